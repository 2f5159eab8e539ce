"""The real client against a Hub on loopback: pushed by this package, loaded where it cannot be imported.

A user's process has its own cache, because the client reads HF_ENDPOINT and HF_HOME when it is imported; a few processes make
many checks each, because each one imports torch.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import Hub, Request, client_of
from safetensors.torch import load, save
from scripts import PACKAGE_ROOT, PRELUDE, USERS, WITH_PACKAGE, environment, run_script
from tiny_models import make_drafter

from dflash.checkpoints import check, embedded_path, heldout_problems


DRAFTER, TARGET = "me/tiny-DFlash", "me/tiny-target"
SHIPPED_CODE = {path.name for path in (PACKAGE_ROOT / "dflash" / "model").glob("*_dflash.py")} - {"pair_dflash.py"}
PUSHED = SHIPPED_CODE | {"config.json", "model.safetensors", "README.md", "custom_generate/generate.py"}

PAIRS = ["me/tiny-pair", "me/whole-pair"]  # the drafter named with its commit, and a copy of it

PUSH = """
from transformers import AutoModelForCausalLM
from dflash.checkpoints import load_embedded_pair, make_pair, plan_publication, publish, save_pair
drafter = load_embedded_pair()[1]
drafter.push_to_hub(DRAFTER, commit_message="first")
drafter.save_pretrained("again", push_to_hub=True, repo_id="me/again-DFlash")
named, whole = (make_pair(TARGET, DRAFTER, name.split("/")[1], copy=name == PAIRS[1]) for name in PAIRS)
publish(plan_publication(named, PAIRS[0]))
model = AutoModelForCausalLM.from_pretrained(whole, trust_remote_code=True)
publish(plan_publication(save_pair(model, "saved"), PAIRS[1]))
print("{}")
"""

# What a user's process does, with `dflash` hidden: `PRELUDE` goes before it.
LOADING = """
from urllib.request import urlopen

from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer


def mark(name):
    urlopen(f"{ENDPOINT}/mark/{name}").close()


def load(**options):
    return AutoModel.from_pretrained(DRAFTER, **{"trust_remote_code": True, "dtype": torch.float32, **options}).eval()


def texts(draft):
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    messages = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    spec = draft.spec_generate(ids, target=target, max_new_tokens=40, temperature=0.0, return_dict_in_generate=True)
    greedy = {"max_new_tokens": 40, "do_sample": False}
    plain, forwards = target.generate(ids, **greedy), []
    target.register_forward_pre_hook(lambda *_: forwards.append(1))
    door = target.generate(ids, custom_generate=DRAFTER, trust_remote_code=True, drafter=draft, **greedy)
    pairs = [AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, dtype=torch.float32) for name in PAIRS]
    return {
        "pairs": [pair.eval().generate(ids, **greedy)[0].tolist() for pair in pairs],
        "pairs' tau": [pair.dflash_stats["tau"] for pair in pairs],
        "plain": plain[0].tolist(),
        "spec": spec.sequences[0].tolist(),
        "tau": spec.tau,
        "door": door[0].tolist(),
        "door forwards": len(forwards),
        "module": type(draft).__module__,
    }
"""

ONLINE = """
import io

from huggingface_hub import constants
from transformers import AutoConfig

constants.DOWNLOAD_CHUNK_SIZE = 1 << 20  # what is not a whole chunk, 10 MB otherwise, is fetched again
report = {"config without trust": type(AutoConfig.from_pretrained(DRAFTER, revision=FIRST)).__module__}
mark("interrupted")
failures = 0
while failures < 3:
    try:
        draft = load(revision=FIRST)
        break
    except OSError:  # the older client gives up, and goes on where it was when it is asked again
        failures += 1
mark("again")
load(revision=FIRST)
mark("newer")
newer = load(code_revision=FIRST)
mark("newer-again")
load(code_revision=FIRST)
mark("newer-code")
try:
    load()
except RuntimeError as error:
    report["newer code"] = str(error)
report["weights"] = [float(model.norm.weight[0]) for model in (draft, newer)]
mark("door")
answers = []
for answer in ("n", "y"):
    sys.stdin = io.StringIO(f"{answer}\\n")
    try:
        target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
        ids = torch.tensor([[5, 6, 7]])
        given = {"custom_generate": DRAFTER, "drafter": draft, "max_new_tokens": 2, "do_sample": False}
        answers.append(target.generate(ids, **given).shape[1])
    except ValueError as error:
        answers.append(str(error))
