"""Options that several commands have, and the panels that group them in the help."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
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

# What the help writes for a type: whole names then have room on 80 columns.
LETTERS = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}
LONGEST_OPPOSITE = 16  # letters of a `--no-…` that has room beside its flag


def panel(title: str | None) -> Callable[..., Any]:
    """`typer.Option` by help text and names, for options that the help shows together under a title."""

    def option(help: str, *names: str, **rules: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=title, **rules)

    return option


def argument(help: str, metavar: str | None = None) -> Any:
    """`typer.Argument` by help text and what the usage calls it."""
    return typer.Argument(metavar=metavar, help=help)


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
    """`command`, which has an option for each field of its parameters that are dataclasses, and receives their objects."""
    groups: dict[str, Any] = {}
    flags: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(command).parameters.items():
        if is_dataclass(parameter.annotation):
            groups[name] = parameter.annotation
            flags |= inspect.signature(groups[name]).parameters
        else:
            flags[name] = parameter

    def run(**values: Any) -> None:
        for name, group in groups.items():
            options = {flag: values.pop(flag) for flag in inspect.signature(group).parameters}
            values[name] = group(**options)
        command(**values)

    own = [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in flags.values()]
    run.__signature__ = inspect.Signature(own)  # type: ignore[attr-defined]
    run.__annotations__ = {flag.name: flag.annotation for flag in own}
    for flag in own:
        _shorten_type(*get_args(flag.annotation))
    return run


def _shorten_type(hint: Any, note: Any) -> None:
    """Makes the help name the type of an option in short."""
    letters = [letter for kind, letter in LETTERS.items() if kind in _kinds(hint)]
    if isinstance(note, OptionInfo) and note.metavar is None and letters:
        note.metavar = letters[0]


def _kinds(hint: Any) -> set[Any]:
    """A type and all that it is made of: `list[Path] | None` has `Path` in it."""
    return {hint}.union(*map(_kinds, get_args(hint)))


option = panel(None)
prompt_option, decoding_option, model_option = panel("Prompts"), panel("Decoding"), panel("Models and device")
server_option, result_option = panel("Servers"), panel("Result")

# What `loading.read_prompts` reads.
PROMPT_FILE = "A file with a prompt a line, or JSON with messages, prompt or question"

# Short metavars leave room for whole names on 80 columns.
Target = Annotated[str, option("The target: a local folder or an id on the Hub.", metavar="NAME")]
Drafter = Annotated[str, option("Its DFlash drafter: a local folder or an id on the Hub.", metavar="NAME")]
TargetOfDrafter = Annotated[
    str | None, option("Its target: a local folder or an id on the Hub.", "--target", metavar="NAME")
]
Source = Annotated[str, argument("A drafter's checkpoint of any tool: a folder or an id on the Hub.", "SOURCE")]
WeightsOnly = Annotated[bool, option("Read the tensors of a pickle too.", "--weights-only")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
TrustRemoteCode = Annotated[
    bool, model_option("Run code that the target's repository holds. Read it first.", "--trust-remote-code")
]
Thinking = Annotated[bool, prompt_option("Let the chat template ask for thinking.")]
ApiKeyEnv = Annotated[str | None, server_option("Environment variable that holds the API key.", metavar="NAME")]
Hardware = Annotated[str | None, server_option("Hardware of the servers, for the record.")]
Model = Annotated[str | None, server_option("The served model's name. Default: the only one.")]
BaselineModel = Annotated[str | None, server_option("The model's name at --baseline-url. Default: that of --model.")]
Repeats = Annotated[int, decoding_option("Runs of each method on each prompt; the median counts.", min=1)]
Output = Annotated[Path | None, result_option("JSON file to write.")]
Overwrite = Annotated[bool, result_option("Replace a file that exists at --output.", "--overwrite")]
AsJson = Annotated[bool, result_option("Print one JSON object.", "--json")]
AcceptLicence = Annotated[bool, option("Go on where a licence forbids it.", "--accept-licence")]


@dataclass
class ModelOptions:
    """How checkpoints are loaded."""

    dtype: Annotated[
        DtypeName,
        model_option(
            "float32, bfloat16, float16, or auto: as each checkpoint is stored (the embedded pair: float32).",
            metavar="NAME",
        ),
    ] = "auto"
    device: Annotated[
        str | None,
        model_option("cpu, cuda, cuda:1, auto … Default: CUDA if there is any, one GPU per process.", metavar="NAME"),
    ] = None
    trust_remote_code: TrustRemoteCode = False


@dataclass
class TemplateOptions:
    """How prompts are given to the target."""

    chat_template: Annotated[bool, prompt_option("Use the target's chat template.")] = True
    thinking: Thinking = False


@dataclass
class ResultOptions:
    """Where a result goes."""

    output: Output = None
    overwrite: Overwrite = False
    as_json: AsJson = False
