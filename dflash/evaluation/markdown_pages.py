"""Markdown pages whose tables come out of result files, such as a README.

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, where NAME is a result's file name without its ending, or
the name of a checkpoint's folder; the second of one name is NAME-2.
`NAME/headline` has only the methods that a user chooses among. `NAME+NAME` joins results of one kind in one table.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from dflash.common.files import write_text

from .results import RUN, Facts, read_result, setup, stated
from .tables import Table, caveat, markdown, tables_of


MARK = re.compile(r"<!-- ([\w.+/-]+):begin -->")
HEADLINE = "/headline"


def shown_results(results: Sequence[dict[str, Any]], is_headline: bool) -> str:
    """The tables of results of one kind, and under them what their figures depend on and the command that gives them."""
    rows = [row for result in results for row in result["summary"]]
    tables = tables_of({**results[0], "summary": rows}, is_headline)
    return with_facts(tables, results, [setup(result) for result in results])


def fill_pages(
    results: Sequence[str | Path],
    pages: Sequence[str | Path],
    check: bool = False,
    write: Callable[[Sequence[dict[str, Any]], bool], str] = shown_results,
) -> list[Path]:
    """Writes the tables of results into every page that has a place for them; returns the pages that changed.

    Results and pages are files, and folders of them; a result that is named itself must have a place. With `check` nothing
    is written, and the pages returned are those that differ from the results. `write` makes the text at a mark out of the
    results, and of whether the mark asks for the headline.

    Raises:
        ValueError: A result or a page cannot be read, or a place is missing or not closed.
    """
    known = results_by_name(files_in(results, "*.json"))
    texts = {page: _text(page) for page in files_in(pages, "**/*.md")}
    if texts:
        _check_places(known, set(map(Path, results)), texts)
    changed = []
    for page, text in texts.items():
        filled = text
        for mark in MARK.findall(text):
            names = names_of(mark)
            if known.keys() >= set(names):
                read = [read_result(known[name]) for name in names]
                table = write(read, mark.endswith(HEADLINE))
                filled = with_table(filled, mark, table)
        if filled != text:
            changed.append(page)
            if not check:
                write_text(page, filled)
    return changed


def _check_places(known: Mapping[str, Path], named: set[Path], texts: Mapping[Path, str]) -> None:
    """Raises ValueError if no page has a place for a result that is named itself, and not by its folder."""
    shown: set[str] = set()
    for text in texts.values():
        for mark in MARK.findall(text):
            shown.update(names_of(mark))
    for name, path in known.items():
        is_named = path in named or (path.name == RUN and path.parent in named)
        if is_named and name not in shown:
            pages = ", ".join(map(str, texts))
            place = f"<!-- {name}:begin --> and <!-- {name}:end -->"
            raise ValueError(f"{pages} has no place for {path}: put {place} there, in this order.")


def files_in(paths: Iterable[str | Path], pattern: str) -> list[Path]:
    """The files, and in place of each folder those in it that match the pattern: of a checkpoint its `training.json`."""
    files = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
        elif pattern == "*.json" and (path / RUN).is_file():
            files.append(path / RUN)
        else:
            files += sorted(path.glob(pattern))
    return files


def results_by_name(paths: Iterable[Path]) -> dict[str, Path]:
    """Each file by its name without ending, of a checkpoint by that of its folder; the second of one name as NAME-2."""
    names: dict[str, Path] = {}
    for path in dict.fromkeys(paths):
        stem = path.absolute().parent.name if path.name == RUN else path.stem
        name = stem
        for number in count(2):
            if name not in names:
                break
            name = f"{stem}-{number}"
        names[name] = path
    return names


def names_of(mark: str) -> list[str]:
    """The results whose table stands at a mark."""
    return mark.removesuffix(HEADLINE).split("+")


def with_table(page: str, mark: str, table: str) -> str:
    """`page` with the text at the mark replaced; ValueError if the mark does not stand there once, opened and closed."""
    begin = f"<!-- {mark}:begin -->"
    end = f"<!-- {mark}:end -->"
    before, _, opened = page.partition(begin)
    _, _, after = opened.partition(end)
    is_once = page.count(begin) == page.count(end) == 1
    if not is_once or end not in opened:
        raise ValueError(
            f"The page has no place for this table: put {begin} and {end} there, each once, in this order."
        )
    return f"{before}{begin}\n{table}\n{end}{after}"


def _text(page: Path) -> str:
    try:
        return page.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ValueError(f"{page} cannot be read ({reason}): name a Markdown file, or a folder of them.") from error


def with_facts(tables: Iterable[Table], results: Sequence[dict[str, Any]], facts: Sequence[Facts]) -> str:
    """Tables in Markdown, and a paragraph for each result: its facts, and the commands that gave it."""
    parts = list(map(markdown, tables))
    for result, of_result in zip(results, facts, strict=True):
        line = stated(of_result)
        sentences = [f"{line}."] if line else []
        sentences.append(caveat(result["summary"], of_result.get("dtype")))
        for name in ("trained by", "command"):
            if of_result.get(name):
                sentences.append(f"`{of_result[name]}`")
        parts.append(" ".join(filter(None, sentences)))
    return "\n\n".join(parts)
