"""Proposals that were seen before: where the text repeats itself, its own past competes with the drafter's block."""

from __future__ import annotations

from .rows_dflash import Row


# How much of the running mean the latest block is.
RECENT = 0.25

# A loser is tried again after so many places where it could have proposed.
RETRY_AFTER = 16


class PromptLookup:
    """Proposes what followed the latest earlier occurrence of the text's last `ngram_size` tokens.

    It proposes only as long as it pays: while its blocks have had at least as many tokens accepted as the drafter's, on
    a running mean; otherwise it is tried once in a while. Verification is that of any proposal.

    Args:
        num_tokens: Tokens to propose.
        ngram_size: Tokens that must have occurred before; fewer find more and worse matches.
    """

    def __init__(self, num_tokens: int, ngram_size: int) -> None:
        self.num_tokens = num_tokens
        self.ngram_size = ngram_size
        self._texts: dict[int, list[int]] = {}
        self._places: dict[int, dict[tuple[int, ...], int]] = {}  # n-gram -> where the token behind it stands
        self._mean_accepted: dict[str, float] = {}
        self._num_passed = 0

    def propose(self, rows: list[Row]) -> dict[int, list[int]]:
        """Proposals by place in `rows`, where the text's end occurred before and looking back pays."""
        found = {place: ids for place, row in enumerate(rows) if (ids := self._continue(row))}
        return found if found and self._pays() else {}

    def record(self, is_lookup: bool, num_accepted: int) -> None:
        """Counts what was accepted of a block of either kind."""
        source = "lookup" if is_lookup else "drafter"
        mean = self._mean_accepted.get(source, float(num_accepted))
        self._mean_accepted[source] = mean + RECENT * (num_accepted - mean)

    def _pays(self) -> bool:
        looked_up = self._mean_accepted.get("lookup", float("inf"))  # untried, it is tried
        if looked_up >= self._mean_accepted.get("drafter", 0.0):
            return True
        self._num_passed = (self._num_passed + 1) % RETRY_AFTER
        return self._num_passed == 0

    def _continue(self, row: Row) -> list[int] | None:
        """What stood behind the latest earlier occurrence of the row's end, repeated if it reaches that end."""
        text = self._read(row)
        begin = self._places[row.index].get(tuple(text[-self.ngram_size :]))
        if begin is None:
            return None
        period = len(text) - begin
        return [text[begin + i % period] for i in range(self.num_tokens)]

    def _read(self, row: Row) -> list[int]:
        """The row's text, with every n-gram of it but the last one in the table."""
        if row.index not in self._texts:
            self._texts[row.index], self._places[row.index] = row.prompt_ids.tolist(), {}
            read_from = 0
        else:
            read_from = len(self._texts[row.index])
        text = self._texts[row.index]
        text += row.new_ids[len(text) - len(row.prompt_ids) :]
        for end in range(max(read_from, self.ngram_size), len(text)):
            self._places[row.index][tuple(text[end - self.ngram_size : end])] = end
        return text
