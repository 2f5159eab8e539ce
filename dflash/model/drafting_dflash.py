"""How the drafter reads the text and proposes the tokens of a block. Nothing here can change the text.

The drafter attends to context features, the target's hidden states of committed tokens. `DrafterContext` holds their keys and
values, and the features that wait to be read. `DraftProposer` reads them with the next block and proposes its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from .acceptance_dflash import Acceptor, Proposals
from .cache_dflash import PreallocatedCache, chosen, to_device
from .sequences_dflash import TextSequence
from .targets_dflash import Target


logger = logging.get_logger(__name__)

INACTIVE_STEPS = 32  # verify steps without an accepted proposal after which a warning is logged


class Proposer(Protocol):
    """Proposes tokens for each verify step. It reads no cache but its own."""

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """At most `most` tokens after the anchors [B, 1] of the sequences that are not done."""

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """Tells what the step with these proposals committed: a `Block` for each sequence, its `num_accepted` among it."""


@dataclass(frozen=True)
class Context:
    """Context features of committed text."""

    features: torch.Tensor  # [B, C, L * D]
    num_real: list[int]  # each sequence's number of valid columns, which are the first ones

    @property
    def num_columns(self) -> int:
        """C, with the padding of shorter sequences."""
        return self.features.shape[1]

    @property
    def counts(self) -> torch.Tensor:
        """`num_real` on the device, [B]."""
        return to_device(torch.tensor(self.num_real), self.features.device)

    def part(self, begin: int, end: int) -> Context:
        """Columns `begin` to `end` of each sequence, as far as it has them."""
        num_real = []
        for count in self.num_real:
            num_left = min(end, count) - begin
            num_real.append(max(num_left, 0))
        return Context(self.features[:, begin:end], num_real)

    def of_sequences(self, places: list[int]) -> Context:
        """The context of these sequences of the batch."""
        num_real = [self.num_real[place] for place in places]
        features = self.features[:, : max(num_real)]
        return Context(chosen(features, 0, places), num_real)

    @classmethod
    def joined(cls, parts: Sequence[Context]) -> Context:
        """Contexts of consecutive parts of the text. Each sequence's valid columns are moved to the front."""
        if len(parts) == 1:
            return parts[0]
        rows = []
        for place in range(len(parts[0].num_real)):
            pieces = [part.features[place, : part.num_real[place]] for part in parts]
            rows.append(torch.cat(pieces))
        features = pad_sequence(rows, batch_first=True)
        return cls(features, [len(row) for row in rows])


class DrafterContext:
    """The drafter's keys and values of the text, and the context features that it has not read.

    Attributes:
        cache (`PreallocatedCache`): The keys and values.
    """

    def __init__(self, drafter: Any, cache: PreallocatedCache) -> None:
        self.drafter = drafter
        self.cache = cache
        self._device = drafter.device
        self._dtype = drafter.dtype
        self._parts = [self.nothing]  # what waits; a single one may be empty

    @property
    def nothing(self) -> Context:
        """No context."""
        config = self.drafter.config
        num_sequences = self.cache.batch_size
        width = len(config.target_layer_ids) * config.hidden_size
        features = torch.empty(num_sequences, 0, width, device=self._device, dtype=self._dtype)
        return Context(features, [0] * num_sequences)

    @property
    def num_read(self) -> int:
        """Number of tokens of a single text whose context the cache holds."""
        return self.cache.lengths[0]

    def append(self, context: Context) -> None:
        """Adds the context of new text."""
        features = context.features.to(self._device, self._dtype)
        if not self._parts[-1].num_columns:
            self._parts.clear()
        self._parts.append(Context(features, context.num_real))

    @property
    def waiting(self) -> Context:
        """The context that the drafter has not read, which may be empty."""
        if len(self._parts) > 1:  # only now: steps without a draft just append
            self._parts = [Context.joined(self._parts)]
        return self._parts[0]

    @waiting.setter
    def waiting(self, context: Context) -> None:
        self._parts = [context]

    def for_next_block(self) -> Context:
        """The context that the drafter reads together with the next block."""
        return self.waiting

    def mark_read(self) -> None:
        """Marks the waiting context as read: its keys and values are in the cache."""
        self.waiting = self.waiting.part(0, 0)

    def absorb(self) -> None:
        """Reads the waiting context now, without a block."""
        context = self.waiting
        if context.num_columns:
            self._absorb(context)
        self.mark_read()

    def _absorb(self, context: Context) -> None:
        cache = self.cache
        device = context.features.device
        columns = torch.arange(context.num_columns, device=device)
        starts = cache.lengths_on(device)
        slots = starts[:, None] + columns  # columns that are not valid are overwritten by the next ones
        with cache.appending(slots, context.num_real):
            self.drafter.absorb(context.features, cache.positions(slots), cache)

    def keep_sequences(self, places: list[int]) -> None:
        """Drops all sequences of the batch except these."""
        self.cache.keep_sequences(places)
        self.waiting = self.waiting.of_sequences(places)

    def truncate(self, length: int) -> None:
        """Keeps the context of a single text's first `length` tokens."""
        num_read = min(self.num_read, length)
        self.waiting = self.waiting.part(0, length - num_read)
        self.cache.truncate(num_read)


def block_ids(drafter: Any, anchors: torch.Tensor, block_size: int) -> torch.Tensor:
    """Anchors [B, 1] and the masks after them, [B, N]."""
    shape = (len(anchors), block_size - 1)
    masks = anchors.new_full(shape, drafter.config.mask_token_id)
    return torch.cat([anchors, masks], dim=1)


