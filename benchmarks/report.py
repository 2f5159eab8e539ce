"""Writes the tables of the README and of docs/: measured figures out of the committed results, and what works out of tests and cards.

    python benchmarks/report.py

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`, in as many pages as show it. With `--check` nothing is
written, and a page that says anything else than results, tests and cards is an error.
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

from dflash.evaluation import caveat, table_of
from dflash.evaluation.tables import DECODED, markdown, with_table


ROOT = Path(__file__).parent.parent
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


def headline_table(result: dict[str, Any]) -> str:
    """The few rows of `decode_table` that a first look needs."""
    rows = [row for row in result["summary"] if row["method"] in HEADLINE]
    setup = result["environment"]
    return (
        f"{markdown(table_of(rows, DECODED))}\n\n"
        f"The pair that is part of the package ({setup['target_parameters'] / 1e6:.1f} M and "
        f"{setup['drafter_parameters'] / 1e6:.1f} M parameters), greedy, batch {result['decoding']['batch_size']}, "
        f"{setup['target_dtype']}, {_machine(result)}."
    )


def tau_example(result: dict[str, Any]) -> str:
    """Tau and tokens per step, counted on one measured text."""
    runs = (run for run in result["measurements"] if run["method"] == "dflash" and len(run["acceptance_lengths"]) > 1)
    run = next(run for run in runs if sum(run["acceptance_lengths"]) >= run["num_tokens"] and run["num_tokens"] < 30)
    lengths, kept = run["acceptance_lengths"], run["num_tokens"] - 1
    steps, given = len(lengths), sum(lengths)
    listed = f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"
    return (
        f"An example: the target's answer to one of the measured questions has {run['num_tokens']} tokens. The prompt's forward "
        f"gives the first one, and {steps} verify steps give the other {kept}. The steps commit {listed} tokens, the target's own "
        f"included. `tau` is their mean: {given} / {steps} = {given / steps:.2f}. The answer ends inside the last step, where "
        f"{given - kept} of its {lengths[-1]} tokens is cut. `tokens per step` is what was kept: {kept} / {steps} = "
        f"{kept / steps:.2f}. A speed-up is tokens per step, divided by what a step costs in steps of plain decoding."
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
    """What a token costs after a short and a long context."""
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
    headings = ["ms per token", *(f"after {length} tokens" for length in lengths), "growth"]
    return f"{markdown((headings, cells))}\n\n{_simulated(result)}"


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


def tiny_drafter_table(result: dict[str, Any]) -> str:
    """What the embedded drafter accepts after its own training, and how it was made."""
    made = result["training"]
    cells = [
        [
            task,
            f"{figures['identical']} of {figures['prompts']}",
            f"{figures['tau']:.2f}",
            f"{figures['tokens_per_step']:.2f}",
        ]
        for task, figures in (
            ("held-out templates", made["figures"]["heldout_templates"]),
            ("GSM8K test", made["figures"]["gsm8k_test"]),
        )
    ]
    how = (
        f"A drafter of {made['parameters'] / 1e6:.1f} M parameters for a target of {made['target']['parameters'] / 1e6:.1f} M, "
        f"{made['data']['examples']} of the target's own texts, {made['settings']['steps']} steps, {made['processes']} processes, "
        f"{made['seconds'] / 60:.1f} minutes. `{' '.join(made['command'])}`"
    )
    return f"{markdown((['greedy', 'same text', 'tau', 'tokens per step'], cells))}\n\n{how}"


def conversation_table(result: dict[str, Any]) -> str:
    """Time to the first token, turn by turn, with and without a kept conversation."""
    headings = [
        "turn",
        "same text",
        "prompt tokens",
        "of them kept",
        "first token, ms, afresh",
        "first token, ms, kept",
    ]
    cells = [
        [
            str(row["turn"]),
            f"{row['identical']} of {row['chats']}",
            f"{row['prompt_tokens']:.1f}",
            f"{row['reused_tokens']:.1f}",
            *(f"{row['ms_to_first_token'][way]:.1f}" for way in ("fresh", "kept")),
        ]
        for row in result["summary"]
    ]
    return f"{markdown((headings, cells))}\n\nThe embedded pair, {_machine(result)}. `{result['command']}`"


def sweep_table(result: dict[str, Any]) -> str:
    """What a token costs along each axis, and the tau at which drafting breaks even."""
    rows = [row for row in result["summary"] if row["axis"] != "budget"]
    plain = {(row["axis"], row["value"]): row for row in rows if row["method"] == "target.generate"}
    cells = [
        [
            SWEPT[row["axis"]],
            str(row["value"]),
            f"{plain[row['axis'], row['value']]['ms_per_token']:.2f}",
            f"{row['ms_per_token']:.2f}",
            f"{row['speedup_at_stated_tau']:.2f}x",
            f"{row['tau_to_match_plain']:.2f}",
        ]
        for row in rows
        if row["method"] != "target.generate"
    ]
    headings = [
        "what changes",
        "value",
        "target.generate, ms per token",
        "dflash eager, ms per token",
        "speed-up",
        "break-even tau",
    ]
    return f"{markdown((headings, cells))}\n\n{_simulated(result)}"


def memory_table(result: dict[str, Any]) -> str:
    """What a prompt's forward allocates, over the weights."""
    headings = ["context, tokens", "method", "allocated, MiB", "to target.generate", "of it hidden states, MiB"]
    cells = [
        [
            str(row["context_tokens"]),
            row["method"],
            f"{row['allocated_bytes'] / 2**20:.0f}",
            f"{row['over_plain']:.2f}x",
            f"{row['taps_bytes'] / 2**20:.0f}",
        ]
        for row in result["summary"]
    ]
    setup = result["environment"]
    return (
        f"{markdown((headings, cells))}\n\nRandom weights of the shape {result['decoding']['shape']} "
        f"({setup['target_parameters'] / 1e6:.1f} M parameters), {setup['target_dtype']}, {_machine(result)}. `{result['command']}`"
    )


