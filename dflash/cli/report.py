"""`dflash report`: makes one page with pictures of result files, or writes their tables into Markdown pages."""

from pathlib import Path
from typing import Annotated

from .arguments import argument, option


def report(
    results: Annotated[list[Path], argument("Results of bench, eval, canary and train, or folders.")],
    output: Annotated[Path | None, option("Folder for index.html and the plots as PNG.")] = None,
    pages: Annotated[
        list[Path] | None,
        option(
            "A Markdown file, or a folder of them: write each result's table between <!-- NAME:begin --> and "
            "<!-- NAME:end -->. NAME is the result's file name without .json, or the checkpoint's folder. If two have "
            "the same name, the second is NAME-2. May be repeated.",
            "--pages",
            "--readme",
        ),
    ] = None,
    check: Annotated[
        bool, option("Write no Markdown file. Fail if a table differs from the results.", "--check")
    ] = False,
) -> None:
    """Writes a page with plots, readable without a network, or the tables of Markdown files, or both."""
    if output is None and not pages:
        raise ValueError("Nothing to write: give --output FOLDER for a page, --pages FILE for tables, or both.")
    if check and not pages:
        raise ValueError("--check compares Markdown files with the results: name them with --pages.")
    from dflash.evaluation import fill_pages, write_page

    changed = fill_pages(results, pages or (), check)
    if check and changed:
        names = ", ".join(map(str, changed))
        raise ValueError(f"{names}: a table differs from the results; leave --check out to write it.")
    for page in changed:
        print(page)
    if output is not None:
        print(write_page(results, output))