def block_slots(starts: torch.Tensor, counts: torch.Tensor, num_columns: int, block_size: int) -> torch.Tensor:
    """Slots [B, C + N] in the drafter's cache: first `counts` of C context columns, the block, then the padding."""
    counts = counts[:, None]
    columns = torch.arange(num_columns, device=starts.device)
    after_block = columns + block_size
    context = torch.where(columns < counts, columns, after_block)
    block = counts + torch.arange(block_size, device=starts.device)
    offsets = torch.cat([context, block], dim=1)
    return starts[:, None] + offsets


def proposing_positions(drafter: Any, num_proposals: int) -> slice:
    """Positions of a block whose hidden states propose: all, or all after the anchor."""
    first = 0 if drafter.config.sample_from_anchor else 1
    return slice(first, first + num_proposals)


def embed(target: Any, drafter: Any, token_ids: torch.Tensor) -> torch.Tensor:
    """Embeddings [..., D] of token_ids [...] by the target, as the drafter reads them, on its device."""
    embedding = target.get_input_embeddings()
    device = embedding.weight.device
    if device.type != "meta":  # offloaded: accelerate moves the ids
        token_ids = token_ids.to(device)
    return drafter.embed(token_ids, embedding).to(drafter.hidden_norm.weight.device)


class DraftProposer:
    """Proposes what the drafter predicts after the anchors.

    It draws proposals if the request samples, the drafter has a head, the rule is not "match" and `may_draw`. Else it proposes
    the likeliest path.
    """

    def __init__(
        self, request: Any, target: Target, context: DrafterContext, acceptor: Acceptor, may_draw: bool = True
    ) -> None:
        self.request = request
        self.drafter: Any = request.drafter
        self.target = target
        self.context = context
        has_head = self.drafter.causal_head(self.embed) is not None  # a drafter without one proposes its argmax
        draws = may_draw and has_head and acceptor.uniforms_of is not None and acceptor.verification != "match"
        self._uniforms_of = acceptor.uniforms_of if draws else None
        self.num_proposals = num_proposals(request)
        self._num_steps = 0
        self._num_accepted = 0

    @property
    def draws(self) -> bool:
        """Whether proposals are drawn, not the most probable tokens."""
        return self._uniforms_of is not None

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [..., D] of token_ids [...] by the target, on the drafter's device."""
        return embed(self.target.model, self.drafter, token_ids)

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """The drafter's proposals after anchors [B, 1]: those of a block, at most `most`."""
        count = min(most, self.num_proposals)
        if count == 0:
            return Proposals(anchors[:, :0])
        hidden_states = self.hidden_states(anchors, count)
        drawn = None
        if self._uniforms_of is not None:
            uniforms = self._uniforms_of.fresh(sequences, count, anchors.device)
            drawn = (self.request.temperature, uniforms)
        proposals: Proposals = self.drafter.propose(hidden_states, anchors, self.target.head, drawn, embed=self.embed)
        return proposals

    def hidden_states(self, anchors: torch.Tensor, count: int) -> torch.Tensor:
        """Runs the drafter once; its last hidden states at `count` proposals [B, n, D]. The cache then holds only context."""
        context = self.context.for_next_block()
        cache = self.context.cache
        block_size = self.request.block_size
        noise_embeds = self.embed(block_ids(self.drafter, anchors, block_size))
        device = context.features.device
        num_keys = max(cache.lengths) + context.num_columns + block_size
        if cache.is_ragged:
            lengths = cache.lengths_on(device)
            slots = block_slots(lengths, context.counts, context.num_columns, block_size)
            masks = self.drafter.step_masks(lengths + context.counts, block_size, num_keys)
        else:
            slots = torch.arange(cache.get_seq_length(), num_keys, device=device)[None]
            masks = None  # the drafter takes it from its cache
        with cache.appending(slots, context.num_real):
            output = self.drafter(
                noise_embeds=noise_embeds,
                context_hidden_states=context.features,
                position_ids=cache.positions(slots),
                attention_mask=masks,
                past_key_values=cache,
            )
        self.context.mark_read()
        return output.last_hidden_state[:, proposing_positions(self.drafter, count)]

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """Warns once if drafts are never accepted."""
        self._num_accepted += sum(block.num_accepted for block in blocks)
        self._num_steps += proposals.token_ids.shape[1] > 0
        if self._num_steps == INACTIVE_STEPS and not self._num_accepted:
            self._num_steps += 1  # said once
            self._warn_of_inactive_drafts()

    def _warn_of_inactive_drafts(self) -> None:
        drafter = self.drafter.config._name_or_path or "the drafter"
        target = self.target.model.config._name_or_path or type(self.target.model).__name__
        logger.warning(
            f"{INACTIVE_STEPS} blocks were verified and not one drafted token was accepted: the text is right, but "
            f"nothing is gained. Likely causes: {drafter} was trained for another target than {target}, the prompt does "
            "not use the chat template it was trained with (thinking on or off), or its target_layer_ids or "
            "mask_token_id are wrong."
        )


def num_proposals(request: Any) -> int:
    """How many tokens a block of the request proposes."""
    count: int = request.block_size
    if not request.drafter.config.sample_from_anchor:
        count -= 1
    if request.max_draft_tokens is not None:
        count = min(count, request.max_draft_tokens)
    return count
