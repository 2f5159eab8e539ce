"""A page that streams every answer twice: first the target alone, then DFlash with the accepted tokens of each block.

    python examples/space/app.py

Needs the extra `space`. The page opens with the embedded pair, which needs no download; another pair is loaded on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache, partial
from math import isnan
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Semaphore
from time import perf_counter
from typing import Any
from weakref import WeakSet

import gradio as gr
import torch
import view

from dflash.checkpoints import heldout_problems, load_embedded_pair
from dflash.cli.arguments import ModelOptions
from dflash.cli.loading import Pair, checked_prompt, dtype_name, encode, load_pair
from dflash.common.hub import ask_hub_again
from dflash.common.messages import OWN_CODE, as_sentence
from dflash.evaluation import TimedRun, first_difference, timed_blocks, timed_generate
from dflash.model.targets_dflash import max_positions


MAX_PROMPT_TOKENS = 4096
# A text with more characters per token than this is over the limit in any tokenizer: it is refused without tokenizing it.
MAX_CHARACTERS_PER_TOKEN = 64
SECONDS_PER_FRAME = 0.05
VISITORS_IN_LINE = 32
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
# One thread decodes all answers, so that it stays warm.
DECODER = ThreadPoolExecutor(1)
# One pair is loaded at a time.
LOADING = Lock()
EMBEDDED = Pair(*load_embedded_pair())
# Drafters that have decoded.
WARM: WeakSet[Any] = WeakSet()


class VisitorLeft(Exception):
    """Ends the decode of a visitor who left."""


def load(target: str, drafter: str) -> Pair:
    """A pair by folders or Hub ids; the embedded pair if both are empty. ValueError if one cannot be loaded."""
    if bool(target) != bool(drafter):
        raise ValueError("Target and drafter go together: name both, or neither for the embedded pair.")
    return load_named(target, drafter) if target else EMBEDDED


@lru_cache(maxsize=1)  # the last pair stays loaded
def load_named(target: str, drafter: str) -> Pair:
    with LOADING:
        ask_hub_again()
        return load_pair(target, drafter, ModelOptions())


def warm_up(pair: Pair) -> None:
    """Decodes a few tokens if the pair has decoded none yet. ValueError if the two do not match."""
    if pair.drafter in WARM:
        return
    input_ids = encode(pair, "Hello.")
    timed_blocks(pair.drafter, pair.target, input_ids, max_new_tokens=24, temperature=0.0)
    timed_generate(pair.target, input_ids, max_new_tokens=8, **GREEDY)
    WARM.add(pair.drafter)


def read(pair: Pair, prompt: str) -> torch.Tensor:
    """The prompt's ids [1, S] in the chat template; ValueError if there is no text, or too much."""
    limit = min(MAX_PROMPT_TOKENS, (max_positions(pair.target) or MAX_PROMPT_TOKENS + 1) - 1)
    input_ids = encode(pair, checked_prompt(prompt[: MAX_CHARACTERS_PER_TOKEN * limit]))
    if input_ids.shape[1] > limit or len(prompt) > MAX_CHARACTERS_PER_TOKEN * limit:
        raise ValueError(
            f"The prompt ({len(prompt):,} characters) is longer than {limit:,} tokens, the most that this page gives this "
            "target: shorten it."
        )
    return input_ids


def fetch(target: str, drafter: str) -> Iterator[tuple[str, str]]:
    """Loads a pair before its visitor stands in line, where that would hold up others: the page, and why it failed."""
    waiting, refusal = view.page(note="Loading the pair…"), ""
    yield waiting, refusal
    try:
        load(target.strip(), drafter.strip())
    except Exception as error:
        refusal = refusal_of(error)
    yield waiting, refusal


def answer(prompt: str, target: str, drafter: str, max_new_tokens: int, refusal: str = "") -> Iterator[str]:
    """Frames of the page: first the target's own answer, then DFlash's. A refusal is one sentence."""
    if refusal:
        yield view.problem(refusal)
        return
    try:
        pair = load(target.strip(), drafter.strip())
        DECODER.submit(warm_up, pair).result()
        input_ids = read(pair, prompt)
        yield from race(pair, input_ids, max_new_tokens)
    except Exception as error:
        yield view.problem(refusal_of(error))


def refusal_of(error: Exception) -> str:
    """What a visitor is told of an error, which is raised again if it is a bug."""
    if isinstance(error, torch.OutOfMemoryError):
        return "The device is out of memory: take a smaller pair or a shorter prompt."
    sentence = as_sentence(error)
    if sentence is None:
        raise error
    if OWN_CODE in sentence:
        return "This page runs no code of a checkpoint: name a pair that holds none."
    return sentence.removeprefix("--")


