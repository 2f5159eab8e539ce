"""`dflash regenerate`: answers in the target's own words, whatever the row's form, the batch, the processes or a kill."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shutil
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from loopback import LoopbackServer, QuietHandler, started
from processes import dflash_process, forked
from tiny_models import make_drafter, make_target, make_tokenizer
from transformers import GPT2Config, GPT2LMHeadModel

from dflash.common.files import check_output
from dflash.common.openai_client import OpenAIClient
from dflash.regeneration import (
    Answer,
    AnswerRequest,
    RegenerationRecord,
    RegenerationRun,
    RegenerationSettings,
    Sampling,
    ServerWriter,
    TargetWriter,
    regenerate_data,
    row_seed,
    selection,
)
from dflash.regeneration import run as run_module
from dflash.training import Trace, load_examples


STOPS = [2, 11, 23, 37, 50, 64, 78]  # so many that a random target meets one soon
NEW = 10
SETTINGS = RegenerationSettings(max_new_tokens=NEW)


@pytest.fixture(scope="module")
def target() -> Any:
    target = make_target("qwen3", max_position_embeddings=96)
    target.generation_config.eos_token_id = STOPS
    target.generation_config.pad_token_id = 0
    return target


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def user(*texts: str) -> dict[str, Any]:
    """A chat whose answers are to be replaced."""
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": "old"}] for text in texts]
    return {"messages": [message for pair in turns for message in pair]}


CHATS = [
    user(text) for text in ("a", "how many?", "tell me more of it", "b c", "1+1", "why", "x y z w", "hello there")
]


def answer_alone(target: Any, prompt_ids: Sequence[int], max_new_tokens: int = NEW) -> list[int]:
    """The oracle: plain greedy decoding of one prompt."""
    ids = torch.tensor([list(prompt_ids)])
    written = target.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
    return written[0, len(prompt_ids) :].tolist()


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


class Counting:
    """A writer that counts what it is asked, and breaks before batch number `breaks_at`."""

    def __init__(self, writer: Any, breaks_at: int | None = None) -> None:
        self.writer, self.breaks_at, self.batches, self.asked = writer, breaks_at, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def __call__(self, requests: Sequence[AnswerRequest], sampling: Sampling) -> list[Answer]:
        if self.batches == self.breaks_at:
            raise KeyboardInterrupt
        self.batches += 1
        self.asked += len(requests)
        return self.writer(requests, sampling)


class Spoken:
    """A writer that says what it is told to, as the tokenizer spells it."""

    positions, facts, batch_size, is_concurrent = 400, {}, 4, False
    revision = None

    def __init__(self, tokenizer: Any, say: Callable[[str], tuple[str, bool]]) -> None:
        self.tokenizer, self.say = tokenizer, say
        self.prompts: list[str] = []

    def __call__(self, requests: Sequence[AnswerRequest], sampling: Sampling) -> list[Answer]:
        answers = []
        for request in requests:
            self.prompts.append(self.tokenizer.decode(request.prompt_ids))
            text, ended = self.say(self.prompts[-1])
            answers.append(Answer([*self.tokenizer(text)["input_ids"], *[2] * ended], ended))
        return answers


def test_every_form_of_a_row_is_answered_as_the_target_answers_it_alone(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    rows = [
        user("why"),
        {"conversations": [{"from": "human", "value": "why"}, {"from": "gpt", "value": "old"}]},
        {"prompt": "why", "completion": "old"},
        {
            "prompt": [{"role": "user", "content": "why"}],
            "completion": [{"role": "assistant", "content": "old"}],
        },
        {"prompt": "why"},
        {"messages": [{"role": "user", "content": "why"}]},
        {"prompt_ids": [5, 6, 7], "response_ids": [8]},
        {"text": "once upon a time"},
    ]
    regenerate_data(
        TargetWriter(target, None, 3),
        tokenizer,
        rows,
        tmp_path / "r.jsonl",
        replace(SETTINGS, prompt_tokens=6, deduplicate=False),
    )
    found = read(tmp_path / "r.jsonl")
    assert [row["row"] for row in found] == list(range(1, 9))
    chat = tokenizer("<|im_start|>user why<|im_end|><|im_start|>assistant [] ")["input_ids"]
    assert [row["prompt_ids"] for row in found] == [chat] * 6 + [[5, 6, 7], tokenizer("once u")["input_ids"]]
    for row in found:
        expected = answer_alone(target, row["prompt_ids"])
        assert row["response_ids"] == expected
        assert row["finish"] == ("stop" if expected[-1] in STOPS else "length")
        said = tokenizer.decode(expected[:-1] if row["finish"] == "stop" else expected, skip_special_tokens=True)
        if "messages" in row:
            assert row["messages"][-1] == {"role": "assistant", "content": said}
        else:
            assert row["text"].endswith(said)
    assert {row["finish"] for row in found} == {"stop", "length"}
    examples = load_examples(tmp_path / "r.jsonl")
    assert [example.input_ids for example in examples] == [row["prompt_ids"] + row["response_ids"] for row in found]


def test_a_target_without_a_chat_template_continues_texts_and_prompts_and_refuses_messages(
    target: Any, tmp_path: Path
) -> None:
    plain = make_tokenizer()
    plain.chat_template = None
    rows = [{"prompt": "once upon", "completion": "old"}, {"text": "once upon a time there"}]
    regenerate_data(TargetWriter(target), plain, rows, tmp_path / "r.jsonl", replace(SETTINGS, prompt_tokens=4))
    first, second = read(tmp_path / "r.jsonl")
    assert first["prompt_ids"] == plain("once upon")["input_ids"]
    assert set(first) == {"row", "parts", "finish", "prompt", "completion", "prompt_ids", "response_ids"}
    assert first["prompt"] == "once upon"
    assert second["text"].startswith("once")
    assert second["prompt_ids"] == plain("once")["input_ids"]
    with pytest.raises(
        ValueError, match=r"Row 1 of the data: The tokenizer has no chat template.*set tokenizer.chat_template"
    ):
        regenerate_data(TargetWriter(target), plain, [user("a")], tmp_path / "s.jsonl", SETTINGS)


def test_each_turn_of_a_chat_is_written_after_those_written_before_it(tokenizer: Any, tmp_path: Path) -> None:
    writer = Spoken(tokenizer, lambda prompt: (f"new {prompt.count('user')}", True))
    chat = {
        "messages": [
            {"role": "system", "content": "s"},
            *user("one", "two")["messages"],
            {"role": "user", "content": "x"},
        ]
    }
    record = regenerate_data(
        writer, tokenizer, [chat, user("one")], tmp_path / "r.jsonl", RegenerationSettings(thinking=True)
    )
    assert not any("old" in prompt for prompt in writer.prompts)
    row, single = read(tmp_path / "r.jsonl")
    assert [message["content"] for message in row["messages"]] == ["s", "one", "new 1", "two", "new 2", "x", "new 3"]
    assert "response_mask" not in single
    assert record.tokens == 4 * len("new 1 ")
    # As the template writes it, supervised where the assistant speaks, its end included.
    example = load_examples(tmp_path / "r.jsonl")[0]
    assert tokenizer.decode(example.input_ids) == tokenizer.apply_chat_template(row["messages"], tokenize=False)
    supervised = [i for i, is_ours in zip(example.input_ids, example.loss_mask, strict=True) if is_ours]
    assert tokenizer.decode(supervised) == "new 1<|im_end|>new 2<|im_end|>new 3<|im_end|>"


def test_a_template_that_rewrites_earlier_turns_gives_a_row_for_each_state_the_target_wrote_in(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Without thinking this template begins an answer with [], which it does not repeat in the history."""
    writer = Spoken(tokenizer, lambda prompt: ("new", True))
    regenerate_data(writer, tokenizer, [user("one", "two"), user("x")], tmp_path / "r.jsonl")
    rows = read(tmp_path / "r.jsonl")
    assert [(row["row"], row["parts"]) for row in rows] == [(1, 2), (1, 2), (2, 1)]
    assert [len(row["messages"]) for row in rows] == [2, 4, 2]
    assert sorted(tokenizer.decode(row["prompt_ids"]) for row in rows) == sorted(writer.prompts)
    assert all("response_mask" not in row for row in rows)


