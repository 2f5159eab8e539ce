"""Words for a user: what an error says, and what to do."""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .json_text import BYTE_ORDER_MARK, parsed_json


NO_SPACE = re.compile(r"No space left on device|Disk quota exceeded|File too large")
NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|unable to mmap|Cannot allocate memory")
NUM_BYTES = re.compile(r"(\d+) bytes")
# What transformers says of every fault of a config.json.
UNREADABLE_CONFIG = re.compile(r"config file at '(.+)' is not a valid JSON file")
# Modules of the extras `train` and `eval`.
EXTRA_MODULES = ("datasets", "math_verify", "matplotlib", "tqdm", "yaml")
INSTALL_EXTRAS = "pip install '.[train,eval]'"  # in the checkout: the package is on no index yet
# What transformers raises for a repository whose code nobody has trusted.
UNTRUSTED_CODE = re.compile(r"custom (generation )?code.*trust_remote_code", re.DOTALL)
OWN_CODE = "it holds code of its own, which runs only with --trust-remote-code: read that code first"


# Is told in a sentence what takes long, what is left out, or where something is kept.
Announce = Callable[[str], None]


def say_nothing(sentence: str) -> None:
    """Announces nothing."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the advice that libraries add; its type if it has none.

    Of a repository that holds code, it is a sentence that names the flag of our commands.
    """
    if UNTRUSTED_CODE.search(str(error)):
        return OWN_CODE
    return str(error).strip().split("\n")[0] or type(error).__name__


@contextmanager
def without_load_report() -> Iterator[None]:
    """Hides the table of tensors that transformers logs in the body: what does not fit a drafter is refused in one sentence."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)  # of the logger's level other messages depend
    try:
        yield
    finally:
        logger.removeFilter(is_error)


def counted(count: int, noun: str) -> str:
    """The count and its noun: `1 row`, `1,200 rows`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def is_out_of_memory(error: Exception) -> bool:
    """Whether this machine or a device has no room for what was asked for, in the words of Python, torch and the system."""
    is_named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
    is_other = isinstance(error, (RuntimeError, OSError))
    return is_named or (is_other and bool(NO_MEMORY.search(str(error))))


def as_sentence(error: Exception) -> str | None:
    """What an error says to a person, and what to do, on one line; `None` for one that is a bug."""
    kind, text = type(error).__name__, str(error)
    is_of_weights = kind == "SafetensorError"
    is_told = "make room" in text  # the library's own sentence, which says what is lost
    full = NO_SPACE.search(text)
    if full and not is_told and (isinstance(error, OSError) or is_of_weights):
        return f"Nothing more can be written ({full[0]}): free some space, or name a path on another disk."
    if kind == "OutOfMemoryError":
        return "The device is out of memory: use a smaller dtype or model, fewer new tokens or another device."
    if is_out_of_memory(error):
        return _out_of_memory(text)
    if is_of_weights:
        return f"The weights cannot be read ({text}): the file is truncated or no safetensors file; fetch it again."
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename} cannot be used ({error.strerror}): name another path, or change its permissions."
    if isinstance(error, OSError) and (config := UNREADABLE_CONFIG.search(text)):
        return _unreadable(Path(config[1]))
    if isinstance(error, (ValueError, OSError)):
        return first_line(error)
    if isinstance(error, ModuleNotFoundError) and error.name in EXTRA_MODULES:
        return f"The package {error.name} is not installed: run {INSTALL_EXTRAS} in the checkout of dflash."
    if isinstance(error, ImportError) and "pip install" in text:  # transformers, of what a model or tokenizer needs
        return first_line(error)
    if isinstance(error, RecursionError) and "while decoding a JSON" in text:  # any other is a bug
        return "A JSON file is nested too deeply to be read: fetch or write it again."
    return None


def _out_of_memory(text: str) -> str:
    """The sentence for an allocation that failed, with its size where `text` says it."""
    size = NUM_BYTES.search(text)
    amount = f" for {int(size[1]):,} bytes" if size else ""
    return f"There is not enough memory{amount}: use a smaller model, or correct the sizes in its config.json."


def _unreadable(path: Path) -> str:
    """The sentence for a JSON file that transformers does not read."""
    remedy = "fetch or write the file again"
    try:
        content = path.read_bytes()
        parsed_json(content)
        fault = "cannot be read"
        if content.startswith(BYTE_ORDER_MARK):
            fault = "begins with a byte order mark, which transformers does not read"
            remedy = "save it as UTF-8 without BOM"
    except (OSError, ValueError) as error:
        fault = str(error)
    return f"{path} {fault}: {remedy}."
