"""`dflash canary`: one server with DFlash and one without, under the same growing load."""

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from dflash.common.provenance import record

from .measurements import rounded
from .results import Row
from .timed_server import Message, Reply, Server, drafting


FEWEST_REQUESTS = 16

# A server and the name of its model, by "dflash" and "baseline".
Servers = dict[str, tuple[Server, str]]


@dataclass(frozen=True)
class Load:
    """The requests to each server, and the limits of its 99th percentiles. All numbers are finite."""

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
    servers: Servers,
    prompts: Sequence[Sequence[Message]],
    load: Load,
    progress: Callable[[], None] = lambda: None,
    hardware: str | None = None,
) -> dict[str, Any]:
    """Sends every level of the load to every server; returns a result of kind "serving".

    At each level the servers take turns, get the same prompts in the same order, and are warmed up by one unmeasured
    request per concurrent one. No prompt is repeated as long as there are enough, because a repeated prompt is in the
    server's prefix cache.

    `servers` holds a server and its model's name, by "dflash" and "baseline". `progress` is called after each server
    at each level. `hardware` is that of the servers, for the record. ValueError if a server fails a warm-up, or every
    request of a level; a single failed request is counted.
    """
    order = _order(len(prompts), load)
    rows: list[Row] = []
    measurements: list[Row] = []
    for level in load.concurrency:
        chosen = [next(order) for _ in range(level + load.requests(level))]
        asked = [prompts[index] for index in chosen]
        of_level: dict[str, Row] = {}
        texts: dict[str, list[str | None]] = {}
        for name, (server, model) in servers.items():
            ask = partial(_reply, server, model, load)
            row, replies = _under_load(server, ask, asked[:level], asked[level:])
            if load.price_per_hour is not None:
                row["cost_per_million_tokens"] = _cost(load.price_per_hour, row["tokens_per_second"])
            of_level[name] = {"server": name, "concurrency": level, **row}
            texts[name] = [getattr(reply, "text", None) for reply in replies]
            for index, reply in zip(chosen[level:], replies, strict=True):
                measured = {
                    "server": name,
                    "concurrency": level,
                    "prompt_index": index,
                    **_times(reply),
                }
                measurements.append(measured)
            progress()
        _compare(of_level, texts, load)
        rows += of_level.values()
    needed = sum(level + load.requests(level) for level in load.concurrency)
    return record(
        "serving",
        _environment(servers, hardware),
        decoding={
            **asdict(load),
            "prompts": len(prompts),
            "prompts_repeat": needed > len(prompts),
        },
        summary=rows,
        at_target=at_target(rows, load),
        measurements=measurements,
    )


def _environment(servers: Servers, hardware: str | None) -> dict[str, Any]:
    served = {}
    for name, (server, model) in servers.items():
        served[name] = {"url": server.url, "model": model, "engine": server.engine()}
    models = dict.fromkeys(entry["model"] for entry in served.values())
    engines = dict.fromkeys(entry["engine"] for entry in served.values() if entry["engine"])
    return {
        "target": " / ".join(models),  # type: ignore[arg-type]
        "engine": " / ".join(engines) or None,
        "device": hardware,
        "servers": served,
    }


def _cost(price_per_hour: float, tokens_per_second: float) -> float:
    """The price of a million tokens."""
    seconds = 1e6 / tokens_per_second
    return round(price_per_hour * seconds / 3600, 6)


def _order(num_prompts: int, load: Load) -> Iterator[int]:
    """The numbers of all prompts shuffled, then all of them again, without an end."""
    generator = random.Random(load.seed)
    while True:
        yield from generator.sample(range(num_prompts), num_prompts)


def _reply(server: Server, model: str, load: Load, messages: Sequence[Message]) -> Reply | str:
    """The server's answer, or what went wrong."""
    try:
        return server.stream(model, messages, load.max_new_tokens, load.temperature, load.seed, load.thinking)
    except ValueError as error:
        return str(error)


def _times(reply: Reply | str) -> Row:
    if isinstance(reply, str):
        return {"error": reply}
    return {
        "num_tokens": reply.num_tokens,
        "seconds": rounded(reply.seconds),
        "seconds_to_first_token": rounded(reply.seconds_to_first_token),
    }


def at_target(rows: Sequence[Row], load: Load) -> dict[str, Row | None]:
    """For each server, the row with the highest throughput within the load's targets; `None` if no row is within them.

    Only measured levels count; nothing is interpolated. Empty without a target.
    """
    targets = {
        "ms_per_output_token_p99": load.target_ms_per_output_token,
        "ms_to_first_token_p99": load.target_ms_to_first_token,
    }
    limits = {name: limit for name, limit in targets.items() if limit is not None}
    if not limits:
        return {}

    def is_within(row: Row) -> bool:
        if row["failed"]:
            return False
        return all(row[name] is not None and row[name] <= limit for name, limit in limits.items())

    best: dict[str, Row | None] = {row["server"]: None for row in rows}
    for row in sorted(filter(is_within, rows), key=lambda row: row["tokens_per_second"]):
        best[row["server"]] = row
    return best


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile of the finite values, `None` without any."""
    ordered = sorted(filter(math.isfinite, values))
    rank = max(math.ceil(share * len(ordered)), 1)
    return ordered[rank - 1] if ordered else None


def _under_load(
    server: Server,
    ask: Callable[[Sequence[Message]], Reply | str],
    warm_up: Sequence[Sequence[Message]],
    measured: Sequence[Sequence[Message]],
) -> tuple[Row, list[Reply | str]]:
    """The row of one level of one server, and the replies to its measured prompts."""
    with ThreadPoolExecutor(len(warm_up)) as pool:
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
        raise ValueError(replies[0])
    num_tokens = sum(reply.num_tokens for reply in good)
    row: Row = {
        "requests": len(replies),
        "failed": len(replies) - len(good),
        "tokens": num_tokens,
        "seconds": rounded(seconds),
        "tokens_per_second": rounded(num_tokens / seconds),
    }
    waits = {
        "ms_to_first_token": [1e3 * reply.seconds_to_first_token for reply in good],
        "ms_per_output_token": [1e3 * reply.seconds_per_output_token for reply in good],
    }
    for name, values in waits.items():
        row[f"{name}_p50"] = rounded(percentile(values, 0.5))
        row[f"{name}_p99"] = rounded(percentile(values, 0.99))
    row |= dict.fromkeys(("tau", "accepted_per_position", "tau_source"))
    if drafts is not None:
        row["tau"] = rounded(drafts.tau)
        row["accepted_per_position"] = list(map(rounded, drafts.per_position))
        row["tau_source"] = drafts.source
    return row, replies


def _compare(rows: dict[str, Row], texts: dict[str, list[str | None]], load: Load) -> None:
    """Adds to the rows of one level the speed-up over the baseline and the number of equal greedy texts."""
    if len(rows) < 2 or "baseline" not in rows:
        return
    plain_texts = texts["baseline"]
    plain_speed = rows["baseline"]["tokens_per_second"]
    for name, row in rows.items():
        row["speedup"] = rounded(row["tokens_per_second"] / plain_speed)
        if load.temperature > 0:
            continue
        row["identical"] = 0
        for text, plain in zip(texts[name], plain_texts, strict=True):
            row["identical"] += text is not None and text == plain
