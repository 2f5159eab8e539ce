"""The loop: propose a block, verify it in one forward of the target, accept what stands, commit it.

`decode_blocks` is the loop. `decode_ahead` runs the same four verbs where one compiled function does the first three, and on
a device with a queue launches a step before the host has read the one before. Both know nothing of how a request was put.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .cache_dflash import PreallocatedCache, chosen, to_device, to_host
from .proposals_dflash import DraftTree, Habits, LatencyCurve, Pacer, PromptLookup, Row, clock, grow_tree
from .step_dflash import ROW_CLASSES, WIDTH_CLASSES, Context, Loan, NotCompiledError, Pair, Shape, State
from .verification_dflash import DRAFTER_BROKE, PositionNoise, Proposals, Verdict, Verifier


logger = logging.get_logger(__name__)

INITIAL_NEW_TOKENS = 1024  # room made at first for new text; storage doubles when a text outgrows it
INACTIVE_STEPS = 32  # verify steps without a single accepted proposal after which the drafter is called inactive
TREE_BRANCHES = 8  # tokens of a position that a tree looks at: the ninth best is hardly ever on a likely path
LARGEST_TREE = 64  # nodes, at most, of a draft tree whose size is chosen step by step


@dataclass(frozen=True)
class Block:
    """What one forward of the target committed to one row of the batch.

    Attributes:
        token_ids: The committed tokens, cut where the text stops.
        num_proposals: Proposed tokens that were verified; 0 for the prefill's block.
        num_accepted: How many of them stood, before the cut.
        is_prefill: True for a row's first block: its one token comes from the prompt's forward, not from a verify step.
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


