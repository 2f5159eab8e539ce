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
    stream = TextStream(tokenizer)
    spans: list[str] = []
    plain: list[str] = []
    lengths: list[int] = []
    for block in blocks:
        if block.sequence:
            continue
        title = "the prompt's forward"
        if not block.is_prefill:
            lengths.append(block.acceptance_length)
            title = f"step {len(lengths)}: {block.num_accepted} of {block.num_proposals} accepted"
        accepted = stream.push(block.token_ids[: block.num_accepted])
        own = stream.push(block.token_ids[block.num_accepted :])
        if accepted:
            spans.append(_span(accepted, ACCEPTED_STYLE, title))
            plain.append(f"[{accepted}]")
        if own:
            spans.append(_span(own, OWN_STYLE, title))
            plain.append(own)
    rest = stream.push([], is_last=True)  # half a character that nothing completed
    mean = number(tau(sum(lengths), len(lengths)))
    figures = f"{len(lengths)} steps, tau {mean}"
    accepted_key = _span("accepted drafts", ACCEPTED_STYLE)
    own_key = _span("the target’s own token", OWN_STYLE)
    body = "".join(spans) + _text(rest)
    legend = f'<div style="font-size:smaller">{accepted_key} {own_key} {figures}</div>'
    text = "".join(plain) + rest
    return Page(f'<div style="{TEXT_STYLE}">{body}{legend}</div>', f"{text}\n{figures}")


def show_step(
    proposals: torch.Tensor,  # [1, n]
    choices: torch.Tensor,  # [1, n + 1]
    num_accepted: int,
    anchor: int,
    tokenizer: Any,
) -> Page:
    """One step as a table: the proposals after the anchor, and below them the target's choices for the same positions."""
    drafted = [tokenizer.decode([token_id]) for token_id in proposals[0].tolist()]
    chosen = [tokenizer.decode([token_id]) for token_id in choices[0].tolist()]
    num_proposals = len(drafted)
    positions = [_cell("anchor")]
    drafts = [_cell("")]
    targets = [_cell(tokenizer.decode([anchor]))]
    for index, choice in enumerate(chosen):
        draft_style = choice_style = UNUSED_STYLE
        if index < num_accepted:
            draft_style = choice_style = ACCEPTED_STYLE
        elif index == num_accepted:
            draft_style = REJECTED_STYLE
            choice_style = OWN_STYLE
        positions.append(_cell(f"+{index + 1}"))
        drafts.append(_cell(drafted[index], draft_style) if index < num_proposals else _cell(""))
        targets.append(_cell(choice, choice_style))
    body = _row("position", positions) + _row("drafted", drafts) + _row("target", targets)
    accepted = f"{num_accepted} of {num_proposals} accepted"
    own = chosen[num_accepted]
    return Page(
        f'<div style="overflow-x:auto"><table>{body}</table><small>{accepted}</small></div>',
        f"drafted {drafted}\ntarget  {chosen}\n{accepted}, then {own!r}",
    )


def draw_taps(axes: Any, config: DFlashConfig) -> None:
    """Draws the target's layers, the taps among them, and where the context features enter the drafter.

    Raises:
        ValueError: if the config does not say how many layers the target has.
    """
    depth = config.num_target_layers
    if depth is None:
        raise ValueError("num_target_layers=None: the drawing needs the target's depth, write it into the config.")
    taps = config.target_layer_ids or []
    middle = (depth - 1) / 2
    for layer in range(depth):
        colour = GREEN if layer in taps else GREY
        _box(axes, 0, layer, f"layer {layer}", colour, height=0.8)
    for layer in taps:
        _arrow(axes, (0.42, layer), (1.08, middle))
    projection = f"fc of {len(taps)} × {config.hidden_size},\nhidden_norm"
    _box(axes, 1.5, middle, projection, BLUE, height=1.6)
    step = depth / (config.num_hidden_layers + 1)
    thickness = min(1.6, 0.8 * step)
    for index in range(config.num_hidden_layers):
        y = step * (index + 1) - 0.5
        _arrow(axes, (1.92, middle), (2.58, y))
        _box(axes, 3, y, f"drafter {index}\nkeys, values", MAGENTA, thickness)
    axes.set_xlim(-0.5, 3.5)
    axes.set_ylim(-0.7, depth - 0.3)
    axes.set_xticks([0, 1.5, 3], ["target", "context features", "drafter"])
    axes.set_yticks([])
    axes.tick_params(length=0)
    axes.set_frame_on(False)


