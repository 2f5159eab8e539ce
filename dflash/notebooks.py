"""HTML and drawings for notebooks: a text with its accepted tokens in colour, one step token by token, taps and masks.

Drawings go to axes that the caller made with matplotlib, which is not imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

import torch

from .cli.terminal import TextStream, number
from .common.acceptance import tau


if TYPE_CHECKING:
    from .drafter import DFlashConfig
    from .model.decoding_dflash import Block


# Half transparent, so that the page's own colour of text stays readable on light and dark pages.
ACCEPTED_STYLE = "background:rgba(46,160,67,.32);border-radius:3px"
OWN_STYLE = "background:rgba(191,75,190,.34);border-radius:3px;font-weight:600"
REJECTED_STYLE = "background:rgba(218,54,51,.28);border-radius:3px;text-decoration:line-through"
UNUSED_STYLE = "opacity:.45"
TEXT_STYLE = "white-space:pre-wrap;font-family:monospace;line-height:1.7;text-align:left"
CELL_STYLE = "white-space:pre;font-family:monospace;text-align:center;padding:2px 6px"

GREEN, MAGENTA, RED, GREY, BLUE = "#2ea043", "#bf4bbe", "#da3633", "#c4c9d0", "#4c8eda"


@dataclass(frozen=True)
class Page:
    """Coloured HTML for a notebook, and the same as text for a terminal."""

    html: str
    text: str

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.text


def show_blocks(blocks: Iterable[Block], tokenizer: Any) -> Page:
    """The text of one prompt's blocks: accepted drafts green, the target's own tokens magenta, a step's count on hover.

    Args:
        blocks: From `generate_blocks`; of several sequences, the first one's.
        tokenizer: The target's.

    Example:
        >>> show_blocks(generate_blocks(drafter, target, input_ids, temperature=0.0), tokenizer)
    """
    stream, spans, plain, lengths = TextStream(tokenizer), [], [], []
    for block in blocks:
        if block.sequence:
            continue
        title = "the prompt's forward"
        if not block.is_prefill:
            lengths.append(block.acceptance_length)
            title = f"step {len(lengths)}: {block.num_accepted} of {block.num_proposals} accepted"
        accepted = stream.push(block.token_ids[: block.num_accepted])
        own = stream.push(block.token_ids[block.num_accepted :])
        spans += [_span(accepted, ACCEPTED_STYLE, title), _span(own, OWN_STYLE, title)]
        plain += [f"[{accepted}]" if accepted else "", own]
    rest = stream.push([], is_last=True)  # half a character that nothing completed
    mean = number(tau(sum(lengths), len(lengths)))
    legend = (
        f"{_span('accepted drafts', ACCEPTED_STYLE)} {_span('the target’s own token', OWN_STYLE)} "
        f"{len(lengths)} steps, tau {mean}"
    )
    body = "".join([*spans, _text(rest)])
    return Page(
        f'<div style="{TEXT_STYLE}">{body}<div style="font-size:smaller">{legend}</div></div>',
        f"{''.join([*plain, rest])}\n{len(lengths)} steps, tau {mean}",
    )


def show_step(
    proposals: torch.Tensor,  # [1, n]
    choices: torch.Tensor,  # [1, n + 1]
    num_accepted: int,
    anchor: int,
    tokenizer: Any,
) -> Page:
    """One step as a table: the proposals after the anchor, and below them the target's choices for the same positions."""
    drafted = [tokenizer.decode([i]) for i in proposals[0].tolist()]
    chosen = [tokenizer.decode([anchor]), *(tokenizer.decode([i]) for i in choices[0].tolist())]
    looks = [ACCEPTED_STYLE] * num_accepted + [REJECTED_STYLE] + [UNUSED_STYLE] * len(drafted)
    kept = ["", *[ACCEPTED_STYLE] * num_accepted, OWN_STYLE] + [UNUSED_STYLE] * len(drafted)
    rows = {
        "position": [_cell(text, "") for text in ["anchor", *(f"+{i}" for i in range(1, len(chosen)))]],
        "drafted": [_cell("", ""), *map(_cell, drafted, looks), _cell("", "")],
        "target": [*map(_cell, chosen, kept)],
    }
    body = "".join(f"<tr><th>{name}</th>{''.join(cells)}</tr>" for name, cells in rows.items())
    accepted = f"{num_accepted} of {proposals.shape[1]} accepted"
    plain = [f"drafted {drafted}", f"target  {chosen[1:]}", f"{accepted}, then {chosen[num_accepted + 1]!r}"]
    scroll = '<div style="overflow-x:auto">'
    return Page(f"{scroll}<table>{body}</table><small>{accepted}</small></div>", "\n".join(plain))


