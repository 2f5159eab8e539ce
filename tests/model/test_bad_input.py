"""Bad input gets one clear sentence with the value and the remedy, before any forward of the target.

Bad configurations: `test_configuration.py`; bad checkpoints: `test_modeling.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    DIMENSIONS,
    MASK_TOKEN_ID,
    NO_SPECIAL_TOKENS,
    NUM_TARGET_LAYERS,
    counted_forwards,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
    make_tokenizer,
)
from transformers import (
    BertConfig,
    BertLMHeadModel,
    BertModel,
    DynamicCache,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    Qwen3Model,
    T5Config,
    T5ForConditionalGeneration,
)

from dflash import DFlashConfig, DFlashDraftModel, custom_generate, generate_blocks, spec_generate


BERT = BertConfig(vocab_size=96, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=32)


class _Streamer:
    """A streamer that must not be touched by a refused request."""

    def put(self, value: Any) -> None:
        pytest.fail("the streamer was given something")

    def end(self) -> None:
        pytest.fail("the streamer was ended")


def assert_refused(target: Any, drafter: Any, phrases: list[str], input_ids: Any = None, **kwargs: Any) -> None:
    """`spec_generate` raises ValueError with all `phrases` in one line; nothing ran and nothing was streamed."""
    input_ids = make_prompt() if input_ids is None else input_ids
    kwargs = {"max_new_tokens": 8, "temperature": 0.0, **kwargs}
    kwargs = {name: value for name, value in kwargs.items() if value != "absent"}
    watched = target if isinstance(target, torch.nn.Module) else torch.nn.Identity()
    with counted_forwards(watched) as calls, counted_forwards(drafter) as drafts:
        with pytest.raises(ValueError, match=r".") as error:
            drafter.spec_generate(input_ids=input_ids, target=target, streamer=_Streamer(), **kwargs)
        assert not calls
        assert not drafts
    message = str(error.value)
    for phrase in phrases:
        assert phrase in message, message
    assert "\n" not in message
    assert len(message) < 400


# Pairs that do not belong together.


@pytest.mark.parametrize(
    ("overrides", "phrases"),
    [
        ({"hidden_size": 64}, ["hidden_size is 64", "target's is 32"]),
        ({"vocab_size": 128}, ["vocab_size is 128", "target's is 96"]),
        ({"num_target_layers": 6}, ["num_target_layers is 6", "target's is 4"]),
        ({"num_target_layers": None, "target_layer_ids": [0, 3]}, ["[0, 3]", "up to layer 2"]),
        ({"num_target_layers": None, "target_layer_ids": [0, 7]}, ["[0, 7]", "up to layer 2"]),
    ],
    ids=["hidden size", "vocabulary", "depth", "last layer tapped", "layer past the end tapped"],
)
def test_mismatched_pairs(tiny_target: PreTrainedModel, overrides: dict[str, Any], phrases: list[str]) -> None:
    """Promise: both numbers are named."""
    assert_refused(tiny_target, make_drafter(**overrides), phrases)


def test_drafter_as_its_own_target(tiny_drafter: DFlashDraftModel) -> None:
    """Promise: the same object twice is told apart from a wrong class."""
    assert_refused(tiny_drafter, tiny_drafter, ["same object", "AutoModelForCausalLM"])


def test_another_drafter_as_the_target(tiny_drafter: DFlashDraftModel) -> None:
    """Promise: a drafter has no head and is no target."""
    assert_refused(make_drafter(seed=9), tiny_drafter, ["DFlashDraftModel", "AutoModelForCausalLM"])


def test_encoder_decoder_target(tiny_drafter: DFlashDraftModel) -> None:
    """Promise: named as such."""
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    assert_refused(T5ForConditionalGeneration(config), tiny_drafter, ["T5ForConditionalGeneration", "encoder-decoder"])


@pytest.mark.parametrize("kind", ["headless", "classifier", "bert"])
def test_target_that_is_no_causal_language_model(tiny_drafter: DFlashDraftModel, kind: str) -> None:
    """Promise: a model without a language-model head is named, with the class to load instead."""
    config = Qwen3Config(**DIMENSIONS, **NO_SPECIAL_TOKENS, num_hidden_layers=NUM_TARGET_LAYERS)
    if kind == "headless":
        target: PreTrainedModel = Qwen3Model(config)
    elif kind == "classifier":
        target = Qwen3ForSequenceClassification(config)
    else:
        target = BertModel(BERT)
    assert_refused(target, tiny_drafter, [type(target).__name__, "causal language model", "AutoModelForCausalLM"])


@pytest.mark.parametrize("hidden_size", [32, 64])
def test_an_encoder_with_a_head_is_said_to_be_one(tiny_drafter: DFlashDraftModel, hidden_size: int) -> None:
    """Promise: BERT is named as no decoder-only model, whatever its size, and not by a size that differs."""
    sizes = {"num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 32}
    target = BertLMHeadModel(BertConfig(vocab_size=96, hidden_size=hidden_size, **sizes))
    assert_refused(target, tiny_drafter, ["BertLMHeadModel", "decoder-only"])


@pytest.mark.parametrize("target", [None, "some/target"], ids=["none", "a name"])
def test_target_that_is_no_model(tiny_drafter: DFlashDraftModel, target: Any) -> None:
    """Promise: a forgotten or unloaded target is said to be one."""
    assert_refused(target, tiny_drafter, [type(target).__name__, "AutoModelForCausalLM"])


def test_recurrent_target(tiny_drafter: DFlashDraftModel) -> None:
    """Known trap: recurrent layers run, are rolled back silently wrong, and the text differs. Refused by name."""
    target = make_target("qwen3")
    target.config.layer_types = ["linear_attention", "full_attention"] * 2
    assert_refused(target, tiny_drafter, ["linear_attention", "target.generate"])


# Drafters that cannot be built.


@pytest.mark.parametrize("name", ["mask_token_id", "target_layer_ids"])
def test_drafter_without_mask_or_layers(name: str) -> None:
    """Promise: a missing mask id or layer list is refused when the model is built."""
    fields = {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": [0, 2]}
    del fields[name]
    with pytest.raises(ValueError, match=f"holds no {name}"):
        DFlashDraftModel(DFlashConfig(**DIMENSIONS, num_hidden_layers=1, **fields))


# Prompts.


def test_empty_prompt(tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel) -> None:
    """Promise: an empty prompt is said to be empty."""
    assert_refused(tiny_target, tiny_drafter, ["empty", "[1, 0]", "bos_token_id"], torch.empty(1, 0, dtype=torch.long))


@pytest.mark.parametrize("length", [32, 40])
def test_prompt_longer_than_the_targets_positions(length: int) -> None:
    """Promise: both numbers are named; a prompt that just leaves room is fine."""
    target = make_target("qwen3", max_position_embeddings=32)
    drafter = make_drafter()
    assert_refused(target, drafter, [f"{length} tokens", "32 positions", "shorten"], make_prompt(length))
    prompt = make_prompt(31)
    text = drafter.spec_generate(input_ids=prompt, target=target, max_new_tokens=1, temperature=0.0)
    assert torch.equal(text, greedy(target, prompt, max_new_tokens=1))


@pytest.mark.parametrize(("length", "is_refused"), [(65, False), (512, True)])
def test_positions_count_rope_scaling(length: int, is_refused: bool) -> None:
    """Promise: llama3 scaling of 64 positions by 8 leaves room for 512."""
    target = make_target("llama", max_position_embeddings=64)
    drafter = make_drafter()
    if is_refused:
        assert_refused(target, drafter, ["512 positions"], make_prompt(length))
    else:
        text = drafter.spec_generate(input_ids=make_prompt(length), target=target, max_new_tokens=1, temperature=0.0)
        assert text.shape == (1, length + 1)


@pytest.mark.parametrize(
    ("input_ids", "phrases"),
    [
        (torch.ones(2, 5, dtype=torch.long), ["one prompt at a time", "2"]),  # because of the streamer
        (torch.ones(0, 5, dtype=torch.long), ["empty", "[0, 5]"]),
        (torch.ones(5, dtype=torch.long), ["[5]", "token ids ["]),
        (torch.ones(1, 5), ["input_ids", "token ids"]),
        ([["a", "prompt"]], ["list", "token ids"]),
        ("a prompt", ["str", "tensor"]),
        (torch.ones(1, 5, dtype=torch.bool), ["torch.bool", "token ids"]),
        ([[True, False]], ["torch.bool", "token ids"]),
        ([[1.5, 2.0]], ["torch.float32", "token ids"]),
        ([1.5, 2.0], ["torch.float32", "token ids"]),
        (torch.tensor([[1, 96]]), ["96", "vocabulary of 96", "tokenizer"]),
        (torch.tensor([[1, -3, 2]]), ["-3", "vocabulary of 96", "tokenizer"]),
    ],
    ids=[
        *("batch and streamer", "no prompt", "one dimension", "floats", "list", "text", "bools", "list of bools"),
        *("list of floats", "flat floats", "id too large", "negative id"),
    ],
)
def test_prompts_that_are_none(
    tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel, input_ids: Any, phrases: list[str]
) -> None:
    """Promise: what was given is said, and what is wanted."""
    assert_refused(tiny_target, tiny_drafter, phrases, input_ids)


@pytest.mark.parametrize(
    ("mask", "phrases"),
    [
        (torch.ones(1, 7, dtype=torch.long), ["(1, 7)", "(1, 9)"]),
        (torch.tensor([[1] * 8 + [0]]), ["padding", "left"]),
        (torch.zeros(1, 9, dtype=torch.long), ["padding"]),
        (torch.tensor([[float("nan")] + [1.0] * 8]), ["attention_mask holds nan", "1 for tokens"]),
        (torch.tensor([[2] * 9]), ["attention_mask holds 2", "0 for padding"]),
    ],
    ids=["shape", "right padding", "all padding", "nan", "numbers"],
)
def test_masks_that_do_not_fit(
    tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel, mask: torch.Tensor, phrases: list[str]
) -> None:
    """Promise: a mask of another shape and padding on the right are refused."""
    assert_refused(tiny_target, tiny_drafter, phrases, attention_mask=mask)


def test_batch_encoding_without_ids(tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel) -> None:
    """Promise: a mapping that holds no ids is refused as a ValueError, not as a KeyError."""
    assert_refused(tiny_target, tiny_drafter, ["input_ids"], {"attention_mask": torch.ones(1, 3)})


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: {"input_ids": ids, "attention_mask": [1] * len(ids)}])
def test_a_flat_list_of_ids_is_one_prompt(
    tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel, wrap: Any
) -> None:
    """Promise: what a tokenizer returns without `return_tensors` is one prompt, and not one prompt for each token."""
    ids = make_prompt()[0].tolist()
    text = tiny_drafter.spec_generate(wrap(ids), tiny_target, max_new_tokens=6, temperature=0.0)
    assert torch.equal(text, greedy(tiny_target, make_prompt(), max_new_tokens=6))


# Requests.


@pytest.mark.parametrize(
    ("kwargs", "phrases"),
    [
        ({"max_new_tokens": 0}, ["max_new_tokens=0", "at least one"]),
        ({"max_new_tokens": -5}, ["max_new_tokens=-5", "at least one"]),
        ({"temperature": -0.5}, ["temperature=-0.5", "0 for greedy"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"temperature": float("inf")}, ["temperature=inf", "finite"]),
        ({"temperature": 1e-38}, ["temperature=1e-38", "0 for greedy"]),
        ({"temperature": 10**400}, ["temperature=1000", "finite number"]),
        ({"temperature": True}, ["temperature=True", "0 for greedy"]),
        ({"temperature": 0.0, "generator": 5}, ["generator=5", "torch.Generator"]),
        ({"temperature": 0.0, "min_p": float("nan")}, ["min_p=nan", "0 to 1"]),
        ({"temperature": 1.0, "top_p": True}, ["top_p=True", "up to 1"]),
        ({"draft_window": (1, 10**30)}, ["draft_window=(1, 1000", "two numbers"]),
        ({"generation_config": 5}, ["generation_config=5", "GenerationConfig"]),
        ({"conversation": 5}, ["conversation=5", "dflash.Conversation"]),
        ({"stop_strings": 5}, ["stop_strings=5", "a string"]),
        ({"stop_token_ids": ["a"]}, ["stop_token_ids=['a']", "a list of them"]),
        ({"eos_token_id": 1.5}, ["eos_token_id=1.5", "a token id"]),
        ({"logits_processor": max}, ["logits_processor=", "a list of processors"]),
        ({"logits_processor": ["x"]}, ["logits_processor=['x']", "a list of processors"]),
        ({"stopping_criteria": 5}, ["stopping_criteria=5", "a list of criteria"]),
        ({"max_time": "soon"}, ["max_time='soon'", "seconds above 0"]),
        ({"max_new_tokens": 1.5}, ["max_new_tokens=1.5", "whole number"]),
        ({"max_new_tokens": True}, ["max_new_tokens=True", "whole number"]),
        ({"block_size": 4.5}, ["block_size=4.5", "2 to 6"]),
        ({"draft_tree": 10**6}, ["draft_tree=1000000", "up to 1024"]),
        ({"temperature": 0.0, "do_sample": True}, ["temperature=0.0", "do_sample=True"]),
        ({"temperature": 1.0, "top_p": 0.0}, ["top_p=0.0", "above 0"]),
        ({"temperature": 1.0, "top_p": 1.5}, ["top_p=1.5", "up to 1"]),
        ({"temperature": 1.0, "top_p": -0.1}, ["top_p=-0.1", "above 0"]),
        ({"temperature": 1.0, "top_p": float("nan")}, ["top_p=nan"]),
        ({"temperature": 0.0, "top_p": 2.0}, ["top_p=2.0"]),
        ({"temperature": 1.0, "top_k": -1}, ["top_k=-1", "0 to keep every"]),
        ({"block_size": 1}, ["block_size=1", "2 to 6"]),
        ({"block_size": 7}, ["block_size=7", "2 to 6"]),
        ({"stop_strings": "ab"}, ["stop_strings", "tokenizer"]),
        ({"num_beams": 4}, ["num_beams=4", "target.generate"]),
        ({"output_hidden_states": True}, ["output_hidden_states=True", "target.generate"]),
        ({"prompt_lookup_num_tokens": 64}, ["prompt_lookup_num_tokens=64"]),
        ({"past_key_values": object()}, ["past_key_values"]),
        ({"cache": object()}, ["cache"]),
        ({"inputs_embeds": torch.zeros(1, 3, 32)}, ["inputs_embeds"]),
        ({"max_length": 9, "max_new_tokens": "absent"}, ["9"]),
        ({"max_length": 4, "max_new_tokens": "absent"}, ["4"]),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_requests_that_cannot_be_run(
    tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel, kwargs: dict[str, Any], phrases: list[str]
) -> None:
    """Promise: the value and the remedy."""
    assert_refused(tiny_target, tiny_drafter, phrases, **kwargs)


@pytest.mark.parametrize(
    ("ids", "shown"),
    [
        (torch.ones(1, 3, dtype=torch.uint8), "torch.uint8"),
        (torch.ones(1, 3, dtype=torch.long).to_sparse(), "torch.sparse_coo"),
        (torch.ones(1, 3, dtype=torch.long, device="meta"), "on meta"),
    ],
    ids=["uint8", "sparse", "meta"],
)
def test_ids_that_no_target_can_embed(
    tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel, ids: torch.Tensor, shown: str
) -> None:
    """Promise: one sentence, where torch has a raw error of its own for each."""
    assert_refused(tiny_target, tiny_drafter, [shown, "pass a tensor of token ids"], ids)


@pytest.mark.parametrize("drafter", [None, "some/drafter", torch.nn.Linear(2, 2)], ids=["none", "name", "module"])
def test_a_drafter_that_is_none(tiny_target: PreTrainedModel, drafter: Any) -> None:
    """Promise: one sentence through both doors; a target given as the drafter too."""
    calls: list[Callable[..., Any]] = [
        lambda drafter: spec_generate(drafter, tiny_target, make_prompt(), max_new_tokens=4),
        lambda drafter: tiny_target.generate(make_prompt(), custom_generate=custom_generate, drafter=drafter),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"drafter=.* cannot draft: pass what DFlashDraftModel.from_pretrained"):
            call(drafter)
        with pytest.raises(ValueError, match=r"cannot draft|are the same object"):
            call(tiny_target)
    with pytest.raises(ValueError, match="drafter=None cannot draft"):
        tiny_target.generate(make_prompt(), custom_generate=custom_generate)


def test_a_drafter_without_values(tiny_target: PreTrainedModel) -> None:
    """Promise: weights on the meta device are named before any forward."""
    drafter = make_drafter().to("meta")
    assert_refused(tiny_target, drafter, ["weights are on the meta device", "from_pretrained"])


def test_a_streamer_that_is_none(tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel) -> None:
    """Promise: refused before any forward, and not when the first token is written."""
    with counted_forwards(tiny_target) as calls:
        with pytest.raises(ValueError, match="streamer=5: pass a streamer"):
            tiny_drafter.spec_generate(make_prompt(), tiny_target, streamer=5, max_new_tokens=4)
        assert not calls


def test_a_text_beyond_the_targets_positions_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Promise: as `generate` does, and only for a text that gets there; the text is the target's all the same."""
    target, drafter, prompt = make_target("qwen3", max_position_embeddings=37), make_drafter(), make_prompt(30)
    drafter.spec_generate(prompt, target, max_new_tokens=7, temperature=0.0, stop_token_ids=[])
    assert "positions" not in caplog.text
    asked: dict[str, Any] = {"max_new_tokens": 20, "temperature": 0.0, "stop_token_ids": []}
    text = drafter.spec_generate(prompt, target, **asked)
    assert torch.equal(text, greedy(target, prompt, max_new_tokens=20, eos_token_id=None))
    drafter.spec_generate(prompt, target, **asked)
    assert caplog.text.count("longer than the target's 37 positions") == 1
    assert "lower max_new_tokens" in caplog.text


