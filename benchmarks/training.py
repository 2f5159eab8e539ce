"""What a drafter's recipe is worth, at equal steps: one thing changed at a time, several seeds each, true acceptance.

    python benchmarks/training.py --pair tiny embedded answers.jsonl --pair stories stories260K stories.jsonl \\
        --work runs --output benchmarks/results/training_tiny.json

A pair is a name, a target (a folder or Hub id, or `embedded`) and data that the target wrote (`dflash regenerate`). Without one
it is the embedded target and its own answers to the package's problems. Every cell is a run of the trainer in a folder below
`--work`; a finished one is not run again and a stopped one goes on, so the command may be given again, and several of them may
run side by side with other `--only`. Acceptance is that of the last step on the same held-out prompts in every cell, greedy.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from records import prompt_ids, save
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from dflash import DFlashDraftModel
from dflash.checkpoints import heldout_problems, load_embedded_pair
from dflash.cli.options import show_table
from dflash.evaluation import any_table
from dflash.regeneration import regenerate
from dflash.training import (
    Example,
    TrainingSettings,
    describe_inputs,
    find_mask_token,
    hold_out,
    load_examples,
    new_drafter,
    train,
)


# 97.5 % quantiles of Student's t by degrees of freedom: the half-width of a mean's 95 % interval in standard errors.
STUDENT = {1: 12.71, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass(frozen=True)
class Cell:
    """One row of the table: what differs from the base."""

    axis: str
    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    shape: dict[str, Any] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The same for cells that are the same run, whichever axis they stand on."""
        return "-".join(f"{name}={value}" for name, value in sorted((self.settings | self.shape).items())) or "base"


@dataclass(frozen=True)
class Subject:
    """A target to draft for, and what is learned and measured."""

    name: str
    target: PreTrainedModel
    mask_token_id: int
    examples: list[Example]
    held_out: list[list[int]]

    @property
    def most_anchors(self) -> int:
        """More than these no sequence has."""
        return max(sum(example.loss_mask) for example in self.examples) - 1


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", nargs=3, action="append", metavar=("NAME", "TARGET", "DATA"))
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    parser.add_argument("--only", nargs="+", choices=AXES, default=list(AXES), help="axes to run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--layers", type=int, default=2, help="depth of the base")
    parser.add_argument("--taps", type=int, default=5, help="tapped layers of the base")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--num-anchors", type=int, default=32, help="blocks per sequence of the base")
    parser.add_argument("--anchors", type=int, nargs="+", default=[8, 32, 128, 256, 512, 1024])
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--muon-lr", type=float, help="peak rate of Muon, for the matrices (default: AdamW alone)")
    parser.add_argument("--prompts", type=int, default=16, help="held-out prompts")
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--precision", choices=["bf16", "no"], default="bf16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps through the same code")
    args = parser.parse_args()
    if args.smoke:
        small = {
            "steps": 2,
            "seeds": 2,
            "layers": 1,
            "taps": 2,
            "num_anchors": 2,
            "anchors": [1, 2, 2048],
            "prompts": 1,
        }
        for name, value in (small | {"max_new_tokens": 8, "batch_tokens": 128, "block_size": 4}).items():
            setattr(args, name, value)
    return args


def losses(args: argparse.Namespace, subject: Subject) -> Iterator[Cell]:
    """Losses by position weights; JetSpec takes KL without any."""
    for loss, weights in (
        ("ce", "decay"),
        ("ce", "dpace"),
        ("forward_kl", "uniform"),
        ("forward_kl", "decay"),
        ("forward_kl", "dpace"),
    ):
        settings = {"loss": loss, "position_weights": weights}
        base = {"loss": "ce", "position_weights": "decay"}
        differing = {key: value for key, value in settings.items() if value != base[key]}
        yield Cell("loss", f"{loss} {weights}".replace("_", " "), differing)


