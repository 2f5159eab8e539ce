"""The rows of `gpu.py`, measured. Runs in a process of its own, which holds the models."""

import copy
import gc
import math
import os
from contextlib import nullcontext
from functools import cache, partial
from statistics import median
from typing import Any

import torch
import transformers
from gpu_steps import GraphWatch, StepMarks, read_blocks, step_figures
from measuring import versions

from dflash import DFlashDraftModel, generate_blocks
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
from dflash.model.step_dflash import CompiledPair
from dflash.training import Batch, DrafterLoss, Example, FrozenTarget, build_optimizers, collate, sample_anchors


# The keywords of `generate_blocks` for each of ours.
EAGERLY: dict[str, Any] = {**EAGER, "temperature": 0.0}
COMPILED: dict[str, Any] = {**EAGERLY, "compile": True}
OPTIONS: dict[str, dict[str, Any]] = {
    "eager": EAGERLY,
    "compiled": COMPILED,
    "tree": {**COMPILED, "draft_tree": 64},
    "adaptive": {**COMPILED, "adaptive": True},
    "useless": {**COMPILED, "adaptive": True},
    "sampled": {**COMPILED, "do_sample": True, "temperature": 1.0, "top_p": 0.95, "top_k": 20},
}
# Their steps are of several widths.
OF_MANY_WIDTHS = ("adaptive", "useless")

# A training step: documents of a batch, tokens of each, of which the first are a prompt, blocks in each; and timed steps.
TRAINING = {"documents": 4, "tokens": 2048, "prompt": 256, "anchors": 128, "steps": 6}
SMOKE_TRAINING = {"documents": 2, "tokens": 64, "prompt": 16, "anchors": 4, "steps": 2}
WARM_UP = 2  # steps that are not timed