def test_nothing_is_asked_after_an_answer_that_was_cut(tokenizer: Any, tmp_path: Path) -> None:
    writer = Spoken(tokenizer, lambda prompt: ("new", prompt.count("user") < 2))
    record = regenerate_data(writer, tokenizer, [user("one", "two", "three"), user("x")], tmp_path / "r.jsonl")
    assert len(writer.prompts) == 3
    assert [row["finish"] for row in read(tmp_path / "r.jsonl")] == ["length", "length", "stop"]
    assert (record.rows, record.cut) == (2, 1)
    regenerate_data(
        writer,
        tokenizer,
        [user("one", "two", "three"), user("x")],
        tmp_path / "r.jsonl",
        RegenerationSettings(drop_cut=True),
        overwrite=True,
    )
    assert [row["row"] for row in read(tmp_path / "r.jsonl")] == [2]
    with pytest.raises(ValueError, match="Every one of the 1 answers was cut off: give a larger max_new_tokens"):
        regenerate_data(
            writer,
            tokenizer,
            [user("one", "two")],
            tmp_path / "none.jsonl",
            RegenerationSettings(drop_cut=True),
        )


def test_an_answer_ends_where_the_positions_do_also_beside_shorter_prompts(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """The batch goes on for its other rows, past the end of this one."""
    longest = target.config.max_position_embeddings
    rows = [{"prompt_ids": [9] * (longest - 3)}, {"prompt_ids": [5, 6]}, {"prompt_ids": [9] * longest}]
    record = regenerate_data(TargetWriter(target), tokenizer, rows, tmp_path / "r.jsonl", SETTINGS)
    long, short = read(tmp_path / "r.jsonl")
    assert len(long["response_ids"]) <= 3
    assert long["response_ids"] == answer_alone(target, long["prompt_ids"], 3)
    assert short["response_ids"] == answer_alone(target, [5, 6])
    assert record.left_out == {f"a prompt that fills the target's {longest} positions": 1}


def crowded(longest: int) -> list[AnswerRequest]:
    """Prompts of a batch that leave one token, a few, and more than the longest answer of the others."""
    return [AnswerRequest([9] * (longest - room), 40 + room, min(room, NEW)) for room in (1, 3, 4, 60)]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2, 0.95, 40)])
@pytest.mark.parametrize("with_drafter", [False, True])
def test_texts_that_fill_the_positions_change_no_answer_of_their_batch(
    target: Any, with_drafter: bool, sampling: Sampling, caplog: pytest.LogCaptureFixture
) -> None:
    """The others go on without them: no forward has a position that the target lacks."""
    longest = target.config.max_position_embeddings
    seen: list[int] = []
    write = TargetWriter(target, make_drafter() if with_drafter else None)
    hook = target.model.rotary_emb.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(int(kwargs.get("position_ids", args[-1]).max())), with_kwargs=True
    )
    try:
        together = write(crowded(longest), sampling)
    finally:
        hook.remove()
    assert max(seen) < longest
    alone = [TargetWriter(target)([request], sampling)[0] for request in crowded(longest)]
    assert [(one.token_ids, one.ended) for one in together] == [(one.token_ids, one.ended) for one in alone]
    assert "positions" not in caplog.text


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.2, 0.95, 40)])
@pytest.mark.parametrize("prompts", [(95, 2, 3), (95, 60, 70, 2)])
def test_a_long_prompt_ends_neither_the_drafts_nor_the_trace_of_its_batch(
    tokenizer: Any, tmp_path: Path, prompts: tuple[int, ...], sampling: Sampling
) -> None:
    """Promise: a trace holds whole answers, because `dflash adapt` trains on them as they are."""
    target = make_target("qwen3", max_position_embeddings=96)  # it never stops
    requests = [AnswerRequest([9] * length, length, min(40, 96 - length)) for length in prompts]
    write = TargetWriter(target, make_drafter(), trace=Trace(tmp_path / "trace.jsonl", target, tokenizer))
    answers = write(requests, sampling)
    assert [one.token_ids for one in answers] == [one.token_ids for one in TargetWriter(target)(requests, sampling)]
    assert [len(one.token_ids) for one in answers] == [request.max_new_tokens for request in requests]
    for request, answer, row in zip(requests, answers, read(tmp_path / "trace.jsonl"), strict=True):
        assert (row["prompt_ids"], row["response_ids"]) == (request.prompt_ids, answer.token_ids)
        begin = len(request.prompt_ids)
        assert sum(answer.acceptance_lengths) >= request.max_new_tokens // 2
        assert len(row["rejected"]) >= request.max_new_tokens // 4  # a drafter without training is rarely right
        assert set(row["rejected"]) <= set(range(begin, begin + len(answer.token_ids) - 1))


