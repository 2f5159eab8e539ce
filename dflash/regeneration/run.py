"""`dflash regenerate`: a data set with its answers replaced by the target's own, as a file of rows to train on."""

import os
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dflash.common.files import only_writer
from dflash.common.fingerprints import fingerprint
from dflash.common.processes import Processes
from dflash.common.provenance import public_name, versions
from dflash.training import FORMS, SEARCHED_ROWS, named_row, read_rows

from .answer_file import AnswerFile, check_answer_file
from .dialogues import Dialogue, Unanswerable, as_dialogue
from .server_writer import ServerWriter
from .target_writer import Answer, Request, Sampling, TargetWriter, row_seed


# What answers: the target in this process or on a server.
Writer = TargetWriter | ServerWriter


@dataclass(frozen=True, kw_only=True)
class RegenerationSettings(Sampling):
    """The rows to answer and how: the fields of [`Sampling`], and these."""

    max_new_tokens: int = 2048  # also cut at the end of the target's positions
    seed: int = 0  # of sampling and the choice of `samples`; a row's answer depends on its number and on this
    thinking: bool = False  # whether the chat template asks for thinking
    prompt_tokens: int = 16  # number of tokens of a `text` that are its prompt
    samples: int | None = None  # number of rows; `None` for all. Fewer rows are a subset of more
    split: str = "train"  # of a data set that has several
    streaming: bool = False  # answer the first `samples` rows that can be answered, and read a data set only as far
    drop_cut: bool = False  # leave out rows with an answer that the longest length cut off

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prompt_tokens", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: use 1 or more.")
        if self.streaming and self.samples is None:
            raise ValueError("streaming reads data only as far as it is asked to: give samples (--samples) too.")


