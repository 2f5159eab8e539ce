"""The rows of `bench.py`, measured. Runs in a process of its own, which holds the models."""

import copy
import gc
import math
import os
import subprocess
import time
from functools import cached_property
from itertools import pairwise
from shutil import which
from statistics import median, quantiles
from typing import Any

import torch
from correctness import GREEDILY, MODES, NOTHING_LOOKED_UP, SAMPLED, Checks
from simulated_pairs import scripted_continuation, scripted_pair, scripted_prompt, useless

from dflash import DFlashDraftModel
from dflash.common.provenance import machine, versions
from dflash.common.stopwatch import seconds_of
from dflash.engine import fallback_reason
from dflash.evaluation import (
    GREEDY,
    HAS_NATIVE,
    PeakMemory,
    TimedRun,
    timed_blocks,
    timed_generate,
)
from dflash.training import DrafterLoss, Example, FrozenTarget, build_optimizers, collate, sample_anchors


# The keywords of `generate_blocks` for each way of ours.
EAGERLY: dict[str, Any] = {**GREEDILY, **MODES["eager"], **NOTHING_LOOKED_UP}
OPTIONS: dict[str, dict[str, Any]] = {
    "eager": EAGERLY,
    "default": GREEDILY,
    "sampled": {**EAGERLY, **SAMPLED},
    "tree": {**EAGERLY, "draft_tree": 63},
    "adaptive": {**EAGERLY, "adaptive": True},
    "useless": {**EAGERLY, "adaptive": True},
    "recorded": {**EAGERLY, **MODES["recorded"]},
    "compiled": {**EAGERLY, **MODES["compiled"]},
}

TAU = 6.5  # mean acceptance length of the script
GAINING_LITTLE = ("tree", "useless")  # ways whose steps give about one token
STEPS, SMOKE_STEPS = 40, 5  # of a text

# A training step: documents of a batch, tokens of each, of which the first are a prompt, and blocks in each.
TRAINING = {"documents": 4, "tokens": 2048, "prompt": 256, "anchors": 128}
SMOKE_TRAINING = {"documents": 2, "tokens": 64, "prompt": 16, "anchors": 4}
TRAINING_STEPS, WARM_UP = 8, 2


