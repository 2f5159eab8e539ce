"""`dflash eval`: the paper's tasks or one's own prompts with any pair, plain decoding beside DFlash, answers scored."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.text import Text

from dflash.common.files import only_writer
from dflash.common.messages import counted

from . import arguments, loading
from .arguments import decoding_option, prompt_option, result_option, server_option
from .terminal import counting_bar, show_table
from .tracing import Decode, TraceFile, check_trace_file, recording


def evaluate(
    target: arguments.Target,
    drafter: arguments.Drafter,
    tasks: Annotated[str | None, typer.Option(help="Names of the tasks above, with commas between.")] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help=f"Your own, besides or instead of tasks; not scored. {arguments.PROMPT_FILE}; may be repeated."
        ),
    ] = None,
    limit: Annotated[int, prompt_option(min=0, help="Prompts of each task and file; 0 for all.")] = 80,
    seed: Annotated[int, prompt_option(min=0, help="Chooses the prompts.")] = 0,
    data_root: Annotated[Path | None, prompt_option(help="Read the tasks from files below this folder.")] = None,
    chat_template: arguments.ChatTemplate = True,
    thinking: arguments.Thinking = False,
    score: Annotated[bool, prompt_option(help="Score the answers; runs code that the target wrote.")] = True,
    unsafe_code: Annotated[
        bool, prompt_option("--unsafe-code", help="Run that code even where this system cannot confine it.")
    ] = False,
    methods: Annotated[str, decoding_option(help="Methods besides target.generate, with commas between.")] = "dflash",
    max_new_tokens: Annotated[
        int | None,
        decoding_option(min=2, help="Longest answer, in tokens. Default: 2048, or half of the target's positions."),
    ] = None,
    repeats: Annotated[int, decoding_option(min=1, help="Runs of each method on each prompt; the median counts.")] = 1,
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = None,
    trust_remote_code: arguments.TrustRemoteCode = False,
    url: Annotated[str | None, server_option(help="A server of the pair (vLLM, SGLang, …); loads no weights.")] = None,
    baseline_url: Annotated[str | None, server_option(help="A server of the target alone.")] = None,
    model: arguments.Model = None,
    baseline_model: arguments.BaselineModel = None,
    hardware: arguments.Hardware = None,
    output: Annotated[
        Path | None, result_option(help="JSON to write; a stopped run continues from its .jsonl.")
    ] = None,
    overwrite: Annotated[bool, result_option("--overwrite", help="Begin anew if --output exists.")] = False,
    trace: TraceFile = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Measures a pair on the paper's tasks or your own prompts: speed, acceptance, memory, same texts, right answers.

    Tasks: gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench,
    spec-bench, alpaca, speed-bench.

    Methods: target.generate, prompt lookup, native dflash (transformers 5.15 on),
    dflash (the drafter alone), dflash with lookup (the default of
    spec_generate), dflash with lookup and trees, dflash eager,
    dflash compiled, dflash adaptive, dflash tree, dflash drafting nothing,
    random drafter adaptive.

    With --url and --baseline-url two servers answer, and only the target's tokenizer is read here.

    In several processes, each with its share of the prompts:
    torchrun --nproc-per-node N -m dflash eval …,
    or accelerate launch (which starts a single one with --cpu).
    """
    loading.hide_loading_bars()
    if data_root is not None:  # reading local rows takes no time, and its errors are sentences of ours
        import datasets

        datasets.disable_progress_bars()
        datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    from dflash.common.processes import Processes
    from dflash.common.runs import Run
    from dflash.evaluation import (
        OURS,
        EvalPlan,
        Server,
        check_eval_output,
        check_methods,
        pair_backend,
        questions_of,
        questions_of_prompts,
        run_eval,
        server_backend,
    )

    if tasks is None and not prompts:
        raise ValueError(
            "Nothing is asked: give --tasks with names of tasks, --prompts with a file of your own, or both."
        )
    if (url is None) != (baseline_url is None):
        raise ValueError("--url and --baseline-url go together: the speed-up is over the target served alone.")
    if url is not None and methods != "dflash":
        raise ValueError(f"--methods {methods} run in this process, and --url asks a server: leave one of them out.")
    chosen = loading.listed(methods, "--methods")
    check_methods(chosen)
    if trace is not None and (url is not None or OURS not in chosen):
        why = "--url asks a server" if url is not None else f"--methods {methods} leaves it out"
        raise ValueError(f"--trace {trace} records the drafts of the method {OURS}, and {why}: leave one of them out.")
    loading.known_device(device)
    wanted = () if tasks is None else loading.listed(tasks, "--tasks")
    pair_names = loading.checkpoint(target, "--target"), loading.checkpoint(drafter, "--drafter")
    plan = EvalPlan(
        *pair_names, wanted, limit or None, seed, data_root, repeats, thinking, chat_template, score, unsafe_code
    )
    processes = Processes()
    if url is not None and processes.count > 1:
        raise ValueError(
            f"--url asks one question at a time, not the {processes.count} of as many processes: start one."
        )
    prompts, written = prompts or [], [] if output is None else [output, output.parent / f"{output.stem}.jsonl"]
    if processes.is_first:
        for path in prompts:
            if path.resolve() in [one.resolve() for one in written]:
                raise ValueError(
                    f"--prompts {path} is a file that --output {output} writes: give --output another name."
                )
        check_trace_file(trace, [*prompts, *written])
    with ExitStack() as held:
        # The lock is taken before anything is loaded: of two commands the first one writes.
        if output is not None and processes.is_first:
            check_eval_output(output, overwrite)
            held.enter_context(only_writer(output))
        own = loading.read_prompt_files(prompts)
        questions = [one for name in own for one in questions_of_prompts(name, own[name], plan.num_prompts, seed)]
        questions = [*questions_of(plan), *questions]
        if url is not None and baseline_url is not None:
            tokenizer = loading.load_tokenizer(plan.target, trust_remote_code)
            servers = Server(url), Server(baseline_url)
            backend = server_backend(*servers, tokenizer, max_new_tokens, model, hardware, baseline_model)
        else:
            place = device or loading.own_device(processes)
            pair = loading.load_pair(target, drafter, dtype, place, trust_remote_code)
            backend, tokenizer = pair_backend(pair.target, pair.drafter, max_new_tokens, chosen), pair.tokenizer
            if max_new_tokens is None and backend.max_new_tokens < 2048 and processes.is_first:
                cut = f"{backend.max_new_tokens} tokens, half of the target's positions (--max-new-tokens)"
                print(f"Answers are cut at {cut}.", file=sys.stderr)
            recorded = held.enter_context(recording(trace, pair, target, processes.rank))
            backend = replace(backend, begin=partial(_recorded, backend.begin, recorded))
        if processes.is_first:
            loading.say_without_template(tokenizer, chat_template)
        # No thread draws the bar, because that would disturb the measurement.
        progress = _Bar(held.enter_context(counting_bar(processes.is_first, auto_refresh=False)))
        run = Run(processes=processes, on_begin=progress.begin, on_done=progress.done, is_locked=True)
        result = run_eval(plan, questions, backend, tokenizer, output, overwrite, run)
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


