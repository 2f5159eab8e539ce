"""A pair that keeps the caches of conversations between requests: the next turn computes what is new."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.generation.continuous_batching.requests import GenerationOutput

from dflash.checkpoints import DRAFTER_NAME, TARGET_NAME, embedded_path, make_pair
from dflash.engine.conversations import KeptConversations


TARGET, DRAFTER = embedded_path(TARGET_NAME), embedded_path(DRAFTER_NAME)
MOST = 2
GREEDY: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"keep_conversations": MOST}
    return make_pair(TARGET, DRAFTER, tmp_path_factory.mktemp("pairs") / "pair", settings=settings)


@pytest.fixture
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()


def prompt(seed: int, length: int = 40) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(10, 2000, (1, length), generator=generator)


def next_turn(text_ids: torch.Tensor, seed: int = 9, length: int = 12) -> torch.Tensor:
    return torch.cat([text_ids, prompt(seed, length)], dim=1)


@contextmanager
def prompt_columns(model: Any) -> Iterator[list[int]]:
    """The columns of the target's first forward inside: what it computes of a prompt."""
    columns: list[int] = []

    def note(module: Any, args: Any, kwargs: Any) -> None:
        columns.append(kwargs["input_ids"].shape[1])

    note.is_tap = True  # type: ignore[attr-defined]  # it only looks on, so the model is the same
    hook = model.register_forward_pre_hook(note, with_kwargs=True)
    try:
        yield columns
    finally:
        hook.remove()


def write(model: Any, input_ids: torch.Tensor, **keywords: Any) -> tuple[torch.Tensor, int]:
    """The text, and how many columns of its prompt were computed."""
    with prompt_columns(model) as columns:
        text = model.generate(input_ids, attention_mask=torch.ones_like(input_ids), **GREEDY, **keywords)
    return text, columns[0]


def plain(target: Any, input_ids: torch.Tensor) -> torch.Tensor:
    return target.generate(input_ids, attention_mask=torch.ones_like(input_ids), **GREEDY)


def test_a_second_turn_computes_what_is_new(model: Any, target: Any) -> None:
    first, num_computed = write(model, prompt(1))
    assert num_computed == 40
    second_prompt = next_turn(first)
    second, num_computed = write(model, second_prompt)
    assert torch.equal(second, plain(target, second_prompt))
    num_new = 12 + 1  # the last token of an answer is not computed yet
    assert num_computed == num_new


def test_conversations_take_turns_and_the_least_recently_used_goes_first(model: Any, target: Any) -> None:
    texts = [write(model, prompt(seed))[0] for seed in (1, 2)]
    texts[0], num_computed = write(model, next_turn(texts[0]))  # used later than the other one
    assert num_computed == 13
    write(model, prompt(3))
    for text, is_kept in ((texts[0], True), (texts[1], False)):
        asked = next_turn(text, seed=8)
        again, num_computed = write(model, asked)
        assert torch.equal(again, plain(target, asked))
        assert (num_computed == 13) == is_kept


def test_a_policy_that_has_changed_does_not_read_old_caches(model: Any) -> None:
    first, _ = write(model, prompt(1))
    with torch.no_grad():
        for parameter in model.model.layers[3].parameters():
            parameter.data += 1e-4
    asked = next_turn(first)
    second, num_computed = write(model, asked)
    assert num_computed == asked.shape[1]
    assert torch.equal(second, model.generate(asked, attention_mask=torch.ones_like(asked), dflash=False, **GREEDY))


def test_an_edited_turn_is_computed_from_where_it_differs(model: Any, target: Any) -> None:
    first, _ = write(model, prompt(1))
    edited = next_turn(first)
    edited[0, 45] = 7
    second, num_computed = write(model, edited)
    assert torch.equal(second, plain(target, edited))
    assert num_computed == edited.shape[1] - 45


def test_padding_of_a_single_prompt_changes_nothing(model: Any, target: Any) -> None:
    first, _ = write(model, prompt(1))
    asked = next_turn(first)
    padded = torch.nn.functional.pad(asked, (4, 0))
    mask = torch.nn.functional.pad(torch.ones_like(asked), (4, 0))
    with prompt_columns(model) as columns:
        second = model.generate(padded, attention_mask=mask, **GREEDY)
    assert torch.equal(second[:, 4:], plain(target, asked))
    assert columns[0] == 13


