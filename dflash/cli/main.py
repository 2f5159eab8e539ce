"""`dflash …`: text in, text out. One function per sub-command; everything else is the library's."""

from __future__ import annotations

import json
import math
import platform
import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from dflash import __version__
from dflash.common.name_clash import import_name_clash

from .bench import bench
from .canary import canary
from .eval import evaluate
from .options import (
    Dtype,
    Pair,
    check_decoding,
    checkpoint,
    dtype_name,
    encode,
    first_line,
    given,
    hide_loading_bars,
    load_pair,
    torch_dtype,
    version,
)
from .publish import publish
from .regenerate import regenerate
from .report import report
from .terminal import BlockPrinter, Comparison, comparison_table, legend, number, progress_bar
from .train import train, with_flags


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        print(f"dflash {__version__}")
        raise typer.Exit


@app.callback()
def common(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Log errors alone.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what is decided on the way, too.")] = False,
) -> None:
    """DFlash speculative decoding: the target's own text, in fewer of its forwards."""
    if quiet and verbose:
        raise typer.BadParameter("--quiet and --verbose: give one of them.")
    if quiet or verbose:
        from transformers.utils import logging

        logging.set_verbosity(logging.ERROR if quiet else logging.INFO)


class Engine(str, Enum):
    """What may run a drafter."""

    remote_code = "remote-code"
    native = "native"
    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"
    mlx = "mlx"


class Server(str, Enum):
    """Engines with a server of their own."""

    vllm = "vllm"
    sglang = "sglang"
    trtllm = "trtllm"


