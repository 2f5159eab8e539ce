"""`dflash train`: trains a drafter for a target. Its flags are the fields of `TrainingSettings`."""

import math
import os
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from dflash.training import TrainingSettings, read_yaml

from .arguments import AcceptLicence, option, panel
from .loading import checkpoint, hide_loading_bars, is_first_process, numbers


@dataclass
class TrainingPaths:
    """What is read and written. --config may name them too."""

    target: Annotated[str | None, option("Required. The target: a local folder or an id on the Hub.")] = None
    data: Annotated[
        list[str] | None,
        option("Required. Chats, prompts and completions, or texts. May be repeated, with weights: a.jsonl:0.7."),
    ] = None
    output: Annotated[Path | None, option("Required. Folder of the checkpoint.")] = None


@dataclass
class StartOptions:
    """What to do if --output already holds a run."""

    resume: Annotated[bool, option("Go on with the run in --output.", "--resume")] = False
    overwrite: Annotated[bool, option("Begin anew if --output holds a run.", "--overwrite")] = False


def settings_options(defaults: TrainingSettings | None = None, without: Collection[str] = ()) -> Any:
    """Returns a dataclass with an option for each field of `TrainingSettings`.

    Fields whose name or topic is in `without` are left out. An option that is not given is `None`. The help shows the
    values of `defaults`, or those of the fields.
    """
    hints = get_type_hints(TrainingSettings)
    options = []
    for field in fields(TrainingSettings):
        name = field.name
        if name in without or field.metadata["topic"] in without:
            continue
        default = field.default if defaults is None else getattr(defaults, name)
        options.append((name, _option(field, hints[name], default), None))
    return make_dataclass("SettingsOptions", options)


def _option(field: Any, hint: Any, default: Any) -> Any:
    """Returns the option of a field. Its choices are only shown in the help: `TrainingSettings` checks the value."""
    text = field.metadata["help"]
    kind = hint
    if hint == list[int] | None:
        kind = str
    for choices in (hint, *get_args(hint)):
        if get_origin(choices) is Literal:
            kind = str
            text += f" One of {', '.join(get_args(choices))}."
    if default is not None:
        text, _, _ = text.partition(" Default: ")
        text += f" Default: {'no' if default is False else default}."
    topic_option = panel(field.metadata["topic"])
    return Annotated[kind | None, topic_option(text, show_default=False)]


class TrainingRecipe(settings_options()):  # type: ignore[misc]  # mypy does not know computed classes
    """The fields of `TrainingSettings` that were given."""


def train(
    *,
    paths: TrainingPaths,
    config: Annotated[Path | None, option("YAML file with any of these options. Flags override it.")] = None,
    start: StartOptions,
    dry_run: Annotated[bool, option("Estimate memory and time, and stop.", "--dry-run")] = False,
    accept_licence: AcceptLicence = False,
    recipe: TrainingRecipe,
) -> None:
    """Trains a drafter for a target by a recipe and writes its checkpoint.

    In N processes, on GPUs or on a CPU:
    torchrun --nproc_per_node N -m dflash train …
    (On a CPU, accelerate launch starts a single process.)
    """
    options = _chosen_or_filed(paths, recipe, config)
    target = str(options.pop("target"))
    data = options.pop("data")
    texts = list(map(str, data if isinstance(data, list) else [data]))
    output = str(options.pop("output"))
    settings = TrainingSettings(**options)
    hide_loading_bars()
    from dflash.training import check_split, parts_of

    check_split([source for source, _ in parts_of(texts)], settings.split)
    if not os.path.isdir(target):
        from dflash.common.hub import read_cache_without_hub

        read_cache_without_hub(announce)
    if settings.init is not None:
        say_licences("train", checkpoint(settings.init, "--init"), target, accept_licence)
    if dry_run:
        from dflash.training import rehearse

        for line in rehearse(target, texts, settings, announce):
            print(line)
        return

    from dflash.training import train_drafter

    record = finished(
        train_drafter,
        target,
        texts,
        output,
        settings,
        **vars(start),
        on_point=_print_point,
    )
    if is_first_process():
        tau = "" if math.isnan(record.best_tau) else f", tau {record.best_tau:.2f} on the held-out prompts"
        say_complete(output, f"step {record.best_step}{tau}", record)


def _chosen_or_filed(paths: TrainingPaths, recipe: Any, config: Path | None) -> dict[str, Any]:
    """Returns the options given as flags and, where there is no flag, those of the file.

    ValueError if one of `TrainingPaths` is missing.
    """
    chosen = chosen_of(recipe)
    if "target_layer_ids" in chosen:
        chosen["target_layer_ids"] = numbers(chosen["target_layer_ids"], "--target-layer-ids")
    names = list(vars(paths))
    options = read_yaml(config, names) if config is not None else {}
    options |= chosen | chosen_of(paths)
    for name in names:
        if options.get(name) is None:
            raise ValueError(f"--{name} is missing: give it, or write `{name}: …` into the file of --config.")
    return options


def chosen_of(options: Any) -> dict[str, Any]:
    """Returns the options that were given, by name."""
    return {name: value for name, value in vars(options).items() if value not in (None, [])}


def say_licences(verb: Literal["adapt", "train"], drafter: str, target: str, is_accepted: bool) -> None:
    """Says what the licences ask for. ValueError if a licence forbids the training and `is_accepted` is false."""
    from dflash.checkpoints import licence_lines

    for line in licence_lines(verb, drafter, target, is_accepted):
        announce(line)


def finished(train: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Runs `train` with the command added to `provenance`, and returns its record.

    After a signal, prints how to go on and exits with 128 + the signal's number. ValueError for a loss that is not
    finite: the settings or the data are wrong.
    """
    from dflash.common.provenance import command

    facts = {"command": command()} | options.pop("provenance", {})
    try:
        record = train(*arguments, provenance=facts, announce=announce, show_progress=sys.stderr.isatty(), **options)
    except FloatingPointError as error:
        raise ValueError(str(error)) from error
    if record.stopped_at is not None:
        print(f"Stopped after step {record.stopped_at}: go on with the same command and --resume.", file=sys.stderr)
        raise typer.Exit(128 + (record.signal or 0))
    return record


def say_complete(folder: str | Path, kept: str, record: Any) -> None:
    """Prints where the checkpoint is and what it holds. If a new one states no licence, prints how to state one."""
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
    """Prints the figures of one point of the training curve."""
    figures = []
    if "loss" in point:
        figures.append(f"loss {point['loss']:.3f}")
        figures.append(f"{point['accepted_per_block']:.2f} accepted per block")
    if "tau" in point:
        figures.append(f"tau {point['tau']:.2f}")
    print(f"step {point['step']}: {', '.join(figures)}", flush=True)
