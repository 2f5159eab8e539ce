"""What a drafter's recipe is worth: true acceptance by recipe, target, seed and budget, at equal steps and at equal time.

    python benchmarks/recipes.py --pair stories stories260K stories.jsonl --axis recipe recipe=paper recipe=short \\
        --budgets 240 1000 --equal steps time --work runs --output benchmarks/results/recipes.json

A pair is a name, a target (a folder or a Hub id) and data that it wrote (`dflash regenerate`). An axis is a name and its cells, each
of settings of `dflash train` joined by `+`, which are compared with the first. At equal time a cell gets the steps that take as
long as the budget's steps of the first cell; each cell is timed in turn with the first.

Every row is a run below `--work`, and is in `--output` once it is finished. The same command, or one with more axes, seeds or
budgets, skips the rows that are there and goes on with the run that was stopped. Tau is that of the last step on held-out prompts.
"""

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from measuring import argument_parser, parsed
from reporting import tables_of
from transformers import AutoModelForCausalLM

from dflash import DFlashDraftModel
from dflash.cli.terminal import show_table
from dflash.common.json_lines import changes
from dflash.common.provenance import environment, record, write_result
from dflash.common.stopwatch import seconds_of
from dflash.training import Trainer, TrainingSettings, prepare, train_drafter


# 97.5 % quantiles of Student's t by degrees of freedom: the half-width of a mean's 95 % interval in standard errors.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
AXES = [["recipe", "recipe=paper", "recipe=paper+learning_rate=2e-3", "recipe=short"]]
BASE = {"num_hidden_layers": 2, "block_size": 16, "batch_tokens": 2048, "held_out": 16, "eval_new_tokens": 192}
TIMED_STEPS = 12
KEY = ("target", "axis", "cell", "seed")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argument_parser(description)
    parser.add_argument("--pair", nargs=3, action="append", required=True, metavar=("NAME", "TARGET", "DATA"))
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--axis", nargs="+", action="append", help="name and cells")
    parser.add_argument("--base", default="", help="settings of every cell: num_anchors=64+batch_tokens=1024")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--budgets", type=int, nargs="+", default=[240], help="steps")
    parser.add_argument("--equal", nargs="+", choices=["steps", "time"], default=["steps"])
    return parser


def arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    args = parsed(parser)
    args.output, args.base = args.output or args.work / "recipes.json", BASE | given(args.base)
    return args


def given(cell: str) -> dict[str, Any]:
    """The settings that a cell names; a value that is not JSON is text."""
    settings: dict[str, Any] = {}
    for name, _, value in (one.partition("=") for one in cell.split("+") if one):
        settings[name] = value
        with suppress(ValueError):
            settings[name] = json.loads(value)
    return settings


def run(target: str, data: str, folder: Path, settings: TrainingSettings) -> dict[str, Any]:
    """What `training.json` of a run says; the run begins, goes on, or is left as it is if it is finished."""
    if train_drafter(target, data, folder, settings, resume=True, show_progress=False).stopped_at is not None:
        raise SystemExit(f"Stopped in {folder}: give the command again to go on.")
    return json.loads((folder / "training.json").read_text(encoding="utf-8"))


def folder_of(work: Path, target: str, cell: str, steps: int, seed: int) -> Path:
    """Where a run is."""
    return work / target / cell / f"{steps} steps, seed {seed}"


def seconds_per_step(target: str, data: str, cells: Mapping[str, TrainingSettings]) -> dict[str, float]:
    """Of each cell the median of some training steps after one to warm up, measurements and saving left out.

    The cells take their steps in turn, so that other work on the machine slows all of them.
    """
    trainers = []
    for settings in cells.values():
        ready = prepare(target, data, settings)
        trainers.append(Trainer(ready.drafter, ready.target, ready.examples, settings))
    rounds = [[seconds_of(trainer.step) for trainer in trainers] for _ in range(TIMED_STEPS + 1)][1:]
    return dict(zip(cells, map(median, zip(*rounds, strict=True)), strict=True))


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean tau over seeds, and its mean difference to the first cell with the same seed, each with its half interval."""
    base = {(row["target"], row["axis"], row["seed"]): row["tau"] for row in rows if row["is_base"]}
    summary = []
    for key in dict.fromkeys((row["target"], row["axis"], row["cell"]) for row in rows):
        chosen = [row for row in rows if (row["target"], row["axis"], row["cell"]) == key]
        of = {name: [row[name] for row in chosen] for name in ("tau", "accepted_per_block")}
        of["gain"] = [row["tau"] - base[key[0], key[1], row["seed"]] for row in chosen if not row["is_base"]]
        row = dict(zip(KEY, key, strict=False)) | {"seeds": len(chosen)}
        row |= {name: round(fmean(values), 4) if values else None for name, values in of.items()}
        summary.append(row | {f"{name}_interval": half_width(of[name]) for name in ("tau", "gain")})
    return summary


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval of the mean of `values`; a single one has none."""
    if len(values) < 2:
        return None
    return round(STUDENT.get(len(values) - 1, 1.96) * stdev(values) / math.sqrt(len(values)), 4)


