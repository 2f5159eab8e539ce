"""`dflash publish`: what goes up, what is refused before a connection is made, and what the Hub's refusals are told as."""

from __future__ import annotations

import json
import re
import shutil
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub_server import Hub, Repo, client_of
from safetensors.torch import load_file, save_file
from scripts import USERS
from tiny_models import make_drafter, make_target

from dflash.checkpoints import make_pair, plan_publication, publish, save_checkpoint


REPO = "me/tiny-DFlash"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `save_pretrained` writes: no card, no door; read-only."""
    folder = tmp_path_factory.mktemp("saved") / "my-DFlash"
    make_drafter().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to change."""
    return Path(shutil.copytree(saved, tmp_path / saved.name))


@pytest.fixture
def no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any attempt to connect is an error of the test."""

    def refuse(*args: Any) -> None:
        raise AssertionError(f"a connection to {args[1]}")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def run(dflash_command: Callable[..., Any]) -> Callable[..., tuple[int, str, str]]:
    """`run(folder, …)`: exit status, standard output, standard error."""
    return partial(dflash_command, "publish")


# What goes up.


def test_a_plain_save_gets_a_card_and_the_door(folder: Path, no_connection: None) -> None:
    """Promise: what `save_pretrained` leaves out is written for the repository, and the folder stays as it is."""
    before = sorted(folder.rglob("*"))
    plan = plan_publication(folder, REPO)
    content = {file.path: file.read() for file in plan.files}
    assert set(content) == {path.name for path in before} | {"README.md", "custom_generate/generate.py"}
    assert set(plan.written) == {"README.md", "custom_generate/generate.py"}
    assert f'from_pretrained("{REPO}", trust_remote_code=True' in content["README.md"].decode()
    assert b"def generate(inputs" in content["custom_generate/generate.py"]
    assert sorted(folder.rglob("*")) == before


def test_only_files_of_a_checkpoint_go_up(folder: Path, no_connection: None) -> None:
    (folder / "notes.txt").write_text("mine")
    (folder / ".git").mkdir()
    (folder / "__pycache__").mkdir()
    (folder / "tokenizer.json").write_text("{}")
    plan = plan_publication(folder, REPO)
    assert plan.left_out == (".git/", "__pycache__/", "notes.txt")
    assert "tokenizer.json" in {file.path for file in plan.files}


def test_code_of_another_tool_goes_up_with_what_it_imports(folder: Path, no_connection: None) -> None:
    """Promise: the files that `auto_map` names are part of the checkpoint, whatever they are called."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"]["AutoModel"] = "net.DFlashDraftModel"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_dflash.py").rename(folder / "net.py")
    (folder / "net.py").write_text("from .layers import x\n" + (folder / "net.py").read_text())
    (folder / "layers.py").write_text("x = 1\n")
    (folder / "train.py").write_text("")
    plan = plan_publication(folder, REPO)
    assert {"net.py", "layers.py"} <= {file.path for file in plan.files}
    assert plan.left_out == ("train.py",)


def test_a_card_of_the_folder_loads_the_repository(folder: Path, no_connection: None) -> None:
    (folder / "README.md").write_text(
        '---\nlicense: mit\n---\n# Mine\n\nAutoModel.from_pretrained("my-DFlash", revision="main")\n'
    )
    plan = plan_publication(folder, REPO)
    text = next(file for file in plan.files if file.path == "README.md").read().decode()
    assert f'from_pretrained("{REPO}", revision' in text
    assert plan.card["license"] == "mit"
    assert "README.md" in plan.written
    assert "my-DFlash" in (folder / "README.md").read_text()


