"""`compile`: steps as one compiled function, the eager text, and eager steps where nothing else is right.

Most tests play the compiler, or only capture graphs (`backend="eager"`). Those marked `compiler` run Inductor.
"""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from devices import LateDevice, Pair, PlayedCompiler, replace_method
from families import FAMILIES
from tiny_models import BLOCK_SIZE, GREEDY, SMALL, ScriptedDrafter, greedy, make_drafter, make_prompt, make_target
from torch._dynamo.utils import counters

from dflash import generate_blocks, spec_generate
from dflash.engine import compiled, fallback_reason, runner, trees
from dflash.engine.state import PairState, fingerprint
from dflash.evaluation import allocated_memory
from dflash.model import decoding_dflash


COMPILED: dict[str, Any] = {"compile": True}
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.7}, {"temperature": 0.9, "top_k": 9, "top_p": 0.8}]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> PlayedCompiler:
    """A compiler that changes nothing."""
    compiler = PlayedCompiler()
    monkeypatch.setattr(torch, "compile", compiler)
    return compiler


@pytest.fixture
def _captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are captured and run as they are."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    yield
    torch._dynamo.reset()


@pytest.fixture
def pair() -> Pair:
    """A pair of which nothing is compiled."""
    return Pair.make()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings about compiled steps."""
    return [record.message for record in caplog.records if "eagerly" in record.message]


def num_graphs() -> int:
    """How many graphs were captured."""
    return counters["stats"]["unique_graphs"]


# Captured graphs


@pytest.mark.usefixtures("_captured")
def test_captured_text_and_acceptance_are_the_eager_ones(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: one graph serves all lengths, prompts, caches and temperatures of a kind of step, and both gradient modes.

    What was compiled in inference mode serves the texts outside of it.
    """
    monkeypatch.setattr(decoding_dflash, "INITIAL_NEW_TOKENS", 8)
    eager = list(pair.blocks([17], compile=False))
    assert any(block.num_accepted for block in eager)
    with torch.inference_mode():
        assert list(pair.blocks([17], **COMPILED)) == eager
    for length, num_new in ((8, 24), (60, 150), (17, 10)):
        pair.check([length], max_new_tokens=num_new, **COMPILED)
    assert num_graphs() == 1
    sampled = pair.follow_sampled(17, **SAMPLING[0])
    for _ in range(2):
        assert pair.write([17], **SAMPLING[0], **COMPILED) == sampled
    pair.write([60], temperature=1.3, **COMPILED)
    assert num_graphs() == 2
    assert not counters["graph_break"]
    assert fallback_reason(pair.drafter, pair.target) is None


@pytest.mark.usefixtures("_captured")
def test_captured_batches_of_any_size_share_a_graph(pair: Pair) -> None:
    """Promise: also while their sequences end one by one."""
    last = next(i for i in range(130, pair.text.shape[1]) if pair.text[0, i] not in pair.text[0, 70:i])
    lengths = [last - 40, last - 9, last - 55]
    stop = {"stop_token_ids": [int(pair.text[0, last])], "max_new_tokens": 80}
    assert pair.write(lengths, **stop, **COMPILED) == [pair.text[0, n : last + 1].tolist() for n in lengths]
    graphs = num_graphs()
    assert graphs <= 2  # several sequences, and the last of them
    pair.check([45, 9], **COMPILED)
    pair.check([45, -9, 80, 17], **COMPILED)
    assert num_graphs() == graphs
    assert fallback_reason(pair.drafter, pair.target) is None


@pytest.mark.usefixtures("_captured")
@pytest.mark.parametrize(
    "head",
    [{"selector_rank": 4, "selector_top_k": 5}, {"gru_hidden_dim": 6, "emb_dim": 4}],
    ids=["selector", "Domino"],
)
@pytest.mark.parametrize("asked", [{}, {"temperature": 3.0, "top_k": 6}], ids=["greedy", "drawn"])
def test_a_causal_head_is_captured(head: dict[str, int], asked: dict[str, Any], pair: Pair) -> None:
    """Promise: its proposals, also drawn ones, are the eager ones, which the first step is compared with."""
    drafter = make_drafter(**SMALL, **head)
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    other = Pair(pair.target, drafter, pair.text, pair.other)  # type: ignore[arg-type]
    eager = list(other.blocks([17], compile=False, **asked))
    assert list(other.blocks([17], **asked, **COMPILED)) == eager
    assert num_graphs() == 1
    assert fallback_reason(drafter, pair.target) is None


