"""A folder that is the target, with a `generate` that drafts: for every tool that loads a model and calls `generate`."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from dflash.common.messages import first_line

from .cards import pair_card
from .conversion import convert_checkpoint
from .folders import DRAFTERS, written_aside
from .licences import read_card
from .publishing import CARD, PAIR, SECRETS, TRAINING_STATE, working_report
from .rules.checkpoint_files import read_json


WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
LICENCE = ("license", "license_name", "license_link")
NOT_THE_TARGETS = (*SECRETS, *TRAINING_STATE, ".*", CARD)
# Keywords of the loop that no JSON holds, and inner names.
NO_SETTINGS = {
    *("as_blocks", "conversation", "drafter", "generator", "latency_curve", "ngram_size"),
    *("num_looked_up", "token_streamer", "uniforms_generator"),
}


def make_pair(
    target: str | os.PathLike[str],
    drafter: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    copy: bool = False,
    settings: Mapping[str, Any] | None = None,
    on_error: Literal["raise", "plain"] = "raise",
    trust_remote_code: bool = False,
) -> Path:
    """Writes a folder that is the target, with a `generate` that drafts, and returns its path.

    `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)`, `pipeline` and `transformers serve` then draft
    with no other change, and without this package. Loaded without `trust_remote_code` it is the target alone.

    Weights are linked, and other files copied. A drafter on the Hub that holds this library's code is named with its
    commit; one in another layout is converted. The folder is complete or not there.

    Args:
        target: A folder or an id on the Hub.
        drafter: Its drafter, the same.
        folder: Where to; it must not exist.
        copy: Copies all files, a drafter of the Hub too.
        settings: Keywords of `spec_generate` that every request starts from: `block_size`, `draft_tree`, `compile`, ….
        on_error: What the folder does once its drafter is gone or does not fit: "raise" a ValueError, or "plain" text
            with a warning.
        trust_remote_code: Run code that the target's repository holds, where a drafter of another layout needs its config.

    Raises:
        ValueError: if one of the two cannot be read or is something else, they do not belong together, a setting cannot
            be used, or `folder` exists.

    Example:
        >>> make_pair("Qwen/Qwen3-8B", "z-lab/Qwen3-8B-DFlash-b16", "Qwen3-8B-pair", settings={"draft_tree": 32})
    """
    folder = Path(folder).expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists: name a folder that does not, or delete it.")
    target_folder, drafter_folder = _local(target, "target"), _local(drafter, "drafter")
    config = read_json(target_folder / "config.json", f"The target {target} holds no config.json: give its folder.")
    kinds = set(config.get("architectures") or ())
    for is_wrong, what in (
        (kinds & set(DRAFTERS), "a drafter: name the target first, then its drafter"),
        ((target_folder / PAIR).exists(), "a pair already: give its target"),
        ((target_folder / "custom_generate").exists(), "a model with a generate of its own, which a pair replaces"),
    ):
        if is_wrong:
            raise ValueError(f"{target} is {what}.")
    its = read_json(drafter_folder / "config.json", f"The drafter {drafter} holds no config.json: give its folder.")
    _check_settings(dict(settings or {}), its, on_error)
    is_ours = str((its.get("auto_map") or {}).get("AutoModel")).startswith("modeling_dflash.")
    on_the_hub, code = not Path(drafter).expanduser().is_dir(), drafter_folder / "step_dflash.py"
    has_code = is_ours and code.is_file() and "class InexactError" in code.read_text(encoding="utf-8")
    with written_aside(folder) as aside:
        aside.mkdir()
        for path in sorted(target_folder.iterdir()):
            if not any(map(path.match, NOT_THE_TARGETS)) and (path.is_file() or path.name.endswith("_templates")):
                _place(path, aside / path.name, copy)
        said: dict[str, Any] = {"drafter": "drafter"}
        if has_code and on_the_hub and not copy:
            said = {"drafter": str(drafter), "revision": drafter_folder.name}  # a snapshot has the name of its commit
        elif is_ours:
            _place_drafter(drafter_folder, aside / "drafter", copy)
        else:
            convert_checkpoint(drafter_folder, aside / "drafter", target_folder, trust_remote_code)
        (aside / "custom_generate").mkdir()
        shutil.copyfile(Path(__file__).with_name("pair_door.py"), aside / "custom_generate" / "generate.py")
        text = json.dumps({**said, "settings": dict(settings or {}), "on_error": on_error}, indent=2) + "\n"
        (aside / PAIR).write_text(text, encoding="utf-8")
        stated = read_card(target_folder).fields
        licence = "".join(f"{name}: {json.dumps(stated[name])}\n" for name in LICENCE if name in stated)
        (aside / CARD).write_text(pair_card(folder.name, str(target), str(drafter), licence), encoding="utf-8")
        in_its_form = aside / "drafter" if (aside / "drafter").exists() else drafter_folder
        working_report(in_its_form, str(target_folder), os.fspath(drafter))
        if "auto_map" not in config:  # code is not run to find out
            _check_fit(aside, in_its_form)
    return folder


def _local(name: str | os.PathLike[str], what: str) -> Path:
    """The folder of a checkpoint's files, fetched if it is on the Hub; ValueError if there is none."""
    from huggingface_hub import snapshot_download

    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.absolute()
    try:
        others = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "onnx/*"]
        fetched = Path(snapshot_download(str(name), ignore_patterns=others))
        if not any(fetched.glob("*.safetensors")):
            snapshot_download(str(name), allow_patterns=["*.bin", "*.bin.index.json"])
    except Exception as error:
        raise ValueError(
            f"The {what} {name} is no folder and cannot be fetched from the Hub ({first_line(error)}): give its folder."
        ) from error
    return fetched


