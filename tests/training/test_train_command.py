"""`dflash train`: flags and YAML of one dataclass, a target and data in, a checkpoint out; and what it refuses."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import Hub, client_of
from scripts import USERS
from test_training_resume import no_file_larger_than
from tiny_models import make_target, make_tokenizer, save_target
from transformers import AutoModelForCausalLM, AutoTokenizer

from dflash import DFlashDraftModel, generate_blocks
from dflash.cli import app as cli
from dflash.common import provenance
from dflash.model import drafting_dflash, generation_dflash
from dflash.training import (
    ADAPTATION,
    RECIPES,
    Trainer,
    TrainingSettings,
    find_mask_token,
    hold_out,
    new_drafter,
    prepare,
    prompt_of,
    read_yaml,
    spread_taps,
    train_drafter,
    with_response,
)
from dflash.training.loading import PART_SETTINGS, make_drafter


TINY = {
    "steps": 4,
    "num_hidden_layers": 1,
    "block_size": 4,
    "num_anchors": 4,
    "batch_tokens": 128,
    "mixed_precision": "no",
    "eval_every": 2,
    "eval_new_tokens": 4,
    "held_out": 2,
}
# Of a run whose drafter has its shape already.
GOING_ON = {name: value for name, value in TINY.items() if name not in ("num_hidden_layers", "block_size")}
# All blocks of all sequences at each point, so that the losses of two points can be compared.
FAST = {"held_out": 0, "learning_rate": 5e-3, "steps": 30, "eval_every": 10, "num_anchors": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target's folder and data."""
    folder = tmp_path_factory.mktemp("train")
    save_target(folder / "target")
    rows = [{"prompt_ids": [5, 6, 7 + i], "response_ids": [20 + i, *range(30, 44), 8]} for i in range(20)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, dflash_command: Callable[..., Any], folder: Path) -> Any:
    """`run(output, "--steps", 4)`: exit status, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "300")

    def call(*arguments: Any, named: bool = True) -> tuple[int, str, str]:
        pair = ["--target", folder / "target"] if named else []
        data = ["--data", folder / "data.jsonl"] if named and "--data" not in arguments else []
        return dflash_command("train", *pair, *data, *arguments)

    return call


def test_a_new_drafter_is_told_how_to_state_its_licence(
    run: Any, dflash_command: Callable[..., Any], tmp_path: Path
) -> None:
    """Promise: who trained a drafter is not sent to its authors, by the command or by the check of the folder."""
    remedy = "state one: `--license apache-2.0` of dflash train, or `license: apache-2.0` in the front matter of its README.md"
    silent = {**TINY, "held_out": 0}
    assert (
        f"Its card states no licence. Before you share it, {remedy}."
        in run("--output", tmp_path / "new", *flags(**silent))[2]
    )
    assert (
        f"Licence: drafter states none. If you trained it, {remedy}." in dflash_command("check", tmp_path / "new")[1]
    )
    assert "licence" not in run("--output", tmp_path / "mit", *flags(**silent, license="mit"))[2]
    assert "Licence: drafter mit.\n" in dflash_command("check", tmp_path / "mit")[1]


@pytest.mark.parametrize("dry", [True, False])
@pytest.mark.parametrize(
    ("option", "said"),
    [
        (("--split", "zz"), "--split zz chooses a part of a data set, and "),
        (("--log-with", "nothing"), "log_with='nothing' is not one of the trackers installed here"),
        (("--license", ""), "license is empty: give a value, or leave it out. Licence of the drafter"),
        (("--license", " "), "license is empty"),
    ],
)
def test_a_value_that_would_do_nothing_is_refused(
    run: Any, tmp_path: Path, option: tuple[str, str], said: str, dry: bool
) -> None:
    """Promise: before anything is trained, and by `--dry-run` too. They were once taken in silence."""
    words = ["--output", tmp_path / "new", *flags(**TINY), *option, *(["--dry-run"] if dry else [])]
    status, out, error = run(*words)
    assert (status, out) == (1, "")
    assert said in error
    assert list(tmp_path.iterdir()) == []


def flags(**settings: Any) -> list[str]:
    words = []
    for name, value in settings.items():
        flag = f"--{name.replace('_', '-')}"
        words += ([flag] if value else [f"--no-{flag[2:]}"]) if isinstance(value, bool) else [flag, str(value)]
    return words


def test_train_writes_a_checkpoint_that_decodes_with_its_record_and_card(
    run: Any, folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "my-DFlash"
    status, out, _ = run("--output", output, *flags(**TINY, license="apache-2.0"))
    assert status == 0
    assert re.search(r"step 2: loss \d+\.\d+, \d\.\d\d accepted per block, tau \d\.\d\d", out)
    assert str(output) in out.splitlines()[-1]

    facts = json.loads((output / "training.json").read_text())
    assert [point["step"] for point in facts["curve"]] == [2, 4]
    for point in facts["curve"]:
        assert point["accepted_per_block"] == pytest.approx(point["accepted"] / point["blocks"])
    assert len(facts["curve"][0]["accuracy"]) == 3
    assert facts["settings"]["num_anchors"] == 4
    assert facts["command"].startswith("dflash train --target target --data data.jsonl")
    assert facts["data"]["examples"] == 18
    assert facts["versions"].keys() >= {"dflash", "torch", "transformers", "accelerate"}
    target = AutoModelForCausalLM.from_pretrained(folder / "target")
    known = provenance.environment(target, DFlashDraftModel.from_pretrained(output))
    names = ("cpu", "threads", "device", "target_dtype", "attention")
    assert [facts[name] for name in names] == [known[name] for name in names]  # as `eval` records them
    assert all(facts[name]["fingerprint"] for name in ("target", "drafter", "data", "held_out"))
    card = (output / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "base_model" not in card  # the target is a folder of this machine, and states no id
    assert f"| 4 | {facts['curve'][1]['loss']:.3f} |" in card
    assert facts["recipe"].startswith("short (learning_rate=0.002, muon_learning_rate=0.0")
    assert f"recipe {facts['recipe']}, loss ce, position weights dpace" in card
    assert str(tmp_path) not in card + json.dumps(facts)
    assert str(folder) not in card + json.dumps(facts)

    drafter = DFlashDraftModel.from_pretrained(output, dtype=torch.float32).eval()
    assert drafter.config.architectures == ["DFlashDraftModel"]
    target = make_target()
    prompt = torch.tensor([[5, 6, 7]])
    ours = drafter.spec_generate(prompt, target=target, max_new_tokens=12, temperature=0.0)
    assert torch.equal(ours, target.generate(prompt, max_new_tokens=12, do_sample=False))


def test_a_target_that_accelerate_spreads_is_not_moved(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, targets = AutoModelForCausalLM.from_pretrained, []

    def watched(*arguments: Any, **options: Any) -> Any:
        targets.append(load(*arguments, **options))
        targets[0].hf_device_map = {"": "cpu"}  # of one device alone transformers 5 sets none
        monkeypatch.setattr(targets[0], "to", lambda *_: pytest.fail("moved"))
        return targets[0]

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    status, _, err = run("--output", tmp_path / "drafter", *flags(**TINY, device_map="auto", license="mit"))
    assert (status, err, len(targets)) == (0, "", 1)


def test_data_too_small_to_hold_anything_out_says_so(run: Any, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "few.jsonl").write_text("\n".join((folder / "data.jsonl").read_text().splitlines()[:6]))
    words = ["--target", folder / "target", "--data", tmp_path / "few.jsonl", "--output", tmp_path / "drafter"]
    status, out, err = run(*words, *flags(**TINY), named=False)
    assert status == 0
    assert "The data has 6 usable sequences, of which a tenth may be held out: tau is not measured" in err
    assert "tau" not in out


def test_a_dflash2_drafter_is_trained_from_the_command_line(run: Any, tmp_path: Path) -> None:
    shape = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 3, "selector_top_k": 4}
    status, _, err = run("--output", tmp_path / "drafter", *flags(**TINY, **shape, license="mit"))
    assert (status, err) == (0, "")
    config = DFlashDraftModel.from_pretrained(tmp_path / "drafter").config
    assert {name: getattr(config, name) for name in shape} == shape
    words = flags(**{name: TINY[name] for name in ("steps",)}, init=tmp_path / "drafter", selector_rank=3)
    assert "fix selector_rank: leave these settings out" in run("--output", tmp_path / "other", *words)[2]


def test_the_record_and_the_card_say_who_wrote_the_answers(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From `dflash regenerate`'s manifest, which stands beside its rows: target, distribution, source and licence."""
    questions, answers, output = (tmp_path / name for name in ("chats.jsonl", "answers.jsonl", "my-DFlash"))
    rows = [{"prompt_ids": [5, 6, 7 + i], "license": "cc-by-4.0"} for i in range(20)]
    questions.write_text("\n".join(map(json.dumps, rows)))
    words = ["regenerate", "--target", folder / "target", "--data", questions, "--output", answers]
    words += ["--max-new-tokens", 16, "--temperature", 0.5, "--top-k", 30, "--seed", 3]
    monkeypatch.setattr(sys, "argv", ["dflash", *map(str, words)])
    with pytest.raises(SystemExit):
        cli.main()

    status, _, err = run("--data", answers, "--output", output, *flags(**TINY))
    assert (status, "another target" in err) == (0, False)
    facts = json.loads((output / "training.json").read_text())
    manifest = json.loads(answers.with_suffix(".manifest.json").read_text())
    assert facts["answers"] == {name: value for name, value in manifest.items() if name != "complete"}
    assert facts["answers"]["settings"]["weights"] == facts["target"]["fingerprint"]
    card = (output / "README.md").read_text()
    assert card.startswith("---\nlicense: cc-by-4.0\n")
    assert (
        "The answers to the prompts of `chats.jsonl` (20 rows, licence cc-by-4.0) were written by `target` at temperature "
        "0.5, top-p 1, top-k 30, seed 3, thinking off, at most 16 tokens each. `dflash regenerate --target target --data "
        "chats.jsonl" in card
    )
    assert "No licence was stated" not in card
    run("--data", answers, "--output", output, *flags(**TINY, license="mit"), "--overwrite")
    assert (output / "README.md").read_text().startswith("---\nlicense: mit\n")

    save_target(tmp_path / "other", seed=9)
    answers.with_suffix(".manifest.json").write_text(json.dumps(manifest | {"complete": False}))
    given = ["--target", tmp_path / "other", "--data", answers, "--output", tmp_path / "third"]
    status, _, err = run(*given, *flags(**TINY))
    assert status == 0
    assert "answers.jsonl holds the answers of another target (target, weights" in err
    assert "answers.jsonl is unfinished: dflash regenerate --resume writes the rest of it." in err


