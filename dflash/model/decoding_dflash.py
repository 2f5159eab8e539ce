"""What target and drafter have computed of a text and need not compute again: both caches and what lies between them.

Every call of the loop has a `Conversation`; a user who holds one over several calls pays for the new tokens alone.

Where proposals come from: one forward of the drafter per block or, where it pays, the text's own past.

The loop: draft a block, verify it in one forward of the target, commit what the target itself would have written.

It knows no clock, no text, no file, and nothing of how a request was put.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .attention_dflash import decoding_visibility
from .cache_dflash import PreallocatedCache, bucket, compiled_length, to_host
from .proposals_dflash import DraftTree, Habits, LatencyCurve, Pacer, PromptLookup, Row, grow_tree, measured_curve
from .step_dflash import CompiledPair, NotCompiledError, TappedTarget
from .verification_dflash import Judge, PositionNoise, Proposals, Verdict


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


logger = logging.get_logger(__name__)

# Verify steps without a single accepted proposal after which the drafter is called inactive.
INACTIVE_STEPS = 32

# Tokens of a position that a tree looks at, at most: the ninth best is hardly ever among the likeliest paths.
TREE_BRANCHES = 8

# Nodes of a draft tree whose size is chosen step by step, at most.
LARGEST_TREE = 64


class Proposer:
    """`propose(rows, anchors, num_wanted)`: what the next verify step is to judge.

    Args:
        drafter: A `DFlashDraftModel`.
        tapped: Its target.
        memory: The caches; the drafter reads the context that waits there.
        block_size: Tokens in a block, anchor included.
        max_draft_tokens: Proposals of a step at most; 0: the drafter never runs.
        lookup: Competes with the drafter; `None`: the drafter alone.
        noise: For drafters whose proposals are drawn; `None`: they propose their likeliest path.
        temperature: Of the draws.
        is_adaptive: Verify as many proposals as pay, step by step.
        latency_curve: What that is judged by; `None`: it is measured here.
        draft_tree: Nodes of a tree that stands in place of the likeliest path; 0: none.
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        tapped: TappedTarget,
        memory: Conversation,
        block_size: int,
        max_draft_tokens: int | None = None,
        lookup: PromptLookup | None = None,
        noise: PositionNoise | None = None,
        temperature: float = 1.0,
        is_adaptive: bool = False,
        latency_curve: LatencyCurve | None = None,
        draft_tree: int = 0,
    ) -> None:
        self.drafter = drafter
        self.tapped = tapped
        self.memory = memory
        self.block_size = block_size
        self.max_draft_tokens = max_draft_tokens
        self.lookup = lookup
        self.noise = noise
        self.temperature = temperature
        self.is_adaptive = is_adaptive
        self.latency_curve = latency_curve
        self.draft_tree = draft_tree
        self._pacer: Pacer | None = None
        self._num_steps = self._num_accepted = 0

    @property
    def num_proposals(self) -> int:
        """Proposals of a whole block."""
        count = self.block_size - (0 if self.drafter.config.sample_from_anchor else 1)
        return count if self.max_draft_tokens is None else min(count, self.max_draft_tokens)

    @property
    def runs_ahead(self) -> bool:
        """Whether every block is a whole one that is drafted without knowing the text before it."""
        is_plain = self.lookup is None and not self.is_adaptive and not self.draft_tree
        return is_plain and self.num_proposals < self.block_size  # a step's features are context for one block

    def propose(
        self, rows: list[Row], anchors: torch.Tensor, num_wanted: int, unread: Context | None = None
    ) -> Proposals:
        """At most `num_wanted` tokens deep behind the anchors [B, 1] of all rows.

        With an `unread` context, which the memory does not hold yet, the memory and its caches stay as they are; raises
        NotCompiledError where that cannot be done.
        """
        nothing = Proposals(anchors[:, :0])
        if self.max_draft_tokens is not None:
            num_wanted = min(num_wanted, self.max_draft_tokens)
        if not num_wanted:
            return nothing
        found = self.lookup.propose(rows) if self.lookup is not None else {}
        if len(found) == len(rows):
            return Proposals(anchors.new_tensor(list(found.values())), looked_up=tuple(found)).first(num_wanted)
        if self._pacer is not None and not self._pacer.wants_draft(len(rows)):
            return nothing
        proposals = self._draft(rows, anchors, num_wanted, unread)
        return proposals.with_lookups(found) if found else proposals

    def record(self, proposals: Proposals, num_accepted: Sequence[int]) -> None:
        """Takes note of how many of each row's proposals stood."""
        for place, count in enumerate(num_accepted):
            self._num_accepted += count
            if self.lookup is not None:
                self.lookup.record(place in proposals.looked_up, count)
        if self._pacer is not None and not proposals.looked_up:
            self._pacer.record(proposals.token_ids.shape[1], sum(num_accepted))
        if proposals.token_ids.shape[1]:
            self._num_steps += 1
            if self._num_steps == INACTIVE_STEPS and not self._num_accepted:
                _warn_inactive(self.drafter, self.tapped.target)

    def _draft(
        self, rows: list[Row], anchors: torch.Tensor, num_wanted: int, unread: Context | None = None
    ) -> Proposals:
        """What the drafter proposes behind the anchors: one forward, after which its cache holds context alone.

        A drafter whose positions know nothing of each other proposes its argmax, at a temperature too: letting the target
        sample accepts more than positions that are sampled independently, at the same law (`verification_dflash`).
        """
        context = unread or self.memory.context
        if context is None:
            raise RuntimeError("The drafter has read all that the target computed: nothing stands before the anchor.")
        hidden_states = self._hidden_states(anchors, context)
        if unread is None:
            self.memory.mark_read()
        if self.is_adaptive and self._pacer is None:  # the drafter's cache holds the text now, as in later steps
            hidden_states = hidden_states.clone()  # a CUDA graph's output, which its next run overwrites
            self._pacer = Pacer(self.latency_curve or self._measure(anchors), len(rows), Habits.of(self.drafter))
            self._pacer.wants_draft(len(rows))
        proposing = hidden_states[:, 0 if self.drafter.config.sample_from_anchor else 1 :]
        count, proposing = proposing.shape[1], proposing[:, :num_wanted]
        if self.draft_tree and (self._pacer is None or self._pacer.wants_tree()):
            return self._grow_tree(proposing, anchors)
        propose: Any = self.drafter.propose
        options: dict[str, Any] = {"with_confidences": True} if self._pacer is not None else {}
        if self.noise is not None:
            uniforms = torch.stack([self.noise.fresh(row.index, count)[:num_wanted] for row in rows])
            options |= {"temperature": self.temperature, "uniforms": uniforms}
        proposals: Proposals = propose(proposing, anchors, self.tapped.head, **options)
        if self._pacer is None or proposals.confidences is None:
            return proposals
        survival = proposals.confidences.cumprod(dim=1).sum(dim=0)
        return proposals.first(self._pacer.choose(survival.tolist())[0])

    def _grow_tree(self, proposing: torch.Tensor, anchors: torch.Tensor) -> Proposals:
        """The likeliest paths of a single row, as many as pay; where a chain pays more, that."""
        tree = self._whole_tree(proposing)
        if self._pacer is not None:
            count, is_tree = self._pacer.choose([tree.probabilities[i] for i in tree.chain()], tree.probabilities)
            if not is_tree:
                return Proposals(anchors.new_tensor([[tree.token_ids[i] for i in tree.chain()[:count]]]))
            tree = tree.first(count)
        return Proposals(anchors.new_tensor([tree.token_ids]), tree=tree)

    def _whole_tree(self, proposing: torch.Tensor) -> DraftTree:
        compute_logits: Any = self.drafter.compute_logits
        budget = self.draft_tree if self.max_draft_tokens is None else min(self.draft_tree, self.max_draft_tokens)
        logits = compute_logits(proposing, self.tapped.head)[0].float() / self.temperature  # [n, V]
        best, token_ids = logits.log_softmax(dim=-1).topk(min(budget, TREE_BRANCHES, logits.shape[-1]), dim=-1)
        best, token_ids = torch.stack([best.double(), token_ids.double()]).tolist()  # one synchronisation
        return grow_tree(best, [list(map(int, row)) for row in token_ids], budget)

    def _hidden_states(self, anchors: torch.Tensor, context: Context) -> torch.Tensor:
        """The drafter's last hidden states [B, N, D] of the block; its cache holds the context then, and no block."""
        masks = anchors.new_full((len(anchors), self.block_size - 1), self.drafter.config.mask_token_id)
        token_ids, cache = torch.cat([anchors, masks], dim=1), self.memory.draft_cache

        def eagerly() -> torch.Tensor:
            output = self.drafter(
                noise_embeds=self.tapped.embed(token_ids),
                context_hidden_states=context.features,
                past_key_values=cache,
                **self._placed(context),
            )
            cache.rollback(self.block_size)
            return output.last_hidden_state

        pair = self.tapped.compiled
        fits = context.is_packed and context.features.shape[1] <= self.block_size and cache.get_seq_length() > 0
        kind, models = f"a draft for {'one row' if len(anchors) == 1 else 'rows'}", (self.tapped.target, self.drafter)
        counts = context.num_real if context.counts is None else context.counts

        def compiled() -> torch.Tensor:
            return cast(CompiledPair, pair).draft(*models, token_ids, context.features, counts, cache)

        if pair is not None and context.counts is not None:
            return pair.ahead(kind, *models, compiled)
        if pair is None or not fits:
            return eagerly()
        return pair.either(kind, *models, compiled, eagerly, lambda: cache.advance(context.num_real))

    def _placed(self, context: Context) -> dict[str, Any]:
        """Positions and mask of rows of different lengths; a single row's follow from its cache."""
        cache = self.memory.draft_cache
        if not cache.is_ragged:
            return {}
        is_block = context.is_real.new_ones(len(context.num_real), self.block_size)
        slots = cache.plan(
            torch.cat([context.is_real, is_block], dim=1), [count + self.block_size for count in context.num_real]
        )
        num_keys = cache.get_seq_length() + slots.shape[1]
        visible = decoding_visibility(self.drafter.config, slots[:, -self.block_size :], num_keys)
        return {"position_ids": slots, "attention_mask": visible}

    def _measure(self, anchors: torch.Tensor) -> LatencyCurve:
        """The pair's curve behind a text of this length. What is run for it is taken back."""
        tapped, memory = self.tapped, self.memory
        num_rows, length = len(anchors), max(memory.target_cache.lengths)

        def verify(width: int) -> torch.Tensor:
            logits, _ = tapped.forward(anchors.expand(-1, width), memory.target_cache, num_logits=width)
            memory.target_cache.rollback([width] * num_rows)
            return logits.argmax(dim=-1)

        def verify_tree(width: int) -> torch.Tensor:
            tree = self._whole_tree(proposing).first(width - 1)
            ids = torch.cat([anchors, anchors.new_tensor([tree.token_ids])], dim=1)
            logits, _ = tapped.forward(ids, memory.target_cache, num_logits=ids.shape[1], tree=tree)
            columns = [0, *range(2, ids.shape[1], 2)]
            memory.target_cache.keep_columns(ids.shape[1], columns)
            memory.target_cache.rollback(len(columns))
            return logits.argmax(dim=-1)

        def draft() -> torch.Tensor:
            count = min(self.block_size // 2 + 1, max(1, length))
            size = len(self.drafter.config.target_layer_ids) * self.drafter.config.hidden_size
            weight: Any = self.drafter.get_parameter("norm.weight")
            features = weight.new_zeros(num_rows, count, size)
            hidden_states = self._hidden_states(anchors, Context.first_columns(features, [count] * num_rows))
            memory.draft_cache.rollback([count] * num_rows)
            return tapped.head(hidden_states).argmax(dim=-1)

        widest = 1 + (self.draft_tree or self.block_size)
        widths = [width for width in (1, 2, 4, 8, 16, 32, 64, 128) if width < widest] + [widest]
        pair = tapped.compiled
        setting = (num_rows, bucket(length), self.block_size, pair is not None and pair.is_active, self.draft_tree)
        proposing = self.drafter.get_parameter("norm.weight").expand(1, self.block_size - 1, -1)
        options = {"verify_tree": verify_tree} if self.draft_tree else {}
        return measured_curve(tapped.target, self.drafter, setting, widths, verify, draft, **options)


def _warn_inactive(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    logger.warning(
        f"{INACTIVE_STEPS} blocks were verified and not one drafted token was accepted: the text is right, but nothing is "
        f"gained. Likely causes: {drafter.config._name_or_path or 'the drafter'} was trained for another target than "
        f"{target.config._name_or_path or type(target).__name__}, the prompt does not use the chat template it was trained with "
        "(thinking on or off), or its target_layer_ids or mask_token_id are wrong."
    )


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
