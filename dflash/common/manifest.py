"""The manifest beside a file of regenerated answers: who wrote it, how, and whether it is complete."""

from pathlib import Path
from typing import Any

from .json_text import parsed_json


def manifest_path(path: Path) -> Path:
    """The path of an output's manifest."""
    return path.with_suffix(".manifest.json")


def read_manifest(path: Path) -> dict[str, Any]:
    """The content of an output's manifest; ValueError for a file that is none."""
    manifest = manifest_path(path)
    try:
        content: dict[str, Any] = parsed_json(manifest.read_bytes())
        content["settings"]["samples"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{manifest} is no manifest of a run: move it away from {path.name}, or choose another file."
        ) from error
    return content
