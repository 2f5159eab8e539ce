"""Whether a device can be used here, and which dtypes the CPU multiplies."""

from typing import Any

import torch

from .messages import first_line


# Instructions of an x86 CPU that multiply numbers of 16 bits. Without them each product is converted, which takes longer than
# one in fp32: in a training step, and in a forward over a block.
INSTRUCTIONS = {torch.bfloat16: ("avx512_bf16", "amx_bf16"), torch.float16: ("avx512_fp16", "amx_fp16")}


def device_fault(device: str) -> str | None:
    """Why nothing can be computed on the device of this name; `None` if it can be used."""
    try:
        if torch.device(device).type == "meta":
            return "it holds shapes and no values"
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return first_line(error)
    return None


def cpu_emulates(dtype: torch.dtype) -> bool:
    """Whether the CPU is an x86 that has no instruction to multiply numbers of this dtype."""
    capabilities: Any = torch.cpu.get_capabilities()
    if dtype not in INSTRUCTIONS or capabilities.get("architecture") != "x86_64":
        return False
    return not any(map(capabilities.get, INSTRUCTIONS[dtype]))