def test_a_dry_run_connects_to_nothing(folder: Path, run: Any, no_connection: None) -> None:
    (folder / "notes.txt").write_text("mine")
    status, out, err = run(folder, "me/tiny", "--dry-run")
    assert (status, err) == (0, "")
    assert "README.md  (written)" in out
    assert "kB  model.safetensors\n" in out
    assert "files to me/tiny\n" in out
    assert "left out: notes.txt\n" in out
    assert "  base_model: not said (--base-model ORG/NAME gives it)\n" in out
    assert (
        "  datasets: not said (write `datasets: …` into a README.md in the folder, between two lines of ---)\n" in out
    )
    assert "  tags: dflash, speculative-decoding\n" in out
    assert 'needs "method": "dflash"' in out


def test_a_dry_run_says_what_fills_the_card(folder: Path, run: Any, no_connection: None) -> None:
    """Promise: a card of the folder's own is not said to change by --target, and the line that is asked for is read."""
    (folder / "README.md").write_text('---\nlicense: mit\n---\nfrom_pretrained("my-DFlash")\n')
    assert "  base_model: not said (--base-model ORG/NAME gives it)" in run(folder, "me/my-DFlash", "--dry-run")[1]
    asked = (folder, "me/my-DFlash", "--dry-run", "--base-model")
    assert "  base_model: org/given\n" in run(*asked, "org/given")[1]
    status, _, err = run(*asked, "given")
    assert (status, err) == (1, "dflash: --base-model given is no id on the Hub: give namespace/name.\n")
    text = next(
        one for one in plan_publication(folder, REPO, None, "org/given").files if one.path == "README.md"
    ).read()
    assert b"license: mit" in text
    (folder / "README.md").write_text("---\nbase_model: org/target\n---\n")
    assert "  base_model: org/target\n" in run(folder, "me/my-DFlash", "--dry-run")[1]


def test_a_drafter_that_one_engine_cannot_run_is_published_all_the_same(
    folder: Path, run: Any, no_connection: None
) -> None:
    """Promise: what counts is that transformers loads it; who fails is named."""
    config = json.loads((folder / "config.json").read_text())
    del config["num_target_layers"]
    config["dflash_config"].pop("num_target_layers", None)
    (folder / "config.json").write_text(json.dumps(config))
    status, out, _ = run(folder, REPO, "--dry-run")
    assert status == 0
    assert "MLX fails: `dflash check` says why." in out


# What is refused before anything is sent.


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (".env", r"\.env looks secret: move it out"),
        ("id_ed25519", "looks secret"),
        ("token", "looks secret"),
        ("optimizer.pt", r"optimizer\.pt is the state of a training run"),
        ("checkpoint-40/optimizer.bin", "checkpoint-40 is the state"),
        ("trainer_state.json", "is the state"),
        ("events.out.tfevents.1", "is the state"),
    ],
)
def test_secrets_and_training_state_are_refused(folder: Path, name: str, said: str, no_connection: None) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text("")
    with pytest.raises(ValueError, match=said):
        plan_publication(folder, REPO)


@pytest.mark.parametrize(
    "key",
    ["hf_" + "a1" * 17, "sk-" + "b2" * 20, "AKIA" + "Q" * 16, "-----BEGIN RSA PRIVATE KEY-----", "ghp_" + "c" * 36],
)
@pytest.mark.parametrize("name", ["README.md", "training.json", "cache_dflash.py"])
def test_keys_within_files_are_refused(folder: Path, name: str, key: str, no_connection: None) -> None:
    with (folder / name).open("a") as file:
        file.write(f"\n# {key}\n")
    with pytest.raises(ValueError, match=f"{name} holds what looks like a secret key"):
        plan_publication(folder, REPO)


def test_a_key_in_a_card_that_is_rewritten_is_refused(folder: Path, no_connection: None) -> None:
    """Promise: files that are written anew are searched as well."""
    (folder / "README.md").write_text(f'AutoModel.from_pretrained("{folder.name}")\n# hf_{"a1" * 17}\n')
    with pytest.raises(ValueError, match=r"README\.md holds what looks like a secret key"):
        plan_publication(folder, REPO)


