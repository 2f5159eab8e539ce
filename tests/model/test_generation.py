"""The loop's promises: the target's own text at every acceptance length, stops, streams, threads, and the sampled distribution."""

from __future__ import annotations

import logging
import math
import threading
from functools import partial
from typing import Any

import pytest
import torch
from distributions import (
    DEPTH,
    PROMPT,
    HabitDrafter,
    drawn_cells,
    exact_distribution,
    make_distribution_target,
    p_value,
    prepared_processors,
)
from tiny_models import (
    BLOCK_SIZE,
    MASK_TOKEN_ID,
    PAD_TOKEN_ID,
    SMALL,
    TARGET_KINDS,
    WRONG_OFFSET,
    counted_forwards,
    expected_lengths,
    greedy,
    make_prompt,
    make_tokenizer,
    num_hooks,
    plain_loop,
    remembered_greedy,
)
from tiny_models import ScriptedDrafter as AnyScriptedDrafter
from tiny_models import make_drafter as any_drafter
from tiny_models import make_target as any_target
from transformers import (
    BatchEncoding,
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from dflash import DFlashDraftModel, DFlashOutput, generate_blocks, spec_generate
from dflash.model import acceptance_dflash, decoding_dflash, drafting_dflash
from dflash.model.sampling_dflash import PositionUniforms, choose_sampled


# Two layers below one: what is shown here does not depend on how many there are.
ScriptedDrafter = partial(AnyScriptedDrafter, **SMALL)
make_drafter = partial(any_drafter, **SMALL)
SEEDS = {"qwen3": 60, "qwen3_tied": 15}  # whose texts are varied
N = BLOCK_SIZE
EVERY_SCRIPT = [[accepted] for accepted in range(N)] + [[0, 5, 1, 4, 2, 3], [5, 0, 0, 3]]
MIXED = [2, 0, 5, 1]


def make_target(kind: str) -> PreTrainedModel:
    """A target of two layers."""
    windows = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "qwen3_sliding" else {}
    return any_target(kind, SEEDS.get(kind), num_hidden_layers=2, **windows)


@pytest.fixture(scope="module")
def targets() -> dict[str, PreTrainedModel]:
    """One target of every kind; read-only."""
    return {kind: make_target(kind) for kind in TARGET_KINDS}


@pytest.fixture(scope="module")
def tiny_target(targets: dict[str, PreTrainedModel]) -> PreTrainedModel:
    return targets["qwen3"]


@pytest.fixture(scope="module")
def tiny_drafter() -> DFlashDraftModel:
    return make_drafter()


@pytest.fixture(scope="module")
def truth(tiny_target: PreTrainedModel, prompt_ids: torch.Tensor) -> torch.Tensor:
    """What `tiny_target` writes greedily, longer than any test asks for."""
    return greedy(tiny_target, prompt_ids, max_new_tokens=60)


def run(drafter: Any, target: Any, prompt_ids: Any, **kwargs: Any) -> DFlashOutput:
    """`spec_generate`, greedy unless told, with statistics."""
    kwargs = {"max_new_tokens": 30, "temperature": 0.0, **kwargs}
    return drafter.spec_generate(input_ids=prompt_ids, target=target, return_dict_in_generate=True, **kwargs)


# Greedy: the target's own text.


@pytest.mark.parametrize("script", EVERY_SCRIPT, ids=str)
@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_output_equals_greedy_for_every_acceptance_length(
    targets: dict[str, PreTrainedModel], prompt_ids: torch.Tensor, kind: str, script: list[int]
) -> None:
    """Promise: lossless whatever is accepted, and the statistics say what was.

    A random drafter accepts nothing and exercises no rollback; here every length occurs, on tied and untied heads, on rope
    scaling and on windows of 5 positions (a stock cache of transformers cannot roll those back).
    """
    target = targets[kind]
    expected = remembered_greedy(target, prompt_ids, max_new_tokens=40)
    output = run(ScriptedDrafter(target, expected, script), target, prompt_ids)
    assert torch.equal(output.sequences, expected[:, :-10])
    assert output.acceptance_lengths == [expected_lengths(script, 30)]


@pytest.mark.parametrize("script", [[0], [3], [N - 1]], ids=str)
@pytest.mark.parametrize("max_new_tokens", [1, 2, N - 1, N, N + 1, 2 * N])
def test_length_limit_around_a_block(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor, max_new_tokens: int, script: list[int]
) -> None:
    """Promise: exactly `max_new_tokens` tokens, also where the limit cuts a block."""
    output = run(ScriptedDrafter(tiny_target, truth, script), tiny_target, prompt_ids, max_new_tokens=max_new_tokens)
    assert torch.equal(output.sequences, truth[:, : prompt_ids.shape[1] + max_new_tokens])
    assert output.acceptance_lengths == [expected_lengths(script, max_new_tokens)]


def test_max_length_counts_the_prompt(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: `max_length` means what it means to `generate`: prompt and new tokens."""
    drafter = ScriptedDrafter(tiny_target, truth, MIXED)
    text = drafter.spec_generate(input_ids=prompt_ids, target=tiny_target, temperature=0.0, max_length=20)
    assert torch.equal(text, truth[:, :20])


@pytest.mark.parametrize("block_size", range(2, N + 1))
def test_smaller_blocks_write_the_same(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor, block_size: int
) -> None:
    """Promise: `block_size` changes speed alone."""
    output = run(ScriptedDrafter(tiny_target, truth, MIXED), tiny_target, prompt_ids, block_size=block_size)
    assert torch.equal(output.sequences, truth[:, : prompt_ids.shape[1] + 30])
    assert output.acceptance_lengths == [expected_lengths(MIXED, 30, block_size)]


@pytest.mark.parametrize("prompt_length", [1, 2, 40])
def test_prompt_lengths(tiny_target: PreTrainedModel, prompt_length: int) -> None:
    """Promise: one token of prompt is enough; a long one is no other path."""
    prompt = make_prompt(prompt_length, seed=5)
    expected = greedy(tiny_target, prompt)
    assert torch.equal(run(ScriptedDrafter(tiny_target, expected, MIXED), tiny_target, prompt).sequences, expected)


def test_cache_grows_past_its_first_room(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the preallocated room is no limit on the text."""
    monkeypatch.setattr(decoding_dflash, "INITIAL_NEW_TOKENS", 3)
    expected = greedy(tiny_target, prompt_ids, max_new_tokens=50)
    output = run(ScriptedDrafter(tiny_target, expected, MIXED), tiny_target, prompt_ids, max_new_tokens=50)
    assert torch.equal(output.sequences, expected)


def test_emitted_token_equal_to_the_mask_id_survives(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Known bug (z-lab's loop before April 2026, SpecForge still): real tokens equal to the mask id were dropped."""
    mask_token_id = int(truth[0, prompt_ids.shape[1] + 2])
    drafter = ScriptedDrafter(tiny_target, truth, [N - 1], mask_token_id=mask_token_id)
    output = run(drafter, tiny_target, prompt_ids)
    assert mask_token_id in output.sequences[0, prompt_ids.shape[1] :]
    assert torch.equal(output.sequences, truth[:, : output.sequences.shape[1]])
    assert output.sequences.shape[1] == prompt_ids.shape[1] + 30


def test_training_mode_of_the_caller_is_kept(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: generating has no side effect on the models' modes, and records no gradient."""
    drafter = ScriptedDrafter(tiny_target, truth, MIXED).train()
    text = drafter.spec_generate(input_ids=prompt_ids, target=tiny_target, temperature=0.0, max_new_tokens=8)
    assert drafter.training
    assert not text.requires_grad
    assert all(parameter.grad is None for parameter in drafter.parameters())


def test_bf16_drafter_serves_an_fp32_target(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Known trap: transformers 5 loads a drafter in bf16, and matmuls of two dtypes raise."""
    drafter = ScriptedDrafter(tiny_target, truth, MIXED).to(torch.bfloat16)
    output = run(drafter, tiny_target, prompt_ids)
    assert torch.equal(output.sequences, truth[:, : prompt_ids.shape[1] + 30])
    assert output.acceptance_lengths == [expected_lengths(MIXED, 30)]


def test_bf16_text_is_the_argmax_of_the_forward_that_committed_it(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise in bf16, where a near-tie can flip between forwards: every token is the argmax of its own forward."""
    target = make_target("qwen3").to(torch.bfloat16)
    argmaxes: list[torch.Tensor] = []
    forward = type(target).forward

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        argmaxes.append(output.logits[0].argmax(dim=-1))
        return output

    monkeypatch.setattr(type(target), "forward", record)
    drafter = ScriptedDrafter(target, truth, MIXED)
    blocks = list(generate_blocks(drafter, target, prompt_ids, temperature=0.0, max_new_tokens=30))
    for block, argmax in zip(blocks, argmaxes, strict=True):
        assert block.token_ids == argmax[-(block.num_proposals + 1) :][: len(block.token_ids)].tolist()


# Stops.


@pytest.mark.parametrize("place", range(1, N + 2))
def test_stop_token_at_each_place_of_a_block(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor, place: int
) -> None:
    """Promise: text ends at the first stop token, wherever in a block it lies (the first, an accepted one, the last)."""
    new_ids = truth[0, prompt_ids.shape[1] :].tolist()
    stop = new_ids[place - 1]
    assert stop not in new_ids[: place - 1], "the fixture's text repeats itself: choose another seed"
    expected = greedy(tiny_target, prompt_ids, eos_token_id=stop)
    assert expected.shape[1] == prompt_ids.shape[1] + place
    drafter = ScriptedDrafter(tiny_target, truth, [N - 1])
    assert torch.equal(run(drafter, tiny_target, prompt_ids, stop_token_ids=stop).sequences, expected)
    # A drafter that is wrong before the stop must not change it.
    drafter = ScriptedDrafter(tiny_target, truth, [1])
    assert torch.equal(run(drafter, tiny_target, prompt_ids, stop_token_ids=[stop]).sequences, expected)


def test_stop_token_after_a_wrong_proposal_does_not_stop(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: only committed tokens stop the text; a rejected proposal that is a stop token is nothing."""
    new_ids = truth[0, prompt_ids.shape[1] :].tolist()
    wrong = (
        new_ids[2] + WRONG_OFFSET
    ) % tiny_target.config.vocab_size  # what the script proposes at the second place of block 0
    assert wrong not in new_ids[:12]
    drafter = ScriptedDrafter(tiny_target, truth, [1])
    output = run(drafter, tiny_target, prompt_ids, stop_token_ids=[wrong], max_new_tokens=12)
    assert torch.equal(output.sequences, truth[:, : prompt_ids.shape[1] + 12])


def test_several_stop_tokens_and_the_target_default(prompt_ids: torch.Tensor, truth: torch.Tensor) -> None:
    """Promise: a list of stop ids works, and without one the target's generation config decides."""
    new_ids = truth[0, prompt_ids.shape[1] :].tolist()
    target = make_target("qwen3")
    drafter = ScriptedDrafter(target, truth, MIXED)
    stops = [new_ids[9], new_ids[4]]
    expected = greedy(target, prompt_ids, eos_token_id=stops)
    assert torch.equal(run(drafter, target, prompt_ids, stop_token_ids=stops).sequences, expected)
    target.generation_config.eos_token_id = stops
    assert torch.equal(run(drafter, target, prompt_ids).sequences, expected)
    assert torch.equal(greedy(target, prompt_ids), expected)


@pytest.mark.parametrize("end", range(2, N + 2))
def test_stop_string_that_ends_inside_an_accepted_block(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor, end: int
) -> None:
    """Known bug (native transformers 5.23): strings that end inside an accepted block were missed."""
    tokenizer = make_tokenizer()
    characters = tokenizer.convert_ids_to_tokens(truth[0, prompt_ids.shape[1] :].tolist())
    string = "".join(characters[end - 2 : end])
    expected = greedy(tiny_target, prompt_ids, stop_strings=string, tokenizer=tokenizer)
    assert expected.shape[1] == prompt_ids.shape[1] + end
    drafter = ScriptedDrafter(tiny_target, truth, [N - 1])
    output = run(drafter, tiny_target, prompt_ids, stop_strings=[string, "never"], tokenizer=tokenizer)
    assert torch.equal(output.sequences, expected)


class _EnoughSmallIds(StoppingCriteria):
    """Stops once five ids of the text are below 30: looks at whole prefixes, as any user's criterion may."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return (input_ids < 30).sum(dim=1) >= 5


@pytest.mark.parametrize("script", [[0], [N - 1], MIXED], ids=str)
def test_custom_stopping_criterion_sees_every_prefix(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor, script: list[int]
) -> None:
    """Promise: a criterion stops the text at the token at which it stops plain `generate`."""
    expected = greedy(tiny_target, prompt_ids, stopping_criteria=[_EnoughSmallIds()])
    assert prompt_ids.shape[1] + 1 < expected.shape[1] < prompt_ids.shape[1] + 30
    drafter = ScriptedDrafter(tiny_target, truth, script)
    assert torch.equal(
        run(drafter, tiny_target, prompt_ids, stopping_criteria=[_EnoughSmallIds()]).sequences, expected
    )


# Everything else that `generate` prepares.


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.4},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
        {"suppress_tokens": [3, 20, 37]},
        {"min_new_tokens": 12, "eos_token_id": list(range(20, 60))},
        {"bad_words_ids": [[20], [30, 31]]},
    ],
    ids=lambda options: "+".join(options),
)
@pytest.mark.parametrize("script", [[0], [N - 1], MIXED], ids=str)
def test_logits_processors_equal_plain_generate(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, script: list[int], options: dict[str, Any]
) -> None:
    """Promise: each row is processed after the prefix it stands for, also where a processor looks at the prefix."""
    expected = remembered_greedy(tiny_target, prompt_ids, **options)
    longer = remembered_greedy(tiny_target, prompt_ids, max_new_tokens=40, **options)
    output = run(ScriptedDrafter(tiny_target, longer, script), tiny_target, prompt_ids, **options)
    assert torch.equal(output.sequences, expected)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "llama"])
def test_left_padding_equals_generate(
    targets: dict[str, PreTrainedModel], prompt_ids: torch.Tensor, kind: str
) -> None:
    """Promise: padding on the left with its mask is the same prompt, in a tensor, a dict or a BatchEncoding."""
    target = targets[kind]
    padded = torch.cat([torch.full((1, 4), PAD_TOKEN_ID), prompt_ids], dim=1)
    mask = (padded != PAD_TOKEN_ID).long()
    expected = greedy(target, padded, attention_mask=mask, pad_token_id=PAD_TOKEN_ID)
    truth = greedy(target, prompt_ids, max_new_tokens=40)
    encoded = {"input_ids": padded, "attention_mask": mask}
    for prompt in (encoded, BatchEncoding(encoded)):
        output = run(ScriptedDrafter(target, truth, MIXED), target, prompt)
        assert torch.equal(output.sequences, expected)
        assert output.acceptance_lengths == [expected_lengths(MIXED, 30)]
    output = run(ScriptedDrafter(target, truth, MIXED), target, padded, attention_mask=mask)
    assert torch.equal(output.sequences, expected)


def test_repetition_penalty_with_left_padding(tiny_target: PreTrainedModel, prompt_ids: torch.Tensor) -> None:
    """Promise: processors see the text as plain `generate` shows it, padding included."""
    padded = torch.cat([torch.full((1, 3), PAD_TOKEN_ID), prompt_ids], dim=1)
    options = {"attention_mask": (padded != PAD_TOKEN_ID).long(), "repetition_penalty": 1.4}
    expected = greedy(tiny_target, padded, **options)
    output = run(ScriptedDrafter(tiny_target, expected[:, 3:], MIXED), tiny_target, padded, **options)
    assert torch.equal(output.sequences, expected)


def test_prompt_with_pad_id_in_the_middle(prompt_ids: torch.Tensor) -> None:
    """Known trap: with a pad id and no mask, `generate` hides every pad id of the prompt; so must the loop."""
    target = make_target("qwen3")
    target.generation_config.pad_token_id = PAD_TOKEN_ID
    prompt = prompt_ids.clone()
    prompt[0, 0] = PAD_TOKEN_ID
    expected = greedy(target, prompt, max_new_tokens=20)
    assert torch.equal(run(make_drafter(), target, prompt, max_new_tokens=20).sequences, expected)


def test_statistics_follow_the_script(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: tau counts the last step uncut, tokens_per_step counts what was kept, neither counts the prefill's token."""
    stop = int(truth[0, prompt_ids.shape[1] + 4])
    output = run(ScriptedDrafter(tiny_target, truth, [1, N - 1]), tiny_target, prompt_ids, stop_token_ids=stop)
    # The prefill's token, a block of 2, and of a block of N the 2 up to the stop.
    assert output.sequences.shape[1] == prompt_ids.shape[1] + 5
    assert output.acceptance_lengths == [[2, N]]
    assert output.tau == pytest.approx((2 + N) / 2)
    assert output.tokens_per_step == pytest.approx(4 / 2)


def test_tokens_per_step_of_a_batch_leave_out_every_prefill(tiny_target: PreTrainedModel) -> None:
    """Promise: the mean is over the verify steps of all rows."""
    prompts = [make_prompt(9, seed=1), make_prompt(9, seed=2)]
    truths = [greedy(tiny_target, prompt, max_new_tokens=9) for prompt in prompts]
    output = run(
        ScriptedDrafter(tiny_target, truths, [1]),
        tiny_target,
        torch.cat(prompts),
        max_new_tokens=9,
        prompt_lookup_num_tokens=0,
    )
    assert output.acceptance_lengths == [[2] * 4] * 2
    assert output.tokens_per_step == 2.0


def test_statistics_without_a_verify_step_are_nan(
    tiny_target: PreTrainedModel, tiny_drafter: Any, prompt_ids: torch.Tensor
) -> None:
    """Promise: one token needs no step, and a mean over none is no number rather than an exception."""
    output = run(tiny_drafter, tiny_target, prompt_ids, max_new_tokens=1)
    assert output.acceptance_lengths == [[]]
    assert math.isnan(output.tau)
    assert math.isnan(output.tokens_per_step)


def test_one_forward_of_the_target_per_step(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: a step costs one forward of the target and one of the drafter; after the last none is wasted."""
    drafter = ScriptedDrafter(tiny_target, truth, [N - 1])
    with counted_forwards(tiny_target) as target_calls, counted_forwards(drafter) as drafter_calls:
        output = run(drafter, tiny_target, prompt_ids, max_new_tokens=1 + 4 * N)
    assert len(output.acceptance_lengths[0]) == 4
    assert len(target_calls) == 5
    assert len(drafter_calls) == 4


def test_function_and_method_agree(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: `draft.spec_generate(input_ids=…, target=…)` and `spec_generate(draft, target, ids)` are one thing."""
    drafter = ScriptedDrafter(tiny_target, truth, MIXED)
    text = spec_generate(drafter, tiny_target, prompt_ids, temperature=0.0, max_new_tokens=10)
    assert torch.equal(text, truth[:, : prompt_ids.shape[1] + 10])
    assert torch.equal(
        text, drafter.spec_generate(input_ids=prompt_ids, target=tiny_target, temperature=0.0, max_new_tokens=10)
    )


class _Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.num_ends += 1


def test_streamer_receives_what_generate_streams(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: a streamer of transformers gets the same ids in the same order, prompt first, and one end."""
    expected, streamed = _Recorder(), _Recorder()
    greedy(tiny_target, prompt_ids, streamer=expected)
    run(ScriptedDrafter(tiny_target, truth, MIXED), tiny_target, prompt_ids, streamer=streamed)
    assert streamed.ids == expected.ids
    assert streamed.num_ends == expected.num_ends == 1


# The generator of blocks.


def test_nothing_runs_before_the_first_next_but_the_checks_do(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: building the generator computes nothing, each `next` one step."""
    drafter = ScriptedDrafter(tiny_target, truth, [2])
    with counted_forwards(tiny_target) as calls:
        blocks = generate_blocks(drafter, tiny_target, prompt_ids, temperature=0.0, max_new_tokens=20)
        assert not calls
        first = next(blocks)
        assert first.is_prefill
        assert (first.num_proposals, first.num_accepted, len(first.token_ids)) == (0, 0, 1)
        assert len(calls) == 1
        second = next(blocks)
        assert not second.is_prefill
        assert (second.num_proposals, second.num_accepted, len(second.token_ids)) == (N - 1, 2, 3)
        assert len(calls) == 2
        blocks.close()


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
@pytest.mark.parametrize("how", ["close", "drop"])
def test_leaving_early_leaves_the_target_as_it_was(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor, num_blocks: int, how: str
) -> None:
    """Promise: no hook stays on the target when a consumer stops half-way, and plain `generate` is what it was."""
    before = num_hooks(tiny_target)
    drafter = ScriptedDrafter(tiny_target, truth, MIXED)
    blocks = generate_blocks(drafter, tiny_target, prompt_ids, temperature=0.0, max_new_tokens=30)
    for _ in range(num_blocks):
        next(blocks)
        assert num_hooks(tiny_target) == before
    if how == "close":
        blocks.close()
    del blocks
    assert num_hooks(tiny_target) == before
    assert torch.equal(greedy(tiny_target, prompt_ids, max_new_tokens=10), truth[:, : prompt_ids.shape[1] + 10])


def test_target_that_raises_keeps_no_hook(prompt_ids: torch.Tensor, truth: torch.Tensor) -> None:
    """Promise: an exception inside the target's forward takes the taps down with it."""
    target = make_target("qwen3")
    drafter = ScriptedDrafter(target, truth, MIXED)
    blocks = generate_blocks(drafter, target, prompt_ids, temperature=0.0, max_new_tokens=30)
    next(blocks)
    before = num_hooks(target)  # transformers 5 installs hooks of its own when hidden states are first asked for

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    handle = target.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        next(blocks)
    handle.remove()
    assert num_hooks(target) == before


def _in_threads(*works: Any) -> list[Any]:
    """Runs every callable in a thread of its own, all at once, and returns what they return; their errors are raised."""
    results: list[Any] = [None] * len(works)
    barrier = threading.Barrier(len(works))

    def call(slot: int) -> None:
        barrier.wait()
        try:
            results[slot] = works[slot]()
        except BaseException as error:
            results[slot] = error

    threads = [threading.Thread(target=call, args=(slot,)) for slot in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_generator_may_be_consumed_in_another_thread(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor
) -> None:
    """Promise: blocks built here and read elsewhere (as a server does) are the same, also if they change hands.

    Taps listen to the thread that runs the forward, not to the one that built the generator; and gradients, which torch
    switches per thread, stay off.
    """
    drafter = ScriptedDrafter(tiny_target, truth, MIXED)
    blocks = generate_blocks(drafter, tiny_target, prompt_ids, temperature=0.0, max_new_tokens=30)
    new_ids = list(next(blocks).token_ids)
    (second,) = _in_threads(lambda: next(blocks))
    (rest,) = _in_threads(lambda: list(blocks))
    new_ids += second.token_ids + [token for block in rest for token in block.token_ids]
    assert new_ids == truth[0, prompt_ids.shape[1] :][:30].tolist()


def test_two_threads_on_one_target(tiny_target: PreTrainedModel) -> None:
    """Known trap: hooks on a shared target catch the other thread's states; and one's end may remove the other's."""
    prompts = [make_prompt(length, seed) for length, seed in ((7, 11), (12, 12))]
    truths = [greedy(tiny_target, prompt, max_new_tokens=50) for prompt in prompts]
    # Random drafters: what they propose depends on the states they are given, so a mix-up shows in the proposals too.
    drafters = [make_drafter(), make_drafter()]
    alone = [run(drafters[i], tiny_target, prompts[i], max_new_tokens=50) for i in range(2)]
    scripted = [ScriptedDrafter(tiny_target, truth, MIXED) for truth in truths]
    before = num_hooks(tiny_target)
    works = [
        lambda i=i, drafter=drafter: run(drafter, tiny_target, prompts[i], max_new_tokens=50)
        for pair in (scripted, drafters)
        for i, drafter in enumerate(pair)
    ]
    outputs = _in_threads(*works)
    for output, expected in zip(outputs, truths * 2, strict=True):
        assert torch.equal(output.sequences, expected)
    assert [output.acceptance_lengths for output in outputs[2:]] == [output.acceptance_lengths for output in alone]
    assert num_hooks(tiny_target) == before


def test_target_and_plain_generate_in_two_threads(tiny_target: PreTrainedModel, prompt_ids: torch.Tensor) -> None:
    """Promise: a plain `generate` on the same target in another thread disturbs nothing and is not disturbed."""
    other = make_prompt(21, seed=13)
    expected, expected_other = greedy(tiny_target, prompt_ids), greedy(tiny_target, other)
    drafter = ScriptedDrafter(tiny_target, greedy(tiny_target, prompt_ids, max_new_tokens=40), MIXED)
    output, plain = _in_threads(lambda: run(drafter, tiny_target, prompt_ids), lambda: greedy(tiny_target, other))
    assert torch.equal(output.sequences, expected)
    assert torch.equal(plain, expected_other)


# A drafter that is never right.


def _warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "not one drafted token" in record.getMessage()]


def test_inactive_drafter_is_reported_once(
    tiny_target: PreTrainedModel, prompt_ids: torch.Tensor, truth: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Known bug (ollama PR 17865): a drafter that never helps went unnoticed. One warning says so, with likely causes."""
    with caplog.at_level(logging.WARNING):
        output = run(ScriptedDrafter(tiny_target, truth, [0]), tiny_target, prompt_ids, max_new_tokens=50)
    assert torch.equal(output.sequences, truth[:, : prompt_ids.shape[1] + 50])
    (message,) = _warnings_of(caplog)
    for cause in ("another target", "chat template", "mask_token_id"):
        assert cause in message


@pytest.mark.parametrize(
    ("script", "max_new_tokens"),
    [
        ([0], 20),
        ([N - 1], 50),
        ([1] + [0] * 60, 50),
        ([0] * (drafting_dflash.INACTIVE_STEPS - 1) + [1] + [0] * 60, 50),
    ],
    ids=["too short to say", "active", "once at first", "once at the last step looked at"],
)
def test_no_warning_without_reason(
    tiny_target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    truth: torch.Tensor,
    caplog: pytest.LogCaptureFixture,
    script: list[int],
    max_new_tokens: int,
) -> None:
    """Promise: the warning is true: a drafter with one accepted token in that time is not called inactive."""
    with caplog.at_level(logging.WARNING):
        run(ScriptedDrafter(tiny_target, truth, script), tiny_target, prompt_ids, max_new_tokens=max_new_tokens)
    assert not _warnings_of(caplog)


# A target spread over devices.


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_dispatched_target_equals_greedy(
    prompt_ids: torch.Tensor, truth: torch.Tensor, tmp_path: Any, place: str
) -> None:
    """Promise: layers and head offloaded by accelerate change nothing; their weights are on "meta" between calls."""
    accelerate = pytest.importorskip("accelerate")
    target = make_target("qwen3")
    drafter = ScriptedDrafter(target, truth, MIXED)
    device_map = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": place,
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": place,
    }
    target = accelerate.dispatch_model(
        target, device_map, main_device="cpu", offload_dir=str(tmp_path), force_hooks=True
    )
    if place == "disk":
        assert target.lm_head.weight.device.type == "meta"
    output = run(drafter, target, prompt_ids)
    assert torch.equal(output.sequences, truth[:, : prompt_ids.shape[1] + 30])
    assert output.acceptance_lengths == [expected_lengths(MIXED, 30)]


# Sampling: the same noise gives the same text.


def _processors(options: dict[str, Any]) -> LogitsProcessorList:
    """Transformers' own processors in `generate`'s order."""
    made = LogitsProcessorList()
    if "repetition_penalty" in options:
        made.append(RepetitionPenaltyLogitsProcessor(options["repetition_penalty"]))
    if options.get("temperature", 1.0) != 1.0:
        made.append(TemperatureLogitsWarper(options["temperature"]))
    if "top_k" in options:
        made.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        made.append(TopPLogitsWarper(options["top_p"]))
    return made


def sampled_plainly(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    max_new_tokens: int,
    seed: int,
    options: dict[str, Any],
    row: int = 0,
) -> torch.Tensor:
    """The oracle: one token per forward, no cache, the noise of that row of a batch, transformers' processors."""
    noise = PositionUniforms(row + 1, torch.Generator().manual_seed(seed))
    processors = _processors(options)

    def pick(scores: torch.Tensor, text: torch.Tensor, index: int) -> int:
        return int(choose_sampled(processors(text, scores)[:, None], noise(row, index, 1)[None]))

    return plain_loop(target, prompt_ids, max_new_tokens, pick)


SAMPLING = [
    {"temperature": 1.0, "top_k": 0},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 30, "repetition_penalty": 1.3},
]


@pytest.mark.parametrize(
    ("kind", "options"),
    [*(("qwen3", options) for options in SAMPLING), ("qwen3_sliding", SAMPLING[2]), ("llama_tied", SAMPLING[1])],
    ids=str,
)
def test_sampled_text_depends_on_the_seed_alone(
    targets: dict[str, PreTrainedModel], prompt_ids: torch.Tensor, kind: str, options: dict[str, Any]
) -> None:
    """Promise: at a seed, the text of a plain one-token loop with the same noise, whatever the block size and drafter."""
    target = targets[kind]
    plain = {name: value for name, value in options.items() if value}
    known = sampled_plainly(target, prompt_ids, 20 + N, 7, plain)  # the last block is drafted whole
    expected = known[:, : prompt_ids.shape[1] + 20]
    assert not torch.equal(expected, sampled_plainly(target, prompt_ids, 20, 8, plain))
    for block_size, script in [(2, [1]), (3, [2, 0]), (5, [4]), (N, [0]), (N, [N - 1]), (N, MIXED)]:
        output = run(
            ScriptedDrafter(target, known, script),
            target,
            prompt_ids,
            max_new_tokens=20,
            block_size=block_size,
            generator=torch.Generator().manual_seed(7),
            **options,
        )
        assert torch.equal(output.sequences, expected), (block_size, script)
        assert output.acceptance_lengths == [expected_lengths(script, 20, block_size)]


def test_global_seed_reproduces_without_a_generator(
    tiny_target: PreTrainedModel, tiny_drafter: Any, prompt_ids: torch.Tensor
) -> None:
    """Promise: `torch.manual_seed` rules where no generator is passed, as it does in `generate`."""
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts.append(run(tiny_drafter, tiny_target, prompt_ids, temperature=1.0, max_new_tokens=12).sequences)
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


def test_temperature_one_samples_and_the_target_default_decides(prompt_ids: torch.Tensor) -> None:
    """Promise: `temperature` above 0 samples; without it, the target's generation config says whether and how."""
    target, drafter = make_target("qwen3"), make_drafter()
    expected = greedy(target, prompt_ids, max_new_tokens=12)
    assert torch.equal(drafter.spec_generate(input_ids=prompt_ids, target=target, max_new_tokens=12), expected)
    target.generation_config.do_sample = True
    target.generation_config.temperature = 0.7
    target.generation_config.top_k = 20
    target.generation_config.top_p = 0.9
    text = drafter.spec_generate(
        input_ids=prompt_ids, target=target, max_new_tokens=12, generator=torch.Generator().manual_seed(7)
    )
    assert torch.equal(text, sampled_plainly(target, prompt_ids, 12, 7, SAMPLING[1]))
    # Temperature 0 is greedy even where the target's defaults sample.
    assert torch.equal(run(drafter, target, prompt_ids, max_new_tokens=12).sequences, expected)


# Batches: every row accepts its own number of tokens.


def padded_prompts(lengths: list[int]) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Prompts of these lengths; the same padded on the left; and the mask."""
    prompts = [make_prompt(length, seed=40 + length) for length in lengths]
    longest = max(lengths)
    padded = torch.cat([torch.nn.functional.pad(p, (longest - p.shape[1], 0), value=PAD_TOKEN_ID) for p in prompts])
    return prompts, padded, (padded != PAD_TOKEN_ID).long()


@pytest.mark.parametrize("script", [[0], [3], [N - 1], [0, 5, 1, 4, 2, 3]], ids=str)
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "llama"])
def test_every_row_of_a_batch_equals_greedy(targets: dict[str, PreTrainedModel], kind: str, script: list[int]) -> None:
    """Promise: prompts of different lengths that accept different numbers of tokens, each as if it were alone."""
    target = targets[kind]
    prompts, padded, mask = padded_prompts([9, 4, 12])
    truths = [remembered_greedy(target, prompt, max_new_tokens=40) for prompt in prompts]
    drafter = ScriptedDrafter(target, truths, script)
    output = run(drafter, target, padded, attention_mask=mask, prompt_lookup_num_tokens=0)
    for row, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        start = padded.shape[1]
        assert torch.equal(output.sequences[row, start:], truth[0, prompt.shape[1] : prompt.shape[1] + 30])
        rotated = script[row % len(script) :] + script[: row % len(script)]
        # The last step is as wide as the slowest row wants, so only those before it are sure.
        assert output.acceptance_lengths[row][:-1] == expected_lengths(rotated, 30)[:-1]


@pytest.mark.parametrize("pad_token_id", [PAD_TOKEN_ID, None])
def test_rows_that_stop_first_are_padded_as_generate_pads(
    tiny_target: PreTrainedModel, pad_token_id: int | None
) -> None:
    """Promise: a batch whose rows end at different tokens gives what `generate` gives, padding included."""
    prompts, padded, mask = padded_prompts([9, 4, 12, 7])
    truths = [remembered_greedy(tiny_target, prompt, max_new_tokens=40) for prompt in prompts]
    stops = [int(truths[row][0, prompts[row].shape[1] + place]) for row, place in ((0, 3), (2, 9), (3, 0))]
    expected = greedy(tiny_target, padded, attention_mask=mask, eos_token_id=stops, pad_token_id=pad_token_id)
    for script in ([0], MIXED, [N - 1]):
        drafter = ScriptedDrafter(tiny_target, truths, script)
        output = run(
            drafter, tiny_target, padded, attention_mask=mask, stop_token_ids=stops, pad_token_id=pad_token_id
        )
        assert torch.equal(output.sequences, expected)


def test_sampled_rows_have_their_own_noise(tiny_target: PreTrainedModel) -> None:
    """Promise: row r's text depends on the seed, on r and on its prompt, not on the batch, the blocks or the drafter."""
    prompts, padded, mask = padded_prompts([9, 4, 12])
    options = SAMPLING[1]
    expected = [sampled_plainly(tiny_target, prompts[row], 16, 7, options, row) for row in range(3)]
    for block_size, script in [(2, [1]), (4, [1, 3]), (N, [5]), (N, MIXED)]:
        output = run(
            ScriptedDrafter(tiny_target, expected, script),
            tiny_target,
            padded,
            attention_mask=mask,
            max_new_tokens=16,
            block_size=block_size,
            generator=torch.Generator().manual_seed(7),
            **options,
        )
        for row in range(3):
            assert torch.equal(output.sequences[row, padded.shape[1] :], expected[row][0, prompts[row].shape[1] :])


@pytest.mark.parametrize("place", ["keyword", "generation_config", "target"])
def test_several_sequences_of_one_prompt(prompt_ids: torch.Tensor, place: str) -> None:
    """Promise: `num_return_sequences` gives rows that differ, wherever it is written."""
    target, drafter = make_target("qwen3"), make_drafter()
    expected = [sampled_plainly(target, prompt_ids, 8, 7, SAMPLING[1], row) for row in range(3)]
    options: dict[str, Any] = {"num_return_sequences": 3}
    if place == "generation_config":
        options = {"generation_config": GenerationConfig(do_sample=True, num_return_sequences=3)}
    elif place == "target":
        target.generation_config, options = GenerationConfig(do_sample=True, num_return_sequences=3), {}
    output = run(
        drafter,
        target,
        prompt_ids,
        max_new_tokens=8,
        generator=torch.Generator().manual_seed(7),
        **SAMPLING[1],
        **options,
    )
    assert torch.equal(output.sequences, torch.cat(expected))
    assert len({tuple(row) for row in output.sequences.tolist()}) == 3


def test_blocks_name_their_row(tiny_target: PreTrainedModel) -> None:
    """Promise: the blocks of a batch, sorted by row, are the rows' texts; every row has one prefill."""
    prompts, padded, mask = padded_prompts([9, 4])
    truths = [remembered_greedy(tiny_target, prompt, max_new_tokens=40) for prompt in prompts]
    drafter = ScriptedDrafter(tiny_target, truths, [5, 0])
    blocks = list(
        generate_blocks(drafter, tiny_target, padded, attention_mask=mask, temperature=0.0, max_new_tokens=20)
    )
    for row, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        own = [block for block in blocks if block.sequence == row]
        assert [block.is_prefill for block in own] == [True] + [False] * (len(own) - 1)
        written = [token for block in own for token in block.token_ids]
        assert written == truth[0, prompt.shape[1] : prompt.shape[1] + 20].tolist()


# Sampling: the distribution.

LAW_OPTIONS = [{"temperature": 1.5}, {"temperature": 2.0, "top_k": 3, "top_p": 0.9}]


@pytest.fixture(scope="module")
def distribution_target() -> PreTrainedModel:
    """A target of five words, whose texts of four words can all be enumerated."""
    return make_distribution_target()


def distribution_of(target: PreTrainedModel, options: dict[str, Any]) -> torch.Tensor:
    """The probability of every text, by enumeration with the processors of plain `generate`."""
    options = {"do_sample": True, "max_new_tokens": DEPTH, "top_k": 0, **options}
    return exact_distribution(target, PROMPT, prepared_processors(target, PROMPT, **options))


def sample_cells(target: PreTrainedModel, options: dict[str, Any]) -> torch.Tensor:
    """Which texts `spec_generate` writes: a hundred at a time, ten seeds; the drafter is often right and often wrong."""
    drafter = HabitDrafter(target)

    def generate(seed: int) -> torch.Tensor:
        return spec_generate(
            drafter, target, PROMPT, max_new_tokens=DEPTH, num_return_sequences=100,
            generator=torch.Generator().manual_seed(seed), **{"top_k": 0, **options},
        )  # fmt: skip

    return drawn_cells(generate, range(10))


@pytest.mark.parametrize("options", LAW_OPTIONS, ids=["temperature", "temperature+top_k+top_p"])
def test_sampled_distribution_is_the_targets(distribution_target: PreTrainedModel, options: dict[str, Any]) -> None:
    """Promise: sampled text has exactly the distribution of ancestral sampling from the target, warped as transformers warps.

    The oracle is checked first: `generate(do_sample=True)` passes the same test.
    """
    distribution = distribution_of(distribution_target, options)
    asked = {"do_sample": True, "max_new_tokens": DEPTH, "num_return_sequences": 4000, "top_k": 0, **options}
    assert p_value(drawn_cells(lambda seed: distribution_target.generate(PROMPT, **asked), [0]), distribution) > 1e-3
    assert p_value(sample_cells(distribution_target, options), distribution) > 1e-3


def _keep_rows_after_a_rejection(proposals: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Wrong: rows stand that were computed after a proposal the target did not choose."""
    return torch.full((len(proposals),), proposals.shape[1])


def _keep_some_wrong_proposals(proposals: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """Wrong: two rejected proposals in three are written all the same (a "lenient" acceptance)."""
    width = proposals.shape[1]
    lenient = torch.rand(proposals.shape) < 0.67
    choices[:, :width] = torch.where(lenient, proposals, choices[:, :width])
    return (proposals == choices[:, :width]).long().cumprod(dim=1).sum(dim=1)


@pytest.mark.parametrize("wrong_rule", [_keep_rows_after_a_rejection, _keep_some_wrong_proposals])
def test_a_wrong_accept_rule_fails_the_distribution_test(
    distribution_target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, wrong_rule: Any
) -> None:
    """The test of the test: a rule that keeps what the target did not choose is caught by the same chi-square."""
    monkeypatch.setattr(acceptance_dflash, "accept_prefix", wrong_rule)
    options = LAW_OPTIONS[0]
    assert p_value(sample_cells(distribution_target, options), distribution_of(distribution_target, options)) < 1e-6


@pytest.mark.parametrize("kind", TARGET_KINDS)
def test_the_texts_of_the_fixtures_are_varied(
    targets: dict[str, PreTrainedModel], prompt_ids: torch.Tensor, kind: str
) -> None:
    """Guards the fixtures: a text that repeats itself would hide a wrong rollback."""
    assert len(set(remembered_greedy(targets[kind], prompt_ids, max_new_tokens=40)[0].tolist())) > 16


def test_mask_id_of_the_fixture_is_not_in_the_prompt(prompt_ids: torch.Tensor) -> None:
    """Guards the fixtures: neither pad nor mask id may occur in `prompt_ids`."""
    assert not {PAD_TOKEN_ID, MASK_TOKEN_ID} & set(prompt_ids[0].tolist())


@pytest.mark.parametrize("chunk_size", [1, 4, 9, 64])
def test_a_prompt_in_chunks(tiny_target: PreTrainedModel, chunk_size: int) -> None:
    """Promise: no forward of the prompt is wider than asked for, and neither text nor acceptance changes."""
    prompts = [make_prompt(23, seed=1), make_prompt(9, seed=2)]
    truths = [greedy(tiny_target, prompt, max_new_tokens=30) for prompt in prompts]
    widths: list[int] = []
    handle = tiny_target.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        for rows in ([0], [1], [0, 1]):
            drafter = ScriptedDrafter(tiny_target, [truths[row] for row in rows], [2, 0, N - 1])
            widths.clear()
            batch: Any = prompts[rows[0]] if len(rows) == 1 else [prompt[0] for prompt in prompts]
            output = run(drafter, tiny_target, batch, prefill_chunk_size=chunk_size, max_new_tokens=20, pad_token_id=0)
            length = max(prompts[row].shape[1] for row in rows)
            forwards = -(-length // chunk_size)
            assert widths[:forwards] == [chunk_size] * (length // chunk_size) + [length % chunk_size] * bool(
                length % chunk_size
            )
            for row, text in zip(rows, output.sequences, strict=True):
                assert torch.equal(text[-20:], truths[row][0, prompts[row].shape[1] :][:20])
            if len(rows) == 1:
                assert output.acceptance_lengths == [expected_lengths([2, 0, N - 1], 20)]
    finally:
        handle.remove()