def _place(source: Path, path: Path, copy: bool) -> None:
    if source.is_dir():
        shutil.copytree(source, path)
    elif copy or not any(map(source.match, WEIGHTS)):
        shutil.copyfile(source, path)
    else:
        path.symlink_to(source)


def _place_drafter(source: Path, folder: Path, copy: bool) -> None:
    """The drafter's config and weights, with the code of this version."""
    import dflash.model

    folder.mkdir()
    code = Path(str(dflash.model.__file__)).parent.glob("*_dflash.py")
    for path in (*code, *source.glob("*.safetensors"), *source.glob("*.json"), *source.glob(CARD)):
        _place(path, folder / path.name, copy)


def _check_settings(settings: dict[str, Any], config: Mapping[str, Any], on_error: str) -> None:
    from dflash.model.generation_dflash import GENERATES_OWN, KEYWORDS, SETTINGS

    known = sorted({*KEYWORDS, *GENERATES_OWN} - NO_SETTINGS)
    if on_error not in ("raise", "plain"):
        raise ValueError(f"on_error={on_error!r}: use raise or plain.")
    largest = config.get("block_size") or math.inf

    def is_block_size(size: Any) -> bool:
        return type(size) is int and 2 <= size <= largest

    block_size = is_block_size, f"use 2 to {largest}, the block that the drafter was trained for"
    for name, value in settings.items():
        if name not in known:
            raise ValueError(f"{name!r} is no setting of a pair: use {', '.join(known)}.")
        is_meant, remedy = SETTINGS.get(name, block_size)
        if not is_meant(value):
            raise ValueError(f"{name}={value!r} cannot be a setting of this pair: {remedy}.")


def _check_fit(pair: Path, drafter: Path) -> None:
    """Raises ValueError unless the drafter can draft for the target; both are built without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dflash.model.configuration_dflash import DFlashConfig
    from dflash.model.modeling_dflash import DFlashDraftModel
    from dflash.model.step_dflash import check_pair

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pair, trust_remote_code=False))
        check_pair(model, DFlashDraftModel(DFlashConfig.from_pretrained(drafter)))
