"""Tensors on their way between host and device, without waiting for what the device still has to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host on `device`. From memory that is not pinned CUDA would copy it once all else is done."""
    if device.type != "cuda" or tensor.device == device:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: torch.Tensor) -> Callable[[], Any]:
    """Begins to copy a tensor to the host: `read()`, its numbers as lists, waits for them and for nothing launched since."""
    if tensor.device.type != "cuda":
        return tensor.tolist
    copy = tensor.to("cpu", non_blocking=True)
    arrived = torch.cuda.current_stream(tensor.device).record_event()

    def read() -> Any:
        arrived.synchronize()
        return copy.tolist()

    return read