@pytest.mark.usefixtures("_captured")
@pytest.mark.parametrize("name", ["gemma3", "qwen3_moe", "qwen3_next"])
def test_other_families_compile_or_say_why_not(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: the text is exact either way, and one warning says what runs eagerly."""
    if not FAMILIES[name].is_served:
        pytest.skip("not served on this transformers")
    half: dict[str, Any] = {} if name == "qwen3_next" else {"num_hidden_layers": 2}
    if name == "gemma3":
        half["layer_types"] = ["sliding_attention", "full_attention"]
    target = FAMILIES[name].make(**half)
    prompt = make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=16, eos_token_id=None)
    fields = {} if name == "qwen3_next" else SMALL
    drafter = make_drafter(**fields)
    for _ in range(2):
        output = spec_generate(drafter, target, prompt, max_new_tokens=16, **GREEDY, **COMPILED)
        assert torch.equal(output.sequences, truth)
    reason = fallback_reason(drafter, target)
    assert len(warnings_of(caplog)) == (reason is not None)
    assert name != "qwen3_next" or "linear_attention" in str(reason)


@pytest.mark.usefixtures("_captured")
def test_a_target_that_does_not_compile_runs_eagerly(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Promise: one warning of one line gives the compiler's reason, which can also be asked for."""
    mlp = pair.target.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states * (1.0 if states.sum() < 1e9 else 0.0))
    for _ in range(2):
        pair.check([17], **COMPILED)
    (warning,) = warnings_of(caplog)
    assert warning.startswith("Steps run eagerly and compile has no effect: Unsupported(")
    assert "\n" not in warning
    assert "Unsupported" in str(fallback_reason(pair.drafter, pair.target))


# What runs, and what the compiler is asked


@pytest.mark.parametrize("value", ["yes", 1, None.__class__, 2.0])
def test_another_value_of_compile_is_refused(pair: Pair, value: Any) -> None:
    with pytest.raises(ValueError, match="compile="):
        pair.blocks([9], compile=value)


