"""What a compiled pair does on a GPU, as far as it can be seen without one: the same functions, options and masks.

Flex attention has a kernel for CPUs too, so that the functions that CUDA compiles can run, and be right, there.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from dflash.model.step_dflash import CompiledPair
from tiny_models import SMALL, greedy, make_drafter, make_prompt, make_target

from dflash import generate_blocks
from dflash.model import step_dflash
from dflash.model.cache_dflash import LinearAttentionLayer


@pytest.fixture
def _as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that is served as a GPU is: few shapes, storage that is lent, steps launched ahead, flex attention."""
    torch._dynamo.reset()
    monkeypatch.setattr(step_dflash, "ASYNCHRONOUS", ("cuda", "cpu"))
    monkeypatch.setattr(step_dflash, "FLEX_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(step_dflash, "SMALLEST_CAPACITY", 256)


@pytest.mark.compiler
@pytest.mark.usefixtures("_as_on_cuda")
def test_what_cuda_compiles_writes_the_targets_text() -> None:
    """Flex attention with grouped heads, lengths on the device and windows: through Inductor, and no step eagerly.

    With torch 2.13 hidden states were collected once and never again: Dynamo drops what is set after flex attention.
    """
    sizes: dict[str, Any] = {"head_dim": 16}
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5}
    target = make_target("qwen3_sliding", num_hidden_layers=2, **sizes, **sliding)
    drafter = make_drafter(attn_implementation="sdpa", **SMALL, **sizes)
    prompt = make_prompt(140, seed=3)  # more than a block of keys
    truth = greedy(target, prompt, max_new_tokens=40, eos_token_id=None)[0, prompt.shape[1] :].tolist()
    asked: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40, "stop_token_ids": [], "compile": True}
    for more in ({}, {"draft_tree": 7}):
        blocks = islice(generate_blocks(drafter, target, prompt, **asked, **more), 7)
        written = [token_id for block in blocks for token_id in block.token_ids]
        assert written == truth[: len(written)]
    pair = CompiledPair.of(target, drafter)
    assert pair._is_flex is (LinearAttentionLayer is not None)  # transformers 4 attends as on other devices
    assert pair.reason is None
    assert len(pair._num_calls) == 3  # a whole step; a draft and a tree
    states = target(prompt, output_hidden_states=True).hidden_states
    assert len(states) == 3
