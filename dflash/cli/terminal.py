"""Terminal output: progress bars, text with its accepted drafts marked, and the table of a comparison."""

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console, JustifyMethod
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from dflash.common.stopwatch import LINE_SECONDS, stopwatch


if TYPE_CHECKING:  # for annotations alone: importing these takes seconds
    from dflash.evaluation import Difference, TimedRun
    from dflash.model.decoding_dflash import Block


ACCEPTED_STYLE, OWN_STYLE = "green underline", "bold magenta"
OF_PROMPTS = ("measurements", "profiles")  # fields of a result that hold an entry for each prompt


@contextmanager
def progress_bar(what: str, num_steps: int, hidden: bool = False) -> Iterator[Callable[[], None]]:
    """Shows a bar on standard error until the end of the body and yields a function that ends a step."""
    with counting_bar(not hidden) as progress:
        task = progress.add_task(what, total=num_steps)
        yield lambda: progress.advance(task)


def counting_bar(is_first: bool, *more: ProgressColumn, auto_refresh: bool = True) -> Progress:
    """Returns a bar on standard error that counts items, with `more` columns and the time left.

    If standard error is not a terminal, one line per minute says how many items are done. Processes other than the
    first show neither, and the console of their bar prints nothing.
    """
    console = Console(stderr=True, highlight=False, quiet=not is_first)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *more, TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    hidden = not (is_first and console.is_terminal)
    return _LoggedBar(*columns, console=console, transient=True, disable=hidden, auto_refresh=auto_refresh)


class _LoggedBar(Progress):
    """A bar that prints one line per minute if it is not drawn.

    So a log of nohup, SLURM or docker shows that the work goes on.
    """

    def __init__(self, *columns: ProgressColumn, **options: Any) -> None:
        super().__init__(*columns, **options)
        self._since_line = stopwatch()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._print_line()

    def update(self, task_id: TaskID, **values: Any) -> None:
        super().update(task_id, **values)
        self._print_line()

    def _print_line(self) -> None:
        """Prints the state as a line, if the bar is not drawn and the last line is a minute old."""
        if not self.disable or self._since_line() < LINE_SECONDS:
            return
        self._since_line = stopwatch()
        (task,) = self.tasks
        line = f"{task.completed:,.0f}"
        if task.total:
            line += f" of {task.total:,.0f}"
        line += f": {task.description}"
        if task.fields.get("rate"):
            line += f", {task.fields['rate']}"
        self.console.print(line, soft_wrap=True)


class TextStream:
    """Decodes token ids piece by piece. An incomplete character waits for its other bytes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._length = 0

    def push(self, token_ids: Sequence[int], is_last: bool = False) -> str:
        """Returns the text that `token_ids` add, without special tokens."""
        self._token_ids += token_ids
        text = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        if text.endswith("\ufffd") and not is_last:
            return ""
        added = text[self._length :]
        self._length = len(text)
        return added


class BlockPrinter:
    """Prints blocks as they are committed and marks their accepted drafts, by colour or by [ ]."""

    def __init__(self, console: Console, tokenizer: Any, is_marked: bool = True) -> None:
        self._console = console
        self._stream = TextStream(tokenizer)
        self._is_marked = is_marked

    def block(self, block: "Block") -> None:
        """Prints a block: the accepted drafts, then the target's own token."""
        accepted = self._stream.push(block.token_ids[: block.num_accepted])
        own = self._stream.push(block.token_ids[block.num_accepted :])
        self._print(accepted, ACCEPTED_STYLE, "[{}]")
        self._print(own, OWN_STYLE)

    def tokens(self, token_ids: list[int]) -> None:
        """Prints tokens of plain decoding."""
        self._print(self._stream.push(token_ids))

    def end(self) -> None:
        """Prints an incomplete character, if one waits, and ends the line."""
        self._print(self._stream.push([], is_last=True))
        self._console.print()

    def _print(self, text: str, style: str = "", brackets: str = "{}") -> None:
        if not text:
            return
        if self._is_marked and not has_colour(self._console):
            text = brackets.format(text)
        self._console.print(Text(text, style if self._is_marked else ""), end="", soft_wrap=True)


def has_colour(console: Console) -> bool:
    """Returns whether the console shows colours. It does not in a pipe, on a dumb terminal, or if NO_COLOR is set."""
    return console.is_terminal and console.color_system is not None and not console.no_color


def legend(console: Console) -> Text:
    """Returns a line that explains the marks."""
    begin = "DFlash marks each block: "
    own = "the target's own token"
    if not has_colour(console):
        return Text(f"{begin}[accepted draft], then {own}")
    return Text.assemble(begin, ("accepted draft", ACCEPTED_STYLE), ", then ", (own, OWN_STYLE))


@dataclass(frozen=True)
class Comparison:
    """One prompt answered twice, and where the two texts first differ."""

    plain: "TimedRun"
    fast: "TimedRun"
    difference: "Difference | None"


def comparison_table(rows: Sequence[Comparison]) -> Table:
    """Returns a table of speeds, counts and whether the texts agree, with a row per prompt and a row for all."""
    table = Table(title="Tokens per second, the prompt's forward included", title_justify="left", title_style="dim")
    table.add_column("#")
    for name in ("tokens", "generate", "DFlash", "speed-up", "tau", "per step"):
        table.add_column(name, justify="right")
    # The most important cells are whole on any terminal.
    table.add_column("text", min_width=len("identical"))
    num_same = 0
    for number, row in enumerate(rows, start=1):
        difference = row.difference
        agreement = "identical"
        if difference is None:
            num_same += 1
        else:
            agreement = f"differs from token {difference.index}, margin {difference.margin:.2g}"
        table.add_row(str(number), *_figures([row]), agreement)
    if len(rows) > 1:
        table.add_section()
        agreement = "identical" if num_same == len(rows) else f"{num_same} of {len(rows)} identical"
        table.add_row("all", *_figures(rows), agreement)
    return table


