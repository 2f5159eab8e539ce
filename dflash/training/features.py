"""Keeps the target's hidden states of the data (features) on disk: sharded safetensors, and a manifest.

A document's features depend on its own tokens alone, so they are found by a hash of these tokens. The manifest is
written last: a folder without one is unfinished and is written again.
"""

import hashlib
import json
import random
import shutil
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from dflash.common.files import write_text
from dflash.common.fingerprints import model_fingerprint
from dflash.common.json_lines import changes
from dflash.common.logits import dtype_name
from dflash.common.messages import Announce, counted, say_nothing

from .batches import PADDING_DOCUMENT, Batch, batch_indices, collate
from .examples import Example, Examples, described, lengths_of
from .frozen_target import FrozenTarget, TargetStates
from .settings import Facts
from .training_state import save_errors


MANIFEST = "manifest.json"
SHARD_BYTES = 2**30


class CachedFeatures:
    """Reads the target's hidden states for a batch from a folder that `write_features` wrote.

    Raises:
        ValueError: if the manifest differs from `expected`, the result of `facts_of`. The message names what differs.
    """

    def __init__(self, folder: Path, expected: Facts) -> None:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not expected["has_last_states"]:  # the folder may hold states that this run does not need
            expected = expected | {"has_last_states": manifest["has_last_states"]}
        before = {name: manifest.get(name) for name in expected}
        differences = changes(before, expected)
        if differences:
            remedy = "give another folder, or delete this one"
            raise ValueError(f"The features in {folder} are not those of this run ({differences}): {remedy}.")
        self._documents = manifest["documents"]
        paths = [str(folder / name) for name in manifest["shards"]]
        self._shards = [safe_open(path, framework="pt") for path in paths]

    def __call__(self, batch: Batch, wants_states: bool = False) -> TargetStates:
        """Returns the states of every column of `batch`, in fp32 on its device; 0 for padding.

        With `wants_states` they include the last hidden states. KeyError for a document that is not in the folder.
        """
        features = self._read("features", batch)
        return TargetStates(features, self._read("last_hidden_state", batch) if wants_states else None)

    def _read(self, name: str, batch: Batch) -> Tensor:
        input_ids = batch.input_ids
        num_sequences, length = input_ids.shape
        _, width = self._shards[0].get_slice(name).get_shape()
        states = torch.zeros(num_sequences, length, width)
        for sequence, columns in documents_of(batch):
            token_ids = input_ids[sequence, columns]
            rows = self._rows(name, token_ids.tolist())
            states[sequence, columns] = rows.float()
        return states.to(input_ids.device)

    def _rows(self, name: str, token_ids: list[int]) -> Tensor:
        """Reads the tensor `name` of the document with these tokens, [S, width], in the dtype of the file."""
        key = key_of(token_ids)
        shard, begin, length = self._documents[key]
        end = begin + length
        stored = self._shards[shard].get_slice(name)
        return stored[begin:end]


def facts_of(target: FrozenTarget, examples: Examples, wants_states: bool, precision: str = "no") -> Facts:
    """Returns what features depend on (target, layers, precision, data) and whether they include last hidden states."""
    return {
        "target": model_fingerprint(target.target),
        "target_layer_ids": list(target.drafter.config.target_layer_ids),
        "data": described(examples)["fingerprint"],
        "dtype": dtype_name(target.target),
        "mixed_precision": precision,
        "has_last_states": wants_states,
    }


def feature_bytes(target: FrozenTarget, examples: Examples, wants_states: bool) -> int:
    """Returns the number of bytes that the features of `examples` take on disk. Repeated documents are stored once."""
    config = target.drafter.config
    num_states = len(config.target_layer_ids) + wants_states
    width = config.hidden_size * num_states
    value_bytes = target.target.dtype.itemsize
    lengths = {key_of(example.token_array): len(example) for example in examples}  # each document once
    num_tokens = sum(lengths.values())
    return num_tokens * width * value_bytes


