"""Writes the parts of README and docs that come from tests, cards and one measured text, and from no result's rows.

    python docs/tables.py [--check]

A part stands between `<!-- docs/tables.py NAME:begin -->` and `<!-- docs/tables.py NAME:end -->`. `benchmarks/reporting.py`
writes the tables of results.
"""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from dflash.evaluation import markdown, read_result, with_table


ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"<!-- (docs/tables\.py (\w+)):begin -->")


def tau_example() -> str:
    """Tau and tokens per step, counted on one measured text."""
    result = read_result(ROOT / "benchmarks" / "results" / "decode_tiny_cpu.json")
    runs = (run for run in result["measurements"] if run["method"] == "dflash" and len(run["acceptance_lengths"]) > 1)
    run = next(run for run in runs if sum(run["acceptance_lengths"]) >= run["num_tokens"] and run["num_tokens"] < 30)
    lengths, kept = run["acceptance_lengths"], run["num_tokens"] - 1
    steps, given = len(lengths), sum(lengths)
    listed = f"{', '.join(map(str, lengths[:-1]))} and {lengths[-1]}"
    return (
        f"An example: the target's answer to one of the measured questions has {run['num_tokens']} tokens. The prompt's forward "
        f"gives the first one, and {steps} verify steps give the other {kept}. The steps commit {listed} tokens, the target's own "
        f"included. `tau` is their mean: {given} / {steps} = {given / steps:.2f}. The answer ends inside the last step, where "
        f"{given - kept} of its {lengths[-1]} tokens is cut. `tokens per step` is what was kept: {kept} / {steps} = "
        f"{kept / steps:.2f}. A speed-up is tokens per step, divided by the time of a DFlash step over that of a plain one."
    )


def targets() -> str:
    """The families of targets that the tests cover, by version of transformers."""
    families = _module("families", ROOT / "tests").FAMILIES.values()

    def named(is_seeing: bool, versions: tuple[int, ...]) -> str:
        chosen = (f.kind for f in families if (f.images is not None) is is_seeing and f.versions == versions)
        return ", ".join(dict.fromkeys(chosen))

    rows = [
        [f"**{what}**", named(is_seeing, (4, 5)), named(is_seeing, (5,))]
        for what, is_seeing in (("targets", False), ("images in the prompt", True))
    ]
    return markdown((["", "transformers 4.57 and 5", "transformers 5 alone"], rows))


def engines() -> str:
    """How many of the published drafters each engine reads, by their cards."""
    build = _module("build", ROOT / "model_cards")
    data = json.loads((ROOT / "model_cards" / "drafters.json").read_text(encoding="utf-8"))
    verdicts = {"this library": [build.library_verdict(data, drafter)[0] for drafter in data["drafters"]]}
    for engine, name in build.ENGINES.items():
        verdicts[name] = [build.engine_verdict(data, drafter, engine)["serves"] for drafter in data["drafters"]]
    rows = [[name, *(str(said.count(word)) for word in (True, False, None))] for name, said in verdicts.items()]
    return markdown(([f"of {len(data['drafters'])} published drafters", "read", "refused", "not known"], rows))


MADE = {"tau_example": tau_example, "targets": targets, "engines": engines}


def changed_pages() -> dict[Path, str]:
    """The pages that differ from tests, cards and results, with the text that they should have."""
    changed = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = wanted = page.read_text(encoding="utf-8")
        for mark, name in MARK.findall(text):
            wanted = with_table(wanted, mark, MADE[name]())
        if wanted != text:
            changed[page] = wanted
    return changed


def _module(name: str, folder: Path) -> Any:
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))


if __name__ == "__main__":
    for page, text in changed_pages().items():
        if "--check" in sys.argv:
            sys.exit(f"{page.relative_to(ROOT)} is out of date: run `python docs/tables.py`.")
        page.write_text(text, encoding="utf-8")
