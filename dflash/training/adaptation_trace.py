"""Records texts while a pair decodes them, with the anchors of the drafts that verification rejected, as rows to train on."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from transformers.modeling_utils import PreTrainedModel

from dflash.common.fingerprints import fingerprint, model_fingerprint
from dflash.common.json_lines import JsonLines, whole_lines
from dflash.common.provenance import public_name
from dflash.model.decoding_dflash import Block

from .examples import Prompts
from .settings import Facts
from .sources import Source


# What each row of a trace begins with.
BEGINNING = b'{"target":'


class Trace:
    """A file with a row for each text: its token ids and, in `rejected`, the anchors of drafts that were not accepted whole.

    Each row also names the target that wrote it and the tokenizer, so that files can be joined.

    Args:
        path: A `.jsonl` file, to which rows are added.
        target: The target. Rows hold the fingerprint of its weights.
        tokenizer: Its tokenizer.
        name: The target's name. Only the last part of a path is written.
        rank: Number of this process; every process but the first writes a file of its own beside `path`.
        begin: Delete what the file holds.

    Raises:
        ValueError: for a path that does not end in `.jsonl`, which is how training reads it, or a file that is no trace of this
            target and tokenizer; nothing is changed then.

    Example:
        >>> trace = Trace(Path("trace.jsonl"), target, tokenizer, "Qwen/Qwen3-4B")
        >>> for block in recorded(generate_blocks(drafter, target, [prompt_ids]), [prompt_ids], trace):
        ...     print(tokenizer.decode(block.token_ids), end="")
    """

    def __init__(
        self,
        path: Path,
        target: PreTrainedModel,
        tokenizer: Any,
        name: str | None = None,
        rank: int = 0,
        begin: bool = False,
    ) -> None:
        self.check_name(path)
        self._lines = JsonLines(path, rank)
        self._origin = {"target": public_name(name), **_fingerprints(target, tokenizer)}
        for part in self._lines.parts():
            if not begin:
                check_trace(
                    _rows_of(part),
                    name or "this target",
                    tokenizer,
                    target,
                    f"{part}: ",
                    "name another file",
                )
            elif rank == 0:
                part.unlink()
        self._lines.mend()

    @staticmethod
    def check_name(path: Path) -> None:
        """Raises ValueError for a path that does not end in `.jsonl`."""
        if path.suffix != ".jsonl":
            raise ValueError(f"The trace {path} must be a file that ends in .jsonl, which is how training reads it.")

    def append(self, prompt_ids: Sequence[int], response_ids: Sequence[int], rejected: Sequence[int]) -> None:
        """Adds a text. `rejected` counts places from the beginning of the prompt."""
        text = {
            "prompt_ids": list(prompt_ids),
            "response_ids": list(response_ids),
            "rejected": list(rejected),
        }
        self._lines.append([self._origin | text])

    def join(self) -> None:
        """Adds the rows of the other processes to the file. The first process calls it when all are done."""
        parts = self._lines.parts()
        if len(parts) > 1:
            numbered = chain.from_iterable(map(whole_lines, parts))
            self._lines.join(line for _, line in numbered)


def was_rejected(block: Block) -> bool:
    """Whether verification rejected a draft of the drafter. A drafter learns nothing from the proposals of a lookup."""
    return block.num_accepted < block.num_proposals and not block.is_lookup


def recorded(blocks: Iterable[Block], prompts: Prompts, trace: Trace) -> Iterator[Block]:
    """The blocks of `generate_blocks`, unchanged. When they end, or are not read further, their texts are added to `trace`."""
    texts = [list(prompt) for prompt in prompts]
    rejected: list[list[int]] = [[] for _ in prompts]
    try:
        for block in blocks:
            text = texts[block.sequence]
            if was_rejected(block):
                rejected[block.sequence].append(len(text) - 1)
            text += block.token_ids
            yield block
    finally:
        for prompt, text, anchors in zip(
            prompts,
            texts,
            rejected,
            strict=True,
        ):
            trace.append(prompt, text[len(prompt) :], anchors)


def _rows_of(path: Path) -> Iterator[Facts]:
    """The rows of a trace. Half a row at its end, which a killed process left, is skipped; ValueError for any other line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            is_whole = line.endswith(b"\n")
            row = None
            with suppress(ValueError):
                row = json.loads(line)
            begins_a_row = line.startswith(BEGINNING[: len(line)])
            if row is None and not is_whole and begins_a_row:
                return
            if not is_whole or not isinstance(row, dict) or "rejected" not in row:
                raise ValueError(
                    f"Line {number} of {path} is no complete row of a trace: name a new file, or one that --trace wrote."
                )
            yield row


def _fingerprints(target: PreTrainedModel, tokenizer: Any) -> dict[str, str]:
    return {"weights": model_fingerprint(target), "tokenizer": fingerprint(tokenizer.get_vocab())}


def check_trace(
    rows: Iterable[Mapping[str, Any]],
    target: Source,
    tokenizer: Any,
    model: PreTrainedModel,
    where: str = "",
    remedy: str = "record a trace of this target (dflash regenerate --trace)",
) -> None:
    """Raises ValueError for a row of a trace that was recorded with another tokenizer or with another target than `model`."""
    expected = _fingerprints(model, tokenizer)
    for number, row in enumerate(rows, start=1):
        if row.get("rejected") is None:
            continue
        recorder = row.get("target") or "another target"
        for name in ("tokenizer", "weights"):
            recorded = row.get(name)
            if recorded != expected[name]:
                raise ValueError(
                    f"{where}Row {number} was recorded with the {name} {recorded} of {recorder} "
                    f"and those of {target} are {expected[name]}: {remedy}."
                )
