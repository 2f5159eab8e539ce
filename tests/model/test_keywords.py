"""Each keyword of `generate` means what it means to plain `generate`: greedy the same text, sampled the same distribution.

What cannot be exact, or would be ignored, is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from distributions import (
    DEPTH,
    PAD,
    PROMPT,
    HabitDrafter,
    drawn_cells,
    exact_distribution,
    leaning,
    make_distribution_target,
    p_value,
    prepared_processors,
)
from tiny_models import (
    MASK_TOKEN_ID,
    NO_SPECIAL_TOKENS,
    PAD_TOKEN_ID,
    ScriptedDrafter,
    counted_forwards,
    make_drafter,
    make_prompt,
    make_target,
    make_tokenizer,
)
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    MaxTimeCriteria,
    PreTrainedModel,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from transformers.cache_utils import DynamicCache

from dflash import DFlashDraftModel, spec_generate
from dflash.model import generation_dflash
from dflash.model.targets_dflash import InexactError


NEW_TOKENS = 16
LENGTHS = (6, 1, 9)
SHALLOW = {"num_hidden_layers": 2}
SHALLOW_DRAFTER = {"num_hidden_layers": 1, "num_target_layers": 2, "target_layer_ids": [0]}
SCRIPT = [5, 0, 3, 1]
EARLY_IDS = list(range(20, 60))  # so many stop ids that a text meets one soon


def shallow_target() -> PreTrainedModel:
    """A fresh Qwen3 target of two layers, for a test that changes it."""
    return make_target("qwen3", **SHALLOW)


@cache
def target() -> PreTrainedModel:
    """The same, read-only."""
    return shallow_target()


@cache
def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Three prompts padded on the left [3, S], and their mask."""
    rows = [make_prompt(length, seed=10 + length)[0] for length in LENGTHS]
    ids = torch.stack([torch.nn.functional.pad(row, (max(LENGTHS) - len(row), 0), value=PAD_TOKEN_ID) for row in rows])
    return ids, (ids != PAD_TOKEN_ID).long()


def plain(model: PreTrainedModel, **options: Any) -> torch.Tensor:
    """What plain `generate` makes of `prompts()`."""
    ids, mask = prompts()
    return model.generate(ids, attention_mask=mask, **options)


def unpadded(sequences: torch.Tensor) -> list[torch.Tensor]:
    """The rows of sequences [3, S + new], without the padding of their prompts."""
    return [row[max(LENGTHS) - length :] for row, length in zip(sequences, LENGTHS, strict=True)]


class AvoidsTheLast(LogitsProcessor):
    """A processor of a user's own, which looks at the prefix."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 3.0 * torch.nn.functional.one_hot(input_ids[:, -1], scores.shape[-1])


class SumIsLarge(StoppingCriteria):
    """A criterion of a user's own: stops a row once its ids add up to enough."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids.sum(dim=1) > 450


