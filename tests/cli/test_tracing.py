"""`--trace` of `dflash generate` and `dflash eval`: texts and rejected drafts, added to a file that `dflash adapt` reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import SMALL, ScriptedDrafter, greedy, make_drafter, make_target, make_tokenizer, save_target

from dflash.cli import loading
from dflash.cli.loading import Pair
from dflash.cli.tracing import recording
from dflash.common.files import only_writer
from dflash.evaluation import decoding_methods
from dflash.training import Trace, load_examples


PROMPT = "Ann has 3 apples."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, another of other weights, a drafter and prompts; read-only."""
    folder = tmp_path_factory.mktemp("tracing")
    for name, seed in (("target", 0), ("other", 1)):
        save_target(folder / name, num_hidden_layers=2, seed=seed)
    make_drafter(**SMALL).save_pretrained(folder / "drafter")
    (folder / "mine.jsonl").write_text("say 1\nsay 2\nsay 3")
    return folder


@pytest.fixture(autouse=True)
def _says_again() -> None:
    loading.say_once.cache_clear()


@pytest.fixture
def run(dflash_command: Callable[..., Any], folder: Path) -> Any:
    """`run("generate", PROMPT, "--trace", path)` with the pair: exit status, standard output, standard error."""

    def call(command: str, *words: Any, target: str = "target") -> tuple[int, str, str]:
        pair = ("--target", folder / target, "--drafter", folder / "drafter", "--max-new-tokens", 12)
        return dflash_command(command, *words, *pair)

    return call


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_generate_adds_its_text_to_a_trace_and_says_so_once(run: Any, folder: Path, tmp_path: Path) -> None:
    """Promise: off by default; each call adds the text it showed, with the rejected drafts, for the pair's own target."""
    trace = tmp_path / "new folder" / "t.jsonl"
    plain = run("generate", PROMPT, "--json")
    assert plain[0] == 0, plain[2]
    assert "adapt" not in plain[2]
    assert "--trace" not in plain[2]
    status, out, err = run("generate", PROMPT, "--json", "--trace", trace)
    assert status == 0, err
    assert err.count(f"The texts are added to {trace}, with the places where drafts were rejected (--trace).") == 1
    assert json.loads(out)["token_ids"] == json.loads(plain[1])["token_ids"]
    (row,) = rows(trace)
    assert row["response_ids"] == json.loads(out)["token_ids"]
    assert row["target"] == "target"
    assert row["rejected"]
    assert run("generate", "And now?", "--temperature", 1, "--trace", trace)[0] == 0
    assert [one["response_ids"] for one in rows(trace)][:1] == [row["response_ids"]]
    assert len(load_examples(trace)) == 2
    assert sorted(path.name for path in trace.parent.iterdir()) == ["t.jsonl"]


def test_eval_adds_each_prompt_once_and_its_result_is_the_same(run: Any, folder: Path, tmp_path: Path) -> None:
    """Promise: neither the warm-up nor repeats nor other methods are recorded; the texts are those of the journal."""
    trace, output = tmp_path / "t.jsonl", tmp_path / "r.json"
    asked = ("eval", "--prompts", folder / "mine.jsonl", "--methods", "dflash,dflash with lookup,dflash eager")
    status, _, err = run(*asked, "--repeats", 2, "--output", output, "--trace", trace)
    assert status == 0, err
    assert err.count("The texts are added to") == 1
    found = rows(trace)
    assert len(found) == 3
    answers = [one for row in rows(output.with_suffix(".jsonl"))[1:] for one in row["answers"]]
    texts = {one["text"] for one in answers if one["method"] == "dflash"}
    tokenizer = make_tokenizer()
    assert {tokenizer.decode(row["response_ids"], skip_special_tokens=True) for row in found} == texts
    assert all(row["rejected"] for row in found)
    lengths = {one["num_tokens"] for one in answers if one["method"] == "dflash"}
    assert {len(row["response_ids"]) for row in found} == lengths
    assert run(*asked, "--repeats", 2, "--output", output, "--trace", trace)[0] == 0
    assert len(rows(trace)) == 3  # nothing was asked again


