"""What users of a device with a queue need, held on a CPU: what is recorded, what waits, what is copied, what is compared.

The branches of such devices are forced (`ASYNCHRONOUS`), and `devices.py` plays the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from devices import TEXT_LENGTH, Graphs, LateDevice, OtherDefaultDevice, PlacedDrafter, Turns, as_it_is
from tiny_models import BLOCK_SIZE, PAD_TOKEN_ID, greedy, make_prompt, make_target
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext
from transformers import PreTrainedModel

from dflash import Conversation, generate_blocks, spec_generate
from dflash.model import decoding_dflash, proposals_dflash, step_dflash
from dflash.model.decoding_dflash import Block, Decoder
from dflash.model.proposals_dflash import LatencyCurve
from dflash.model.step_dflash import COMPARED_CALLS, ROW_CLASSES, WIDTH_CLASSES, CompiledPair


SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_target_layers": 2, "target_layer_ids": [0]}
MIXED = [2, 0, BLOCK_SIZE - 1, 1, 3, 0, 4]
NEW_TOKENS = 40

# Graphs that the first text of a pair may record: one sequence, and eight that leave one by one.
MOST_KEYS_OF_ONE, MOST_KEYS_OF_EIGHT = 4, 10


@dataclass
class Pair:
    """A target, a drafter that is right as a script says, and what the target writes after every beginning of its text."""

    target: PreTrainedModel
    drafter: PlacedDrafter
    text: torch.Tensor  # [1, S]

    @classmethod
    def make(cls, **shape: Any) -> Pair:
        """A new one, of which nothing is compiled."""
        target = make_target(num_hidden_layers=2, **shape)
        text = greedy(target, make_prompt(7, seed=3), max_new_tokens=TEXT_LENGTH - 7, eos_token_id=None)
        drafter = PlacedDrafter(target, text, [0], **SMALL, **shape)
        drafter.follow(text, MIXED)
        return cls(target, drafter, text)

    @property
    def compiled(self) -> CompiledPair:
        """What the two share, which must not have given up."""
        compiled = CompiledPair.of(self.target, self.drafter)
        assert compiled.reason is None
        return compiled

    def prompts(self, lengths: Sequence[int]) -> Any:
        """Beginnings of the text: one [1, S], or a list."""
        return self.text[:, : lengths[0]] if len(lengths) == 1 else [self.text[0, :length] for length in lengths]

    def blocks(self, lengths: Sequence[int], text: torch.Tensor | None = None, **asked: Any) -> Iterator[Block]:
        """What is generated after beginnings of the text, which the drafter knows."""
        self.drafter.follow(self.text if text is None else text, asked.pop("script", MIXED))
        asked = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "stop_token_ids": [], "compile": True, **asked}
        if asked["temperature"]:
            asked["generator"] = torch.Generator().manual_seed(11)
        return generate_blocks(self.drafter, self.target, self.prompts(lengths), pad_token_id=PAD_TOKEN_ID, **asked)

    def check(self, lengths: Sequence[int], **asked: Any) -> None:
        """What is generated is the target's own text."""
        self.check_blocks(lengths, self.blocks(lengths, **asked), asked.get("max_new_tokens", NEW_TOKENS))

    def check_blocks(self, lengths: Sequence[int], blocks: Iterator[Block], num_new: int = NEW_TOKENS) -> None:
        """The blocks are the target's own text."""
        written: list[list[int]] = [[] for _ in lengths]
        for block in blocks:
            written[block.row] += block.token_ids
        for length, new_ids in zip(lengths, written, strict=True):
            assert new_ids == self.text[0, length : length + num_new].tolist()


@pytest.fixture(autouse=True)
def _queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_dflash, "ASYNCHRONOUS", ("cuda", "cpu"))
    monkeypatch.setattr(step_dflash, "FLEX_DEVICES", ())


@dataclass
class Recorded(Pair):
    """A pair that all tests share and that has written texts, its graphs, and how many were recorded in those texts."""

    graphs: Any = None
    num_first: tuple[int, int] = (0, 0)