class AllSumsAreLarge(SumIsLarge):
    """Stops all texts together, as criteria of lm-eval and lighteval do."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> bool:  # type: ignore[override]
        return bool(super().__call__(input_ids, scores).all())


# Greedy: the text of plain `generate`, for a batch of three.

GREEDY: dict[str, dict[str, Any]] = {
    "max_new_tokens": {"max_new_tokens": 7},
    "max_length": {"max_length": 18, "max_new_tokens": None},
    "max_length+max_new_tokens": {"max_length": 12, "max_new_tokens": 5},
    "min_new_tokens": {"min_new_tokens": 9, "eos_token_id": EARLY_IDS},
    "min_length": {"min_length": 17, "eos_token_id": EARLY_IDS},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[38], [22, 52], [5, 5]]},
    "suppress_tokens": {"suppress_tokens": [3, 18, 52, 72]},
    "begin_suppress_tokens": {"begin_suppress_tokens": [78, 84, 92]},
    "forced_eos_token_id": {"forced_eos_token_id": 5},
    "sequence_bias": {"sequence_bias": [[[22], -8.0], [[5, 5], -8.0]]},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 7},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.2},
    "remove_invalid_values": {"remove_invalid_values": True},
    "eos_token_id": {"eos_token_id": EARLY_IDS},
    "pad_token_id": {"eos_token_id": EARLY_IDS, "pad_token_id": 3},
    "max_time that is over": {"max_time": 1e-6},
    "max_time that is not": {"max_time": 1e6},
    "use_cache=True": {"use_cache": True},
    "guidance_scale=1": {"guidance_scale": 1.0},
    "several": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "min_new_tokens": 6, "eos_token_id": EARLY_IDS},
}

# Plain `generate` pads the rows of a batch that stopped only where there is a stop id too; without one it writes on.
UNUSED_STOP = {"eos_token_id": 7}

# What a `GenerationConfig` cannot hold.
GREEDY_CALLS: dict[str, dict[str, Any]] = {
    "logits_processor": {"logits_processor": [AvoidsTheLast()]},
    "logits_processor beside repetition_penalty": {"logits_processor": [AvoidsTheLast()], "repetition_penalty": 1.3},
    "stopping_criteria": {"stopping_criteria": [SumIsLarge()], **UNUSED_STOP},
    "stopping_criteria without a stop token": {"stopping_criteria": [SumIsLarge()]},
    "stopping_criteria of all texts": {"stopping_criteria": [AllSumsAreLarge()], **UNUSED_STOP},
    "stopping_criteria beside early stops": {
        "stopping_criteria": [SumIsLarge(), AllSumsAreLarge()],
        "eos_token_id": EARLY_IDS,
    },
    "stop_strings without a stop token": {"stop_strings": ["T3 T", 'W""', "GB3", "no"], "tokenizer": make_tokenizer()},
    "stop_strings": {"stop_strings": ["T3 T", 'W""', "GB3", "no"], "tokenizer": make_tokenizer(), **UNUSED_STOP},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": lambda row, ids: [30 + row, 40 + len(ids), 3]},
}


def complete(options: dict[str, Any]) -> dict[str, Any]:
    """The options, with a length and a pad id where they name none."""
    return {"max_new_tokens": NEW_TOKENS, "pad_token_id": PAD_TOKEN_ID, **options}


@cache
def expected(name: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What plain `generate` writes with the options of that name, and the rows' texts without any stop."""
    options = complete({**GREEDY, **GREEDY_CALLS}[name])
    stops = ("eos_token_id", "stopping_criteria", "stop_strings", "max_time", "max_length")
    endless = {key: value for key, value in options.items() if key not in stops}
    if {"min_new_tokens", "min_length", "exponential_decay_length_penalty"} & set(options):
        endless["eos_token_id"] = options["eos_token_id"]  # it is what they are about
    endless["max_new_tokens"] = NEW_TOKENS + 8
    truths = unpadded(plain(target(), do_sample=False, **endless))
    return plain(target(), do_sample=False, **options), truths


def ours(model: PreTrainedModel, truths: list[torch.Tensor], **options: Any) -> torch.Tensor:
    """`spec_generate` on `prompts()`, with a drafter that knows the texts and is wrong now and then."""
    ids, mask = prompts()
    return spec_generate(
        ScriptedDrafter(model, truths, SCRIPT, **SHALLOW_DRAFTER), model, ids, attention_mask=mask, **options
    )


@pytest.mark.parametrize("name", [*GREEDY, *GREEDY_CALLS])
def test_keyword_equals_plain_generate(name: str) -> None:
    """Promise: the keyword changes the text exactly as it changes that of plain `generate`, rows that stop included."""
    sequences, truths = expected(name)
    options = complete({**GREEDY, **GREEDY_CALLS}[name])
    assert torch.equal(ours(target(), truths, do_sample=False, **options), sequences)


WITHOUT_EFFECT = {"renormalize_logits", "remove_invalid_values", "max_time that is not", "use_cache=True", "guidance_scale=1"}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in (*GREEDY, *GREEDY_CALLS) if name not in WITHOUT_EFFECT])
def test_the_keyword_has_an_effect_here(name: str) -> None:
    """Guards the table: an option that changes nothing would pass where it is ignored."""
    untouched = plain(target(), do_sample=False, max_new_tokens=NEW_TOKENS, pad_token_id=PAD_TOKEN_ID)
    assert not torch.equal(expected(name)[0], untouched)


DOORS = ["temperature", "generation_config", "target"]


@pytest.mark.parametrize("name", ["max_length", "repetition_penalty", "pad_token_id", "several"])
@pytest.mark.parametrize("door", DOORS)
def test_settings_count_wherever_they_are_written(name: str, door: str) -> None:
    """Promise: `temperature=0.0` beside keywords, a `GenerationConfig`, and the one that the target holds are one thing."""
    sequences, truths = expected(name)
    options = {key: value for key, value in complete(GREEDY[name]).items() if value is not None}
    model = target()
    if door == "temperature":
        options = {"temperature": 0.0, **options}
    elif door == "generation_config":
        options = {"generation_config": GenerationConfig(do_sample=False, **options)}
    else:
        model = shallow_target()
        model.generation_config = GenerationConfig(do_sample=False, **options)
        options = {}
    assert torch.equal(ours(model, truths, **options), sequences)


