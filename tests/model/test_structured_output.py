"""Logits processors with a state, such as grammars: the text of `generate`, for one prompt and in batches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import PAD_TOKEN_ID, SMALL, ScriptedDrafter, left_padded, make_drafter, make_prompt, make_target
from transformers import LogitsProcessor, PreTrainedModel

from dflash import DFlashDraftModel, spec_generate
from dflash.checkpoints import heldout_problems, load_embedded_pair


LENGTHS = [7, 4, 9, 5]
SCRIPT = [2, 0, 5, 1, 3]  # drafts that are partly rejected, which a state must not see
NEW_TOKENS = 24
SELECTOR = {"selector_rank": 8, "selector_top_k": 4, "conv_kernel_size": 2, "conv_group_size": 4}


class Matcher:
    """Which tokens may follow a text, by a state that every token changes."""

    def __init__(self) -> None:
        self.state = 1

    def allows(self, vocab_size: int) -> torch.Tensor:
        return (torch.arange(vocab_size) + self.state) % 3 != 0

    def accept(self, token_id: int, vocab_size: int) -> None:
        assert self.allows(vocab_size)[token_id], "a token that the grammar does not allow"
        self.state = (5 * self.state + token_id + 1) % 97


class Grammar(LogitsProcessor):
    """Behaves as the processor of xgrammar does: a matcher for each sequence, made in the first call, one call for each token."""

    def __init__(self) -> None:
        self.matchers: list[Matcher] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        vocab_size = scores.shape[-1]
        if not self.matchers:
            self.matchers = [Matcher() for _ in input_ids]
        else:
            assert len(input_ids) == len(self.matchers), "another number of sequences"
            for matcher, token_id in zip(self.matchers, input_ids[:, -1].tolist(), strict=True):
                matcher.accept(token_id, vocab_size)
        allowed = torch.stack([matcher.allows(vocab_size) for matcher in self.matchers])
        return scores.masked_fill(~allowed, -torch.inf)


class Eager(LogitsProcessor):
    """A grammar for one prompt, whose matcher is there before the first call."""

    def __init__(self) -> None:
        self.matcher, self.length = Matcher(), 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        vocab_size = scores.shape[-1]
        if self.length:
            assert input_ids.shape[1] == self.length + 1, "a token is missing"
            self.matcher.accept(int(input_ids[0, -1]), vocab_size)
        self.length = input_ids.shape[1]
        return scores.masked_fill(~self.matcher.allows(vocab_size), -torch.inf)


class Compiled:
    """A compiled grammar, which cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Compiled:
        raise TypeError("cannot copy a compiled grammar")


