"""Text of any form and source as token ids with a loss mask, and what is refused."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from transformers import PreTrainedTokenizerFast

import dflash.training
from dflash.checkpoints import TARGET_NAME, embedded_path
from dflash.training import Example, TrainingSettings, encode, load_examples, with_response, write_examples
from dflash.training.data import mixed, parts_of
from dflash.training.data_checks import check_lengths, check_mask_token, check_tokenizer, usable


CHAT = [
    {"role": "user", "content": "Ann has 3 apples."},
    {"role": "assistant", "content": "She has 3."},
    {"role": "user", "content": "And 4 more?"},
    {"role": "assistant", "content": "She has 7."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The embedded target's, whose chat template marks what the assistant says."""
    return PreTrainedTokenizerFast.from_pretrained(embedded_path(TARGET_NAME))


def supervised(example: Example, tokenizer: Any) -> list[str]:
    """The supervised stretches, as text."""
    stretches: list[list[int]] = []
    before = 0
    for token_id, learned in zip(example.input_ids, example.loss_mask, strict=True):
        if learned and not before:
            stretches.append([])
        if learned:
            stretches[-1].append(token_id)
        before = learned
    return [tokenizer.decode(stretch) for stretch in stretches]


# --- forms of a row ---


def test_every_turn_of_the_assistant_is_supervised_with_its_end(tokenizer: Any) -> None:
    example = encode({"messages": CHAT}, tokenizer)
    assert supervised(example, tokenizer) == ["She has 3.<|im_end|>", "She has 7.<|im_end|>"]
    assert tokenizer.decode(example.prompt_ids).endswith("<|im_start|>assistant\n")


def test_sharegpt_is_a_chat(tokenizer: Any) -> None:
    turns = [{"from": {"user": "human", "assistant": "gpt"}[turn["role"]], "value": turn["content"]} for turn in CHAT]
    assert encode({"conversations": turns}, tokenizer) == encode({"messages": CHAT}, tokenizer)


def test_a_completion_is_what_the_assistant_says(tokenizer: Any) -> None:
    one_turn = encode({"messages": CHAT[:2]}, tokenizer)
    as_text = encode({"prompt": CHAT[0]["content"], "completion": CHAT[1]["content"]}, tokenizer)
    as_messages = encode({"prompt": CHAT[:1], "completion": CHAT[1:2]}, tokenizer)
    assert supervised(as_text, tokenizer) == supervised(one_turn, tokenizer)
    assert as_text.prompt_ids == as_messages.prompt_ids == one_turn.prompt_ids
    assert as_messages.input_ids == one_turn.input_ids


def test_a_text_is_supervised_after_its_first_token(tokenizer: Any) -> None:
    example = encode({"text": "Ann has 3 apples."}, tokenizer)
    assert tokenizer.decode(example.input_ids) == "Ann has 3 apples." + tokenizer.eos_token
    assert example.loss_mask == [0] + [1] * (len(example) - 1)
    assert encode({"text": ""}, tokenizer).loss_mask == [0]


def test_without_a_template_a_prompt_is_written_as_it_is(tokenizer: Any) -> None:
    bare = PreTrainedTokenizerFast.from_pretrained(embedded_path(TARGET_NAME))
    bare.chat_template = None
    example = encode({"prompt": "Ann has", "completion": " 3 apples."}, bare)
    assert bare.decode(example.input_ids) == "Ann has 3 apples." + bare.eos_token
    assert supervised(example, bare) == [" 3 apples." + bare.eos_token]
    with pytest.raises(ValueError, match=r"no chat template.*set tokenizer\.chat_template"):
        encode({"messages": CHAT}, bare)


def test_a_template_that_marks_nothing_is_refused_with_what_to_add(tokenizer: Any) -> None:
    unmarked = PreTrainedTokenizerFast.from_pretrained(embedded_path(TARGET_NAME))
    unmarked.chat_template = tokenizer.chat_template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ValueError, match=r"wrap what the assistant says in \{% generation %\}…\{% endgeneration %\}"):
        encode({"messages": CHAT}, unmarked)
    # A chat in which the assistant says nothing is no fault of the template.
    assert not any(encode({"messages": CHAT[:1]}, tokenizer).loss_mask)


