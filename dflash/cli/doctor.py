"""`dflash doctor`: says why a pair accepts little, and what to change."""

from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash.common.files import check_output
from dflash.common.messages import counted

from . import loading
from .arguments import (
    PROMPT_FILE,
    ModelOptions,
    ResultOptions,
    TemplateOptions,
    argument,
    decoding_option,
    prompt_option,
)
from .bench import bar
from .terminal import print_result


def doctor(
    *,
    target: Annotated[str, argument("The target: a folder or an id on the Hub.", "TARGET")],
    drafter: Annotated[str, argument("Its DFlash drafter: a folder or an id.", "DRAFTER")],
    prompts: Annotated[
        Path | None,
        prompt_option(f"{PROMPT_FILE}. Default: six."),
    ] = None,
    limit: Annotated[int, prompt_option("Number of prompts of the file.", min=1)] = 8,
    template: TemplateOptions,
    max_new_tokens: Annotated[int, decoding_option("Longest answer, in tokens.", min=2)] = 128,
    models: ModelOptions,
    result: ResultOptions,
) -> None:
    """Says why a pair accepts little: compares it with its card, then measures it with one change at a time.

    It tries the other thinking mode, prompts with and without the chat
    template, target layers off by one, other mask tokens, the target's rope
    and other dtypes. It says in order what helps and how much.
    """
    if result.output is not None:
        check_output(result.output, result.overwrite)
    dialogues = None if prompts is None else loading.read_prompts(prompts)[:limit]
    pair = loading.load_pair(target, drafter, models)

    from dflash.checkpoints import read_card
    from dflash.common.provenance import public_name, write_result
    from dflash.evaluation import DOCTORS_PROMPTS, Setup, run_doctor

    try:
        card = read_card(drafter)
    except ValueError as error:
        card = None
        loading.say_once(str(error))
    findings = run_doctor(
        pair.target,
        Setup(pair.drafter, **vars(template)),
        pair.tokenizer,
        dialogues or list(map(loading.question, DOCTORS_PROMPTS)),
        max_new_tokens,
        card,
        {"target": public_name(target), "drafter": public_name(drafter)},
        bar,
    )
    if result.output is not None:
        write_result(result.output, findings)
    print_result(findings, result.as_json, _show)


def _show(result: dict[str, Any]) -> None:
    """Prints the trials, what the card says, and what to do."""
    console = Console(highlight=False)
    decoding = result["decoding"]
    setup = result["environment"]
    facts = [
        counted(decoding["prompts"], "prompt"),
        counted(result["summary"][0]["steps"], "step"),
        "greedy",
        setup["target_dtype"],
        f"thinking {'on' if decoding['enable_thinking'] else 'off'}",
        f"{'the' if decoding['chat_template'] else 'no'} chat template",
    ]
    pair = f"{decoding['target']} with {decoding['drafter']}"
    line = ", ".join(facts)
    console.print(Text.assemble((pair, "bold"), (f"  {line}", "dim")))
    console.print(_trials(result["summary"], setup["block_size"] - 1))
    key = "at N: share of the steps that keep the token at position N of the block, if they propose one"
    console.print(Text(key, "dim"))
    stated = [f"{published['tau']:.2f} ({published['measured_on']})" for published in result["published"]]
    console.print(f"Published tau: {', '.join(stated) or 'the card states none'}")
    for sentence in result["observations"]:
        console.print(Text.assemble(("! ", "yellow"), sentence))
    for number, advice in enumerate(result["advice"], start=1):
        before = f"{advice['tau_before']:.2f}"
        after = f"{advice['tau']:.2f}"
        change = f"{number}. {advice['change']}: tau {before} → {after}"
        console.print(Text.assemble((change, "bold green"), f"  ({advice['reason']})"))
    if not result["advice"]:
        console.print("Nothing tried does better.", style="bold")


def _trials(rows: list[dict[str, Any]], last: int) -> Table:
    """Returns a table with a row for each trial. `last` is the last position of a block."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("change", overflow="fold")
    table.add_column("tau", justify="right")
    positions = [position for position in (1, 2, 4, 8) if position < last]
    positions.append(last)
    for position in positions:
        table.add_column(f"at {position}", justify="right", no_wrap=True)
    after: list[str] = []
    for row in rows:
        if row["after"] != after:
            after = row["after"]
            table.add_row(Text(f"with {after[-1]}:", "bold"))
        indent = "  " * len(after)
        change = f"{indent}{row['change'] or 'as it is'}"
        if row["tau"] is None:
            table.add_row(f"{change} ({row['error']})", "-")
            continue
        shares = row["accepted_at"]
        figures = []
        for position in positions:
            is_known = position <= len(shares)
            figures.append(f"{100 * shares[position - 1]:.0f} %" if is_known else "")
        table.add_row(change, f"{row['tau']:.2f}", *figures)
    return table
