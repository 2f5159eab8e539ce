"""How a request may be put, and what comes back: lists of prompts, scores, rules, and the target's own `generate`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, ScriptedDrafter, greedy, make_drafter, make_prompt, make_target
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, SynthIDTextWatermarkLogitsProcessor

from dflash import DFlashOutput, custom_generate, generate_blocks, spec_generate


PROMPT_LENGTHS = [3, 12, 7]


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    """Three prompts [1, S] of different lengths."""
    return [make_prompt(length, seed=length) for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("form", [lambda p: p[0], lambda p: p[0].tolist(), lambda p: p], ids=["1-D", "list", "2-D"])
def test_a_list_of_prompts_is_padded_here(
    tiny_target: PreTrainedModel, prompts: list[torch.Tensor], form: Any
) -> None:
    """Promise: prompts of any lengths, each written as if alone."""
    truths = [greedy(tiny_target, prompt, max_new_tokens=11) for prompt in prompts]
    drafter = ScriptedDrafter(tiny_target, truths, [2, 0, 5])
    texts = spec_generate(drafter, tiny_target, [form(p) for p in prompts], max_new_tokens=11, temperature=0.0)
    assert texts.shape == (3, 12 + 11)
    for text, truth in zip(texts, truths, strict=True):
        assert torch.equal(text[-truth.shape[1] :], truth[0])


def test_what_a_tokenizer_returns_without_tensors_is_taken(
    tiny_target: PreTrainedModel, prompts: list[torch.Tensor]
) -> None:
    """Promise: lists of unequal lengths and their masks, as tokenizers return them by default."""
    encoded = {"input_ids": [p[0].tolist() for p in prompts], "attention_mask": [[1] * p.shape[1] for p in prompts]}
    listed = spec_generate(make_drafter(), tiny_target, encoded, max_new_tokens=4, temperature=0.0)
    given = spec_generate(make_drafter(), tiny_target, encoded["input_ids"], max_new_tokens=4, temperature=0.0)
    assert torch.equal(listed, given)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_in_lists_is_no_text(tiny_target: PreTrainedModel, prompts: list[torch.Tensor], side: str) -> None:
    """Promise: the lists of `tokenizer(texts, padding=True)` give each prompt's own text; their mask was once dropped."""
    padding = {n: [7] * (max(PROMPT_LENGTHS) - n) for n in PROMPT_LENGTHS}  # a token like any other
    ids, mask = [], []
    for prompt in prompts:
        real, ones = prompt[0].tolist(), [1] * prompt.shape[1]
        pads = padding[prompt.shape[1]]
        ids.append(pads + real if side == "left" else real + pads)
        mask.append([0] * len(pads) + ones if side == "left" else ones + [0] * len(pads))
    asked = {"max_new_tokens": 4, "temperature": 0.0}
    listed = spec_generate(make_drafter(), tiny_target, {"input_ids": ids, "attention_mask": mask}, **asked)
    given = spec_generate(make_drafter(), tiny_target, [prompt[0].tolist() for prompt in prompts], **asked)
    assert torch.equal(listed, given)


def test_a_list_of_single_ids_of_a_tensor_is_one_prompt(
    tiny_target: PreTrainedModel, prompts: list[torch.Tensor]
) -> None:
    """Promise: `list(ids)` is the prompt that `ids.tolist()` is."""
    asked = {"max_new_tokens": 4, "temperature": 0.0}
    listed = spec_generate(make_drafter(), tiny_target, list(prompts[1][0]), **asked)
    assert torch.equal(listed, spec_generate(make_drafter(), tiny_target, prompts[1], **asked))


@pytest.mark.parametrize(
    ("input_ids", "message"),
    [
        ([[1, 2], []], "Prompt 1 of the list is empty"),
        ([], "pass a tensor of token ids"),
        (["text"], "pass a tensor of token ids"),
    ],
)
def test_lists_that_are_no_prompts_are_refused(tiny_target: PreTrainedModel, input_ids: Any, message: str) -> None:
    """Promise: one sentence, before any compute."""
    with pytest.raises(ValueError, match=message):
        spec_generate(make_drafter(), tiny_target, input_ids, max_new_tokens=2, temperature=0.0)


