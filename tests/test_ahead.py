"""Steps launched before the last one is read: the same blocks, the same caches, and one read per step, a step late.

The CPU computes at once, so there nothing is gained and the loop does not do it; here it is told to.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, zip_longest
from typing import Any

import pytest
import torch
from test_compilation import SMALL, small_target
from tiny_models import BLOCK_SIZE, PAD_TOKEN_ID, PlacedDrafter, greedy, make_prompt, make_tokenizer
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from dflash import Conversation, LatencyCurve, generate_blocks, spec_generate
from dflash.model import decoding_dflash, proposals_dflash, step_dflash
from dflash.model.cache_dflash import to_device, to_host
from dflash.model.decoding_dflash import Block
from dflash.model.proposals_dflash import Habits, TextSequence, machine
from dflash.model.step_dflash import CompiledPair


NEW_TOKENS = 40
TEXT_LENGTH = 300
LENGTHS = (17, 9, 26)  # of the prompts of a batch, all beginnings of one text
APART = (17, 70, 123)  # of prompts after which no two rows ever stand at the same place
MIXED = [2, 0, BLOCK_SIZE - 1, 1, 3]
ALONE: dict[str, Any] = {"stop_token_ids": [], "prompt_lookup_num_tokens": 0}  # what is looked up is read first
GREEDY: dict[str, Any] = {**ALONE, "temperature": 0.0, "max_new_tokens": NEW_TOKENS}


def same_blocks(found: list[Block], expected: list[Block]) -> bool:
    """Whether blocks are equal, but for what was proposed in each row's last step: eagerly nothing for a last token."""
    last = {block.sequence: place for place, block in enumerate(expected)}
    if len(found) != len(expected):
        return False
    for place, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
        if place == last[theirs.sequence] and mine.token_ids == theirs.token_ids and mine.sequence == theirs.sequence:
            continue
        if mine != theirs:
            return False
    return True


@dataclass
class Pair:
    """A target, a drafter and what the target writes after every beginning of its text."""

    target: PreTrainedModel
    drafter: PlacedDrafter
    text: torch.Tensor  # [1, S]
    events: list[str] = field(default_factory=list)

    def prompts(self, num_rows: int) -> Any:
        """One prompt [1, S], or a list of several."""
        return self.text[:, : LENGTHS[0]] if num_rows == 1 else [self.text[0, :length] for length in LENGTHS]

    def blocks(self, prompts: Any, compile: bool | str = True, script: list[int] = MIXED, **asked: Any) -> Any:
        """Compiled and ahead, or eagerly."""
        texts = asked.pop("texts", None)
        if texts is None:
            self.drafter.follow([self.text], script)
        else:
            self.drafter.follow(texts, script, APART[: len(texts)])
        asked = GREEDY | asked
        if asked["temperature"]:
            asked["generator"] = torch.Generator().manual_seed(11)
        self.events.clear()
        return generate_blocks(self.drafter, self.target, prompts, compile=compile, pad_token_id=PAD_TOKEN_ID, **asked)

    def both(self, prompts: Any, **asked: Any) -> list[Block]:
        """The blocks, which must be those of the loop that reads every step before it launches the next."""
        expected = list(self.blocks(prompts, compile=False, **asked))
        found = list(self.blocks(prompts, **asked))
        assert same_blocks(found, expected)
        return found


@pytest.fixture(scope="module")
def _pair() -> Pair:
    torch._dynamo.reset()
    target = small_target()
    text = greedy(target, make_prompt(7, seed=3), max_new_tokens=TEXT_LENGTH - 7, eos_token_id=None)
    return Pair(target, PlacedDrafter(target, **SMALL), text)


