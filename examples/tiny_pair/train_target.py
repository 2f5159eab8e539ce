"""Trains the tiny pair's target from nothing: a Qwen3 of about 3.5 M parameters that answers grade-school word problems.

    python train_target.py --gsm8k openai/gsm8k --output tiny_pair/target

It reads GSM8K train and the generator in `problems.py`, and runs on two CPU cores. It knows nothing of the drafter.
"""

import argparse
import copy
import json
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from evaluate_target import generated_sets, score
from problems import generate
from tiny_tokenizer import save_tokenizer, train_tokenizer
from torch import distributed
from torch.nn import functional
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from word_problem_data import Batch, Encoder, Mix, bucketed_batches, fingerprint, load_gsm8k, mixed_rows
from workers import WORKERS, argument_parser, spawn_workers

from dflash.checkpoints import replace_folder


ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Scale:
    """What `--smoke` shrinks, with the values of a full run; everything else is the same code."""

    steps: int = 3000
    layers: int = 8
    vocab_size: int = 2048
    batch_tokens: int = 4096
    max_length: int = 384
    tokenizer_problems: int = 8000
    problems_scored: int = 300


FULL = Scale()
SMOKE = Scale(
    steps=6, layers=2, vocab_size=512, batch_tokens=1024, max_length=384, tokenizer_problems=200, problems_scored=4
)


def build_config(tokenizer: PreTrainedTokenizerFast, layers: int) -> Qwen3Config:
    """A Qwen3 shape with few, narrow layers."""
    width = {"hidden_size": 192, "intermediate_size": 512}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    length = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024}
    return Qwen3Config(**width, **heads, **ids, **length, num_hidden_layers=layers, tie_word_embeddings=True)


class MasterWeights:
    """fp32 weights and optimisers behind bf16 copies of one model, one copy to a worker.

    bf16 matrix products are several times faster on a CPU. Every second weight belongs to the first worker, the others
    to the second, and each updates only its own: two one-threaded workers that meet once a step waste far less
    than two threads that meet at every small operation.
    """

    def __init__(self, model: Qwen3ForCausalLM, lr: float, muon_lr: float, rank: int) -> None:
        self.shadows = list(model.parameters())
        self.owned = [index % WORKERS == rank for index in range(len(self.shadows))]
        self.masters = [shadow.detach().float().clone().requires_grad_() for shadow in self.shadows]
        embeddings = model.get_input_embeddings().weight
        mine = [(s, m) for s, m, owned in zip(self.shadows, self.masters, self.owned, strict=True) if owned]
        matrices = [master for shadow, master in mine if shadow.ndim == 2 and shadow is not embeddings]
        others = [master for shadow, master in mine if shadow.ndim != 2 or shadow is embeddings]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peaks = (muon_lr, lr)

    def step(self, loss: float, done: float) -> tuple[float, float]:
        """One update from the mean of the workers' gradients; the workers' mean `loss` and `done`."""
        numbers = torch.tensor([loss, done])
        flat = torch.cat([*(shadow.grad.float().flatten() for shadow in self.shadows), numbers])
        distributed.all_reduce(flat)
        flat /= WORKERS
        mean_loss, mean_done = flat[-2:].tolist()
        gradients = flat[:-2]
        gradients *= min(1.0, 1.0 / (gradients.norm().item() + 1e-6))
        parts = gradients.split([shadow.numel() for shadow in self.shadows])
        for shadow, master, part in zip(self.shadows, self.masters, parts, strict=True):
            shadow.grad = None
            master.grad = part.view_as(master)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate(mean_done)
            optimizer.step()
        self.share()
        return mean_loss, mean_done

    @torch.no_grad()
    def share(self) -> None:
        """Gives every worker the weights that the others updated."""
        pieces = [m.flatten() * owned for m, owned in zip(self.masters, self.owned, strict=True)]
        flat = torch.cat(pieces)
        distributed.all_reduce(flat)
        parts = flat.split([shadow.numel() for shadow in self.shadows])
        torch._foreach_copy_(self.shadows, [p.view_as(s) for p, s in zip(parts, self.shadows, strict=True)])


def rate(progress: float, warmup: float = 0.03) -> float:
    """The learning rate's factor: a short warm-up, flat, then linear to zero over the second half."""
    if progress < warmup:
        return progress / warmup
    return min(1.0, 2.0 * (1.0 - progress))