report["answers"] = answers
report |= texts(draft)
draft.push_to_hub("me/third-DFlash")
mark("end")
print("\\n" + json.dumps(report))
"""

OFFLINE = """
report = {"weights": [float(load(**options).norm.weight[0]) for options in ({"revision": FIRST}, {"code_revision": FIRST})]}
report |= texts(load(revision=FIRST))
try:
    AutoModel.from_pretrained("me/never-loaded-DFlash", trust_remote_code=True)
except OSError as error:
    report["never loaded"] = str(error)
print("\\n" + json.dumps(report))
"""


def push(hub: Hub, folder: Path, python: str = sys.executable) -> str:
    """The commit of the embedded drafter, pushed from `python` with its `push_to_hub`; the target lies there too."""
    hub.add(TARGET, embedded_path("tiny-target"))
    variables = environment(hub, folder / "home", "loopback-me")
    run_script(PUSH, folder, python, WITH_PACKAGE, variables, **names(hub))
    return hub.repos[DRAFTER].branches["main"]


def names(hub: Hub) -> dict[str, Any]:
    """What the scripts read."""
    question = heldout_problems()[0].question
    return {"DRAFTER": DRAFTER, "TARGET": TARGET, "PAIRS": PAIRS, "ENDPOINT": hub.url, "QUESTION": question}


def assert_is_the_targets_text(report: dict[str, Any]) -> None:
    """The text of plain `generate` by all doors, really drafted, by the class out of the repository."""
    assert len(report["plain"]) > 40
    assert report["spec"] == report["plain"]
    assert report["door"] == report["plain"]
    assert report["pairs"] == [report["plain"]] * 2
    assert min(report["tau"], *report["pairs' tau"]) > 3
    assert report["door forwards"] < len(report["plain"]) / 3
    assert report["module"].startswith("transformers_modules.")


def test_pushed_then_loaded_without_the_package_then_offline(tmp_path: Path) -> None:
    """Promise: `push_to_hub` sends all that a user's process needs, and that process sees what the Hub promises.

    Trust is asked for; a broken download goes on where it broke; what is cached is not sent again; code of one commit runs
    with weights of another; without a connection everything loads once more.
    """
    with Hub(USERS) as hub:
        hub.add("me/never-loaded-DFlash", {"config.json": b"{}"})
        first = push(hub, tmp_path / "push")
        files = dict(hub.repos[DRAFTER].head().files)
        for name in (DRAFTER, "me/again-DFlash"):
            assert set(hub.repos[name].head().files) == PUSHED | {".gitattributes"}, name
        assert [commit.message for commit in hub.repos[DRAFTER].commits.values()] == ["initial commit", "first"]
        named, whole = (set(hub.repos[name].head().files) for name in PAIRS)
        assert {"dflash.json", "custom_generate/generate.py"} <= named & whole
        assert f'"revision": "{first}"'.encode() in hub.repos[PAIRS[0]].head().files["dflash.json"]
        assert {f"drafter/{name}" for name in PUSHED if "generate" not in name} == whole - named - {
            "model.safetensors"
        }
        card = files["README.md"].decode()
        assert f'AutoModel.from_pretrained("{DRAFTER}", trust_remote_code=True' in card
        assert "blocks of 16 tokens, target layers [1, 2, 3, 4, 5], mask token 3." in card

        # A later commit: other weights, and code that must not run for who pins the first commit's.
        tensors = load(files["model.safetensors"])
        expected = [float(tensors["norm.weight"][0]), float(tensors["norm.weight"][0]) + 1]
        tensors["norm.weight"] += 1
        code = files["modeling_dflash.py"] + b"\nraise RuntimeError('newer code runs')\n"
        hub.add(DRAFTER, {**files, "model.safetensors": save(tensors, {"format": "pt"}), "modeling_dflash.py": code})

        since, size, kept = len(hub.requests), len(files["model.safetensors"]), 4 << 20
        hub.cut("model.safetensors", after=kept)
        home = tmp_path / "home"
        variables = environment(hub, home, "loopback-me")
        report = run_script(
            PRELUDE + LOADING + ONLINE, tmp_path / "user", variables=variables, FIRST=first, **names(hub)
        )
        assert_is_the_targets_text(report)
        assert report["config without trust"].startswith("transformers.models.qwen3")
        said_no, said_yes = report["answers"]
        assert "trust_remote_code=True" in said_no
        assert said_yes == 5
        assert report["newer code"] == "newer code runs"
        assert report["weights"] == pytest.approx(expected)

        def bodies(start: str, end: str) -> list[Request]:
            low, high = hub.marked(start), hub.marked(end)
            return [request for request in hub.bodies() if low < hub.requests.index(request) < high]

        # Nothing of the code was fetched for who did not trust it.
        assert [request.path.rpartition("/")[2] for request in hub.bodies(since)][:1] == ["config.json"]
        assert hub.bodies(since)[1:] == hub.bodies(hub.marked("interrupted"))
        weights = [request for request in bodies("interrupted", "again") if request.path.endswith(".safetensors")]
        assert [(request.status, request.sent) for request in weights] == [(200, kept), (206, size - kept)]
        assert weights[1].range == f"bytes={kept}-"
        assert bodies("again", "newer") == []
        assert sum(request.path.endswith(".safetensors") for request in bodies("newer", "newer-again")) == 1
        assert bodies("newer-again", "newer-code") == []
        pushed_again = hub.repos["me/third-DFlash"].head().files
        assert set(pushed_again) == PUSHED | {".gitattributes"}
        assert b"# Model Card for Model ID" in pushed_again["README.md"]  # by transformers: ours is the package's

        # The same cache where nothing may be asked.
        before = len(hub.requests)
        variables = environment(hub, home, HF_HUB_OFFLINE="1")
        again = run_script(
            PRELUDE + LOADING + OFFLINE, tmp_path / "offline", variables=variables, FIRST=first, **names(hub)
        )
        assert len(hub.requests) == before
        assert_is_the_targets_text(again)
        assert again["spec"] == report["spec"]
        assert again["weights"] == report["weights"]
        assert "connect to" in again["never loaded"]


def test_a_drafter_of_the_hub_is_checked(tmp_path: Path) -> None:
    """Promise: a name on the Hub gets the folder's report, under its own name; pickles are not fetched."""
    folder = tmp_path / "saved"
    make_drafter().to(torch.bfloat16).save_pretrained(folder)
    (folder / "optimizer.bin").write_bytes(b"a pickle")
    with Hub(USERS) as hub:
        hub.add(DRAFTER, folder)
        with client_of(hub.url, tmp_path / "home"):
            report = check(DRAFTER)
        assert not any(request.path.endswith(".bin") for request in hub.bodies())
    assert (report.name, report.findings, report.is_ok) == ("tiny-DFlash", (), True)


