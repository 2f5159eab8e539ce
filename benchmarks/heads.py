"""Heads against each other at equal seconds of training: no head, the selector, Domino, DSpark, and JetSpec's causal block.

    python benchmarks/heads.py --pair stories stories260K stories.jsonl --budgets 200 500 --work runs \\
        --output benchmarks/results/heads_stories_cpu.json

Runs are made, kept and gone on with as by `recipes.py`, whose arguments these are. Then the drafters of the largest budget decode
held-out prompts in turns, beside plain decoding: tau, the time of a step, and the speed. Of several budgets a figure shows tau.
With `--heads selector DSpark` larger budgets are of these two, and of no head.
"""

import argparse
import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import recipes
import torch
from reporting import facts_of, tables_of
from rich.progress import track
from transformers import AutoModelForCausalLM

from dflash import DFlashDraftModel
from dflash.cli.terminal import show_table
from dflash.common.provenance import record, write_result
from dflash.evaluation import PLAIN, Prompt, canvas, compare, results, summarise, timed_blocks, timed_generate
from dflash.training import TrainingSettings, prepare


NO_HEAD = "recipe=short"
# Sizes that suit targets of 64 to 192 channels.
HEADS = {
    NO_HEAD: "none",
    "head=selector+selector_rank=64": "selector",
    "head=domino+gru_hidden_dim=192+emb_dim=96": "Domino",
    "head=dspark+markov_rank=96": "DSpark",
    "recipe=jetspec": "JetSpec's causal block",
}
PROMPTS = 16
GREEDILY: dict[str, Any] = {"temperature": 0.0, "prompt_lookup_num_tokens": 0, "compile": False, "cuda_graph": False}

Row = dict[str, Any]


def speeds(args: argparse.Namespace, rows: list[Row]) -> list[Row]:
    """A row per target and head: means over the seeds of what its drafters of the largest budget do."""
    budget = max(row["budget"] for row in rows)
    made = []
    for name, target_name, data in args.pair:
        target: Any = AutoModelForCausalLM.from_pretrained(target_name, dtype=torch.float32, trust_remote_code=False)
        seeds = []
        for seed in range(args.seeds):
            of_seed = [row for row in rows if (row["target"], row["budget"], row["seed"]) == (name, budget, seed)]
            settings = TrainingSettings(**{**args.base, "seed": seed, "steps": 1})
            prompts = prepare(target_name, data, settings).held_out[:PROMPTS]
            seeds.append(decoded(target.eval(), drafters(args.work, of_seed), prompts, args.base["eval_new_tokens"]))
        for head in dict.fromkeys(HEADS[row["cell"]] for row in of_seed):
            made.append({"target": name, "head": head, "seeds": len(seeds), **means(seeds, head)})
    return made


def drafters(work: Path, rows: Iterable[Row]) -> dict[str, Any]:
    """The drafters of these runs, by their head."""
    models = {}
    for row in rows:
        folder = recipes.folder_of(work, row["target"], row["cell"], row["steps"], row["seed"])
        models[HEADS[row["cell"]]] = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    return models


def decoded(target: Any, models: dict[str, Any], prompts: Any, num_tokens: int) -> list[Row]:
    """A row of figures per way of decoding, all in turns."""
    length: dict[str, Any] = {"max_new_tokens": num_tokens}
    methods: dict[str, Any] = {PLAIN: partial(timed_generate, target, do_sample=False, **length)}
    for head, drafter in models.items():
        methods[head] = partial(timed_blocks, drafter, target, **length, **GREEDILY)
    asked = [Prompt("held-out", torch.tensor([list(prompt)])) for prompt in prompts]
    return summarise(compare(methods, asked, 1, lambda items, what: track(items, description=what)))


def means(seeds: list[list[Row]], head: str) -> Row:
    """The figures of a head, each the mean over the seeds."""
    by_head = [{row["method"]: row for row in rows} for rows in seeds]
    own = [rows[head] for rows in by_head]
    without = [rows[HEADS[NO_HEAD]] for rows in by_head]
    pairs = zip(own, without, strict=True)
    return {
        "prompts": sum(row["prompts"] for row in own),
        "identical": sum(row["identical"] for row in own),
        "tau": fmean(row["tau_micro"] for row in own),
        "ms_per_step": fmean(row["ms_per_step"] for row in own),
        "tokens_per_second": fmean(row["tokens_per_second"] for row in own),
        "speedup": fmean(row["speedup"] for row in own),
        "over_no_head": fmean(row["tokens_per_second"] / base["tokens_per_second"] for row, base in pairs),
    }


@canvas.themed
def tau_by_budget(rows: list[Row], note: str, theme: canvas.Theme) -> Any:
    """Tau of each head by the steps of the run without one, whose seconds all have; means over seeds, a panel per target."""
    targets = list(dict.fromkeys(row["target"] for row in rows))
    colours = canvas.colours_of(list(HEADS.values()), theme)
    shown = {HEADS[row["cell"]] for row in rows}
    key: list[canvas.Entry] = [(head, colour, "-") for head, colour in colours.items() if head in shown]
    labels = canvas.Labels("Tau after equal seconds of training", "steps of the run without a head", "tau (tokens)")
    figure, panels = canvas.small_plots(targets, labels, note, theme, key)
    for target, axes in panels.items():
        for cell, head in HEADS.items():
            taus: dict[int, list[float]] = {}
            for row in rows:
                if (row["target"], row["cell"]) == (target, cell):
                    taus.setdefault(row["budget"], []).append(row["tau"])
            points = [(budget, fmean(values)) for budget, values in sorted(taus.items())]
            canvas.line(axes, points, colours[head])
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=1)
    return figure


def main() -> None:
    parser = recipes.make_parser(__doc__)
    others = [head for cell, head in HEADS.items() if cell != NO_HEAD]
    parser.add_argument("--heads", nargs="+", choices=others, default=others, help="beside no head")
    args = recipes.arguments(parser)
    args.axis = [["head", *(cell for cell, head in HEADS.items() if cell == NO_HEAD or head in args.heads)]]
    args.equal = ["time"]
    recipes.train_all(args)
    trained = json.loads(args.output.read_text(encoding="utf-8"))
    rows = trained["measurements"]
    content = {name: trained[name] for name in ("training", "targets", "summary", "measurements")}
    write_result(args.output, record("training", trained["environment"], **content, speeds=speeds(args, rows)))
    result = results.read_result(args.output)
    for table in tables_of(result):
        show_table(table)
    if len({row["budget"] for row in rows}) > 1:
        path = args.output.with_name(f"{args.output.stem}_tau.png")
        path.write_bytes(canvas.png(tau_by_budget(rows, results.stated(facts_of(result)))))


if __name__ == "__main__":
    main()
