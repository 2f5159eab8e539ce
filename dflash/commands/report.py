"""`dflash report`: result files in, one page and its pictures out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    results: Annotated[list[Path], typer.Argument(help="Result files of bench, eval and canary.")],
    output: Annotated[Path | None, typer.Option(help="Folder for index.html and the plots as PNG.")] = None,
    readme: Annotated[
        Path | None, typer.Option(help="Write the table of the one result into this Markdown file.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="… between <!-- NAME:begin --> and <!-- NAME:end -->. Default: the result's name."),
    ] = None,
) -> None:
    """Writes one page that needs no network, and its plots as PNG; or a README's table."""
    if output is None and readme is None:
        raise ValueError("Nothing to write: give --output FOLDER for the page, --readme FILE for the table, or both.")
    if readme is not None and len(results) != 1:
        raise ValueError(f"--readme takes the table of one result, not of {len(results)}: name one file.")
    if name is not None and readme is None:
        raise ValueError(f"--name {name} says where in a README the table goes: give --readme FILE too.")
    from dflash.evaluation import write_page, write_readme

    if readme is not None:
        write_readme(readme, results[0].stem if name is None else name, results[0])
        print(readme)
    if output is not None:
        print(write_page(results, output))
