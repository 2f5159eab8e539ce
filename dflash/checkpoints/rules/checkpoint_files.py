"""A drafter's checkpoint and its target's, as the rules see them: JSON files, safetensors headers, weights as bits."""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from dflash.common.files import adapter_fault
from dflash.common.json_text import parsed_json
from dflash.common.messages import first_line, is_out_of_memory
from dflash.dialects import dialect_of

from .engine_readings import Config, Reading, decoder_fields, either, mapping, meant, nested_fields, whole_number
from .findings import CONFIG, WEIGHTS


INDEX = f"{WEIGHTS}.index.json"
# Files of a drafter that the rules look at, and of a target.
DRAFTER_FILES = ["*.json", "*.safetensors", "*.py", "mask_embedding.pt"]
TARGET_FILES = [CONFIG, "generation_config.json", "tokenizer.json"]

PIECE = 2**24  # values that are read at once
SPECIAL_TOKENS = ("eos_token_id", "pad_token_id", "bos_token_id")


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header, and the name of its file."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's folder as the rules see it; `name` is the folder's own, or the repository's on the Hub."""

    name: str
    folder: Path
    config: Config
    files: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def meant(self) -> Reading:
        """What the config means."""
        return meant(self.config)

    @cached_property
    def fields(self) -> Config:
        """The fields of the drafter's own layers."""
        return decoder_fields(self.config)

    @cached_property
    def nested(self) -> Config:
        """`dflash_config`, empty if there is none."""
        return nested_fields(self.config)

    def number(self, name: str) -> int | None:
        """An integer of the drafter's own layers."""
        return whole_number(self.fields.get(name))

    def either(self, name: str) -> Any:
        """A field of `dflash_config` or of the top level, whichever is not null."""
        return either(self.config, name)

    def own_number(self, name: str) -> int | None:
        """An integer of `dflash_config` or of the top level."""
        return whole_number(self.either(name))

    @cached_property
    def form(self) -> str:
        """The dialect that the checkpoint is written in."""
        return dialect_of(dict(self.config), self.tensors)

    @property
    def reduced_vocabulary(self) -> int | None:
        """Tokens of the drafter's own head, where it proposes from a part of the vocabulary."""
        words = self.number("draft_vocab_size") or self.own_number("draft_vocab_size")
        return None if words == self.number("vocab_size") else words


@dataclass(frozen=True)
class TargetFiles:
    """A target's config, with the fields of its text part, and what its tokenizer says of ids."""

    name: str
    config: Config
    stop_ids: frozenset[int] = frozenset()
    token_of: Mapping[int, str] = field(default_factory=dict)
    ordinary_ids: frozenset[int] = frozenset()


def read_checkpoint(drafter: str | os.PathLike[str]) -> Checkpoint:
    """The config, the file names and the tensor headers of a folder or Hub id; files that cannot be read are in `unreadable`."""
    folder = Path(drafter).expanduser()
    name = folder.absolute().name
    if not folder.exists() and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(drafter)):
        folder = downloaded(str(drafter), "drafter", allow_patterns=DRAFTER_FILES)
    if fault := adapter_fault(folder):
        raise ValueError(f"{folder} {fault}")
    absent = f"{folder} is no checkpoint: give the folder that holds a drafter's config.json."
    config = read_json(folder / CONFIG, absent)
    files = tuple(sorted(path.name for path in folder.iterdir() if path.is_file()))
    tensors: dict[str, Tensor] = {}
    unreadable: dict[str, str] = {}
    for file in _weight_files(folder):
        if file in files:
            try:
                tensors |= safetensors_header(folder / file)
            except ValueError as error:
                unreadable[file] = str(error)
    return Checkpoint(name, folder, config, files, tensors, unreadable)


def _weight_files(folder: Path) -> list[str]:
    """The safetensors that transformers reads: the one file, or else those that the index names."""
    if (folder / WEIGHTS).is_file():
        return [WEIGHTS]
    index: dict[str, Any] = {}
    with suppress(ValueError):  # a rule says what is wrong with it
        index = read_json(folder / INDEX, "")
    return sorted(set(map(str, mapping(index.get("weight_map")).values())))


