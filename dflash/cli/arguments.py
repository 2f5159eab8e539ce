"""Options that several commands have, the panels that group them in the help, and the file of --prompts."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .options import Dtype, numbered_lines


def panel(title: str) -> Callable[..., Any]:
    """`typer.Option` for options that the help shows together under a title."""
    return partial(typer.Option, rich_help_panel=title)


prompt_option, decoding_option, model_option = panel("Prompts"), panel("Decoding"), panel("Models and device")
server_option, result_option = panel("Servers"), panel("Result")

Target = Annotated[str, typer.Option(help="The target: a local folder or an id on the Hub.")]
Drafter = Annotated[str, typer.Option(help="Its DFlash drafter: a local folder or an id on the Hub.")]
DtypeOption = Annotated[
    Dtype,
    model_option(
        metavar="NAME",
        help="float32, bfloat16, float16, or auto: as each checkpoint is stored (the embedded pair: float32).",
    ),
]
Device = Annotated[
    str | None,
    model_option(metavar="NAME", help="cpu, cuda, cuda:1, auto … Default: CUDA if there is any, one GPU per process."),
]
ChatTemplate = Annotated[bool, prompt_option(help="Use the target's chat template.")]
Thinking = Annotated[bool, prompt_option(help="Let the chat template ask for thinking.")]
ApiKeyEnv = Annotated[str | None, server_option(metavar="NAME", help="Environment variable that holds the API key.")]
Hardware = Annotated[str | None, server_option(help="Hardware of the servers, for the record.")]
Model = Annotated[str | None, server_option(help="The served model's name. Default: the only one.")]
Output = Annotated[Path | None, result_option(help="JSON file to write.")]
Overwrite = Annotated[bool, result_option("--overwrite", help="Replace a file that exists at --output.")]
AsJson = Annotated[bool, result_option("--json", help="Print the summary as one JSON object.")]


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """Chat messages of each line of a file: a prompt, or a JSON object with `messages`, `prompt` or `question`."""
    prompts = []
    for number, line in numbered_lines(path, "--prompts"):
        try:
            row: Any = json.loads(line) if line.lstrip().startswith("{") else {"prompt": line}
            said = row["prompt"] if "prompt" in row else row.get("question")
            messages = row.get("messages") or [{"role": "user", "content": said}]
            dialogue = [{"role": str(turn["role"]), "content": turn["content"]} for turn in messages]
            if not all(turn["content"].strip() for turn in dialogue):
                raise ValueError("There is no text.")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--prompts {path}, line {number} is no prompt: write a text, or a JSON object with messages, prompt or "
                "question."
            ) from error
        prompts.append(dialogue)
    return prompts