@pytest.mark.parametrize(
    "asked", [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 0}], ids=str
)
def test_a_target_of_nan_is_named(tiny_drafter: DFlashDraftModel, asked: dict[str, Any]) -> None:
    """Promise: broken weights give one sentence, greedily and sampled, and no text."""
    target = make_target()
    target.get_output_embeddings().weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"target's logits are NaN or infinite .*check its weights"):
        tiny_drafter.spec_generate(make_prompt(), target, max_new_tokens=4, **asked)


def test_assistant_model_inside(tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel) -> None:
    """Promise: one way of speculation at a time."""
    assert_refused(tiny_target, tiny_drafter, ["assistant_model"], assistant_model=tiny_drafter)


def test_unknown_keyword_is_refused(tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel) -> None:
    """Promise: a misspelt option is not swallowed: transformers names it."""
    with counted_forwards(tiny_target) as calls:
        with pytest.raises((ValueError, TypeError), match="max_new_token"):
            tiny_drafter.spec_generate(input_ids=make_prompt(), target=tiny_target, temperature=0.0, max_new_token=5)
        assert not calls


def test_blocks_are_refused_when_they_are_asked_for(
    tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel
) -> None:
    """Promise: `generate_blocks` checks before it returns a generator, not at its first `next`."""
    with pytest.raises(ValueError, match="temperature=-1"):
        generate_blocks(tiny_drafter, tiny_target, make_prompt(), temperature=-1, max_new_tokens=3)
    with pytest.raises(ValueError, match="num_beams=4"):
        generate_blocks(tiny_drafter, tiny_target, make_prompt(), temperature=0.0, num_beams=4, max_new_tokens=3)
    with pytest.raises(ValueError, match="hidden_size"):
        generate_blocks(make_drafter(hidden_size=64), tiny_target, make_prompt(), max_new_tokens=3)


