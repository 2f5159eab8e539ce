"""Records decoded texts as training rows, with the anchors of the drafts that verification rejected."""

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
    """A file of JSON lines, one per text: its token ids, and the anchors of drafts that were not fully accepted.

    The anchors are in `rejected`. Each row also holds the target's name and the fingerprints of target and tokenizer,
    so that files can be concatenated.

    Args:
        path: A `.jsonl` file. Rows are appended to it.
        target: The target. Each row holds the fingerprint of its weights.
        tokenizer: The target's tokenizer.
        name: The target's name. For a local path, only the last part is written.
        rank: Rank of this process. Each process except the first writes to a file beside `path`, whose rows `join`
            moves to `path`.
        overwrite: Delete the rows that the file holds.

    Raises:
        ValueError: for a path that does not end in `.jsonl`, as training needs it; or, without `overwrite`, for a file
            that is not a trace of this target and tokenizer. The file is then not changed.

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
        overwrite: bool = False,
    ) -> None:
        self.check_name(path)
        self._lines = JsonLines(path, rank)
        self._origin = {"target": public_name(name), **_fingerprints(target, tokenizer)}
        for part in self._lines.parts():
            if not overwrite:
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
        """Appends the row of one text; OSError if it cannot be written.

        `rejected` holds the anchors of rejected drafts, as indices into prompt and response together.
        """
        text = {
            "prompt_ids": list(prompt_ids),
            "response_ids": list(response_ids),
            "rejected": list(rejected),
        }
        self._lines.append([self._origin | text])

    def join(self) -> None:
        """Moves the rows of all processes into `path`. Call it on the first process, when all have finished."""
        parts = self._lines.parts()
        if len(parts) > 1:
            numbered = chain.from_iterable(map(whole_lines, parts))
            self._lines.join(line for _, line in numbered)


def was_rejected(block: Block) -> bool:
    """Whether verification rejected a proposal of the drafter; False for lookup proposals."""
    return block.num_accepted < block.num_proposals and not block.is_lookup


def recorded(blocks: Iterable[Block], prompts: Prompts, trace: Trace) -> Iterator[Block]:
    """Yields the `blocks` of `generate_blocks` unchanged, and appends each text to `trace`.

    The texts are appended when this generator ends or is closed.
    """
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
    """Yields the rows of a trace. An incomplete last row is skipped.

    ValueError for a line that is not a row of a trace.
    """
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
                    f"Line {number} of {path} is not a complete row of a trace: name a new file, or one that --trace "
                    "wrote."
                )
            yield row


def _fingerprints(target: PreTrainedModel, tokenizer: Any) -> dict[str, str]:
    return {"weights": model_fingerprint(target), "tokenizer": fingerprint(tokenizer.get_vocab())}


def check_trace(
    rows: Iterable[Mapping[str, Any]],
    target_name: Source,
    tokenizer: Any,
    target: PreTrainedModel,
    where: str = "",
    remedy: str = "record a trace of this target (dflash regenerate --trace)",
) -> None:
    """Raises ValueError if a row was recorded with another tokenizer or another target.

    Rows without `rejected` do not come from a trace and are not checked. The message begins with `where`, calls the
    target `target_name`, and ends with `remedy`.
    """
    expected = _fingerprints(target, tokenizer)
    for number, row in enumerate(rows, start=1):
        if row.get("rejected") is None:
            continue
        recorder = row.get("target") or "another target"
        for name in ("tokenizer", "weights"):
            value = row.get(name)
            if value != expected[name]:
                raise ValueError(
                    f"{where}Row {number} was recorded with the {name} {value} of {recorder} "
                    f"but {target_name} has {expected[name]}: {remedy}."
                )