def test_a_keyword_beats_the_config_that_the_target_holds() -> None:
    """Promise: as in `generate`: a keyword, else the target's own config."""
    model = shallow_target()
    model.generation_config = GenerationConfig(max_new_tokens=3, repetition_penalty=5.0, pad_token_id=PAD_TOKEN_ID)
    sequences, truths = expected("repetition_penalty")
    options = {"max_new_tokens": NEW_TOKENS, **GREEDY["repetition_penalty"]}
    assert torch.equal(ours(model, truths, do_sample=False, **options), sequences)


@pytest.mark.parametrize("greedy_by", [{"temperature": 0.0}, {"do_sample": False}], ids=str)
def test_greedy_where_the_target_samples_by_default(greedy_by: dict[str, Any]) -> None:
    """Promise: both spellings of greedy rule over a target whose own config samples."""
    model = shallow_target()
    model.generation_config = GenerationConfig(do_sample=True, temperature=0.6, top_k=20, top_p=0.9)
    sequences, truths = expected("max_new_tokens")
    options = complete(GREEDY["max_new_tokens"])
    assert torch.equal(ours(model, truths, **greedy_by, **options), sequences)


def test_return_dict_holds_the_sequences_of_generate() -> None:
    """Promise: `return_dict_in_generate` changes what is around the text, not the text."""
    sequences, truths = expected("max_new_tokens")
    options = {**complete(GREEDY["max_new_tokens"]), "do_sample": False, "return_dict_in_generate": True}
    assert torch.equal(plain(target(), **options).sequences, sequences)
    assert torch.equal(ours(target(), truths, **options).sequences, sequences)