def test_a_yaml_file_says_the_same_as_flags_which_win_over_it(run: Any, folder: Path, tmp_path: Path) -> None:
    config = tmp_path / "recipe.yaml"
    lines = [
        f"target: {folder / 'target'}",
        f"data: {folder / 'data.jsonl'}",
        f"output: {tmp_path / 'from-file'}",
        *(f"{name.replace('_', '-')}: {value}" for name, value in TINY.items()),
        "learning-rate: 1e-3",
        "seed: 9",
        "target-layer-ids: [0, 2]",
    ]
    config.write_text("\n".join(lines))
    assert run("--config", config, "--seed", 3, named=False)[0] == 0
    written = json.loads((tmp_path / "from-file" / "training.json").read_text())["settings"]
    assert (written["learning_rate"], written["seed"], written["mixed_precision"]) == (1e-3, 3, "no")
    assert (
        run("--output", tmp_path / "flags", *flags(**TINY, learning_rate=1e-3, target_layer_ids="0,2", seed=3))[0] == 0
    )
    same = json.loads((tmp_path / "flags" / "training.json").read_text())
    assert same["settings"] == written
    assert DFlashDraftModel.from_pretrained(tmp_path / "flags").config.target_layer_ids == [0, 2]


def test_every_setting_is_a_flag_in_the_panel_of_its_topic(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole names at 100 columns, and what must be given first."""
    monkeypatch.setenv("COLUMNS", "100")
    _, out, _ = run("--help", named=False)
    assert "…" not in out.split("╭", 1)[1]
    _, *panels = re.split("╭─ ", out)
    shown = {panel.split(" ─")[0]: " ".join(panel.replace("│", " ").split()) for panel in panels}
    assert next(iter(shown)) == "Options"
    assert re.match(
        r"Options ─+╮ --target TEXT Required\..* --data TEXT Required\..* --output PATH Required",
        shown["Options"],
    )
    assert set(shown) == {"Options"} | {one.metadata["topic"] for one in fields(TrainingSettings)}
    for one in fields(TrainingSettings):
        words = shown[one.metadata["topic"]]
        assert f" --{one.name.replace('_', '-')} " in words
        assert one.metadata["help"].split(". ")[0][:30] in words


def test_a_dry_run_says_what_it_would_take_and_writes_nothing(run: Any, tmp_path: Path) -> None:
    status, out, _ = run("--output", tmp_path / "drafter", *flags(**TINY | {"steps": 40}), "--dry-run")
    assert status == 0
    assert "steps     40 (" in out
    assert "recipe    short: learning_rate=0.002, muon_learning_rate=0.0" in out
    assert re.search(r"18 sequences, 342 tokens an epoch, 288 supervised; 2 held-out prompts", out)
    assert re.search(r"memory    about \d+.*estimated from shapes", out)
    assert re.search(r"time      about \d+ s: \d+\.\d\d s a step, mean of 3 measured steps", out)
    assert re.search(
        r"speed     a verify step, draft included, takes as long as \d+\.\d tokens of plain decoding: decoding is faster if tau",
        out,
    )
    assert list(tmp_path.iterdir()) == []
    words = flags(**TINY | {"steps": 2}, features=tmp_path / "features")
    out = run("--output", tmp_path / "drafter", *words, "--dry-run")[1]
    assert re.search(r"features  \d+ KiB in .*features, written once", out)
    assert list(tmp_path.iterdir()) == []
    out = run("--output", tmp_path / "drafter", *flags(**TINY | {"steps": 2}, recipe="paper", seed=1), "--dry-run")[1]
    assert "not measured" in out
    assert "recipe    paper: learning_rate=0.0006, weights decay" in out


@pytest.mark.parametrize(
    ("libc", "is_set", "is_said"), [("glibc", False, True), ("glibc", True, False), ("musl", False, False)]
)
def test_a_dry_run_on_a_cpu_names_the_setting_that_gives_freed_memory_back(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, libc: str, is_set: bool, is_said: bool
) -> None:
    """Promise: what glibc keeps is not in the estimate, and the line that states it says so, with the way to avoid it."""
    monkeypatch.setattr(platform, "libc_ver", lambda *_: (libc, ""))
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    if is_set:
        monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    out = run("--output", tmp_path / "drafter", *flags(**TINY | {"steps": 2}), "--dry-run")[1]
    (memory,) = [line for line in out.splitlines() if line.startswith("memory")]
    expected = is_said and torch.accelerator.current_accelerator() is None
    assert memory.endswith("(set MALLOC_MMAP_THRESHOLD_=65536 to have none)") == expected


def test_a_drafter_larger_than_its_target_is_said_before_training(run: Any, folder: Path, tmp_path: Path) -> None:
    """Promise: one sentence with both sizes and the remedy, in a dry run too; embeddings, which a drafter uses too, do not count."""
    large, said = flags(**TINY | {"num_hidden_layers": 4}), "a step of the drafter costs more than one of the target"
    err = run("--output", tmp_path / "large", *large)[2]
    (line,) = [line for line in err.splitlines() if said in line]
    facts = json.loads((tmp_path / "large" / "training.json").read_text())
    layers = sum(weight.numel() for weight in make_target().model.layers.parameters())
    assert f"has {facts['parameters']:,} parameters and the target's layers have {layers:,}" in line
    assert line.endswith("give fewer --num-hidden-layers or a smaller --intermediate-size.")
    assert said in run("--output", tmp_path / "new", *large, "--steps", 2, "--dry-run")[1]
    out, err = run("--output", tmp_path / "new", *flags(**TINY | {"steps": 2}), "--dry-run")[1:]
    assert said not in out + err
    words = flags(
        **{name: value for name, value in TINY.items() if name != "num_hidden_layers"}, init=tmp_path / "large"
    )
    assert "at a high tau: start from a smaller drafter." in run("--output", tmp_path / "again", *words)[2]


def test_a_dry_run_decodes_in_the_targets_precision_and_is_said_once(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtypes = []

    def watched(drafter: Any, target: Any, *arguments: Any, **how: Any) -> Any:
        dtypes.append((drafter.dtype, target.dtype))
        return decode(drafter, target, *arguments, **how)

    decode = generation_dflash.generate_blocks
    monkeypatch.setattr("dflash.training.rehearsal.generate_blocks", watched)
    words = ["--output", tmp_path / "drafter", *flags(**TINY, target_dtype="bfloat16"), "--dry-run"]
    assert "speed" in run(*words)[1]
    assert set(dtypes) == {(torch.bfloat16, torch.bfloat16)}
    monkeypatch.setattr(Trainer, "is_first", False)
    assert run(*words, "--steps", 2)[:2] == (0, "")


def test_what_can_be_refused_at_once_is_refused_before_anything_is_loaded(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values, tracker, output and its lock before the tokenizer; the data before the target's weights, which are large."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "text.md").write_text("mine")
    never = lambda *_, **__: pytest.fail("loaded")  # noqa: E731
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    (tmp_path / "rows.jsonl").write_text('{"words": "x"}')
    later = run("--output", tmp_path / "new", "--data", tmp_path / "rows.jsonl")
    assert "Row 1 of" in later[2]
    assert "nowhere.jsonl does not exist" in run("--output", tmp_path / "new", "--data", "/nowhere.jsonl")[2]
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", never)
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").write_text("{}")
    for words, said in (
        (["--output", tmp_path / "new", "--init", tmp_path / "lora"], "lora is a peft adapter"),
        (["--output", tmp_path / "notes"], "is not a checkpoint"),
        (["--output", tmp_path / "file" / "x"], "file is no folder, so "),
        (["--output", tmp_path / "new", "--log-with", "nothing"], "log_with='nothing'"),
        (["--output", tmp_path / "new", "--device-map", "meta:x"], "device_map='meta:x' cannot be used"),
        (["--output", tmp_path / "new", "--resume", "--overwrite"], "both given"),
    ):
        status, _, err = run(*words)
        assert (status, said in err, err.count("\n")) == (1, True, 1), err


def test_training_that_diverges_is_one_sentence_and_keeps_the_best_checkpoint(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, forward, calls = tmp_path / "drafter", DFlashDraftModel.forward, []

    def failing(self: DFlashDraftModel, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        if self.training:
            calls.append(1)
        if len(calls) > 3:
            result.last_hidden_state = result.last_hidden_state * float("nan")
        return result

    monkeypatch.setattr(DFlashDraftModel, "forward", failing)
    status, _, err = run("--output", output, *flags(**TINY))
    assert (status, err.count("\n")) == (1, 1)
    assert re.search(
        r"The loss of step 4 is nan, on batch \d.*: lower learning_rate=0\.002, muon_learning_rate=0\.\d+, .*checkpoint of step 2 is kept",
        err,
    )
    assert json.loads((output / "training.json").read_text())["best_step"] == 2


def test_a_full_disk_is_one_sentence(run: Any, tmp_path: Path) -> None:
    with no_file_larger_than(2000):
        status, _, err = run("--output", tmp_path / "drafter", *flags(**TINY))
    assert (status, err.count("\n")) == (1, 1)
    assert "cannot be written (" in err
    assert "make room and run again with --resume" in err


def test_resume_of_a_complete_run_says_so_in_one_line(run: Any, tmp_path: Path) -> None:
    words = ["--output", tmp_path / "drafter", *flags(**TINY)]
    assert run(*words)[0] == 0
    status, out, err = run(*words, "--resume")
    assert (status, err, out.count("\n")) == (0, "", 1)
    assert "; the run was complete, nothing to resume" in out
    status, _, err = run(*words, "--resume", "--steps", 5)
    assert (status, "steps: 4, now 5" in err) == (1, True)


def test_early_measurements_do_not_warn_that_nothing_is_accepted(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Users of a drafter are warned so; that training begins there is no news."""
    monkeypatch.setattr(drafting_dflash, "INACTIVE_STEPS", 2)
    monkeypatch.setattr(drafting_dflash.logger, "propagate", True)
    with caplog.at_level("WARNING"):
        assert run("--output", tmp_path / "drafter", *flags(**TINY | {"learning_rate": 1e-9}))[0] == 0
        assert "not one drafted token was accepted" not in caplog.text
        drafter = DFlashDraftModel.from_pretrained(tmp_path / "drafter", dtype=torch.float32).eval()
        list(generate_blocks(drafter, make_target(), torch.tensor([[5, 6, 7]]), max_new_tokens=12, temperature=0.0))
    assert "not one drafted token was accepted" in caplog.text


def test_a_run_that_a_signal_ends_says_how_to_go_on(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    from dflash.cli import train as command

    monkeypatch.setattr(command, "_print_point", lambda point: os.kill(os.getpid(), signal.SIGTERM))
    status, _, err = run("--output", tmp_path / "drafter", *flags(**TINY))
    assert status == 128 + signal.SIGTERM
    assert "Stopped after step 3: go on with the same command and --resume." in err
    monkeypatch.undo()
    assert (tmp_path / "drafter.state").is_dir()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--output is missing"),
        (["--output", "OUT", "--config", "/nowhere.yaml"], "is not a file"),
        (["--output", "OUT", "--num-taps", "0"], "num_taps=0: give 1 or more"),
        (
            ["--output", "OUT", "--target-layer-ids", "1,a"],
            "--target-layer-ids 1,a is not a list of numbers from 0 on: write them as",
        ),
        (["--output", "OUT", "--target-layer-ids", "1,3"], "reaches the last of 4 layers"),
        (
            ["--output", "OUT", "--features", "F", "--shard-target"],
            "one process writes features with the whole target",
        ),
        (["--output", "OUT", "--num-taps", "2", "--target-layer-ids", "1"], "give the number or the layers"),
        (["--output", "OUT", "--data", "a.jsonl:0"], "data a.jsonl:0: the weight 0 is not a finite number above 0"),
        (["--output", "OUT", "--data", "a.jsonl:0.5", "--data", "b"], "beside others with one (b): give every part a"),
        (["--output", "OUT", "--data", "/nowhere.jsonl:0.5"], "/nowhere.jsonl does not exist"),
        (["--output", "OUT", "--data", ""], "The name of the data is empty: give a file"),
        (["--output", "OUT", "--lora-rank", "2"], "lora_rank=2 changes a trained drafter: give init (--init)"),
        (
            ["--output", "OUT", "--min-length", "99"],
            "Part 1 of the data has no sequence left (20 shorter than 99 tokens): give",
        ),
        (["--output", "OUT", "--mask-token-id", "40"], "Sequence 1 holds the mask token (40, at position"),
        (["--output", "OUT", "--mask-token-id", "400"], "outside the vocabulary of 96"),
        (["--output", "OUT", "--mask-token-id", "2"], "mask_token_id=2 is also an end-of-text token"),
        (["--output", "OUT", "--log-with", "nothing"], "log_with='nothing' is not one of the trackers installed here"),
        (["--output", "OUT", "--init", "/nowhere"], "/nowhere"),
        (["--output", "OUT", "--warmup-ratio", "2"], "warmup_ratio=2.0: give a share"),
        (["--output", "OUT", "--learning-rate", "0"], "learning_rate=0.0: give a number above 0"),
        (["--output", "OUT", "--max-length", "4"], "has at least 16 tokens (a block)"),
        (["--output", "OUT", "--held-out", "-1"], "held_out=-1: give 0 or more"),
        (["--output", "OUT", "--held-out", "999"], "held_out=999: the data has 20 usable sequences"),
        (["--output", "OUT", "--seed", "99999999999999999999"], "seed=99999999999999999999: give less than 2**63"),
        (["--output", "OUT", "--seed", "-1"], "seed=-1: give 0 or more"),
        (["--output", "OUT", "--weight-decay", "-1"], "weight_decay=-1.0: give 0 or more"),
        (["--output", "OUT", "--selector-weight", "nan"], "selector_weight=nan: give 0 or more"),
        (["--output", "OUT", "--dpace-alpha", "nan"], "dpace_alpha=nan: give a probability above 0"),
        (["--output", "OUT", "--num-taps", "50"], "num_taps=50: the target has 4 layers, all but the last"),
        (["--output", "OUT", "--device-map", "nonsense"], "device_map='nonsense' cannot be used ("),
        (["--output", "OUT", "--loss", "mse"], "loss='mse' is not one of ce, forward_kl"),
        (
            ["--output", "/proc/x/y"],
            "/proc/x cannot be used (No such file or directory): name another path",
        ),
        (["--output", "OUT", "--target", "/nowhere"], "The target /nowhere cannot be loaded ("),
    ],
)
def test_bad_input_is_one_sentence(run: Any, tmp_path: Path, words: list[str], said: str) -> None:
    given = [str(tmp_path / "drafter") if word == "OUT" else word for word in words]
    small = {"steps": 1} if "--held-out" in words else {"steps": 1, "held_out": 1}
    status, _, err = run(*given, *(flags(**small) if len(words) > 1 else []))
    assert status == 1
    assert said in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"steps": "many"}, "steps='many' is not a whole number"),
        ({"steps": True}, "steps=True is not a whole number"),
        ({"loss": "mse"}, "loss='mse' is not one of ce, forward_kl"),
        ({"position_weights": "linear"}, "position_weights='linear' is not one of decay, dpace"),
        ({"compile": "yes"}, "compile='yes' is not true or false"),
        ({"target_layer_ids": [1, "2"]}, "is not a list of numbers"),
        ({"gamma": float("nan")}, "gamma=nan: give a number above 0"),
        ({"gamma": 0}, "gamma=0.0: give a number above 0"),
        ({"dpace_alpha": 0.0}, "dpace_alpha=0.0: give a probability above 0"),
    ],
)
def test_settings_refuse_values_of_another_kind(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        TrainingSettings(**values)


def test_yaml_that_is_none_is_refused(tmp_path: Path, run: Any) -> None:
    path = tmp_path / "x.yaml"
    for text, said in (
        ("a: [", "is not YAML"),
        ("- 1", "holds no settings"),
        ("stepz: 3", "holds stepz"),
        ("steps: 3\nseed: 1\nsteps: 4", "x.yaml gives steps more than once: keep one line of each"),
        ("batch-tokens: 3\nbatch_tokens: 3", "gives batch_tokens more than once"),
    ):
        path.write_text(text)
        status, _, err = run("--config", path, named=False)
        assert (status, said in err) == (1, True)
    path.write_text("a: " + "[" * 1500)
    assert "x.yaml is nested too deeply to be read" in run("--config", path, named=False)[2]
    path.write_bytes(b"license: \xe9")
    assert "x.yaml is not UTF-8" in run("--config", path, named=False)[2]
    path.write_text("mixed_precision: no\nlearning-rate: 6e-4\n", encoding="utf-8-sig")  # as Windows writes it
    settings = TrainingSettings(**read_yaml(path))
    assert (settings.mixed_precision, settings.learning_rate) == ("no", 6e-4)


def test_a_warm_start_goes_on_from_the_weights_on_longer_text(run: Any, folder: Path, tmp_path: Path) -> None:
    """The paper's table 4: an existing drafter, fine-tuned on sequences longer than those it was trained on."""
    first, second = tmp_path / "short-DFlash", tmp_path / "long-DFlash"
    assert run("--output", first, *flags(**TINY | {"max_length": 12}))[0] == 0
    trained = DFlashDraftModel.from_pretrained(first, dtype=torch.float32)
    settings = TrainingSettings(init=str(first), sliding_window=64, held_out=0)
    begun = prepare(folder / "target", folder / "data.jsonl", settings).drafter
    assert all(torch.equal(tensor, trained.state_dict()[name]) for name, tensor in begun.state_dict().items())
    rows = [{"prompt_ids": [5, 6, 7 + i], "response_ids": [20 + i, *list(range(30, 44)) * 12, 8]} for i in range(12)]
    (tmp_path / "long.jsonl").write_text("\n".join(map(json.dumps, rows)))
    longer = {"steps": 24, "eval_every": 8, "learning_rate": 5e-3, "max_length": 160, "batch_tokens": 512}
    asked = flags(**GOING_ON | longer | {"init": first, "sliding_window": 64, "eval_new_tokens": 40})
    assert run("--data", tmp_path / "long.jsonl", "--output", second, *asked)[0] == 0
    facts = json.loads((second / "training.json").read_text())
    assert facts["data"]["tokens"] == 160 * facts["data"]["examples"]
    assert facts["settings"]["init"] == "short-DFlash"
    assert facts["curve"][0].keys() == {"step", "tau", "tokens_per_step"}  # what it began with
    losses = [point["loss"] for point in facts["curve"][1:]]
    assert losses[2] < losses[1] < losses[0]
    assert losses[2] < 0.9 * losses[0]
    config = DFlashDraftModel.from_pretrained(second).config
    assert (config.layer_types, config.sliding_window, config.block_size) == (["sliding_attention"], 64, 4)
    status, _, err = run("--output", tmp_path / "other", *flags(**TINY, init=first))
    assert status == 1
    assert "fix num_hidden_layers: leave these settings out" in err


def test_jetspecs_recipe_trains_a_causal_drafter_on_the_targets_distribution(run: Any, tmp_path: Path) -> None:
    """Promise: the recipe gives a drafter that is causal in its block and learned by forward KL; another recipe undoes both."""
    status, _, err = run("--output", tmp_path / "drafter", *flags(**TINY | FAST | {"steps": 20}, recipe="jetspec"))
    assert status == 0, err
    record = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert (record["settings"]["loss"], record["settings"]["is_causal"]) == ("forward_kl", True)
    assert record["curve"][-1]["loss"] < record["curve"][0]["loss"]
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "drafter")
    assert all(drafter.config.is_layer_causal(layer) for layer in range(drafter.config.num_hidden_layers))
    short = TrainingSettings(recipe="jetspec").changed(recipe="short")
    assert (short.loss, short.is_causal) == ("ce", None)
    assert (
        TrainingSettings(recipe="jetspec", loss="ce", is_causal=False).recipe_text()
        == "jetspec with loss=ce, is_causal=False"
    )


