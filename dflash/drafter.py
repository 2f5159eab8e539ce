"""The package's own drafter: the shipped classes, and what only the package has, attached to them.

`DFlashConfig` and `DFlashDraftModel` read every dialect, and requests may ask for the engine. The classes of a checkpoint's own
code have neither: they read the form that they were saved in, and run the plain loop. Other rooms take both classes from here.
"""

import dflash.dialects as dialects
import dflash.engine as engine

from .engine.many_texts import generate_batch, init_continuous_batching
from .model.configuration_dflash import DFlashConfig
from .model.modeling_dflash import DFlashDraftModel
from .model.pair_dflash import KEYWORDS


__all__ = ["DFlashConfig", "DFlashDraftModel"]

DFlashConfig.reader = dialects
DFlashDraftModel.engine = engine
DFlashDraftModel.generate_batch = generate_batch  # type: ignore[attr-defined]
DFlashDraftModel.init_continuous_batching = init_continuous_batching  # type: ignore[attr-defined]
DFlashDraftModel.KEYWORDS = KEYWORDS  # type: ignore[attr-defined]  # pairs of earlier releases read it here
