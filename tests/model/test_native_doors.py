"""Every door of transformers opens on the same pair: `generate`, its assistant, pipelines, streamers, threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from distributions import (
    DEPTH,
    PROMPT,
    HabitDrafter,
    drawn_cells,
    exact_distribution,
    leaning,
    make_distribution_target,
    p_value,
)
from tiny_models import (
    PAD_TOKEN_ID,
    CollectingStreamer,
    ScriptedDrafter,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
    make_tokenizer,
    num_hooks,
)
from transformers import (
    AsyncTextIteratorStreamer,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    TextIteratorStreamer,
    pipeline,
)

from dflash import DFlashDraftModel, custom_generate, generate_blocks, spec_generate


needs_native = pytest.mark.skipif(
    not hasattr(GenerationConfig(), "speculation_type"), reason="this transformers has no DFlash of its own (5.15 has)"
)
SHALLOW_DRAFTER = {"num_hidden_layers": 1, "num_target_layers": 2, "target_layer_ids": [0]}
SCRIPT = [5, 0, 3, 1]
NEW_TOKENS = 20


@cache
def target_of(kind: str = "qwen3") -> PreTrainedModel:
    """One shallow target of every kind; read-only."""
    overrides = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "qwen3_sliding" else {}
    return make_target(kind, num_hidden_layers=2, **overrides)


def scripted(target: PreTrainedModel, *prompts: torch.Tensor, **options: Any) -> ScriptedDrafter:
    """A drafter that knows what `target` writes after the prompts and is wrong now and then."""
    truths = [greedy(target, prompt, max_new_tokens=NEW_TOKENS + 8, **options) for prompt in prompts]
    return ScriptedDrafter(target, truths, SCRIPT, **SHALLOW_DRAFTER)


def two_prompts() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Two prompts, and both as one batch with its mask."""
    prompts = [make_prompt(9, seed=4), make_prompt(6, seed=5)]
    ids = torch.cat([prompts[0], torch.nn.functional.pad(prompts[1], (3, 0), value=PAD_TOKEN_ID)])
    return prompts, {"input_ids": ids, "attention_mask": (ids != PAD_TOKEN_ID).long()}


# Native: the target's own `generate` with our drafter as its assistant.


@needs_native
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "llama"])
def test_native_greedy_equals_plain_generate(kind: str) -> None:
    """Promise: an unchanged drafter of ours runs in the native loop; what it accepts, ours accepts."""
    target, prompt = target_of(kind), make_prompt()
    drafter = scripted(target, prompt)
    expected = greedy(target, prompt, max_new_tokens=NEW_TOKENS)
    native = greedy(target, prompt, max_new_tokens=NEW_TOKENS, assistant_model=drafter, speculation_type="dflash")
    assert torch.equal(native, expected)
    blocks_drafted = drafter.num_blocks
    ours = spec_generate(drafter, target, prompt, temperature=0.0, max_new_tokens=NEW_TOKENS)
    assert torch.equal(ours, expected)
    assert blocks_drafted < NEW_TOKENS - 1, "nothing was accepted"


@needs_native
def test_native_sampled_has_the_distribution_of_plain_generate() -> None:
    """Promise: at a temperature the distribution is the target's, by enumeration; a planted bias fails the same test."""
    target = make_distribution_target()
    drafter = HabitDrafter(target)
    distribution = exact_distribution(target, PROMPT, LogitsProcessorList())
    options = {"do_sample": True, "max_new_tokens": DEPTH, "assistant_model": drafter, "speculation_type": "dflash"}

    def generate(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return target.generate(PROMPT, **options)

    assert p_value(drawn_cells(generate, range(180)), distribution) > 1e-3
    with leaning(target, strength=8.0):
        assert p_value(drawn_cells(generate, range(150)), distribution) < 1e-5


# The loop behind the target's own `generate`.


def test_custom_generate_equals_plain_generate() -> None:
    """Promise: the callable gives `target.generate` the same text, for a batch, with statistics where asked for."""
    target = target_of()
    prompts, batch = two_prompts()
    drafter = scripted(target, *prompts, repetition_penalty=1.2)
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "repetition_penalty": 1.2}
    expected = target.generate(**batch, **options)
    door: dict[str, Any] = {"custom_generate": custom_generate, "drafter": drafter}
    assert torch.equal(target.generate(**batch, **options, **door), expected)
    output = target.generate(**batch, **options, **door, return_dict_in_generate=True)
    assert torch.equal(output.sequences, expected)
    assert output.tau > 1


