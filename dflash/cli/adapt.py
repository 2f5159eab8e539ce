"""`dflash adapt`: trains a drafter further on a user's prompts or texts, and keeps the drafter that accepts most of them."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash.training import ADAPTATION

from . import loading
from .arguments import BeginAnew, Drafter, Resume, Target, panel
from .regenerate import answer_bar, load_writer
from .train import announce, or_value_error, say_complete, say_stopped


written_option = panel("What the target writes")


def adapt(
    *,
    target: Target,
    drafter: Drafter,
    data: Annotated[
        list[str], typer.Option(help="Prompts, texts, answers or a trace. Again for more; each is reported.")
    ],
    output: Annotated[Path, typer.Option(help="Folder of the checkpoint.")],
    general: Annotated[
        str | None, typer.Option(help="Others, of the kind that it is good at, mixed in and not adapted to.")
    ] = None,
    general_share: Annotated[float, typer.Option(help="Share of the tokens that are of --general, at most.")] = 0.3,
    samples: Annotated[int | None, written_option(min=1, help="Rows of each file to answer. Default: all.")] = None,
    streaming: Annotated[
        bool, written_option("--streaming", help="Answer the first --samples rows; download nothing after them.")
    ] = False,
    max_new_tokens: Annotated[int, written_option(min=1, help="Longest answer, in tokens.")] = 512,
    batch_size: Annotated[int, written_option(min=1, help="Rows at once.")] = 8,
    resume: Resume = False,
    overwrite: BeginAnew = False,
    has_permission: Annotated[
        bool, typer.Option("--i-have-permission", help="Go on where its licence forbids it.")
    ] = False,
    **flags: Any,
) -> None:
    """Trains a drafter further on your texts, which the target answers first, and keeps what accepts most.

    Files that hold answers already (of dflash regenerate, or its --trace) are used as they are.
    """
    target = loading.checkpoint(target, "--target")
    drafter = loading.checkpoint(drafter, "--drafter")
    chosen = {name: value for name, value in flags.items() if value is not None}
    settings = ADAPTATION.changed(**chosen, init=drafter)
    loading.hide_loading_bars()
    from dflash.checkpoints import licence_lines, read_licence
    from dflash.common.processes import Processes
    from dflash.common.provenance import command
    from dflash.regeneration import RegenerationSettings, answer_sources
    from dflash.training import adapt as adapt_it
    from dflash.training import adaptation_sources, check_split, claimed

    sources = adaptation_sources(data, settings, general, general_share)
    check_split(sources.values(), settings.split)
    for line in licence_lines("adapt", drafter, target, has_permission):
        announce(line)
    facts: dict[str, Any] = {"command": command()}
    facts["has_permission"] = read_licence(drafter).forbids_changed_copies  # else the lines above raise
    answering = RegenerationSettings(
        split=settings.split,
        thinking=settings.thinking,
        max_new_tokens=max_new_tokens,
        samples=samples,
        streaming=streaming,
        seed=settings.seed,
        deduplicate=settings.deduplicate,
    )

    def load() -> tuple[Any, Any]:
        place = loading.own_device(Processes())
        return load_writer(target, drafter, "auto", place, batch_size, settings.trust_remote_code)

    with claimed(output, settings, resume, overwrite) as claim:  # refused now, and not after the answers
        places = list(sources.values())
        if claim.finished is None:
            folder = output.with_name(f"{output.name}.answers")
            bar = partial(answer_bar, loading.is_first_process())
            places = answer_sources(sources, folder, load, answering, target, overwrite, announce, bar)
        record = or_value_error(
            adapt_it,
            target,
            drafter,
            places if general is None else places[:-1],
            output,
            settings,
            general=None if general is None else places[-1],
            general_share=general_share,
            claim=claim,
            announce=announce,
            on_point=_print_point,
            provenance=facts,
            show_progress=sys.stderr.isatty(),
        )
    say_stopped(record)
    if loading.is_first_process():
        _print_result(output, record)


def _print_point(point: dict[str, Any]) -> None:
    taus = ", ".join(f"{name} {domain['tau']:.2f}" for name, domain in point["domains"].items())
    print(f"step {point['step']}: tau {taus}", flush=True)


def _print_result(output: Path, record: Any) -> None:
    """Prints acceptance before and after, by domain and position."""
    domains_at = {point["step"]: point["domains"] for point in record.curve}
    before = domains_at[0]
    after = domains_at[record.best_step]
    for name, first in before.items():
        last = after[name]
        print(f"{name}: tau {first['tau']:.2f} before, {last['tau']:.2f} after; accepted by position")
        print(f"  before  {_shares(first)}")
        print(f"  after   {_shares(last)}")
    kept = "the drafter as it began: no other state accepted more without losing over 2 % on a file"
    if record.best_step:
        kept = f"step {record.best_step}"
    say_complete(output, kept, record)


def _shares(domain: dict[str, Any]) -> str:
    return " ".join(f"{share:.2f}" for share in domain["accepted"])