@app.command()
def demo(
    prompts: Annotated[int, typer.Option(min=1, help="How many held-out problems to answer.")] = 3,
    prompt: Annotated[str | None, typer.Option(help="Answer this text instead.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    dtype: Annotated[Dtype, typer.Option(help="float32 is exact; in bfloat16 a near-tie can flip.")] = Dtype.float32,
) -> None:
    """Answers word problems with the embedded tiny pair, plainly and with DFlash, and compares. Needs no download."""
    with progress_bar("Loading the embedded pair", num_steps=3) as advance:
        hide_loading_bars()
        from dflash.checkpoints import heldout_problems, load_embedded_pair

        advance()
        pair = Pair(*load_embedded_pair(torch_dtype(dtype)))
        advance()
        texts = [problem.question for problem in heldout_problems()[:prompts]] if prompt is None else [given(prompt)]
        inputs = [encode(pair, text) for text in texts]
        _warm_up(pair, inputs[0])
    _show_comparison(pair, texts, inputs, max_new_tokens)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to answer; - reads it from standard input.")],
    target: Annotated[str, typer.Option(help="The target: a local folder or an id on the Hub.")],
    drafter: Annotated[str, typer.Option(help="Its DFlash drafter: a local folder or an id on the Hub.")],
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 decodes greedily; above 0 samples.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Sample from the smallest set of this probability.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample from so many most probable tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the sampling noise.")] = 0,
    dtype: Annotated[Dtype, typer.Option(help="auto: as each checkpoint is stored.")] = Dtype.auto,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda, cuda:1, auto … Default: CUDA if there is one.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run target.generate too, and compare.")] = False,
    chat_template: Annotated[bool, typer.Option(help="Ask in the target's chat template.")] = True,
    thinking: Annotated[bool, typer.Option(help="Let the chat template ask for thinking.")] = False,
) -> None:
    """Writes the target's answer to PROMPT with any pair, streamed block by block."""
    if compare and (as_json or temperature):
        raise ValueError("--compare shows two greedy texts: leave out --json and --temperature.")
    check_decoding(device, max_new_tokens, temperature, top_p, top_k)
    text = given(sys.stdin.read() if prompt == "-" else prompt)
    pair = load_pair(target, drafter, dtype, device)
    input_ids = encode(pair, text, chat_template, thinking)
    if compare:
        _warm_up(pair, input_ids)
        _show_comparison(pair, [text], [input_ids], max_new_tokens)
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


@app.command()
def export_demo(folder: Annotated[Path, typer.Argument(help="Two checkpoint folders are written below it.")]) -> None:
    """Writes the embedded pair as two checkpoint folders, the drafter's code beside its weights."""
    with progress_bar("Writing the embedded pair", num_steps=2) as advance:
        hide_loading_bars()
        from dflash.checkpoints import export_embedded_pair

        advance()
        paths = export_embedded_pair(folder)
    for path in paths:
        print(path)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A drafter's checkpoint of any tool: a folder or an id on the Hub.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it.")],
    target: Annotated[
        str | None, typer.Option(help="Its target, whose config says what some tools leave out.")
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Read a pickle's tensors too.")] = False,
) -> None:
    """Writes a drafter of any dialect in this library's form, its code beside its weights."""
    hide_loading_bars()
    from dflash.checkpoints import convert_checkpoint

    asked = {"weights_only": True} if weights_only else {}
    its_target = None if target is None else checkpoint(target, "--target")
    print(convert_checkpoint(checkpoint(source, "SOURCE"), folder, its_target, **asked))


@app.command()
def export(
    source: Annotated[str, typer.Argument(help="A drafter's checkpoint: a folder or an id on the Hub.")],
    folder: Annotated[Path, typer.Argument(help="Where to write it; its name contains DFlash.")],
    target: Annotated[str, typer.Option(help="Its target: a folder or an id on the Hub.")],
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Read a pickle's tensors too.")] = False,
) -> None:
    """Writes a drafter in the form that all engines load, with a card; refused if `dflash check` says that one fails."""
    hide_loading_bars()
    from dflash.checkpoints import export_checkpoint

    asked = {"weights_only": True} if weights_only else {}
    print(export_checkpoint(checkpoint(source, "SOURCE"), folder, checkpoint(target, "--target"), **asked))


@app.command()
def check(
    folder: Annotated[Path, typer.Argument(help="The drafter's checkpoint.")],
    target: Annotated[
        str | None, typer.Option(help="Its target, a folder or an id on the Hub: check the pair.")
    ] = None,
    engine: Annotated[list[Engine] | None, typer.Option(help="Ask for this engine alone; may be repeated.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Says what is wrong with a drafter's checkpoint and what each engine makes of it; exit status 1 if one fails."""
    from dflash.checkpoints import ENGINES, report_lines
    from dflash.checkpoints import check as check_folder

    asked = tuple(dict.fromkeys(item.value for item in engine or ())) or tuple(ENGINES)
    report = check_folder(folder, target, asked)
    if as_json:
        print(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        Console(highlight=False).print(report_lines(report))
    if not report.is_ok:
        raise typer.Exit(1)


@app.command()
def serve(
    engine: Annotated[Server, typer.Option(help="The engine that serves.")],
    target: Annotated[str, typer.Option(help="The target: a local folder or an id on the Hub.")],
    drafter: Annotated[str, typer.Option(help="Its DFlash drafter: a local folder or an id on the Hub.")],
    engine_args: Annotated[list[str] | None, typer.Argument(help="The engine's own arguments, after --.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Block, anchor included. Default: the drafter's.")] = None,
    only_print: Annotated[bool, typer.Option("--print", help="Print the command and stop.")] = False,
    checked: Annotated[bool, typer.Option("--check/--no-check", help="Refuse what the engine cannot run.")] = True,
) -> None:
    """Serves a pair with vLLM, SGLang or TensorRT-LLM: prints the engine's own command, then runs it."""
    from dflash.checkpoints import declared_block_size, launch, refuse_unfit, run

    if checked:
        target, drafter = checkpoint(target, "--target"), checkpoint(drafter, "--drafter")
        refuse_unfit(engine.value, target, drafter, block_size)
    block_size = declared_block_size(drafter) if block_size is None else block_size
    plan = launch(engine.value, target, drafter, block_size, engine_args or ())
    print(plan.script(), flush=True)
    if not only_print:
        run(plan, engine.value)


app.command()(bench)
app.command()(publish)
app.command()(regenerate)
app.command()(report)
app.command("eval")(evaluate)
app.command()(canary)
app.command()(with_flags(train))


def main() -> None:
    """Runs the command line. What the library refuses is one sentence on standard error and exit status 1."""
    clash = import_name_clash()
    if clash:
        _fail(clash)
    try:
        app()
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.filename and error.strerror:
            _fail(f"{error.filename} cannot be used ({error.strerror}): name another path, or see to this one.")
        _fail(first_line(error))
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":
            raise
        _fail("The device is out of memory: use a smaller --dtype, --max-new-tokens or model, or --device auto.")
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(sentence: str) -> None:
    print(f"dflash: {sentence}", file=sys.stderr)
    sys.exit(1)


def _warm_up(pair: Pair, input_ids: Any) -> None:
    """A few tokens of both, so that neither run pays for what happens once."""
    from dflash.evaluation import GREEDY, timed_blocks, timed_generate

    timed_generate(pair.target, input_ids, max_new_tokens=8, **GREEDY)
    timed_blocks(pair.drafter, pair.target, input_ids, max_new_tokens=24, temperature=0.0)


def _show_comparison(pair: Pair, texts: list[str], inputs: list[Any], max_new_tokens: int) -> None:
    """Answers each prompt plainly, then with DFlash, both streamed; ends with the table."""
    import torch

    from dflash.evaluation import GREEDY, first_difference, place_of, timed_blocks, timed_generate

    console = Console(highlight=False)
    console.print(legend(console))
    rows = []
    for text, input_ids in zip(texts, inputs, strict=True):
        console.print(Text(f"\n{text.strip()}", "bold"))
        console.print(Text("\ntarget.generate", "dim"))
        printer = BlockPrinter(console, pair.tokenizer)
        plain = timed_generate(
            pair.target, input_ids, on_tokens=printer.tokens, max_new_tokens=max_new_tokens, **GREEDY
        )
        printer.end()
        console.print(Text("\nDFlash", "dim"))
        printer = BlockPrinter(console, pair.tokenizer)
        fast = timed_blocks(
            pair.drafter, pair.target, input_ids, printer.block, max_new_tokens=max_new_tokens, temperature=0.0
        )
        printer.end()
        parts = first_difference(pair.target, input_ids, plain.token_ids, fast.token_ids)
        rows.append(Comparison(plain, fast, parts))
    console.print()
    console.print(comparison_table(rows))
    device = pair.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    place = place_of({"device": name, "threads": torch.get_num_threads()})
    block_size = pair.drafter.config.block_size
    console.print(Text(f"{dtype_name(pair)}, {place}, block size {block_size}, greedy, batch 1", "dim"))


def _report(pair: Pair, run: Any) -> dict[str, Any]:
    """What `--json` says about a run."""
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
            **{name: version(name) for name in ("dflash-transformers", "torch", "transformers")},
        },
    }


if __name__ == "__main__":
    main()
