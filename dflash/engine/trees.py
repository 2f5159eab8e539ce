"""Draft trees: several continuations of one text, verified in one forward of the target (DDTree, arXiv 2604.12989).

Each node sees only the text and its ancestors. Its logits are those of plain decoding after its path, so following the
target's choices down the tree is exact. A tree is grown best first: its first n nodes are the n most probable paths.
"""

from __future__ import annotations

import heapq
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch

from dflash.model.acceptance_dflash import DRAFTER_BROKE, TARGET_BROKE, Acceptance, Acceptor, Proposals
from dflash.model.attention_dflash import step_attention
from dflash.model.cache_dflash import PreallocatedCache, RunningState, chosen, to_device, to_host
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
    probabilities: list[float]  # of each node's path under the drafter, in descending order

    @classmethod
    def grown(
        cls, log_probs: Sequence[Sequence[Sequence[float]]], token_ids: Sequence[Sequence[int]], budget: int
    ) -> DraftTree:
        """The `budget` most probable paths, best first (DDTree, algorithm 1).

        `log_probs[p][i][j]` is of token j of position p after token i of the position before, where i = 0 is the anchor. A
        position with a single row has the same probabilities after every token.
        """
        tree = cls([], [], [])
        frontier = _children(log_probs, 0.0, 0, 0, 0)
        heapq.heapify(frontier)
        while frontier and len(tree.token_ids) < budget:
            cost, parent, position, token = heapq.heappop(frontier)
            if cost == math.inf:  # outside the drafter's vocabulary
                break
            tree.token_ids.append(token_ids[position][token])
            tree.parents.append(parent)
            tree.probabilities.append(math.exp(-cost))
            column = len(tree.token_ids)
            for child in _children(log_probs, cost, column, position + 1, token):
                heapq.heappush(frontier, child)
        return tree

    def first(self, count: int) -> DraftTree:
        """The `count` most probable nodes. They form a tree: no node is more probable than its parent."""
        return DraftTree(self.token_ids[:count], self.parents[:count], self.probabilities[:count])

    @cached_property
    def depths(self) -> list[int]:
        """Distance of each column from the anchor, in tokens."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each column, its children: token to column."""
        children: list[dict[int, int]] = [{} for _ in self.depths]
        for index, token_id in enumerate(self.token_ids):
            siblings = children[self.parents[index]]
            siblings[token_id] = index + 1
        return children

    @cached_property
    def leaf_paths(self) -> list[list[int]]:
        """The columns from the anchor down to each leaf."""
        paths = [[0]]
        for column, parent in enumerate(self.parents, start=1):
            paths.append([*paths[parent], column])
        return [path for path in paths if not self.children[path[-1]]]

    def ancestors(self) -> torch.Tensor:
        """Which columns each column sees, itself included, bool [1 + n, 1 + n]."""
        sees = torch.eye(len(self.depths), dtype=torch.bool)
        for column, parent in enumerate(self.parents, start=1):
            sees[column] |= sees[parent]
        return sees


# Negative log-probability of a path, its parent's column, and position and index of its last token.
Candidate = tuple[float, int, int, int]


def _children(
    log_probs: Sequence[Sequence[Sequence[float]]], cost: float, parent: int, position: int, token: int
) -> list[Candidate]:
    """The continuations of a path of this cost, which ends with `token` of the position before."""
    if position == len(log_probs):
        return []
    rows = log_probs[position]
    row = rows[token] if len(rows) > 1 else rows[0]
    return [(cost - log_prob, parent, position, child) for child, log_prob in enumerate(row)]


