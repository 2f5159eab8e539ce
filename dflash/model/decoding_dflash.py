"""The loop: propose a block, verify it in one forward of the target, accept a prefix, commit it.

`decode_blocks` is the loop. One compiled function may do its first three verbs, and on a device with a queue a step is launched
before the host has read the one before.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .cache_dflash import PreallocatedCache, chosen, to_device, to_host
from .proposals_dflash import DraftTree, Habits, LatencyCurve, Pacer, PromptLookup, TextSequence, clock, measured_curve
from .step_dflash import SEQUENCE_CLASSES, WIDTH_CLASSES, Context, Loan, NotCompiledError, Pair, Shape, State
from .verification_dflash import DRAFTER_BROKE, Proposals, Verdict, Verifier, place_uniforms


logger = logging.get_logger(__name__)

INITIAL_NEW_TOKENS = 1024  # initial room for new tokens; storage doubles when a text outgrows it
INACTIVE_STEPS = 32  # verify steps without an accepted proposal after which a warning is logged
TREE_BRANCHES = 8  # most probable tokens of a position that a tree considers
LARGEST_TREE = 64  # nodes of a draft tree whose size is chosen step by step, at most
SHORTEST_SIZE = 10  # bits of the length of a text; up to it forwards are taken to last equally long


@dataclass(frozen=True)
class Block:
    """The tokens that one forward of the target commits to one sequence of the batch, with their counts.

    Attributes:
        token_ids (`list[int]`): The committed tokens, cut where the text stops.
        num_proposals (`int`): Number of verified proposals; 0 for the prompt's block.
        num_accepted (`int`): Number of accepted proposals, before the cut.
        is_prefill (`bool`, defaults to `False`): Whether the token comes from the prompt's forward, not from a verify step.
        sequence (`int`, defaults to 0): Index of the sequence in the batch.
        is_lookup (`bool`, defaults to `False`): Whether proposals come from the text itself (`prompt_lookup_num_tokens`).
        scores (`torch.Tensor` of shape `(tokens, V)`, *optional*): Processed scores of the tokens, with `output_scores=True`.
        logits (`torch.Tensor` of shape `(tokens, V)`, *optional*): The target's logits, with `output_logits=True`.

    Example:
        >>> blocks = list(generate_blocks(drafter, target, input_ids))
        >>> tau = mean(block.acceptance_length for block in blocks if not block.is_prefill)
    """

    token_ids: list[int]
    num_proposals: int
    num_accepted: int
    is_prefill: bool = False
    sequence: int = 0
    is_lookup: bool = False
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    @property
    def acceptance_length(self) -> int:
        """Tokens of the verify step before the cut: the accepted proposals and one of the target's own."""
        return self.num_accepted + 1


