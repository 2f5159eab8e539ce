"""What goes wrong in a command is one sentence with the value and the remedy, and never a traceback."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import struct
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import typer
from processes import forked
from safetensors.torch import load_file, save_file
from tiny_models import make_drafter, save_target
from transformers import BertConfig

from dflash.checkpoints import check
from dflash.cli import app as cli
from dflash.cli import loading
from dflash.common.json_text import parsed_json
from dflash.common.messages import EXTRA_MODULES, INSTALL_EXTRAS, as_sentence, counted


ROOT = Path(__file__).parents[2]
Run = Callable[..., tuple[int, str, str]]
DEEP = "[" * 100_000 + "]" * 100_000
BYTE_ORDER_MARK = "\ufeff"
NO_BOM = "config.json begins with a byte order mark, which transformers does not read: save it as UTF-8 without BOM."


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a drafter; read-only."""
    folder = tmp_path_factory.mktemp("pair")
    save_target(folder / "target")
    make_drafter().save_pretrained(folder / "tiny-DFlash")
    return folder


@pytest.fixture
def target(originals: Path, tmp_path: Path) -> Path:
    """A target's folder to break."""
    return Path(shutil.copytree(originals / "target", tmp_path / "target"))


@pytest.fixture
def drafter(originals: Path, tmp_path: Path) -> Path:
    """A drafter's folder to break."""
    return Path(shutil.copytree(originals / "tiny-DFlash", tmp_path / "tiny-DFlash"))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, dflash_command: Run) -> Run:
    monkeypatch.setenv("COLUMNS", "200")
    loading.say_once.cache_clear()
    return dflash_command


def refusal(done: tuple[int, str, str]) -> str:
    """The sentence of a command that failed; it is the last line of standard error, and the only one of its kind."""
    status, out, err = done
    assert (status, out) == (1, ""), err
    assert "Traceback" not in err
    (sentence,) = (line for line in err.splitlines() if line.startswith("dflash: ") and "proposes" not in line)
    assert err.splitlines()[-1] == sentence
    return sentence.removeprefix("dflash: ")


def answered(run: Run, target: Path, drafter: Path, prompt: str = "abc", *words: str) -> tuple[int, str, str]:
    return run("generate", "--target", target, "--drafter", drafter, prompt, "--max-new-tokens", 4, *words)


# Chat templates.


