"""`dflash generate`: any pair answers a prompt, streamed block by block."""

from __future__ import annotations

import json
import math
import platform
import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from dflash import __version__

from .demo import show_comparison, warm_up
from .options import (
    AsJson,
    ChatTemplate,
    Device,
    Drafter,
    Dtype,
    Pair,
    StoredDtype,
    Target,
    Thinking,
    check_decoding,
    dtype_name,
    encode,
    given,
    load_pair,
    say_once,
)
from .terminal import BlockPrinter, number


DECODING = "Decoding"


def generate(
    prompt: Annotated[
        str, typer.Argument(metavar="PROMPT", help="The text to answer; - reads it from standard input.")
    ],
    target: Target,
    drafter: Drafter,
    dtype: StoredDtype = Dtype.auto,
    device: Device = None,
    chat_template: ChatTemplate = True,
    thinking: Thinking = False,
    as_json: AsJson = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run target.generate too, and compare.")] = False,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=DECODING, help="Longest answer, in tokens.")
    ] = 512,
    temperature: Annotated[
        float, typer.Option(metavar="X", rich_help_panel=DECODING, help="0 decodes greedily; above 0 samples.")
    ] = 0.0,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="X", rich_help_panel=DECODING, help="Sample from the smallest set of this probability."),
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option(metavar="N", rich_help_panel=DECODING, help="Sample from the N most probable tokens."),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, metavar="N", rich_help_panel=DECODING, help="Seed of the sampling.")
    ] = 0,
) -> None:
    """Writes the target's answer to PROMPT with any pair, streamed block by block."""
    if compare and (as_json or temperature):
        raise ValueError("--compare shows two greedy texts: leave out --json and --temperature.")
    check_decoding(device, max_new_tokens, temperature, top_p, top_k)
    text = given(sys.stdin.read() if prompt == "-" else prompt)
    pair = load_pair(target, drafter, dtype, device)
    input_ids = encode(pair, text, chat_template, thinking)
    warn_of_positions(pair, input_ids.shape[1], max_new_tokens)
    if compare:
        warm_up(pair, input_ids)
        show_comparison(pair, [text], [input_ids], max_new_tokens)
        return

    import torch

    from dflash.evaluation import timed_blocks

    request: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    request |= {name: value for name, value in (("top_p", top_p), ("top_k", top_k)) if value is not None}
    noise = torch.Generator().manual_seed(seed)
    if as_json:
        run = timed_blocks(pair.drafter, pair.target, input_ids, generator=noise, **request)
        asked = {"target": target, "drafter": drafter, "prompt": text, "seed": seed, **request}
        print(json.dumps({**asked, "chat_template": chat_template, "thinking": thinking, **_report(pair, run)}))
        return
    printer = BlockPrinter(Console(highlight=False), pair.tokenizer, is_marked=sys.stdout.isatty())
    run = timed_blocks(pair.drafter, pair.target, input_ids, on_block=printer.block, generator=noise, **request)
    printer.end()
    print(
        f"{len(run.token_ids)} tokens, {run.tokens_per_second:.1f} tokens/s, tau {number(run.tau)}, "
        f"{number(run.tokens_per_step)} tokens per step",
        file=sys.stderr,
    )


def warn_of_positions(pair: Pair, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Says on standard error that a request reaches beyond the positions that the target was made for."""
    positions = getattr(pair.target.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions is not None and num_prompt_tokens + max_new_tokens > positions:
        say_once(
            f"The prompt's {num_prompt_tokens} tokens and --max-new-tokens {max_new_tokens} reach beyond the target's "
            f"{positions} positions, where its text gets worse: ask for at most {positions - num_prompt_tokens}."
        )


def _report(pair: Pair, run: Any) -> dict[str, Any]:
    """What `--json` says about a run."""
    import torch
    import transformers

    return {
        "text": pair.tokenizer.decode(run.token_ids, skip_special_tokens=True),
        "token_ids": run.token_ids,
        "acceptance_lengths": run.acceptance_lengths,
        "tau": None if math.isnan(run.tau) else run.tau,
        "tokens_per_step": None if math.isnan(run.tokens_per_step) else run.tokens_per_step,
        "tokens_per_second": run.tokens_per_second,
        "seconds": run.seconds,
        "seconds_to_first_token": run.seconds_to_first_token,
        "block_size": pair.drafter.config.block_size,
        "dtype": dtype_name(pair),
        "device": str(pair.target.device),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dflash-transformers": __version__,
        },
    }