def number(value: float | None) -> str:
    """Returns `value` with two decimals, or a dash if there was nothing to count."""
    return "-" if value is None or math.isnan(value) else f"{value:.2f}"


def _figures(rows: Sequence[Comparison]) -> list[str]:
    """Returns tokens, tokens/s of both runs, speed-up, tau and tokens per step, over all `rows`."""
    from dflash.evaluation import OURS, PLAIN, measured, summarise

    measurements = []
    for index, row in enumerate(rows):
        measurements += measured("", index, [{PLAIN: row.plain, OURS: row.fast}])
    plain, fast = summarise(measurements)
    return [
        str(fast["tokens"]),
        f"{plain['tokens_per_second']:.0f}",
        f"{fast['tokens_per_second']:.0f}",
        f"{fast['speedup']:.2f}x",
        number(fast["tau_micro"]),
        number(fast["tokens_per_step"]),
    ]


def print_result(result: dict[str, Any], as_json: bool, show: Callable[[dict[str, Any]], None]) -> None:
    """Prints a result on standard output: with `show`, or as one JSON object without the entries of single prompts."""
    if not as_json:
        show(result)
        return
    figures = {name: value for name, value in result.items() if name not in OF_PROMPTS}
    print(json.dumps(figures))


def show_table(table: tuple[list[str], list[list[str]]], title: str | None = None, num_names: int = 0) -> None:
    """Prints headings and cells, with figures to the right. A heading is wrapped to the width of its cells.

    Nothing is cut. If the terminal is too narrow, the columns that do not fit follow in a second table with the same
    first columns: `num_names` of them, or those without figures. In a pipe or a file, tables have any width.
    """
    headings, rows = table
    columns = []
    for index, heading in enumerate(headings):
        columns.append(_Column.of(heading, [row[index] for row in rows]))
    if not num_names:
        figures = [index for index, column in enumerate(columns) if column.is_figure]
        num_names = max(1, figures[0]) if figures else 1
    console = Console()
    is_bounded = console.is_terminal or "COLUMNS" in os.environ
    for table_columns in _tables(columns, num_names, console.width if is_bounded else sys.maxsize):
        _print_columns(table_columns, title)
        title = None


def show_facts(result: dict[str, Any], *more: str) -> None:
    """Prints what the figures of a result depend on and, if some texts differ, why they may."""
    from dflash.evaluation import caveat, place_of

    setup = result["environment"]
    decoding = result["decoding"]
    dtype = setup.get("target_dtype")
    facts = [setup.get("engine"), dtype, place_of(setup)]
    if "block_size" in setup:
        facts.append(f"block size {setup['block_size']}")
    facts += ["greedy, batch 1", *more]
    if "enable_thinking" in decoding:
        facts.append(f"thinking {'on' if decoding['enable_thinking'] else 'off'}")
    facts.append(f"at most {decoding['max_new_tokens']} tokens")
    line = ", ".join(filter(None, facts))
    warning = caveat(result["summary"], dtype)
    Console(highlight=False).print(Text(f"{line}. {warning}".rstrip(), "dim"))


def _print_columns(columns: "Sequence[_Column]", title: str | None) -> None:
    """Prints a table of these columns."""
    table = Table(title=title, title_justify="left", title_style="dim", padding=(0, 1, 0, 0), box=None)
    for column in columns:
        side: JustifyMethod = "right" if column.is_figure else "left"
        table.add_column(column.heading, justify=side, no_wrap=True)
    cells = [column.cells for column in columns]
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    width = max(_width(columns), len(title or ""))
    console = Console(width=width, highlight=False, markup=False)
    console.print(table)


@dataclass(frozen=True)
class _Column:
    """A heading, broken into lines, above its cells."""

    heading: str
    cells: list[str]
    is_figure: bool
    width: int  # number of letters of its longest line, and of the space after it

    @classmethod
    def of(cls, heading: str, cells: list[str]) -> "_Column":
        """Returns the column of these cells. Its heading is wrapped to the width of its cells and its words."""
        words = re.split(r"[ -]", heading)
        width = _max_letters(cells + words)
        hyphens = heading.count("-")
        broken = textwrap.fill(heading, width + hyphens, break_long_words=False)
        lines = broken.splitlines()
        max_letters = _max_letters(cells + lines)
        is_figure = any(cell[:1].isdigit() for cell in cells)
        return cls(broken, cells, is_figure, max_letters + 1)


def _max_letters(words: Sequence[str]) -> int:
    """Returns the number of letters of the longest word."""
    return max(map(len, words), default=0)


def _width(columns: Sequence[_Column]) -> int:
    """Returns the width of a table of these columns, in letters."""
    return sum(column.width for column in columns)


def _tables(columns: Sequence[_Column], num_names: int, width: int) -> Iterator[list[_Column]]:
    """Yields the columns of each table.

    Tables are at most `width` letters wide, if possible. Each begins with the first `num_names` columns.
    """
    names = list(columns[:num_names])
    table_columns = list(names)
    for column in columns[num_names:]:
        if len(table_columns) > num_names and _width([*table_columns, column]) > width:
            yield table_columns
            table_columns = list(names)
        table_columns.append(column)
    yield table_columns