def write_features(
    folder: Path,
    target: FrozenTarget,
    examples: Examples,
    facts: Facts,
    batch_tokens: int,
    announce: Announce = say_nothing,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the features of `examples` to `folder`, which is new, empty, or left unfinished by another write.

    `facts` is the result of `facts_of`. It says in which precision the target runs, and whether its last hidden states
    are written too. The target reads up to `batch_tokens` tokens per forward. `announce` is told how much is written.
    If `announce` is given, a progress bar is shown.

    Raises:
        ValueError: if the folder holds other files, or its disk has no room.
        OSError: if the folder cannot be written.
    """
    size = feature_bytes(target, examples, facts["has_last_states"])
    sequences = counted(len(examples), "sequence")
    announce(f"Writing {_mebibytes(size)} of features of {sequences} to {folder}.")
    _clear(folder)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(
            f"The features take {_mebibytes(size)} and {folder} has {_mebibytes(free)} left: leave features out, or "
            "train with fewer sequences or layers."
        )
    writer = _ShardWriter(folder, shard_bytes)
    is_bf16 = facts["mixed_precision"] == "bf16"
    autocast = torch.autocast(target.target.device.type, torch.bfloat16, enabled=is_bf16)
    is_hidden = announce is say_nothing
    bar = tqdm(
        total=len(examples),
        desc="features",
        disable=is_hidden,
        dynamic_ncols=True,
    )
    with bar:
        for indices in batch_indices(lengths_of(examples), batch_tokens, random.Random(0)):
            documents = [examples[index] for index in indices]
            batch = collate(documents, [[]] * len(documents), pad_token_id=0)
            with autocast:
                states = target(batch, facts["has_last_states"])
            for sequence, document in enumerate(documents):
                rows = {"features": states.features[sequence]}
                if states.last_hidden_state is not None:
                    rows["last_hidden_state"] = states.last_hidden_state[sequence]
                writer.add(document, rows, target.target.dtype)
            bar.update(len(documents))
        writer.close_shard()
    manifest = facts | {"bytes": size, "shards": writer.shards, "documents": writer.documents}
    with save_errors("features", folder, "they are incomplete"):
        write_text(folder / MANIFEST, json.dumps(manifest) + "\n")


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"


class _ShardWriter:
    """Collects the states of documents, and writes them to a new shard whenever they reach `shard_bytes`."""

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self.shards: list[str] = []
        self.documents: dict[str, tuple[int, int, int]] = {}  # by key: the shard, the first row in it, and the length
        self._folder = folder
        self._shard_bytes = shard_bytes
        self._waiting: dict[str, list[Tensor]] = {}

    def add(self, document: Example, rows: dict[str, Tensor], dtype: torch.dtype) -> None:
        """Adds a document's states, tensors [S, width] by name, without right padding.

        Does nothing if the document was added before.
        """
        key = key_of(document.token_array)
        if key in self.documents:
            return
        length = len(document)
        begin = sum(map(len, self._waiting.get("features", ())))
        self.documents[key] = (len(self.shards), begin, length)
        for name, values in rows.items():
            own = values[:length].to("cpu", dtype, copy=True)
            self._waiting.setdefault(name, []).append(own)
        num_bytes = sum(values.nbytes for values in self._waiting["features"])
        if num_bytes >= self._shard_bytes:
            self.close_shard()

    def close_shard(self) -> None:
        """Writes the collected states to a shard, if there are any; OSError if it cannot be written."""
        if not self._waiting:
            return
        name = f"features-{len(self.shards):05d}.safetensors"
        tensors = {name: torch.cat(parts) for name, parts in self._waiting.items()}
        with save_errors("features", self._folder, "they are incomplete"):
            save_file(tensors, str(self._folder / name))
        self.shards.append(name)
        self._waiting.clear()


def _clear(folder: Path) -> None:
    """Makes `folder` and deletes the files of an unfinished write; ValueError if the folder holds any other file."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = {*folder.glob("features-*.safetensors"), *folder.glob(f".{MANIFEST}.*")}
    others = {*folder.iterdir()} - unfinished
    strangers = sorted(path.name for path in others)
    if strangers:
        raise ValueError(f"{folder} holds {strangers[0]}, which is not a file of features: give a new folder.")
    for path in unfinished:
        path.unlink()


def key_of(input_ids: Sequence[int]) -> str:
    """Returns the key of a document's features: a hash of its token ids, 32 hexadecimal digits."""
    content = array("q", input_ids).tobytes()
    return hashlib.sha256(content).hexdigest()[:32]


def documents_of(batch: Batch) -> Iterator[tuple[int, slice]]:
    """Yields, for each document of a batch, the index of its sequence and the slice of its columns."""
    for sequence, document_ids in enumerate(batch.document_ids.tolist()):
        for document in sorted({*document_ids} - {PADDING_DOCUMENT}):
            begin = document_ids.index(document)
            end = begin + document_ids.count(document)
            yield sequence, slice(begin, end)
