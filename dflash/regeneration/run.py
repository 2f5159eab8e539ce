"""Regenerates a data set: replaces its answers by the target's own and writes the rows to a file to train on."""

import os
from collections import Counter, deque
from collections.abc import Callable, Container, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from dflash.common.acceptance import tau
from dflash.common.files import check_output, only_writer
from dflash.common.fingerprints import fingerprint
from dflash.common.messages import counted
from dflash.common.processes import Processes
from dflash.common.provenance import public_name, versions
from dflash.common.runs import Run
from dflash.training import Trace

from .answer_file import AnswerFile, check_answer_file
from .dialogues import Dialogue
from .selection import Row, SeenRows, drawn_rows, opened, selected, unwarned_of_length
from .server_writer import ServerWriter
from .settings import RegenerationSettings
from .target_writer import Answer, AnswerRequest, TargetWriter, row_seed


# A writer asks the target for answers, in this process or on a server.
Writer = TargetWriter | ServerWriter
# One turn of a batch: the dialogues that are done after it, and the answers to all dialogues of the batch.
Round = tuple[list[Dialogue], list[Answer]]
Answered = Generator[Round, None, None]
# How many dialogues are submitted at a time, as a multiple of the batch size. It is above 1, so that a thread that has
# finished finds the next dialogue waiting.
PENDING = 2


@dataclass
class RegenerationRecord:
    """The result of a run. A run that was resumed has several starts, and some figures count only the last start."""

    # Of the whole output:
    rows: int = 0  # number of answered rows of the data that are in the output
    tokens: int = 0  # number of tokens in these rows that the target wrote
    cut: int = 0  # number of rows that were cut at `max_new_tokens` or the target's positions, dropped ones included
    # Of the whole data:
    left_out: dict[str, int] | None = None  # number of rows that are not answered, by reason
    # Of this start:
    was_finished: int = 0  # number of rows to answer that earlier starts had answered
    steps: int = 0  # number of verify steps, 0 without a drafter
    tau: float = float("nan")  # mean acceptance length of these steps
    encoded: int = 0  # number of answers whose ids were encoded from a server's text
    miscounted: int = 0  # number of these for which the server counted another number of tokens

    def summary(self, output: Path, drop_cut: bool = False) -> str:
        """Returns the result as one line. `drop_cut` says whether rows with a cut answer were left out of `output`."""
        phrases = [f"{output}: {counted(self.rows, 'row')}, {counted(self.tokens, 'token')} by the target"]
        if self.cut:
            dropped = " dropped," if drop_cut else ""
            phrases.append(f"{counted(self.cut, 'row')}{dropped} cut off at the length")
        if self.steps:
            phrases.append(f"tau {self.tau:.2f} over {counted(self.steps, 'step')}")
        if self.encoded:
            phrases.append(f"{counted(self.encoded, 'answer')} encoded from the server's text")
        if self.miscounted:
            phrases.append(f"{self.miscounted} of them with a number of tokens that differs from the server's count")
        return ", ".join(phrases)


@dataclass(frozen=True, kw_only=True)
class RegenerationRun(Run):
    """Processes and callbacks of a regeneration, and further entries of its manifest.

    `on_begin` is called with the number of rows that this process will answer and the [`RegenerationRecord`]. `on_done`
    is called after each finished row with the number of its new tokens.
    """

    target: str | None = None  # the target's name
    license: str | None = None  # the licence of the data; by default what the source states
    provenance: Mapping[str, Any] = field(default_factory=dict)  # further entries of the manifest, such as the command
    trace: Path | None = None  # the file of a [`Trace`] to which a writer with a drafter adds its texts

    def facts(
        self, revision: str | None, settings: RegenerationSettings, name: str | None, card: Any, seen: SeenRows
    ) -> dict[str, Any]:
        """Returns entries of the manifest. `revision` is the target's. `name`, `card` and `seen` describe the data."""
        license = self.license or getattr(card, "license", None) or seen.license
        return {
            "target": public_name(self.target),  # without a path of this machine
            "revision": revision,
            "data": {"name": public_name(name), "split": settings.split, "rows": seen.count, "license": license},
            "drop_cut": settings.drop_cut,
            "versions": versions(),
            **self.provenance,
        }

    def lock(self, output: Path, may_replace: bool) -> AbstractContextManager[None]:
        """Returns the lock of `output` as a context manager. Raises the errors of `check_output` for the trace."""
        if self.trace is not None:
            check_output(self.trace, may_replace)
        return only_writer(output)

    def begin_trace(self, writer: Any, tokenizer: Any, resume: bool) -> None:
        """Opens the trace, if the run has one, and sets it as `writer.trace`. The writer then appends its texts to it.

        Without `resume` the file begins anew. ValueError if the file is not a trace of this target.
        """
        if self.trace is not None:
            rank = self.processes.rank
            writer.trace = Trace(self.trace, writer.target, tokenizer, self.target, rank, overwrite=not resume)

    def join_trace(self, writer: Any) -> None:
        """Joins the traces of all processes. Only the first process may call it, after all have finished."""
        if self.trace is not None:
            writer.trace.join()