class Conversation:
    """The caches of one text, kept from call to call, so that a shared beginning is computed once.

    Pass the whole text each time. The longest prefix that the caches hold is reused; the new text does not depend on it.

    Attributes:
        token_ids (`list[int]`): The text that the caches hold.
        num_reused (`int`): Number of tokens of the last prompt that were reused.

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
        self.draft_window: tuple[int, int] | None = None  # of new caches
        self.waiting: list[Context] = []  # context that the drafter has not read, oldest first
        self.loan: Loan | None = None  # of the caches, if a compiled pair has lent them
        self._num_read = 0  # tokens whose context the drafter's cache holds
        self._models: tuple[Any, Any] | None = None
        self._return: Any = None

    @property
    def caches(self) -> tuple[PreallocatedCache, PreallocatedCache]:
        """The target's and the drafter's cache."""
        return self.target_cache, self.draft_cache

    def check(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        """Raises ValueError if the caches belong to other models."""
        if self._models is not None and (self._models[0] is not target or self._models[1] is not drafter):
            name = type(self._models[0]).__name__
            raise ValueError(f"The conversation was begun with another {name} or another drafter: start a new one.")

    def open(self, pair: Pair, token_ids: torch.Tensor, max_new_tokens: int) -> int:
        """Prepares the caches for token_ids [B, S] and new tokens; returns how many of them are reused, at most S - 1."""
        self.num_reused = 0
        if len(token_ids) == 1:
            both = zip(self.token_ids, token_ids[0, :-1].tolist(), strict=False)
            num_shared = sum(1 for _ in takewhile(lambda ids: ids[0] == ids[1], both))
            self.num_reused = self.target_cache.truncate(num_shared) if num_shared else 0
        self._models, self.token_ids = (pair.target, pair.drafter), self.token_ids[: self.num_reused]
        length = token_ids.shape[1] + min(max_new_tokens, INITIAL_NEW_TOKENS) + 4 * pair.drafter.config.block_size
        if self.num_reused:
            self._num_read = min(self._num_read, self.num_reused)
            self.draft_cache.truncate(self._num_read)
            num_waiting = self.num_reused - self._num_read
            self.waiting = [self.next_context().part(0, num_waiting)] if num_waiting else []
            self.make_room(pair, length, [0])
        else:
            self.close(has_failed=False)
            self._num_read = 0
            self._allocate(pair, len(token_ids), length)
        return self.num_reused

    def _allocate(self, pair: Pair, num_sequences: int, length: int) -> None:
        """Makes new caches, or on devices with few shapes takes lent ones."""
        compiled = pair.compiled
        if compiled is not None and compiled.is_static and num_sequences <= SEQUENCE_CLASSES[-1]:
            self.loan = compiled.lend(pair, num_sequences, length)
            self.target_cache, self.draft_cache = self.loan.target_cache, self.loan.draft_cache
            self._return = weakref.finalize(self, compiled.take_back, self.loan)
            self._return.atexit = False
        else:
            self.target_cache = pair.new_cache(length, num_sequences)
            length = length if self.draft_window is None else sum(self.draft_window)
            self.draft_cache = PreallocatedCache(pair.drafter.config.num_hidden_layers, length, num_sequences)
        self.draft_cache.window = self.draft_window

    def close(self, has_failed: bool) -> None:
        """Returns lent caches. After a failure they are dropped, because they may contain NaN."""
        if self._return is not None:
            (self._return.detach if has_failed else self._return)()
        self._return = self.loan = None
        self.token_ids, self.waiting = [], []

    def make_room(self, pair: Pair, length: int, sequences: list[int]) -> None:
        """Moves `sequences` of lent caches to the smallest size class that fits them and `length` tokens."""
        compiled, loan = pair.compiled, self.loan
        if compiled is None or not compiled.is_static or len(sequences) > SEQUENCE_CLASSES[-1]:
            return
        size = next(size for size in SEQUENCE_CLASSES if size >= len(sequences))
        if loan is not None and loan.num_sequences == size and loan.capacity >= length:
            return
        old_caches, give_back = self.caches, self._return
        self._allocate(pair, len(sequences), length if loan is None else max(length, loan.capacity))
        for mine, old in zip(self.caches, old_caches, strict=True):
            mine.copy_sequences(old, sequences)
        if give_back is not None:
            give_back()

    def keep_sequences(self, pair: Pair, sequences: list[int]) -> bool:
        """Drops the other sequences of the batch, in lent caches only if a smaller class fits; returns whether it did."""
        if self.loan is not None and pair.compiled is not None and pair.compiled.is_static:
            if not any(len(sequences) <= size < self.loan.num_sequences for size in SEQUENCE_CLASSES):
                return False
            self.make_room(pair, 0, sequences)
        else:
            self.target_cache.keep_sequences(sequences)
            self.draft_cache.keep_sequences(sequences)
        self.waiting = [context.of_sequences(sequences) for context in self.waiting]
        return True

    def commit(self, features: torch.Tensor, num_kept: list[int], text: list[int], columns: list[int] | None) -> None:
        """Keeps each sequence's first `num_kept` columns of a step, or of a tree's `columns`; `text`: the first's new tokens."""
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
        """The context that the drafter has not read, as one."""
        if not self.waiting:
            raise RuntimeError("The drafter has no new context: it has read all features of the target.")
        if len(self.waiting) > 1:
            features = torch.cat([part.features for part in self.waiting], dim=1)
            is_real = torch.cat([part.is_real for part in self.waiting], dim=1)
            num_real = [sum(counts) for counts in zip(*(part.num_real for part in self.waiting), strict=True)]
            self.waiting = [_packed(features, is_real, num_real)]
        return self.waiting[0]

    def step_context(self, pair: Pair, most: float = float("inf")) -> Context:
        """`next_context` of at most `most` columns. The drafter reads a longer one now, without a block, and by its window."""
        context, cache = self.next_context(), self.draft_cache
        num_columns = context.features.shape[1]
        size = num_columns if cache.window is None else cache.window[1]
        cache.drop()
        if num_columns > min(most, size) or (most < float("inf") and not any(cache.lengths)):
            for begin in range(0, num_columns, size):
                pair.absorb(context.part(begin, begin + size), cache)
                cache.drop()
            self.mark_read()
            self.waiting = [context.part(0, 0)]
        return self.waiting[0]

    def mark_read(self) -> list[int]:
        """Marks the context as read by the drafter; returns its length for each sequence."""
        num_real = self.waiting.pop().num_real
        self._num_read += num_real[0]
        return num_real