class Conversation:
    """One prompt's caches, kept from call to call: `spec_generate(..., conversation=conversation)`.

    Pass the whole text each time. What of it the caches hold already, from its first token on, is not computed again;
    what differs is forgotten. The text that comes out is that of a call without a conversation. A compiled pair lends the
    caches on devices with a queue; a conversation keeps them while it lives.

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
        self.waiting: list[Context] = []  # what the drafter has not read, oldest first
        self.loan: Loan | None = None  # the caches, if they are lent
        self._num_read = 0  # tokens whose context the drafter's cache holds
        self._models: tuple[Any, Any] | None = None
        self._return: Any = None

    @property
    def caches(self) -> tuple[PreallocatedCache, PreallocatedCache]:
        """The target's and the drafter's."""
        return self.target_cache, self.draft_cache

    def check(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        """Raises ValueError if the caches are those of other models."""
        if self._models is not None and (self._models[0] is not target or self._models[1] is not drafter):
            name = type(self._models[0]).__name__
            raise ValueError(f"The conversation was begun with another {name} or another drafter: start a new one.")

    def open(self, pair: Pair, token_ids: torch.Tensor, max_new_tokens: int) -> int:
        """Makes the caches ready for token_ids [B, S] and what follows; how many of those they hold, which are not all."""
        self.num_reused = 0
        if len(token_ids) == 1:
            both = zip(self.token_ids, token_ids[0, :-1].tolist(), strict=False)
            num_shared = sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], both))
            self.num_reused = self.target_cache.reusable(num_shared) if num_shared else 0
        self._models, self.token_ids = (pair.target, pair.drafter), self.token_ids[: self.num_reused]
        length = token_ids.shape[1] + min(max_new_tokens, INITIAL_NEW_TOKENS) + 4 * pair.drafter.config.block_size
        if self.num_reused:
            self.target_cache.truncate(self.num_reused)
            self._num_read = min(self._num_read, self.num_reused)
            self.draft_cache.truncate(self._num_read)
            num_waiting = self.num_reused - self._num_read
            self.waiting = [self.next_context().first(num_waiting)] if num_waiting else []
            self.make_room(pair, length, [0])
        else:
            self.waiting, self._num_read = [], 0
            self._allocate(pair, len(token_ids), length)
        return self.num_reused

    def _allocate(self, pair: Pair, num_rows: int, length: int) -> None:
        """New caches, or on devices of few shapes lent ones; those that were lent before go back."""
        compiled, old = pair.compiled, self.loan
        if compiled is not None and compiled.is_static and num_rows <= ROW_CLASSES[-1]:
            self.loan = compiled.lend(pair, num_rows, length)
            self.target_cache, self.draft_cache = self.loan.target_cache, self.loan.draft_cache
            if self._return is not None:
                self._return.detach()
            if old is not None:
                compiled.take_back(old)
            self._return = weakref.finalize(self, compiled.take_back, self.loan)
            self._return.atexit = False
        else:
            self.close(has_failed=False)
            self.target_cache = pair.new_cache(length, num_rows)
            self.draft_cache = PreallocatedCache(pair.drafter.config.num_hidden_layers, length, num_rows)

    def close(self, has_failed: bool) -> None:
        """Gives lent caches back; after a failure they are dropped, because what is in them may be no number."""
        if self._return is not None:
            if has_failed:
                self._return.detach()
            else:
                self._return()
        self._return = self.loan = None
        self.token_ids, self.waiting = [], []

    def make_room(self, pair: Pair, length: int, rows: list[int]) -> None:
        """Moves `rows` of lent caches into the smallest class that holds them and `length` tokens, if that is another."""
        compiled, loan = pair.compiled, self.loan
        if compiled is None or not compiled.is_static or len(rows) > ROW_CLASSES[-1]:
            return
        size = next(size for size in ROW_CLASSES if size >= len(rows))
        if loan is not None and loan.num_rows == size and loan.capacity >= length:
            return
        old_caches, lengths = self.caches, [[cache.lengths[row] for row in rows] for cache in self.caches]
        self.loan = None  # given back only after it was read
        self._allocate(pair, len(rows), length if loan is None else max(length, loan.capacity))
        for mine, old, held in zip(self.caches, old_caches, lengths, strict=True):
            mine.copy_rows(old, rows, held)
        if loan is not None:
            compiled.take_back(loan)

    def keep_rows(self, pair: Pair, rows: list[int]) -> bool:
        """Forgets the other rows of the batch, those of lent caches once a smaller class fits; whether it did."""
        if self.loan is not None and pair.compiled is not None and pair.compiled.is_static:
            if not any(len(rows) <= size < self.loan.num_rows for size in ROW_CLASSES):
                return False
            self.make_room(pair, 0, rows)
        else:
            self.target_cache.keep_rows(rows)
            self.draft_cache.keep_rows(rows)
        self.waiting = [context.of_rows(rows) for context in self.waiting]
        return True

    def commit(self, features: torch.Tensor, num_kept: list[int], text: list[int], columns: list[int] | None) -> None:
        """Keeps what a verify step computed, features [B, 1 + n, L * D], for each row's first `num_kept` columns.

        Those stand for the anchor and all kept tokens but the last, which is the next forward's anchor. Of a tree `columns`
        stand. `text` holds the first row's new tokens, those of this step included.
        """
        width = features.shape[1]
        if columns is None:
            self.target_cache.rollback([width - kept for kept in num_kept])
        else:
            columns = columns[: num_kept[0]]
            self.target_cache.keep_columns(width, columns)
            features = chosen(features, 1, columns)
        self.waiting.append(Context(features[:, : max(num_kept)], num_kept))
        self.token_ids += text[len(text) - 1 - num_kept[0] : -1]

    def next_context(self) -> Context:
        """What waits for the drafter, in one piece."""
        if not self.waiting:
            raise RuntimeError("The drafter has read all that the target computed: nothing stands before the anchor.")
        if len(self.waiting) > 1:
            features = torch.cat([part.features for part in self.waiting], dim=1)
            is_real = torch.cat([part.is_real for part in self.waiting], dim=1)
            num_real = [sum(counts) for counts in zip(*(part.num_real for part in self.waiting), strict=True)]
            self.waiting = [_packed(features, is_real, num_real)]
        return self.waiting[0]

    def step_context(self, pair: Pair, block_size: int) -> Context:
        """`next_context` of a compiled step; what it has no columns for, the drafter reads now, without a block."""
        context = self.next_context()
        if context.features.shape[1] > pair.num_columns(block_size) or not any(self.draft_cache.lengths):
            pair.absorb(context, self.draft_cache)
            self.mark_read()
            self.waiting = [context.first(0)]
        return self.waiting[0]

    def mark_read(self) -> list[int]:
        """The drafter's cache holds the context now; how much of it, in each row."""
        (context,) = self.waiting
        self._num_read += context.num_real[0]
        self.waiting = []
        return context.num_real


