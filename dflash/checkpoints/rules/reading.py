"""A drafter's folder and its target's, as the rules see them: JSON files and safetensors headers, no weights."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from dflash.checkpoints.dialects import dialect_of

from .engines import Config, Reading, decoder_fields, meant, whole_number


CONFIG = "config.json"


@dataclass(frozen=True)
class Tensor:
    """One entry of a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(frozen=True)
class Checkpoint:
    """A drafter's folder as the rules see it."""

    folder: Path
    config: Config
    files: tuple[str, ...]
    tensors: Mapping[str, Tensor]
    unreadable: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def meant(self) -> Reading:
        """What the config means."""
        return meant(self.config)

    def number(self, name: str) -> int | None:
        """An integer of the drafter's own layers."""
        return whole_number(decoder_fields(self.config).get(name))

    @cached_property
    def form(self) -> str:
        """The dialect that the checkpoint is written in."""
        return dialect_of(dict(self.config), self.tensors)

    @property
    def head_dim(self) -> int | None:
        """`head_dim`, or what transformers derives where it is absent."""
        explicit, hidden, heads = (self.number(n) for n in ("head_dim", "hidden_size", "num_attention_heads"))
        return explicit or (hidden // heads if hidden and heads else None)


@dataclass(frozen=True)
class Target:
    """A target's config, its text part apart, and what its tokenizer says of ids."""

    name: str
    config: Config
    stop_ids: frozenset[int] = frozenset()
    token_of: Mapping[int, str] = field(default_factory=dict)
    ordinary_ids: frozenset[int] = frozenset()


def read_checkpoint(folder: str | os.PathLike[str]) -> Checkpoint:
    """The config, the file names and the tensor headers of a folder; a file that is not readable is noted as such."""
    folder = Path(folder).expanduser()
    config = read_json(
        folder / CONFIG, f"{folder} is no checkpoint: give the folder that holds a drafter's config.json."
    )
    files = tuple(sorted(path.name for path in folder.iterdir() if path.is_file()))
    tensors: dict[str, Tensor] = {}
    unreadable: dict[str, str] = {}
    for name in (name for name in files if name.endswith(".safetensors")):
        try:
            header = safetensors_header(folder / name)
        except ValueError as error:
            unreadable[name] = str(error)
            continue
        tensors |= {key: Tensor(dtype, shape, name) for key, (dtype, shape) in header.items()}
    return Checkpoint(folder, config, files, tensors, unreadable)


def read_json(path: Path, absent: str) -> dict[str, Any]:
    """A JSON object; ValueError, with `absent` for what to do if there is no such file."""
    if not path.is_file():
        raise ValueError(absent)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}): fetch or write the file again.") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a {type(value).__name__} and no object: fetch or write the file again.")
    return value


def safetensors_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape by tensor name; ValueError for a file that is not whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"its header says {length} bytes and the file has {size}")
        try:
            header = json.loads(file.read(length))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            ends = [entry["data_offsets"][1] for entry in entries.values()]
            found = {name: (str(e["dtype"]), tuple(int(n) for n in e["shape"])) for name, e in entries.items()}
            missing = max(ends, default=0) - (size - 8 - length)
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
            raise ValueError(f"its header is not that of a safetensors file ({type(error).__name__})") from error
    if missing > 0:
        raise ValueError(f"it is truncated: {missing} bytes are missing")
    return found


def read_target(name: str) -> Target:
    """A target's folder, or the JSON files of a Hub id."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        folder = _downloaded(name)
    absent = f"The target {name} holds no config.json: give its folder or its id on the Hub."
    whole = read_json(folder / CONFIG, absent)
    inner = whole.get("text_config")
    config = {**whole, **inner} if isinstance(inner, dict) else whole
    stop_ids = token_ids(config.get("eos_token_id"))
    if (folder / "generation_config.json").is_file():
        stop_ids |= token_ids(read_json(folder / "generation_config.json", absent).get("eos_token_id"))
    token_of, ordinary = _vocabulary(folder / "tokenizer.json")
    return Target(name, config, stop_ids, token_of, ordinary)


def _downloaded(name: str) -> Path:
    from huggingface_hub import snapshot_download

    wanted = [CONFIG, "generation_config.json", "tokenizer.json"]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(
            f"The target {name} is no folder and cannot be fetched from the Hub ({reason}): give its folder, or leave "
            "it out."
        ) from error


def token_ids(value: Any) -> frozenset[int]:
    """The ids of a field that holds one, several or none."""
    items = value if isinstance(value, list) else [value]
    return frozenset(item for item in items if whole_number(item) is not None)


def _vocabulary(path: Path) -> tuple[dict[int, str], frozenset[int]]:
    """The text of each id of a tokenizer.json, and the ids that ordinary text can hold."""
    if not path.is_file():
        return {}, frozenset()
    tokenizer = read_json(path, "")
    model = tokenizer.get("model")
    words = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(words, list):  # unigram: [token, score] at its id
        words = {item[0]: index for index, item in enumerate(words) if isinstance(item, list) and item}
    token_of = {index: str(token) for token, index in words.items()} if isinstance(words, dict) else {}
    added = [entry for entry in tokenizer.get("added_tokens") or () if isinstance(entry, dict) and "id" in entry]
    ordinary = frozenset(token_of) - {entry["id"] for entry in added if entry.get("special")}
    return token_of | {entry["id"]: str(entry.get("content")) for entry in added}, ordinary
