"""What the commands share: options, the checks before anything is loaded, loading a pair, encoding a prompt."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from dflash.common.messages import first_line

from .terminal import progress_bar


class Dtype(str, Enum):
    """Names of dtypes that the commands take."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


# Options of several commands. Short metavars leave room for whole names on 80 columns.
Target = Annotated[str, typer.Option(metavar="NAME", help="The target: a local folder or an id on the Hub.")]
Drafter = Annotated[str, typer.Option(metavar="NAME", help="Its DFlash drafter: a local folder or an id on the Hub.")]
TargetOfDrafter = Annotated[
    str | None, typer.Option("--target", metavar="NAME", help="Its target: a local folder or an id on the Hub.")
]
WeightsOnly = Annotated[bool, typer.Option("--weights-only", help="Read the tensors of a pickle too.")]
StoredDtype = Annotated[
    Dtype, typer.Option(metavar="DTYPE", help="auto (as each checkpoint is stored), float32, bfloat16 or float16.")
]
Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1, auto … Default: CUDA if there is one.")
]
ChatTemplate = Annotated[bool, typer.Option(help="Ask in the target's chat template.")]
Thinking = Annotated[bool, typer.Option(help="Let the chat template ask for thinking.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


class Pair(NamedTuple):
    """A target, its drafter and their tokenizer."""

    target: Any
    drafter: Any
    tokenizer: Any


def load_pair(target: str, drafter: str, dtype: Dtype, device: str | None) -> Pair:
    """Both models and the tokenizer, by folder or Hub id; ValueError names the one that cannot be loaded."""
    target, drafter = checkpoint(target, "--target"), checkpoint(drafter, "--drafter")
    is_local = os.path.isdir(target) and os.path.isdir(drafter)
    with progress_bar("Loading the pair", num_steps=3, hidden=not is_local) as advance:
        if is_local:  # a download shows bars of its own
            hide_loading_bars()
        place = {"dtype": torch_dtype(dtype), "device_map": known_device(device)}
        from transformers import AutoModelForCausalLM

        from dflash.model.modeling_dflash import DFlashDraftModel

        tokenizer = load_tokenizer(target)
        advance()
        with named("--drafter", drafter):
            draft_model = DFlashDraftModel.from_pretrained(drafter, **place).eval()
        advance()
        with named("--target", target):
            return Pair(AutoModelForCausalLM.from_pretrained(target, **place).eval(), draft_model, tokenizer)


def load_tokenizer(target: str) -> Any:
    """The tokenizer of a causal language model; ValueError for a model of another kind or without a tokenizer."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    with named("--target", target):
        config = AutoConfig.from_pretrained(target)
        # AutoModelForCausalLM takes these too, and their positions then see the ones after them.
        if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
            raise ValueError(f"a {config.model_type} model is no causal language model: give one that generates text.")
        try:
            tokenizer = AutoTokenizer.from_pretrained(target)
            is_empty = not tokenizer("a", add_special_tokens=False)["input_ids"]
        except TypeError:  # transformers 4.57, of files that are not there
            is_empty = True
        if is_empty:
            raise ValueError("there is no tokenizer: put its files (tokenizer.json, tokenizer_config.json) there.")
        return tokenizer


@contextmanager
def named(option: str, name: str) -> Iterator[None]:
    """Raises what goes wrong in the body as one sentence that begins with the checkpoint's name."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise ValueError(f"{option} {name}: {first_line(error)}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise ValueError(
            f"{option} {name}: the weights cannot be read ({error}): the file is truncated or no safetensors file; "
            "fetch it again."
        ) from error


def checkpoint(name: str, option: str) -> str:
    """A folder's path with `~` resolved, or a Hub id as it is; ValueError for what can be neither."""
    path = os.path.expanduser(name)
    remedy = "give a checkpoint's folder or its id on the Hub."
    if os.path.isdir(path):
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ValueError(f"{option} {name} holds no config.json: {remedy}")
        return path
    if not name or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ValueError(f"{option} {name or repr(name)} is no folder: {remedy}")
    return name


def check_decoding(
    device: str | None = None,
    max_new_tokens: int = 1,
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
) -> None:
    """Refuses values that no decoding takes, by their options' names; called before anything is loaded.

    Raises:
        ValueError: with the option, its value and the remedy.
    """
    for option, value, is_allowed, remedy in (
        ("--max-new-tokens", max_new_tokens, max_new_tokens > 0, "ask for at least one token"),
        ("--temperature", temperature, 0 <= temperature < math.inf, "use 0 for greedy decoding, or a number above 0"),
        ("--top-p", top_p, top_p is None or 0 < top_p <= 1, "use a probability above 0 and up to 1"),
        ("--top-k", top_k, top_k is None or top_k >= 0, "use the number of tokens to keep, or 0 for all"),
    ):
        if not is_allowed:
            raise ValueError(f"{option} {value} cannot be used: {remedy}.")
    known_device(device)


def torch_dtype(dtype: Dtype) -> Any:
    """The value of `from_pretrained(dtype=…)`."""
    import torch

    return "auto" if dtype is Dtype.auto else getattr(torch, dtype.value)


def known_device(device: str | None) -> str:
    """The value of `from_pretrained(device_map=…)`; ValueError for a device that cannot be used here."""
    import torch

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device != "auto":
        try:
            if torch.device(device).type == "meta":
                raise RuntimeError("it holds shapes and no values")
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"--device {device} cannot be used ({reason}): try cpu, cuda, cuda:0 or auto.") from error
    return device


