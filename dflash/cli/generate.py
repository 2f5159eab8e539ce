"""`dflash generate`: any pair answers a prompt, streamed block by block."""

import json
import math
import sys
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from rich.console import Console

from dflash.common.messages import counted
from dflash.common.version import __version__

from .arguments import AsJson, Drafter, ModelOptions, Target, TemplateOptions, argument, decoding_option, option
from .demo import show_comparison, warm_up
from .loading import Pair, checked_prompt, dtype_name, encode, load_pair, say_once, standard_input
from .terminal import BlockPrinter, number
from .tracing import TraceFile, check_trace_file, recording


@dataclass
class ShownOptions:
    """What is shown and what is recorded."""

    as_json: AsJson = False
    compare: Annotated[bool, option("Run target.generate too, and compare.", "--compare")] = False
    trace: TraceFile = None


@dataclass
class RequestOptions:
    """The settings of the request."""

    max_new_tokens: Annotated[int, decoding_option("Longest answer, in tokens.", metavar="N")] = 512
    temperature: Annotated[float, decoding_option("0 decodes greedily; above 0 samples.", metavar="X")] = 0.0
    top_p: Annotated[
        float | None, decoding_option("Sample from the smallest set of this probability.", metavar="X")
    ] = None
    top_k: Annotated[int | None, decoding_option("Sample from the N most probable tokens.", metavar="N")] = None
    seed: Annotated[int, decoding_option("Seed of the sampling.", min=0, max=2**63 - 1, metavar="N")] = 0

    def request(self) -> dict[str, Any]:
        """Returns the keywords of the loop. ValueError for a wrong value, with the name of its flag."""
        from dflash.model.requests_dflash import SETTINGS

        keywords = {name: value for name, value in vars(self).items() if value is not None}
        del keywords["seed"]
        for name, value in keywords.items():
            is_meant, remedy = SETTINGS[name]
            flag = name.replace("_", "-")
            if not is_meant(value):
                raise ValueError(f"--{flag} {value} cannot be used: {remedy}.")
        return keywords


def generate(
    *,
    prompt: Annotated[str, argument("The text to answer; - reads it from standard input.", "PROMPT")],
    target: Target,
    drafter: Drafter,
    models: ModelOptions,
    template: TemplateOptions,
    shown: ShownOptions,
    decoding: RequestOptions,
) -> None:
    """Writes the target's answer to PROMPT with any pair, streamed block by block."""
    is_sampled = decoding != RequestOptions(decoding.max_new_tokens)
    if shown.compare and (shown.as_json or is_sampled or shown.trace):
        raise ValueError(
            "--compare shows two greedy texts: leave out --json, --temperature, --top-p, --top-k, --seed and --trace."
        )
    request = decoding.request()
    check_trace_file(shown.trace)
    text = checked_prompt(standard_input() if prompt == "-" else prompt)
    pair = load_pair(target, drafter, models)
    input_ids = encode(pair, text, template)
    _warn_of_positions(pair, input_ids.shape[1], decoding.max_new_tokens)
    if shown.compare:
        warm_up(pair, input_ids)
        show_comparison(pair, [text], [input_ids], decoding.max_new_tokens)
        return

    import torch

    from dflash.evaluation import timed_blocks

    printer = BlockPrinter(Console(highlight=False), pair.tokenizer, is_marked=sys.stdout.isatty())
    with recording(shown.trace, pair, target) as recorder:
        decode = recorder(partial(timed_blocks, pair.drafter, pair.target))
        on_block = None if shown.as_json else printer.block
        generator = torch.Generator().manual_seed(decoding.seed)
        run = decode(input_ids, on_block, generator=generator, **request)
    if not shown.as_json:
        printer.end()
        print(_figures(run), file=sys.stderr)
        return
    content = {"target": target, "drafter": drafter, "prompt": text, "seed": decoding.seed, **request}
    content |= vars(template) | _report(run, pair)
    print(json.dumps(content))


def _figures(run: Any) -> str:
    """Returns one line on a text: its length, its speed and how much was accepted."""
    figures = [
        counted(len(run.token_ids), "token"),
        f"{run.tokens_per_second:.1f} tokens/s",
        f"tau {number(run.tau)}",
        f"{number(run.tokens_per_step)} tokens per step",
    ]
    lookups = ""
    if run.lookup_steps:
        num_steps = len(run.acceptance_lengths)
        lookups = f" ({len(run.lookup_steps)} of {num_steps} steps proposed text that had occurred before)"
    return ", ".join(figures) + lookups


def _report(run: Any, pair: Pair) -> dict[str, Any]:
    """Returns the text and its figures for JSON. A mean over no steps is `None`."""
    from dflash.common.provenance import versions

    means = {name: getattr(run, name) for name in ("tau", "tau_with_lookup", "tokens_per_step")}
    return {
        "text": pair.tokenizer.decode(run.token_ids, skip_special_tokens=True),
        "token_ids": run.token_ids,
        "acceptance_lengths": run.acceptance_lengths,
        **{name: None if math.isnan(mean) else mean for name, mean in means.items()},
        "tokens_per_second": run.tokens_per_second,
        "seconds": run.seconds,
        "seconds_to_first_token": run.seconds_to_first_token,
        "block_size": pair.drafter.config.block_size,
        "dtype": dtype_name(pair),
        "device": str(pair.target.device),
        "versions": {**versions(), "dflash-transformers": __version__},
    }


def _warn_of_positions(pair: Pair, num_prompt_tokens: int, max_new_tokens: int) -> None:
    """Says on standard error if a request reaches beyond the target's positions."""
    config = pair.target.config.get_text_config(decoder=True)
    positions = getattr(config, "max_position_embeddings", None)
    max_length = num_prompt_tokens + max_new_tokens
    if positions is not None and num_prompt_tokens < positions < max_length:
        say_once(
            f"The prompt's {num_prompt_tokens} tokens and --max-new-tokens {max_new_tokens} reach beyond the target's "
            f"{positions} positions, where its text gets worse: ask for at most {positions - num_prompt_tokens}."
        )
