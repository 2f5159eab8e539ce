"""Earlier texts: drafts of every way of decoding are taken from them, and the texts stay the target's."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import SMALL, VOCAB_SIZE, make_prompt, scripted, small_target

from dflash import History, generate_blocks, spec_generate
from dflash.engine.history import BYTES_PER_TOKEN
from dflash.engine.lookup import LookupProposer, PromptLookup
from dflash.model.acceptance_dflash import Proposals
from dflash.model.sequences_dflash import TextSequence


NEW_TOKENS = 18
ALONE: dict[str, Any] = {"prompt_lookup_num_tokens": 0, "max_new_tokens": NEW_TOKENS}


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, list[list[int]]]:
    """A drafter that is right for few tokens, its target, and two prompts."""
    target = small_target("qwen3")
    prompts = [make_prompt(length, seed=30 + length) for length in (9, 4)]
    return scripted(target, prompts, **SMALL), target, [prompt[0].tolist() for prompt in prompts]


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.0}, {"temperature": 0.8}, {"draft_tree": 8}, {"adaptive": True}], ids=str
)
def test_a_second_text_takes_fewer_steps_and_is_the_same(pair: Any, settings: Any) -> None:
    drafter, target, prompts = pair
    history = History(ngram_size=3)

    def run(**keywords: Any) -> Any:
        generator = torch.Generator().manual_seed(3)
        keywords |= {**ALONE, **settings, "generator": generator, "return_dict_in_generate": True}
        return spec_generate(drafter, target, prompts, **keywords)

    plain, first, second = run(), run(history=history), run(history=history)
    assert torch.equal(first.sequences, plain.sequences)
    assert torch.equal(second.sequences, plain.sequences)
    steps = [sum(map(len, output.acceptance_lengths)) for output in (first, second)]
    assert steps[1] < 0.75 * steps[0]


def test_texts_that_end_are_added_without_padding(pair: Any) -> None:
    drafter, target, prompts = pair
    history = History()
    texts = spec_generate(drafter, target, prompts, temperature=0.0, history=history, **ALONE)
    width = max(map(len, prompts))
    new_ids = texts[:, width:].tolist()
    assert list(map(list, history._texts.values())) == [
        prompt + new for prompt, new in zip(prompts, new_ids, strict=True)
    ]


def test_an_earlier_text_is_searched_before_the_text_itself() -> None:
    history = History(ngram_size=2)
    history.add([1, 2, 9, 9])
    sequence = TextSequence(0, torch.tensor([1, 2, 3, 1, 2]))
    both = PromptLookup(4, 2, history, num_earlier=1)
    both.read(sequence)
    assert both.match() == [9]
    both.record(0)
    assert both._num_matching == 2, "what an earlier text proposed says nothing of the text itself"
    own = PromptLookup(4, 2, History(ngram_size=2), num_earlier=1)
    own.read(sequence)
    assert own.match() == [3, 1, 2, 3]


def test_beside_drawn_proposals_nothing_is_looked_up() -> None:
    """A draw of the drafter's distribution cannot be exchanged for a token of another text."""
    history = History(ngram_size=2)
    history.add([1, 2, 9, 9])
    drawn = Proposals(torch.tensor([[5], [6]]), torch.zeros(2, 1, 1), torch.ones(2, 1, 1))
    drafts: Any = SimpleNamespace(propose=lambda *_: drawn)
    proposer = LookupProposer(drafts, lambda: PromptLookup(0, 2, history, num_earlier=4))
    sequences = [TextSequence(0, torch.tensor([4, 1, 2])), TextSequence(1, torch.tensor([7, 7, 7]))]
    assert proposer.propose(sequences, torch.tensor([[2], [7]]), 4) is drawn


def test_the_oldest_texts_make_room() -> None:
    history = History(most_bytes=20 * BYTES_PER_TOKEN, ngram_size=2)
    history.add([1, 2, 3, 4, 5])
    history.add([9, 1, 2, 6])
    assert history.after([7, 1, 2], 3) == [6], "the newest text is looked up first"
    assert history.after([3, 4], 3) == [5]
    assert history.after([4, 5], 3) == history.after([8, 8], 3) == history.after([1], 3) == []
    history.add(list(range(50, 66)))
    assert history.after([2, 3], 1) == [], "the oldest text was dropped"
    assert history.after([9, 1], 1) == [2]
    history.add(list(range(100, 200)))
    assert (history.num_tokens, history._ends) == (0, {})


