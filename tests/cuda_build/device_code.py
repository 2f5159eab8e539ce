"""What Inductor makes of a step for an NVIDIA H200, without one: launches, buffers over the vocabulary, bytes.

    PYTHONPATH=benchmarks python tests/cuda_build/device_code.py --output benchmarks/results/device_code_qwen3.json

The functions are those that a compiled pair runs (`whole_step`, `verify_lent`), with its options, its storage and models of
Qwen3's sizes, all as fake tensors on "cuda:0". Needs torch's CUDA build and no GPU. It counts; how long anything takes is for
`benchmarks/gpu.py` to say.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache, partial
from typing import Any

import torch
from dflash.model.step_dflash import CompiledPair, Pair, Shape, State, verify_lent, whole_step
from measuring import argument_parser, finish, parsed, versions
from no_gpu import BLOCK_SIZE, DEVICE, H200, compiling, counted, fake_module, need_cuda_build, random_pair
from rich.progress import track
from torch._subclasses.fake_tensor import FakeTensorMode

from dflash import default_target_layer_ids
from dflash.evaluation import SHAPES
from dflash.model.attention_dflash import step_attention
from dflash.model.cache_dflash import PreallocatedCache


VOCAB_SIZE = 151936

# Targets by name, and whether the head is the embedding.
TARGETS = {"Qwen3-8B": False, "Qwen3-0.6B": True}

# What `temperature=1, top_k=20, top_p=0.95` looks at: 20 candidates and room for ties.
NUM_CANDIDATES = 64


@dataclass(frozen=True)
class Case:
    """One function in one class of shapes."""

    what: str  # "step", "sampled step", "verify" or "tree"
    size: str = "Qwen3-8B"
    width: int = BLOCK_SIZE  # columns of the target
    capacity: int = 2048  # keys in the storage of each sequence
    num_sequences: int = 1

    @property
    def name(self) -> str:
        """What `--rows` goes by."""
        return f"{self.what} {self.size} {self.width}x{self.capacity}x{self.num_sequences}"


CASES = [
    *(
        Case(what, size, capacity=capacity)
        for size in TARGETS
        for capacity in (2048, 32768)
        for what in ("step", "sampled step")
    ),
    Case("step", num_sequences=8),
    Case("sampled step", num_sequences=8),
    *(Case("verify", width=width) for width in (1, 4, 8, 16)),
    Case("tree", width=64),
    Case("tree", width=64, capacity=32768),
]
SMOKE = [Case("step"), Case("sampled step"), Case("verify", width=1), Case("tree", width=64)]


class Bench:
    """A pair of one size as fake tensors on the GPU, of the published depths or of `depths`."""

    def __init__(self, size: str, depths: tuple[int, int] | None = None) -> None:
        shape = SHAPES[size.lower()]
        sizes: dict[str, Any] = {**shape.target, "dtype": torch.bfloat16}
        num_layers = sizes.pop("num_hidden_layers")
        taps = default_target_layer_ids(num_layers) if depths is None else [0]
        self.mode = FakeTensorMode()
        with torch.device("meta"):
            pair = random_pair(sizes, depths or (num_layers, shape.draft_layers), taps, TARGETS[size])
        self.target, self.drafter = (fake_module(self.mode, model.to(torch.bfloat16).eval()) for model in pair)
        self.num_features = len(taps) * sizes["hidden_size"]
        self.pair = Pair(self.target, self.drafter)
        with self.mode, torch.no_grad():  # as a compiled pair does before it compiles
            some_id = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
            self.target(input_ids=some_id, use_cache=False, output_hidden_states=True, logits_to_keep=1)

    def figures(self, case: Case) -> dict[str, Any]:
        """The counts of the case's code."""
        compiled = CompiledPair(self.target, self.drafter)
        compiled.is_wanted = True
        rows, taken, drawn, tree = case.num_sequences, Shape(BLOCK_SIZE, BLOCK_SIZE - 1), None, None
        with self.mode:
            ids = torch.zeros(rows, case.width, dtype=torch.long, device=DEVICE)
            starts = torch.zeros(rows, dtype=torch.long, device=DEVICE)
            features = torch.zeros(rows, BLOCK_SIZE, self.num_features, dtype=torch.bfloat16, device=DEVICE)
            state = State(ids[:, :1].clone(), starts, features, torch.zeros_like(starts))
            storages = [
                compiled.storage(self._cache(model, rows, case.capacity), case.capacity)
                for model in (self.target, self.drafter)
            ]
            if case.what == "sampled step":
                uniforms = torch.zeros(rows, BLOCK_SIZE, dtype=torch.float64, device=DEVICE)
                drawn = uniforms, torch.zeros(3, device=DEVICE)
                taken = Shape(BLOCK_SIZE, BLOCK_SIZE - 1, NUM_CANDIDATES)
            if case.what == "tree":
                ancestors = torch.zeros(case.width, case.width, dtype=torch.bool, device=DEVICE)
                tree = ancestors, torch.zeros(case.width, dtype=torch.long, device=DEVICE)
        with compiling() as codes, step_attention(self.target):
            if case.what.endswith("step"):
                models = self.target, self.drafter, self.pair.layout
                compiled.function(case, whole_step)(models, state, tuple(storages), taken, drawn, None)
            else:
                compiled.function(case, verify_lent)(self.target, self.pair.layout, ids, starts, storages[0], tree)
        return counted(codes, VOCAB_SIZE)

    def _cache(self, model: Any, rows: int, capacity: int) -> PreallocatedCache:
        """Storage as a compiled pair lends it, already allocated."""
        config = model.config
        cache = PreallocatedCache(config.num_hidden_layers, capacity, rows, rows)
        for layer in cache.layers:
            layer.lazy_initialization(
                torch.empty(rows, config.num_key_value_heads, 0, config.head_dim, dtype=torch.bfloat16, device=DEVICE)
            )
        return cache


def measured(cases: list[Case], depths: tuple[int, int] | None = None) -> Iterator[dict[str, Any]]:
    """Each case with its figures; a pair is made once per size."""
    bench = cache(partial(Bench, depths=depths))
    for case in cases:
        yield {**asdict(case), **bench(case.size).figures(case)}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--smoke", action="store_true", help="two layers of the target and one of the drafter")
    parser.add_argument("--rows", default="*", help="cases to run, by name: 'step Qwen3-8B 16x2048x1', with * and ?")
    args = parsed(parser)
    need_cuda_build()
    smoke = list(measured(SMOKE, (2, 1)))
    cases = [] if args.smoke else [case for case in CASES if fnmatch(case.name, args.rows)]
    rows = list(track(measured(cases), total=len(cases), description="cases"))
    facts = {**versions(), "code_for": H200.name, "dtype": "bfloat16"}
    finish(args.output, "device_code", facts, smoke=smoke, cases=rows)


if __name__ == "__main__":
    main()
