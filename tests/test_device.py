"""What users of a device with a queue need, held on a CPU: what is recorded, what waits, what is copied, what is compared.

The branches of such devices are forced (`ASYNCHRONOUS`), and `devices.py` plays the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from devices import TEXT_LENGTH, Graphs, LateDevice, OtherDefaultDevice, PlacedDrafter, Turns, as_it_is
from tiny_models import BLOCK_SIZE, PAD_TOKEN_ID, SMALL, greedy, make_prompt, make_target
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext
from transformers import PreTrainedModel

from dflash import Conversation, generate_blocks, spec_generate
from dflash.model import proposals_dflash, step_dflash
from dflash.model.decoding_dflash import Block, Decoder
from dflash.model.proposals_dflash import LatencyCurve
from dflash.model.step_dflash import COMPARED_CALLS, WIDTH_CLASSES, CompiledPair


MIXED = [2, 0, BLOCK_SIZE - 1, 1, 3, 0, 4]
NEW_TOKENS = 40
ALONE: dict[str, Any] = {"stop_token_ids": [], "prompt_lookup_num_tokens": 0}  # what is looked up is read first

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
        asked = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "compile": True, **ALONE, **asked}
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
            written[block.sequence] += block.token_ids
        for length, new_ids in zip(lengths, written, strict=True):
            assert new_ids == self.text[0, length : length + num_new].tolist()


def curve_of(pair: Pair, whole_ms: float | None = None) -> LatencyCurve:
    """One by which whole blocks pay, whatever the clock says here, and for less than 10.2 ms as one function."""
    machine = proposals_dflash.machine(pair.target, pair.drafter)
    return LatencyCurve((1, 64), (10.0, 10.5), 0.1, machine, 0.1, whole_ms)


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
    mark = torch._dynamo.mark_static_address  # older versions of torch guard on the address by default
    monkeypatch.setattr(torch._dynamo, "mark_static_address", lambda tensor, guard=True: mark(tensor, guard=guard))
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
        written[block.sequence] += block.token_ids
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
    pair, graphs, conversation = recorded, recorded.graphs, Conversation()

    def turns(lengths: Sequence[int], conversation: Conversation) -> None:
        for length in lengths:
            pair.check([length], conversation=conversation)
            pair.check([23])

    num_functions = graphs.num_functions
    assert graphs.new_keys(lambda: turns([17], conversation)) <= 1, "storage for a second text at a time"
    assert graphs.new_keys(lambda: turns([70, 90, 33, 140], conversation)) == 0
    assert conversation.num_reused
    conversation = Conversation()  # the other one gives its storage back
    assert graphs.new_keys(lambda: turns([17, 80], conversation)) == 0
    assert graphs.num_functions == num_functions, "other storage is recorded, and compiles nothing"


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


@pytest.mark.parametrize(
    ("mode", "most"), [("adaptive", 3), ("lookup", 3), ("tree", 2), ("sampled", 1)], ids=lambda value: str(value)
)
def test_other_texts_record_few_graphs_too(
    recorded: Recorded, mode: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a draft, and the target's forward in the classes' widths, once each; a second text records nothing."""
    monkeypatch.setattr(proposals_dflash, "LONGEST_MATCH", 1)  # look up also after lookups that failed
    pair = recorded
    kinds: dict[str, dict[str, Any]] = {
        "adaptive": {"latency_curve": curve_of(pair)},
        "lookup": {"prompt_lookup_num_tokens": 2, "max_matching_ngram_size": 1},
        "tree": {"draft_tree": 7},
        "sampled": {"temperature": 0.7},
    }
    asked = kinds[mode]

    def write(length: int) -> None:
        blocks = list(pair.blocks([length], **asked))
        if mode == "sampled":
            eagerly = list(pair.blocks([length], compile=False, **asked))
            assert [block.token_ids for block in blocks] == [block.token_ids for block in eagerly]
        else:
            pair.check_blocks([length], iter(blocks))

    assert pair.graphs.new_keys(lambda: write(17)) <= most
    if mode == "lookup":
        asked["prompt_lookup_num_tokens"] = 3  # another width of the same class
    assert pair.graphs.new_keys(lambda: [write(17), write(60)]) == 0


def test_the_call_after_numbers_that_are_none_is_right(recorded: Recorded) -> None:
    """Promise: storage that a broken model wrote NaN into is not lent again."""
    weight = recorded.target.model.layers[1].self_attn.k_proj.weight
    kept = weight.detach().clone()
    blocks = recorded.blocks([17])
    next(blocks)
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="NaN"):
        list(blocks)
    with torch.no_grad():
        weight.copy_(kept)
    for _ in range(2):
        recorded.check([8])  # after whose text the numbers lie, where nothing sees them