def test_a_target_with_learned_positions_answers_short_prompts_beside_long_ones() -> None:
    """Such a batch once ended in an IndexError: the long text went on past the table of positions."""
    sizes = {"vocab_size": 96, "n_positions": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
    target = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    requests = [AnswerRequest([9] * 93, 0, 3), AnswerRequest([5, 6], 0, NEW)]
    answers = TargetWriter(target)(requests, Sampling())
    assert [one.token_ids for one in answers] == [
        answer_alone(target, one.prompt_ids, one.max_new_tokens) for one in requests
    ]


SAMPLED = replace(SETTINGS, temperature=1.2, top_p=0.95, top_k=40, seed=3)


def test_a_sampled_answer_depends_on_its_row_and_seed_not_on_batch_subset_or_drafter(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    def write(name: str, writer: Any, settings: RegenerationSettings = SAMPLED) -> dict[int, list[int]]:
        regenerate_data(writer, tokenizer, CHATS, tmp_path / f"{name}.jsonl", settings)
        return {row["row"]: row["response_ids"] for row in read(tmp_path / f"{name}.jsonl")}

    state = torch.get_rng_state()
    one = write("one", TargetWriter(target, None, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert write("five", TargetWriter(target, None, 5)) == one
    assert write("drafted", TargetWriter(target, make_drafter(), 3)) == one
    assert write("some", TargetWriter(target), replace(SAMPLED, samples=3)).items() <= one.items()
    assert write("other", TargetWriter(target), replace(SAMPLED, seed=4)) != one
    greedy = write("greedy", TargetWriter(target), SETTINGS)
    assert greedy != one
    assert write("greedy-drafted", TargetWriter(target, make_drafter(), 3), SETTINGS) == greedy
    assert len(set(map(tuple, one.values()))) == len(one)


def test_sampling_keeps_to_top_k_and_top_p_and_to_the_targets_distribution(target: Any) -> None:
    prompt = [5, 6, 7]
    logits = target(torch.tensor([prompt])).logits[0, -1].float()
    write = TargetWriter(target, None, 500)

    def first_tokens(sampling: Sampling, count: int = 500) -> list[int]:
        return [
            a.token_ids[0] for a in write([AnswerRequest(prompt, row_seed(0, i), 1) for i in range(count)], sampling)
        ]

    best = logits.topk(3).indices.tolist()
    assert set(first_tokens(Sampling(1.0, top_k=3))) == set(best)
    expected = (logits / 1.5).softmax(-1)
    drawn = torch.bincount(torch.tensor(first_tokens(Sampling(1.5), 4000)), minlength=len(expected)) / 4000
    assert (drawn - expected).abs().sum() < 0.2  # 0.12 is expected of 4000 draws from 96 tokens
    order = expected.sort(descending=True)
    kept = order.indices[: int((order.values.cumsum(0) < 0.3).sum()) + 1].tolist()
    assert set(first_tokens(Sampling(1.5, top_p=0.3))) <= set(kept)


@pytest.mark.parametrize("breaks_at", [1, 2])
def test_a_run_that_was_killed_goes_on_and_ends_as_if_it_had_not_been(
    target: Any, tokenizer: Any, tmp_path: Path, breaks_at: int
) -> None:
    """A kill can leave half a line; the row it belongs to is written again."""
    whole, output = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    regenerate_data(TargetWriter(target, None, 3), tokenizer, CHATS, whole, SAMPLED)
    with pytest.raises(KeyboardInterrupt):
        regenerate_data(Counting(TargetWriter(target, None, 3), breaks_at), tokenizer, CHATS, output, SAMPLED)
    assert len(read(output)) == 3 * breaks_at
    assert not json.loads(output.with_suffix(".manifest.json").read_text())["complete"]
    output.write_bytes(output.read_bytes()[:-5])
    (tmp_path / ".killed.jsonl.77.tmp").write_text("half")  # of a kill while the rows were put in order
    writer = Counting(TargetWriter(target, None, 2))  # another batch size may go on
    told: list[tuple[int, int]] = []
    regenerate_data(
        writer,
        tokenizer,
        CHATS,
        output,
        SAMPLED,
        resume=True,
        run=RegenerationRun(on_begin=lambda share, record: told.append((share, record.was_finished))),
    )
    left = len(CHATS) - 3 * breaks_at + 1
    assert (writer.asked, told) == (left, [(left, len(CHATS) - left)])
    assert output.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob(".*"))
    assert json.loads(output.with_suffix(".manifest.json").read_text())["complete"]
    writer = Counting(TargetWriter(target))
    regenerate_data(writer, tokenizer, CHATS, output, SAMPLED, resume=True)
    assert writer.asked == 0
    assert output.read_bytes() == whole.read_bytes()


def test_a_torn_row_of_several_lines_is_written_again(tokenizer: Any, tmp_path: Path) -> None:
    output, rows = tmp_path / "r.jsonl", [user("one", "two"), user("a", "b")]
    regenerate_data(Spoken(tokenizer, lambda prompt: ("new", True)), tokenizer, rows, output)
    whole = output.read_bytes()
    output.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))  # the second row lacks its second line
    writer = Spoken(tokenizer, lambda prompt: ("new", True))
    regenerate_data(writer, tokenizer, rows, output, resume=True)
    assert len(writer.prompts) == 2
    assert output.read_bytes() == whole


def test_more_samples_may_follow_and_contain_the_fewer(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    output = tmp_path / "r.jsonl"
    regenerate_data(TargetWriter(target), tokenizer, CHATS, output, replace(SETTINGS, samples=3))
    few = {row["row"] for row in read(output)}
    writer = Counting(TargetWriter(target))
    regenerate_data(writer, tokenizer, CHATS, output, replace(SETTINGS, samples=5), resume=True)
    assert writer.asked == 2
    assert few < {row["row"] for row in read(output)}
    with pytest.raises(ValueError, match="samples: 5, now 4"):
        regenerate_data(writer, tokenizer, CHATS, output, replace(SETTINGS, samples=4), resume=True)


def test_streamed_rows_are_answered_as_far_as_they_are_asked_for(
    target: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the first rows with a question, answered as of the downloaded data, and nothing is read after them."""
    silent = {"messages": [{"role": "assistant", "content": "old"}]}
    read_so_far: list[Any] = []

    def stream(rows: Sequence[Any] = (silent, *CHATS)) -> Any:
        for row in rows:
            read_so_far.append(row)
            yield row

    settings = replace(SETTINGS, samples=3, streaming=True)
    writer, output = Counting(TargetWriter(target)), tmp_path / "r.jsonl"
    record = regenerate_data(writer, tokenizer, stream(), output, settings)
    assert (record.rows, len(read_so_far), sum((record.left_out or {}).values())) == (3, 4, 1)
    regenerate_data(writer, tokenizer, [silent, *CHATS[:3]], tmp_path / "whole.jsonl", SETTINGS)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    asked = writer.asked
    regenerate_data(writer, tokenizer, stream(), output, settings, resume=True)
    assert writer.asked == asked

    datasets.Dataset.from_list(CHATS).to_parquet(tmp_path / "chats.parquet")
    regenerate_data(writer, tokenizer, tmp_path / "chats.parquet", tmp_path / "p.jsonl", settings)
    assert [row["row"] for row in read(tmp_path / "p.jsonl")] == [1, 2, 3]

    with pytest.raises(ValueError, match=r"^streaming needs a number of rows to stop at: give samples"):
        RegenerationSettings(streaming=True)
    with pytest.raises(ValueError, match="the data holds no row: give messages"):
        regenerate_data(writer, tokenizer, stream(()), tmp_path / "none.jsonl", settings)
    monkeypatch.setattr(selection, "SEARCHED_ROWS", 5)
    read_so_far.clear()
    with pytest.raises(ValueError, match=r"No row of the data can be answered: .* \(5\); give rows with a question"):
        regenerate_data(writer, tokenizer, stream([silent] * 9), tmp_path / "none.jsonl", settings)
    assert len(read_so_far) == 5


def test_a_trace_of_an_earlier_run_is_not_lost(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Known bug: a call from Python deleted the file, whatever it held; the command asked first."""
    trace, output = tmp_path / "trace.jsonl", tmp_path / "r.jsonl"
    trace.write_text("mine\n")
    writer = TargetWriter(target, make_drafter())
    with pytest.raises(ValueError, match=r"trace\.jsonl exists: pass overwrite"):
        regenerate_data(writer, tokenizer, CHATS[:1], output, SETTINGS, run=RegenerationRun(trace=trace))
    assert trace.read_text() == "mine\n"
    regenerate_data(writer, tokenizer, CHATS[:1], output, SETTINGS, overwrite=True, run=RegenerationRun(trace=trace))
    assert read(trace)


def test_an_output_that_holds_something_else_is_refused(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    output, writer = tmp_path / "r.jsonl", TargetWriter(target)

    def write(settings: RegenerationSettings = SETTINGS, rows: Any = CHATS, path: Path = output, **how: Any) -> None:
        regenerate_data(writer, tokenizer, rows, path, settings, **how)

    write()
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"holds a run: pass resume \(--resume\).*--overwrite"):
        write()
    with pytest.raises(
        ValueError, match=r"to resume differs \(max_new_tokens: 10, now 9; temperature: 0.0, now 0.5\)"
    ):
        write(replace(SETTINGS, max_new_tokens=9, temperature=0.5), resume=True)
    with pytest.raises(ValueError, match=r"to resume differs \(data: "):
        write(rows=CHATS[:4], resume=True)
    with pytest.raises(ValueError, match="both given"):
        write(resume=True, overwrite=True)
    other = make_tokenizer()
    other.chat_template = other.chat_template.replace("[] ", "() ")
    with pytest.raises(ValueError, match="chat_template"):
        regenerate_data(writer, other, CHATS, output, SETTINGS, resume=True)
    with pytest.raises(ValueError, match="weights"):
        regenerate_data(TargetWriter(make_target(seed=9)), tokenizer, CHATS, output, SETTINGS, resume=True)
    assert output.read_bytes() == before
    write(replace(SETTINGS, max_new_tokens=3), overwrite=True)
    assert max(len(row["response_ids"]) for row in read(output)) == 3

    mine = tmp_path / "mine.jsonl"
    mine.write_text(json.dumps(CHATS[0]) + "\n")
    for how in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(ValueError, match=r"something other than a run \(there is no mine.manifest.json\)"):
            write(path=mine, **how)
    with pytest.raises(ValueError, match="is the data itself"):
        write(rows=mine, path=mine, overwrite=True)
    with pytest.raises(ValueError, match=r"must be a file that ends in \.jsonl"):
        write(path=tmp_path / "folder")


class Sibling:
    """One of several processes, here a thread of its own."""

    def __init__(self, rank: int, meeting: Any, held: list[Any]) -> None:
        self.rank, self.is_first, self.count = rank, rank == 0, len(held)
        self._meeting, self._held = meeting, held

    def share(self, items: Sequence[Any]) -> Sequence[Any]:
        return items[self.rank :: self.count]

    def gather(self, items: Sequence[Any]) -> list[Any]:
        self._held[self.rank] = list(items)
        self._meeting.wait()
        found = [item for part in self._held for item in part]
        self._meeting.wait()
        return found


def in_processes(count: int, work: Callable[[Sibling], Any]) -> list[Any]:
    meeting, held, results = threading.Barrier(count, timeout=60), [[]] * count, [None] * count

    def run(rank: int) -> None:
        try:
            results[rank] = work(Sibling(rank, meeting, held))
        except BaseException as error:
            results[rank] = error
            meeting.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_several_processes_write_what_one_does_also_when_fewer_go_on(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "r.jsonl"
    alone = regenerate_data(TargetWriter(target, make_drafter(), 2), tokenizer, CHATS, whole, SAMPLED)
    in_processes(
        3,
        lambda sibling: regenerate_data(
            Counting(TargetWriter(target, None, 1), 3 - sibling.rank),
            tokenizer,
            CHATS,
            output,
            SAMPLED,
            run=RegenerationRun(processes=sibling),
        ),
    )
    assert sorted(path.name for path in tmp_path.glob("r.*jsonl")) == ["r.jsonl", "r.part1.jsonl", "r.part2.jsonl"]
    found = in_processes(
        2,
        lambda sibling: regenerate_data(
            TargetWriter(target, make_drafter(), 2),
            tokenizer,
            CHATS,
            output,
            SAMPLED,
            run=RegenerationRun(processes=sibling),
            resume=True,
        ),
    )
    assert all(isinstance(record, RegenerationRecord) for record in found), found
    assert output.read_bytes() == whole.read_bytes()
    assert sorted(path.name for path in tmp_path.glob("r.*")) == ["r.jsonl", "r.manifest.json"]
    assert found[0].rows == alone.rows == len(CHATS)
    assert found[0].steps == found[1].steps < alone.steps


def test_a_data_set_with_mixed_columns_is_read_and_its_licence_kept(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """In a `Dataset` every row has every column, `None` where it has nothing to say."""
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"prompt": "why", "text": None}, {"prompt": None, "text": "once upon"}])
    rows.info.license = "mit"
    regenerate_data(TargetWriter(target), tokenizer, rows, tmp_path / "r.jsonl", replace(SETTINGS, prompt_tokens=4))
    first, second = read(tmp_path / "r.jsonl")
    assert (first["messages"][0]["content"], second["text"][:4]) == ("why", "once")
    assert json.loads((tmp_path / "r.manifest.json").read_text())["data"]["license"] == "mit"


def test_rows_that_ask_nothing_are_left_out_and_counted(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        user("a"),
        {"messages": [{"role": "system", "content": "s"}, {"role": "assistant", "content": "old"}]},
        {"messages": [{"role": "user", "content": "a"}, {"role": "tool", "content": "4"}]},
        {"text": ""},
    ]
    record = regenerate_data(TargetWriter(target), tokenizer, rows, tmp_path / "r.jsonl", SETTINGS)
    assert record.rows == 1
    assert record.left_out == {
        "no user turn": 1,
        "tool calls, which the target's new turns might not repeat": 1,
        "an empty prompt": 1,
    }
    with pytest.raises(
        ValueError, match=r"No row of the data can be answered: no user turn \(1\), an empty prompt \(1\)"
    ):
        regenerate_data(TargetWriter(target), tokenizer, [rows[1], rows[3]], tmp_path / "s.jsonl", SETTINGS)
    with pytest.raises(ValueError, match="the data holds no row"):
        regenerate_data(TargetWriter(target), tokenizer, [], tmp_path / "s.jsonl", SETTINGS)
    with pytest.raises(
        ValueError, match=r"Row 2 of the data: its columns \['words'\] hold no question: give messages"
    ):
        regenerate_data(TargetWriter(target), tokenizer, [rows[0], {"words": "x"}], tmp_path / "s.jsonl", SETTINGS)
    with pytest.raises(ValueError, match=r"Row 1 of the data: it is malformed \(KeyError: 'role'\)"):
        regenerate_data(TargetWriter(target), tokenizer, [{"messages": [{"x": 1}]}], tmp_path / "s.jsonl", SETTINGS)
    assert list(tmp_path.glob("s.*")) == []


REPEATED = [user("why"), user("a"), {"prompt": "why"}, user("why", "and?"), user("why", "so?"), user("a"), user("b")]


def test_prompts_that_repeat_another_are_left_out_once_and_for_all_starts_and_processes(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Equal is what is sent: two forms of a question are, and two chats with other questions later are not."""
    output = tmp_path / "r.jsonl"
    with pytest.raises(KeyboardInterrupt):
        regenerate_data(Counting(TargetWriter(target, None, 1), 2), tokenizer, REPEATED, output, SETTINGS)
    records = in_processes(
        2,
        lambda sibling: regenerate_data(
            TargetWriter(target, None, 1),
            tokenizer,
            REPEATED,
            output,
            SETTINGS,
            resume=True,
            run=RegenerationRun(processes=sibling),
        ),
    )
    assert sorted({row["row"] for row in read(output)}) == [1, 2, 4, 5, 7]
    assert records[0].rows == 5
    assert [record.left_out for record in records] == [{"a prompt that repeats another one": 2}] * 2

    several = tmp_path / "several.jsonl"
    repeats = replace(SAMPLED, deduplicate=False)
    regenerate_data(TargetWriter(target), tokenizer, [CHATS[0]] * 4, several, repeats)
    assert len({tuple(row["response_ids"]) for row in read(several)}) == 4
    with pytest.raises(ValueError, match=r"to resume differs .*deduplicate: false, now true"):
        regenerate_data(TargetWriter(target), tokenizer, [CHATS[0]] * 4, several, SAMPLED, resume=True)


def test_more_samples_leave_out_no_row_that_fewer_kept(tokenizer: Any, tmp_path: Path) -> None:
    """A row drawn later may stand earlier in the data: of two that ask the same, the first drawn is kept."""
    rows, kept = [*CHATS, *CHATS], set()
    for samples in range(1, len(rows) + 1):
        settings = RegenerationSettings(samples=samples, seed=4)
        drawn = selection.drawn_rows(lambda: rows, selection.SeenRows(), settings)
        dialogues, left_out = selection.selected(drawn, "the data", tokenizer, settings, None)
        numbers = {dialogue.number for dialogue in dialogues}
        assert kept <= numbers
        assert len(numbers) + sum(left_out.values()) == samples
        kept = numbers
    assert len(kept) == len(CHATS)
    assert kept != set(range(1, len(CHATS) + 1))  # else the order of drawing decided nothing


def test_streamed_rows_that_repeat_another_do_not_count(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    settings = replace(SETTINGS, samples=3, streaming=True)
    record = regenerate_data(TargetWriter(target), tokenizer, iter(REPEATED), tmp_path / "r.jsonl", settings)
    assert [row["row"] for row in read(tmp_path / "r.jsonl") if row["parts"] == 1] == [1, 2]
    assert (record.rows, record.left_out) == (3, {"a prompt that repeats another one": 1})


def test_prompts_above_a_length_are_left_out(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"prompt_ids": [5] * length} for length in (3, 4, 5, 6)]
    settings = replace(SETTINGS, max_prompt_tokens=4)
    record = regenerate_data(TargetWriter(target), tokenizer, rows, tmp_path / "r.jsonl", settings)
    assert [row["row"] for row in read(tmp_path / "r.jsonl")] == [1, 2]
    assert record.left_out == {"a prompt longer than 4 tokens": 2}
    with pytest.raises(ValueError, match=r"longer than 4 tokens \(2\); .*, or a larger max_prompt_tokens"):
        regenerate_data(TargetWriter(target), tokenizer, rows[2:], tmp_path / "s.jsonl", settings)


def test_the_manifest_holds_the_fingerprint_of_the_rows_and_a_run_without_one_of_its_settings_is_another(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    output = tmp_path / "r.jsonl"
    regenerate_data(TargetWriter(target), tokenizer, CHATS[:2], output, SETTINGS)
    manifest = output.with_suffix(".manifest.json")
    facts = json.loads(manifest.read_text())
    same, other = selection.SeenRows(), selection.SeenRows()
    assert len(list(same.watched(CHATS[:2]))) == len(list(other.watched(CHATS[1::-1]))) == 2
    assert facts["settings"]["data"] == same.fingerprint != other.fingerprint
    del facts["settings"]["deduplicate"]
    manifest.write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"to resume differs \(deduplicate: null, now true\): give the same"):
        regenerate_data(TargetWriter(target), tokenizer, CHATS[:2], output, SETTINGS, resume=True)


class Watched(dict):
    """A row that can be watched: a plain dict has no weak references."""


@pytest.mark.parametrize("samples", [None, 30])
@pytest.mark.parametrize("is_concurrent", [False, True])
def test_a_run_holds_neither_its_rows_nor_what_it_has_written(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, samples: int | None, is_concurrent: bool
) -> None:
    rows: list[Any] = []
    dialogues: list[Any] = []
    most_rows, waiting, held, as_dialogue = 0, [], [], selection.as_dialogue
    begun, lock = 0, threading.Lock()

    class Table:
        def __iter__(self) -> Iterator[Any]:
            nonlocal most_rows
            for number in range(40):
                row = Watched(prompt_ids=[5 + number])
                rows.append(weakref.ref(row))
                most_rows = max(most_rows, sum(one() is not None for one in rows))
                yield row

    class Pool(run_module.ThreadPoolExecutor):
        def submit(self, *args: Any) -> Any:
            with lock:
                waiting.append(len(waiting) - begun)  # submitted before, and not begun
            return super().submit(*args)

    def as_watched(*args: Any, **how: Any) -> Any:
        dialogue = as_dialogue(*args, **how)
        dialogues.append(weakref.ref(dialogue))
        return dialogue

    def say(prompt: str) -> tuple[str, bool]:
        nonlocal begun
        with lock:
            begun += 1
            held.append(sum(one() is not None for one in dialogues))
        return "new", True

    monkeypatch.setattr(run_module, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(selection, "as_dialogue", as_watched)
    writer: Any = Spoken(tokenizer, say)
    writer.is_concurrent, writer.stopped = is_concurrent, threading.Event()
    settings = RegenerationSettings(samples=samples)
    record = regenerate_data(writer, tokenizer, Table(), tmp_path / "r.jsonl", settings)
    assert record.rows == len(held) == (samples or 40)
    assert most_rows <= 4  # of each reading the one at hand and the one before
    # Those that are asked or wait, and as many whose answers all came at once before them.
    assert held[-1] <= (2 * run_module.PENDING + 1) * writer.batch_size
    assert max(waiting, default=0) < run_module.PENDING * writer.batch_size
    assert len(waiting) == record.rows * is_concurrent


@pytest.mark.parametrize(
    ("field", "said"),
    [
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0: use 1 or more"),
        ({"temperature": -1.0}, "temperature=-1.0: use 0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"max_new_tokens": 0}, "max_new_tokens=0: ask for at least one new token"),
    ],
)
def test_settings_out_of_range_are_refused(field: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RegenerationSettings(**field)


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Writing past so many bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_leaves_what_was_finished_to_go_on_with(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    whole, output = tmp_path / "whole.jsonl", tmp_path / "r.jsonl"
    regenerate_data(TargetWriter(target), tokenizer, CHATS, whole, SETTINGS)
    longest = TargetWriter(target, None, 2)
    with (
        largest_file(1100),
        pytest.raises(OSError, match=r"r\.jsonl cannot be written .*make room and go on with --resume"),
    ):
        regenerate_data(longest, tokenizer, CHATS, output, SETTINGS)
    assert 0 < len(output.read_bytes()) <= 1100
    writer = Counting(longest)
    regenerate_data(writer, tokenizer, CHATS, output, SETTINGS, resume=True)
    assert writer.asked < len(CHATS)
    assert output.read_bytes() == whole.read_bytes()


class Engine(LoopbackServer):
    """An OpenAI-compatible server of a target; it tells ids or text alone, as engines do."""

    def __init__(self, target: Any, tokenizer: Any, tells_ids: bool = True, fails_at: int | None = None) -> None:
        super().__init__(Handler)
        self.writer, self.tokenizer = TargetWriter(target), tokenizer
        self.tells_ids, self.fails_at = tells_ids, fails_at
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.models = ["tiny"]


class Handler(QuietHandler):
    server: Engine

    def do_GET(self) -> None:
        self.reply({"data": [{"id": name} for name in self.server.models]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine = self.server
        with engine.lock:
            engine.asked.append(asked)
            if engine.fails_at is not None and len(engine.asked) > engine.fails_at:
                self.reply({"error": {"message": "the engine is dead"}}, 503)
                return
            [answer] = engine.writer([AnswerRequest(asked["prompt"], asked["seed"], asked["max_tokens"])], Sampling())
        spoken = answer.token_ids[:-1] if answer.ended else answer.token_ids
        choice = {"text": engine.tokenizer.decode(spoken), "finish_reason": "stop" if answer.ended else "length"}
        self.reply({"choices": [choice | ({"token_ids": answer.token_ids} if engine.tells_ids else {})]})

    def reply(self, content: Any, status: int = 200) -> None:
        self.say(json.dumps(content), status)


def server_writer(url: str, target: Any, tokenizer: Any, **how: Any) -> ServerWriter:
    how = {"wait": lambda seconds: None} | how
    client = OpenAIClient(url, how.pop("api_key", None))
    return ServerWriter(client, how.pop("model", None), tokenizer, target.config, target.generation_config, **how)


def test_a_server_gives_the_rows_that_the_target_gives_here(target: Any, tokenizer: Any, tmp_path: Path) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    rows = [*CHATS, user("one", "two")]
    regenerate_data(TargetWriter(target), tokenizer, rows, here, SETTINGS)
    with started(Engine(target, tokenizer)) as engine:
        writer = server_writer(f"{engine.url}/v1", target, tokenizer, batch_size=4, api_key="k")
        record = regenerate_data(writer, tokenizer, rows, there, replace(SETTINGS, top_p=0.9, top_k=7, seed=5))
    assert read(there) == read(here)
    assert record.encoded == 0
    asked = engine.asked[0]
    assert (asked["model"], asked["top_p"], asked["top_k"], asked["temperature"]) == ("tiny", 0.9, 7, 0.0)
    assert len({request["seed"] for request in engine.asked}) == len(engine.asked)


def test_ids_that_a_server_does_not_tell_are_encoded_from_its_text_and_counted(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    regenerate_data(TargetWriter(target), tokenizer, CHATS, here, SETTINGS)
    with started(Engine(target, tokenizer, tells_ids=False)) as engine:
        record = regenerate_data(server_writer(engine.url, target, tokenizer), tokenizer, CHATS, there, SETTINGS)
    assert record.encoded == len(CHATS)
    for mine, its in zip(read(here), read(there), strict=True):
        ends = mine["finish"] == "stop"
        assert its["finish"] == mine["finish"]
        assert its["response_ids"] == ([*mine["response_ids"][:-1], 2] if ends else mine["response_ids"])


def test_a_server_that_is_down_or_dies_is_one_sentence_and_the_rest_can_follow(
    target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    output = tmp_path / "r.jsonl"
    with started(Engine(target, tokenizer, fails_at=3)) as engine:
        with pytest.raises(ValueError, match=r"/v1/completions answered 503 .*: the engine is dead\."):
            regenerate_data(
                server_writer(engine.url, target, tokenizer, batch_size=1), tokenizer, CHATS, output, SETTINGS
            )
        assert len(read(output)) == 3
        engine.fails_at = None
        engine.asked.clear()
        regenerate_data(
            server_writer(engine.url, target, tokenizer, batch_size=1), tokenizer, CHATS, output, SETTINGS, resume=True
        )
        assert len(engine.asked) == len(CHATS) - 3
        assert len(read(output)) == len(CHATS)
        assert server_writer(engine.url, target, tokenizer, model="unlisted").model == "unlisted"
        url = engine.url
    with pytest.raises(ValueError, match=r"/v1/models cannot be reached \(.*refused\): is the server running there\?"):
        server_writer(url, target, tokenizer)
    with pytest.raises(ValueError, match="'' is no server's URL"):
        server_writer("", target, tokenizer)


def test_each_row_of_a_batch_reads_as_alone_with_its_own_generator(target: Any) -> None:
    drafter = make_drafter()
    prompts = [torch.tensor([5, 6, 7]), torch.tensor([20, 30])]

    def seeded(row: int) -> torch.Generator:
        return torch.Generator().manual_seed(row)

    how = {"target": target, "temperature": 1.0, "max_new_tokens": 6, "stop_token_ids": []}
    both = drafter.spec_generate(prompts, generator=[seeded(0), seeded(1)], **how)[:, 3:]
    for row, prompt in enumerate(prompts):
        alone = drafter.spec_generate(prompt[None], generator=seeded(row), **how)[0, len(prompt) :]
        assert torch.equal(both[row], alone)
    with pytest.raises(ValueError, match="generator holds 1 for 2 sequences"):
        drafter.spec_generate(prompts, generator=[seeded(0)], **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, target: Any, tokenizer: Any) -> Path:
    folder = tmp_path_factory.mktemp("regenerate")
    target.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    make_drafter().save_pretrained(folder / "drafter")
    rows = [chat | {"license": "cc-by-4.0"} for chat in CHATS]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"prompt_ids": [9] * 200}])))
    return folder


@pytest.fixture
def run(dflash_command: Callable[..., Any], folder: Path) -> Any:
    """`run(output, "--seed", 4)`: exit status, standard output, standard error."""

    def call(output: Path, *arguments: Any) -> tuple[int, str, str]:
        words = ["regenerate", "--target", folder / "target", "--data", folder / "data.jsonl", "--output", output]
        words += ["--max-new-tokens", NEW, *arguments]
        return dflash_command(*words)

    return call


def test_the_command_writes_rows_and_what_they_depend_on(
    run: Any, folder: Path, target: Any, tokenizer: Any, tmp_path: Path
) -> None:
    output = tmp_path / "new" / "answers.jsonl"
    status, out, error = run(output, "--batch-size", 3)
    assert status == 0, error
    assert "Left out: 1 x a prompt that fills the target's 96 positions." in error
    rows = read(output)
    tokens, cut = sum(len(row["response_ids"]) for row in rows), sum(row["finish"] == "length" for row in rows)
    assert out == f"{output}: 8 rows, {tokens} tokens by the target, {cut} rows cut off at the length\n"
    assert [row["response_ids"] for row in rows] == [answer_alone(target, row["prompt_ids"]) for row in rows]
    text = output.with_suffix(".manifest.json").read_text()
    facts = json.loads(text)
    assert facts["settings"].keys() >= {"weights", "config", "chat_template", "data", "temperature", "top_p", "seed"}
    assert facts["data"] == {"name": "data.jsonl", "split": "train", "rows": 9, "license": "cc-by-4.0"}
    assert facts["versions"].keys() == {"python", "torch", "transformers"}
    assert (facts["target"], facts["result"]["rows"], facts["complete"]) == ("target", 8, True)
    assert facts["command"].startswith("dflash regenerate --target target --data data.jsonl")
    assert str(folder) not in text
    assert str(tmp_path) not in text

    drafted = tmp_path / "drafted.jsonl"
    status, out, _ = run(drafted, "--drafter", folder / "drafter", "--batch-size", 3)
    assert (status, drafted.read_bytes()) == (0, output.read_bytes())
    assert ", tau 1." in out
    with started(Engine(target, tokenizer)) as engine:
        status, out, error = run(tmp_path / "served.jsonl", "--url", engine.url, "--drop-cut")
    assert status == 0, error
    assert read(tmp_path / "served.jsonl") == [row for row in rows if row["finish"] == "stop"]
    assert f"{cut} rows dropped, cut off at the length" in out

    status, _, error = run(output, "--resume")
    assert (status, error.splitlines()[-1]) == (0, "Answered before: 8 of 8 rows.")
    status, _, error = run(output, "--resume", "--thinking", "--top-k", 5)
    assert status == 1
    assert "to resume differs (thinking: false, now true; top_k: 0, now 5)" in error
    status, _, error = run(output, "--url", "http://127.0.0.1:9", "--drafter", folder / "drafter")
    assert (status, error) == (
        1,
        "dflash: --url and --drafter are both given: a server has its own drafter (dflash serve).\n",
    )


def test_the_command_asks_each_prompt_once_unless_it_is_told_otherwise(run: Any, folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(map(json.dumps, [*CHATS[:2], CHATS[0]])))
    status, out, error = run(tmp_path / "once.jsonl", "--data", data, "--max-prompt-tokens", 90)
    assert (status, "2 rows" in out) == (0, True), error
    assert "Left out: 1 x a prompt that repeats another one.\n" in error
    words = ["--data", data, "--no-deduplicate", "--temperature", 1, "--seed", 3]
    status, out, error = run(tmp_path / "several.jsonl", *words)
    assert (status, "Left out" in error) == (0, False), error
    first, _, third = (row["response_ids"] for row in read(tmp_path / "several.jsonl"))
    assert first != third
    status, _, error = run(tmp_path / "none.jsonl", "--data", data, "--max-prompt-tokens", 1)
    assert (status, "a prompt longer than 1 tokens (3)" in error) == (1, True)


@pytest.mark.parametrize("with_drafter", [False, True])
def test_lengths_that_the_command_handles_are_not_warned_of(
    folder: Path, tokenizer: Any, tmp_path: Path, with_drafter: bool
) -> None:
    """A text is cut to its beginning, a prompt that is too long is left out, and one near the end gets a short answer."""
    own = make_tokenizer()
    own.model_max_length = 96
    place = tmp_path / "target"
    shutil.copytree(folder / "target", place)
    own.save_pretrained(place)
    rows = [{"text": "once upon " * 20}, {"prompt": "why " * 40}, {"prompt_ids": [9] * 93}, {"prompt_ids": [5, 6]}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = ["regenerate", "--target", place, "--data", tmp_path / "data.jsonl", "--output", tmp_path / "r.jsonl"]
    words += ["--max-new-tokens", NEW, "--device", "cpu"]
    drafted = ["--drafter", folder / "drafter", "--trace", tmp_path / "trace.jsonl"] if with_drafter else []

    def work() -> None:
        from dflash.cli import main

        # As in a process that has just begun: pytest has taken the stream of the log, and what was said once is not said again.
        logging.getLogger("transformers").addHandler(logging.StreamHandler())
        logging.getLogger("dflash").addHandler(logging.StreamHandler())
        logging.Logger.warning_once.cache_clear()  # type: ignore[attr-defined]
        sys.argv = ["dflash", *map(str, [*words, *drafted])]
        main()

    done = forked(work)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("dflash: The drafter")]
    said = f"dflash: Prompts, answers and the places of rejected drafts are recorded in {tmp_path / 'trace.jsonl'} (--trace)."
    assert lines == [said] * with_drafter + ["Left out: 1 x a prompt that fills the target's 96 positions."]


def test_a_target_whose_logits_are_no_numbers_writes_nothing(tokenizer: Any, tmp_path: Path) -> None:
    """Its answers would be empty, and were once written as training data."""
    broken = make_target("qwen3", max_position_embeddings=96)
    broken.lm_head.weight.data[3] = float("nan")
    with pytest.raises(ValueError, match="target's logits are NaN or infinite"):
        regenerate_data(TargetWriter(broken), tokenizer, CHATS, tmp_path / "r.jsonl", SETTINGS)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("settings", [SETTINGS, SAMPLED])
def test_logits_that_overflow_on_the_way_stop_the_run(
    tokenizer: Any, tmp_path: Path, settings: RegenerationSettings
) -> None:
    """As in float16, where a long prompt alone may overflow: the rows of that batch are not written."""
    target = make_target("qwen3", max_position_embeddings=96)
    writer = TargetWriter(target, None, 4)
    target.model.embed_tokens.weight.data[9] = float("inf")
    rows = [{"prompt_ids": [5, 6, 7]}, {"prompt_ids": [5, 9]}]
    with pytest.raises(ValueError, match="target's logits are NaN or infinite"):
        regenerate_data(writer, tokenizer, rows, tmp_path / "r.jsonl", settings)
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--temperature", "inf"), "temperature=inf: use 0 for greedy decoding, or a finite number"),
        (("--temperature", "nan"), "temperature=nan"),
        (("--temperature", "1e-38"), "temperature=1e-38"),
        (("--top-p", "nan"), "top_p=nan"),
        (("--device", "nonsense"), "--device nonsense cannot be used"),
        (("--resume", "--overwrite"), "both given"),
        (("--split", "zz"), "--split zz chooses a part of a data set, and "),
        (("--license", ""), "--license is empty: name the licence of the data"),
    ],
)
def test_the_command_refuses_values_before_a_model_is_loaded(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.setattr("dflash.cli.regenerate.load_writer", lambda *_: pytest.fail("a model was loaded"))
    status, _, error = run(tmp_path / "r.jsonl", *options)
    assert status == 1
    assert said in error
    for output, reason in ((tmp_path / "r.txt", "must be a file that ends in .jsonl"), (tmp_path, "must be a file")):
        assert reason in run(output)[2]
    (tmp_path / "mine.jsonl").write_text("{}\n")
    assert "holds something other than a run" in run(tmp_path / "mine.jsonl")[2]


def test_the_first_of_two_commands_holds_the_output_while_it_loads(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a second command fails at once. The lock was once taken after loading, and the later one could win."""

    def load_writer(*_: Any) -> Any:
        with pytest.raises(ValueError, match=r"r\.jsonl is being written by process"):
            check_output(tmp_path / "r.jsonl")
        raise ValueError("It was held.")

    monkeypatch.setattr("dflash.cli.regenerate.load_writer", load_writer)
    assert run(tmp_path / "r.jsonl") == (1, "", "dflash: It was held.\n")
    check_output(tmp_path / "r.jsonl")  # free again


def test_the_command_says_in_a_log_how_far_it_is(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dflash.cli.terminal.LINE_SECONDS", 0)
    error = run(tmp_path / "r.jsonl")[2]
    rows = len(read(tmp_path / "r.jsonl"))
    counted = re.findall(r"^([\d,]+) of ([\d,]+): Answering, [\d,]+ tokens/s$", error, re.MULTILINE)
    assert [(int(done), int(total)) for done, total in counted] == [(done, rows) for done in range(1, rows + 1)]


def test_the_answers_go_where_a_link_leads(run: Any, tmp_path: Path) -> None:
    """Promise: an output that is a link to no file yet is made there; it was once taken for another run."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "r.jsonl").symlink_to(tmp_path / "disk" / "real.jsonl")
    status, out, error = run(tmp_path / "r.jsonl")
    assert status == 0, error
    assert (tmp_path / "r.jsonl").is_symlink()
    assert len(read(tmp_path / "disk" / "real.jsonl")) > 1
    assert run(tmp_path / "r.jsonl", "--resume")[1] == out
    (tmp_path / "lost.jsonl").symlink_to(tmp_path / "unmounted" / "real.jsonl")
    assert "whose folder does not exist" in run(tmp_path / "lost.jsonl")[2]
    assert not list(tmp_path.glob("lost.manifest*"))


def test_two_processes_do_not_write_one_output(folder: Path, target: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Promise: the second is refused with the number of the first; no row is lost or doubled."""
    output = tmp_path / "r.jsonl"
    words = ["regenerate", "--target", folder / "target", "--data", folder / "data.jsonl", "--output", output]
    refusals: list[str] = []

    class Busy(Counting):
        """Another process comes while this one answers."""

        def __call__(self, requests: Sequence[AnswerRequest], sampling: Sampling) -> list[Answer]:
            if not refusals:
                refusals.extend(dflash_process(*words, *more).stderr for more in (["--overwrite"], []))
            return super().__call__(requests, sampling)

    regenerate_data(Busy(TargetWriter(target, None, 3)), tokenizer, CHATS, output, SETTINGS)
    assert len(refusals) == 2
    assert all(f"r.jsonl is being written by process {os.getpid()} on " in refusal for refusal in refusals)
    assert [row["row"] for row in read(output)] == list(range(1, len(CHATS) + 1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.jsonl", "r.manifest.json"]


def test_what_is_left_of_a_torn_row_goes_even_if_its_new_answer_has_fewer_lines(
    tokenizer: Any, tmp_path: Path
) -> None:
    """Bug: lines of the torn attempt were counted as the new one's; a server does not answer the same way twice."""
    output, rows = tmp_path / "r.jsonl", [user("one", "two", "three")]
    regenerate_data(Spoken(tokenizer, lambda prompt: ("new", True)), tokenizer, rows, output)
    first_two = output.read_bytes().splitlines(keepends=True)[:2]
    cut = Spoken(tokenizer, lambda prompt: ("new", False))
    for num_left in (1, 2):
        output.write_bytes(b"".join(first_two[:num_left]))
        regenerate_data(cut, tokenizer, rows, output, resume=True)
        assert [(row["row"], row["parts"], row["finish"]) for row in read(output)] == [(1, 1, "length")]


def test_answers_that_are_all_cut_are_kept_and_none_is_dropped_twice(tokenizer: Any, tmp_path: Path) -> None:
    """Bugs: `drop_cut` emptied the file before it refused to; and a resumed run answered again what it had dropped."""
    output, settings = tmp_path / "r.jsonl", RegenerationSettings(drop_cut=True)
    cut = Spoken(tokenizer, lambda prompt: ("new", False))
    with pytest.raises(ValueError, match="Every one of the 2 answers was cut off"):
        regenerate_data(cut, tokenizer, [user("one"), user("two")], output, settings)
    assert sorted(row["row"] for row in read(output)) == [1, 2]

    rows = [user("one"), user("two"), user("x")]
    some = Spoken(tokenizer, lambda prompt: ("new", "x" in prompt))
    record = regenerate_data(some, tokenizer, rows, output, settings, overwrite=True)
    assert (record.rows, record.cut) == (1, 2)
    again = Spoken(tokenizer, lambda prompt: pytest.fail("a row was answered again"))
    record = regenerate_data(again, tokenizer, rows, output, settings, resume=True)
    assert (record.rows, record.cut, record.was_finished) == (1, 2, 3)
    with_cut = Spoken(tokenizer, lambda prompt: ("new", False))
    record = regenerate_data(with_cut, tokenizer, rows, output, RegenerationSettings(), resume=True)
    assert (record.rows, record.cut, len(with_cut.prompts)) == (3, 2, 2)
