"""How a token is drawn: uniform numbers that belong to positions, and three ways to turn one into a token.

All three draw by inverse transform: the tokens share the interval [0, 1) by their probabilities, and the token whose part holds
the uniform is drawn. They differ in what they read, and give equal tokens:

 * `pick` draws from weights that the caller has computed. It sums all of them in float64. The drafter's candidates and the
   residual of an accept rule are drawn so: a few tokens, or one distribution a step.
 * `choose_sampled` draws the target's choices from logits of the whole vocabulary, for all positions of a block. It sums the
   vocabulary in chunks, so that no float64 copy of the logits is made.
 * `Sampler` does what temperature, top-k and top-p of transformers and `choose_sampled` do together. It replaces these
   processors where they are the only ones and the processed scores are not returned. It reads only the most probable tokens.

Tokens are drawn in float64, and where their uniforms lie: on the device of the logits, or on the CPU if that device has no
float64 (`place_uniforms`). So a seed gives the same choices everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn import functional
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from .cache_dflash import to_device
from .sequences_dflash import TextSequence


UNIFORMS_CHUNK = 256  # uniforms drawn at a time, so that a position's does not depend on how many are requested
VOCABULARY_CHUNK = 256  # tokens whose probabilities are summed together when a token is drawn
NUM_TIES = 44  # candidates beyond the k most probable, because top-k keeps every token that ties with the k-th
# What a `Sampler` can do, and where each keeps its number.
WARPERS = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
# In these orders. Without top-k, top-p would read the whole vocabulary.
ORDERS: tuple[list[str], ...] = (
    [],
    ["temperature"],
    ["top_k"],
    ["temperature", "top_k"],
    ["top_k", "top_p"],
    ["temperature", "top_k", "top_p"],
)


class PositionUniforms:
    """One uniform number per sequence and new position. It does not depend on what is drafted, or how.

    The uniforms of sequence i depend only on i and the state of `generator` (default: torch's global one), on any device and
    in any batch. With a list of generators, one for each sequence, every text is the one that it would be alone.
    """

    def __init__(self, batch_size: int, generator: torch.Generator | Sequence[torch.Generator] | None = None) -> None:
        seeds = _seeds(batch_size, generator)
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds]
        self._drawn = [_draw(stream, UNIFORMS_CHUNK) for stream in self._streams]
        # For rules that draw per step: they must not reuse a number that has decided something.
        self._step_streams = [torch.Generator().manual_seed(seed ^ 1) for seed in seeds]

    def __call__(self, sequence: int, start: int, count: int) -> torch.Tensor:
        """Uniforms in [0, 1) of the new positions `start..start + count - 1` of a sequence, float64 [count] on the CPU."""
        end = start + count
        drawn = self._drawn[sequence]
        while len(drawn) < end:
            chunk = _draw(self._streams[sequence], UNIFORMS_CHUNK)
            drawn = torch.cat([drawn, chunk])
        self._drawn[sequence] = drawn
        return drawn[start:end]

    def fresh(self, sequences: Sequence[TextSequence], count: int, device: torch.device) -> torch.Tensor:
        """Uniforms of the sequences that no earlier call has returned, float64 [B, count], for logits on `device`."""
        uniforms = [_draw(self._step_streams[sequence.index], count) for sequence in sequences]
        return place_uniforms(torch.stack(uniforms), device)

    def mark(self) -> list[torch.Tensor]:
        """Where the fresh numbers are, for `go_back`."""
        return [stream.get_state() for stream in self._step_streams]

    def go_back(self, mark: list[torch.Tensor]) -> None:
        """Has `fresh` return again what it has returned since the mark, for a step that has failed and is repeated."""
        for stream, state in zip(self._step_streams, mark, strict=True):
            stream.set_state(state)


def _seeds(batch_size: int, generator: torch.Generator | Sequence[torch.Generator] | None) -> list[int]:
    """A seed for each sequence. Raises ValueError unless there is one generator for all, or one for each."""
    generators = generator if isinstance(generator, Sequence) else [generator] * batch_size
    if len(generators) != batch_size:
        raise ValueError(f"generator holds {len(generators)} for {batch_size} sequences: pass one for each, or one.")
    seeds: list[int] = []
    for of_sequence in generators:
        device = "cpu" if of_sequence is None else of_sequence.device
        seed = torch.randint(2**63 - 1, (1,), generator=of_sequence, device=device)
        seeds += seed.tolist()
    return seeds


def _draw(stream: torch.Generator, count: int) -> torch.Tensor:
    return torch.rand(
        count,
        generator=stream,
        dtype=torch.float64,
        device="cpu",
    )


@cache
def has_float64(device: torch.device) -> bool:
    """Whether `device` computes in float64. Apple's MPS and some Intel GPUs do not."""
    try:
        torch.ones(1, dtype=torch.float64, device=device).cumsum(dim=0)
    except (TypeError, RuntimeError):
        return False
    return True


def place_uniforms(uniforms: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Uniforms of the CPU for logits on `device`: moved there, or left on the CPU if `device` has no float64."""
    return to_device(uniforms, device) if has_float64(device) else uniforms


@dataclass(frozen=True)
class Sampler:
    """Temperature, then top-k, then top-p of the rest, as numbers on the device."""

    settings: torch.Tensor  # temperature, k and p, float32 [3]
    num_candidates: int  # most probable tokens to read, k and room for ties; 0: all, without top-k

    @classmethod
    def of(cls, processors: Any, device: torch.device) -> Sampler | None:
        """The sampler of a `LogitsProcessorList`; `None` if it holds anything else, or top-p without top-k."""
        names: list[Any] = [WARPERS.get(type(processor)) for processor in processors]
        if names not in ORDERS:
            return None
        numbers: dict[str, Any] = {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
        }
        for name, processor in zip(names, processors, strict=True):
            number = getattr(processor, name)
            without_options = type(processor)(number)
            if vars(processor) != vars(without_options):
                return None
            numbers[name] = number

        num_candidates = 0
        if numbers["top_k"]:  # a power of two, so that one compiled step serves many k
            least = numbers["top_k"] + NUM_TIES
            num_candidates = 1 << (least - 1).bit_length()
        settings = torch.tensor(list(numbers.values()), dtype=torch.float32)
        return cls(to_device(settings, device), num_candidates)

    def __call__(self, logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
        """Tokens drawn by uniforms [...] from logits [..., V], equal to those after the warpers of transformers."""
        if not self.num_candidates:
            return choose_sampled(self.scores(logits), uniforms)
        values, token_ids = self._kept(logits)
        # By id, so that rounding cannot swap two intervals.
        token_ids, order = token_ids.sort()
        probabilities = values.gather(-1, order).softmax(-1)
        return _at(token_ids, pick(probabilities, uniforms))

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Scores [..., V] of logits [..., V], as those warpers return them."""
        if not self.num_candidates:
            temperature, *_ = self.settings
            return logits.float() / temperature
        values, token_ids = self._kept(logits)
        everywhere = torch.full_like(logits, -torch.inf, dtype=torch.float32)
        return everywhere.scatter(-1, token_ids, values)

    def _kept(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores [..., C] and ids of the most probable tokens, -inf where one is cut."""
        temperature, k, p = self.settings
        count = min(self.num_candidates, logits.shape[-1])
        values, token_ids = logits.topk(count)  # descending
        values = values.float() / temperature
        # Top-k keeps all that tie with the k-th.
        place = (k.long() - 1).clamp(max=count - 1)
        smallest = values.index_select(
            -1,
            place[None],
        )
        is_cut = values < smallest
        values = values.masked_fill(is_cut, -torch.inf)
        # Top-p keeps the smallest set of probability p: a token is cut if it and all less probable ones hold at most 1 - p.
        rising = values.softmax(-1).flip(-1)
        tails = rising.cumsum(-1)
        is_cut = tails.flip(-1) <= 1 - p
        is_cut[..., 0] = False
        return values.masked_fill(is_cut, -torch.inf), token_ids


def choose_sampled(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The target's choice for every position, [B, N] of logits [B, N, V] and uniforms [B, N]: inverse transform sampling.

    Chunks are summed in float32; the sums and the chunk that a uniform falls into are read in float64, to keep the tail.
    """
    weights = logits.float().softmax(-1)
    padding = -weights.shape[-1] % VOCABULARY_CHUNK
    padded = functional.pad(
        weights,
        (0, padding),
    )
    chunks = padded.unflatten(-1, (-1, VOCABULARY_CHUNK))
    # First the chunk is drawn, then the token in it, by where the uniform lies in the chunk's interval.
    sums = chunks.sum(-1)
    sums = sums.to(uniforms.device).double()
    index = pick(sums, uniforms)  # [B, N]
    ends = sums.cumsum(-1)
    size = _at(sums, index)
    begin = _at(ends, index) - size
    drawn_sum = uniforms * ends[..., -1]
    rest = (drawn_sum - begin) / size  # where the uniform lies inside the drawn chunk, from 0 to 1
    rest = rest.clamp(min=0.0)

    index = index.to(chunks.device)
    chunk = chunks.take_along_dim(
        index[..., None, None],
        dim=-2,
    )
    in_chunk = pick(chunk.squeeze(-2), rest)
    token_ids = index * VOCABULARY_CHUNK + in_chunk
    return token_ids.clamp(max=logits.shape[-1] - 1)  # a valid token for NaN, too


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The token whose interval of the cumulative `weights` [..., V] (any sum) holds the uniform [...] (float64)."""
    # Moved first: a device without float64 cannot convert it.
    cumulative = weights.to(uniforms.device).double().cumsum(-1)
    # Scaled by the computed sum and kept below it, so that rounding cannot move a pick past the last token.
    total = cumulative[..., -1]
    below_total = total.nextafter(torch.zeros_like(total))
    drawn_sum = torch.minimum(uniforms * total, below_total)

    token_ids = torch.searchsorted(
        cumulative,
        drawn_sum[..., None],
        right=True,
    )
    token_ids = token_ids.squeeze(-1)
    token_ids = token_ids.clamp(max=weights.shape[-1] - 1)  # a valid token for NaN, too
    return token_ids.to(weights.device)


def _at(values: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The entries [...] of values [..., N] at index [...]."""
    entries = values.gather(-1, index[..., None])
    return entries.squeeze(-1)