def test_anchors_are_those_of_the_blocks_and_processes_write_one_file(tmp_path: Path) -> None:
    target, tokenizer = make_target(num_hidden_layers=2), make_tokenizer()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    drafter = ScriptedDrafter(target, greedy(target, ids, max_new_tokens=40), [1, 0, 2], **SMALL)
    pair, path = Pair(target, drafter, tokenizer), tmp_path / "t.jsonl"
    seen: list[list[Any]] = [[], []]
    for rank in (1, 0):
        with recording(path, pair, "org/target", rank) as recorded:
            method = recorded(decoding_methods(target, drafter, 20, ["dflash"])["dflash"])
            prompt = ids if rank else ids[:, :-1]
            method(prompt, seen[rank].append)
            assert method(prompt).token_ids == greedy(target, prompt, max_new_tokens=20)[0, prompt.shape[1] :].tolist()
            if not rank:
                with (
                    pytest.raises(ValueError, match="is being written by process"),
                    recording(path, pair, "org/target"),
                ):
                    pytest.fail("two commands add to one file")
        assert (tmp_path / "t.part1.jsonl").exists() == bool(rank)
    assert [len(row["prompt_ids"]) for row in rows(path)] == [ids.shape[1] - 1, ids.shape[1]]
    anchors, place = [], ids.shape[1] - 1
    for block in seen[1]:
        if block.num_accepted < block.num_proposals:
            anchors.append(place)
        place += len(block.token_ids)
    assert rows(path)[1]["rejected"] == anchors
    assert len(anchors) > 2


def test_a_text_that_is_interrupted_is_recorded_as_far_as_it_came(tmp_path: Path) -> None:
    target, drafter, tokenizer = make_target(num_hidden_layers=2), make_drafter(**SMALL), make_tokenizer()
    ids = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    seen: list[int] = []

    def stop(block: Any) -> None:
        seen.extend(block.token_ids)
        if len(seen) > 4:
            raise KeyboardInterrupt

    with recording(tmp_path / "t.jsonl", Pair(target, drafter, tokenizer), "t") as recorded:
        method = recorded(decoding_methods(target, drafter, 20, ["dflash"])["dflash"])
        with pytest.raises(KeyboardInterrupt):
            method(ids, stop)
    assert [row["response_ids"] for row in rows(tmp_path / "t.jsonl")] == [seen]


@pytest.mark.parametrize(
    ("held", "message"),
    [
        (
            "trace of another target",
            "Row 1 was recorded with the weights {ours} of other but {folder}/target has ",
        ),
        (
            "trace of another tokenizer",
            "Row 1 was recorded with the tokenizer 0a of target but {folder}/target has ",
        ),
        (
            '{{"prompt": "mine"}}\n',
            "Line 1 of {path} is not a complete row of a trace: name a new file, or one that --trace wrote.",
        ),
        (
            '{{"prompt": "mine"}}',
            "Line 1 of {path} is not a complete row of a trace: name a new file, or one that --trace wrote.",
        ),
        (
            '{{"target": "t", "rejected": []}}',
            "Line 1 of {path} is not a complete row of a trace: name a new file, or one that --trace wrote.",
        ),
        ("no JSON", "Line 1 of {path} is not a complete row of a trace: name a new file, or one that --trace wrote."),
    ],
)
def test_a_file_that_is_no_trace_of_this_pair_is_refused_and_stays(
    run: Any, folder: Path, tmp_path: Path, held: str, message: str
) -> None:
    path = tmp_path / "t.jsonl"
    if held.startswith("trace"):
        name = "other" if held.endswith("target") else "target"
        assert run("generate", PROMPT, "--trace", path, target=name)[0] == 0
    if held == "trace of another tokenizer":
        path.write_text(json.dumps(rows(path)[0] | {"tokenizer": "0a"}) + "\n")
    elif not held.startswith("trace"):
        path.write_text(held.format())
    before = path.read_bytes()
    said = message.format(path=path, folder=folder, ours=json.loads(before)["weights"] if "ours" in message else "")
    for words in (("generate", PROMPT), ("eval", "--prompts", folder / "mine.jsonl")):
        status, out, err = run(*words, "--trace", path)
        assert (status, out) == (1, "")
        assert said in err
        assert "name another file." in err or "name a new file" in err
        assert path.read_bytes() == before


