"""What target and drafter have computed of a text and need not compute again: both caches and what lies between them.

Every call of the loop has a `Conversation`; a user who holds one over several calls pays for the new tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from .cache_dflash import PreallocatedCache, compiled_length
from .target_dflash import TappedTarget


# Room made at first for new text; storage doubles when a text outgrows it.
INITIAL_NEW_TOKENS = 1024


@dataclass(frozen=True)
class Context:
    """What the target computed behind text that stands, and the drafter's cache does not hold yet."""

    features: torch.Tensor  # [B, C, L * D]
    is_real: torch.Tensor  # bool [B, C]: the other columns are padding, or were computed behind a rejected token
    num_real: list[int]
    is_packed: bool = True  # each row's real columns come first
    counts: torch.Tensor | None = None  # [B] where the device alone knows `num_real`, which is then the most it can be

    @classmethod
    def first_columns(cls, features: torch.Tensor, num_real: list[int]) -> Context:
        """The first `num_real` columns of each row."""
        width = max(num_real)
        if min(num_real) == width:
            is_real = torch.ones(len(features), width, dtype=torch.bool, device=features.device)
        else:
            is_real = torch.arange(width, device=features.device) < features.new_tensor(num_real)[:, None]
        return cls(features[:, :width], is_real, num_real)

    @classmethod
    def unread(cls, features: torch.Tensor, counts: torch.Tensor) -> Context:
        """The first `counts` [B] columns of each row, numbers that the host has not read."""
        is_real = torch.arange(features.shape[1], device=features.device) < counts[:, None]
        return cls(features, is_real, [features.shape[1]] * len(features), counts=counts)

    @classmethod
    def joined(cls, parts: Sequence[Context]) -> Context:
        """One behind the other."""
        return cls(
            torch.cat([part.features for part in parts], dim=1),
            torch.cat([part.is_real for part in parts], dim=1),
            [sum(counts) for counts in zip(*(part.num_real for part in parts), strict=True)],
            is_packed=len(parts[0].num_real) == 1,
        )

    def of_rows(self, rows: list[int]) -> Context:
        """Without the other rows of the batch; a single row's cache takes real columns alone."""
        features, is_real = self.features[rows], self.is_real[rows]
        if len(rows) == 1:
            features, is_real = features[is_real][None], is_real[is_real][None]
        num_real = [self.num_real[row] for row in rows]
        return Context(features, is_real, num_real, self.is_packed or len(rows) == 1)


