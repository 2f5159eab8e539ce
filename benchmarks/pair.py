"""Measurements of a pair that are no command: batches, conversations, histories, sampling, trees, and blocks of several sizes.

    python benchmarks/pair.py batch --output benchmarks/results/batch_tiny_cpu.json
    python benchmarks/pair.py conversation --output benchmarks/results/conversation_tiny_cpu.json
    python benchmarks/pair.py history --output benchmarks/results/history_tiny_cpu.json
    python benchmarks/pair.py sampling --output benchmarks/results/sampling_tiny.json
    python benchmarks/pair.py trees --prompts gsm8k_test.jsonl --limit 16 --output benchmarks/results/trees_tiny_cpu.json
    python benchmarks/pair.py drafter --target stories260K --drafter stories-DFlash --prompts held.jsonl \
        --output benchmarks/results/drafter_stories_cpu.json

The first five measure the embedded pair on its held-out problems, with `--domino` its second drafter. Ways of decoding take turns
on the same prompts, and their texts are compared.

batch: throughput at several batch sizes against `target.generate` at the same batch, padded on the left, with as many proposals as
    pay, too, and so with a drafter of random weights.
conversation: time to the first token of a follow-up question with a kept conversation, against starting afresh.
history: tokens per step at temperature 1 when the same prompts come again, four texts to each prompt, as rollouts are; with what was
    written before, and without.
sampling: acceptance at temperature 1 by what is proposed; and token-by-token rejection against block verification, for a
    scripted drafter whose distribution is known.
trees: tau, tokens per step and time of a step by the budget of the tree, the chain beside them, greedily and at temperature 1;
    `--prompts` adds questions to the held-out problems.
drafter: what a trained drafter accepts on prompts that it has not seen, beside its `training.json`. A prompt is a row with
    `prompt_ids` or `prompt`, or a row to train on, of which it is the part before the first answer.
"""

import argparse
import copy
import json
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from itertools import cycle
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from measuring import argument_parser, finish, heldout_prompts, parsed, turns
from rich.progress import track
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import Conversation, DFlashDraftModel, History, spec_generate
from dflash.checkpoints import DOMINO_NAME, DRAFTER_NAME, load_embedded_pair
from dflash.cli.loading import read_prompts
from dflash.common.stopwatch import seconds_of
from dflash.evaluation import PLAIN, Prompt, chat_encoder, compare, summarise, timed_blocks, timed_generate
from dflash.model.acceptance_dflash import Proposals, accept_block, accept_rejection
from dflash.model.sampling_dflash import pick
from dflash.training import encode, encode_prompt, prompt_of, read_rows


ALONE: dict[str, Any] = {"prompt_lookup_num_tokens": 0}  # the drafter
GREEDILY = {"temperature": 0.0, **ALONE}
VOCAB_SIZE = 32  # of the scripted chains


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("what", choices=MEASUREMENTS)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--limit", type=int, default=40, help="prompts of each source; of conversation: chats of six turns"
    )
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--domino", action="store_true", help="the embedded drafter with Domino's head")
    parser.add_argument("--target", help="folder or Hub id")
    parser.add_argument("--drafter", type=Path, help="folder that `dflash train` wrote")
    parser.add_argument(
        "--prompts", nargs="+", help="JSON lines, a task each; of drafter also other sources that training reads"
    )
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 32, 64], help="nodes of a tree")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[16, 8])
    args = parsed(parser, words)
    if args.what == "drafter" and None in (args.target, args.drafter, args.prompts):
        parser.error("drafter needs --target, --drafter and --prompts.")
    if args.what == "drafter" and args.domino:
        parser.error("--domino is the embedded drafter: give drafter --drafter FOLDER alone.")
    if args.what == "drafter" and not (args.drafter / "training.json").is_file():
        parser.error(f"{args.drafter} holds no training.json: give a folder that `dflash train` wrote.")
    return args


def embedded(args: argparse.Namespace) -> Any:
    """The embedded target, the drafter that is asked for, and their tokenizer."""
    return load_embedded_pair(drafter=DOMINO_NAME if args.domino else DRAFTER_NAME)


