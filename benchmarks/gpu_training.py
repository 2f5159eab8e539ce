"""How long a step of training takes on a target of random weights: forward, backward and optimiser, by attention."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from gpu_steps import StepClock

from dflash.model.modeling_dflash import DFlashDraftModel
from dflash.training import Batch, DrafterLoss, Example, FrozenTarget, build_optimizers, collate, sample_anchors


@dataclass(frozen=True)
class TrainingSize:
    """What a step trains on.

    Attributes:
        documents: Of a batch, all of one length: no padding.
        tokens: Of a document.
        anchors: Blocks that begin in a document.
        prompt: Tokens of a document that are not learned.
        steps: That are timed, after two that are not.
    """

    documents: int = 4
    tokens: int = 2048
    anchors: int = 128
    prompt: int = 256
    steps: int = 6


WARM_UP = 2


class _WithAttention(DrafterLoss):
    """The library's loss with an attention that is given; `None`: the one that the library chooses."""

    given: str | None = None

    def attention(self, device: torch.device) -> str:
        return self.given or super().attention(device)


def random_batch(size: TrainingSize, vocab_size: int) -> Batch:
    """Documents of random tokens."""
    noise = torch.Generator(device="cpu").manual_seed(2)
    ids = torch.randint(vocab_size, (size.documents, size.tokens), generator=noise, device="cpu").tolist()
    mask = [0] * size.prompt + [1] * (size.tokens - size.prompt)
    examples = [Example(document, mask) for document in ids]
    anchors = [sample_anchors(mask, size.anchors, seed=0, epoch=0, index=index) for index in range(size.documents)]
    return collate(examples, anchors, pad_token_id=0)


def time_training(
    target: Any, config: Any, attention: str | None, size: TrainingSize, clock: StepClock
) -> dict[str, Any]:
    """Tokens per second of a step, the median of several; the drafter is in fp32, and bf16 computes where the target has it.

    Args:
        target: The target, frozen.
        config: Of the drafter, which begins with random weights.
        attention: By which the drafter is trained; `None`: the one that the library chooses.
        size: Of the batch.
        clock: A fresh one.
    """
    device = target.device
    drafter = DFlashDraftModel(config).to(device, torch.float32).train()
    loss_of = _WithAttention(FrozenTarget(target, drafter))
    loss_of.given = attention
    (optimizer,) = build_optimizers(drafter, learning_rate=1e-4, weight_decay=0.0, muon_learning_rate=None)
    batch = random_batch(size, target.config.vocab_size).to(device)
    losses = []
    clock.mark()
    for _ in range(WARM_UP + size.steps):
        with torch.autocast(device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            loss_sum, _ = loss_of(batch)
        loss_sum.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_sum.detach())
        clock.mark()
    times = [clock.milliseconds(step, step + 1) for step in range(WARM_UP, WARM_UP + size.steps)]
    if not torch.stack(losses).isfinite().all():
        raise RuntimeError(f"A loss is not finite: {[loss.item() for loss in losses]}.")
    num_tokens = size.documents * size.tokens
    return {
        "attention": loss_of.attention(device),
        "batch_size": asdict(size),
        "drafter_dtype": "float32",
        "ms_per_step": median(times),
        "ms_per_step_fastest": min(times),
        "ms_per_step_slowest": max(times),
        "ms_first_step": clock.milliseconds(0, 1),
        "tokens_per_second": 1e3 * num_tokens / median(times),
    }