def test_every_secret_pattern_is_refused_and_in_no_pair(folder: Path, tmp_path: Path, no_connection: None) -> None:
    """Promise: none of these names is published, and no pair copies one from its target or its drafter."""
    names = [
        ".env", ".env.local", ".netrc", "_netrc", ".git-credentials", ".npmrc", ".pypirc", "a.pem", "a.key", "a.p12", "a.pfx",
        "id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "token", "token.txt", "a.token", "credentials.json", "secrets.json"
    ]  # fmt: skip
    target = save_checkpoint(make_target(), tmp_path / "target")
    for name in names:
        (target / name).touch()
        (folder / name).touch()
        with pytest.raises(ValueError, match=f"^{re.escape(name)} looks secret"):
            plan_publication(folder, REPO)
        (folder / name).unlink()
    for name in names:
        (folder / name).touch()
    pair = make_pair(target, folder, tmp_path / "pair")
    assert not {path.name for path in pair.rglob("*")} & set(names)


def test_a_commit_names_its_parent_and_leaves_visibility_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: what somebody else commits meanwhile is not overwritten; an organisation's own default decides visibility."""
    calls: dict[str, dict[str, Any]] = {}

    def answer(name: str) -> Any:
        def call(self: Any, *args: Any, **keywords: Any) -> Any:
            calls[name] = keywords
            return SimpleNamespace(sha="before", siblings=[], private=False, oid="after")

        return call

    for name in ("create_repo", "model_info", "create_commit"):
        monkeypatch.setattr(f"huggingface_hub.HfApi.{name}", answer(name))
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "loopback-me")
    assert publish(plan_publication(folder, REPO), private=False).is_new
    assert calls["create_commit"]["parent_commit"] == "before"
    assert calls["create_repo"]["private"] is None


def test_what_does_not_load_is_refused(folder: Path, run: Any, no_connection: None) -> None:
    """Promise: the linter's own reason and remedy, and nothing goes up."""
    (folder / "modeling_dflash.py").unlink()
    status, out, err = run(folder, REPO)
    assert (status, out) == (1, "")
    assert err == (
        "dflash: auto_map.AutoModel keeps this checkpoint from working in transformers (remote code) (there is no class "
        "DFlashDraftModel in modeling_dflash.py beside the weights): save the drafter again with this package, its code "
        f"beside it; `dflash check {folder}` says all.\n"
    )


def test_weights_that_are_no_numbers_are_refused(folder: Path, run: Any, no_connection: None) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["norm.weight"][0] = float("nan")
    save_file(weights, folder / "model.safetensors")
    status, out, err = run(folder, REPO, "--dry-run")
    assert (status, out) == (1, "")
    assert (
        "(NaN or infinite weights make everything that is computed from them NaN): take a checkpoint from before"
        in err
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("tiny-DFlash", "'tiny-DFlash' says no namespace: give your user name or an organisation, as in you/tiny"),
        ("a b/c", "'a b/c' is no name of a repository: give namespace/name"),
        ("a/b/c", "'a/b/c' is no name of a repository"),
        ("me/-x-", "is no name of a repository"),
    ],
)
def test_a_name_that_is_none_is_refused(folder: Path, name: str, said: str, no_connection: None) -> None:
    with pytest.raises(ValueError, match=said):
        plan_publication(folder, name)


def test_no_folder_and_no_checkpoint_are_refused(tmp_path: Path, run: Any, no_connection: None) -> None:
    status, _, err = run(tmp_path / "nowhere", REPO)
    assert status == 1
    assert err.endswith("nowhere is no folder: give the folder of a drafter's checkpoint.\n")
    status, _, err = run(tmp_path, REPO)
    assert status == 1
    assert "is no checkpoint: give the folder that holds a drafter's config.json." in err


def test_a_card_that_cannot_be_read_is_refused(folder: Path, no_connection: None) -> None:
    (folder / "README.md").write_text("---\ntags: [dflash\n---\n# Mine\n")
    with pytest.raises(ValueError, match=r"The front matter of README\.md cannot be read"):
        plan_publication(folder, REPO)


