"""`dflash doctor`: why a pair accepts little, and what to change."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dflash.common.files import check_output
from dflash.common.messages import counted

from . import arguments, loading
from .arguments import decoding_option, prompt_option
from .bench import bar


def doctor(
    target: Annotated[str, typer.Argument(metavar="TARGET", help="The target: a folder or an id on the Hub.")],
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Its DFlash drafter: a folder or an id.")],
    prompts: Annotated[
        Path | None,
        prompt_option(help=f"{arguments.PROMPT_FILE}. Default: six."),
    ] = None,
    limit: Annotated[int, prompt_option(min=1, help="Number of prompts of the file.")] = 8,
    chat_template: arguments.ChatTemplate = True,
    thinking: arguments.Thinking = False,
    max_new_tokens: Annotated[int, decoding_option(min=2, help="Longest answer, in tokens.")] = 128,
    dtype: arguments.Dtype = "auto",
    device: arguments.Device = None,
    trust_remote_code: arguments.TrustRemoteCode = False,
    output: arguments.Output = None,
    overwrite: arguments.Overwrite = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Says why a pair accepts little: measures it beside its card, then with one change at a time.

    It tries the other thinking mode, prompts with and without the chat template, target layers off by one,
    other mask tokens, the target's rope and other dtypes, and says in order what helps and what that gains.
    """
    if output is not None:
        check_output(output, overwrite)
    asked = None if prompts is None else loading.read_prompts(prompts)[:limit]
    pair = loading.load_pair(target, drafter, dtype, device, trust_remote_code)

    from dflash.checkpoints import read_card
    from dflash.common.provenance import public_name, write_result
    from dflash.evaluation import DOCTORS_PROMPTS, Setup, run_doctor

    try:
        card = read_card(drafter)
    except ValueError as error:
        card = None
        loading.say_once(str(error))
    result = run_doctor(
        pair.target,
        Setup(pair.drafter, chat_template, thinking),
        pair.tokenizer,
        asked or [[{"role": "user", "content": text}] for text in DOCTORS_PROMPTS],
        max_new_tokens,
        card,
        {"target": public_name(target), "drafter": public_name(drafter)},
        lambda trials: bar(trials, "Trying"),
    )
    if as_json:
        print(json.dumps(result))
    else:
        _show(result)
    if output is not None:
        write_result(output, result)


def _show(result: dict[str, Any]) -> None:
    """The trials, what the card says, and what to do."""
    console, decoding, setup = Console(highlight=False), result["decoding"], result["environment"]
    facts = (
        f"{counted(decoding['prompts'], 'prompt')}, {counted(result['summary'][0]['steps'], 'step')}, greedy, "
        f"{setup['target_dtype']}, thinking "
        f"{'on' if decoding['enable_thinking'] else 'off'}, {'the' if decoding['chat_template'] else 'no'} chat template"
    )
    console.print(Text.assemble((f"{decoding['target']} with {decoding['drafter']}", "bold"), (f"  {facts}", "dim")))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("change", overflow="fold")
    table.add_column("tau", justify="right")
    last = setup["block_size"] - 1
    places = [place for place in (1, 2, 4, 8) if place < last] + [last]
    for place in places:
        table.add_column(f"at {place}", justify="right", no_wrap=True)
    for before, row in pairwise([{"after": []}, *result["summary"]]):
        if row["after"] != before["after"]:
            table.add_row(Text(f"with {row['after'][-1]}:", "bold"))
        change = f"{'  ' * len(row['after'])}{row['change'] or 'as it is'}"
        if row["tau"] is None:
            table.add_row(f"{change} ({row['error']})", "-")
            continue
        figures = [row["accepted_at"][place - 1 : place] for place in places]
        table.add_row(change, f"{row['tau']:.2f}", *(f"{100 * one[0]:.0f} %" if one else "" for one in figures))
    console.print(table)
    console.print(
        Text("at N: of the steps that propose a token at position N of the block, those that keep it", "dim")
    )
    said = ", ".join(f"{one['tau']:.2f} ({one['measured_on']})" for one in result["published"])
    console.print(f"Published tau: {said or 'the card states none'}")
    for sentence in result["observations"]:
        console.print(Text.assemble(("! ", "yellow"), sentence))
    for number, one in enumerate(result["advice"], start=1):
        gain = f"tau {one['tau_before']:.2f} → {one['tau']:.2f}"
        console.print(Text.assemble((f"{number}. {one['change']}: {gain}", "bold green"), f"  ({one['reason']})"))
    if not result["advice"]:
        console.print("Nothing tried does better.", style="bold")
