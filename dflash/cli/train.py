"""`dflash train`: trains a drafter for a target. Its flags are the fields of `TrainingSettings`."""

import inspect
import math
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from dflash.training import TrainingSettings, read_yaml

from .arguments import AcceptLicence, BeginAnew, Resume
from .loading import checkpoint, hide_loading_bars, is_first_process, numbers


def train(
    *,
    target: Annotated[
        str | None, typer.Option(help="Required. The target: a local folder or an id on the Hub.")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Required. Chats, prompts and completions, or texts. May be repeated, with weights: a.jsonl:0.7."
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Required. Folder of the checkpoint.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file of any of these options; flags win over it.")] = None,
    resume: Resume = False,
    overwrite: BeginAnew = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would take, and stop.")] = False,
    accept_licence: AcceptLicence = False,
    **flags: Any,
) -> None:
    """Trains a drafter for a target by a recipe and writes its checkpoint.

    In N processes, on GPUs or on a CPU (where accelerate launch starts one alone):
    torchrun --nproc_per_node N -m dflash train …
    """
    chosen = {name: value for name, value in flags.items() if value is not None}
    if "target_layer_ids" in chosen:
        chosen["target_layer_ids"] = numbers(chosen["target_layer_ids"], "--target-layer-ids")
    places = {"target": target, "data": data, "output": output}
    options = read_yaml(config, list(places)) if config is not None else {}
    options |= chosen | {name: place for name, place in places.items() if place not in (None, [])}
    for name in places:
        if options.get(name) is None:
            raise ValueError(f"--{name} is missing: give it, or write `{name}: …` into the file of --config.")
    model = str(options.pop("target"))
    texts = options.pop("data")
    texts = list(map(str, texts if isinstance(texts, list) else [texts]))
    folder = str(options.pop("output"))
    settings = TrainingSettings(**options)
    hide_loading_bars()
    from dflash.common.hub import read_cache_without_hub
    from dflash.training import check_split, parts_of

    check_split([source for source, _ in parts_of(texts)], settings.split)
    if not os.path.isdir(model):
        read_cache_without_hub(announce)
    if settings.init is not None:
        from dflash.checkpoints import licence_lines

        for line in licence_lines("train", checkpoint(settings.init, "--init"), model, accept_licence):
            announce(line)
    if dry_run:
        from dflash.training import rehearse

        for line in rehearse(model, texts, settings, announce):
            print(line)
        return

    from dflash.common.provenance import command
    from dflash.training import train_drafter

    record = or_value_error(
        train_drafter,
        model,
        texts,
        folder,
        settings,
        resume=resume,
        overwrite=overwrite,
        on_point=_print_point,
        announce=announce,
        provenance={"command": command()},
        show_progress=sys.stderr.isatty(),
    )
    say_stopped(record)
    if is_first_process():
        tau = "" if math.isnan(record.best_tau) else f", tau {record.best_tau:.2f} on the held-out prompts"
        say_complete(folder, f"step {record.best_step}{tau}", record)


def or_value_error(train: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What `train` returns; ValueError for a loss that is not finite: the settings or the data are wrong."""
    try:
        return train(*arguments, **keywords)
    except FloatingPointError as error:
        raise ValueError(str(error)) from error


def say_stopped(record: Any) -> None:
    """Says how to go on after a signal, and exits with its status."""
    if record.stopped_at is not None:
        print(f"Stopped after step {record.stopped_at}: go on with the same command and --resume.", file=sys.stderr)
        raise typer.Exit(128 + (record.signal or 0))


def say_complete(folder: str | Path, kept: str, record: Any) -> None:
    """Prints where the checkpoint is and what it holds, and how to state a licence where the card of a new one has none."""
    from dflash.checkpoints import HOW_TO_STATE, read_licence

    was_complete = "; the run was complete, nothing to resume" if record.was_complete else ""
    print(f"{folder}: {kept}{was_complete}")
    if not record.was_complete and read_licence(folder).name is None:
        announce(f"Its card states no licence. Before you share it, {HOW_TO_STATE}.")


def announce(sentence: str) -> None:
    """Prints a sentence on standard error, once for all processes."""
    if is_first_process():
        print(sentence, file=sys.stderr)


def _print_point(point: dict[str, Any]) -> None:
    figures = []
    if "loss" in point:
        figures += [f"loss {point['loss']:.3f}", f"{point['accepted_per_block']:.2f} accepted per block"]
    if "tau" in point:
        figures.append(f"tau {point['tau']:.2f}")
    print(f"step {point['step']}: {', '.join(figures)}", flush=True)


def with_flags(
    function: Callable[..., None], defaults: TrainingSettings | None = None, without: Collection[str] = ()
) -> Callable[..., None]:
    """`function` with an option for each field of `TrainingSettings` in the place of its `**flags`.

    The help names `defaults`, by default the fields' own; fields whose name or topic is in `without`, or which `function` takes
    by name, have no option.
    """
    *own, _flags = inspect.signature(function, eval_str=True).parameters.values()
    left_out = {*without, *(parameter.name for parameter in own)}
    kind = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(TrainingSettings)
    for field in fields(TrainingSettings):
        name = field.name
        if name in left_out or field.metadata["topic"] in left_out:
            continue
        default = field.default
        if defaults is not None:
            default = getattr(defaults, name)
        option = _option(field, hints[name], default)
        own.append(inspect.Parameter(name, kind, default=None, annotation=option))
    function.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in own}
    return function


def _option(field: Any, hint: Any, default: Any) -> Any:
    """The option of a field. Its choices are in the help text alone: `TrainingSettings` checks them."""
    text = field.metadata["help"]
    kind = hint
    if hint == list[int] | None:
        kind = str
    for option in (hint, *get_args(hint)):
        if get_origin(option) is Literal:
            kind = str
            text += f" One of {', '.join(get_args(option))}."
    if default is not None:
        text, _, _ = text.partition(" Default: ")
        text += f" Default: {'no' if default is False else default}."
    option = typer.Option(
        help=text,
        show_default=False,
        rich_help_panel=field.metadata["topic"],
    )
    return Annotated[kind | None, option]
