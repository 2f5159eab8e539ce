"""Options that several commands have, and the panels that group them in the help."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo


# The methods of `bench` and `eval`, in lines for the help: its paragraphs are not filled.
METHODS = """target.generate, prompt lookup, native dflash (transformers 5.15 on),
dflash (the drafter alone), dflash with lookup (the default of
spec_generate), dflash with lookup and trees, dflash eager,
dflash compiled, dflash adaptive, dflash tree, dflash drafting nothing,
random drafter adaptive"""

LONGEST_OPPOSITE = 16  # letters of a `--no-…` that has room beside its flag


def panel(title: str) -> Callable[..., Any]:
    """`typer.Option` for options that the help shows together under a title."""
    return partial(typer.Option, rich_help_panel=title)


class WholeNames(TyperCommand):
    """A command whose help shows every name whole on 80 columns."""

    def format_help(self, context: Any, formatter: Any) -> None:
        """Writes the help. The opposite of a flag, if it is long and not its default's, is left out."""
        for parameter in self.params:
            is_long = any(len(name) > LONGEST_OPPOSITE for name in parameter.secondary_opts)
            if is_long and parameter.default is not True:
                parameter.secondary_opts = []
        super().format_help(context, formatter)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """`command`, which has an option for each field of its parameters that are dataclasses, and receives their objects.

    The help names the types of options by a letter: whole names then have room on 80 columns.
    """
    groups: dict[str, Any] = {}
    flags = {}
    for name, parameter in inspect.signature(command).parameters.items():
        options: Mapping[str, inspect.Parameter] = {name: parameter}
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            options = inspect.signature(groups[name]).parameters
        for flag, option in options.items():
            flags[flag] = option.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            _shorten_type(option.annotation)

    def run(**values: Any) -> None:
        for name, group in groups.items():
            options = {flag: values.pop(flag) for flag in inspect.signature(group).parameters}
            values[name] = group(**options)
        command(**values)

    run.__signature__ = inspect.Signature(list(flags.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: flag.annotation for name, flag in flags.items()}
    return run


def _shorten_type(annotation: Any) -> None:
    """Names the type of an option by a letter."""
    words = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}
    hint, *notes = get_args(annotation)
    kinds = _kinds(hint)
    letters = [word for kind, word in words.items() if kind in kinds]
    for note in notes:
        if isinstance(note, OptionInfo) and note.metavar is None and letters:
            note.metavar = letters[0]


def _kinds(hint: Any) -> set[Any]:
    """A type and all that it is made of: `list[Path] | None` has `Path` in it."""
    return {hint}.union(*map(_kinds, get_args(hint)))


prompt_option, decoding_option, model_option = panel("Prompts"), panel("Decoding"), panel("Models and device")
server_option, result_option = panel("Servers"), panel("Result")

# What `loading.read_prompts` reads.
PROMPT_FILE = "A file with a prompt a line, or JSON with messages, prompt or question"

# Short metavars leave room for whole names on 80 columns.
Target = Annotated[str, typer.Option(metavar="NAME", help="The target: a local folder or an id on the Hub.")]
Drafter = Annotated[str, typer.Option(metavar="NAME", help="Its DFlash drafter: a local folder or an id on the Hub.")]
TargetOfDrafter = Annotated[
    str | None, typer.Option("--target", metavar="NAME", help="Its target: a local folder or an id on the Hub.")
]
Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="A drafter's checkpoint of any tool: a folder or an id on the Hub.")
]
WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Read the tensors of a pickle too.")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
TrustRemoteCode = Annotated[
    bool, model_option("--trust-remote-code", help="Run code that the target's repository holds. Read it first.")
]
ChatTemplate = Annotated[bool, prompt_option(help="Use the target's chat template.")]
Thinking = Annotated[bool, prompt_option(help="Let the chat template ask for thinking.")]
ApiKeyEnv = Annotated[str | None, server_option(metavar="NAME", help="Environment variable that holds the API key.")]
Hardware = Annotated[str | None, server_option(help="Hardware of the servers, for the record.")]
Model = Annotated[str | None, server_option(help="The served model's name. Default: the only one.")]
BaselineModel = Annotated[
    str | None, server_option(help="The model's name at --baseline-url. Default: that of --model.")
]
Repeats = Annotated[int, decoding_option(min=1, help="Runs of each method on each prompt; the median counts.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --output.")]
BeginAnew = Annotated[bool, typer.Option("--overwrite", help="Begin anew in an --output that holds a run.")]
Output = Annotated[Path | None, result_option(help="JSON file to write.")]
Overwrite = Annotated[bool, result_option("--overwrite", help="Replace a file that exists at --output.")]
AsJson = Annotated[bool, result_option("--json", help="Print one JSON object.")]
AcceptLicence = Annotated[bool, typer.Option("--accept-licence", help="Go on where a licence forbids it.")]


@dataclass
class ModelOptions:
    """How checkpoints are loaded."""

    dtype: Annotated[
        DtypeName,
        model_option(
            metavar="NAME",
            help="float32, bfloat16, float16, or auto: as each checkpoint is stored (the embedded pair: float32).",
        ),
    ] = "auto"
    device: Annotated[
        str | None,
        model_option(
            metavar="NAME", help="cpu, cuda, cuda:1, auto … Default: CUDA if there is any, one GPU per process."
        ),
    ] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass
class TemplateOptions:
    """How prompts are given to the target."""

    chat_template: ChatTemplate = True
    thinking: Thinking = False


@dataclass
class ResultOptions:
    """Where a result goes."""

    output: Output = None
    overwrite: Overwrite = False
    as_json: AsJson = False
