"""Draft trees: several continuations of each text, verified in one forward of the target (DDTree, arXiv 2604.12989).

Each node sees only the text and its ancestors. Its logits are those of plain decoding after its path, so following the
target's choices down the tree is exact. The nodes are the most probable paths, each scored by the head in the state that its
own tokens leave (DARTree, arXiv 2608.13524). A tree is grown, verified and followed on the device: the host waits for the
accepted tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from dflash.model.acceptance_dflash import TARGET_BROKE, Acceptance, Acceptor, Proposals, checked
from dflash.model.attention_dflash import step_attention
from dflash.model.cache_dflash import PreallocatedCache, RunningState, in_this_thread, to_host
from dflash.model.drafting_dflash import DraftProposer
from dflash.model.heads_dflash import CausalHead
from dflash.model.sequences_dflash import TextSequence
from dflash.model.targets_dflash import Target, masked_forward


TREE_BRANCHES = 8  # most probable tokens of a position that a tree considers without a head


# -- a tree


@dataclass(frozen=True)
class TreeAcceptance(Acceptance):
    """The paths of trees that are accepted."""

    columns: torch.Tensor = field(kw_only=True)  # [B, S], the anchor's and those of the path; token i follows column i

    def before_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """As `Acceptance.before_tokens`."""
        return rows_at(states, self.columns)


def rows_at(rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Rows [B, N, ...] at places [B, ...] of each sequence."""
    sequences = torch.arange(len(places), device=rows.device)
    sequences = sequences.view(-1, *[1] * (places.dim() - 1))
    return rows[sequences, places.to(rows.device)]


@dataclass(frozen=True)
class TreeProposals(Proposals):
    """Proposals as nodes of a tree for each sequence, in columns 1, 2, …, each after its parent. Column 0 is the anchor."""

    drafted_parents: torch.Tensor = field(kw_only=True)  # columns, [B, m]

    @cached_property
    def parents(self) -> torch.Tensor:
        """The column of each node's parent, [B, n]. What a lookup proposes is a chain."""
        num_nodes = self.token_ids.shape[1]
        chain = torch.arange(num_nodes, device=self.token_ids.device)
        rows = []
        for place, parents in enumerate(self.drafted_parents):
            num_drafted = 0 if place in self.looked_up else len(parents)
            row = torch.cat([parents[:num_drafted], chain[num_drafted:]])
            rows.append(row[:num_nodes])
        return torch.stack(rows)

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Which columns each column sees, itself included, bool [B, S, S]."""
        earlier = functional.pad(self.parents, (1, 0))  # the anchor is before itself
        num_sequences, width = earlier.shape
        itself = torch.eye(width, dtype=torch.bool, device=earlier.device)
        sees = itself.expand(num_sequences, -1, -1)
        for _ in range(width.bit_length()):  # twice as far each time
            sees = sees | rows_at(sees, earlier)
            earlier = earlier.gather(1, earlier)
        return sees

    @cached_property
    def depths(self) -> Any:
        """As `Proposals.depths`, of each sequence, [B, S]."""
        return self.ancestors.sum(-1) - 1

    @cached_property
    def _columns(self) -> list[dict[tuple[int, ...], int]]:
        """For each sequence, the column of each node, by its parent's column and its token."""
        nodes = torch.stack([self.parents, self.token_ids], dim=-1)
        return [{tuple(node): column for column, node in enumerate(tree, start=1)} for tree in to_host(nodes)()]

    def walk(self, place: int, token_after: Callable[[int], int]) -> list[int]:
        """The columns of a sequence from the anchor on, as far as `token_after` a column is one of its children.

        Waits for the device.
        """
        columns = []
        column: int | None = 0
        while column is not None:
            columns.append(column)
            token_id = token_after(column)
            column = self._columns[place].get((column, token_id))
        return columns

    def accept_match(self, choices: torch.Tensor, best: torch.Tensor) -> TreeAcceptance:
        """Follows choices [B, S], each after the path to its column, down the trees. `best` as in `Proposals`."""
        is_wrong = choices.gather(1, self.parents) != self.token_ids
        is_off = self.ancestors[:, :, 1:] & is_wrong[:, None]
        is_accepted = ~is_off.any(-1)
        columns = in_front(is_accepted)
        num_accepted = is_accepted.sum(1) - 1
        best = best.gather(1, columns)
        return TreeAcceptance(
            num_accepted=checked(num_accepted, best, self),
            token_ids=choices.gather(1, columns),
            columns=columns,
        )