TEMPLATES = {
    "raises": ("{{ raise_exception('roles must alternate') }}", "does not take the prompt (roles must alternate)"),
    "does not parse": ("{% if %}{{ x", "does not take the prompt (Expected an expression"),
    "forbidden": ("{{ ''.__class__.__mro__ }}", "does not take the prompt (access to attribute '__class__'"),
    "adds a text": ("{{ 1 + 'a' }}", "does not take the prompt (unsupported operand"),
    "empty": ("", "writes nothing of the prompt"),
    "blank": ("\n", "writes nothing of the prompt"),
    "constant": ("<|im_start|>hello", "writes nothing of the prompt"),
    "without the last": ("{{ messages[:-1] }}", "writes nothing of the prompt"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_template_that_does_not_take_the_prompt(kind: str, run: Run, target: Path, drafter: Path) -> None:
    """Bug: the first four were tracebacks of jinja2, and the others decoded 512 tokens of anything."""
    template, reason = TEMPLATES[kind]
    (target / "chat_template.jinja").write_text(template)
    sentence = refusal(answered(run, target, drafter))
    assert sentence.startswith(f"The target's chat template {reason}")
    assert "--no-chat-template" in sentence


@pytest.mark.parametrize("kind", ["raises", "empty"])
def test_eval_refuses_such_a_chat_template_too(
    kind: str, run: Run, target: Path, drafter: Path, tmp_path: Path
) -> None:
    template, reason = TEMPLATES[kind]
    (target / "chat_template.jinja").write_text(template)
    (tmp_path / "asked.txt").write_text("abc")
    words = ["eval", "--target", target, "--drafter", drafter, "--prompts", tmp_path / "asked.txt"]
    assert reason in refusal(run(*words, "--max-new-tokens", 4))
    assert answered(run, target, drafter, "abc", "--no-chat-template")[0] == 0  # the remedy


@pytest.mark.parametrize("row", [{"prompt": "abc", "completion": "def"}, {"prompt": "abc"}])
def test_a_chat_template_that_writes_nothing_names_the_row(row: dict[str, str], run: Run, target: Path) -> None:
    (target / "chat_template.jinja").write_text("")
    data = target.parent / "data.jsonl"
    data.write_text(json.dumps(row))
    command = "train" if "completion" in row else "regenerate"
    done = run(command, "--target", target, "--data", data, "--output", target.parent / "new.jsonl")
    assert "Row 1 of" in refusal(done)
    assert "The chat template renders this prompt as an empty text" in done[2]


# Texts.


@pytest.mark.parametrize("way", ["argument", "standard input"])
def test_a_prompt_that_is_not_utf_8(
    way: str, run: Run, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `dflash generate … $'caf\\xe9'` was a TypeError of the tokenizer."""
    text = os.fsdecode(b"caf\xe9")  # as Python reads an argument
    monkeypatch.setattr(sys, "stdin", StringIO(text))
    prompt = text if way == "argument" else "-"
    done = answered(run, originals / "target", originals / "tiny-DFlash", prompt)
    assert refusal(done) == "The prompt holds '\\udce9' at character 4, which is no character: give the text in UTF-8."


class _Closed(StringIO):
    def read(self, size: int | None = -1) -> str:
        raise OSError(9, "Bad file descriptor")


class _Latin(StringIO):
    def read(self, size: int | None = -1) -> str:
        return b"caf\xe9".decode()


@pytest.mark.parametrize(
    ("stdin", "said"),
    [(None, "cannot be read"), (_Closed(), "cannot be read"), (_Latin(), "is not UTF-8")],
    ids=["closed", "closed later", "not UTF-8"],
)
def test_standard_input_without_a_prompt(
    stdin: Any, said: str, run: Run, originals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: `dflash generate … - <&-` was an AttributeError, or "[Errno 9]"."""
    monkeypatch.setattr(sys, "stdin", stdin)
    sentence = refusal(answered(run, originals / "target", originals / "tiny-DFlash", "-"))
    assert sentence == f"Standard input {said}: give the prompt as an argument, or pipe it in UTF-8."


@pytest.mark.parametrize(
    "line",
    ['{"prompt": "\\ud800"}', '{"messages": [{"role": "user", "content": "\\ud800"}]}', '{"messages": "hi"}', DEEP],
    ids=["half a pair", "half a pair in a message", "text for messages", "deep"],
)
@pytest.mark.parametrize("command", ["eval", "doctor"])
def test_a_line_that_is_no_prompt_is_named(command: str, line: str, run: Run, originals: Path, tmp_path: Path) -> None:
    """Bug: half a surrogate pair was a TypeError of the tokenizer, deep nesting a RecursionError."""
    (tmp_path / "asked.jsonl").write_text('{"prompt": "a"}\n' + line.replace(DEEP, '{"prompt": ' + DEEP + "}"))
    names = [originals / "target", originals / "tiny-DFlash"]
    words = ["--target", names[0], "--drafter", names[1]] if command == "eval" else names
    sentence = refusal(run(command, *words, "--prompts", tmp_path / "asked.jsonl"))
    assert "line 2 is not a prompt: write a text in UTF-8, or a JSON object with messages" in sentence


ROWS = {
    '{"messages": "hi"}': "Row 1 of DATA: its messages are 'hi': give a list of objects with role and content.",
    '{"messages": [1]}': "Row 1 of DATA: its messages are [1]: give a list of objects with role and content.",
    '{"conversations": "hi"}': "Row 1 of DATA: its messages are 'hi': give a list of objects with role and content.",
    '{"messages": [{"role": "user", "content": "\\ud800"}]}': "Row 1 of DATA: a message holds '\\ud800' at character 1",
    '{"text": "a \\ud800"}': "Row 1 of DATA: it holds '\\ud800' at character 3, which is no character",
    '{"text": ' + DEEP + "}": "Line 1 of DATA is nested too deeply to be read: write one object a line, in UTF-8.",
    '{"text": ' + "9" * 5000 + "}": "Line 1 of DATA cannot be read (Exceeds the limit",
}


@pytest.mark.parametrize(
    "row", ROWS, ids=["text", "number", "sharegpt", "half a pair", "half in a text", "deep", "digits"]
)
@pytest.mark.parametrize("command", ["train", "regenerate"])
def test_a_row_that_is_none_is_named(command: str, row: str, run: Run, originals: Path, tmp_path: Path) -> None:
    """Bug: "dictionary update sequence element #0", a TypeError of the tokenizer, a RecursionError."""
    data = tmp_path / "data.jsonl"
    data.write_text(row)
    done = run(command, "--target", originals / "target", "--data", data, "--output", tmp_path / "new.jsonl")
    assert ROWS[row].replace("DATA", str(data)) in refusal(done)


def test_a_folder_of_mixed_files_is_named(run: Run, originals: Path, tmp_path: Path) -> None:
    """Bug: a traceback of `datasets` that ended with "An error occurred while generating the dataset"."""
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "a.jsonl").write_text('{"text": "a"}\n')
    (mixed / "b.jsonl").write_text('{"number": [1]}\n')
    (mixed / "c.csv").write_text("x,y\n1,2\n")
    done = run("train", "--target", originals / "target", "--data", mixed, "--output", tmp_path / "new")
    sentence = refusal(done)
    assert sentence.startswith(f"{mixed} cannot be read as one table (")
    assert sentence.endswith("give files of one kind with the same columns, or only one file.")


def test_rows_of_a_task_that_are_nested_too_deeply(run: Run, originals: Path, tmp_path: Path) -> None:
    """Bug: a RecursionError of `datasets`."""
    row = '{"question": "a", "answer": "#### 1", "more": ' + "[" * 3000 + "]" * 3000 + "}"
    (tmp_path / "gsm8k.jsonl").write_text(row)
    names = ["--target", originals / "target", "--drafter", originals / "tiny-DFlash"]
    sentence = refusal(run("eval", *names, "--tasks", "gsm8k", "--data-root", tmp_path, "--no-score"))
    assert sentence.startswith(f"{tmp_path / 'gsm8k.jsonl'} is not JSON, a row a line: get the data set")
    done = run("train", "--target", originals / "target", "--data", tmp_path, "--output", tmp_path / "new")
    assert refusal(done).startswith(f"{tmp_path} cannot be read as one table (")


# Files as Windows writes them, and files that no reader takes.


def test_lines_with_a_byte_order_mark_are_read(run: Run, originals: Path, tmp_path: Path) -> None:
    """Bug: `train` refused the file, and `eval` asked the text `{"prompt": …}` itself."""
    marked = tmp_path / "data.jsonl"
    marked.write_text(BYTE_ORDER_MARK + '{"prompt": "ab"}\n', encoding="utf-8")
    assert loading.read_prompts(marked) == [[{"role": "user", "content": "ab"}]]
    output = tmp_path / "new.jsonl"
    words = ["--target", originals / "target", "--data", marked, "--output", output, "--max-new-tokens", 2]
    status, out, _ = run("regenerate", *words)
    assert status == 0
    assert "new.jsonl: 1 row, 2 tokens by the target, 1 row cut off at the length" in out
    (row,) = map(json.loads, output.read_text().splitlines())
    assert row["messages"][0]["content"] == "ab"


def with_mark(folder: Path) -> Path:
    text = (folder / "config.json").read_text(encoding="utf-8")
    (folder / "config.json").write_text(BYTE_ORDER_MARK + text, encoding="utf-8")
    return folder


def test_a_config_with_a_byte_order_mark_says_what_to_do(
    run: Run, target: Path, drafter: Path, originals: Path, tmp_path: Path
) -> None:
    """Bug: "It looks like the config file at … is not a valid JSON file", and nothing more: transformers reads it itself."""
    with_mark(target)
    assert refusal(answered(run, target, originals / "tiny-DFlash")) == f"--target {target}: {target}/{NO_BOM}"
    (tmp_path / "data.jsonl").write_text('{"text": "abc"}')
    done = run("train", "--target", target, "--data", tmp_path / "data.jsonl", "--output", tmp_path / "new")
    assert NO_BOM.rstrip(".") in refusal(done)
    with_mark(drafter)
    assert refusal(answered(run, originals / "target", drafter)) == f"--drafter {drafter}: {drafter}/{NO_BOM}"
    (finding,) = (one for one in check(drafter).findings if one.rule == "encoding")
    assert (finding.severity, finding.field) == ("error", "config.json")
    assert finding.fix == "save it as UTF-8 without BOM."
    assert not [one for one in check(originals / "tiny-DFlash").findings if one.rule == "encoding"]


@pytest.mark.parametrize(
    ("config", "said"),
    [(DEEP, "nested too deeply to be read"), ('{"a": 1,\n}', "is not JSON (")],
    ids=["deep", "comma"],
)
def test_a_config_that_no_reader_takes(
    config: str, said: str, run: Run, target: Path, drafter: Path, originals: Path
) -> None:
    """Bug: deep nesting was a RecursionError."""
    (target / "config.json").write_text(config)
    sentence = refusal(answered(run, target, originals / "tiny-DFlash"))
    assert sentence.startswith(f"--target {target}: ")
    assert said in sentence
    (drafter / "config.json").write_text(config)
    sentence = refusal(answered(run, originals / "target", drafter))
    assert sentence.startswith(f"--drafter {drafter}: ")
    assert said in sentence
    assert said in refusal(run("check", drafter))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"{", "is not JSON (Expecting property name enclosed in double quotes, column 2)"),
        (b'{"a": 1,\n "b" 2}', r"is not JSON (Expecting ':' delimiter, line 2, column 6)"),
        (b"\xff", "is not UTF-8"),
        (DEEP.encode(), "is nested too deeply to be read"),
    ],
)
def test_what_is_wrong_with_a_json_text(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"):
        parsed_json(content)


# Sizes.


def within_memory(*words: Any) -> tuple[int, str, str]:
    """`dflash words …` in a process that can reach 128 GiB and no more."""

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (2**37, 2**37))
        sys.argv = ["dflash", *map(str, words)]
        cli.main()

    done = forked(work)
    return done.returncode, done.stdout, done.stderr


