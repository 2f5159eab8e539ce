"""Draft trees: several continuations of one text, verified in one forward of the target (DDTree, arXiv 2604.12989).

Each node sees only the text and its ancestors. Its logits are those of plain decoding after its path, so following the
target's choices down the tree is exact. A tree is grown best first: its first n nodes are the n most probable paths.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from dflash.model.acceptance_dflash import DRAFTER_BROKE, TARGET_BROKE, Acceptance, Acceptor, Proposals
from dflash.model.attention_dflash import step_attention
from dflash.model.cache_dflash import PreallocatedCache, RunningState, chosen, in_this_thread, to_device, to_host
from dflash.model.drafting_dflash import DraftProposer
from dflash.model.heads_dflash import CausalHead
from dflash.model.sequences_dflash import TextSequence
from dflash.model.targets_dflash import Target, masked_forward


TREE_BRANCHES = 8  # most probable tokens of a position that a tree considers


# -- a tree


@dataclass(frozen=True)
class DraftTree:
    """A tree of proposals. Column 0 is the anchor; nodes are columns 1, 2, …, each after its parent."""

    token_ids: list[int]
    parents: list[int]  # columns

    @classmethod
    def grown(cls, positions: Sequence[Sequence[Sequence[float]]], budget: int) -> DraftTree:
        """The `budget` most probable paths, best first (DDTree, algorithm 1).

        `positions[p]` holds the tokens of position p, then a row of their log-probabilities after each token of the position
        before, or a single row, which is right after every token. The anchor counts as the first token before position 0.
        """
        tree = cls([], [])
        # Candidates: negative log-probability of a path, its parent's column, its length, and index and id of its last token.
        frontier = [(0.0, 0, 0, 0, 0.0)]
        while frontier and len(tree.token_ids) < budget:
            cost, parent, depth, index, token_id = heapq.heappop(frontier)
            if cost == math.inf:  # outside the drafter's vocabulary
                break
            if depth > 0:
                tree.token_ids.append(int(token_id))
                tree.parents.append(parent)
            if depth == len(positions):
                continue
            column = len(tree.token_ids)
            next_ids, *rows = positions[depth]
            log_probs = rows[index % len(rows)]
            for child, log_prob in enumerate(log_probs):
                path_cost = cost - log_prob
                candidate = (path_cost, column, depth + 1, child, next_ids[child])
                heapq.heappush(frontier, candidate)
        return tree

    @cached_property
    def paths(self) -> list[list[int]]:
        """The columns from the anchor to each column."""
        paths = [[0]]
        for column, parent in enumerate(self.parents, start=1):
            paths.append([*paths[parent], column])
        return paths

    @cached_property
    def depths(self) -> list[int]:
        """Distance of each column from the anchor, in tokens."""
        return [len(path) - 1 for path in self.paths]

    @cached_property
    def columns(self) -> dict[tuple[int, int], int]:
        """The column of each node, by its parent's column and its token."""
        keys = zip(self.parents, self.token_ids, strict=True)
        return {key: column for column, key in enumerate(keys, start=1)}

    def walk(self, token_after: Callable[[int], int]) -> list[int]:
        """The columns from the anchor on, as far as `token_after` a column is one of its children."""
        columns = []
        column: int | None = 0
        while column is not None:
            columns.append(column)
            token_id = token_after(column)
            column = self.columns.get((column, token_id))
        return columns

    @cached_property
    def padded_paths(self) -> torch.Tensor:
        """`paths` as a tensor [S, D], padded with column 0."""
        paths = [torch.tensor(path) for path in self.paths]
        return pad_sequence(paths, batch_first=True)

    def ancestors(self) -> torch.Tensor:
        """Which columns each column sees, itself included, bool [S, S]."""
        num_columns = len(self.paths)
        sees = torch.zeros(num_columns, num_columns, dtype=torch.bool)
        return sees.scatter(1, self.padded_paths, True)


@dataclass(frozen=True)
class TreeAcceptance(Acceptance):
    """The path of a tree that is accepted."""

    columns: list[int] = field(kw_only=True)  # the anchor's and those of the accepted nodes; token i follows column i

    def before_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """As `Acceptance.before_tokens`."""
        return chosen(states, 1, self.columns)


