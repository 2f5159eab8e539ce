"""Makes one HTML page out of result files: a table for each task, figures, and the facts that they depend on.

This module measures nothing; `plots` draws the figures.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers.utils import logging

from . import canvas, plots
from .markdown_pages import files_in, results_by_name
from .methods import PLAIN
from .results import Row, grouped, published, read_result, setup, stated, template_name
from .tables import COLUMNS, SHOWN, Table, caveat, table_of, tables_of


if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.get_logger(__name__)

TITLE = b"<title>DFlash results</title>"


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
        ValueError: A file is no result, no file has rows, or `index.html` is another page; nothing is written then.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    results = {}
    for name, path in results_by_name(files_in(paths, "*.json")).items():
        result = read_result(path)
        if tables_of(result):
            results[name] = result
        else:
            logger.warning(f"{name} holds no rows to show and is left out.")
    if not results:
        raise ValueError(
            f"{', '.join(map(str, paths))} is no result: its summary holds no rows; give results of bench, eval, canary or "
            "train."
        )
    folder = Path(folder)
    page = folder / "index.html"
    if page.exists() and TITLE not in page.read_bytes():
        raise ValueError(f"{page} is no page of results and would be replaced: name another --output.")
    folder.mkdir(parents=True, exist_ok=True)
    sections = [_section(name, result, folder) for name, result in results.items()]
    templates = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page.write_text(templates.get_template("page.html").render(sections=sections), encoding="utf-8")
    return page


def drawings(result: dict[str, Any]) -> list[Drawing]:
    """The figures that a result's rows have something for."""
    rows = result["summary"]
    note = stated(setup(result))
    figures = []

    def add(name: str, shows: str, chosen: Sequence[Row], draw: Callable[..., Figure], **options: Any) -> None:
        if chosen:
            figures.append(
                Drawing(name, shows, lambda theme, has_note: draw(chosen, note if has_note else "", theme, **options))
            )

    paper, source = published(result) or (None, "")
    add(
        "speedup",
        "Speed-up over plain decoding in the same run, by task and method."
        + (f" Hatched: {source}." if paper else ""),
        [row for row in _having(rows, "task", "method", "speedup") if row["method"] != PLAIN],
        plots.speedups,
        paper=paper,
    )
    histograms = _having(rows, "task", "method", "acceptance_histogram")
    drafting = [row for row in histograms if len(row["acceptance_histogram"]) > 1]
    add(
        "acceptance",
        "How often the proposal at each position is accepted: of all verify steps, and of those that got there, if at least "
        f"{plots.FEWEST_STEPS} did.",
        drafting,
        plots.acceptance_by_position,
    )
    add("lengths", "How many tokens a verify step gives; τ (micro) marked.", drafting, plots.acceptance_lengths)
    widths = _having(result.get("widths", rows), "width", "ms_verify")
    add("step_time", "Time of one forward by its width.", widths, plots.step_time)
    add(
        "latency_throughput",
        "Throughput of all requests against the wait of one, by the number of requests at once.",
        _having(
            rows,
            "server",
            "concurrency",
            "tokens_per_second",
            "ms_per_output_token_p50",
            "ms_per_output_token_p99",
        ),
        plots.latency_throughput,
        target_ms=result["decoding"].get("target_ms_per_output_token"),
    )
    measured = _having(rows, "step", "tau") if result["kind"] == "run" else []
    add("run", "Tokens of a verify step on held-out prompts, by the step of the run.", measured, plots.run_curve)
    return figures


def save_plots(result: dict[str, Any], output: Path) -> list[Path]:
    """Writes a result's figures as PNG beside `output`, which names them; returns their paths."""
    paths = []
    for drawing in drawings(result):
        path = output.with_name(f"{output.stem}_{drawing.name}.png")
        paths.append(_save(drawing, path))
    return paths


def save_drawing(result: dict[str, Any], name: str, path: Path) -> Path:
    """Writes the figure of that name as a PNG; ValueError if the rows have nothing for it."""
    for drawing in drawings(result):
        if drawing.name == name:
            return _save(drawing, path)
    raise ValueError(f"{path} is not drawn: no row has what {name} shows; ask for longer answers.")


def _save(drawing: Drawing, path: Path, theme: canvas.Theme = canvas.LIGHT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(canvas.png(drawing.draw(theme, True)))
    return path


def _section(name: str, result: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the template shows of one result. Its figures are saved; the page holds them for wide screens and for phones."""
    facts = setup(result)
    kind = result["kind"]
    template = facts.get("chat template")
    return {
        "name": name,
        "kind": "" if kind in name.split("-") else kind,
        "tables": _tables(result),
        "caveat": caveat(result["summary"], facts.get("dtype")),
        "figures": [_images(drawing, folder / name) for drawing in drawings(result)],
        "facts": {key: fact for key, fact in facts.items() if fact and key != "chat template"},
        "missing": [key for key, fact in facts.items() if not fact],
        "chat_template": template,
        "template_name": template and template_name(template),
        "stated": stated(facts),
    }


def _images(drawing: Drawing, path: Path) -> dict[str, str]:
    """A figure's sentence, and its images by width and theme, as addresses that hold them. The wide ones are saved too."""
    images = {"shows": drawing.shows}
    themes = {"": canvas.LIGHT, "_dark": canvas.DARK}
    for ending, theme in themes.items():
        saved = path.with_name(f"{path.name}_{drawing.name}{ending}.png")
        _save(drawing, saved, theme)
        wide = saved.read_bytes()
        narrow = canvas.png(drawing.draw(theme.narrow(), False))
        images[f"wide{ending}"] = _address(wide)
        images[f"narrow{ending}"] = _address(narrow)
    return images


def _address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode('ascii')}"


def _tables(result: dict[str, Any]) -> list[tuple[str, Table, Table | None]]:
    """Title, table, and the table of all columns where that has more; one per task where the kind has tasks."""
    shown = SHOWN.get(result["kind"], ())
    if "task" not in shown:
        return [("", table, None) for table in tables_of(result)]
    usual = _without_task(shown)
    every = _without_task(COLUMNS)
    rows_by_task = grouped(result["summary"], itemgetter("task"))
    tables: list[tuple[str, Table, Table | None]] = []
    for task, rows in rows_by_task.items():
        tables.append((task, table_of(rows, usual), table_of(rows, every)))
    return tables


def _without_task(names: Iterable[str]) -> list[str]:
    """The columns below a title that says the task."""
    return [name for name in names if name != "task"]


def _having(rows: Sequence[Row], *keys: str) -> list[Row]:
    return [row for row in rows if all(row.get(key) is not None for key in keys)]