def test_half_a_row_of_a_process_that_was_killed_is_cut_off(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    for half in (b'{"targ', b'{"target":"target","weights":"0'):
        assert run("generate", PROMPT, "--trace", path)[0] == 0
        whole = path.read_bytes()
        path.write_bytes(whole + half)
        assert run("generate", PROMPT, "--trace", path)[0] == 0
        assert path.read_bytes() == whole + whole.splitlines(keepends=True)[0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("generate", "x", "--trace", "t.json"), "The trace t.json must be a file that ends in .jsonl"),
        (("generate", "x", "--trace", "."), "The trace . must be a file that ends in .jsonl"),
        (("generate", "x", "--trace", "busy.jsonl"), "busy.jsonl is being written by process"),
        (
            ("generate", "x", "--trace", "t.jsonl", "--compare"),
            "leave out --json, --temperature, --top-p, --top-k, --seed and --trace.",
        ),
        (
            ("eval", "--prompts", "mine.jsonl", "--trace", "./mine.jsonl"),
            "--trace mine.jsonl is also a file that this command reads or writes: name another file.",
        ),
        (
            ("eval", "--tasks", "gsm8k", "--output", "r.json", "--trace", "r.jsonl"),
            "--trace r.jsonl is also a file that this command reads or writes: name another file.",
        ),
        (
            ("eval", "--tasks", "gsm8k", "--methods", "prompt lookup", "--trace", "t.jsonl"),
            "--trace t.jsonl records the drafts of the method dflash, and --methods prompt lookup leaves it out: ",
        ),
        (
            ("eval", "--tasks", "gsm8k", "--url", "http://x", "--baseline-url", "http://y", "--trace", "t.jsonl"),
            "--trace t.jsonl records the drafts of the method dflash, and --url asks a server: leave one of them out.",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_a_model_is_loaded(
    dflash_command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jsonl").write_text("say 1\n")
    with only_writer(tmp_path / "busy.jsonl"):
        status, out, err = dflash_command(words[0], *words[1:], "--target", "org/t", "--drafter", "org/d")
    assert (status, out) == (1, "")
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["mine.jsonl"]


def test_a_resumed_trace_of_another_target_is_refused_in_python_too(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "t.jsonl", make_tokenizer()
    Trace(path, make_target(num_hidden_layers=1), tokenizer).append([1], [2], [0])
    with pytest.raises(ValueError, match=r"t\.jsonl: Row 1 was recorded with the weights .*: name another file\."):
        Trace(path, make_target(num_hidden_layers=1, seed=1), tokenizer)
    Trace(path, make_target(num_hidden_layers=1, seed=1), tokenizer, overwrite=True).append([3], [4], [])
    assert [row["prompt_ids"] for row in rows(path)] == [[3]]


def test_a_resumed_command_keeps_what_its_trace_holds(dflash_command: Any, folder: Path, tmp_path: Path) -> None:
    """Promise: `regenerate --resume --trace` adds to the trace, and never begins it anew."""
    (tmp_path / "asked.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    words = ["regenerate", "--target", folder / "target", "--drafter", folder / "drafter", "--max-new-tokens", 8]
    words += [
        "--data",
        tmp_path / "asked.jsonl",
        "--output",
        tmp_path / "answers.jsonl",
        "--trace",
        tmp_path / "t.jsonl",
    ]
    status, _, err = dflash_command(*words)
    assert status == 0, err
    before = rows(tmp_path / "t.jsonl")
    status, _, err = dflash_command(*words, "--resume")
    assert status == 0, err
    assert rows(tmp_path / "t.jsonl") == before != []
