"""Data that is encoded once and kept, and data that is streamed: the same sequences as without, and what is refused."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
from processes import Forked
from tiny_models import save_target
from transformers import PreTrainedTokenizerFast

from dflash.checkpoints import TARGET_NAME, embedded_path
from dflash.training import (
    Example,
    Trainer,
    TrainingSettings,
    encoding_cache,
    load_examples,
    prepare,
    read_rows,
    train_drafter,
    valid_anchors,
)
from dflash.training import data as data_module
from dflash.training.data import Wanted
from dflash.training.encoding_cache import cached_examples
from dflash.training.examples import ExampleTable, has_rejected, joined, lengths_of, selected


TEXTS = [{"text": f"Ann has {number} apples and buys {number % 7} more."} for number in range(12)]
TRACE = [
    {"prompt_ids": [5, 6], "response_ids": [7, 8, 9], "rejected": [1, 3]},
    {"prompt_ids": [5], "response_ids": []},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return PreTrainedTokenizerFast.from_pretrained(embedded_path(TARGET_NAME))


@pytest.fixture
def encoded_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The rows that were encoded so far. Tables of 4 rows or more are kept, in a folder of the test."""
    rows: list[Any] = []
    encode = data_module.encode

    def counted(row: Any, *arguments: Any, **options: Any) -> Example:
        rows.append(row)
        return encode(row, *arguments, **options)

    monkeypatch.setattr(data_module, "encode", counted)
    monkeypatch.setattr(encoding_cache, "CACHED_ROWS", 4)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return rows


@pytest.fixture
def file(tmp_path: Path) -> str:
    return lines(tmp_path / "rows.jsonl", [*TEXTS, *TRACE])


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    return str(path)


