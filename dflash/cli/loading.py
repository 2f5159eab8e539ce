"""Functions that several commands use to check options and to load models. Wrong values are refused before loading."""

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from dflash.common.files import adapter_fault
from dflash.common.json_text import parsed_json
from dflash.common.messages import as_sentence, counted, without_load_report
from dflash.common.plain_text import check_text
from dflash.common.remote_code import refuse_own_generate

from .arguments import ModelOptions, TemplateOptions
from .terminal import progress_bar


# Chat messages, in the form that chat templates take.
Dialogue = list[dict[str, str]]
IN_TEMPLATE = TemplateOptions()


class Pair(NamedTuple):
    """A target, its drafter and their tokenizer."""

    target: Any
    drafter: Any
    tokenizer: Any


def load_pair(target: str, drafter: str, models: ModelOptions) -> Pair:
    """Loads and returns a pair, by folder or Hub id. ValueError names the model that cannot be loaded.

    Code of the target's repository runs only with `models.trust_remote_code`. No question is asked on standard input.
    """
    target = checkpoint(target, "--target")
    drafter = checkpoint(drafter, "--drafter")
    is_local = os.path.isdir(target) and os.path.isdir(drafter)
    with progress_bar("Loading the pair", num_steps=3, hidden=not is_local) as advance:
        if is_local:  # a download shows bars of its own
            hide_loading_bars()
        device = known_device(models.device)
        from dflash.drafter import DFlashDraftModel

        tokenizer = load_tokenizer(target, models.trust_remote_code)
        advance()
        with named("--drafter", drafter), without_load_report():
            draft_model = DFlashDraftModel.from_pretrained(drafter, dtype=models.dtype, device_map=device).eval()
        advance()
        model = load_target(target, models)
    if is_first_process():
        _say_depth(draft_model.config)
    return Pair(model, draft_model, tokenizer)


def load_target(target: str, models: ModelOptions) -> Any:
    """Loads and returns the target, by folder or Hub id. ValueError with its name if it cannot be loaded."""
    from transformers import AutoModelForCausalLM

    own_code = models.trust_remote_code
    options: dict[str, Any] = {"dtype": models.dtype, "device_map": known_device(models.device)}
    with named("--target", target):
        refuse_own_generate(target, own_code)
        model = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=own_code, **options).eval()
    if models.dtype == "auto" and is_first_process():
        _say_emulation(model)
    return model


def _say_emulation(model: Any) -> None:
    """Says on standard error that the stored dtype is slow on this CPU, unless errors alone are wanted (`--quiet`)."""
    from transformers.utils import logging

    from dflash.common.devices import cpu_emulates

    if model.device.type == "cpu" and cpu_emulates(model.dtype) and logging.get_verbosity() < logging.ERROR:
        name = str(model.dtype).removeprefix("torch.")
        say_once(f"This CPU emulates {name}, in which the target is stored: --dtype float32 is faster here.")


def _say_depth(config: Any) -> None:
    """Says on standard error how many tokens a drafter proposes, except with `--quiet`."""
    from transformers.utils import logging

    if logging.get_verbosity() < logging.ERROR:
        shape = counted(config.num_hidden_layers, "layer")
        if "sliding_attention" in config.layer_types:
            shape += f", window {config.sliding_window}"
        drafts = config.num_proposals
        say_once(
            f"The drafter ({shape}) proposes {counted(drafts, 'token')} at once: at most {drafts + 1} tokens a step."
        )


def load_tokenizer(target: str, trust_remote_code: bool = False) -> Any:
    """Loads and returns the tokenizer of a target. ValueError if there is none, or if the model is not a causal one."""
    from transformers import AutoConfig, AutoTokenizer
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    with named("--target", target):
        config = AutoConfig.from_pretrained(target, trust_remote_code=trust_remote_code)
        # AutoModelForCausalLM loads these too, but their positions would then see later positions.
        if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
            raise ValueError(f"a {config.model_type} model is not a causal language model: give one that writes text.")
        try:
            tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=trust_remote_code)
            is_empty = not tokenizer("a", add_special_tokens=False)["input_ids"]
        except TypeError:  # raised by transformers 4.57 if there are no files
            is_empty = True
        if is_empty:
            raise ValueError("there is no tokenizer: put its files (tokenizer.json, tokenizer_config.json) there.")
        return tokenizer