def train_all(args: argparse.Namespace) -> None:
    """Makes the runs that are not in `args.output` yet, and adds them there one by one."""
    before = json.loads(args.output.read_text(encoding="utf-8")) if args.output.exists() else {}
    if before and (changed := changes(before["training"]["base"], args.base)):
        raise ValueError(f"{args.output} holds runs of another base ({changed}): give another --work and --output.")
    rows, targets = before.get("measurements", []), before.get("targets", {})
    there = [[row[name] for name in KEY] for row in rows]
    inputs = {(row["target"], row["seed"]): row["inputs"] for row in rows}
    speeds = {(row["target"], row["cell"]): row["seconds_per_step"] for row in rows if "seconds_per_step" in row}
    plan = product(args.budgets, range(args.seeds), args.pair, args.equal, args.axis or AXES)
    for budget, seed, (name, target, data), equal, (axis, first, *others) in plan:
        for cell in (first, *others):
            label = f"{axis}, {'time of ' if equal == 'time' else ''}{budget:,} steps"
            if [name, label, cell, seed] in there:
                continue
            row = dict(zip(KEY, (name, label, cell, seed), strict=True)) | {"is_base": cell == first}
            if equal == "time":
                if (name, cell) not in speeds:
                    each = {one: args.base | {"steps": budget} | given(one) for one in (first, cell)}
                    of = seconds_per_step(target, data, {one: TrainingSettings(**its) for one, its in each.items()})
                    speeds[name, cell] = speeds.setdefault((name, first), of[first]) * of[cell] / of[first]
                row["seconds_per_step"] = speeds[name, cell]
            steps = max(1, round(budget * speeds[name, first] / speeds[name, cell])) if equal == "time" else budget
            ends = {"steps": steps, "eval_every": steps, "save_every": 100, "seed": seed}
            folder = folder_of(args.work, name, cell, steps, seed)
            facts = run(target, data, folder, TrainingSettings(**{**args.base, **ends, **given(cell)}))
            last, read = facts["curve"][-1], {key: facts[key]["fingerprint"] for key in ("target", "data", "held_out")}
            if inputs.setdefault((name, seed), read) != read:
                raise ValueError(f"Runs of {name}, seed {seed}, have other data: give another --work and --output.")
            row |= {key: last[key] for key in ("tau", "tokens_per_step", "accepted_per_block", "accuracy")}
            row |= {"budget": budget, "steps": steps, "recipe": facts["recipe"], "parameters": facts["parameters"]}
            rows.append(row | {"inputs": read})
            targets[name] = {key: facts["target"][key] for key in ("class", "parameters")}
            targets[name] |= {"sequences": facts["data"]["examples"], "held_out": facts["held_out"]["prompts"]}
            made = args.base | {"base": args.base, "seeds": max(row["seed"] for row in rows) + 1}
            made["steps"] = ", ".join(map(str, sorted({row["budget"] for row in rows})))
            content = {"training": made, "targets": targets, "summary": summarise(rows), "measurements": rows}
            model = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=False)
            pair = model, DFlashDraftModel.from_pretrained(folder)
            write_result(args.output, record("training", environment(*pair), **content))
            print(f"{name}, {label}, {cell}, seed {seed}: tau {row['tau']:.3f}", flush=True)


def main() -> None:
    args = arguments(make_parser(__doc__))
    train_all(args)
    for table in tables_of(json.loads(args.output.read_text(encoding="utf-8"))):
        show_table(table)


if __name__ == "__main__":
    main()