def regenerate_data(
    writer: Writer,
    tokenizer: Any,
    data: str | os.PathLike[str] | Sequence[Row],
    output: str | os.PathLike[str],
    settings: RegenerationSettings | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    run: RegenerationRun | None = None,
) -> RegenerationRecord:
    """Answers the prompts of `data` with the target, writes the rows to `output`, and returns their counts.

    The assistant turns of a chat are answered in order. Each answer follows the target's own earlier answers. Rows are
    appended to the output as they are finished, and sorted in the order of the data at the end. The manifest beside the
    output holds the settings and what `run` says of the target and the data.

    `data` is a file, folder or Hub id as in [`load_examples`], or rows. `output` ends in `.jsonl`, because `dflash
    train --data` reads such files. With `resume` the run in `output` goes on. With `overwrite` it begins anew.

    Raises:
        ValueError: for data without a question, other settings than those of the run to resume, an output that holds
            something other than a run or that another process writes, or a target whose logits are NaN or infinite.
        OSError: if the output cannot be written. The rows in it stay.

    Example:
        >>> writer = TargetWriter(target)
        >>> settings = RegenerationSettings(samples=1000)
        >>> record = regenerate_data(writer, tokenizer, "chats.jsonl", "answers.jsonl", settings)
    """
    settings = settings or RegenerationSettings()
    run = run or RegenerationRun()
    processes = run.processes
    path = Path(output)
    name = os.fspath(data) if isinstance(data, (str, os.PathLike)) else None
    _check_output(path, name, resume, overwrite)
    is_locked = run.is_locked or not processes.is_first
    with unwarned_of_length(tokenizer), nullcontext() if is_locked else run.lock(path, resume or overwrite):
        source = opened(data, settings)
        seen = SeenRows()
        rows = drawn_rows(source, seen, settings)
        asked, left_out = selected(rows, name or "the data", tokenizer, settings, writer.positions)
        info = getattr(source(), "info", None)
        facts = run.facts(writer.revision, settings, name, info, seen)
        depends_on = _depends_on(settings, writer, tokenizer, seen)
        file = AnswerFile(path, depends_on, processes.rank)
        finished = set() if overwrite else file.finished(settings.drop_cut)
        was_finished = sum(dialogue.number in finished for dialogue in asked)
        record = RegenerationRecord(left_out=dict(left_out), was_finished=was_finished)
        share = _share(asked, finished, processes)
        del asked  # so that each dialogue is freed once its answer is written
        _begin(file, processes, overwrite, facts)
        run.begin_trace(writer, tokenizer, resume)
        run.on_begin(len(share), record)
        counts = _append_all(file, _answered(writer, share, settings), run.on_done)
        _sum_up(record, processes.gather([counts]))
        if processes.is_first:
            _finish(file, record, facts, settings.drop_cut)
            run.join_trace(writer)
    return record


def _share(asked: Sequence[Dialogue], finished: Container[int], processes: Processes) -> deque[Dialogue]:
    """Returns this process's share of the dialogues that are not finished.

    Dialogues with similar numbers of turns and tokens share a batch. Those with more turns come first, then longer
    ones, so that memory runs out at the beginning or never.
    """
    left = [dialogue for dialogue in asked if dialogue.number not in finished]
    left.sort(key=lambda row: (row.num_turns, row.num_prompt_tokens, row.number), reverse=True)
    return deque(processes.share(left))


def _check_output(output: Path, name: str | None, resume: bool, overwrite: bool) -> None:
    """Raises ValueError if `output` is the data itself. Also raises the errors of [`check_answer_file`]."""
    data = Path(name or "").expanduser()
    if name is not None and data.exists() and data.resolve() == output.expanduser().resolve():
        raise ValueError(f"The output {output} is the data itself: choose another output.")
    check_answer_file(output, resume, overwrite)


def _begin(file: AnswerFile, processes: Processes, overwrite: bool, facts: dict[str, Any]) -> None:
    """Prepares the output for appending, once all processes have passed their checks."""
    processes.gather([None])  # no process writes before all have checked
    if processes.is_first:
        file.begin(overwrite, facts)
    processes.gather([None])
    file.mend()


def _sum_up(record: RegenerationRecord, counts: Sequence[Counter[str]]) -> None:
    """Sets `steps`, `tau`, `encoded` and `miscounted` of the record from the counts of all processes."""
    total = sum(counts, Counter())
    record.steps = total["steps"]
    record.tau = tau(total["step_tokens"], record.steps)
    record.encoded = total["encoded"]
    record.miscounted = total["miscounted"]