def test_offline_is_said(folder: Path, run: Any, monkeypatch: pytest.MonkeyPatch, no_connection: None) -> None:
    """The tests run offline, so this is the real client's refusal."""
    monkeypatch.setenv("HF_TOKEN", "loopback-me")
    assert run(folder, REPO) == (1, "", "dflash: HF_HUB_OFFLINE is set, so nothing can be published: unset it.\n")


# With the Hub. One process makes all calls, because the client reads HF_ENDPOINT when it is imported.


def test_publishing_with_the_hub(folder: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    """Promise: one commit, private if asked, on any branch; the same again makes none; what left the folder leaves too.

    And every refusal is one sentence: no token, a wrong one, one without permission, no connection, a public repository.
    """
    changed = Path(shutil.copytree(folder, tmp_path / "changed" / folder.name))
    (changed / "training.json").write_text('{"steps": 2}')
    pair = make_pair(save_checkpoint(make_target(), tmp_path / "target"), folder, tmp_path / "tiny-pair")
    with socket.socket() as unused:  # bound and never listening: nobody answers there
        unused.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with Hub(USERS) as hub:
            hub.repos["me/public-DFlash"] = Repo()
            former = ("ops_dflash.py", "model-00001-of-00002.safetensors", "drafter/model.safetensors")
            others = ("figure.png", "fp8/model.safetensors", "int8/my_dflash.py", "onnx/custom_generate/x.py")
            hub.add("me/former-DFlash", dict.fromkeys((*former, *others), b""))
            calls: list[tuple[str | None, str, list[str]]] = [
                ("loopback-me", hub.url, [str(folder), REPO, "--private"]),
                ("loopback-me", hub.url, [str(folder), REPO]),
                ("loopback-me", hub.url, [str(changed), REPO, "--revision", "v/2", "--message", "second"]),
                ("loopback-me", hub.url, [str(folder), "me/former-DFlash"]),
                ("loopback-me", hub.url, [str(pair), "me/tiny-pair"]),
                (None, hub.url, [str(folder), REPO]),
                ("loopback-nobody", hub.url, [str(folder), REPO]),
                ("loopback-you", hub.url, [str(folder), REPO]),
                ("loopback-you", hub.url, [str(folder), "me/public-DFlash"]),
                ("loopback-me", nobody, [str(folder), REPO]),
                ("loopback-me", hub.url, [str(folder), "me/public-DFlash", "--private"]),
            ]
            answers = []
            for token, url, words in calls:
                with client_of(url, tmp_path / "home", token):
                    answers.append(run(*words))
            repo, public, paired = (hub.repos[name] for name in (REPO, "me/public-DFlash", "me/tiny-pair"))

    main, second = repo.branches["main"], repo.branches["v/2"]
    assert [commit.message for commit in repo.commits.values()] == [
        "initial commit", "Upload a DFlash drafter", "second"
    ]  # fmt: skip
    assert repo.private
    planned = {file.path: file.read() for file in plan_publication(folder, REPO).files}
    assert dict(repo.head().files) == planned | {".gitattributes": repo.head().files[".gitattributes"]}
    assert repo.head("v/2").files["training.json"] == b'{"steps": 2}'
    assert set(hub.repos["me/former-DFlash"].head().files) == {*planned, *others}
    assert public.commits == {}
    assert [commit.message for commit in paired.commits.values()][1:] == ["Upload a DFlash pair"]
    weights = "model-target-00001-of-00001.safetensors", "drafter/model.safetensors"
    for name in (*weights, "dflash.json", "custom_generate/generate.py"):
        assert paired.head().files[name] == (pair / name).read_bytes()

    def load_line(commit: str) -> str:
        return f'AutoModel.from_pretrained("{REPO}", trust_remote_code=True, revision="{commit}")\n'

    first, again, branch, _, whole, *refusals = answers
    assert 'AutoModelForCausalLM.from_pretrained("me/tiny-pair", trust_remote_code=True' in whole[1]
    assert (first[0], first[1]) == (0, f"{hub.url}/{REPO}\n{load_line(main)}")
    assert again[:2] == (0, f"Nothing has changed since the last commit.\n{hub.url}/{REPO}\n{load_line(main)}")
    assert branch[:2] == (0, f"{hub.url}/{REPO}/tree/v/2\n{load_line(second)}")
    assert [status for status, _, _ in refusals] == [1] * 6
    said = [err for _, _, err in refusals]
    may_not = "the token may not write to me: use one with write access, or another namespace."
    failed = f"was not published: the connection to {nobody} failed (Conn"
    assert said[0] == "dflash: There is no token of the Hub: run `hf auth login`, or set HF_TOKEN.\n"
    assert said[1] == (
        f"dflash: {REPO} was not published: the Hub does not know the token: run `hf auth login` again, or set HF_TOKEN.\n"
    )
    assert said[2] == f"dflash: {REPO} was not published: {may_not}\n"
    assert said[3] == f"dflash: me/public-DFlash was not published: {may_not}\n"
    assert failed in said[4]
    assert said[4].count("\n") == 1
    assert said[5] == (
        "dflash: me/public-DFlash exists and is public: make it private in its settings first, or leave out --private.\n"
    )


def test_secrets_and_training_state_beside_a_pairs_drafter_are_refused(
    folder: Path, tmp_path: Path, no_connection: None
) -> None:
    """Promise: a pair is uploaded whole, and what is not published of a drafter is not published of a pair."""
    pair = make_pair(save_checkpoint(make_target(), tmp_path / "target"), folder, tmp_path / "pair")
    for name, said in (("token.txt", "looks secret"), ("id_rsa", "looks secret"), ("optimizer.pt", "is the state of")):
        (pair / "drafter" / name).touch()
        with pytest.raises(ValueError, match=f"^{re.escape(name)} {said}"):
            plan_publication(pair, "me/pair")
        (pair / "drafter" / name).unlink()
    assert plan_publication(pair, "me/pair").is_pair


def test_a_pairs_further_chat_templates_go_up(folder: Path, tmp_path: Path, no_connection: None) -> None:
    """Promise: a pair is uploaded whole, with the templates that a tokenizer has beside its first one."""
    target = save_checkpoint(make_target(), tmp_path / "target")
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "rag.jinja").write_text("{{ messages }}")
    plan = plan_publication(make_pair(target, folder, tmp_path / "pair"), "me/pair")
    assert "additional_chat_templates/rag.jinja" in {file.path for file in plan.files}
    assert not plan.left_out


def test_a_drafter_that_stays_on_the_hub_is_not_fetched(
    folder: Path, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: a dry run fetched the drafter that a pair names, of its newest commit. A dflash.json without one was a KeyError.

    A pair whose dflash.json named a folder elsewhere on the disk was published, and nobody else could load it.
    """
    fetched: list[Any] = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *arguments, **_: fetched.append(arguments))
    pair = make_pair(save_checkpoint(make_target(), tmp_path / "target"), folder, tmp_path / "pair")
    shutil.rmtree(pair / "drafter")
    (pair / "dflash.json").write_text(json.dumps({"drafter": "you/tiny-DFlash", "revision": "abc"}))
    status, out, err = run(pair, "me/pair", "--dry-run")
    assert (status, fetched) == (0, []), err
    assert "The drafter stays on the Hub" in out
    (pair / "dflash.json").write_text(json.dumps({"drafter": str(folder)}))
    with pytest.raises(
        ValueError, match=r"dflash\.json names a drafter outside its folder \(.*\): write the pair again"
    ):
        plan_publication(pair, "me/pair")
    (pair / "dflash.json").write_text("{}")
    with pytest.raises(ValueError, match=r"dflash\.json names no drafter: write the pair again"):
        plan_publication(pair, "me/pair")
