"""`dflash eval`: measures and scores a pair on the paper's tasks or your own prompts, plainly and with DFlash."""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import Progress

from dflash.common.files import only_writer
from dflash.common.messages import counted

from . import loading
from .arguments import (
    PROMPT_FILE,
    AsJson,
    BaselineModel,
    Drafter,
    Hardware,
    Model,
    ModelOptions,
    Repeats,
    Target,
    TemplateOptions,
    decoding_option,
    option,
    prompt_option,
    result_option,
    server_option,
)
from .terminal import counting_bar, print_result, show_facts, show_table
from .tracing import TraceFile, check_trace_file, recording


@dataclass
class QuestionOptions:
    """The questions."""

    tasks: Annotated[str | None, option("Names of the tasks above, separated by commas.")] = None
    prompts: Annotated[
        list[Path] | None,
        option(f"Your own prompts, besides or instead of tasks; not scored. {PROMPT_FILE}; may be repeated."),
    ] = None
    limit: Annotated[int, prompt_option("Prompts of each task and file; 0 for all.", min=0)] = 80
    seed: Annotated[int, prompt_option("Seed of the choice of the prompts.", min=0)] = 0
    data_root: Annotated[Path | None, prompt_option("Read the tasks from files below this folder.")] = None


@dataclass
class AskingOptions(TemplateOptions):
    """How the questions are asked, and whether the answers are scored."""

    score: Annotated[bool, prompt_option("Score the answers; runs code that the target wrote.")] = True
    unsafe_code: Annotated[
        bool, prompt_option("Run that code even where this system cannot confine it.", "--unsafe-code")
    ] = False


@dataclass
class EvalMethods:
    """How the answers are decoded."""

    methods: Annotated[str, decoding_option("Methods besides target.generate, separated by commas.")] = "dflash"
    max_new_tokens: Annotated[
        int | None,
        decoding_option("Longest answer, in tokens. Default: 2048, or half of the target's positions.", min=2),
    ] = None
    repeats: Repeats = 1


@dataclass
class EvalServers:
    """A server of the pair and one of the target alone."""

    url: Annotated[
        str | None, server_option("A server of the pair (vLLM, SGLang, …). No weights are loaded here.")
    ] = None
    baseline_url: Annotated[str | None, server_option("A server of the target alone.")] = None
    model: Model = None
    baseline_model: BaselineModel = None
    hardware: Hardware = None


@dataclass
class EvalFiles:
    """What is written."""

    output: Annotated[
        Path | None, result_option("JSON file to write. A stopped run goes on from the .jsonl beside it.")
    ] = None
    overwrite: Annotated[bool, result_option("Begin anew if --output exists.", "--overwrite")] = False
    trace: TraceFile = None
    as_json: AsJson = False


