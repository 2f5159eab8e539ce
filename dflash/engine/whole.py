"""The whole step as one function of device state: draft, verify, accept, without a word from the host.

Compiled steps (`compiled.py`) and recorded steps (`recorded.py`) both run `whole_step`. It is made of the functions that an
eager step consists of, and works on storage that its caller owns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from dflash.model.acceptance_dflash import Proposals, accept_match
from dflash.model.drafting_dflash import block_ids, block_slots, proposing_positions
from dflash.model.sampling_dflash import Sampler
from dflash.model.targets_dflash import Layout, head, masked_forward


# Largest difference between outputs of compiled and eager steps, relative to the largest output.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 5e-2
FEWEST_SAME_CHOICES = 0.75  # of all: near-ties may differ


class NotWholeError(Exception):
    """A step cannot run whole, compiled or recorded, and has to run eagerly."""


class LentLayer(CacheLayerMixin):
    """A layer of a cache over storage that another one owns. New columns go to `slots` [B, S]."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, num_keys: int) -> None:
        super().__init__()
        self.keys = keys
        self.values = values
        self.slots = slots
        self.num_keys = num_keys
        self.is_initialized = True

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing: the storage is there."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes keys and values [B, G, S, E] in place; returns views [B, G, num_keys, E]."""
        # An indexed assignment is compiled in place; `scatter_` would copy the whole storage twice.
        index = torch.arange(len(key_states), device=key_states.device)[:, None]
        self.keys.transpose(1, 2)[index, self.slots] = key_states.transpose(1, 2)
        self.values.transpose(1, 2)[index, self.slots] = value_states.transpose(1, 2)
        batch = slice(len(key_states))
        return self.keys[batch, :, : self.num_keys], self.values[batch, :, : self.num_keys]

    def get_seq_length(self, *args: Any) -> int:
        """Number of keys before the new columns."""
        return self.num_keys - self.slots.shape[1]

    def get_mask_sizes(self, *args: Any) -> tuple[int, int]:
        """`(keys, offset)` of a mask."""
        return self.num_keys, 0

    def get_max_length(self) -> int:
        """-1: not known here."""
        return -1

    get_max_cache_shape = get_max_length  # the name of transformers 4


