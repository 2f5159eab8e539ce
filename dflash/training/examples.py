"""Sequences to train on, in a list or in a table of `datasets`, which may be larger than memory. It knows no text and no model."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from .settings import Facts


@dataclass(slots=True, init=False)
class Example:
    """One sequence as arrays, which take 5 bytes a token; in `mask_array` the tokens that the drafter learns to propose are 1.

    `rejected` are the anchors of drafts that verification rejected, where a [`Trace`] recorded them.
    """

    token_array: array[int]
    mask_array: array[int]
    rejected: array[int]

    def __init__(
        self, input_ids: Sequence[int], loss_mask: Sequence[int], rejected: Sequence[int] | bytes = ()
    ) -> None:
        self.token_array = array("i", input_ids)
        self.mask_array = array("b", loss_mask)
        self.rejected = array("i", rejected)

    @property
    def input_ids(self) -> list[int]:
        """The token ids, in a new list."""
        return self.token_array.tolist()

    @property
    def loss_mask(self) -> list[int]:
        """1 for a supervised token, else 0, in a new list."""
        return self.mask_array.tolist()

    @property
    def prompt_ids(self) -> list[int]:
        """The token ids before the first supervised one; ValueError if no token is supervised."""
        return self.input_ids[: self.mask_array.index(1)]

    @property
    def has_anchor(self) -> bool:
        """Whether two supervised tokens follow each other, so that a block may begin here."""
        return b"\1\1" in self.mask_array.tobytes()

    def __len__(self) -> int:
        return len(self.token_array)

    def __hash__(self) -> int:
        tokens, mask = self.token_array.tobytes(), self.mask_array.tobytes()
        return hash((tokens, mask))

    def __repr__(self) -> str:
        return f"Example({self.input_ids}, {self.loss_mask})"

    def cut(self, length: int) -> Example:
        """The first `length` tokens."""
        if len(self) <= length:
            return self
        rejected = [anchor for anchor in self.rejected if anchor < length]
        return Example(self.token_array[:length], self.mask_array[:length], rejected)

    def row(self) -> Facts:
        """The example as a row of an [`ExampleTable`]."""
        import numpy

        return {
            "input_ids": numpy.asarray(self.token_array),
            "loss_mask": numpy.asarray(self.mask_array),
            "rejected": numpy.asarray(self.rejected),
        }


class ExampleTable(Sequence[Example]):
    """The examples of a table of `datasets`. Each access reads an example from the mapped file."""

    def __init__(self, table: Any) -> None:
        self.table = table.with_format("arrow")

    @staticmethod
    def features() -> Any:
        """The columns of such a table."""
        import datasets

        ids, mask = datasets.Value("int32"), datasets.Value("int8")
        return datasets.Features(
            {
                "input_ids": datasets.List(ids),
                "loss_mask": datasets.List(mask),
                "rejected": datasets.List(ids),
            }
        )

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        row = self.table[index]
        fields = []
        for name in ("input_ids", "loss_mask", "rejected"):
            values = row.column(name)[0].values
            fields.append(values.to_numpy().tobytes())
        return Example(*fields)

    def lengths_in(self, name: str) -> Any:
        """The length of each example's list in a column, as an array of pyarrow: the lists are not read."""
        from pyarrow import compute  # which comes with `datasets`, as tables do

        column = self.table.select_columns(name)[:].column(name)
        return compute.list_value_length(column)


Examples = Sequence[Example]
Prompts = Sequence[Sequence[int]]  # their token ids


def lengths_of(sequences: Sequence[Sized]) -> list[int]:
    """The length of each sequence; the examples of a table are not read."""
    if isinstance(sequences, ExampleTable):
        return sequences.lengths_in("input_ids").to_pylist()
    return list(map(len, sequences))


def has_rejected(examples: Examples) -> bool:
    """Whether an example has anchors of drafts that verification rejected; the examples of a table are not read."""
    if not isinstance(examples, ExampleTable):
        return any(example.rejected for example in examples)
    lengths = examples.lengths_in("rejected").to_numpy()
    return bool(lengths.any())


def selected(examples: Examples, places: Iterable[int]) -> Examples:
    """The examples at `places`, as a list or a table. A table copies no example."""
    if isinstance(examples, ExampleTable):
        return ExampleTable(examples.table.select(places))
    return [examples[place] for place in places]


def joined(parts: Sequence[Examples]) -> Examples:
    """The examples of all parts, one part after the other: a table if a part is one, else a list."""
    if not any(isinstance(part, ExampleTable) for part in parts):
        return [example for part in parts for example in part]
    import datasets

    tables = [_table(part) for part in parts]
    return ExampleTable(datasets.concatenate_datasets(tables))


def _table(part: Examples) -> Any:
    import datasets

    if isinstance(part, ExampleTable):
        return part.table
    rows = [example.row() for example in part]
    return datasets.Dataset.from_list(rows, features=ExampleTable.features()).with_format("arrow")


def described(examples: Examples) -> Facts:
    """The amount of data, and a short hash that tells one version of it from another. Each example is read once."""
    answers = []  # supervised tokens of each example
    digest = hashlib.sha256()
    for example in examples:
        answers.append(sum(example.mask_array))
        rejected = [example.rejected.tolist()] if example.rejected else []
        content = (example.input_ids, example.loss_mask, *rejected)
        digest.update(repr(content).encode())
    return {
        "examples": len(examples),
        "tokens": sum(lengths_of(examples)),
        "supervised_tokens": sum(answers),
        "longest_answer": max(answers, default=0),
        "fingerprint": digest.hexdigest()[:16],
    }