ADDED = {
    "selector": {"selector_rank": 3, "selector_top_k": 4},
    "conv": {"conv_kernel_size": 2, "conv_group_size": 8},
    "domino": {"gru_hidden_dim": 6, "emb_dim": 4},
    "dspark": {"head": "dspark", "markov_rank": 3},
}


@pytest.fixture(scope="module")
def begun(folder: Path) -> Path:
    """A trained drafter without added parts; read-only."""
    output = folder / "begun"
    train_drafter(
        folder / "target", folder / "data.jsonl", output, TrainingSettings(**TINY | FAST), show_progress=False
    )
    return output


@pytest.mark.parametrize("added", ADDED)
def test_parts_are_added_to_a_trained_drafter_whose_weights_stay_if_asked(
    run: Any, begun: Path, tmp_path: Path, added: str
) -> None:
    """What is added begins without effect, or with little; frozen weights are the same bits after training."""
    second, third = tmp_path / "second", tmp_path / "third"
    going_on = GOING_ON | FAST | ADDED[added] | {"init": begun, "recipe": "short"}
    assert run("--output", second, *flags(**going_on, freeze_init=True))[0] == 0
    assert run("--output", third, *flags(**going_on | {"steps": 3}))[0] == 0

    before, frozen, free = (DFlashDraftModel.from_pretrained(one).state_dict() for one in (begun, second, third))
    assert all(torch.equal(frozen[name], tensor) for name, tensor in before.items())
    assert not all(torch.equal(free[name], tensor) for name, tensor in before.items())
    parts = set(frozen) - set(before)
    assert parts
    modules = {"domino": ("prefix_gru", "embed_proj"), "dspark": ("markov_head", "confidence_head")}
    named = modules.get(added, (added,))
    assert parts == {name for name in frozen if any(word in name for word in named)}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        fresh = DFlashDraftModel(DFlashDraftModel.from_pretrained(second).config).state_dict()
    assert all(torch.equal(fresh[name], frozen[name]) is False for name in parts)  # each of them learned
    losses = [point["loss"] for point in json.loads((second / "training.json").read_text())["curve"]]
    assert losses[-1] < losses[0]
    parts_again = GOING_ON | FAST | {"init": second, "recipe": "short", "steps": 3}
    assert run("--output", tmp_path / "again", *flags(**parts_again, freeze_init=True))[0] == 0
    again = DFlashDraftModel.from_pretrained(tmp_path / "again").state_dict()
    assert {name for name, tensor in frozen.items() if not torch.equal(again[name], tensor)} == parts
    written = json.loads((second / "config.json").read_text())
    assert written["dflash_config"].get("pure_draft_prefix_len") == (1 if added == "domino" else None)
    names = {"domino": "DFlashDraftModel", "dspark": "DSparkDraftModel"}
    assert written["architectures"] == [names.get(added, "DFlash2DraftModel")]
    assert written["dflash_config"].get("projector_type") == (added if added in names else None)
    status, _, err = run("--output", tmp_path / "other", *flags(**GOING_ON, init=second, **ADDED[added]))
    assert status == 1
    assert f"fix {', '.join(name for name in ADDED[added] if name != 'head')}" in err


