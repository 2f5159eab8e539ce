"""`dflash train`: a target and data in, a drafter's checkpoint out. Its flags are the fields of `TrainingSettings`."""

import copy
import inspect
import os
import platform
import sys
from collections.abc import Callable, Collection
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from dflash.common.messages import counted
from dflash.training import TrainingSettings, read_yaml

from .arguments import AcceptLicence
from .loading import checkpoint, hide_loading_bars, numbers


# Steps that a dry run measures, after one warm-up step.
MEASURED_STEPS = 3


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
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew in an --output that holds a run.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the run would take, and stop.")] = False,
    accept_licence: AcceptLicence = False,
    **flags: Any,
) -> None:
    """Trains a drafter for a target by a recipe and writes its checkpoint.

    In N processes, on GPUs or on a CPU (where accelerate launch starts one alone):
    torchrun --nproc_per_node N -m dflash train …
    """
    given = {name: value for name, value in flags.items() if value is not None}
    if "target_layer_ids" in given:
        given["target_layer_ids"] = numbers(given["target_layer_ids"], "--target-layer-ids")
    places = {"target": target, "data": data, "output": output}
    asked = read_yaml(config, list(places)) if config is not None else {}
    asked |= given | {name: place for name, place in places.items() if place not in (None, [])}
    for name in places:
        if asked.get(name) is None:
            raise ValueError(f"--{name} is missing: give it, or write `{name}: …` into the file of --config.")
    model, texts, folder = (asked.pop(name) for name in places)
    model, folder = str(model), str(folder)
    texts = list(map(str, texts if isinstance(texts, list) else [texts]))
    settings = TrainingSettings(**asked)
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
        _rehearse(model, texts, settings)
        return

    from dflash.common.provenance import command
    from dflash.training import train_drafter

    how: dict[str, Any] = {"resume": resume, "overwrite": overwrite, "on_point": _print_point, "announce": announce}
    how |= {"provenance": {"command": command()}, "show_progress": sys.stderr.isatty()}
    try:
        record = train_drafter(model, texts, folder, settings, **how)
    except FloatingPointError as error:
        raise ValueError(str(error)) from error
    say_stopped(record)
    if os.environ.get("RANK", "0") == "0":
        tau = "" if record.best_tau != record.best_tau else f", tau {record.best_tau:.2f} on the held-out prompts"
        was_complete = "; the run was complete, nothing to resume" if record.was_complete else ""
        print(f"{folder}: step {record.best_step}{tau}{was_complete}")
        if not record.was_complete:
            say_licence(folder)


def say_stopped(record: Any) -> None:
    """Says how to go on after a signal, and exits with its status."""
    if record.stopped_at is not None:
        print(f"Stopped after step {record.stopped_at}: go on with the same command and --resume.", file=sys.stderr)
        raise typer.Exit(128 + (record.signal or 0))


def say_licence(folder: str) -> None:
    """Says on standard error how to state a licence, where the card of a new checkpoint has none."""
    from dflash.checkpoints import STATE_ONE, read_licence

    if read_licence(folder).name is None:
        announce(f"Its card states no licence. Before you share it, {STATE_ONE}.")


def announce(sentence: str) -> None:
    """Prints a sentence on standard error, once for all processes."""
    if os.environ.get("RANK", "0") == "0":
        print(sentence, file=sys.stderr)


def _print_point(point: dict[str, Any]) -> None:
    said = [f"tau {point['tau']:.2f}"] if "tau" in point else []
    if "loss" in point:
        said = [f"loss {point['loss']:.3f}", f"{point['accepted_per_block']:.2f} accepted per block", *said]
    print(f"step {point['step']}: {', '.join(said)}", flush=True)


def _rehearse(target: str, data: list[str], settings: TrainingSettings) -> None:
    """Prints what the run would take, once for all processes, after a few real steps of it; writes nothing."""
    import resource

    import torch

    from dflash.common.stopwatch import seconds_of
    from dflash.training import Trainer, estimate_memory, oversize, prepare, tracker_options

    tracker_options(settings, Path())  # refused as the run itself would
    ready = prepare(target, data, settings, announce)
    trainer = Trainer(ready.drafter, ready.target, ready.examples, replace(settings, features=None))
    say: Callable[[str], None] = print if trainer.is_first else lambda line: None
    steps, batches, config = trainer.num_steps, trainer.batches_per_epoch, ready.drafter.config
    sizes = ((len(example), sum(example.mask_array)) for example in ready.examples)
    tokens, supervised = map(sum, zip(*sizes, strict=True))
    say(f"recipe    {settings.recipe_text()}: {trainer.rates}, weights {settings.position_weights}")
    say(f"steps     {steps:,} ({steps / batches:.1f} epochs of {batches:,} batches)")
    say(
        f"data      {counted(len(ready.examples), 'sequence')}, {tokens:,} tokens an epoch, {supervised:,} "
        f"supervised; {counted(len(ready.held_out), 'held-out prompt')}"
    )
    say(
        f"drafter   {ready.drafter.num_parameters():,} parameters in {counted(config.num_hidden_layers, 'layer')}, block {config.block_size}, "
        f"target layers {config.target_layer_ids}; target {ready.target.num_parameters():,} parameters"
    )
    if too_large := oversize(ready.drafter, ready.target, settings.init is not None):
        say(f"size      {too_large}")
    memory = estimate_memory(trainer)
    parts = ", ".join(f"{name} {_bytes(held)}" for name, held in memory.items())
    say(
        f"memory    about {_bytes(sum(memory.values()))} per process, estimated from shapes: {parts}{_kept_by_glibc(trainer)}"
    )
    if settings.features is not None:
        say(f"features  {_bytes(trainer.feature_bytes())} in {settings.features}, written once; measured here online")
    if steps <= MEASURED_STEPS:
        say("time      not measured: the run is shorter than a measurement")
        return
    trainer.step()
    seconds = seconds_of(lambda: [trainer.step() for _ in range(MEASURED_STEPS)]) / MEASURED_STEPS
    say(
        f"time      about {_duration(seconds * steps)}: {seconds:.2f} s a step, mean of {MEASURED_STEPS} measured steps; "
        "the decoding of held-out prompts is not in it"
    )
    if trainer.accelerator.num_processes == 1:
        ratio = _step_cost(trainer)
        say(
            f"speed     a draft and its check take as long as {ratio:.1f} plain tokens: decoding is faster above that tau"
        )
    device, what = trainer.accelerator.device, "in these steps"
    if device.type == "cuda":
        held = torch.cuda.max_memory_allocated(device)
    else:  # of everything, Python and the data too
        unit = 1 if sys.platform == "darwin" else 1024
        held, what = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "by the whole process up to here"
    say(f"measured  {_bytes(held)} at most on {device}, {what}")


