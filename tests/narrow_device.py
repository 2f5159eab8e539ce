"""A device without float64, played on the CPU: tensors that lie on it, and an error for every float64 that would.

`NarrowDevice` makes it known to torch, which cannot be undone, so use it in a `Forked` process.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend


NAME = "small_gpu"


class OnDevice(torch.Tensor):
    """A tensor that lies on the device. Its values are those of `inner`, on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> OnDevice:
        if inner.dtype == torch.float64:
            raise TypeError(f"Cannot make a tensor on {NAME}: it has no float64.")  # the kind of error that MPS raises
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        tensor = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=f"{NAME}:0", **layout)
        tensor.inner = inner
        return tensor

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Factories(TorchDispatchMode):
    """Sees the operations that no tensor of the device takes part in, such as `torch.zeros(…, device=…)`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})


class _Lists(TorchFunctionMode):
    """Moves what `torch.tensor` makes of a list, which no dispatch mode sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.new_tensor:
            func, kwargs = torch.tensor, {"device": args[0].device, "dtype": args[0].dtype, **kwargs}
            args = args[1:]
        if func is torch.tensor and (device := kwargs.pop("device", None)) is not None:
            return torch.tensor(*args, **kwargs).to(device)
        return func(*args, **kwargs)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The result of an operation, on the device if its tensors or its `device` are."""
    tensors: list[torch.Tensor] = []

    def inner(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        return value.inner if isinstance(value, OnDevice) else value

    inner_args, inner_kwargs = _mapped(inner, args), _mapped(inner, kwargs)
    are_on_device = [isinstance(tensor, OnDevice) for tensor in tensors if tensor.dim()]  # a number may lie anywhere
    is_on_device = any(isinstance(tensor, OnDevice) for tensor in tensors)
    is_copy = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
    if not is_copy and any(are_on_device) and not all(are_on_device):
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {func} got some on {NAME} and some on the CPU."
        )
    if kwargs.get("device") is not None:
        is_on_device = torch.device(kwargs["device"]).type == NAME
        inner_kwargs["device"] = torch.device("cpu")
    result = func(*inner_args, **inner_kwargs)
    if func is torch.ops.aten.copy_.default or func._schema.name.endswith("_"):  # in place
        return args[0]
    return _mapped(_wrapped, result) if is_on_device else result


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """`function` of every leaf: torch's own trees take most of the time of these tests."""
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(function, part) for part in value)
    if isinstance(value, dict):
        return {name: _mapped(function, part) for name, part in value.items()}
    return function(value)


def _wrapped(value: Any) -> Any:
    return OnDevice(value) if isinstance(value, torch.Tensor) else value


class _Module(_DummyBackendModule):
    """What torch asks of a device, and that transformers 4.57 switches autocast off."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []


class NarrowDevice(ExitStack):
    """The device, for as long as the block runs."""

    device = f"{NAME}:0"

    def __enter__(self) -> NarrowDevice:
        _setup_privateuseone_for_python_backend(NAME, _Module())
        self.enter_context(_Factories())
        self.enter_context(_Lists())
        return self

    def move(self, model: torch.nn.Module) -> None:
        """Puts the weights and buffers of `model` on the device."""
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = torch.nn.Parameter(OnDevice(weight.data), requires_grad=False)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = OnDevice(buffer)
