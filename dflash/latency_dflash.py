"""How long the forwards of a pair take by width: measured once, where they run, and kept in memory.

The one shipped file with a clock. It decides no text: only how many drafted tokens are worth verifying.
"""

from __future__ import annotations

import json
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch


# Forwards of each width that are timed, behind one that is not.
REPEATS = 5

_measured: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, dict[Any, LatencyCurve]]]
_measured = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class LatencyCurve:
    """Milliseconds of one verify step by its number of columns, of one draft, and of what a tree adds.

    Attributes:
        widths: Columns, anchor included, rising from 1.
        verify_ms: Milliseconds of the target's forward over so many.
        draft_ms: Milliseconds of the drafter's.
        machine: What they were measured on: device, dtype, threads, versions.
        tree_ms: Milliseconds more of a step whose columns are a tree; `None`: not measured.

    Example:
        >>> curve = LatencyCurve.from_json(Path("curve.json").read_text())
        >>> drafter.spec_generate(input_ids, target=target, latency_curve=curve)
    """

    widths: tuple[int, ...]
    verify_ms: tuple[float, ...]
    draft_ms: float
    machine: dict[str, Any]
    tree_ms: float | None = None

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.widths, self.widths[1:], strict=False))
        if not self.widths or self.widths[0] != 1 or not rising or len(self.widths) != len(self.verify_ms):
            raise ValueError(
                f"A latency curve has the widths {list(self.widths)} for {len(self.verify_ms)} times: give one time for each "
                "of rising widths from 1 on."
            )
        if not all(ms > 0 for ms in (*self.verify_ms, self.draft_ms)) or (self.tree_ms or 0.0) < 0:
            shortest = min(*self.verify_ms, self.draft_ms, self.tree_ms or 0.0)
            raise ValueError(f"A latency curve holds {shortest} ms: measure it again.")

    def verify(self, width: int) -> float:
        """Milliseconds of `width` columns: between two measured widths on the line through them, beyond on the last one."""
        if len(self.widths) == 1:
            return self.verify_ms[0]
        right = min(max(bisect_left(self.widths, width), 1), len(self.widths) - 1)
        (w0, w1), (t0, t1) = self.widths[right - 1 : right + 1], self.verify_ms[right - 1 : right + 1]
        return t0 + (t1 - t0) * (width - w0) / (w1 - w0)

    def to_json(self) -> str:
        """As text for a file."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LatencyCurve:
        """What `to_json` wrote.

        Raises:
            ValueError: if it is something else.
        """
        try:
            fields = json.loads(text)
            widths, verify_ms = tuple(map(int, fields["widths"])), tuple(map(float, fields["verify_ms"]))
            draft_ms, tree_ms = float(fields["draft_ms"]), fields["tree_ms"]
            tree_ms, measured_on = None if tree_ms is None else float(tree_ms), dict(fields["machine"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"This is no latency curve ({error!r}): give what LatencyCurve.to_json wrote.") from error
        return cls(widths, verify_ms, draft_ms, measured_on, tree_ms)

    def check(self, target: Any, drafter: Any, is_tree: bool) -> None:
        """Raises ValueError if it was measured on another machine or of another pair, or knows no trees."""
        if is_tree and self.tree_ms is None:
            raise ValueError("The latency curve was measured without draft_tree: measure it with draft_tree=True.")
        here = machine(target, drafter)
        others = [name for name, value in here.items() if self.machine.get(name) != value]
        if others:
            said = ", ".join(f"{name} {self.machine.get(name)!r} and not {here[name]!r}" for name in others)
            raise ValueError(f"The latency curve was measured elsewhere ({said}): measure it here.")


def machine(target: Any, drafter: Any) -> dict[str, Any]:
    """What the times of a pair depend on."""
    device = target.device
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "target_parameters": sum(parameter.numel() for parameter in target.parameters()),
        "drafter_parameters": sum(parameter.numel() for parameter in drafter.parameters()),
    }


def measured_curve(
    target: Any,
    drafter: Any,
    setting: Any,
    widths: Sequence[int],
    verify: Callable[[int], torch.Tensor],
    draft: Callable[[], torch.Tensor],
    verify_tree: Callable[[int], torch.Tensor] | None = None,
) -> LatencyCurve:
    """The pair's curve in a `setting` (rows, length of the context, how it runs), measured if it was not before.

    Args:
        target: The target.
        drafter: The drafter.
        setting: What else the times depend on; hashable.
        widths: To measure, rising from 1.
        verify: Runs the target over so many columns and leaves everything as it was.
        draft: Runs the drafter, likewise.
        verify_tree: Grows a tree and runs the target over its columns.
    """
    of_target = _measured.setdefault(target, weakref.WeakKeyDictionary())
    of_pair = of_target.setdefault(drafter, {})
    key = (setting, tuple(widths), target.dtype, target.device, torch.get_num_threads())
    if key not in of_pair:
        times = [_milliseconds(partial(verify, width)) for width in widths]
        # Wider is never faster: what says so is noise.
        times = list(accumulate(times, max))
        tree_ms = None
        if verify_tree is not None:
            tree_ms = max(0.0, _milliseconds(partial(verify_tree, widths[-1])) - times[-1])
        of_pair[key] = LatencyCurve(
            tuple(widths), tuple(times), _milliseconds(draft), machine(target, drafter), tree_ms
        )
    return of_pair[key]


def _milliseconds(run: Callable[[], torch.Tensor]) -> float:
    def timed() -> float:
        began = time.perf_counter()
        run().flatten()[0].item()  # reading a value waits for the device
        return 1e3 * (time.perf_counter() - began)

    timed()
    return min(timed() for _ in range(REPEATS))  # what another process slows down is not the machine's
