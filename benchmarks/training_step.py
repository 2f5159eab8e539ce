"""Tokens per second and memory of training: ours against a plain step, and the loss against whole logits by vocabulary.

    python benchmarks/training_step.py --compile --output benchmarks/results/training_step_tiny_cpu.json

The embedded pair on its held-out problems. One measurement is the forward and backward passes over all of them, and the ways
take turns. "naive" pads documents in the order they come and holds all logits; "unpacked" sorts them by length; "compiled" is the
same through `torch.compile` (`dflash train --compile`), compiled before it is timed; "packed" puts documents side by side. The
script checks that all give the same loss. Tokens are those of the documents, without padding.
Memory is that of a step over the same documents, those of the first naive batch.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from measuring import argument_parser, finish, parsed, turns
from rich.progress import track
from torch.nn.functional import cross_entropy, pad

from dflash.checkpoints import heldout_problems, load_embedded_pair
from dflash.common.stopwatch import seconds_of
from dflash.evaluation import allocated_memory
from dflash.model.targets_dflash import decoder_layers, tapped
from dflash.training import (
    Batch,
    BatchPlan,
    DrafterLoss,
    Example,
    FrozenTarget,
    TrainingSettings,
    chunked_loss,
    collate,
    decay_weights,
    default_gamma,
    encode,
    epoch_batches,
    lay_out_blocks,
    sample_anchors,
)


SMALL = {"documents": 6, "anchors": 4, "repeats": 1, "rows": 64, "vocabularies": [512, 1024]}


def arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--anchors", type=int, default=16, help="blocks per document")
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--pack-length", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[2048, 16384, 131072])
    parser.add_argument("--rows", type=int, default=2048, help="positions of the loss alone")
    parser.add_argument(
        "--compile", action="store_true", help="measure compiled steps too, after minutes of compiling"
    )
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to see that it runs")
    args = parsed(parser)
    vars(args).update(SMALL if args.smoke else {})
    return args


def naive_batches(examples: list[Example], args: argparse.Namespace) -> Iterator[Batch]:
    """Documents in the order they come, as many to a batch as fit its tokens when padded to the longest of all."""
    count = max(1, args.batch_tokens // max(map(len, examples)))
    for begin in range(0, len(examples), count):
        chosen = range(begin, min(begin + count, len(examples)))
        anchors = [sample_anchors(examples[i].loss_mask, args.anchors, seed=0, epoch=0, index=i) for i in chosen]
        yield collate([examples[i] for i in chosen], anchors, 0, width=max(map(len, examples)))


def naive_loss(drafter: Any, pair: FrozenTarget, batch: Batch) -> tuple[torch.Tensor, None]:
    """The same loss written naively: the logits of all positions at once, and all that autograd keeps of them."""
    config = drafter.config
    layout = lay_out_blocks(batch.input_ids, batch.loss_mask, batch.document_ids, batch.anchors, config, "sdpa")
    with torch.no_grad():
        with tapped([decoder_layers(pair.target)[tap] for tap in config.target_layer_ids]) as states:
            pair.target(batch.input_ids)
        features = torch.cat(states, dim=-1)
        noise_embeds = pair.embed(layout.token_ids)
    states = drafter(noise_embeds, features, layout.position_ids, layout.attention_mask).last_hidden_state
    logits = pair.head(states).flatten(0, 1).float()
    losses = cross_entropy(logits, layout.labels.flatten(), reduction="none")
    learned = layout.is_trained.view(-1, config.block_size)[:, 1:]
    weigh = decay_weights(default_gamma(config.block_size))
    return (losses * pad(weigh(learned.float(), learned), (1, 0)).flatten()).sum(), None


def measure_steps(target: Any, drafter: Any, examples: list[Example], args: Any) -> list[dict[str, Any]]:
    """Every way of training over all examples."""
    pair = FrozenTarget(target, drafter)
    recipe = TrainingSettings(recipe="paper")
    ours = DrafterLoss(pair, recipe)
    ways: dict[str, Callable[[Batch], Any]] = {
        "naive": partial(naive_loss, drafter, pair),
        "unpacked": ours,
        "packed": ours,
    }
    if args.compile:
        ways["compiled"] = DrafterLoss(pair, recipe, torch.compile(drafter))

    def batches_of(name: str, examples: list[Example], batch_tokens: int) -> list[Batch]:
        if name == "naive":
            return list(naive_batches(examples, args))
        pack_length = args.pack_length if name == "packed" else None
        return list(epoch_batches(examples, 0, BatchPlan(args.anchors, batch_tokens, pack_length=pack_length)))

    all_batches = {name: batches_of(name, examples, args.batch_tokens) for name in ways}
    first = all_batches["naive"][0]
    count, at_once = len(first.input_ids), first.input_ids.numel() + args.pack_length
    steps = {name: batches_of(name, examples[:count], at_once) for name in ways} | {"naive": [first]}
    assert all(len(batches) == 1 for batches in steps.values())
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, float] = {}
    peaks: dict[str, int] = {}

    def run(name: str, batches: list[Batch]) -> None:
        losses[name] = 0.0
        for batch in batches:
            loss_sum, _ = ways[name](batch)
            loss_sum.backward()
            losses[name] += loss_sum.item()

    for parameter in drafter.parameters():
        parameter.grad = torch.zeros_like(parameter)  # they stay where they are, and count in no peak
    for name, batches in all_batches.items():
        run(name, [*batches, *steps[name]])  # warms up, and compiles
        peaks[name] = allocated_memory(partial(run, name, steps[name]), drafter.device)
    for name in track(turns(ways, args.repeats), description="steps"):
        seconds[name].append(seconds_of(partial(run, name, all_batches[name])))
    if any(abs(loss / losses["naive"] - 1) > 1e-4 for loss in losses.values()):
        raise SystemExit(f"The ways do not compute the same loss: {losses}.")
    num_tokens = sum(map(len, examples))
    rows = []
    for name, batches in all_batches.items():
        columns = sum(batch.input_ids.numel() for batch in batches)
        row = {"way": name, "batches": len(batches), "columns": columns, "tokens": num_tokens}
        row["tokens_per_second"] = round(num_tokens / median(seconds[name]), 1)
        row["speedup"] = round(median(seconds["naive"]) / median(seconds[name]), 4)
        rows.append({**row, "peak_memory_bytes": peaks[name], "loss": round(losses[name], 4)})
    return rows


def whole_loss(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> None:
    cross_entropy(hidden @ head.T, labels, reduction="sum").backward()


def loss_in_chunks(hidden: torch.Tensor, head: torch.Tensor, labels: torch.Tensor, chunk_rows: int) -> None:
    weights = torch.ones(len(labels))
    chunked_loss(hidden, labels, weights, lambda states: states @ head.T, chunk_rows).loss_sum.backward()


def measure_loss(hidden_size: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """The loss alone over a random head: in chunks, and with the logits of all positions at once."""
    rows = []
    for vocab_size in args.vocabularies:
        hidden = torch.randn(args.rows, hidden_size, requires_grad=True)
        head = torch.randn(vocab_size, hidden_size) / hidden_size**0.5
        labels = torch.randint(0, vocab_size, (args.rows,))
        chunk_rows = max(1, args.rows * min(args.vocabularies) // (4 * vocab_size))

        ways = {"whole": whole_loss, "chunked": partial(loss_in_chunks, chunk_rows=chunk_rows)}
        for name, way in ways.items():
            compute = partial(way, hidden, head, labels)
            compute()
            milliseconds = 1000 * median(seconds_of(compute) for _ in range(args.repeats))
            sizes = {"vocabulary": vocab_size, "rows": args.rows}
            peak = {"peak_memory_bytes": allocated_memory(compute, hidden.device)}
            rows.append({"loss": name, **sizes, "ms": round(milliseconds, 2), **peak})
    return rows


def main() -> None:
    args = arguments()
    torch.manual_seed(0)
    target, drafter, tokenizer = load_embedded_pair()
    problems = heldout_problems()
    examples = [
        encode({"prompt": problem.question, "completion": problem.answer}, tokenizer)
        for problem in (problems * (1 + args.documents // len(problems)))[: args.documents]
    ]
    drafter.train()
    steps = measure_steps(target, drafter, examples, args)
    losses = measure_loss(drafter.config.hidden_size, args)
    names = ("documents", "anchors", "batch_tokens", "pack_length", "repeats", "rows", "threads")
    settings = {name: getattr(args, name) for name in names}
    finish(args.output, "training_step", (target, drafter), training=settings, summary=steps, losses=losses)


if __name__ == "__main__":
    main()
