"""What a published shape costs on a CPU: plain decoding, the native loop and ours, and forwards of the target.

    python benchmarks/cpu_shape.py --output benchmarks/results/shape_qwen3_0_6b_cpu.json

Random weights of a shape of `SHAPES`, and a script that says how often proposals are right: milliseconds are measured, tau is only
stated. Ways of decoding take turns, in the first of `--dtypes`. Forwards of one column and of a block take turns, in each of them.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from typing import Any

import torch
from measuring import argument_parser, finish, parsed, simulated, turns
from rich.console import Console
from simulated_pairs import EAGERLY, SHAPES, measure_point, scripted_pair, scripted_prompt

from dflash.common.stopwatch import seconds_of
from dflash.evaluation import HAS_NATIVE, NATIVE
from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.targets_dflash import Target


METHODS = (*([NATIVE] if HAS_NATIVE else []), EAGERLY, "dflash compiled")
WARM_UP = 2  # forwards of each width that are not counted


@torch.no_grad()
def measure_forwards(target: Any, drafter: Any, context: int, repeats: int) -> dict[str, float]:
    """Milliseconds of the target's forward after `context` tokens, by its number of columns: medians."""
    block_size = drafter.config.block_size
    forwards, ids = Target(target, drafter.config.target_layer_ids), scripted_prompt(target, context)
    cache = PreallocatedCache(forwards.num_layers, context + block_size)
    forwards.read(ids, cache, [ids.shape[1]])
    times: dict[int, list[float]] = {1: [], block_size: []}

    def forward(width: int) -> None:
        forwards.verify(ids[:, -1:].expand(-1, width), cache)
        cache.rollback([width])

    for width in turns(list(times), repeats + WARM_UP):
        times[width].append(1e3 * seconds_of(partial(forward, width)))
    return {name_of(width): round(median(taken[WARM_UP:]), 4) for width, taken in times.items()}


def name_of(width: int) -> str:
    return "1 column" if width == 1 else f"{width} columns"


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--tau", type=float, default=6.5, help="mean acceptance length of the script")
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float32"], default=["bfloat16", "float32"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    args = parsed(parser)
    console = Console(stderr=True)
    forwards: list[dict[str, Any]] = []
    summary: list[dict[str, Any]] = []
    measured_pair: Any = None
    for dtype in args.dtypes:
        console.print(f"{args.shape} in {dtype}")
        pair = scripted_pair(args.shape, args.tau, getattr(torch, dtype))
        forwards.append({"dtype": dtype, "ms_per_forward": measure_forwards(*pair, args.context, 5 * args.repeats)})
        if not summary:
            point = {"context": args.context, "new_tokens": args.new_tokens, "repeats": args.repeats}
            summary, measured_pair = measure_point(*pair, methods=args.methods, **point), pair
    decoding = {**simulated(args.shape, args.tau, args.repeats), "max_new_tokens": args.new_tokens}
    finish(args.output, "shape", measured_pair, decoding=decoding, forwards=forwards, summary=summary)


if __name__ == "__main__":
    main()
