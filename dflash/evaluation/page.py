"""What `dflash report` does: one HTML page out of result files, a table per task, figures, and what each depends on.

It draws nothing itself (`plots`) and measures nothing.
"""

from __future__ import annotations

import base64
import hashlib
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from . import canvas, plots
from .methods import PLAIN
from .results import KNOWN_BY, Row, published, read_result, setup
from .tables import COLUMNS, DECODED, Table, any_table, caveat, markdown, table_of, with_table


if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.get_logger(__name__)

NOTE_WIDTH = 150  # letters in one line below a figure
LONGEST_SHOWN = 40  # letters of a chat template that is written out
STATED = ("pair", "hardware", "dtype", "attention", "thinking", "temperature", "chat template", "versions")
UNNAMED = ("pair", "hardware", "versions")


@dataclass(frozen=True)
class Drawing:
    """A figure to be: its name in file names, what it shows, and how to draw it in a theme."""

    name: str
    shows: str
    draw: Callable[[canvas.Theme], Figure]


def write_page(paths: Sequence[str | Path], folder: str | Path) -> Path:
    """Writes `index.html` and one PNG per figure and theme into `folder`, and gives the page's path.

    Raises:
        ValueError: for a file that is no result, before anything is written.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    results = {name: read_result(path, needs_rows=len(paths) == 1) for name, path in _names(paths).items()}
    for name in [name for name, result in results.items() if not result["summary"]]:
        logger.warning(f"{name} holds no rows to show and is left out.")
        del results[name]
    if not results:
        raise ValueError(f"None of {', '.join(map(str, paths))} holds rows: give results of bench, eval or canary.")
    folder = Path(folder)
    sections = [_section(name, result, folder) for name, result in results.items()]
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = folder / "index.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(templates.get_template("page.html").render(sections=sections), encoding="utf-8")
    return page


def drawings(result: dict[str, Any]) -> list[Drawing]:
    """The figures that a result's rows have something for."""
    rows = result["summary"]
    note = "\n".join(textwrap.wrap(in_one_line(result), NOTE_WIDTH))
    paper = published(result)
    found = []

    def add(name: str, shows: str, chosen: list[Row], draw: Callable[..., Figure], **options: Any) -> None:
        if chosen:
            found.append(Drawing(name, shows, lambda theme: draw(chosen, note, theme, **options)))

    compared = [row for row in _having(rows, "task", "method", "speedup") if row["method"] != PLAIN]
    source = "" if paper is None else f" Hatched: {paper[1]}."
    add(
        "speedup", f"Speed-up over plain decoding in the same run, by task and method.{source}",
        compared, plots.speedups, paper=paper and paper[0],
    )  # fmt: skip
    accepting = [
        row for row in _having(rows, "task", "method", "acceptance_histogram") if row["acceptance_histogram"][1:]
    ]
    add(
        "acceptance", "How often the proposal at each position is accepted: of all verify steps, and of those that got there.",
        accepting, plots.acceptance_by_position,
    )  # fmt: skip
    add("lengths", "How many tokens a verify step gives; τ (micro) marked.", accepting, plots.acceptance_lengths)
    add(
        "step_time",
        "Time of one forward by its width.",
        _having(result.get("widths", rows), "width", "ms_verify"),
        plots.step_time,
    )
    swept = [
        row
        for row in _having(rows, "context_tokens", "method", "ms_per_token")
        if row.get("axis", "context") == "context"
    ]
    simulated = (
        " Simulated: tau is stated, milliseconds are measured."
        if any(row.get("is_simulated") for row in swept)
        else ""
    )
    add("growth", f"Time per token as the context grows.{simulated}", swept, plots.growth)
    add(
        "latency_throughput", "Throughput of all requests against the wait of one, by the number of requests at once.",
        _having(rows, "server", "concurrency", "tokens_per_second", "ms_per_output_token_p50", "ms_per_output_token_p99"), plots.latency_throughput,
        target_ms=result.get("decoding", {}).get("target_ms_per_output_token"),
    )  # fmt: skip
    return found


def save_plots(result: dict[str, Any], output: Path) -> list[Path]:
    """Writes a result's figures as PNG beside `output`, which names them; their paths.

    Raises:
        ValueError: if matplotlib is not installed.
    """
    return [
        canvas.save(drawing.draw(canvas.LIGHT), output.with_name(f"{output.stem}_{drawing.name}.png"))
        for drawing in drawings(result)
    ]