def test_a_config_that_asks_for_terabytes(originals: Path, drafter: Path) -> None:
    """Bug: "can't allocate memory: you tried to allocate 6184752906240 bytes"."""
    config = json.loads((drafter / "config.json").read_text())
    (drafter / "config.json").write_text(json.dumps({**config, "hidden_size": 2**20}))
    sentence = refusal(within_memory("generate", "--target", originals / "target", "--drafter", drafter, "abc"))
    assert sentence.startswith(f"--drafter {drafter}: There is not enough memory for ")
    assert re.search(
        r" for [\d,]{13,} bytes: use a smaller model, or correct the sizes in its config\.json\.$", sentence
    )


def test_weights_that_say_a_terabyte(drafter: Path) -> None:
    """Bug: "unable to mmap", or "Cannot allocate memory", under 50 lines of traceback. The file is sparse."""
    num_values = 2**38
    header = {"fc.weight": {"dtype": "F32", "shape": [32, num_values // 32], "data_offsets": [0, 4 * num_values]}}
    text = json.dumps(header).encode()
    with (drafter / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * num_values)

    assert refusal(within_memory("check", drafter)) == (
        f"{drafter}/model.safetensors says that it holds {8 + len(text) + 4 * num_values:,} bytes, which cannot be mapped into "
        "memory: fetch the file again, or check it on a machine with more memory."
    )


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("Cannot allocate memory (os error 12)"), "There is not enough memory: use a smaller model"),
        (RuntimeError("unable to mmap 42 bytes from file </x>"), "There is not enough memory for 42 bytes: use"),
        (OSError(12, "Cannot allocate memory"), "There is not enough memory: use"),
        (ImportError("\nThis model requires tiktoken. Run pip install tiktoken."), "This model requires tiktoken."),
        (RuntimeError("shape mismatch"), None),
        (RecursionError("maximum recursion depth exceeded"), None),
        (ImportError("cannot import name x"), None),
        (TypeError("unexpected keyword argument"), None),
    ],
)
def test_what_is_a_sentence_and_what_is_a_bug(error: Exception, said: str | None) -> None:
    """Promise: a fault of this package keeps its traceback."""
    sentence = as_sentence(error)
    assert sentence is None if said is None else (sentence or "").startswith(said)


