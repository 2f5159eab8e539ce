"""A checkpoint's card, the licence that it states, and what this licence forbids.

The licence is read where authors write it: in the front matter of README.md, else in the first line of a LICENSE file.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import metadata_load

from dflash.common.messages import first_line

from .folders import LICENCE_TEXTS
from .rules.checkpoint_files import local_folder, read_json


Purpose = Literal["adapt", "check", "pair", "publish", "train"]

FILES = ["README.md", *LICENCE_TEXTS, "training.json"]
# An underscore ends a word, too.
NON_COMMERCIAL = re.compile(r"(?<![a-z0-9])(nc|research)(?![a-z0-9])|non[-_ ]?commercial", re.IGNORECASE)
NO_DERIVATIVES = re.compile(r"(?<![a-z0-9])nd(?![a-z0-9])|no[-_ ]?deriv", re.IGNORECASE)
TERMS = {
    "non-commercial": (NON_COMMERCIAL, "no commercial use"),
    "no derivatives": (NO_DERIVATIVES, "changed copies may not be shared"),
}
# Between the licence of a checkpoint and those of its origins; a name may hold a comma.
BETWEEN = "; "
# Creative Commons' version 4 lets anybody change the work, and forbids to share the changed work; older versions forbid both.
CHANGES_ARE_PRIVATE = re.compile(r"(nd|derivatives),?[-_ ](version )?4", re.IGNORECASE)
HOW_TO_STATE = (
    "state one: `--license apache-2.0` of dflash train, or `license: apache-2.0` in the front matter of its README.md"
)
ACCEPT = "pass --accept-licence if its authors allow it"


@dataclass(frozen=True)
class Card:
    """README.md of a checkpoint, its front matter and its text, and `training.json`; empty where there is none."""

    folder: Path
    fields: dict[str, Any]
    text: str
    facts: dict[str, Any]


def read_card(checkpoint: str | Path, revision: str | None = None) -> Card:
    """The card of a folder or Hub id; ValueError if it cannot be read."""
    folder = local_folder(checkpoint, "checkpoint", revision=revision, allow_patterns=FILES)
    readme = folder / "README.md"
    record = folder / "training.json"
    fields: dict[str, Any] = {}
    text = ""
    try:
        if readme.is_file():
            fields = metadata_load(readme) or {}
            text = readme.read_text(encoding="utf-8")
        return Card(folder, fields, text, read_json(record, "") if record.is_file() else {})
    except Exception as error:  # whatever a YAML reader makes of it
        raise ValueError(
            f"The card of {checkpoint} cannot be read ({first_line(error)}): correct its README.md."
        ) from error


@dataclass(frozen=True)
class Licence:
    """What a checkpoint states of its licence."""

    name: str | None = None  # its identifier or title; `None` if none is stated
    link: str | None = None  # where its terms are
    is_gated: bool = False  # whether the Hub asks for an agreement before it gives the files
    origin: str | None = None  # licence of the drafter that this one was trained from (`dflash train --init`)
    unread: str = ""  # why nothing could be read
    is_trained: bool = False  # whether `dflash train` or `dflash adapt` wrote it

    @property
    def inherited(self) -> str | None:
        """The licences that bind a drafter that is trained on from this one: this one's, and that of its origin."""
        names = [*(self.origin or "").split(BETWEEN), self.name]
        return BETWEEN.join(dict.fromkeys(filter(None, names))) or None

    @property
    def front_matter(self) -> str:
        """The lines by which the card of a copy states it too; none if it is not stated."""
        if self.name is None:
            return ""
        lines = f"license: {self.name}\n"
        if not re.fullmatch(r"[a-z0-9.+-]+", self.name):  # a title, and no identifier
            lines = f"license: other\nlicense_name: {json.dumps(self.name)}\n"
        if self.link is not None:
            lines += f"license_link: {json.dumps(str(self.link))}\n"
        return lines

    @property
    def forbids_changed_copies(self) -> bool:
        """Whether its name, or that of its origin, forbids to share what was trained on from it."""
        return NO_DERIVATIVES.search(self.inherited or "") is not None

    @property
    def forbids_private_changes(self) -> bool:
        """Whether its name, or that of its origin, forbids also a changed copy that is not shared."""
        forbidding = filter(NO_DERIVATIVES.search, (self.inherited or "").split(BETWEEN))
        return any(CHANGES_ARE_PRIVATE.search(name) is None for name in forbidding)

    @property
    def terms(self) -> dict[str, str]:
        """What its name, or that of its origin, forbids: the term, and what it means."""
        return {term: meaning for term, (pattern, meaning) in TERMS.items() if pattern.search(self.inherited or "")}


