"""Many texts at once: this loop's continuous batching, transformers' own, and this loop in batches that stay as they are.

    OMP_NUM_THREADS=1 python benchmarks/many_texts.py --threads 1 --output benchmarks/results/many_texts_tiny_cpu.json

The embedded pair writes `--requests` texts of 16 to 256 new tokens, greedily, stop tokens off, so that each way writes equally
many. All ways take turns. Both managers get the same bounds. A batch that stays as it is writes as many tokens for each text as
its longest one has, and what is beyond a text's own length is not counted.
"""

import argparse
import random
from collections.abc import Callable
from resource import RUSAGE_SELF, getrusage
from statistics import median
from typing import Any

from measuring import argument_parser, finish, heldout_prompts, parsed, turns
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel
from transformers.utils import logging

from dflash.checkpoints import load_embedded_pair
from dflash.common.stopwatch import stopwatch


NO_STOPS = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
PAGE_SIZE = 256
THEIRS, OURS, STATIC = "generate_batch of transformers", "generate_batch", "static batches"

Texts = list[list[int]]


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--rows", type=int, default=16, help="of a manager's batch")
    parser.add_argument("--static-rows", type=int, default=8, help="of a batch that stays as it is")
    parser.add_argument("--shortest", type=int, default=16, help="new tokens")
    parser.add_argument("--longest", type=int, default=256, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--adaptive", action="store_true", help="as many proposals as pay")
    parser.add_argument("--ways", nargs="+", choices=[THEIRS, OURS, STATIC], default=[THEIRS, OURS, STATIC])
    return parsed(parser)


def cpu_seconds() -> float:
    """What this process has used of the processor: on a machine that does other work, too, this says more than a clock."""
    usage = getrusage(RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def managed(init: Callable[..., Any], prompts: Texts, lengths: list[int], rows: int) -> Texts:
    """The texts by a manager, transformers' or ours: the same calls."""
    longest = max(map(len, prompts)) + max(lengths) + 64
    pages = rows * -(-longest // PAGE_SIZE)
    bounds = ContinuousBatchingConfig(num_blocks=pages, page_size=PAGE_SIZE, max_requests_per_batch=rows)
    config = GenerationConfig(max_new_tokens=max(lengths), **NO_STOPS)
    manager = init(generation_config=config, continuous_batching_config=bounds)
    manager.start()
    ids = [manager.add_request(prompt, max_new_tokens=length) for prompt, length in zip(prompts, lengths, strict=True)]
    texts = {}
    while len(texts) < len(ids):
        output = manager.get_result(timeout=1)
        if output is not None:
            assert output.error is None, output.error
            texts[output.request_id] = output.generated_tokens
    manager.stop()
    return [texts[request_id] for request_id in ids]


def static(drafter: Any, target: PreTrainedModel, prompts: Texts, lengths: list[int], rows: int) -> Texts:
    """The texts in batches that end with their longest text."""
    texts = []
    for begin in range(0, len(prompts), rows):
        part = prompts[begin : begin + rows]
        own = lengths[begin : begin + rows]
        output = drafter.spec_generate(
            part, target=target, max_new_tokens=max(own), temperature=0.0, stop_token_ids=[]
        )
        start = max(map(len, part))
        texts += [row[start : start + length].tolist() for row, length in zip(output, own, strict=True)]
    return texts


def main() -> None:
    args = arguments()
    logging.set_verbosity_error()  # a warning for each request would be timed
    target, drafter, tokenizer = load_embedded_pair()
    questions = heldout_prompts(tokenizer)
    prompts = [questions[index % len(questions)] for index in range(args.requests)]
    chance = random.Random(0)
    lengths = [chance.randint(args.shortest, args.longest) for _ in prompts]
    keywords = {"adaptive": True} if args.adaptive else {}

    def ours(**settings: Any) -> Any:
        return drafter.init_continuous_batching(target=target, **settings, **keywords)

    ways: dict[str, Callable[[], Texts]] = {
        THEIRS: lambda: managed(target.init_continuous_batching, prompts, lengths, args.rows),
        OURS: lambda: managed(ours, prompts, lengths, args.rows),
        STATIC: lambda: static(drafter, target, prompts, lengths, args.static_rows),
    }
    seconds: dict[str, list[float]] = {name: [] for name in args.ways}
    cpu: dict[str, list[float]] = {name: [] for name in args.ways}
    texts: dict[str, Texts] = {}
    for name in turns(args.ways, args.repeats):
        elapsed = stopwatch()
        cpu_before = cpu_seconds()
        texts[name] = ways[name]()
        seconds[name].append(elapsed())
        cpu[name].append(cpu_seconds() - cpu_before)
        print(f"{name}: {sum(lengths) / seconds[name][-1]:.0f} tokens/s", flush=True)
    rows = []
    medians = {name: median(times) for name, times in seconds.items()}
    for name in args.ways:
        pairs = zip(texts[name], texts[args.ways[0]], strict=True)
        row = {
            "method": name,
            "prompts": len(prompts),
            "identical": sum(own == other for own, other in pairs),
            "tokens_per_second": sum(lengths) / medians[name],
            "seconds": seconds[name],
            "cpu_seconds": cpu[name],
        }
        for key, other in (("over_theirs", THEIRS), ("over_static", STATIC)):
            if other in medians:
                row[key] = medians[other] / medians[name]
                row[f"{key}_by_cpu"] = median(cpu[other]) / median(cpu[name])
        rows.append(row)
    settings = {name: value for name, value in vars(args).items() if name not in ("output", "ways")}
    finish(
        args.output,
        "many texts",
        (target, drafter),
        summary=rows,
        temperature=0.0,
        new_tokens=sum(lengths),
        **settings,
    )


if __name__ == "__main__":
    main()
