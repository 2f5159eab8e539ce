"""`dflash check`: says what is wrong with a drafter's checkpoint, and how each engine reads it."""

import json
from typing import Annotated

import typer
from rich.console import Console

from .arguments import AsJson, TargetOfDrafter, argument, option
from .loading import checkpoint


def check(
    drafter: Annotated[str, argument("The drafter's checkpoint: a folder or an id on the Hub.", "DRAFTER")],
    target: TargetOfDrafter = None,
    engine: Annotated[
        list[str] | None,
        option("Only this engine (remote-code, native, vllm, sglang, trtllm, mlx); may be repeated.", metavar="NAME"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Says what is wrong with a drafter's checkpoint and how each engine reads it. Exit status 1 if an engine fails.

    Every weight is read, to find those that are NaN or infinite. With --target the pair is checked too.
    """
    from dflash.checkpoints import ENGINES, licence_lines, report_lines
    from dflash.checkpoints import check as check_checkpoint

    engines = tuple(dict.fromkeys(engine or ENGINES))
    name = checkpoint(drafter, "DRAFTER")
    report = check_checkpoint(name, target, engines)
    licences = licence_lines("check", name, target)
    if as_json:
        print(json.dumps({**report.as_json(), "licences": licences}, ensure_ascii=False))
    else:
        Console(highlight=False).print(report_lines(report))
        print(*licences, sep="\n")
    if not report.is_ok:
        raise typer.Exit(1)