def race(pair: Pair, input_ids: torch.Tensor, max_new_tokens: int) -> Iterator[str]:
    """Both decoders, one after the other, so that each has the machine to itself."""
    positions = max_positions(pair.target)
    if positions is not None:
        max_new_tokens = min(max_new_tokens, positions - input_ids.shape[1])
    note = view.setup(pair.drafter.config.block_size, dtype_name(pair), device_name(pair.target.device))
    plain, fast = view.Answer(pair.tokenizer), view.Answer(pair.tokenizer)
    generate = partial(timed_generate, pair.target, input_ids, max_new_tokens=max_new_tokens, **GREEDY)
    plain_run = yield from streamed(generate, plain, plain.add_tokens, lambda: view.page(plain, note=note))
    blocks = partial(
        timed_blocks, pair.drafter, pair.target, input_ids, max_new_tokens=max_new_tokens, temperature=0.0
    )
    fast_run = yield from streamed(blocks, fast, fast.add_block, lambda: view.page(plain, fast, note=note))

    parts = first_difference(pair.target, input_ids, plain_run.token_ids, fast_run.token_ids)
    if parts is None:
        verdict = f"Identical: both sides wrote the same {len(fast_run.token_ids)} tokens."
    else:
        apart = "one of them ends" if isnan(parts.margin) else f"the target's two logits are {parts.margin:.2g} apart"
        verdict = f"The texts differ from token {parts.index + 1} on, where {apart}."
    yield view.page(plain, fast, verdict, note)


def streamed(
    run: Callable[..., TimedRun], answer: view.Answer, add: Callable[[Any], None], draw: Callable[[], str]
) -> Generator[str, None, TimedRun]:
    """Yields frames of `answer` while `run` fills it through `add`, and returns what it returns.

    `run` computes only while the reader waits for the next frame, so drawing is not counted. Closing the generator ends
    the decode at the next token.
    """
    frames: SimpleQueue[str | None] = SimpleQueue()
    turn = Semaphore(0)
    is_closed = False
    resumed = drawn = perf_counter()

    def listen(piece: Any) -> None:
        nonlocal resumed, drawn
        now = perf_counter()
        answer.seconds += now - resumed
        add(piece)
        if len(answer.steps) == 1 or now - drawn > SECONDS_PER_FRAME:
            frames.put(draw())
            turn.acquire()
            drawn = perf_counter()
        if is_closed:
            raise VisitorLeft
        resumed = perf_counter()

    future = DECODER.submit(run, listen)
    future.add_done_callback(lambda _: frames.put(None))
    try:
        while (frame := frames.get()) is not None:
            yield frame
            turn.release()
    finally:
        is_closed = True
        turn.release()
        wait([future])
    done = future.result()
    answer.end(done.seconds)
    return done


def device_name(device: torch.device) -> str:
    """The device of a model, in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{threads} CPU thread{'s' * (threads > 1)}" if device.type == "cpu" else str(device)


# Gradio serves the font itself: nothing is fetched from elsewhere.
FONTS = [gr.themes.LocalFont("Source Sans Pro", weights=(400, 700)), "system-ui", "sans-serif"]
PROBLEMS = [problem.question for problem in heldout_problems()[:4]]

with gr.Blocks(title="DFlash, side by side", analytics_enabled=False) as demo:
    gr.HTML(view.HEAD)
    prompt = gr.Textbox(PROBLEMS[0], label="Prompt", lines=3, max_lines=8, elem_id="prompt")
    gr.Examples([[question] for question in PROBLEMS], prompt, label="Word problems that the embedded pair never saw")
    with gr.Accordion("Another pair, another length", open=False):
        gr.Markdown(
            "Hub ids or folders, both or none. With none, the page uses the pair inside the package, which knows word problems."
        )
        with gr.Row():
            target = gr.Textbox("", label="Target", placeholder="Qwen/Qwen3-4B", elem_id="target")
            drafter = gr.Textbox("", label="Drafter", placeholder="z-lab/Qwen3-4B-DFlash-b16", elem_id="drafter")
        max_new_tokens = gr.Slider(16, 512, 192, step=16, label="Longest answer, in tokens")
    with gr.Row():
        write = gr.Button("Write it twice", variant="primary", scale=4, elem_id="write")
        stop = gr.Button("Stop", scale=1, min_width=90, elem_id="stop")
    line = gr.HTML(view.LINE, elem_id="line")  # under the place in the queue
    result = gr.HTML(view.page(), elem_id="result")
    refusal = gr.State("")
    asked = [write.click, prompt.submit]
    loaded = {"show_progress": "hidden", "concurrency_limit": None}
    fetching = gr.on(asked, fetch, [target, drafter], [result, refusal], **loaded)
    writing = fetching.then(
        answer,
        [prompt, target, drafter, max_new_tokens, refusal],
        result,
        show_progress="minimal",
        show_progress_on=line,
        concurrency_limit=1,
    )
    stop.click(view.stopped, result, result, cancels=[fetching, writing], show_progress="hidden")


def serve(**kwargs: Any) -> Any:
    """Starts the server; visitors wait in line, one answer is written at a time."""
    here = Path(__file__).parent
    DECODER.submit(warm_up, load("", "")).result()  # the first visitor finds the embedded pair warm
    return demo.queue(max_size=VISITORS_IN_LINE).launch(
        theme=gr.themes.Default(primary_hue="blue", neutral_hue="slate", font=FONTS),
        css_paths=here / "style.css",
        footer_links=["gradio", "settings"],
        ssr_mode=False,
        **kwargs,
    )


if __name__ == "__main__":
    serve()