def in_front(is_chosen: torch.Tensor) -> torch.Tensor:
    """The columns that are chosen in is_chosen [..., S], in order, then 0, [..., S]."""
    width = is_chosen.shape[-1]
    columns = torch.arange(width, device=is_chosen.device)
    chosen_first = torch.where(is_chosen, columns, width).sort(-1)
    return chosen_first.values % width


# -- growing


class NoHead(CausalHead):
    """Scores candidates by their log-probabilities among all tokens, which it takes for logits."""

    top_k = TREE_BRANCHES
    state_size = 1

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Unused."""
        return hidden_states

    def rows(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Unused."""
        return token_ids

    def inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Unused."""
        return token_ids[..., None]

    def read(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """Unused."""
        return inputs

    def scores(
        self, features: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """As given."""
        return logits

    def probabilities(self, scores: torch.Tensor, temperature: float) -> torch.Tensor:
        """As given."""
        return scores.exp()


def grown(
    head: CausalHead,
    hidden_states: torch.Tensor,  # [B, R, D]
    logits: torch.Tensor,  # [B, R, V]
    anchors: torch.Tensor,  # [B, 1]
    temperature: float,
    num_nodes: int,
) -> TreeProposals:
    """The `num_nodes` most probable paths, best first, among those of each position's candidates.

    Grown depth by depth: each path goes on from its own state, all of a depth at once. Probabilities only fall along a path, so
    as many paths of a depth as the tree has room for are enough. A tree with fewer nodes holds the first of them.
    """
    device = hidden_states.device
    num_sequences, num_positions, vocab_size = logits.shape
    top_k = min(head.top_k, vocab_size)
    top = logits.topk(top_k)
    token_ids = top.indices.to(device)
    of_positions = (
        head.features(hidden_states),
        top.values.to(hidden_states),
        head.rows(token_ids, torch.arange(num_positions, device=device)),
    )
    inputs = head.inputs(token_ids)  # [B, R, K, I]
    inputs_before = head.inputs(anchors.to(device))  # of the paths' last tokens, [B, M, I]
    state = hidden_states.new_zeros(num_sequences, head.state_size)
    totals = torch.zeros(anchors.shape, device=device)  # log-probabilities of the paths
    found: list[tuple[torch.Tensor, ...]] = []
    first, num_found = 0, 1  # the anchor
    for position in range(num_positions):
        width = totals.shape[1]
        state = head.read(inputs_before.flatten(0, 1), state)
        of_paths = [values[:, position].repeat_interleave(width, dim=0) for values in of_positions]
        features, top_logits, rows = of_paths
        scores = head.scores(features, top_logits, rows, state)
        log_probs = head.probabilities(scores, temperature).log()
        longer = totals[..., None] + log_probs.view(num_sequences, width, top_k)
        longer = longer.flatten(1)
        totals, indices = longer.topk(min(num_nodes - position, longer.shape[1]))
        if device.type == "cpu":  # on a GPU reading the number would take longer than all paths
            count = num_promising(totals, found, num_nodes)
            totals, indices = totals[:, :count], indices[:, :count]
        parents = indices // top_k
        candidates = indices % top_k
        found.append((totals, first + parents, token_ids[:, position].gather(1, candidates)))
        first, num_found = num_found, num_found + totals.shape[1]
        state = rows_at(state.unflatten(0, (num_sequences, width)), parents).flatten(0, 1)
        inputs_before = rows_at(inputs[:, position], candidates)
    totals, parents, token_ids = (torch.cat(values, dim=1) for values in zip(*found, strict=True))
    # Equal ones stay in order, so parents come first.
    order = totals.sort(dim=1, descending=True, stable=True).indices[:, :num_nodes]
    columns = torch.arange(1, order.shape[1] + 1, device=device).expand_as(order)
    column_of = torch.zeros_like(functional.pad(totals, (1, 0)), dtype=torch.long)
    column_of = column_of.scatter(1, order + 1, columns)
    parents = column_of.gather(1, parents.gather(1, order))
    return TreeProposals(
        token_ids=token_ids.gather(1, order).to(anchors.device),
        is_finite=~totals.isnan().any(1),
        drafted_parents=parents.to(anchors.device),
    )


def num_promising(totals: torch.Tensor, found: list[tuple[torch.Tensor, ...]], num_nodes: int) -> int:
    """How many of the paths with log-probabilities `totals` [B, M], best first, a tree of those found so far has room for."""
    known = torch.cat([totals, *(level[0] for level in found)], dim=1)
    count = min(num_nodes, known.shape[1])
    least = known.topk(count).values[:, -1:]
    is_promising = ~(totals < least)  # NaN is
    return max(1, int(is_promising.sum(1).max()))


class TreeProposer:
    """Proposes a tree of the drafter's most probable paths, of at most `num_nodes` nodes, for each sequence."""

    def __init__(self, drafts: DraftProposer, num_nodes: int) -> None:
        self.drafts = drafts
        self.request = drafts.request
        most = self.request.max_draft_tokens
        self.num_nodes = num_nodes if most is None else min(num_nodes, most)

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """Trees of at most `most` nodes after anchors [B, 1], whose paths are not longer than a block."""
        drafts = self.drafts
        num_nodes = min(most, self.num_nodes)
        depth = min(num_nodes, drafts.num_proposals)
        if depth == 0:
            return Proposals(anchors[:, :0])
        hidden_states = drafts.hidden_states(anchors, depth)
        logits = drafts.drafter.compute_logits(hidden_states, drafts.target.head)
        temperature = self.request.temperature
        head = drafts.drafter.causal_head(drafts.embed)
        if head is None:
            head = NoHead(drafts.drafter, None)
            logits = (logits.float() / temperature).log_softmax(-1)
        return grown(head, hidden_states, logits, anchors, temperature, num_nodes)

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """As `DraftProposer.record`."""
        self.drafts.record(proposals, blocks)


