"""`dflash convert`: writes a drafter of any dialect in this library's form."""

from pathlib import Path
from typing import Annotated

from .arguments import Source, TargetOfDrafter, TrustRemoteCode, WeightsOnly, argument
from .loading import checkpoint, hide_loading_bars


def convert(
    source: Source,
    folder: Annotated[Path, argument("The folder to write.", "FOLDER")],
    target: TargetOfDrafter = None,
    weights_only: WeightsOnly = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Writes a drafter of any dialect in this library's form, with its code beside its weights.

    The configs of some dialects do not state the depth and the vocabulary of the target: give --target then.
    """
    hide_loading_bars()
    from dflash.checkpoints import convert_checkpoint

    options = {"weights_only": True} if weights_only else {}
    target_name = None if target is None else checkpoint(target, "--target")
    print(convert_checkpoint(checkpoint(source, "SOURCE"), folder, target_name, trust_remote_code, **options))