@pytest.mark.usefixtures("compiler")
def test_compiling_is_announced_once(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """Known trap: `compile=True` was silent for half a minute where stderr is no terminal."""
    for _ in range(2):
        pair.check([17], **COMPILED)
    (record,) = [record for record in caplog.records if "are being compiled" in record.message]
    assert record.levelno == logging.WARNING
    assert "compile=False avoids it" in record.message


def test_the_caches_are_those_of_the_output_that_is_used(pair: Pair, compiler: PlayedCompiler) -> None:
    """Known bug: the eager step that the first output is compared with ran after it, and had proposed otherwise."""
    drafter: Any = ScriptedDrafter(pair.target, pair.text, [2, 0, BLOCK_SIZE - 1], **SMALL)
    prompt = pair.text[:, :17]
    output = spec_generate(drafter, pair.target, prompt, **GREEDY, max_new_tokens=40, **COMPILED)
    assert torch.equal(output.sequences, pair.text[:, :57])
    assert compiler.num_made == 1


# What changes


@pytest.mark.usefixtures("_captured")
def test_a_captured_graph_does_not_outlive_the_models_it_was_made_of(pair: Pair) -> None:
    """Promise: what runs is the model as it is now, though no step looks at its modules."""
    pair.check([17], **COMPILED)
    before = pair.text
    replace_method(pair)
    pair.write_text()
    assert not torch.equal(pair.text, before)
    pair.check([17], **COMPILED)
    with torch.no_grad():
        pair.target.model.layers[0].mlp.down_proj.weight.neg_()  # as a merged adapter does
    pair.write_text()
    pair.check([17], **COMPILED)
    assert num_graphs() == 2


def test_taps_of_another_threads_forward_are_no_change(pair: Pair) -> None:
    """Known bug: a text that began while another thread was in a forward dropped all that was compiled."""

    def hook(*args: Any) -> None:
        return None

    at_rest = fingerprint(pair.target, pair.drafter)
    handle = pair.target.model.layers[1].register_forward_hook(hook)
    assert fingerprint(pair.target, pair.drafter) != at_rest
    hook.is_tap = True  # type: ignore[attr-defined]
    assert fingerprint(pair.target, pair.drafter) == at_rest
    handle.remove()
    assert fingerprint(pair.target, pair.drafter) == at_rest


def test_a_number_of_a_module_is_a_change_and_one_that_forwards_count_is_none(pair: Pair) -> None:
    """Bug: `gate.top_k = 1` changed no compiled step."""
    module = pair.target.model.layers[1].mlp
    module.top_k = 2
    at_rest = fingerprint(pair.target, pair.drafter)
    module.top_k = 1
    assert fingerprint(pair.target, pair.drafter) != at_rest
    module.top_k = 2
    pair.check([17], compile=False)
    pair.target.model.rotary_emb.max_seq_len_cached += 1
    assert fingerprint(pair.target, pair.drafter) == at_rest


# Whose it is


def test_other_models_and_copies_share_nothing(pair: Pair, compiler: PlayedCompiler) -> None:
    """Promise: a reason of one pair is none of another, and a copy of a drafter begins without any."""
    compiler.fails_at = 1
    pair.check([17], **COMPILED)
    assert fallback_reason(pair.drafter, pair.target) is not None
    for drafter in (copy.deepcopy(pair.drafter), copy.copy(pair.drafter)):
        assert PairState.of(drafter, pair.target) is not pair.state
        assert fallback_reason(drafter, pair.target) is None
    assert fallback_reason(pair.drafter, make_target(num_hidden_layers=2)) is None
    assert PairState.of(pair.drafter, pair.target) is pair.state


def test_a_pair_ends_with_its_models(compiler: PlayedCompiler) -> None:
    """Promise: what was compiled keeps neither model alive, and a drafter's other pairs go on."""
    pair = Pair.make()
    pair.check([17], **COMPILED)
    assert compiler.num_calls > 1
    target = weakref.ref(pair.target)
    state = weakref.ref(pair.state)
    drafter = pair.drafter
    del pair
    gc.collect()
    assert target() is None
    assert state() is None
    left = weakref.ref(drafter)
    del drafter
    gc.collect()
    assert left() is None


# By itself


@pytest.fixture
def _second_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every eager step takes a second, and ten of them let "auto" compile."""
    monkeypatch.setattr(compiled, "stopwatch", lambda: lambda: 1.0)
    monkeypatch.setattr(compiled, "AUTO_SECONDS", 10.0)


@pytest.mark.usefixtures("_second_steps")
def test_auto_compiles_a_kind_of_step_after_its_eager_seconds(pair: Pair, compiler: PlayedCompiler) -> None:
    """Promise: in mid-text, and not for the steps of another kind; compile=False is not weighed."""
    pair.check([17], compile=False)
    pair.check([17], max_new_tokens=12)
    assert compiler.num_calls == 0
    blocks = list(pair.blocks([17], max_new_tokens=100))
    assert pair.texts_of(blocks) == pair.expected([17], 100)
    assert 10 < compiler.num_calls < len(blocks) - 1
    pair.check([17, 60], max_new_tokens=12)
    assert compiler.num_made == 1


@pytest.mark.usefixtures("_second_steps")
def test_auto_is_silent_about_what_cannot_be_compiled(
    pair: Pair, compiler: PlayedCompiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: nobody asked for it, and it is not tried."""
    monkeypatch.setattr(runner, "why_not", lambda *models: "it makes its own masks")
    for _ in range(2):
        pair.check([17], max_new_tokens=100)
    assert compiler.num_made == 0
    assert not warnings_of(caplog)


@pytest.mark.usefixtures("_second_steps")
def test_auto_never_compiles_on_another_device(
    pair: Pair, compiler: PlayedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: on an accelerator compiling is for whoever asks."""

    runner_class = runner.EngineDecoder._runner_class

    def chosen_elsewhere(self: Any, drafts: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(type(pair.target), "device", torch.device("xpu"))
            return runner_class(self, drafts)

    monkeypatch.setattr(runner.EngineDecoder, "_runner_class", chosen_elsewhere)
    pair.check([17], max_new_tokens=100)
    assert compiler.num_made == 0
    pair.check([17], **COMPILED)
    assert compiler.num_made == 1


# What a step costs


MODES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "chain": ([17], {}),
    "sampled": ([17], {"temperature": 0.7}),
    "rejection": ([17], {"temperature": 0.7, "verification": "rejection"}),
    "ragged": ([17, -60, 31], {}),
    "window": ([17], {"draft_window": (4, 12)}),
    "tree": ([17], {"draft_tree": 6}),
    "ragged trees": ([17, -60, 31], {"draft_tree": 6}),
    "lookup": ([17], {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2}),
}


@pytest.mark.parametrize("mode", MODES)
def test_the_host_waits_once_in_a_step(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: for what was accepted, of chains and of trees."""
    lengths, keywords = MODES[mode]
    pair = Pair.make(seed=11)
    device = LateDevice(pair.target, pair.drafter)
    device.install(monkeypatch)
    monkeypatch.setattr(trees, "num_promising", lambda totals, *_: totals.shape[1])  # which is asked for on CPUs alone
    num_waits: list[int] = []  # so far, after the prompt and each step
    commit = runner.EngineDecoder.commit

    def noted_commit(self: Any, step: Any) -> Any:
        blocks = commit(self, step)
        num_waits.append(device.num_waits)
        return blocks

    monkeypatch.setattr(runner.EngineDecoder, "commit", noted_commit)
    with device:
        blocks = pair.blocks(lengths, max_new_tokens=200, compile=False, **keywords)
        for _ in (*lengths, *lengths):  # the prompts' and a first step, which read the prompts
            next(blocks)
        device.faults.clear()
        for _ in range(25):
            next(blocks)
        blocks.close()
    assert device.faults == []
    assert {after - before for before, after in pairwise(num_waits)} == {1}


@pytest.mark.compiler
def test_inductors_step_writes_the_text_and_copies_no_keys(caplog: pytest.LogCaptureFixture) -> None:
    """Promise: keys are copied neither to write a block nor for each head: a step allocates less than a layer's keys."""
    target = make_target(num_hidden_layers=2, num_attention_heads=8, head_dim=64, max_position_embeddings=4096)
    drafter = make_drafter(**SMALL, attn_implementation="sdpa")
    prompt = make_prompt(2000)
    asked: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": [], "max_new_tokens": 12, **COMPILED}
    truth = greedy(target, prompt, max_new_tokens=12, eos_token_id=None)
    assert torch.equal(spec_generate(drafter, target, prompt, **asked), truth)
    assert not warnings_of(caplog)
    steps = generate_blocks(drafter, target, prompt, **asked)
    for _ in range(2):  # the prompt's forward, and the drafter's first, which reads all of the prompt
        next(steps)
    of_one_layer = 4 * prompt.shape[1] * target.config.num_key_value_heads * target.config.head_dim
    assert 0 < allocated_memory(lambda: list(steps), target.device) < of_one_layer


@pytest.mark.compiler
def test_inductors_batches_write_their_texts(pair: Pair) -> None:
    sampling = {**SAMPLING[1], "max_new_tokens": 12}
    for lengths in ([17, -60, 31], [45, 9]):
        assert pair.write(lengths, **sampling, **COMPILED) == pair.write(lengths, compile=False, **sampling)
    assert fallback_reason(pair.drafter, pair.target) is None