def training_step_table(result: dict[str, Any]) -> str:
    """Throughput and memory of a training step by how texts are laid out, and of the loss by how it is computed."""
    ways = [
        [
            row["way"],
            str(row["batches"]),
            f"{row['tokens_per_second']:.0f}",
            f"{row['speedup']:.2f}x",
            f"{row['peak_memory_bytes'] / 2**20:.0f}",
        ]
        for row in result["summary"]
    ]
    losses = [
        [str(row["vocabulary"]), row["loss"], f"{row['ms']:.0f}", f"{row['peak_memory_bytes'] / 2**20:.0f}"]
        for row in result["losses"]
    ]
    return "\n\n".join(
        [
            markdown((["layout", "batches", "tokens/s", "to naive", "peak memory, MiB"], ways)),
            markdown((["vocabulary", "loss", "ms", "peak memory, MiB"], losses)),
            f"The embedded pair, {_machine(result)}. `{result['command']}`",
        ]
    )


def vllm_table(result: dict[str, Any]) -> str:
    """The embedded pair in vLLM: texts and acceptance beside ours."""
    headings = ["vLLM's CPU kernel", "same text", "same text, one batch", "tau here", "tau in vLLM"]
    cells = [
        [
            row["vllm"],
            f"{row['identical']} of {row['prompts']}",
            f"{row['identical_in_one_batch']} of {row['prompts']}",
            f"{row['tau']:.2f}",
            f"{row['vllm_tau']:.2f}",
        ]
        for row in result["summary"]
    ]
    setup = result["environment"]
    return (
        f"{markdown((headings, cells))}\n\n{setup['engine']}, {setup['cpu']}, greedy, float32. `{result['command']}`"
    )


def launches_table(result: dict[str, Any]) -> str:
    """Kernels and library calls of one compiled step, by Inductor's own code."""
    headings = ["compiled step", "launches", "matrix products", "attention", "fused kernels"]
    cells = []
    for case in result["cases"]:
        kinds = case["by_kind"]
        products, attention = kinds["extern_kernels.mm"], kinds["flex attention"]
        cells.append(
            [case["what"], *map(str, (case["launches"], products, attention, case["launches"] - products - attention))]
        )
    case, setup = result["cases"][0], result["environment"]
    return (
        f"{markdown((headings, cells))}\n\nThe shape of {case['size']}, block {case['width']}, capacity {case['capacity']}, "
        f"{setup['dtype']}, code for an {setup['code_for']} written by torch {setup['torch']}; counted in the code, not run. "
        f"`{result['command']}`"
    )


