"""What this process computes on, and whether that computes in bf16, which decides the defaults of precision."""

import os
from typing import Any

import torch


# Instructions that multiply bf16. An x86 CPU without them converts each product: a training step of the embedded pair took
# three times as long as in fp32.
BF16_INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def is_cpu_alone() -> bool:
    """Whether to compute on the CPU: without an accelerator, or with one on which processes cannot communicate.

    Unless it is told, accelerate takes several processes there for as many runs of one process.
    """
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found is None or (found.type == "mps" and int(os.environ.get("WORLD_SIZE", "1")) > 1)


def computes_in_bf16() -> bool:
    """Whether products in bf16 are as fast as in fp32: not where they are emulated, as on an x86 CPU without `BF16_INSTRUCTIONS`."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available() and not is_cpu_alone():
        return True
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities.get("architecture") != "x86_64" or any(map(capabilities.get, BF16_INSTRUCTIONS))
