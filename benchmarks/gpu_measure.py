"""The rows of `gpu.py`, measured: runs in a process of its own, which holds the models.

What it takes from the library beside its public names is in the first functions, so that a change there is one here.
"""

from __future__ import annotations

import copy
import gc
import os
import platform
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import transformers
from gpu_rows import OURS
from gpu_steps import Counts, GraphWatch, StepClock, TimedText, step_figures, time_blocks, time_generate
from gpu_training import TrainingSize, time_training

from dflash import generate_blocks
from dflash.common.stopwatch import seconds_of
from dflash.evaluation import (
    EAGER,
    GREEDY,
    HAS_NATIVE,
    PeakMemory,
    scripted_continuation,
    scripted_pair,
    scripted_prompt,
    useless,
)


def why_not_compiled(target: Any, drafter: Any) -> str | None:
    """Why the library runs this pair eagerly though it was to be compiled; `None`: it does not."""
    from dflash.model.step_dflash import CompiledPair

    return CompiledPair.of(target, drafter).reason


def sequence_of(block: Any) -> int:
    """Which sequence of a batch a block belongs to."""
    return block.sequence


# What each of ours asks of `generate_blocks`.
GREEDILY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20}
COMPILED: dict[str, Any] = {**EAGER, "compile": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {**EAGER, **GREEDILY},
    "compiled": {**COMPILED, **GREEDILY},
    "tree": {**COMPILED, **GREEDILY, "draft_tree": 64},
    "adaptive": {**COMPILED, **GREEDILY, "adaptive": True},
    "useless": {**COMPILED, **GREEDILY, "adaptive": True},
    "sampled": {**COMPILED, **SAMPLED},
}
# Their steps are of several widths.
OF_MANY_WIDTHS = ("adaptive", "useless")
# Ways whose texts are longer, by the script's tau: their steps give more than one token, or there is a habit to be formed.
LONGER = ("eager", "compiled", "adaptive", "useless", "sampled")


@dataclass(frozen=True)
class Pair:
    """A scripted target with its drafters."""

    target: Any
    drafter: Any

    @cached_property
    def useless(self) -> Any:
        """A drafter that is never right, of the same weights."""
        return useless(self.drafter)


