"""Inductor's code for an NVIDIA H200, made on a machine that has none.

    with compiling() as codes:
        torch.compile(function)(*inputs)  # fake tensors on "cuda"
    counted(codes, vocab_size)

Dynamo, AOT autograd, every pass of Inductor and its code generation are the real ones; the code is read and not run. Needs
torch's CUDA build, and takes the whole process for itself: torch believes in a GPU from the first `compiling()` on. What
reaches into torch fits 2.13.
"""

import collections
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dflash import DFlashConfig, DFlashDraftModel
from dflash.model import step_dflash


DEVICE = torch.device("cuda:0")
BLOCK_SIZE = 16

H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    total_memory=141 * 2**30,
    warp_size=32,
    regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)


def need_cuda_build() -> None:
    """Ends the program where torch knows no CUDA."""
    if torch.version.cuda is None:
        raise SystemExit("This torch knows no CUDA: install its CUDA build, which needs no GPU for this.")


def random_pair(
    sizes: dict[str, Any], depths: tuple[int, int], taps: list[int], is_tied: bool = False
) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """A random Qwen3 target and its drafter with the given numbers of layers."""
    num_layers, num_draft_layers = depths
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    target = Qwen3ForCausalLM(Qwen3Config(**sizes, **ends, num_hidden_layers=num_layers, tie_word_embeddings=is_tied))
    nested = {"target_layer_ids": taps, "mask_token_id": sizes["vocab_size"] - 1}
    layers = {"num_hidden_layers": num_draft_layers, "num_target_layers": num_layers}
    return target, DFlashDraftModel(DFlashConfig(**sizes, **layers, block_size=BLOCK_SIZE, dflash_config=nested))


def fake_module(mode: FakeTensorMode, module: nn.Module) -> Any:
    """The module itself, its weights and buffers now on the GPU and without numbers; tied ones stay tied."""
    seen: dict[int, torch.Tensor] = {}

    def fake(value: torch.Tensor) -> torch.Tensor:
        meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        tensor = FakeTensor(mode, meta, DEVICE)
        return nn.Parameter(tensor, requires_grad=False) if isinstance(value, nn.Parameter) else tensor

    for part in module.modules():
        for values in (part._parameters, part._buffers):
            for name, value in values.items():
                if value is not None:
                    if id(value) not in seen:
                        seen[id(value)] = fake(value)
                    values[name] = seen[id(value)]
    return module


@cache
def use_device_guard() -> None:
    """Lets C++ change the current device without a driver: it does when a tensor on the GPU is indexed. For good."""
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()


@cache
def _pretend() -> None:
    """Makes torch take this machine for one with an H200, for the rest of the process."""
    use_device_guard()
    import torch._dynamo.device_interface as interfaces
    import torch._inductor.fx_passes.fuse_attention as fuse_attention
    import torch._inductor.fx_passes.joint_graph as joint_graph
    import torch._inductor.fx_passes.misc_patterns as misc_patterns
    import torch._inductor.fx_passes.pad_mm as pad_mm
    import torch._inductor.utils as inductor_utils
    import torch.utils._triton as triton_utils
    from torch._inductor.runtime.hints import DeviceProperties

    def always(value: Any) -> Any:
        return lambda *args, **kwargs: value

    triton_utils.triton_hash_with_backend, triton_utils.has_triton = always("none"), always(True)
    inductor_utils.is_big_gpu = always(True)
    cuda = torch.cuda
    cuda.get_device_properties, cuda.get_device_capability = always(H200), always((9, 0))
    cuda.current_device, cuda.device_count, cuda.is_available = always(0), always(1), always(True)
    cuda.get_rng_state, cuda.set_rng_state = always(torch.zeros(16, dtype=torch.uint8)), always(None)
    cuda.synchronize, cuda.set_device, cuda._lazy_init = always(None), always(None), always(None)
    cuda.is_initialized = always(False)
    # Two functions, because Dynamo knows each by itself.
    cuda._exchange_device, cuda._maybe_exchange_device = always(0), always(0)
    torch.accelerator.is_available = always(False)  # Dynamo would ask for the current stream
    interface = interfaces.CudaInterface
    interface.Worker.get_device_properties = staticmethod(always(H200))
    interface.Worker.current_device = staticmethod(always(0))
    interface.get_compute_capability = staticmethod(always(90))
    interface.is_available, interface.current_device = staticmethod(always(True)), staticmethod(always(0))
    interface.device_count = staticmethod(always(1))

    made = DeviceProperties.create
    known = {name: value for name, value in vars(H200).items() if name in DeviceProperties._fields}
    properties = DeviceProperties(type="cuda", index=0, cc=90, **known)
    DeviceProperties.create = staticmethod(
        lambda device: properties if torch.device(device).type == "cuda" else made(device)
    )

    def on_cpu(initialise: Any) -> Any:
        """Patterns are traced from small real tensors."""

        def inner(*args: Any, **kwargs: Any) -> Any:
            kept, cuda.is_available = cuda.is_available, always(False)
            try:
                return initialise(None)
            finally:
                cuda.is_available = kept

        return inner

    fuse_attention._sfdp_init = on_cpu(fuse_attention._sfdp_init)
    misc_patterns._misc_patterns_init = on_cpu(misc_patterns._misc_patterns_init)
    pad_mm._pad_mm_init = on_cpu(pad_mm._pad_mm_init)

    def would_be_timed(match: Any, first: Any, second: Any, *args: Any, **kwargs: Any) -> bool:
        _timed.append((tuple(first.shape), tuple(second.shape)))
        return False

    pad_mm._should_pad = would_be_timed
    folder = joint_graph.UniformValueConstantFolder
    deduce = folder._deduce_value

    def deduce_on_cpu(self: Any, node: Any) -> Any:
        """Constants of one element, of which only the value is used."""
        kept = node.kwargs
        if kept.get("device") is not None:
            node.kwargs = {**kept, "device": torch.device("cpu")}
        try:
            return deduce(self, node)
        finally:
            node.kwargs = kept

    folder._deduce_value = deduce_on_cpu


