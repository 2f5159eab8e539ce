"""The figures that need an accelerator: a step against the memory's own speed, and against launch-bound decoding.

    benchmarks/gpu.sh            # one GPU, bf16, Qwen3-8B's shape: under 9 minutes, writes benchmarks/results/gpu_qwen3_8b.json
    benchmarks/gpu.sh --smoke    # the same code on the CPU with a tiny shape; its figures mean nothing and are kept nowhere

Random weights and scripted acceptance (`dflash/evaluation/scripted.py`): milliseconds are measured, tau is stated. The file
is written again behind every figure, so that a run that is cut short leaves those that it has.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from records import save
from rich.console import Console
from rich.table import Table

from dflash.evaluation import seconds_of
from dflash.evaluation.harness import PLAIN
from dflash.evaluation.scripted import SHAPES, scripted_pair
from dflash.evaluation.sweep import measure_point


COMPILED = "dflash compiled"
CONTEXT = 512


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen3-8b")
    parser.add_argument("--tau", type=float, default=6.5, help="mean acceptance length of the script")
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--smoke", action="store_true", help="on the CPU, the tiny shape, nothing kept")
    args = parser.parse_args()
    if args.smoke and args.output is not None:
        parser.error(f"--output {args.output}: the figures of --smoke mean nothing and are not kept, leave it out.")
    if not args.smoke and not torch.cuda.is_available():
        parser.error("There is no CUDA device: run this where there is one, or with --smoke.")
    return args


def copy_bandwidth(device: torch.device, num_bytes: int, repeats: int = 10) -> float:
    """Bytes per second that a copy inside the device's memory reads and writes, at its best."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)

    def copy() -> None:
        for _ in range(10):
            sink.copy_(source)
        sink[0].item()  # waits for the device

    copy()
    return 20 * num_bytes / min(seconds_of(copy) for _ in range(repeats))


def bytes_per_step(target: Any, drafter: Any) -> int:
    """Weights that a step reads: both models' once. Of the embedding a step reads single rows."""
    embedding = target.get_input_embeddings().weight
    weights = [p for model in (target, drafter) for p in model.parameters() if p is not embedding]
    return sum(p.numel() * p.element_size() for p in weights)


def figures(target: Any, drafter: Any, args: argparse.Namespace) -> list[Callable[[dict[str, Any]], dict[str, Any]]]:
    """What is measured, in order; each gets what the ones before it gave."""
    common: dict[str, Any] = {"context": CONTEXT, "new_tokens": args.new_tokens, "repeats": args.repeats}

    def floor(_: dict[str, Any]) -> dict[str, Any]:
        bandwidth = copy_bandwidth(target.device, 2**20 if args.smoke else 2**32)
        num_bytes = bytes_per_step(target, drafter)
        return {
            "copy_gb_per_second": bandwidth / 1e9,
            "step_bytes": num_bytes,
            "floor_ms": 1e3 * num_bytes / bandwidth,
        }

    def one(found: dict[str, Any]) -> dict[str, Any]:
        plain, ours = measure_point(target, drafter, methods=(COMPILED,), **common)
        return {
            "step_ms": ours["ms_per_step"],
            "plain_ms_per_token": plain["ms_per_step"],
            "is_identical": ours["is_identical"],
            "compilations": ours["compilations"],
            "step_over_floor": ours["ms_per_step"] / found["floor_ms"],
            "plain_over_ours_at_stated_tau": plain["ms_per_step"] * args.tau / ours["ms_per_step"],
        }

    def static(found: dict[str, Any]) -> dict[str, Any]:
        # `generate` compiles its forward by itself where the cache is static and the device an accelerator.
        plain = measure_point(target, drafter, methods=(), plain={"cache_implementation": "static"}, **common)[0]
        return {
            "compiled_plain_ms_per_token": plain["ms_per_step"],
            "compiled_plain_over_ours_at_stated_tau": plain["ms_per_step"] * args.tau / found["step_ms"],
        }

    def batch(found: dict[str, Any]) -> dict[str, Any]:
        ours = measure_point(target, drafter, methods=(COMPILED,), batch_size=8, **common)[1]
        return {
            "step_ms_batch_8": ours["ms_per_step"],
            "compilations_batch_8": ours["compilations"],
            "batch_8_over_batch_1": ours["ms_per_step"] / found["step_ms"],
        }

    return [floor, one, static, batch]


# Figure, where the ratio has to be, and where it should be.
GOALS = {
    "step_over_floor": ("at most", 1.6, 1.15),
    "plain_over_ours_at_stated_tau": ("at least", 12.0, 25.0),
    "compiled_plain_over_ours_at_stated_tau": ("at least", 4.0, 5.0),
    "batch_8_over_batch_1": ("at most", 1.3, 1.1),
}


def show(found: dict[str, Any], label: str) -> None:
    table = Table("figure", "value", "must", "aim", title=label, title_justify="left", title_style="dim", box=None)
    for name, value in found.items():
        side, must, aim = GOALS.get(name, ("", None, None))
        said = value if isinstance(value, bool) else f"{value:,.4g}"
        table.add_row(name, str(said), "" if must is None else f"{side} {must}", "" if aim is None else f"{aim}")
    Console(highlight=False).print(table)


def main() -> None:
    args = arguments()
    if args.smoke:
        args.shape, args.new_tokens, args.repeats = "smoke", 24, 1
    device, dtype = ("cpu", torch.float32) if args.smoke else ("cuda", torch.bfloat16)
    target, drafter = scripted_pair(args.shape, args.tau, dtype, device)
    setting = {
        "label": "smoke: means nothing" if args.smoke else f"simulated: random weights, tau {args.tau:g} stated",
        "shape": args.shape,
        "is_simulated": True,
        "stated_tau": args.tau,
        "context_tokens": CONTEXT,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
        "baseline": f"{PLAIN}, greedy",
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as nowhere:
        output = Path(nowhere) / "smoke.json" if args.smoke else args.output
        for measure in figures(target, drafter, args):
            found |= measure(found)
            if output is not None:
                rounded = {name: round(v, 4) if isinstance(v, float) else v for name, v in found.items()}
                save(output, target, drafter, kind="gpu", decoding=setting, summary=[rounded])
    show(found, setting["label"])


if __name__ == "__main__":
    main()
