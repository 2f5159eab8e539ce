"""`dflash pair`: writes a target and its drafter as one folder, which every tool can load."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

from .arguments import TrustRemoteCode, argument, option
from .loading import checkpoint, hide_loading_bars


def pair(
    target: Annotated[str, argument("The target: a folder or an id on the Hub.", "TARGET")],
    drafter: Annotated[str, argument("Its drafter: a folder or an id on the Hub.", "DRAFTER")],
    out: Annotated[Path, argument("The folder to write.", "OUT")],
    copy: Annotated[bool, option("Copy the weights instead of linking to them.", "--copy")] = False,
    settings: Annotated[
        list[str] | None,
        option("A keyword of spec_generate for every request; may be repeated.", "--set", metavar="NAME=VALUE"),
    ] = None,
    on_error: Annotated[
        Literal["raise", "plain"],
        option("If the drafter does not fit: raise an error, or plain: decode without it.", metavar="NAME"),
    ] = "raise",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Writes a folder with the target and a `generate` that drafts, for every tool that calls `generate`.

    Load it with trust_remote_code=True. This package is not needed for it. If it is installed, its engine drafts.
    """
    chosen: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ValueError(f"--set {setting} is not NAME=VALUE: write --set draft_tree=32.")
        try:
            chosen[name] = json.loads(value)
        except ValueError:  # a value that is not JSON is taken as a word
            chosen[name] = value
    target, drafter = checkpoint(target, "TARGET"), checkpoint(drafter, "DRAFTER")
    hide_loading_bars()
    from dflash.checkpoints import licence_lines, make_pair

    folder = make_pair(target, drafter, out, copy, chosen, on_error, trust_remote_code)
    print(*licence_lines("pair", drafter, target), sep="\n", file=sys.stderr)
    print(f'AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)')
