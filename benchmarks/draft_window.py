"""Milliseconds of a draft by the length of the text, for a drafter that reads all of it and for one with a window.

    python benchmarks/draft_window.py --output benchmarks/results/draft_window_small_cpu.json

Random weights of a shape of `SHAPES`. Both drafters take turns; the text is random context of that length.
"""

from __future__ import annotations

from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from measuring import argument_parser, finish, parsed, turns
from rich.progress import track
from simulated_pairs import SHAPES, scripted_pair

from dflash.common.stopwatch import seconds_of
from dflash.engine.windows import WindowedCache, WindowedContext
from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.drafting_dflash import Context, DrafterContext, DraftProposer
from dflash.model.targets_dflash import Target


PIECE = 1024  # columns that the drafter reads at a time
NUM_NEW = 6  # columns of context that each draft reads


def context_of(config: Any, count: int) -> Context:
    """Random context of `count` tokens."""
    return Context(torch.randn(1, count, len(config.target_layer_ids) * config.hidden_size), [count])


def proposer_of(target: Any, drafter: Any, length: int, window: tuple[int, int] | None) -> DraftProposer:
    """A proposer that has read a text of `length` tokens."""
    num_layers = drafter.config.num_hidden_layers
    if window is None:
        context = DrafterContext(drafter, PreallocatedCache(num_layers, length + PIECE))
    else:
        context = WindowedContext(drafter, WindowedCache(num_layers, sum(window), window=window))
    for begin in range(0, length, PIECE):
        context.append(context_of(drafter.config, min(PIECE, length - begin)))
        context.absorb()
    block_size = drafter.config.block_size
    request = SimpleNamespace(drafter=drafter, block_size=block_size, max_draft_tokens=None, temperature=1.0)
    acceptor = SimpleNamespace(uniforms_of=None, verification="match")
    return DraftProposer(request, Target(target, drafter.config.target_layer_ids), context, acceptor)


@torch.no_grad()
def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES), default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--window", type=int, nargs=2, default=[64, 1024], help="first and newest tokens")
    parser.add_argument("--repeats", type=int, default=25)
    args = parsed(parser)
    torch.manual_seed(0)
    target, drafter = scripted_pair(args.shape, 6.5)
    new_context = context_of(drafter.config, NUM_NEW)
    windows = {"all": None, "window": tuple(args.window)}
    lengths = track(args.lengths, description="texts")
    proposers = {}
    for length in lengths:
        for name, kept in windows.items():
            proposers[length, name] = proposer_of(target, drafter, length, kept)

    def draft(key: Any) -> None:
        context = proposers[key].context
        context.append(new_context)
        proposer = proposers[key]
        proposer.hidden_states(torch.ones(1, 1, dtype=torch.long), proposer.num_proposals)
        context.cache.rollback(NUM_NEW)

    times: dict[Any, list[float]] = {key: [] for key in proposers}
    for key in turns(list(proposers), args.repeats + 2):
        times[key].append(1e3 * seconds_of(partial(draft, key)))
    summary = []
    for (length, name), taken in times.items():
        ms, first = (median(of_length[2:]) for of_length in (taken, times[args.lengths[0], name]))
        row = {"reads": name, "text_tokens": length, "keys": proposers[length, name].context.cache.lengths[0]}
        summary.append(row | {"ms_draft": round(ms, 4), "over_shortest": round(ms / first, 4)})
    models = dict.fromkeys(("target", "drafter"), f"random weights, shape {args.shape}")
    decoding = {**models, "window": "{} + {} tokens".format(*args.window), "repeats": args.repeats}
    finish(args.output, "draft_window", (target, drafter), decoding=decoding, summary=summary)


if __name__ == "__main__":
    main()