@dataclass(frozen=True)
class TreeProposals(Proposals):
    """Proposals for a single sequence as nodes of a tree: token_ids [1, n] are those of its nodes."""

    tree: DraftTree = field(kw_only=True)

    @classmethod
    def of(cls, tree: DraftTree, device: torch.device, is_finite: bool = True) -> TreeProposals:
        """The nodes of `tree`, for a target on `device`. `is_finite`: whether the drafter's logits were."""
        token_ids = torch.tensor([tree.token_ids], dtype=torch.long)
        return cls(to_device(token_ids, device), is_finite=torch.tensor([is_finite]), tree=tree)

    def first(self, count: int) -> TreeProposals:
        """The `count` most probable nodes."""
        return replace(self, token_ids=self.token_ids[:, :count], tree=self.tree.first(count))


# -- growing


@torch.no_grad()
def branches(
    drafter: Any,
    hidden_states: torch.Tensor,  # [1, n, D]
    anchors: torch.Tensor,  # [1, 1]
    head: Callable[[torch.Tensor], torch.Tensor],
    temperature: float,
    most: int,
    embed: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [n, K or 1, K] and tokens [n, K] of which `DraftTree.grown` makes a single sequence's tree.

    A causal head has a row for each candidate of the position before. Without one there is one row for all, and the `most`
    probable tokens are taken. `head` and `embed` are as in `propose` of the drafter.
    """
    logits = drafter.compute_logits(hidden_states, head)
    causal_head = drafter.causal_head(embed)
    if causal_head is not None:
        scores, token_ids = scores_after_each(causal_head, hidden_states, logits, anchors)
        scores = scores.float() / temperature
        return scores.log_softmax(-1), token_ids
    logits = logits[0]  # too large for a float32 copy
    count = min(most, logits.shape[-1])
    values, token_ids = logits.topk(count)  # [n, K]
    largest = values[:, :1]
    weights = (logits - largest) / temperature
    total = weights.exp().sum(-1, keepdim=True, dtype=torch.float32)
    scores = (values - largest).float() / temperature
    log_probs = scores - total.log()
    return log_probs[:, None], token_ids


def scores_after_each(
    head: CausalHead, hidden_states: torch.Tensor, logits: torch.Tensor, anchors: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores [n, K, K] of a single block's candidates [n, K] after each one of the position before, or the anchor [1, 1].

    Of the tokens before that one, the state knows those of the best path.
    """
    path = head.choose_path(hidden_states, logits, anchors)
    candidate_ids = path.candidate_ids[0]
    top_logits = logits[0].to(hidden_states).gather(-1, candidate_ids)
    anchor = anchors.to(candidate_ids.device)
    anchor = anchor.expand(1, head.top_k)
    before = torch.cat([anchor, candidate_ids[:-1]])  # [n, K]
    positions = torch.arange(len(before), device=before.device)
    rows = head.rows(candidate_ids, positions)
    features = head.features(hidden_states[0])
    # For each candidate of the position before.
    state, features, top_logits, rows = (
        values.repeat_interleave(head.top_k, dim=0) for values in (path.states[0], features, top_logits, rows)
    )
    inputs = head.inputs(before.flatten())
    scores = head.scores(features, top_logits, rows, head.read(inputs, state))
    return scores.view(*before.shape, -1), candidate_ids


class TreeProposer:
    """Proposes a tree of the drafter's most probable paths, of at most `num_nodes` nodes, for a single sequence."""

    def __init__(self, drafts: DraftProposer, num_nodes: int) -> None:
        self.drafts = drafts
        self.request = drafts.request
        most = self.request.max_draft_tokens
        self.num_nodes = num_nodes if most is None else min(num_nodes, most)

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """A tree after anchors [1, 1] whose paths have at most `most` tokens, and none more than a block."""
        depth = min(most, self.drafts.num_proposals)
        if depth == 0:
            return Proposals(anchors[:, :0])
        hidden_states = self.drafts.hidden_states(anchors)
        log_probs, token_ids = branches(
            self.drafts.drafter,
            hidden_states[:, :depth],
            anchors,
            self.drafts.target.head,
            self.request.temperature,
            min(self.num_nodes, TREE_BRANCHES),
            self.drafts.embed,
        )
        # One copy for both; float32 holds ids below 2**24.
        numbers = torch.cat([log_probs, token_ids[:, None]], dim=1)
        tree = self._grown(to_host(numbers)())
        is_finite = tree is not None
        return TreeProposals.of(tree or DraftTree([], [], []), anchors.device, is_finite)

    def _grown(self, numbers: list[list[list[float]]]) -> DraftTree | None:
        """The tree of log-probabilities and tokens, the last row of each position; `None` if the numbers hold NaN."""
        log_probs = [rows[:-1] for rows in numbers]
        token_ids = [[int(token_id) for token_id in rows[-1]] for rows in numbers]
        for rows in log_probs:
            if any(math.isnan(log_prob) for log_prob in rows[0]):
                return None
        return DraftTree.grown(log_probs, token_ids, self.num_nodes)

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """As `DraftProposer.record`."""
        self.drafts.record(proposals, blocks)


# -- verifying


def tree_tensors(tree: DraftTree, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Ancestors [S, S] and depths [S] of a tree's columns, on `device`."""
    depths = torch.tensor(tree.depths)
    return to_device(tree.ancestors(), device), to_device(depths, device)


def verify_tree(
    target: Target, token_ids: torch.Tensor, cache: TreeCache, tree: DraftTree
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [1, S, V] and context features of the columns of `tree`, token_ids [1, S], after a single text.

    The cache then holds all columns; `TreeCache.keep_columns` keeps a path of them.
    """
    ancestors, depths = tree_tensors(tree, token_ids.device)
    start = cache.get_seq_length()
    width = token_ids.shape[1]
    positions = start + depths[None]
    with cache.recording(width, tree), step_attention(target.model):
        return masked_forward(
            target.model, target.layout, cache, token_ids, positions, start + width, ancestors=ancestors
        )


@dataclass(frozen=True)
class TreeAcceptance(Acceptance):
    """The path of a tree that is accepted."""

    columns: list[int] = field(kw_only=True)  # the anchor's and those of the accepted nodes; token i follows column i


def accept_tree(proposals: TreeProposals, choices: torch.Tensor, best: torch.Tensor) -> TreeAcceptance:
    """Follows a single sequence's choices [1, S], each after the path to its column, down the tree.

    `best` [1, S] holds a number of each column that is not finite where its logits are not. Waits for the device.
    """
    choices = torch.where(best.isfinite(), choices, TARGET_BROKE)
    choice_of = to_host(choices[0])()
    children = proposals.tree.children
    columns = [0]
    choice = choice_of[0]
    token_ids = [choice]
    while choice in children[columns[-1]]:
        column = children[columns[-1]][choice]
        columns.append(column)
        choice = choice_of[column]
        token_ids.append(choice)
    num_accepted = len(columns) - 1
    if choice == TARGET_BROKE:
        num_accepted = TARGET_BROKE
    if proposals.is_finite is not None and not bool(proposals.is_finite):
        num_accepted = DRAFTER_BROKE
    return TreeAcceptance(torch.tensor([num_accepted]), torch.tensor([token_ids]), columns=columns)


class TreeAcceptor(Acceptor):
    """Accepts trees, too: by the target's choices."""

    @property
    def can_fuse(self) -> bool:
        """Whether accepting needs only the logits, so that one function on the device can draft, verify and accept."""
        if self.uniforms_of is None:
            return not self.processors and not self.keeps_scores
        return self.verification in ("auto", "match") and self.sampler is not None

    def accept(self, logits: torch.Tensor, sequences: list[TextSequence], proposals: Proposals) -> Acceptance:
        """As `Acceptor.accept`; of a tree, those of a column are processed after the text and the path to it."""
        if not isinstance(proposals, TreeProposals):
            return super().accept(logits, sequences, proposals)
        logits = logits.to(proposals.token_ids.device)
        scores = self.process(logits, sequences, proposals)
        choices, best = self.choose(scores, sequences, proposals.tree.depths)
        acceptance = accept_tree(proposals, choices, best)
        if self.keeps_scores:
            scores = chosen(scores, 1, acceptance.columns)
            acceptance = replace(acceptance, scores=scores)
        return acceptance

    def process_sequence(self, scores: torch.Tensor, sequence: TextSequence, place: int, proposals: Proposals) -> None:
        """As `Acceptor.process_sequence`; of a tree, the columns of the path that the target's choices take."""
        if not isinstance(proposals, TreeProposals):
            super().process_sequence(scores, sequence, place, proposals)
            return
        column: int | None = 0
        path: list[int] = []
        while column is not None:
            of_column = scores[column]
            if not self.process_column(of_column, sequence, path):
                return
            children = proposals.tree.children[column]
            if not children:
                return
            choices, _ = self.choose(of_column[None, None], [sequence], [len(path)])
            choice = int(choices)
            path.append(choice)
            column = children.get(choice)


# -- keeping a path

# The columns of a tree's paths, padded with the anchor's [P, depth], and the path and place of each column, [S] each.
Paths = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def paths_of(tree: DraftTree, device: torch.device) -> Paths:
    """The paths of a tree to its leaves, as sequences of columns, and where each column stands in them."""
    depths = torch.tensor(tree.depths)
    path_of = torch.zeros_like(depths)
    columns = torch.zeros(len(tree.leaf_paths), max(tree.depths) + 1, dtype=torch.long)
    for index, path in enumerate(tree.leaf_paths):
        path_of[path] = index
        columns[index, : len(path)] = torch.tensor(path)
    return to_device(columns, device), to_device(path_of, device), to_device(depths, device)


class TreeRunningState(RunningState):
    """The state of a linear mixer, also in a step over a tree, whose paths run as sequences.

    For the columns 0, 1, 2 and 3, where 1 and 2 follow 0, and 3 follows 1:

        state before --- mixer(columns 0 1 3) --> outputs of columns 0, 1 and 3
        state before --- mixer(columns 0 2 .) --> output of column 2
        state before --- mixer(columns 0 2) ----> state             `rewind_to([0, 2])`
    """

    # The paths of the next step's tree on a device; None: a chain.
    paths_on: Callable[[torch.device], Paths] | None = None

    def hooks(self) -> list[Any]:
        """As `RunningState.hooks`; in a step over a tree, the output of the mixer is that of the paths."""
        handles = super().hooks()
        paths_on = self.paths_on
        if paths_on is None:
            return handles
        thread = threading.get_ident()

        def join(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            if threading.get_ident() != thread:
                return output
            return self._joined(*paths_on(output.device))

        return [*handles, self.mixer.register_forward_hook(join)]

    def _joined(self, paths: torch.Tensor, path_of: torch.Tensor, place_of: torch.Tensor) -> torch.Tensor:
        """The output [1, S, D] of the recorded columns, each after its path."""
        inputs = self._arguments["hidden_states"][0, paths]
        outputs = self.replay(inputs, torch.zeros_like(paths[:, 0]))
        if len(paths) > 1:  # else all columns may be kept; the states of paths take memory in every layer
            self.restore()
        return outputs[path_of, place_of][None]

    @torch.no_grad()
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
        paths_on = None if tree is None else cache(lambda device: paths_of(tree, device))  # moved once for all layers
        for running in self._running.values():
            running.paths_on = paths_on
        with super().recording(num_columns):
            yield

    def keep_columns(self, width: int, columns: Sequence[int]) -> None:
        """Keeps the given `columns` (rising) of a single sequence's last `width` positions, moved together."""
        start = self.get_seq_length() - width
        index = torch.tensor([start + column for column in columns], dtype=torch.long)
        end = start + len(columns)
        for layer in self.attention_layers():
            if layer.is_initialized:  # else it reads the keys of another layer
                for states in (layer.keys, layer.values):
                    index = to_device(index, states.device)
                    states[:, :, start:end] = states.index_select(2, index)
        self._drop([width - len(columns)], lambda running: running.rewind_to(columns))