# Products whose sizes Inductor would pad or not by timing both on the GPU, while it compiles.
_timed: list[tuple[tuple[int, ...], tuple[int, ...]]] = []


class _Made(BaseException):
    """The code is there, and what is left of compiling would load it; not caught by Dynamo's `except Exception`."""


@contextmanager
def compiling() -> Iterator[list[str]]:
    """The code that the one `torch.compile`d call inside would have run, in the list when the block is left."""
    _pretend()
    from torch._dynamo import reset
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    codes: list[str] = []
    _timed.clear()
    reset()

    def stop(self: Any) -> Any:
        codes.append(self.codegen()[0].value)
        raise _Made

    kept, GraphLowering._compile_to_module = GraphLowering._compile_to_module, stop
    try:
        with torch.no_grad(), config.patch(compile_threads=1, fx_graph_cache=False):
            yield codes
    except _Made:
        pass
    finally:
        GraphLowering._compile_to_module = kept
        reset()
        if step_dflash._collector is not None:  # as after a step
            step_dflash._collector.reset(None)


_CALLS = re.compile(r"^ *def (?:partition_0|call)\(", re.M)  # before it stand the kernels
_KERNEL = re.compile(r"^\s+(?:\w+ = )?(triton_\w+)\.run\(", re.M)
_EXTERN = re.compile(r"^\s+(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.[\w.]+)\(", re.M)
_BUFFER = re.compile(r"^\s+\w+ = empty_strided_cuda\(\(([^)]*)\), \([^)]*\), torch\.(\w+)\)", re.M)


def counted(codes: list[str], vocab_size: int) -> dict[str, Any]:
    """What generated code launches and allocates, weights, keys and values aside."""
    code = "\n".join(codes)
    calls = "\n".join(_CALLS.split(code, maxsplit=1)[1] for code in codes)
    launches = collections.Counter(_kind(kernel, code) for kernel in _KERNEL.findall(calls))
    launches.update(_EXTERN.findall(calls))
    allocated, over_vocabulary = 0, []
    for sizes, dtype in _BUFFER.findall(calls):
        shape = [int(size) for size in sizes.replace(" ", "").split(",") if size]
        allocated += math.prod(shape) * getattr(torch, dtype).itemsize
        if any(size and size % vocab_size == 0 for size in shape):
            over_vocabulary.append([shape, dtype])
    return {
        "launches": sum(launches.values()),
        "by_kind": dict(sorted(launches.items())),
        "over_vocabulary": over_vocabulary,
        "allocated_bytes": allocated,
        "timed_products": [[list(first), list(second)] for first, second in _timed],
    }


def _kind(kernel: str, code: str) -> str:
    """What a generated kernel is."""
    match = re.search(rf"^{kernel} = async_compile\.triton\(.*?^'''", code, re.M | re.S)
    source = match.group(0) if match else ""
    if "combo_grid_meta" in source:
        return "combined"
    if "_tem_" in kernel:
        if "SPLIT_KV" in source:
            return "flex decoding"
        return "flex attention" if "SPARSE_KV_BLOCK_SIZE" in source else "product"
    return {"poi": "pointwise", "per": "reduction", "red": "reduction"}.get(kernel.split("_")[1], kernel)
