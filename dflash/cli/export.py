"""`dflash export`: writes a drafter in the form that all engines load."""

from pathlib import Path
from typing import Annotated

from .arguments import Source, Target, TrustRemoteCode, WeightsOnly, argument
from .loading import checkpoint, hide_loading_bars


def export(
    source: Source,
    folder: Annotated[Path, argument("The folder to write. Its name must contain DFlash.", "FOLDER")],
    target: Target,
    weights_only: WeightsOnly = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Writes a drafter in the form that all engines load, with a card. Refused if an engine fails in `dflash check`."""
    hide_loading_bars()
    from dflash.checkpoints import export_checkpoint

    options = {"weights_only": True} if weights_only else {}
    target_name = checkpoint(target, "--target")
    print(export_checkpoint(checkpoint(source, "SOURCE"), folder, target_name, trust_remote_code, **options))
