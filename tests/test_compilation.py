"""Compiled forwards: the same text, no compilation behind the first steps, and eager ones where nothing else is right.

Most tests run the graphs that dynamo takes as they are (`backend="eager"`): what is guarded, captured and fallen back from
is decided there. One compiles them for real.
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import (
    BLOCK_SIZE,
    FAMILIES,
    PAD_TOKEN_ID,
    ScriptedDrafter,
    counted_forwards,
    expected_lengths,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
)
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from dflash import Conversation, DFlashDraftModel, generate_blocks, spec_generate
from dflash.evaluation.memory import allocated_memory
from dflash.model import step_dflash
from dflash.model.step_dflash import CompiledPair


NEW_TOKENS = 24
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_target_layers": 2, "target_layer_ids": [0]}
SLIDING = ["sliding_attention", "full_attention"]
SCRIPT = [2, 0, BLOCK_SIZE - 1, 1, 3]
GREEDY: dict[str, Any] = {
    "temperature": 0.0,
    "max_new_tokens": NEW_TOKENS,
    "stop_token_ids": [],
    "return_dict_in_generate": True,
}


@pytest.fixture(autouse=True)
def _captured_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(step_dflash, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


def small_target(kind: str = "qwen3") -> PreTrainedModel:
    """Two layers: capturing takes its time for each."""
    return make_target(kind, num_hidden_layers=2, **({"layer_types": SLIDING} if kind == "qwen3_sliding" else {}))


def small_drafter() -> DFlashDraftModel:
    """A random one for it."""
    return make_drafter(**SMALL)


def scripted(target: PreTrainedModel, prompts: list[torch.Tensor]) -> tuple[ScriptedDrafter, list[torch.Tensor]]:
    """A drafter that is right as the script says, and what the target writes behind each prompt."""
    truths = [greedy(target, p, max_new_tokens=NEW_TOKENS + BLOCK_SIZE, eos_token_id=None) for p in prompts]
    small = SMALL if target.config.num_hidden_layers == 2 else {}
    return _Compilable(target, truths, SCRIPT, **small), [truth[:, :-BLOCK_SIZE] for truth in truths]


class _Compilable(ScriptedDrafter):
    """Its own forward is a real drafter's; what it proposes is written over in `propose`, which is never compiled."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super(ScriptedDrafter, self).forward(*args, **kwargs)

    def propose(self, hidden_states: torch.Tensor, anchors: torch.Tensor, head: Any, **kwargs: Any) -> Any:
        proposals = super().propose(hidden_states, anchors, head, **kwargs)
        # A row is done, and no longer here, once its anchor would be its last token.
        live = [row for row, at in enumerate(self.places) if at < self.ends[row]]
        for place, row in enumerate(live):
            at, truth = self.places[row], self.truths[row]
            assert truth[at] == int(anchors[place])
            count = min(proposals.token_ids.shape[1], self.ends[row] - at - 1)
            right = self.script[(self.num_blocks + row) % len(self.script)]
            for i in range(proposals.token_ids.shape[1]):
                proposals.token_ids[place, i] = (truth[at + 1 + i] + (5 if i == right else 0)) % self.config.vocab_size
            self.places[row] = at + min(right, count) + 1
        self.num_blocks += 1
        return proposals


def compiled_run(drafter: Any, target: PreTrainedModel, prompts: list[torch.Tensor], **asked: Any) -> Any:
    """One call with compile=True, behind the prompts."""
    drafter.places, drafter.num_blocks = [prompt.shape[1] for prompt in prompts], 0
    drafter.ends = [at + NEW_TOKENS - 1 for at in drafter.places]
    batch: Any = prompts[0] if len(prompts) == 1 else [prompt[0] for prompt in prompts]
    return spec_generate(drafter, target, batch, pad_token_id=PAD_TOKEN_ID, **{**GREEDY, "compile": True, **asked})


