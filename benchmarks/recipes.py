"""What a drafter's recipe is worth, at equal steps: one thing changed at a time, several seeds each, true acceptance.

    python benchmarks/recipes.py --pair stories stories260K stories.jsonl --work runs --output benchmarks/results/recipes.json

A pair is a name, a target (a folder or a Hub id) and data that the target wrote (`dflash regenerate`). Every cell is a
`dflash train` of its own in a folder below `--work`. A finished cell is not run again and a stopped one goes on, so the command
may be given again, and several of them may run side by side with other `--only`. Acceptance is that of the last step on
held-out prompts, greedy; runs with the same seed hold out the same ones.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from measuring import argument_parser, finish, parsed
from transformers import AutoModelForCausalLM

from dflash import DFlashDraftModel
from dflash.checkpoints import export_embedded_pair, heldout_problems
from dflash.common.json_lines import changes
from dflash.training import TrainingSettings, train_drafter


# 97.5 % quantiles of Student's t by degrees of freedom: the half-width of a mean's 95 % interval in standard errors.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
SMALL = {
    "steps": 2, "seeds": 2, "layers": 1, "taps": 2, "num_anchors": 2, "anchors": [1, 2], "prompts": 1,
    "max_new_tokens": 8, "batch_tokens": 128, "block_size": 4,
}  # fmt: skip


# Settings of a training run by the arguments that they come from.
SETTINGS = {
    "steps": "steps", "num_hidden_layers": "layers", "num_taps": "taps", "block_size": "block_size", "learning_rate": "lr",
    "muon_learning_rate": "muon_lr", "num_anchors": "num_anchors", "batch_tokens": "batch_tokens",
    "mixed_precision": "precision", "held_out": "prompts", "eval_every": "steps", "eval_new_tokens": "max_new_tokens",
}  # fmt: skip


class Cell(NamedTuple):
    """One row of the table: its settings that differ from the base."""

    name: str
    settings: dict[str, Any]

    @property
    def key(self) -> str:
        """The same for cells that are the same run, whichever axis they stand on."""
        return "-".join(f"{name}={value}" for name, value in sorted(self.settings.items())) or "base"


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--pair", nargs=3, action="append", metavar=("NAME", "TARGET", "DATA"))
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES), help="axes to run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--layers", type=int, default=2, help="depth of the base")
    parser.add_argument("--taps", type=int, default=5, help="tapped layers of the base")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-anchors", type=int, default=32, help="blocks per sequence of the base")
    parser.add_argument("--anchors", type=int, nargs="+", default=[8, 32, 128, 256], help="blocks per sequence to try")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon-lr", type=float, help="peak rate of Muon, for the matrices (default: AdamW alone)")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--precision", choices=["bf16", "no"], default="bf16")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps of the embedded target")
    args = parsed(parser)
    if args.smoke:
        vars(args).update(SMALL)
    elif not args.pair:
        parser.error("--pair is needed: name a target and data that it wrote, or give --smoke.")
    return args


def losses(args: argparse.Namespace) -> Iterator[Cell]:
    """Losses by position weights."""
    base = {"loss": "ce", "position_weights": "decay"}
    for loss, weights in (("ce", "decay"), ("ce", "dpace"), ("forward_kl", "decay"), ("forward_kl", "dpace")):
        settings = {"loss": loss, "position_weights": weights}
        yield Cell(f"{loss} {weights}".replace("_", " "), dict(settings.items() - base.items()))


def numbers(setting: str, values: Sequence[int], base: int) -> Iterator[Cell]:
    """One setting at several values."""
    for value in values:
        yield Cell(str(value), {} if value == base else {setting: value})


AXES = {
    "loss": losses,
    "anchors": lambda args: numbers("num_anchors", args.anchors, args.num_anchors),
    "layers": lambda args: numbers("num_hidden_layers", (1, 2, 3), args.layers),  # table 6 of the paper
    "taps": lambda args: numbers("num_taps", (1, 3, 5), args.taps),  # table 7
}


def run(name: str, target: str, data: str, cell: Cell, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """What `training.json` of a run says; the run begins or goes on if it is not finished."""
    folder = args.work / name / cell.key / f"seed-{seed}"
    base = {name: getattr(args, argument) for name, argument in SETTINGS.items()}
    settings = TrainingSettings(**{**base, "save_every": 100, "seed": seed, **cell.settings})
    record, state = folder / "training.json", folder.with_name(f"{folder.name}.state")
    if state.exists() or not record.exists():
        train_drafter(target, data, folder, settings, resume=state.exists())
        if state.exists():
            raise SystemExit(f"Stopped in {folder}: give the command again to go on.")
    facts = json.loads(record.read_text(encoding="utf-8"))
    now = {**settings.decisive(), "target": Path(target).name, "data": Path(data).name}
    its = {"target": Path(facts["target_name"]).name, "data": Path(facts["data_name"]).name}
    if changed := changes({**{name: facts["settings"].get(name) for name in settings.decisive()}, **its}, now):
        raise ValueError(f"{folder} is of another run ({changed}): give another --work.")
    return facts


def check_inputs(runs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    """ValueError if runs of one target and seed did not learn from the same target and data."""
    known: dict[Any, Any] = {}
    for row, facts in runs:
        seen = {name: facts[name]["fingerprint"] for name in ("target", "data", "held_out")}
        if known.setdefault((row["target"], row["seed"]), seen) != seen:
            raise ValueError(f"Runs of {row['target']}, seed {row['seed']}, have other data: give another --work.")


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval of the mean of `values`; a single one has none."""
    if len(values) < 2:
        return None
    return round(STUDENT.get(len(values) - 1, 1.96) * stdev(values) / math.sqrt(len(values)), 4)


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean tau over seeds, and its mean difference to the base with the same seed, each with the half-width of its interval.

    Seeds share their first weights and the order of the data, so differences tell more than means.
    """
    base = {(row["target"], row["seed"]): row["tau"] for row in rows if row["is_base"]}
    summary = []
    for key in dict.fromkeys((row["target"], row["axis"], row["cell"]) for row in rows):
        chosen = [row for row in rows if (row["target"], row["axis"], row["cell"]) == key]
        taus = [row["tau"] for row in chosen]
        gains = [row["tau"] - base[key[0], row["seed"]] for row in chosen if not row["is_base"] and base]
        row = dict(zip(("target", "axis", "cell"), key, strict=True)) | {"seeds": len(taus)}
        row |= {"tau": round(fmean(taus), 4), "tau_interval": half_width(taus)}
        row |= {"gain": round(fmean(gains), 4) if gains else None, "gain_interval": half_width(gains)}
        summary.append(row | {"accepted_per_block": round(fmean(run["accepted_per_block"] for run in chosen), 4)})
    return summary


def smoke_pair(work: Path) -> tuple[str, str, str]:
    """The embedded target and the answers of a few problems."""
    work.mkdir(parents=True, exist_ok=True)
    target, _ = export_embedded_pair(work / "embedded")
    rows = [{"prompt": problem.question, "completion": problem.answer} for problem in heldout_problems()[:12]]
    data = work / "answers.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return "tiny", str(target), str(data)


def main() -> None:
    args = arguments()
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = []
    pairs = [smoke_pair(args.work)] if args.smoke else args.pair
    for name, target, data in pairs:
        for axis in args.only:
            for cell in AXES[axis](args):
                for seed in range(args.seeds):
                    facts = run(name, target, data, cell, args, seed)
                    last = facts["curve"][-1]
                    row = {"target": name, "axis": axis, "cell": cell.name, "seed": seed, "is_base": not cell.settings}
                    row |= {key: last[key] for key in ("tau", "tokens_per_step", "accepted_per_block", "accuracy")}
                    runs.append((row | {"parameters": facts["parameters"]}, facts))
                    print(f"{name}, {axis} {cell.name}, seed {seed}: tau {last['tau']:.3f}")
        check_inputs(runs)
    subjects = {}
    for row, facts in runs:
        subject = {name: facts["target"][name] for name in ("class", "parameters")}
        subject |= {"sequences": facts["data"]["examples"], "supervised_tokens": facts["data"]["supervised_tokens"]}
        subjects[row["target"]] = {**subject, "held_out": facts["held_out"]["prompts"]}
    folder = args.work / pairs[-1][0] / cell.key / f"seed-{seed}"
    pair = AutoModelForCausalLM.from_pretrained(pairs[-1][1]), DFlashDraftModel.from_pretrained(folder)
    asked = {name: value for name, value in vars(args).items() if name not in ("pair", "work", "output")}
    rows = [row for row, _ in runs]
    finish(args.output, "training", pair, training=asked, targets=subjects, summary=summarise(rows), measurements=rows)


if __name__ == "__main__":
    main()
