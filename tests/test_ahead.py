"""Steps launched before the last one is read: the same blocks, the same caches, and one read per step, a step late.

The CPU computes at once, so there nothing is gained and the loop does not do it; here it is told to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from test_compilation import SMALL, small_target
from tiny_models import (
    BLOCK_SIZE,
    PAD_TOKEN_ID,
    WRONG_OFFSET,
    ScriptedDrafter,
    greedy,
    make_prompt,
    make_tokenizer,
)
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from dflash import Conversation, generate_blocks, spec_generate
from dflash.model import decoding_dflash, step_dflash
from dflash.model.decoding_dflash import Block
from dflash.model.proposals_dflash import Row
from dflash.model.step_dflash import CompiledPair, to_device, to_host


NEW_TOKENS = 40
TEXT_LENGTH = 300
LENGTHS = (17, 9, 26)  # of the prompts of a batch, all beginnings of one text
MIXED = [2, 0, BLOCK_SIZE - 1, 1, 3]


class PlacedDrafter(ScriptedDrafter):
    """Proposes a text that it knows, and goes wrong behind as many tokens as its script says of the anchor's position.

    It asks nothing but positions and computes on the device alone, so it may run ahead, and again at the same place.
    """

    def follow(self, text: torch.Tensor, script: list[int]) -> None:
        """Takes the text [1, S] and the script, which repeats."""
        self.text = text[0]
        self.rights = torch.tensor(script).repeat(len(self.text))[: len(self.text)]

    def forward(self, noise_embeds: Any = None, context_hidden_states: Any = None, **kwargs: Any) -> Any:
        width, positions = noise_embeds.shape[1], kwargs.get("position_ids")
        if positions is None:
            end = kwargs["past_key_values"].get_seq_length() + context_hidden_states.shape[1] + width
            positions = torch.arange(end)[None]
        super(ScriptedDrafter, self).forward(noise_embeds, context_hidden_states, **kwargs)
        positions = positions[:, -width:]
        anchors = positions[:, :1]
        is_wrong = positions - anchors == self.rights[anchors] + 1
        token_ids = (self.text[positions] + is_wrong * WRONG_OFFSET) % self.config.vocab_size
        return BaseModelOutput(last_hidden_state=self.sayings[token_ids])


@dataclass
class Pair:
    """A target, a drafter and what the target writes behind every beginning of its text."""

    target: PreTrainedModel
    drafter: PlacedDrafter
    text: torch.Tensor  # [1, S]
    events: list[str] = field(default_factory=list)

    def prompts(self, num_rows: int) -> Any:
        """One prompt [1, S], or a list of several."""
        return self.text[:, : LENGTHS[0]] if num_rows == 1 else [self.text[0, :length] for length in LENGTHS]

    def blocks(self, prompts: Any, compile: bool = True, script: list[int] = MIXED, **asked: Any) -> Iterator[Block]:
        """Compiled and ahead, or eagerly."""
        self.drafter.follow(asked.pop("text", self.text), script)
        asked = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "stop_token_ids": [], **asked}
        if asked["temperature"]:
            asked["generator"] = torch.Generator().manual_seed(11)
        self.events.clear()
        return generate_blocks(self.drafter, self.target, prompts, compile=compile, pad_token_id=PAD_TOKEN_ID, **asked)

    def both(self, prompts: Any, **asked: Any) -> list[Block]:
        """The blocks, which must be those of the loop that reads every step before it launches the next."""
        expected = list(self.blocks(prompts, compile=False, **asked))
        found = list(self.blocks(prompts, **asked))
        assert found == expected
        return found


@pytest.fixture(scope="module")
def _pair() -> Pair:
    torch._dynamo.reset()
    target = small_target()
    text = greedy(target, make_prompt(7, seed=3), max_new_tokens=TEXT_LENGTH - 7, eos_token_id=None)
    return Pair(target, PlacedDrafter(target, text, [0], **SMALL), text)


@pytest.fixture
def pair(_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The pair, and what is launched and read, in order."""
    monkeypatch.setattr(step_dflash, "BACKEND", "eager")
    monkeypatch.setattr(step_dflash, "ASYNCHRONOUS", ("cuda", "cpu"))
    if not CompiledPair.of(_pair.target, _pair.drafter)._checked:
        for num_rows in (1, 3):
            list(_pair.blocks(_pair.prompts(num_rows)))
            list(_pair.blocks(_pair.prompts(num_rows), max_draft_tokens=0))
    events = _pair.events

    def spy(owner: Any, name: str, event: str) -> None:
        function = getattr(owner, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            events.append(event)
            return result

        monkeypatch.setattr(owner, name, spied)

    spy(CompiledPair, "draft", "draft")
    spy(CompiledPair, "verify", "verify")
    spy(CompiledPair, "ahead", "ahead")
    spy(decoding_dflash.Step, "read", "read")
    return _pair


def num_ahead(pair: Pair) -> int:
    """Steps that the last call launched before it read the step before."""
    return sum(pair.events[i : i + 2] == ["verify", "ahead"] for i in range(len(pair.events)))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("script", [*([n] for n in range(BLOCK_SIZE)), MIXED, [5, 5, 0, 4, 0, 0, 3]], ids=str)
def test_the_same_blocks_at_every_acceptance(pair: Pair, num_rows: int, script: list[int]) -> None:
    """Promise: text, acceptance and widths are those of reading every step first."""
    blocks = pair.both(pair.prompts(num_rows), script=script)
    assert num_ahead(pair) > 1
    for row in range(num_rows):
        start = LENGTHS[row]
        written = [token_id for block in blocks if block.row == row for token_id in block.token_ids]
        assert written == pair.text[0, start : start + NEW_TOKENS].tolist()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("asked", [{}, {"top_k": 20, "top_p": 0.9}, {"max_draft_tokens": 3}], ids=str)
def test_sampled_blocks_are_the_same(pair: Pair, num_rows: int, asked: dict[str, Any]) -> None:
    """Promise: noise belongs to positions, also to those that the device alone knows."""
    # Rows that never stand at the same place, so that one text says what each of them samples.
    prompts = [make_prompt(length, seed=length) for length in (17, 70, 123)[:num_rows]]
    batch = prompts[0] if num_rows == 1 else [prompt[0] for prompt in prompts]
    text = torch.full((1, TEXT_LENGTH), 3)
    asked = {"temperature": 0.8, **asked}
    ends = [prompt.shape[1] for prompt in prompts]
    for block in pair.blocks(batch, compile=False, text=text, **asked):
        text[0, ends[block.row] :][: len(block.token_ids)] = torch.tensor(block.token_ids)
        ends[block.row] += len(block.token_ids)
    blocks = pair.both(batch, text=text, **asked)
    assert num_ahead(pair) > 3
    num_accepted = {block.num_accepted for block in blocks}
    assert min(num_accepted) == 0
    assert max(num_accepted) >= 3


@pytest.mark.parametrize("max_new_tokens", range(1, 3 * BLOCK_SIZE + 2))
def test_never_more_than_is_wanted(pair: Pair, max_new_tokens: int) -> None:
    """Promise: at the end of the text no step is wider than what is wanted, and none is launched in vain."""
    blocks = pair.both(pair.prompts(1), script=[1, 4, 5], max_new_tokens=max_new_tokens)
    assert sum(len(block.token_ids) for block in blocks) == max_new_tokens
    assert pair.events.count("verify") == len(blocks) - 1
    written = 0
    for block in blocks:
        assert block.num_proposals <= max(0, max_new_tokens - written - 1)
        written += len(block.token_ids)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("place", range(18, 30, 2))
def test_stop_tokens_inside_a_block(pair: Pair, num_rows: int, place: int) -> None:
    """Promise: what is in flight behind a stop is dropped; the rows that are left go on."""
    stop_token_ids = [int(pair.text[0, place])]
    blocks = pair.both(pair.prompts(num_rows), stop_token_ids=stop_token_ids, script=[5, 3])
    assert blocks[-1].token_ids[-1] in stop_token_ids or num_rows > 1


@pytest.mark.parametrize("place", [19, 24, 31])
def test_stop_strings_inside_a_block(pair: Pair, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: they are looked for on the host, while the device goes on."""
    monkeypatch.setattr(Row, "text", None)
    tokenizer: PreTrainedTokenizerBase = make_tokenizer()
    string = "".join(tokenizer.convert_ids_to_tokens(pair.text[0, place - 2 : place].tolist()))
    blocks = pair.both(pair.prompts(1), stop_strings=string, tokenizer=tokenizer, script=[4])
    assert sum(len(block.token_ids) for block in blocks) < NEW_TOKENS
    assert num_ahead(pair)


def held(conversation: Conversation) -> dict[str, Any]:
    """All that a conversation holds: tokens, lengths, keys and values in use, and the context that waits."""
    context = conversation.context
    state: dict[str, Any] = {"token_ids": list(conversation.token_ids), "num_read": conversation._num_read}
    for name in ("target_cache", "draft_cache"):
        cache = getattr(conversation, name)
        state[name] = cache.lengths
        length = min(
            cache.get_seq_length(), len(conversation.token_ids)
        )  # behind an error there are columns of no text
        layers = [layer for layer in cache.layers if layer.is_initialized]
        state[f"{name} states"] = [
            tensor[:, :, :length].clone() for layer in layers for tensor in (layer.keys, layer.values)
        ]
    state["waiting"] = None if context is None else (context.num_real, context.is_real.tolist(), context.counts)
    state["waiting states"] = [] if context is None else [context.features.clone()]
    return state


def assert_same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Equal, tensors but for rounding."""
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        if name.endswith("states"):
            torch.testing.assert_close(mine[name], value, rtol=0, atol=2e-5)
        else:
            assert mine[name] == value, name


@pytest.mark.parametrize("script", [[5], [0], [1, 4, 2]], ids=str)
def test_caches_are_what_was_yielded(pair: Pair, script: list[int]) -> None:
    """Promise: at every block, and so after a close, caches and context are those of the loop that reads first."""
    prompt, kept, plain = pair.prompts(1), Conversation(), Conversation()
    expected = []
    for block in pair.blocks(prompt, compile=False, conversation=plain, script=script):
        expected.append((block, held(plain)))
    for place, block in enumerate(pair.blocks(prompt, conversation=kept, script=script)):
        assert block == expected[place][0]
        assert_same(held(kept), expected[place][1])
        assert kept.target_cache.lengths == [len(kept.token_ids)]
    assert_same(held(kept), held(plain))
    assert num_ahead(pair) > 2


@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_a_conversation_goes_on_after_a_close(pair: Pair, num_blocks: int) -> None:
    """Promise: the text behind an early close is the target's, and only what was not yielded is run again."""
    conversation, prompt = Conversation(), pair.prompts(1)
    blocks = pair.blocks(prompt, conversation=conversation)
    written = [token_id for _ in range(num_blocks) for token_id in next(blocks).token_ids]
    blocks.close()  # type: ignore[attr-defined]
    so_far = torch.cat([prompt, torch.tensor([written])], dim=1)
    assert torch.equal(so_far, pair.text[:, : so_far.shape[1]])
    assert conversation.token_ids == so_far[0, :-1].tolist()
    again = [token_id for block in pair.blocks(so_far, conversation=conversation) for token_id in block.token_ids]
    assert again == pair.text[0, so_far.shape[1] :][:NEW_TOKENS].tolist()
    assert conversation.num_reused == so_far.shape[1] - 1


@pytest.mark.parametrize("stop", [20, 24, 29])
def test_a_conversation_goes_on_after_a_stop_and_after_an_error(pair: Pair, stop: int) -> None:
    """Promise: neither a stop nor a criterion that raises leaves anything of the step in flight."""
    prompt = pair.prompts(1)

    class Fails:
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            if input_ids.shape[1] == stop:
                raise RuntimeError("a criterion")
            return torch.zeros(1, dtype=torch.bool)

    states = []
    for compile in (False, True):
        stopped, failed = Conversation(), Conversation()
        ids = [int(pair.text[0, stop])]
        list(pair.blocks(prompt, compile=compile, conversation=stopped, stop_token_ids=ids))
        with pytest.raises(RuntimeError, match="a criterion"):
            list(pair.blocks(prompt, compile=compile, conversation=failed, stopping_criteria=[Fails()]))
        for conversation in (stopped, failed):
            states.append(held(conversation))
            so_far = pair.text[:, :33]
            again = [t for b in pair.blocks(so_far, compile=compile, conversation=conversation) for t in b.token_ids]
            assert again == pair.text[0, 33 : 33 + NEW_TOKENS].tolist()
    assert_same(states[2], states[0])
    assert_same(states[3], states[1])


def test_storage_that_grows_under_a_step_in_flight(pair: Pair) -> None:
    """Promise: over a bucket's edge nothing is lost, and nothing is compiled."""
    graphs = counters["stats"]["unique_graphs"]
    blocks = pair.both(pair.text[:, :230])
    assert sum(len(block.token_ids) for block in blocks) == NEW_TOKENS
    assert num_ahead(pair) > 3
    assert counters["stats"]["unique_graphs"] == graphs


class _Streamer:
    """Keeps what it is given, and what had been launched by then."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.tokens, self.verified = pair, list[int](), list[int]()

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        self.verified.append(self.pair.events.count("verify"))

    def end(self) -> None:
        self.tokens.append(-1)


def test_a_streamer_gets_the_tokens_in_order_while_the_next_step_runs(pair: Pair) -> None:
    streamer = _Streamer(pair)
    pair.drafter.follow(pair.text, [2])
    pair.events.clear()
    spec_generate(
        pair.drafter, pair.target, pair.prompts(1), streamer=streamer, max_new_tokens=NEW_TOKENS, temperature=0.0,
        stop_token_ids=[], compile=True,
    )  # fmt: skip
    assert streamer.tokens == [*pair.text[0, : LENGTHS[0] + NEW_TOKENS].tolist(), -1]
    # The prompt and its token; then three tokens of the first block, by when the second one's forward is launched.
    assert streamer.verified[:8] == [0, 0, 2, 2, 2, 3, 3, 3]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_a_step_is_launched_before_the_last_one_is_read(pair: Pair, num_rows: int, temperature: float) -> None:
    """Promise: while whole blocks are wanted, draft and forward of a step are launched first, then the last one is read."""
    list(pair.blocks(pair.prompts(num_rows), script=[2], temperature=temperature))
    assert pair.events[:2] == ["read", "verify"]  # the first draft, behind a whole prompt, runs eagerly
    assert pair.events[2 : 2 + 5 * 5] == ["draft", "ahead", "verify", "ahead", "read"] * 5
    assert pair.events[-1] == "read"


class _Reads(TorchDispatchMode):
    """Keeps the operations for which the host waits for numbers."""

    WAITING = ("_local_scalar_dense", "nonzero", "item", "equal", "masked_select", "unique")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split("::")[1].split(".")[0]
        if name in self.WAITING or (name == "index" and any(i is not None and i.dtype == torch.bool for i in args[1])):
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What makes the host wait for the device, or copies from its unpinned memory (on CUDA, that waits too)."""
    reads = _Reads()
    with monkeypatch.context() as patch:

        def watch(name: str) -> None:
            function = getattr(torch.Tensor, name)

            def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                reads.found.append(name)
                return function(self, *args, **kwargs)

            patch.setattr(torch.Tensor, name, noted)

        for name in ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "new_tensor"):
            watch(name)
        make = torch.tensor

        def made(*args: Any, **kwargs: Any) -> torch.Tensor:
            if "device" in kwargs:
                reads.found.append("tensor")
            return make(*args, **kwargs)

        patch.setattr(torch, "tensor", made)
        patch.setattr(step_dflash, "is_in_torch_dispatch_mode", lambda: False)  # ours is not to be noticed
        for name in ("draft", "verify"):
            function = getattr(CompiledPair, name)

            def unwatched(*args: Any, function: Any = function, **kwargs: Any) -> Any:
                with _disable_current_modes():  # a compiled function runs outside of them
                    return function(*args, **kwargs)

            patch.setattr(CompiledPair, name, unwatched)
        with reads:
            yield reads.found


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.5, "top_k": 30}], ids=["greedy", "sampled"])
def test_the_host_waits_once_per_step(
    pair: Pair, num_rows: int, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: between two launches the host waits for nothing but the verdict that it reads."""
    blocks = pair.blocks(pair.prompts(num_rows), script=[2, 4, 0], **asked)
    for _ in range(2 * num_rows):  # the prompts' blocks and the first step's: the second runs ahead
        next(blocks)
    with watched(monkeypatch) as found:
        for num_steps in range(5):  # the first read began before
            for _ in range(num_rows):
                next(blocks)
            assert found == ["tolist"] * num_steps
    assert num_ahead(pair) == 6
    blocks.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.3},
        {"prompt_lookup_num_tokens": 3},
        {"draft_tree": 6},
        {"temperature": 0.5, "verification": "rejection"},
        {"output_scores": True},
    ],
    ids=str,
)
def test_what_needs_the_text_is_read_first(pair: Pair, asked: dict[str, Any]) -> None:
    """Promise: whatever looks at the text, draws per step or keeps scores gets every step read before the next."""
    expected = [t for block in pair.blocks(pair.prompts(1), compile=False, **asked) for t in block.token_ids]
    assert [t for block in pair.blocks(pair.prompts(1), **asked) for t in block.token_ids] == expected
    assert "verify" in pair.events
    assert num_ahead(pair) == 0


def test_plain_compiled_decoding_runs_ahead_too(pair: Pair) -> None:
    conversations = []
    for compile in (False, True):
        conversations.append(Conversation())
        asked = {"max_draft_tokens": 0, "compile": compile, "conversation": conversations[-1]}
        blocks = list(pair.blocks(pair.prompts(1), **asked))
        assert [token for block in blocks for token in block.token_ids] == pair.text[0, 17 : 17 + NEW_TOKENS].tolist()
    assert num_ahead(pair) == NEW_TOKENS - 2  # all but the prompt's and the first
    assert_same(held(conversations[1]), held(conversations[0]))


def test_a_device_that_computes_at_once_reads_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: on the CPU nothing is launched that a stop would throw away."""
    monkeypatch.setattr(CompiledPair.of(pair.target, pair.drafter), "_is_asynchronous", False)
    pair.both(pair.prompts(1))
    assert num_ahead(pair) == 0


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("failing", ["draft", "verify"])
def test_a_graph_that_fails_ahead_is_run_eagerly(
    pair: Pair, failing: str, num_rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: what was to run ahead runs eagerly once the last step is read, and one warning says why."""
    compiled, calls = CompiledPair.of(pair.target, pair.drafter), list[int]()
    function = getattr(CompiledPair, failing)

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("no more graphs")
        return function(*args, **kwargs)

    monkeypatch.setattr(CompiledPair, failing, fails)
    try:
        pair.both(pair.prompts(num_rows))
        assert num_ahead(pair) > 0
        assert caplog.text.count("no more graphs") == 1
    finally:
        compiled.reason = None


def test_hooks_see_every_forward(pair: Pair) -> None:
    """Promise: somebody's hook, also one that comes half-way, makes the rest run eagerly."""
    seen: list[int] = []
    blocks = pair.blocks(pair.prompts(1), script=[2])
    written = [token_id for _ in range(4) for token_id in next(blocks).token_ids]
    handle = pair.target.register_forward_pre_hook(lambda *_: seen.append(1))
    num_steps = 0
    for block in blocks:
        written += block.token_ids
        num_steps += 1
    handle.remove()
    assert written == pair.text[0, LENGTHS[0] :][:NEW_TOKENS].tolist()
    assert len(seen) == num_steps - 1  # one step was in flight


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")])])  # fmt: skip
def test_numbers_between_host_and_device(device: str) -> None:
    numbers = torch.arange(6).view(2, 3)
    there = to_device(numbers, torch.device(device))
    assert there.device.type == device
    assert to_host(there)() == numbers.tolist()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="only CUDA says where the host waits")
def test_on_cuda_nothing_waits_between_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    target = small_target()
    text = greedy(target, make_prompt(7, seed=3), max_new_tokens=120, eos_token_id=None)
    pair = Pair(target.cuda(), PlacedDrafter(target, text, [0], **SMALL).cuda(), text.cuda())
    pair.drafter.embeddings, pair.drafter.sayings = pair.drafter.embeddings.cuda(), pair.drafter.sayings.cuda()
    for temperature in (0.0, 0.5):
        pair.both(pair.prompts(1), temperature=temperature)
        for block in (blocks := pair.blocks(pair.prompts(1), temperature=temperature)):
            torch.cuda.set_sync_debug_mode("default" if block.is_prefill else "error")
        torch.cuda.set_sync_debug_mode("default")
        del blocks