def labels(args: argparse.Namespace, subject: Subject) -> Iterator[Cell]:
    """Hard labels, the data's or the target's, and soft ones; all with the paper's weights."""
    for loss in ("ce", "forward_kl", "mix"):
        yield Cell("labels", loss.replace("_", " "), {} if loss == "ce" else {"loss": loss})


def anchors(args: argparse.Namespace, subject: Subject) -> Iterator[Cell]:
    """Blocks per sequence; numbers that no sequence reaches are one cell."""
    reached = [number for number in sorted(args.anchors) if number < subject.most_anchors]
    for number in reached:
        yield Cell("anchors", str(number), {} if number == args.num_anchors else {"num_anchors": number})
    if len(reached) < len(args.anchors):
        yield Cell("anchors", f"{subject.most_anchors} and more", {"num_anchors": subject.most_anchors})


def layers(args: argparse.Namespace, subject: Subject) -> Iterator[Cell]:
    """Depth of the drafter (table 6)."""
    for number in (1, 2, 3):
        yield Cell("layers", str(number), shape={} if number == args.layers else {"num_hidden_layers": number})


def taps(args: argparse.Namespace, subject: Subject) -> Iterator[Cell]:
    """Layers of the target that the drafter reads (table 7)."""
    for number in (1, 3, 5):
        yield Cell("taps", str(number), shape={} if number == args.taps else {"num_taps": number})


AXES = {"loss": losses, "labels": labels, "anchors": anchors, "layers": layers, "taps": taps}


def load_subject(name: str, target_name: str, data: str | None, args: argparse.Namespace) -> Subject:
    """A target and its data, the held-out prompts taken out."""
    if target_name == "embedded":
        target, _, tokenizer = load_embedded_pair()
    else:
        target = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(target_name)
    if data is None:
        questions = [prompt_ids(tokenizer, problem.question) for problem in heldout_problems()]
        questions = questions[: 12 if args.smoke else None]
        written = regenerate(target, questions, max_new_tokens=16 if args.smoke else 224, batch_size=32)
        examples = [one.example for one in sorted(written, key=lambda one: one.index)]
    else:
        examples = load_examples(data, tokenizer)
    examples, held_out = hold_out(examples, args.prompts, seed=0)
    return Subject(name, target, find_mask_token(tokenizer, target.config.vocab_size), examples, held_out)


def make_drafter(subject: Subject, cell: Cell, args: argparse.Namespace, seed: int) -> DFlashDraftModel:
    """A new drafter, the same for the same seed and shape."""
    shape = {"num_hidden_layers": args.layers, "num_taps": args.taps, "block_size": args.block_size} | cell.shape
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return new_drafter(subject.target, mask_token_id=subject.mask_token_id, **shape)


