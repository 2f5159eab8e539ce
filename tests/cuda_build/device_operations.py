"""Operations that the host dispatches in one step, counted: on a GPU in every mode, and eagerly beside transformers' own DFlash.

    PYTHONPATH=benchmarks python tests/cuda_build/device_operations.py --output benchmarks/results/device_operations.json

The GPU is one of fake tensors, which have shapes, dtypes and a device and no numbers: whoever reads a number without having
said so fails, and so does an operation on tensors of two devices. Needs torch's CUDA build and no GPU. The other comparison
runs on the CPU, on small models; a count does not depend on how wide they are.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from dflash.model.proposals_dflash import machine
from measuring import argument_parser, finish, parsed, versions
from no_gpu import BLOCK_SIZE, DEVICE, fake_module, need_cuda_build, random_pair, use_device_guard
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash import DFlashDraftModel, LatencyCurve, custom_generate, generate_blocks
from dflash.evaluation import HAS_NATIVE
from dflash.model import decoding_dflash, generation_dflash, step_dflash, verification_dflash


VOCAB_SIZE = 640
PROMPT_LENGTH = 40
NEW_TOKENS = 200

# Steps that are counted: not the first ones, of which one reads the prompt's context.
SETTLED = slice(3, 7)

WIDTHS = (1, 2, 4, 8, 16)
# Layers of target and drafter that an eager step is compared with the native one on.
DEPTHS = ((4, 2), (28, 5))

# What is asked for in each mode, the number of prompts, and how often a settled step may wait for the device.
MODES: dict[str, tuple[dict[str, Any], int, int]] = {
    "chain": ({}, 1, 1),
    "batch of 4": ({}, 4, 1),
    "sampled": ({}, 1, 1),
    "adaptive": ({"adaptive": True}, 1, 2),
    "tree": ({"draft_tree": 24}, 1, 2),
    "verify alone": ({"max_draft_tokens": 0}, 1, 1),
}


def small_pair(depths: tuple[int, int], dtype: torch.dtype) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """A narrow, random target and its drafter with the given numbers of layers."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
    }
    torch.manual_seed(0)
    target, drafter = random_pair(sizes, depths, taps=[0, 1, 2])
    return target.to(dtype).eval(), drafter.to(dtype).eval()


def no_faults() -> SimpleNamespace:
    """Operations that no step on a GPU may have, none yet.

    Wide ones write the logits of a block in float32 or float64, strays take a number from the host in a tensor beside tensors
    on the device, and the host waits for copies.
    """
    return SimpleNamespace(wide=set(), strays=set(), waits=set())


class Watch(TorchDispatchMode):
    """Counts operations, and notes faults in them."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.faults = no_faults()
        self.is_inside = False  # a compiled function: one operation, whatever it holds

    def as_one(self, pair: Any, key: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        """In place of `CompiledPair.function`: the function as it is written, counted as one operation."""

        def inner(*args: Any) -> Any:
            self.counts["a compiled function"] += 1
            self.is_inside = True
            try:
                return function(*args)
            finally:
                self.is_inside = False

        return inner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result, name = func(*args, **kwargs), func.name()
        self.counts[name] += not self.is_inside and name.startswith("aten::")
        devices = {part.device.type for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)}
        is_copy = name in ("aten::_to_copy", "aten::copy_")
        if len(devices) > 1 and not is_copy and name != "aten::fill_.Tensor":  # which reads its number on the host
            self.faults.strays.add(name)
        for tensor in (part for part in tree_leaves(result) if isinstance(part, torch.Tensor)):
            # Shapes are small here: only logits have as many columns as the vocabulary has tokens.
            is_wide = tensor.dtype in (torch.float32, torch.float64) and tensor.shape[-1:] == (VOCAB_SIZE,)
            if is_wide and tensor.numel() >= BLOCK_SIZE // 2 * VOCAB_SIZE:
                self.faults.wide.add(f"{name} {tensor.dtype}")
            is_asynchronous = kwargs.get("non_blocking", name == "aten::copy_" and len(args) > 2 and args[2])
            if is_copy and len(devices | {tensor.device.type}) > 1 and not is_asynchronous:
                self.faults.waits.add(name)
        return result


def numbers(tensor: torch.Tensor) -> Any:
    """What the device would have computed: half of a block stands, tokens are all different, the best come first."""
    shape = tuple(tensor.shape)
    if len(shape) == 3:  # a tree's log-probabilities and tokens
        _, depth, count = shape
        best = [[-0.1 - rank for rank in range(count)] for _ in range(depth)]
        return [best, [[float(1 + rank) for rank in range(count)] for _ in range(depth)]]
    if tensor.dtype.is_floating_point:  # confidences
        return [[0.9**column for column in range(shape[1])] for _ in range(shape[0])]
    num_accepted = min(BLOCK_SIZE // 2, shape[1] - 2)
    return [[num_accepted, *range(1, shape[1])] for _ in range(shape[0])]


class Gate:
    """The places where the host may wait, and how often it did."""

    def __init__(self) -> None:
        self.num_waits = 0

    def to_host(self, tensor: torch.Tensor, computed: Callable[[torch.Tensor], Any] = numbers) -> Callable[[], Any]:
        """In place of `cache_dflash.to_host`: the copy, and the numbers once they are read."""
        is_waited_for = tensor.device.type == "cuda"
        if is_waited_for:
            tensor.to("cpu", non_blocking=True)

        def read() -> Any:
            self.num_waits += is_waited_for
            return computed(tensor)

        return read

    def on_host(self, tensor: torch.Tensor) -> list[int]:
        """In place of a fake tensor's `tolist`: lengths of prompts, or seeds."""
        self.num_waits += tensor.device.type == "cuda"
        return [PROMPT_LENGTH - row for row in range(tensor.shape[0])]


