"""What the target says of the data, written once: sharded safetensors, and a manifest of what they belong to.

A document's features depend on its own tokens alone, so they are found by these, in whatever batch and row it comes. The
manifest is written last: a folder without one is not finished, and is written again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from dflash.common.fingerprints import model_fingerprint

from .batches import Batch, collate
from .data import Example, fingerprint
from .state import saving
from .targets import FrozenTarget, TargetStates


MANIFEST = "manifest.json"
SHARD_BYTES = 2**30


class CachedFeatures:
    """Reads from a folder what the target would say of a batch.

    Args:
        folder: Where `write_features` wrote.
        expected: What the manifest must say, of `facts_of`.

    Raises:
        ValueError: if the features are those of another target, other layers or other data, naming what differs.
    """

    def __init__(self, folder: Path, expected: dict[str, Any]) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        differing = [
            f"{name} {self.manifest.get(name)}, now {value}"
            for name, value in expected.items()
            if self.manifest.get(name) != value and not (name == "has_last_states" and not value)
        ]
        if differing:
            raise ValueError(
                f"The features in {folder} are not those of this run ({'; '.join(differing)}): give another folder, or delete "
                "this one."
            )
        self._shards = [safe_open(str(folder / name), framework="pt") for name in self.manifest["shards"]]

    def __call__(self, batch: Batch, wants_states: bool = False) -> TargetStates:
        """The states of every token of `batch`, on its device and in fp32; 0 for padding."""
        names = ["features", *(["last_hidden_state"] if wants_states else [])]
        wide: dict[str, torch.Tensor] = {}
        for row, columns in documents_of(batch):
            shard, begin, length = self.manifest["documents"][key_of(batch.input_ids[row, columns].tolist())]
            for name in names:
                values = self._shards[shard].get_slice(name)[begin : begin + length].float()
                if name not in wide:
                    wide[name] = values.new_zeros(*batch.input_ids.shape, values.shape[-1])
                wide[name][row, columns] = values
        return TargetStates(*(wide[name].to(batch.input_ids.device) for name in names))


def facts_of(
    target: FrozenTarget, examples: Sequence[Example], wants_states: bool, precision: str = "no"
) -> dict[str, Any]:
    """What features belong to: target and layers, the precision they run in, the data; and whether last states are there."""
    model = target.tapped.target
    return {
        "target": model_fingerprint(model),
        "target_layer_ids": list(target.tapped.drafter.config.target_layer_ids),
        "data": fingerprint(examples),
        "dtype": str(model.dtype).removeprefix("torch."),
        "mixed_precision": precision,
        "has_last_states": wants_states,
    }


def feature_bytes(target: FrozenTarget, examples: Sequence[Example], wants_states: bool) -> int:
    """Bytes that the features of `examples` take on disk."""
    config = target.tapped.drafter.config
    width = config.hidden_size * (len(config.target_layer_ids) + wants_states)
    distinct = {key_of(example.input_ids): len(example) for example in examples}
    return sum(distinct.values()) * width * torch.empty(0, dtype=target.tapped.target.dtype).element_size()


def write_features(
    folder: Path,
    target: FrozenTarget,
    examples: Sequence[Example],
    *,
    wants_states: bool,
    batch_tokens: int,
    autocast: AbstractContextManager[Any] | None = None,
    precision: str = "no",
    announce: Callable[[str], None] | None = None,
    show_progress: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the features of `examples` to `folder`.

    Args:
        folder: New, empty, or left unfinished by another write.
        target: Gives the features.
        examples: The data.
        wants_states: The target's last states too, for losses that read its logits.
        batch_tokens: Tokens that the target reads at a time.
        autocast: The precision that the target is read in while training,
        precision: and what the settings call it.
        announce: Told how much will be written, before it is.
        show_progress: Draw a progress bar.
        shard_bytes: Size of a shard, about.

    Raises:
        ValueError: if the folder holds something else, or its disk has no room.
    """
    size = feature_bytes(target, examples, wants_states)
    if announce is not None:
        announce(f"Writing {size / 2**20:,.1f} MiB of features of {len(examples):,} sequences to {folder}.")
    aside = folder / f".{MANIFEST}.partial"
    aside.unlink(missing_ok=True)
    strangers = [path.name for path in sorted(folder.glob("*")) if path.suffix != ".safetensors"]
    if strangers:
        raise ValueError(f"{folder} holds {strangers[0]}, which is none of our features: give a new folder.")
    folder.mkdir(parents=True, exist_ok=True)
    for unfinished in folder.glob("*.safetensors"):
        unfinished.unlink()
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(
            f"The features take {size / 2**20:,.1f} MiB and {folder} has {free / 2**20:,.1f} MiB left: train without features "
            "(online), or with fewer sequences or layers."
        )
    shards: list[str] = []
    documents: dict[str, tuple[int, int, int]] = {}
    waiting: list[TargetStates] = []
    waiting_tokens = waiting_bytes = 0
    dtype = target.tapped.target.dtype

    def close_shard() -> None:
        nonlocal waiting, waiting_tokens, waiting_bytes
        if not waiting:
            return
        tensors = {"features": torch.cat([states.features for states in waiting])}
        if wants_states:
            tensors["last_hidden_state"] = torch.cat([states.last_hidden_state for states in waiting])  # type: ignore[misc]
        name = f"features-{len(shards):05d}.safetensors"
        save_file(tensors, str(folder / name))
        shards.append(name)
        waiting, waiting_tokens, waiting_bytes = [], 0, 0

    with saving("features", folder):
        bar = tqdm(total=len(examples), desc="features", disable=not show_progress, dynamic_ncols=True)
        for chosen in _batches(examples, batch_tokens):
            batch = collate(chosen, [[]] * len(chosen), pad_token_id=0)
            with autocast or nullcontext():
                states = target(batch, wants_states)
            for row, example in enumerate(chosen):
                key, length = key_of(example.input_ids), len(example)
                if key in documents:
                    continue
                documents[key] = (len(shards), waiting_tokens, length)
                kept = TargetStates(
                    *(
                        None if values is None else values[row, :length].to("cpu", dtype, copy=True)
                        for values in (states.features, states.last_hidden_state)
                    )  # type: ignore[arg-type]
                )
                waiting.append(kept)
                waiting_tokens += length
                waiting_bytes += kept.features.nbytes
                if waiting_bytes >= shard_bytes:
                    close_shard()
            bar.update(len(chosen))
        bar.close()
        close_shard()
        manifest = facts_of(target, examples, wants_states, precision) | {
            "bytes": size,
            "shards": shards,
            "documents": documents,
        }
        aside.write_text(json.dumps(manifest) + "\n", encoding="utf-8")
        os.replace(aside, folder / MANIFEST)


def key_of(input_ids: Sequence[int]) -> str:
    """By what a document is found."""
    return hashlib.sha256(array("q", input_ids).tobytes()).hexdigest()[:32]


def documents_of(batch: Batch) -> Iterator[tuple[int, slice]]:
    """`(row, columns)` of every document of a batch."""
    for row, ids in enumerate(batch.document_ids.tolist()):
        begin = 0
        for column in range(1, len(ids) + 1):
            if column == len(ids) or ids[column] != ids[begin]:
                if ids[begin] >= 0:
                    yield row, slice(begin, column)
                begin = column


def _batches(examples: Sequence[Example], batch_tokens: int) -> Iterator[list[Example]]:
    """All examples, the longest first, padded to at most `batch_tokens`."""
    current: list[Example] = []
    for example in sorted(examples, key=lambda one: -len(one)):
        if current and (len(current) + 1) * len(current[0]) > batch_tokens:
            yield current
            current = []
        current.append(example)
    if current:
        yield current
