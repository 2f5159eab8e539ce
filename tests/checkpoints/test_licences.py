"""What a checkpoint states of its licence, and which licence forbids what is about to be done."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_drafter, save_target

from dflash.checkpoints import embedded_path, licence_lines, make_pair, plan_publication, read_licence
from dflash.training import TrainingSettings, train_drafter


def folder_of(path: Path, card: str | None = None, **files: str) -> Path:
    """A folder that holds a card with this front matter, and other files by name."""
    path.mkdir(exist_ok=True)
    if card is not None:
        (path / "README.md").write_text(f"---\n{card}\n---\n# A drafter\n")
    for name, text in files.items():
        (path / name.replace("_json", ".json")).write_text(text)
    return path


@pytest.mark.parametrize(
    ("card", "files", "said"),
    [
        ("license: apache-2.0", {}, "apache-2.0."),
        ("license: cc-by-nc-4.0", {}, "cc-by-nc-4.0 (non-commercial): no commercial use."),
        (
            "license: cc-by-nc-nd-4.0",
            {},
            "cc-by-nc-nd-4.0 (non-commercial, no derivatives): no commercial use, changed copies may not be shared.",
        ),
        (
            "license: other\nlicense_name: llama3.1\nlicense_link: https://x/terms\nextra_gated_prompt: agree",
            {},
            "llama3.1 (gated, https://x/terms).",
        ),
        ("license: [mit, apache-2.0]", {}, "mit, apache-2.0."),
        ("license: cc_by_nc_4.0", {}, "cc_by_nc_4.0 (non-commercial): no commercial use."),
        ("license: cc_by_nd_4.0", {}, "cc_by_nd_4.0 (no derivatives): changed copies may not be shared."),
        (
            "license: other\nlicense_name: Attribution-No Derivatives 4.0",
            {},
            "Attribution-No Derivatives 4.0 (no derivatives): changed copies may not be shared.",
        ),
        ("license: other\nlicense_name: 2nd release, Inc.", {}, "2nd release, Inc.."),
        ("license: other", {}, "other."),
        ("license: unknown", {"LICENSE": "MIT License"}, "MIT License (LICENSE)."),
        ("tags: [dflash]", {"LICENSE": "\n  # MIT License\n\nCopyright"}, "MIT License (LICENSE)."),
        (
            None,
            {"LICENSE.txt": "Attribution-NonCommercial 4.0 International"},
            "Attribution-NonCommercial 4.0 International (non-commercial, LICENSE.txt): no commercial use.",
        ),
        (None, {}, "states none: ask its authors before you use, change or share it."),
        (
            "tags: [dflash]",
            {"training.json": '{"curve": []}'},
            "states none. If you trained it, state one: `--license apache-2.0` of dflash train, or `license: apache-2.0` in the "
            "front matter of its README.md. If not, ask its authors before you use, change or share it.",
        ),
        ("license: mit", {"training.json": '{"curve": []}'}, "mit."),
        ("tags: [dflash]", {}, "states none: ask its authors before you use, change or share it."),
    ],
)
def test_the_line_says_what_the_checkpoint_states(
    card: str | None, files: dict[str, str], said: str, tmp_path: Path
) -> None:
    """Promise: the card's licence, else the first line of LICENSE; its terms, its link, or that none is stated."""
    folder = folder_of(tmp_path / "drafter", card, **files)
    assert licence_lines("check", folder) == [f"Licence: drafter {said}"]


def test_a_card_that_cannot_be_read_is_said_and_stops_nothing(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "drafter", "license: [")
    (line,) = licence_lines("pair", target=folder)
    assert line.startswith("Licence: target not known (")
    (line,) = licence_lines("pair", target="nobody/has-this")
    assert "cannot be fetched" in line


def test_the_embedded_pair_states_its_licence() -> None:
    assert read_licence(embedded_path("tiny-DFlash")).name == "apache-2.0"


def test_training_on_is_refused_where_changes_are_forbidden(tmp_path: Path) -> None:
    """Promise: version 4 of Creative Commons lets anybody change what may not be shared; older ones and others do not."""
    private = folder_of(tmp_path / "a", "license: cc-by-nc-nd-4.0")
    assert "may not be shared" in licence_lines("train", private)[0]
    for name in ("cc-by-nd-3.0", "acme-no-derivatives"):
        folder = folder_of(tmp_path / "b", f"license: other\nlicense_name: {name}")
        with pytest.raises(ValueError, match=f"licence {name} of .* forbids changed copies, and --init makes one"):
            licence_lines("train", folder)
        assert "changed copies" in licence_lines("train", folder, is_accepted=True)[0]
        assert len(licence_lines("pair", folder, folder)) == 2  # to run it changes nothing