def test_a_template_that_rewrites_the_prompt_is_refused(tokenizer: Any) -> None:
    odd = PreTrainedTokenizerFast.from_pretrained(embedded_path(TARGET_NAME))
    odd.chat_template = "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(ValueError, match="writes this prompt differently when an answer follows"):
        encode({"prompt": CHAT[:1], "completion": CHAT[1:2]}, odd)


def test_examples_are_values() -> None:
    one, same, other = (with_response([3, 4], ids) for ids in ([5, 6], [5, 6], [5, 7]))
    assert one == same
    assert hash(one) == hash(same)
    assert one != other
    assert one != ([3, 4, 5, 6], [0, 0, 1, 1])
    assert len(one) == 4
    assert repr(one) == "Example([3, 4, 5, 6], [0, 0, 1, 1])"


# --- sources ---

ROWS = [{"text": "Ann has 3 apples."}, {"text": "She buys 4 more."}, {"text": "How many?"}]


def test_every_source_gives_the_same_examples(tokenizer: Any, tmp_path: Path) -> None:
    expected = [encode(row, tokenizer) for row in ROWS]
    lines = tmp_path / "rows.jsonl"
    lines.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    table = datasets.Dataset.from_list(ROWS)
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(tmp_path / "splits")
    (tmp_path / "folder").mkdir()
    table.to_json(tmp_path / "folder" / "train.jsonl")
    sources: list[Any] = [
        ROWS,
        iter(ROWS),
        table,
        lines,
        str(lines),
        *map(tmp_path.joinpath, ("rows.parquet", "saved")),
    ]
    for source in [*sources, tmp_path / "splits", tmp_path / "folder"]:
        assert load_examples(source, tokenizer) == expected
    assert load_examples(tmp_path / "splits", tokenizer, split="test") == expected[1:2]
    write_examples(tmp_path / "ids.jsonl", expected)
    assert load_examples(tmp_path / "ids.jsonl") == expected


def test_long_sequences_are_cut(tokenizer: Any) -> None:
    whole = encode(ROWS[0], tokenizer)
    (cut,) = load_examples(ROWS[:1], tokenizer, max_length=4)
    assert (cut.input_ids, cut.loss_mask) == (whole.input_ids[:4], whole.loss_mask[:4])


def test_arguments_for_the_template_arrive(tokenizer: Any) -> None:
    loud = PreTrainedTokenizerFast.from_pretrained(embedded_path(TARGET_NAME))
    loud.chat_template = "{% if loud %}!{% endif %}" + tokenizer.chat_template
    (quiet,), (noisy,) = (load_examples([{"messages": CHAT}], loud, loud=value) for value in (False, True))
    assert noisy.input_ids == loud("!")["input_ids"] + quiet.input_ids


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"text": "a"}\n{"text"', r"Line 2 of .*rows\.jsonl is not JSON"),
        ("[1]", r"Line 1 of .*rows\.jsonl is not an object: write one with messages, prompt and completion, or text"),
        ('{"text": "a"}\n{"words": "a"}', r"Row 2 of .*rows\.jsonl: A row with the columns \['words'\]"),
        ('{"prompt": "a"}', r"Row 1 of .*: A row with the columns \['prompt'\] cannot be trained on"),
        ('{"completion": "a"}', r"Row 1 of .*: it is malformed \(KeyError: 'prompt'\)"),
        ('{"messages": [{"content": "a"}]}', r"Row 1 of .*: the chat template cannot render it \(.*role"),
        ("", r"rows\.jsonl holds no row: give messages, prompt and completion, or text"),
    ],
)
def test_bad_files_are_refused_by_line(content: str, message: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_examples(path, tokenizer)


def test_sources_that_do_not_exist_are_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"rows\.jsonl does not exist: give a file, a folder, or the id"):
        load_examples(tmp_path / "rows.jsonl", tokenizer)
    with pytest.raises(FileNotFoundError, match="nobody/nothing is neither a file nor a data set that can be reached"):
        load_examples("nobody/nothing", tokenizer)
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match="has no split 'test': choose one of train"):
        load_examples(tmp_path / "splits", tokenizer, split="test")


