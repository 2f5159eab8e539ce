"""`dflash regenerate`: replaces the answers of a data set by the target's own. A drafter learns best from these."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.progress import Progress, TextColumn

from dflash.common.files import check_output, only_writer
from dflash.common.messages import counted

from . import loading
from .arguments import (
    ApiKeyEnv,
    Model,
    ModelOptions,
    Target,
    model_option,
    option,
    panel,
    result_option,
    server_option,
)
from .terminal import counting_bar


LONGEST_SILENCE = 3600.0  # seconds; a server may take that long to write an answer
data_option, answer_option = panel("Data"), panel("Answers")


@dataclass
class AnswerOptions:
    """The fields of `RegenerationSettings`."""

    samples: Annotated[int | None, data_option("Number of rows. Default: all.", min=1)] = None
    split: Annotated[str, data_option("Split of a data set that has several.")] = "train"
    streaming: Annotated[
        bool, data_option("Answer the first --samples rows; download nothing after them.", "--streaming")
    ] = False
    prompt_tokens: Annotated[int, data_option("Number of tokens of a text that are its prompt.", min=1)] = 16
    max_prompt_tokens: Annotated[
        int | None,
        data_option(
            "Leave out rows whose prompt has more tokens than this. In a chat the first prompt counts.", min=1
        ),
    ] = None
    deduplicate: Annotated[
        bool,
        data_option(
            "Leave out prompts that repeat another one. Use --no-deduplicate to sample several answers to one prompt."
        ),
    ] = True
    thinking: Annotated[bool, data_option("Let the chat template ask for thinking.")] = False
    max_new_tokens: Annotated[int, answer_option("Longest answer, in tokens.", min=1)] = 2048
    temperature: Annotated[float, answer_option("0 answers greedily; above 0 samples.")] = 0.0
    top_p: Annotated[float, answer_option("Sample from the smallest set of this probability.")] = 1.0
    top_k: Annotated[int, answer_option("Sample from the N most probable tokens. 0: from all.")] = 0
    seed: Annotated[int, answer_option("Seed of the sampling and of the choice of --samples.", min=0)] = 0
    drop_cut: Annotated[bool, answer_option("Leave out rows with an answer that was cut off.", "--drop-cut")] = False


@dataclass
class WriterOptions:
    """How the target answers in this process or on a server, and how many rows at once."""

    batch_size: Annotated[
        int | None,
        answer_option("Rows at once. Default: 8, or 64 with --url. A server may take 300.", min=1),
    ] = None
    drafter: Annotated[
        str | None,
        model_option(
            "A drafter to speed up the answers. The text is the same except for rounding. Faster in small batches, "
            "possibly slower in large ones."
        ),
    ] = None
    trace: Annotated[
        Path | None,
        model_option("A .jsonl file to write: the texts and where drafts were rejected, for dflash adapt."),
    ] = None


@dataclass
class AnswerServer:
    """A server that answers with the target."""

    url: Annotated[str | None, server_option("An OpenAI-compatible server of the target.")] = None
    model: Model = None
    api_key_env: ApiKeyEnv = None


@dataclass
class OutputOptions:
    """The licence of the data, and what to do if --output already holds a run."""

    license: Annotated[str | None, data_option("Licence of the data. Default: what the source states.")] = None
    resume: Annotated[bool, result_option("Go on with the run in --output.", "--resume")] = False
    overwrite: Annotated[bool, result_option("Begin anew if --output holds a run.", "--overwrite")] = False


def regenerate(
    *,
    target: Target,
    data: Annotated[str, option("Chats, prompts or texts: a JSONL file, a folder, or an id on the Hub.")],
    output: Annotated[Path, option("The .jsonl file to write, for dflash train --data.")],
    answers: AnswerOptions,
    writing: WriterOptions,
    models: ModelOptions,
    server: AnswerServer,
    options: OutputOptions,
) -> None:
    """Answers the prompts of --data with the target, turn by turn in a chat, and writes rows to train a drafter on.

    In N processes, each with its share of the rows, on GPUs or on a CPU:
    torchrun --nproc_per_node N -m dflash regenerate …
    (On a CPU, accelerate launch starts a single process.)
    """
    if options.license is not None and not options.license.strip():
        raise ValueError("--license is empty: name the licence of the data, such as cc-by-4.0, or leave it out.")
    _check_server(server, writing.drafter)
    _check_trace(writing, data, output)
    loading.hide_loading_bars()
    from dflash.common.processes import Processes
    from dflash.common.provenance import command, public_name
    from dflash.regeneration import RegenerationRun, RegenerationSettings, regenerate_data
    from dflash.training import check_split

    check_split([data], answers.split)
    settings = RegenerationSettings(**vars(answers))
    loading.known_device(models.device)
    processes = Processes()
    start = {"resume": options.resume, "overwrite": options.overwrite}
    with ExitStack() as locks:
        if processes.is_first:
            _claim(locks, output, writing.trace, **start)
        target = loading.checkpoint(target, "--target")
        if server.url is not None:
            writer, tokenizer = _load_server(target, server, writing.batch_size or 64, models.trust_remote_code)
        else:
            own_models = loading.on_own_device(models, processes)
            writer, tokenizer = load_writer(target, writing.drafter, writing.batch_size or 8, own_models)
        if writing.trace is not None and processes.is_first:
            recorded = "Prompts, answers and the places of rejected drafts are recorded"
            loading.say_once(f"{recorded} in {writing.trace} (--trace).")
        facts = {"command": command(), "drafter": public_name(writing.drafter), "processes": processes.count}
        with answer_bar(processes.is_first) as bar:
            run = RegenerationRun(
                processes=processes,
                on_begin=bar.begin,
                on_done=bar.row,
                is_locked=True,
                target=target,
                license=options.license,
                provenance=facts,
                trace=writing.trace,
            )
            record = regenerate_data(writer, tokenizer, data, output, settings, **start, run=run)
        if processes.is_first:
            print(record.summary(output, answers.drop_cut))


def _check_server(server: AnswerServer, drafter: str | None) -> None:
    """Raises ValueError for options of a server without a server, or for a drafter together with a server."""
    if server.url is None:
        if server != AnswerServer():
            raise ValueError("--model and --api-key-env say how to ask a server: give its --url, or leave them out.")
    elif drafter is not None:
        raise ValueError("--url and --drafter are both given: a server has its own drafter (dflash serve).")


def _check_trace(writing: WriterOptions, data: str, output: Path) -> None:
    """Raises ValueError if --trace is given without --drafter, or names --data or --output."""
    trace = writing.trace
    if trace is None:
        return
    if writing.drafter is None:
        raise ValueError(
            f"--trace {trace} records rejected drafts, and there is no drafter: give --drafter, or leave --trace out."
        )
    if trace.resolve() in (output.resolve(), Path(data).resolve()):
        raise ValueError(f"--trace {trace} is also --data or --output: name another file.")


def _claim(locks: ExitStack, output: Path, trace: Path | None, resume: bool, overwrite: bool) -> None:
    """Checks and locks the files to write before anything is loaded, so that only the first of two commands writes."""
    from dflash.regeneration import check_answer_file

    if not output.is_dir():
        # It refuses a run that is still going on. The check after it would ask to resume that run.
        check_output(output)
    check_answer_file(output, resume, overwrite)
    locks.enter_context(only_writer(output))
    if trace is not None:
        check_output(trace, overwrite or resume)
        locks.enter_context(only_writer(trace))


def load_writer(target: str, drafter: str | None, batch_size: int, models: ModelOptions) -> tuple[Any, Any]:
    """Loads the target, and the drafter if there is one. Returns a writer with them, and the tokenizer."""
    from dflash.regeneration import TargetWriter

    if drafter is None:
        tokenizer = loading.load_tokenizer(target, models.trust_remote_code)
        return TargetWriter(loading.load_target(target, models), None, batch_size), tokenizer
    pair = loading.load_pair(target, drafter, models)
    return TargetWriter(pair.target, pair.drafter, batch_size), pair.tokenizer


def _load_server(target: str, server: AnswerServer, batch_size: int, own_code: bool) -> tuple[Any, Any]:
    """Returns a writer for the target on a server, and the tokenizer. Loads no weights."""
    from dflash.common.openai_client import OpenAIClient
    from dflash.regeneration import ServerWriter, read_configs

    client = OpenAIClient(str(server.url), loading.api_key(server.api_key_env), timeout=LONGEST_SILENCE)
    tokenizer = loading.load_tokenizer(target, own_code)
    with loading.named("--target", target):
        configs = read_configs(target, own_code)
    return ServerWriter(client, server.model, tokenizer, *configs, batch_size), tokenizer


@contextmanager
def answer_bar(is_first: bool) -> Iterator["AnswerBar"]:
    """Shows on standard error how many rows are answered, in the first process only."""
    with counting_bar(is_first, TextColumn("{task.fields[rate]}")) as progress:
        yield AnswerBar(progress)


class AnswerBar:
    """A progress bar over the rows that one process answers."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("Answering", total=None, rate="")
        self._tokens = 0

    def begin(self, share: int, record: Any) -> None:
        """Prints how many rows are left out or already answered, and sets the bar to `share` rows."""
        console = self._progress.console
        for reason, count in record.left_out.items():
            console.print(f"Left out: {count:,} x {reason}.", soft_wrap=True)
        before = record.was_finished
        if before:
            everything = counted(share + before, "row")
            console.print(f"Answered before: {before:,} of {everything}.")
        self._progress.reset(self._task, total=share)

    def row(self, tokens: int) -> None:
        """Counts one row with `tokens` new tokens."""
        self._tokens += tokens
        seconds = self._progress.tasks[0].elapsed
        rate = ""
        if seconds:
            rate = f"{self._tokens / seconds:,.0f} tokens/s"  # at the end of the last batch
        self._progress.update(self._task, advance=1, rate=rate)
