"""In bf16 and fp16 two tokens can be within rounding of each other: every token is still the argmax of what committed it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, ScriptedDrafter, greedy, make_prompt, make_target
from transformers import AutoModelForCausalLM, TorchAoConfig

from dflash import generate_blocks, spec_generate
from dflash.engine import compiled


NEW_TOKENS = 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "asked", [{}, {"draft_tree": 9}, {"adaptive": True}, {"compile": True}, {"prefill_chunk_size": 4}]
)
def test_every_token_is_the_argmax_of_the_forward_that_committed_it(
    dtype: torch.dtype, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    target, prompt = make_target().to(dtype), make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS + BLOCK_SIZE, eos_token_id=None)
    # Right as long as the text is plain decoding's own: a near-tie that flips ends that, and not the promise.
    drafter = ScriptedDrafter(target, truth, [2, BLOCK_SIZE - 1, 0, 3]).to(dtype)
    request: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "stop_token_ids": []}
    blocks = list(generate_blocks(drafter, target, prompt, output_logits=True, **request, **asked))
    written = [token_id for block in blocks for token_id in block.token_ids]
    assert len(written) == NEW_TOKENS
    for block in blocks:
        assert block.logits.argmax(dim=-1).tolist() == block.token_ids
    assert sum(block.num_accepted for block in blocks) > 0, "a loop that accepts nothing promises nothing"


@pytest.mark.parametrize("asked", [{}, {"draft_tree": 9}, {"compile": True}])
def test_a_quantised_target_writes_its_own_text(
    asked: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: nothing assumes plain weights, neither here nor in what is compiled."""
    torchao = pytest.importorskip("torchao.quantization")
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    make_target().save_pretrained(tmp_path)
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    target = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, quantization_config=config).eval()
    assert type(target.model.layers[0].mlp.up_proj.weight) is not torch.nn.Parameter
    prompt = make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS + BLOCK_SIZE, eos_token_id=None)
    drafter = ScriptedDrafter(target, truth, [2, BLOCK_SIZE - 1, 0, 3])
    request: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "temperature": 0.0, "stop_token_ids": []}
    output = spec_generate(drafter, target, prompt, return_dict_in_generate=True, **request, **asked)
    assert torch.equal(output.sequences, truth[:, :-BLOCK_SIZE])
    assert output.tau > 1.5


def test_memory_that_runs_out_is_said_with_what_needs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    drafter = ScriptedDrafter(target, greedy(target, make_prompt(9), max_new_tokens=20, eos_token_id=None), [1])

    def full(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(
            "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 64 bytes.\nframes"
        )

    monkeypatch.setattr(target.model, "forward", full)
    with pytest.raises(torch.OutOfMemoryError, match=r"can't allocate memory: 64 bytes\.\): lower prefill_chunk_size"):
        spec_generate(drafter, target, make_prompt(9), max_new_tokens=4, temperature=0.0)
