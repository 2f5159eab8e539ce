"""Token sequences to train on, in a list or a memory-mapped table of `datasets`. It uses no tokenizer and no model."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from .settings import Facts


@dataclass(slots=True, init=False)
class Example:
    """One training sequence: its token ids, and a mask that is 1 for each token that the drafter learns to propose.

    `token_array` and `mask_array` take 5 bytes per token together. `rejected` holds the anchors of drafts that
    verification rejected, if a [`Trace`] recorded them.
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
        """The token ids as a new list."""
        return self.token_array.tolist()

    @property
    def loss_mask(self) -> list[int]:
        """For each token 1 if it is supervised, else 0, as a new list."""
        return self.mask_array.tolist()

    @property
    def prompt_ids(self) -> list[int]:
        """The token ids before the first supervised one; ValueError if no token is supervised."""
        return self.input_ids[: self.mask_array.index(1)]

    @property
    def has_anchor(self) -> bool:
        """Whether a block may begin in this sequence: it has two supervised tokens in a row."""
        return b"\1\1" in self.mask_array.tobytes()

    def __len__(self) -> int:
        return len(self.token_array)

    def __hash__(self) -> int:
        tokens, mask = self.token_array.tobytes(), self.mask_array.tobytes()
        return hash((tokens, mask))

    def __repr__(self) -> str:
        return f"Example({self.input_ids}, {self.loss_mask})"

    def cut(self, length: int) -> Example:
        """Returns an example of the first `length` tokens, or this example if it is not longer."""
        if len(self) <= length:
            return self
        rejected = [anchor for anchor in self.rejected if anchor < length]
        return Example(self.token_array[:length], self.mask_array[:length], rejected)

    def row(self) -> Facts:
        """Returns the example as a row of an [`ExampleTable`]: a numpy array for each column."""
        import numpy

        return {
            "input_ids": numpy.asarray(self.token_array),
            "loss_mask": numpy.asarray(self.mask_array),
            "rejected": numpy.asarray(self.rejected),
        }


class ExampleTable(Sequence[Example]):
    """A sequence of examples in a table of `datasets`. Each access reads one example from the memory-mapped file."""

    def __init__(self, table: Any) -> None:
        self.table = table.with_format("arrow")

    @staticmethod
    def features() -> Any:
        """Returns the `datasets.Features` of the table: lists of integers `input_ids`, `loss_mask` and `rejected`."""
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
        """Returns the length of each list in column `name`, as an array of pyarrow. The lists are not read."""
        from pyarrow import compute  # installed with `datasets`

        column = self.table.select_columns(name)[:].column(name)
        return compute.list_value_length(column)


Examples = Sequence[Example]
Prompts = Sequence[Sequence[int]]  # their token ids


def lengths_of(sequences: Sequence[Sized]) -> list[int]:
    """Returns the length of each sequence as a list. For an `ExampleTable`, the token ids are not read."""
    if isinstance(sequences, ExampleTable):
        return sequences.lengths_in("input_ids").to_pylist()
    return list(map(len, sequences))


def has_rejected(examples: Examples) -> bool:
    """Whether any example records a rejected draft. For an `ExampleTable`, only the lengths of the lists are read."""
    if not isinstance(examples, ExampleTable):
        return any(example.rejected for example in examples)
    lengths = examples.lengths_in("rejected").to_numpy()
    return bool(lengths.any())


def selected(examples: Examples, places: Iterable[int]) -> Examples:
    """Returns the examples at the indices `places`, as a list or an `ExampleTable`.

    For an `ExampleTable` the result is another table that shares its rows: nothing is copied.
    """
    if isinstance(examples, ExampleTable):
        return ExampleTable(examples.table.select(places))
    return [examples[place] for place in places]


def joined(parts: Sequence[Examples]) -> Examples:
    """Returns all examples of the parts: a table if one of the parts is a table, else a list."""
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
    """Returns the numbers of examples and tokens, and a fingerprint. Reads each example once.

    `longest_answer` is the largest number of supervised tokens in one example.
    """
    num_supervised = []  # of each example
    digest = hashlib.sha256()
    for example in examples:
        num_supervised.append(sum(example.mask_array))
        rejected = [example.rejected.tolist()] if example.rejected else []
        content = (example.input_ids, example.loss_mask, *rejected)
        digest.update(repr(content).encode())
    return {
        "examples": len(examples),
        "tokens": sum(lengths_of(examples)),
        "supervised_tokens": sum(num_supervised),
        "longest_answer": max(num_supervised, default=0),
        "fingerprint": digest.hexdigest()[:16],
    }