@dataclass
class Drafted:
    """A draft that was launched, and the numbers by which the host chooses among its tokens, on their way to it."""

    proposals: Any  # the likeliest tokens; `None`: a tree is grown
    read: Any = None  # waits for each row's confidences, or a tree's best tokens; `None`: nothing is to be chosen


class Proposer:
    """What the next verify step verifies. `noise` is for drafters whose proposals are drawn."""

    def __init__(self, pair: Pair, memory: Conversation, request: Any, noise: PositionNoise | None) -> None:
        self.pair, self.memory, self.request, self.noise = pair, memory, request, noise
        most = float("inf") if request.max_draft_tokens is None else request.max_draft_tokens
        self.num_proposals: Any = min(pair.num_columns(request.block_size) - 1, most)  # of a whole block
        self._num_nodes: Any = min(request.draft_tree, most)
        self._lookup = PromptLookup(request.num_looked_up, request.ngram_size) if request.num_looked_up else None
        self._pacer: Pacer | None = None
        self._ahead: Drafted | None = None
        self._is_wanted: bool | None = None  # whether the pacer wants the next draft, if it was asked ahead
        self._num_steps = self._num_accepted = 0

    def propose(self, rows: list[Row], anchors: torch.Tensor, num_wanted: int) -> Proposals:
        """At most `num_wanted` tokens deep after the anchors [B, 1] of all rows."""
        nothing, num_wanted = Proposals(anchors[:, :0]), min(num_wanted, self.num_proposals)
        if not num_wanted:
            return nothing
        found = self._lookup.propose(rows) if self._lookup is not None else {}
        if len(found) == len(rows):
            token_ids = to_device(torch.tensor(list(found.values())), anchors.device)
            return Proposals(token_ids, looked_up=tuple(found)).first(num_wanted)
        drafted, is_wanted = self._ahead, self._is_wanted
        self.forget_ahead()
        if drafted is not None:
            self.memory.draft_cache.advance(self.memory.mark_read())
        else:
            if self._pacer is not None and is_wanted is None:
                is_wanted = self._pacer.wants_draft(_num_live(rows))
            if is_wanted is False:
                return nothing
            drafted = self._draft(rows, anchors)
        proposals = self._choose(drafted, anchors, num_wanted)
        return proposals.with_lookups(found) if found else proposals

    def propose_ahead(self, step: Step, rows: list[Row]) -> None:
        """Launches the draft after a step that the host has not read; NotCompiledError if it needs the host."""
        request, pacer, memory, verdict = self.request, self._pacer, self.memory, step.verdict
        if self._lookup is not None or self.noise is not None or request.draft_tree or pacer is None:
            raise NotCompiledError
        self._is_wanted = pacer.wants_draft(_num_live(rows))
        # After a pause the drafter has more to read than this step's context.
        if not self._is_wanted or memory.waiting:
            raise NotCompiledError
        lengths = to_device(torch.tensor(memory.target_cache.lengths), request.input_ids.device)
        starts, written, anchors = lengths - step.features.shape[1], verdict.num_written, verdict.anchors
        state = State(anchors, starts + written, step.features, written)
        hidden_states = self.pair.draft_compiled(state, memory.draft_cache, request.block_size, 1)
        self._ahead = self._begin_choice(hidden_states, anchors)

    def read_ahead(self) -> None:
        """Waits for the draft of the next step, if one was launched."""
        if self._ahead is not None and self._ahead.read is not None:
            self._ahead.read()

    def forget_ahead(self) -> None:
        """Drops a draft that was launched for rows that have left."""
        self._ahead = self._is_wanted = None

    def record(self, proposals: Proposals, blocks: Sequence[Block]) -> None:
        """Takes note of how many of each row's proposals stood."""
        num_accepted = sum(block.num_accepted for block in blocks)
        self._num_accepted += num_accepted
        if self._lookup is not None:
            for block in blocks:
                self._lookup.record(block.is_lookup, block.num_accepted)
        num_proposals = proposals.token_ids.shape[1]
        if self._pacer is not None and proposals.looked_up:
            self._pacer.begin_step()  # nothing is said of drafts
        elif self._pacer is not None:
            self._pacer.record(num_proposals, num_accepted)
        self._num_steps += num_proposals > 0
        if num_proposals and self._num_steps == INACTIVE_STEPS and not self._num_accepted:
            drafter, target = self.pair.drafter, self.pair.target
            logger.warning(
                f"{INACTIVE_STEPS} blocks were verified and not one drafted token was accepted: the text is right, but "
                f"nothing is gained. Likely causes: {drafter.config._name_or_path or 'the drafter'} was trained for another "
                f"target than {target.config._name_or_path or type(target).__name__}, the prompt does not use the chat template "
                "it was trained with (thinking on or off), or its target_layer_ids or mask_token_id are wrong."
            )

    def _draft(self, rows: list[Row], anchors: torch.Tensor) -> Drafted:
        """One forward of the drafter, after which its cache holds context alone."""
        request, pair, memory = self.request, self.pair, self.memory
        is_compiled = pair.compiled is not None and pair.compiled.is_active
        context = memory.step_context(pair, request.block_size) if is_compiled else memory.next_context()
        hidden_states = pair.draft(anchors, context, memory.draft_cache, request.block_size)
        memory.mark_read()
        if request.adaptive and self._pacer is None:  # the drafter's cache holds the text now, as in later steps
            widths = WIDTH_CLASSES if pair.compiled is not None and pair.compiled.is_static else None
            curve, num_rows = request.latency_curve or self._measure(anchors, widths), _num_live(rows)
            self._pacer = Pacer(curve, num_rows, Habits.of(pair.drafter), widths)
        return self._begin_choice(hidden_states, anchors, rows)

    def _begin_choice(self, hidden_states: torch.Tensor, anchors: torch.Tensor, rows: Sequence[Row] = ()) -> Drafted:
        """The proposals of the draft's last hidden states, or what the host needs in order to choose them.

        A drafter whose positions know nothing of each other proposes its argmax, at a temperature too: letting the target
        sample accepts more than positions that are sampled independently, at the same distribution.
        """
        drafter: Any = self.pair.drafter
        proposing = hidden_states[:, 0 if drafter.config.sample_from_anchor else 1 :][:, : self.num_proposals]
        if self.request.draft_tree and (self._pacer is None or self._pacer.wants_tree()):
            return Drafted(None, self._begin_tree(proposing))
        options: dict[str, Any] = {"with_confidences": True} if self._pacer is not None else {}
        if self.noise is not None:
            uniforms = torch.stack([self.noise.fresh(row.index, proposing.shape[1]) for row in rows])
            options |= {"temperature": self.request.temperature, "uniforms": to_device(uniforms, anchors.device)}
        proposals = drafter.propose(proposing, anchors, self.pair.head, **options)
        if proposals.confidences is None:
            return Drafted(proposals)
        return Drafted(proposals, cache(to_host(proposals.confidences.cumprod(dim=1))))

    def _choose(self, drafted: Drafted, anchors: torch.Tensor, num_wanted: int) -> Proposals:
        """The proposals that are verified: as many as pay, as a chain or as a tree."""
        proposals, pacer = drafted.proposals, self._pacer
        if proposals is not None:
            if pacer is not None and drafted.read is not None:
                survival = [sum(of_rows) for of_rows in zip(*drafted.read(), strict=True)]
                num_wanted = pacer.choose(survival[:num_wanted])[0]
            return proposals.first(num_wanted)
        tree = self._grow(drafted.read(), num_wanted)
        if pacer is not None:
            chain = tree.chain()
            count, is_tree = pacer.choose([tree.probabilities[i] for i in chain], tree.probabilities)
            if not is_tree:
                token_ids = torch.tensor([[tree.token_ids[i] for i in chain[:count]]], dtype=torch.long)
                return Proposals(to_device(token_ids, anchors.device))
            tree = tree.first(count)
        return Proposals(to_device(torch.tensor([tree.token_ids]), anchors.device), tree=tree)

    def _begin_tree(self, proposing: torch.Tensor) -> Callable[[], Any]:
        """Best log-probabilities and tokens of a single row's positions, on their way to the host."""
        drafter: Any = self.pair.drafter
        logits = drafter.compute_logits(proposing, self.pair.head)[0]  # [n, V]: the largest tensor, never in float32
        temperature, count = self.request.temperature, min(self._num_nodes, TREE_BRANCHES, logits.shape[-1])
        values, token_ids = logits.topk(count, dim=-1)
        total = ((logits - values[:, :1]) / temperature).exp().sum(dim=-1, keepdim=True, dtype=torch.float32)
        best = (values - values[:, :1]).float() / temperature - total.log()
        return cache(to_host(torch.stack([best.double(), token_ids.double()])))

    def _grow(self, numbers: Any, num_wanted: int) -> DraftTree:
        best, token_ids = numbers
        if any(value != value for of_position in best for value in of_position):
            raise _broken(self.pair, "drafter")
        return grow_tree(
            best[:num_wanted], [list(map(int, of_position)) for of_position in token_ids], self._num_nodes
        )

    def _measure(self, anchors: torch.Tensor, classes: Sequence[int] | None) -> LatencyCurve:
        """The pair's curve over widths of these `classes`; `None`: over powers of two and the widest."""
        block_size, draft_tree = self.request.block_size, self.request.draft_tree
        proposing = self.pair.drafter.get_parameter("norm.weight").expand(1, block_size - 1, -1)

        def grow(width: int) -> DraftTree:
            return self._grow(self._begin_tree(proposing)(), block_size).first(width - 1)

        widest = 1 + (draft_tree or self.num_proposals)
        widths = [width for width in classes or (1, 2, 4, 8, 16, 32, 64, 128) if width < widest]
        widths.append(next((width for width in classes or () if width >= widest), widest))
        return self.pair.measured_curve(anchors, self.memory.caches, widths, block_size, grow if draft_tree else None)


