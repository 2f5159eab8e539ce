"""What compiled and recorded steps promise alike: the eager text, and eager steps where nothing else is right.

The compiler and the recorder are played.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import CHANGES, Pair, PlayedCompiler, PlayedRecorder, move_parameter
from families import FAMILIES
from tiny_models import BLOCK_SIZE, GREEDY, SMALL, counted_forwards, greedy, make_drafter, make_prompt
from torch.utils.flop_counter import FlopCounterMode

from dflash import Conversation, spec_generate
from dflash.engine import fallback_reason


WAYS: dict[str, dict[str, Any]] = {"compiled": {"compile": True}, "recorded": {"cuda_graph": True}}
HEADS: dict[str, dict[str, int]] = {
    "none": {},
    "selector": {"selector_rank": 4, "selector_top_k": 5},
    "Domino": {"gru_hidden_dim": 6, "emb_dim": 4},
    "DSpark": {"markov_rank": 4},
}
SAMPLING: list[dict[str, Any]] = [{"temperature": 0.7}, {"temperature": 0.9, "top_k": 9, "top_p": 0.8}]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The keywords of a way to run steps."""
    return WAYS[request.param]


@pytest.fixture
def played(way: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> PlayedCompiler | PlayedRecorder:
    """What makes its functions."""
    if "compile" in way:
        compiler = PlayedCompiler()
        monkeypatch.setattr(torch, "compile", compiler)
        return compiler
    return PlayedRecorder.of_the_cpu(monkeypatch)


@pytest.fixture
def pair(played: Any) -> Pair:
    """A pair of which nothing is compiled or recorded."""
    return Pair.make()


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings about steps that run eagerly."""
    return [record.message for record in caplog.records if "eagerly" in record.message]


@pytest.mark.parametrize("sampling", SAMPLING, ids=str)
@pytest.mark.parametrize("lengths", [[17], [17, -60, 31]], ids=["one", "three"])
def test_sampled_text_is_the_eager_one(
    pair: Pair, played: Any, way: dict[str, Any], sampling: dict[str, Any], lengths: list[int]
) -> None:
    """Promise: what a seed writes does not depend on how steps run, and another temperature needs no new function."""
    for temperature in (sampling["temperature"], 1.3):
        asked = {**sampling, "temperature": temperature}
        pair.follow_sampled(17, **asked)
        assert pair.write(lengths, **asked, **way) == pair.write(lengths, compile=False, **asked)
    assert played.num_made == 1


@pytest.mark.parametrize("verification", ["auto", "rejection", "block"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("lengths", [[17], [17, -60, 31]], ids=["one", "three"])
def test_drawn_proposals_are_those_of_eager_steps(
    played: Any, way: dict[str, Any], head: str, verification: str, lengths: list[int]
) -> None:
    """Promise: with the same seed all that is proposed, accepted and written is equal; another temperature needs no new function."""
    torch.manual_seed(1)
    pair = Pair.make()
    drafter = make_drafter(**SMALL, **HEADS[head])
    for parameter in drafter.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    pair = Pair(pair.target, drafter, pair.text, pair.other)  # type: ignore[arg-type]
    num_accepted = 0
    for temperature in (1.5, 3.0):
        asked = {"temperature": temperature, "top_k": 6, "top_p": 0.95, "verification": verification}
        eager = list(pair.blocks(lengths, compile=False, **asked))
        assert list(pair.blocks(lengths, **asked, **way)) == eager
        num_accepted += sum(block.num_accepted for block in eager)
    assert num_accepted or head == "none"
    assert played.num_made == 1


@pytest.mark.parametrize("verification", ["auto", "block"])
@pytest.mark.parametrize("lengths", [[41], [60, 60]], ids=["one", "two"])
def test_lookups_between_drawn_proposals_are_those_of_eager_steps(
    played: Any, way: dict[str, Any], verification: str, lengths: list[int]
) -> None:
    """Promise: they are verified by the rule of proposals that were not drawn; in a batch, where all texts have one."""
    pair = Pair.make(seed=11)
    drafter = make_drafter(**SMALL, **HEADS["selector"])
    pair = Pair(pair.target, drafter, pair.text, pair.other)  # type: ignore[arg-type]
    asked: dict[str, Any] = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 1, "max_new_tokens": 60}
    asked |= {"temperature": 0.2, "top_k": 2, "verification": verification}
    eager = list(pair.blocks(lengths, compile=False, **asked))
    looked_up = [block for block in eager if block.is_lookup]
    assert any(block.num_accepted for block in looked_up) or len(lengths) > 1
    assert 0 < len(looked_up) < len(eager) // 2
    assert list(pair.blocks(lengths, **asked, **way)) == eager
    assert fallback_reason(drafter, pair.target) is None


def test_what_is_drawn_after_a_lookup_with_a_window_is_that_of_eager_steps(played: Any, way: dict[str, Any]) -> None:
    """Known bug: the drafter of a whole step saw fewer keys, and the text of a seed was another one."""
    pair = Pair.make(seed=11)
    drafter = make_drafter(**SMALL, **HEADS["selector"])
    pair = Pair(pair.target, drafter, pair.text, pair.other)  # type: ignore[arg-type]
    asked: dict[str, Any] = {"prompt_lookup_num_tokens": 12, "max_matching_ngram_size": 1, "draft_window": (4, 12)}
    asked |= {"temperature": 1.5, "top_k": 6, "top_p": 0.95}
    assert pair.write([26], **asked, **way) == pair.write([26], compile=False, **asked)


def test_a_conversation_takes_turns_with_eager_steps(pair: Pair, way: dict[str, Any]) -> None:
    conversation = Conversation()
    eager = {"compile": False}
    for length, keywords in ((17, way), (57, eager), (90, way), (130, eager), (33, way)):
        pair.check([length], conversation=conversation, **keywords)
    assert conversation.num_reused == 32


def test_steps_with_a_lookup_run_between_whole_ones(played: Any, way: dict[str, Any]) -> None:
    """Promise: only where the text's last tokens occurred before a step is not whole, unless it is recorded."""
    pair = Pair.make(seed=11)
    asked: dict[str, Any] = {"prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2, "max_new_tokens": 120}
    blocks = list(pair.blocks([17], **asked, **way))
    assert pair.texts_of(blocks) == pair.expected([17], 120)
    num_looked_up = sum(block.is_lookup for block in blocks)
    assert 0 < num_looked_up < len(blocks) - 1
    num_whole = len(blocks) - 1 if "cuda_graph" in way else len(blocks) - num_looked_up
    assert 0 < played.num_calls <= num_whole + played.num_made


@pytest.mark.parametrize(
    "keywords",
    [
        {"draft_tree": 6},
        {"adaptive": True},
        {"output_scores": True},
        {"output_logits": True},
        {"repetition_penalty": 1.3},
        {"temperature": 0.7, "min_p": 0.1},
        {"max_draft_tokens": 0},
    ],
    ids=str,
)
def test_steps_that_need_the_host_run_eagerly(
    pair: Pair, played: Any, way: dict[str, Any], keywords: dict[str, Any]
) -> None:
    """Promise: processors, scores and trees change nothing of the text, and make no function."""
    assert pair.write([17], **keywords, **way) == pair.write([17], compile=False, **keywords)
    assert played.num_made == 0


def test_hooks_and_dispatch_modes_see_every_forward(pair: Pair, played: Any, way: dict[str, Any]) -> None:
    """Promise: also a hook that comes in mid-text; and what was made stays."""
    blocks = pair.blocks([17], **way)
    written = [token_id for _ in range(4) for token_id in next(blocks).token_ids]
    with counted_forwards(pair.target) as forwards:
        rest = list(blocks)
    assert [*written, *pair.texts_of(rest)[0]] == pair.expected([17])[0]
    assert len(forwards) == len(rest)
    num_calls = played.num_calls
    with FlopCounterMode(display=False) as flops:
        pair.check([17], **way)
    assert flops.get_total_flops() > 0
    assert played.num_calls == num_calls
    pair.check([17], **way)
    assert played.num_calls > num_calls
    assert played.num_made == 1


@pytest.mark.parametrize("pre", [False, True])
def test_a_hook_of_a_module_inside_runs_every_step_eagerly(
    pair: Pair, played: Any, way: dict[str, Any], pre: bool
) -> None:
    """Bug: it froze as it was when the step was made. What transformers hooks by itself, for hidden states, is none."""
    pair.target(pair.text[:, :4], output_hidden_states=True)
    pair.check([17], **way)
    assert played.num_made == 1
    seen: list[int] = []
    module = pair.target.model.layers[1].mlp
    register = module.register_forward_pre_hook if pre else module.register_forward_hook
    handle = register(lambda *args: seen.append(1))
    num_calls = played.num_calls
    blocks = list(pair.blocks([17], **way))
    assert pair.texts_of(blocks) == pair.expected([17])
    assert len(seen) >= len(blocks)
    assert played.num_calls == num_calls
    assert "a hook of Qwen3ForCausalLM.model.layers.1.mlp" in str(fallback_reason(pair.drafter, pair.target))
    handle.remove()
    pair.check([17], **way)
    assert fallback_reason(pair.drafter, pair.target) is None
    assert played.num_calls > num_calls


@pytest.mark.parametrize(
    ("fails_at", "lengths"), [(1, [17]), (2, [17]), (1, [17, -60, 31]), (5, [17, -60, 31])], ids=str
)
def test_a_function_that_fails_in_mid_text_leaves_the_right_text(
    pair: Pair, played: Any, way: dict[str, Any], fails_at: int, lengths: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: one warning, one reason, and no further try until a model changes."""
    played.fails_at = fails_at
    for _ in range(2):
        pair.check(lengths, **way)
    assert played.num_calls == fails_at
    (warning,) = warnings_of(caplog)
    assert "RuntimeError('" in warning
    assert "\n" not in warning
    assert str(fallback_reason(pair.drafter, pair.target)) in warning
    move_parameter(pair)
    pair.write_text()
    pair.check(lengths, **way)
    assert fallback_reason(pair.drafter, pair.target) is None
    assert played.num_calls > fails_at


@pytest.mark.parametrize("part", ["features", "choices"])
def test_a_function_that_computes_something_else_is_not_used(
    pair: Pair, played: Any, way: dict[str, Any], part: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: the first output of each function is compared with the eager one."""

    def spoil(output: Any) -> Any:
        if part == "features":
            output.features.copy_(output.features.flip(-1))
        else:
            output.token_ids.add_(1).remainder_(90)
        return output

    played.spoil = spoil
    for _ in range(2):
        pair.check([17], **way)
    assert played.num_calls == 1
    (warning,) = warnings_of(caplog)
    assert "computes something else than eagerly" in warning


@pytest.mark.parametrize("change", CHANGES)
def test_a_function_of_a_model_that_was_changed_is_made_anew(
    pair: Pair, played: Any, way: dict[str, Any], change: Callable[[Pair], None]
) -> None:
    """Promise: the text is that of the model as it is now."""
    pair.check([17], **way)
    change(pair)
    pair.write_text()
    for _ in range(2):
        pair.check([17], **way)
    assert played.num_made == 2


def test_two_threads_write_their_own_texts(pair: Pair, played: Any, way: dict[str, Any]) -> None:
    """Promise: threads may share a pair; a function is compiled once."""
    pair.check_in_threads([17, -60], **way)
    assert played.num_made == 1 or "cuda_graph" in way


@pytest.mark.skipif(not FAMILIES["qwen3_next"].is_served, reason="transformers 4 has no common form of running states")
def test_linear_layers_run_eagerly(played: Any, way: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Promise: one warning says why."""
    target = FAMILIES["qwen3_next"].make()
    drafter = make_drafter()
    prompt = make_prompt(17, seed=3)
    truth = greedy(target, prompt, max_new_tokens=12, eos_token_id=None)
    output = spec_generate(drafter, target, prompt, max_new_tokens=12, **GREEDY, **way)
    assert torch.equal(output.sequences, truth)
    (warning,) = warnings_of(caplog)
    assert "linear_attention" in warning
    assert played.num_made == 0


def test_a_prompt_that_is_no_longer_than_a_block_runs_whole(pair: Pair, played: Any, way: dict[str, Any]) -> None:
    """Promise: the drafter's cache has its storage before the first whole step."""
    assert pair.write([BLOCK_SIZE], **way) == pair.write([BLOCK_SIZE], compile=False)
    assert played.num_made == 1
    assert fallback_reason(pair.drafter, pair.target) is None
