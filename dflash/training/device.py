"""Whether this process computes on the CPU, and whether in bf16: both decide defaults."""

import os
from typing import Any

import torch


# Instructions that multiply bf16. An x86 CPU without them converts each product, and a training step of the embedded pair takes
# three times as long as in fp32.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def is_cpu_alone() -> bool:
    """Whether to compute on the CPU: without an accelerator, or with one on which processes cannot communicate (MPS).

    Otherwise accelerate would start several separate runs of one process there.
    """
    if not torch.accelerator.is_available():
        return True
    is_mps = torch.accelerator.current_accelerator().type == "mps"  # type: ignore[union-attr]
    return is_mps and int(os.environ.get("WORLD_SIZE", "1")) > 1


def computes_in_bf16() -> bool:
    """Whether products in bf16 are as fast as in fp32: not where they are emulated, as on an x86 CPU without `BF16_INSTRUCTIONS`."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available() and not is_cpu_alone():
        return True
    capabilities: Any = torch.cpu.get_capabilities()
    return capabilities.get("architecture") != "x86_64" or any(map(capabilities.get, BF16_INSTRUCTIONS))
