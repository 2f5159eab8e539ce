"""A served target as the backend of an evaluation: ids in, a timed run out, as a pair in this process is.

It knows nothing about tasks; the prompt's ids come from the caller's own tokenizer and chat template.
"""

from __future__ import annotations

from typing import Any

import torch

from .harness import OURS, PLAIN, Method
from .server import Server, acceptance_lengths, drafting
from .sessions import Backend, Begin
from .timing import TimedRun


def server_backend(
    server: Server,
    baseline: Server,
    tokenizer: Any,
    max_new_tokens: int,
    model: str | None = None,
    hardware: str | None = None,
) -> Backend:
    """A server with DFlash and one without as the two methods; arguments as those of [`server_methods`].

    Args:
        server: Serves the target with its drafter.
        baseline: Serves the target alone.
        tokenizer: The target's.
        max_new_tokens: Longest answer.
        model: The name that both serve it under; `None` for the only one of each.
        hardware: What the servers run on, for the record.

    Raises:
        ValueError: if a server does not answer, or serves several models and none is named.
    """
    methods = {PLAIN: (baseline, baseline.only_model(model)), OURS: (server, server.only_model(model))}
    engines = dict.fromkeys(asked.engine() for asked, _ in methods.values())
    setup = {"engine": " / ".join(filter(None, engines)) or None, "device": hardware}
    servers = {name: {"url": asked.url, "model": served} for name, (asked, served) in methods.items()}
    return Backend(server_methods(methods, tokenizer, max_new_tokens), setup, {"servers": servers})


def server_methods(servers: dict[str, tuple[Server, str]], tokenizer: Any, max_new_tokens: int) -> Begin:
    """The methods of a dialogue, greedy: a server by each name, and the name of its model.

    One request is under way at a time, so that what a server's counters say meanwhile is of that request: nobody else may
    ask it anything. Engines that do not count by position (SGLang) give verify steps and no acceptance lengths; those that
    do not tell the ids of a text have it encoded again, which is exact for most texts and not for all.
    """

    def method(asked: Server, model: str) -> Method:
        return lambda input_ids: _timed(asked, model, tokenizer, max_new_tokens, input_ids)

    methods = {name: method(*served) for name, served in servers.items()}
    return lambda: dict(methods)


def _timed(server: Server, model: str, tokenizer: Any, max_new_tokens: int, input_ids: torch.Tensor) -> TimedRun:
    """One request; the counters are read outside the clock."""
    before = server.counters()
    reply = server.complete(model, input_ids[0].tolist(), max_new_tokens)
    after = server.counters()
    token_ids = list(reply.token_ids) or tokenizer(reply.text, add_special_tokens=False)["input_ids"]
    lengths = acceptance_lengths(before, after)
    drafts = drafting(before, after)
    steps = len(lengths) if lengths else round(drafts.steps) if drafts and drafts.steps else reply.num_tokens - 1
    return TimedRun(token_ids, reply.seconds, reply.seconds_to_first_token, 1 + steps, lengths)
