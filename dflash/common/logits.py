"""Refuses models whose logits are no numbers: every way of decoding would write the same nonsense."""

import torch
from transformers.modeling_utils import PreTrainedModel


@torch.no_grad()
def check_logits(target: PreTrainedModel) -> None:
    """Raises ValueError if the target's logits of one token are NaN or infinite."""
    if is_broken(target(torch.zeros(1, 1, dtype=torch.long, device=target.device)).logits):
        raise broken_logits(target)


def is_broken(logits: torch.Tensor) -> torch.Tensor:
    """Whether any logit is NaN or +inf, as a tensor on its device; -inf may mask a token."""
    return logits.isnan().any() | logits.isposinf().any()


def broken_logits(target: PreTrainedModel) -> ValueError:
    """The error to raise."""
    kind = f"{type(target).__name__} in {dtype_name(target)}"
    remedy = "load it in bfloat16 or float32, or check its weights"
    return ValueError(f"The target's logits are NaN or infinite ({kind}): {remedy}.")


def dtype_name(model: PreTrainedModel) -> str:
    """The dtype of a model's weights as configs write it: `bfloat16`."""
    return str(model.dtype).removeprefix("torch.")