@pytest.fixture
def pair(_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """The pair, and what is launched and read, in order."""
    monkeypatch.setattr(step_dflash, "BACKEND", "eager")
    monkeypatch.setattr(step_dflash, "ASYNCHRONOUS", ("cuda", "cpu"))
    for module in (step_dflash, decoding_dflash):
        monkeypatch.setattr(module, "SEQUENCE_CLASSES", (1, 4, 16))  # fewer to capture
    if not CompiledPair.of(_pair.target, _pair.drafter)._num_calls:
        for num_rows in (1, 3):  # what never ran is compared with eager first, and not launched ahead
            list(_pair.blocks(_pair.prompts(num_rows)))
    spy(monkeypatch, _pair)
    return _pair


def spy(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    """Makes `events` of the pair what is launched and read from here on."""

    def watch(owner: Any, name: str, event: Any) -> None:
        function = getattr(owner, name)

        def spied(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            said = event(*args) if callable(event) else event
            pair.events.extend([said] * (said is not None))
            return result

        monkeypatch.setattr(owner, name, spied)

    watch(step_dflash.Pair, "step", lambda *args: "ahead" if args[-1] else "step")
    watch(step_dflash.Pair, "draft", "draft")
    watch(step_dflash.Pair, "verify", "verify")
    watch(decoding_dflash.Step, "read", "read")


def num_ahead(pair: Pair) -> int:
    """Steps that the last call launched before it read the step before."""
    return sum(pair.events[i : i + 2] == ["ahead", "read"] for i in range(len(pair.events)))


def num_verified(pair: Pair) -> int:
    """Forwards over blocks that the last call launched."""
    return sum(event in ("step", "ahead", "verify") for event in pair.events)


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("script", [*([n] for n in range(BLOCK_SIZE)), MIXED, [5, 5, 0, 4, 0, 0, 3]], ids=str)
def test_the_same_blocks_at_every_acceptance(pair: Pair, num_rows: int, script: list[int]) -> None:
    """Promise: text, acceptance and widths are those of reading every step first."""
    blocks = pair.both(pair.prompts(num_rows), script=script)
    assert num_ahead(pair) > 1
    for row in range(num_rows):
        start = LENGTHS[row]
        written = [token_id for block in blocks if block.sequence == row for token_id in block.token_ids]
        assert written == pair.text[0, start : start + NEW_TOKENS].tolist()


def sampled_texts(pair: Pair, prompts: list[torch.Tensor], **asked: Any) -> list[torch.Tensor]:
    """What is written after each prompt [1, S]: [1, TEXT_LENGTH] each."""
    texts = [torch.full((1, TEXT_LENGTH), 3) for _ in prompts]
    ends = [prompt.shape[1] for prompt in prompts]
    batch = prompts[0] if len(prompts) == 1 else [prompt[0] for prompt in prompts]
    for block in pair.blocks(batch, compile=False, texts=texts, **asked):
        texts[block.sequence][0, ends[block.sequence] :][: len(block.token_ids)] = torch.tensor(block.token_ids)
        ends[block.sequence] += len(block.token_ids)
    return texts


@pytest.mark.parametrize(
    ("asked", "num_rows"),
    [({}, 1), ({}, 3), ({"top_k": 20, "top_p": 0.9}, 3), ({"max_draft_tokens": 3}, 1)],  # each is captured by itself
    ids=str,
)
def test_sampled_blocks_are_the_same(pair: Pair, num_rows: int, asked: dict[str, Any]) -> None:
    """Promise: noise belongs to positions, also to those that the device alone knows; each row is another text."""
    prompts = [make_prompt(length, seed=length) for length in APART[:num_rows]]
    batch = prompts[0] if num_rows == 1 else [prompt[0] for prompt in prompts]
    asked = {"temperature": 0.8, **asked}
    blocks = pair.both(batch, texts=sampled_texts(pair, prompts, **asked), **asked)
    assert num_ahead(pair) > 3
    num_accepted = {block.num_accepted for block in blocks}
    assert min(num_accepted) == 0
    assert max(num_accepted) >= 3


def test_greedy_rows_of_different_texts(pair: Pair) -> None:
    """Promise: no row reads what another one's caches hold."""
    prompts = [make_prompt(length, seed=length) for length in APART]
    texts = sampled_texts(pair, prompts)
    blocks = pair.both([prompt[0] for prompt in prompts], texts=texts)
    assert num_ahead(pair) > 3
    for row, prompt in enumerate(prompts):
        written = [token_id for block in blocks if block.sequence == row for token_id in block.token_ids]
        truth = greedy(pair.target, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
        assert written == truth[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("max_new_tokens", range(1, 3 * BLOCK_SIZE + 2))
def test_never_more_than_is_wanted(pair: Pair, max_new_tokens: int) -> None:
    """Promise: blocks are whole and cut where the text ends, and no step is launched in vain."""
    blocks = pair.both(pair.prompts(1), script=[1, 4, 5], max_new_tokens=max_new_tokens)
    assert sum(len(block.token_ids) for block in blocks) == max_new_tokens
    assert num_verified(pair) == pair.events.count("read") - 1 == len(blocks) - 1
    assert all(block.num_proposals == BLOCK_SIZE - 1 for block in blocks[1:])


@pytest.mark.parametrize(
    ("num_rows", "num_left"), [*((1, num_left) for num_left in range(1, 2 * BLOCK_SIZE + 2)), (3, 2), (3, 7), (3, 10)]
)
def test_never_after_the_last_position(pair: Pair, num_rows: int, num_left: int) -> None:
    """Promise: no block reaches beyond the positions that the target can tell apart."""
    longest = max(LENGTHS[:num_rows])
    asked = {"max_new_tokens": num_left, "script": [5, 2]}
    limit, pair.target.config.max_position_embeddings = pair.target.config.max_position_embeddings, longest + num_left
    try:
        # Rows that are done stay for a while, and their place counts: what is left may be drafted for less than eagerly.
        blocks = pair.both(pair.prompts(1), **asked) if num_rows == 1 else list(pair.blocks(pair.prompts(3), **asked))
    finally:
        pair.target.config.max_position_embeddings = limit
    written: list[list[int]] = [[] for _ in range(num_rows)]
    for block in blocks:
        end = LENGTHS[block.sequence] + len(written[block.sequence]) + block.num_proposals
        assert end <= longest + num_left
        written[block.sequence] += block.token_ids
    for row, new_ids in enumerate(written):
        assert new_ids == pair.text[0, LENGTHS[row] :][:num_left].tolist()


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("place", range(18, 30, 2))
def test_stop_tokens_inside_a_block(pair: Pair, num_rows: int, place: int) -> None:
    """Promise: what is in flight after a stop is dropped; the rows that are left go on."""
    stop_token_ids = [int(pair.text[0, place])]
    blocks = pair.both(pair.prompts(num_rows), stop_token_ids=stop_token_ids, script=[5, 3])
    assert blocks[-1].token_ids[-1] in stop_token_ids or num_rows > 1
    for row in range(num_rows):
        written = [token_id for block in blocks if block.sequence == row for token_id in block.token_ids]
        truth = pair.text[0, LENGTHS[row] :][:NEW_TOKENS].tolist()
        is_stopped = stop_token_ids[0] in truth
        assert written == (truth[: truth.index(stop_token_ids[0]) + 1] if is_stopped else truth)


def test_rows_that_are_done_leave_once_a_smaller_class_fits(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: until then they are masked, and whoever stays goes on at the right place."""
    lend, sizes = CompiledPair.lend, list[int]()

    def noted(*args: Any) -> Any:
        loan = lend(*args)
        sizes.append(loan.num_sequences)
        return loan

    monkeypatch.setattr(CompiledPair, "lend", noted)
    for module in (step_dflash, decoding_dflash):
        monkeypatch.setattr(module, "SEQUENCE_CLASSES", (1, 2, 4, 8, 16))
    stop_token_id, lengths = int(pair.text[0, 60]), [58, 40, 52, 46, 34]  # all stop at one place, at different steps
    blocks = pair.both(
        [pair.text[0, :length] for length in lengths], stop_token_ids=[stop_token_id], script=[0, 1, 0, 2]
    )
    for row, length in enumerate(lengths):
        written = [token_id for block in blocks if block.sequence == row for token_id in block.token_ids]
        truth = pair.text[0, length:].tolist()
        assert written == truth[: truth.index(stop_token_id) + 1]
    assert sizes == [8, 4, 2, 1]
    assert num_ahead(pair) > 3


@pytest.mark.parametrize("place", [19, 24, 31])
def test_stop_strings_inside_a_block(pair: Pair, place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: they are looked for on the host, while the device goes on."""
    text, on_host, rows_on_host = TextSequence.text, TextSequence.on_host.func, list[TextSequence]()

    def noted(row: TextSequence) -> TextSequence:
        rows_on_host.append(on_host(row))
        return rows_on_host[-1]

    def text_on_host(row: TextSequence) -> torch.Tensor:
        assert any(row is one for one in rows_on_host)
        return text(row)

    monkeypatch.setattr(TextSequence, "on_host", property(noted))
    monkeypatch.setattr(TextSequence, "text", text_on_host)
    tokenizer: PreTrainedTokenizerBase = make_tokenizer()
    string = "".join(tokenizer.convert_ids_to_tokens(pair.text[0, place - 2 : place].tolist()))
    blocks = pair.both(pair.prompts(1), stop_strings=string, tokenizer=tokenizer, script=[4])
    assert sum(len(block.token_ids) for block in blocks) < NEW_TOKENS
    assert num_ahead(pair)


def held(conversation: Conversation) -> dict[str, Any]:
    """All that a conversation holds: tokens, lengths, keys and values in use, and the context that waits."""
    state: dict[str, Any] = {"token_ids": list(conversation.token_ids), "num_read": conversation._num_read}
    for name in ("target_cache", "draft_cache"):
        cache = getattr(conversation, name)
        (length,) = state[name] = cache.lengths
        layers = [layer for layer in cache.layers if length]  # lent storage is there before there is text
        tensors = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        state[f"{name} states"] = [tensor[:1, :, :length].clone() for tensor in tensors]
    waiting = [conversation.next_context()] if conversation.waiting else []
    state["waiting"] = [(context.num_real, context.is_real.tolist()) for context in waiting]
    state["waiting states"] = [context.features.clone() for context in waiting]
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
    # The last one is drafted for or not: the drafter's cache says so.
    for block in pair.blocks(prompt, compile=False, conversation=plain, script=script):
        expected.append((block, held(plain)))
    for place, block in enumerate(pair.blocks(prompt, conversation=kept, script=script)):
        if place + 1 < len(expected):
            assert block == expected[place][0]
            assert_same(held(kept), expected[place][1])
        assert kept.target_cache.lengths == [len(kept.token_ids)]
        num_waiting = sum(context.num_real[0] for context in kept.waiting)
        assert kept._num_read + num_waiting == len(kept.token_ids)
        assert kept.draft_cache.lengths == [kept._num_read]
    assert place + 1 == len(expected)
    assert kept.token_ids == plain.token_ids
    assert num_ahead(pair) > 2


@pytest.mark.parametrize("num_blocks", range(1, 8))
def test_a_conversation_goes_on_after_a_close(pair: Pair, num_blocks: int) -> None:
    """Promise: the text after an early close is the target's, and only what was not yielded is run again."""
    conversation, prompt = Conversation(), pair.prompts(1)
    blocks = pair.blocks(prompt, conversation=conversation)
    written = [token_id for _ in range(num_blocks) for token_id in next(blocks).token_ids]
    blocks.close()
    so_far = torch.cat([prompt, torch.tensor([written])], dim=1)
    assert torch.equal(so_far, pair.text[:, : so_far.shape[1]])
    assert conversation.token_ids == so_far[0, :-1].tolist()
    again = [token_id for block in pair.blocks(so_far, conversation=conversation) for token_id in block.token_ids]
    assert again == pair.text[0, so_far.shape[1] :][:NEW_TOKENS].tolist()
    assert conversation.num_reused == so_far.shape[1] - 1


@pytest.mark.parametrize("compiled", [(True, False, True), (False, True, False)], ids=str)
def test_a_conversation_goes_on_compiled_and_eagerly(pair: Pair, compiled: tuple[bool, ...]) -> None:
    """Promise: caches that were lent serve eager calls, and a conversation's own ones are moved into lent ones."""
    conversation, so_far = Conversation(), pair.prompts(1)
    for compile in compiled:
        blocks = list(pair.blocks(so_far, compile=compile, conversation=conversation))
        assert (conversation.loan is not None) or not compile
        assert conversation.num_reused == (0 if so_far.shape[1] == LENGTHS[0] else so_far.shape[1] - 1)
        so_far = torch.cat([so_far, torch.tensor([[t for block in blocks for t in block.token_ids]])], dim=1)
        assert torch.equal(so_far, pair.text[:, : so_far.shape[1]])
    assert so_far.shape[1] == LENGTHS[0] + 3 * NEW_TOKENS


class _Fails:
    """A criterion that raises once the text has so many tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            raise RuntimeError("a criterion")
        return torch.zeros(1, dtype=torch.bool)


@pytest.mark.parametrize("stop", [20, 24, 29])
def test_a_conversation_goes_on_after_a_stop_and_after_an_error(pair: Pair, stop: int) -> None:
    """Promise: a stop leaves nothing of the step in flight, a criterion that raises nothing at all; the next call is right."""
    prompt = pair.prompts(1)
    states = []
    for compile in (False, True):
        stopped, failed = Conversation(), Conversation()
        ids = [int(pair.text[0, stop])]
        list(pair.blocks(prompt, compile=compile, conversation=stopped, stop_token_ids=ids))
        with pytest.raises(RuntimeError, match="a criterion"):
            list(pair.blocks(prompt, compile=compile, conversation=failed, stopping_criteria=[_Fails(stop)]))
        states.append(held(stopped))
        assert not failed.token_ids
        assert failed.loan is None
        for conversation in (stopped, failed):
            so_far = pair.text[:, :33]
            again = [t for b in pair.blocks(so_far, compile=compile, conversation=conversation) for t in b.token_ids]
            assert again == pair.text[0, 33 : 33 + NEW_TOKENS].tolist()
            assert conversation.num_reused == (len(states[-1]["token_ids"]) if conversation is stopped else 0)
    assert_same(states[1], states[0])


def test_storage_that_grows_under_a_step_in_flight(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: over the edge of a class of capacity nothing is lost, and the second text compiles nothing."""
    monkeypatch.setattr(step_dflash, "SMALLEST_CAPACITY", 64)
    monkeypatch.setattr(decoding_dflash, "INITIAL_NEW_TOKENS", 8)
    for num_rows in (1, 3):
        conversation = Conversation()
        for num_texts in range(2):
            graphs = counters["stats"]["unique_graphs"]
            blocks = pair.both(pair.prompts(num_rows), max_new_tokens=100, script=[2, 5, 3])
            assert sum(len(block.token_ids) for block in blocks) == num_rows * 100
            assert num_ahead(pair) > 10
            assert num_texts == 0 or counters["stats"]["unique_graphs"] == graphs
    capacities = []
    for _ in pair.blocks(pair.prompts(1), conversation=conversation, max_new_tokens=100):
        capacities.append(conversation.target_cache.storage(0)[0][0].shape[2])
    assert sorted(set(capacities)) == [64, 128, 256]
    assert capacities == sorted(capacities)


def data_of(conversation: Conversation) -> list[int]:
    """Where the caches lie in memory."""
    return [keys.data_ptr() for cache in conversation.caches for keys in cache.storage(0)[0]]


def test_storage_is_lent_to_one_text_after_another(pair: Pair) -> None:
    """Promise: a text gives it back, a conversation keeps it as long as it lives, and nobody has another one's."""
    first, second = Conversation(), Conversation()
    expected = pair.text[0, LENGTHS[0] :][:NEW_TOKENS].tolist()
    one = pair.blocks(pair.prompts(1), conversation=first)
    other = pair.blocks(pair.prompts(1), conversation=second)
    texts: list[list[int]] = [[], []]
    for of_one, of_other in zip_longest(one, other):  # two texts at once
        texts[0] += of_one.token_ids
        texts[1] += of_other.token_ids
        assert not set(data_of(first)) & set(data_of(second))
    assert texts == [expected, expected]
    data = data_of(first)
    del first, one, of_one
    gc.collect()
    third = Conversation()
    list(pair.blocks(pair.prompts(1), conversation=third))
    assert data_of(third) == data
    graphs = counters["stats"]["unique_graphs"]
    list(pair.blocks(pair.prompts(1)))
    assert counters["stats"]["unique_graphs"] == graphs


def test_a_conversation_that_begins_anew_eagerly_keeps_nothing_lent(pair: Pair) -> None:
    """Promise: what compiled steps run on later is lent to it, and not caches of its own that pass for it."""
    conversation, other = Conversation(), pair.prompts(1).flip(-1)
    list(pair.blocks(pair.prompts(1), conversation=conversation))
    assert conversation.loan is not None
    list(pair.blocks(other, conversation=conversation, compile=False))
    assert conversation.loan is None
    found = [token_id for block in pair.blocks(other, conversation=conversation) for token_id in block.token_ids]
    assert (
        found == greedy(pair.target, other, max_new_tokens=NEW_TOKENS, eos_token_id=None)[0, other.shape[1] :].tolist()
    )
    assert conversation.loan is not None
    assert conversation.target_cache is conversation.loan.target_cache


def test_storage_is_lent_again_only_as_it_was(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: neither what eager steps let grow nor what held another dtype reaches the next text."""
    monkeypatch.setattr(step_dflash, "SMALLEST_CAPACITY", 64)
    monkeypatch.setattr(decoding_dflash, "INITIAL_NEW_TOKENS", 8)
    target = small_target()
    other = Pair(target, PlacedDrafter(target, **SMALL), pair.text)
    compiled, asked = CompiledPair.of(target, other.drafter), {"max_draft_tokens": 0, "max_new_tokens": 8}

    def check() -> None:
        blocks = list(other.blocks(other.prompts(1), **asked))
        assert [token_id for block in blocks for token_id in block.token_ids] == pair.text[0, 17:25].tolist()
        assert compiled.reason is None

    conversation = Conversation()
    list(other.blocks(other.prompts(1), conversation=conversation, **asked))
    list(other.blocks(other.prompts(1), conversation=conversation, compile=False, **asked | {"max_new_tokens": 150}))
    assert conversation.target_cache.layers[0].capacity > conversation.loan.capacity  # type: ignore[union-attr]
    del conversation
    gc.collect()
    check()
    for (size, capacity), loans in compiled._shelf.items():
        for loan in loans:
            assert {tuple(keys.shape[::2]) for keys in loan.target_cache.storage(0)[0]} == {(size, capacity)}

    conversation = Conversation()
    list(other.blocks(other.prompts(1), conversation=conversation, **asked))
    for model in (target, other.drafter):
        model.double()
    other.drafter.sayings = other.drafter.sayings.double()
    check()
    del conversation
    gc.collect()
    check()
    check()


class _Streamer:
    """Keeps what it is given, and what had been launched by then."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.tokens, self.verified = pair, list[int](), list[int]()

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        self.verified.append(num_verified(self.pair))

    def end(self) -> None:
        self.tokens.append(-1)


def test_a_streamer_gets_the_tokens_in_order_while_the_next_step_runs(pair: Pair) -> None:
    streamer = _Streamer(pair)
    pair.drafter.follow([pair.text], [2])
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
    """Promise: while another step must follow it is launched first, and then the last one is read."""
    asked = {"temperature": temperature, "script": [2]}
    list(pair.blocks(pair.prompts(num_rows), **asked))  # a shape that is new is compared first
    list(pair.blocks(pair.prompts(num_rows), **asked))
    assert pair.events[:2] == ["read", "step"]  # of the prompt, whose token the first step needs
    assert pair.events[2 : 2 + 2 * 8] == ["ahead", "read"] * 8
    assert pair.events[-1] == "read"
    assert set(pair.events) == {"read", "step", "ahead"}
    # What the last ones give may end a row: they are read first.
    num_left = (
        NEW_TOKENS - 1 - 2 * BLOCK_SIZE
    )  # tokens after which nothing is launched any more before it is sure to be
    assert num_ahead(pair) >= num_left // 3


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
        make_function = CompiledPair.function

        def unwatched(*args: Any) -> Any:
            function = make_function(*args)

            def run(*inputs: Any) -> Any:
                with _disable_current_modes():  # a compiled function runs outside of them
                    return function(*inputs)

            return run

        patch.setattr(CompiledPair, "function", unwatched)
        with reads:
            yield reads.found


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.5, "top_k": 30}], ids=["greedy", "sampled"])
def test_the_host_waits_once_per_step(
    pair: Pair, num_rows: int, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: between two launches the host waits for nothing but the verdict that it reads."""
    list(pair.blocks(pair.prompts(num_rows), **asked))
    blocks = pair.blocks(pair.prompts(num_rows), script=[2, 4, 0], **asked)
    for _ in range(2 * num_rows):  # the prompts' blocks and the first step's: the second runs ahead
        next(blocks)
    with watched(monkeypatch) as found:
        for num_steps in range(5):  # the first read began before
            for _ in range(num_rows):
                next(blocks)
            assert found == ["tolist"] * num_steps
    assert num_ahead(pair) == 6
    blocks.close()


@pytest.mark.parametrize(
    "asked",
    [
        {"repetition_penalty": 1.3},
        {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
        {"draft_tree": 6},
        {"temperature": 0.5, "verification": "rejection"},
        {"output_scores": True},
    ],
    ids=str,
)
def test_what_needs_the_text_is_read_first(pair: Pair, asked: dict[str, Any]) -> None:
    """Promise: whatever looks at the text, draws per step or keeps scores gets every step read before the next."""
    expected = [t for block in pair.blocks(pair.prompts(1), compile=False, **asked) for t in block.token_ids]
    found = [t for block in pair.blocks(pair.prompts(1), **asked) for t in block.token_ids]
    assert found[:-1] == expected[:-1]
    # Noise that belongs to steps is drawn otherwise by an eager step that drafts nothing for a last token.
    assert len(found) == len(expected)
    assert found == expected or "verification" in asked
    assert "verify" in pair.events
    assert "ahead" not in pair.events


def test_plain_compiled_decoding_leaves_the_same_caches(pair: Pair) -> None:
    """Promise: without a draft every step is a forward over one column, and each is read before the next."""
    conversations = []
    for compile in (False, True):
        conversations.append(Conversation())
        asked = {"max_draft_tokens": 0, "compile": compile, "conversation": conversations[-1]}
        blocks = list(pair.blocks(pair.prompts(1), **asked))
        assert [token for block in blocks for token in block.token_ids] == pair.text[0, 17 : 17 + NEW_TOKENS].tolist()
    assert pair.events == ["read", *["verify", "read"] * (NEW_TOKENS - 1)]
    for conversation in conversations:
        conversation.next_context()
    assert_same(held(conversations[1]), held(conversations[0]))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_adaptive_steps_run_whole_and_ahead_while_a_choice_does_not_pay(pair: Pair, num_rows: int) -> None:
    """Promise: what is chosen is weighed against a whole step, which is faster here and then taken; the text is the same."""
    curve = LatencyCurve((1, 6), (10.0, 10.1), 0.1, machine(pair.target, pair.drafter), whole_ms=10.0)
    for whole_ms, ran in ((None, {"draft", "verify", "read"}), (10.0, {"read", "step", "ahead"})):
        asked = {"latency_curve": replace(curve, whole_ms=whole_ms), "script": [5, 2, 4]}
        blocks = [list(pair.blocks(pair.prompts(num_rows), **asked)) for _ in range(2)][1]
        assert set(pair.events) - ran <= ({"draft", "verify"} if num_rows > 1 else set())
        assert ran <= set(pair.events)
        for row in range(num_rows):
            written = [token_id for block in blocks if block.sequence == row for token_id in block.token_ids]
            assert written == pair.text[0, LENGTHS[row] :][:NEW_TOKENS].tolist()
    assert pair.events.count("verify") <= 2  # after a text has left the batch


@pytest.mark.parametrize("num_rows", [1, 3])
def test_measuring_leaves_the_caches_as_they_were(pair: Pair, num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: timed forwards, whole steps among them, write nothing into the text that either model has read."""
    measure, curves = decoding_dflash.Proposer._curve, list[LatencyCurve]()

    def held(conversation: Conversation) -> list[torch.Tensor]:
        return [
            states[row, :, :length].clone()
            for cache in conversation.caches
            for layer in cache.layers
            for states in (layer.keys, layer.values)
            for row, length in enumerate(cache.lengths)
        ]

    def checked(self: decoding_dflash.Proposer, *args: Any) -> LatencyCurve | None:
        before = held(self.conversation)
        curve = measure(self, *args)
        assert all(map(torch.equal, before, held(self.conversation)))
        curves.extend([] if curve is None else [curve])
        return curve

    monkeypatch.setattr(decoding_dflash.Proposer, "_curve", checked)
    list(pair.blocks(pair.prompts(num_rows), adaptive=True))
    assert curves[0].whole_ms is not None


def test_a_curve_that_is_known_is_taken_before_the_first_step(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a later text need not draft before it can run whole steps, and its forwards are not timed again."""
    monkeypatch.setattr(proposals_dflash, "PATIENCE", float("inf"))
    ticks = count()  # every forward takes one, so whole steps pay whatever else the machine does
    monkeypatch.setattr(proposals_dflash, "clock", lambda: 0.01 * next(ticks))
    list(pair.blocks(pair.prompts(1), adaptive=True))
    Habits.of(pair.drafter).choices.left = 100
    blocks = list(pair.blocks(pair.prompts(1), adaptive=True))
    assert [token_id for block in blocks for token_id in block.token_ids] == pair.text[0, 17:][:NEW_TOKENS].tolist()
    assert set(pair.events) == {"read", "step", "ahead"}


def test_a_device_that_computes_at_once_reads_first(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: on the CPU nothing is launched that a stop would throw away."""
    monkeypatch.setattr(step_dflash, "ASYNCHRONOUS", ("cuda",))
    drafter = PlacedDrafter(pair.target, **SMALL)  # as another pair: nothing of it has been lent yet
    other = Pair(pair.target, drafter, pair.text)
    spy(monkeypatch, other)
    other.both(other.prompts(1))
    assert set(other.events) == {"step", "read"}


class _NoMoreGraphsError(Exception):
    """What a compiled function raises."""


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("num_graphs", [0, 1, 4])
def test_a_graph_that_fails_ahead_is_run_eagerly(
    pair: Pair, num_graphs: int, num_rows: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: what was to run ahead runs eagerly once the last step is read, and one warning says why."""
    compiled, calls = CompiledPair.of(pair.target, pair.drafter), list[int]()
    make = CompiledPair.function

    def failing(*args: Any) -> Any:
        function = make(*args)

        def run(*inputs: Any) -> Any:
            calls.append(1)
            if len(calls) > num_graphs:
                raise _NoMoreGraphsError("no more graphs")
            return function(*inputs)

        return run

    monkeypatch.setattr(CompiledPair, "function", failing)
    try:
        pair.both(pair.prompts(num_rows))
        assert len(calls) == num_graphs + 1
        assert num_ahead(pair) == max(0, num_graphs - 1)
        assert caplog.text.count("no more graphs") == 1
    finally:
        compiled.reason = None
        compiled._shelf.clear()  # eager steps may have made other storage of what was lent


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
    pair = Pair(target.cuda(), PlacedDrafter(target.cpu(), **SMALL).cuda(), text.cuda())
    target.cuda()
    for temperature in (0.0, 0.5):
        pair.both(pair.prompts(1), temperature=temperature)
        for block in (blocks := pair.blocks(pair.prompts(1), temperature=temperature)):
            torch.cuda.set_sync_debug_mode("default" if block.is_prefill else "error")
        torch.cuda.set_sync_debug_mode("default")
        del blocks
