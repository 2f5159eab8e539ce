"""How the cost of a step grows with the work: context, generated length, batch, width, tree budget. Simulated pairs.

    python benchmarks/sweep.py --shape small --output benchmarks/results/sweep_small_cpu.json
    python benchmarks/sweep.py --shape qwen3-0.6b --axes memory --output benchmarks/results/memory_qwen3_0_6b_cpu.json

Random weights of a published shape (`--shape`) and a script that says how often proposals are right: a step's
milliseconds are measured, tau is the script's and is only stated. Plain decoding and ours take turns at every point.

The axis `memory` counts what the allocator gives out at once for a prompt of so many tokens, beyond what stood before.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from dflash.cli.options import show_table
from dflash.common.provenance import environment, record, write_result
from dflash.evaluation import (
    EAGERLY,
    SHAPES,
    VARIANTS,
    any_table,
    measure_point,
    measure_prefill,
    save_plots,
    scripted_pair,
)


AXES: dict[str, list[int]] = {
    "context": [128, 256, 512, 1024, 2048, 4096, 8192],
    "length": [32, 128, 512],
    "batch": [1, 2, 4, 8],
    "width": [2, 4, 8, 16],
    "budget": [8, 16, 32, 64],
    "memory": [8192],
}
KEYWORDS = {
    "context": "context", "length": "new_tokens", "batch": "batch_size", "width": "width", "budget": "budget",
}  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--tau", type=float, default=6.5, help="mean acceptance length of the script")
    parser.add_argument(
        "--axes", nargs="+", choices=list(AXES), default=["context", "length", "batch", "width", "budget"]
    )
    parser.add_argument("--points", type=int, nargs="+", help="values on the axis, if it is a single one")
    parser.add_argument("--methods", nargs="+", choices=list(VARIANTS), default=[EAGERLY])
    parser.add_argument("--context", type=int, default=256, help="where it is not swept")
    parser.add_argument("--new-tokens", type=int, default=64, help="where it is not swept")
    parser.add_argument("--prefill-chunk-size", type=int, help="for the axis memory: columns of the prompt at once")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--output", type=Path, help="JSON file to write; plots stand beside it")
    args = parser.parse_args()
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
            point = {"context": args.context, "new_tokens": args.new_tokens, KEYWORDS[axis]: value}
            measured = measure_point(target, drafter, **point, methods=args.methods, repeats=args.repeats)
        rows += [{"axis": axis, "value": value, **row} for row in measured]
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    steps = [
        {
            **{name: row[name] for name in ("axis", "value", "method")},
            "same": "yes" if row["is_identical"] else "NO",
            "ms/step": row["ms_per_step"],
            "stated tau": row["stated_tau"],
            "ms/token": row["ms_per_token"],
            "speed-up": row["speedup_at_stated_tau"],
            "tau to match": row["tau_to_match_plain"],
        }
        for row in rows
        if row["axis"] != "memory"
    ]
    prefills = [
        {
            "prefill of": row["value"],
            "method": row["method"],
            "allocated, MiB": row["allocated_bytes"] / 2**20,
            "over plain": row["over_plain"],
            "tapped features, MiB": row["taps_bytes"] / 2**20,
        }
        for row in rows
        if row["axis"] == "memory"
    ]
    for shown in filter(None, (steps, prefills)):
        show_table(any_table(shown))


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    target, drafter = scripted_pair(args.shape, args.tau, getattr(torch, args.dtype), args.device)
    rows = sweep(target, drafter, args)
    show(rows)
    if args.output is None:
        return
    decoding = {
        "target": f"random weights, shape {args.shape}",
        "drafter": f"random weights, shape {args.shape}, scripted",
        "temperature": 0.0,
        "shape": args.shape,
        "is_simulated": True,
        "stated_tau": args.tau,
        "repeats": args.repeats,
        "prefill_chunk_size": args.prefill_chunk_size,
    }
    result = record("sweep", environment(target, drafter), decoding=decoding, summary=rows)
    write_result(args.output, result)
    save_plots(result, args.output)


if __name__ == "__main__":
    main()
