"""Operations that a CUDA graph cannot hold: those in which the host waits, and copies from its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


# Operations of aten in which the host waits for a size or a number. A recording that meets one fails, and may leave the device
# in a bad state.
WAITING = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}
COPYING = {"_to_copy", "copy_"}
INDEXING = {"index", "index_put", "index_put_"}  # wait where they look for the true places of a mask
MASKS = (torch.bool, torch.uint8)


def waits(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host waits in an operation of aten."""
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name in INDEXING:
        return any(index is not None and index.dtype in MASKS for index in args[1])
    return name in WAITING


class Recordable(TorchDispatchMode):
    """Refuses operations on a kind of device that a graph cannot hold. RuntimeError: there was one."""

    def __init__(self, device_type: str = "cuda") -> None:
        super().__init__()
        self.device_type = device_type

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_on_device = any(self._is_on_device(arg) for arg in args)
        if is_on_device and waits(func.overloadpacket.__name__, args, kwargs):
            raise RuntimeError(f"the host waits in {func}")
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and is_on_device and not self._is_on_device(result):
            raise RuntimeError(f"the host reads the result of {func}")
        is_copy = func.overloadpacket.__name__ in COPYING and self._is_on_device(result)
        if is_copy and any(self._is_on_host(arg) for arg in args):
            raise RuntimeError(f"{func} copies from the host's memory, which a replay would read at the old address")
        return result

    def _is_on_host(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == "cpu" != self.device_type

    def _is_on_device(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.device.type == self.device_type
