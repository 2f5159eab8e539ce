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
from dflash.model.cache_dflash import PreallocatedCache, RunningState, in_this_thread, to_host
from dflash.model.drafting_dflash import DraftProposer
from dflash.model.heads_dflash import CausalHead
from dflash.model.sequences_dflash import TextSequence


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
    """Rows [B, N, ...] at places [B, M] of each sequence."""
    places = places.to(rows.device)
    sequences = torch.arange(len(places), device=rows.device)
    return rows[sequences[:, None], places]


@dataclass(frozen=True)
class TreeProposals(Proposals):
    """Proposals as nodes of a tree for each sequence, in columns 1, 2, …, each after its parent. Column 0 is the anchor."""

    parents: torch.Tensor = field(kw_only=True)  # their columns, [B, n]

    @cached_property
    def ancestors(self) -> torch.Tensor:
        """Which columns each column sees, itself included, bool [B, S, S]."""
        earlier = functional.pad(self.parents, (1, 0))  # the anchor is before itself
        width = earlier.shape[1]
        itself = torch.eye(width, dtype=torch.bool, device=earlier.device)
        sees = itself.expand(len(earlier), -1, -1)
        for _ in range(width.bit_length()):  # twice as far each time
            sees = sees | rows_at(sees, earlier)
            earlier = earlier.gather(1, earlier)
        return sees

    @cached_property
    def depths(self) -> Any:
        """As `Proposals.depths`, of each sequence, [B, S]."""
        return self.ancestors.sum(-1) - 1

    def walk(self, place: int, token_after: Callable[[int], int]) -> list[int]:
        """The columns of a sequence from the anchor on, as far as `token_after` a column is one of its children.

        Waits for the device.
        """
        nodes = torch.stack([self.parents[place], self.token_ids[place]], dim=1)
        column_of = {tuple(node): column for column, node in enumerate(to_host(nodes)(), start=1)}
        columns = []
        column: int | None = 0
        while column is not None:
            columns.append(column)
            token_id = token_after(column)
            column = column_of.get((column, token_id))
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


Found = list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]  # of each depth: log-probabilities, parents, tokens


class Branches:
    """The likeliest tokens of each position, and their log-probabilities, whatever was chosen before: without a head."""

    def __init__(self, logits: torch.Tensor, temperature: float, device: torch.device) -> None:
        scores = logits.float() / temperature
        log_probs = scores.log_softmax(-1)
        num_branches = min(TREE_BRANCHES, logits.shape[-1])
        best = log_probs.topk(num_branches)
        self.log_probs = best.values.to(device)
        self.token_ids = best.indices.to(device)  # [B, R, K]

    def after_paths(self, position: int) -> torch.Tensor:
        """Log-probabilities of a position's candidates after each of M paths, [B, M, K], or [B, 1, K] where all are equal."""
        return self.log_probs[:, position, None]

    def follow(self, position: int, parents: torch.Tensor, choices: torch.Tensor) -> None:
        """Goes on from the paths `parents` [B, M] with the candidates `choices` [B, M] of a position. No path has a state."""


class HeadBranches(Branches):
    """Those of a drafter whose head scores the candidates after each path, from the state that the path leaves."""

    def __init__(
        self,
        head: CausalHead,
        hidden_states: torch.Tensor,
        logits: torch.Tensor,
        anchors: torch.Tensor,
        temperature: float,
    ) -> None:
        device = hidden_states.device
        best = logits.topk(min(head.top_k, logits.shape[-1]))
        token_ids = best.indices.to(device)
        positions = torch.arange(token_ids.shape[1], device=device)
        self.head = head
        self.temperature = temperature
        self.token_ids = token_ids
        self.logits = best.values.to(hidden_states)
        self.features = head.features(hidden_states)
        self.rows = head.rows(token_ids, positions)
        self.inputs = head.inputs(token_ids)  # [B, R, K, I]
        self.previous = head.inputs(anchors.to(device))  # of each path's last token, [B, M, I]
        self.states = hidden_states.new_zeros(len(anchors), 1, head.state_size)  # before that token, [B, M, H]

    def after_paths(self, position: int) -> torch.Tensor:
        """As `Branches.after_paths`."""
        head = self.head
        num_texts, num_paths, _ = self.previous.shape
        previous = self.previous.flatten(0, 1)
        states = self.states.flatten(0, 1)
        states = head.read(previous, states)
        self.states = states.unflatten(0, (num_texts, num_paths))

        def of_paths(values: torch.Tensor) -> torch.Tensor:
            return values[:, position].repeat_interleave(num_paths, dim=0)

        features = of_paths(self.features)
        logits = of_paths(self.logits)
        rows = of_paths(self.rows)
        scores = head.scores(features, logits, rows, states)
        probabilities = head.probabilities(scores, self.temperature)
        return probabilities.log().unflatten(0, (num_texts, num_paths))

    def follow(self, position: int, parents: torch.Tensor, choices: torch.Tensor) -> None:
        """As `Branches.follow`."""
        self.states = rows_at(self.states, parents)
        self.previous = rows_at(self.inputs[:, position], choices)