@pytest.mark.parametrize("kind", ["scores", "logits"])
@pytest.mark.parametrize("name", ["max_new_tokens", "pad_token_id", "several"])
def test_scores_and_logits_are_those_of_generate(name: str, kind: str) -> None:
    """Promise: one [B, V] per new position as plain `generate` returns them, as far as a row's own text goes."""
    _, truths = expected(name)
    options = {**complete(GREEDY[name]), "do_sample": False, "return_dict_in_generate": True, f"output_{kind}": True}
    wanted, given = plain(target(), **options), ours(target(), truths, **options)
    assert torch.equal(given.sequences, wanted.sequences)
    stop_ids = torch.tensor(options.get("eos_token_id", []))
    new_ids = wanted.sequences[:, max(LENGTHS) :]
    is_stop = torch.isin(new_ids, stop_ids).long()
    is_text = is_stop.cumsum(dim=1) - is_stop == 0  # up to a row's first stop, itself included
    assert len(given[kind]) == len(wanted[kind]) == new_ids.shape[1]
    for position, (theirs, own) in enumerate(zip(wanted[kind], given[kind], strict=True)):
        rows = is_text[:, position]
        torch.testing.assert_close(own[rows], theirs[rows], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("end", [3, 4, 5])
def test_stop_string_inside_an_accepted_block_of_a_batch(end: int) -> None:
    """Known bug (native transformers 5.23): strings that end inside an accepted block were missed. Rows go on alone."""
    _, truths = expected("max_new_tokens")
    written = truths[1][LENGTHS[1] :][:end].tolist()
    string = "".join(make_tokenizer().convert_ids_to_tokens(written[-2:]))
    options = complete({"stop_strings": string, "tokenizer": make_tokenizer(), "do_sample": False, **UNUSED_STOP})
    sequences = plain(target(), **options)
    assert sequences[1, max(LENGTHS) + end :].eq(PAD_TOKEN_ID).all()
    assert sequences[0, -1] != PAD_TOKEN_ID
    ids, mask = prompts()
    drafter = ScriptedDrafter(target(), truths, [5], **SHALLOW_DRAFTER)
    assert torch.equal(spec_generate(drafter, target(), ids, attention_mask=mask, **options), sequences)


# Sampled: the distribution of plain `generate`, by enumeration.


class FollowsTheLast(LogitsProcessor):
    """A processor of a user's own: after a word, the next one of the vocabulary is likelier."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        following = (input_ids[:, -1] + 1) % scores.shape[-1]
        return scores + 1.5 * torch.nn.functional.one_hot(following, scores.shape[-1])


# Processors that look at a row's scores alone: all samples are rows of one batch.
SAMPLED: dict[str, dict[str, Any]] = {
    "do_sample": {},
    "temperature above 1": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.6},
    "epsilon_cutoff": {"epsilon_cutoff": 0.15},
    "eta_cutoff": {"eta_cutoff": 0.3},
    "suppress_tokens": {"suppress_tokens": [2]},
    "eos_token_id": {"eos_token_id": [3, 4], "pad_token_id": PAD},
    "temperature+top_k+top_p": {"temperature": 1.5, "top_k": 4, "top_p": 0.9},
}
# Processors that look at the prefix: asked row by row, so fewer samples in smaller batches.
SAMPLED_AFTER_A_PREFIX: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 4.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "temperature": 2.0},
    "min_new_tokens": {"min_new_tokens": 3, "eos_token_id": 3, "pad_token_id": PAD},
    "sequence_bias": {"sequence_bias": [[[1, 3], 3.0], [[2], -2.0]]},
    "logits_processor": {"logits_processor": [FollowsTheLast()]},
    "repetition_penalty+top_p": {"repetition_penalty": 1.5, "top_p": 0.9, "temperature": 1.5},
}
LAWS = {**SAMPLED, **SAMPLED_AFTER_A_PREFIX}
FITS, FAILS = 1e-3, 1e-5
FEW = {"no_repeat_ngram_size": 3}  # batches that show a bias, which a temperature of 2 hides in part


@cache
def distribution_target() -> PreTrainedModel:
    """The target of five words; read-only but for hooks that are taken off again."""
    return make_distribution_target()


@cache
def distribution(name: str) -> torch.Tensor:
    """The exact distribution of plain `generate` with the options of that name."""
    options = LAWS[name]
    processors = prepared_processors(distribution_target(), PROMPT, do_sample=True, max_new_tokens=DEPTH, **options)
    stop_ids = torch.tensor(options.get("eos_token_id", [])).flatten().tolist()
    return exact_distribution(distribution_target(), PROMPT, processors, stop_ids)


def sampled(num_batches: int, batch_size: int, **options: Any) -> torch.Tensor:
    """Which texts `spec_generate` writes, `batch_size` rows at a time."""
    drafter = HabitDrafter(distribution_target())

    def generate(seed: int) -> torch.Tensor:
        return spec_generate(
            drafter, distribution_target(), PROMPT, do_sample=True, max_new_tokens=DEPTH,
            num_return_sequences=batch_size, generator=torch.Generator().manual_seed(seed), **options,
        )  # fmt: skip

    return drawn_cells(generate, range(num_batches))


def sampled_with(name: str, **options: Any) -> torch.Tensor:
    """As many samples as the test can afford of the options of that name."""
    num_batches, batch_size = (3, 200) if name in SAMPLED_AFTER_A_PREFIX else (1, 1200)
    return sampled(num_batches, batch_size, **LAWS[name], **options)


def sampled_with_a_bias(name: str, **options: Any) -> torch.Tensor:
    """Fewer samples, from a target that leans towards what a block shows it."""
    with leaning(distribution_target()):
        return sampled(FEW.get(name, 1), 200 if name in SAMPLED_AFTER_A_PREFIX else 600, **LAWS[name], **options)


@pytest.mark.parametrize("name", LAWS)
def test_sampled_distribution_of_the_keyword(name: str) -> None:
    """Promise: exactly the distribution of plain `generate` with that keyword, by enumeration of every text of four words.

    The oracle is held against plain `generate` first; and a planted bias, a target that leans towards what a block shows
    it, fails the same test.
    """
    options = {"do_sample": True, "max_new_tokens": DEPTH, "num_return_sequences": 2000, **LAWS[name]}
    assert (
        p_value(drawn_cells(lambda seed: distribution_target().generate(PROMPT, **options), [0]), distribution(name))
        > FITS
    )
    assert p_value(sampled_with(name), distribution(name)) > FITS
    assert p_value(sampled_with_a_bias(name), distribution(name)) < FAILS


@pytest.mark.parametrize("name", [name for name in LAWS if name != "do_sample"])
def test_a_keyword_that_is_ignored_fails_the_distribution_test(name: str) -> None:
    """The test of the test: samples without the keyword are not taken for samples with it."""
    assert p_value(unguided(), distribution(name)) < FAILS


@cache
def unguided() -> torch.Tensor:
    """Samples with no keyword at all."""
    return sampled_with("do_sample")


@pytest.mark.parametrize("verification", ["rejection", "block"])
@pytest.mark.parametrize("name", ["temperature+top_k+top_p", "eos_token_id", "min_new_tokens"])
def test_every_verification_has_the_distribution_of_the_keyword(name: str, verification: str) -> None:
    """Promise: for a drafter that proposes one token per row all rules have one distribution, the target's."""
    assert p_value(sampled_with(name, verification=verification), distribution(name)) > FITS
    assert p_value(sampled_with_a_bias(name, verification=verification), distribution(name)) < FAILS


class Stale(LogitsProcessor):
    """A planted bug: a processor that is shown the prompt and the first word, whatever stands after them."""

    def __init__(self, inner: Callable[..., torch.Tensor]) -> None:
        self.inner = inner

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids[:, : PROMPT.shape[1] + 1], scores)