def draw_visibility(axes: Any, visible: torch.Tensor, block_size: int, labels: Sequence[str] = ()) -> None:
    """Draws an attention mask [positions, keys]: a filled square is a key that the position sees.

    Args:
        axes: Of matplotlib.
        visible: A bool mask; the last columns are the positions' own keys, those before them the context.
        block_size: Positions of a block, anchor included; lines separate the blocks.
        labels: Names of the positions.
    """
    num_positions, num_keys = visible.shape
    context = num_keys - num_positions
    picture = _picture(visible, context)
    axes.imshow(picture.numpy(), aspect="equal", interpolation="nearest")
    # Lines and not a grid of minor ticks: matplotlib drops a minor tick that coincides with a major one.
    for key in range(1, num_keys):
        axes.axvline(key - 0.5, color="white", linewidth=0.7)
    for position in range(1, num_positions):
        axes.axhline(position - 0.5, color="white", linewidth=0.7)
    for start in range(0, num_positions + 1, block_size):
        axes.axhline(start - 0.5, color="black", linewidth=1)
        axes.axvline(context + start - 0.5, color="black", linewidth=1)
    middle_of_context = (context - 1) / 2
    middle_of_blocks = context + (num_positions - 1) / 2
    axes.set_xticks([middle_of_context, middle_of_blocks], ["context features", "the blocks' own keys"])
    axes.set_yticks(range(len(labels)), labels)
    axes.tick_params(length=0)


def _picture(visible: torch.Tensor, context: int) -> torch.Tensor:
    """Colours [positions, keys, 3] of a mask: the context's keys blue, the positions' own green, what is not seen white."""
    num_positions, _ = visible.shape
    of_keys = [_rgb(BLUE)] * context + [_rgb(GREEN)] * num_positions
    seen = torch.tensor(of_keys)
    white = torch.ones(3)
    return torch.where(visible.unsqueeze(-1), seen, white)


def draw_acceptance(axes: Any, lengths: Sequence[int], block_size: int) -> None:
    """Draws one bar for each verify step: accepted drafts, with the target's own token on top. The mean is tau."""
    num_steps = len(lengths)
    steps = range(1, num_steps + 1)
    accepted = [length - 1 for length in lengths]
    axes.bar(steps, accepted, color=GREEN, label="accepted drafts")
    axes.bar(steps, [1] * num_steps, bottom=accepted, color=MAGENTA, label="the target's own token")
    if lengths:
        mean = tau(sum(lengths), num_steps)
        axes.axhline(mean, color="black", linestyle="--", linewidth=1, label=f"tau {mean:.2f}")
    axes.set_xlabel("verify step")
    axes.set_ylabel("acceptance length")
    axes.set_ylim(0, block_size + 0.5)
    axes.locator_params(integer=True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.18), ncols=3, frameon=False)


def _text(text: str) -> str:
    """`text` as HTML. A dollar sign gets an element of its own: front ends read text between two of them as TeX."""
    return escape(text).replace("$", "<span>&#36;</span>")


def _span(text: str, style: str, title: str = "") -> str:
    return f'<span style="{style}" title="{escape(title)}">{_text(text)}</span>'


def _row(name: str, cells: Sequence[str]) -> str:
    return f"<tr><th>{name}</th>{''.join(cells)}</tr>"


def _cell(text: str, style: str = "") -> str:
    visible = text.replace("\n", "↵").replace(" ", "␣")
    return f'<td style="{CELL_STYLE};{style}">{_text(visible)}</td>'


def _box(axes: Any, x: float, y: float, text: str, colour: str, height: float) -> None:
    axes.barh(y, 0.84, left=x - 0.42, height=height, color=colour, alpha=0.75)
    axes.text(x, y, text, ha="center", va="center", fontsize=8)


def _arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float]) -> None:
    axes.annotate("", xy=end, xytext=begin, arrowprops={"arrowstyle": "->", "color": "grey", "linewidth": 0.9})


def _rgb(colour: str) -> list[float]:
    return [part / 255 for part in bytes.fromhex(colour.removeprefix("#"))]