def test_it_is_saved_and_loaded(tmp_path: Path) -> None:
    history = History(ngram_size=2)
    texts = [[1, 2, 3, 4, 5], [], [9, 1, 2, 6]]
    for text in texts:
        history.add(text)
    history.save(tmp_path / "texts.safetensors")
    loaded = History(ngram_size=2)
    loaded.load(tmp_path / "texts.safetensors")
    assert list(map(list, loaded._texts.values())) == texts
    assert (loaded.num_tokens, loaded.largest_id) == (9, 9)


# Bad input.


def test_a_history_of_another_tokenizer_is_refused(pair: Any) -> None:
    drafter, target, prompts = pair
    history = History()
    history.add([1, VOCAB_SIZE])
    sentence = rf"history holds the token id {VOCAB_SIZE}, and the target has {VOCAB_SIZE} tokens: give"
    with pytest.raises(ValueError, match=sentence):
        spec_generate(drafter, target, prompts, history=history, **ALONE)


def test_what_is_no_history_is_refused(pair: Any) -> None:
    drafter, target, prompts = pair
    with pytest.raises(ValueError, match=r"history=\[\[1, 2\]\].*pass a dflash\.History"):
        spec_generate(drafter, target, prompts, history=[[1, 2]], **ALONE)


def test_files_that_hold_no_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "words").write_text("not tensors")
    with pytest.raises(ValueError, match="words is no safetensors file"):
        History().load(tmp_path / "words")
    save_file({"weight": torch.ones(2)}, tmp_path / "weights")
    with pytest.raises(ValueError, match=r"weights holds the tensors weight: give a file that History\.save"):
        History().load(tmp_path / "weights")
    save_file({"token_ids": torch.arange(3), "lengths": torch.tensor([2])}, tmp_path / "cut")
    with pytest.raises(ValueError, match="cut holds the tensors"):
        History().load(tmp_path / "cut")


# What is left when a text goes, and what is never forgotten.


def test_a_dropped_text_takes_nothing_of_a_newer_one() -> None:
    """Promise: an n-gram that a newer text has too is still found there."""
    history = History(most_bytes=9 * BYTES_PER_TOKEN, ngram_size=2)
    for text in ([1, 2, 3, 4, 5], [9, 1, 2, 6], [7, 7]):
        history.add(text)
    assert len(history._texts) == 2
    assert history.after([1, 2], 3) == [6]


def test_the_end_of_a_newer_text_hides_no_continuation() -> None:
    history = History(ngram_size=2)
    history.add([1, 2, 3])
    history.add([4, 1, 2])
    assert history.after([1, 2], 3) == [3]


def test_the_largest_id_is_that_of_all_texts() -> None:
    """Promise: also of those that were dropped, and whichever came last."""
    history = History(ngram_size=2)
    for text in ([3, 900], [4], []):
        history.add(text)
    assert history.largest_id == 900
    with pytest.raises(ValueError, match="history holds the token id 900, and the target has 900 tokens"):
        history.check_vocabulary(900)
    history.check_vocabulary(901)


def test_a_text_is_read_under_the_lock_of_those_that_add() -> None:
    """Bug: a text was dropped between the look for its n-gram and the look into it: KeyError, once in 150 lookups."""
    history, held = History(ngram_size=2), []
    history.add([1, 2, 3])
    lock = history._lock

    class Noted:
        def __enter__(self) -> None:
            lock.acquire()
            held.append(True)

        def __exit__(self, *_: Any) -> None:
            lock.release()

    history._lock = Noted()
    assert history.after([1, 2], 1) == [3]
    assert held == [True]


def test_ids_that_no_target_has_are_refused_and_those_of_another_are_not_proposed(pair: Any) -> None:
    """Bug: both were proposed, and the embedding raised IndexError in the middle of a text."""
    drafter, target, prompts = pair
    history = History(ngram_size=1)
    with pytest.raises(ValueError, match="holds the token id -100: give token ids alone"):
        history.add([1, -100, 2])
    plain = spec_generate(drafter, target, prompts[:1], temperature=0.0, **ALONE)
    written: list[int] = []
    asked = {"temperature": 0.0, "history": history, "num_looked_up": 0, "max_new_tokens": NEW_TOKENS}
    for block in generate_blocks(drafter, target, prompts[:1], **asked):
        written += block.token_ids
        history.add([block.token_ids[-1], VOCAB_SIZE + 3])  # by a request to a target of more tokens
    assert written == plain[0, len(prompts[0]) :].tolist()


def test_nothing_of_a_history_outlives_it(pair: Any) -> None:
    """Bug: what adaptive steps learn is kept with the pair, and its key held the history."""
    drafter, target, prompts = pair
    history = History(ngram_size=3)
    spec_generate(drafter, target, prompts, temperature=0.0, adaptive=True, history=history, **ALONE)
    reference = weakref.ref(history)
    del history
    gc.collect()
    assert reference() is None