@pytest.mark.parametrize(
    ("name", "inner"),
    [("repetition_penalty", RepetitionPenaltyLogitsProcessor(4.0)), ("logits_processor", FollowsTheLast())],
)
def test_a_stale_prefix_fails_the_distribution_test(name: str, inner: Callable[..., torch.Tensor]) -> None:
    """The test of the test: a block whose columns are all processed after the same prefix is caught."""
    assert p_value(sampled(3, 200, logits_processor=[Stale(inner)]), distribution(name)) < FAILS


@pytest.mark.parametrize("door", ["keywords", "temperature", "generation_config", "target"])
def test_sampling_settings_count_wherever_they_are_written(door: str) -> None:
    """Promise: the same seed and settings give the same texts, however the settings came in."""
    settings = {"temperature": 1.5, "top_k": 4, "top_p": 0.9}
    model = distribution_target()
    options: dict[str, Any] = {}
    if door == "keywords":
        options = {"do_sample": True, **settings}
    elif door == "temperature":  # above 0: it samples, and nothing else need say so
        options = settings
    elif door == "generation_config":
        options = {"generation_config": GenerationConfig(do_sample=True, **settings)}
    else:
        model = make_distribution_target()
        model.generation_config = GenerationConfig(do_sample=True, **settings)
    sequences = spec_generate(
        HabitDrafter(model), model, PROMPT, max_new_tokens=DEPTH, num_return_sequences=200,
        generator=torch.Generator().manual_seed(1), **options,
    )  # fmt: skip
    assert sequences.shape == (200, PROMPT.shape[1] + DEPTH)
    expected_cells = sampled_settings_cells()
    assert torch.equal(drawn_cells(lambda seed: sequences, [0]), expected_cells)


@cache
def sampled_settings_cells() -> torch.Tensor:
    """The texts of seed 1 with the settings of the test above, given as keywords."""
    options = {"temperature": 1.5, "top_k": 4, "top_p": 0.9, "do_sample": True}
    return drawn_cells(
        lambda seed: spec_generate(
            HabitDrafter(distribution_target()), distribution_target(), PROMPT, max_new_tokens=DEPTH, num_return_sequences=200,
            generator=torch.Generator().manual_seed(seed), **options,
        ),
        [1],
    )  # fmt: skip


# Refused by name, before any compute.

SYNTHID = SynthIDTextWatermarkingConfig(ngram_len=2, keys=[1, 2, 3])
REFUSED: dict[str, dict[str, Any]] = {
    "num_beams": {"num_beams": 3},
    "num_beams and do_sample": {"num_beams": 3, "do_sample": True},
    "penalty_alpha": {"penalty_alpha": 0.6, "top_k": 4},
    "dola_layers": {"dola_layers": "low"},
    "guidance_scale": {"guidance_scale": 1.5},
    "watermarking_config": {"watermarking_config": WatermarkingConfig()},
    "watermarking_config of SynthID": {"watermarking_config": SYNTHID},
    "output_attentions": {"output_attentions": True, "return_dict_in_generate": True},
    "output_hidden_states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "use_cache": {"use_cache": False},
    "cache_implementation": {"cache_implementation": "static"},
}