def pair_of(target: PreTrainedModel, drafter: Any) -> CompiledPair:
    """The pair's, which must not have given up."""
    pair = CompiledPair.of(target, drafter)
    assert pair.reason is None
    return pair


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_sliding", "llama"])
def test_compiled_text_is_the_targets(kind: str) -> None:
    target, prompt = small_target(kind), make_prompt(17, seed=3)
    drafter, (truth,) = scripted(target, [prompt])
    output = compiled_run(drafter, target, [prompt])
    assert torch.equal(output.sequences, truth)
    assert output.acceptance_lengths == [expected_lengths(SCRIPT, NEW_TOKENS)]
    assert len(pair_of(target, drafter)._checked) == 2  # the last block may have one column, which is a third


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "qwen3_moe"])
def test_other_families_compile_or_say_why_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: the text is exact either way, and what runs eagerly was said once."""
    target, prompt = FAMILIES[name].make(), make_prompt(17, seed=3)
    drafter, (truth,) = scripted(target, [prompt])
    assert torch.equal(compiled_run(drafter, target, [prompt]).sequences, truth)
    assert torch.equal(compiled_run(drafter, target, [prompt]).sequences, truth)
    warnings = [record for record in caplog.records if "run eagerly" in record.message]
    assert len(warnings) == (CompiledPair.of(target, drafter).reason is not None)


def test_nothing_is_compiled_behind_the_first_steps() -> None:
    """Promise: other lengths, other prompts, new caches, growing storage and narrower blocks compile nothing."""
    target = small_target()
    prompts = [make_prompt(17, seed=3), make_prompt(60, seed=4), make_prompt(5, seed=5)]
    drafter = small_drafter()
    asked = {**GREEDY, "compile": True}
    spec_generate(drafter, target, prompts[0], max_draft_tokens=0, **asked)  # one column
    spec_generate(drafter, target, prompts[0], **asked)
    pair_of(target, drafter)
    before = counters["stats"]["unique_graphs"]
    assert before == 3
    for prompt in prompts:
        truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
        for more in ({}, {"max_draft_tokens": 2}, {"draft_tree": 9}, {"max_draft_tokens": 0}, {"temperature": 0.7}):
            output = spec_generate(drafter, target, prompt, **{**asked, **more})
            assert "temperature" in more or torch.equal(output.sequences, truth)
    long = {**asked, "max_new_tokens": 400}  # over a bucket's edge
    truth = greedy(target, prompts[0], max_new_tokens=400, eos_token_id=None)
    assert torch.equal(spec_generate(drafter, target, prompts[0], **long).sequences, truth)
    assert counters["stats"]["unique_graphs"] == before
    assert not counters["graph_break"]


def test_rows_of_different_lengths() -> None:
    target = small_target()
    prompts = [make_prompt(length, seed=length) for length in (17, 9, 26)]
    drafter, truths = scripted(target, prompts)
    output = compiled_run(drafter, target, prompts)
    for row, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        assert torch.equal(output.sequences[row, -NEW_TOKENS:], truth[0, prompt.shape[1] :])
    graphs = counters["stats"]["unique_graphs"]
    pair_of(target, drafter)
    compiled_run(drafter, target, prompts)
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_conversation_goes_on_compiled() -> None:
    target, prompt = small_target(), make_prompt(17, seed=3)
    drafter, conversation, asked = small_drafter(), Conversation(), {**GREEDY, "compile": True}
    first = spec_generate(drafter, target, prompt, conversation=conversation, **asked).sequences
    longer = torch.cat([first, make_prompt(6, seed=9)], dim=1)
    again = spec_generate(drafter, target, longer, conversation=conversation, **asked).sequences
    assert torch.equal(again, greedy(target, longer, max_new_tokens=NEW_TOKENS, eos_token_id=None))
    assert conversation.num_reused >= first.shape[1] - 1


def test_auto_compiles_what_has_run_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_dflash, "AUTO_STEPS", 30)
    target, drafter, prompt = small_target(), small_drafter(), make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert torch.equal(spec_generate(drafter, target, prompt, **GREEDY).sequences, truth)
    assert not CompiledPair.of(target, drafter)._checked
    assert torch.equal(spec_generate(drafter, target, prompt, **GREEDY).sequences, truth)
    assert CompiledPair.of(target, drafter)._checked
    graphs = counters["stats"]["unique_graphs"]
    with counted_forwards(target) as forwards:  # somebody's hooks: they see every forward
        assert torch.equal(spec_generate(drafter, target, prompt, **GREEDY).sequences, truth)
    assert len(forwards) > NEW_TOKENS // 2
    with FlopCounterMode(display=False):  # a dispatch mode: it sees every operation
        assert torch.equal(spec_generate(drafter, target, prompt, **GREEDY).sequences, truth)
    assert pair_of(target, drafter).is_active
    assert torch.equal(spec_generate(drafter, target, prompt, compile=False, **GREEDY).sequences, truth)
    assert torch.equal(spec_generate(drafter, target, prompt, **GREEDY).sequences, truth)
    assert counters["stats"]["unique_graphs"] == graphs


def _other_activation(target: Any) -> None:
    target.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def _method_put_over(target: Any) -> None:
    attend = target.model.layers[1].self_attn
    plain = attend.forward
    attend.forward = lambda *args, **kwargs: (plain(*args, **kwargs)[0] * 0.0, None)


def _switch(target: Any) -> None:
    target.model.layers[0].input_layernorm.variance_epsilon = 10.0


def _hook(target: Any) -> None:
    target.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output * -2.0)


@pytest.mark.parametrize("change", [_other_activation, _method_put_over, _switch, _hook])
def test_a_target_that_changes_between_texts_is_compiled_anew(change: Any) -> None:
    """Promise: what runs is the model as it is now, though no step looks at all of its modules."""
    target, drafter, prompt = small_target(), small_drafter(), make_prompt(17, seed=3)
    asked = {**GREEDY, "compile": True}
    before = spec_generate(drafter, target, prompt, **asked).sequences
    pair_of(target, drafter)
    change(target)
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert not torch.equal(truth, before)
    assert torch.equal(spec_generate(drafter, target, prompt, **asked).sequences, truth)


def test_other_weights_in_the_same_place_compile_nothing() -> None:
    target, drafter, prompt = small_target(), small_drafter(), make_prompt(17, seed=3)
    asked = {**GREEDY, "compile": True}
    spec_generate(drafter, target, prompt, **asked)
    graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        target.model.layers[0].mlp.down_proj.weight.neg_()
    target.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(-target.model.layers[1].mlp.up_proj.weight)
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert torch.equal(spec_generate(drafter, target, prompt, **asked).sequences, truth)
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_target_that_does_not_compile_runs_eagerly_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    target, drafter, prompt = small_target(), small_drafter(), make_prompt(17, seed=3)
    attend = target.model.layers[0].self_attn.forward

    def data_dependent(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return attend(hidden_states + (1.0 if hidden_states.sum() > 1e9 else 0.0), *args, **kwargs)

    target.model.layers[0].self_attn.forward = data_dependent
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    for _ in range(2):
        assert torch.equal(spec_generate(drafter, target, prompt, compile=True, **GREEDY).sequences, truth)
    said = [r.message for r in caplog.records if r.levelno == logging.WARNING and "eagerly" in r.message]
    assert len(said) == 1
    assert "Qwen3ForCausalLM and DFlashDraftModel run eagerly and compile has no effect: " in said[0]
    assert "\n" not in said[0]


def test_what_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: the first compiled forward is compared with the eager one."""
    step = step_dflash.whole_step

    def wrong(*args: Any) -> Any:
        *others, features = step(*args)
        return *others, features.flip(-1)

    monkeypatch.setattr(step_dflash, "whole_step", wrong)
    target, drafter, prompt = small_target(), small_drafter(), make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert torch.equal(spec_generate(drafter, target, prompt, compile=True, **GREEDY).sequences, truth)
    assert "computes something else than eagerly" in caplog.text


