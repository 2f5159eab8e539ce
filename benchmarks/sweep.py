"""How the cost of a step grows with the work: context, generated length, batch, width, tree budget. Simulated pairs.

    python benchmarks/sweep.py --shape small --output benchmarks/results/sweep_small_cpu.json
    python benchmarks/sweep.py --shape qwen3-0.6b --axes memory --output benchmarks/results/memory_qwen3_0_6b_cpu.json

Random weights of a published shape (`--shape`) and a script that says how often proposals are right: a step's
milliseconds are measured; tau is the script's and is only stated. Plain decoding and ours take turns at every point.

The axis `memory` counts the bytes that the allocator holds for a prompt, by its length, beyond those it held before.
"""

import argparse
from typing import Any

import torch
from measuring import argument_parser, finish, parsed, simulated
from reporting import facts_of
from rich.console import Console
from rich.progress import track
from simulated_pairs import EAGERLY, SHAPES, measure_point, measure_prefill, scripted_pair

from dflash.evaluation import VARIANTS, canvas, results


AXES: dict[str, list[int]] = {
    "context": [128, 256, 512, 1024, 2048, 4096, 8192],
    "length": [32, 128, 512],
    "batch": [1, 2, 4, 8],
    "width": [2, 4, 8, 16],
    "budget": [8, 16, 32, 64],
    "memory": [8192],
}
KEYWORDS = {"length": "new_tokens", "batch": "batch_size"}  # of `measure_point`, where they are not the axis' name


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--tau", type=float, default=6.5, help="mean acceptance length of the script")
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=[axis for axis in AXES if axis != "memory"])
    parser.add_argument("--points", type=int, nargs="+", help="values on the axis, if it is a single one")
    parser.add_argument("--methods", nargs="+", choices=list(VARIANTS), default=[EAGERLY])
    parser.add_argument("--context", type=int, default=256, help="where it is not swept")
    parser.add_argument("--new-tokens", type=int, default=64, help="where it is not swept")
    parser.add_argument("--prefill-chunk-size", type=int, help="for the axis memory: tokens of the prompt at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parsed(parser)
    if args.points is not None and len(args.axes) != 1:
        parser.error(f"--points {args.points} are values on one axis: name it with --axes, alone.")
    return args


def sweep(target: Any, drafter: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every axis."""
    todo = [(axis, value) for axis in args.axes for value in args.points or AXES[axis]]
    rows = []
    for axis, value in track(todo, "Sweeping", console=Console(stderr=True), auto_refresh=False):
        if axis == "memory":
            measured = measure_prefill(target, drafter, value, args.methods, args.prefill_chunk_size)
        else:
            point = {"context": args.context, "new_tokens": args.new_tokens, KEYWORDS.get(axis, axis): value}
            measured = measure_point(target, drafter, **point, methods=args.methods, repeats=args.repeats)
        rows += [{"axis": axis, "value": value, **row} for row in measured]
    return rows


@canvas.themed
def growth(rows: list[dict[str, Any]], note: str, theme: canvas.Theme) -> Any:
    """Milliseconds per token as the context grows, a curve per method."""
    methods: dict[str, list[canvas.Point]] = {}
    for row in sorted(rows, key=lambda row: row["context_tokens"]):
        methods.setdefault(row["method"], []).append((row["context_tokens"], row["ms_per_token"]))
    colours = canvas.colours_of(list(methods), theme)
    labels = canvas.Labels("Time per token as the context grows", "context (tokens)", "time per token (ms)")
    curves = [(name, colours[name], points) for name, points in methods.items()]
    return canvas.curves(labels, curves, note, theme)


def main() -> None:
    args = arguments()
    target, drafter = scripted_pair(args.shape, args.tau, getattr(torch, args.dtype), args.device)
    more = {"prefill_chunk_size": args.prefill_chunk_size}
    decoding = {**simulated(args.shape, args.tau, args.repeats), **more}
    rows = sweep(target, drafter, args)
    result = finish(args.output, "sweep", (target, drafter), decoding=decoding, summary=rows)
    by_context = [row for row in rows if row["axis"] == "context"]
    if args.output is not None and by_context:
        path = args.output.with_name(f"{args.output.stem}_growth.png")
        path.write_bytes(canvas.png(growth(by_context, results.stated(facts_of(result)))))


if __name__ == "__main__":
    main()
