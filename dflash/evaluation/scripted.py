"""Pairs of a published shape with random weights, whose text and whose acceptance are written in advance.

For the time of a step where no weights are to be had. Both models run as trained ones of their shape would, every matrix
is read and every product computed; only what comes out is arranged: the target's text counts up token by token, and the
drafter's proposals are right as often as a script says. So a step's milliseconds are measured, an acceptance length never
is: whoever reports one of these pairs says "simulated" and states the tau of its script.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.model.configuration_dflash import DFlashConfig, default_target_layer_ids
from dflash.model.modeling_dflash import DFlashDraftModel


QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
QWEN3_MASK = 151669
SMALL = {"vocab_size": 8192, "head_dim": 64, "num_key_value_heads": 2, "max_position_embeddings": 16384}
SMOKE = {"vocab_size": 512, "head_dim": 32, "num_key_value_heads": 1, "max_position_embeddings": 16384}

# Layers far below their usual size leave the residual stream what the embedding put there: the token.
QUIET = 0.01


@dataclass(frozen=True)
class Shape:
    """Sizes of a Qwen3 target and its drafter.

    Attributes:
        target: Fields of its `Qwen3Config`.
        draft_layers: Of the drafter; its other sizes are the target's.
        mask_token_id: Of the drafter.
        block_size: Likewise.
    """

    target: dict[str, int]
    draft_layers: int
    mask_token_id: int
    block_size: int = 16


def _qwen3(hidden_size: int, intermediate_size: int, num_layers: int, num_heads: int) -> Shape:
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }
    return Shape({**QWEN3, **sizes}, 5, QWEN3_MASK)


# The first two are those of Qwen3 and of z-lab/Qwen3-{8B,4B}-DFlash-b16; the third has the published drafters' depth, though
# none was published for it. The last two are for machines without an accelerator, and for tests.
SHAPES = {
    "qwen3-8b": _qwen3(4096, 12288, 36, 32),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16),
    "small": Shape(
        {**SMALL, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 10, "num_attention_heads": 8},
        2,
        8191,
    ),
    "smoke": Shape(
        {**SMOKE, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 2},
        1,
        511,
    ),
}


@dataclass(frozen=True)
class Script:
    """How long accepted runs are: geometric, the same chance at every position, cut at the block.

    Attributes:
        mean: The mean acceptance length of a whole block, the target's own token included.
        block_size: Tokens in a block.
    """

    mean: float
    block_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.block_size:
            raise ValueError(
                f"tau {self.mean} cannot be scripted: a block of {self.block_size} gives 1 to {self.block_size} tokens."
            )

    @property
    def chance(self) -> float:
        """That a proposal is right where all before it were."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean_length(middle, self.block_size) < self.mean else (low, middle)
        return high

    def tau(self, width: int) -> float:
        """Mean acceptance length where `width` tokens are verified at once, anchor included."""
        return _mean_length(self.chance, min(width, self.block_size))

    def runs(self, count: int) -> torch.Tensor:
        """`count` numbers of right proposals, always the same ones, [count] on the CPU.

        Device and dtype are given: pairs are built in a context of another device, which refuses a CPU's generator, and in
        bf16, whose few values between 0 and 1 would make the mean larger than stated.
        """
        noise = torch.Generator(device="cpu").manual_seed(0)
        draws = torch.rand(count, self.block_size - 1, generator=noise, device="cpu", dtype=torch.float32)
        right = draws < self.chance
        return right.long().cumprod(dim=1).sum(dim=1)


def _mean_length(chance: float, width: int) -> float:
    return sum(chance**i for i in range(width))


