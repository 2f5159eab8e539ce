"""The loop: draft a block, verify it in one forward of the target, commit what the target itself would have written.

It knows no clock, no text, no file, and nothing of how a request was put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import torch

from .compilation_dflash import NotCompiledError
from .conversation_dflash import Context, Conversation
from .drafting_dflash import Proposer
from .judging_dflash import Judge
from .rows_dflash import Row
from .target_dflash import TappedTarget
from .transfers_dflash import to_host
from .verification_dflash import Proposals, Verdict


@dataclass(frozen=True)
class Block:
    """What one forward of the target committed to one row of the batch.

    Attributes:
        token_ids: The committed tokens, cut where the text stops.
        num_proposals: Proposed tokens that were verified; 0 for the prefill's block.
        num_accepted: How many of them stood, before the cut.
        is_prefill: True for a row's first block, whose one token comes from the prompt's forward and not from a verify
            step.
        row: The row of the batch.
        is_lookup: Whether the proposals were found in the text (`prompt_lookup_num_tokens`) and not drafted.
        scores: The processed scores that the tokens were chosen by, [tokens, V] (`output_scores`).
        logits: The target's logits for them, unprocessed, [tokens, V] (`output_logits`).
    """

    token_ids: list[int]
    num_proposals: int
    num_accepted: int
    is_prefill: bool = False
    row: int = 0
    is_lookup: bool = False
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    @property
    def acceptance_length(self) -> int:
        """Tokens that the verify step gave before the cut: the accepted proposals and one of the target's own."""
        return self.num_accepted + 1


class Step:
    """A forward of the target that was launched, and what it says, which is on its way to the host.

    Args:
        rows: The rows that it writes a block for.
        proposals: What it judged.
        features: The context features of all columns, [B, 1 + n, L * D].
        logits: The target's logits of all columns, [B, 1 + n, V].
        verdict: What of the proposals stands.
    """

    def __init__(
        self,
        rows: list[Row],
        proposals: Proposals,
        features: torch.Tensor,
        logits: torch.Tensor,
        verdict: Verdict,
    ) -> None:
        self.rows, self.proposals = rows, proposals
        self.features, self.logits, self.verdict = features, logits, verdict
        self._read = to_host(torch.cat([verdict.num_accepted[:, None], verdict.token_ids], dim=1))

    @property
    def num_columns(self) -> int:
        """Columns of each row: an anchor and its proposals."""
        return 1 + self.proposals.token_ids.shape[1]

    def read(self) -> list[tuple[int, list[int]]]:
        """How many proposals of each row stand, and what the target writes. Waits for this step, the only place to wait."""
        return [(num_accepted, token_ids[: num_accepted + 1]) for num_accepted, *token_ids in self._read()]


@torch.no_grad()
def decode_blocks(
    tapped: TappedTarget,
    proposer: Proposer,
    judge: Judge,
    cut: Callable[[Row, list[int]], list[int]],
    memory: Conversation,
    input_ids: torch.Tensor,  # [B, S]
    attention_mask: torch.Tensor | None,  # [B, S]
    max_new_tokens: int,
    keeping: frozenset[str] = frozenset(),  # of "scores" and "logits"
    prefill_chunk_size: int | None = None,
) -> Iterator[Block]:
    """Drafts, verifies, accepts and commits a block for every row that is not done, until none is left.

    Where the device alone can find out how a step goes on, the next one is launched before the host reads it, and both
    work at the same time. All that the host holds (rows, lengths of caches, context) is as of the step that was read, so
    the one ahead can be dropped at any time.
    """

    def launch(rows: list[Row], anchors: torch.Tensor, behind: Step | None = None) -> Step:
        """Drafts, verifies and judges a block; `behind` a step, if the host has not read that yet."""
        unread = None if behind is None else behind.verdict
        context = None if behind is None else Context.unread(behind.features, behind.verdict.num_written)
        num_wanted = max_new_tokens - min(len(row.new_ids) for row in rows) - 1  # behind the target's own token
        proposals = proposer.propose(rows, anchors, num_wanted, context)
        verified_ids = torch.cat([anchors, proposals.token_ids], dim=1)  # [B, 1 + n]
        logits, features = tapped.forward(
            verified_ids, memory.target_cache, num_logits=verified_ids.shape[1], tree=proposals.tree, unread=unread
        )
        return Step(rows, proposals, features, logits, judge(logits, rows, proposals, unread))

    rows = [Row(index, prompt_ids) for index, prompt_ids in enumerate(input_ids)]
    # The prompts' forward is a step without proposals: its last column chooses the first token.
    logits = _prefill(tapped, memory, input_ids, attention_mask, max_new_tokens, prefill_chunk_size)
    nothing = Proposals(input_ids[:, :0])
    step = Step(rows, nothing, logits[:, :0], logits, judge(logits, rows, nothing))  # the memory holds its features
    yield from _write(step, cut, keeping)
    ahead: Step | None = None
    while True:
        if ahead is not None and not any(row.is_done for row in rows):
            step = ahead
            memory.catch_up(step.num_columns)
        else:  # what is ahead was launched for rows that leave now
            rows, anchors = _go_on(step, memory)
            if not rows:
                return
            step = launch(rows, anchors)
        ahead = None
        if not keeping and _runs_ahead(step, tapped, proposer, judge, max_new_tokens):
            with suppress(NotCompiledError):  # then it is launched once this one is read
                ahead = launch(rows, step.verdict.anchors, behind=step)
        blocks = _write(step, cut, keeping)
        num_kept = [len(block.token_ids) for block in blocks]
        memory.commit(step.features, num_kept, rows[0].new_ids, step.verdict.columns)
        proposer.record(step.proposals, [block.num_accepted for block in blocks])
        yield from blocks