def read_json(path: Path, absent: str) -> dict[str, Any]:
    """A JSON object; ValueError, with `absent` for what to do if there is no such file."""
    if not path.is_file():
        raise ValueError(absent)
    try:
        value = parsed_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path} {error}: fetch or write the file again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} and no object: fetch or write the file again.")
    return value


def safetensors_header(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name; ValueError for a file that is not whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"its header says {length} bytes and the file has {size}")
        try:
            entries = json.loads(file.read(length))
            entries.pop("__metadata__", None)
            end = 0
            tensors = {}
            for name, entry in entries.items():
                tensors[name] = Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), path.name)
                end = max(end, int(entry["data_offsets"][1]))
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"its header is not that of a safetensors file ({type(error).__name__})") from error
    missing = 8 + length + end - size
    if missing > 0:
        raise ValueError(f"it is truncated: {missing} bytes are missing")
    if missing < 0:
        raise ValueError(f"it holds {-missing} bytes after its tensors")
    return tensors


def is_finite(path: Path, name: str) -> bool:
    """Whether a tensor of a safetensors file holds neither NaN nor infinity; it is read in pieces.

    SafetensorError for a file that the library does not read.
    """
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            pieces = file.get_tensor(name).flatten().split(PIECE)
            return all((piece.float() if piece.itemsize == 1 else piece).isfinite().all() for piece in pieces)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        size = path.stat().st_size
        raise ValueError(
            f"{path.resolve()} says that it holds {size:,} bytes, which cannot be mapped into memory: fetch the file again, or check it "
            "on a machine with more memory."
        ) from error


def read_target(name: str) -> TargetFiles:
    """A target's folder, or the JSON files of a Hub id."""
    folder = local_folder(name, "target", allow_patterns=TARGET_FILES)
    absent = f"The target {name} holds no config.json: give its folder or its id on the Hub."
    config = read_json(folder / CONFIG, absent)
    config |= mapping(config.get("text_config"))
    stop_ids = token_ids(config.get("eos_token_id"))
    generation_config = folder / "generation_config.json"
    if generation_config.is_file():
        stop_ids |= token_ids(read_json(generation_config, absent).get("eos_token_id"))
    token_of, ordinary = _vocabulary(folder / "tokenizer.json")
    return TargetFiles(name, config, stop_ids, token_of, ordinary)


def local_folder(name: str | os.PathLike[str], what: str, **options: Any) -> Path:
    """The folder of this name, or else that of [`downloaded`]; ValueError if there is neither."""
    folder = Path(name).expanduser()
    return folder if folder.is_dir() else downloaded(str(name), what, **options)


def downloaded(name: str, what: str, **options: Any) -> Path:
    """The folder of a Hub id's files, as `snapshot_download` fetches them with `options`; ValueError if it cannot."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, **options))
    except Exception as error:
        reason = f"is no folder and cannot be fetched from the Hub ({first_line(error)})"
        raise ValueError(f"The {what} {name} {reason}: give its folder.") from error


def token_ids(value: Any) -> frozenset[int]:
    """The ids of a field that holds an id, a list of ids or nothing."""
    items = value if isinstance(value, list) else [value]
    return frozenset(item for item in items if whole_number(item) is not None)


def _vocabulary(path: Path) -> tuple[dict[int, str], frozenset[int]]:
    """The text of each id of a tokenizer.json, and the ids that ordinary text can hold."""
    if not path.is_file():
        return {}, frozenset()
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises no class of its own
        remedy = "fetch or write the file again, or install a newer version of tokenizers"
        raise ValueError(f"{path} cannot be read ({first_line(error)}): {remedy}.") from error
    token_of = {index: token for token, index in tokenizer.get_vocab().items()}
    ordinary = set(tokenizer.get_vocab(with_added_tokens=False).values())
    for index, token in tokenizer.get_added_tokens_decoder().items():
        if token.special:
            ordinary.discard(index)
    return token_of, frozenset(ordinary)
