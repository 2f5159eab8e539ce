"""What target and drafter have computed of a text and need not compute again: both caches and what lies between them.

Every call of the loop has a `Conversation`; a user who holds one over several calls pays for the new tokens alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from .cache_dflash import PreallocatedCache
from .target_dflash import TappedTarget


# Room made at first for new text; storage doubles when a text outgrows it.
INITIAL_NEW_TOKENS = 1024


@dataclass(frozen=True)
class Context:
    """What the target computed behind text that stands, and the drafter's cache does not hold yet."""

    features: torch.Tensor  # [B, C, L * D]
    is_real: torch.Tensor  # bool [B, C]: the other columns are padding, or were computed behind a rejected token
    num_real: list[int]

    @classmethod
    def first_columns(cls, features: torch.Tensor, num_real: list[int]) -> Context:
        """The first `num_real` columns of each row."""
        columns = torch.arange(max(num_real), device=features.device)
        counts = torch.tensor(num_real, device=features.device)
        return cls(features[:, : len(columns)], columns < counts[:, None], num_real)

    def followed_by(self, other: Context) -> Context:
        """Both, this one first."""
        return Context(
            torch.cat([self.features, other.features], dim=1),
            torch.cat([self.is_real, other.is_real], dim=1),
            [mine + theirs for mine, theirs in zip(self.num_real, other.num_real, strict=True)],
        )

    def of_rows(self, rows: list[int]) -> Context:
        """Without the other rows of the batch; a single row's cache takes real columns alone."""
        features, is_real = self.features[rows], self.is_real[rows]
        if len(rows) == 1:
            features, is_real = features[is_real][None], is_real[is_real][None]
        return Context(features, is_real, [self.num_real[row] for row in rows])


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
        self.context: Context | None = None
        self._pair: tuple[Any, Any] | None = None
        self._num_read = 0  # tokens whose context the drafter's cache holds

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
        if self.num_reused:  # a target with linear layers can go on from its last position alone
            self.num_reused = self.target_cache.reusable(self.num_reused)
        if self.num_reused:
            self._forget_behind(self.num_reused)
        else:
            capacity = token_ids.shape[1] + min(max_new_tokens, INITIAL_NEW_TOKENS) + tapped.drafter.config.block_size
            self.target_cache = tapped.new_cache(capacity, len(token_ids))
            self.draft_cache = PreallocatedCache(tapped.drafter.config.num_hidden_layers, capacity, len(token_ids))
            self.context, self._num_read = None, 0
        self._pair = (tapped.target, tapped.drafter)
        self.token_ids = self.token_ids[: self.num_reused]
        return self.num_reused

    def _count_held(self, token_ids: torch.Tensor) -> int:
        """How many tokens the prompt and the caches share, as far as the target's cache can go back."""
        wanted = token_ids[0, :-1].tolist()
        pairs = enumerate(zip(self.token_ids, wanted, strict=False))
        shared = next((i for i, (mine, theirs) in pairs if mine != theirs), min(len(self.token_ids), len(wanted)))
        return self.target_cache.reusable(shared) if shared else 0

    def _forget_behind(self, length: int) -> None:
        # By length and not by count: a call that failed half-way may have left layers of different lengths.
        self.target_cache.truncate(length)
        self._num_read = min(self._num_read, length)
        self.draft_cache.truncate(self._num_read)
        pending = length - self._num_read
        if self.context is not None:
            self.context = Context.first_columns(self.context.features, [pending]) if pending else None

    def add(self, context: Context, token_ids: torch.Tensor) -> None:
        """Keeps what the target computed for token_ids [B, S] until the drafter reads it."""
        self.context = context if self.context is None else self.context.followed_by(context)
        self.token_ids += token_ids[0].tolist()

    def commit(self, features: torch.Tensor, num_kept: list[int], verified_ids: torch.Tensor) -> None:
        """Keeps what a verify step over verified_ids [B, 1 + n] computed for each row's first `num_kept` columns.

        Those were computed behind text that stands: the anchor and all kept tokens but the last, whose keys and values
        the next forward computes, with it as the anchor.
        """
        width = verified_ids.shape[1]
        self.target_cache.rollback([width - kept for kept in num_kept])
        self.add(Context.first_columns(features, num_kept), verified_ids[:, : num_kept[0]])

    def mark_read(self) -> None:
        """The drafter's cache holds the context now."""
        if self.context is not None:
            self._num_read += self.context.num_real[0]
        self.context = None

    def keep_rows(self, rows: list[int]) -> None:
        """Forgets the other rows of the batch: those that are done cost nothing from here on."""
        self.target_cache.keep_rows(rows)
        self.draft_cache.keep_rows(rows)
        if self.context is not None:
            self.context = self.context.of_rows(rows)