@contextmanager
def named(option: str, name: str) -> Iterator[None]:
    """Raises an error in the body again, as one sentence that begins with the option and the checkpoint's name."""
    try:
        yield
    except Exception as error:
        sentence = as_sentence(error)
        if sentence is None:
            raise
        raise ValueError(f"{option} {name}: {sentence}") from error


def checkpoint(name: str, option: str) -> str:
    """Returns the path of a folder with `~` resolved, or a Hub id unchanged. ValueError for any other name.

    If the Hub does not answer, this process reads only the Hub's cache from now on.
    """
    path = os.path.expanduser(name)
    remedy = "give a checkpoint's folder or its id on the Hub."
    if os.path.isdir(path):
        if fault := adapter_fault(path):
            raise ValueError(f"{option} {name} {fault}")
        if not os.path.isfile(os.path.join(path, "config.json")):
            raise ValueError(f"{option} {name} holds no config.json: {remedy}")
        return path
    if not name or name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ValueError(f"{option} {name or repr(name)} is not a folder: {remedy}")
    from dflash.common.hub import read_cache_without_hub

    read_cache_without_hub(say_once)
    return name


def known_device(device: str | None) -> str:
    """Returns the value of `from_pretrained(device_map=…)`. ValueError for a device that cannot be used here."""
    import torch

    from dflash.common.devices import device_fault

    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    fault = None if device == "auto" else device_fault(device)
    if fault is not None:
        raise ValueError(f"--device {device} cannot be used ({fault}): try cpu, cuda, cuda:0 or auto.")
    return device


def is_first_process() -> bool:
    """Returns whether this process is the first, by the launcher's variables. It makes no connection."""
    return os.environ.get("RANK", "0") == "0"


def on_own_device(models: ModelOptions, processes: Any) -> ModelOptions:
    """Returns `models` with the GPU of this process, if there are several processes and no device is named."""
    import torch

    if models.device or processes.count == 1 or not torch.cuda.is_available():
        return models
    return replace(models, device=f"cuda:{processes.local_rank % torch.cuda.device_count()}")


def api_key(variable: str | None) -> str | None:
    """Returns the value of the environment variable that --api-key-env names. ValueError if it is not set."""
    key = os.environ.get(variable or "")
    if variable is not None and not key:
        raise ValueError(f"--api-key-env {variable} is not set: export it, or leave the option out.")
    return key


def checked_prompt(text: str) -> str:
    """Returns `text` unchanged. ValueError if it is empty or not valid text."""
    if not text.strip():
        raise ValueError("The prompt is empty: give some text.")
    check_text(text)
    return text


def standard_input() -> str:
    """Returns all of standard input. ValueError if it is closed or not in UTF-8."""
    remedy = "give the prompt as an argument, or pipe it in UTF-8."
    try:
        if sys.stdin is None:  # closed before Python started
            raise OSError
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"Standard input is not UTF-8: {remedy}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"Standard input cannot be read: {remedy}") from error


def hide_loading_bars() -> None:
    """Hides the progress bars of transformers and, if standard error is not a terminal, those of `datasets`.

    It imports transformers, which takes seconds. Show a bar meanwhile.
    """
    if not sys.stderr.isatty():
        # `datasets` reads it when it is imported, which may be later.
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    from transformers.utils import logging

    logging.disable_progress_bar()


def encode(pair: Pair, text: str, template: TemplateOptions = IN_TEMPLATE) -> Any:
    """Returns the prompt's ids [1, S], in the chat template unless it is switched off or the tokenizer has none."""
    return encoder(pair.tokenizer, template)(question(text))