@dataclass
class Step:
    """A forward of the target that was launched, and what it says, which is on its way to the host."""

    proposals: Proposals
    features: torch.Tensor  # of all columns, [B, 1 + n, L * D]
    verdict: Verdict
    wanted: dict[str, Any]  # "scores" and "logits" of the tokens, [B, 1 + n, V], if they are asked for
    whole: tuple[State, torch.Tensor] | None = None  # ran as one: where the sequences stood, which were not done
    num_context: list[int] | None = None  # columns that the drafter read in it; None: those of the step before

    def __post_init__(self) -> None:
        verdict = self.verdict
        self._read = to_host(torch.cat([verdict.num_accepted[:, None], verdict.token_ids], dim=1))

    def read(self) -> list[tuple[int, list[int]]]:
        """How many proposals of each row stand, and what the target writes. Waits for this step, the only place to wait."""
        return [(num_accepted, token_ids[: num_accepted + 1]) for num_accepted, *token_ids in self._read()]


class Decoder:
    """The four verbs for one request. What the host holds is as of the step that it has read.

    `cut` takes a row and its new tokens, and gives those up to where the text stops.
    """

    def __init__(self, request: Any, pair: Pair, verifier: Verifier, cut: Any, memory: Conversation) -> None:
        self.request, self.pair, self.verifier, self._cut, self.memory = request, pair, verifier, cut, memory
        has_selector = getattr(pair.drafter, "candidate_selector", None) is not None  # others propose their argmax
        # A width chosen by how likely the drawn tokens are would keep the likely ones: what is left is no draw from q.
        drawn = has_selector and verifier.takes_drawn_proposals and not request.adaptive
        self.proposer = Proposer(pair, memory, request, verifier.noise if drawn else None)
        self.rows: list[Row] = []
        self.anchors = torch.empty(0)
        self._began, self._num_steps = 0.0, 0

    @property
    def num_wanted(self) -> int:
        """Proposals for which the target has positions left; blocks are whole, and cut where a text ends."""
        compiled, request = self.pair.compiled, self.request
        is_eager = compiled is None or not compiled.is_active
        if is_eager and request.max_new_tokens - min(len(row.new_ids) for row in self.rows) == 1:
            return 0  # the last token needs no drafter
        longest = max(len(row.prompt_ids) + len(row.new_ids) for row in self.rows if not row.is_done)
        return max(0, request.max_length - longest - 1)

    def read_prompt(self) -> list[Block]:
        """Runs the prompts, or what of them the memory does not hold, and commits their first tokens."""
        request, memory = self.request, self.memory
        token_ids, mask = request.input_ids, request.attention_mask
        self.rows = [Row(index, prompt_ids) for index, prompt_ids in enumerate(token_ids)]
        is_real = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask.bool()
        if mask is not None and len(token_ids) == 1:  # nobody sees masked tokens: it is the same prompt without them
            token_ids, is_real = token_ids[is_real][None], is_real[is_real][None]
        num_held, width = memory.open(self.pair, token_ids, request.max_new_tokens), token_ids.shape[1]
        chunk_size = request.chunk_size or width
        for begin in range(num_held, width, chunk_size):
            columns = slice(begin, begin + chunk_size)
            chunk, is_token = token_ids[:, columns], is_real[:, columns]
            num_real = is_token.sum(dim=1).tolist()
            logits, features = self.pair.forward(chunk, memory.target_cache, 1, is_token, num_real)
            memory.waiting.append(_packed(features, is_token, num_real))
            memory.token_ids += chunk[0].tolist()
        # Without features: the memory holds them already.
        return self.commit(self.accept(Proposals(request.input_ids[:, :0]), logits, features[:, :0]))

    def propose(self) -> Proposals:
        """What the next step verifies."""
        self._began = clock()
        self._make_room()
        return self.proposer.propose(self.rows, self.anchors, self.num_wanted)

    def verify(self, proposals: Proposals) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's logits and features of the anchors and proposals."""
        token_ids = torch.cat([self.anchors, proposals.token_ids], dim=1)  # [B, 1 + n]
        return self.pair.verify(token_ids, self.memory.target_cache, proposals.tree)

    def accept(self, proposals: Proposals, logits: torch.Tensor, features: torch.Tensor) -> Step:
        """What of the proposals stands."""
        verdict, wanted = self.verifier.accept(logits, self.rows, proposals), dict[str, Any]()
        if "scores" in self.request.keeping:
            wanted["scores"] = verdict.scores
        if "logits" in self.request.keeping:
            wanted["logits"] = logits if verdict.columns is None else logits[:, verdict.columns]
        return Step(proposals, features, verdict, wanted)

    def commit(self, step: Step) -> list[Block]:
        """Writes what a step gives each row, up to where its text stops, and keeps what it computed of that.

        Logits of either model that are NaN or infinite raise ValueError.
        """
        self.proposer.read_ahead()  # it was launched later: once it is read, this step is there too
        proposals, blocks, num_kept = step.proposals, [], []
        for place, (row, (num_accepted, token_ids)) in enumerate(zip(self.rows, step.read(), strict=True)):
            if row.is_done:  # it stays until a smaller class of shapes fits
                num_kept.append(0)
                continue
            if num_accepted < 0:
                raise _broken(self.pair, "drafter" if num_accepted == DRAFTER_BROKE else "target")
            is_prefill, kept = not row.new_ids, self._cut(row, token_ids)
            num_kept.append(len(kept))
            # Copied, because the next run of a graph overwrites what this one gave.
            wanted = {name: of[place, : len(kept)].to(torch.float32, copy=True) for name, of in step.wanted.items()}
            is_lookup, num_proposals = place in proposals.looked_up, proposals.token_ids.shape[1]
            blocks.append(Block(kept, num_proposals, num_accepted, is_prefill, row.index, is_lookup, **wanted))
        self._keep(step, num_kept)
        self.proposer.record(proposals, blocks)
        self.anchors = to_device(step.verdict.anchors, self.request.input_ids.device)
        live = [place for place, row in enumerate(self.rows) if not row.is_done]
        if len(live) < len(self.rows) and (not live or self.memory.keep_rows(self.pair, live)):
            self.rows = [self.rows[place] for place in live]
            self.anchors = chosen(self.anchors, 0, live)
            self.proposer.forget_ahead()
        return blocks

    def _keep(self, step: Step, num_kept: list[int]) -> None:
        """Counts what the step computed for text that stands."""
        memory, compiled, width = self.memory, self.pair.compiled, step.features.shape[1]
        if not width:
            return  # the prompt
        if step.whole is not None:
            memory.draft_cache.advance(memory.mark_read() if step.num_context is None else step.num_context)
            memory.target_cache.advance([width] * len(self.rows))
        memory.commit(step.features, num_kept, self.rows[0].new_ids, step.verdict.columns)
        if compiled is None:
            return
        seconds = clock() - self._began
        if compiled.is_active:
            compiled.note_compiled_step(seconds)
        else:
            self._num_steps += 1
            num_written = max(len(row.new_ids) for row in self.rows)
            compiled.weigh(seconds, (self.request.max_new_tokens / num_written - 1) * self._num_steps)

    @property
    def is_fused(self) -> bool:
        """Whether draft, verification and acceptance run as one compiled function."""
        compiled, request, proposer = self.pair.compiled, self.request, self.proposer
        if compiled is None or not compiled.is_active or request.keeping or not proposer.num_proposals:
            return False
        if request.num_looked_up or request.adaptive or request.draft_tree or proposer.noise is not None:
            return False  # the drafter's likeliest block is not always what is verified
        if not compiled.is_static:  # compiling takes long there: one function serves the default, three all the rest
            columns = self.pair.num_columns(self.pair.drafter.config.block_size)
            if self.verifier.noise is not None or proposer.num_proposals < columns - 1:
                return False
        return self.num_wanted >= proposer.num_proposals and self.verifier.is_fusible(request.input_ids.device)

    def launch(self) -> Step:
        """The first three verbs, as one function where that is possible."""
        if self.is_fused:
            with suppress(NotCompiledError):
                return self._launch_whole(None)
        proposals = self.propose()
        return self.accept(proposals, *self.verify(proposals))

    def _launch_whole(self, after: Step | None) -> Step:
        """A whole step `after` one, if any, that the host has not read.

        What can run only eagerly, or follows a step that says more on the host, raises NotCompiledError.
        """
        self._began = clock()
        memory, pair, request = self.memory, self.pair, self.request
        device, num_proposals = request.input_ids.device, self.proposer.num_proposals
        is_live = to_device(torch.tensor([not row.is_done for row in self.rows]), device)
        if after is None:
            self._make_room()
            context = memory.step_context(pair, request.block_size)
            state = context.state(self.anchors, memory.target_cache.lengths)
        elif after.whole is None:
            raise NotCompiledError
        else:
            before, was_live = after.whole
            written = after.verdict.num_written * was_live
            state = State(after.verdict.anchors, before.starts + written, after.features, written)
        sampler, drawn, num_candidates = self.verifier.sampler(device), None, 0
        if sampler is not None:
            width = num_proposals + 1
            uniforms = self.verifier.uniforms(self.rows, 2 * width, device)
            places = torch.arange(width, device=device).expand(len(state.anchors), -1)
            if after is not None:  # of which the host does not know how many tokens it wrote
                places = places + state.counts[:, None]
            drawn, num_candidates = (uniforms.gather(1, places), sampler.settings), sampler.num_candidates
        shape = Shape(request.block_size, num_proposals, num_candidates)
        verdict, proposed_ids, features = pair.step(state, memory.caches, shape, drawn, int(after is not None))
        num_context = memory.mark_read() if after is None else None
        return Step(Proposals(proposed_ids), features, verdict, {}, (state, is_live), num_context)

    def _make_room(self) -> None:
        longest, num_columns = max(self.memory.target_cache.lengths), self.pair.num_columns(self.request.block_size)
        self.memory.make_room(self.pair, longest + WIDTH_CLASSES[-1] + 4 * num_columns, list(range(len(self.rows))))

    def launch_ahead(self, step: Step) -> Step | None:
        """What of the next step can be launched before the host has read this one, on a device that computes meanwhile."""
        compiled, loan, request = self.pair.compiled, self.memory.loan, self.request
        if compiled is None or not compiled.is_static or request.keeping or step.verdict.columns is not None:
            return None
        # Another step must follow whatever this one gives, and need no other storage.
        width = step.features.shape[1]
        num_left = request.max_new_tokens - max(len(row.new_ids) for row in self.rows if not row.is_done) - width
        length = max(self.memory.target_cache.lengths) + 4 * self.pair.num_columns(request.block_size)
        if num_left <= 0 or self.num_wanted < 2 * width or loan is None or length > loan.capacity:
            return None
        with suppress(NotCompiledError):
            if self.is_fused:
                return self._launch_whole(step)
            self.proposer.propose_ahead(step, self.rows)
        return None


