"""`dflash export-demo`: the embedded pair as two checkpoint folders."""

from pathlib import Path
from typing import Annotated

import typer

from .loading import hide_loading_bars
from .terminal import progress_bar


def export_demo(folder: Annotated[Path, typer.Argument(help="Two checkpoint folders are written below it.")]) -> None:
    """Writes the embedded pair as two checkpoint folders, the drafter's code beside its weights."""
    with progress_bar("Writing the embedded pair", num_steps=2) as advance:
        hide_loading_bars()
        from dflash.checkpoints import export_embedded_pair

        advance()
        paths = export_embedded_pair(folder)
    for path in paths:
        print(path)
