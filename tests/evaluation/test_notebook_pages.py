"""What notebooks show is what happened: every token in its colour, every count, every layer and key."""

from __future__ import annotations

import html
import re
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoTokenizer

from dflash import Block, DFlashConfig
from dflash.checkpoints import TARGET_NAME, embedded_path
from dflash.model.attention_dflash import draft_sees
from dflash.notebooks import (
    ACCEPTED_STYLE,
    BLUE,
    GREEN,
    GREY,
    OWN_STYLE,
    REJECTED_STYLE,
    draw_acceptance,
    draw_taps,
    draw_visibility,
    show_blocks,
    show_step,
)


SPAN = re.compile(r'<span style="([^"]*)" title="([^"]*)">(.*?)</span>(?!\d)')


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(embedded_path(TARGET_NAME))


def words(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def block(accepted: list[int], own: list[int], **fields: Any) -> Block:
    return Block([*accepted, *own], num_proposals=7, num_accepted=len(accepted), **fields)


def spans(page: str) -> list[tuple[str, str, str]]:
    """Style, title and text of each run, the legend's left out."""
    body = page.split('<div style="font-size')[0].replace("<span>&#36;</span>", "&#36;")
    return [(style, title, html.unescape(text)) for style, title, text in SPAN.findall(body)]


def test_blocks_are_shown_whole_and_each_run_in_its_colour(tokenizer: Any) -> None:
    first, accepted, own = words(tokenizer, "Ann")[:1], words(tokenizer, " has 3 + 4"), words(tokenizer, " = 7")[:1]
    blocks = [block([], first, is_prefill=True), block(accepted, own), block([], own)]
    page = show_blocks(blocks, tokenizer)
    text = tokenizer.decode([*first, *accepted, *own, *own])
    shown = spans(page._repr_html_())
    assert "".join(run for *_, run in shown) == text
    assert [style for style, *_ in shown] == [OWN_STYLE, ACCEPTED_STYLE, OWN_STYLE, OWN_STYLE]
    assert [title for _, title, _ in shown] == [
        "the prompt's forward".replace("'", "&#x27;"),
        *[f"step 1: {len(accepted)} of 7 accepted"] * 2,
        "step 2: 0 of 7 accepted",
    ]
    tau = (len(accepted) + 1 + 1) / 2
    assert f"2 steps, tau {tau:.2f}" in page.html
    assert f"[{tokenizer.decode(accepted)}]" in repr(page)
    assert repr(page).endswith(f"2 steps, tau {tau:.2f}")


def test_text_cannot_become_markup_or_formulas(tokenizer: Any) -> None:
    """Front ends run HTML and typeset what stands between two dollar signs: answers hold both."""
    text = "$<<8*3=24>>24 and $<b>5</b>"
    page = show_blocks([block(words(tokenizer, text), [], is_prefill=True)], tokenizer)
    assert "<b>" not in page.html
    assert "$" not in page.html
    assert page.html.count("<span>&#36;</span>") == 2
    assert "".join(run for *_, run in spans(page.html)) == text


def test_a_character_of_two_blocks_is_shown_once(tokenizer: Any) -> None:
    """A character whose bytes two steps gave stands where it was completed."""
    ids = words(tokenizer, "é日")
    assert len(ids) > 2
    page = show_blocks([block([], [i]) for i in ids], tokenizer)
    assert "".join(run for *_, run in spans(page.html)) == "é日"


def test_other_sequences_of_a_batch_are_left_out(tokenizer: Any) -> None:
    mine, other = words(tokenizer, "apples"), words(tokenizer, "pens")
    page = show_blocks([block(mine, []), block(other, [], sequence=1)], tokenizer)
    assert "".join(run for *_, run in spans(page.html)) == "apples"
    assert "1 steps" in page.html


def test_tau_counts_what_a_stop_cut_off(tokenizer: Any) -> None:
    """As the paper does: the step accepted 5 and gave 6, though the text ends with the third."""
    page = show_blocks([Block(words(tokenizer, "a b c")[:3], num_proposals=7, num_accepted=5)], tokenizer)
    assert "1 steps, tau 6.00" in page.html
    assert {style for style, *_ in spans(page.html)} == {ACCEPTED_STYLE}


def test_no_step_has_no_tau(tokenizer: Any) -> None:
    assert "0 steps, tau -" in repr(show_blocks([], tokenizer))


@pytest.mark.parametrize("num_accepted", [0, 2, 3])
def test_step_shows_what_fell_and_what_stands_instead(tokenizer: Any, num_accepted: int) -> None:
    proposals, choices = torch.tensor([[10, 11, 12]]), torch.tensor([[20, 21, 22, 23]])
    page = show_step(proposals, choices, num_accepted, anchor=30, tokenizer=tokenizer)
    rows = re.findall(r"<tr><th>(\w+)</th>(.*?)</tr>", page.html)
    assert [name for name, _ in rows] == ["position", "drafted", "target"]
    cells = [re.findall(r'<td style="[^"]*?;([^"]*)">', row) for _, row in rows]
    assert [len(row) for row in cells] == [5, 5, 5]
    drafted, chosen = ([style.split("padding:2px 6px;")[-1] for style in row] for row in cells[1:])
    assert drafted[1 : 1 + num_accepted] == chosen[1 : 1 + num_accepted] == [ACCEPTED_STYLE] * num_accepted
    assert chosen[1 + num_accepted] == OWN_STYLE
    assert drafted.count(REJECTED_STYLE) == (num_accepted < 3)
    assert f"{num_accepted} of 3 accepted, then {tokenizer.decode([20 + num_accepted])!r}" in repr(page)


def config(**fields: Any) -> DFlashConfig:
    return DFlashConfig(
        **{"num_hidden_layers": 2, "block_size": 4, "mask_token_id": 3, "num_target_layers": 8, **fields}
    )


def test_taps_are_the_green_layers() -> None:
    axes = MagicMock()
    draw_taps(axes, config(target_layer_ids=[1, 4, 6]))
    layers = [call for call in axes.barh.call_args_list if call.kwargs["left"] == -0.42]
    assert [call.kwargs["color"] == GREEN for call in layers] == [i in (1, 4, 6) for i in range(8)]
    assert {call.kwargs["color"] for call in layers} == {GREEN, GREY}
    assert axes.annotate.call_count == 3 + 2  # an arrow from each tap, and one to each layer of the drafter


def test_taps_of_a_target_of_unknown_depth_are_refused() -> None:
    with pytest.raises(ValueError, match=r"num_target_layers=None: .* write it"):
        draw_taps(MagicMock(), config(num_target_layers=None, target_layer_ids=[1]))


def test_every_line_of_a_mask_is_drawn() -> None:
    """Minor ticks that met a label's tick were dropped, and with them lines of the grid."""
    figures = pytest.importorskip("matplotlib.figure", reason="needs the extra eval")
    backends = pytest.importorskip("matplotlib.backends.backend_agg", reason="needs the extra eval")
    canvas = backends.FigureCanvasAgg(figures.Figure(figsize=(10, 4)))
    axes = canvas.figure.add_subplot()
    draw_visibility(axes, torch.ones(6, 18, dtype=torch.bool), block_size=6)
    canvas.draw()
    shades = torch.frombuffer(bytearray(canvas.buffer_rgba()), dtype=torch.uint8).view(400, 1000, 4)[..., :3].sum(-1)

    def contrast(x: float, y: float) -> torch.Tensor:
        """The largest difference in brightness within two pixels of a point of the mask."""
        column, line = axes.transData.transform((x, y)).round().astype(int)
        around = shades.flip(0)[line - 2 : line + 3, column - 2 : column + 3]
        return around.max() - around.min()

    assert contrast(3.2, 2.2) == 0  # inside a square
    assert all(contrast(i - 0.5, 2.2) > 60 for i in range(1, 18))
    assert all(contrast(3.2, i - 0.5) > 60 for i in range(1, 6))


@pytest.mark.parametrize("window", [None, 4])
def test_filled_squares_are_the_keys_that_a_position_sees(window: int | None) -> None:
    sliding = {"layer_types": ["sliding_attention"] * 2, "use_sliding_window": True, "sliding_window": window}
    shown = config(**(sliding if window else {}))
    visible = draft_sees(shown, 0, torch.tensor([5]), 4, 9)[0]
    axes = MagicMock()
    draw_visibility(axes, visible, block_size=4, labels=["anchor", "mask", "mask", "mask"])
    picture = torch.tensor(axes.imshow.call_args.args[0])
    assert torch.equal((picture != 1).any(dim=-1), visible)
    for columns, colour in ((slice(0, 5), BLUE), (slice(5, 9), GREEN)):
        filled = picture[:, columns][visible[:, columns]]
        wanted = torch.tensor([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
        assert torch.equal((filled * 255).round().long(), wanted.expand(len(filled), 3))


def test_bars_are_acceptance_lengths() -> None:
    axes = MagicMock()
    draw_acceptance(axes, [4, 1, 3], block_size=8)
    drafts, own = axes.bar.call_args_list
    assert list(drafts.args[0]) == [1, 2, 3]
    assert drafts.args[1] == own.kwargs["bottom"] == [3, 0, 2]
    assert own.args[1] == [1, 1, 1]
    assert axes.axhline.call_args.args[0] == pytest.approx(8 / 3)
    draw_acceptance(MagicMock(), [], block_size=8)  # a text of one token
