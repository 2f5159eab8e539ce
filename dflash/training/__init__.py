"""Training a drafter for a target: data, anchors, masks, losses, and the loop. Needs the extra `train`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash.common.lazy import lazy_names


if TYPE_CHECKING:
    from .acceptance import Acceptance, measure_acceptance
    from .anchors import sample_anchors
    from .batches import Batch, collate, epoch_batches
    from .data import (
        FORMS,
        Example,
        encode,
        encode_prompt,
        load_examples,
        read_examples,
        read_rows,
        sharegpt_messages,
        stop_ids,
        with_response,
        write_examples,
    )
    from .initialization import new_drafter
    from .keeping import save_drafter
    from .losses import chunked_loss, decay_weights, default_gamma
    from .masks import lay_out_blocks
    from .objective import DrafterLoss
    from .optimizers import build_optimizers
    from .planning import Plan, peak_memory, plan
    from .preparation import Prepared, prepare, prompt_of, train_drafter
    from .record import TrainingRecord
    from .running import train
    from .settings import TrainingSettings, read_yaml
    from .trainer import Trainer

__all__ = [
    "FORMS",
    "Acceptance",
    "Batch",
    "DrafterLoss",
    "Example",
    "Plan",
    "Prepared",
    "Trainer",
    "TrainingRecord",
    "TrainingSettings",
    "build_optimizers",
    "chunked_loss",
    "collate",
    "decay_weights",
    "default_gamma",
    "encode",
    "encode_prompt",
    "epoch_batches",
    "lay_out_blocks",
    "load_examples",
    "measure_acceptance",
    "new_drafter",
    "peak_memory",
    "plan",
    "prepare",
    "prompt_of",
    "read_examples",
    "read_rows",
    "read_yaml",
    "sample_anchors",
    "save_drafter",
    "sharegpt_messages",
    "stop_ids",
    "train",
    "train_drafter",
    "with_response",
    "write_examples",
]

# The command line reads the settings and needs no torch for it.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "acceptance": ("Acceptance", "measure_acceptance"),
        "anchors": ("sample_anchors",),
        "batches": ("Batch", "collate", "epoch_batches"),
        "data": (
            "FORMS",
            "Example",
            "encode",
            "encode_prompt",
            "load_examples",
            "read_examples",
            "read_rows",
            "sharegpt_messages",
            "stop_ids",
            "with_response",
            "write_examples",
        ),
        "initialization": ("new_drafter",),
        "keeping": ("save_drafter",),
        "losses": ("chunked_loss", "decay_weights", "default_gamma"),
        "masks": ("lay_out_blocks",),
        "objective": ("DrafterLoss",),
        "optimizers": ("build_optimizers",),
        "planning": ("Plan", "peak_memory", "plan"),
        "preparation": ("Prepared", "prepare", "prompt_of", "train_drafter"),
        "record": ("TrainingRecord",),
        "running": ("train",),
        "settings": ("TrainingSettings", "read_yaml"),
        "trainer": ("Trainer",),
    },
)
