"""Writes the tables of this repository's results into its README and docs, or checks them.

    python benchmarks/reporting.py [--check]

`dflash report` knows what `dflash bench`, `eval`, `canary` and `train` write; here are the tables of the other benchmarks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dflash.evaluation import PLAIN, fill_pages, markdown_pages, results, tables


Row = dict[str, Any]
Column = tables.Column
Part = tables.Part
ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", ROOT / "docs"]

AXES = {
    "context": "context, tokens",
    "length": "new tokens",
    "width": "block",
    "loss": "loss and weights of positions",
    "anchors": "anchors per sequence",
    "scheme": "where anchors stand",
    "layers": "layers of the drafter",
    "taps": "tapped layers",
}
COLUMNS = {
    **tables.COLUMNS,
    "tau_interval": Column("± (95 %)", 2),
    "batch_size": Column("batch"),
    "prompt_tokens": Column("prompt tokens", 1),
    "reused_tokens": Column("of them kept", 1),
    "proposals": Column("proposals at temperature 1"),
    "axis": Column("what changes"),
    "context_tokens": Column("context, tokens"),
    "growth": Column("growth", 2, unit="x"),
    "ms_per_token": Column("ms per token", 2),
    "speedup_at_stated_tau": Column("speed-up", 2, unit="x"),
    "tau_to_match_plain": Column("break-even tau", 2),
    "allocated_bytes": Column("allocated, MiB", 0, scale=2**-20),
    "over_no_head": Column("to no head", 2, unit="x"),
    "over_plain": Column(f"to {PLAIN}", 2, unit="x"),
    "taps_bytes": Column("of it hidden states, MiB", 0, scale=2**-20),
    "way": Column("layout"),
    "over_theirs": Column("to transformers", 2, unit="x"),
    "over_static": Column("to static batches", 2, unit="x"),
    "over_theirs_by_cpu": Column("by CPU time", 2, unit="x"),
    "over_static_by_cpu": Column("by CPU time", 2, unit="x"),
    "over_naive": Column("to naive", 2, unit="x"),
    "live_bytes": Column("peak memory, MiB", 0, scale=2**-20),
    "ms": Column("ms", 0),
    "ms_per_forward": Column("ms", 1),
    "vllm": Column("vLLM's CPU kernel"),
    "identical_in_one_batch": Column("identical in one batch", is_share=True),
    "vllm_tau": Column("tau in vLLM", 2),
    "recipe_tau": Column("tau"),
    "recipe_gain": Column("to the base"),
    "ms_per_step_p10": Column("p10-p90", 2, last="ms_per_step_p90"),
    "ms_per_step_of_first_text": Column("first text's", 2),
    "history_over_without": Column("with over without", 2, unit="x"),
    "generate_over_this": Column("x generate", 2),
    "static_over_this": Column("x static", 2),
    "peak_memory_gb": Column("GB", 1),
}
# By kind, the fields that are shown; of other kinds all are.
FIELDS: dict[str, Sequence[str]] = {
    **tables.SHOWN,
    "batch": ("batch_size", "identical", "tokens_per_second", "speedup"),
    "conversation": ("turn", "identical", "prompt_tokens", "reused_tokens", "ms_to_first_token"),
    "sampling": ("proposals", "prompts", "tau"),
    "many texts": (
        "method",
        "identical",
        "tokens_per_second",
        "over_theirs",
        "over_theirs_by_cpu",
        "over_static",
        "over_static_by_cpu",
    ),
    "engine": ("vllm", "identical", "identical_in_one_batch", "tau", "vllm_tau"),
}


def swept(result: Row) -> list[Part]:
    """Methods side by side: by the context if nothing else was swept, or by each value; and what a prompt allocates."""
    timed = [row for row in result["summary"] if row.get("ms_per_token") is not None]
    timed = [row for row in timed if row.get("axis") != "budget"]  # of a tree no tau is stated
    allocated = [row for row in result["summary"] if "allocated_bytes" in row]
    is_by_context = {row.get("axis") for row in timed} == {"context"}
    keys = ("method", "axis", "value", "ms_per_token", "growth", "speedup_at_stated_tau", "tau_to_match_plain")
    return [
        (by_context(timed) if is_by_context else by_value(timed), keys),
        (allocated, ("context_tokens", "method", "allocated_bytes", "over_plain", "taps_bytes")),
    ]


def by_context(timed: Sequence[Row]) -> list[Row]:
    """A row for each method: its times by the context, and the last over the first."""
    methods: dict[str, Row] = {}
    for row in timed:
        method = methods.setdefault(row["method"], {"method": row["method"], "ms_per_token": {}})
        times = method["ms_per_token"]
        times[f"after {row['context_tokens']} tokens"] = row["ms_per_token"]
        method["growth"] = row["ms_per_token"] / next(iter(times.values()))
    return list(methods.values())


def by_value(timed: Sequence[Row]) -> list[Row]:
    """A row for each value of each axis: the methods' times, speed-ups and break-even taus."""
    points: dict[Any, Row] = {}
    for row in timed:
        axis, value = row.get("axis"), row.get("value")
        point = points.setdefault((axis, value), {"axis": AXES.get(str(axis), axis), "value": value})
        point.setdefault("ms_per_token", {})[row["method"]] = row["ms_per_token"]
        if row["method"] != PLAIN:
            for key in ("speedup_at_stated_tau", "tau_to_match_plain"):
                point.setdefault(key, {})[row["method"]] = row.get(key)
    return list(points.values())