def test_a_refused_request_loses_nothing(tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel) -> None:
    """Promise: after a refusal the same models answer as if it had not been."""
    prompt = make_prompt()
    before = greedy(tiny_target, prompt, max_new_tokens=6)
    assert_refused(tiny_target, tiny_drafter, ["top_p=7"], temperature=1.0, top_p=7)
    text = tiny_drafter.spec_generate(input_ids=prompt, target=tiny_target, max_new_tokens=6, temperature=0.0)
    assert torch.equal(text, before)
    assert torch.equal(greedy(tiny_target, prompt, max_new_tokens=6), before)


@pytest.mark.parametrize("size", [0, -1, True])
def test_a_chunk_of_no_tokens(tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel, size: Any) -> None:
    with pytest.raises(ValueError, match=f"prefill_chunk_size={size}: use a number of tokens from 1 on"):
        tiny_drafter.spec_generate(
            make_prompt(), tiny_target, prefill_chunk_size=size, max_new_tokens=4, temperature=0.0
        )


def test_a_target_in_training_that_keeps_no_cache(tiny_drafter: DFlashDraftModel) -> None:
    target = make_target().train()
    with warnings.catch_warnings():  # transformers 5 has another name for it
        warnings.simplefilter("ignore")
        target.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="gradient checkpointing, which keeps no cache: call its eval"):
        tiny_drafter.spec_generate(make_prompt(), target, max_new_tokens=4, temperature=0.0)