def grown(branches: Branches, anchors: torch.Tensor, num_nodes: int) -> TreeProposals:
    """The `num_nodes` most probable paths through the candidates of each position after anchors [B, 1], best first.

    Grown depth by depth: each path goes on from its own state, all of a depth at once. Probabilities only fall along a path, so
    as many paths of a depth as the tree has room for are enough. A tree with fewer nodes holds the first of them.
    """
    token_ids = branches.token_ids
    device = token_ids.device
    _, num_positions, top_k = token_ids.shape
    totals = torch.zeros(anchors.shape, device=device)  # log-probabilities of M paths, [B, M]
    found: Found = []
    first, num_found = 0, 1  # the anchor
    for position in range(num_positions):
        log_probs = branches.after_paths(position)
        longer = (totals[..., None] + log_probs).flatten(1)
        totals, places = longer.topk(min(num_nodes - position, longer.shape[1]))
        if device.type == "cpu":  # a GPU would wait longer for the number than it saves
            places = places[:, : num_promising(totals, found, num_nodes)]
            totals = totals[:, : places.shape[1]]
        parents = places // top_k
        choices = places % top_k
        chosen_ids = token_ids[:, position].gather(1, choices)
        found.append((totals, first + parents, chosen_ids))
        first, num_found = num_found, num_found + places.shape[1]
        branches.follow(position, parents, choices)
    return best_of(found, num_nodes, anchors.device)


def num_promising(totals: torch.Tensor, found: Found, num_nodes: int) -> int:
    """How many of the paths `totals` [B, M], best first, a tree has room for beside those that were found before."""
    earlier = [level[0] for level in found]
    known = torch.cat([totals, *earlier], dim=1)
    num_best = min(num_nodes, known.shape[1])
    best = known.topk(num_best).values
    least = best[:, -1:]
    is_promising = totals >= least
    num_paths = int(is_promising.sum(1).max())
    return max(1, num_paths)


def best_of(found: Found, num_nodes: int, device: torch.device) -> TreeProposals:
    """The tree of the most probable paths."""
    of_all = [torch.cat(values, dim=1) for values in zip(*found, strict=True)]
    totals, parents, token_ids = of_all
    is_broken = totals.isnan()
    # Equal ones stay in order, and NaN comes last: so nodes come after their parents.
    ranked = totals.nan_to_num(-torch.inf)
    in_order = ranked.sort(dim=1, descending=True, stable=True).indices
    ranks = in_order.argsort(1)
    columns = functional.pad(ranks + 1, (1, 0))  # of the anchor and of each path that was found
    nodes = in_order[:, :num_nodes]
    parents_of_nodes = parents.gather(1, nodes)
    parent_columns = columns.gather(1, parents_of_nodes)
    node_ids = token_ids.gather(1, nodes)
    return TreeProposals(
        token_ids=node_ids.to(device),
        is_finite=~is_broken.any(1),
        parents=parent_columns.to(device),
    )


class TreeProposer:
    """Proposes a tree of the drafter's most probable paths, of at most `num_nodes` nodes, for each sequence."""

    def __init__(self, drafts: DraftProposer, num_nodes: int) -> None:
        self.drafts = drafts
        most = drafts.request.max_draft_tokens
        self.num_nodes = num_nodes if most is None else min(num_nodes, most)

    def propose(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Proposals:
        """Trees of at most `most` nodes after anchors [B, 1], whose paths are not longer than a block."""
        drafts = self.drafts
        drafter = drafts.drafter
        num_nodes = min(most, self.num_nodes)
        depth = min(num_nodes, drafts.num_proposals)
        if depth == 0:
            return Proposals(anchors[:, :0])
        hidden_states = drafts.hidden_states(anchors, depth)
        logits = drafter.compute_logits(hidden_states, drafts.target.head)
        head = drafter.causal_head(drafts.embed)
        temperature = drafts.request.temperature
        if head is None:
            branches = Branches(logits, temperature, hidden_states.device)
        else:
            branches = HeadBranches(head, hidden_states, logits, anchors, temperature)
        return grown(branches, anchors, num_nodes)

    def record(self, proposals: Proposals, blocks: Sequence[Any]) -> None:
        """As `DraftProposer.record`."""
        self.drafts.record(proposals, blocks)


# -- accepting


class TreeAcceptor(Acceptor):
    """Accepts trees, too: by the target's choices."""

    @property
    def can_fuse(self) -> bool:
        """Whether accepting needs only the logits, so that one function on the device can draft, verify and accept."""
        if self.uniforms_of is None:
            return not self.processors and not self.keeps_scores
        return self.sampler is not None

    def uniforms(self, sequences: list[TextSequence], depths: Any, device: torch.device) -> torch.Tensor:
        """As `Acceptor.uniforms`, also for depths [B, S] of trees."""
        if not isinstance(depths, torch.Tensor):
            return super().uniforms(sequences, depths, device)
        num_columns = depths.shape[1]
        uniforms = super().uniforms(sequences, range(num_columns), device)
        depths = depths.to(uniforms.device)
        return uniforms.gather(1, depths)

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
        num_sequences, width, num_channels = hidden_states.shape
        paths = paths.to(hidden_states.device)
        columns = paths.flatten(1)
        inputs = rows_at(hidden_states, columns).view(num_sequences * width, -1, num_channels)
        places = torch.arange(num_sequences, device=paths.device)
        origins = places.repeat_interleave(width)
        outputs = self.replay(inputs, origins)
        # The states of all paths take memory. Those of the last columns hold all columns, if these are a chain.
        last_paths = (places + 1) * width - 1
        self.layer.reorder_cache(last_paths)
        ends = (paths > 0).sum(-1).view(-1, 1)
        return rows_at(outputs, ends).view_as(hidden_states)

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
            slots = ends + torch.arange(-width, 0, device=device)
            origins = slots.gather(1, columns.to(device))
            sequences = torch.arange(len(slots), device=device)[:, None]
            for states in (layer.keys, layer.values):
                by_slot = states.transpose(1, 2)
                by_slot[sequences, slots] = rows_at(by_slot, origins)
        for running in self._running.values():
            running.bring_to_front(columns)
