"""Says whether this process computes on the CPU, and whether bf16 is fast on this machine. Defaults depend on both."""

import os

import torch

from dflash.common.devices import cpu_emulates


def is_cpu_alone() -> bool:
    """Whether to compute on the CPU: there is no accelerator, or it is MPS and there are several processes.

    Processes cannot communicate on MPS: accelerate would treat each one as a run of its own.
    """
    if not torch.accelerator.is_available():
        return True
    is_mps = torch.accelerator.current_accelerator().type == "mps"  # type: ignore[union-attr]
    return is_mps and int(os.environ.get("WORLD_SIZE", "1")) > 1


def computes_in_bf16() -> bool:
    """Whether bf16 products are fast here. Some x86 CPUs, for example, emulate them."""
    if torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if torch.accelerator.is_available() and not is_cpu_alone():
        return True
    return not cpu_emulates(torch.bfloat16)
