"""A server's own counters of its drafts, in Prometheus' text format, and the acceptance between two readings of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise


VLLM = "vllm:spec_decode_num_"
SGLANG = "sglang:"
SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?P<labels>\{.*\})?\s+(?P<value>\S+)", re.MULTILINE)
POSITION = re.compile(r'[{,]\s*position="(\d+)"')
SGLANG_COUNTERS = {f"{SGLANG}spec_verify_calls", f"{SGLANG}generation_tokens", f"{SGLANG}num_requests"}

Counters = Mapping[str, float]


@dataclass(frozen=True)
class Drafting:
    """The acceptance of a server's drafts in some span of time.

    Attributes:
        tau: Tokens per verify step, the target's own included.
        per_position: Share of drafts whose proposal at position 1, 2, … was accepted; empty if the server does not say.
        source: The counters that it was taken from.
        steps: Verify steps; 0 if the server does not count them.
    """

    tau: float
    per_position: tuple[float, ...]
    source: str
    steps: float = 0.0


def read_counters(metrics: str) -> dict[str, float]:
    """The samples about drafts, summed over engines; a position follows its counter's name."""
    found: dict[str, float] = {}
    gauges: list[float] = []
    for sample in SAMPLE.finditer(metrics):
        name = sample["name"].removesuffix("_total")
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if name == f"{SGLANG}spec_accept_length":
            gauges.append(value)
        elif (name.startswith(VLLM) and not name.endswith("_created")) or name in SGLANG_COUNTERS:
            position = POSITION.search(sample["labels"] or "")
            key = f"{name} {position[1]}" if position else name
            found[key] = found.get(key, 0.0) + value
    if gauges:
        found[f"{SGLANG}spec_accept_length"] = sum(gauges) / len(gauges)
    return found


def drafting(before: Counters | None, after: Counters | None) -> Drafting | None:
    """The acceptance between two readings of [`Server.counters`]; `None` if nothing was drafted.

    vLLM counts drafts and accepted tokens. SGLang counts verify steps and the tokens that were kept, so an answer's last
    step counts less there; its older versions show only the mean of the last moments.
    """
    if before is None or after is None:
        return None
    delta = {name: value - before.get(name, 0.0) for name, value in after.items()}
    drafts = delta.get(f"{VLLM}drafts", 0.0)
    if drafts > 0:
        per_position = tuple(count / drafts for count in _by_position(delta))
        tau = 1 + delta.get(f"{VLLM}accepted_tokens", 0.0) / drafts
        return Drafting(tau, per_position, f"{VLLM}drafts, …accepted_tokens", drafts)
    steps, tokens = delta.get(f"{SGLANG}spec_verify_calls", 0.0), delta.get(f"{SGLANG}generation_tokens", 0.0)
    if steps > 0 and tokens > 0:
        # The prefill gives each answer's first token.
        kept = tokens - delta.get(f"{SGLANG}num_requests", 0.0)
        return Drafting(kept / steps, (), f"{SGLANG}spec_verify_calls", steps)
    recent = after.get(f"{SGLANG}spec_accept_length", 0.0)
    return Drafting(recent, (), f"{SGLANG}spec_accept_length, a mean of the last moments") if recent > 0 else None


def acceptance_lengths(before: Counters | None, after: Counters | None) -> list[int]:
    """Acceptance length of each draft between two readings of vLLM's counters, longest first; empty for other engines.

    The counts by position are the drafts with at least 1, 2, … proposals accepted; their differences are those with
    exactly that many.
    """
    if before is None or after is None:
        return []
    delta = {name: value - before.get(name, 0.0) for name, value in after.items()}
    by_position = _by_position(delta)
    if not by_position:
        return []
    reached = [round(count) for count in (delta.get(f"{VLLM}drafts", 0.0), *by_position, 0.0)]
    exact = [here - further for here, further in pairwise(reached)]
    return [length for length in range(len(exact), 0, -1) for _ in range(exact[length - 1])]


def _by_position(delta: Counters) -> list[float]:
    """The counts of accepted proposals at position 1, 2, … of vLLM."""
    counts: list[float] = []
    while (name := f"{VLLM}accepted_tokens_per_pos {len(counts)}") in delta:
        counts.append(delta[name])
    return counts