def _recorded(begin: Callable[[], dict[str, Any]], recorded: Callable[[Decode], Decode]) -> dict[str, Any]:
    """The methods of a dialogue, of which the drafter alone is recorded."""
    from dflash.evaluation import OURS

    return {name: recorded(run) if name == OURS else run for name, run in begin().items()}


class _Bar:
    """Progress over one process's share, with the task's speed-up and tau so far."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._answers: list[Any] = []

    def begin(self, share: int, done: int) -> None:
        if done:
            self._progress.console.print(f"{counted(done, 'question')} answered before.")
        self._progress.update(self._task, total=share, refresh=True)

    def done(self, answers: Sequence[Any]) -> None:
        from dflash.evaluation import summarise_answers

        self._answers += answers
        said = ""
        if self._answers:
            row = summarise_answers([a for a in self._answers if a.task == self._answers[-1].task])[-1]
            tau = "" if row["tau_micro"] is None else f", tau {row['tau_micro']:.2f}"
            said = f"{row['task']} {row['speedup']:.2f}x{tau}"
        self._progress.update(self._task, advance=1, description=said, refresh=True)


def _show(result: dict[str, Any]) -> None:
    """The table, and what its figures depend on."""
    from dflash.evaluation import caveat, place_of, table_of

    rows = result["summary"]
    table = table_of([*rows, *_means(rows)], SHOWN, short=True)
    show_table(table, "Everything counted, the prompt's forward too")
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
            left_out = f"{task['too_long']} of {counted(task['prompts'], 'prompt')} of {task['task']} are left out"
            console.print(f"{left_out}: with the answer they would be longer than the target's positions.")


def _means(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per method with the means of its tasks, if there are several."""
    means = []
    for method in dict.fromkeys(row["method"] for row in rows[1:]):
        chosen = [row for row in rows if row["method"] == method and row["tau_micro"] is not None]
        if len(chosen) > 1:
            mean = {key: sum(row[key] for row in chosen) / len(chosen) for key in ("speedup", "tau_micro")}
            means.append({"task": "mean", "method": method, **mean})
    return means