def table_file(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache" / "dflash").rglob("*.arrow")
    return found


# --- encoded once ---


def test_a_second_start_encodes_nothing_and_has_the_same_examples(
    tokenizer: Any, file: str, encoded_rows: list[Any], tmp_path: Path
) -> None:
    """Promise: each start of a run has the same sequences, with their masks and rejected anchors, and one start encodes them."""
    datasets.Dataset.from_list(TEXTS).to_parquet(tmp_path / "rows.parquet")
    for source in (file, str(tmp_path / "rows.parquet")):
        expected = load_examples(source, tokenizer, max_length=9)
        encoded_rows.clear()
        said: list[str] = []
        first, second = (cached_examples(source, tokenizer, max_length=9, announce=said.append) for _ in range(2))
        assert len(encoded_rows) == len(expected)
        for found in (first, second):
            assert isinstance(found, ExampleTable)
            assert list(found) == expected
            assert found[-1] == expected[-1]
            assert found[2:5] == expected[2:5]
        assert len(said) == 1
        assert f"{source} is encoded once and kept in {tmp_path / 'cache' / 'dflash'}" in said[0]
    with pytest.raises(IndexError):
        second[len(second)]


def test_what_decides_the_encoding_decides_which_table_is_read(
    tokenizer: Any, file: str, encoded_rows: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Promise: another row, template, tokenizer, length or rule of encoding is never answered with older sequences."""

    def is_encoded(source: str = file, tokenizer: Any = tokenizer, **how: Any) -> bool:
        encoded_rows.clear()
        found = list(cached_examples(source, tokenizer, **how))
        is_new = bool(encoded_rows)
        assert found == load_examples(source, tokenizer, **how)
        return is_new

    assert is_encoded()
    tokenizer.save_pretrained(tmp_path / "copy")
    copy = PreTrainedTokenizerFast.from_pretrained(tmp_path / "copy")
    assert not is_encoded(tokenizer=copy)  # in another folder
    copy(["a", "b c"], padding=True, truncation=True, max_length=2)  # which leaves a trace in its state
    assert not is_encoded(tokenizer=copy)
    copy.chat_template += "{# changed #}"
    assert is_encoded(tokenizer=copy)
    copy.add_tokens(["apples"])
    assert is_encoded(tokenizer=copy)
    for how in ({"max_length": 5}, {"enable_thinking": True}, {"wanted": Wanted(5)}, {"wanted": Wanted(5, 8)}):
        assert is_encoded(**how)
        assert not is_encoded(**how)
    lines(Path(file), [*TEXTS[1:], TEXTS[0], *TRACE])
    assert is_encoded()
    monkeypatch.setattr(encoding_cache, "ENCODING", -1)
    assert is_encoded()


@pytest.mark.parametrize("damage", ["a bit", "the end", "all", "digest", "no digest"])
def test_a_damaged_table_is_written_again(
    damage: str, tokenizer: Any, file: str, encoded_rows: list[Any], tmp_path: Path
) -> None:
    expected = list(cached_examples(file, tokenizer))
    path = table_file(tmp_path)
    content = path.read_bytes()
    begin = content.index(expected[3].token_array.tobytes())
    if damage == "a bit":
        path.write_bytes(content[:begin] + bytes([content[begin] ^ 1]) + content[begin + 1 :])
    elif damage == "the end":
        path.write_bytes(content[: len(content) // 2])
    elif damage == "all":
        path.write_bytes(b"")
    elif damage == "digest":
        path.with_suffix(".digest").write_text("0" * 32)
    else:
        path.with_suffix(".digest").unlink()
    encoded_rows.clear()
    assert list(cached_examples(file, tokenizer)) == expected
    assert len(encoded_rows) == len(expected)
    assert list(cached_examples(file, tokenizer)) == expected
    assert len(encoded_rows) == len(expected)


def test_a_row_that_is_refused_is_named_and_nothing_is_kept(
    tokenizer: Any, encoded_rows: list[Any], tmp_path: Path
) -> None:
    file = lines(tmp_path / "rows.jsonl", [*TEXTS, {"words": "a"}])
    for _ in range(2):
        with pytest.raises(
            ValueError, match=r"^Row 13 of .*rows\.jsonl: A row with the columns \['words'\] cannot be"
        ):
            cached_examples(file, tokenizer)
    assert not list((tmp_path / "cache").rglob("*.arrow"))
    assert list(cached_examples(lines(Path(file), TEXTS), tokenizer)) == load_examples(file, tokenizer)


def test_where_nothing_can_be_kept_a_start_says_so_and_goes_on(
    tokenizer: Any, file: str, encoded_rows: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "cache").write_text("no folder")
    said: list[str] = []
    assert cached_examples(file, tokenizer, announce=said.append) == load_examples(file, tokenizer)
    (sentence,) = said
    assert f"cannot be kept in {tmp_path / 'cache' / 'dflash'} (" in sentence
    assert sentence.endswith("make room there, or set HF_DATASETS_CACHE to a folder that can be written.")


def test_few_rows_and_tokenizers_in_python_are_encoded_at_each_start(
    tokenizer: Any, file: str, encoded_rows: list[Any], tmp_path: Path
) -> None:
    few = lines(tmp_path / "few.jsonl", TEXTS[:3])
    assert isinstance(cached_examples(few, tokenizer), list)
    assert isinstance(cached_examples(file, tokenizer, wanted=Wanted(3)), list)

    class InPython:
        def __call__(self, text: str) -> dict[str, list[int]]:
            return {"input_ids": [len(text)]}

        eos_token_id = None

    assert isinstance(cached_examples(file, InPython()), list)
    assert not (tmp_path / "cache").exists()


def test_processes_that_start_together_encode_once(
    tokenizer: Any, file: str, encoded_rows: list[Any], tmp_path: Path
) -> None:
    def start() -> None:
        found = cached_examples(file, tokenizer)
        sys.stdout.write(f"{len(encoded_rows)} {found[3].input_ids}")

    one, other = (started.finish() for started in [Forked(start), Forked(start)])
    expected = load_examples(file, tokenizer)
    counts = [int(process.stdout.split()[0]) for process in (one, other)]
    assert sorted(counts) == [0, len(expected)], one.stderr + other.stderr
    assert all(str(expected[3].input_ids) in process.stdout for process in (one, other))


# --- sequences that are read when they are asked for ---


def test_tables_are_what_lists_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: the same examples as of lists, and the same lengths, for which no example is read."""
    whole = [Example([number] * (number % 7), [1] * (number % 7), [1] * (number % 2)) for number in range(50)]
    table = table_of(whole)
    for make in (
        lambda items: selected(items, [7, 3, 3, 49]),
        lambda items: joined([items, selected(items, [4, 2]), selected(items, []), items]),
        lambda items: selected(joined([items, whole]), range(40, 60)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(ExampleTable, "__getitem__", lambda *_: pytest.fail("read"))
            found, lengths = make(table), lengths_of(make(table))
        expected = list(make(whole))
        assert isinstance(found, ExampleTable)
        assert (len(found), list(found), found[-1]) == (len(expected), expected, expected[-1])
        assert found[1::2] == expected[1::2]
        assert random.Random(0).sample(found, 3) == random.Random(0).sample(expected, 3)
        assert lengths == lengths_of(expected) == list(map(len, found))
    assert all(isinstance(items, list) for items in (selected(whole, [1]), joined([whole, whole])))


def table_of(examples: list[Example]) -> ExampleTable:
    rows = [example.row() for example in examples]
    return ExampleTable(datasets.Dataset.from_list(rows, features=ExampleTable.features()))


@pytest.mark.parametrize("rows", [[*TEXTS, *TRACE], TEXTS], ids=["a trace", "texts"])
def test_a_table_knows_lengths_and_rejections_without_reading_an_example(
    rows: list[Any], tokenizer: Any, encoded_rows: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = cached_examples(lines(tmp_path / "some.jsonl", rows), tokenizer)
    assert isinstance(found, ExampleTable)
    expected = list(found)
    monkeypatch.setattr(ExampleTable, "__getitem__", lambda *_: pytest.fail("read"))
    assert lengths_of(found) == list(map(len, expected))
    assert has_rejected(found) == any(example.rejected for example in expected) == (rows is not TEXTS)


def test_an_example_has_an_anchor_if_a_block_may_begin_in_it() -> None:
    rng = random.Random(0)
    for _ in range(200):
        mask = [rng.randrange(2) for _ in range(rng.randrange(6))]
        assert Example(mask, mask).has_anchor == bool(valid_anchors(mask))


# --- runs ---

TINY: dict[str, Any] = {"num_hidden_layers": 1, "block_size": 8, "num_anchors": 4, "batch_tokens": 128}
TINY |= {"mixed_precision": "no", "eval_new_tokens": 4, "steps": 2, "held_out": 2}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cache") / "target"
    return save_target(folder)


def ids(count: int, first: int = 20, length: int = 14) -> list[dict[str, Any]]:
    return [{"prompt_ids": [5, 6, 7], "response_ids": [first + i, *range(30, 30 + length), 8]} for i in range(count)]


def test_a_run_from_the_cache_is_the_run_without_bit_for_bit(
    target: Path, encoded_rows: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    one, other = lines(tmp_path / "one.jsonl", ids(20)), lines(tmp_path / "other.jsonl", ids(8, 50, 9))
    found = []
    for name in ("without", "first", "second"):
        monkeypatch.setattr(encoding_cache, "CACHED_ROWS", 99 if name == "without" else 4)
        encoded_rows.clear()
        train_drafter(
            target, [f"{one}:0.7", f"{other}:0.3"], tmp_path / name, TrainingSettings(**TINY), show_progress=False
        )
        facts = json.loads((tmp_path / name / "training.json").read_text())
        weights = (tmp_path / name / "model.safetensors").read_bytes()
        found.append((weights, facts["data"], facts["held_out"], facts["curve"]))
        assert len(encoded_rows) == (0 if name == "second" else 28)
    assert found[0] == found[1] == found[2]


def test_before_the_first_step_each_example_is_read_three_times(
    target: Path, encoded_rows: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Promise: passes over data larger than memory are few. They are for the checks, repeats and the fingerprint.

    Reading an example of a table costs time, and lengths are known without: a step reads each example of its batch once more.
    """
    reads: Counter[int] = Counter()
    read, step, before = ExampleTable.__getitem__, Trainer.step, []

    def counted(self: ExampleTable, place: int) -> Example:
        example = read(self, place)
        reads[example.input_ids[3]] += 1  # which differs
        return example

    def noted(self: Trainer, *arguments: Any, **options: Any) -> Any:
        before.append(reads.copy())
        return step(self, *arguments, **options)

    monkeypatch.setattr(ExampleTable, "__getitem__", counted)
    monkeypatch.setattr(Trainer, "step", noted)
    settings = TrainingSettings(**TINY | {"steps": None, "epochs": 2, "batch_tokens": 32 * 18})
    file = lines(tmp_path / "rows.jsonl", ids(20))
    for number in range(2):
        reads.clear()
        train_drafter(target, file, tmp_path / str(number), settings, show_progress=False)
        first, second = before[-2:]
        assert max(first.values()) == 3
        assert Counter((second - first).values()) == {1: 18}  # an epoch; two are held out


# --- streamed ---


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A data set in parquet files, of which each third row is too short for a block."""
    rows = [row for i in range(30) for row in ids(1, 20 + i, 1 if i % 3 == 0 else 14)]
    for number in range(3):
        split = datasets.Dataset.from_list(rows[number * 10 :][:10])
        (tmp_path / "set").mkdir(exist_ok=True)
        split.to_parquet(tmp_path / "set" / f"train-{number}.parquet")
    return str(tmp_path / "set")


def test_a_streamed_source_is_read_as_far_as_it_is_asked_to(
    folder: str, tokenizer: Any, encoded_rows: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the first usable rows, the same as of the downloaded data, and no row after them."""
    whole = load_examples(folder)
    usable = [number for number, example in enumerate(whole) if len(example) >= 8]
    wanted = Wanted(9, 8)
    file = Path(folder, "train-0.parquet")
    for source, last in ((folder, usable[8]), (str(file), 9)):
        encoded_rows.clear()
        with monkeypatch.context() as patch:
            patch.setattr(datasets.DatasetBuilder, "download_and_prepare", lambda *_, **__: pytest.fail("downloaded"))
            assert load_examples(source, streaming=True, wanted=wanted) == whole[: last + 1]
        assert len(encoded_rows) == last + 1
        assert load_examples(source, wanted=wanted) == whole[: last + 1]
    encoded_rows.clear()
    for _ in range(2):
        assert list(cached_examples(folder, tokenizer, streaming=True, wanted=wanted)) == whole[: usable[8] + 1]
    assert len(encoded_rows) == usable[8] + 1
    datasets.Dataset.from_list(ids(9, 60)).to_parquet(file)
    assert cached_examples(folder, tokenizer, streaming=True, wanted=wanted)[0].input_ids[3] == 60
    assert next(iter(read_rows(folder, "train", streaming=True)))["prompt_ids"] == [5, 6, 7]


def test_a_mix_of_a_file_and_a_stream_has_its_weights(target: Path, folder: str, tmp_path: Path) -> None:
    file = lines(tmp_path / "rows.jsonl", ids(40, 20, 9))
    settings = TrainingSettings(**TINY | {"held_out": 0}, samples=12, streaming=True)
    said: list[str] = []
    ready = prepare(target, [f"{file}:0.75", f"{folder}:0.25"], settings, said.append)
    assert [sum(len(example) == length for example in ready.examples) for length in (14, 19)] == [12, 4]
    same = prepare(target, [f"{file}:0.75", f"{folder}:0.25"], replace(settings, streaming=False))
    assert list(same.examples) == list(ready.examples)
    prepare(target, folder, replace(settings, samples=25), said.append)
    assert f"{folder} has only 20 usable rows; samples asks for 25." in said


def test_streams_that_cannot_be_read_are_refused(
    target: Path, folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"^streaming needs a number of rows to stop at: give samples"):
        TrainingSettings(streaming=True)
    settings = TrainingSettings(**TINY, samples=5, streaming=True)
    with pytest.raises(ValueError, match=r"^.*set has no split 'test': choose one of train\.$"):
        prepare(target, folder, replace(settings, split="test"))
    monkeypatch.setattr(data_module, "SEARCHED_ROWS", 20)
    with pytest.raises(
        ValueError,
        match=r"^None of the first 20 rows of .*set is usable \(usable means: at least 40 tokens, two supervised",
    ):
        prepare(target, folder, replace(settings, min_length=40))
    with pytest.raises(ValueError, match="None of 10 sequences"):
        prepare(target, str(Path(folder, "train-0.parquet")), replace(settings, block_size=40))
    with pytest.raises(FileNotFoundError, match="nobody/nothing is neither a file nor a data set that can be reached"):
        prepare(target, "nobody/nothing", settings)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=r"empty\.jsonl holds no row"):
        prepare(target, tmp_path / "empty.jsonl", settings)


def test_the_command_streams(
    target: Path, folder: str, dflash_command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    words = ["--target", target, "--data", folder, "--output", tmp_path / "drafter", "--streaming"]
    words += [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", value)]
    status, _, said = dflash_command("train", *words)
    assert (status, "give samples (--samples) too" in said) == (1, True)
    assert dflash_command("train", *words, "--samples", 12)[0] == 0
    facts = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert facts["data"]["examples"] == 11  # one is held out


@pytest.mark.parametrize("error", [ConnectionError("The server went away."), OSError("Input/output error")], ids=repr)
def test_an_error_while_reading_is_raised_as_it_is(
    error: OSError, tokenizer: Any, encoded_rows: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: it is not taken for a cache that cannot be written, and nothing is read twice."""
    encode = data_module.encode

    def broken(row: Any, *arguments: Any, **options: Any) -> Example:
        if len(encoded_rows) == 5:
            raise error
        return encode(row, *arguments, **options)

    monkeypatch.setattr(data_module, "encode", broken)
    (tmp_path / "texts.jsonl").write_text("\n".join(map(json.dumps, TEXTS)))
    said: list[str] = []
    with pytest.raises(type(error), match=str(error)):
        cached_examples(str(tmp_path / "texts.jsonl"), tokenizer, announce=said.append)
    assert len(encoded_rows) == 5
    assert not any("cannot be kept" in sentence for sentence in said)


def test_texts_that_are_too_long_are_dropped_and_not_cut(target: Path, tmp_path: Path) -> None:
    """Promise: with drop_long no longer text is trained on, not even its beginning."""
    file = lines(tmp_path / "rows.jsonl", [*ids(6, 20, 9), *ids(4, 50, 20)])
    settings = TrainingSettings(**TINY | {"held_out": 0}, max_length=14, drop_long=True)
    assert [len(example) for example in prepare(target, file, settings).examples] == [14] * 6


def test_a_number_of_rows_does_not_bound_what_is_measured_on(target: Path, tmp_path: Path) -> None:
    """Promise: prompts are drawn from all of --eval-data, and nothing is said of its number of rows."""
    for name, count in (("train", 12), ("eval", 8)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, TEXTS[:count])))
    asked = {"samples": 10, "held_out": 8, "eval_data": str(tmp_path / "eval.jsonl"), "deduplicate": False}
    said: list[str] = []
    ready = prepare(target, tmp_path / "train.jsonl", TrainingSettings(**{**TINY, **asked}), said.append)
    assert len(ready.examples) == 10
    assert len(ready.held_out) == 8
    assert not [sentence for sentence in said if "usable rows" in sentence]
