"""`dflash regenerate`: a data set with its answers replaced by the target's own, as a file of rows to train on."""

import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from dflash.common.files import only_writer
from dflash.common.fingerprints import fingerprint
from dflash.common.messages import counted
from dflash.common.processes import Processes
from dflash.common.provenance import public_name, versions

from .answer_file import AnswerFile, check_answer_file
from .dialogues import Dialogue
from .selection import SeenRows, drawn_rows, opened, selected, unwarned_of_length
from .server_writer import ServerWriter
from .settings import RegenerationSettings
from .target_writer import Answer, Request, TargetWriter, row_seed


# What answers: the target in this process or on a server.
Writer = TargetWriter | ServerWriter
# Dialogues when they are finished, and the answers since the last ones.
Answered = Generator[tuple[list[Dialogue], list[Answer]], None, None]
# Dialogues that wait or are asked at once, in batches: a thread that is done finds the next one.
PENDING = 2


@dataclass
class RegenerationRecord:
    """The result of a run. The last four figures are of this start, the others of the whole output."""

    rows: int = 0  # in the output
    tokens: int = 0  # in them, written by the target
    cut: int = 0  # rows with an answer that the longest length cut off; in the output unless they are dropped
    left_out: dict[str, int] | None = None  # number of rows that were not asked, by the reason
    was_finished: int = 0  # rows that an earlier start had answered
    steps: int = 0  # verify steps, 0 without a drafter
    tau: float = float("nan")  # their mean acceptance length
    encoded: int = 0  # answers whose ids were encoded from a server's text
    miscounted: int = 0  # of these, answers of which the server counted another number of tokens

    def summary(self, output: Path, drop_cut: bool = False) -> str:
        """The result in one line; `drop_cut` says that cut answers are not in `output`."""
        parts = [f"{output}: {counted(self.rows, 'row')}, {counted(self.tokens, 'token')} by the target"]
        if self.cut:
            dropped = " dropped," if drop_cut else ""
            parts.append(f"{counted(self.cut, 'row')}{dropped} cut off at the length")
        if self.steps:
            parts.append(f"tau {self.tau:.2f} over {counted(self.steps, 'step')}")
        if self.encoded:
            parts.append(f"{counted(self.encoded, 'answer')} encoded from the server's text")
        if self.miscounted:
            parts.append(f"{self.miscounted} of them to another number of tokens than the server counted")
        return ", ".join(parts)


def regenerate_data(
    writer: Writer,
    tokenizer: Any,
    data: str | os.PathLike[str] | Sequence[Mapping[str, Any]],
    output: str | os.PathLike[str],
    settings: RegenerationSettings | None = None,
    *,
    target_name: str | None = None,
    license: str | None = None,
    provenance: Mapping[str, Any] | None = None,
    resume: bool = False,
    overwrite: bool = False,
    processes: Any = None,
    on_begin: Callable[[int, RegenerationRecord], None] = lambda share, record: None,
    on_row: Callable[[int], None] = lambda tokens: None,
    is_locked: bool = False,
) -> RegenerationRecord:
    """Writes `data` with the target's own answers to `output`.

    A chat's assistant turns are written in order, each after the new ones before it. Rows appear in the output when
    they are finished, and in the data's order at the end. The manifest beside the output holds the settings,
    `target_name`, the data's `license` (by default what the source states) and `provenance`, such as the command.

    `data` is a file, folder or Hub id as in [`load_examples`], or rows. `output` ends in `.jsonl`, for `dflash train
    --data`: `resume` goes on with the run in it, `overwrite` begins anew. `processes` are by default those of the
    launcher's variables. `on_begin` is called with the number of rows to answer here and the record so far, `on_row`
    with the number of new tokens of each finished row. `is_locked` says that the caller holds the lock of `output`
    (`only_writer`) already, as who loads a model first should.

    Raises:
        ValueError: for data without a question, settings that changed, an output that holds something else or that
            another process writes, or a target whose logits are NaN or infinite.
        OSError: if the output cannot be written; the rows in it stay.

    Example:
        >>> writer = TargetWriter(target)
        >>> settings = RegenerationSettings(samples=1000)
        >>> record = regenerate_data(writer, tokenizer, "chats.jsonl", "answers.jsonl", settings)
    """
    settings = settings or RegenerationSettings()
    processes = processes or Processes()
    named = os.fspath(data) if isinstance(data, (str, os.PathLike)) else None
    if named is not None and Path(named).exists() and Path(named).resolve() == Path(output).resolve():
        raise ValueError(f"The output {output} is the data itself: choose another output.")
    with unwarned_of_length(tokenizer), ExitStack() as lock:
        source, seen, record = opened(data, settings), SeenRows(), RegenerationRecord()
        drawn = drawn_rows(source, seen, settings)
        asked, record.left_out = selected(drawn, named or "the data", tokenizer, settings, writer.positions)
        of_card = getattr(getattr(source(), "info", None), "license", None)
        facts = {"target": public_name(target_name), "revision": writer.revision}  # without a path of this machine
        facts["data"] = {
            "name": public_name(named),
            "split": settings.split,
            "rows": seen.count,
            "license": license or of_card or seen.license,
        }
        facts |= {"drop_cut": settings.drop_cut, "versions": versions(), **(provenance or {})}
        check_answer_file(Path(output), resume, overwrite)
        if processes.is_first and not is_locked:
            lock.enter_context(only_writer(Path(output)))
        file = AnswerFile(Path(output), _depends_on(settings, writer, tokenizer, seen), processes.rank)
        if resume:
            file.check_settings()
        finished = set() if overwrite else file.finished()
        num_asked = len(asked)
        asked = [dialogue for dialogue in asked if dialogue.number not in finished]
        record.was_finished = num_asked - len(asked)
        processes.gather([None])  # no process writes before all have checked
        if processes.is_first:
            file.begin(overwrite, facts)
        processes.gather([None])
        file.mend()

        # Rows of like length and number of turns share a batch, the longest first: memory runs out at once or never.
        asked.sort(key=lambda one: (one.num_turns, one.num_prompt_tokens, one.number), reverse=True)
        share = deque(processes.share(asked))
        del asked  # a row is held until its answer is in the output
        on_begin(len(share), record)
        counts = _append_all(file, _answered(writer, share, settings), on_row)
        sums = [sum(of_all) for of_all in zip(*processes.gather([counts]), strict=True)]
        steps, tokens, record.encoded, record.miscounted = sums
        record.steps, record.tau = steps, tokens / steps if steps else float("nan")
        if processes.is_first:
            written = file.finish(settings.drop_cut)
            record.rows, record.tokens, record.cut = written["rows"], written["tokens"], written["cut"]
            if not record.rows:
                said = f"Every one of the {record.cut} answers was cut off"
                raise ValueError(f"{said}: ask for a larger max_new_tokens.")
            result = asdict(record) | {"tau": record.tau if steps else None}
            file.write_manifest(facts | {"complete": True, "result": result})
    return record