def read_licence(checkpoint: str | Path) -> Licence:
    """The licence of a folder or Hub id. Why one cannot be read is in `unread`, and is no error."""
    try:
        return _licence_of(read_card(checkpoint))
    except ValueError as error:
        return Licence(unread=str(error))


def _licence_of(card: Card) -> Licence:
    stated = card.fields.get("license")
    if isinstance(stated, list):
        stated = ", ".join(map(str, stated))
    if stated == "unknown":
        stated = None
    name = card.fields.get("license_name") if stated in (None, "other") else stated
    link = card.fields.get("license_link")
    files = _licence_paths(card.folder)
    if name is None and files:
        lines = files[0].read_text(encoding="utf-8", errors="replace").splitlines()
        titles = [line.strip(" #*") for line in lines]
        name = next(filter(None, titles), None)
        link = link or files[0].name
    name = name or stated
    return Licence(
        name and str(name),
        link,
        any(str(field).startswith("extra_gated") for field in card.fields),
        card.facts.get("init_licence"),
        is_trained="curve" in card.facts,
    )


def carried_licence(checkpoint: str | Path, revision: str | None = None) -> tuple[Licence, dict[str, bytes]]:
    """The licence of a folder or Hub id that is copied, and the files that go with it: its text, and the record of a training run.

    Raises:
        ValueError: if its card cannot be read.
    """
    card = read_card(checkpoint, revision)
    paths = [*_licence_paths(card.folder), *card.folder.glob("training.json")]
    return _licence_of(card), {path.name: path.read_bytes() for path in paths}


def _licence_paths(folder: Path) -> list[Path]:
    return sorted(path for pattern in LICENCE_TEXTS for path in folder.glob(pattern) if path.is_file())


def licence_lines(
    purpose: Purpose, drafter: str | Path | None = None, target: str | Path | None = None, is_accepted: bool = False
) -> list[str]:
    """A line for each model: its licence, and what that forbids. For "train", `drafter` is the one of `--init`.

    Raises:
        ValueError: if a licence forbids the purpose, unless `is_accepted`: to train on from a drafter whose licence
            allows no derivatives, or to publish what was trained so. The licence of the drafter that `drafter` was
            trained from counts as its own. "adapt" is refused also where the licence would allow a changed copy that is
            not shared, because who adapts means to use it.

    Example:
        >>> lines = licence_lines("check", drafter="drafter-DFlash", target="Qwen/Qwen3-8B")
    """
    named = {"drafter": drafter, "target": target}
    licences = {role: read_licence(name) for role, name in named.items() if name is not None}
    if "drafter" in licences and not is_accepted:
        _refuse_forbidden(purpose, licences["drafter"], str(drafter))
    return [f"Licence: {role} {_sentence(licence)}" for role, licence in licences.items()]


def _refuse_forbidden(purpose: Purpose, licence: Licence, drafter: str) -> None:
    """Raises ValueError if the licence of a drafter forbids the purpose."""
    if purpose == "publish" and NO_DERIVATIVES.search(licence.origin or ""):
        what = "forbids to share changed copies, and this drafter was trained from one of that licence"
        raise ValueError(f"The licence {licence.origin} {what}: keep it to yourself, or {ACCEPT}.")
    if purpose == "adapt" and licence.forbids_changed_copies:
        raise ValueError(
            f"The licence {licence.inherited} of {drafter} allows no derivatives, and adapting makes one: train a new "
            "drafter (dflash train without --init), or pass --i-have-permission if its authors allow it."
        )
    if purpose == "train" and licence.forbids_private_changes:
        raise ValueError(
            f"The licence {licence.inherited} of {drafter} forbids changed copies, and --init makes one: begin without "
            f"--init, or {ACCEPT}."
        )


def _sentence(licence: Licence) -> str:
    """What follows "Licence: drafter"."""
    if licence.unread:
        return f"not known ({licence.unread.rstrip('.')})."
    if licence.inherited is None:
        ask = "ask its authors before you use, change or share it."
        if licence.is_trained:
            return f"states none. If you trained it, {HOW_TO_STATE}. If not, {ask}"
        return f"states none: {ask}"
    sentence = licence.name or "states none"
    if licence.origin not in (None, licence.name):
        sentence += f", trained from one of {licence.origin}"
    notes = list(licence.terms)
    if licence.is_gated:
        notes.append("gated")
    if licence.link:
        notes.append(licence.link)
    if notes:
        sentence += f" ({', '.join(notes)})"
    if licence.terms:
        sentence += f": {', '.join(licence.terms.values())}"
    return f"{sentence}."
