"""The application: puts every command in its panel, and prints every error as one sentence."""

import inspect
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from dflash.common.messages import as_sentence
from dflash.common.name_clash import import_name_clash
from dflash.common.version import __version__

from .adapt import adapt
from .arguments import METHODS, WholeNames, option, with_flags
from .bench import bench
from .canary import canary
from .check import check
from .convert import convert
from .demo import demo
from .doctor import doctor
from .eval import evaluate
from .export import export
from .export_demo import export_demo
from .generate import generate
from .pair import pair
from .publish import publish
from .regenerate import regenerate
from .report import report
from .serve import serve
from .train import train


PANELS: dict[str, dict[str, Callable[..., Any]]] = {
    "Try it": {"demo": demo, "export-demo": export_demo},
    "Decode": {"generate": generate},
    "Measure": {"bench": bench, "doctor": doctor, "eval": evaluate, "report": report},
    "Train": {"adapt": adapt, "regenerate": regenerate, "train": train},
    "Checkpoints": {"check": check, "convert": convert, "export": export, "pair": pair, "publish": publish},
    "Servers": {"serve": serve, "canary": canary},
}

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        text = str(inspect.getdoc(command)).replace("{methods}", METHODS)
        app.command(name, cls=WholeNames, help=text, rich_help_panel=panel)(with_flags(command))


def _print_version(is_asked: bool) -> None:
    """Prints the version and exits, if `--version` was given."""
    if is_asked:
        print(f"dflash {__version__}")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, option("Print the version and exit.", "--version", callback=_print_version, is_eager=True)
    ] = False,
    quiet: Annotated[bool, option("Log errors only.", "--quiet", "-q")] = False,
    verbose: Annotated[bool, option("Also log decisions on the way.", "--verbose", "-v")] = False,
) -> None:
    """DFlash speculative decoding: the target's own text, in fewer of its forwards."""
    if quiet and verbose:
        raise typer.BadParameter("--quiet and --verbose: give one of them.")
    if quiet or verbose:
        from transformers.utils import logging

        logging.set_verbosity(logging.ERROR if quiet else logging.INFO)


def main() -> None:
    """Runs the command line. An error of the library is one sentence on standard error, and the exit status is 1."""
    clash = import_name_clash()
    if clash:
        _fail(clash)
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        sentence = as_sentence(error)
        if sentence is None:
            raise
        _fail(sentence)


def _fail(sentence: str) -> None:
    """Prints an error on standard error and exits with status 1."""
    print(f"dflash: {sentence}", file=sys.stderr)
    sys.exit(1)
