"""Takes the installed transformers into the range of pyproject.toml and into constraints.txt; changes nothing if it is there."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path


def widen(root: Path, version: str) -> bool:
    """Whether the files in `root` were changed for this release of transformers. A release candidate is left alone."""
    number = re.fullmatch(r"(\d+)\.(\d+)\.(\d+)", version)
    if number is None:
        return False
    major, minor = int(number[1]), int(number[2])
    project, constraints = root / "pyproject.toml", root / "constraints.txt"
    text = project.read_text()
    bound = re.search(r'"transformers>=[\d.]+,<(\d+)\.(\d+)"', text)
    if bound is None:
        raise SystemExit("pyproject.toml has no range of transformers with an upper minor version.")
    if (major, minor) < (int(bound[1]), int(bound[2])):
        return False
    project.write_text(text.replace(f',<{bound[1]}.{bound[2]}"', f',<{major}.{minor + 1}"'))
    pins = re.sub(
        r"^transformers==\S+(?=; python_version >=)", f"transformers=={version}", constraints.read_text(), flags=re.M
    )
    constraints.write_text(pins)
    return True


if __name__ == "__main__":
    found = metadata.version("transformers")
    print(f"transformers {found}: {'taken into the range' if widen(Path.cwd(), found) else 'nothing to change'}")