@dataclass(frozen=True)
class TreeProposals(Proposals):
    """Proposals for a single sequence as nodes of a tree: token_ids [1, n] are those of its nodes."""

    tree: DraftTree = field(kw_only=True)

    @property
    def depths(self) -> Sequence[int]:
        """As `Proposals.depths`."""
        return self.tree.depths

    def accept_match(self, choices: torch.Tensor, best: torch.Tensor) -> TreeAcceptance:
        """Follows a single sequence's choices [1, S], each after the path to its column, down the tree.

        `best` [1, S] holds a number of each column that is not finite where its logits are not. Waits for the device.
        """
        choices = torch.where(best.isfinite(), choices, TARGET_BROKE)
        choice_of = to_host(choices[0])()
        columns = self.tree.walk(choice_of.__getitem__)
        token_ids = [choice_of[column] for column in columns]
        num_accepted = len(columns) - 1
        if token_ids[-1] == TARGET_BROKE:
            num_accepted = TARGET_BROKE
        if not self.is_finite:
            num_accepted = DRAFTER_BROKE
        return TreeAcceptance(
            num_accepted=torch.tensor([num_accepted]),
            token_ids=torch.tensor([token_ids]),
            columns=columns,
        )


# -- growing


def scores_after_each(
    head: CausalHead, hidden_states: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [n, K, K] of a single block's candidates [n, K] after each one of the position before, or the anchor [1, 1].

    Of the tokens before that one, the state knows those of the best path.
    """
    path = head.choose_path(hidden_states, logits, anchors)
    candidate_ids = path.candidate_ids[0]
    top_k = head.top_k
    anchor = anchors.to(candidate_ids.device)
    before = torch.cat([anchor.expand(1, top_k), candidate_ids[:-1]])  # [n, K]
    positions = torch.arange(len(before), device=before.device)
    of_positions = (
        path.states[0],
        head.features(hidden_states[0]),
        logits[0].to(hidden_states).gather(-1, candidate_ids),
        head.rows(candidate_ids, positions),
    )
    # For each candidate of the position before.
    repeated = [values.repeat_interleave(top_k, dim=0) for values in of_positions]
    state, features, top_logits, rows = repeated
    inputs = head.inputs(before.flatten())
    state = head.read(inputs, state)
    scores = head.scores(features, top_logits, rows, state)
    return scores.view(*before.shape, -1), candidate_ids


class TreeProposer:
    """Proposes a tree of the drafter's most probable paths, of at most `num_nodes` nodes, for a single sequence."""

    def __init__(self, drafts: DraftProposer, num_nodes: int) -> None:
        self.drafts = drafts
        self.request = drafts.request
        most = self.request.max_draft_tokens
        self.num_nodes = num_nodes if most is None else min(num_nodes, most)

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """A tree of at most `most` nodes after anchors [1, 1], whose paths are not longer than a block."""
        depth = min(most, self.drafts.num_proposals)
        if depth == 0:
            return Proposals(anchors[:, :0])
        hidden_states = self.drafts.hidden_states(anchors, depth)
        log_probs, token_ids = self.branches(hidden_states, anchors)
        # One copy for both; float32 holds ids below 2**24.
        next_ids = token_ids[:, None]
        numbers = torch.cat([next_ids, log_probs], dim=1)
        positions = to_host(numbers)()
        num_nodes = min(most, self.num_nodes)
        tree = DraftTree.grown(positions, num_nodes)
        node_ids = torch.tensor([tree.token_ids], dtype=torch.long)
        # A sum over all tokens is part of each number.
        has_nan = any(math.isnan(rows[1][0]) for rows in positions)
        return TreeProposals(
            token_ids=to_device(node_ids, anchors.device),
            is_finite=torch.tensor([not has_nan]),
            tree=tree,
        )

    def branches(self, hidden_states: torch.Tensor, anchors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [n, K or 1, K] and tokens [n, K] of hidden states [1, n, D] after anchors [1, 1], for `grown`.

        A causal head has a row for each candidate of the position before. Without one there is one row for all.
        """
        drafts = self.drafts
        logits = drafts.drafter.compute_logits(hidden_states, drafts.target.head)
        causal_head = drafts.drafter.causal_head(drafts.embed)
        if causal_head is None:
            scores = logits.transpose(0, 1)  # [n, 1, V]
        else:
            scores, token_ids = scores_after_each(causal_head, hidden_states, logits, anchors)
        scores = scores.float() / self.request.temperature
        log_probs = scores.log_softmax(-1)
        if causal_head is not None:
            return log_probs, token_ids
        vocab_size = logits.shape[-1]
        count = min(self.num_nodes, TREE_BRANCHES, vocab_size)
        best = log_probs.topk(count)
        return best.values, best.indices[:, 0]

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """As `DraftProposer.record`."""
        self.drafts.record(proposals, blocks)


# -- verifying


def verify_tree(
    target: Target, token_ids: torch.Tensor, cache: TreeCache, tree: DraftTree
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [1, S, V] and context features of the columns of `tree`, token_ids [1, S], after a single text.

    The cache then holds all columns; `TreeCache.keep_columns` keeps a path of them.
    """
    device = token_ids.device
    start = cache.get_seq_length()
    width = token_ids.shape[1]
    positions = start + torch.tensor([tree.depths])
    ancestors = tree.ancestors()
    with cache.recording(width, tree), step_attention(target.model):
        return masked_forward(
            target.model,
            target.layout,
            cache,
            token_ids,
            to_device(positions, device),
            start + width,
            ancestors=to_device(ancestors, device),
        )


class TreeAcceptor(Acceptor):
    """Accepts trees, too: by the target's choices."""

    @property
    def can_fuse(self) -> bool:
        """Whether accepting needs only the logits, so that one function on the device can draft, verify and accept."""
        if self.uniforms_of is None:
            return not self.processors and not self.keeps_scores
        return self.verification in ("auto", "match") and self.sampler is not None

    def process_sequence(self, scores: torch.Tensor, sequence: TextSequence, place: int, proposals: Proposals) -> None:
        """As `Acceptor.process_sequence`; of a tree, the columns of the path that the target's choices take."""
        if not isinstance(proposals, TreeProposals):
            super().process_sequence(scores, sequence, place, proposals)
            return
        path: list[int] = []

        def choice_after(column: int) -> int:
            of_column = scores[column]
            if not self.process_column(of_column, sequence, path):
                return TARGET_BROKE  # no token of the tree
            depth = len(path)
            choices, _ = self.choose(of_column[None, None], [sequence], [depth])
            choice = int(choices)
            path.append(choice)
            return choice

        proposals.tree.walk(choice_after)


# -- keeping a path


class TreeRunningState(RunningState):
    """The state of a linear mixer, also in a step over a tree, whose paths run as sequences.

    For the columns 0, 1, 2 and 3, where 1 and 2 follow 0, and 3 follows 1:

        state before --- mixer(columns 0 . .) --> output of column 0
        state before --- mixer(columns 0 1 .) --> output of column 1
        state before --- mixer(columns 0 2 .) --> output of column 2
        state before --- mixer(columns 0 1 3) --> output of column 3
        state before --- mixer(columns 0 2) ----> state             `rewind_to([0, 2])`
    """

    tree: DraftTree | None = None  # of the next step; None: a chain

    def hooks(self) -> list[Any]:
        """As `RunningState.hooks`; in a step over a tree, the output of the mixer is that of the paths."""
        handles = super().hooks()
        tree = self.tree
        if tree is None:
            return handles
        join = in_this_thread(lambda *_: self._output_of(tree))
        return [*handles, self.mixer.register_forward_hook(join)]

    def _output_of(self, tree: DraftTree) -> torch.Tensor:
        """The output [1, S, D] of the recorded columns, each after its path."""
        hidden_states = self._arguments["hidden_states"]
        paths = to_device(tree.padded_paths, hidden_states.device)
        inputs = hidden_states[0, paths]
        first = torch.zeros_like(paths[:, 0])
        outputs = self.replay(inputs, first)
        self.restore()  # the states of paths take memory in every layer
        depths = (paths > 0).sum(1)
        columns = torch.arange(len(paths), device=paths.device)
        of_columns = outputs[columns, depths]
        return of_columns[None]

    def rewind_to(self, columns: Sequence[int]) -> None:
        """Sets the state of a single sequence to that after `columns` of the recorded step."""
        inputs = chosen(self._arguments["hidden_states"], 1, columns)
        first = torch.zeros(1, dtype=torch.long, device=inputs.device)
        self.replay(inputs, first)


class TreeCache(PreallocatedCache):
    """A cache whose single sequence can be rolled back to a path of a tree."""

    running_state_class = TreeRunningState

    @contextmanager
    def recording(self, num_columns: int, tree: DraftTree | None = None) -> Iterator[None]:
        """As `PreallocatedCache.recording`, of a chain, or of `tree`."""
        for running in self._running.values():
            running.tree = tree
        with super().recording(num_columns):
            yield

    def keep_columns(self, columns: Sequence[int]) -> None:
        """Keeps the given `columns` (rising) of the recorded forward of a single sequence, moved together."""
        width = self._num_recorded or 0
        length = self.get_seq_length()
        start = length - width
        kept = slice(start, start + len(columns))
        index = start + torch.tensor(columns, dtype=torch.long)
        for layer in self.attention_layers():
            if not layer.is_initialized:  # it reads the keys of another layer
                continue
            for states in (layer.keys, layer.values):
                index = to_device(index, states.device)
                states[:, :, kept] = states.index_select(2, index)
        num_dropped = width - len(columns)
        self._drop([num_dropped], lambda running: running.rewind_to(columns))
