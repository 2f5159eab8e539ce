"""Where the blocks of one document begin. It knows token positions and seeds, no model, no text and no neighbours."""

from __future__ import annotations

import random
from collections.abc import Sequence


NO_ANCHOR = -1


def valid_anchors(loss_mask: Sequence[int]) -> list[int]:
    """Positions at which a block may begin: the token is supervised, and so is the next one.

    While decoding, an anchor is a token of the target, and the drafter proposes its successor first. A position whose
    successor belongs to a prompt never occurs.
    """
    return [i for i in range(len(loss_mask) - 1) if loss_mask[i] and loss_mask[i + 1]]


def sample_anchors(loss_mask: Sequence[int], num_anchors: int, *, seed: int, epoch: int, index: int) -> list[int]:
    """At most `num_anchors` distinct valid anchors in ascending order, drawn anew each epoch.

    They depend on `(seed, epoch, index)` and on the sequence alone, `index` being its place in the data. Neither its batch nor
    a restart changes them. A sequence with fewer valid positions gives all of them.

    Example:
        >>> sample_anchors([0, 0, 1, 1, 1], 8, seed=0, epoch=0, index=0)
        [2, 3]
    """
    candidates = valid_anchors(loss_mask)
    rng = random.Random(f"{seed}-{epoch}-{index}")
    return sorted(rng.sample(candidates, min(num_anchors, len(candidates))))
