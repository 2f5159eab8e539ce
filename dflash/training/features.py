"""The target's features of the data, written once: sharded safetensors, and a manifest that says what they belong to.

A document's features depend on its own tokens alone, so its tokens are their key, in whatever batch it comes. The manifest is
written last: a folder without one is unfinished and is written again.
"""

import hashlib
import json
import random
import shutil
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tqdm import tqdm

from dflash.common.files import write_text
from dflash.common.fingerprints import model_fingerprint
from dflash.common.json_lines import changes
from dflash.common.messages import counted

from .batches import PADDING_DOCUMENT, Batch, batch_indices, collate
from .data import Example, described
from .frozen_target import FrozenTarget, TargetStates
from .lazy_sequences import lengths_of
from .training_state import saving


MANIFEST = "manifest.json"
SHARD_BYTES = 2**30


class CachedFeatures:
    """Reads the target's states of a batch from a folder of `write_features`.

    Raises:
        ValueError: if the manifest does not say what is `expected`, of `facts_of`, naming what differs.
    """

    def __init__(self, folder: Path, expected: dict[str, Any]) -> None:
        self.manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        now = {name: value for name, value in expected.items() if value or name != "has_last_states"}
        if differing := changes({name: self.manifest.get(name) for name in now}, now):
            remedy = "give another folder, or delete this one"
            raise ValueError(f"The features in {folder} are not those of this run ({differing}): {remedy}.")
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
    """What features belong to: target, layers, precision and data; and whether the last hidden states are there."""
    return {
        "target": model_fingerprint(target.target),
        "target_layer_ids": list(target.drafter.config.target_layer_ids),
        "data": described(examples)["fingerprint"],
        "dtype": str(target.target.dtype).removeprefix("torch."),
        "mixed_precision": precision,
        "has_last_states": wants_states,
    }


def feature_bytes(target: FrozenTarget, examples: Sequence[Example], wants_states: bool) -> int:
    """Bytes that the features of `examples` take on disk."""
    config = target.drafter.config
    width = config.hidden_size * (len(config.target_layer_ids) + wants_states)
    distinct = {key_of(example.token_array): len(example) for example in examples}
    return sum(distinct.values()) * width * torch.empty(0, dtype=target.target.dtype).element_size()


def write_features(
    folder: Path,
    target: FrozenTarget,
    examples: Sequence[Example],
    facts: dict[str, Any],
    batch_tokens: int,
    announce: Callable[[str], None] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes the features of `examples` to `folder`, which is new, empty, or left unfinished by another write.

    `facts`, of `facts_of`, say whether the target's last hidden states are written too, and in which precision the target
    reads `batch_tokens` at a time. `announce` is told how much will be written; with it, a bar shows the progress.

    Raises:
        ValueError: if the folder holds something else, or its disk has no room.
    """
    wants_states = facts["has_last_states"]
    size = feature_bytes(target, examples, wants_states)
    if announce is not None:
        announce(f"Writing {size / 2**20:,.1f} MiB of features of {counted(len(examples), 'sequence')} to {folder}.")
    _clear(folder)
    free = shutil.disk_usage(folder).free
    if size > free:
        raise ValueError(
            f"The features take {size / 2**20:,.1f} MiB and {folder} has {free / 2**20:,.1f} MiB left: train without features "
            "(online), or with fewer sequences or layers."
        )
    shards: list[str] = []
    documents: dict[str, tuple[int, int, int]] = {}
    waiting: dict[str, list[torch.Tensor]] = {"features": [], "last_hidden_state": []}
    waiting_tokens = 0

    def close_shard() -> None:
        nonlocal waiting_tokens
        if waiting_tokens:
            shards.append(f"features-{len(shards):05d}.safetensors")
            tensors = {name: torch.cat(parts) for name, parts in waiting.items() if parts}
            save_file(tensors, str(folder / shards[-1]))
        for parts in waiting.values():
            parts.clear()
        waiting_tokens = 0

    autocast = torch.autocast(target.target.device.type, torch.bfloat16, enabled=facts["mixed_precision"] == "bf16")
    with (
        saving("features", folder),
        tqdm(total=len(examples), desc="features", disable=announce is None, dynamic_ncols=True) as bar,
    ):
        for indices in batch_indices(lengths_of(examples), batch_tokens, random.Random(0)):
            chosen = [examples[i] for i in indices]
            batch = collate(chosen, [[]] * len(chosen), pad_token_id=0)
            with autocast:
                states = target(batch, wants_states)
            for row, example in enumerate(chosen):
                key, length = key_of(example.token_array), len(example)
                if key in documents:
                    continue
                documents[key] = (len(shards), waiting_tokens, length)
                for name, values in vars(states).items():
                    if values is not None:
                        waiting[name].append(values[row, :length].to("cpu", target.target.dtype, copy=True))
                waiting_tokens += length
                if waiting_tokens * waiting["features"][-1][0].nbytes >= shard_bytes:
                    close_shard()
            bar.update(len(chosen))
        close_shard()
        manifest = facts | {"bytes": size, "shards": shards, "documents": documents}
        write_text(folder / MANIFEST, json.dumps(manifest) + "\n")


def _clear(folder: Path) -> None:
    """Makes `folder` and deletes what an unfinished write left in it; ValueError if it holds something else."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = [*folder.glob("*.safetensors"), *folder.glob(f".{MANIFEST}.*")]
    strangers = sorted({path.name for path in folder.iterdir()} - {path.name for path in unfinished})
    if strangers:
        raise ValueError(f"{folder} holds {strangers[0]}, which is none of our features: give a new folder.")
    for path in unfinished:
        path.unlink()


def key_of(input_ids: Sequence[int]) -> str:
    """The key of a document's features."""
    return hashlib.sha256(array("q", input_ids).tobytes()).hexdigest()[:32]


def documents_of(batch: Batch) -> Iterator[tuple[int, slice]]:
    """`(row, columns)` of every document of a batch."""
    for row, ids in enumerate(batch.document_ids.tolist()):
        for document in sorted(set(ids) - {PADDING_DOCUMENT}):
            begin = ids.index(document)
            yield row, slice(begin, begin + ids.count(document))
