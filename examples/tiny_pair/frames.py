"""The story frames of the word problems, out of `frames.json`: who does what with which things. It knows no arithmetic.

Slots: `{name}` and its pronouns `{he}`, `{He}`, `{his}`, `{him}`; `{items}`, the things counted; `{x}`, a number.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Frame:
    """One setting with its own nouns and sentences. Only plurals are told.

    Attributes:
        nouns: Kind of the nouns that stand for `{items}` beside the frame's own, so that copying a noun is learned and
            not a list of nouns; `None` for a frame that has its own alone.
        is_held_out: The frame is never trained on.
    """

    key: str
    nouns: str | None
    is_held_out: bool
    items: tuple[str, ...]
    do: str
    did: str
    doing: str
    box: str
    group: str
    opens: tuple[str, ...]
    gains: tuple[str, ...]
    loses: tuple[str, ...]


_DATA = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
MODIFIERS: list[str] = _DATA["modifiers"]
FRAMES = tuple(
    Frame(**{name: tuple(value) if isinstance(value, list) else value for name, value in frame.items()})
    for frame in _DATA["frames"]
)
NOUNS_OF_FRAME: dict[str, list[str]] = {frame.key: _DATA["nouns"][frame.nouns] for frame in FRAMES if frame.nouns}
FRAMES_HELD_OUT = frozenset(frame.key for frame in FRAMES if frame.is_held_out)
