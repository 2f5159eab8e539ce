"""DFlash: block-diffusion speculative decoding for Hugging Face transformers."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .distributions import import_name_clash


if TYPE_CHECKING:
    from .model.configuration_dflash import DFlashConfig, default_target_layer_ids
    from .model.decoding_dflash import Block, Conversation
    from .model.generation_dflash import DFlashOutput, custom_generate, generate_blocks, spec_generate
    from .model.modeling_dflash import DFlashDraftModel
    from .model.proposals_dflash import LatencyCurve

__version__ = "0.1.0"

__all__ = [
    "Block",
    "Conversation",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashOutput",
    "LatencyCurve",
    "custom_generate",
    "default_target_layer_ids",
    "generate_blocks",
    "spec_generate",
]

_MODULE_OF = {
    "DFlashConfig": "model.configuration_dflash",
    "default_target_layer_ids": "model.configuration_dflash",
    "Block": "model.decoding_dflash",
    "Conversation": "model.decoding_dflash",
    "custom_generate": "model.generation_dflash",
    "DFlashOutput": "model.generation_dflash",
    "generate_blocks": "model.generation_dflash",
    "spec_generate": "model.generation_dflash",
    "LatencyCurve": "model.proposals_dflash",
    "DFlashDraftModel": "model.modeling_dflash",
}

if (_clash := import_name_clash()) is not None:
    warnings.warn(_clash, stacklevel=2)


def __getattr__(name: str) -> Any:
    """Public names on first use (PEP 562): importing torch takes seconds, which the command line shows a bar for."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'dflash' has no attribute {name!r}; it has {', '.join(__all__)}.")
    return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
