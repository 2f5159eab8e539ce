"""Writes the README's table of measured figures out of a result of `benchmarks/decode.py`.

    python benchmarks/report.py benchmarks/results/decode_tiny_cpu.json

With `--check` it writes nothing and fails if the README says anything else than the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


README = Path(__file__).parent.parent / "README.md"
RESULT = Path(__file__).parent / "results" / "decode_tiny_cpu.json"
BEGIN, END = "<!-- table:begin -->", "<!-- table:end -->"
COLUMNS = ("task", "method", "identical texts", "tau", "tokens per step", "tokens/s", "speed-up")


def readme_table(result: dict[str, Any]) -> str:
    """A Markdown table of the summary, and under it what the figures depend on."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for row in result["summary"]:
        cells = (
            row["task"],
            row["method"],
            f"{row['identical']} of {row['prompts']}",
            "" if row["tau_micro"] is None else f"{row['tau_micro']:.2f}",
            f"{row['tokens_per_step']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
        )
        lines.append("| " + " | ".join(cells) + " |")
    setup, decoding = result["environment"], result["decoding"]
    lines += [
        "",
        f"Embedded pair ({setup['target_parameters'] / 1e6:.1f} M and {setup['drafter_parameters'] / 1e6:.1f} M parameters), "
        f"greedy, batch {decoding['batch_size']}, block {setup['block_size']}, {setup['target_dtype']}, {setup['attention']} "
        f"attention, {setup['threads']} threads of one {setup['cpu']}, torch {setup['torch']}, transformers "
        f"{setup['transformers']}; medians of {decoding['repeats']} interleaved repeats. `{result['command']}`",
    ]
    return "\n".join(lines)


def with_table(readme: str, table: str) -> str:
    """The README with what stands between the markers replaced."""
    head, rest = readme.split(BEGIN, 1)
    _, tail = rest.split(END, 1)
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, nargs="?", default=RESULT)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = README.read_text(encoding="utf-8")
    wanted = with_table(readme, readme_table(json.loads(args.result.read_text(encoding="utf-8"))))
    if args.check:
        if readme != wanted:
            print(f"README.md and {args.result.name} disagree: run `python benchmarks/report.py`.", file=sys.stderr)
        return int(readme != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