# --- names ---


def test_every_exported_name_is_there() -> None:
    assert [name for name in dflash.training.__all__ if not hasattr(dflash.training, name)] == []
    assert dir(dflash.training) == sorted(dflash.training.__all__)


# --- mixes ---


def test_a_mix_has_its_weights_and_no_repeats() -> None:
    """The part that is smallest for its weight is whole; the same seed draws the same of the others."""
    many, few = ([with_response([first], [i, i]) for i in range(count)] for first, count in ((3, 50), (4, 8)))
    settings = TrainingSettings()
    kept, left_out = mixed([many + many[:5], few], (0.6, 0.4), settings)
    assert [sum(example.input_ids[0] == first for example in kept) for first in (3, 4)] == [12, 8]
    assert len(set(kept)) == 20
    assert left_out == {"that repeats another one": 5, "for the weights of the mix": 38}
    assert mixed([many + many[:5], few], (0.6, 0.4), settings)[0] == kept
    assert mixed([many, few], (0.6, 0.4), TrainingSettings(seed=1))[0] != kept
    assert mixed([many, few], (None, None), settings) == ([*many, *few], {})
    assert mixed([few, few], (None, None), TrainingSettings(deduplicate=False)) == ([*few, *few], {})


def test_sequences_of_another_length_are_left_out_of_a_mix() -> None:
    part = [with_response([3], [4] * length) for length in range(1, 9)]  # of 2 to 9 tokens
    kept, left_out = mixed([part], (None,), TrainingSettings(min_length=4, max_length=6, drop_long=True))
    assert [len(example) for example in kept] == [4, 5, 6]
    assert left_out == {"shorter than 4 tokens": 2, "longer than 6 tokens": 3}
    with pytest.raises(
        ValueError, match=r"Part 2 of the data has no sequence left \(8 that repeats another one\): give"
    ):
        mixed([part, part], (0.5, 0.5), TrainingSettings())


def test_a_weight_ends_the_name_of_a_part(tmp_path: Path) -> None:
    assert parts_of(["a.jsonl:0.7", "org/name:main:3e-1"]) == [("a.jsonl", 0.7), ("org/name:main", 0.3)]
    assert parts_of("org/name:main") == [("org/name:main", None)]
    (tmp_path / "rows:2").touch()
    assert parts_of(tmp_path / "rows:2") == [(str(tmp_path / "rows:2"), None)]
    for wrong in ("a:-1", "a:nan", "a:inf"):
        with pytest.raises(
            ValueError, match="is not a finite number above 0: give another one, or leave this source out"
        ):
            parts_of(wrong)


# --- what cannot be trained on ---


def chosen(examples: list[Example], mask_token_id: int = 49) -> tuple[list[Example], list[str]]:
    """The usable ones for a block of 4 and a vocabulary of 50, and what is announced."""
    said: list[str] = []
    config = SimpleNamespace(vocab_size=50, pad_token_id=None, get_text_config=lambda decoder: config)
    target: Any = SimpleNamespace(config=config, generation_config=SimpleNamespace())
    drafter: Any = SimpleNamespace(config=SimpleNamespace(block_size=4, mask_token_id=mask_token_id))
    return usable(examples, drafter, target, said.append), said