@torch.inference_mode(False)
@torch.no_grad()
def decode_blocks(decoder: Decoder) -> Iterator[Block]:
    """Proposes, verifies, accepts and commits a block for every row that is not done, until none is left."""
    yield from decoder.read_prompt()
    while decoder.rows:
        proposals = decoder.propose()
        logits, features = decoder.verify(proposals)
        verdict = decoder.accept(proposals, logits, features)
        yield from decoder.commit(verdict)


@torch.inference_mode(False)
@torch.no_grad()
def decode_ahead(decoder: Decoder) -> Iterator[Block]:
    """The same four verbs, the first three launched together and, on a device with a queue, one step before they are read.

    A step that was launched for rows that have left since is dropped: what the host holds is as of the step it has read.
    """
    yield from decoder.read_prompt()
    ahead: Step | None = None
    while decoder.rows:
        step, rows = ahead or decoder.launch(), decoder.rows
        ahead = decoder.launch_ahead(step)
        blocks = decoder.commit(step)
        if decoder.rows is not rows:
            ahead = None
        yield from blocks


def _packed(features: torch.Tensor, is_real: torch.Tensor, num_real: list[int]) -> Context:
    """Features [B, C, L * D] with each row's real columns first, as many as the longest has."""
    if min(num_real) < features.shape[1]:
        order = (~is_real).long().argsort(dim=1, stable=True)[:, : max(num_real)].to(features.device)
        features = features.gather(1, order[..., None].expand(-1, -1, features.shape[-1]))
    return Context(features, num_real)


def _num_live(rows: list[Row]) -> int:
    return sum(not row.is_done for row in rows)


def _broken(pair: Pair, name: str) -> ValueError:
    model = getattr(pair, name)
    kind, dtype = type(model).__name__, str(model.dtype).removeprefix("torch.")
    remedy = "load it in bfloat16 or float32, or check its weights"
    return ValueError(f"The {name}'s logits are NaN or infinite ({kind} in {dtype}): {remedy}.")