def draw_taps(axes: Any, config: DFlashConfig) -> None:
    """Draws the target's layers, the taps among them, and where the context features enter the drafter.

    Raises:
        ValueError: if the config does not say how many layers the target has.
    """
    depth = config.num_target_layers
    if depth is None:
        raise ValueError("num_target_layers=None: the drawing needs the target's depth, write it into the config.")
    taps, layers = list(config.target_layer_ids or ()), config.num_hidden_layers
    middle = (depth - 1) / 2
    for layer in range(depth):
        _box(axes, 0, layer, f"layer {layer}", GREEN if layer in taps else GREY, height=0.8)
    for layer in taps:
        _arrow(axes, (0.42, layer), (1.08, middle))
    _box(axes, 1.5, middle, f"fc of {len(taps)} × {config.hidden_size},\nhidden_norm", BLUE, height=1.6)
    step = depth / (layers + 1)
    for index in range(layers):
        height = step * (index + 1) - 0.5
        _arrow(axes, (1.92, middle), (2.58, height))
        _box(axes, 3, height, f"drafter {index}\nkeys, values", MAGENTA, height=min(1.6, 0.8 * step))
    axes.set(xlim=(-0.5, 3.5), ylim=(-0.7, depth - 0.3), xticks=(0, 1.5, 3))
    axes.set_xticklabels(["target", "context features", "drafter"])
    _bare(axes)


def draw_visibility(axes: Any, visible: torch.Tensor, block_size: int, labels: Sequence[str] = ()) -> None:
    """Draws an attention mask [positions, keys]: a filled square is a key that the position sees.

    Args:
        axes: Of matplotlib.
        visible: A bool mask; the last columns are the positions' own keys, those before them the context.
        block_size: Positions of a block, anchor included; lines separate the blocks.
        labels: Names of the positions.
    """
    rows, keys = visible.shape
    context = keys - rows
    picture = torch.ones(rows, keys, 3)
    picture[:, :context][visible[:, :context]] = torch.tensor(_rgb(BLUE))
    picture[:, context:][visible[:, context:]] = torch.tensor(_rgb(GREEN))
    axes.imshow(picture.numpy(), aspect="equal", interpolation="nearest")
    # Lines and not a grid of minor ticks: matplotlib drops a minor tick that coincides with a major one.
    axes.vlines([i - 0.5 for i in range(1, keys)], -0.5, rows - 0.5, color="white", linewidth=0.7)
    axes.hlines([i - 0.5 for i in range(1, rows)], -0.5, keys - 0.5, color="white", linewidth=0.7)
    for start in range(0, rows + 1, block_size):
        axes.axhline(start - 0.5, color="black", linewidth=1)
        axes.axvline(context + start - 0.5, color="black", linewidth=1)
    axes.set_xticks([(context - 1) / 2, context + (rows - 1) / 2], ["context features", "the blocks' own keys"])
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0)


def draw_acceptance(axes: Any, lengths: Sequence[int], block_size: int) -> None:
    """Draws one bar for each verify step: accepted drafts, with the target's own token on top. The mean is tau."""
    steps = range(1, len(lengths) + 1)
    accepted = [length - 1 for length in lengths]
    axes.bar(steps, accepted, color=GREEN, label="accepted drafts")
    axes.bar(steps, [1] * len(accepted), bottom=accepted, color=MAGENTA, label="the target's own token")
    if lengths:
        mean = tau(sum(lengths), len(lengths))
        axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"tau {mean:.2f}")
    axes.set(xlabel="verify step", ylabel="acceptance length", ylim=(0, block_size + 0.5))
    axes.locator_params(integer=True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), ncols=3, frameon=False)


def _text(text: str) -> str:
    """`text` as HTML. A dollar sign gets an element of its own: front ends read text between two of them as TeX."""
    return escape(text).replace("$", "<span>&#36;</span>")


def _span(text: str, style: str, title: str = "") -> str:
    return f'<span style="{style}" title="{escape(title)}">{_text(text)}</span>' if text else ""


def _cell(text: str, style: str) -> str:
    shown = escape(text.replace("\n", "↵")).replace(" ", "␣").replace("$", "<span>&#36;</span>")
    return f'<td style="{CELL_STYLE};{style}">{shown}</td>'


def _box(axes: Any, x: float, y: float, text: str, colour: str, height: float) -> None:
    axes.barh(y, 0.84, left=x - 0.42, height=height, color=colour, alpha=0.75)
    axes.text(x, y, text, ha="center", va="center", fontsize=8)


def _arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=begin, arrowprops={"arrowstyle": "->", "color": "grey", "linewidth": 0.9})


def _bare(axes: Any) -> None:
    axes.set_yticks([])
    axes.tick_params(length=0)
    for side in ("left", "right", "top", "bottom"):
        axes.spines[side].set_visible(False)


def _rgb(colour: str) -> list[float]:
    return [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