def test_parts_that_cannot_be_added_or_frozen_are_refused(run: Any, begun: Path, tmp_path: Path) -> None:
    for settings, said in (
        ({"freeze_init": True}, "freeze_init keeps the weights of a trained drafter: give init (--init)"),
        ({"freeze_init": True, "init": begun}, f"freeze_init: init={str(begun)!r} has no part of"),
        (
            {"init": begun, "rejected_share": 0.5},
            "rejected_share=0.5 and the data records no rejected draft: give a trace",
        ),
        (
            {"freeze_init": True, "init": begun, "lora_rank": 2},
            "lora_rank=2 and freeze_init: one changes the weights of init",
        ),
        (
            {"init": begun, "lora_rank": 2, **ADDED["domino"]},
            "lora_rank=2 trains existing matrices only, and ",
        ),
        ({"init": begun, "freeze_init": True, "shard": True, **ADDED["domino"]}, "freeze_init and shard"),
    ):
        status, _, err = run("--output", tmp_path / "other", *flags(**GOING_ON | FAST | settings))
        assert (status, said in err) == (1, True), err


def test_weights_that_are_to_stay_are_not_trained_by_a_caller_who_froze_none(folder: Path) -> None:
    settings = TrainingSettings(**TINY)
    ready = prepare(folder / "target", folder / "data.jsonl", settings)
    with pytest.raises(ValueError, match="freeze_init is set but no weight is frozen"):
        Trainer(ready.drafter, ready.target, ready.examples, replace(settings, freeze_init=True))


