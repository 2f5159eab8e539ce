"""Writes the README's tables: measured figures out of the committed results, and what works out of tests and cards.

    python benchmarks/report.py

With `--check` it writes nothing and fails if the README says anything else than they do.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.evaluation.tables import DECODED, caveat, markdown, table_of, with_table


ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"


def decode_table(result: dict[str, Any]) -> str:
    """Ways of decoding side by side, and under them what the figures depend on."""
    setup, decoding = result["environment"], result["decoding"]
    pair = f"{setup['target_parameters'] / 1e6:.1f} M and {setup['drafter_parameters'] / 1e6:.1f} M parameters"
    return (
        f"{markdown(table_of(result['summary'], DECODED))}\n\n"
        f"Embedded pair ({pair}), greedy, batch {decoding['batch_size']}, block {setup['block_size']}, "
        f"{setup['target_dtype']}, {setup['attention']} attention, {_machine(result)}; medians of {decoding['repeats']} "
        f"{' '.join(filter(None, ['interleaved repeats.', caveat(result['summary'], setup['target_dtype'])]))} `{result['command']}`"
    )


def batch_table(result: dict[str, Any]) -> str:
    """Throughput by batch size."""
    headings = ["batch", "identical texts", "target.generate, tokens/s", "dflash, tokens/s", "speed-up"]
    cells = [
        [
            str(row["batch_size"]),
            f"{row['identical']} of {row['prompts']}",
            *(f"{speed:.0f}" for speed in row["tokens_per_second"].values()),
            f"{row['speedup']:.2f}x",
        ]
        for row in result["summary"]
    ]
    repeats = result["decoding"]["repeats"]
    setup = f"The same pair, {_machine(result)}; medians of {repeats} repeats. `{result['command']}`"
    return f"{markdown((headings, cells))}\n\n{setup}"


def sampling_table(result: dict[str, Any]) -> str:
    """Acceptance at temperature 1, by what is proposed."""
    rows = result["summary"]
    headings = [f"proposals at temperature 1, {rows[0]['prompts']} held-out prompts", "tau"]
    cells = [[row["proposals"], f"{row['tau']:.2f}"] for row in rows]
    return f"{markdown((headings, cells))}\n\n`{result['command']}`"


def growth_table(result: dict[str, Any]) -> str:
    """What a token costs behind a short and a long context."""
    rows = result["summary"]
    lengths = sorted({row["context_tokens"] for row in rows})
    costs = {(row["method"], row["context_tokens"]): row["ms_per_token"] for row in rows}
    cells = [
        [
            method,
            *(f"{costs[method, length]:.2f}" for length in lengths),
            f"{costs[method, lengths[-1]] / costs[method, lengths[0]]:.2f}x",
        ]
        for method in dict.fromkeys(row["method"] for row in rows)
    ]
    headings = ["ms per token", *(f"behind {length} tokens" for length in lengths), "growth"]
    size, tau = result["environment"]["target_parameters"] / 1e6, result["decoding"]["stated_tau"]
    return (
        f"{markdown((headings, cells))}\n\nSimulated: random weights ({size:.1f} M parameters) and a script that accepts "
        f"{tau} tokens per step; milliseconds are measured, {_machine(result)}. `{result['command']}`"
    )


def drafter_table(result: dict[str, Any]) -> str:
    """What a drafter that `dflash train` made accepts, and how it was made."""
    made = result["training"]
    cells = [
        [row["method"], f"{row['identical']} of {row['prompts']}", f"{row['tau_micro']:.2f}"]
        for row in result["summary"]
        if row["tau_micro"] is not None
    ]
    how = (
        f"A {made['target']['parameters'] / 1e3:.0f} K {made['target']['class']} that others trained, a drafter of "
        f"{made['parameters'] / 1e3:.0f} K parameters, {made['data']['examples']} of the target's own texts, "
        f"{made['settings']['steps']} steps, {made['processes']} processes, {made['seconds'] / 60:.1f} minutes. `{made['command']}`"
    )
    return f"{markdown((['greedy, held-out prompts', 'same text', 'tau'], cells))}\n\n{how}"


RECIPES = {  # axes of `benchmarks/training.py` as a reader knows them
    "loss": "loss and weights of positions",
    "labels": "labels",
    "anchors": "anchors per sequence",
    "scheme": "where anchors stand",
    "layers": "layers of the drafter",
    "taps": "tapped layers",
}


def recipes_table() -> str:
    """What one thing changed in a recipe is worth, a table for each number of steps."""
    return "\n\n".join(_recipes_of([read(name) for name in names]) for names in RECIPE_RESULTS)


def _recipes_of(results: Sequence[dict[str, Any]]) -> str:
    """Tau and its difference to the base, for every target measured."""
    rows = {(row["target"], row["axis"], row["cell"]): row for result in results for row in result["summary"]}
    targets = list(dict.fromkeys(target for target, _, _ in rows))
    cells = []
    for axis, cell in dict.fromkeys((axis, cell) for _, axis, cell in rows):
        line = [RECIPES[axis], cell]
        for target in targets:
            line += _gain(rows.get((target, axis, cell)))
        cells.append(line)
    headings = ["", "", *(text for target in targets for text in (f"{target}: tau", "to the base"))]
    notes = [_recipe_note(result) for result in results]
    return "\n\n".join([markdown((headings, cells)), *notes])


def _gain(row: dict[str, Any] | None) -> list[str]:
    if row is None:
        return ["", ""]
    gain = "base" if row["gain"] is None else f"{row['gain']:+.2f} ± {row['gain_interval']:.2f}"
    return [f"{row['tau']:.2f} ± {row['tau_interval']:.2f}", gain]


def _recipe_note(result: dict[str, Any]) -> str:
    asked = result["training"]
    of = "; ".join(
        f"{name}: {target['class']} of {target['parameters'] / 1e6:.1f} M parameters, {target['sequences']} texts of its own, "
        f"{target['held_out']} held-out prompts"
        for name, target in result["targets"].items()
    )
    return (
        f"{of}; {asked['steps']} steps of {asked['batch_tokens']} tokens, block {asked['block_size']}, {asked['seeds']} seeds, 95 % "
        f"intervals; {_machine(result)}. `{result['command']}`"
    )


def targets_table() -> str:
    """The families of targets that the tests prove, by version of transformers."""
    families = _module("tiny_models", ROOT / "tests").FAMILIES.values()

    def named(is_seeing: bool, versions: tuple[int, ...]) -> str:
        chosen = (f.model for f in families if (f.images is not None) is is_seeing and f.versions == versions)
        return ", ".join(dict.fromkeys(re.sub("For(CausalLM|ConditionalGeneration)$", "", model) for model in chosen))

    rows = [
        [f"**{what}**", named(is_seeing, (4, 5)), named(is_seeing, (5,))]
        for what, is_seeing in (("targets", False), ("images in the prompt", True))
    ]
    return markdown((["", "transformers 4.57 and 5", "transformers 5 alone"], rows))


def engines_table() -> str:
    """How many of the published drafters each engine reads, as their cards say."""
    build = _module("build", ROOT / "model_cards")
    data = json.loads((ROOT / "model_cards" / "drafters.json").read_text(encoding="utf-8"))
    verdicts = {"this library": [build.library_verdict(data, drafter)[0] for drafter in data["drafters"]]}
    for engine, name in build.ENGINES.items():
        verdicts[name] = [build.engine_verdict(data, drafter, engine)["serves"] for drafter in data["drafters"]]
    rows = [[name, *(str(said.count(word)) for word in (True, False, None))] for name, said in verdicts.items()]
    return markdown(([f"of {len(data['drafters'])} published drafters", "read", "refused", "not known"], rows))


def _module(name: str, folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


def _machine(result: dict[str, Any]) -> str:
    setup = result["environment"]
    threads = f"{setup['threads']} thread{'' if setup['threads'] == 1 else 's'}"
    return f"{threads} of one {setup['cpu']}, torch {setup['torch']}, transformers {setup['transformers']}"


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "decode_tiny_cpu": decode_table,
    "batch_tiny_cpu": batch_table,
    "growth_small_cpu": growth_table,
    "sampling_tiny": sampling_table,
    "drafter_stories_cpu": drafter_table,
}


RECIPE_RESULTS = (("training_stories_cpu", "training_tiny_cpu"), ("anchors_stories_cpu", "anchors_tiny_cpu"))


def read(name: str) -> dict[str, Any]:
    """The committed result of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def with_all_tables(readme: str) -> str:
    """The README as results, tests and cards have it."""
    for name, table in TABLES.items():
        readme = with_table(readme, name, table(read(name)))
    readme = with_table(readme, "recipes", recipes_table())
    return with_table(with_table(readme, "targets", targets_table()), "engines", engines_table())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    readme = README.read_text(encoding="utf-8")
    wanted = with_all_tables(readme)
    if args.check:
        if readme != wanted:
            print("README.md and the results disagree: run `python benchmarks/report.py`.", file=sys.stderr)
        return int(readme != wanted)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
