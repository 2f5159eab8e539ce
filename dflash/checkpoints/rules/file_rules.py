"""Rules of the files beside the config: the code that would run, pickles, and what is missing or broken."""

import ast
from collections.abc import Iterator, Mapping
from filecmp import cmp
from pathlib import Path
from typing import Any

import dflash.model
from dflash.common.json_text import BYTE_ORDER_MARK
from dflash.common.messages import first_line
from dflash.common.version import __version__
from dflash.dialects import ASSISTANT, portable_fields

from .checkpoint_files import Checkpoint, read_json
from .findings import ALL, CONFIG, CONVERT, TRANSFORMERS, WEIGHTS, Finding, all_but, error, note, warning


OWN_CODE = Path(dflash.model.__file__).parent  # the files that are copied beside every drafter
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
# How code that a folder carries becomes that of this package.
RENEW = "write it again with this package: `dflash convert` for a drafter, `dflash pair` for a pair. The weights stay the same."
SAMPLING_FIELDS = ("do_sample", "temperature", "top_p", "top_k", "repetition_penalty", "max_length", "max_new_tokens")


def files(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Pickles, absent or broken weights, and files that belong to a model that generates."""
    has_safetensors = any(name.endswith(".safetensors") for name in checkpoint.files)
    for name in checkpoint.files:
        if name == "mask_embedding.pt":
            why = "only vLLM and SGLang replace the mask's embedding by this file."
            fix = "serve it with vLLM or SGLang."
            yield error("mask_embedding", name, why, fix, all_but("vllm", "sglang"), name)
        elif name.endswith(PICKLES) and name != "training_args.bin":
            severity, more = (warning, "") if has_safetensors else (error, ", and there are no other weights")
            why = f"a pickle can run code when it is loaded{more}."
            yield severity("weights", name, why, "save as safetensors and delete it.", ALL, name)
        elif name == "generation_config.json":
            why = "a drafter does not generate by itself, so no engine reads it."
            yield note("generation_config", name, why, "delete it.", ALL, name)
    if not has_safetensors:
        yield error("weights", None, "there are no weights.", "save them as safetensors.", file=WEIGHTS)
    for name, reason in checkpoint.unreadable.items():
        yield error("weights", name, f"{reason}.", "fetch or save the file again.", ALL, name)
    index = checkpoint.folder / f"{WEIGHTS}.index.json"
    if index.is_file():
        yield from _missing_shards(checkpoint, index)
    for name in SAMPLING_FIELDS:
        if name in checkpoint.config:
            why = "transformers reads it as a generation setting, and a drafter does not generate by itself."
            yield note(name, checkpoint.config[name], why, "delete it.", TRANSFORMERS)


def encoding(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A config.json that begins as Windows writes text files."""
    with (checkpoint.folder / CONFIG).open("rb") as file:
        is_marked = file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK
    if is_marked:
        why = "it begins with a byte order mark, which transformers and the engines do not read."
        yield error(CONFIG, "UTF-8 with BOM", why, "save it as UTF-8 without BOM.")


def _missing_shards(checkpoint: Checkpoint, index: Path) -> Iterator[Finding]:
    try:
        listed = read_json(index, "").get("weight_map")
    except ValueError as refusal:
        yield error("weight_map", None, str(refusal), "fetch or save the file again.", file=index.name)
        return
    wanted = {str(name) for name in listed.values()} if isinstance(listed, dict) else set()
    for name in sorted(wanted - set(checkpoint.files)):
        yield error("weight_map", name, "this shard is not there.", "fetch the file.", file=index.name)


def code(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The code that `AutoModel.from_pretrained(…, trust_remote_code=True)` and native `generate` would run."""
    config = checkpoint.config
    auto_map = config.get("auto_map")
    entry = auto_map.get("AutoModel") if isinstance(auto_map, Mapping) else None
    if checkpoint.form == ASSISTANT and entry is None:
        why = "AutoModel then loads transformers' own class, which has no spec_generate."
        yield error("model_type", config.get("model_type"), why, f"{CONVERT}.", ("remote-code",))
        return
    if not isinstance(entry, str) or "." not in entry:
        why = "AutoModel cannot tell which code makes the drafter."
        yield error("auto_map.AutoModel", entry, why, f"{CONVERT}, its code beside it.", TRANSFORMERS)
        return
    module, _, name = entry.rpartition("--")[2].rpartition(".")
    if "--" in entry:
        why = "the code is fetched from another repository, which can change."
        yield note("auto_map.AutoModel", entry, why, f"{CONVERT}, its code beside it.", TRANSFORMERS)
        return
    parameters = forward_parameters(checkpoint.folder / f"{module}.py", name)
    if parameters is None:
        why = f"there is no class {name} in {module}.py beside the weights."
        fix = "save the drafter again with this package, its code beside it."
        yield error("auto_map.AutoModel", entry, why, fix, TRANSFORMERS)
        return
    if not {"noise_embeds", "context_hidden_states"} <= parameters:
        why = f"the forward of {name} does not take noise_embeds and context_hidden_states."
        yield error("auto_map.AutoModel", entry, why, f"{CONVERT}, its code beside it.", ("native",))
    if module != "modeling_dflash":
        why = "it is code of its own, which may run on one version of transformers alone."
        fix = "load it with this package's DFlashDraftModel, or `dflash convert` it."
        yield warning("auto_map.AutoModel", entry, why, fix, ("remote-code",))
    elif "cache" not in parameters:
        why = f"this code is of an older version: the forward of {name} takes no cache, as transformers 5.24 calls it."
        yield error(f"{module}.py", name, why, RENEW, TRANSFORMERS, f"{module}.py")
    elif differing := _other_code(checkpoint.folder):
        why = f"this code is not that of this version of the package ({__version__})."
        yield note(differing[0], len(differing), why, RENEW, TRANSFORMERS, differing[0])


def _other_code(folder: Path) -> list[str]:
    """The code files beside the weights that are not those of this package."""
    shipped = [path.name for path in sorted(folder.glob("*_dflash.py"))]
    return [
        name for name in shipped if not (OWN_CODE / name).is_file() or not cmp(OWN_CODE / name, folder / name, False)
    ]


def forward_parameters(path: Path, name: str) -> set[str] | None:
    """Argument names of the forward of class `name`, from the text of `path`; `None` if there is no such class."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None
    found = next((node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name), None)
    if found is None:
        return None
    methods = [node.args for node in found.body if isinstance(node, ast.FunctionDef) and node.name == "forward"]
    return {one.arg for method in methods for one in (*method.posonlyargs, *method.args, *method.kwonlyargs)}


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
