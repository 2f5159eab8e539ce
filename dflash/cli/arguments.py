"""Options that several commands have, and the panels that group them in the help."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import typer
from typer.core import TyperCommand
from typer.models import OptionInfo


# The methods of `bench` and `eval`. Lines are broken here, because the help does not wrap its paragraphs.
METHODS = """target.generate, prompt lookup, native dflash (transformers 5.15 on),
dflash (the drafter alone), dflash with lookup (the default of
spec_generate), dflash with lookup and trees, dflash eager,
dflash compiled, dflash adaptive, dflash tree, dflash drafting nothing,
random drafter adaptive"""

# What the help shows for a type. It is short, so that whole names have room on 80 columns.
LETTERS = {bool: "", int: "N", float: "X", str: "TEXT", Path: "PATH"}
LONGEST_OPPOSITE = 16  # largest number of letters of a `--no-…` that has room beside its flag


def panel(title: str | None) -> Callable[..., Any]:
    """Returns a function that makes options from help text and names. The help shows them together under `title`."""

    def option(help: str, *names: str, **rules: Any) -> Any:
        return typer.Option(*names, help=help, rich_help_panel=title, **rules)

    return option


def argument(help: str, metavar: str | None = None) -> Any:
    """Returns a `typer.Argument` with its help text and its name in the usage line."""
    return typer.Argument(metavar=metavar, help=help)


class WholeNames(TyperCommand):
    """A command whose help shows every name whole on 80 columns."""

    def format_help(self, context: Any, formatter: Any) -> None:
        """Writes the help. Leaves out a long opposite of a flag, unless the flag is on by default."""
        for parameter in self.params:
            is_long = any(len(name) > LONGEST_OPPOSITE for name in parameter.secondary_opts)
            if is_long and parameter.default is not True:
                parameter.secondary_opts = []
        super().format_help(context, formatter)


def with_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Returns a function that runs `command`. It has an option for each field of the command's dataclass parameters."""
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
    """Shortens the name that the help shows for the type of an option."""
    letters = [letter for kind, letter in LETTERS.items() if kind in _kinds(hint)]
    if isinstance(note, OptionInfo) and note.metavar is None and letters:
        note.metavar = letters[0]


def _kinds(hint: Any) -> set[Any]:
    """Returns a type and all types in it: those of `list[Path] | None` include `Path`."""
    return {hint}.union(*map(_kinds, get_args(hint)))


option = panel(None)
prompt_option, decoding_option, model_option = panel("Prompts"), panel("Decoding"), panel("Models and device")
server_option, result_option = panel("Servers"), panel("Result")

# The files that `loading.read_prompts` reads.
PROMPT_FILE = "A file with a prompt on each line, or JSON with messages, prompt or question"

# Short metavars leave room for whole names on 80 columns.
Target = Annotated[str, option("The target: a local folder or an id on the Hub.", metavar="NAME")]
Drafter = Annotated[str, option("Its DFlash drafter: a local folder or an id on the Hub.", metavar="NAME")]
TargetOfDrafter = Annotated[
    str | None, option("Its target: a local folder or an id on the Hub.", "--target", metavar="NAME")
]
Source = Annotated[str, argument("A drafter's checkpoint from any tool: a folder or an id on the Hub.", "SOURCE")]
WeightsOnly = Annotated[bool, option("Read the tensors of a pickle too.", "--weights-only")]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
TrustRemoteCode = Annotated[
    bool, model_option("Run code that the target's repository holds. Read it first.", "--trust-remote-code")
]
Thinking = Annotated[bool, prompt_option("Let the chat template ask for thinking.")]
ApiKeyEnv = Annotated[str | None, server_option("Environment variable that holds the API key.", metavar="NAME")]
Hardware = Annotated[str | None, server_option("Hardware of the servers, to record it in the result.")]
Model = Annotated[str | None, server_option("The served model's name. Default: the server's only model.")]
BaselineModel = Annotated[str | None, server_option("The model's name at --baseline-url. Default: that of --model.")]
Repeats = Annotated[int, decoding_option("Runs of each method on each prompt; the median counts.", min=1)]
Output = Annotated[Path | None, result_option("JSON file to write.")]
Overwrite = Annotated[bool, result_option("Replace a file that exists at --output.", "--overwrite")]
AsJson = Annotated[bool, result_option("Print one JSON object.", "--json")]
AcceptLicence = Annotated[bool, option("Go on although a licence forbids it.", "--accept-licence")]


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
    """Where and how a result is written."""

    output: Output = None
    overwrite: Overwrite = False
    as_json: AsJson = False
