"""One HTML page out of result files: a table per task, figures, and what each depends on.

This module measures nothing; `plots` draws the figures.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils import logging

from . import canvas, plots
from .markdown_pages import files_in, results_by_name
from .methods import PLAIN
from .results import KNOWN_BY, Row, published, read_result, setup, stated, template_name
from .tables import COLUMNS, DECODED, EVALUATED, Table, caveat, table_of, tables_of


if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.get_logger(__name__)


class Drawing(NamedTuple):
    """A figure that a result has rows for: its name in file names, a sentence or two, and what draws it.

    `draw` takes a theme, and whether the note on what its figures depend on stands below it.
    """

    name: str
    shows: str
    draw: Callable[[canvas.Theme, bool], Figure]


def write_page(paths: Sequence[str | Path], folder: str | Path) -> Path:
    """Writes `index.html` and two PNG per figure, for light and dark pages, into `folder`; returns the page's path.

    Paths are result files, folders of them, and checkpoints that `dflash train` has written.

    Raises:
        ValueError: A file is no result, or no file has rows; nothing is written then.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    results = {name: read_result(path) for name, path in results_by_name(files_in(paths, "*.json")).items()}
    for name in [name for name, result in results.items() if not tables_of(result)]:
        logger.warning(f"{name} holds no rows to show and is left out.")
        del results[name]
    if not results:
        given = ", ".join(map(str, paths))
        raise ValueError(
            f"{given} is no result: its summary holds no rows; give results of bench, eval, canary or train."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    sections = [_section(name, result, folder) for name, result in results.items()]
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = folder / "index.html"
    page.write_text(templates.get_template("page.html").render(sections=sections), encoding="utf-8")
    return page


def drawings(result: dict[str, Any]) -> list[Drawing]:
    """The figures that a result's rows have something for."""
    rows, note, paper = result["summary"], stated(result), published(result)
    found = []

    def add(name: str, shows: str, chosen: list[Row], draw: Callable[..., Figure], **options: Any) -> None:
        if chosen:
            found.append(Drawing(name, shows, lambda theme, noted: draw(chosen, note * noted, theme, **options)))

    compared = [row for row in _having(rows, "task", "method", "speedup") if row["method"] != PLAIN]
    shows = "Speed-up over plain decoding in the same run, by task and method."
    shows += "" if paper is None else f" Hatched: {paper[1]}."
    add("speedup", shows, compared, plots.speedups, paper=paper and paper[0])
    histograms = _having(rows, "task", "method", "acceptance_histogram")
    accepting = [row for row in histograms if row["acceptance_histogram"][1:]]
    shows = "How often the proposal at each position is accepted: of all verify steps, and of those that got there, if at least "
    shows += f"{plots.FEWEST_STEPS} did."
    add("acceptance", shows, accepting, plots.acceptance_by_position)
    add("lengths", "How many tokens a verify step gives; τ (micro) marked.", accepting, plots.acceptance_lengths)
    widths = _having(result.get("widths", rows), "width", "ms_verify")
    add("step_time", "Time of one forward by its width.", widths, plots.step_time)
    costs = _having(rows, "context_tokens", "method", "ms_per_token")
    swept = [row for row in costs if row.get("axis", "context") == "context"]
    is_simulated = any(row.get("is_simulated") for row in swept)
    shows = "Time per token as the context grows."
    shows += " Simulated: tau is stated, milliseconds are measured." if is_simulated else ""
    add("growth", shows, swept, plots.growth)
    waits = ("ms_per_output_token_p50", "ms_per_output_token_p99")
    loads = _having(rows, "server", "concurrency", "tokens_per_second", *waits)
    shows = "Throughput of all requests against the wait of one, by the number of requests at once."
    target_ms = result.get("decoding", {}).get("target_ms_per_output_token")
    add("latency_throughput", shows, loads, plots.latency_throughput, target_ms=target_ms)
    measured = _having(rows, "step", "tau") if result["kind"] == "run" else []
    add("run", "Tokens of a verify step on held-out prompts, by the step of the run.", measured, plots.run_curve)
    return found


def save_plots(result: dict[str, Any], output: Path) -> list[Path]:
    """Writes a result's figures as PNG beside `output`, which names them; returns their paths."""
    return [_save(drawing, output.with_name(f"{output.stem}_{drawing.name}.png")) for drawing in drawings(result)]


def save_drawing(result: dict[str, Any], name: str, path: Path) -> Path:
    """Writes the figure of that name as a PNG; ValueError if the rows have nothing for it."""
    drawing = next((drawing for drawing in drawings(result) if drawing.name == name), None)
    if drawing is None:
        raise ValueError(f"{path} is not drawn: no row has what {name} shows; ask for longer answers.")
    return _save(drawing, path)


def _save(drawing: Drawing, path: Path, theme: canvas.Theme = canvas.LIGHT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canvas.png(drawing.draw(theme, True)))
    return path


def _section(name: str, result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the template shows of one result. Its figures are saved; the page holds them for wide screens and for phones."""
    facts, kind = setup(result), result["kind"]
    figures = []
    for drawing in drawings(result):
        images = {}
        for theme, ending in ((canvas.LIGHT, ""), (canvas.DARK, "_dark")):
            wide = _save(drawing, folder / f"{name}_{drawing.name}{ending}.png", theme).read_bytes()
            narrow = canvas.png(drawing.draw(theme.narrow(), False))
            for width, png in (("wide", wide), ("narrow", narrow)):
                images[f"{width}{ending}"] = "data:image/png;base64," + base64.b64encode(png).decode("ascii")
        figures.append({"shows": drawing.shows, **images})
    return {
        "name": name,
        "kind": "" if kind in name.split("-") else kind,
        "tables": _tables(result),
        "caveat": caveat(result["summary"], facts["dtype"]),
        "figures": figures,
        "facts": {key: value for key, value in facts.items() if key != "chat template" and value},
        "missing": [key for key, value in facts.items() if not value],
        "chat_template": facts.get("chat template"),
        "template_name": template_name(facts.get("chat template")),
        "stated": stated(result),
    }


def _tables(result: dict[str, Any]) -> list[tuple[str, Table, Table | None]]:
    """Title, table, and the table of all columns where that has more; one per task where the kind has tasks."""
    rows = result["summary"]
    if "task" not in KNOWN_BY.get(result["kind"], ()):
        return [("", table, None) for table in tables_of(result)]
    first = [key for key in (EVALUATED if result["kind"] == "eval" else DECODED) if key != "task"]
    every = [key for key in COLUMNS if key != "task"]
    of: dict[str, list[Row]] = {}
    for row in rows:
        of.setdefault(row["task"], []).append(row)
    return [(task, table_of(of_task, first), table_of(of_task, every)) for task, of_task in of.items()]


def _having(rows: Sequence[Row], *keys: str) -> list[Row]:
    return [row for row in rows if all(row.get(key) is not None for key in keys)]