def drafter(result: Row) -> list[Part]:
    """What was measured, or what its training record says of held-out prompts."""
    rows = result["summary"]
    if not rows:
        figures = result["training"].get("figures") or {}
        rows = [{"task": task.replace("_", " "), **row} for task, row in figures.items()]
    accepting = [row for row in rows if row.get("tau", row.get("tau_micro")) is not None]
    keys = ("method", "identical", "tau", "tau_micro", "tokens_per_step")
    has_tasks = len({row.get("task") for row in accepting}) > 1
    return [(accepting, ("task", *keys) if has_tasks else keys)]


def recipes(result: Row) -> list[Part]:
    """Tau and its difference to the base, the targets side by side."""
    cells: dict[Any, Row] = {}
    for row in result["summary"]:
        name = row["cell"].replace("+", ", ").replace("=", " ").replace("_", " ")
        axis = AXES.get(row["axis"], row["axis"])
        cell = cells.setdefault((axis, name), {"axis": axis, "cell": name, "recipe_tau": {}, "recipe_gain": {}})
        gain = "base" if row["gain"] is None else f"{row['gain']:+.2f}{spread(row['gain_interval'])}"
        cell["recipe_tau"][row["target"]] = f"{row['tau']:.2f}{spread(row['tau_interval'])}"
        cell["recipe_gain"][row["target"]] = gain
    of_speed = ("target", "head", "identical", "tau", "ms_per_step", "tokens_per_second", "speedup", "over_no_head")
    return [
        (list(cells.values()), ("axis", "cell", "recipe_tau", "recipe_gain")),
        (result.get("speeds", []), of_speed),
    ]


def spread(interval: float | None) -> str:
    return "" if interval is None else f" ± {interval:.2f}"


def training_step(result: Row) -> list[Part]:
    def with_memory(rows: Sequence[Row]) -> list[Row]:
        return [{**row, "over_naive": row.get("speedup"), "live_bytes": row["peak_memory_bytes"]} for row in rows]

    return [
        (with_memory(result["summary"]), ("way", "batches", "tokens_per_second", "over_naive", "live_bytes")),
        (with_memory(result.get("losses", ())), ("vocabulary", "loss", "ms", "live_bytes")),
    ]


def shape(result: Row) -> list[Part]:
    """Ways of decoding, and forwards by the number of columns."""
    steps = ("method", "ms_per_step", "stated_tau", "ms_per_token", "speedup_at_stated_tau")
    return [(result["summary"], steps), (result["forwards"], ("dtype", "ms_per_forward"))]


def dialects(result: Row) -> list[Part]:
    rows = [
        {
            "checkpoint": name,
            "written by": f"{fixture['package']} {fixture.get('version', '')}",
            f"same outputs, within {result['tolerance']:g}": fixture.get("agrees"),
        }
        for name, fixture in result["fixtures"].items()
    ]
    return [(rows, None)]