def assert_refused(word: str, model: PreTrainedModel | None = None, **options: Any) -> None:
    """ValueError that names `word`, with nothing run."""
    model = target() if model is None else model
    drafter = make_drafter(**SHALLOW_DRAFTER)
    with counted_forwards(model) as calls, counted_forwards(drafter) as drafts:
        with pytest.raises(ValueError, match=word) as error:
            spec_generate(drafter, model, **{"input_ids": make_prompt(), **options})
        assert not calls
        assert not drafts
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_by_name(name: str) -> None:
    """Promise: named as a keyword and as part of a `GenerationConfig`."""
    options = REFUSED[name]
    assert_refused(name.split()[0], max_new_tokens=4, **options)
    if name != "cache_implementation":  # 4.57 fails on this one by itself
        assert_refused(name.split()[0], generation_config=GenerationConfig(max_new_tokens=4, **options))


@pytest.mark.parametrize("name", ["num_beams", "penalty_alpha", "guidance_scale"])
def test_what_the_target_holds_and_cannot_be_exact_is_refused_by_name(name: str) -> None:
    """Promise: a target's own defaults are never ignored in silence."""
    model = shallow_target()
    model.generation_config = GenerationConfig(max_new_tokens=4, **REFUSED[name])
    assert_refused(name, model)


@pytest.mark.parametrize(
    "options",
    [
        {"assistant_model": object()},
        {"past_key_values": DynamicCache()},
        {"cache": DynamicCache()},
        {"custom_generate": "some/folder"},
        {"inputs_embeds": torch.zeros(1, 3, 32)},
    ],
    ids=lambda options: next(iter(options)),
)
def test_another_way_of_decoding_is_refused_by_name(options: dict[str, Any]) -> None:
    """Promise: one way of decoding at a time."""
    assert_refused(next(iter(options)), max_new_tokens=4, **options)


def test_greedy_gives_one_sequence() -> None:
    """Promise: as in `generate`: several greedy texts of one prompt would all be the same."""
    assert_refused("num_return_sequences", max_new_tokens=4, num_return_sequences=2, do_sample=False)


NATIVE_SETTINGS = {"speculation_type": "dflash", "use_mtp": True}  # since transformers 5
IGNORED = {
    "prompt_lookup_num_tokens": {"generation_config": GenerationConfig(max_new_tokens=4, prompt_lookup_num_tokens=3)},
    "assistant_early_exit": {"assistant_early_exit": 1, "max_new_tokens": 4},
    "negative_prompt_ids": {"negative_prompt_ids": make_prompt(3), "max_new_tokens": 4},
    "assistant_tokenizer": {"assistant_tokenizer": make_tokenizer(), "max_new_tokens": 4},
    "synced_gpus": {"synced_gpus": True, "max_new_tokens": 4},
    "logits_to_keep": {"logits_to_keep": 3, "max_new_tokens": 4},
    **{name: {name: value, "max_new_tokens": 4} for name, value in NATIVE_SETTINGS.items()},
}


@pytest.mark.parametrize("name", IGNORED)
def test_nothing_is_ignored_in_silence(name: str) -> None:
    """Promise: a setting that would have no effect is refused by its name."""
    assert_refused(name, do_sample=False, **IGNORED[name])


# Bad input.


class Says(LogitsProcessor):
    """A broken processor: every score is `value`, from the third word on."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores if input_ids.shape[1] < 11 else torch.full_like(scores, self.value)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_processor_that_leaves_no_choice_is_named(value: float, temperature: float) -> None:
    """Promise: scores that are all NaN or all minus infinity choose nothing, and the processor that made them is named."""
    with pytest.raises(ValueError, match="Says"):
        spec_generate(
            make_drafter(**SHALLOW_DRAFTER), target(), make_prompt(),
            logits_processor=[Says(value)], temperature=temperature, max_new_tokens=6,
        )  # fmt: skip


class Forbids(LogitsProcessor):
    """Forbids the most probable token, and returns the scores in another shape."""

    def __init__(self, reshape: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.reshape = reshape

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.reshape(scores.scatter(-1, scores.argmax(-1, keepdim=True), float("-inf")))


def test_one_texts_scores_without_their_first_axis_are_those_of_generate() -> None:
    """Known bug: of [V] a single number was taken, and the text was the stop token for ever."""
    processors = LogitsProcessorList([Forbids(lambda scores: scores)])
    text = target().generate(make_prompt(), do_sample=False, logits_processor=processors, **SHORT)
    for reshape in (lambda scores: scores, lambda scores: scores[0]):
        asked = {"logits_processor": [Forbids(reshape)], "temperature": 0.0, **SHORT}
        assert torch.equal(spec_generate(make_drafter(**SHALLOW_DRAFTER), target(), make_prompt(), **asked), text)


@pytest.mark.parametrize(
    "reshape",
    [
        lambda scores: scores.repeat(2, 1),
        lambda scores: scores[None],
        lambda scores: scores[:, :50],
        lambda scores: scores.amax(),
    ],
    ids=["more rows", "another axis", "fewer tokens", "a number"],
)
def test_scores_of_another_shape_are_refused(reshape: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Known bug: more rows and another axis were taken in silence, where `generate` raises."""
    drafter, asked = make_drafter(**SHALLOW_DRAFTER), {"logits_processor": [Forbids(reshape)], "temperature": 0.0}
    with pytest.raises(ValueError, match=r"Forbids.* returned \[.*return scores of the same shape"):
        spec_generate(drafter, target(), make_prompt(), **asked, **SHORT)


