"""Requests that look ordinary and would change the text or be ignored: each is honoured exactly or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, ScriptedDrafter, greedy, make_drafter, make_prompt, make_target
from transformers import GenerationConfig, StoppingCriteriaList
from transformers.generation.logits_process import TemperatureLogitsWarper
from transformers.generation.stopping_criteria import MaxLengthCriteria

from dflash import DFlashDraftModel, generate_blocks, spec_generate


NEW = 20


def scripted(target: Any, prompt: torch.Tensor, **kwargs: Any) -> ScriptedDrafter:
    return ScriptedDrafter(target, greedy(target, prompt, max_new_tokens=NEW + BLOCK_SIZE, **kwargs), [3, 0, 5, 1])


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
         "original_max_position_embeddings": 16},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rope_that_depends_on_the_length_is_refused(rope: dict[str, Any]) -> None:
    """A block that crosses the original length is rotated otherwise than single tokens: logits differ by whole units."""
    target = make_target("llama", rope_scaling=rope)
    with pytest.raises(ValueError, match=f"rope_type='{rope['rope_type']}'.*Use target.generate"):
        generate_blocks(make_drafter(), target, make_prompt(), max_new_tokens=4, temperature=0.0)


def test_a_length_criterion_of_the_caller_counts() -> None:
    """`generate` lets it stand in place of its own; a loop that reads the config alone writes on."""
    target, prompt = make_target(), make_prompt(4)
    criteria = StoppingCriteriaList([MaxLengthCriteria(max_length=9)])
    ours = spec_generate(
        scripted(target, prompt), target, prompt, stopping_criteria=criteria, max_new_tokens=NEW, temperature=0.0
    )
    assert torch.equal(ours, greedy(target, prompt, stopping_criteria=criteria, max_new_tokens=NEW))
    assert ours.shape[1] == 9


class ColderByTheToken(TemperatureLogitsWarper):
    """A subclass of a prefix-free warper that does look at the prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(input_ids.shape[1] % 7, dims=-1)


def test_a_subclass_of_a_known_warper_sees_the_prefix() -> None:
    target, prompt = make_target(), make_prompt()
    options: dict[str, Any] = {"logits_processor": [ColderByTheToken(0.5)], "max_new_tokens": NEW}
    drafter = ScriptedDrafter(target, greedy(target, prompt, **options), [3, 0, 5, 1])
    assert torch.equal(
        spec_generate(drafter, target, prompt, temperature=0.0, **options), greedy(target, prompt, **options)
    )


@pytest.mark.parametrize("extra", ["pixel_values", "position_ids", "token_type_ids"])
def test_inputs_that_would_be_dropped_are_refused(extra: str) -> None:
    inputs = {"input_ids": make_prompt(), extra: torch.ones(1, 9)}
    with pytest.raises(ValueError, match=extra):
        spec_generate(make_drafter(), make_target(), inputs, max_new_tokens=2, temperature=0.0)
    with pytest.raises(ValueError, match="position_ids"):
        spec_generate(make_drafter(), make_target(), make_prompt(), position_ids=torch.ones(1, 9), max_new_tokens=2)


def test_token_types_that_say_nothing_are_taken() -> None:
    inputs = {"input_ids": make_prompt(), "token_type_ids": torch.zeros(1, 9, dtype=torch.long)}
    assert spec_generate(make_drafter(), make_target(), inputs, max_new_tokens=2, temperature=0.0).shape == (1, 11)


def test_generate_blocks_takes_no_streamer() -> None:
    with pytest.raises(ValueError, match="streamer to spec_generate"):
        generate_blocks(make_drafter(), make_target(), make_prompt(), streamer=object(), max_new_tokens=2)


@pytest.mark.parametrize(("name", "value"), [("dola_layers", "high"), ("num_beams", 3)])
def test_settings_of_a_generation_config_are_refused_by_name(name: str, value: Any) -> None:
    config = GenerationConfig(max_new_tokens=4, **{name: value})
    with pytest.raises(ValueError, match=name):
        list(generate_blocks(make_drafter(), make_target(), make_prompt(), generation_config=config))


def test_right_padding_that_only_the_pad_id_shows_is_refused() -> None:
    """Without a mask `generate` infers one from the pad id; a padding column would choose the first token."""
    target = make_target(pad_token_id=0)
    target.generation_config.pad_token_id = 0
    prompts = torch.cat([make_prompt(), torch.nn.functional.pad(make_prompt(7), (0, 2))])
    with pytest.raises(ValueError, match="pad on the left"):
        generate_blocks(make_drafter(), target, prompts, max_new_tokens=4, temperature=0.0)


def test_a_head_of_another_dtype_than_the_target() -> None:
    """Preparing a model for adapters leaves an fp32 head on a bf16 body."""
    target = make_target().to(torch.bfloat16)
    target.lm_head.float()
    target.lm_head.register_forward_pre_hook(lambda module, args: (args[0].float(),))
    output = spec_generate(make_drafter(), target, make_prompt(), max_new_tokens=4, temperature=0.0)
    assert output.shape == (1, 13)


def test_a_config_changed_in_place_is_saved_as_it_is(tmp_path: Any) -> None:
    """Both copies of a doubled field follow, else the checkpoint would refuse to load."""
    drafter = make_drafter()
    drafter.config.block_size = 4
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.config.block_size == loaded.config.dflash_config["block_size"] == 4


@pytest.mark.parametrize("fields", [{"block_size": 1}, {"mask_token_id": 999}], ids=str)
def test_a_field_given_to_from_pretrained_is_checked(fields: dict[str, int], tmp_path: Any) -> None:
    make_drafter().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=next(iter(fields))):
        DFlashDraftModel.from_pretrained(tmp_path, **fields)


def test_the_last_token_alone_needs_no_drafter() -> None:
    """One token wanted: nothing to draft. The drafter would run for nothing."""
    target, drafter = make_target(), make_drafter()
    calls: list[int] = []
    drafter.register_forward_pre_hook(lambda *args: calls.append(1))
    spec_generate(drafter, target, make_prompt(), max_new_tokens=2, temperature=0.0)
    assert not calls