class WithCompiled(Grammar):
    """A grammar that holds what cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled = Compiled()


# As if it came from xgrammar, whose processors are known to make their state in the first call.
OfXgrammar = type("LogitsProcessor", (WithCompiled,), {"__module__": "xgrammar.contrib.hf"})


@pytest.fixture(scope="module")
def target() -> PreTrainedModel:
    return make_target("qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def prompts() -> list[torch.Tensor]:
    return [make_prompt(length, seed=10 + length) for length in LENGTHS]


def asked(make: Callable[[], Any], **more: Any) -> dict[str, Any]:
    """A request with a new processor."""
    return {
        "logits_processor": [make()],
        "max_new_tokens": NEW_TOKENS,
        "eos_token_id": None,
        "pad_token_id": PAD_TOKEN_ID,
        **more,
    }


def plain(target: PreTrainedModel, prompt: torch.Tensor, **more: Any) -> torch.Tensor:
    """The text of `generate` with a grammar, of one prompt [1, S]."""
    return target.generate(prompt, do_sample=False, **asked(Grammar, **more))


@pytest.mark.parametrize("make", [Grammar, Eager, OfXgrammar])
def test_each_text_of_a_batch_is_the_one_of_generate(
    target: PreTrainedModel, prompts: list[torch.Tensor], make: Callable[[], Any]
) -> None:
    """A grammar saw the tokens of all sequences as one text, and raised AssertionError."""
    longer = [plain(target, prompt, max_new_tokens=NEW_TOKENS + 8) for prompt in prompts]
    ids, mask = left_padded(prompts)
    expected = target.generate(ids, attention_mask=mask, do_sample=False, **asked(Grammar))
    for prompt, text, row in zip(prompts, longer, expected, strict=True):  # in a batch as alone
        assert text[0, prompt.shape[1] :][:NEW_TOKENS].tolist() == row[ids.shape[1] :].tolist()
    drafter = ScriptedDrafter(target, longer, SCRIPT, **SMALL)
    output = spec_generate(
        drafter, target, ids, attention_mask=mask, temperature=0.0, return_dict_in_generate=True, **asked(make)
    )
    assert torch.equal(output.sequences, expected)
    assert output.tau > 2
    for prompt, text in zip(prompts, longer, strict=True):
        alone = ScriptedDrafter(target, text, SCRIPT, **SMALL)
        written = spec_generate(alone, target, prompt, temperature=0.0, **asked(make))
        assert torch.equal(written, text[:, : written.shape[1]])


@pytest.mark.parametrize("head", [{}, SELECTOR], ids=["plain", "selector"])
def test_each_sampled_text_of_a_batch_is_the_one_that_it_has_alone(
    target: PreTrainedModel, prompts: list[torch.Tensor], head: dict[str, Any]
) -> None:
    """With a seed for each prompt. A drafter that draws is verified by "match", which shows a processor no rejected token."""
    drafter = make_drafter(**SMALL, **head)
    ids, mask = left_padded(prompts)

    def seeded(indices: range) -> dict[str, Any]:
        generators = [torch.Generator().manual_seed(100 + index) for index in indices]
        return asked(Grammar, temperature=1.5, generator=generators)

    batch = spec_generate(drafter, target, ids, attention_mask=mask, **seeded(range(4)))
    for index, prompt in enumerate(prompts):
        alone = spec_generate(drafter, target, prompt, **seeded(range(index, index + 1)))
        assert alone[0, prompt.shape[1] :].tolist() == batch[index, ids.shape[1] :].tolist()


def test_several_answers_to_one_prompt(target: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    answers = spec_generate(
        make_drafter(**SMALL), target, prompts[0], num_return_sequences=3, temperature=1.5, **asked(Grammar)
    )
    for answer in answers:
        matcher = Matcher()
        for token_id in answer[prompts[0].shape[1] :].tolist():
            matcher.accept(token_id, target.config.vocab_size)


def test_a_tree_shows_a_grammar_its_text_alone(target: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    expected = plain(target, prompts[0])
    drafter = ScriptedDrafter(target, plain(target, prompts[0], max_new_tokens=NEW_TOKENS + 8), SCRIPT, **SMALL)
    written = spec_generate(drafter, target, prompts[0], draft_tree=7, temperature=0.0, **asked(Grammar))
    assert torch.equal(written, expected)


def test_the_callers_processor_is_not_called_in_a_batch(target: PreTrainedModel, prompts: list[torch.Tensor]) -> None:
    """It can be passed again: only copies of it have a state. What it holds of the models is not copied."""
    processor = Grammar()
    processor.model, processor.table = target, [3]
    ids, mask = left_padded(prompts)
    texts = [
        spec_generate(
            make_drafter(**SMALL), target, ids, attention_mask=mask, temperature=0.0, **asked(lambda: processor)
        )
        for _ in range(2)
    ]
    assert torch.equal(*texts)
    assert processor.matchers == []

    class Uncopied(torch.nn.Module):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("a model was copied")

    processor.model = Uncopied()
    spec_generate(make_drafter(**SMALL), target, ids, attention_mask=mask, temperature=0.0, **asked(lambda: processor))


def test_a_processor_that_cannot_be_copied_is_refused_in_a_batch(
    target: PreTrainedModel, prompts: list[torch.Tensor]
) -> None:
    ids, mask = left_padded(prompts)
    message = r"WithCompiled cannot be copied for each of 4 sequences \(cannot copy a compiled grammar\): pass the prompts one by"
    with pytest.raises(ValueError, match=message):
        spec_generate(make_drafter(**SMALL), target, ids, attention_mask=mask, temperature=0.0, **asked(WithCompiled))
    text = spec_generate(make_drafter(**SMALL), target, prompts[0], temperature=0.0, **asked(WithCompiled))
    assert torch.equal(text, plain(target, prompts[0]))


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rules_that_process_rejected_tokens_are_refused(
    target: PreTrainedModel, prompts: list[torch.Tensor], rule: str
) -> None:
    """Promise: a state never sees a token that is not in the text. Greedy decoding has one rule, whatever is asked for."""
    drafter = make_drafter(**SMALL, **SELECTOR)
    with pytest.raises(ValueError, match=f"verification='{rule}' also processes tokens .* Grammar may keep a state"):
        spec_generate(drafter, target, prompts[0], temperature=1.0, verification=rule, **asked(Grammar))
    text = spec_generate(drafter, target, prompts[0], temperature=0.0, verification=rule, **asked(Grammar))
    assert torch.equal(text, plain(target, prompts[0]))


# The libraries themselves, where they are installed.

PATTERN = r"[A-Z][a-z ,]{0,60}[0-9]{1,6}[ a-z.]{0,40}\n#### [0-9]{1,4}"


@pytest.fixture(scope="module")
def embedded() -> tuple[PreTrainedModel, DFlashDraftModel, Any, list[str]]:
    """The embedded pair, its tokenizer, and four prompts of different lengths."""
    target, drafter, tokenizer = load_embedded_pair()
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": problem.question}], tokenize=False, add_generation_prompt=True
        )
        for problem in heldout_problems()[:4]
    ]
    return target, drafter, tokenizer, texts


def check_library(embedded: Any, make: Callable[[], Any], temperature: float, make_alone: Any = None) -> list[str]:
    """Each text of a batch of four is the one that it has alone; a greedy one is that of `generate`. Returns the texts.

    `make` makes the processor of the batch, and `make_alone` one for each prompt, if they are others.
    """
    target, drafter, tokenizer, texts = embedded
    batch = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    shared: dict[str, Any] = {"max_new_tokens": 48, "temperature": temperature, "return_dict_in_generate": True}

    def generators(*seeds: int) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def new_text(sequence: torch.Tensor, length: int) -> str:
        return tokenizer.decode(sequence[length:], skip_special_tokens=True)

    output = drafter.spec_generate(
        dict(batch), target, logits_processor=[make()], generator=generators(0, 1, 2, 3), **shared
    )
    written = [new_text(sequence, batch["input_ids"].shape[1]) for sequence in output.sequences]
    assert output.tau > 1.3
    for index, text in enumerate(texts):
        ids = tokenizer(text, return_tensors="pt").input_ids
        new = (make_alone or [make] * len(texts))[index]
        alone = drafter.spec_generate(ids, target, logits_processor=[new()], generator=generators(index), **shared)
        assert new_text(alone.sequences[0], ids.shape[1]) == written[index]
        if not temperature:
            expected = target.generate(ids, logits_processor=[new()], max_new_tokens=48, do_sample=False)
            assert torch.equal(alone.sequences, expected)
    return written


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_xgrammar(embedded: Any, temperature: float) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    target, _, tokenizer, _ = embedded
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    grammar = xgrammar.GrammarCompiler(info).compile_regex(PATTERN)
    check_library(embedded, lambda: xgrammar.contrib.hf.LogitsProcessor(grammar), temperature)


def test_xgrammar_with_a_grammar_for_each_prompt(embedded: Any) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    target, _, tokenizer, _ = embedded
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    compiler = xgrammar.GrammarCompiler(info)
    grammars = [compiler.compile_regex(f"[A-Z][a-z ]{{5,20}}{number}{number}") for number in range(4)]
    alone = [lambda grammar=grammar: xgrammar.contrib.hf.LogitsProcessor(grammar) for grammar in grammars]
    together = check_library(embedded, lambda: xgrammar.contrib.hf.LogitsProcessor(grammars), 0.0, alone)
    assert [text[-2:] for text in together] == ["00", "11", "22", "33"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_outlines(embedded: Any, temperature: float) -> None:
    outlines = pytest.importorskip("outlines")
    target, _, tokenizer, _ = embedded
    model = outlines.from_transformers(target, tokenizer)
    with torch._dynamo.config.patch(suppress_errors=False):  # which outlines sets for the whole process
        processor = outlines.backends.get_regex_logits_processor("outlines_core", model, PATTERN)
        check_library(embedded, lambda: copy.copy(processor), temperature)
