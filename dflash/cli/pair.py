"""`dflash pair`: a target and its drafter as one folder, which every tool can load."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .arguments import TrustRemoteCode
from .loading import checkpoint, hide_loading_bars


def pair(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The target: a folder or an id on the Hub.")],
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Its drafter: a folder or an id on the Hub.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    copy: Annotated[bool, typer.Option("--copy", help="Copy the weights instead of linking to them.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="NAME=VALUE", help="A keyword of spec_generate for every request; may be repeated."
        ),
    ] = None,
    on_error: Annotated[
        Literal["raise", "plain"],
        typer.Option(metavar="NAME", help="Without a drafter that fits: raise an error, or write plain text."),
    ] = "raise",
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Writes a folder that is the target, with a `generate` that drafts, for every tool that calls `generate`.

    Load it with trust_remote_code=True. This package is not needed there; where it is installed, its engine drafts.
    """
    chosen: dict[str, Any] = {}
    for setting in settings or ():
        name, equals, value = setting.partition("=")
        if not (name and equals and value):
            raise ValueError(f"--set {setting} is no NAME=VALUE: write --set draft_tree=32.")
        try:
            chosen[name] = json.loads(value)
        except ValueError:  # a word
            chosen[name] = value
    target, drafter = checkpoint(target, "TARGET"), checkpoint(drafter, "DRAFTER")
    hide_loading_bars()
    from dflash.checkpoints import licence_lines, make_pair

    folder = make_pair(target, drafter, out, copy, chosen, on_error, trust_remote_code)
    print(*licence_lines("pair", drafter, target), sep="\n", file=sys.stderr)
    print(f'AutoModelForCausalLM.from_pretrained("{folder}", trust_remote_code=True)')