def batch(args: argparse.Namespace) -> None:
    """A row per batch size."""
    target, drafter, tokenizer = embedded(args)
    prompts = list(map(torch.tensor, heldout_prompts(tokenizer)[: args.limit]))
    if (largest := max(args.batch_sizes)) > len(prompts):
        raise SystemExit(f"A batch of {largest} is not filled by {len(prompts)} prompts: give smaller --batch-sizes.")
    spec_generate(drafter, target, prompts[0][None], max_new_tokens=8, **GREEDILY)  # warm-up
    torch.manual_seed(0)
    useless = DFlashDraftModel(drafter.config).eval()
    runs = {
        PLAIN: target.generate,
        "dflash": partial(spec_generate, drafter, target, **ALONE),
        "dflash adaptive": partial(spec_generate, drafter, target, adaptive=True, **ALONE),
        "random drafter adaptive": partial(spec_generate, useless, target, adaptive=True, **ALONE),
    }
    summary, stop_id = [], target.generation_config.eos_token_id
    for size in args.batch_sizes:
        seconds, num_tokens, num_identical = dict.fromkeys(runs, 0.0), 0, 0
        batches = [prompts[begin : begin + size] for begin in range(0, len(prompts) - size + 1, size)]
        for chosen in track(batches, description=f"batch {size}"):
            took, texts = _all_ways(runs, target, chosen, args)
            seconds = {name: seconds[name] + took[name] for name in seconds}
            for place, text in enumerate(texts[PLAIN]):
                num_identical += all(torch.equal(of_way[place], text) for of_way in texts.values())
            num_tokens += sum([*text, stop_id].index(stop_id) + (stop_id in text) for text in texts[PLAIN].tolist())
        row = {"batch_size": size, "prompts": size * len(batches), "identical": num_identical, "tokens": num_tokens}
        row["tokens_per_second"] = {name: round(num_tokens / taken, 1) for name, taken in seconds.items()}
        summary.append({**row, "speedup": round(seconds[PLAIN] / seconds["dflash"], 4)})
    finish(args.output, "batch", (target, drafter), decoding=_decoding(args), summary=summary)


def _all_ways(runs: Any, target: Any, prompts: list[torch.Tensor], args: argparse.Namespace) -> tuple[Any, Any]:
    """Seconds, the median of the repeats, and new tokens [B, N] of each way on a batch."""
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    ids = pad(prompts, padding_value=target.generation_config.pad_token_id)
    mask = pad([torch.ones_like(prompt) for prompt in prompts])
    asked: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": args.max_new_tokens, "do_sample": False}
    times: dict[str, list[float]] = {name: [] for name in runs}
    texts: dict[str, torch.Tensor] = {}
    for name in turns(runs, args.repeats):
        times[name].append(seconds_of(lambda name=name: texts.update({name: runs[name](ids, **asked)})))
    seconds = {name: median(taken) for name, taken in times.items()}
    return seconds, {name: text[:, ids.shape[1] :] for name, text in texts.items()}


def conversation(args: argparse.Namespace) -> None:
    """A row per turn of a chat."""
    target, drafter, tokenizer = embedded(args)
    asked: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, **GREEDILY}
    questions = cycle(heldout_prompts(tokenizer))
    rows: list[list[dict[str, Any]]] = [[] for _ in range(6)]
    for _ in track(range(args.limit), description="chats"):
        chat, text = Conversation(), list[int]()
        for turn in rows:
            # The text as it was written, token for token, and the next question.
            prompt = torch.tensor([[*text, *next(questions)]])
            runs: dict[str, list[Any]] = {"fresh": [], "kept": []}
            for name in turns(runs, args.repeats):
                held = copy.deepcopy(chat, {id(model): model for model in (target, drafter)})
                kept = {"conversation": held} if name == "kept" else {}
                runs[name].append(timed_blocks(drafter, target, prompt, **asked, **kept))
            timed_blocks(drafter, target, prompt, conversation=chat, **asked)
            text = prompt[0].tolist() + runs["fresh"][0].token_ids
            row = {"prompt_tokens": prompt.shape[1], "reused_tokens": chat.num_reused}
            row["is_identical"] = runs["kept"][0].token_ids == runs["fresh"][0].token_ids
            waits = {name: 1e3 * median(run.seconds_to_first_token for run in made) for name, made in runs.items()}
            turn.append(row | waits)
    summary = [
        {
            "turn": number,
            "chats": len(turn),
            "identical": sum(chat["is_identical"] for chat in turn),
            **{name: round(fmean(chat[name] for chat in turn), 1) for name in ("prompt_tokens", "reused_tokens")},
            "ms_to_first_token": {name: round(fmean(chat[name] for chat in turn), 3) for name in ("fresh", "kept")},
        }
        for number, turn in enumerate(rows, start=1)
    ]
    finish(args.output, "conversation", (target, drafter), decoding=_decoding(args), summary=summary)


