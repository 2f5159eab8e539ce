"""Trains a drafter for a target: data, anchors, blocks, losses and the training loop. Needs the extra `train` for most data."""

from typing import TYPE_CHECKING

from dflash.common.lazy import lazy_names


if TYPE_CHECKING:
    from .acceptance import AcceptanceCounts, measure_acceptance
    from .adaptation import adapt, adaptation_sources
    from .adaptation_trace import Trace, recorded, was_rejected
    from .batches import Batch, BatchPlan, collate, epoch_batches, sample_anchors, valid_anchors
    from .checkpointing import TrainingRecord, save_drafter
    from .data import (
        SEARCHED_ROWS,
        chat_messages,
        encode,
        encode_prompt,
        load_examples,
        messages_of,
        named_row,
        parts_of,
        stop_ids,
        with_response,
        write_examples,
    )
    from .device import computes_in_bf16
    from .examples import Example
    from .frozen_target import FrozenTarget, can_pack
    from .initialization import find_mask_token, new_drafter, spread_taps
    from .layout import lay_out_blocks
    from .loading import Prepared, hold_out, make_drafter, prepare, prompt_of
    from .losses import LOSSES, chunked_loss, decay_weights, default_gamma
    from .objective import DrafterLoss
    from .online import OnlineTrainer, Rollouts
    from .optimizers import build_optimizers
    from .rehearsal import rehearse
    from .run import RunOptions, claimed, tracker_options, train, train_drafter
    from .settings import ADAPTATION, DRAFTER, RECIPES, TrainingSettings, read_yaml
    from .size_estimate import estimate_memory, oversize
    from .sources import FORMS, check_split, read_rows
    from .trainer import Trainer
    from .training_state import state_folder

__all__ = [
    "ADAPTATION",
    "DRAFTER",
    "FORMS",
    "LOSSES",
    "RECIPES",
    "SEARCHED_ROWS",
    "AcceptanceCounts",
    "Batch",
    "BatchPlan",
    "DrafterLoss",
    "Example",
    "FrozenTarget",
    "OnlineTrainer",
    "Prepared",
    "Rollouts",
    "RunOptions",
    "Trace",
    "Trainer",
    "TrainingRecord",
    "TrainingSettings",
    "adapt",
    "adaptation_sources",
    "build_optimizers",
    "can_pack",
    "chat_messages",
    "check_split",
    "chunked_loss",
    "claimed",
    "collate",
    "computes_in_bf16",
    "decay_weights",
    "default_gamma",
    "encode",
    "encode_prompt",
    "epoch_batches",
    "estimate_memory",
    "find_mask_token",
    "hold_out",
    "lay_out_blocks",
    "load_examples",
    "make_drafter",
    "measure_acceptance",
    "messages_of",
    "named_row",
    "new_drafter",
    "oversize",
    "parts_of",
    "prepare",
    "prompt_of",
    "read_rows",
    "read_yaml",
    "recorded",
    "rehearse",
    "sample_anchors",
    "save_drafter",
    "spread_taps",
    "state_folder",
    "stop_ids",
    "tracker_options",
    "train",
    "train_drafter",
    "valid_anchors",
    "was_rejected",
    "with_response",
    "write_examples",
]

__getattr__, __dir__ = lazy_names(__name__, __file__)