def test_a_list_with_a_mask_is_refused(tiny_target: PreTrainedModel) -> None:
    """Promise: a mask of a padding that is made here cannot be right."""
    with pytest.raises(ValueError, match="needs no attention_mask"):
        spec_generate(make_drafter(), tiny_target, [[1, 2], [3]], attention_mask=torch.ones(2, 2), max_new_tokens=2)


@pytest.mark.parametrize(
    "options",
    [{}, {"repetition_penalty": 1.4}, {"do_sample": True, "temperature": 0.8, "top_k": 5}],
    ids=["plain", "penalty", "sampled"],
)
def test_scores_and_logits_are_those_of_generate(tiny_target: PreTrainedModel, options: dict[str, Any]) -> None:
    """Promise: one [B, V] per new position, equal to plain decoding's up to the rounding of a block's forward."""
    prompt = make_prompt()
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "max_new_tokens": 13}
    is_greedy = not options.get("do_sample")
    truth = greedy(tiny_target, prompt, max_new_tokens=13)
    drafter = ScriptedDrafter(tiny_target, truth, [2, 0, 5])
    ours = spec_generate(
        drafter, tiny_target, prompt, **wanted, **options, **({"temperature": 0.0} if is_greedy else {})
    )
    assert len(ours.scores) == len(ours.logits) == 13
    assert ours.scores[0].shape == (1, tiny_target.config.vocab_size)
    if is_greedy:
        plain = tiny_target.generate(prompt, do_sample=False, **wanted, **options)
        assert torch.equal(ours.sequences, plain.sequences)
        for mine, theirs in zip([*ours.scores, *ours.logits], [*plain.scores, *plain.logits], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    else:
        with torch.no_grad():
            logits = tiny_target(ours.sequences).logits[0, prompt.shape[1] - 1 : -1]
        torch.testing.assert_close(torch.cat(ours.logits), logits, rtol=1e-4, atol=1e-4)
        for scores, row in zip(ours.scores, logits, strict=True):
            kept = row.topk(5).indices
            torch.testing.assert_close(scores[0, kept], row[kept] / 0.8, rtol=1e-4, atol=1e-4)
            assert scores.isfinite().sum() == 5


def test_scores_after_a_rows_end_are_zero(tiny_target: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    """Promise: positions that a row never came to hold 0."""
    truths = [greedy(tiny_target, prompt, max_new_tokens=9) for prompt in prompts]
    stop = int(truths[0][0, 3 + 4])
    new_ids = [truth[0, prompt.shape[1] :].tolist() for truth, prompt in zip(truths, prompts, strict=True)]
    lengths = [ids.index(stop) + 1 if stop in ids else len(ids) for ids in new_ids]
    assert len(set(lengths)) > 1
    drafter = ScriptedDrafter(tiny_target, truths, [3, 1])
    output = spec_generate(
        drafter,
        tiny_target,
        [prompt[0] for prompt in prompts],
        max_new_tokens=9,
        temperature=0.0,
        stop_token_ids=stop,
        output_logits=True,
        return_dict_in_generate=True,
    )
    assert output.scores is None
    is_zero = torch.stack(output.logits, dim=1).abs().sum(dim=-1) == 0  # [B, new]
    assert is_zero.sum(dim=1).tolist() == [max(lengths) - length for length in lengths]


@pytest.mark.parametrize("verification", ["match", "rejection", "block", "auto"])
def test_greedy_text_under_every_rule(tiny_target: PreTrainedModel, verification: str) -> None:
    """Promise: greedy decoding has one rule, whatever is asked for."""
    truth = greedy(tiny_target, make_prompt(), max_new_tokens=15)
    drafter = ScriptedDrafter(tiny_target, truth, [2, 0, 5])
    text = spec_generate(
        drafter, tiny_target, make_prompt(), max_new_tokens=15, temperature=0.0, verification=verification
    )
    assert torch.equal(text, truth)


@pytest.mark.parametrize("verification", ["rejection", "block"])
def test_rules_that_draw_per_step_are_reproducible(tiny_target: PreTrainedModel, verification: str) -> None:
    """Promise: a seed gives one text, other seeds others; a row's text does not depend on the batch."""
    prompt, drafter = make_prompt(), make_drafter()
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "verification": verification}

    def text(seed: int, count: int = 1) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return spec_generate(drafter, tiny_target, prompt.repeat(count, 1), generator=generator, **options)

    assert torch.equal(text(1), text(1))
    assert not torch.equal(text(1), text(2))
    assert torch.equal(text(1, count=3)[:1], text(1))


def test_an_unknown_rule_is_refused(tiny_target: PreTrainedModel) -> None:
    """Promise: the value and what there is."""
    with pytest.raises(ValueError, match="verification='typical': use one of auto, match, rejection, block"):
        spec_generate(make_drafter(), tiny_target, make_prompt(), max_new_tokens=2, verification="typical")


def test_the_targets_own_generate_runs_the_loop(tiny_target: PreTrainedModel) -> None:
    """Promise: `generate(custom_generate=custom_generate, drafter=…)` is `spec_generate` with generate's preparation."""
    prompt = make_prompt()
    truth = greedy(tiny_target, prompt, max_new_tokens=15)
    drafter = ScriptedDrafter(tiny_target, truth, [4, 1])
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 15, "return_dict_in_generate": True}
    output = tiny_target.generate(prompt, custom_generate=custom_generate, drafter=drafter, **options)
    assert isinstance(output, DFlashOutput)
    assert torch.equal(output.sequences, truth)
    assert max(output.acceptance_lengths[0]) == 5 < BLOCK_SIZE