def test_a_text_that_fails_is_not_kept(model: Any, target: Any) -> None:
    def fail(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 44:
            raise RuntimeError("planted")
        return scores

    with pytest.raises(RuntimeError, match="planted"):
        write(model, prompt(1), logits_processor=[fail])
    asked = prompt(1, 40)
    text, num_computed = write(model, asked)
    assert num_computed == 40
    assert torch.equal(text, plain(target, asked))


def test_copies_begin_without_and_all_is_freed(folder: Path) -> None:
    model = load(folder)
    first, _ = write(model, prompt(1))
    other = copy.deepcopy(model)
    assert write(other, next_turn(first))[1] == first.shape[1] + 12
    drafter = copy.deepcopy(model._dflash_drafting.drafter)  # as a callback trains one
    assert drafter.kept_conversations is not model._dflash_drafting.drafter.kept_conversations
    references = [weakref.ref(model), weakref.ref(model._dflash_drafting.drafter)]
    del model, other
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_nothing_is_kept_unless_the_folder_says_so(tmp_path: Path) -> None:
    model = load(make_pair(TARGET, DRAFTER, tmp_path / "pair"))
    first, _ = write(model, prompt(1))
    assert write(model, next_turn(first))[1] == first.shape[1] + 12


def test_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep_conversations=-1"):
        make_pair(TARGET, DRAFTER, tmp_path / "pair", settings={"keep_conversations": -1})


@pytest.mark.skipif(not hasattr(GenerationOutput, "is_finished"), reason="drafted with transformers 5")
def test_a_manager_of_batches_keeps_conversations_by_itself(model: Any, target: Any) -> None:
    """What `transformers serve --continuous-batching` does with a chat: its manager lives as long as the server."""
    manager = model.init_continuous_batching(GenerationConfig(**GREEDY))
    manager.start()
    texts = prompt(1)
    num_computed = []
    for _ in range(2):
        with prompt_columns(model) as columns:
            request_id = manager.add_request(texts[0].tolist())
            output = manager.get_result(request_id)
        num_computed.append(columns[0])
        written = torch.tensor([output.generated_tokens])
        assert torch.equal(torch.cat([texts, written], dim=1), plain(target, texts))
        texts = next_turn(torch.cat([texts, written], dim=1))
    manager.stop()
    assert num_computed == [40, 13]


def test_offloaded_weights_are_passed_over() -> None:
    """Weights on "meta" have no values to sample."""
    assert KeptConversations(1).take([1], torch.nn.Linear(2, 2, device="meta"))[0].token_ids == []


def test_a_text_of_weights_that_have_changed_meanwhile_is_not_kept() -> None:
    """Promise: a trainer's step while a text is written leaves nothing of it."""
    kept, layer = KeptConversations(MOST), torch.nn.Linear(2, 2)
    for is_changed in (False, True):
        conversation, begun = kept.take([1, 2, 3], layer)
        conversation.hold([1, 2, 3], [4])
        with torch.no_grad():
            if is_changed:
                layer.weight += 1
        kept.give(conversation, begun, layer)
        assert len(kept._conversations) == (not is_changed)


def test_a_text_of_older_weights_is_not_kept_among_those_of_newer_ones() -> None:
    """Bug: a text begun before a trainer's step, and closed after another request, was kept for the new weights."""
    kept, layer = KeptConversations(MOST), torch.nn.Linear(2, 2)
    older, begun = kept.take([1, 2, 3], layer)
    older.hold([1, 2, 3], [4])
    with torch.no_grad():
        layer.weight += 1
    kept.take([5, 6], layer)
    kept.give(older, begun, layer)
    assert len(kept._conversations) == 0


def test_a_text_of_an_adapter_that_is_switched_off_is_not_gone_on_from() -> None:
    """Bug: weights were compared, and an adapter that is switched changes none."""
    kept, layer = KeptConversations(MOST), torch.nn.Linear(2, 2)
    layer.is_adapted = True
    conversation, begun = kept.take([1, 2, 3], layer)
    conversation.hold([1, 2, 3], [4])
    kept.give(conversation, begun, layer)
    layer.is_adapted = False
    assert kept.take([1, 2, 3, 4, 5], layer)[0].token_ids == []


def write_some(layer: Any) -> None:
    with torch.no_grad():
        layer.weight[:, 1] += 1  # between the values that are sampled


def scale(layer: Any) -> None:
    layer.scaling["default"] = 2.0


def choose(layer: Any) -> None:
    layer.top_k = 1


def hook(layer: Any) -> None:
    layer.register_forward_hook(lambda module, args, output: -output)


@pytest.mark.parametrize("change", [write_some, scale, choose, hook])
def test_a_change_that_no_sampled_value_shows_is_noticed(change: Any) -> None:
    """Bug: a text went on from the caches of the model as it had been."""
    kept, layer = KeptConversations(MOST), torch.nn.Linear(64, 16)
    layer.scaling, layer.top_k = {"default": 1.0}, 2
    conversation, begun = kept.take([1, 2, 3], layer)
    conversation.hold([1, 2, 3], [4])
    kept.give(conversation, begun, layer)
    assert len(kept._conversations) == 1
    change(layer)
    assert kept.take([1, 2, 3, 4, 5], layer)[0].token_ids == []


class Shared(torch.Tensor):
    """As a weight that processes share: it has no values to read but those of its part."""

    part: torch.Tensor

    def detach(self) -> Any:
        return self

    def flatten(self, *args: Any) -> Any:
        raise RuntimeError("mixed torch.Tensor and DTensor")

    def to_local(self) -> torch.Tensor:
        return self.part


class Sealed(Shared):
    """As a quantised weight: it has no values to read."""

    def to_local(self) -> torch.Tensor:
        raise RuntimeError("no storage")


@pytest.mark.parametrize(("kind", "is_kept"), [(Shared, True), (Sealed, False)])
def test_weights_that_cannot_be_read_fail_no_request(kind: Any, is_kept: bool) -> None:
    """Bug: a DTensor or a quantised weight raised in the request. Where nothing can be told, nothing is kept."""
    kept, layer = KeptConversations(MOST), torch.nn.Linear(2, 2, bias=False)
    weight = torch.zeros(2, 2).as_subclass(kind)
    weight.part = torch.zeros(1, 2)
    layer.parameters = lambda *args: [weight]  # type: ignore[method-assign]
    layer.named_parameters = lambda *args: [("weight", weight)]  # type: ignore[method-assign]
    conversation, begun = kept.take([1, 2, 3], layer)
    conversation.hold([1, 2, 3], [4])
    kept.give(conversation, begun, layer)
    assert len(kept._conversations) == is_kept