# -- verifying


def verify_trees(
    target: Target, token_ids: torch.Tensor, cache: TreeCache, proposals: TreeProposals
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [B, S, V] and context features of anchors and nodes, token_ids [B, S], after each text.

    The cache then holds all columns; `TreeCache.bring_to_front` orders those of a path before it is rolled back.
    """
    device = token_ids.device
    num_sequences, width = token_ids.shape
    starts = cache.lengths_on(device)[:, None]
    slots = starts + torch.arange(width, device=device)
    num_keys = max(cache.lengths) + width
    counts = [width] * num_sequences
    ancestors = proposals.ancestors
    with cache.recording(width, ancestors), cache.appending(slots, counts), step_attention(target.model):
        return masked_forward(
            target.model,
            target.layout,
            cache,
            token_ids,
            starts + proposals.depths,
            num_keys,
            ancestors=ancestors,
        )


class TreeAcceptor(Acceptor):
    """Accepts trees, too: by the target's choices."""

    @property
    def can_fuse(self) -> bool:
        """Whether accepting needs only the logits, so that one function on the device can draft, verify and accept."""
        if self.uniforms_of is None:
            return not self.processors and not self.keeps_scores
        return self.verification in ("auto", "match") and self.sampler is not None

    def uniforms(self, sequences: list[TextSequence], depths: Any, device: torch.device) -> torch.Tensor:
        """As `Acceptor.uniforms`, also for depths [B, S] of trees."""
        if not isinstance(depths, torch.Tensor):
            return super().uniforms(sequences, depths, device)
        uniforms = super().uniforms(sequences, range(depths.shape[1]), device)
        return uniforms.gather(1, depths.to(device))

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

        proposals.walk(place, choice_after)


# -- keeping a path


class TreeRunningState(RunningState):
    """The state of a linear mixer, also in a step over trees, whose paths run as sequences.

    For the columns 0, 1, 2 and 3, where 1 and 2 follow 0, and 3 follows 1:

        state before --- mixer(columns 0 . .) --> output of column 0
        state before --- mixer(columns 0 1 .) --> output of column 1
        state before --- mixer(columns 0 2 .) --> output of column 2
        state before --- mixer(columns 0 1 3) --> output of column 3
        state before --- mixer(columns 0 2) ----> state             `bring_to_front([0, 2, …])`, `rewind([2])`
    """

    paths: torch.Tensor | None = None  # [B, S, P], columns of those of the next step, padded with 0; None: a chain

    def hooks(self) -> list[Any]:
        """As `RunningState.hooks`; in a step over trees, the output of the mixer is that of the paths."""
        handles = super().hooks()
        paths = self.paths
        if paths is None:
            return handles
        join = in_this_thread(lambda *_: self._output_of(paths))
        return [*handles, self.mixer.register_forward_hook(join)]

    def _output_of(self, paths: torch.Tensor) -> torch.Tensor:
        """The output [B, S, D] of the recorded columns, each after its path."""
        hidden_states = self._arguments["hidden_states"]
        num_sequences, width = paths.shape[:2]
        paths = paths.to(hidden_states.device)
        inputs = rows_at(hidden_states, paths)
        places = torch.arange(num_sequences, device=paths.device)
        outputs = self.replay(inputs.flatten(0, 1), places.repeat_interleave(width))
        # The states of all paths take memory. Those of the last columns hold all columns, if these are a chain.
        self.layer.reorder_cache((places + 1) * width - 1)
        ends = (paths > 0).sum(-1, keepdim=True)
        of_columns = rows_at(outputs, ends.flatten(0, 1))
        return of_columns.view_as(hidden_states)

    def bring_to_front(self, columns: torch.Tensor) -> None:
        """Orders the recorded columns, of which `rewind` keeps the first ones."""
        self._arguments["hidden_states"] = rows_at(self._arguments["hidden_states"], columns)


class TreeCache(PreallocatedCache):
    """A cache whose sequences can be rolled back to paths of trees."""

    running_state_class = TreeRunningState

    @contextmanager
    def recording(self, num_columns: int, ancestors: torch.Tensor | None = None) -> Iterator[None]:
        """As `PreallocatedCache.recording`, of chains, or of trees whose columns see `ancestors` [B, S, S]."""
        paths = None
        if self._running and ancestors is not None:
            longest = ancestors.sum(-1).max()
            paths = in_front(ancestors)[..., : int(longest)]
        for running in self._running.values():
            running.paths = paths
        with super().recording(num_columns):
            yield

    def bring_to_front(self, columns: torch.Tensor) -> None:
        """Orders the columns of the recorded forward: `columns` [B, S], whose first ones `rollback` keeps."""
        width = columns.shape[1]
        for layer in self.attention_layers():
            if not layer.is_initialized:  # it reads the keys of another layer
                continue
            device = layer.keys.device
            ends = self.lengths_on(device)[:, None]
            slots = ends - width + torch.arange(width, device=device)
            origins = slots.gather(1, columns.to(device))
            sequences = torch.arange(len(slots), device=device)[:, None]
            for states in (layer.keys, layer.values):
                states = states.transpose(1, 2)
                states[sequences, slots] = states[sequences, origins]
        for running in self._running.values():
            running.bring_to_front(columns)