SHORT: dict[str, Any] = {"max_new_tokens": 6}


def even_then_odd(row: int, input_ids: torch.Tensor) -> list[int]:
    """A grammar: after an odd token only even ones, and the other way round; nothing after a text that breaks it."""
    words = input_ids.tolist()[max(LENGTHS) :]
    is_grammatical = all((left + right) % 2 for left, right in pairwise(words))
    return list(range(2 + (words[-1] + 1) % 2 if words else 2, 90, 2)) if is_grammatical else []


class NothingBehindASlip(LogitsProcessor):
    """The same grammar as a processor, which leaves no choice after a text that breaks it."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        allowed = torch.full_like(scores, float("-inf"))
        for row, text in enumerate(input_ids):
            allowed[row, even_then_odd(row, text)] = 0
        return scores + allowed


@pytest.mark.parametrize(
    "options",
    [{"prefix_allowed_tokens_fn": even_then_odd}, {"logits_processor": [NothingBehindASlip()]}],
    ids=lambda options: next(iter(options)),
)
def test_a_grammar_need_not_know_what_is_only_drafted(options: dict[str, Any]) -> None:
    """Promise: a processor that has no answer after a text that is never written does not stop the text."""
    options = complete({**options, "do_sample": False})
    truths = unpadded(plain(target(), **{**options, "max_new_tokens": NEW_TOKENS + 8}))
    assert torch.equal(ours(target(), truths, **options), plain(target(), **options))


def test_a_stop_string_that_can_never_match_is_refused() -> None:
    """Promise: a string of characters that no token holds would never stop the text."""
    assert_refused("[Ss]top string", stop_strings="é", tokenizer=make_tokenizer(), max_new_tokens=4)


def test_a_stop_string_that_can_never_match_is_refused_beside_others() -> None:
    """Promise: the one that cannot match is named, whatever stands beside it."""
    assert_refused("[Ss]top string", stop_strings=["ab", "é"], tokenizer=make_tokenizer(), max_new_tokens=4)


def test_an_empty_stop_string_is_refused() -> None:
    """Promise: an empty string ends every text at its first token, which nobody means."""
    assert_refused("stop_strings", stop_strings="", tokenizer=make_tokenizer(), max_new_tokens=4)


def test_stop_strings_of_a_config_say_where_they_belong() -> None:
    """Promise: they need the tokenizer, which no config holds."""
    config = GenerationConfig(max_new_tokens=4, stop_strings=["ab"])
    assert_refused("stop_strings.*tokenizer", generation_config=config)
    assert_refused("stop_strings.*tokenizer", stop_strings=["ab"], max_new_tokens=4)


def masked_by_pad_id() -> PreTrainedModel:
    """A target whose config names a pad id, so that `generate` infers masks."""
    model = shallow_target()
    model.generation_config = GenerationConfig(**{**NO_SPECIAL_TOKENS, "pad_token_id": PAD_TOKEN_ID})
    return model


@pytest.mark.parametrize("rows", [1, 2])
def test_pad_id_inside_a_prompt_without_a_mask(rows: int) -> None:
    """Known trap: `generate` hides a pad id wherever it stands, also in the middle. Refused; with a mask it is a token."""
    model = masked_by_pad_id()
    prompt = make_prompt(8)
    prompt[0, 3] = PAD_TOKEN_ID
    prompt = torch.cat([make_prompt(8, seed=5), prompt])[-rows:]
    assert_refused(f"pad id {PAD_TOKEN_ID} at column 3", model, input_ids=prompt, do_sample=False, max_new_tokens=4)
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": NEW_TOKENS}
    sequences = model.generate(prompt, **options)
    hidden = model.generate(prompt, do_sample=False, max_new_tokens=NEW_TOKENS)
    assert not torch.equal(sequences, hidden), "hiding it changes nothing: choose another prompt"
    assert torch.equal(spec_generate(make_drafter(**SHALLOW_DRAFTER), model, prompt, **options), sequences)


def test_a_mask_with_a_hole_equals_plain_generate() -> None:
    """Promise: a hidden token in the middle of a prompt is hidden from both models."""
    prompt, mask = make_prompt(8), torch.ones(1, 8, dtype=torch.long)
    mask[0, 2:4] = 0
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": NEW_TOKENS}
    sequences = target().generate(prompt, **options)
    assert torch.equal(spec_generate(make_drafter(**SHALLOW_DRAFTER), target(), prompt, **options), sequences)


def test_a_hole_is_refused_where_hidden_tokens_count() -> None:
    """Bug: all of 12 prompts had another text: in plain decoding hidden tokens fill a window, and pass through a state."""
    target = make_target("qwen3_sliding")
    prompt, mask = make_prompt(8), torch.ones(1, 8, dtype=torch.long)
    spec_generate(make_drafter(), target, prompt, attention_mask=mask, max_new_tokens=2)
    mask[0, :2] = 0  # padding
    spec_generate(make_drafter(), target, prompt, attention_mask=mask, max_new_tokens=2)
    mask[0, 4] = 0
    with pytest.raises(ValueError, match="hides tokens inside a prompt, and Qwen3ForCausalLM counts them"):
        spec_generate(make_drafter(), target, prompt, attention_mask=mask, max_new_tokens=2)


def test_a_pad_inside_is_found_by_the_targets_own_id() -> None:
    """Bug: a config that was passed without `pad_token_id` hid it, though generate fills it up."""
    model = masked_by_pad_id()
    prompt = make_prompt(8)
    prompt[0, 3] = PAD_TOKEN_ID
    config = GenerationConfig(max_new_tokens=4)
    with pytest.raises(ValueError, match=f"holds the pad id {PAD_TOKEN_ID} at column 3"):
        spec_generate(make_drafter(**SHALLOW_DRAFTER), model, prompt, generation_config=config)


def test_prompts_that_already_end_in_a_stop_token_go_on() -> None:
    """Promise: only new tokens stop a text; a chat prompt may well end in one."""
    ids, _ = prompts()
    stop_id = int(ids[0, -1])
    sequences, truths = expected("suppress_tokens")
    options = complete({"eos_token_id": stop_id, **GREEDY["suppress_tokens"]})
    assert sequences.shape[1] > ids.shape[1] + 1
    assert torch.equal(ours(target(), truths, do_sample=False, **options), plain(target(), do_sample=False, **options))


def test_the_fixtures_hold_no_special_ids() -> None:
    """Guards the prompts: neither pad nor mask id among their tokens."""
    ids, mask = prompts()
    assert not {PAD_TOKEN_ID, MASK_TOKEN_ID} & set(ids[mask.bool()].tolist())
    assert isinstance(make_drafter(**SHALLOW_DRAFTER), DFlashDraftModel)


def test_criteria_of_a_batch_without_stop_tokens_need_the_package() -> None:
    """Without stop tokens `generate` pads no text, and all grow until all are told to stop."""
    criteria = StoppingCriteriaList([MaxTimeCriteria(9.0), MaxLengthCriteria(9)])
    with pytest.raises(InexactError, match=r"MaxTimeCriteria in a batch without stop tokens.*give eos_token_id"):
        generation_dflash._criteria_of_batch(criteria, False, None)
    assert generation_dflash._criteria_of_batch(criteria, True, None) == []
    criteria.append(SumIsLarge())
    with pytest.raises(InexactError, match=r"SumIsLarge in a batch, where it may look at all texts.*give one prompt"):
        generation_dflash._criteria_of_batch(criteria, True, None)


@pytest.mark.parametrize("nothing", [[], ()])
def test_no_stop_tokens_stop_nothing(nothing: Any) -> None:
    """Bug: an empty tuple of stop tokens raised IndexError."""
    ids = prompts()[0][:1]
    written = spec_generate(
        make_drafter(**SHALLOW_DRAFTER), target(), ids, temperature=0.0, max_new_tokens=9, stop_token_ids=nothing
    )
    assert written.shape[1] == ids.shape[1] + 9