@pytest.mark.skipif(
    not FAMILIES["qwen3_next"].is_served, reason="transformers 4 has no common form of recurrent states"
)
def test_linear_layers_run_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    target, prompt = FAMILIES["qwen3_next"].make(), make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert torch.equal(spec_generate(make_drafter(), target, prompt, compile=True, **GREEDY).sequences, truth)
    assert "has layers of type linear_attention" in caplog.text


def test_a_pair_is_not_kept_alive() -> None:
    target, drafter = small_target(), small_drafter()
    spec_generate(drafter, target, make_prompt(9), compile=True, **GREEDY)
    left = weakref.ref(target), weakref.ref(drafter)
    torch._dynamo.reset()
    del target, drafter
    gc.collect()
    assert [ref() for ref in left] == [None, None]


@pytest.mark.parametrize("value", ["yes", 1, 2, None])
def test_a_compile_that_is_none(value: Any) -> None:
    with pytest.raises(ValueError, match="compile="):
        spec_generate(
            small_drafter(), small_target(), make_prompt(9), compile=value, max_new_tokens=4, temperature=0.0
        )


def test_compiled_for_real(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Through inductor and the C++ compiler behind it; most tests here only capture."""
    monkeypatch.setattr(step_dflash, "BACKEND", "inductor")
    target = small_target()
    drafter = small_drafter()
    prompt = make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    for more in ({}, {"draft_tree": 7}, {"max_draft_tokens": 0}):
        assert torch.equal(spec_generate(drafter, target, prompt, compile=True, **GREEDY, **more).sequences, truth)
    pair_of(target, drafter)
    assert "eagerly" not in caplog.text


def test_no_compiled_step_copies_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: neither to write a block nor for each head; what a step allocates is less than one layer's keys."""
    monkeypatch.setattr(step_dflash, "BACKEND", "inductor")
    target = make_target(num_hidden_layers=2, num_attention_heads=8, head_dim=64, max_position_embeddings=4096)
    drafter, prompt = make_drafter(**SMALL, attn_implementation="sdpa"), make_prompt(2000)
    asked: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": [], "max_new_tokens": 12, "compile": True}
    spec_generate(drafter, target, prompt, **asked)
    pair_of(target, drafter)
    steps = generate_blocks(drafter, target, prompt, **asked)
    next(steps), next(steps)  # the prompt's forward, and the drafter's first, which reads all of the prompt
    of_one_layer = 4 * prompt.shape[1] * target.config.num_key_value_heads * target.config.head_dim
    assert 0 < allocated_memory(lambda: list(steps), target.device) < of_one_layer