@pytest.mark.skipif(not os.environ.get("DFLASH_OTHER_PYTHON"), reason="DFLASH_OTHER_PYTHON names no other interpreter")
@pytest.mark.parametrize("pushed_by", ["this", "other"])
def test_pushed_by_one_version_loaded_by_the_other(tmp_path: Path, pushed_by: str) -> None:
    """Promise: the two versions and their two clients read each other's repositories."""
    pythons = {"this": sys.executable, "other": os.environ["DFLASH_OTHER_PYTHON"]}
    script = PRELUDE + LOADING + "print(json.dumps(texts(load())))"
    reader = pythons["other" if pushed_by == "this" else "this"]
    with Hub(USERS) as hub:
        push(hub, tmp_path / "push", pythons[pushed_by])
        variables = environment(hub, tmp_path / "home")
        report = run_script(script, tmp_path / "user", reader, variables=variables, **names(hub))
    assert_is_the_targets_text(report)


def test_the_server_keeps_what_it_is_given() -> None:
    """The server itself: commits are immutable, a branch moves, the same content has the same name everywhere."""
    with Hub() as hub:
        first = hub.add("a/b", {"x.txt": b"1"})
        second = hub.add("a/b", {"x.txt": b"2"})
        repo = hub.repos["a/b"]
        assert repo.branches == {"main": second}
        assert repo.resolve(first) == first
        assert repo.commits[first].files == {"x.txt": b"1"}
        assert repo.resolve("0" * 40) is None