@pytest.mark.parametrize("origin", ["cc-by-nc-nd-4.0", "mit; cc-by-nd-3.0"])
def test_publishing_what_was_trained_from_it_is_refused(origin: str, tmp_path: Path) -> None:
    """Promise: whatever the new drafter's own card says, the licence of the one it was trained from counts."""
    folder = folder_of(tmp_path / "a", "license: mit", training_json=json.dumps({"init_licence": origin}))
    with pytest.raises(ValueError, match=f"licence {origin} forbids to share .*--accept-licence"):
        licence_lines("publish", folder)
    (line,) = licence_lines("publish", folder, is_accepted=True)
    assert line.startswith(f"Licence: drafter mit, trained from one of {origin} (")
    assert line.endswith("changed copies may not be shared.")
    assert read_licence(folder).inherited == "; ".join(
        dict.fromkeys([*origin.split("; "), "mit"])
    )  # and so for what is trained from this one


@pytest.mark.parametrize(
    ("origin", "refused"),
    [("cc-by-nd-3.0", True), ("cc-by-nc-nd-4.0; cc-by-nd-3.0", True), ("cc-by-nd-4.0", False), ("mit", False)],
)
def test_training_on_from_a_descendant_is_refused_by_the_licence_that_it_inherited(
    origin: str, refused: bool, tmp_path: Path
) -> None:
    """Promise: one inherited licence that forbids private changes is enough, beside others that allow them."""
    folder = folder_of(tmp_path / "a", "license: mit", training_json=json.dumps({"init_licence": origin}))
    if refused:
        with pytest.raises(ValueError, match=f"licence {origin}; mit of .* forbids changed copies"):
            licence_lines("train", folder)
    assert len(licence_lines("train", folder, is_accepted=refused)) == 1


