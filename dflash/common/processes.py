"""This process among its siblings, as `accelerate launch` or torchrun started them; alone if nothing did."""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar


Item = TypeVar("Item")

# The longest wait of processes for one another.
PATIENCE = timedelta(days=7)


class Processes:
    """This process's share of the work, and the exchange of results."""

    def __init__(self) -> None:
        self.rank, self.local_rank, self.count = 0, 0, 1  # the local rank is that on this machine, and so of its GPU
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            from accelerate import PartialState

            # Only Python objects are sent: on the CPU, wherever the models are.
            state = PartialState(cpu=True, timeout=PATIENCE)
            self.rank, self.local_rank = state.process_index, state.local_process_index
            self.count = state.num_processes

    @property
    def is_first(self) -> bool:
        """Whether this process writes and shows."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Every `count`-th item: shares differ by one at most."""
        return items[self.rank :: self.count]

    def gather(self, items: Sequence[Any]) -> list[Any]:
        """All processes' items, in every process; waits for the slowest."""
        if self.count == 1:
            return list(items)
        from accelerate.utils import gather_object

        return list(gather_object(list(items)))