def test_custom_generate_samples_what_spec_generate_samples() -> None:
    """Promise: one loop behind both doors: the same noise, the same texts."""
    target, drafter, prompt = target_of(), make_drafter(**SHALLOW_DRAFTER), make_prompt()
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.2, "top_k": 20, "max_new_tokens": 10}
    texts = [
        spec_generate(drafter, target, prompt, generator=torch.Generator().manual_seed(3), **options),
        target.generate(
            prompt, custom_generate=custom_generate, drafter=drafter,
            uniforms_generator=torch.Generator().manual_seed(3), **options,
        ),
    ]  # fmt: skip
    assert torch.equal(*texts)


# Pipelines.


def written_by(ways: list[dict[str, Any]], text: Any, **options: Any) -> list[Any]:
    """What a text-generation pipeline writes after `text`: plainly, and in each of `ways`."""
    writer = pipeline("text-generation", model=make_target(num_hidden_layers=2), tokenizer=make_tokenizer())
    writer.tokenizer.padding_side = "left"
    settings = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": PAD_TOKEN_ID, "return_full_text": False}
    return [writer(text, **settings, **options, **way) for way in ({}, *ways)]


def test_a_pipeline_writes_through_the_loop() -> None:
    """Promise: `pipeline(…)(text, custom_generate=…)` is the pipeline's own text, one prompt or several."""
    prompts = [make_tokenizer()(text, return_tensors="pt")["input_ids"] for text in ("how many", "7 and 8?")]
    way = {"custom_generate": custom_generate, "drafter": scripted(target_of(), *prompts)}
    plain, ours = written_by([way], ["how many", "7 and 8?"], batch_size=2)
    assert plain == ours
    assert len(ours) == 2
    assert all(len(row[0]["generated_text"]) > 3 for row in ours)


@needs_native
def test_a_pipeline_writes_natively() -> None:
    """Promise: the drafter as a pipeline's assistant."""
    prompt = make_tokenizer()("how many", return_tensors="pt")["input_ids"]
    way = {"assistant_model": scripted(target_of(), prompt), "speculation_type": "dflash"}
    plain, native = written_by([way], "how many")
    assert plain == native


# Streams.


def decoded(target: PreTrainedModel, prompt: torch.Tensor) -> str:
    """The new text that plain `generate` writes."""
    sequences = greedy(target, prompt, max_new_tokens=NEW_TOKENS)
    return make_tokenizer().decode(sequences[0, prompt.shape[1] :], skip_special_tokens=True)


def streaming_thread(drafter: DFlashDraftModel, target: PreTrainedModel, prompt: torch.Tensor, streamer: Any) -> Any:
    """A started thread that generates into `streamer`."""
    options = {"streamer": streamer, "temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    thread = threading.Thread(target=spec_generate, args=(drafter, target, prompt), kwargs=options)
    thread.start()
    return thread


def test_a_streamer_of_generate_streams_through_the_custom_loop() -> None:
    """Known bug: `generate` keeps its streamer from a custom loop, so nothing was streamed and a reader waited forever."""
    target, prompt = target_of(), make_prompt()
    asked = {"custom_generate": custom_generate, "drafter": scripted(target, prompt), "do_sample": False}
    asked["max_new_tokens"] = NEW_TOKENS
    plain, ours = CollectingStreamer(), CollectingStreamer()
    greedy(target, prompt, max_new_tokens=NEW_TOKENS, streamer=plain)
    target.generate(prompt, streamer=ours, **asked)
    assert ours.token_ids == plain.token_ids  # the prompt once, each token once, and the end
    wrapped = CollectingStreamer()
    through = {**asked, "custom_generate": wrapped_loop}
    target.generate(prompt, streamer=wrapped, **through)
    assert wrapped.token_ids == plain.token_ids
    with pytest.raises(ValueError, match="streamer came with token_streamer"):
        target.generate(prompt, streamer=ours, token_streamer=plain, **asked)


def wrapped_loop(model: PreTrainedModel, input_ids: torch.Tensor, drafter: DFlashDraftModel, **kwargs: Any) -> Any:
    """A loop of a user's own around the library's."""
    return custom_generate(model, input_ids, drafter=drafter, **kwargs)


def test_two_iterators_stream_from_one_target_at_once() -> None:
    """Promise: a `TextIteratorStreamer` read while a thread generates yields the text, whoever else uses the target."""
    target = target_of()
    prompts, _ = two_prompts()
    streamers = [TextIteratorStreamer(make_tokenizer(), skip_prompt=True, timeout=120, skip_special_tokens=True) for _ in prompts]  # fmt: skip
    threads = [
        streaming_thread(scripted(target, prompt), target, prompt, streamer)
        for prompt, streamer in zip(prompts, streamers, strict=True)
    ]
    texts = ["".join(streamer) for streamer in streamers]
    for thread in threads:
        thread.join()
    assert texts == [decoded(target, prompt) for prompt in prompts]


@pytest.mark.skipif(
    not hasattr(asyncio, "timeout"), reason="transformers' streamer needs asyncio.timeout (Python 3.11)"
)
def test_an_async_iterator_streams() -> None:
    """Promise: the same in an event loop."""
    target, prompt = target_of(), make_prompt()

    async def read() -> str:
        streamer = AsyncTextIteratorStreamer(make_tokenizer(), skip_prompt=True, timeout=120, skip_special_tokens=True)
        thread = streaming_thread(scripted(target, prompt), target, prompt, streamer)
        text = "".join([piece async for piece in streamer])
        thread.join()
        return text

    assert asyncio.run(read()) == decoded(target, prompt)


class Leaves:
    """A streamer whose reader goes away after a few tokens."""

    def __init__(self, after: int) -> None:
        self.left = after

    def put(self, value: torch.Tensor) -> None:
        self.left -= value.numel()
        if self.left < 0:
            raise ConnectionError("the reader is gone")

    def end(self) -> None:
        pytest.fail("the text did not end")


def test_a_reader_that_goes_away_leaves_the_target_as_it_was() -> None:
    """Promise: what a streamer raises comes out; no hook stays, and the next text is right."""
    target, prompt = target_of(), make_prompt()
    before, drafter = num_hooks(target), scripted(target, prompt)
    options = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS}
    with pytest.raises(ConnectionError, match="gone"):
        spec_generate(drafter, target, prompt, streamer=Leaves(prompt.shape[1] + 4), **options)
    assert num_hooks(target) == before
    assert torch.equal(
        spec_generate(drafter, target, prompt, **options), greedy(target, prompt, max_new_tokens=NEW_TOKENS)
    )


