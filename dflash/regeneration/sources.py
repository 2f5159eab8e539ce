"""Prepares the sources of an adaptation. The target answers the sources that do not hold its answers yet."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from dflash.common.manifest import manifest_path
from dflash.common.messages import Announce, say_nothing
from dflash.common.processes import Processes
from dflash.training import read_rows

from .run import RegenerationRun, regenerate_data
from .settings import RegenerationSettings
from .target_writer import TargetWriter


def answer_sources(
    sources: Mapping[str, str],
    folder: Path,
    load: Callable[[], tuple[TargetWriter, Any]],
    settings: RegenerationSettings,
    target_name: str,
    overwrite: bool = False,
    announce: Announce = say_nothing,
    watch: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> list[str]:
    """Returns the data to train on for each source: the source itself if it holds answers, else a trace of new answers.

    The writer makes the traces, in `folder`. If an earlier call was interrupted, its answers are completed.

    Args:
        sources: Files, folders or Hub ids. Their keys are the names of their traces.
        folder: Folder of the answers and traces. It is made if it does not exist.
        load: Function that returns the writer, with a drafter, and the tokenizer. Called only if a source lacks
            answers.
        settings: Which rows to answer, and how.
        target_name: The target's name, for the manifest.
        overwrite: Answer all sources again.
        announce: Called with a sentence before each source that is answered, and with its result.
        watch: Function that returns a context manager for each source that is answered. The value of the context
            manager is `None`, or has `begin` and `row`, which become `on_begin` and `on_done` of a [`RegenerationRun`].

    Raises:
        ValueError: for a source that cannot be read or that is streamed although it holds answers. Also the errors of
            [`regenerate_data`].
    """
    has_answers = {source: _has_answers(source, settings) for source in sources.values()}
    if all(has_answers.values()):
        return list(sources.values())
    processes = Processes()
    writer, tokenizer = load()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, source in sources.items():
        if has_answers[source]:
            paths.append(source)
            continue
        answers = folder / f"{name}.jsonl"
        trace = folder / f"{name}.trace.jsonl"
        resume = manifest_path(answers).exists() and not overwrite
        rest = "the rest of " if resume else ""
        announce(f"The target answers {rest}{source}, and rejected drafts are recorded, in {trace}.")
        with watch() as bar:
            watched = {} if bar is None else {"on_begin": bar.begin, "on_done": bar.row}
            run = RegenerationRun(processes=processes, target=target_name, trace=trace, **watched)
            record = regenerate_data(
                writer, tokenizer, source, answers, settings, resume=resume, overwrite=overwrite, run=run
            )
        if processes.is_first:
            announce(record.summary(answers))
        processes.gather([None])
        paths.append(str(trace))
    return paths


def _has_answers(source: str, settings: RegenerationSettings) -> bool:
    """Returns whether the first row of a source holds an answer. ValueError if it does and the source is streamed."""
    row = next(iter(read_rows(source, settings.split, settings.streaming)), {})
    if settings.streaming and "response_ids" in row:
        raise ValueError(f"{source} holds answers, which are read whole: leave --streaming out.")
    return "response_ids" in row