def evaluate(
    *,
    target: Target,
    drafter: Drafter,
    questions: QuestionOptions,
    asking: AskingOptions,
    decoding: EvalMethods,
    models: ModelOptions,
    servers: EvalServers,
    files: EvalFiles,
) -> None:
    """Measures a pair on the paper's tasks or your own prompts: speed, acceptance, memory, same texts, right answers.

    Tasks: gsm8k, math500, aime25, humaneval, mbpp, livecodebench, mt-bench,
    spec-bench, alpaca, speed-bench.

    Methods: {methods}.

    With --url and --baseline-url two servers answer, and only the target's tokenizer is loaded here.

    In N processes, each with its share of the prompts:
    torchrun --nproc-per-node N -m dflash eval …
    (accelerate launch works too, but starts a single process with --cpu.)
    """
    loading.hide_loading_bars()
    from dflash.common.processes import Processes
    from dflash.common.runs import Run
    from dflash.evaluation import check_methods, run_eval

    processes = Processes()
    _check_servers(servers, decoding.methods, processes.count)
    methods = loading.listed(decoding.methods, "--methods")
    prompts = questions.prompts or []
    check_methods(methods)
    _check_traced(files.trace, servers.url, methods)
    loading.known_device(models.device)
    plan = _plan(target, drafter, questions, asking, decoding.repeats)
    with ExitStack() as stack:
        if processes.is_first:
            _claim(stack, files, prompts)
        asked = _questions(plan, prompts)
        if servers.url is not None:
            tokenizer = loading.load_tokenizer(plan.target, models.trust_remote_code)
            backend = _server_backend(servers, tokenizer, decoding.max_new_tokens)
        else:
            pair = loading.load_pair(target, drafter, loading.on_own_device(models, processes))
            tokenizer = pair.tokenizer
            recorder = stack.enter_context(recording(files.trace, pair, target, processes.rank))
            backend = _backend(pair, decoding.max_new_tokens, methods, recorder)
        if processes.is_first:
            if decoding.max_new_tokens is None:
                _say_limit(backend.max_new_tokens)
            loading.say_without_template(tokenizer, asking.chat_template)
        # No thread draws the bar, because that would disturb the measurement.
        bar = _Bar(stack.enter_context(counting_bar(processes.is_first, auto_refresh=False)))
        run = Run(processes=processes, on_begin=bar.begin, on_done=bar.done, is_locked=True)
        result = run_eval(plan, asked, backend, tokenizer, files.output, files.overwrite, run)
    if processes.is_first:
        _report(result, files)


def _silence_datasets() -> None:
    """Hides the output of `datasets`: local rows are read at once, and this package has its own errors for them."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)


def _check_servers(servers: EvalServers, methods: str, num_processes: int) -> None:
    """Raises ValueError for one server without the other, for methods that no server has, and for several processes."""
    if (servers.url is None) != (servers.baseline_url is None):
        raise ValueError("--url and --baseline-url go together: the speed-up is over the target served alone.")
    if servers.url is None:
        return
    if methods != "dflash":
        raise ValueError(f"--methods {methods} run in this process, and --url asks a server: leave one of them out.")
    if num_processes > 1:
        raise ValueError(
            f"--url asks one question at a time, and there are {num_processes} processes: start only one."
        )


def _plan(target: str, drafter: str, questions: QuestionOptions, asking: AskingOptions, repeats: int) -> Any:
    """Returns the plan of the evaluation. ValueError if there are no questions."""
    from dflash.evaluation import EvalPlan

    if questions.tasks is None and not questions.prompts:
        raise ValueError(
            "Nothing is asked: give --tasks with names of tasks, --prompts with a file of your own, or both."
        )
    return EvalPlan(
        loading.checkpoint(target, "--target"),
        loading.checkpoint(drafter, "--drafter"),
        () if questions.tasks is None else loading.listed(questions.tasks, "--tasks"),
        questions.limit or None,
        questions.seed,
        questions.data_root,
        repeats,
        **vars(asking),
    )


def _questions(plan: Any, prompts: Sequence[Path]) -> list[Any]:
    """Returns the questions of the tasks, then those of the user's prompts."""
    from dflash.evaluation import questions_of, questions_of_prompts

    if plan.data_root is not None:
        _silence_datasets()
    own: list[Any] = []
    for name, dialogues in loading.read_prompt_files(prompts).items():
        own += questions_of_prompts(name, dialogues, plan.num_prompts, plan.seed)
    return [*questions_of(plan), *own]


def _say_limit(max_new_tokens: int) -> None:
    """Says on standard error at how many tokens answers are cut, unless it is the usual number."""
    if max_new_tokens < 2048:
        limit = f"{max_new_tokens} tokens, half of the target's positions (--max-new-tokens)"
        print(f"Answers are cut at {limit}.", file=sys.stderr)


def _check_traced(trace: Path | None, url: str | None, methods: Sequence[str]) -> None:
    """Raises ValueError for a trace if this process makes no drafts."""
    from dflash.evaluation import OURS

    if trace is None or (url is None and OURS in methods):
        return
    why = f"--methods {','.join(methods)} leaves it out" if url is None else "--url asks a server"
    raise ValueError(f"--trace {trace} records the drafts of the method {OURS}, and {why}: leave one of them out.")


