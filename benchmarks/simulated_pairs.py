"""Pairs of a published shape with random weights, whose text and acceptance are fixed in advance by a script.

They measure the cost of a step without published weights. Both models compute everything that trained ones would; only
their outputs are arranged: the target's text counts up, and the drafter is right as often as the script says.
Milliseconds are measured, acceptance never is: a report of such a pair says "simulated" and states the tau of its
script.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any, NamedTuple, cast

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash.drafter import DFlashConfig, DFlashDraftModel
from dflash.evaluation import (
    GREEDY,
    NATIVE,
    PLAIN,
    VARIANTS,
    Measurement,
    Prompt,
    allocated_memory,
    compare,
    timed_blocks,
    timed_generate,
)
from dflash.model.configuration_dflash import default_target_layer_ids


EAGERLY = "dflash eager"

# Layers with outputs this small leave the token's embedding in the residual stream.
QUIET = 0.01


class Shape(NamedTuple):
    """Fields of a Qwen3 target's config, and the layers of its drafter, whose other sizes are the target's."""

    target: dict[str, int]
    draft_layers: int


def _shape(hidden: int, intermediate: int, layers: int, heads: int, draft_layers: int = 5, **others: int) -> Shape:
    sizes = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40960}
    sizes |= {"hidden_size": hidden, "intermediate_size": intermediate} | others
    return Shape(sizes | {"num_hidden_layers": layers, "num_attention_heads": heads}, draft_layers)


BLOCK_SIZE = 16
SMALL = {"vocab_size": 8192, "head_dim": 64, "num_key_value_heads": 2, "max_position_embeddings": 40960}
SMOKE = {"vocab_size": 512, "head_dim": 32, "num_key_value_heads": 1, "max_position_embeddings": 40960}
# The first two are Qwen3 with z-lab/Qwen3-{8B,4B}-DFlash-b16; no drafter was published for the third. The last two are for
# machines without an accelerator, and for tests.
SHAPES = {
    "qwen3-8b": _shape(4096, 12288, 36, 32),
    "qwen3-4b": _shape(2560, 9728, 36, 32),
    "qwen3-0.6b": _shape(1024, 3072, 28, 16),
    "small": _shape(512, 1536, 10, 8, draft_layers=2, **SMALL),
    "smoke": _shape(64, 128, 4, 2, draft_layers=1, **SMOKE),
}


@dataclass(frozen=True)
class Script:
    """Lengths of accepted runs: geometric, with the same chance at every position, cut at the block."""

    mean: float  # of the acceptance length of a block, the target's own token included
    block_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.mean <= self.block_size:
            possible = f"a block of {self.block_size} gives 1 to {self.block_size} tokens"
            raise ValueError(f"tau {self.mean} cannot be scripted: {possible}.")

    @property
    def chance(self) -> float:
        """The probability that a proposal is right if all before it were."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if _mean_length(middle, self.block_size) < self.mean else (low, middle)
        return high

    def tau(self, width: int) -> float:
        """Mean acceptance length if `width` tokens are verified at once, anchor included."""
        return _mean_length(self.chance, min(width, self.block_size))

    def runs(self, count: int) -> torch.Tensor:
        """`count` numbers of right proposals, the same in every call, [count] on the CPU."""
        generator = torch.Generator(device="cpu").manual_seed(0)
        # Explicit: a pair is built under another default, bf16 is too coarse, and a device has its own generator.
        uniforms = torch.rand(count, self.block_size - 1, generator=generator, device="cpu", dtype=torch.float32)
        return (uniforms < self.chance).long().cumprod(dim=1).sum(dim=1)


def _mean_length(chance: float, width: int) -> float:
    return sum(chance**i for i in range(width))