def history(args: argparse.Namespace) -> None:
    """A row per epoch over the same prompts."""
    target, drafter, tokenizer = embedded(args)
    prompts = [ids for ids in heldout_prompts(tokenizer)[: args.limit] for _ in range(4)]
    asked: dict[str, Any] = {"max_new_tokens": args.max_new_tokens, "temperature": 1.0, "top_k": 0}
    ways: dict[str, dict[str, Any]] = {"with history": {"history": History()}, "without": {}}
    summary = []
    for epoch in (1, 2):
        row: dict[str, Any] = {"epoch": epoch, "texts": len(prompts), "tokens_per_step": {}}
        for name, keywords in ways.items():
            seeds = torch.Generator().manual_seed(epoch)
            outputs = drafter.generate_batch(
                prompts, target=target, generator=seeds, progress_bar=True, **asked, **keywords
            ).values()
            num_tokens = sum(len(output.generated_tokens) - 1 for output in outputs)  # the first is the prompt's
            num_steps = sum(len(output.acceptance_lengths) for output in outputs)
            row["tokens_per_step"][name] = round(num_tokens / num_steps, 3)
        with_history, without = row["tokens_per_step"].values()
        summary.append({**row, "history_over_without": round(with_history / without, 3)})
    finish(args.output, "history", (target, drafter), decoding=asked, summary=summary)


def sampling(args: argparse.Namespace) -> None:
    """A row per kind of proposals, and one per scripted drafter."""
    target, drafter, tokenizer = embedded(args)
    prompts = heldout_prompts(tokenizer)[: args.limit]
    taus = {"argmax, match": sampled_tau(target, drafter, prompts, "match", args.max_new_tokens)}
    drafter.propose = draw_positions_independently(drafter)
    drafter.causal_head = lambda _: drafter.propose  # the loop gives uniforms to drafters with such a head alone
    for verification in ("rejection", "block"):
        name = f"positions drawn independently, {verification}"
        taus[name] = sampled_tau(target, drafter, prompts, verification, args.max_new_tokens)
    summary = [{"proposals": name, "prompts": len(prompts), "tau": tau} for name, tau in taus.items()]
    scripts = [scripted(share, num_proposals) for num_proposals in (7, 15) for share in (0.5, 0.7, 0.9)]
    print(json.dumps(scripts, indent=1))
    asked = {"temperature": 1.0}
    finish(args.output, "sampling", (target, drafter), decoding=asked, summary=summary, scripted=scripts)


def draw_positions_independently(drafter: Any) -> Any:
    """A `propose` that draws each position from the drafter's own distribution, whatever the others drew."""

    def propose(hidden_states: torch.Tensor, anchors: torch.Tensor, head: Any, drawn: Any, **_: Any) -> Proposals:
        temperature, uniforms = drawn
        logits = drafter.compute_logits(hidden_states, head).double()  # [B, N, V]
        distribution = (logits / temperature).softmax(dim=-1)
        token_ids = torch.arange(distribution.shape[-1]).expand_as(distribution)
        return Proposals(pick(distribution, uniforms), token_ids, distribution)

    return propose


def sampled_tau(target: Any, drafter: Any, prompts: list[list[int]], verification: str, max_new_tokens: int) -> float:
    """Mean acceptance length over all steps of all prompts at temperature 1."""
    asked: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": 1.0,
        "top_k": 0,
        "compile": False,
        "cuda_graph": False,
        **ALONE,
    }
    asked["verification"] = verification
    lengths: list[int] = []
    for index, prompt in enumerate(track(prompts, description=verification)):
        noise = torch.Generator().manual_seed(index)
        run = timed_blocks(drafter, target, torch.tensor([prompt]), generator=noise, **asked)
        lengths += run.acceptance_lengths
    return round(fmean(lengths), 4)


