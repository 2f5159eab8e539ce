"""`dflash canary`: one server with DFlash and one without, under the same growing load."""

import math
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from dflash.common.provenance import record

from .measurements import rounded
from .results import Row
from .timed_server import Message, Reply, Server, drafting


FEWEST_REQUESTS = 16


@dataclass(frozen=True)
class Load:
    """The requests to each server, and the largest 99th percentiles of its times; all numbers are finite."""

    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32)  # requests under way at once, level by level
    rounds: int = 4  # requests of a level for each that is under way at once (at least `FEWEST_REQUESTS` in all)
    max_new_tokens: int = 512
    temperature: float = 0.0  # 0 decodes greedily, and texts of both servers are compared
    thinking: bool | None = False  # passed to the chat template; `None` passes nothing
    seed: int = 0  # of the order of the prompts and of the servers' sampling
    price_per_hour: float | None = None  # of one server, in any currency
    target_ms_per_output_token: float | None = None
    target_ms_to_first_token: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name}={value}: use a finite number.")

    def requests(self, concurrency: int) -> int:
        """The number of requests of a level."""
        return max(FEWEST_REQUESTS, self.rounds * concurrency)


def run_canary(
    servers: dict[str, tuple[Server, str]],
    prompts: Sequence[Sequence[Message]],
    load: Load,
    progress: Callable[[], None] = lambda: None,
    hardware: str | None = None,
) -> dict[str, Any]:
    """Puts every server under every level of the load; returns a result of kind "serving".

    At each level the servers take turns, get the same prompts in the same order, and are warmed up by one unmeasured
    request per concurrent one. No prompt is repeated as long as there are enough, because a repeated prompt is in the
    server's prefix cache.

    `servers` holds a server and its model's name, by "dflash" and "baseline". `progress` is called after each server
    at each level. `hardware` is that of the servers, for the record. ValueError if a server fails a warm-up, or every
    request of a level; a single failed request is counted.
    """
    needed = sum(load.requests(level) + level for level in load.concurrency)
    draw, everyone = random.Random(load.seed), range(len(prompts))
    # All prompts shuffled, then all of them again.
    order = [i for _ in range(math.ceil(needed / len(prompts))) for i in draw.sample(everyone, len(prompts))]
    rows: list[Row] = []
    measurements: list[Row] = []
    dealt = 0
    for level in load.concurrency:
        chosen = order[dealt : dealt + level + load.requests(level)]
        dealt += len(chosen)
        texts: dict[str, list[str | None]] = {}
        for name, (server, model) in servers.items():

            def ask(index: int, server: Server = server, model: str = model) -> Reply | str:
                request = load.max_new_tokens, load.temperature, load.seed, load.thinking
                try:
                    return server.stream(model, prompts[index], *request)
                except ValueError as error:
                    return str(error)

            row, replies = _under_load(ask, server, chosen[:level], chosen[level:], level)
            texts[name] = [reply.text if isinstance(reply, Reply) else None for reply in replies]
            if load.price_per_hour is not None:
                row["cost_per_million_tokens"] = round(load.price_per_hour / 3600 / row["tokens_per_second"] * 1e6, 6)
            rows.append({"server": name, **row})
            for index, reply in zip(chosen[level:], replies, strict=True):
                one: Row = {"server": name, "concurrency": level, "prompt_index": index}
                if isinstance(reply, str):
                    measurements.append(one | {"error": reply})
                    continue
                first = rounded(reply.seconds_to_first_token)
                times = {"seconds": rounded(reply.seconds), "seconds_to_first_token": first}
                measurements.append(one | {"num_tokens": reply.num_tokens} | times)
            progress()
        _compare(rows[-len(servers) :], texts, load)
    engines = {name: server.engine() for name, (server, _) in servers.items()}
    served = {
        name: {"url": one.url, "model": model, "engine": engines[name]} for name, (one, model) in servers.items()
    }
    target = " / ".join(dict.fromkeys(model for _, model in servers.values()))
    engine = " / ".join(dict.fromkeys(filter(None, engines.values()))) or None
    return record(
        "serving",
        {"target": target, "engine": engine, "device": hardware, "servers": served},
        decoding={**asdict(load), "prompts": len(prompts), "prompts_repeat": needed > len(prompts)},
        summary=rows,
        at_target=at_target(rows, load),
        measurements=measurements,
    )


def at_target(rows: Sequence[Row], load: Load) -> dict[str, Row | None]:
    """By server, the row of the highest throughput within the load's targets, `None` if there is none.

    Only measured levels count; nothing is interpolated. Empty without a target.
    """
    limits = {
        "ms_per_output_token_p99": load.target_ms_per_output_token,
        "ms_to_first_token_p99": load.target_ms_to_first_token,
    }
    wanted = {key: limit for key, limit in limits.items() if limit is not None}
    if not wanted:
        return {}
    best: dict[str, Row | None] = dict.fromkeys(row["server"] for row in rows)
    for row in rows:
        within = not row["failed"] and all(row[key] is not None and row[key] <= limit for key, limit in wanted.items())
        so_far = best[row["server"]]
        if within and (so_far is None or row["tokens_per_second"] > so_far["tokens_per_second"]):
            best[row["server"]] = row
    return best


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of the finite values, `None` without any."""
    ordered = sorted(value for value in values if math.isfinite(value))
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else None


def _under_load(
    ask: Callable[[int], Reply | str], server: Server, warm_up: Sequence[int], measured: Sequence[int], level: int
) -> tuple[Row, list[Reply | str]]:
    """One level of one server."""
    with ThreadPoolExecutor(level) as pool:
        for reply in pool.map(ask, warm_up):
            if isinstance(reply, str):
                raise ValueError(reply)
        before = server.counters()
        began = time.perf_counter()
        replies = list(pool.map(ask, measured))
        seconds = time.perf_counter() - began
        drafts = drafting(before, server.counters())
    good = [reply for reply in replies if isinstance(reply, Reply)]
    if not good:
        raise ValueError(next(reply for reply in replies if isinstance(reply, str)))
    tokens = sum(reply.num_tokens for reply in good)
    first = [1e3 * reply.seconds_to_first_token for reply in good]
    each = [1e3 * reply.seconds_per_output_token for reply in good]
    row: Row = {
        "concurrency": level,
        "requests": len(replies),
        "failed": len(replies) - len(good),
        "tokens": tokens,
        "seconds": rounded(seconds),
        "tokens_per_second": rounded(tokens / seconds),
        "ms_to_first_token_p50": rounded(percentile(first, 0.5)),
        "ms_to_first_token_p99": rounded(percentile(first, 0.99)),
        "ms_per_output_token_p50": rounded(percentile(each, 0.5)),
        "ms_per_output_token_p99": rounded(percentile(each, 0.99)),
        "tau": rounded(drafts.tau) if drafts else None,
        "accepted_per_position": [rounded(share) for share in drafts.per_position] if drafts else None,
        "tau_source": drafts.source if drafts else None,
    }
    return row, replies


def _compare(rows: Sequence[Row], texts: dict[str, list[str | None]], load: Load) -> None:
    """Adds to the rows of one level the speed-up over the baseline and the number of equal greedy texts."""
    base = next((row for row in rows if row["server"] == "baseline"), None)
    if base is None or len(rows) < 2:
        return
    for row in rows:
        row["speedup"] = rounded(row["tokens_per_second"] / base["tokens_per_second"])
        if load.temperature == 0:
            pairs = zip(texts[row["server"]], texts["baseline"], strict=True)
            row["identical"] = sum(text == plain and text is not None for text, plain in pairs)
