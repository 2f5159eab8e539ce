"""Anchors: where blocks of a training sequence may begin, and what they depend on."""

import random

from dflash.training import sample_anchors, valid_anchors


def test_anchor_and_next_token_are_supervised() -> None:
    rng = random.Random(0)
    for _ in range(200):
        length = rng.randrange(1, 12)
        loss_mask = [rng.randrange(2) for _ in range(length)]
        expected = []
        for i in range(length):
            has_next = i + 1 < length
            if has_next and loss_mask[i] == 1 and loss_mask[i + 1] == 1:
                expected.append(i)
        assert valid_anchors(loss_mask) == expected
        anchors = sample_anchors(loss_mask, 3, seed=0, epoch=0, index=0)
        assert set(anchors) <= set(expected)
        assert len(anchors) == min(3, len(expected))


def test_last_token_of_a_response_is_no_anchor() -> None:
    assert valid_anchors([0, 1, 1, 0, 0]) == [1]
    assert valid_anchors([0, 0, 1]) == []
    assert sample_anchors([0, 0, 1], 4, seed=0, epoch=0, index=0) == []


def test_anchors_are_redrawn_each_epoch_and_depend_on_nothing_else() -> None:
    loss_mask = [0] * 10 + [1] * 90

    def draw(epoch: int, index: int = 7) -> list[int]:
        return sample_anchors(loss_mask, 16, seed=3, epoch=epoch, index=index)

    random.seed(1)
    first = draw(0)
    random.seed(2)
    assert draw(0) == first == sorted(set(first))
    assert len({tuple(draw(epoch)) for epoch in range(5)}) == 5
    assert draw(0, index=8) != first


def test_every_valid_position_is_drawn_equally_often() -> None:
    loss_mask = [0, 0] + [1] * 9
    seen = [0] * 11
    for epoch in range(2000):
        for anchor in sample_anchors(loss_mask, 4, seed=0, epoch=epoch, index=0):
            seen[anchor] += 1
    assert seen[:2] == [0, 0]
    assert seen[10] == 0  # nothing follows it
    assert all(850 < count < 1150 for count in seen[2:10])
