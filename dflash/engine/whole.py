"""The whole step as one function of device state: draft, verify, accept, without a word from the host.

Proposals that the host has looked up are part of the state. In a single text nothing is drafted beside them.

Compiled steps (`compiled.py`) and recorded steps (`recorded.py`) both run `whole_step`. It is made of the functions that an
eager step consists of, and works on storage that its caller owns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers.cache_utils import Cache

from dflash.model.acceptance_dflash import RULES, Acceptance, Proposals, rule_of
from dflash.model.cache_dflash import PreallocatedCache, PreallocatedLayer
from dflash.model.drafting_dflash import block_ids, block_slots, embed, proposing_positions
from dflash.model.sampling_dflash import Sampler
from dflash.model.targets_dflash import Layout, head, masked_forward


class LentLayer(PreallocatedLayer):
    """A layer of a cache over storage that another one owns. New columns go to `slots` [R, S], so that `num_keys` are read."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor, num_keys: int) -> None:
        super().__init__(0)
        self.keys = keys
        self.values = values
        self.slots = slots
        self.capacity = keys.shape[2]
        self.length = num_keys - slots.shape[1]
        self.is_initialized = True


@dataclass(frozen=True)
class Storage:
    """Keys and values of all layers of a model, [R, G, capacity, E] each."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    index: torch.Tensor  # its length is the number of keys to read: a size that a compiler can leave open

    @classmethod
    def of(cls, cache: PreallocatedCache, num_keys: int) -> Storage:
        """The storage of a cache, for a step that reads `num_keys` keys."""
        keys, values = cache.storage(num_keys)
        return cls(keys, values, index=keys[0].new_empty(1).expand(num_keys))

    @property
    def num_keys(self) -> int:
        """How many keys a forward reads."""
        return self.index.shape[0]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The keys and the values."""
        return self.keys + self.values

    def cache(self, slots: torch.Tensor) -> Cache:
        """A cache over this storage that writes new columns to `slots` [R, S]."""
        pairs = zip(self.keys, self.values, strict=True)
        return Cache(layers=[LentLayer(keys, values, slots, self.num_keys) for keys, values in pairs])


@dataclass(frozen=True)
class State:
    """The state of [R] sequences between two steps, on the device, and what a sampled step draws with."""

    anchors: torch.Tensor  # the last committed tokens, [R, 1]
    starts: torch.Tensor  # their positions, [R], which are the lengths of the target's cache
    features: torch.Tensor  # context features that the drafter has not read, [R, C, L * D]
    counts: torch.Tensor  # how many of their columns are valid, [R]
    num_read: torch.Tensor  # the lengths of the drafter's cache, [R]
    uniforms: torch.Tensor | None  # that accept proposals and choose tokens, [R, n + 1]; None: greedy
    settings: torch.Tensor | None  # of a `Sampler`
    draft_uniforms: torch.Tensor | None = None  # that draw proposals, [R, n]; None: the likeliest are proposed
    looked_up_ids: torch.Tensor | None = None  # proposals [R, n], -1 where the drafter proposes; None: everywhere

    def clone(self) -> State:
        """A copy that shares no memory."""
        copies: dict[str, Any] = {}
        for name, tensor in vars(self).items():
            copies[name] = None if tensor is None else tensor.clone()
        return State(**copies)

    @property
    def num_looked_up(self) -> int:
        """How many proposals of a text may be looked up."""
        return 0 if self.looked_up_ids is None else self.looked_up_ids.shape[1]


class Kind(NamedTuple):
    """What a compiled or recorded function is made for."""

    block_size: int  # anchor included
    num_proposals: int
    num_candidates: int | None  # of its `Sampler`; None: greedy
    verification: str  # of its `Acceptor`; "match" where "auto" means it for all proposals
    is_batch: bool


@dataclass(frozen=True)
class Inputs:
    """What a whole step computes with."""

    target: Any
    drafter: Any
    layout: Layout
    kind: Kind
    state: State
    target_storage: Storage
    draft_storage: Storage