def test_another_recipe_decides_anew_what_recipes_decide() -> None:
    changed = ADAPTATION.changed(recipe="short", steps=3)
    assert (changed.steps, changed.learning_rate, changed.muon_rate(128)) == (3, 2e-3, 2e-2)
    assert changed.num_anchors == ADAPTATION.num_anchors
    assert ADAPTATION.changed(recipe="short", learning_rate=1.0).learning_rate == 1.0
    assert ADAPTATION.changed(steps=3).learning_rate == ADAPTATION.learning_rate


def test_convolutions_are_not_added_where_the_drafter_reads_scaled_embeddings(tmp_path: Path) -> None:
    target = make_target()
    begun = new_drafter(target, mask_token_id=90, num_hidden_layers=1)
    target.get_input_embeddings().embed_scale = torch.tensor(8.0)
    settings = TrainingSettings(init="org/drafter", conv_kernel_size=2, conv_group_size=8)
    with pytest.raises(ValueError, match="conv_kernel_size=2 cannot be added to init='org/drafter'"):
        make_drafter(target, make_tokenizer(), settings, begun)


def test_a_warm_start_that_only_harms_leaves_the_drafter_it_began_with(run: Any, tmp_path: Path) -> None:
    """No point of step 0 was measured: whether training helped could not be seen, and worse weights were kept."""
    first, second = tmp_path / "first", tmp_path / "second"
    long = {"eval_new_tokens": 32, "target_dtype": "float32"}
    # Towards what the target writes, which the held-out prompts are measured with.
    learned = {"steps": 60, "eval_every": 60, "learning_rate": 5e-3, "from_target": False, "loss": "forward_kl"}
    assert run("--output", first, *flags(**TINY | long | learned))[0] == 0
    status, out, _ = run(
        "--output", second, *flags(**GOING_ON | long, init=first, learning_rate=1000, warmup_ratio=0, seed=0)
    )
    assert (status, out.splitlines()[0].startswith("step 0: tau "), ": step 0, tau" in out) == (0, True, True)
    weights = [DFlashDraftModel.from_pretrained(folder).state_dict() for folder in (first, second)]
    assert all(torch.equal(weights[1][name], tensor) for name, tensor in weights[0].items())
    assert re.search(r"^\| 0 \| \| \| \d\.\d\d \|$", (second / "README.md").read_text(), re.MULTILINE)