def own_device(processes: Any) -> str | None:
    """The GPU of this process where several run on one machine, else `None`."""
    import torch

    if processes.count == 1 or not torch.cuda.is_available():
        return None
    return f"cuda:{processes.local_rank % torch.cuda.device_count()}"


def api_key(variable: str | None) -> str | None:
    """The value of the environment variable that --api-key-env names; ValueError if it is not set."""
    if variable is None:
        return None
    key = os.environ.get(variable)
    if not key:
        raise ValueError(f"--api-key-env {variable} is not set: export it, or leave the option out.")
    return key


def given(text: str) -> str:
    """The prompt; ValueError if there is none."""
    if not text.strip():
        raise ValueError("The prompt is empty: give some text.")
    return text


def hide_loading_bars() -> None:
    """Hides the progress bars of transformers. Called inside a bar of ours, because this import takes seconds."""
    from transformers.utils import logging

    logging.disable_progress_bar()


def encode(pair: Pair, text: str, chat_template: bool = True, thinking: bool = False) -> Any:
    """The prompt's ids [1, S], in the chat template unless it is switched off or the tokenizer has none."""
    from dflash.evaluation import chat_encoder

    if chat_template and not pair.tokenizer.chat_template:
        say_once("The target's tokenizer has no chat template: prompts are given as they are.")
    return chat_encoder(pair.tokenizer, thinking, chat_template)([{"role": "user", "content": text}])


@functools.cache
def say_once(sentence: str) -> None:
    """Prints a sentence on standard error, once in a process."""
    print(f"dflash: {sentence}", file=sys.stderr)


def numbered_lines(path: Path, option: str) -> list[tuple[int, str]]:
    """A file's lines that are not blank, counted from 1; ValueError if it cannot be read or has none."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"{option} {path} cannot be read ({error.strerror}): name a file of one prompt a line."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{option} {path} is no text in UTF-8: name a file of one prompt a line.") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{option} {path} is empty: write one prompt a line.")
    return lines


def listed(text: str, option: str) -> tuple[str, ...]:
    """Names that were given with commas between, each once; ValueError if there are none."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"{option} {text!r} names nothing: give names with commas between.")
    return names


def show_table(table: tuple[list[str], list[list[str]]], title: str | None = None) -> None:
    """Prints headings and cells, figures to the right; a heading is wrapped to the width of its cells."""
    from rich.console import Console
    from rich.table import Table

    headings, rows = table
    shown = Table(title=title, title_justify="left", title_style="dim", padding=(0, 1, 0, 0), box=None)
    for place, heading in enumerate(headings):
        cells = [row[place] for row in rows]
        width = max(map(len, [*cells, *re.split(r"[ -]", heading)]))
        is_figure = any(cell[:1].isdigit() for cell in cells)
        broken = textwrap.fill(heading, width + heading.count("-"), break_long_words=False)
        shown.add_column(broken, justify="right" if is_figure else "left", no_wrap=True)
    for row in rows:
        shown.add_row(*row)
    Console(highlight=False, markup=False).print(shown)


def dtype_name(pair: Pair) -> str:
    """The target's dtype without `torch.`."""
    return str(pair.target.dtype).removeprefix("torch.")