# Threads.


@contextmanager
def meeting_inside(target: PreTrainedModel, num_threads: int) -> Iterator[Callable[[], None]]:
    """Every forward waits inside the target until all threads are there; what it yields sends a thread home."""
    barrier = threading.Barrier(num_threads)
    meetings: list[int] = []

    def wait(*_: Any) -> None:
        if not barrier.broken:
            try:
                meetings.append(barrier.wait(timeout=120))
            except threading.BrokenBarrierError:
                return  # another thread is done: from here on this one runs alone

    handle = target.model.layers[1].register_forward_pre_hook(wait)
    try:
        yield barrier.abort
    finally:
        handle.remove()
    assert len(meetings) >= 5 * num_threads, "the forwards did not overlap"


def test_forwards_that_overlap_mix_neither_features_nor_caches() -> None:
    """Known trap: hooks on a shared target catch another thread's states. Here every two forwards do overlap.

    The drafters are random, and over few words right now and then; what they are given is compared too, number by number.
    """
    target = make_target(vocab_size=8, num_hidden_layers=2)
    shape = {**SHALLOW_DRAFTER, "vocab_size": 8, "mask_token_id": 7}
    prompts = [make_prompt(length, seed=length, vocab_size=8) for length in (7, 4)]
    drafters = [make_drafter(7, **shape) for _ in prompts]

    def steps(place: int) -> list[Any]:
        """What is written, step by step, and what the drafter read for it."""
        seen: list[Any] = []
        handle = drafters[place].register_forward_pre_hook(
            lambda module, args, kwargs: seen.append(kwargs["context_hidden_states"].tolist()), with_kwargs=True
        )
        for block in generate_blocks(drafters[place], target, prompts[place], temperature=0.0, max_new_tokens=40):
            seen.append((block.token_ids, block.num_accepted))
        handle.remove()
        return seen

    alone = [steps(place) for place in range(2)]
    together: list[Any] = [None, None]
    with meeting_inside(target, 2) as go_home:

        def work(place: int) -> None:
            try:
                together[place] = steps(place)
            finally:
                go_home()

        threads = [threading.Thread(target=work, args=(place,)) for place in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == alone


def test_texts_read_by_turns_do_not_mix() -> None:
    """Promise: two generators of blocks on one target and one drafter may be read alternately."""
    target = target_of()
    prompts, _ = two_prompts()
    drafter = make_drafter(**SHALLOW_DRAFTER)
    readers = [
        generate_blocks(drafter, target, prompt, temperature=0.0, max_new_tokens=NEW_TOKENS) for prompt in prompts
    ]
    texts: list[list[int]] = [[], []]
    while any(len(text) < NEW_TOKENS for text in texts):
        for reader, text in zip(readers, texts, strict=True):
            block = next(reader, None)
            text += block.token_ids if block else []
    for prompt, text in zip(prompts, texts, strict=True):
        assert text == greedy(target, prompt, max_new_tokens=NEW_TOKENS)[0, prompt.shape[1] :].tolist()