class _Nothing(LogitsProcessor):
    """Leaves no token possible after 12 tokens."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, self.value) if input_ids.shape[1] == 12 else scores

    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.parametrize("value", [float("nan"), -float("inf")])
def test_a_processor_that_leaves_no_token_is_named(tiny_target: PreTrainedModel, value: float) -> None:
    """Promise: no text is made up out of NaN."""
    processors = LogitsProcessorList([_Nothing(value)])
    with pytest.raises(ValueError, match=r"\(_Nothing\) left no token possible after 12 tokens"):
        spec_generate(
            make_drafter(), tiny_target, make_prompt(), max_new_tokens=9, temperature=0.0, logits_processor=processors
        )


class _Grammar(LogitsProcessor):
    """Has no answer after the token that ends the text."""

    def __init__(self, stop: int, start: int) -> None:
        self.stop, self.start = stop, start

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        ended = (input_ids[:, self.start :] == self.stop).any(dim=1, keepdim=True)
        return scores.masked_fill(ended, -torch.inf)


@pytest.mark.parametrize("asked", [{}, {"draft_tree": 8}], ids=["chain", "tree"])
def test_a_grammar_need_not_answer_after_the_end(asked: dict[str, Any], tiny_target: PreTrainedModel) -> None:
    """Known bug: a draft that goes on after the text's end asked it what follows there, and the text was lost."""
    prompt = make_prompt()
    truth = greedy(tiny_target, prompt, max_new_tokens=30)
    new_ids = truth[0, prompt.shape[1] :].tolist()
    place = next(place for place in range(2, 20) if new_ids[place] not in new_ids[:place])
    processors = LogitsProcessorList([_Grammar(new_ids[place], prompt.shape[1])])
    output = spec_generate(
        ScriptedDrafter(tiny_target, truth, [BLOCK_SIZE - 1]),
        tiny_target,
        prompt,
        max_new_tokens=25,
        temperature=0.0,
        stop_token_ids=[new_ids[place]],
        logits_processor=processors,
        **asked,
    )
    assert output[0, prompt.shape[1] :].tolist() == new_ids[: place + 1]


