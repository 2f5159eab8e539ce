"""`dflash convert`: a drafter of any dialect, written in this library's form."""

from pathlib import Path
from typing import Annotated

from .arguments import Source, TargetOfDrafter, TrustRemoteCode, WeightsOnly, argument
from .loading import checkpoint, hide_loading_bars


def convert(
    source: Source,
    folder: Annotated[Path, argument("Where to write it.", "FOLDER")],
    target: TargetOfDrafter = None,
    weights_only: WeightsOnly = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Writes a drafter of any dialect in this library's form, its code beside its weights.

    --target gives what the config of some dialects leaves out: the target's depth and vocabulary.
    """
    hide_loading_bars()
    from dflash.checkpoints import convert_checkpoint

    options = {"weights_only": True} if weights_only else {}
    target_name = None if target is None else checkpoint(target, "--target")
    print(convert_checkpoint(checkpoint(source, "SOURCE"), folder, target_name, trust_remote_code, **options))
