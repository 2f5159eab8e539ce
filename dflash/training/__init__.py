"""Training a drafter for a target: data, anchors, masks, losses, and the loop. Needs the extra `train`."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .acceptance import Acceptance, measure_acceptance
    from .batches import Batch
    from .data import Example, encode, encode_prompt, load_examples, read_examples, with_response, write_examples
    from .initialization import new_drafter
    from .keeping import save_drafter
    from .planning import Plan, peak_memory, plan
    from .preparation import Prepared, prepare, train_drafter
    from .record import TrainingRecord
    from .regeneration import Regenerated, Sampling, TargetWriter, regenerate
    from .rewriting import RegenerationRecord, RegenerationSettings, regenerate_data
    from .running import train
    from .served import ServerWriter
    from .settings import TrainingSettings, read_yaml
    from .trainer import Trainer

__all__ = [
    "Acceptance",
    "Batch",
    "Example",
    "Plan",
    "Prepared",
    "Regenerated",
    "RegenerationRecord",
    "RegenerationSettings",
    "Sampling",
    "ServerWriter",
    "TargetWriter",
    "Trainer",
    "TrainingRecord",
    "TrainingSettings",
    "encode",
    "encode_prompt",
    "load_examples",
    "measure_acceptance",
    "new_drafter",
    "peak_memory",
    "plan",
    "prepare",
    "read_examples",
    "read_yaml",
    "regenerate",
    "regenerate_data",
    "save_drafter",
    "train",
    "train_drafter",
    "with_response",
    "write_examples",
]

_MODULE_OF = {
    **dict.fromkeys(("Acceptance", "measure_acceptance"), "acceptance"),
    **dict.fromkeys(
        ("Example", "encode", "encode_prompt", "load_examples", "read_examples", "with_response", "write_examples"),
        "data",
    ),
    "Batch": "batches",
    "new_drafter": "initialization",
    **dict.fromkeys(("Plan", "peak_memory", "plan"), "planning"),
    **dict.fromkeys(("Prepared", "prepare", "train_drafter"), "preparation"),
    "TrainingRecord": "record",
    **dict.fromkeys(("Regenerated", "Sampling", "TargetWriter", "regenerate"), "regeneration"),
    **dict.fromkeys(("RegenerationRecord", "RegenerationSettings", "regenerate_data"), "rewriting"),
    "ServerWriter": "served",
    **dict.fromkeys(("TrainingSettings", "read_yaml"), "settings"),
    "Trainer": "trainer",
    "save_drafter": "keeping",
    "train": "running",
}


def __getattr__(name: str) -> Any:
    """Public names on first use, as in `dflash` itself: the command line reads the settings and needs no torch for it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dflash.training' has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