def encoder(tokenizer: Any, template: TemplateOptions) -> Any:
    """Returns a function that encodes a chat as ids [1, S].

    Says on standard error if the chat template is to be used but there is none.
    """
    from dflash.evaluation import chat_encoder

    say_without_template(tokenizer, template.chat_template)
    return chat_encoder(tokenizer, **vars(template))


def question(text: str) -> Dialogue:
    """Returns the chat in which a user asks `text`."""
    return [{"role": "user", "content": text}]


def heldout_dialogues() -> list[Dialogue]:
    """Returns word problems that the embedded drafter was not trained on, as chats."""
    from dflash.checkpoints import heldout_problems

    return [question(problem.question) for problem in heldout_problems()]


def say_without_template(tokenizer: Any, chat_template: bool) -> None:
    """Says on standard error if the chat template is to be used but there is none."""
    if chat_template and tokenizer.chat_template is None:
        say_once("The target's tokenizer has no chat template: prompts are given as they are.")


@functools.cache
def say_once(sentence: str) -> None:
    """Prints a sentence on standard error, once in a process."""
    print(f"dflash: {sentence}", file=sys.stderr)


def read_prompt_files(paths: Iterable[Path]) -> dict[str, list[Dialogue]]:
    """Returns the prompts of each file ([`read_prompts`]) by the file's name without ending.

    Results are stored under these names, so two files with the same name are a ValueError.
    """
    dialogues: dict[str, list[Dialogue]] = {}
    for path in paths:
        if path.stem in dialogues:
            raise ValueError(
                f"--prompts {path} is the second file named {path.stem}. Results are stored by this name: rename it."
            )
        dialogues[path.stem] = read_prompts(path)
    return dialogues


def read_prompts(path: Path) -> list[Dialogue]:
    """Returns the chat messages of each line of a file. A line is a prompt, or a JSON object.

    The object has `messages`, `prompt` or `question`. Answers of the assistant at the end of a chat are left out: the
    models write them.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # files of Windows may begin with a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        fault = f"cannot be read ({error.strerror})" if isinstance(error, OSError) else "is not text in UTF-8"
        raise ValueError(f"--prompts {path} {fault}: name a file with one prompt on each line.") from error
    prompts = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompts.append(_dialogue(line))
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"--prompts {path}, line {number} is not a prompt: write a text in UTF-8, or a JSON object with "
                "messages, prompt or question."
            ) from error
    if not prompts:
        raise ValueError(f"--prompts {path} is empty: write one prompt on each line.")
    return prompts


def _dialogue(line: str) -> Dialogue:
    """Returns the chat in a line of a file of prompts. Any error means that there is none."""
    if not line.lstrip().startswith("{"):
        return question(checked_prompt(line))
    row = parsed_json(line.encode())
    text = row.get("prompt", row.get("question"))
    messages = row.get("messages") or question(text)
    dialogue = [{"role": str(turn["role"]), "content": turn["content"]} for turn in messages]
    while dialogue[-1]["role"] == "assistant":
        dialogue.pop()
    for turn in dialogue:
        checked_prompt(turn["content"])
    return dialogue


def listed(text: str, option: str) -> tuple[str, ...]:
    """Returns the names in a text with commas, each once. ValueError if there are none."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"{option} {text!r} names nothing: give names separated by commas.")
    return names


def numbers(text: str, option: str, minimum: int = 0) -> list[int]:
    """Returns the whole numbers in a text with commas. ValueError for anything else, or for one below `minimum`."""
    values = []
    for number in text.split(","):
        digits = number.strip()
        if not digits.isdecimal() or int(digits) < minimum:
            raise ValueError(f"{option} {text} is not a list of numbers from {minimum} on: write them as 1,4,16.")
        values.append(int(digits))
    return values


def dtype_name(pair: Pair) -> str:
    """Returns the target's dtype without `torch.`."""
    return str(pair.target.dtype).removeprefix("torch.")