def test_an_unchanged_copy_may_be_published(tmp_path: Path) -> None:
    """Promise: its authors too have to publish a drafter that nobody may change."""
    folder = folder_of(tmp_path / "a", "license: cc-by-nd-3.0", training_json=json.dumps({"init_licence": "mit"}))
    assert "no derivatives" in licence_lines("publish", folder)[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a drafter with a licence that forbids changes, and data."""
    folder = tmp_path_factory.mktemp("licences")
    save_target(folder / "target")
    make_drafter().save_pretrained(folder / "nd-DFlash")
    folder_of(folder / "nd-DFlash", "license: cc-by-nd-3.0")
    rows = [{"prompt_ids": [5, 6, 7 + i], "response_ids": [20 + i, *range(30, 44), 8]} for i in range(8)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


@pytest.mark.parametrize("command", ["convert", "export"])
def test_a_copy_in_another_form_has_its_licence(command: str, pair: Path, tmp_path: Path, dflash_command: Any) -> None:
    """Promise: neither the drafter's own licence nor that of its origin is lost on the way to the Hub."""
    theirs = tmp_path / "theirs-DFlash"
    shutil.copytree(pair / "nd-DFlash", theirs)
    front = "license: other\nlicense_name: Acme's terms\nlicense_link: LICENSE"
    (theirs / "LICENSE.pdf").write_bytes(b"\xff\xfe\x00")
    folder_of(theirs, front, LICENSE="Acme's terms\n\nAll of them.", training_json='{"init_licence": "cc-by-nd-3.0"}')
    ours = tmp_path / "ours-DFlash"
    status, _, err = dflash_command(command, theirs, ours, "--target", pair / "target")
    assert status == 0, err
    assert read_licence(ours) == read_licence(theirs)
    assert (ours / "LICENSE").read_text() == "Acme's terms\n\nAll of them."
    assert (ours / "LICENSE.pdf").read_bytes() == b"\xff\xfe\x00"
    assert "# ours-DFlash" in (ours / "README.md").read_text()
    assert {"LICENSE", "LICENSE.pdf"} <= {file.path for file in plan_publication(ours, "me/ours-DFlash").files}
    assert dflash_command(command, theirs, ours, "--target", pair / "target")[0] == 0  # replaces it
    with pytest.raises(ValueError, match="allows no derivatives"):
        licence_lines("adapt", ours)
    folder_of(theirs, "license: [")
    status, _, err = dflash_command(command, theirs, tmp_path / "unread-DFlash", "--target", pair / "target")
    assert (status, "correct its README.md" in err, (tmp_path / "unread-DFlash").exists()) == (1, True, False)


def test_a_name_with_a_comma_is_one_licence(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "a", "license: other\nlicense_name: CC BY-ND, version 4.0")
    assert len(licence_lines("train", folder)) == 1
    folder = folder_of(tmp_path / "a", "license: mit", training_json=json.dumps({"init_licence": "apache-2.0; mit"}))
    assert read_licence(folder).inherited == "apache-2.0; mit"


def test_commands_say_the_licences(pair: Path, tmp_path: Path, dflash_command: Any) -> None:
    """Promise: check and publish say one line of each model; train from such a drafter is refused, and publish after it."""
    drafter, target = pair / "nd-DFlash", pair / "target"
    lines = "Licence: drafter cc-by-nd-3.0 (no derivatives): changed copies may not be shared.\nLicence: target states none"
    assert lines in dflash_command("check", drafter, "--target", target)[1]
    told = json.loads(dflash_command("check", drafter, "--target", target, "--json")[1])
    assert "\n".join(told["licences"]).startswith(lines)
    assert lines in dflash_command("publish", drafter, "me/nd-DFlash", "--target", target, "--dry-run")[1]

    how = {
        "steps": 1,
        "eval-every": 1,
        "eval-new-tokens": 4,
        "held-out": 1,
        "batch-tokens": 64,
        "mixed-precision": "no",
    }
    words = [word for name, value in how.items() for word in (f"--{name}", value)]
    words = ["train", "--target", target, "--data", pair / "data.jsonl", "--init", drafter, *words]
    status, _, err = dflash_command(*words, "--output", tmp_path / "new-DFlash")
    assert (status, "--accept-licence" in err, (tmp_path / "new-DFlash").exists()) == (1, True, False)
    status, _, err = dflash_command(*words, "--output", tmp_path / "new-DFlash", "--accept-licence")
    assert (status, lines in err) == (0, True), err
    card = (tmp_path / "new-DFlash" / "README.md").read_text()
    assert "trained from those of a drafter whose licence is cc-by-nd-3.0." in card
    assert "No licence was stated" not in card
    status, out, err = dflash_command("publish", tmp_path / "new-DFlash", "me/new-DFlash", "--dry-run")
    assert (status, out, "The licence cc-by-nd-3.0 forbids to share changed copies" in err) == (1, "", True)


def test_a_run_from_python_knows_the_licence_that_it_inherits(pair: Path, tmp_path: Path) -> None:
    settings = TrainingSettings(
        init=str(pair / "nd-DFlash"), steps=1, held_out=0, batch_tokens=64, mixed_precision="no"
    )
    train_drafter(pair / "target", pair / "data.jsonl", tmp_path / "new-DFlash", settings, show_progress=False)
    assert read_licence(tmp_path / "new-DFlash").origin == "cc-by-nd-3.0"


def test_publish_reads_the_licence_of_a_pairs_drafter(pair: Path, tmp_path: Path, dflash_command: Any) -> None:
    """Promise: the licence of the drafter inside forbids and is said; the folder's own card has the target's."""
    target = folder_of(Path(shutil.copytree(pair / "target", tmp_path / "target")), "license: apache-2.0")
    drafter = Path(shutil.copytree(pair / "nd-DFlash", tmp_path / "new-DFlash"))
    folder_of(drafter, "license: mit", training_json=json.dumps({"init_licence": "cc-by-nd-3.0"}))
    both = make_pair(target, drafter, tmp_path / "both")
    words = ["publish", both, "me/both", "--dry-run"]
    status, out, err = dflash_command(*words)
    assert (status, out, "The licence cc-by-nd-3.0 forbids to share changed copies" in err) == (1, "", True)
    status, out, err = dflash_command(*words, "--accept-licence")
    assert status == 0, err
    assert "Licence: drafter mit, trained from one of cc-by-nd-3.0 (no derivatives): changed copies" in out
    assert "Licence: target apache-2.0." in out


def test_a_drafter_in_a_pair_keeps_the_text_of_its_licence(pair: Path, tmp_path: Path, dflash_command: Any) -> None:
    """Promise: a licence that only a LICENSE file states is known of the pair's drafter, and is published with it."""
    drafter = Path(shutil.copytree(pair / "nd-DFlash", tmp_path / "new-DFlash"))
    (drafter / "README.md").unlink()
    folder_of(drafter, LICENSE="Attribution-NoDerivatives 4.0 International")
    both = make_pair(pair / "target", drafter, tmp_path / "both")
    assert read_licence(both / "drafter") == read_licence(drafter)
    status, out, err = dflash_command("publish", both, "me/both", "--dry-run")
    assert status == 0, err
    assert "Licence: drafter Attribution-NoDerivatives 4.0 International (no derivatives, LICENSE): changed" in out
    assert " drafter/LICENSE\n" in out