@contextmanager
def fake_gpu(gate: Gate, watch: Watch) -> Iterator[FakeTensorMode]:
    """A GPU without numbers, with one gate to the host; compiled functions run as they are written."""
    use_device_guard()
    replaced: list[tuple[Any, str, Any]] = [
        (decoding_dflash, "to_host", gate.to_host),
        # What the target would have chosen at the columns [1 + n] of a tree.
        (verification_dflash, "to_host", partial(gate.to_host, computed=lambda tensor: [1] * len(tensor))),
        (FakeTensor, "tolist", lambda tensor: gate.on_host(tensor)),
        (generation_dflash, "check_padding", lambda mask: None),
        (torch.Tensor, "pin_memory", lambda tensor, *args: tensor),
        (step_dflash, "_agree", lambda mine, theirs: True),
        (step_dflash, "_is_watched", lambda target, drafter: False),
        (step_dflash, "_may_flex", lambda target, drafter: False),
        (step_dflash, "SMALLEST_CAPACITY", 256),
        (step_dflash.CompiledPair, "function", lambda *args: watch.as_one(*args)),
        (torch.compiler, "cudagraph_mark_step_begin", lambda: None),
        (torch.cuda, "get_device_name", lambda device=None: "fake"),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield stack.enter_context(FakeTensorMode())


def on_fake_gpu(mode_name: str, is_compiled: bool) -> tuple[list[int], list[int], SimpleNamespace]:
    """Of settled steps in a mode: the operations of each, how often each waits for the device, and their faults."""
    asked, num_prompts, _ = MODES[mode_name]
    is_sampled = mode_name == "sampled"
    gate, watch = Gate(), Watch()
    target, drafter = small_pair((4, 2), torch.bfloat16)
    with fake_gpu(gate, watch) as mode:
        target, drafter = fake_module(mode, target), fake_module(mode, drafter)
        input_ids = torch.zeros(num_prompts, PROMPT_LENGTH, dtype=torch.long, device=DEVICE)
        options: dict[str, Any] = {"compile": is_compiled, "as_blocks": True, "num_looked_up": 0, **asked}
        if num_prompts > 1:
            options["attention_mask"] = torch.ones_like(input_ids)
        if "adaptive" in asked:
            times = tuple(10.0 + 0.01 * width for width in WIDTHS)  # as of a GPU: width costs little
            options["latency_curve"] = LatencyCurve(WIDTHS, times, 1.0, machine(target, drafter), 0.5)
        processors = LogitsProcessorList()
        if is_sampled:
            processors += [TemperatureLogitsWarper(1.0), TopKLogitsWarper(20), TopPLogitsWarper(0.95)]
        stopping = StoppingCriteriaList([MaxLengthCriteria(PROMPT_LENGTH + NEW_TOKENS)])
        config = GenerationConfig(do_sample=is_sampled)
        marks: list[tuple[int, int]] = []
        with watch:
            blocks: Any = custom_generate(target, input_ids, processors, stopping, config, drafter=drafter, **options)
            for block in blocks:
                if block.sequence == 0:
                    marks.append((watch.counts.total(), gate.num_waits))
                if len(marks) == SETTLED.start:
                    watch.faults = no_faults()
                if len(marks) > SETTLED.stop:
                    break
    settled = list(pairwise(marks))[SETTLED]
    operations, waits = ([after[kind] - before[kind] for before, after in settled] for kind in (0, 1))
    return operations, waits, watch.faults


def beside_native(*depths: int) -> dict[str, int]:
    """Operations of a settled eager step of ours and of `generate(speculation_type="dflash")`, both on the CPU."""
    target, drafter = small_pair(depths, torch.float32)
    input_ids = torch.arange(1, 1 + PROMPT_LENGTH)[None]
    asked: dict[str, Any] = {"temperature": 0.0, "compile": False, "stop_token_ids": [], "prompt_lookup_num_tokens": 0}
    native: dict[str, Any] = {"assistant_model": drafter, "speculation_type": "dflash", "do_sample": False}
    runs = {
        "ours": lambda: list(generate_blocks(drafter, target, input_ids, max_new_tokens=12, **asked)),
        "native": lambda: target.generate(input_ids, max_new_tokens=12, pad_token_id=0, **native),
    }
    counts = {}
    for name, run in runs.items():
        watch, marks = Watch(), list[int]()
        hook = target.register_forward_pre_hook(lambda *args, w=watch, m=marks: m.append(w.counts.total()))
        with watch:
            run()
        hook.remove()
        steps = [after - before for before, after in pairwise(marks)][SETTLED]
        assert len(set(steps)) == 1, f"{name}: settled steps differ ({steps})"
        counts[name] = steps[0]
    return counts


def main() -> None:
    args = parsed(argument_parser(__doc__))
    need_cuda_build()
    modes = []
    for name in MODES:
        for is_compiled in (False, True):
            operations, waits, faults = on_fake_gpu(name, is_compiled)
            found = {kind: sorted(names) for kind, names in vars(faults).items()}
            path = "compiled" if is_compiled else "eager"
            modes.append({"mode": name, "path": path, "operations": operations, "waits": waits, "faults": found})
    native = [{"layers": layers, **beside_native(*layers)} for layers in DEPTHS] if HAS_NATIVE else []
    finish(args.output, "device_operations", versions(), modes=modes, native=native)


if __name__ == "__main__":
    main()
