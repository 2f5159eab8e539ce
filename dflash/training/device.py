"""Says whether this process computes on the CPU, and whether bf16 is fast on this machine. Defaults depend on both."""

import os
from typing import Any

import torch


# Instructions that multiply bf16. An x86 CPU without them converts each product, and a training step of the embedded
# pair takes three times as long as in fp32.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def is_cpu_alone() -> bool:
    """Whether to compute on the CPU: there is no accelerator, or it is MPS and there are several processes.

    Processes cannot communicate on MPS: accelerate would treat each one as a run of its own.
    """
    if not torch.accelerator.is_available():
        return True
    is_mps = torch.accelerator.current_accelerator().type == "mps"  # type: ignore[union-attr]
    return is_mps and int(os.environ.get("WORLD_SIZE", "1")) > 1


def computes_in_bf16() -> bool:
    """Whether bf16 products are fast here. An x86 CPU without `BF16_INSTRUCTIONS`, for example, emulates them."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available() and not is_cpu_alone():
        return True
    capabilities: Any = torch.cpu.get_capabilities()
    return capabilities.get("architecture") != "x86_64" or any(map(capabilities.get, BF16_INSTRUCTIONS))
