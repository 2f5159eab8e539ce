"""HTML of two answers: their texts, speeds and acceptance. Nothing here loads a model, reads a clock or needs Gradio."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from dflash import Block
from dflash.cli.terminal import TextStream, number


HEAD = (
    '<div class="head"><h1>DFlash, side by side</h1><p>A small drafter proposes a block of tokens. The target checks all of them '
    "in one forward and keeps those that it would have written itself. The text is the target’s own, in fewer forwards. "
    '<a href="https://arxiv.org/abs/2602.06036">The paper</a></p></div>'
)

LEGEND = '<span class="drafted">draft accepted</span> <span class="own">target’s own</span>'
LINE = (
    "<p>First target.generate, then DFlash: each has the machine to itself, and drawing this page is not counted.</p>"
)


@dataclass(frozen=True)
class Step:
    """The text that one forward of the target added: the accepted drafts, then the target's own token.

    Attributes:
        drafted: Text of the accepted drafts.
        own: Text of the target's own token.
        num_accepted: Accepted tokens, before stop and length cuts.
        num_proposals: Drafted tokens; 0 where nothing was drafted, as in the prompt's forward.
    """

    drafted: str
    own: str
    num_accepted: int = 0
    num_proposals: int = 0


class Answer:
    """The text that one decoder has written so far, and its seconds, which the caller sets."""

    def __init__(self, tokenizer: Any = None) -> None:
        self._stream = TextStream(tokenizer)
        self.steps: list[Step] = []
        self.rest = ""
        self.num_tokens = 0
        self.seconds = 0.0
        self.is_done = False

    def add_tokens(self, token_ids: list[int]) -> None:
        """Adds tokens of plain decoding."""
        self.num_tokens += len(token_ids)
        self.steps.append(Step("", self._stream.push(token_ids)))

    def add_block(self, block: Block) -> None:
        """Adds a block of DFlash."""
        self.num_tokens += len(block.token_ids)
        drafted = self._stream.push(block.token_ids[: block.num_accepted])
        own = self._stream.push(block.token_ids[block.num_accepted :])
        self.steps.append(Step(drafted, own, block.num_accepted, block.num_proposals))

    def end(self, seconds: float) -> None:
        """Adds the bytes of an unfinished character, and sets the seconds of the whole decode."""
        self.rest = self._stream.push([], is_last=True)
        self.seconds, self.is_done = seconds, True

    @property
    def verified(self) -> list[Step]:
        """The verify steps: those with proposals."""
        return [step for step in self.steps if step.num_proposals]

    @property
    def tokens_per_second(self) -> float:
        """New tokens over all seconds, the prompt's forward included; NaN before the first."""
        return self.num_tokens / self.seconds if self.seconds else math.nan

    @property
    def tau(self) -> float:
        """Mean acceptance length, the target's own token counted; NaN without a verify step."""
        return _over(sum(step.num_accepted + 1 for step in self.verified), len(self.verified))

    @property
    def tokens_per_step(self) -> float:
        """Tokens kept after the first, per verify step; NaN without one."""
        return _over(self.num_tokens - 1, len(self.verified))


def page(plain: Answer | None = None, fast: Answer | None = None, verdict: str = "", note: str = "") -> str:
    """Both answers side by side, the verdict, and the tokens that each step accepted."""
    left = _side("plain", "target.generate", "one token per forward", plain, "The target by itself writes here first.")
    right = _side("fast", "DFlash", LEGEND, fast, "DFlash writes here when target.generate has ended.")
    status = f'<p class="verdict" role="status">{escape(verdict)}</p>' if verdict else ""
    return f'<div class="race">{left}{right}</div>{status}{_acceptance(plain, fast)}<p class="note">{escape(note)}</p>'


def setup(block_size: int, dtype: str, device: str) -> str:
    """The note under the answers: what was run, and why a step can be longer than a block."""
    return (
        f"Greedy, batch 1, block size {block_size}, {dtype}, {device}. Where the text repeats itself, a step proposes what "
        "followed before, and can add more tokens than a block has."
    )


def stopped(shown: str) -> str:
    """The page as it stood when its visitor pressed Stop."""
    return shown.replace(" writes", " stopped")


def problem(sentence: str) -> str:
    """An error in place of the answers."""
    return f'<p class="problem" role="alert">{escape(sentence)}</p>'


