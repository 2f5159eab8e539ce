"""Training a drafter for a target: data, anchors, blocks, losses, and the loop. Needs the extra `train`."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dflash.common.lazy import lazy_names, names_for_typing


if TYPE_CHECKING:
    from .acceptance import Acceptance, measure_acceptance
    from .anchors import sample_anchors, valid_anchors
    from .batches import Batch, collate, epoch_batches
    from .block_attention import BLOCKWISE, MOST_SCORES, blockwise_attention
    from .checkpointing import save_drafter
    from .data import (
        FORMS,
        Example,
        encode,
        encode_prompt,
        load_examples,
        read_rows,
        sharegpt_messages,
        stop_ids,
        with_response,
        write_examples,
    )
    from .frozen_target import FrozenTarget, can_pack
    from .initialization import find_mask_token, new_drafter, spread_taps
    from .layout import BlockLayout, lay_out_blocks
    from .loading import Prepared, hold_out, prepare, prompt_of
    from .losses import (
        LOSSES,
        POSITION_WEIGHTS,
        Candidates,
        DraftCounts,
        RowLosses,
        chunked_loss,
        count_drafts,
        decay_weights,
        default_gamma,
        position_weights,
        selector_loss,
    )
    from .objective import DrafterLoss
    from .optimizers import build_optimizers
    from .run import train, train_drafter
    from .run_record import TrainingRecord, describe_inputs
    from .settings import REMOVED, TrainingSettings, read_yaml
    from .size_estimate import Estimate, estimate, peak_memory
    from .trainer import Trainer
    from .training_state import state_folder

__all__ = [
    "BLOCKWISE",
    "FORMS",
    "LOSSES",
    "MOST_SCORES",
    "POSITION_WEIGHTS",
    "REMOVED",
    "Acceptance",
    "Batch",
    "BlockLayout",
    "Candidates",
    "DraftCounts",
    "DrafterLoss",
    "Estimate",
    "Example",
    "FrozenTarget",
    "Prepared",
    "RowLosses",
    "Trainer",
    "TrainingRecord",
    "TrainingSettings",
    "blockwise_attention",
    "build_optimizers",
    "can_pack",
    "chunked_loss",
    "collate",
    "count_drafts",
    "decay_weights",
    "default_gamma",
    "describe_inputs",
    "encode",
    "encode_prompt",
    "epoch_batches",
    "estimate",
    "find_mask_token",
    "hold_out",
    "lay_out_blocks",
    "load_examples",
    "measure_acceptance",
    "new_drafter",
    "peak_memory",
    "position_weights",
    "prepare",
    "prompt_of",
    "read_rows",
    "read_yaml",
    "sample_anchors",
    "save_drafter",
    "selector_loss",
    "sharegpt_messages",
    "spread_taps",
    "state_folder",
    "stop_ids",
    "train",
    "train_drafter",
    "valid_anchors",
    "with_response",
    "write_examples",
]

# The command line reads the settings and needs no torch for it.
_get, __dir__ = lazy_names(__name__, names_for_typing(__file__))

# Names of the last release, and where they are now.
_MOVED = {
    "Plan": ("dflash.training", "Estimate"),
    "plan": ("dflash.training", "estimate"),
    "read_examples": ("dflash.training", "load_examples"),
} | {
    name: ("dflash.regeneration", name)
    for name in (
        "Regenerated", "RegenerationRecord", "RegenerationSettings", "Sampling", "ServerWriter", "TargetWriter", "regenerate",
        "regenerate_data",
    )
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        return _get(name)
    room, new = _MOVED[name]
    warnings.warn(
        f"dflash.training.{name} is {room}.{new} now: the old name goes with the next release.",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(import_module(room), new)