def gpu(result: Row) -> list[Part]:
    """Decoding, training, and what was not measured."""
    kinds: dict[str, list[Row]] = {"decode": [], "training": [], "rest": []}
    for row in result["summary"]:
        kind = row["kind"] if row["status"] == "measured" else "rest"
        kinds.setdefault(kind, []).append({**row, "label": row["label"].split(":")[0]} if kind == "decode" else row)
    step = ("ms_per_step", "ms_per_step_p10", "ms_per_step_of_first_text", "tokens_per_step")
    ratios = ("generate_over_this", "static_over_this")
    return [
        (kinds["decode"], ("shape", "context", "batch", "label", *step, *ratios, "peak_memory_gb", "compilations")),
        (kinds["training"], ("shape", "label", "tokens_per_second", "ms_per_step", "peak_memory_gb")),
        (kinds["rest"], ("name", "status", "reason")),
    ]


PARTS: dict[str, Callable[[Row], list[Part]]] = {
    "sweep": swept,
    "drafter": drafter,
    "training": recipes,
    "training_step": training_step,
    "dialects": dialects,
    "gpu": gpu,
    "shape": shape,
}


def tables_of(result: Row, headline: bool = False) -> list[tables.Table]:
    """The tables of a result; `headline`: of the methods among which a user chooses alone."""
    kind = "dialects" if "fixtures" in result else result["kind"]  # the first fixtures named no kind
    parts = PARTS[kind](result) if kind in PARTS else [(result["summary"], FIELDS.get(kind))]
    chosen = tables.chosen(parts, headline)
    return [tables.table_of(rows, keys, columns=COLUMNS) for rows, keys in chosen if rows]


def facts_of(result: Row) -> dict[str, str | None]:
    """What the figures of a result depend on: also its training, and what a simulated pair is."""
    facts = results.setup(result)
    environment, decoding, training = result["environment"], result["decoding"], result.get("training", {})
    if "code_for" in environment:
        facts["hardware"] = f"code for an {environment['code_for']}, counted and not run"
    if decoding.get("is_simulated"):
        size = environment.get("target_parameters")
        weights = f"random weights ({results.count(size)} parameters)" if size else "random weights"
        tau = decoding.get("stated_tau")
        facts["simulated"] = (
            f"simulated: {weights} and a script that accepts {tau} tokens per step; milliseconds are measured"
        )
    if result["kind"] == "drafter":
        command = training["command"]
        facts["training"] = how_trained(training)
        facts["trained by"] = command if isinstance(command, str) else " ".join(command)
    if result["kind"] == "training":
        # The targets have sizes of their own; the environment is that of the last one alone.
        facts["pair"] = None
        facts["targets"] = "; ".join(described(name, target) for name, target in result["targets"].items())
        block = f", block {training['block_size']}" if training["block_size"] else ""  # else that of the first drafter
        seeds = "one seed" if training["seeds"] == 1 else f"{training['seeds']} seeds, 95 % intervals"
        facts["training"] = f"{training['steps']} steps of {training['batch_tokens']} tokens{block}, {seeds}"
    return {name: fact for name, fact in facts.items() if fact or result["kind"] in results.NEEDED}


def how_trained(training: Row) -> str:
    target = training["target"]
    processes = "1 process" if training["processes"] == 1 else f"{training['processes']} processes"
    return (
        f"trained on {training['data']['examples']} texts of a {target['class']} of {results.count(target['parameters'])} "
        f"parameters, {training['settings']['steps']} steps, {processes}, {training['seconds'] / 60:.1f} minutes"
    )


def described(name: str, target: Row) -> str:
    return (
        f"{name}: {target['class']} of {results.count(target['parameters'])} parameters, {target['sequences']} texts of its "
        f"own, {target['held_out']} held-out prompts"
    )


def shown(read: Sequence[Row], is_headline: bool) -> str:
    """The tables of results of one kind, and what their figures depend on."""
    rows = [row for result in read for row in result["summary"]]
    made = tables_of({**read[0], "summary": rows}, is_headline)
    return markdown_pages.with_facts(made, read, [facts_of(result) for result in read])


def filled(check: bool) -> list[Path]:
    """The pages of this repository that differ from its results; without `check` they are written."""
    return fill_pages([RESULTS], PAGES, check, shown)


def main() -> None:
    check = "--check" in sys.argv
    pages = filled(check)
    print("\n".join(str(page.relative_to(ROOT)) for page in pages))
    if check and pages:
        sys.exit("These pages differ from the results: run `python benchmarks/reporting.py`.")


if __name__ == "__main__":
    main()
