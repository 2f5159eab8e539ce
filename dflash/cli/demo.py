"""`dflash demo`: the embedded pair answers word problems, plainly and with DFlash."""

from typing import Annotated, Any

from rich.console import Console
from rich.text import Text

from .arguments import DtypeName, option
from .loading import Pair, checked_prompt, encode, hide_loading_bars
from .terminal import BlockPrinter, Comparison, comparison_table, legend, progress_bar, show_facts


def demo(
    prompts: Annotated[int, option("How many held-out problems to answer.", min=1, metavar="N")] = 3,
    prompt: Annotated[str | None, option("Answer this text instead.", metavar="TEXT")] = None,
    max_new_tokens: Annotated[int, option("Longest answer, in tokens.", min=1, metavar="N")] = 256,
    domino: Annotated[bool, option("Draft with Domino's head, which chooses token by token.", "--domino")] = False,
    dtype: Annotated[
        DtypeName, option("float32 is exact; in bfloat16 a near-tie can flip.", metavar="NAME")
    ] = "float32",
) -> None:
    """Answers word problems with the embedded tiny pair, plainly and with DFlash, and compares. Needs no download."""
    with progress_bar("Loading the embedded pair", num_steps=3) as advance:
        hide_loading_bars()
        from dflash.checkpoints import DOMINO_NAME, DRAFTER_NAME, heldout_problems, load_embedded_pair

        advance()
        problems = heldout_problems()
        if prompts > len(problems):
            raise ValueError(
                f"--prompts {prompts}: there are {len(problems)} problems; ask for at most {len(problems)}."
            )
        pair = Pair(*load_embedded_pair(dtype, DOMINO_NAME if domino else DRAFTER_NAME))
        advance()
        texts = [problem.question for problem in problems[:prompts]]
        if prompt is not None:
            texts = [checked_prompt(prompt)]
        inputs = [encode(pair, text) for text in texts]
        warm_up(pair, inputs[0])
    show_comparison(pair, texts, inputs, max_new_tokens)


def warm_up(pair: Pair, input_ids: Any) -> None:
    """Decodes a few tokens in both ways, so that neither measured run includes what happens only once."""
    from dflash.evaluation import GREEDY, timed_blocks, timed_generate

    timed_generate(pair.target, input_ids, max_new_tokens=8, **GREEDY)
    timed_blocks(pair.drafter, pair.target, input_ids, max_new_tokens=24, temperature=0.0)


def show_comparison(pair: Pair, texts: list[str], inputs: list[Any], max_new_tokens: int) -> None:
    """Answers each prompt plainly, then with DFlash, and streams both texts. Prints the table at the end."""
    from dflash.common.provenance import environment

    console = Console(highlight=False)
    console.print(legend(console))
    rows = []
    for text, input_ids in zip(texts, inputs, strict=True):
        console.print(Text(f"\n{text.strip()}", "bold"))
        rows.append(_compare(console, pair, input_ids, max_new_tokens))
    console.print()
    console.print(comparison_table(rows))
    num_identical = sum(row.difference is None for row in rows)
    differing = [] if num_identical == len(rows) else [{"identical": num_identical}]
    facts = {
        "environment": environment(pair.target, pair.drafter),
        "decoding": {"max_new_tokens": max_new_tokens},
        "summary": differing,
    }
    show_facts(facts)


def _compare(console: Console, pair: Pair, input_ids: Any, max_new_tokens: int) -> Comparison:
    """Answers one prompt in both ways, streams the texts, and returns the comparison."""
    from dflash.evaluation import GREEDY, first_difference, timed_blocks, timed_generate

    limit = {"max_new_tokens": max_new_tokens}
    console.print(Text("\ntarget.generate", "dim"))
    printer = BlockPrinter(console, pair.tokenizer)
    plain = timed_generate(pair.target, input_ids, on_tokens=printer.tokens, **limit, **GREEDY)
    printer.end()
    console.print(Text("\nDFlash", "dim"))
    printer = BlockPrinter(console, pair.tokenizer)
    fast = timed_blocks(pair.drafter, pair.target, input_ids, printer.block, temperature=0.0, **limit)
    printer.end()
    return Comparison(plain, fast, first_difference(pair.target, input_ids, plain.token_ids, fast.token_ids))
