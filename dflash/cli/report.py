"""`dflash report`: result files in, one page and its pictures out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[list[Path], typer.Argument(help="Result files of bench, eval and canary.")],
    output: Annotated[Path | None, typer.Option(help="Folder for index.html and the plots as PNG.")] = None,
    readme: Annotated[
        list[Path] | None,
        typer.Option(help="Write the table of the one result into this Markdown file; may be repeated."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="… between <!-- NAME:begin --> and <!-- NAME:end -->. Default: the result's name."),
    ] = None,
) -> None:
    """Writes one page that needs no network, and its plots as PNG; or a table into Markdown files."""
    if output is None and not readme:
        raise ValueError("Nothing to write: give --output FOLDER for the page, --readme FILE for the table, or both.")
    if readme and len(results) != 1:
        raise ValueError(f"--readme takes the table of one result, not of {len(results)}: name one file.")
    if name is not None and not readme:
        raise ValueError(f"--name {name} says where in a README the table goes: give --readme FILE too.")
    from dflash.evaluation import write_page, write_readme

    for page in readme or ():
        write_readme(page, results[0].stem if name is None else name, results[0])
        print(page)
    if output is not None:
        print(write_page(results, output))