@pytest.mark.parametrize("is_whole", [True, False], ids=["whole", "parts"])
def test_two_threads_write_their_own_texts(
    recorded: Recorded, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: graphs of one pair write into the same buffers, and no thread reads what another one's graph wrote."""
    pair, turns = recorded, Turns(recorded.compiled.lock)
    asked = {} if is_whole else {"latency_curve": curve_of(pair)}
    monkeypatch.setattr(pair.compiled, "lock", turns)
    pair.graphs.on_end = turns.meet
    lengths = (17, 60)
    works = [partial(list, pair.blocks([length], **asked)) for length in lengths]
    texts = turns.run(works)
    for length, blocks in zip(lengths, texts, strict=True):
        assert not isinstance(blocks, BaseException), repr(blocks)
        pair.check_blocks([length], blocks)
    assert turns.num_meetings > 10


# 2. What the compiler is told


VIEWS = (
    "view",
    "slice",
    "transpose",
    "permute",
    "expand",
    "unsqueeze",
    "select",
    "as_strided",
    "alias",
    "detach",
    "t",
)


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
    ("lengths", "asked"), [([17, 9, 26], {}), ([17], {"adaptive": True})], ids=["three", "adaptive"]
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
    if asked:
        asked = {"latency_curve": curve_of(pair)}  # so that not every width is run
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
        if "adaptive" in asked:
            asked["latency_curve"] = curve_of(self.pair, asked.pop("adaptive"))
        for _ in range(max(COMPARED_CALLS)):
            list(self.pair.blocks(lengths, max_new_tokens=60, **asked))
        # Where steps can be whole, none of these is a choice.
        proposals_dflash.Habits.of(self.pair.drafter).choices.left = 100
        self.device.faults.clear()
        events = self.device.events
        events.clear()
        blocks = self.pair.blocks(lengths, max_new_tokens=90, **asked)
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
    _late_pair.text._place = "device"  # type: ignore[attr-defined]
    compiled, commit, ahead = CompiledPair.function, Decoder.commit, Decoder.launch_ahead

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

    def launched_ahead(self: Decoder, step: Any) -> None:
        ahead(self, step)
        if self._ahead is not None:
            device.events.append("ahead")

    monkeypatch.setattr(torch, "compile", as_it_is)
    monkeypatch.setattr(Decoder, "launch_ahead", launched_ahead)
    monkeypatch.setattr(CompiledPair, "function", function)
    monkeypatch.setattr(Decoder, "commit", committed)
    return Late(_late_pair, device)


NUM_SKIPPED, NUM_STEPS = 4, 6
FOUR = [17, 9, 26, 12]


def sampled_text(pair: Pair, lengths: Sequence[int], **asked: Any) -> torch.Tensor:
    """The text, written over by what is sampled after its beginnings: those have to lie far from each other."""
    text, ends = pair.text.clone(), list(lengths)
    for block in pair.blocks(lengths, compile=False, max_new_tokens=90, **asked):
        text[0, ends[block.sequence] :][: len(block.token_ids)] = torch.tensor(block.token_ids)
        ends[block.sequence] += len(block.token_ids)
    return text


WHOLE = ["graph", "ahead", "wait"]  # a compiled step, launched when the host has not read the one before
CHOSEN = ["graph", "wait", "graph", "wait"]  # a draft, of which the host verifies what it chooses
READ = ["graph", "graph", "wait"]  # a draft and the target's forward, chosen by the host
MODES: dict[str, tuple[list[int], dict[str, Any], list[str]]] = {  # lengths, what is asked, and what each step does
    "chain": ([17], {}, WHOLE),
    "ragged": (FOUR, {}, WHOLE),
    "three of four": (FOUR[:3], {}, WHOLE),
    "short": ([17], {"max_draft_tokens": 2}, WHOLE),
    "sampled": ([17], {"temperature": 0.7}, WHOLE),
    "ragged sampled": ([17, 110, 203], {"temperature": 0.7, "top_k": 20, "top_p": 0.9}, WHOLE),
    "adaptive": ([17], {"adaptive": 10.0}, WHOLE),  # milliseconds of a whole step, which pays
    "ragged adaptive": (FOUR, {"adaptive": 10.0}, WHOLE),
    "choosing": ([17], {"adaptive": None}, CHOSEN),  # there is none
    "ragged choosing": (FOUR, {"adaptive": None}, CHOSEN),
    "rejection": ([17], {"temperature": 0.7, "verification": "rejection"}, READ),
    "tree": ([17], {"draft_tree": 8}, CHOSEN),
    "sampled tree": ([17], {"draft_tree": 8, "temperature": 0.7}, CHOSEN),
    "penalty": ([17], {"min_p": 0.1, "temperature": 0.7}, READ),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_step_waits_once_and_runs_ahead(late: Late, mode: str) -> None:
    """Promise: each step waits once, after the next one is launched; where the host chooses among proposals, twice.

    Nothing else reads what the device computes, and nothing but `to_device` copies what the host knows.
    """
    lengths, asked, expected = MODES[mode]
    text = sampled_text(late.pair, lengths, **asked) if "temperature" in asked else late.pair.text
    steps = late.steps(lengths, text=text, **asked)
    assert late.device.faults == []
    assert steps == [expected] * NUM_STEPS


@pytest.mark.parametrize("lengths", [[17], FOUR], ids=["one", "four"])
def test_a_draft_after_a_pause_has_read_everything(
    late: Late, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: where drafts do not pay, a step passes a pause once, and a draft reads all the context that has waited."""
    machine, events = proposals_dflash.machine(late.pair.target, late.pair.drafter), late.device.events
    costly = LatencyCurve((1, 64), (1.0, 1.1), 1000.0, machine)
    wants_draft = proposals_dflash.Pacer.wants_draft

    def noted(self: Any, num_rows: int = 1) -> bool:
        events.append("asked")
        return wants_draft(self, num_rows)

    monkeypatch.setattr(proposals_dflash.Pacer, "wants_draft", noted)
    monkeypatch.setattr(proposals_dflash.Habits, "_of", weakref.WeakKeyDictionary())
    for _ in COMPARED_CALLS:
        events.clear()
        blocks = list(late.pair.blocks(lengths, latency_curve=costly, max_new_tokens=90))
        late.pair.check_blocks(lengths, iter(blocks), 90)
    assert 0 < sum(block.num_accepted > 0 for block in blocks) < len(blocks) / 4
    # Nobody asks before the prompt is committed, nor for the first draft, which the curve is measured after.
    assert abs(events.count("asked") - events.count("commit")) <= len(lengths) + 1


@pytest.mark.parametrize("lengths", [[17], FOUR], ids=["one", "four"])
def test_what_is_looked_up_costs_no_further_wait(
    late: Late, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: what the host finds in the text is copied as everything else is; drafted tokens are waited for once."""
    monkeypatch.setattr(proposals_dflash, "LONGEST_MATCH", 1)  # also after lookups that failed
    steps = late.steps(lengths, prompt_lookup_num_tokens=3, max_matching_ngram_size=1)
    assert late.device.faults == []
    assert {step.count("wait") for step in steps} <= {1, 2}
    assert all(step.count("wait") == 1 for step in steps if step.count("graph") == 1)
    assert any(step.count("graph") == 1 for step in steps) or len(lengths) > 1, "all of a block was looked up"


@pytest.mark.parametrize("mode", ["chain", "tree", "lookup", "sampled", "ragged"])
def test_eager_steps_wait_no_more_often(late: Late, mode: str) -> None:
    """Promise: also a step that is not compiled is read once, a tree twice."""
    lengths, asked, expected = MODES.get(mode, ([17], {"prompt_lookup_num_tokens": 3}, WHOLE))
    steps = late.steps(lengths, compile=False, **asked)
    assert late.device.faults == []
    assert {step.count("wait") for step in steps} == {expected.count("wait")}


def test_sequences_that_leave_cost_no_wait(late: Late) -> None:
    """Promise: those that stay are chosen and moved without waiting for what was launched."""
    lengths, asked = eight(late.pair)
    for _ in range(max(COMPARED_CALLS)):  # until steps of every class were compared
        write_eight(late.pair)
    late.device.events.clear()
    with late.device:
        with late.device.unwatched():
            blocks = late.pair.blocks(lengths, max_new_tokens=80, **asked)
            while late.device.events.count("commit") < 2:
                next(blocks)
        for _ in blocks:
            assert not late.device.faults
    assert late.device.faults == []


@pytest.mark.parametrize("mode", MODES)
def test_texts_are_the_same_on_a_late_device(late: Late, mode: str) -> None:
    """Promise: what runs ahead writes the text, and accepts the proposals, of the loop that reads first."""
    lengths, asked, _ = MODES[mode]
    if "adaptive" in asked:
        asked = {"latency_curve": curve_of(late.pair, asked["adaptive"])}
    text = sampled_text(late.pair, lengths, **asked) if "temperature" in asked else late.pair.text
    asked = {**asked, "text": text, "max_new_tokens": 48}
    expected = list(late.pair.blocks(lengths, compile=False, **asked))
    found = list(late.pair.blocks(lengths, **asked))
    for row in range(len(lengths)):
        texts = [
            [t for block in blocks if block.sequence == row for t in block.token_ids] for blocks in (found, expected)
        ]
        last = (
            -1 if mode == "rejection" else None
        )  # drawn by what is proposed, which is nothing for a last token alone
        assert texts[0][:last] == texts[1][:last]
    whole = [[block for block in blocks if block.num_proposals] for blocks in (found, expected)]
    num_accepted = [[block.num_accepted for block in blocks[: 8 * len(lengths)]] for blocks in whole]
    assert len(set(num_accepted[0])) > 2 or mode == "rejection", "which follows no text"
    if "adaptive" not in asked and "latency_curve" not in asked:  # which may verify other widths
        assert num_accepted[0] == num_accepted[1]


# 4. Generators


@pytest.mark.parametrize("compile", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_no_generator_of_another_device_is_used(late: Late, mode: str, compile: bool) -> None:
    """Promise: where tensors are made on another device by default, noise is drawn where its generator lies."""
    lengths, asked, _ = MODES[mode]
    asked = {**asked, "adaptive": "adaptive" in asked}
    with OtherDefaultDevice():
        assert list(late.pair.blocks(lengths, compile=compile, max_new_tokens=12, **asked))


# 6. The latency curve


@pytest.mark.parametrize("asked", [{}, {"draft_tree": 12}], ids=["chain", "tree"])
def test_every_width_of_the_curve_is_timed_as_it_is_used(
    asked: dict[str, Any], late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: times are those of compiled functions of the classes' widths, without recording and comparing."""
    pair, timed, compared = Pair.make(), list[Any](), list[int]()
    agree = step_dflash._agree
    milliseconds = proposals_dflash._milliseconds

    def noted_comparison(*args: Any) -> bool:
        compared.append(1)
        return agree(*args)

    def noted(run: Callable[[], torch.Tensor], num_untimed: int) -> float:
        late.device.events.clear()
        counts: list[tuple[int, int]] = []

        def counted() -> torch.Tensor:
            at = len(compared), len(late.device.events)
            result = run()
            counts.append((len(compared) - at[0], len(late.device.events) - at[1]))
            return result

        result = milliseconds(counted, num_untimed)
        timed.append((*getattr(run, "args", ("draft",)), counts[-proposals_dflash.REPEATS :]))
        return result

    monkeypatch.setattr(step_dflash, "_agree", noted_comparison)
    monkeypatch.setattr(proposals_dflash, "_milliseconds", noted)
    pair.check([17], adaptive=True, **asked)
    widths = [width for width, *_ in timed if width != "draft"]
    assert set(widths) <= set(WIDTH_CLASSES)
    assert widths[0] == 1
    assert max(widths) >= 1 + asked.get("draft_tree", BLOCK_SIZE - 1)
    for width, repeats in timed:
        assert repeats == [(0, 1)] * proposals_dflash.REPEATS, f"{width} is not timed as a replay"


# 7. What is compared


FIRST_REPLAY = 3  # a graph runs once eagerly, and once when it is recorded


@pytest.mark.parametrize("what", ["choices", "states"])
def test_a_replay_that_is_wrong_is_noticed(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Promise: a graph that is right when it is recorded and wrong when it is replayed is not used; one warning says so."""
    torch._dynamo.reset()
    pair, graphs = Pair.make(), Graphs()

    def spoil(num_runs: int, outputs: list[torch.Tensor]) -> None:
        for output in outputs:
            if num_runs >= FIRST_REPLAY and output.is_floating_point() == (what == "states"):
                output.copy_(output.flip(-1) if what == "states" else output.roll(1) + 1)

    graphs.spoil = spoil
    monkeypatch.setattr(step_dflash, "BACKEND", graphs)
    pair.check([17])
    assert graphs.num_runs == FIRST_REPLAY
    pair.check([26])
    said = [record.message for record in caplog.records if "run eagerly" in record.message]
    assert len(said) == 1
    assert "computes something else than eagerly" in said[0]
    assert graphs.num_runs == FIRST_REPLAY
    torch._dynamo.reset()
