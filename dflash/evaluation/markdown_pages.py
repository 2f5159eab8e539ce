"""Markdown pages whose tables come out of result files, such as a README.

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, where NAME is a result's file name without its ending, or
the name of a checkpoint's folder; the second of one name is NAME-2.
`NAME/headline` has only the methods that a user chooses among. `NAME+NAME` joins results of one kind in one table.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import chain, count
from pathlib import Path
from typing import Any

from dflash.common.files import write_text

from .results import RUN, read_result, setup, stated
from .tables import caveat, markdown, tables_of


MARK = re.compile(r"<!-- ([\w.+/-]+):begin -->")
HEADLINE = "/headline"


def fill_pages(results: Sequence[str | Path], pages: Sequence[str | Path], check: bool = False) -> list[Path]:
    """Writes the tables of results into every page that has a place for them; returns the pages that changed.

    Results and pages are files, and folders of them; a result that is named itself must have a place. With `check` nothing
    is written, and the pages returned are those that differ from the results.

    Raises:
        ValueError: A result or a page cannot be read, or a place is missing or not closed.
    """
    known = results_by_name(files_in(results, "*.json"))
    texts = {path: _text(path) for path in files_in(pages, "**/*.md")}
    shown = {name for text in texts.values() for mark in MARK.findall(text) for name in names_of(mark)}
    named = {str(path) for path in map(Path, results) if not path.is_dir() or (path / RUN).is_file()}
    for name, path in known.items() if pages else ():
        if named & {str(path), str(path.parent)} and name not in shown:
            place = f"<!-- {name}:begin --> and <!-- {name}:end -->"
            where = ", ".join(map(str, pages))
            raise ValueError(f"{where} has no place for {path}: put {place} there, in this order.")
    changed = []
    for path, text in texts.items():
        wanted = text
        for mark in MARK.findall(text):
            if known.keys() >= set(names_of(mark)):
                read = [read_result(known[name]) for name in names_of(mark)]
                wanted = with_table(wanted, mark, _table(read, mark.endswith(HEADLINE)))
        if wanted != text:
            changed.append(path)
            if not check:
                write_text(path, wanted)
    return changed


def files_in(paths: Iterable[str | Path], pattern: str) -> list[Path]:
    """The files, and in place of each folder those in it that match the pattern: of a checkpoint its `training.json`."""

    def matching(folder: Path) -> list[Path]:
        run = folder / RUN
        return [run] if run.is_file() and run.match(pattern) else sorted(folder.glob(pattern))

    return [file for path in map(Path, paths) for file in (matching(path) if path.is_dir() else [path])]


def results_by_name(paths: Iterable[Path]) -> dict[str, Path]:
    """Each file by its name without ending, of a checkpoint by that of its folder; the second of one name as NAME-2."""
    names: dict[str, Path] = {}
    for path in dict.fromkeys(paths):
        stem = path.absolute().parent.name if path.name == RUN else path.stem
        candidates = chain([stem], (f"{stem}-{number}" for number in count(2)))
        names[next(name for name in candidates if name not in names)] = path
    return names


def names_of(mark: str) -> list[str]:
    """The results whose table stands at a mark."""
    return mark.removesuffix(HEADLINE).split("+")


def with_table(page: str, mark: str, table: str) -> str:
    """`page` with the text at the mark replaced; ValueError if the mark does not stand there once, opened and closed."""
    begin, end = f"<!-- {mark}:begin -->", f"<!-- {mark}:end -->"
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        place = f"{begin} and {end}"
        raise ValueError(f"The page has no place for this table: put {place} there, each once, in this order.")
    return f"{page[: page.index(begin)]}{begin}\n{table}\n{page[page.index(end) :]}"


def _text(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{page} cannot be read ({reason}): name a Markdown file, or a folder of them.") from error


def _table(results: Sequence[dict[str, Any]], is_headline: bool) -> str:
    """The tables of results of one kind, and under them what their figures depend on and the command that gives them."""
    rows = [row for result in results for row in result["summary"]]
    parts = [markdown(table) for table in tables_of({**results[0], "summary": rows}, is_headline)]
    for result in results:
        facts = setup(result)
        said = [f"{line}." if (line := stated(result)) else "", caveat(result["summary"], facts["dtype"])]
        said += [f"`{facts[name]}`" for name in ("trained by", "command") if facts.get(name)]
        parts.append(" ".join(filter(None, said)))
    return "\n\n".join(parts)
