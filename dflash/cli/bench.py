"""`dflash bench`: how fast each way of decoding is with a pair, on the same prompts, in one run."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.text import Text

from .options import Dtype, Pair, encode, hide_loading_bars, listed, load_pair, numbered_lines, show_table, torch_dtype


def bench(
    target: Annotated[
        str | None, typer.Option(help="The target: a local folder or an id on the Hub. Default: the embedded pair.")
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="Its DFlash drafter: a local folder or an id on the Hub.")
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(help="A text file, one prompt a line; may be repeated. Default: the embedded word problems."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="So many prompts of each file.")] = 40,
    methods: Annotated[
        str | None,
        typer.Option(help="Besides target.generate: names out of those above, with commas between. Default: all."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Longest answer, in tokens.")] = 256,
    repeats: Annotated[int, typer.Option(min=1, help="How often each method answers; the median counts.")] = 3,
    profiled: Annotated[int, typer.Option(min=0, help="Prompts that are looked into; 0 for none.")] = 4,
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all cores.")] = None,
    dtype: Annotated[
        Dtype, typer.Option(help="auto: as each checkpoint is stored; the embedded pair: float32.")
    ] = Dtype.auto,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, auto … Default: CUDA if there is one.")
    ] = None,
    chat_template: Annotated[bool, typer.Option(help="Ask in the target's chat template.")] = True,
    thinking: Annotated[bool, typer.Option(help="Let the chat template ask for thinking.")] = False,
    output: Annotated[Path | None, typer.Option(help="JSON file to write; plots as PNG stand beside it.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Times every way of decoding with a pair, in turns on the same prompts, and compares their texts.

    Methods: target.generate, prompt lookup, native dflash (transformers 5.15 on),
    dflash, dflash eager, dflash compiled, dflash adaptive, dflash tree,
    dflash drafting nothing, random drafter adaptive.
    """
    if (target is None) != (drafter is None):
        raise ValueError("--target and --drafter go together: give both, or neither for the embedded pair.")
    chosen = None if methods is None else listed(methods, "--methods")
    texts = {path.stem: read_prompts(path)[:limit] for path in prompts or ()}
    hide_loading_bars()
    import torch

    from dflash.checkpoints import heldout_problems, load_embedded_pair
    from dflash.common.provenance import write_result
    from dflash.evaluation import Prompt, check_methods, run_bench, save_plots

    check_methods(chosen or ())
    if threads is not None:
        torch.set_num_threads(threads)
    if target is not None and drafter is not None:
        pair = load_pair(target, drafter, dtype, device)
    else:
        pair = Pair(*load_embedded_pair(torch.float32 if dtype is Dtype.auto else torch_dtype(dtype)))
    texts = texts or {"held-out templates": [problem.question for problem in heldout_problems()[:limit]]}
    result = run_bench(
        pair.target,
        pair.drafter,
        [Prompt(task, encode(pair, text, chat_template, thinking)) for task in texts for text in texts[task]],
        max_new_tokens,
        repeats,
        chosen,
        profiled,
        {
            "target": target,
            "drafter": drafter,
            "enable_thinking": thinking,
            "chat_template": pair.tokenizer.chat_template if chat_template else None,
        },
        bar,
    )
    if as_json:
        print(json.dumps({name: value for name, value in result.items() if name not in RAW}))
    else:
        show(result)
    if output is None:
        return
    write_result(output, result)
    written = [output]
    try:
        written += save_plots(result, output)
    except ValueError as error:  # the figures are safe, and the plots are made out of them at any time
        Console(stderr=True, highlight=False).print(f"{error} Then: dflash report {output}", soft_wrap=True)
    if not as_json:
        print("\n".join(map(str, written)))


ON_THE_CLOCK = (
    "method", "identical", "tokens_per_second", "speedup", "speedup_p10", "tau_micro", "tokens_per_step", "ms_per_step",
    "ms_to_first_token", "compilations",
)  # fmt: skip
LOOKED_INTO = (
    "method", "profiled_ms_draft", "profiled_ms_verify", "profiled_ms_rest", "profiled_host_syncs_per_step",
    "profiled_memory_bytes",
)  # fmt: skip
# Fields of a result that hold one entry per prompt.
RAW = ("measurements", "profiles")


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: its lines, or the `prompt` or `question` of those that are JSON objects."""
    prompts = []
    for number, line in numbered_lines(path, "--prompts"):
        prompt: Any = line
        if line.lstrip().startswith("{"):
            try:
                fields = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"--prompts {path}, line {number} is no JSON ({error}): correct it.") from error
            prompt = fields.get("prompt", fields.get("question"))
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"--prompts {path}, line {number} holds no text: give a prompt or a question.")
        prompts.append(prompt)
    return prompts


def bar(items: Iterable[Any], what: str) -> Iterable[Any]:
    """A bar on standard error, gone at the end. No thread of its own draws it: that would take time from what is measured."""
    console = Console(stderr=True)
    return track(
        list(items), what, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
    )


def show(result: dict[str, Any]) -> None:
    """What the clock says and what the passes beside it say, on standard output, and what the figures depend on."""
    from dflash.evaluation import caveat, place_of, table_of

    rows, setup, decoding = result["summary"], result["environment"], result["decoding"]
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        show_table(table_of(of_task, ON_THE_CLOCK, short=True), f"{task}, {of_task[0]['prompts']} prompts")
        if "profiled_prompts" in of_task[0]:
            looked_into = f"A step, looked into on {of_task[0]['profiled_prompts']} prompts (slower than on the clock)"
            show_table(table_of(of_task, LOOKED_INTO, short=True), looked_into)
    facts = (
        f"{setup['target_dtype']}, {place_of(setup)}, block {setup['block_size']}, greedy, batch 1, at most "
        f"{decoding['max_new_tokens']} tokens, medians of {decoding['repeats']} interleaved repeats. {caveat(rows, setup['target_dtype'])}"
    )
    Console(highlight=False).print(Text(facts.rstrip(), "dim"))
