"""`dflash eval`: the paper's tasks with any pair, plain decoding beside DFlash, answers scored."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from .options import Dtype, checkpoint, hide_loading_bars, listed, load_pair, named, own_device, show_table
from .terminal import counting_bar


def evaluate(
    target: Annotated[str, typer.Option(help="The target: a local folder or an id on the Hub.")],
    drafter: Annotated[str, typer.Option(help="Its DFlash drafter: a local folder or an id on the Hub.")],
    tasks: Annotated[str, typer.Option(help="Names out of those above, with commas between.")],
    prompts: Annotated[int, typer.Option(min=0, help="Prompts per task; 0 for all.")] = 80,
    seed: Annotated[int, typer.Option(min=0, help="Which prompts: the same for the same seed.")] = 0,
    data_root: Annotated[Path | None, typer.Option(help="Read the tasks from files below this folder.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 2048,
    repeats: Annotated[int, typer.Option(min=1, help="How often each method answers; the median counts.")] = 1,
    methods: Annotated[
        str, typer.Option(help="Besides target.generate: names out of those above, with commas between.")
    ] = "dflash",
    dtype: Annotated[Dtype, typer.Option(help="auto: as each checkpoint is stored.")] = Dtype.auto,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, auto … Default: a GPU per process if there are any.")
    ] = None,
    chat_template: Annotated[bool, typer.Option(help="Ask in the target's chat template.")] = True,
    thinking: Annotated[bool, typer.Option(help="Let the chat template ask for thinking.")] = False,
    score: Annotated[bool, typer.Option(help="Score the answers; runs code that the target wrote.")] = True,
    url: Annotated[
        str | None, typer.Option(help="Ask this server (vLLM, SGLang), which serves the pair; nothing is loaded here.")
    ] = None,
    baseline_url: Annotated[str | None, typer.Option(help="… and this one, which serves the target alone.")] = None,
    model: Annotated[str | None, typer.Option(help="The served model's name. Default: the only one.")] = None,
    hardware: Annotated[str | None, typer.Option(help="What the servers run on, for the record.")] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file to write; a run that was stopped goes on from its .jsonl.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Measures a pair on the paper's tasks: speed, acceptance, memory, and whether the answers are right.

    Tasks: gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench,
    spec-bench, alpaca, speed-bench.

    Methods: target.generate, prompt lookup, native dflash (transformers 5.15 on),
    dflash, dflash eager, dflash compiled, dflash adaptive, dflash tree,
    dflash drafting nothing, random drafter adaptive.

    With --url and --baseline-url two servers answer, and only the target's tokenizer is read here.

    In several processes, each with its share of the prompts:
    torchrun --nproc-per-node N -m dflash eval …,
    or accelerate launch (which starts a single one with --cpu).
    """
    hide_loading_bars()
    if data_root is not None:
        _hide_reading_bars()
    from dflash.common.processes import Processes
    from dflash.evaluation import Plan, pair_backend, questions_of, run_plan

    if (url is None) != (baseline_url is None):
        raise ValueError("--url and --baseline-url go together: the speed-up is over the target served alone.")
    if url is not None and methods != "dflash":
        raise ValueError(f"--methods {methods} run in this process, and --url asks a server: leave one of them out.")
    plan = Plan(
        target=checkpoint(target, "--target"),
        drafter=checkpoint(drafter, "--drafter"),
        tasks=listed(tasks, "--tasks"),
        num_prompts=prompts or None,
        seed=seed,
        data_root=data_root,
        max_new_tokens=max_new_tokens,
        repeats=repeats,
        methods=listed(methods, "--methods"),
        thinking=thinking,
        chat_template=chat_template,
        score=score,
    )
    processes = Processes()
    if url is not None and processes.count > 1:
        raise ValueError(
            f"--url asks one question at a time, and {processes.count} processes would ask more: start one."
        )
    questions = questions_of(plan)
    if url is not None and baseline_url is not None:
        backend, tokenizer = _served(plan, url, baseline_url, model, hardware)
    else:
        pair = load_pair(target, drafter, dtype, device or own_device(processes))
        backend, tokenizer = pair_backend(plan, pair.target, pair.drafter), pair.tokenizer
    # No thread of its own draws the bar: it would take time from what is measured.
    with counting_bar(processes.is_first, auto_refresh=False) as bar:
        progress = _Bar(bar)
        result = run_plan(plan, questions, backend, tokenizer, output, processes, progress.begin, progress.done)
    if not processes.is_first:
        return
    if as_json:
        print(json.dumps({name: value for name, value in result.items() if name != "measurements"}))
    else:
        _show(result)
    if output is not None:
        print(f"{output} holds the figures, {output.with_suffix('.jsonl')} the answers.", file=sys.stderr)


