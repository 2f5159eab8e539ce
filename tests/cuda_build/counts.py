"""What an eager step asks of a GPU, counted without one: kernels, waits of the host, attention problems never met before.

    python tests/cuda_build/counts.py --output benchmarks/results/device_counts.json

The tensors are fake ones on "cuda": they have shapes, dtypes and a device, and no numbers. What the host reads is invented: half
of a block stands, tokens are all different. The layers are as many as Qwen3-8B and its drafter have; they are narrow, because a
count does not depend on their width. Only `custom_generate` is called. Needs torch's CUDA build.
"""

import argparse
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional
from torch.nn.attention import bias
from torch.utils._python_dispatch import TorchDispatchMode

from dflash import DFlashConfig, DFlashDraftModel, custom_generate, default_target_layer_ids
from dflash.cli.terminal import show_table
from dflash.common.provenance import record, versions, write_result
from dflash.evaluation import tables_of


DEVICE = torch.device("cuda:0")
DEEP = (36, 5)  # layers of Qwen3-8B and of its drafter
SHALLOW = (4, 2)
SIZES = {"vocab_size": 640, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096}
BLOCK_SIZE = 16
PROMPT_LENGTH = 40

# Keywords of each mode, and its number of prompts, which are of different lengths.
MODES: dict[str, tuple[dict[str, Any], int]] = {
    "chain": ({}, 1),
    "batch of 4": ({}, 4),
    "sampled": ({}, 1),
    "tree of 24": ({"draft_tree": 24}, 1),
    "trees in a batch of 4": ({"draft_tree": 24}, 4),
    "adaptive": ({"adaptive": True}, 1),
}
NEW_TOKENS = 400
LOWER_RIGHT = object()  # causal attention aligned to the last keys, which no plan of cuDNN computes
SETTLED = slice(2, 6)  # steps that are counted: the first one reads the prompt's context