def save_drawing(result: dict[str, Any], name: str, path: Path) -> Path:
    """Writes the one figure of that name as a PNG; ValueError if the rows have nothing for it."""
    drawing = next((drawing for drawing in drawings(result) if drawing.name == name), None)
    if drawing is None:
        raise ValueError(f"{path} is not drawn: no row has what {name} shows; ask for longer answers.")
    return canvas.save(drawing.draw(canvas.LIGHT), path)


def in_one_line(result: dict[str, Any]) -> str:
    """What the figures of a result depend on; of a long chat template the start of its SHA-256, and the command left out."""
    facts = setup(result)
    facts["chat template"] = _template_name(facts["chat template"])
    said = {name: facts[name] for name in STATED}
    stated = [str(fact) if name in UNNAMED else f"{name} {fact}" for name, fact in said.items() if fact]
    missing = [name for name, fact in said.items() if not fact]
    return " · ".join([*stated, *([f"not recorded: {', '.join(missing)}"] if missing else [])])


def readme_table(result: dict[str, Any]) -> str:
    """A result's table in Markdown, and under it what its figures depend on and the command that gives them."""
    rows, facts = result["summary"], setup(result)
    kind = result.get("kind")
    table = (
        any_table(rows) if kind not in KNOWN_BY else table_of(rows, DECODED if "task" in KNOWN_BY[kind] else COLUMNS)
    )
    stated = [
        f"{in_one_line(result)}.",
        caveat(rows, facts["dtype"]),
        f"`{facts['command']}`" if facts["command"] else "",
    ]
    return f"{markdown(table)}\n\n{' '.join(filter(None, stated))}"


def write_readme(readme: str | Path, name: str, path: str | Path) -> None:
    """Writes the table of one result between the markers of `name` in a README; ValueError if there are none."""
    readme = Path(readme)
    table = readme_table(read_result(path))
    try:
        text = readme.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{readme} cannot be read ({error.strerror}): name a file with <!-- {name}:begin --> and <!-- {name}:end -->."
        ) from error
    readme.write_text(with_table(text, name, table), encoding="utf-8")


def _section(name: str, result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the template shows of one result; draws and saves its figures."""
    facts = setup(result)
    figures = []
    for drawing in drawings(result):
        light, dark = (
            canvas.save(drawing.draw(theme), folder / f"{name}_{drawing.name}{suffix}.png")
            for theme, suffix in ((canvas.LIGHT, ""), (canvas.DARK, "_dark"))
        )
        figures.append({"shows": drawing.shows, "light": _embedded(light), "dark": _embedded(dark)})
    return {
        "name": name,
        "kind": result.get("kind", ""),
        "tables": _tables(result),
        "caveat": caveat(result["summary"], facts["dtype"]),
        "figures": figures,
        "facts": {key: value for key, value in facts.items() if key != "chat template" and value},
        "missing": [key for key, value in facts.items() if not value],
        "chat_template": facts["chat template"],
        "template_name": _template_name(facts["chat template"]),
        "stated": in_one_line(result),
        "command": facts["command"],
    }


def _template_name(template: str | None) -> str | None:
    """A short template as it is, of a long one the start of its SHA-256."""
    if template is None or len(template) <= LONGEST_SHOWN:
        return template
    return f"sha256 {hashlib.sha256(template.encode()).hexdigest()[:8]}"


def _tables(result: dict[str, Any]) -> list[tuple[str, Table]]:
    """Title and table: one per task where the result's kind has tasks."""
    rows, known_by = result["summary"], KNOWN_BY.get(result.get("kind", ""))
    if known_by is None:
        return [("", any_table(rows))]
    if "task" not in known_by:
        return [("", table_of(rows))]
    keys = [key for key in COLUMNS if key != "task"]
    tasks = dict.fromkeys(row["task"] for row in rows)
    return [(task, table_of([row for row in rows if row["task"] == task], keys)) for task in tasks]


def _having(rows: Sequence[Row], *keys: str) -> list[Row]:
    return [row for row in rows if all(row.get(key) is not None for key in keys)]


def _names(paths: Sequence[str | Path]) -> dict[str, str | Path]:
    """A name per file, from its own; told apart by a number where two files have the same."""
    names: dict[str, str | Path] = {}
    for path in dict.fromkeys(map(str, paths)):
        stem, number = Path(path).stem, 2
        name = stem
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names[name] = path
    return names


def _embedded(png: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(png.read_bytes()).decode("ascii")
