"""`dflash adapt`: a drafter, a user's prompts or texts, and minutes; out comes a checkpoint that accepts more of them, or the same."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash.training import ADAPTATION

from . import loading
from .arguments import Drafter, Target, panel
from .regenerate import answer_bar, load_writer, summary
from .train import announce, say_licence, say_stopped


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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew in an --output that holds a run.")
    ] = False,
    has_permission: Annotated[
        bool, typer.Option("--i-have-permission", help="Go on where its licence forbids it.")
    ] = False,
    **flags: Any,
) -> None:
    """Trains a drafter further on your texts, which the target answers first, and keeps what accepts most.

    Files that hold answers already (of dflash regenerate, or its --trace) are used as they are.
    """
    target, drafter = loading.checkpoint(target, "--target"), loading.checkpoint(drafter, "--drafter")
    chosen = {name: value for name, value in flags.items() if value is not None}
    settings = ADAPTATION.changed(**chosen, init=drafter)
    loading.hide_loading_bars()
    from dflash.checkpoints import licence_lines, read_licence
    from dflash.common.provenance import command
    from dflash.training import adapt as adapt_it
    from dflash.training import adaptation_sources, check_split, claimed

    given = adaptation_sources(data, settings, general, general_share)
    check_split(given.values(), settings.split)
    for line in licence_lines("adapt", drafter, target, has_permission):
        announce(line)
    facts: dict[str, Any] = {"command": command(), "has_permission": read_licence(drafter).forbids_changed_copies}
    answers = output.with_name(f"{output.name}.answers")
    how: dict[str, Any] = {"split": settings.split, "thinking": settings.thinking, "max_new_tokens": max_new_tokens}
    how |= {"samples": samples, "streaming": streaming, "seed": settings.seed, "deduplicate": settings.deduplicate}
    with claimed(output, settings, resume, overwrite) as claim:  # refused now, and not after the answers
        sources = list(given.values())
        if claim.finished is None:
            place = batch_size, settings.trust_remote_code
            sources = _answered(given, answers, target, drafter, *place, overwrite, how)
        keywords: dict[str, Any] = {"general": None if general is None else sources.pop(), "claim": claim}
        keywords |= {"general_share": general_share, "announce": announce, "on_point": _print_point}
        keywords |= {"provenance": facts, "show_progress": sys.stderr.isatty()}
        try:
            record = adapt_it(target, drafter, sources, output, settings, **keywords)
        except FloatingPointError as error:
            raise ValueError(str(error)) from error
    say_stopped(record)
    if os.environ.get("RANK", "0") == "0":
        _print_result(output, record)


def _answered(
    sources: dict[str, str],
    folder: Path,
    target: str,
    drafter: str,
    batch_size: int,
    trust_remote_code: bool,
    overwrite: bool,
    how: dict[str, Any],
) -> list[str]:
    """The sources, each that holds no answers replaced by a trace of the target's own, which the pair writes into `folder`."""
    from dflash.common.manifest import manifest_path
    from dflash.common.processes import Processes
    from dflash.regeneration import RegenerationRun, RegenerationSettings, check_answer_file, regenerate_data
    from dflash.training import Trace, read_rows

    settings, found = RegenerationSettings(**how), []
    rows = [next(iter(read_rows(source, settings.split, settings.streaming)), {}) for source in sources.values()]
    for source, row in zip(sources.values(), rows, strict=True):
        if settings.streaming and "response_ids" in row:
            raise ValueError(f"{source} holds answers, which are read whole: leave --streaming out.")
    if all("response_ids" in row for row in rows):
        return list(sources.values())
    processes = Processes()
    place = loading.own_device(processes)
    writer, tokenizer = load_writer(target, drafter, "auto", place, batch_size, trust_remote_code)
    for (name, source), row in zip(sources.items(), rows, strict=True):
        if "response_ids" in row:
            found.append(source)
            continue
        answers, trace = folder / f"{name}.jsonl", folder / f"{name}.trace.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        again: dict[str, Any] = {"resume": manifest_path(answers).exists() and not overwrite, "overwrite": overwrite}
        check_answer_file(answers, **again)  # before a trace is begun anew
        writer.trace = Trace(trace, writer.target, tokenizer, target, processes.rank, begin=not again["resume"])
        rest = "what is left of " if again["resume"] else ""
        announce(f"The target answers {rest}{source}, and rejected drafts are recorded, in {trace}.")
        with answer_bar(processes.is_first) as progress:
            run = RegenerationRun(processes=processes, on_begin=progress.begin, on_done=progress.row, target=target)
            record = regenerate_data(writer, tokenizer, source, answers, settings, **again, run=run)
        if processes.is_first:
            writer.trace.join()
            announce(summary(answers, record, drop_cut=False))
        processes.gather([None])
        found.append(str(trace))
    return found


def _print_point(point: dict[str, Any]) -> None:
    taus = ", ".join(f"{name} {one['tau']:.2f}" for name, one in point["domains"].items())
    print(f"step {point['step']}: tau {taus}", flush=True)


def _print_result(output: Path, record: Any) -> None:
    """Prints acceptance before and after, by domain and position."""
    before, after = (next(p for p in record.curve if p["step"] == step)["domains"] for step in (0, record.best_step))
    for name in before:
        print(f"{name}: tau {before[name]['tau']:.2f} before, {after[name]['tau']:.2f} after; accepted by position")
        for when, one in (("before", before[name]), ("after", after[name])):
            print(f"  {when:<7} {' '.join(f'{share:.2f}' for share in one['accepted'])}")
    kept = (
        f"step {record.best_step}"
        if record.best_step
        else "the drafter as it began: no other state accepted more without losing over 2 % on a file"
    )
    was_complete = "; the run was complete, nothing to resume" if record.was_complete else ""
    print(f"{output}: {kept}{was_complete}")
    if not record.was_complete:
        say_licence(str(output))