# Operations that launch nothing: they return a view, or memory.
VIEWS = {
    *(
        "_reshape_alias",
        "_unsafe_view",
        "alias",
        "as_strided",
        "chunk",
        "detach",
        "empty",
        "empty_like",
        "empty_strided",
    ),
    *("expand", "lift_fresh", "new_empty", "permute", "reshape", "select", "slice", "split", "split_with_sizes"),
    *("squeeze", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view"),
}


class Watch(TorchDispatchMode):
    """Counts kernels, waits of the host, and attention problems: what cuDNN plans for are sizes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.num_waits = 0
        self.problems: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        is_on_device = isinstance(result, torch.Tensor | tuple | list) and _is_on_device(result)
        self.kernels[name] += name not in VIEWS and is_on_device
        return result

    def counts(self) -> tuple[int, int, int]:
        """All so far: kernels, waits, attention problems."""
        return self.kernels.total(), self.num_waits, len(self.problems)

    def attend(self, query: Any, key: Any, value: Any, attn_mask: Any = None, *options: Any, **kwargs: Any) -> Any:
        """In place of `scaled_dot_product_attention`: one kernel, and a problem for cuDNN where it may be asked."""
        self.kernels["attention"] += 1
        if attn_mask is not LOWER_RIGHT and torch.backends.cuda.cudnn_sdp_enabled():
            tensors = [tensor for tensor in (query, key, value, attn_mask) if tensor is not None]
            self.problems.add((str(options), str(kwargs), *((*tensor.shape, *tensor.stride()) for tensor in tensors)))
        return torch.empty_like(query)

    def wait(self) -> None:
        """In place of waiting for an event of the device."""
        self.num_waits += 1

    def read(self, tensor: torch.Tensor) -> Any:
        """In place of a fake tensor's `tolist`: what the device would have computed."""
        if tensor.device.type == "cuda":
            self.wait()
        shape = tuple(tensor.shape)
        if len(shape) == 2 and shape[1] > 1:  # of each sequence the number of accepted tokens, then the tokens
            return [[min(BLOCK_SIZE // 2, shape[1] - 2), *range(1, shape[1])] for _ in range(shape[0])]
        if tensor.dtype == torch.bool:
            return [False] * shape[0]
        return [PROMPT_LENGTH - place for place in range(shape[0])] if len(shape) == 1 else [[1]] * shape[0]


def _is_on_device(result: Any) -> bool:
    tensors = [result] if isinstance(result, torch.Tensor) else result
    return any(isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" for tensor in tensors)


def need_cuda_build() -> None:
    """Ends the program where torch knows no CUDA."""
    if torch.version.cuda is None:
        raise SystemExit("This torch knows no CUDA: install its CUDA build, which needs no GPU for this.")


def random_pair(depths: tuple[int, int]) -> tuple[Any, Any]:
    """A random, narrow target and its drafter in bfloat16, with so many layers."""
    ends = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
    num_layers, num_draft_layers = depths
    target = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, **ends, num_hidden_layers=num_layers))
    layers = {"num_hidden_layers": num_draft_layers, "num_target_layers": num_layers}
    taps = {"target_layer_ids": default_target_layer_ids(num_layers), "mask_token_id": SIZES["vocab_size"] - 1}
    drafter = DFlashDraftModel(DFlashConfig(**SIZES, **ends, **layers, **taps, block_size=BLOCK_SIZE))
    return target.to(torch.bfloat16).eval(), drafter.to(torch.bfloat16).eval()


def move(model: torch.nn.Module) -> None:
    """Inside `fake_gpu`: puts a model's weights and buffers on the device, without their numbers."""
    for module in model.modules():
        for values in (module._parameters, module._buffers):
            for name, value in values.items():
                if value is not None:
                    fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=DEVICE)
                    is_weight = isinstance(value, torch.nn.Parameter)
                    values[name] = torch.nn.Parameter(fake, requires_grad=False) if is_weight else fake


def of_real_tokens(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    """In place of a fake tensor's indexing, whose shape would depend on numbers for a mask: no prompt has padding."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    return tensor.flatten() if is_mask else torch.Tensor.__getitem__(tensor, index)


@contextmanager
def fake_gpu(watch: Watch) -> Iterator[None]:
    """A GPU without numbers, whose only gate to the host is `tolist`."""
    if not torch.cuda.is_available():
        torch._C._ensureCUDADeviceGuardSet()  # lets C++ change the current device without a driver
    event = SimpleNamespace(synchronize=watch.wait)
    stream = SimpleNamespace(record_event=lambda: event)
    replaced: list[tuple[Any, str, Any]] = [
        (FakeTensor, "tolist", lambda tensor: watch.read(tensor)),
        (FakeTensor, "__getitem__", of_real_tokens),
        (bias, "CausalBias", lambda *args: LOWER_RIGHT),
        (functional, "scaled_dot_product_attention", watch.attend),
        (torch.Tensor, "pin_memory", lambda tensor, *args: tensor),
        (torch.cuda, "current_stream", lambda device=None: stream),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
    ]
    with ExitStack() as stack:
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.enter_context(FakeTensorMode())
        yield


def count(mode_name: str, depths: tuple[int, int], prompt_length: int, watch: Watch) -> list[tuple[int, int, int]]:
    """Of settled steps of a text: kernels, waits of the host, and attention problems that `watch` had never met."""
    keywords, num_prompts = MODES[mode_name]
    is_sampled = mode_name == "sampled"
    processors = transformers.LogitsProcessorList()
    if is_sampled:
        processors += [transformers.TopKLogitsWarper(20), transformers.TopPLogitsWarper(0.95)]
    stopping = transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(prompt_length + NEW_TOKENS)])
    config = transformers.GenerationConfig(do_sample=is_sampled)
    config._eos_token_tensor = None  # as `generate` prepares it
    target, drafter = random_pair(depths)
    marks = []
    with fake_gpu(watch):
        move(target)
        move(drafter)
        input_ids = torch.zeros(num_prompts, prompt_length, dtype=torch.long, device=DEVICE)
        options: dict[str, Any] = {"compile": False, "cuda_graph": False, "num_looked_up": 0, "as_blocks": True}
        options |= keywords
        if num_prompts > 1:
            options["attention_mask"] = torch.ones_like(input_ids)
        with watch:
            blocks: Any = custom_generate(target, input_ids, processors, stopping, config, drafter=drafter, **options)
            for block in blocks:
                if block.sequence == 0:
                    marks.append(watch.counts())
                if len(marks) > SETTLED.stop:
                    break
        blocks.close()  # here, where tensors are fake ones
    steps = []
    for before, after in pairwise(marks):
        kernels, waits, problems = (new - old for old, new in zip(before, after, strict=True))
        steps.append((kernels, waits, problems))
    return steps[SETTLED]


def rows_of(depths: tuple[int, int], mode: str) -> dict[str, Any]:
    """The counts of a step in a second text, whose prompt has another length than the first."""
    watch = Watch()
    count(mode, depths, PROMPT_LENGTH, watch)
    steps = count(mode, depths, PROMPT_LENGTH + 7, watch)
    kernels, waits, problems = (sum(numbers) / len(steps) for numbers in zip(*steps, strict=True))
    layers = " + ".join(map(str, depths))
    return {"layers": layers, "mode": mode, "kernels": kernels, "waits": waits, "new_attention_problems": problems}


def main() -> None:
    need_cuda_build()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    rows = [rows_of(DEEP, "chain"), *(rows_of(SHALLOW, mode) for mode in MODES)]
    result = record("device_counts", versions(), summary=rows)
    for table in tables_of(result):
        show_table(table)
    if args.output is not None:
        write_result(args.output, result)


if __name__ == "__main__":
    main()