@dataclass
class RegenerationRecord:
    """The result of a run. The last three figures are of this start, the others of the whole output."""

    rows: int = 0  # in the output
    tokens: int = 0  # in them, written by the target
    cut: int = 0  # rows with an answer that the longest length cut off; in the output unless they are dropped
    left_out: dict[str, int] | None = None  # number of rows that were not asked, by the reason
    was_finished: int = 0  # rows that an earlier start had answered
    steps: int = 0  # verify steps, 0 without a drafter
    tau: float = float("nan")  # their mean acceptance length
    encoded: int = 0  # answers whose ids were encoded from a server's text


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
) -> RegenerationRecord:
    """Writes `data` with the target's own answers to `output`.

    A chat's assistant turns are written in order, each after the new ones before it. Rows appear in the output when
    they are finished, and in the data's order at the end. The manifest beside the output holds the settings,
    `target_name`, the data's `license` (by default what the source states) and `provenance`, such as the command.

    `data` is a file, folder or Hub id as in [`load_examples`], or rows. `output` ends in `.jsonl`, for `dflash train
    --data`: `resume` goes on with the run in it, `overwrite` begins anew. `processes` are by default those of the
    launcher's variables. `on_begin` is called with the number of rows to answer here and the record so far, `on_row`
    with the number of new tokens of each finished row.

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
    name = named or "the data"
    source: Any = data if named is None else read_rows(named, settings.split, settings.streaming)
    rows: list[Mapping[str, Any]] = []
    numbered = _first_rows(source, rows) if settings.streaming else _drawn_rows(source, rows, settings)
    record = RegenerationRecord()
    asked, record.left_out = _dialogues(numbered, name, tokenizer, settings, writer.positions)
    depends_on = {
        **{name: value for name, value in asdict(settings).items() if name not in ("split", "streaming", "drop_cut")},
        **writer.facts,
        "chat_template": fingerprint(getattr(tokenizer, "chat_template", None)),
        "data": fingerprint(rows),
    }
    license = license or _stated_license(source, rows)
    facts = {  # without a path of this machine
        "target": public_name(target_name),
        "revision": writer.revision,
        "data": {"name": public_name(named), "split": settings.split, "rows": len(rows), "license": license},
        "drop_cut": settings.drop_cut,
        "versions": versions(),
        **(provenance or {}),
    }
    with ExitStack() as lock:
        check_answer_file(Path(output), resume, overwrite)
        if processes.is_first:
            lock.enter_context(only_writer(Path(output)))
        file = AnswerFile(Path(output), depends_on, processes.rank)
        if resume:
            file.check_settings()
        finished = set() if overwrite else file.finished()
        open_rows = [dialogue for dialogue in asked if dialogue.number not in finished]
        record.was_finished = len(asked) - len(open_rows)
        processes.gather([None])  # no process writes before all have checked
        if processes.is_first:
            file.begin(overwrite, facts)
        processes.gather([None])
        file.mend()

        # Rows of like length and number of turns share a batch, the longest first: memory runs out at once or never.
        open_rows.sort(key=lambda one: (one.num_turns, len(one.prompt_ids or ()), one.number), reverse=True)
        share = processes.share(open_rows)
        on_begin(len(share), record)
        counts = [0, 0, 0]  # verify steps, tokens of them, answers encoded again
        for dialogues, answers in _answered(writer, share, settings):
            file.append([row for dialogue in dialogues for row in dialogue.rows()])
            for answer in answers:
                counts[0] += len(answer.acceptance_lengths)
                counts[1] += sum(answer.acceptance_lengths)
                counts[2] += answer.is_encoded
            for dialogue in dialogues:
                on_row(dialogue.num_tokens)
        steps, tokens, record.encoded = (sum(of_all) for of_all in zip(*processes.gather([counts]), strict=True))
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


NumberedRows = Iterator[tuple[int, Mapping[str, Any]]]


def _first_rows(source: Iterable[Mapping[str, Any]], rows: list[Mapping[str, Any]]) -> NumberedRows:
    """The rows in order; those that were asked for are added to `rows`."""
    for number, row in enumerate(source, start=1):
        rows.append(row)
        yield number, row


def _drawn_rows(
    source: Iterable[Mapping[str, Any]], rows: list[Mapping[str, Any]], settings: RegenerationSettings
) -> NumberedRows:
    """`samples` rows, drawn by the seed, in order; all are added to `rows`."""
    rows.extend(source)
    order = list(range(1, len(rows) + 1))
    if settings.samples is not None:
        random.Random(f"samples-{settings.seed}").shuffle(order)
    for number in sorted(order[: settings.samples]):
        yield number, rows[number - 1]


def _dialogues(
    rows: NumberedRows, name: str, tokenizer: Any, settings: RegenerationSettings, positions: int | None
) -> tuple[list[Dialogue], dict[str, int]]:
    """The dialogues of the rows, and the number of rows left out, by the reason; of streamed rows the first `samples`."""
    left_out: Counter[str] = Counter()
    found: list[Dialogue] = []
    for number, row in rows:
        how = {"num_prompt_tokens": settings.prompt_tokens, "enable_thinking": settings.thinking}
        dialogue = None
        with named_row(number, name):
            try:
                dialogue = as_dialogue(number, row, tokenizer, **how)
            except Unanswerable as reason:
                left_out[str(reason)] += 1
        if dialogue is not None and dialogue.room(1, positions):
            found.append(dialogue)
        elif dialogue is not None:
            left_out[f"a prompt that fills the target's {positions} positions"] += 1
        if settings.streaming and (len(found) == settings.samples or (not found and number == SEARCHED_ROWS)):
            break
    if not found and not left_out:
        raise ValueError(f"{name} holds no row: give {FORMS}.")
    if not found:
        said = ", ".join(f"{reason} ({count})" for reason, count in left_out.items())
        raise ValueError(f"No row of {name} can be answered: {said}; give rows with a question.")
    return found, dict(left_out)


def _answered(
    writer: Writer, dialogues: Sequence[Dialogue], settings: RegenerationSettings
) -> Iterator[tuple[list[Dialogue], list[Answer]]]:
    """Dialogues when they are finished, and the answers since the last ones."""
    if not writer.is_concurrent:
        for begin in range(0, len(dialogues), writer.batch_size):
            yield from _rounds(writer, dialogues[begin : begin + writer.batch_size], settings)
        return
    with ThreadPoolExecutor(writer.batch_size) as pool:
        futures = [pool.submit(lambda one: list(_rounds(writer, [one], settings)), dialogue) for dialogue in dialogues]
        try:
            for future in as_completed(futures):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _rounds(
    writer: Writer, dialogues: Sequence[Dialogue], settings: RegenerationSettings
) -> Iterator[tuple[list[Dialogue], list[Answer]]]:
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
        done = [dialogue for dialogue in going if dialogue.prompt_ids is None]
        going = [dialogue for dialogue in going if dialogue.prompt_ids is not None]
        yield done, answers


def _stated_license(source: Any, rows: Sequence[Mapping[str, Any]]) -> str | None:
    """The licence that the data set's card or its rows state."""
    stated = getattr(getattr(source, "info", None), "license", None)
    if stated:
        return str(stated)
    found = sorted({str(row[key]) for row in rows for key in ("license", "licence") if row.get(key)})
    return ", ".join(found) or None