def batch_loss(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean next-token loss, each token weighed by the batch's weights."""
    logits = model(input_ids=batch.input_ids, use_cache=False).logits[:, :-1]  # [B, S-1, V]
    losses = functional.cross_entropy(
        logits.float().flatten(0, 1), batch.input_ids[:, 1:].flatten(), reduction="none"
    )  # [B*(S-1)]
    weights = batch.weights[:, 1:].flatten()  # [B*(S-1)]
    return (losses * weights).sum() / weights.sum()


def complete_config(folder: Path) -> None:
    """Writes the keys of transformers 4.57 beside those of 5.x, so that neither falls back on a default."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config |= {"rope_theta": ROPE_THETA, "rope_scaling": None}
    config["rope_parameters"] = {"rope_theta": ROPE_THETA, "rope_type": "default"}
    config |= {"dtype": "bfloat16", "torch_dtype": "bfloat16"}
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path, record: dict[str, object]) -> None:
    """Replaces `folder` in one rename, so that a reader never meets half a model."""
    aside = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(aside)
    save_tokenizer(tokenizer, aside)
    complete_config(aside)
    (aside / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    # safetensors files come out readable by their owner alone.
    (aside / "model.safetensors").chmod(0o644)
    replace_folder(aside, folder)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, f"{FULL.steps} by default")
    parser.add_argument("--minutes", type=float, help="a budget by the clock instead of --steps")
    parser.add_argument("--lr", type=float, default=4e-3, help="peak rate of AdamW, for embeddings and norms")
    parser.add_argument("--muon-lr", type=float, default=5e-3, help="peak rate of Muon, for the matrices")
    parser.add_argument("--gsm8k-share", type=float, default=0.08, help="GSM8K's share of the rows")
    parser.add_argument("--drill-share", type=float, default=0.3, help="bare arithmetic's share of the rows")
    parser.add_argument("--resume", type=Path, help="a saved target to train on, with its tokenizer")
    parser.add_argument("--prompt-weight", type=float, default=0.1, help="loss weight of the question's tokens")
    parser.add_argument("--early", type=Path, help="also save here after each scoring on the way")
    arguments = parser.parse_args()
    for folder in filter(None, (arguments.output, arguments.early)):
        if folder.exists() and not arguments.overwrite:
            parser.error(f"{folder} exists: name another folder, or pass --overwrite to replace it.")
    return arguments


def train(rank: int, arguments: argparse.Namespace) -> None:
    """One worker; the first one also scores, prints and saves."""
    scale = SMOKE if arguments.smoke else FULL
    steps = arguments.steps or scale.steps
    torch.manual_seed(arguments.seed)
    began = time.monotonic()

    gsm8k = load_gsm8k(arguments.gsm8k, "train")
    # Plain attention is the faster one here: rows are short, and CPU kernels for heads this small are not.
    if arguments.resume:
        tokenizer = AutoTokenizer.from_pretrained(arguments.resume, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(
            arguments.resume, dtype=torch.bfloat16, attn_implementation="eager", trust_remote_code=False
        ).train()
    else:
        made = generate(scale.tokenizer_problems, arguments.seed)
        texts = (f"user\n{row.question}\nassistant\n{row.answer}" for row in [*made, *gsm8k])
        tokenizer = train_tokenizer(texts, scale.vocab_size)
        config = build_config(tokenizer, scale.layers)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.bfloat16)
    encoder = Encoder(tokenizer, arguments.prompt_weight)
    weights = MasterWeights(model, arguments.lr, arguments.muon_lr, rank)
    seed = WORKERS * arguments.seed + rank
    mix = Mix(arguments.gsm8k_share, arguments.drill_share)
    rows = mixed_rows(gsm8k[rank::WORKERS], mix, seed)
    batches = bucketed_batches(encoder, rows, scale.batch_tokens // WORKERS, scale.max_length, seed)
    sets = generated_sets(scale.problems_scored)
    few = {name: rows[: max(2, scale.problems_scored // 6)] for name, rows in sets.items()}
    curve: list[dict[str, object]] = []
    if rank == 0:
        print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(tokenizer)} tokens", flush=True)

    started = time.monotonic()
    scores_due = [0.15, 0.35, 0.55, 0.75, 0.9]
    seen, losses, step, done = 0, 0.0, 0, 0.0
    bar = tqdm(total=1.0, disable=rank > 0 or not sys.stderr.isatty())
    while done < 1:
        batch = next(batches)
        loss = batch_loss(model, batch)
        loss.backward()
        # By the clock, the workers may differ by a moment: they agree on the mean of what each believes.
        believed = (time.monotonic() - started) / (60 * arguments.minutes) if arguments.minutes else step / steps
        mean_loss, done = weights.step(loss.item(), believed)
        step += 1
        if step == steps and not arguments.minutes:
            done = 1.0
        seen += WORKERS * int((batch.weights > 0).sum())
        losses += mean_loss
        if rank > 0:
            continue
        bar.update(min(1.0, done) - bar.n)
        if step % 50 == 0:
            speed = seen / (time.monotonic() - started)
            print(f"step {step} {done:.1%} loss {losses / 50:.4f} {speed:.0f} tokens/s", flush=True)
            losses = 0.0
        if scores_due and done >= scores_due[0]:
            scores_due.pop(0)
            # In fp32, whose kernels are not compiled per shape: generation meets a new shape with every token.
            copied = copy.deepcopy(model).float().eval()
            accuracies = {name: round(score(copied, tokenizer, rows).accuracy, 4) for name, rows in few.items()}
            curve.append({"step": step, "tokens": seen, **accuracies})
            print(curve[-1], flush=True)
            if arguments.early:
                save(model, tokenizer, arguments.early, {"steps": step, "curve": curve})
    bar.close()
    if rank > 0:
        return
    training_minutes = (time.monotonic() - started) / 60
    final = copy.deepcopy(model).float().eval()
    scores = {name: score(final, tokenizer, rows).summary() for name, rows in sets.items()}
    record = {
        "command": "python train_target.py --steps " + str(step),
        "seed": arguments.seed,
        "rates": {"adamw": arguments.lr, "muon": arguments.muon_lr},
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "workers": WORKERS,
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": step,
        "tokens": seen,
        "training_minutes": round(training_minutes, 1),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "gsm8k": {"rows": len(gsm8k), "fingerprint": fingerprint(gsm8k), "share": mix.gsm8k},
        "drill_share": mix.drills,
        "resumed_from": json.loads((arguments.resume / "training.json").read_text()) if arguments.resume else None,
        "curve": curve,
        "scores": scores,
    }
    save(model, tokenizer, arguments.output, record)
    print(json.dumps(scores, indent=2), flush=True)


def main() -> None:
    spawn_workers(train, parse_arguments())


if __name__ == "__main__":
    main()
