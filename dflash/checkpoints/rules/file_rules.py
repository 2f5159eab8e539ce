"""Rules of the files beside the config: the code that would run, pickles, and what is missing or broken."""

import ast
from collections.abc import Iterator
from filecmp import cmpfiles
from pathlib import Path
from typing import Any

import dflash.model
from dflash.common.json_text import BYTE_ORDER_MARK
from dflash.common.messages import first_line
from dflash.common.version import __version__
from dflash.dialects import ASSISTANT, portable_fields

from .checkpoint_files import INDEX, Checkpoint, read_json
from .engine_readings import mapping
from .findings import ALL, CONFIG, CONVERT, TRANSFORMERS, WEIGHTS, Finding, all_but, error, note, warning


OWN_CODE = Path(dflash.model.__file__).parent  # the files that are copied beside every drafter
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# How code that a folder carries becomes that of this package.
RENEW = "write it again with this package: `dflash convert` for a drafter, `dflash pair` for a pair. The weights stay the same."
CONVERT_WITH_CODE = f"{CONVERT}, its code beside it."
AUTO_MODEL = "auto_map.AutoModel"
SAMPLING_FIELDS = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "max_length", "max_new_tokens")


def files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Pickles, absent or broken weights, and files that belong to a model that generates."""
    has_safetensors = WEIGHTS in checkpoint.files or INDEX in checkpoint.files
    for name in checkpoint.files:
        if name == "mask_embedding.pt":
            yield error(
                "mask_embedding",
                name,
                "only vLLM and SGLang replace the mask's embedding by this file.",
                "serve it with vLLM or SGLang.",
                all_but("vllm", "sglang"),
                name,
            )
        elif name.endswith(PICKLES) and name != "training_args.bin":
            why = "a pickle can run code when it is loaded"
            if has_safetensors:
                yield warning("weights", name, f"{why}.", "save as safetensors and delete it.", ALL, name)
            else:
                why += ", and there are no other weights."
                yield error("weights", name, why, "save as safetensors and delete it.", ALL, name)
        elif name == "generation_config.json":
            yield note(
                "generation_config",
                name,
                "a drafter does not generate by itself, so no engine reads it.",
                "delete it.",
                ALL,
                name,
            )
    if not has_safetensors:
        why = f"there is no {WEIGHTS} and no index of shards, by which loaders find the weights."
        yield error("weights", None, why, "save them as safetensors.", file=WEIGHTS)
    for name, reason in checkpoint.unreadable.items():
        yield error("weights", name, f"{reason}.", "fetch or save the file again.", ALL, name)
    yield from _missing_shards(checkpoint, checkpoint.folder / INDEX)
    for name in SAMPLING_FIELDS:
        if name in checkpoint.config:
            yield note(
                name,
                checkpoint.config[name],
                "transformers reads it as a generation setting, and a drafter does not generate by itself.",
                "delete it.",
                TRANSFORMERS,
            )


def encoding(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A config.json that begins as Windows writes text files."""
    if (checkpoint.folder / CONFIG).read_bytes().startswith(BYTE_ORDER_MARK):
        yield error(
            CONFIG,
            "UTF-8 with BOM",
            "it begins with a byte order mark, which transformers and the engines do not read.",
            "save it as UTF-8 without BOM.",
        )


def _missing_shards(checkpoint: Checkpoint, index: Path) -> Iterator[Finding]:
    """Files that the index names and that are not there."""
    if not index.is_file():
        return
    try:
        shards = mapping(read_json(index, "").get("weight_map")).values()
    except ValueError as refusal:
        yield error("weight_map", None, str(refusal), "fetch or save the file again.", file=index.name)
        return
    for name in sorted(set(map(str, shards)) - set(checkpoint.files)):
        yield error("weight_map", name, "this shard is not there.", "fetch the file.", file=index.name)


def code(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The code that `AutoModel.from_pretrained(…, trust_remote_code=True)` and native `generate` would run."""
    entry = mapping(checkpoint.config.get("auto_map")).get("AutoModel")
    if checkpoint.form == ASSISTANT and entry is None:
        yield error(
            "model_type",
            checkpoint.config.get("model_type"),
            "AutoModel then loads transformers' own class, which has no spec_generate.",
            f"{CONVERT}.",
            ("remote-code",),
        )
    elif not isinstance(entry, str) or "." not in entry:
        yield error(
            AUTO_MODEL, entry, "AutoModel cannot tell which code makes the drafter.", CONVERT_WITH_CODE, TRANSFORMERS
        )
    elif "--" in entry:
        yield note(
            AUTO_MODEL,
            entry,
            "the code is fetched from another repository, which can change.",
            CONVERT_WITH_CODE,
            TRANSFORMERS,
        )
    else:
        yield from _own_code(checkpoint, entry)


def _own_code(checkpoint: Checkpoint, entry: str) -> Iterator[Finding]:
    """The file and the class that `auto_map` names: there, with the forward that is called, and of this version."""
    module, _, name = entry.rpartition(".")
    file = f"{module}.py"
    parameters = forward_parameters(checkpoint.folder / file, name)
    if parameters is None:
        yield error(
            AUTO_MODEL,
            entry,
            f"there is no class {name} in {module}.py beside the weights.",
            "save the drafter again with this package, its code beside it.",
            TRANSFORMERS,
        )
        return
    if not {"noise_embeds", "context_hidden_states"} <= parameters:
        yield error(
            AUTO_MODEL,
            entry,
            f"the forward of {name} does not take noise_embeds and context_hidden_states.",
            CONVERT_WITH_CODE,
            ("native",),
        )
    if module != "modeling_dflash":
        yield warning(
            AUTO_MODEL,
            entry,
            "it is code of its own, which may run on one version of transformers alone.",
            "load it with this package's DFlashDraftModel, or `dflash convert` it.",
            ("remote-code",),
        )
    elif "cache" not in parameters:
        yield error(
            file,
            name,
            f"this code is of an older version: the forward of {name} takes no cache, as transformers 5.24 calls it.",
            RENEW,
            TRANSFORMERS,
            file,
        )
    elif differing := _other_code(checkpoint.folder):
        yield note(
            differing[0],
            len(differing),
            f"this code is not that of this version of the package ({__version__}).",
            RENEW,
            TRANSFORMERS,
            differing[0],
        )


def _other_code(folder: Path) -> list[str]:
    """The code files beside the weights that are not those of this package."""
    names = sorted(path.name for path in folder.glob("*_dflash.py"))
    equal, _, _ = cmpfiles(OWN_CODE, folder, names, shallow=False)
    return [name for name in names if name not in equal]


def forward_parameters(path: Path, name: str) -> set[str] | None:
    """Argument names of the forward of class `name`, from the text of `path`; empty if it has no forward.

    `None` if the text cannot be parsed or has no such class.
    """
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            forwards = [method.args for method in methods if method.name == "forward"]
            return {
                argument.arg for method in forwards for argument in ast.walk(method) if isinstance(argument, ast.arg)
            }
    return None


def library(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What this package itself refuses to load, in its own words."""
    try:
        own_config(checkpoint)
    except Exception as refusal:
        why, fix = f"this package refuses it: {first_line(refusal)}", "correct the field that it names."
        yield error("DFlashConfig", None, why, fix, ("remote-code",))


def own_config(checkpoint: Checkpoint) -> Any:
    """The config as this package reads it, without what transformers logs meanwhile."""
    from transformers.utils import logging

    from dflash.drafter import DFlashConfig

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        return DFlashConfig.from_dict(portable_fields(dict(checkpoint.config), checkpoint.tensors))
    finally:
        logging.set_verbosity(verbosity)