def _finish(file: AnswerFile, record: RegenerationRecord, facts: dict[str, Any], drop_cut: bool) -> None:
    """Completes output, record and manifest. Only the first process may call it, after all have finished."""
    written = file.finish(drop_cut)
    record.rows = written["rows"]
    record.tokens = written["tokens"]
    record.cut = written["cut"]
    result = asdict(record)
    if not record.steps:
        result["tau"] = None
    file.write_manifest(facts | {"complete": True, "result": result})


def _depends_on(settings: RegenerationSettings, writer: Writer, tokenizer: Any, seen: SeenRows) -> dict[str, Any]:
    """Returns the settings and fingerprints that the rows depend on. A run can be resumed only with the same ones."""
    chosen = asdict(settings)
    # The data is identified by its fingerprint, and cut rows are dropped only at the end.
    for name in ("split", "streaming", "drop_cut"):
        del chosen[name]
    template = fingerprint(getattr(tokenizer, "chat_template", None))
    return {**chosen, **writer.facts, "chat_template": template, "data": seen.fingerprint}


def _append_all(file: AnswerFile, answered: Answered, on_done: Callable[[int], None]) -> Counter[str]:
    """Appends the rows of finished dialogues to `file`. Returns counts of verify steps, tokens and encoded answers."""
    counts: Counter[str] = Counter()
    with closing(answered):  # so that an error here stops the writer at once, not when the generator is collected
        for dialogues, answers in answered:
            file.append([row for dialogue in dialogues for row in dialogue.rows()])
            for answer in answers:
                counts["steps"] += len(answer.acceptance_lengths)
                counts["step_tokens"] += sum(answer.acceptance_lengths)
                counts["encoded"] += answer.is_encoded
                counts["miscounted"] += answer.is_miscounted
            for dialogue in dialogues:
                on_done(dialogue.num_tokens)
    return counts


def _answered(writer: Writer, dialogues: deque[Dialogue], settings: RegenerationSettings) -> Answered:
    """Removes all `dialogues` from the deque, answers them, and yields each round as it is finished."""
    if writer.is_concurrent:
        yield from _concurrently(writer, dialogues, settings)
        return
    while dialogues:
        yield from _rounds(writer, _taken(dialogues, writer.batch_size), settings)


def _concurrently(writer: ServerWriter, dialogues: deque[Dialogue], settings: RegenerationSettings) -> Answered:
    """Answers all `dialogues` as `_answered` does, each in one of `writer.batch_size` threads.

    After an error no further dialogue is started, and the error is raised when the running dialogues have finished.
    After an interrupt the answers of the running dialogues are dropped, and no thread sends another request.
    """

    def answer(dialogue: Dialogue) -> list[Round]:
        rounds = _rounds(writer, [dialogue], settings)
        return list(takewhile(lambda _: not writer.stopped.is_set(), rounds))

    writer.stopped.clear()  # an earlier run may have set it
    pending: set[Future[list[Round]]] = set()
    failure: BaseException | None = None
    with ThreadPoolExecutor(writer.batch_size) as pool:
        try:
            while dialogues or pending:
                for dialogue in _taken(dialogues, PENDING * writer.batch_size - len(pending)):
                    pending.add(pool.submit(answer, dialogue))
                done, pending = wait(pending, None, FIRST_COMPLETED)
                for future in done:
                    error = future.exception()
                    if error is None:
                        yield from future.result()
                        continue
                    failure = failure or error
                    dialogues.clear()
                    pending = {waiting for waiting in pending if not waiting.cancel()}
        except BaseException:  # such as KeyboardInterrupt, or GeneratorExit if the consumer of the answers failed
            writer.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    if failure is not None:
        raise failure


def _taken(dialogues: deque[Dialogue], count: int) -> list[Dialogue]:
    """Removes the first `count` dialogues from the deque, or all if there are fewer, and returns them."""
    return [dialogues.popleft() for _ in range(min(count, len(dialogues)))]


def _rounds(writer: Writer, dialogues: Sequence[Dialogue], settings: RegenerationSettings) -> Answered:
    """Answers a batch of dialogues turn by turn, and yields a round after each turn, until all are done."""
    while dialogues:
        requests = []
        for dialogue in dialogues:
            seed = row_seed(settings.seed, dialogue.number, dialogue.num_answers)
            room = dialogue.room(settings.max_new_tokens, writer.positions)
            requests.append(AnswerRequest(dialogue.prompt_ids, seed, room))
        answers = writer(requests, settings)
        for dialogue, answer in zip(dialogues, answers, strict=True):
            dialogue.write(answer.token_ids, answer.ended)
            if not dialogue.room(1, writer.positions):
                dialogue.end()
        yield [dialogue for dialogue in dialogues if dialogue.is_done], answers
        dialogues = [dialogue for dialogue in dialogues if not dialogue.is_done]
