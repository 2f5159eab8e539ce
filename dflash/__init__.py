"""DFlash: block-diffusion speculative decoding for Hugging Face transformers."""

from .configuration_dflash import DFlashConfig, default_target_layer_ids
from .generation_dflash import Block, DFlashOutput, generate_blocks, spec_generate
from .modeling_dflash import DFlashDraftModel


__all__ = [
    "Block",
    "DFlashConfig",
    "DFlashDraftModel",
    "DFlashOutput",
    "default_target_layer_ids",
    "generate_blocks",
    "spec_generate",
]