class Proposer:
    """Proposes tokens for each verify step."""

    def __init__(self, pair: Pair, conversation: Conversation, request: Any, verifier: Verifier) -> None:
        self.pair, self.conversation, self.request, self.verifier = pair, conversation, request, verifier
        has_head = pair.drafter.causal_head(pair.embed) is not None  # others propose their argmax
        # Not with adaptive widths: choosing by the probability of drawn tokens would bias them.
        draws = has_head and verifier.verification != "match" and not request.adaptive
        self.uniforms_of = verifier.uniforms_of if draws else None
        self._most: Any = float("inf") if request.max_draft_tokens is None else request.max_draft_tokens
        self.num_proposals: Any = min(pair.num_columns(request.block_size) - 1, self._most)  # of a whole block
        self._num_nodes: Any = min(request.draft_tree, self._most)
        lookup = partial(PromptLookup, request.num_looked_up, request.ngram_size)
        self._lookups: dict[int, PromptLookup] = defaultdict(lookup)  # by index of the sequence
        self._pacer: Pacer | None = None
        first = 0 if pair.drafter.config.sample_from_anchor else 1
        self._proposing = slice(first, first + self.num_proposals)  # of a block's positions
        self._num_steps = self._num_accepted = self._size = 0

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, num_wanted: int) -> Proposals:
        """At most `num_wanted` tokens, or a tree of that depth, after the anchors [B, 1]."""
        if not (num_wanted := min(num_wanted, self._most)):
            return Proposals(anchors[:, :0])
        lookups, found = self.lookups(sequences), self.found(sequences)
        if len(found) == _num_live(sequences):  # the drafter need not run
            proposals = Proposals(anchors[:, :0])
        else:
            proposals = self._propose_drafts(sequences, anchors, min(num_wanted, self.num_proposals))
            others = lookups.keys() - found if proposals.tree is None else ()
            drafted = to_host(proposals.token_ids)() if others else []
            found |= {index: ids for index in others if (ids := lookups[index].propose(drafted[index]))}
        if not found:
            return proposals
        if 2 * len(found) < _num_live(sequences):  # too few to verify more columns of all
            num_wanted = min(num_wanted, self.num_proposals)
        proposals = proposals if proposals.token_ids.shape[1] else Proposals(anchors)
        return proposals.with_lookups(found).first(num_wanted)

    def found(self, sequences: list[TextSequence]) -> dict[int, tuple[int, list[int]]]:
        """What followed the last tokens of the sequences earlier, by index, as `PromptLookup.propose` gives it."""
        return {i: ids for i, lookup in self.lookups(sequences).items() if (ids := lookup.propose())}

    def lookups(self, sequences: list[TextSequence]) -> dict[int, PromptLookup]:
        """The lookups of the sequences whose text has repeated itself lately, by index."""
        if not self.request.num_looked_up:
            return {}
        live = [(i, self._lookups[one.index], one) for i, one in enumerate(sequences) if not one.is_done]
        return {i: lookup for i, lookup, one in live if lookup.read(one)}

    @property
    def can_be_whole(self) -> bool:
        """Whether draft, verification and acceptance can run as one compiled function."""
        compiled, request, verifier = self.pair.compiled, self.request, self.verifier
        if compiled is None or not (compiled.is_active and verifier.is_fusible and self.num_proposals):
            return False
        # Compiling is slow on a CPU: one function serves the default, three serve the rest.
        num_columns = self.pair.num_columns(self.pair.drafter.config.block_size)
        is_default = verifier.uniforms_of is None and self.num_proposals == num_columns - 1
        return not (request.keeping or self.uniforms_of) and (compiled.is_static or is_default)

    @property
    def shape(self) -> Shape:
        """The static sizes of a whole step."""
        sampler = self.verifier.sampler
        return Shape(self.request.block_size, self.num_proposals, sampler.num_candidates if sampler else 0)

    def num_whole(self, sequences: list[TextSequence], num_wanted: int) -> float:
        """How many of the next steps run as one compiled function, without a choice among proposals."""
        if not self.can_be_whole or num_wanted < self.num_proposals:
            return 0
        if not self.request.adaptive:
            return 0 if self.request.draft_tree else float("inf")
        return 0 if self._pacer is None else self._pacer.num_whole(_num_live(sequences))

    def _propose_drafts(self, sequences: list[TextSequence], anchors: torch.Tensor, num_wanted: int) -> Proposals:
        """The drafter's proposals; none while they do not pay."""
        if self._pacer is not None and not self._pacer.wants_draft(_num_live(sequences)):
            return Proposals(anchors[:, :0])
        proposing = self._draft(sequences, anchors)
        if self.request.draft_tree and (self._pacer is None or self._pacer.habits.trees.is_over()):
            return self._propose_tree(proposing, anchors, num_wanted)
        options: dict[str, Any] = {"embed": self.pair.embed, "with_confidences": self._pacer is not None}
        if self.uniforms_of is not None:
            uniforms = self.uniforms_of.fresh(sequences, proposing.shape[1], anchors.device)
            options["drawn"] = self.request.temperature, uniforms
        proposals: Proposals = self.pair.drafter.propose(proposing, anchors, self.pair.head, **options)
        if self._pacer is not None and proposals.confidences is not None:
            survival = to_host(proposals.confidences.cumprod(dim=1))()
            num_wanted = self._pacer.choose([sum(chances) for chances in zip(*survival, strict=True)][:num_wanted])[0]
        return proposals.first(num_wanted)

    def record(self, proposals: Proposals, blocks: Sequence[Block], is_whole: bool) -> None:
        """Adds the blocks of a step to the lookup, pacing and acceptance statistics; warns if drafts are never accepted."""
        num_accepted = sum(block.num_accepted for block in blocks)
        self._num_accepted += num_accepted
        for block in blocks:
            if block.sequence in self._lookups:
                self._lookups[block.sequence].record(block.num_accepted)
        num_proposals = proposals.token_ids.shape[1]
        if self._pacer is not None and proposals.looked_up:
            self._pacer.begin_step()  # says nothing about drafts
        elif self._pacer is not None:
            self._pacer.record(num_proposals, num_accepted, is_whole)
        self._num_steps += num_proposals > 0
        if num_proposals and self._num_steps == INACTIVE_STEPS and not self._num_accepted:
            drafter, target = self.pair.drafter, self.pair.target
            logger.warning(
                f"{INACTIVE_STEPS} blocks were verified and not one drafted token was accepted: the text is right, but "
                f"nothing is gained. Likely causes: {drafter.config._name_or_path or 'the drafter'} was trained for another "
                f"target than {target.config._name_or_path or type(target).__name__}, the prompt does not use the chat template "
                "it was trained with (thinking on or off), or its target_layer_ids or mask_token_id are wrong."
            )

    def _draft(self, sequences: list[TextSequence], anchors: torch.Tensor) -> torch.Tensor:
        """Runs the drafter once; its last hidden states at the proposals [B, n, D]. Its cache then holds only context."""
        request, pair, conversation = self.request, self.pair, self.conversation
        most = pair.num_columns(request.block_size) if pair.compiled and pair.compiled.is_active else float("inf")
        context = conversation.step_context(pair, most)
        hidden_states = pair.draft(anchors, context, conversation.draft_cache, request.block_size)
        conversation.mark_read()
        self.pace(sequences, anchors)
        return hidden_states[:, self._proposing]

    def pace(self, sequences: list[TextSequence], anchors: torch.Tensor | None) -> None:
        """Takes the curve for the length of the text, which is measured with anchors [B, 1] while both caches hold the text."""
        size = max(SHORTEST_SIZE, max(self.conversation.target_cache.lengths).bit_length())
        given = self.request.latency_curve
        if not self.request.adaptive or (self._pacer is not None and (given is not None or size <= self._size)):
            return
        widths = WIDTH_CLASSES if self.pair.compiled and self.pair.compiled.is_static else ()
        if (curve := given or self._curve(anchors, widths, size)) is not None:
            self._size, self._pacer = size, Pacer(curve, _num_live(sequences), Habits.of(self.pair.drafter), widths)

    def _propose_tree(self, proposing: torch.Tensor, anchors: torch.Tensor, num_wanted: int) -> Proposals:
        """The tree of the drafter's best paths, or its chain, if the pacer prefers that."""
        tree, pacer = self._grow(proposing[:, :num_wanted], anchors), self._pacer
        if pacer is not None:
            chain = tree.chain()
            count, is_tree = pacer.choose([tree.probabilities[i] for i in chain], tree.probabilities)
            if not is_tree:
                token_ids = torch.tensor([[tree.token_ids[i] for i in chain[:count]]], dtype=torch.long)
                return Proposals(to_device(token_ids, anchors.device))
            tree = tree.first(count)
        return Proposals(to_device(torch.tensor([tree.token_ids]), anchors.device), tree=tree)

    def _grow(self, proposing: torch.Tensor, anchors: torch.Tensor) -> DraftTree:
        """The tree of a single sequence's hidden states [1, n, D], grown on the host."""
        pair, most = self.pair, min(self._num_nodes, TREE_BRANCHES)
        found = pair.drafter.branches(proposing, anchors, pair.head, self.request.temperature, most, pair.embed)
        numbers = to_host(torch.cat([found[0], found[1][:, None]], dim=1))()  # one copy; float32 holds ids below 2**24
        if any(value != value for of_position in numbers for value in of_position[0]):
            raise _broken(pair, "drafter")
        token_ids = [list(map(int, of_position.pop())) for of_position in numbers]
        return DraftTree.grown(numbers, token_ids, self._num_nodes)

    def _curve(self, anchors: Any, classes: Sequence[int], size: int) -> LatencyCurve | None:
        """The pair's curve for texts of this `size`, over widths of these `classes`, or over powers of two and the widest."""
        pair, block_size, draft_tree = self.pair, self.request.block_size, self.request.draft_tree
        target_cache, draft_cache = self.conversation.caches
        num_sequences, length = len(target_cache.lengths), max(target_cache.lengths)
        weight = pair.drafter.get_parameter("norm.weight")  # [D]

        def verify(width: int) -> torch.Tensor:
            logits, _ = pair.verify(anchors.expand(-1, width), target_cache)
            target_cache.rollback([width] * num_sequences)
            return logits.argmax(dim=-1)

        def verify_tree() -> torch.Tensor:
            tree = self._grow(weight.expand(1, block_size - 1, -1), anchors).first(widths[-1] - 1)
            ids = torch.cat([anchors, anchors.new_tensor([tree.token_ids])], dim=1)
            logits, _ = pair.verify(ids, target_cache, tree)
            target_cache.keep_columns(ids.shape[1], [])
            return logits.argmax(dim=-1)

        def context() -> Context:
            count = min(block_size // 2 + 1, max(1, length))
            size = len(pair.drafter.config.target_layer_ids) * len(weight)
            return Context(weight.new_zeros(num_sequences, count, size), [count] * num_sequences)

        def draft() -> torch.Tensor:
            read = context()
            states = pair.draft(anchors, read, draft_cache, block_size)[:, self._proposing]
            draft_cache.rollback(read.num_real)
            proposals = pair.drafter.propose(states, anchors, pair.head, with_confidences=True, embed=pair.embed)
            return proposals.token_ids if proposals.confidences is None else proposals.confidences

        def whole() -> torch.Tensor:
            read, sampler, shape = context(), self.verifier.sampler, self.shape
            # After the text, where nothing is kept.
            state = read.state(anchors, [held + read.num_real[0] for held in target_cache.lengths])
            zeros = torch.zeros(num_sequences, 1 + shape.num_proposals, dtype=torch.float64, device="cpu")
            drawn = None if sampler is None else (place_uniforms(zeros, anchors.device), sampler.settings)
            return pair.step(state, self.conversation.caches, shape, drawn, 0)[0].token_ids

        widest = 1 + (draft_tree or self.num_proposals)
        widths = [width for width in classes or (1, 2, 4, 8, 16, 32, 64, 128) if width < widest]
        widths.append(next((width for width in classes if width >= widest), widest))
        is_compiled = bool(pair.compiled and pair.compiled.is_active)
        forwards = {"draft_ms": draft, **({"tree_ms": verify_tree} if draft_tree else {})}
        with suppress(NotCompiledError):  # of a step that is not compiled yet, and not timed
            if self.can_be_whole and (anchors is None or len(whole())):
                forwards["whole_ms"] = whole
        kind = is_compiled, draft_cache.window, self.verifier.sampler is None, tuple(forwards)
        setting, timed = (num_sequences, size, block_size, *kind), None if anchors is None else forwards
        return measured_curve((pair.target, pair.drafter), setting, widths, verify, timed)


@dataclass
class Step:
    """A launched forward of the target, and its verdict, which is being copied to the host."""

    proposals: Proposals
    features: torch.Tensor  # of all columns, [B, 1 + n, L * D]
    verdict: Verdict
    wanted: dict[str, Any]  # "scores" and "logits" of the tokens, [B, 1 + n, V], if requested
    whole: tuple[State, torch.Tensor] | None = None  # of a whole step: the state before it, which sequences were live

    def __post_init__(self) -> None:
        self._read = to_host(torch.cat([self.verdict.num_accepted[:, None], self.verdict.token_ids], dim=1))

    def read(self) -> list[tuple[int, list[int]]]:
        """For each sequence the accepted proposals and the committed tokens. The only place where the host waits for a step."""
        return [(num_accepted, token_ids[: num_accepted + 1]) for num_accepted, *token_ids in self._read()]


class Decoder:
    """Propose, verify, accept, commit, for one request. The host knows the last step that it has read. `cut`: `make_cutter`."""

    def __init__(self, request: Any, pair: Pair, verifier: Verifier, cut: Any, conversation: Conversation) -> None:
        self.request, self.pair, self.verifier = request, pair, verifier
        self.conversation, self._cut = conversation, cut
        self.proposer = Proposer(pair, conversation, request, verifier)
        self.sequences: list[TextSequence] = []
        self.anchors = torch.empty(0)
        self._ahead: Step | None = None  # launched before the host has read the last one
        self._began, self._num_steps = 0.0, 0

    @property
    def num_wanted(self) -> int:
        """Number of proposals that fit into the target's positions. Blocks are not shortened at the end of a text."""
        compiled, request = self.pair.compiled, self.request
        is_eager = compiled is None or not compiled.is_active
        if is_eager and request.max_new_tokens - min(len(sequence.new_ids) for sequence in self.sequences) == 1:
            return 0  # the last token needs no drafter
        longest = max(len(one.prompt_ids) + len(one.new_ids) for one in self.sequences if not one.is_done)
        if longest > request.max_length:
            remedy = "lower max_new_tokens or shorten the prompt"
            logger.warning_once(f"The text is longer than the target's {request.max_length} positions: {remedy}.")
        return max(0, request.max_length - longest - 1)

    def read_prompt(self) -> list[Block]:
        """Runs the part of the prompts that the caches do not hold, and commits the first tokens."""
        request, conversation = self.request, self.conversation
        token_ids, mask = request.input_ids, request.attention_mask
        self.sequences = [TextSequence(index, prompt_ids) for index, prompt_ids in enumerate(token_ids)]
        is_real = torch.ones_like(token_ids, dtype=torch.bool) if mask is None else mask.bool()
        if mask is not None and len(token_ids) == 1:  # the same prompt without its masked tokens
            token_ids, is_real = token_ids[is_real][None], is_real[is_real][None]
        num_held, width = conversation.open(self.pair, token_ids, request.max_new_tokens), token_ids.shape[1]
        chunk_size = request.chunk_size or width
        for begin in range(num_held, width, chunk_size):
            columns = slice(begin, begin + chunk_size)
            chunk, is_token = token_ids[:, columns], is_real[:, columns]
            num_real = is_token.sum(dim=1).tolist()
            logits, features = self.pair.forward(chunk, conversation.target_cache, 1, is_token, num_real)
            conversation.waiting.append(_packed(features, is_token, num_real))
            if conversation.draft_cache.window is not None:
                conversation.step_context(self.pair)
            conversation.token_ids += chunk[0].tolist()
        # Without features: they are in `waiting` already.
        return self.commit(self.accept(Proposals(request.input_ids[:, :0]), logits, features[:, :0]))

    def propose(self) -> Proposals:
        """The proposals of the next step."""
        return self.proposer.propose(self.sequences, self.anchors, self.num_wanted)

    def verify(self, proposals: Proposals) -> tuple[torch.Tensor, torch.Tensor]:
        """The target's logits and context features of the anchors and proposals."""
        token_ids = torch.cat([self.anchors, proposals.token_ids], dim=1)  # [B, 1 + n]
        return self.pair.verify(token_ids, self.conversation.target_cache, proposals.tree)

    def accept(self, proposals: Proposals, logits: torch.Tensor, features: torch.Tensor) -> Step:
        """Accepts proposals by the target's logits."""
        verdict, wanted = self.verifier.accept(logits, self.sequences, proposals), dict[str, Any]()
        if "scores" in self.request.keeping:
            wanted["scores"] = verdict.scores
        if "logits" in self.request.keeping:
            wanted["logits"] = logits if verdict.columns is None else logits[:, verdict.columns]
        return Step(proposals, features, verdict, wanted)

    def commit(self, step: Step) -> list[Block]:
        """Appends a step's tokens, up to where texts stop, and rolls both caches back; ValueError for logits not finite."""
        proposals, blocks, num_kept = step.proposals, [], []
        for index, (sequence, (num_accepted, token_ids)) in enumerate(zip(self.sequences, step.read(), strict=True)):
            if sequence.is_done:  # kept until a smaller class of shapes fits
                num_kept.append(0)
                continue
            if num_accepted < 0:
                raise _broken(self.pair, "drafter" if num_accepted == DRAFTER_BROKE else "target")
            is_prefill, kept = not sequence.new_ids, self._cut(sequence, token_ids)
            num_kept.append(len(kept))
            # Copied, because the next run of the graph overwrites its outputs.
            wanted = {name: of[index, : len(kept)].to(torch.float32, copy=True) for name, of in step.wanted.items()}
            is_lookup, num_proposals = index in proposals.looked_up, proposals.token_ids.shape[1]
            blocks.append(Block(kept, num_proposals, num_accepted, is_prefill, sequence.index, is_lookup, **wanted))
        self._keep(step, num_kept)
        self.proposer.record(proposals, blocks, step.whole is not None)
        self.anchors = to_device(step.verdict.anchors, self.request.input_ids.device)
        live = [index for index, sequence in enumerate(self.sequences) if not sequence.is_done]
        if len(live) < len(self.sequences) and (not live or self.conversation.keep_sequences(self.pair, live)):
            self.sequences = [self.sequences[index] for index in live]
            self.anchors, self._ahead = chosen(self.anchors, 0, live), None
        return blocks

    def _keep(self, step: Step, num_kept: list[int]) -> None:
        """Commits the step to the caches and updates the clock of "auto" compilation."""
        conversation, compiled, width = self.conversation, self.pair.compiled, step.features.shape[1]
        if not width:
            return  # the prompt
        if step.whole is not None:
            conversation.draft_cache.advance(conversation.mark_read())
            conversation.target_cache.advance([width] * len(self.sequences))
        conversation.commit(step.features, num_kept, self.sequences[0].new_ids, step.verdict.columns)
        if compiled is not None:
            self._num_steps += 1
            num_written = max(len(sequence.new_ids) for sequence in self.sequences)
            num_left = (self.request.max_new_tokens / num_written - 1) * self._num_steps
            compiled.weigh(clock() - self._began, num_left)

    def launched(self) -> Step | None:
        """The step that was launched ahead, or one launched now as one function; `None`: it has to run verb by verb."""
        step, self._ahead = self._ahead, None
        if step is None:
            self._began = clock()
            length = max(self.conversation.target_cache.lengths) + WIDTH_CLASSES[-1]
            length += 4 * self.pair.num_columns(self.request.block_size)
            self.conversation.make_room(self.pair, length, list(range(len(self.sequences))))
            self.proposer.pace(self.sequences, None)
            if self.proposer.num_whole(self.sequences, self.num_wanted) and not self.proposer.found(self.sequences):
                with suppress(NotCompiledError):
                    step = self._launch_whole(None)
        return step

    def _launch_whole(self, after: Step | None) -> Step:
        """Launches a whole step, possibly `after` one that the host has not read; NotCompiledError if that cannot be."""
        self._began = clock()
        conversation, pair, device = self.conversation, self.pair, self.request.input_ids.device
        is_live = to_device(torch.tensor([not sequence.is_done for sequence in self.sequences]), device)
        if after is None:
            context = conversation.step_context(pair, pair.num_columns(self.request.block_size))
            state = context.state(self.anchors, conversation.target_cache.lengths)
        elif after.whole is None:
            raise NotCompiledError
        else:
            before, was_live = after.whole
            written = after.verdict.num_written * was_live
            state = State(after.verdict.anchors, before.starts + written, after.features, written)
        sampler, shape, drawn = self.verifier.sampler, self.proposer.shape, None
        if sampler is not None:
            width = shape.num_proposals + 1
            uniforms = self.verifier.uniforms(self.sequences, range(2 * width), device)
            positions = torch.arange(width, device=device).expand(len(state.anchors), -1)
            if after is not None:  # whose number of tokens is known only on the device
                positions = positions + state.counts[:, None]
            drawn = uniforms.gather(1, positions), sampler.settings
        verdict, proposed_ids, features = pair.step(state, conversation.caches, shape, drawn, int(after is not None))
        return Step(Proposals(proposed_ids), features, verdict, {}, (state, is_live))

    def launch_ahead(self, step: Step) -> None:
        """Launches the next step before the host has read this one, on a device with a queue."""
        compiled, loan, request = self.pair.compiled, self.conversation.loan, self.request
        if compiled is None or not compiled.is_static or request.keeping or step.verdict.columns is not None:
            return
        # Only if another step follows in any case, in the same storage, and without keys to drop before it.
        width, (target_cache, draft_cache) = step.features.shape[1], self.conversation.caches
        num_left = request.max_new_tokens - max(len(one.new_ids) for one in self.sequences if not one.is_done) - width
        length = max(target_cache.lengths) + 4 * self.pair.num_columns(request.block_size)
        has_room = loan is not None and length <= loan.capacity and not any(draft_cache.excess)
        if num_left <= 0 or self.num_wanted < 2 * width or not has_room or self.proposer.lookups(self.sequences):
            return
        if self.proposer.num_whole(self.sequences, self.num_wanted) > 1:  # this step counts, too
            with suppress(NotCompiledError):
                self._ahead = self._launch_whole(step)


@torch.inference_mode(False)
@torch.no_grad()
def decode_blocks(decoder: Decoder) -> Iterator[Block]:
    """Proposes, verifies, accepts and commits blocks until every sequence is done."""
    yield from decoder.read_prompt()
    while decoder.sequences:
        step = decoder.launched()
        if step is None:
            proposals = decoder.propose()
            logits, features = decoder.verify(proposals)
            step = decoder.accept(proposals, logits, features)
        decoder.launch_ahead(step)
        yield from decoder.commit(step)


def _packed(features: torch.Tensor, is_real: torch.Tensor, num_real: list[int]) -> Context:
    """Features [B, C, L * D] with each sequence's valid columns first, cut to the longest."""
    if min(num_real) < features.shape[1]:
        order = (~is_real).long().argsort(dim=1, stable=True)[:, : max(num_real)].to(features.device)
        features = features.gather(1, order[..., None].expand(-1, -1, features.shape[-1]))
    return Context(features, num_real)


def _num_live(sequences: list[TextSequence]) -> int:
    return sum(not sequence.is_done for sequence in sequences)


def _broken(pair: Pair, name: str) -> ValueError:
    model = getattr(pair, name)
    kind, dtype = type(model).__name__, str(model.dtype).removeprefix("torch.")
    remedy = "load it in bfloat16 or float32, or check its weights"
    return ValueError(f"The {name}'s logits are NaN or infinite ({kind} in {dtype}): {remedy}.")