class Conversation:
    """One prompt's caches, kept from call to call: `spec_generate(..., conversation=conversation)`.

    Pass the whole text each time. What of it the caches hold already, from its first token on, is not computed again;
    what differs is forgotten. The text that comes out is that of a call without a conversation.

    Attributes:
        token_ids: The text that the caches hold.
        num_reused: How many tokens of the last prompt were found in them.

    Example:
        >>> conversation = Conversation()
        >>> first = drafter.spec_generate(turn_1_ids, target=target, conversation=conversation)
        >>> second = drafter.spec_generate(turn_2_ids, target=target, conversation=conversation)
    """

    target_cache: PreallocatedCache
    draft_cache: PreallocatedCache

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_reused = 0
        self._waiting: list[Context] = []  # what the drafter has not read, joined when it is asked for
        self._pair: tuple[Any, Any] | None = None
        self._num_read = 0  # tokens whose context the drafter's cache holds

    @property
    def context(self) -> Context | None:
        """What the target computed and the drafter has not read, `None` if it has read all."""
        if len(self._waiting) > 1:
            self._waiting = [Context.joined(self._waiting)]
        return self._waiting[0] if self._waiting else None

    def check(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        """Raises ValueError if the caches are those of other models."""
        if self._pair is not None and (self._pair[0] is not target or self._pair[1] is not drafter):
            raise ValueError(
                f"The conversation was begun with another {type(self._pair[0]).__name__} or another drafter: start a new "
                "Conversation() for this pair."
            )

    def open(self, tapped: TappedTarget, token_ids: torch.Tensor, max_new_tokens: int) -> int:
        """Makes the caches ready for token_ids [B, S] and what is written behind them; how many of those they hold.

        At least one token is left to run: its forward chooses the first new one.
        """
        self.num_reused = self._count_held(token_ids) if len(token_ids) == 1 else 0
        if self.num_reused:
            self._forget_behind(self.num_reused)
        else:
            # Room for the last block's padding too, so that nothing is moved in mid-text.
            length = (
                token_ids.shape[1] + min(max_new_tokens, INITIAL_NEW_TOKENS) + 2 * tapped.drafter.config.block_size
            )
            capacity = compiled_length(length, token_ids.device) + 1
            self.target_cache = tapped.new_cache(capacity, len(token_ids))
            self.draft_cache = PreallocatedCache(tapped.drafter.config.num_hidden_layers, capacity, len(token_ids))
            self._waiting, self._num_read = [], 0
        self._pair = (tapped.target, tapped.drafter)
        self.token_ids = self.token_ids[: self.num_reused]
        return self.num_reused

    def _count_held(self, token_ids: torch.Tensor) -> int:
        """How many tokens the prompt and the caches share, as far as the target's cache can go back."""
        wanted = token_ids[0, :-1].tolist()
        if self.token_ids and self.target_cache.is_frozen:
            return 0
        pairs = enumerate(zip(self.token_ids, wanted, strict=False))
        shared = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(self.token_ids), len(wanted)))
        return self.target_cache.reusable(shared) if shared else 0

    def _forget_behind(self, length: int) -> None:
        # By length and not by count: a call that failed half-way may have left layers of different lengths.
        self.target_cache.truncate(length)
        self._num_read = min(self._num_read, length)
        self.draft_cache.truncate(self._num_read)
        pending = length - self._num_read
        context = self.context
        if context is not None:
            self._waiting = [Context.first_columns(context.features, [pending])] if pending else []

    def add(self, context: Context, token_ids: list[int]) -> None:
        """Keeps what the target computed, for these tokens of the first row, until the drafter reads it."""
        self._waiting.append(context)
        self.token_ids += token_ids

    def commit(
        self, features: torch.Tensor, num_kept: list[int], text: list[int], columns: list[int] | None = None
    ) -> None:
        """Keeps what a verify step computed, features [B, 1 + n, L * D], for each row's first `num_kept` columns.

        Those were computed behind text that stands: the anchor and all kept tokens but the last, whose keys and values
        the next forward computes, with it as the anchor. Of a tree, whose columns are no chain, `columns` stand.

        Args:
            features: Of all columns.
            num_kept: Tokens that the step gave each row.
            text: The first row's new tokens, those of this step included.
            columns: Of a tree, those whose path was taken.
        """
        width = features.shape[1]
        if columns is None:
            self.target_cache.rollback([width - kept for kept in num_kept])
        else:
            columns = columns[: num_kept[0]]
            self.target_cache.keep_columns(width, columns)
            features = features[:, columns]
        self.add(Context.first_columns(features, num_kept), text[-1 - num_kept[0] : -1])

    def mark_read(self) -> None:
        """The drafter's cache holds the context now."""
        self._num_read += sum(context.num_real[0] for context in self._waiting)
        self._waiting = []

    def catch_up(self, num_columns: int) -> None:
        """Counts what a step that was launched ahead has done, now that the one before it is committed.

        Its draft has read the context that waits, and its columns stand behind the target's text.
        """
        context = self.context
        if num_columns > 1 and context is not None:  # it was drafted
            self.draft_cache.advance(context.num_real)
            self.mark_read()
        self.target_cache.advance([num_columns] * len(self.target_cache.lengths))

    def keep_rows(self, rows: list[int]) -> None:
        """Forgets the other rows of the batch: those that are done cost nothing from here on."""
        self.target_cache.keep_rows(rows)
        self.draft_cache.keep_rows(rows)
        self._waiting = [context.of_rows(rows) for context in self._waiting]
