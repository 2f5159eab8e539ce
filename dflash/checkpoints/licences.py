"""A checkpoint's card, the licence that it states, and what this forbids of what is about to be done.

It reads what the authors wrote: the front matter of README.md, else the first line of a LICENSE file.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import metadata_load

from dflash.common.messages import first_line

from .rules.checkpoint_files import downloaded, read_json


Purpose = Literal["adapt", "check", "pair", "publish", "train"]

FILES = ("README.md", "LICENSE*", "LICENCE*", "training.json")
NON_COMMERCIAL = re.compile(r"\bnc\b|non-?commercial|\bresearch\b", re.IGNORECASE)
NO_DERIVATIVES = re.compile(r"\bnd\b|no-?deriv", re.IGNORECASE)
# Between the licences of a checkpoint and of those that it was trained from; a name may hold a comma.
BETWEEN = "; "
# Creative Commons' version 4 lets anybody change the work, and forbids to share the changed one; older ones forbid both.
CHANGES_ARE_PRIVATE = re.compile(r"(nd|derivatives),?[- ](version )?4", re.IGNORECASE)
STATE_ONE = (
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
    folder = Path(checkpoint).expanduser()
    folder = folder if folder.is_dir() else downloaded(str(checkpoint), "checkpoint", FILES, revision)
    readme, facts = folder / "README.md", folder / "training.json"
    try:
        fields = (metadata_load(readme) if readme.is_file() else None) or {}
        text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
        return Card(folder, fields, text, read_json(facts, "") if facts.is_file() else {})
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
        """What a drafter that is trained on from this one has to keep in mind: its licence, and that of its origin."""
        return BETWEEN.join(dict.fromkeys(filter(None, (*(self.origin or "").split(BETWEEN), self.name)))) or None

    @property
    def front_matter(self) -> str:
        """The lines by which the card of a copy states it too; none if it is not stated."""
        if self.name is None:
            return ""
        is_identifier = re.fullmatch(r"[a-z0-9.+-]+", self.name)
        name = self.name if is_identifier else f"other\nlicense_name: {json.dumps(self.name)}"
        link = "" if self.link is None else f"license_link: {json.dumps(str(self.link))}\n"
        return f"license: {name}\n{link}"

    @property
    def forbids_changed_copies(self) -> bool:
        """Whether its name, or that of its origin, forbids to share what was trained on from it."""
        return NO_DERIVATIVES.search(self.inherited or "") is not None

    @property
    def forbids_private_changes(self) -> bool:
        """Whether one of these names forbids also a changed copy that is not shared."""
        forbidding = filter(NO_DERIVATIVES.search, (self.inherited or "").split(BETWEEN))
        return any(CHANGES_ARE_PRIVATE.search(name) is None for name in forbidding)

    @property
    def terms(self) -> list[str]:
        """What these names say that they forbid."""
        found = [("non-commercial", NON_COMMERCIAL), ("no derivatives", NO_DERIVATIVES)]
        return [term for term, pattern in found if pattern.search(self.inherited or "")]


def read_licence(checkpoint: str | Path) -> Licence:
    """The licence of a folder or Hub id. What cannot be read is said in `unread` and is no error."""
    try:
        return _licence_of(read_card(checkpoint))
    except ValueError as error:
        return Licence(unread=str(error))


def _licence_of(card: Card) -> Licence:
    stated = card.fields.get("license")
    stated = ", ".join(map(str, stated)) if isinstance(stated, list) else None if stated == "unknown" else stated
    name = card.fields.get("license_name") if stated in (None, "other") else stated
    link = card.fields.get("license_link")
    files = _licence_paths(card.folder)
    if name is None and files:
        lines = files[0].read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.strip(" #*") for line in lines if line.strip(" #*")), None)
        link = link or files[0].name
    is_gated = any(str(field).startswith("extra_gated") for field in card.fields)
    name = name or stated
    origin = card.facts.get("init_licence")
    return Licence(name and str(name), link, is_gated, origin, is_trained="curve" in card.facts)


def carried_licence(checkpoint: str | Path, revision: str | None = None) -> tuple[Licence, dict[str, bytes]]:
    """The licence of a folder or Hub id that is copied, and the files that go with it: its text, and the record of a training run.

    Raises:
        ValueError: if its card cannot be read.
    """
    card = read_card(checkpoint, revision)
    paths = [*_licence_paths(card.folder), *card.folder.glob("training.json")]
    return _licence_of(card), {path.name: path.read_bytes() for path in paths}


def _licence_paths(folder: Path) -> list[Path]:
    return sorted(path for pattern in FILES[1:3] for path in folder.glob(pattern) if path.is_file())


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
    models = {
        role: read_licence(name) for role, name in (("drafter", drafter), ("target", target)) if name is not None
    }
    own = models.get("drafter", Licence())
    if not is_accepted and purpose == "publish" and own.origin and NO_DERIVATIVES.search(own.origin):
        what = "forbids to share changed copies, and this drafter was trained from one of that licence"
        raise ValueError(f"The licence {own.origin} {what}: keep it to yourself, or {ACCEPT}.")
    if purpose == "adapt" and own.forbids_changed_copies and not is_accepted:
        raise ValueError(
            f"The licence {own.inherited} of {drafter} allows no derivatives, and adapting makes one: train a new drafter "
            "(dflash train without --init), or pass --i-have-permission if its authors allow it."
        )
    if purpose == "train" and own.forbids_private_changes and not is_accepted:
        raise ValueError(
            f"The licence {own.inherited} of {drafter} forbids changed copies, and --init makes one: begin without "
            f"--init, or {ACCEPT}."
        )
    return [f"Licence: {role} {_said(licence)}" for role, licence in models.items()]


def _said(licence: Licence) -> str:
    if licence.unread:
        return f"not known ({licence.unread.rstrip('.')})."
    if licence.inherited is None and licence.is_trained:
        return (
            f"states none. If you trained it, {STATE_ONE}. If not, ask its authors before you use, change or share it."
        )
    if licence.inherited is None:
        return "states none: ask its authors before you use, change or share it."
    said = licence.name or "states none"
    if licence.origin not in (None, licence.name):
        said += f", trained from one of {licence.origin}"
    more = [*licence.terms, *(["gated"] if licence.is_gated else []), *([licence.link] if licence.link else [])]
    forbidden = {"non-commercial": "no commercial use", "no derivatives": "changed copies may not be shared"}
    consequences = ", ".join(forbidden[term] for term in licence.terms)
    return said + (f" ({', '.join(more)})" if more else "") + (f": {consequences}." if consequences else ".")
