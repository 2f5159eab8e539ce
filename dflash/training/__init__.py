"""Training a drafter for a target: data, anchors, masks, losses, and the loop. Needs the extra `train`."""

from .acceptance import Acceptance, measure_acceptance
from .data import Batch, Example, encode, encode_prompt, read_examples, with_response, write_examples
from .initialization import new_drafter
from .regeneration import Regenerated, regenerate
from .trainer import TrainingRecord, TrainingSettings, save_drafter, train


__all__ = [
    "Acceptance",
    "Batch",
    "Example",
    "Regenerated",
    "TrainingRecord",
    "TrainingSettings",
    "encode",
    "encode_prompt",
    "measure_acceptance",
    "new_drafter",
    "read_examples",
    "regenerate",
    "save_drafter",
    "train",
    "with_response",
    "write_examples",
]
