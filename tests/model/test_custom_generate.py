"""The door of `target.generate(custom_generate=<folder>)`: the loop without an import of this package."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import CollectingStreamer, greedy, make_drafter, make_prompt
from transformers import AutoModel, AutoModelForCausalLM, LogitsProcessorList, PreTrainedModel

from dflash.checkpoints import save_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved drafter, its code and its `custom_generate` folder."""
    return save_checkpoint(make_drafter(), tmp_path_factory.mktemp("door") / "tiny-DFlash")


def test_a_checkpoint_opens_the_targets_generate(checkpoint: Path, tiny_target: PreTrainedModel) -> None:
    """Promise: text of plain `generate`, with the streamer, the mask and the processors that were given."""
    drafter = AutoModel.from_pretrained(checkpoint, trust_remote_code=True)
    prompt = make_prompt()
    doors: dict[str, Any] = {"custom_generate": str(checkpoint), "trust_remote_code": True, "drafter": drafter}
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "repetition_penalty": 1.3}
    truth = greedy(tiny_target, prompt, max_new_tokens=9, repetition_penalty=1.3)
    streamer = CollectingStreamer()
    text = tiny_target.generate(prompt, streamer=streamer, logits_processor=LogitsProcessorList(), **doors, **options)
    assert torch.equal(text, truth)
    assert streamer.token_ids == [*truth[0].tolist(), -1]
    by_name = tiny_target.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **doors, **options)
    assert torch.equal(by_name, truth)


def test_the_door_in_a_targets_folder_takes_positional_ids(
    checkpoint: Path, tmp_path: Path, tiny_target: PreTrainedModel
) -> None:
    """Promise: bound by transformers as the model's own `generate`, it takes the prompt first, as `generate` does."""
    folder = save_checkpoint(tiny_target, tmp_path / "target")
    shutil.copytree(checkpoint / "custom_generate", folder / "custom_generate")
    target = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    drafter = AutoModel.from_pretrained(checkpoint, trust_remote_code=True)
    prompt = make_prompt()
    text = target.generate(prompt, drafter=drafter, max_new_tokens=9, do_sample=False)
    assert torch.equal(text, greedy(tiny_target, prompt, max_new_tokens=9))


def test_without_a_drafter_it_says_what_to_pass(checkpoint: Path, tiny_target: PreTrainedModel) -> None:
    """Promise: the remedy, not an attribute error."""
    with pytest.raises(ValueError, match=r"drafter=None cannot draft: pass AutoModel\.from_pretrained"):
        tiny_target.generate(make_prompt(), custom_generate=str(checkpoint), trust_remote_code=True, max_new_tokens=2)


def test_targets_are_saved_without_it(tmp_path: Path, tiny_target: PreTrainedModel) -> None:
    """Promise: the folder belongs to drafters."""
    assert not (save_checkpoint(tiny_target, tmp_path / "target") / "custom_generate").exists()