class WholeStep(NamedTuple):
    """What a whole step gives."""

    num_accepted: torch.Tensor  # [R]
    token_ids: torch.Tensor  # the target's choices, [R, n + 1]
    proposed_ids: torch.Tensor  # [R, n]
    features: torch.Tensor  # [R, n + 1, L * D]


WholeFunction = Callable[[Inputs], WholeStep]


def whole_step(inputs: Inputs) -> WholeStep:
    """Drafts a block for each sequence, or takes what was looked up, verifies it and accepts a prefix."""
    state = inputs.state
    proposals = _propose(inputs)
    token_ids = torch.cat([state.anchors, proposals.token_ids], dim=1)
    columns = torch.arange(token_ids.shape[1], device=token_ids.device)
    positions = state.starts[:, None] + columns
    storage = inputs.target_storage
    logits, features = masked_forward(
        inputs.target,
        inputs.layout,
        storage.cache(positions),
        token_ids,
        positions,
        storage.num_keys,
    )
    acceptance = _accept(inputs, proposals, logits)
    return WholeStep(
        num_accepted=acceptance.num_accepted,
        token_ids=acceptance.token_ids,
        proposed_ids=token_ids[:, 1:],  # not the state's own tensor, which is an input of a graph
        features=features.to(inputs.drafter.dtype),
    )


def _accept(inputs: Inputs, proposals: Proposals, logits: torch.Tensor) -> Acceptance:
    """Accepts proposals by logits [R, n + 1, V], as `Acceptor.accept` does."""
    state = inputs.state
    kind = inputs.kind
    if state.uniforms is None or state.settings is None:
        choices = logits.argmax(dim=-1)
        return proposals.accept_match(choices, best=logits.amax(dim=-1))
    sampler = Sampler(state.settings, kind.num_candidates or 0)
    rule = rule_of(kind.verification, proposals.is_drawn)
    if rule == "match":
        choices = sampler(logits, state.uniforms)
        return proposals.accept_match(choices, best=logits.amax(dim=-1))
    accept = RULES[rule]
    scores = sampler.scores(logits)
    return accept(proposals, scores, state.uniforms)


def _propose(inputs: Inputs) -> Proposals:
    """What was looked up, and the drafter's proposals where nothing was."""
    looked_up_ids = inputs.state.looked_up_ids
    if looked_up_ids is None:
        return _draft(inputs)
    if not inputs.kind.is_batch:
        return Proposals(looked_up_ids)
    drafts = _draft(inputs)
    token_ids = torch.where(looked_up_ids < 0, drafts.token_ids, looked_up_ids)
    return replace(drafts, token_ids=token_ids)


def _draft(inputs: Inputs) -> Proposals:
    """The drafter's proposals, after it has read the context in the state."""
    target = inputs.target
    drafter = inputs.drafter
    kind = inputs.kind
    state = inputs.state
    storage = inputs.draft_storage
    starts = state.num_read + state.counts  # slots of the anchors
    num_dropped = state.starts - starts  # keys that a window has dropped
    slots = block_slots(state.num_read, state.counts, state.features.shape[1], kind.block_size)
    token_ids = block_ids(drafter, state.anchors, kind.block_size)
    output = drafter(
        noise_embeds=embed(target, drafter, token_ids),
        context_hidden_states=state.features,
        position_ids=slots + num_dropped[:, None],
        attention_mask=drafter.step_masks(starts, kind.block_size, storage.num_keys),
        past_key_values=storage.cache(slots),
    )
    drawn = None
    if state.settings is not None and state.draft_uniforms is not None:
        temperature, *_ = state.settings
        drawn = (temperature, state.draft_uniforms)
    hidden_states = output.last_hidden_state
    # The head runs on the whole block: with 15 positions Inductor would also benchmark padded products.
    logits = head(target, hidden_states)
    proposing = proposing_positions(drafter, kind.num_proposals)
    proposals: Proposals = drafter.propose(
        hidden_states[:, proposing],
        state.anchors,
        lambda _: logits[:, proposing],
        drawn,
        embed=partial(embed, target, drafter),
    )
    return proposals