# Remedies.


def test_a_package_of_an_extra_that_is_absent_is_named_with_its_installation(
    run: Run, originals: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: README's first command installs no `datasets`, and `eval --tasks` was then a ModuleNotFoundError."""
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    names = ["--target", originals / "target", "--drafter", originals / "tiny-DFlash"]
    sentence = refusal(run("eval", *names, "--tasks", "gsm8k", "--data-root", tmp_path))
    assert sentence == f"The package datasets is not installed: run {INSTALL_EXTRAS} in the checkout of dflash."


def test_every_package_of_the_extras_is_known() -> None:
    """Promise: what `train` and `eval` add is named when it is absent, by the command that README gives."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    named = re.findall(r"^(?:train|eval) = \[(.*?)\]", text, re.MULTILINE)
    packages = {name for line in named for name in re.findall(r'"([\w-]+)', line)}
    assert {name.replace("pyyaml", "yaml").replace("-", "_") for name in packages} == set(EXTRA_MODULES)
    assert INSTALL_EXTRAS in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_pair_of_a_broken_drafter_names_the_drafter(
    run: Run, drafter: Path, originals: Path, tmp_path: Path
) -> None:
    """Bug: "`dflash check drafter` says all", where the folder has another name."""
    weights = load_file(drafter / "model.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, drafter / "model.safetensors", {"format": "pt"})
    sentence = refusal(run("pair", originals / "target", drafter, tmp_path / "new"))
    assert sentence.endswith(f"`dflash check {drafter}` says all.")
    assert run("check", drafter)[0] == 1


def test_a_target_without_a_layer_to_tap_is_said_so(drafter: Path, tmp_path: Path) -> None:
    """Bug: "the target has 1 layers … tap layers up to -1"."""
    BertConfig(num_hidden_layers=1).save_pretrained(tmp_path / "bert")
    (finding,) = (one for one in check(drafter, str(tmp_path / "bert")).findings if one.rule == "pair-taps")
    assert finding.why.startswith("the target has 1 layer, and")
    assert finding.fix == "use a deeper target: this one has no layer that can be tapped."


SOURCES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for pattern in ("dflash/**/*.py", "examples/*.py", "examples/space/*.py", "docs/**/*.md", "*.md")
    for path in ROOT.glob(pattern)
    if path.name != "CHANGELOG.md"  # which names what was
}
# Flags of torchrun, accelerate, git and the engines, which our text names too.
FOREIGN = r"--(nproc[-_]per[-_]node|cpu|short|model-path|speculative[\w-]*)$"


def commands() -> dict[str, Any]:
    group: Any = typer.main.get_command(cli.app)
    return dict(group.commands)


def flags_of(command: Any) -> set[str]:
    return {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)}


def test_every_command_that_a_text_names_exists() -> None:
    """Promise: a remedy in backquotes can be typed, with its flags."""
    known = commands()
    named = [
        (name, *match.groups())
        for name, text in SOURCES.items()
        for match in re.finditer(r"`dflash ([a-z][\w-]*)([^`\n]*)`", text)
    ]
    assert len(named) > 100
    for name, command, rest in named:
        assert command in known, f"{name}: dflash {command}"
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", rest.split(" -- ")[0]):
            assert flag in flags_of(known[command]) | {"--help"}, f"{name}: dflash {command} {flag}"


def test_every_flag_that_a_message_names_exists_on_its_command() -> None:
    """Promise: a command's file names its own flags; any other file of the package, those of some command."""
    known = {name.replace("-", "_"): flags_of(command) for name, command in commands().items()}
    general = {"--quiet", "--verbose", "--version", "--help"}
    num_flags = 0
    for name, text in SOURCES.items():
        if not name.startswith("dflash/"):
            continue
        command = Path(name).stem if name.startswith("dflash/cli/") else ""
        others = re.findall(r"dflash ([a-z]+)", text)  # a command's file may send its user to another one
        meant = {command, *others} if command in known else set(known)
        mine = general.union(*(known[one] for one in meant & known.keys()))
        for flag in re.findall(r"(?<![\w`/-])--[a-z][\w-]+\b", text):
            assert flag in mine or re.match(FOREIGN, flag), f"{name} names {flag}"
            num_flags += 1
    assert num_flags > 100


def test_one_is_not_many() -> None:
    """Bug: "1 rows"."""
    assert [counted(number, "row") for number in (0, 1, 2, 1200)] == ["0 rows", "1 row", "2 rows", "1,200 rows"]