def _side(name: str, title: str, subtitle: str, answer: Answer | None, waiting: str) -> str:
    if answer is None:
        text, rate, state = f'<span class="waiting">{waiting}</span>', "–", "waits"
    else:
        text = "".join(map(_marked if name == "fast" else _plain, answer.steps)) + escape(answer.rest)
        rate = "–" if math.isnan(answer.tokens_per_second) else f"{answer.tokens_per_second:,.0f}"
        state = "done" if answer.is_done else "writes"
    tokens = f"{answer.num_tokens} tokens" if answer else ""
    return (
        f'<section class="side {name} {state}" aria-label="{title}"><header><h2>{title}<small>{subtitle}</small></h2>'
        f'<div class="rate"><b>{rate}</b> tokens/s<small>{tokens}</small></div></header>'
        f'<p class="answer">{text}</p></section>'
    )


def _plain(step: Step) -> str:
    return escape(step.own)


def _marked(step: Step) -> str:
    drafted = f'<span class="drafted">{escape(step.drafted)}</span>' if step.drafted else ""
    own = f'<span class="own">{escape(step.own)}</span>' if step.own else ""
    says = f"{step.num_accepted} of {step.num_proposals} drafted tokens accepted"
    return f'<span class="block" title="{says}">{drafted}{own}</span>'


def _acceptance(plain: Answer | None, fast: Answer | None) -> str:
    """The figures, a bar for each verify step, and the histogram of acceptance lengths."""
    answer = fast or Answer()
    steps = answer.verified
    block_size = max((step.num_proposals + 1 for step in steps), default=16)
    lengths = [step.num_accepted + 1 for step in steps]
    counts = [lengths.count(length) for length in range(1, block_size + 1)]
    forwards = f"{len(answer.steps)} <small>instead of {len(plain.steps)}</small>" if plain and fast else "-"
    speedup = _over(answer.tokens_per_second, plain.tokens_per_second) if plain and answer.is_done else math.nan
    figures = {
        "speed-up": "-" if math.isnan(speedup) else f"{speedup:.2f}×",
        "tau": number(answer.tau),
        "tokens per step": number(answer.tokens_per_step),
        "forwards of the target": forwards,
    }
    named = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in figures.items())
    bars = "".join(
        f'<i title="step {index}: {step.num_accepted} drafted tokens and one of the target’s own">'
        f'<i class="drafted" style="height:{100 * step.num_accepted / block_size:.2f}%"></i>'
        f'<i class="own" style="height:{100 / block_size:.2f}%"></i></i>'
        for index, step in enumerate(steps, start=1)
    )
    most = max(counts) or 1
    columns = "".join(
        f'<i title="{count} steps of length {length}"><small>{count or ""}</small>'
        f'<i class="count" style="height:{72 * count / most:.1f}%"></i><b>{length}</b></i>'
        for length, count in enumerate(counts, start=1)
    )
    return (
        f'<section class="acceptance" aria-label="Acceptance"><dl>{named}</dl>{_cost(answer, speedup)}<div class="charts">'
        f'<figure class="by-step"><figcaption>Tokens of each step; pale: drafted and refused</figcaption>'
        f'<div class="plot"><div class="axis" aria-hidden="true"><b>{block_size}</b><b>{block_size // 2}</b><b>0</b></div>'
        f'<div class="bars" role="img" aria-label="Acceptance lengths: {_list(lengths)}">{bars}</div></div></figure>'
        f'<figure class="histogram"><figcaption>Steps by their number of tokens</figcaption>'
        f'<div class="bars" role="img" aria-label="Steps of length 1, 2, …: {_list(counts)}">{columns}</div></figure>'
        f"</div></section>"
    )


def _cost(answer: Answer, speedup: float) -> str:
    """Why speed-up and tokens per step differ: the cost of a step."""
    cost = answer.tokens_per_step / speedup
    if math.isnan(cost):
        return ""
    why = ": target.generate does more work around each forward" if cost < 1 else ""
    return (
        f'<p class="cost">Speed-up is tokens per step over the cost of a step, here {cost:.2f} plain steps{why}.</p>'
    )


def _list(values: Sequence[int]) -> str:
    return ", ".join(map(str, values)) or "none yet"


def _over(total: float, count: float) -> float:
    return total / count if count else math.nan