def _runs_ahead(step: Step, tapped: TappedTarget, proposer: Proposer, judge: Judge, max_new_tokens: int) -> bool:
    """Whether the step behind this one can be launched before the host has read this one, and is worth it."""
    if tapped.compiled is None or not tapped.compiled.runs_ahead or not proposer.runs_ahead:
        return False
    # A whole block must be wanted, whatever this step gives: the width of the text's last blocks depends on that.
    num_left = max_new_tokens - max(len(row.new_ids) for row in step.rows) - step.num_columns
    return num_left > proposer.num_proposals and judge.runs_ahead(step.proposals)


def _prefill(
    tapped: TappedTarget,
    memory: Conversation,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    max_new_tokens: int,
    chunk_size: int | None,
) -> torch.Tensor:
    """Runs the prompts, or what of them the memory does not hold: logits of their last column, [B, 1, V].

    At most `chunk_size` columns at a time: what a layer computes for a column is dropped with its chunk, but for keys,
    values and what the drafter reads.
    """
    token_ids, is_real = _visible(input_ids, attention_mask)
    num_held = memory.open(tapped, token_ids, max_new_tokens)
    chunk_size = chunk_size or token_ids.shape[1]
    for begin in range(num_held, token_ids.shape[1], chunk_size):
        columns = slice(begin, begin + chunk_size)
        chunk, is_token = token_ids[:, columns], is_real[:, columns]
        num_real = is_token.sum(dim=1).tolist()
        logits, features = tapped.forward(chunk, memory.target_cache, 1, is_token, num_real)
        context = Context(features, is_token.to(features.device), num_real, is_packed=len(chunk) == 1)
        memory.add(context, chunk[0].tolist())
    return logits


def _visible(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns to run, and which of them are tokens, both [B, S].

    Masked tokens are seen by nobody and take up no position, so a single prompt without them is the same prompt.
    """
    if attention_mask is None:
        return input_ids, torch.ones_like(input_ids, dtype=torch.bool)
    is_real = attention_mask.bool()
    return (input_ids, is_real) if len(input_ids) > 1 else (input_ids[is_real][None], is_real[is_real][None])


def _write(step: Step, cut: Callable[[Row, list[int]], list[int]], keeping: frozenset[str]) -> list[Block]:
    """Writes what a step gives each row, up to where its text stops."""
    blocks, verdict = [], step.verdict
    of_tokens = step.logits if verdict.columns is None else step.logits[:, verdict.columns]
    for place, (row, (num_accepted, token_ids)) in enumerate(zip(step.rows, step.read(), strict=True)):
        is_prefill = not row.new_ids
        kept = cut(row, token_ids)
        blocks.append(
            Block(
                token_ids=kept,
                num_proposals=step.proposals.token_ids.shape[1],
                num_accepted=num_accepted,
                is_prefill=is_prefill,
                row=row.index,
                is_lookup=place in step.proposals.looked_up,
                scores=_kept(verdict.scores[place, : len(kept)]) if "scores" in keeping else None,
                logits=_kept(of_tokens[place, : len(kept)]) if "logits" in keeping else None,
            )
        )
    return blocks


def _kept(logits: torch.Tensor) -> torch.Tensor:
    """In float32 and of its own: the next run of a CUDA graph overwrites what this one gave."""
    return logits.to(torch.float32, copy=True)


def _go_on(step: Step, memory: Conversation) -> tuple[list[Row], torch.Tensor]:
    """The rows that are not done and their anchors [B, 1]; the others cost nothing from here on."""
    live = [place for place, row in enumerate(step.rows) if not row.is_done]
    if len(live) == len(step.rows):
        return step.rows, step.verdict.anchors
    if live:
        memory.keep_rows(live)
    return [step.rows[place] for place in live], step.verdict.anchors[live]