def _claim(stack: ExitStack, files: EvalFiles, prompts: Sequence[Path]) -> None:
    """Checks the files to write and locks the output before anything is loaded.

    So only the first of two commands writes.
    """
    from dflash.evaluation import check_eval_output

    output = files.output
    written = [] if output is None else [output, output.parent / f"{output.stem}.jsonl"]
    written_paths = [path.resolve() for path in written]
    for path in prompts:
        if path.resolve() in written_paths:
            raise ValueError(f"--prompts {path} is a file that --output {output} writes: give --output another name.")
    check_trace_file(files.trace, [*prompts, *written])
    if output is not None:
        check_eval_output(output, files.overwrite)
        stack.enter_context(only_writer(output))


def _server_backend(servers: EvalServers, tokenizer: Any, max_new_tokens: int | None) -> Any:
    """Returns the backend that asks the two servers."""
    from dflash.evaluation import Server, server_backend

    return server_backend(
        Server(str(servers.url)),
        Server(str(servers.baseline_url)),
        tokenizer,
        max_new_tokens,
        servers.model,
        servers.hardware,
        servers.baseline_model,
    )


def _backend(pair: loading.Pair, max_new_tokens: int | None, methods: Sequence[str], recorder: Any) -> Any:
    """Returns the backend that decodes in this process. `recorder` makes the method `OURS` record its texts."""
    from dflash.evaluation import OURS, pair_backend

    backend = pair_backend(pair.target, pair.drafter, max_new_tokens, methods)

    def begin() -> dict[str, Any]:
        ways = backend.begin()
        if OURS in ways:
            ways[OURS] = recorder(ways[OURS])
        return ways

    return replace(backend, begin=begin)


class _Bar:
    """A progress bar over the questions of one process, with the speed-up and tau of the task so far."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)
        self._answers: list[Any] = []

    def begin(self, share: int, done: int) -> None:
        """Prints how many questions an earlier start answered, and sets the bar to `share` questions."""
        if done:
            self._progress.console.print(f"{counted(done, 'question')} answered before.")
        self._progress.update(self._task, total=share, refresh=True)

    def done(self, answers: Sequence[Any]) -> None:
        """Counts a question and its answers. A question that is too long has no answers."""
        from dflash.evaluation import summarise_answers

        self._answers += answers
        text = ""
        if self._answers:
            task = self._answers[-1].task
            row = summarise_answers([answer for answer in self._answers if answer.task == task])[-1]
            text = f"{task} {row['speedup']:.2f}x"
            if row["tau_micro"] is not None:
                text += f", tau {row['tau_micro']:.2f}"
        self._progress.update(self._task, advance=1, description=text, refresh=True)


SHOWN = (
    "task", "method", "identical", "score", "tokens_per_second", "speedup", "tau_micro", "ms_to_first_token",
    "ms_per_output_token", "peak_memory_bytes",
)  # fmt: skip


def _report(result: dict[str, Any], files: EvalFiles) -> None:
    """Prints the result and the paths of its files."""
    print_result(result, files.as_json, _show)
    if files.output is not None:
        answers = files.output.with_suffix(".jsonl")
        print(f"{files.output} holds the figures, {answers} the answers.", file=sys.stderr)


def _show(result: dict[str, Any]) -> None:
    """Prints the table and what its figures depend on."""
    from dflash.evaluation import means_of_tasks, table_of

    rows = result["summary"]
    shown = table_of([*rows, *means_of_tasks(rows)], SHOWN, short=True)
    show_table(shown, "Everything counted, the prompt's forward too")
    num_processes = result["environment"]["processes"]
    shared = [f"{num_processes} processes"] if num_processes > 1 else []
    show_facts(result, *shared)
    for task in result["tasks"]:
        if task["too_long"]:
            left_out = f"{task['too_long']} of {counted(task['prompts'], 'prompt')} of {task['task']} are left out"
            Console(highlight=False).print(
                f"{left_out}: with the answer they would be longer than the target's positions."
            )
