"""Cost of a step of a simulated pair, by context, length, batch size, width and tree budget."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from .measurements import Measurement, Prompt, compare
from .memory import allocated_memory
from .methods import GREEDY, PLAIN, VARIANTS, Method
from .simulated_pairs import scripted_prompt
from .timing import timed_blocks, timed_generate


EAGERLY = "dflash eager"


def measure_point(
    target: Any,
    drafter: Any,
    context: int = 256,
    new_tokens: int = 64,
    batch_size: int = 1,
    width: int | None = None,
    budget: int = 0,
    methods: Sequence[str] = (EAGERLY,),
    repeats: int = 3,
    plain: dict[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Plain decoding and ours on one prompt, in turns: a row per method, marked as simulated.

    Milliseconds are measured; the script's tau is stated, and figures that depend on it say so. A batch's step is one
    forward of the target for all sequences; towards the end, when some have stopped, for fewer.

    The pair is a `scripted_pair`; `context` and `new_tokens` (at least 2) count the tokens of the prompt and of its answer.
    `width` tokens are verified at once, anchor included; `None`: the drafter's block. `budget` is the number of nodes of a
    draft tree, 0 for a chain. A tree has no scripted tau: its rows hold only the tau that it needs. `methods` are names of
    `VARIANTS`, and `plain` holds more keywords for `target.generate`.
    """
    limit = {} if width is None else {"max_draft_tokens": width - 1}
    tree = {"draft_tree": budget} if budget else {}
    ways = _ways(target, drafter, new_tokens, methods, plain or {}, {**limit, **tree})
    prompt = Prompt("simulated", scripted_prompt(target, context, batch_size))
    measurements = compare(ways, [prompt], repeats)
    plain_ms = milliseconds(measurements[0])["ms_per_step"]
    tau = drafter.script.tau(drafter.config.block_size if width is None else width)
    rows = []
    for measurement in measurements:
        times = milliseconds(measurement)
        step = times["ms_per_step"]
        is_plain, has_tau = measurement.method == PLAIN, not budget
        stated = 1.0 if is_plain else tau if has_tau else None
        rows.append(
            {
                "method": measurement.method,
                "is_simulated": True,
                "context_tokens": context,
                "new_tokens": new_tokens,
                "batch_size": batch_size,
                "width": 1 if is_plain else width or drafter.config.block_size,
                "budget": 0 if is_plain else budget,
                "is_identical": measurement.is_identical,
                **times,
                "stated_tau": None if stated is None else round(stated, 4),
                "ms_per_token": None if stated is None else round(step / stated, 4),
                "speedup_at_stated_tau": None if stated is None else round(plain_ms * stated / step, 4),
                "tau_to_match_plain": round(step / plain_ms, 4),
                "compilations": measurement.num_compilations,
            }
        )
    return rows


def measure_prefill(
    target: Any, drafter: Any, context: int, methods: Sequence[str] = (EAGERLY,), prefill_chunk_size: int | None = None
) -> list[dict[str, Any]]:
    """Bytes that plain decoding and ours allocate for a prompt and two new tokens: a row per method.

    `taps_bytes` are the features of the tapped layers, which ours needs in addition.
    """
    chunk = {} if prefill_chunk_size is None else {"prefill_chunk_size": prefill_chunk_size}
    ways = _ways(target, drafter, 2, methods, chunk, chunk)
    prompt = scripted_prompt(target, context)
    for run in ways.values():
        run(prompt[:, :32])  # libraries load, buffers that stay are made
    taps = len(drafter.config.target_layer_ids) * target.config.hidden_size * target.dtype.itemsize
    held = {name: allocated_memory(partial(run, prompt), target.device) for name, run in ways.items()}
    return [
        {
            "method": name,
            "is_simulated": True,
            "context_tokens": context,
            "allocated_bytes": num_bytes,
            "over_plain": round(num_bytes / held[PLAIN], 4),
            "taps_bytes": 0 if name == PLAIN else context * taps,
        }
        for name, num_bytes in held.items()
    ]


def milliseconds(measurement: Measurement) -> dict[str, float]:
    """Milliseconds per step (median, fastest and slowest repeat) and to the first token (median)."""
    steps = measurement.num_forwards - 1
    each = [
        1e3 * (total - first) / steps
        for total, first in zip(measurement.seconds, measurement.seconds_to_first_token, strict=True)
    ]
    return {
        "ms_per_step": round(median(each), 4),
        "ms_per_step_fastest": round(min(each), 4),
        "ms_per_step_slowest": round(max(each), 4),
        "ms_to_first_token": round(1e3 * median(measurement.seconds_to_first_token), 4),
    }


def _ways(
    target: Any, drafter: Any, new_tokens: int, methods: Sequence[str], plain: dict[str, Any], ours: dict[str, Any]
) -> dict[str, Method]:
    """Plain decoding with the keywords `plain`, and variants of ours with the keywords `ours`."""
    ways: dict[str, Method] = {PLAIN: partial(timed_generate, target, max_new_tokens=new_tokens, **GREEDY, **plain)}
    for name in methods:
        options = {"max_new_tokens": new_tokens, "temperature": 0.0, **VARIANTS[name], **ours}
        ways[name] = partial(timed_blocks, drafter, target, **options)
    return ways
