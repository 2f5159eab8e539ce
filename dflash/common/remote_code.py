"""Code in a target's folder that transformers would run unasked."""

from importlib.metadata import version
from pathlib import Path

from .messages import OWN_CODE


def refuse_own_generate(target: str, trust_remote_code: bool) -> None:
    """Raises ValueError for a folder with a `generate` of its own, which transformers 4 runs without being told to.

    transformers 5 runs it only with `trust_remote_code`, as both do with a repository on the Hub.
    """
    is_asked_for = int(version("transformers").split(".")[0]) >= 5
    has_generate = (Path(target) / "custom_generate" / "generate.py").is_file()
    if has_generate and not (is_asked_for or trust_remote_code):
        raise ValueError(OWN_CODE)