class GpuBench:
    """Measures rows. Options: `is_smoke` (the CPU, fp32, no compiler), and `shape`."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.is_smoke = bool(options["is_smoke"])
        self.shape = str(options["shape"])
        self.num_steps = SMOKE_STEPS if self.is_smoke else STEPS
        self.num_texts = 0
        self.device, self.dtype = torch.device("cuda"), torch.bfloat16
        if self.is_smoke:
            torch.compiler.set_stance(
                "force_eager"
            )  # on a CPU the compiler takes minutes; compiled functions run as they are
            self.device, self.dtype = torch.device("cpu"), torch.float32
            torch.set_num_threads(1)
        self.facts = {**facts_of(self.device), "dtype": str(self.dtype).removeprefix("torch.")}
        print(", ".join(f"{name} {fact}" for name, fact in self.facts.items()), flush=True)

    @cached_property
    def checks(self) -> Checks:
        """The checks of correctness, with their models."""
        return Checks(self.device, is_compiler_left_out=self.is_smoke)

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """The target and its scripted drafter."""
        models = scripted_pair(self.shape, TAU, self.dtype, self.device)
        return models[0].requires_grad_(False), models[1].requires_grad_(False)

    def measure(self, row: dict[str, Any]) -> dict[str, Any]:
        """The figures of a row."""
        free()
        if row["kind"] == "correctness":
            return self.checks.check(row["check"])
        target, drafter = self.pair
        memory = PeakMemory(not self.is_smoke)
        memory.reset()
        if row["kind"] == "training":
            size = SMOKE_TRAINING if self.is_smoke else TRAINING
            figures = time_training(target, copy.deepcopy(drafter.config), row["way"], size)
        else:
            figures = self._decoding(target, drafter, row["way"], row["context"], row["batch"])
        return {**figures, "peak_memory_gb": memory.read() / 1e9, "memory_kind": memory.kind}

    def recover(self) -> None:
        """Frees what a failed row has left; raises where the device is of no more use."""
        free()
        if torch.zeros(1, device=self.device).add(1).item() != 1.0:
            raise RuntimeError("The device computes nonsense after it.")

    def _decoding(self, target: Any, drafter: Any, way: str, context: int, batch: int) -> dict[str, Any]:
        """The figures of a second text, and the step of the first: each prompt has a length that none had before."""
        drafter = useless(drafter) if way == "useless" else drafter
        first = self._text(target, drafter, way, context, batch)
        return {
            **self._text(target, drafter, way, context, batch),
            "ms_per_step_of_first_text": first["ms_per_step"],
            "compilations_of_first_text": first["compilations"],
            "fallback": self._fallback(target, drafter, way),
        }

    def _text(self, target: Any, drafter: Any, way: str, context: int, batch: int) -> dict[str, Any]:
        self.num_texts += 1
        prompt_ids = scripted_prompt(target, context + self.num_texts, batch)
        marks: list[float] = []  # the end of each step

        def mark(tokens: Any) -> None:
            if getattr(tokens, "sequence", 0) == 0:  # of a batch, a block of each sequence is one step
                marks.append(time.perf_counter())

        if way in OPTIONS:
            new_tokens = int(self.num_steps * (1 if way in GAINING_LITTLE else TAU))
            options = OPTIONS[way] | {"max_new_tokens": new_tokens}
            run = timed_blocks(drafter, target, prompt_ids, mark, **options)
            tokens_per_step = run.tau_with_lookup
        else:
            new_tokens = self.num_steps
            run = self._generate(target, drafter, way, prompt_ids, mark)
            tokens_per_step = (len(run.token_ids) / batch - 1) / (run.num_forwards - 1)
        expected = scripted_continuation(target, prompt_ids, new_tokens).flatten().tolist()
        times = [1e3 * (after - before) for before, after in pairwise(marks[1:])]  # the first step reads the prompt
        deciles = quantiles(times, n=10, method="inclusive")
        return {
            "ms_per_step": median(times),
            "ms_per_step_p10": deciles[0],
            "ms_per_step_p90": deciles[-1],
            "steps": len(times),
            "tokens_per_step": tokens_per_step,
            "ms_per_token": median(times) / tokens_per_step,
            "ms_to_first_token": 1e3 * run.seconds_to_first_token,
            "is_right": run.token_ids == expected,
            "compilations": run.num_compilations,
            "prompt_tokens": prompt_ids.shape[1],
        }

    def _generate(self, target: Any, drafter: Any, way: str, prompt_ids: torch.Tensor, mark: Any) -> TimedRun:
        """A text of `target.generate`: plain, native dflash, or with a static cache, whose forward transformers compiles."""
        options: dict[str, Any] = {"max_new_tokens": self.num_steps, **GREEDY}
        if way == "static":
            options["cache_implementation"] = "static"
        if way == "native":
            if not HAS_NATIVE:
                raise ValueError("This transformers has no native dflash: it came with 5.15, install a newer one.")
            options |= {"assistant_model": drafter, "speculation_type": "dflash"}
        return timed_generate(target, prompt_ids, mark, **options)

    def _fallback(self, target: Any, drafter: Any, way: str) -> str | None:
        """Of a way that is to be recorded or compiled: why it was not."""
        if way not in ("default", "recorded", "compiled", "static"):
            return None
        if way in ("compiled", "static") and self.is_smoke:
            return "--smoke leaves torch's compiler out"
        return None if way == "static" else fallback_reason(drafter, target)


def facts_of(device: torch.device) -> dict[str, Any]:
    """Versions, driver and hardware, and the variable that decides which attention kernels a GPU runs."""
    facts = {**versions(), **machine(device)}
    facts["TORCH_CUDNN_SDPA_DEPRIORITIZED"] = os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["memory_gb"] = properties.total_memory / 1e9
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()
    if which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        facts["driver"] = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return facts


def free() -> None:
    """Gives back what nothing holds."""
    gc.collect()
    torch.cuda.empty_cache()


def time_training(target: Any, config: Any, attention: str, size: dict[str, int]) -> dict[str, Any]:
    """Tokens per second of forward, backward and optimiser, the median of several steps over random documents.

    The drafter begins with random weights in fp32; bf16 computes where the target has it. `attention` is the one that the
    drafter is trained by, or "library": the one that the library chooses.
    """
    device = target.device
    drafter = DFlashDraftModel(config).to(device, torch.float32).train()
    loss_of: Any = DrafterLoss(FrozenTarget(target, drafter))
    if attention != "library":
        loss_of.attention = lambda device: attention
    (optimizer,) = build_optimizers(drafter, learning_rate=1e-4, weight_decay=0.0, muon_learning_rate=None)
    noise = torch.Generator().manual_seed(2)
    documents = torch.randint(target.config.vocab_size, (size["documents"], size["tokens"]), generator=noise).tolist()
    mask = [0] * size["prompt"] + [1] * (size["tokens"] - size["prompt"])
    anchors = [sample_anchors(mask, size["anchors"], seed=0, epoch=0, index=index) for index in range(len(documents))]
    batch = collate([Example(document, mask) for document in documents], anchors, pad_token_id=0).to(device)
    losses = []

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=target.dtype == torch.bfloat16):
            loss_sum, _ = loss_of(batch)
        loss_sum.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss_sum.item())  # waits for all of it

    times = [1e3 * seconds_of(step) for _ in range(TRAINING_STEPS)][WARM_UP:]
    if not all(map(math.isfinite, losses)):
        raise RuntimeError(f"A loss is not finite: {losses}.")
    tokens_per_second = 1e3 * size["documents"] * size["tokens"] / median(times)
    figures = {"ms_per_step": median(times), "tokens_per_second": tokens_per_second}
    return {"attention": loss_of.attention(device), "size": size, **figures}