def test_sequences_shorter_than_a_block_are_left_out_and_counted() -> None:
    long, short, said_nothing = (
        with_response([3], [5, 6, 7]),
        with_response([3], [5, 6]),
        with_response([3, 4, 5, 6], []),
    )
    one_token = with_response([3, 4, 5, 6], [7])  # no anchor with a successor
    kept, said = chosen([short, long, said_nothing, one_token])
    assert kept == [long]
    assert said == ["3 of 4 sequences left out: shorter than a block, or without two supervised tokens in a row."]
    with pytest.raises(
        ValueError, match=r"None of 2 sequences \(the longest has 5 tokens\) has at least 4 tokens \(a block\)"
    ):
        chosen([short, one_token])


def test_data_without_a_supervised_token_is_refused() -> None:
    for examples, number in ([], "0 sequences"), ([with_response([3, 4, 5, 6, 7], [])], "1 sequence"):
        with pytest.raises(ValueError, match=rf"The data \({number}\) holds no supervised token"):
            chosen(examples)


def test_a_mask_token_in_the_data_is_refused() -> None:
    """The drafter would be shown it as text and asked to fill it in; another trainer's drafters had learned to say it."""
    with pytest.raises(
        ValueError, match=r"Sequence 2 holds the mask token \(49, at position 2\).*choose a mask_token_id"
    ):
        chosen([with_response([3], [5, 6, 7]), with_response([3, 4], [49, 5])])
    assert chosen([with_response([3], [5, 6, 7])], mask_token_id=4)[1] == []


def test_ids_that_the_target_does_not_know_are_refused() -> None:
    for token_id in (50, -1):
        with pytest.raises(
            ValueError, match=rf"Sequence 2 holds the token id {token_id} but the target's vocabulary has 50 ids"
        ):
            chosen([with_response([3], [5, 6, 7]), with_response([3], [token_id, 6, 7])])


@pytest.mark.parametrize(
    ("mask_token_id", "message"),
    [
        (0, "mask_token_id=0 is also the padding token: choose an id that never occurs in text"),
        (2, r"mask_token_id=2 is also an end-of-text token"),
        (50, "mask_token_id=50 is not an id of the target: choose one from 0 to 49"),
        (-1, "mask_token_id=-1 is not an id"),
    ],
)
def test_a_mask_token_that_means_something_is_refused(mask_token_id: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_mask_token(mask_token_id, vocab_size=50, pad_token_id=0, eos_token_ids=[1, 2])
    check_mask_token(49, vocab_size=50, pad_token_id=None, eos_token_ids=[])


def test_sequences_and_prompts_beyond_the_targets_positions_are_refused() -> None:
    example = with_response([3, 4], [5, 6, 7])
    check_lengths([example], [[3, 4]], 5)
    check_lengths([example], [[3] * 99], None)
    with pytest.raises(
        ValueError, match="A sequence has 5 tokens and the target 4 positions: give a max_length of at"
    ):
        check_lengths([example], [], 4)
    with pytest.raises(ValueError, match="A held-out prompt has 5 tokens and the target 5 positions"):
        check_lengths([example], [[3] * 5], 5)


def test_a_file_that_is_not_utf8_is_refused_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes('{"prompt_ids": [3], "response_ids": [4]}\n{"text": "naïve"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"Line 2 of .*rows\.jsonl is not UTF-8: write one object a line, in UTF-8"):
        load_examples(path)


def test_columns_that_are_empty_in_a_row_do_not_say_its_form(tokenizer: Any) -> None:
    row = {"text": "once upon a time", "messages": None, "completion": None, "response_ids": None}
    assert encode(row, tokenizer) == encode({"text": row["text"]}, tokenizer)


def test_a_tokenizer_of_another_vocabulary_is_refused(tokenizer: Any) -> None:
    size = len(tokenizer)
    check_tokenizer(tokenizer, size)
    check_tokenizer(tokenizer, size + 64)  # rows to spare
    check_tokenizer(tokenizer, int(size / 1.01) + 1)  # a token or two that a text-only target never reads
    for vocab_size in (int(size / 1.02), 3 * size):
        with pytest.raises(ValueError, match=rf"has {size} tokens and the target's vocabulary {vocab_size}"):
            check_tokenizer(tokenizer, vocab_size)
