"""The figures that need a GPU, in ten minutes: whether texts are right, steps of all ways to decode, their floor, training.

    benchmarks/gpu/run.sh                              # one GPU, bf16, the shape of Qwen3-8B
    benchmarks/gpu/run.sh --list                       # the rows, in their order
    benchmarks/gpu/run.sh --rows 'qwen3-8b/512x1/*'    # some of them
    benchmarks/gpu/run.sh --smoke                      # the same rows on the CPU with a tiny shape; its figures mean nothing
    benchmarks/gpu/run.sh --pack                       # the packages for a machine that has torch alone: see run.sh

Texts of the embedded pair are compared with the target's first. Then weights are random and acceptance is simulated:
milliseconds are measured, and a script decides how many tokens a step gives. A row that fails, hangs or ends its process loses
only itself; rows for which the time does not suffice are noted as skipped. The file is written after each row.
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measure import TAU, GpuBench
from reporting import tables_of
from rows import all_rows, chosen, derived, line
from runner import FAILED, MEASURED, SKIPPED, Row, run_rows

from dflash.cli.terminal import show_table
from dflash.common.provenance import record, write_result


RESULTS = Path(__file__).parent.parent / "results"
SHAPES = ("qwen3-8b", "qwen3-4b", "qwen3-0.6b")
SMOKE: dict[str, Any] = {"shape": "smoke", "contexts": (16, 24, 32), "batch": 2}
SECONDS = 570.0  # of the ten minutes; the rest is for starting and for what comes after


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default=SHAPES[0], choices=SHAPES)
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="only these rows; * stands for anything")
    parser.add_argument("--list", action="store_true", help="print the rows, with their limits in seconds")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all rows together")
    parser.add_argument("--output", type=Path, help="JSON file to write; default: gpu.json in $OUT, if set")
    parser.add_argument("--smoke", action="store_true", help="on the CPU, a tiny shape")
    args = parser.parse_args(words)
    if args.seconds < 1:
        parser.error(f"--seconds {args.seconds:g} is too few: give 1 at least.")
    try:
        args.rows = chosen(all_rows(**SMOKE) if args.smoke else all_rows(args.shape), args.rows)
    except ValueError as error:
        parser.error(str(error))
    args.output = args.output or default_output(args.smoke)
    if not (args.list or args.smoke or torch.cuda.is_available()):
        parser.error("There is no CUDA device: run this where there is one, or with --smoke.")
    return args


def default_output(is_smoke: bool) -> Path | None:
    """Where figures are written by default; those of a smoke test nowhere, but to $OUT."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"]) / "gpu.json"
    return None if is_smoke else RESULTS / "gpu_qwen3.json"


def main() -> None:
    began = time.monotonic()
    args = arguments()
    if args.list:
        print("\n".join(f"{row['name']:40} {row['limit']:4.0f} s" for row in args.rows))
        return
    # So that the process that measures is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    meaning = "smoke, means nothing; " if args.smoke else ""
    label = f"{meaning}simulated acceptance: random weights, and the script's tau is {TAU:g}"
    setting = {
        "label": label,
        "is_simulated": True,
        "stated_tau": TAU,
        "baseline": "target.generate, greedy",
        "step": "median, from the tokens of one step at the host to those of the next; no prompt's length comes twice",
    }
    result: dict[str, Any] = {}
    told: set[str] = set()

    def report(rows: Sequence[Row], facts: dict[str, Any]) -> None:
        """Prints each row once that it has had its turn, and writes the file anew."""
        for row in rows:
            if row["status"] != SKIPPED and row["name"] not in told:
                told.add(row["name"])
                print(line(row), flush=True)
        result.update(record("gpu", facts, decoding=setting, summary=derived(rows)))
        if args.output is not None:
            write_result(args.output, result)

    options = {"is_smoke": args.smoke, "shape": SMOKE["shape"] if args.smoke else args.shape}
    run_rows(args.rows, GpuBench, options, began + args.seconds, report)
    print(label)
    for table in tables_of(result):
        show_table(table)
    statuses = [row["status"] for row in args.rows]
    print(f"{statuses.count(MEASURED)} of {len(statuses)} rows measured, {time.monotonic() - began:.0f} s")
    is_wrong = any(row["kind"] == "correctness" and row["status"] == FAILED for row in args.rows)
    # A smoke test must have measured everything that can be.
    is_incomplete = args.smoke and (FAILED in statuses or SKIPPED in statuses)
    sys.exit(MEASURED not in statuses or is_wrong or is_incomplete)


if __name__ == "__main__":
    main()
