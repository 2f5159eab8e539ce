"""How the cost of a step grows with the work: context, generated length, batch, width, tree budget. Simulated pairs.

    python benchmarks/sweep.py --shape small --output benchmarks/results/sweep_small_cpu.json
    python benchmarks/sweep.py --shape small --axes memory --output benchmarks/results/memory_small_cpu.json

Random weights of a published shape (`--shape`) and a script that says how often proposals are right: a step's
milliseconds are measured, tau is the script's and is only stated. Plain decoding and ours take turns at every point.

The axis `memory` runs each method in a process of its own: what is resident at the peak of the prompt's forward, less
what is resident behind loading and a short warm-up (on CUDA: allocated by tensors).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from records import save
from rich.console import Console
from rich.progress import track
from rich.table import Table

from dflash.evaluation import plots
from dflash.evaluation.harness import GREEDY, PLAIN, VARIANTS
from dflash.evaluation.memory import PeakMemory
from dflash.evaluation.scripted import SHAPES, scripted_pair, scripted_prompt
from dflash.evaluation.sweep import EAGERLY, measure_point
from dflash.evaluation.timing import timed_blocks, timed_generate


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
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)  # what a child process measures
    args = parser.parse_args()
    if args.points is not None and len(args.axes) != 1:
        parser.error(f"--points {args.points} are values on one axis: name it with --axes, alone.")
    return args


def sweep(target: Any, drafter: Any, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of every axis but memory."""
    todo = [(axis, value) for axis in args.axes if axis != "memory" for value in args.points or AXES[axis]]
    rows = []
    for axis, value in track(todo, "Sweeping", console=Console(stderr=True), auto_refresh=False):
        point = {"context": args.context, "new_tokens": args.new_tokens, KEYWORDS[axis]: value}
        measured = measure_point(target, drafter, **point, methods=args.methods, repeats=args.repeats)
        rows += [{"axis": axis, "value": value, **row} for row in measured]
    return rows


def memory_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The peak of each method's prefill, each in a process of its own."""
    rows = []
    for context in args.points or AXES["memory"]:
        peaks = {}
        for method in (PLAIN, *args.methods):
            asked = ["--shape", args.shape, "--dtype", args.dtype, "--device", args.device, "--context", str(context)]
            asked += ["--threads", str(args.threads), "--memory-of", method]
            if args.prefill_chunk_size is not None:
                asked += ["--prefill-chunk-size", str(args.prefill_chunk_size)]
            child = subprocess.run([sys.executable, __file__, *asked], stdout=subprocess.PIPE, text=True, check=True)
            peaks[method] = json.loads(child.stdout.splitlines()[-1])
        for method, said in peaks.items():
            ratio = said["peak_bytes"] / peaks[PLAIN]["peak_bytes"]
            rows.append(
                {
                    "axis": "memory",
                    "value": context,
                    "method": method,
                    "is_simulated": True,
                    "context_tokens": context,
                    **said,
                    "over_plain": round(ratio, 4),
                }
            )
    return rows


def prefill_memory(args: argparse.Namespace) -> dict[str, Any]:
    """In a child: bytes at the peak of one prompt's forward, beyond what stands behind loading."""
    target, drafter = scripted_pair(args.shape, args.tau, getattr(torch, args.dtype), args.device)
    chunk = {} if args.prefill_chunk_size is None else {"prefill_chunk_size": args.prefill_chunk_size}

    def run(context: int) -> None:
        prompt = scripted_prompt(target, context)
        if args.memory_of == PLAIN:
            timed_generate(target, prompt, max_new_tokens=2, **GREEDY, **chunk)
        else:
            options = {**VARIANTS[args.memory_of], **chunk}
            timed_blocks(drafter, target, prompt, max_new_tokens=2, temperature=0.0, **options)

    run(32)  # libraries load, threads start
    memory = PeakMemory(on_cuda=target.device.type == "cuda")
    memory.reset()
    before = memory.read()
    run(args.context)
    taps = len(drafter.config.target_layer_ids) * target.config.hidden_size * target.dtype.itemsize
    return {
        "peak_bytes": memory.read() - before,
        "baseline_bytes": before,
        "counted": memory.kind,
        "taps_bytes": 0 if args.memory_of == PLAIN else args.context * taps,
    }


def show(rows: list[dict[str, Any]]) -> None:
    console = Console(highlight=False)
    steps = [row for row in rows if row["axis"] != "memory"]
    if steps:
        table = Table(box=None, padding=(0, 1, 0, 0))
        for name in (
            "axis",
            "value",
            "method",
            "same",
            "ms/step",
            "stated tau",
            "ms/token",
            "speed-up",
            "tau to match",
        ):
            table.add_column(name, no_wrap=True)
        for row in steps:
            figures = (row["ms_per_step"], row["stated_tau"], row["ms_per_token"], row["speedup_at_stated_tau"])
            cells = ["" if value is None else f"{value:.2f}" for value in (*figures, row["tau_to_match_plain"])]
            table.add_row(
                row["axis"], str(row["value"]), row["method"], "yes" if row["is_identical"] else "NO", *cells
            )
        console.print(table)
    for row in rows:
        if row["axis"] == "memory":
            console.print(
                f"prefill of {row['value']} tokens, {row['method']}: {row['peak_bytes'] / 2**20:.1f} MiB ({row['counted']}), "
                f"{row['over_plain']:.3f} of plain's; features of the tapped layers {row['taps_bytes'] / 2**20:.1f} MiB"
            )


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.memory_of is not None:
        print(json.dumps(prefill_memory(args)))
        return
    rows = memory_rows(args) if "memory" in args.axes else []
    target, drafter = scripted_pair(args.shape, args.tau, getattr(torch, args.dtype), args.device)
    rows = sweep(target, drafter, args) + rows
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
    save(args.output, target, drafter, kind="sweep", decoding=decoding, summary=rows)
    grown = [row for row in rows if row["axis"] == "context"]
    if grown:
        note = f"simulated: random weights of {args.shape}, tau {args.tau:g} stated; {args.device}, {args.dtype}"
        plots.save(plots.growth(grown, note), args.output.with_name(f"{args.output.stem}_context.png"))


if __name__ == "__main__":
    main()