@pytest.fixture(scope="module")
def _recorded() -> Recorded:
    torch._dynamo.reset()
    return Recorded(**vars(Pair.make()), graphs=Graphs())


@pytest.fixture
def recorded(_recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    pair, graphs = _recorded, _recorded.graphs
    monkeypatch.setattr(step_dflash, "BACKEND", graphs)
    if not graphs.keys:
        pair.num_first = graphs.new_keys(lambda: pair.check([17])), graphs.new_keys(lambda: write_eight(pair))
    assert pair.compiled.is_static
    yield pair
    assert pair.compiled.is_static
    graphs.on_end = lambda: None


# 1. Graphs


LEAVING = 180  # where the texts of `eight` stop


def eight(pair: Pair) -> tuple[list[int], dict[str, Any]]:
    """Lengths of eight prompts and a stop token, at which their texts stop one after another."""
    last = next(i for i in range(LEAVING, TEXT_LENGTH) if pair.text[0, i] not in pair.text[0, i - 60 : i])
    return [last - 7 * (row + 1) for row in range(8)], {"stop_token_ids": [int(pair.text[0, last])]}


def write_eight(pair: Pair) -> list[int]:
    """Writes the texts of `eight`; how many sequences each step had."""
    lengths, asked = eight(pair)
    written: list[list[int]] = [[] for _ in lengths]
    for block in pair.blocks(lengths, max_new_tokens=80, **asked):
        written[block.row] += block.token_ids
    last = lengths[0] + 7
    assert written == [pair.text[0, length : last + 1].tolist() for length in lengths]
    return [len(new_ids) for new_ids in written]


def test_the_first_text_records_few_graphs(recorded: Recorded) -> None:
    """Promise: recording costs a graph for each class of shapes, not for each step."""
    of_one, of_eight = recorded.num_first
    assert (of_one, of_eight) == (1, 3), "the figures that were measured last"
    assert of_one <= MOST_KEYS_OF_ONE
    assert of_one + of_eight <= MOST_KEYS_OF_EIGHT


@pytest.mark.parametrize(
    "write",
    [
        lambda pair: pair.check([17]),
        lambda pair: pair.check([60], max_new_tokens=90, script=[1, 4]),
        lambda pair: pair.check([8], max_new_tokens=3),
        write_eight,
        lambda pair: pair.check([30, 9, 26, 17, 40], script=[0, 3]),
        lambda pair: pair.check([30, 9, 26], max_draft_tokens=None),
    ],
    ids=["same", "longer", "short", "eight", "five", "three"],
)
def test_a_later_text_records_nothing(recorded: Recorded, write: Callable[[Pair], Any]) -> None:
    """Promise: neither another length, nor other sequences, nor their leaving costs a recording."""
    num_runs = recorded.graphs.num_runs
    assert recorded.graphs.new_keys(lambda: write(recorded)) == 0
    assert recorded.graphs.num_runs > num_runs


def test_a_conversation_over_several_turns_records_nothing_more(recorded: Recorded) -> None:
    """Promise: it keeps its storage from turn to turn, and the texts between its turns keep theirs."""
    pair, conversation = recorded, Conversation()

    def turn(length: int) -> None:
        pair.check([length], conversation=conversation)
        pair.check([23])

    assert pair.graphs.new_keys(lambda: turn(17)) <= 1, "storage for a second text at a time"
    assert pair.graphs.new_keys(lambda: [turn(length) for length in (70, 90, 33, 140)]) == 0
    assert conversation.num_reused
    del conversation
    assert pair.graphs.new_keys(lambda: [pair.check([17], conversation=Conversation()) for _ in range(2)]) == 0


def test_generators_that_are_closed_early_give_their_storage_back(recorded: Recorded) -> None:
    """Promise: after any number of blocks the next text is right and records nothing."""

    def close_all() -> None:
        for num_blocks in range(1, 6):
            blocks = recorded.blocks([17])
            for _ in range(num_blocks):
                next(blocks)
            blocks.close()  # type: ignore[attr-defined]
            recorded.check([26])

    assert recorded.graphs.new_keys(close_all) == 0


class Broken(RuntimeError):
    pass


class _Fails:
    """A streamer, a processor or a criterion that raises when it is asked the fourth time."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.put(input_ids)
        return scores if scores is not None else torch.zeros(len(input_ids), dtype=torch.bool)

    def put(self, value: torch.Tensor) -> None:
        self.num_calls += 1
        if self.num_calls == 8:
            raise Broken

    def end(self) -> None:
        pass


@pytest.mark.parametrize("where", ["streamer", "logits_processor", "stopping_criteria"])
@pytest.mark.parametrize("keeps", [False, True], ids=["alone", "conversation"])
def test_the_call_after_an_error_in_mid_step_is_right(recorded: Recorded, where: str, keeps: bool) -> None:
    """Promise: an error of a caller's object leaves nothing behind, in a conversation neither."""
    pair, conversation = recorded, Conversation() if keeps else None
    fails = _Fails()
    asked: dict[str, Any] = {where: fails if where == "streamer" else [fails], "conversation": conversation}
    asked |= {"compile": True, "temperature": 0.0, "max_new_tokens": NEW_TOKENS, "stop_token_ids": []}
    pair.drafter.follow(pair.text, MIXED)
    with pytest.raises(Broken):
        spec_generate(pair.drafter, pair.target, pair.prompts([17]), **asked)
    assert fails.num_calls == 8
    pair.check([33], conversation=conversation)
    assert pair.graphs.new_keys(lambda: pair.check([26], conversation=conversation)) == 0


def test_two_threads_write_their_own_texts(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: graphs of one pair write into the same buffers, and no thread reads what another one's graph wrote."""
    pair, turns = recorded, Turns(recorded.compiled.lock)
    monkeypatch.setattr(pair.compiled, "lock", turns)
    pair.graphs.on_end = turns.meet
    pair.drafter.follow(pair.text, MIXED)
    lengths = (17, 60)
    texts = turns.run([lambda length=length: list(pair.blocks([length])) for length in lengths])
    for length, blocks in zip(lengths, texts, strict=True):
        assert not isinstance(blocks, BaseException), repr(blocks)
        pair.check_blocks([length], blocks)
    assert turns.num_meetings > 10


# 2. What the compiler is told


VIEWS = ("view", "slice", "transpose", "permute", "expand", "unsqueeze", "select", "as_strided", "alias", "detach", "t")


def large_operations(graph: Any, size: int) -> dict[str, int]:
    """Operations that write `size` numbers or more, by name; views write none."""
    found: dict[str, int] = {}
    for node in graph.nodes:
        name = str(node.target).removeprefix("aten.").split(".")[0]
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor) or value.numel() < size or name in VIEWS:
            continue
        found[name] = found.get(name, 0) + 1
    return found


@pytest.mark.parametrize(
    ("lengths", "asked"), [([17], {}), ([17, 9, 26], {}), ([17], {"adaptive": True})], ids=["one", "three", "adaptive"]
)
def test_the_compiler_sees_static_storage_and_no_symbols(
    lengths: list[int], asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: only static inputs are written to, keys are written in place and copied nowhere, no size is left open."""
    torch._dynamo.reset()
    pair, found = Pair.make(head_dim=16), list[Any]()  # keys larger than masks

    def look(graph: Any, example_inputs: Any) -> Any:
        about: Any = TracingContext.get().fw_metadata  # type: ignore[union-attr]
        written = {index for index, of_input in enumerate(about.input_info) if of_input.mutates_data}
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        sizes = [size for value in inputs for size in (value.shape if isinstance(value, torch.Tensor) else [value])]
        storage = min(inputs[index].numel() for index in written)
        num_symbols = sum(isinstance(size, torch.SymInt) for size in sizes)
        moved = written - set(about.static_input_indices)
        found.append((len(written), moved, num_symbols, large_operations(graph.graph, storage)))
        return graph.forward

    def backend(module: Any, example_inputs: Any, **options: Any) -> Any:
        return aot_module_simplified(
            module, example_inputs, fw_compiler=look, inference_compiler=look, keep_inference_input_mutations=True
        )

    monkeypatch.setattr(step_dflash, "BACKEND", backend)
    pair.check(lengths, max_new_tokens=8, **asked)
    assert pair.compiled.is_static
    assert found
    for num_written, moved, num_symbols, large in found:
        assert not moved
        assert not num_symbols
        # The compiler makes one write of each two: the columns that are put in, and the storage that they are put into.
        assert large == {"index_put": num_written, "copy_": num_written}
    torch._dynamo.reset()


# 3 and 5. What waits, what is copied, what runs ahead


@dataclass
class Late:
    """A pair on a device that computes late, whose functions run as they are."""

    pair: Pair
    device: LateDevice

    def steps(self, lengths: Sequence[int], **asked: Any) -> list[list[str]]:
        """The events of eight steps in mid-text, each up to its commit, once all that runs was compared with eager steps."""
        if asked.pop("adaptive", False):
            asked["latency_curve"] = curve_of(self.pair)
        for _ in COMPARED_CALLS:
            self._steps(lengths, **asked)
        self.device.faults.clear()
        return self._steps(lengths, **asked)

    def _steps(self, lengths: Sequence[int], **asked: Any) -> list[list[str]]:
        events = self.device.events
        events.clear()
        blocks = self.pair.blocks(lengths, text=self.pair.text.clone(), max_new_tokens=90, **asked)
        with self.device:
            with self.device.unwatched():
                while events.count("commit") < NUM_SKIPPED:
                    next(blocks)
            events.clear()
            while events.count("commit") < NUM_STEPS:
                next(blocks)
            blocks.close()  # type: ignore[attr-defined]
        steps = " ".join(events).split("commit")[:-1]
        return [step.split() for step in steps]


@pytest.fixture(scope="module")
def _late_pair() -> Pair:
    return Pair.make()


@pytest.fixture
def late(_late_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Late:
    device = LateDevice(_late_pair.target, _late_pair.drafter)
    device.install(monkeypatch)
    compiled, commit = CompiledPair.function, Decoder.commit

    def function(self: CompiledPair, key: Any, function: Any) -> Any:
        run = compiled(self, key, function)

        def launched(*args: Any) -> Any:
            device.events.append("graph")
            return run(*args)

        return launched

    def committed(self: Decoder, step: Any) -> list[Block]:
        try:
            return commit(self, step)
        finally:
            device.events.append("commit")

    monkeypatch.setattr(torch, "compile", as_it_is)
    monkeypatch.setattr(CompiledPair, "function", function)
    monkeypatch.setattr(Decoder, "commit", committed)
    return Late(_late_pair, device)


NUM_SKIPPED, NUM_STEPS = 4, 8
FOUR = [17, 9, 26, 12]


def curve_of(pair: Pair) -> LatencyCurve:
    """One by which whole blocks pay, whatever the clock says here."""
    machine = proposals_dflash.machine(pair.target, pair.drafter)
    return LatencyCurve((1, 64), (10.0, 10.5), 0.1, machine, 0.1)


MODES: dict[str, tuple[list[int], dict[str, Any], int]] = {  # the lengths, what is asked, and waits of a step
    "chain": ([17], {}, 1),
    "ragged": (FOUR, {}, 1),
    "adaptive": ([17], {"adaptive": True}, 1),
    "ragged adaptive": (FOUR, {"adaptive": True}, 1),
    "tree": ([17], {"draft_tree": 8}, 2),
    "sampled": ([17], {"temperature": 0.7}, 1),
    "ragged sampled": (FOUR, {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, 1),
    "lookup": ([17], {"prompt_lookup_num_tokens": 4}, 1),
    "short": ([17], {"max_draft_tokens": 2}, 1),
}


@pytest.mark.parametrize("mode", MODES)
def test_how_often_a_step_waits(late: Late, mode: str) -> None:
    """Promise: what a step computes is waited for once; a tree is chosen by the host in between."""
    lengths, asked, budget = MODES[mode]
    steps = late.steps(lengths, **asked)
    print(mode, len(steps), [step.count("wait") for step in steps], steps[:4])
    print(sorted(set(late.device.faults)))
    assert len(steps) > 4
    assert max(step.count("wait") for step in steps) <= budget
