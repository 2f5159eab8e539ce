"""`dflash bench`: measures how fast each way of decoding is with a pair, on the same prompts, in one run."""

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console

from dflash.common.files import check_output, only_writer
from dflash.common.messages import counted

from .arguments import (
    PROMPT_FILE,
    ModelOptions,
    Repeats,
    ResultOptions,
    TemplateOptions,
    decoding_option,
    model_option,
    prompt_option,
    result_option,
)
from .loading import (
    Pair,
    encoder,
    heldout_dialogues,
    hide_loading_bars,
    known_device,
    listed,
    load_pair,
    read_prompt_files,
)
from .terminal import counting_bar, print_result, show_facts, show_table


@dataclass
class BenchModels(ModelOptions):
    """How the pair is loaded, and on how many threads it runs."""

    threads: Annotated[int | None, model_option("CPU threads. Default: all cores.", min=1)] = None


@dataclass
class BenchMethods:
    """Fields of `BenchPlan`."""

    methods: Annotated[
        str | None, decoding_option("Methods besides target.generate, separated by commas. Default: all.")
    ] = None
    max_new_tokens: Annotated[int, decoding_option("Longest answer, in tokens.", min=2)] = 256
    repeats: Repeats = 3
    profiled: Annotated[int, decoding_option("Number of prompts that are profiled; 0 for none.", min=0)] = 4


@dataclass
class BenchFiles(ResultOptions):
    """Where the result and its plots go."""

    output: Annotated[Path | None, result_option("JSON file to write, with plots as PNG beside it.")] = None


def bench(
    *,
    target: Annotated[str | None, model_option("The target: a folder or Hub id. Default: the embedded pair.")] = None,
    drafter: Annotated[str | None, model_option("Its DFlash drafter: a folder or Hub id.")] = None,
    models: BenchModels,
    prompts: Annotated[
        list[Path] | None,
        prompt_option(f"{PROMPT_FILE}; may be repeated. Default: word problems."),
    ] = None,
    limit: Annotated[int, prompt_option("Number of prompts of each file.", min=1)] = 40,
    template: TemplateOptions,
    measured: BenchMethods,
    result: BenchFiles,
) -> None:
    """Times every way of decoding with a pair, in turns on the same prompts, and compares their texts.

    Methods: {methods}.
    """
    if (target is None) != (drafter is None):
        raise ValueError("--target and --drafter go together: give both, or neither for the embedded pair.")
    methods = None if measured.methods is None else listed(measured.methods, "--methods")
    dialogues = read_prompt_files(prompts or ())
    output = result.output
    with ExitStack() as lock:
        if output is not None:
            check_output(output, result.overwrite)
            lock.enter_context(only_writer(output))
        hide_loading_bars()
        from dflash.common.provenance import write_result
        from dflash.evaluation import BenchPlan, Prompt, check_methods, run_bench

        check_methods(methods or ())
        pair = _pair(target, drafter, models)
        dialogues = dialogues or {"held-out templates": heldout_dialogues()}
        encode = encoder(pair.tokenizer, template)
        encoded = []
        for task, task_dialogues in dialogues.items():
            encoded += [Prompt(task, encode(dialogue)) for dialogue in task_dialogues[:limit]]
        facts = {
            "target": target,
            "drafter": drafter,
            "enable_thinking": template.thinking,
            "chat_template": pair.tokenizer.chat_template if template.chat_template else None,
        }
        plan = BenchPlan(measured.max_new_tokens, measured.repeats, methods, measured.profiled)
        figures = run_bench(pair.target, pair.drafter, encoded, plan, facts, bar)
        if output is not None:
            write_result(output, figures)
    print_result(figures, result.as_json, show)
    if output is not None:
        written = _plots(figures, output)
        if not result.as_json:
            print("\n".join(map(str, written)))


def _pair(target: str | None, drafter: str | None, models: BenchModels) -> Pair:
    """Loads and returns the named pair, or the embedded pair if none is named."""
    import torch

    from dflash.checkpoints import load_embedded_pair

    device = known_device(None if models.device == "auto" else models.device)
    if models.threads is not None:
        torch.set_num_threads(models.threads)
    if target is not None and drafter is not None:
        return load_pair(target, drafter, models)
    embedded = Pair(*load_embedded_pair("float32" if models.dtype == "auto" else models.dtype))
    return embedded._replace(target=embedded.target.to(device), drafter=embedded.drafter.to(device))


def _plots(result: dict[str, Any], output: Path) -> list[Path]:
    """Draws the plots beside the written `output`, and returns the paths of all files."""
    from dflash.evaluation import save_plots

    try:
        return [output, *save_plots(result, output)]
    except ValueError as error:  # the plots can be drawn later from the figures in `output`
        Console(stderr=True, highlight=False).print(f"{error} Then: dflash report {output}", soft_wrap=True)
        return [output]


TIMED = (
    "method", "identical", "tokens_per_second", "speedup", "speedup_p10", "tau_micro", "tokens_per_step", "ms_per_step",
    "ms_to_first_token", "compilations",
)  # fmt: skip
PROFILED = (
    "method", "profiled_ms_draft", "profiled_ms_verify", "profiled_ms_rest", "profiled_host_syncs_per_step",
    "profiled_memory_bytes",
)  # fmt: skip


def bar(items: Iterable[Any], what: str) -> Iterable[Any]:
    """Yields the items and counts them on standard error.

    No thread draws the bar, because that would disturb the measurement.
    """
    with counting_bar(is_first=True, auto_refresh=False) as progress:
        yield from progress.track(list(items), description=what)


def show(result: dict[str, Any]) -> None:
    """Prints the tables of the measurement and of the profile, and what their figures depend on."""
    from dflash.evaluation import table_of

    rows = result["summary"]
    for task in dict.fromkeys(row["task"] for row in rows):
        task_rows = [row for row in rows if row["task"] == task]
        first = task_rows[0]
        prompts = counted(first["prompts"], "prompt")
        show_table(table_of(task_rows, TIMED, short=True), f"{task}, {prompts}")
        if "profiled_prompts" in first:
            profiled = counted(first["profiled_prompts"], "prompt")
            title = f"A step, profiled on {profiled} (slower than unprofiled)"
            show_table(table_of(task_rows, PROFILED, short=True), title)
    repeats = counted(result["decoding"]["repeats"], "interleaved repeat")
    show_facts(result, f"medians of {repeats}")