def _kept_by_glibc(trainer: Any) -> str:
    """What is not in the estimate on a CPU: memory that is freed and that glibc keeps, unless its threshold is set."""
    is_set = "MALLOC_MMAP_THRESHOLD_" in os.environ
    if trainer.accelerator.device.type != "cpu" or platform.libc_ver()[0] != "glibc" or is_set:
        return ""
    return "; freed memory that glibc keeps comes on top, unless MALLOC_MMAP_THRESHOLD_=65536 is set"


def _step_cost(trainer: Any) -> float:
    """Seconds of a decoding step with the drafter over those of a plain token, eagerly, after a short prompt.

    The drafter decodes in the target's precision, as it will, and not in that of its training.
    """
    from statistics import median

    import torch

    from dflash.common.stopwatch import seconds_of
    from dflash.model.generation_dflash import generate_blocks
    from dflash.training import prompt_of

    target = trainer.target
    drafter = copy.deepcopy(trainer.whole_drafter()).to(target.dtype).eval()
    ids = torch.tensor([prompt_of(trainer.examples[0])[:16]], device=target.device)
    how: dict[str, Any] = {"temperature": 0.0, "compile": False, "prompt_lookup_num_tokens": 0, "stop_token_ids": []}
    steps: list[float] = []

    def plain() -> None:
        target.generate(ids, max_new_tokens=17, min_new_tokens=17, do_sample=False).tolist()

    def drafted() -> None:
        blocks = generate_blocks(drafter, target, ids, max_new_tokens=17, **how)
        steps.append(sum(not block.is_prefill for block in blocks))

    times = [(seconds_of(plain) / 16, seconds_of(drafted) / steps[-1]) for _ in range(4)]
    return median(of_step / of_token for of_token, of_step in times[1:])  # the first warms up


def _bytes(size: float) -> str:
    power = min(3, max(0, int(size).bit_length() - 1) // 10)
    return f"{size / 1024**power:.{power // 2}f} {('B', 'KiB', 'MiB', 'GiB')[power]}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def with_flags(
    function: Callable[..., None], defaults: TrainingSettings | None = None, without: Collection[str] = ()
) -> Callable[..., None]:
    """`function` with an option for each field of `TrainingSettings` in the place of its `**flags`.

    The help names `defaults`, by default the fields' own; fields whose name or topic is in `without`, or which `function` takes
    by name, have no option.
    """
    *own, _flags = inspect.signature(function, eval_str=True).parameters.values()
    hints, asked = get_type_hints(TrainingSettings), fields(TrainingSettings)
    options = {
        one.name: _option(one, hints[one.name], one.default if defaults is None else getattr(defaults, one.name))
        for one in asked
        if not {one.name, one.metadata["topic"]} & {*without, *(option.name for option in own)}
    }
    kind = inspect.Parameter.KEYWORD_ONLY
    own += [inspect.Parameter(name, kind, default=None, annotation=hint) for name, hint in options.items()]
    function.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    function.__annotations__ = {one.name: one.annotation for one in own}
    return function


def _option(one: Any, hint: Any, default: Any) -> Any:
    """The option of a field. Its choices are in the help text alone: `TrainingSettings` checks them."""
    choices = next((option for option in (hint, *get_args(hint)) if get_origin(option) is Literal), None)
    is_text = hint == list[int] | None or choices is not None
    text = one.metadata["help"]
    if choices is not None:
        text += f" One of {', '.join(get_args(choices))}."
    if default is not None:
        text = text.partition(" Default: ")[0] + f" Default: {'no' if default is False else default}."
    option = typer.Option(help=text, show_default=False, rich_help_panel=one.metadata["topic"])
    return Annotated[str | None if is_text else hint | None, option]