class ScriptedDrafter(DFlashDraftModel):
    """A random drafter for a target that counts: behind anchor t it is right about t + 1, t + 2, … as often as scripted.

    The forward, the head over its rows and their argmax run as ever. Behind the run of right proposals stand its own. How long
    the run is depends on the anchor alone, so that a step needs no knowledge of the steps before it.
    """

    def __init__(self, config: DFlashConfig, script: Script) -> None:
        super().__init__(config)
        self.script = script
        self.register_buffer("runs", script.runs(config.vocab_size), persistent=False)

    def propose(self, hidden_states: torch.Tensor, anchors: torch.Tensor, head: Any, *args: Any, **kwargs: Any) -> Any:
        """As every drafter, with the scripted run in front."""
        proposals = super().propose(hidden_states, anchors, head, *args, **kwargs)
        own, size = proposals.token_ids, self.config.vocab_size
        steps = torch.arange(own.shape[1], device=own.device)
        right = (anchors + 1 + steps) % size  # [B, n]
        wrong = torch.where(own == right, (right + 1) % size, own)
        runs: Any = self.runs
        token_ids = torch.where(steps < runs[anchors], right, wrong)
        if proposals.confidences is None:
            return replace(proposals, token_ids=token_ids)
        return replace(
            proposals,
            token_ids=token_ids,
            confidences=torch.full_like(proposals.confidences, self.script.chance),  # what is right on average
        )


def scripted_pair(
    name: str, tau: float, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Qwen3ForCausalLM, ScriptedDrafter]:
    """A target and a drafter of the shape `name` of `SHAPES`, in eval mode; a script of mean acceptance length `tau`.

    The target's head is a matrix of its own, whether or not the published one is tied: as many bytes are read in a step.

    Raises:
        ValueError: for a shape that does not exist, or a tau that its block cannot have.
    """
    if name not in SHAPES:
        raise ValueError(f"There is no shape {name!r}: choose from {', '.join(SHAPES)}.")
    shape = SHAPES[name]
    script = Script(tau, shape.block_size)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    fields: dict[str, Any] = {**shape.target, **ends, "tie_word_embeddings": False, "rope_theta": 1e6}
    num_layers = shape.target["num_hidden_layers"]
    config = DFlashConfig(
        **{**fields, "num_hidden_layers": shape.draft_layers},
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        num_target_layers=num_layers,
        target_layer_ids=default_target_layer_ids(num_layers),
    )
    with _new_weights(dtype, device):
        target = Qwen3ForCausalLM(Qwen3Config(**fields)).eval()
        drafter = ScriptedDrafter(config, script).eval()
    drafter = drafter.to(device)  # the script's runs
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.mul_(QUIET)
            layer.mlp.down_proj.weight.mul_(QUIET)
        embedding = target.get_input_embeddings().weight
        embedding.normal_()
        target.get_output_embeddings().weight.copy_(embedding.roll(1, dims=0))  # row t + 1 answers token t
    return target, drafter


def useless(drafter: ScriptedDrafter) -> ScriptedDrafter:
    """A drafter that shares the weights of this one and whose proposals are never right.

    Its confidence stays that of the script: only its failures show that it is useless.
    """
    shared: dict[int, Any] = {id(parameter): parameter for parameter in drafter.parameters()}
    twin = copy.deepcopy(drafter, shared)
    cast(torch.Tensor, twin.runs).zero_()
    return twin


def scripted_prompt(target: Qwen3ForCausalLM, length: int, num_rows: int = 1) -> torch.Tensor:
    """Random ids [num_rows, length] on the target's device."""
    noise = torch.Generator(device="cpu").manual_seed(1)
    size = target.config.vocab_size
    return torch.randint(size, (num_rows, length), generator=noise, device="cpu").to(target.device)


def scripted_continuation(target: Qwen3ForCausalLM, prompt_ids: torch.Tensor, length: int) -> torch.Tensor:
    """What the target writes after prompts [B, S], greedily or sampled: [B, length], counting up from the last id."""
    steps = torch.arange(1, length + 1, device=prompt_ids.device)
    return (prompt_ids[:, -1:] + steps) % target.config.vocab_size


@contextmanager
def _new_weights(dtype: torch.dtype, device: str | torch.device) -> Iterator[None]:
    """Models are built in this dtype, on this device, from one seed; the noise of others is left alone."""
    before = torch.get_default_dtype()
    place = torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with place:
                yield
        finally:
            torch.set_default_dtype(before)