@dataclass(frozen=True)
class Storage:
    """Keys and values of all layers of a model, [R, G, capacity, E] each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    index: torch.Tensor  # its length is the number of keys to read: a size that a compiler can leave open

    @property
    def num_keys(self) -> int:
        """How many keys a forward reads."""
        return self.index.shape[0]

    def cache(self, slots: torch.Tensor) -> Cache:
        """A cache over this storage that writes new columns to `slots` [R, S]."""
        pairs = zip(self.keys, self.values, strict=True)
        return Cache(layers=[LentLayer(keys, values, slots, self.num_keys) for keys, values in pairs])


@dataclass(frozen=True)
class State:
    """The state of [R] sequences between two steps, on the device."""

    anchors: torch.Tensor  # the last committed tokens, [R, 1]
    starts: torch.Tensor  # their positions, [R], which are the lengths of the target's cache
    features: torch.Tensor  # context features that the drafter has not read, [R, C, L * D]
    counts: torch.Tensor  # how many of their columns are valid, [R]
    dropped: torch.Tensor  # positions whose keys the drafter's window has dropped, [R]


@dataclass(frozen=True)
class Shape:
    """The static sizes of a whole step."""

    block_size: int  # anchor included
    num_proposals: int
    num_candidates: int = 0  # of its `Sampler`; 0 also for greedy decoding


class Drawn(NamedTuple):
    """What a sampled step draws with."""

    uniforms: torch.Tensor  # [R, n + 1]
    settings: torch.Tensor  # of a `Sampler`


class WholeStep(NamedTuple):
    """What a whole step gives."""

    num_accepted: torch.Tensor  # [R]
    token_ids: torch.Tensor  # the target's choices, [R, n + 1]
    proposed_ids: torch.Tensor  # [R, n]
    features: torch.Tensor  # [R, n + 1, L * D]


class Models(NamedTuple):
    """The models of a step."""

    target: Any
    drafter: Any
    layout: Layout


def whole_step(
    models: Models,
    state: State,
    target_storage: Storage,
    draft_storage: Storage,
    shape: Shape,
    drawn: Drawn | None,  # None: greedy
) -> WholeStep:
    """Drafts a block for each sequence, verifies it and accepts a prefix."""
    proposals = _propose(models, state, draft_storage, shape)
    token_ids = torch.cat([state.anchors, proposals.token_ids], dim=1)
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    positions = state.starts[:, None] + columns
    logits, features = masked_forward(
        models.target,
        models.layout,
        target_storage.cache(positions),
        token_ids,
        positions,
        target_storage.num_keys,
    )
    if drawn is None:
        choices = logits.argmax(dim=-1)
        best = logits.gather(-1, choices[..., None]).squeeze(-1)
    else:
        sampler = Sampler(drawn.settings, shape.num_candidates)
        choices = sampler(logits, drawn.uniforms)
        best = logits.amax(dim=-1)
    acceptance = accept_match(proposals, choices, best)
    features = features.to(models.drafter.dtype)
    return WholeStep(acceptance.num_accepted, choices, proposals.token_ids, features)


def _propose(models: Models, state: State, storage: Storage, shape: Shape) -> Proposals:
    target = models.target
    drafter = models.drafter
    hidden_states = _draft(models, state, storage, shape.block_size)
    proposing = proposing_positions(drafter, shape.num_proposals)

    def logits_of_proposals(_: torch.Tensor) -> torch.Tensor:
        # The head runs on the whole block: with 15 positions Inductor would also benchmark padded products.
        logits = head(target, hidden_states)
        return logits[:, proposing]

    def embed(token_ids: torch.Tensor) -> torch.Tensor:
        embedding = target.get_input_embeddings()
        return drafter.embed(token_ids, embedding)

    proposals: Proposals = drafter.propose(
        hidden_states[:, proposing],
        state.anchors,
        logits_of_proposals,
        embed=embed,
    )
    return proposals


def _draft(models: Models, state: State, storage: Storage, block_size: int) -> torch.Tensor:
    """The drafter's last hidden states [R, N, D] of a block, after it has read the context in `state`."""
    drafter = models.drafter
    starts = state.starts - state.dropped  # slots of the anchors
    num_columns = state.features.shape[1]
    slots = block_slots(starts - state.counts, state.counts, num_columns, block_size)
    token_ids = block_ids(drafter, state.anchors, block_size)
    output = drafter(
        noise_embeds=drafter.embed(token_ids, models.target.get_input_embeddings()),
        context_hidden_states=state.features,
        position_ids=slots + state.dropped[:, None],
        attention_mask=drafter.step_masks(starts, block_size, storage.num_keys),
        past_key_values=storage.cache(slots),
    )
    return output.last_hidden_state


def agree(output: WholeStep, expected: WholeStep) -> bool:
    """Whether two outputs of a step are equal within rounding, up to the first proposal that differs, as near-ties may."""
    is_equal = output.proposed_ids == expected.proposed_ids
    is_equal_in_all = is_equal.all(dim=0)
    num_equal = int(is_equal_in_all.long().cumprod(dim=0).sum())
    columns = slice(1 + num_equal)
    is_same_choice = output.token_ids[:, columns] == expected.token_ids[:, columns]
    if is_same_choice.float().mean() < FEWEST_SAME_CHOICES:
        return False
    features = expected.features[:, columns]
    difference = output.features[:, columns] - features
    largest = features.abs().max()
    largest = largest.clamp(min=1.0)
    tolerance = TOLERANCES.get(features.dtype, LOW_PRECISION_TOLERANCE)
    return bool(difference.abs().max() <= tolerance * largest)
