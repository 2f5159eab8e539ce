"""Where the blocks of one document begin. It knows token positions and seeds, no model, no text and no neighbours."""

from __future__ import annotations

import random
from collections.abc import Sequence


NO_ANCHOR = -1


def valid_anchors(loss_mask: Sequence[int]) -> list[int]:
    """Positions a block may begin at: supervised, as is the next token.

    While decoding, an anchor is a token that the target has written and its successor is what the drafter proposes first; a
    position whose successor is a prompt never occurs.
    """
    return [i for i in range(len(loss_mask) - 1) if loss_mask[i] and loss_mask[i + 1]]


def sample_anchors(loss_mask: Sequence[int], num_anchors: int, *, seed: int, epoch: int, index: int) -> list[int]:
    """At most `num_anchors` distinct valid anchors in ascending order, drawn anew each epoch.

    They depend on `(seed, epoch, index)` and on the sequence alone, `index` being the sequence's place in the data: neither the
    batch it lands in nor a restart changes them. A sequence with fewer valid positions gives all of them.

    Example:
        >>> sample_anchors([0, 0, 1, 1, 1], 8, seed=0, epoch=0, index=0)
        [2, 3]
    """
    candidates = valid_anchors(loss_mask)
    rng = random.Random(f"{seed}-{epoch}-{index}")
    return sorted(rng.sample(candidates, min(num_anchors, len(candidates))))


def fixed_anchors(loss_mask: Sequence[int], stride: int) -> list[int]:
    """Every `stride`-th valid anchor of each response from its first on, the same each epoch.

    With the block size as stride a response is cut into blocks as ordinary block diffusion cuts it, which the paper compares
    random anchors with (table 13).

    Example:
        >>> fixed_anchors([0, 0, 1, 1, 1, 1, 1, 1], 2)
        [2, 4, 6]
    """
    anchors: list[int] = []
    previous, begin = None, 0
    for anchor in valid_anchors(loss_mask):
        if previous is None or anchor != previous + 1:
            begin = anchor
        if (anchor - begin) % stride == 0:
            anchors.append(anchor)
        previous = anchor
    return anchors