def operations_table(result: dict[str, Any]) -> str:
    """Operations and waits of a step on fake CUDA, by mode."""
    cells = [
        [row["mode"], row["path"], *(str(max(row[key])) for key in ("operations", "waits"))] for row in result["modes"]
    ]
    headings = ["mode", "path", "operations from Python, a step", "waits of the host, a step"]
    setup = result["environment"]
    return (
        f"{markdown((headings, cells))}\n\nA small random pair on fake CUDA tensors of torch {setup['torch']}: counted, not timed. "
        f"`{result['command']}`"
    )


def dialects_table(result: dict[str, Any]) -> str:
    """Checkpoints that other tools wrote, read here."""
    cells = [
        [name, f"{fixture['package']} {fixture['version']}", "yes" if fixture["agrees"] else "no"]
        for name, fixture in result["fixtures"].items()
    ]
    headings = ["checkpoint", "written by", f"same outputs, within {result['tolerance']:g}"]
    return f"{markdown((headings, cells))}\n\n`{result['command']}`"


def _simulated(result: dict[str, Any]) -> str:
    size, tau = result["environment"]["target_parameters"] / 1e6, result["decoding"]["stated_tau"]
    return (
        f"Simulated: random weights ({size:.1f} M parameters) and a script that accepts {tau} tokens per step; milliseconds are "
        f"measured, {_machine(result)}. `{result['command']}`"
    )


HEADLINE = ("target.generate", "prompt lookup", "native dflash", "dflash")
SWEPT = {"context": "context, tokens", "length": "new tokens", "batch": "batch", "width": "block"}
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


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {  # by the name of the committed result
    "decode_tiny_cpu": decode_table,
    "batch_tiny_cpu": batch_table,
    "growth_small_cpu": growth_table,
    "sampling_tiny": sampling_table,
    "conversation_tiny_cpu": conversation_table,
    "sweep_small_cpu": sweep_table,
    "memory_small_cpu": memory_table,
    "memory_qwen3_0_6b_cpu": memory_table,
    "drafter_stories_cpu": drafter_table,
    "drafter_tiny_cpu": tiny_drafter_table,
    "training_step_tiny_cpu": training_step_table,
    "vllm_pair_cpu": vllm_table,
    "device_code_qwen3": launches_table,
    "device_operations": operations_table,
    "dialect_fixtures": dialects_table,
}
OTHERS: dict[str, Callable[[], str]] = {  # of several results, of a part of one, or of none
    "headline": lambda: headline_table(read("decode_tiny_cpu")),
    "tau_example": lambda: tau_example(read("decode_tiny_cpu")),
    "recipes": lambda: recipes_table(),
    "targets": lambda: targets_table(),
    "engines": lambda: engines_table(),
}


RECIPE_RESULTS = (("training_stories_cpu", "training_tiny_cpu"), ("anchors_stories_cpu", "anchors_tiny_cpu"))


def read(name: str) -> dict[str, Any]:
    """The committed result of that name."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def pages() -> list[Path]:
    """The files that may show a table."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(text: str) -> list[str]:
    """The names of the tables that a page has a place for."""
    return re.findall(r"<!-- (\w+):begin -->", text)


def with_all_tables(text: str) -> str:
    """A page with each of its tables as results, tests and cards have it; ValueError for one that does not exist."""
    for name in shown(text):
        if name not in {**TABLES, **OTHERS}:
            raise ValueError(f"There is no table {name!r}: use one of {', '.join([*TABLES, *OTHERS])}.")
        text = with_table(text, name, TABLES[name](read(name)) if name in TABLES else OTHERS[name]())
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    status = 0
    for path in pages():
        text = path.read_text(encoding="utf-8")
        wanted = with_all_tables(text)
        if text == wanted:
            continue
        if args.check:
            name = path.relative_to(ROOT)
            print(f"{name} and the results disagree: run `python benchmarks/report.py`.", file=sys.stderr)
            status = 1
        else:
            path.write_text(wanted, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