def _depends_on(settings: RegenerationSettings, writer: Writer, tokenizer: Any, seen: SeenRows) -> dict[str, Any]:
    """What the rows of a run depend on, for its manifest."""
    # What is read is known by its fingerprint, and rows that were cut are dropped at the end.
    others = ("split", "streaming", "drop_cut")
    chosen = {name: value for name, value in asdict(settings).items() if name not in others}
    template = fingerprint(getattr(tokenizer, "chat_template", None))
    return chosen | writer.facts | {"chat_template": template, "data": seen.fingerprint}


def _append_all(file: AnswerFile, answered: Answered, on_row: Callable[[int], None]) -> list[int]:
    """Appends dialogues as they are finished.

    Returns the numbers of verify steps, of tokens of them, of answers encoded again, and of those that are miscounted.
    """
    counts = [0, 0, 0, 0]
    with closing(answered):  # an error here ends what is under way, and not only when the error is forgotten
        for dialogues, answers in answered:
            file.append([row for dialogue in dialogues for row in dialogue.rows()])
            for answer in answers:
                counts[0] += len(answer.acceptance_lengths)
                counts[1] += sum(answer.acceptance_lengths)
                counts[2] += answer.is_encoded
                counts[3] += answer.is_miscounted
            for dialogue in dialogues:
                on_row(dialogue.num_tokens)
    return counts


def _answered(writer: Writer, dialogues: deque[Dialogue], settings: RegenerationSettings) -> Answered:
    """Answers all, taking them from `dialogues`."""
    if writer.is_concurrent:
        yield from _side_by_side(writer, dialogues, settings)
        return
    while dialogues:
        yield from _rounds(writer, _taken(dialogues, writer.batch_size), settings)


def _side_by_side(writer: ServerWriter, dialogues: deque[Dialogue], settings: RegenerationSettings) -> Answered:
    """As `_answered`, each dialogue in a thread.

    After an error of one the answers that are under way still come, and then it is raised. After an interrupt no answer
    is wanted any more, and no thread asks again.
    """

    def answer(dialogue: Dialogue) -> list[tuple[list[Dialogue], list[Answer]]]:
        return list(takewhile(lambda _: not writer.stopped.is_set(), _rounds(writer, [dialogue], settings)))

    writer.stopped.clear()  # by an earlier run
    pending: set[Future[Any]] = set()
    failure: BaseException | None = None
    with ThreadPoolExecutor(writer.batch_size) as pool:
        try:
            while dialogues or pending:
                some = _taken(dialogues, PENDING * writer.batch_size - len(pending))
                done, pending = wait(pending.union(pool.submit(answer, one) for one in some), None, FIRST_COMPLETED)
                for future in done:
                    if (error := future.exception()) is None:
                        yield from future.result()
                        continue
                    failure = failure or error
                    dialogues.clear()
                    pending = {one for one in pending if not one.cancel()}
        except BaseException:  # such as KeyboardInterrupt, and GeneratorExit where what takes the answers failed
            writer.stopped.set()
            pool.shutdown(cancel_futures=True)
            raise
    if failure is not None:
        raise failure


def _taken(dialogues: deque[Dialogue], count: int) -> list[Dialogue]:
    return [dialogues.popleft() for _ in range(min(count, len(dialogues)))]


def _rounds(writer: Writer, dialogues: Sequence[Dialogue], settings: RegenerationSettings) -> Answered:
    """Answers one batch turn by turn until all of it is finished."""
    going = list(dialogues)
    while going:
        requests = []
        for one in going:
            seed = row_seed(settings.seed, one.number, one.num_answers)
            room = one.room(settings.max_new_tokens, writer.positions)
            requests.append(Request(one.prompt_ids or (), seed, room))
        answers = writer(requests, settings)
        for dialogue, answer in zip(going, answers, strict=True):
            dialogue.write(answer.token_ids, answer.ended)
            if not dialogue.room(1, writer.positions):
                dialogue.end()
        done = [dialogue for dialogue in going if dialogue.is_done]
        going = [dialogue for dialogue in going if not dialogue.is_done]
        yield done, answers
