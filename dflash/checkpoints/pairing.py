"""A folder that is the target, with a `generate` that drafts: for every tool that loads a model and calls `generate`."""

import json
import math
import os
import shutil
from collections.abc import Mapping
from filecmp import cmpfiles
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dflash.common.cards import pair_card
from dflash.common.files import adapter_fault
from dflash.common.version import __version__
from dflash.dialects import check_kinds

from .conversion import convert_checkpoint
from .folders import DRAFTERS, LICENCE_TEXTS, save_checkpoint, written_aside
from .licences import read_card
from .publishing import CARD, PAIR, SECRETS, TRAINING_STATE, working_report
from .rules.checkpoint_files import INDEX, downloaded, local_folder, read_json
from .rules.engine_readings import mapping
from .rules.file_rules import OWN_CODE
from .rules.findings import WEIGHTS as MODEL


if TYPE_CHECKING:
    from transformers.modeling_utils import PreTrainedModel


DOOR_CODE = "pair_dflash.py"  # of the package: the `generate` of a pair
AUTO_CLASS = "AutoModelForCausalLM"
AUTO_MAP = {AUTO_CLASS: "custom_generate/generate.DraftedModel"}
WEIGHTS = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth")
INDICES = "*.index.json"
# Not fetched where safetensors are.
OTHER_FORMATS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "original/*", "onnx/*"]
# What `save_pretrained` writes has another name, so that nothing is saved through a link into the target's own weights.
LINK = "model-target-{:05d}-of-{:05d}.safetensors"
LICENCE = ("license", "license_name", "license_link")
PRIVATE = (*SECRETS, *TRAINING_STATE)
NOT_COPIED = (*PRIVATE, *WEIGHTS, INDICES, PAIR, ".*", CARD)
# Keywords of the loop that no JSON holds, and inner names.
NO_SETTINGS = {
    "as_blocks",
    "conversation",
    "drafter",
    "generator",
    "history",
    "ngram_size",
    "num_looked_up",
    "token_streamer",
    "uniforms_generator",
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
    with no other change. They need no package; where this one is installed, its engine drafts. Loaded without
    `trust_remote_code` it is the target alone.

    The target's safetensors are linked under names that `save_pretrained` never writes, and all else is copied. A drafter on
    the Hub that holds the code of this version is named with its commit; one in another layout is converted. The folder is
    complete or not there.

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
    folder = _new_folder(folder)
    target_folder = _local(target, "target")
    drafter_folder = _local(drafter, "drafter")
    config = _config(target_folder, f"The target {target}")
    _check_target(str(target), target_folder, config)
    drafter_config = _config(drafter_folder, f"The drafter {drafter}")
    _check_settings(dict(settings or {}), drafter_config, on_error)
    is_on_hub = not Path(drafter).expanduser().is_dir()
    with written_aside(folder) as aside:
        aside.mkdir()
        _copy_small_files(target_folder, aside)
        _place_weights(target_folder, aside, copy)
        if _is_ours(drafter_config):
            place = _place_drafter(str(drafter), drafter_folder, aside, is_on_hub and not copy)
        else:
            place = {"drafter": "drafter"}
            convert_checkpoint(drafter_folder, aside / "drafter", target_folder, trust_remote_code)
        _write_door(aside, {**place, "settings": dict(settings or {}), "on_error": on_error})
        _write_card(aside, folder.name, target_folder, target=str(target), drafter=str(drafter))
        drafter_here = aside / "drafter" if (aside / "drafter").exists() else drafter_folder
        working_report(drafter_here, str(target_folder), os.fspath(drafter))
        if "auto_map" not in config:  # code is not run to find out
            _check_fit(aside, drafter_here)
    return folder


def save_pair(model: "PreTrainedModel", folder: str | os.PathLike[str], tokenizer: Any = None) -> Path:
    """Saves a model that was loaded from a pair's folder as a pair, and returns the new folder's path.

    `model.save_pretrained` saves the target alone. This adds a copy of the drafter, the settings, and the target's other
    files, such as the tokenizer, of the folder that the model was loaded from. The folder is complete or not there.

    Args:
        model: The model of a pair, as it is now.
        folder: Where to; it must not exist.
        tokenizer: Saved instead of the pair's own, if given.

    Raises:
        ValueError: if the model is not of a pair, the pair's folder is gone, it has an adapter that is not merged, or `folder`
            exists. Nothing is written then.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("Qwen3-8B-pair", trust_remote_code=True)
        >>> save_pair(model, "Qwen3-8B-tuned-pair")
    """
    folder = _new_folder(folder)
    name = str(model.config._name_or_path)
    source = _local(name, "pair", getattr(model.config, "_commit_hash", None))
    remedy = "save it by save_pretrained, and give that folder and its drafter to make_pair."
    content = read_json(source / PAIR, f"{name}, from which the model was loaded, is no pair: {remedy}")
    with written_aside(folder) as aside:
        save_checkpoint(model, aside, tokenizer)
        fault = adapter_fault(aside)
        if fault is not None:
            raise ValueError(f"The model {fault}")
        _copy_small_files(source, aside)
        drafter = str(content["drafter"])
        if (source / drafter).is_dir():
            place = _place_drafter(drafter, source / drafter, aside)
        else:
            drafter_folder = _local(drafter, "drafter", content.get("revision"))
            place = _place_drafter(drafter, drafter_folder, aside, is_on_hub=True)
        _write_door(aside, {**place, "settings": content.get("settings") or {}, "on_error": content.get("on_error")})
        _write_card(aside, folder.name, source)
    return folder


def _new_folder(folder: str | os.PathLike[str]) -> Path:
    """The path of a folder to write; ValueError if there is something."""
    folder = Path(folder).expanduser().absolute()
    if folder.exists() or folder.is_symlink():
        raise ValueError(f"{folder} exists: name a folder that does not, or delete it.")
    return folder


def _local(name: str | os.PathLike[str], what: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint's files, fetched if it is on the Hub; ValueError if there is none."""
    folder = local_folder(name, what, revision=revision, ignore_patterns=OTHER_FORMATS)
    has_safetensors = any(folder.glob("*.safetensors"))
    is_local = Path(name).expanduser().is_dir()
    if not has_safetensors and not is_local:
        patterns = ["*.bin", "*.bin.index.json"]
        downloaded(str(name), what, revision=revision, allow_patterns=patterns)
    return folder.absolute()


def _config(folder: Path, what: str) -> dict[str, Any]:
    """The config of a checkpoint; ValueError if there is none."""
    return dict(read_json(folder / "config.json", f"{what} holds no config.json: give its folder."))


# -- the target's files


def _check_target(name: str, folder: Path, config: Mapping[str, Any]) -> None:
    """Raises ValueError for what cannot be a pair's target: a drafter, a pair, or a model with its own `custom_generate`."""
    what = None
    if set(config.get("architectures") or ()) & set(DRAFTERS):
        what = "a drafter: name the target first, then its drafter"
    elif (folder / PAIR).exists():
        what = "a pair already: give its target"
    elif (folder / "custom_generate").exists():
        what = "a model with a generate of its own, which a pair replaces"
    if what is not None:
        raise ValueError(f"{name} is {what}.")


def _copy_small_files(source: Path, folder: Path) -> None:
    """Copies what is no weights and not there yet: tokenizer, templates, configs, code."""
    for path in sorted(source.iterdir()):
        place = folder / path.name
        is_left_out = _matches(path, NOT_COPIED)
        if is_left_out or place.exists():
            continue
        if path.is_file():
            shutil.copyfile(path, place)
        elif path.name.endswith("_templates"):
            shutil.copytree(path, place)


def _place_weights(source: Path, folder: Path, copy: bool) -> None:
    """Puts the weights that transformers loads into `folder`: links to safetensors, or copies."""
    index = _index_of(source)
    if index is None or copy:
        _copy_weights(source, folder, index)
    else:
        _link_weights(source, folder, index)


def _link_weights(source: Path, folder: Path, index: Mapping[str, Any]) -> None:
    """Links to safetensors, and the index that names the links."""
    shards = _shards(source, index)
    links: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        link = LINK.format(number, len(shards))
        (folder / link).symlink_to(source / shard)
        links[shard] = link
    weight_map = {}
    for tensor, shard in index["weight_map"].items():
        weight_map[tensor] = links[shard]
    content = {"metadata": index.get("metadata") or {}, "weight_map": weight_map}
    _write_json(folder / INDEX, content)


def _shards(source: Path, index: Mapping[str, Any]) -> list[str]:
    """The files that an index names, in order; ValueError if they are no files of its folder."""
    shards = sorted(set(map(str, index["weight_map"].values())))
    for shard in shards:
        is_plain = Path(shard).name == shard
        if not is_plain or not (source / shard).is_file():
            raise ValueError(f"{source / INDEX} names {shard!r}, which is no file beside it: fetch the target again.")
    return shards


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(path.match(pattern) for pattern in patterns)


def _index_of(folder: Path) -> dict[str, Any] | None:
    """Which file holds which tensor, of safetensors; `None` if a folder has none."""
    from safetensors import safe_open

    path = folder / MODEL
    if path.is_file():
        with safe_open(path, framework="pt") as file:
            weight_map = dict.fromkeys(file.keys(), MODEL)
        return {"metadata": {"total_size": path.stat().st_size}, "weight_map": weight_map}
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, "")
        if not mapping(index.get("weight_map")):
            raise ValueError(f"{folder / INDEX} holds no weight_map, which names the shards: fetch the target again.")
        return index
    return None


def _copy_weights(source: Path, folder: Path, index: Mapping[str, Any] | None) -> None:
    """Copies safetensors under their own names, or whatever weights a folder without them has."""
    if index is None:
        names = [path.name for path in source.iterdir() if _matches(path, (*WEIGHTS, INDICES))]
    else:
        names = _shards(source, index)
        if not (source / MODEL).is_file():
            names.append(INDEX)
    for name in names:
        shutil.copyfile(source / name, folder / name)


# -- the drafter, the door and the card


def _is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a drafter's checkpoint is in the form of this library."""
    return str((config.get("auto_map") or {}).get("AutoModel")).startswith("modeling_dflash.")


def _code() -> list[Path]:
    """The files of code that a drafter's checkpoint holds."""
    return [path for path in sorted(OWN_CODE.glob("*_dflash.py")) if path.name != DOOR_CODE]


def _has_this_code(folder: Path) -> bool:
    """Whether a drafter's folder holds the code of this version."""
    names = [path.name for path in _code()]
    equal, _, _ = cmpfiles(OWN_CODE, folder, names, shallow=False)
    return equal == names


def _place_drafter(name: str, source: Path, pair: Path, is_on_hub: bool = False) -> dict[str, str]:
    """What dflash.json says of a drafter: its name and commit on the Hub, if it holds this code, or else a copy in the pair."""
    if is_on_hub and _has_this_code(source):
        return {"drafter": name, "revision": source.name}  # a snapshot has the name of its commit
    folder = pair / "drafter"
    folder.mkdir()
    paths = _code()
    for pattern in ("*.safetensors", "*.json", CARD, *LICENCE_TEXTS):
        found = [path for path in source.glob(pattern) if path.is_file()]
        paths += [path for path in found if not _matches(path, PRIVATE)]
    for path in paths:
        shutil.copyfile(path, folder / path.name)
    return {"drafter": folder.name}


def _write_door(folder: Path, content: Mapping[str, Any]) -> None:
    """Writes `generate` and what leads to it: the auto class in config.json, and dflash.json with this package's version."""
    (folder / "custom_generate").mkdir()
    shutil.copyfile(OWN_CODE / DOOR_CODE, folder / "custom_generate" / "generate.py")
    config = _config(folder, "The target")
    if _loads_by_auto_class(config):
        # Tools load a model by the first architecture that transformers has, or by AutoModelForCausalLM.
        config["architectures"] = [AUTO_CLASS, *config["architectures"]]
        config["auto_map"] = AUTO_MAP
        _write_json(folder / "config.json", config)
    _write_json(folder / PAIR, {**content, "version": __version__})


def _loads_by_auto_class(config: Mapping[str, Any]) -> bool:
    """Whether `AutoModelForCausalLM` loads a target by the class that its config names. Other targets keep their way."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(config.get("model_type")))
    has_own_code = config.get("auto_map", AUTO_MAP) != AUTO_MAP
    return name is not None and not has_own_code and config.get("architectures") == [name]


def _write_card(folder: Path, name: str, source: Path, **models: str) -> None:
    """Writes README.md, with the licence that the card in `source` states."""
    fields = read_card(source).fields
    licence = ""
    for field in LICENCE:
        if field in fields:
            licence += f"{field}: {json.dumps(fields[field])}\n"
    (folder / CARD).write_text(pair_card(name, licence=licence, **models), encoding="utf-8")


def _check_settings(settings: dict[str, Any], config: Mapping[str, Any], on_error: str) -> None:
    """Raises ValueError for what no request of this pair can have."""
    from dflash.engine import check_keywords
    from dflash.model.configuration_dflash import check_values
    from dflash.model.pair_dflash import KEYWORDS
    from dflash.model.requests_dflash import IS_COUNT_OR_ZERO, OTHER_NAMES, SETTINGS

    check_kinds(config)
    if on_error not in ("raise", "plain"):
        raise ValueError(f"on_error={on_error!r}: use raise or plain.")
    known = sorted({*KEYWORDS, *OTHER_NAMES, "keep_conversations"} - NO_SETTINGS)
    for name in settings:
        if name not in known:
            raise ValueError(f"{name!r} is no setting of a pair: use {', '.join(known)}.")
    largest = config.get("block_size") or math.inf
    block_size = settings.get("block_size", 2)
    if type(block_size) is not int or not 2 <= block_size <= largest:
        remedy = f"use 2 to {largest}, the block that the drafter was trained for"
        raise ValueError(f"block_size={block_size!r} cannot be a setting of this pair: {remedy}.")
    check_values(settings, {**SETTINGS, "keep_conversations": (IS_COUNT_OR_ZERO, "use a number of conversations")})
    check_keywords(settings)


def _check_fit(pair: Path, drafter: Path) -> None:
    """Raises ValueError unless the drafter can draft for the target; both are built without weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dflash.drafter import DFlashConfig, DFlashDraftModel

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(pair, trust_remote_code=False))
        DFlashDraftModel(DFlashConfig.from_pretrained(drafter)).check_target(model)