@pytest.mark.parametrize(
    "asked",
    [
        {"adaptive": "yes"},
        {"draft_tree": -1},
        {"draft_tree": 2.5},
        {"draft_window": 8},
        {"block_size": 99},
        {"compile": "yes"},
        {"max_draft_tokens": -1},
        {"token_streamer": 5},
    ],
    ids=str,
)
def test_settings_are_checked_behind_every_door(
    tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel, asked: dict[str, Any]
) -> None:
    """Promise: `target.generate(custom_generate=…)` refuses what `spec_generate` refuses, before any compute."""
    (name,) = asked
    with counted_forwards(tiny_target) as forwards, pytest.raises(ValueError, match=f"^{name}"):
        tiny_target.generate(
            make_prompt(),
            custom_generate=custom_generate,
            drafter=tiny_drafter,
            max_new_tokens=4,
            do_sample=False,
            **asked,
        )
    assert not forwards


def filled_cache() -> DynamicCache:
    cache = DynamicCache()
    cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), 0)
    return cache


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ({"position_ids": torch.arange(4)[None] * 3}, "position_ids do not count the prompt's tokens"),
        ({"past_key_values": filled_cache()}, "The cache holds keys already"),
        ({"inputs_embeds": torch.zeros(1, 4, 32)}, "inputs_embeds came without input_ids"),
    ],
    ids=["positions", "cache", "embeddings"],
)
def test_what_generate_is_given_and_the_loop_does_not_read_is_refused(
    asked: dict[str, Any], shown: str, tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel
) -> None:
    """Bug: the first two were ignored, so the text was another one; the third was an error of torch."""
    ids = {} if "inputs_embeds" in asked else {"input_ids": make_prompt(4)}
    with pytest.raises(ValueError, match=f"{shown}.*use target.generate"):
        tiny_target.generate(**ids, **asked, custom_generate=custom_generate, drafter=tiny_drafter, max_new_tokens=4)
    padded = {"input_ids": make_prompt(4), "attention_mask": torch.tensor([[0, 1, 1, 1]])}
    tiny_target.generate(**padded, custom_generate=custom_generate, drafter=tiny_drafter, max_new_tokens=2)


def test_token_healing_is_refused_by_name(tiny_target: PreTrainedModel, tiny_drafter: DFlashDraftModel) -> None:
    """Bug: the error asked for the tokenizer that had been passed."""
    with pytest.raises(ValueError, match="token_healing=True rewrites the prompt: leave it out"):
        spec_generate(tiny_drafter, tiny_target, make_prompt(), token_healing=True, tokenizer=make_tokenizer())