class GpuBench:
    """Measures a row; `settings` are its fields.

    Args:
        options: `is_smoke` (on the CPU, in fp32, without torch's compiler), `tau` of the script, `steps` that a text should
            have.

    Raises:
        ValueError: without a CUDA device, except with `is_smoke`.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.is_smoke = bool(options["is_smoke"])
        self.tau, self.num_steps = float(options["tau"]), int(options["steps"])
        if not self.is_smoke and not torch.cuda.is_available():
            raise ValueError("There is no CUDA device: run this where there is one, or with --smoke.")
        self.device, self.dtype = torch.device("cuda"), torch.bfloat16
        if self.is_smoke:
            from torch import _dynamo

            _dynamo.config.disable = True  # on a CPU the compiler takes minutes
            self.device, self.dtype = torch.device("cpu"), torch.float32
            torch.set_num_threads(1)
        self.watch = GraphWatch.installed()
        self.facts = self._facts()
        self._pairs: dict[str, Pair] = {}

    def _facts(self) -> dict[str, Any]:
        on_cuda = self.device.type == "cuda"
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "cuda": torch.version.cuda if on_cuda else None,
            "system": f"{platform.system()} {platform.machine()}",
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": torch.cuda.get_device_name() if on_cuda else "cpu",
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def pair(self, shape: str) -> Pair:
        """The pair of a shape, built when it is first asked for."""
        if shape not in self._pairs:
            models = scripted_pair(shape, self.tau, self.dtype, self.device)
            # As training leaves them: what is compiled looks at this, and would be compiled again after training rows.
            self._pairs[shape] = Pair(*(model.requires_grad_(False) for model in models))
        return self._pairs[shape]

    def measure(self, setting: dict[str, Any]) -> dict[str, Any]:
        """The figures of a row."""
        self._free()
        pair = self.pair(setting["shape"])
        if setting["kind"] == "floor":
            return self._floor(pair)
        memory = PeakMemory(self.device.type == "cuda")
        memory.reset()
        held = memory.read()
        if setting["kind"] == "training":
            figures = self._training(pair, setting["way"])
        else:
            figures = self._decoding(pair, setting["way"], setting["context"], setting["batch"])
        peak = {"memory_before_gb": held / 1e9, "peak_memory_gb": memory.read() / 1e9, "memory_kind": memory.kind}
        return {**figures, **peak}

    def recover(self) -> None:
        """Frees what a failed row has left; raises where the device is of no more use."""
        self._free()
        if torch.zeros(1, device=self.device).add(1).item() != 1.0:
            raise RuntimeError("The device computes nonsense after it.")

    def _free(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _floor(self, pair: Pair) -> dict[str, Any]:
        target, drafter = pair.target, pair.drafter
        return {
            "copy_gb_per_second": copy_bandwidth(self.device, 2**20 if self.is_smoke else 2**32) / 1e9,
            "target_parameters": target.num_parameters(),
            "drafter_parameters": drafter.num_parameters(),
            "block_size": drafter.config.block_size,
            "attention": target.config._attn_implementation,
            "step_bytes_without_keys": step_bytes(target, drafter, 0, 1),
        }

    def _decoding(self, pair: Pair, way: str, context: int, batch: int) -> dict[str, Any]:
        target = pair.target
        drafter = pair.useless if way == "useless" else pair.drafter
        prompt_ids = scripted_prompt(target, context, batch)
        new_tokens = 2 + round(self.num_steps * (self.tau if way in LONGER else 1))
        if way in OURS:
            new_tokens += drafter.config.block_size  # the last ones are steps that do not count
            read = partial(self._ours, target, drafter, way, prompt_ids, new_tokens)
        else:
            read = partial(self._generate, target, drafter, way, prompt_ids, new_tokens)
        warm_up, _ = self._watched(read)
        measured, text = self._watched(read)
        expected = scripted_continuation(target, prompt_ids, new_tokens).tolist()
        return {
            **step_figures(text, batch, by_mean=way in OF_MANY_WIDTHS),
            "new_tokens": new_tokens,
            "is_right": text.token_ids == expected,
            "step_bytes": step_bytes(target, None if way in ("generate", "static") else drafter, context, batch),
            "not_compiled_because": self._why_not_compiled(target, drafter, way),
            **measured,
            "warm_up": warm_up,
        }

    def _watched(self, read: Any) -> tuple[dict[str, Any], TimedText]:
        """What reading a text compiled and recorded, and the text."""
        before, known = self.watch.counts(), self.watch.compiled()
        text: list[TimedText] = []
        seconds = seconds_of(lambda: text.append(read()))
        counts: Counts = self.watch.counts()
        return {**counts.since(before), "reasons": self.watch.reasons(known), "seconds_of_text": seconds}, text[0]

    def _ours(self, target: Any, drafter: Any, way: str, prompt_ids: torch.Tensor, new_tokens: int) -> TimedText:
        blocks = generate_blocks(drafter, target, prompt_ids, max_new_tokens=new_tokens, **OPTIONS[way])
        return time_blocks(
            blocks,
            sequence_of,
            StepClock(self.device),
            len(prompt_ids),
            new_tokens,
            drafter.config.block_size,
        )

    def _generate(self, target: Any, drafter: Any, way: str, prompt_ids: torch.Tensor, new_tokens: int) -> TimedText:
        options: dict[str, Any] = {}
        if way == "static":
            options = {"cache_implementation": "static"}
        elif way == "native":
            if not HAS_NATIVE:
                raise ValueError(
                    f"transformers {transformers.__version__} has no native dflash: it came with 5.15, install a newer one."
                )
            options = {"assistant_model": drafter, "speculation_type": "dflash"}
        generate = partial(target.generate, max_new_tokens=new_tokens, **GREEDY, **options)
        # Every context and batch of every shape is one more compilation of the same function of transformers.
        with torch._dynamo.config.patch(recompile_limit=64) if way == "static" else nullcontext():
            return time_generate(generate, prompt_ids, StepClock(self.device))

    def _why_not_compiled(self, target: Any, drafter: Any, way: str) -> str | None:
        """Of a way that is to be compiled: why it was not."""
        if way in ("generate", "native", "eager"):
            return None
        if self.is_smoke and self.watch.counts().compilations == 0:
            return "--smoke leaves torch's compiler out"
        if way == "static":
            is_compiled = hasattr(target, "_compiled_call")
            return None if is_compiled else "transformers compiles a static cache's forward on GPUs alone"
        return why_not_compiled(target, drafter)

    def _training(self, pair: Pair, way: str) -> dict[str, Any]:
        size = TrainingSize(2, 64, 4, 16, 2) if self.is_smoke else TrainingSize()
        attention = None if way == "library" else way
        config = copy.deepcopy(pair.drafter.config)
        clock = StepClock(self.device)
        return time_training(pair.target, config, attention, size, clock)


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 10) -> float:
    """Bytes per second that a copy inside the device's memory reads and writes, at its best."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)

    def copy_often() -> None:
        for _ in range(10):
            sink.copy_(source)
        sink[0].item()  # waits for the device

    copy_often()
    return 20 * num_bytes / min(seconds_of(copy_often) for _ in range(repeats))


def step_bytes(target: Any, drafter: Any | None, context: int, batch: int) -> int:
    """Bytes that a step has to read: all weights, the head a second time for the drafter, and the keys and values.

    Of the embedding a step reads single rows. Without a drafter it is a step of plain decoding.
    """
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    models = [target] if drafter is None else [target, drafter]
    weights = [weight for model in models for weight in model.parameters() if weight is not embedding]
    weights += [] if drafter is None else [head]
    cached = sum(key_bytes(model) for model in models)
    return sum(weight.numel() * weight.element_size() for weight in weights) + batch * context * cached


def key_bytes(model: Any) -> int:
    """Bytes of one token's keys and values in all layers."""
    config = model.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