def scripted(share: float, num_proposals: int, num_blocks: int = 20_000) -> dict[str, Any]:
    """Accepted proposals per block of two Markov chains, the drafter a mixture with `share` of the target's distribution."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(2, VOCAB_SIZE, VOCAB_SIZE, generator=generator, dtype=torch.float64)
    target, other = (2.0 * noise).softmax(dim=-1)
    drafter = share * target + (1 - share) * other
    tokens, distributions = torch.zeros(num_blocks, 1, dtype=torch.long), []
    for _ in range(num_proposals):
        distributions.append(drafter[tokens[:, -1]])
        uniforms = torch.rand(num_blocks, generator=generator, dtype=torch.float64)
        tokens = torch.cat([tokens, pick(distributions[-1], uniforms)[:, None]], dim=1)
    candidates = torch.arange(VOCAB_SIZE).expand(num_blocks, num_proposals, VOCAB_SIZE)
    proposals = Proposals(tokens[:, 1:], candidates, torch.stack(distributions, dim=1))
    uniforms = torch.rand(num_blocks, num_proposals + 1, generator=generator, dtype=torch.float64)
    accepted = {
        name: accept(proposals, target[tokens].log(), uniforms).num_accepted.double().mean().item()
        for name, accept in (("rejection", accept_rejection), ("block", accept_block))
    }
    return {
        "share_of_the_targets_distribution": share,
        "proposals": num_proposals,
        **{f"accepted_by_{name}": round(mean, 4) for name, mean in accepted.items()},
        "gain": round(accepted["block"] / accepted["rejection"], 4),
    }


def trees(args: argparse.Namespace) -> None:
    """A row per task, temperature and budget; plain decoding and the chain beside the trees."""
    target, drafter, tokenizer = embedded(args)
    encode_chat = chat_encoder(tokenizer)
    prompts = [Prompt("held-out", torch.tensor([ids])) for ids in heldout_prompts(tokenizer)[: args.limit]]
    for path in map(Path, args.prompts or ()):
        prompts += [
            Prompt(path.stem.replace("_", " "), encode_chat(chat)) for chat in read_prompts(path)[: args.limit]
        ]
    length = {"max_new_tokens": args.max_new_tokens}
    summary = []
    for temperature in (0.0, 1.0):
        methods: dict[str, Any] = (
            {} if temperature else {PLAIN: partial(timed_generate, target, do_sample=False, **length)}
        )
        for budget in (0, *args.budgets):
            asked = {"temperature": temperature, "draft_tree": budget, "compile": True, **ALONE, **length}
            methods[f"tree of {budget}" if budget else "chain"] = lambda ids, asked=asked: timed_blocks(
                drafter, target, ids, generator=torch.Generator().manual_seed(0), **asked
            )
        rows = summarise(compare(methods, prompts, args.repeats, lambda items, what: track(items, description=what)))
        keys = (
            "task",
            "method",
            "prompts",
            "identical",
            "tau_micro",
            "tokens_per_step",
            "ms_per_step",
            "tokens_per_second",
        )
        summary += [{"temperature": temperature, **{key: row[key] for key in keys}} for row in rows]
    finish(args.output, "trees", (target, drafter), decoding={**length, "repeats": args.repeats}, summary=summary)


def drafter(args: argparse.Namespace) -> None:
    """A row per block size, and one of plain decoding."""
    target = AutoModelForCausalLM.from_pretrained(args.target, dtype=torch.float32, trust_remote_code=False).eval()
    model = DFlashDraftModel.from_pretrained(args.drafter, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.target, trust_remote_code=False)
    prompts = [
        Prompt(Path(name).stem.replace("_", " "), torch.tensor([ids_to_continue(row, tokenizer)]))
        for name in args.prompts
        for row in list(read_rows(name, "train"))[: args.limit]
    ]
    length = {"max_new_tokens": args.max_new_tokens}
    methods: dict[str, Any] = {PLAIN: partial(timed_generate, target, **length, do_sample=False)}
    for size in args.block_sizes:
        methods[f"dflash, block {size}"] = partial(timed_blocks, model, target, **length, block_size=size, **GREEDILY)
    measurements = compare(methods, prompts, args.repeats, lambda items, what: track(items, description=what))
    content = {
        "training": json.loads((args.drafter / "training.json").read_text(encoding="utf-8")),
        "summary": summarise(measurements),
        "measurements": list(map(asdict, measurements)),
    }
    finish(args.output, "drafter", (target, model), decoding=_decoding(args), **content)


def ids_to_continue(row: Mapping[str, Any], tokenizer: Any) -> list[int]:
    """The prompt of a row."""
    if "prompt_ids" in row:
        return list(row["prompt_ids"])
    return encode_prompt(row["prompt"], tokenizer) if "prompt" in row else prompt_of(encode(row, tokenizer))


def _decoding(args: argparse.Namespace) -> dict[str, Any]:
    return {**GREEDILY, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats}


MEASUREMENTS = {
    "batch": batch,
    "conversation": conversation,
    "history": history,
    "sampling": sampling,
    "trees": trees,
    "drafter": drafter,
}


def main() -> None:
    args = arguments()
    MEASUREMENTS[args.what](args)


if __name__ == "__main__":
    main()
