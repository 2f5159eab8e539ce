"""Draft trees: several continuations of one anchor, verified in one forward of the target.

A drafter gives one law per position. Its likeliest path is one chain; the other likely paths share prefixes with it and
with each other, so together they are a tree, whose nodes are verified at the price of as many columns (DDTree, arXiv
2604.12989). Every node sees the text and its own ancestors alone, so its logits are those of plain decoding behind its
path. Walking from the anchor along the target's own choices, greedy or drawn, is therefore exact, whatever was proposed.

Functions of numbers: no model, no cache.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class DraftTree:
    """Column 0 is the anchor; the nodes stand behind it, each after its parent.

    Attributes:
        token_ids: The tokens of columns 1, 2, ….
        parents: The column of each one's parent.
        probabilities: How likely each one's whole path is, by the drafter's laws; never rising.
    """

    token_ids: list[int]
    parents: list[int]
    probabilities: list[float]

    def first(self, count: int) -> DraftTree:
        """The `count` likeliest nodes: a tree, because nobody is likelier than its parent."""
        return DraftTree(self.token_ids[:count], self.parents[:count], self.probabilities[:count])

    @cached_property
    def depths(self) -> list[int]:
        """How many tokens each column stands behind the anchor's."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    @cached_property
    def children(self) -> list[dict[int, int]]:
        """For each column, the columns of its children by their token."""
        children: list[dict[int, int]] = [{} for _ in self.depths]
        for column, (token_id, parent) in enumerate(zip(self.token_ids, self.parents, strict=True), start=1):
            children[parent][token_id] = column
        return children

    def chain(self) -> list[int]:
        """The nodes of the likeliest path, each the likeliest child of the one before, as indices of `token_ids`."""
        chain, column = [], 0
        for node, parent in enumerate(self.parents):
            if parent == column:
                chain.append(node)
                column = node + 1
        return chain

    def ancestors(self) -> torch.Tensor:
        """Which columns each column sees, itself included: bool [1 + n, 1 + n]."""
        sees = torch.eye(len(self.depths), dtype=torch.bool)
        for column, parent in enumerate(self.parents, start=1):
            sees[column] |= sees[parent]
        return sees


def grow_tree(log_probs: Sequence[Sequence[float]], token_ids: Sequence[Sequence[int]], budget: int) -> DraftTree:
    """The tree of the `budget` likeliest paths, best first, where positions are independent (DDTree, algorithm 1).

    Args:
        log_probs: For each position behind the anchor its best log-probabilities, falling.
        token_ids: Whose they are.
        budget: Nodes at most; fewer if there are not so many paths.
    """
    tree = DraftTree([], [], [])
    # Minus the path's log-probability, its parent's, the parent's column, its position and its rank there.
    frontier = [(-log_probs[0][0], 0.0, 0, 0, 0)] if log_probs else []
    while frontier and len(tree.token_ids) < budget:
        cost, cost_of_parent, parent, position, rank = heapq.heappop(frontier)
        if cost == math.inf:  # a token that the drafter cannot say
            break
        tree.token_ids.append(token_ids[position][rank])
        tree.parents.append(parent)
        tree.probabilities.append(math.exp(-cost))
        if rank + 1 < len(log_probs[position]):
            sibling = cost_of_parent - log_probs[position][rank + 1]
            heapq.heappush(frontier, (sibling, cost_of_parent, parent, position, rank + 1))
        if position + 1 < len(log_probs):
            child = cost - log_probs[position + 1][0]
            heapq.heappush(frontier, (child, cost, len(tree.token_ids), position + 1, 0))
    return tree