def test_acceptance_is_measured_on_prompts_of_other_data_if_it_is_given(folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt_ids": [9, 8, 7 + i], "response_ids": list(range(30, 44))} for i in range(5)]
    (tmp_path / "others.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = TrainingSettings(**TINY | {"held_out": 3}, eval_data=str(tmp_path / "others.jsonl"))
    ready = prepare(folder / "target", folder / "data.jsonl", settings)
    assert len(ready.examples) == 20
    assert len(ready.held_out) == 3
    assert all(prompt[:2] == [9, 8] for prompt in ready.held_out)


def test_several_data_are_one_mix(run: Any, folder: Path, tmp_path: Path) -> None:
    """Of two --data the last was taken, silently."""
    rows = [{"prompt_ids": [9, 8, 7 + i], "response_ids": list(range(30, 44 + i % 2))} for i in range(40)]
    (tmp_path / "others.jsonl").write_text("\n".join(map(json.dumps, rows)))
    both = ["--data", f"{folder / 'data.jsonl'}:0.5", "--data", f"{tmp_path / 'others.jsonl'}:0.25"]
    status, _, err = run(*both, "--output", tmp_path / "drafter", *flags(**TINY, min_length=18, license="mit"))
    assert (status, err) == (0, "Left out: 20 shorter than 18 tokens, 10 for the weights of the mix.\n")
    facts = json.loads((tmp_path / "drafter" / "training.json").read_text())
    assert (facts["data"]["examples"], facts["held_out"]["prompts"]) == (28, 2)
    assert facts["data_name"] == "data.jsonl:0.5, others.jsonl:0.25"
    (tmp_path / "mix.yaml").write_text(f"data: [{folder / 'data.jsonl'}, {tmp_path / 'others.jsonl'}]")
    words = ["--config", tmp_path / "mix.yaml", "--target", folder / "target", "--output", tmp_path / "whole"]
    assert run(*words, *flags(**TINY), named=False)[0] == 0
    assert json.loads((tmp_path / "whole" / "training.json").read_text())["data"]["examples"] == 58


def test_a_shallow_target_gives_as_many_taps_as_it_has() -> None:
    assert spread_taps(36) == [1, 9, 17, 25, 33]  # the paper's
    assert spread_taps(8) == [1, 2, 3, 4, 5]
    assert spread_taps(5) == [0, 1, 2, 3]
    assert spread_taps(5, 3) == [0, 2, 3]
    assert spread_taps(2) == [0]
    for layers in range(2, 70):
        for taps in range(1, 9):
            found = spread_taps(layers, taps)
            assert len(found) == min(taps, layers - 1)
            assert found == sorted(set(found))
            assert found[-1] < layers - 1


def test_shape_flags_reach_the_drafter() -> None:
    drafter = new_drafter(
        make_target(), mask_token_id=95, num_hidden_layers=3, block_size=5, sliding_window=7, is_causal=False
    )
    config = drafter.config
    assert config.layer_types == ["sliding_attention"] * 3
    assert [config.layer_window(layer) for layer in range(3)] == [7] * 3
    assert not any(config.is_layer_causal(layer) for layer in range(3))
    plain = new_drafter(make_target(), mask_token_id=95, is_causal=True).config
    assert plain.layer_types == ["full_attention"] * 5
    assert plain.is_layer_causal(0)


def test_mask_token_is_one_that_text_does_not_hold() -> None:
    class Spelled:
        eos_token_id, pad_token_id, mask_token_id, unk_token_id = 1, 0, None, 2

        def __init__(self, **vocabulary: int) -> None:
            self.vocabulary = vocabulary

        def get_vocab(self) -> dict[str, int]:
            return self.vocabulary

    assert find_mask_token(Spelled(a=5), vocab_size=10) == 6  # the first unused row
    assert find_mask_token(Spelled(a=9), vocab_size=10) == 2
    assert find_mask_token(Spelled(**{"<|MASK|>": 4, "a": 5}), vocab_size=10) == 4
    Spelled.unk_token_id = 1
    with pytest.raises(ValueError, match="give mask_token_id"):
        find_mask_token(Spelled(a=9), vocab_size=10)


def test_held_out_sequences_are_not_trained_on() -> None:
    data = [with_response([5, i + 6], [7, 8, 9]) for i in range(40)]
    kept, prompts = hold_out(data, 3, seed=0)
    assert len(kept) == 37
    assert all(example.prompt_ids not in prompts for example in kept)
    assert hold_out(data, 3, seed=0)[1] == prompts != hold_out(data, 3, seed=1)[1]
    assert len(hold_out(data, 30, seed=0)[1]) == 4  # a tenth at most
    assert prompt_of(with_response([], list(range(30)))) == list(range(8))


def test_the_same_from_python(folder: Path, tmp_path: Path) -> None:
    record = train_drafter(
        folder / "target", folder / "data.jsonl", tmp_path / "drafter", TrainingSettings(**TINY), show_progress=False
    )
    assert record.curve[-1]["step"] == 4
    assert json.loads((tmp_path / "drafter" / "training.json").read_text())["target_name"] == "target"


def test_a_tracker_gets_loss_rates_and_acceptance(run: Any, tmp_path: Path) -> None:
    """Promise: each optimiser group has its own curve. AdamW's rate alone was logged, which is not that of the matrices."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    status, *_ = run("--output", tmp_path / "drafter", *flags(**TINY, log_with="tensorboard", log_every=1))
    assert status == 0
    (events,) = (tmp_path / "drafter.logs").rglob("events.out.tfevents.*.0")
    found = EventAccumulator(str(events.parent))
    found.Reload()
    scalars = {name: [event.step for event in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert scalars["train/loss"] == [1, 2, 3, 4]
    rates = {name: [event.value for event in found.Scalars(name)] for name in scalars if "/learning_rate/" in name}
    assert {name.rpartition("/")[2] for name in rates} == {"muon_matrices", "adamw_norms"}
    muon_peak = TrainingSettings(**TINY).muon_rate(make_target().config.hidden_size)
    assert max(rates["train/learning_rate/muon_matrices"]) == pytest.approx(muon_peak, rel=1e-5)
    assert max(rates["train/learning_rate/adamw_norms"]) == pytest.approx(2e-3, rel=1e-5)
    assert all(len(set(of_steps)) == 4 for of_steps in rates.values())  # the cosine
    assert scalars["eval/tau"] == scalars["train/mean/accuracy_1"] == scalars["train/mean/loss"] == [2, 4]
    # Bug: means over the training batches were shown beside the figures of held-out prompts.
    assert {name for name in scalars if name.startswith("eval/")} == {"eval/tau", "eval/tokens_per_step"}


def test_better_checkpoints_are_uploaded_and_a_refused_upload_ends_no_run(folder: Path, tmp_path: Path) -> None:
    """Promise: the repository holds the best checkpoint so far, is private if it is new, and the Hub cannot stop a run."""
    said: list[str] = []
    pair = folder / "target", folder / "data.jsonl"
    mine, home = tmp_path / "mine", tmp_path / "home"
    with Hub(USERS) as hub:
        with client_of(hub.url, home, "loopback-me"):
            for output, repo_id in ((mine, "me/mine-DFlash"), (tmp_path / "theirs", "you/theirs-DFlash")):
                settings = TrainingSettings(**TINY, publish_to=repo_id)
                train_drafter(*pair, output, settings, show_progress=False, announce=said.append)
        repo = hub.repos["me/mine-DFlash"]
        facts = json.loads((mine / "training.json").read_text())
        (mine / "README.md").write_text("---\nlicense: cc-by-nd-4.0\n---\n")
        for token, repo_id, init in (
            ("loopback-me", "no-name", None),
            ("loopback-me", "me/new", str(mine)),
            (None, "me/new", None),
        ):
            settings = TrainingSettings(steps=4, init=init, publish_to=repo_id)
            with client_of(hub.url, home, token), pytest.raises(ValueError) as refusal:  # noqa: PT011, compared below
                train_drafter(*pair, tmp_path / "refused", settings)
            said.append(str(refusal.value))
    assert repo.private
    assert repo.head().message == f"Step {facts['best_step']}"
    assert json.loads(repo.head().files["training.json"]) == facts, "of the whole run"
    assert {"model.safetensors", "config.json", "README.md"} <= set(repo.head().files)
    uploaded, refused, no_namespace, no_sharing, no_token = said[0], said[-4], *said[-3:]
    assert re.search(r"^The checkpoint of step \d was uploaded to http.*/me/mine-DFlash\.$", uploaded)
    assert "was not uploaded, and the run goes on: you/theirs-DFlash was not published" in refused
    assert "publish_to='no-name': 'no-name' says no namespace: give your user name or an organisation" in no_namespace
    assert f"the licence cc-by-nd-4.0 of {mine} forbids sharing a changed copy" in no_sharing
    assert "publish_to='me/new': There is no token of the Hub: run `hf auth login`" in no_token
    assert not (tmp_path / "refused").exists()


def test_the_drafter_that_a_run_began_with_is_not_uploaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: with `init`, step 0 may be the best one. It is somebody else's work, and the Hub has it."""
    from dflash.training import uploading

    asked: list[str] = []

    def refused(folder: Path, repo_id: str) -> None:
        asked.append(repo_id)
        raise ValueError("asked")

    monkeypatch.setattr(uploading, "plan_publication", refused)
    said: list[str] = []
    uploads = uploading.Uploads(tmp_path, "me/my-DFlash", said.append)
    uploads.add(0)
    uploads.add(0, is_last=True)
    assert (asked, said) == ([], [])
    uploads.add(50)
    assert asked == ["me/my-DFlash"]
    assert said == ["Step 50 was not uploaded, and the run goes on: asked"]


def test_text_that_looks_like_a_number_stays_text_in_yaml(tmp_path: Path) -> None:
    """Bug: an output of the name "2024" became the folder 2024.0."""
    path = tmp_path / "x.yaml"
    path.write_text('learning-rate: 6e-4\nsplit: "2024"\noutput: "1e3"\n')
    assert read_yaml(path, ["output"]) == {"learning_rate": 6e-4, "split": "2024", "output": "1e3"}


def test_a_recipe_decides_settings_that_are_none_unless_set() -> None:
    """A recipe's value of another setting would be passed over without a word."""
    defaults = {setting.name: setting.default for setting in fields(TrainingSettings)}
    for name, values in RECIPES.items():
        assert all(defaults[setting] is None for setting in values), name
        assert set(values) >= set(RECIPES["short"]), name


def test_settings_of_a_part_are_those_that_can_be_added_to_a_drafter() -> None:
    """A part whose setting is missing from the list would be passed over without a word."""
    topics = {setting.name: setting.metadata["topic"] for setting in fields(TrainingSettings)}
    of_parts = {name for name, topic in topics.items() if topic == topics["head"]}
    assert of_parts - {"head", "freeze_init", "confidence"} == set(PART_SETTINGS)
