"""The figures that need a GPU, in ten minutes: steps of all ways to decode, their floor, and a step of training.

    benchmarks/gpu.sh                              # one GPU, bf16, the shapes of Qwen3-8B and then of Qwen3-0.6B
    benchmarks/gpu.sh --list                       # the rows, the most useful ones first
    benchmarks/gpu.sh --rows 'qwen3-8b/512x1/*'    # some of them
    benchmarks/gpu.sh --smoke                      # the same rows on the CPU with a tiny shape; its figures mean nothing
    benchmarks/gpu.sh --pack                       # the packages for a machine that has torch alone: see gpu.sh

Weights are random and acceptance is simulated: milliseconds are measured, and a script decides how many tokens a step gives. A
row that fails, hangs or ends its process loses only itself; rows for which the time does not suffice are noted as skipped. The
file is written after each row.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_rows import SMOKE, all_rows, chosen, derived, line
from gpu_runner import FAILED, MEASURED, SKIPPED, Row, run_rows


RESULTS = Path(__file__).parent / "results"
SECONDS = 570.0  # of the ten minutes; the rest is for starting and for what comes after


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="only these rows; * stands for anything")
    parser.add_argument("--list", action="store_true", help="print the rows, with their limits in seconds")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all rows together")
    parser.add_argument("--tau", type=float, default=6.5, help="mean acceptance length of the script")
    parser.add_argument("--steps", type=int, help="of a text; default: 40, with --smoke 4")
    parser.add_argument("--output", type=Path, help="JSON file to write; default: gpu.json in $OUT, if set")
    parser.add_argument("--smoke", action="store_true", help="on the CPU, a tiny shape")
    args = parser.parse_args(words)
    args.steps = args.steps if args.steps is not None else 4 if args.smoke else 40
    for name, least in (("seconds", 1), ("steps", 3), ("tau", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} {getattr(args, name):g} is too few: give {least} at least.")
    if args.tau > 16:
        parser.error(f"--tau {args.tau:g} cannot be scripted: a block gives 16 tokens at most.")
    try:
        args.rows = chosen(all_rows(**SMOKE) if args.smoke else all_rows(), args.rows)
    except ValueError as error:
        parser.error(str(error))
    args.output = args.output or default_output(args.smoke)
    if not (args.list or args.smoke):
        import torch

        if not torch.cuda.is_available():
            parser.error("There is no CUDA device: run this where there is one, or with --smoke.")
    return args


def default_output(is_smoke: bool) -> Path | None:
    """Where figures are written by default; those of a smoke test nowhere, but to $OUT."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"]) / "gpu.json"
    return None if is_smoke else RESULTS / "gpu_qwen3.json"


def open_bench(options: dict[str, Any]) -> Any:
    """The bench, in the process that measures: no other one holds models."""
    from gpu_measure import GpuBench

    return GpuBench(options)


def main() -> None:
    began = time.monotonic()
    args = arguments()
    if args.list:
        print("\n".join(f"{row['name']:40} {row['limit']:4.0f} s" for row in args.rows))
        return
    # So that the process that measures is ended too.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    meaning = "smoke, means nothing; " if args.smoke else ""
    label = f"{meaning}simulated acceptance: random weights, the script's tau is {args.tau:g}"
    setting = {
        "label": label,
        "is_simulated": True,
        "stated_tau": args.tau,
        "steps": args.steps,
        "baseline": "target.generate, greedy",
        "step": "median of the steps that count, from the tokens of one at the host to those of the next",
    }
    result: dict[str, Any] = {}
    told: set[str] = set()

    def report(rows: Sequence[Row], facts: dict[str, Any]) -> None:
        """Prints each row once that it has had its turn, and writes the file anew."""
        from dflash.common.provenance import record, write_result

        for row in rows:
            if row["status"] != SKIPPED and row["name"] not in told:
                told.add(row["name"])
                print(line(row), flush=True)
        result.update(record("gpu", facts, decoding=setting, summary=derived(rows)))
        json.dumps(result, allow_nan=False)  # raises rather than write what is no JSON
        if args.output is not None:
            write_result(args.output, result)

    options = {"is_smoke": args.smoke, "tau": args.tau, "steps": args.steps}
    run_rows(args.rows, open_bench, options, began + args.seconds, report)
    from dflash.cli.terminal import show_table
    from dflash.evaluation import tables_of

    print(label)
    for table in tables_of(result):
        show_table(table)
    statuses = [row["status"] for row in args.rows]
    print(f"{statuses.count(MEASURED)} of {len(statuses)} rows measured, {time.monotonic() - began:.0f} s")
    # A smoke test must have measured everything that can be.
    sys.exit(MEASURED not in statuses or (args.smoke and (FAILED in statuses or SKIPPED in statuses)))


if __name__ == "__main__":
    main()