class ScriptedDrafter(DFlashDraftModel):
    """A random drafter for a target that counts: after anchor t it proposes t + 1, t + 2, … as often as scripted.

    Its forward, head and argmax run as usual; its own proposals follow the run of right ones. The length of the run
    depends only on the anchor, so a step needs no state.
    """

    def __init__(self, config: DFlashConfig, script: Script) -> None:
        super().__init__(config)
        self.script = script
        self.register_buffer("runs", script.runs(config.vocab_size), persistent=False)

    def propose(self, hidden_states: torch.Tensor, anchors: torch.Tensor, head: Any, *args: Any, **kwargs: Any) -> Any:
        """The drafter's proposals with the scripted run in front."""
        proposals = super().propose(hidden_states, anchors, head, *args, **kwargs)
        own, size = proposals.token_ids, self.config.vocab_size
        steps = torch.arange(own.shape[1], device=own.device)
        right = (anchors + 1 + steps) % size  # [B, n]
        wrong = torch.where(own == right, (right + 1) % size, own)
        runs: Any = self.runs
        token_ids = torch.where(steps < runs[anchors], right, wrong)
        return replace(proposals, token_ids=token_ids)


def scripted_pair(
    name: str, tau: float, dtype: torch.dtype = torch.float32, device: str | torch.device = "cpu"
) -> tuple[Qwen3ForCausalLM, ScriptedDrafter]:
    """A target and a drafter of a shape of `SHAPES`, in eval mode, with a script of mean acceptance length `tau`.

    The target's head is a matrix of its own even if the published one is tied: a step reads as many bytes. ValueError
    for a shape that does not exist, or a tau that its block cannot have.
    """
    if name not in SHAPES:
        raise ValueError(f"There is no shape {name!r}: choose from {', '.join(SHAPES)}.")
    sizes, draft_layers = SHAPES[name]
    script = Script(tau, BLOCK_SIZE)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    fields: dict[str, Any] = {**sizes, **ends, "tie_word_embeddings": False, "rope_theta": 1e6}
    num_layers = sizes["num_hidden_layers"]
    config = DFlashConfig(
        **{**fields, "num_hidden_layers": draft_layers},
        block_size=BLOCK_SIZE,
        mask_token_id=min(151669, sizes["vocab_size"] - 1),
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
    """A drafter with the weights and confidences of this one, whose proposals are never right."""
    shared: dict[int, Any] = {id(parameter): parameter for parameter in drafter.parameters()}
    twin = copy.deepcopy(drafter, shared)
    cast(torch.Tensor, twin.runs).zero_()
    return twin


def scripted_prompt(target: Qwen3ForCausalLM, length: int, batch_size: int = 1) -> torch.Tensor:
    """Random ids [batch_size, length] on the target's device."""
    generator = torch.Generator(device="cpu").manual_seed(1)
    size = target.config.vocab_size
    return torch.randint(size, (batch_size, length), generator=generator, device="cpu").to(target.device)


def scripted_continuation(target: Qwen3ForCausalLM, prompt_ids: torch.Tensor, length: int) -> torch.Tensor:
    """The target's text after prompts [B, S], greedy or sampled: [B, length], counting up from the last id."""
    steps = torch.arange(1, length + 1, device=prompt_ids.device)
    return (prompt_ids[:, -1:] + steps) % target.config.vocab_size


@contextmanager
def _new_weights(dtype: torch.dtype, device: str | torch.device) -> Iterator[None]:
    """Builds models in this dtype, on this device, from one seed; the global generator is left as it was."""
    before, place = torch.get_default_dtype(), torch.device(device)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        torch.manual_seed(0)
        torch.set_default_dtype(dtype)
        try:
            with place:
                yield
        finally:
            torch.set_default_dtype(before)


def measure_point(
    target: Any,
    drafter: Any,
    context: int = 256,
    new_tokens: int = 64,
    batch_size: int = 1,
    width: int | None = None,
    budget: int = 0,
    methods: Sequence[str] = (EAGERLY,),
    repeats: int = 3,
    plain: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Plain decoding and ours on one prompt, in turns: a row per method, marked as simulated.

    Milliseconds are measured; the script's tau is stated, and figures that depend on it say so. A batch's step is one
    forward of the target for all sequences; towards the end, when some have stopped, for fewer.

    The pair is a `scripted_pair`; `context` and `new_tokens` (at least 2) count the tokens of the prompt and of its
    answer. `width` tokens are verified at once, anchor included; `None`: the drafter's block. `budget` is the number
    of nodes of a draft tree, 0 for a chain. A tree has no scripted tau: its rows hold only the tau that it needs.
    `methods` are names of `VARIANTS`, or `NATIVE`, and `plain` holds more keywords for `target.generate`. The native loop
    does not follow the script: it is timed with drafts that are right by chance, and a step takes as long.
    """
    limit = {} if width is None else {"max_draft_tokens": width - 1}
    tree = {"draft_tree": budget} if budget else {}
    ways = _ways(target, drafter, new_tokens, methods, plain or {}, {**limit, **tree})
    prompt = Prompt("simulated", scripted_prompt(target, context, batch_size))
    measurements = compare(ways, [prompt], repeats)
    plain_ms = milliseconds(measurements[0])["ms_per_step"]
    tau = drafter.script.tau(drafter.config.block_size if width is None else width)
    rows = []
    for measurement in measurements:
        times = milliseconds(measurement)
        step = times["ms_per_step"]
        is_plain, has_tau = measurement.method == PLAIN, not budget
        stated = 1.0 if is_plain else tau if has_tau else None
        rows.append(
            {
                "method": measurement.method,
                "is_simulated": True,
                "context_tokens": context,
                "new_tokens": new_tokens,
                "batch_size": batch_size,
                "width": 1 if is_plain else width or drafter.config.block_size,
                "budget": 0 if is_plain else budget,
                "is_identical": measurement.is_identical,
                **times,
                "stated_tau": None if stated is None else round(stated, 4),
                "ms_per_token": None if stated is None else round(step / stated, 4),
                "speedup_at_stated_tau": None if stated is None else round(plain_ms * stated / step, 4),
                "tau_to_match_plain": round(step / plain_ms, 4),
                "compilations": measurement.num_compilations,
            }
        )
    return rows


def measure_prefill(
    target: Any, drafter: Any, context: int, methods: Sequence[str] = (EAGERLY,), prefill_chunk_size: int | None = None
) -> list[dict[str, Any]]:
    """Bytes that plain decoding and ours allocate for a prompt and two new tokens: a row per method.

    `taps_bytes` are the features of the tapped layers, which ours needs in addition.
    """
    chunk = {} if prefill_chunk_size is None else {"prefill_chunk_size": prefill_chunk_size}
    ways = _ways(target, drafter, 2, methods, chunk, chunk)
    prompt = scripted_prompt(target, context)
    for run in ways.values():
        run(prompt[:, :32])  # libraries load, buffers that stay are made
    taps = len(drafter.config.target_layer_ids) * target.config.hidden_size * target.dtype.itemsize
    held = {name: allocated_memory(partial(run, prompt), target.device) for name, run in ways.items()}
    return [
        {
            "method": name,
            "is_simulated": True,
            "context_tokens": context,
            "allocated_bytes": num_bytes,
            "over_plain": round(num_bytes / held[PLAIN], 4),
            "taps_bytes": 0 if name == PLAIN else context * taps,
        }
        for name, num_bytes in held.items()
    ]


def milliseconds(measurement: Measurement) -> dict[str, float]:
    """Milliseconds per step (median, fastest and slowest repeat) and to the first token (median)."""
    steps = measurement.num_forwards - 1
    each = [
        1e3 * (total - first) / steps
        for total, first in zip(measurement.seconds, measurement.seconds_to_first_token, strict=True)
    ]
    return {
        "ms_per_step": round(median(each), 4),
        "ms_per_step_fastest": round(min(each), 4),
        "ms_per_step_slowest": round(max(each), 4),
        "ms_to_first_token": round(1e3 * median(measurement.seconds_to_first_token), 4),
    }


def _ways(
    target: Any, drafter: Any, new_tokens: int, methods: Sequence[str], plain: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Callable[..., Any]]:
    """Plain decoding with the keywords `plain`, and variants of ours with the keywords `ours`."""
    ways: dict[str, Callable[..., Any]] = {
        PLAIN: partial(timed_generate, target, max_new_tokens=new_tokens, **GREEDY, **plain)
    }
    for name in methods:
        if name == NATIVE:
            native = {"assistant_model": drafter, "speculation_type": "dflash"}
            ways[name] = partial(timed_generate, target, max_new_tokens=new_tokens, **GREEDY, **native)
            continue
        options = {"max_new_tokens": new_tokens, "temperature": 0.0, **VARIANTS[name], **ours}
        ways[name] = partial(timed_blocks, drafter, target, **options)
    return ways