DECODING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "top-k": {"temperature": 1.0, "top_k": 20},
    "top-p": {"temperature": 1.0, "top_k": 0, "top_p": 0.9},
    "block": {"temperature": 1.0, "verification": "block"},
    "tree": {"temperature": 0.0, "draft_tree": 8},
    "sampled tree": {"temperature": 1.0, "draft_tree": 8},
    "adaptive": {"temperature": 0.0, "adaptive": True},
}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("mode", DECODING)
@pytest.mark.parametrize("name", ["target", "drafter"])
def test_a_model_whose_logits_are_no_numbers_is_named(name: str, mode: str, value: float) -> None:
    """Promise: one sentence says which model, and nothing is written that its logits decided."""
    target, drafter = make_target(), make_drafter()
    weight = target.get_output_embeddings().weight if name == "target" else drafter.norm.weight
    with torch.no_grad():
        weight[3] = value
    blocks = generate_blocks(drafter, target, make_prompt(), max_new_tokens=40, **DECODING[mode])
    written: list[int] = []

    def read() -> None:
        for block in blocks:
            written.extend(block.token_ids)

    with pytest.raises(ValueError, match=f"The {name}'s logits are NaN or infinite") as raised:
        read()
    assert "\n" not in str(raised.value)
    assert len(written) == (name == "drafter")  # the prompt's token is the target's own


def test_processors_with_a_state_are_refused(tiny_target: PreTrainedModel) -> None:
    """Promise: SynthID's watermark remembers what it was shown, and would be shown drafts."""
    watermark = SynthIDTextWatermarkLogitsProcessor(
        ngram_len=3, keys=[1, 2], sampling_table_size=64, sampling_table_seed=0, context_history_size=8, device="cpu"
    )
    with pytest.raises(ValueError, match="SynthIDTextWatermarkLogitsProcessor keeps a state"):
        generate_blocks(
            make_drafter(),
            tiny_target,
            make_prompt(),
            max_new_tokens=2,
            logits_processor=LogitsProcessorList([watermark]),
        )


def test_use_cache_false_is_refused(tiny_target: PreTrainedModel) -> None:
    """Promise: named, since nothing could be verified after it."""
    with pytest.raises(ValueError, match="use_cache=False"):
        spec_generate(make_drafter(), tiny_target, make_prompt(), max_new_tokens=2, temperature=0.0, use_cache=False)


def test_pad_id_inside_a_prompt_needs_a_mask(tiny_target: PreTrainedModel) -> None:
    """Promise: `generate` would hide that token; with a mask the text is its own."""
    prompt = make_prompt()
    prompt[0, 4] = 50
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": 0.0, "pad_token_id": 50}
    with pytest.raises(ValueError, match="Prompt 0 holds the pad id 50 at column 4"):
        spec_generate(make_drafter(), tiny_target, prompt, **options)
    mask = torch.ones_like(prompt)
    text = spec_generate(make_drafter(), tiny_target, prompt, attention_mask=mask, **options)
    assert torch.equal(text, greedy(tiny_target, prompt, attention_mask=mask, pad_token_id=50, max_new_tokens=6))


def test_a_prompt_that_ends_in_a_stop_token_is_told(
    tiny_target: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: it goes on as in `generate`, and one sentence says so."""
    prompt = make_prompt()
    stop = int(prompt[0, -1])
    with caplog.at_level(logging.WARNING):
        text = spec_generate(
            make_drafter(), tiny_target, prompt, max_new_tokens=6, temperature=0.0, stop_token_ids=stop
        )
    assert f"already ends in the stop token {stop}" in caplog.text
    assert torch.equal(text, greedy(tiny_target, prompt, eos_token_id=stop, pad_token_id=stop, max_new_tokens=6))
