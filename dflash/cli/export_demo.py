"""`dflash export-demo`: writes the embedded pair as checkpoint folders."""

from pathlib import Path
from typing import Annotated

from .arguments import argument
from .loading import hide_loading_bars
from .terminal import progress_bar


def export_demo(
    folder: Annotated[Path, argument("The folder in which three checkpoint folders are written.")],
) -> None:
    """Writes the embedded target and its two drafters as checkpoint folders. Each drafter comes with its code."""
    with progress_bar("Writing the embedded pair", num_steps=2) as advance:
        hide_loading_bars()
        from dflash.checkpoints import DOMINO_NAME, export_embedded_pair

        advance()
        target, drafter = export_embedded_pair(folder)
    for path in (target, drafter, drafter.with_name(DOMINO_NAME)):
        print(path)