class GpuBench:
    """Measures rows. Options are `is_smoke` (on the CPU, in fp32, without torch's compiler), the script's `tau`, and `steps`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.is_smoke = bool(options["is_smoke"])
        self.tau, self.num_steps = float(options["tau"]), int(options["steps"])
        self.device, self.dtype = torch.device("cuda"), torch.bfloat16
        if self.is_smoke:
            from torch import _dynamo

            _dynamo.config.disable = True  # on a CPU the compiler takes minutes
            self.device, self.dtype = torch.device("cpu"), torch.float32
            torch.set_num_threads(1)
        self.watch = GraphWatch.installed()
        self.facts = {
            **versions(),
            "cuda": None if self.is_smoke else torch.version.cuda,
            "cpu_count": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": "cpu" if self.is_smoke else torch.cuda.get_device_name(),
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    @cache  # noqa: B019
    def pair(self, shape: str) -> tuple[Any, Any, Any]:
        """The target of a shape, its scripted drafter, and one that is never right; built when they are first asked for."""
        models = scripted_pair(shape, self.tau, self.dtype, self.device)
        # As training leaves them: what is compiled looks at this, and would be compiled again after training rows.
        target, drafter = (model.requires_grad_(False) for model in models)
        return target, drafter, useless(drafter)

    def measure(self, row: dict[str, Any]) -> dict[str, Any]:
        """The figures of a row."""
        free()
        target, drafter, twin = self.pair(row["shape"])
        if row["kind"] == "floor":
            return {
                "copy_gb_per_second": copy_bandwidth(self.device, 2**20 if self.is_smoke else 2**32) / 1e9,
                "target_parameters": target.num_parameters(),
                "drafter_parameters": drafter.num_parameters(),
                "block_size": drafter.config.block_size,
                "attention": target.config._attn_implementation,
                "step_bytes_without_keys": step_bytes(target, drafter, 0, 1),
            }
        memory = PeakMemory(not self.is_smoke)
        memory.reset()
        held = memory.read()
        if row["kind"] == "training":
            size = SMOKE_TRAINING if self.is_smoke else TRAINING
            figures = time_training(target, copy.deepcopy(drafter.config), row["way"], size)
        else:
            drafter = twin if row["way"] == "useless" else drafter
            figures = self._decoding(target, drafter, row["way"], row["context"], row["batch"])
        peak = {"memory_before_gb": held / 1e9, "peak_memory_gb": memory.read() / 1e9, "memory_kind": memory.kind}
        return {**figures, **peak}

    def recover(self) -> None:
        """Frees what a failed row has left; raises where the device is of no more use."""
        free()
        if torch.zeros(1, device=self.device).add(1).item() != 1.0:
            raise RuntimeError("The device computes nonsense after it.")

    def _decoding(self, target: Any, drafter: Any, way: str, context: int, batch: int) -> dict[str, Any]:
        prompt_ids = scripted_prompt(target, context, batch)
        read = partial(self._read, target, drafter, way, prompt_ids)
        warm_up, *_ = self._watched(read)
        measured, marks, token_ids = self._watched(read)
        expected = scripted_continuation(target, prompt_ids, max(map(len, token_ids))).tolist()
        return {
            **step_figures(marks, batch, by_mean=way in OF_MANY_WIDTHS),
            "is_right": all(text == right[: len(text)] for text, right in zip(token_ids, expected, strict=True)),
            "step_bytes": step_bytes(target, None if way in ("generate", "static") else drafter, context, batch),
            "not_compiled_because": self._why_not_compiled(target, drafter, way),
            **measured,
            "warm_up": warm_up,
        }

    def _watched(self, read: Any) -> tuple[dict[str, Any], StepMarks, list[list[int]]]:
        """What reading a text compiled and recorded, its marks, and the text."""
        before, known = self.watch.counts(), self.watch.compiled()
        marks, token_ids = StepMarks(), list[list[int]]()
        seconds = seconds_of(lambda: token_ids.extend(read(marks)))
        counts = self.watch.counts().since(before)
        return {**counts, "reasons": self.watch.reasons(known), "seconds_of_text": seconds}, marks, token_ids

    def _read(
        self, target: Any, drafter: Any, way: str, prompt_ids: torch.Tensor, marks: StepMarks
    ) -> list[list[int]]:
        """One text, step by step."""
        if way in OPTIONS:
            num_steps = self.num_steps * (5 if way in OF_MANY_WIDTHS else 1)  # widths become a habit first
            new_tokens = drafter.config.block_size * (2 + num_steps)  # no text ends before
            blocks = generate_blocks(drafter, target, prompt_ids, max_new_tokens=new_tokens, **OPTIONS[way])
            return read_blocks(blocks, marks, len(prompt_ids), num_steps)
        options: dict[str, Any] = {"cache_implementation": "static"} if way == "static" else {}
        if way == "native":
            if not HAS_NATIVE:
                raise ValueError(
                    f"transformers {transformers.__version__} has no native dflash: it came with 5.15, install a newer one."
                )
            options = {"assistant_model": drafter, "speculation_type": "dflash"}
        # Every context and batch of every shape is one more compilation of the same function of transformers.
        with torch._dynamo.config.patch(recompile_limit=64) if way == "static" else nullcontext():
            length = {"max_new_tokens": 2 + self.num_steps}
            sequences = target.generate(prompt_ids, streamer=marks, **length, **GREEDY, **options)
        return sequences[:, prompt_ids.shape[1] :].tolist()

    def _why_not_compiled(self, target: Any, drafter: Any, way: str) -> str | None:
        """Of a way that is to be compiled: why it was not."""
        if way in ("generate", "native", "eager"):
            return None
        if self.is_smoke and self.watch.counts().compilations == 0:
            return "--smoke leaves torch's compiler out"
        if way == "static":
            is_compiled = hasattr(target, "_compiled_call")
            return None if is_compiled else "transformers compiles a static cache's forward on GPUs alone"
        return CompiledPair.of(target, drafter).reason


def free() -> None:
    """Gives back what nothing holds."""
    gc.collect()
    torch.cuda.empty_cache()


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
    cached = 0  # of one token, in all layers
    for model in models:
        config = model.config
        cached += 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    return sum(weight.numel() * weight.element_size() for weight in weights) + batch * context * cached


def random_batch(size: dict[str, int], vocab_size: int) -> Batch:
    """Documents of random tokens, all of one length."""
    noise = torch.Generator(device="cpu").manual_seed(2)
    shape = size["documents"], size["tokens"]
    ids = torch.randint(vocab_size, shape, generator=noise, device="cpu").tolist()
    mask = [0] * size["prompt"] + [1] * (size["tokens"] - size["prompt"])
    anchors = [sample_anchors(mask, size["anchors"], seed=0, epoch=0, index=index) for index in range(len(ids))]
    return collate([Example(document, mask) for document in ids], anchors, pad_token_id=0)


def time_training(target: Any, config: Any, attention: str, size: dict[str, int]) -> dict[str, Any]:
    """Tokens per second of forward, backward and optimiser, the median of several steps.

    The drafter begins with random weights in fp32; bf16 computes where the target has it. `attention` is the one that the
    drafter is trained by, or "library": the one that the library chooses.
    """
    device = target.device
    drafter = DFlashDraftModel(config).to(device, torch.float32).train()
    loss_of: Any = DrafterLoss(FrozenTarget(target, drafter))
    if attention != "library":
        loss_of.attention = lambda device: attention
    (optimizer,) = build_optimizers(drafter, learning_rate=1e-4, weight_decay=0.0, muon_learning_rate=None)
    batch = random_batch(size, target.config.vocab_size).to(device)
    losses = []

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            loss_sum, _ = loss_of(batch)
        loss_sum.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_sum.item())  # waits for all of it

    first, *others = [1e3 * seconds_of(step) for _ in range(WARM_UP + size["steps"])]
    times = others[WARM_UP - 1 :]
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"A loss is not finite: {losses}.")
    return {
        "attention": loss_of.attention(device),
        "batch_size": size,
        "drafter_dtype": "float32",
        "ms_per_step": median(times),
        "ms_per_step_fastest": min(times),
        "ms_per_step_slowest": max(times),
        "ms_first_step": first,
        "tokens_per_second": 1e3 * size["documents"] * size["tokens"] / median(times),
    }
