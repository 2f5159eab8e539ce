"""DFlash: block-diffusion speculative decoding for Hugging Face transformers."""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from .distributions import import_name_clash


if TYPE_CHECKING:
    from .configuration_dflash import DFlashConfig, default_target_layer_ids
    from .conversation_dflash import Conversation
    from .decoding_dflash import Block
    from .generation_dflash import DFlashOutput, custom_generate, generate_blocks, spec_generate
    from .latency_dflash import LatencyCurve
    from .modeling_dflash import DFlashDraftModel

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
    "DFlashConfig": "configuration_dflash",
    "default_target_layer_ids": "configuration_dflash",
    "Block": "decoding_dflash",
    "Conversation": "conversation_dflash",
    "custom_generate": "generation_dflash",
    "DFlashOutput": "generation_dflash",
    "generate_blocks": "generation_dflash",
    "spec_generate": "generation_dflash",
    "LatencyCurve": "latency_dflash",
    "DFlashDraftModel": "modeling_dflash",
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