SHOWN = (
    "task", "method", "identical", "score", "tokens_per_second", "speedup", "tau_micro", "ms_to_first_token",
    "ms_per_output_token", "peak_memory_bytes",
)  # fmt: skip


def _served(plan: Any, url: str, baseline_url: str, model: str | None, hardware: str | None) -> tuple[Any, Any]:
    """Two servers as a backend, and the target's tokenizer."""
    from transformers import AutoTokenizer

    from dflash.evaluation import Server, server_backend

    with named("--target", plan.target):
        tokenizer = AutoTokenizer.from_pretrained(plan.target)
    servers = Server(url), Server(baseline_url)
    return server_backend(*servers, tokenizer, plan.max_new_tokens, model, hardware), tokenizer


def _hide_reading_bars() -> None:
    """Local rows are read in no time, and what is wrong with them is said in a sentence of ours."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)


class _Bar:
    """Progress over one process's share, with the task's speed-up and tau so far."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._answers: list[Any] = []

    def begin(self, share: int, done: int) -> None:
        if done:
            self._progress.console.print(f"{done} questions were answered before.")
        self._progress.update(self._task, total=share, refresh=True)

    def done(self, answers: Sequence[Any]) -> None:
        self._answers += answers
        said = self._so_far() if self._answers else ""
        self._progress.update(self._task, advance=1, description=said, refresh=True)

    def _so_far(self) -> str:
        from dflash.evaluation import summarise_answers

        row = summarise_answers([a for a in self._answers if a.task == self._answers[-1].task])[-1]
        tau = "" if row["tau_micro"] is None else f", tau {row['tau_micro']:.2f}"
        return f"{row['task']} {row['speedup']:.2f}x{tau}"


def _show(result: dict[str, Any]) -> None:
    """The table, and what its figures depend on."""
    from dflash.evaluation import caveat, place_of, table_of

    rows = result["summary"]
    show_table(table_of([*rows, *_means(rows)], SHOWN, short=True), "Everything counted, the prompt's forward too")
    console = Console(highlight=False)
    decoding, setup = result["decoding"], result["environment"]
    facts = [
        setup.get("engine"),
        setup.get("target_dtype"),
        place_of(setup),
        f"{setup['processes']} processes" if setup["processes"] > 1 else "",
        f"block size {setup['block_size']}" if "block_size" in setup else "",
        "greedy, batch 1",
        f"thinking {'on' if decoding['enable_thinking'] else 'off'}",
        f"at most {decoding['max_new_tokens']} tokens",
    ]
    console.print(Text(f"{', '.join(filter(None, facts))}. {caveat(rows, setup.get('target_dtype'))}".rstrip(), "dim"))
    for task in result["tasks"]:
        if task["too_long"]:
            console.print(
                f"{task['too_long']} of {task['prompts']} prompts of {task['task']} are left out: with the answer they are "
                "longer than the target's positions."
            )


def _means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per method with the means of its tasks, if there are several."""
    means = []
    for method in dict.fromkeys(row["method"] for row in rows[1:]):
        chosen = [row for row in rows if row["method"] == method and row["tau_micro"] is not None]
        if len(chosen) > 1:
            mean = {key: sum(row[key] for row in chosen) / len(chosen) for key in ("speedup", "tau_micro")}
            means.append({"task": "mean", "method": method, **mean})
    return means
