"""DFlash: block-diffusion speculative decoding for Hugging Face transformers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from .common.lazy import lazy_names
from .common.name_clash import import_name_clash
from .common.version import __version__ as __version__


if TYPE_CHECKING:
    from .drafter import DFlashConfig, DFlashDraftModel
    from .engine.history import History
    from .engine.manager import BatchManager
    from .engine.many_texts import draft_batches, generate_batch
    from .engine.tickets import BatchOutput
    from .model.configuration_dflash import default_target_layer_ids
    from .model.decoding_dflash import Block, Conversation
    from .model.generation_dflash import DFlashOutput, custom_generate, generate_blocks, spec_generate

__all__ = [
    "BatchManager",
    "BatchOutput",
    "Block",
    "Conversation",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashOutput",
    "History",
    "custom_generate",
    "default_target_layer_ids",
    "draft_batches",
    "generate_batch",
    "generate_blocks",
    "spec_generate",
]

if (_clash := import_name_clash()) is not None:
    warnings.warn(_clash, stacklevel=2)

__getattr__, __dir__ = lazy_names(__name__, __file__)