def run(subject: Subject, cell: Cell, args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The figures of one run: those on disk, or those of a run that is begun or gone on with."""
    folder = args.work / subject.name / cell.key / f"seed-{seed}"
    finished = folder.with_suffix(".json")
    settings = TrainingSettings(
        **{
            "steps": args.steps,
            "learning_rate": args.lr,
            "muon_learning_rate": args.muon_lr,
            "num_anchors": args.num_anchors,
            "batch_tokens": args.batch_tokens,
            "mixed_precision": args.precision,
            "eval_every": args.steps,
            "eval_new_tokens": args.max_new_tokens,
            "save_every": 100,
            "seed": seed,
        }
        | cell.settings
    )
    drafter = make_drafter(subject, cell, args, seed)
    described = describe_inputs(subject.target, drafter, subject.examples, subject.held_out)
    inputs = {name: facts["fingerprint"] for name, facts in described.items()}
    if finished.exists():
        figures = json.loads(finished.read_text())
        changed = settings.changed_from(figures.pop("settings"))
        before = figures.pop("inputs", {})
        changed += [
            f"{name}: {before.get(name)}, now {now}" for name, now in inputs.items() if before.get(name) != now
        ]
        if changed:
            raise ValueError(f"{finished} is of another run ({'; '.join(changed)}): give another --work.")
        return figures
    is_resumed = folder.with_name(f"{folder.name}.state").exists()
    record = train(
        drafter,
        subject.target,
        subject.examples,
        subject.held_out,
        settings,
        folder,
        resume=is_resumed,
        overwrite=not is_resumed,  # what was left between the run's end and its figures
    )
    if record.stopped_at is not None:
        raise SystemExit(f"Stopped in {folder}: give the command again to go on.")
    last = record.curve[-1]
    figures = {
        "tau": last["tau"],
        "tokens_per_step": last["tokens_per_step"],
        "accepted_per_block": last["accepted_per_block"],
        "accuracy": last["accuracy"],
        "parameters": drafter.num_parameters(),
        "target_layer_ids": drafter.config.target_layer_ids,
    }
    facts = json.loads((folder / "training.json").read_text())
    finished.write_text(json.dumps(figures | {"settings": facts["settings"], "inputs": inputs}, indent=1) + "\n")
    return figures


def half_width(values: Sequence[float]) -> float | None:
    """Of the 95 % interval of the mean of `values`; one alone has none."""
    if len(values) < 2:
        return None
    return round(STUDENT.get(len(values) - 1, 1.96) * stdev(values) / math.sqrt(len(values)), 4)


def summarise(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Mean tau over seeds, and its mean difference to the base with the same seed, each with the half-width of its interval.

    Seeds share what they start from and the order of the data, so differences tell more than the means do.
    """
    base = {(row["target"], row["seed"]): row["tau"] for row in rows if row["is_base"]}
    summary = []
    for key in dict.fromkeys((row["target"], row["axis"], row["cell"]) for row in rows):
        chosen = [row for row in rows if (row["target"], row["axis"], row["cell"]) == key]
        taus = [row["tau"] for row in chosen]
        gains = [row["tau"] - base[key[0], row["seed"]] for row in chosen if not row["is_base"] and base]
        summary.append(
            {
                **dict(zip(("target", "axis", "cell"), key, strict=True)),
                "seeds": len(taus),
                "tau": round(mean(taus), 4),
                "tau_interval": half_width(taus),
                "gain": round(mean(gains), 4) if gains else None,
                "gain_interval": half_width(gains),
                "accepted_per_block": round(mean(row["accepted_per_block"] for row in chosen), 4),
            }
        )
    return summary


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    measurements: list[dict[str, Any]] = []
    subjects: dict[str, Any] = {}
    for name, target, data in args.pair or [("tiny", "embedded", None)]:
        subject = load_subject(name, target, data, args)
        subjects[name] = {
            "class": type(subject.target).__name__,
            "parameters": subject.target.num_parameters(),
            "sequences": len(subject.examples),
            "supervised_tokens": sum(sum(example.loss_mask) for example in subject.examples),
            "held_out": len(subject.held_out),
        }
        for axis in args.only:
            for cell in AXES[axis](args, subject):
                for seed in range(args.seeds):
                    figures = run(subject, cell, args, seed)
                    which = {
                        "target": name,
                        "axis": axis,
                        "cell": cell.name,
                        "seed": seed,
                        "is_base": cell.key == "base",
                    }
                    measurements.append(which | figures)
                    print(f"{name}, {axis} {cell.name}, seed {seed}: tau {figures['tau']:.3f}")
    summary = summarise(measurements)
    show_table(any_table(summary))
    if args.output is not None:
        drafter = make_drafter(subject, Cell("", ""), args, seed=0)
        asked = {name: value for name, value in vars(args).items() if name not in ("pair", "work", "output")}
        save(
            args.output,
            subject.target,
            drafter,
            kind="training",
            training=asked,
            targets=subjects,
            summary=summary,
            measurements=measurements,
        )


if __name__ == "__main__":
    main()
