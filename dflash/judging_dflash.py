"""The target's judgement of a block: logits as plain `generate` would process them, then an accept rule."""

from __future__ import annotations

from typing import Any

import torch
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from .rows_dflash import Row
from .transfers_dflash import to_device
from .trees_dflash import DraftTree
from .verification_dflash import (
    PositionNoise,
    Proposals,
    Verdict,
    choose_greedy,
    choose_sampled,
    verify_block,
    verify_match,
    verify_rejection,
)


# Processors that look at a row's scores alone, so that all rows of a block may share one call.
PREFIX_FREE_PROCESSORS = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


class Judge:
    """`judge(logits, rows, proposals)` for blocks of logits [B, n + 1, V].

    Args:
        processors: The target's `LogitsProcessorList`.
        batch_size: Rows that the batch began with.
        noise: Source of uniforms; `None` decodes greedily.
        verification: One of `VERIFICATIONS`. "auto" is "match" for proposals that are one token, and "block" for drawn
            ones. Greedy decoding has one rule, "match".
    """

    def __init__(self, processors: Any, batch_size: int, noise: PositionNoise | None, verification: str) -> None:
        self.processors = processors
        self.batch_size = batch_size
        self.noise: Any = noise
        self.verification = verification
        self._is_prefix_free = all(type(processor) in PREFIX_FREE_PROCESSORS for processor in processors)

    @property
    def takes_drawn_proposals(self) -> bool:
        """Whether proposals that are drawn from the drafter's law are accepted more often than its argmax."""
        return self.noise is not None and self.verification != "match"

    def runs_ahead(self, proposals: Proposals) -> bool:
        """Whether a block like this one is judged without knowing the text before it, and how long that is."""
        return self._is_prefix_free and proposals.tree is None and self._rule(proposals) == "match"

    def __call__(
        self, logits: torch.Tensor, rows: list[Row], proposals: Proposals, unread: Verdict | None = None
    ) -> Verdict:
        """What of the proposals stands. Column i of the logits is processed behind [text, proposals 1..i].

        The text is that of the rows and, behind it, what an `unread` verdict gives, if this block `runs_ahead`.
        """
        logits = logits.to(proposals.token_ids.device)
        if proposals.tree is not None:
            return self._walk(logits[0], rows[0], proposals.tree)
        rule = self._rule(proposals)
        if self.processors:
            logits = self._process(logits.float(), rows, proposals.token_ids, rule)
        if rule == "match":
            return verify_match(proposals, logits, self._choose(logits, rows, unread=unread))
        uniforms = torch.stack([self.noise.fresh(row.index, logits.shape[1]) for row in rows]).to(logits.device)
        verify = verify_rejection if rule == "rejection" else verify_block
        return verify(proposals, logits, uniforms)

    def _walk(self, logits: torch.Tensor, row: Row, tree: DraftTree) -> Verdict:
        """Follows the target's own choices from the anchor down the tree: logits [1 + n, V] of its columns.

        Each choice is made behind the path that led to it, with the noise of its position, as by plain decoding.
        """
        scores, choices = logits, None
        if self._is_prefix_free:
            if self.processors:
                scores = self.processors(row.prompt_ids[None], logits.float())
            choices = self._choose_at(scores, row, tree.depths).tolist()
        columns, token_ids, seen = [0], list[int](), list[torch.Tensor]()
        while True:
            column = columns[-1]
            if choices is None:
                behind = row.text(row.prompt_ids.new_tensor(token_ids))
                seen.append(self._process_one(row, behind, logits[column].float()))
                token_ids += self._choose_at(seen[-1][None], row, [tree.depths[column]]).tolist()
            else:
                token_ids.append(choices[column])
            if token_ids[-1] not in tree.children[column]:
                break
            columns.append(tree.children[column][token_ids[-1]])
        return Verdict(
            num_accepted=row.prompt_ids.new_tensor([len(columns) - 1]),
            token_ids=row.prompt_ids.new_tensor([token_ids]),
            scores=(torch.stack(seen) if seen else scores[columns])[None],
            columns=columns,
        )

    def _choose_at(self, scores: torch.Tensor, row: Row, depths: list[int]) -> torch.Tensor:
        """The target's choices [N] by scores [N, V] of columns so many tokens behind the anchor."""
        if self.noise is None:
            return choose_greedy(scores)
        uniforms = self.noise(row.index, len(row.new_ids), max(depths) + 1)[depths]
        return choose_sampled(scores, uniforms.to(scores.device))

    def _rule(self, proposals: Proposals) -> str:
        if self.noise is None:
            return "match"
        if self.verification == "auto":
            return "match" if proposals.probabilities is None else "block"
        return self.verification

    def _choose(
        self, scores: torch.Tensor, rows: list[Row], first: int = 0, unread: Verdict | None = None
    ) -> torch.Tensor:
        """The target's choices [B, N] by scores [B, N, V] of the columns from `first` on."""
        if self.noise is None:
            return choose_greedy(scores)
        count = scores.shape[1] + (0 if unread is None else unread.token_ids.shape[1])
        drawn = torch.stack([self.noise(row.index, len(row.new_ids) + first, count) for row in rows])
        uniforms = to_device(drawn, scores.device)
        if unread is not None:  # each row's columns begin behind what that verdict gives it
            columns = torch.arange(scores.shape[1], device=scores.device)
            uniforms = uniforms.gather(1, unread.num_written[:, None] + columns)
        return choose_sampled(scores, uniforms)

    def _process(self, scores: torch.Tensor, rows: list[Row], proposals: torch.Tensor, rule: str) -> torch.Tensor:
        """The processors' scores [B, n + 1, V]; those that never look at the prefix get all columns in one call."""
        if self._is_prefix_free:
            return self.processors(proposals, scores.flatten(0, 1)).view_as(scores)
        return torch.stack(
            [self._process_along(*of_row, rule) for of_row in zip(rows, proposals, scores, strict=True)]
        )

    def _process_along(self, row: Row, proposed: torch.Tensor, scores: torch.Tensor, rule: str) -> torch.Tensor:
        """One row's scores [n + 1, V], column by column and no further than its proposals can stand.

        Behind a text that is never written a processor need have no answer: a grammar has none.
        """
        processed = scores.clone()
        for column in range(len(scores)):
            processed[column] = self._process_one(row, row.text(proposed[:column]), scores[column])
            if column == len(proposed):
                break
            if rule == "match":
                can_stand = self._choose(processed[None, column : column + 1], [row], column)[0, 0] == proposed[column]
            else:
                can_stand = processed[column, proposed[column]] > -torch.inf
            if not can_stand:
                break
        return processed

    def _process_one(self, row: Row, text_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # A processor may hold something for each row of the batch (the repetition penalty does: its padding), and rows
        # have prefixes of different lengths. So each asks as all rows of the batch, and takes the answer in its place.
        count = self.batch_size
        processed = self.processors(text_ids.expand(count, -1), scores.repeat(count, 1))[row.index]
        if processed.isnan().any() or processed.max() == -torch.inf:
            names = ", ".join(type(processor).__name__ for processor in self.processors)
            raise ValueError(
                f"The logits processors ({names}) left no token possible behind {text_ids.shape[1]} tokens (scores are NaN or "
                "all -inf): remove or correct the one that does."
            )
        return processed
