"""The `generate` of a pair's folder: the target's own text, drafted. `make_pair` writes this file there.

transformers binds it as `model.generate` where the folder is loaded with `trust_remote_code=True`. It imports nothing of
the package `dflash`; the drafter brings its own code.
"""

import copy
import functools
import importlib
import inspect
import json
import os
import re
import shutil
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModel, DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput, GenerationMixin
from transformers.generation import utils as generation_utils
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging


logger = logging.get_logger(__name__)

SETTINGS, DRAFTER = "dflash.json", "drafter"
# Names of the cache in `generate` and its outputs. transformers 5.24 renamed it.
CACHE_NAMES = ("cache", "past_key_values")

# Fields of the loop's output that `model.dflash_stats` holds.
STATISTICS = ("tau", "tau_with_lookup", "tokens_per_step", "acceptance_lengths")
# Keywords of the loop that plain `generate` does not know.
OWN = (
    *("adaptive", "as_blocks", "block_size", "compile", "conversation", "draft_tree", "draft_window", "drafter"),
    *("latency_curve", "max_draft_tokens", "ngram_size", "num_looked_up", "stop_token_ids"),
    *("token_streamer", "uniforms_generator", "verification"),
)


class Drafting(NamedTuple):
    """What a model drafts with; without a drafter its text is plain."""

    drafter: Any
    settings: dict[str, Any]  # defaults of the requests


# By model, so that a copy loads its own, a pickle holds none, and the memory returns with the model.
_of_models: weakref.WeakKeyDictionary[Any, Drafting] = weakref.WeakKeyDictionary()
_loading = threading.RLock()
_warned: set[str] = set()


def generate(*args: Any, model: Any, dflash: bool = True, **kwargs: Any) -> Any:
    """The output of the model's own `generate`, in fewer forwards.

    A request that cannot be drafted exactly is generated plainly, and one warning for each reason says so. After each
    drafted request, `model.dflash_stats` holds its tau, with looked-up tokens and without, tokens per step and acceptance lengths.

    Args:
        args: Those of `generate`, the prompts' token ids first.
        model: The target, which transformers gives.
        dflash: `False` asks for plain generation.
        kwargs: Those of `generate` and of the drafter's `spec_generate`, which win over the settings in dflash.json.

    Raises:
        ValueError: for values that no request can have, and for a pair without a drafter that fits, unless dflash.json
            says `"on_error": "plain"`.
    """
    plain = type(model).generate
    kwargs |= zip(list(inspect.signature(plain).parameters)[1:], args, strict=False)
    if kwargs.get("custom_generate") is not None:  # the loop asks the class's own generate to prepare the request
        return plain(model, **kwargs)
    drafter, settings = _drafting(model) if dflash else (None, {})
    if drafter is not None:
        reason = _why_plain(model, kwargs)
        for chosen in ([settings, {}] if settings else [{}]) if reason is None else ():
            try:
                return _drafted(drafter, model, {**chosen, **kwargs})
            except ValueError as error:
                if type(error).__name__ != "InexactError":  # which comes before any forward
                    raise
                reason = str(error)
                if chosen:
                    _warn(f"Drafted without the settings of {SETTINGS}: {reason}")
        _warn(f"Generated without drafts: {reason}")
    return plain(model, **{name: value for name, value in kwargs.items() if name not in OWN})


def _why_plain(model: Any, asked: dict[str, Any]) -> str | None:
    """Why a request is not given to the loop; `None`: it is."""
    prompts = [asked[name] for name in ("inputs", "input_ids") if asked.get(name) is not None]
    if len(prompts) != 1:
        return "the loop takes the prompt as token ids alone."
    foreign = [c for c in asked.get("stopping_criteria") or () if not type(c).__module__.startswith("transformers.")]
    if foreign and len(prompts[0]) > 1:
        return f"{type(foreign[0]).__name__} may look at all {len(prompts[0])} texts at once, and they grow apart."
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        is_sharded = generation_utils.is_deepspeed_zero3_enabled() or generation_utils.is_fsdp_managed_module(model)
        if is_sharded and torch.distributed.get_world_size() > 1:
            return "the processes have to run the same forwards (ZeRO-3 or FSDP), and drafts are accepted differently."
    return None


def _drafted(drafter: Any, model: Any, asked: dict[str, Any]) -> Any:
    """The output of `generate`, by the drafter's `spec_generate`."""
    config: Any = asked.get("generation_config")
    own = model.generation_config
    if asked.get("tokenizer") is not None and getattr(config, "stop_strings", None):
        config = asked["generation_config"] = copy.deepcopy(config)  # `generate` would keep them from the loop
        asked["stop_strings"], config.stop_strings = asked.get("stop_strings") or config.stop_strings, None

    def default(name: str) -> Any:
        return getattr(own, name, None) if getattr(config, name, None) is None else getattr(config, name)

    if asked.get("temperature") is not None and asked.get("do_sample") is None:
        asked["do_sample"] = bool(default("do_sample"))  # a temperature alone has `spec_generate` sample
    if not asked.get("synced_gpus"):
        asked.pop("synced_gpus", None)
    for name in CACHE_NAMES:
        if asked.get(name) is not None and not asked[name].get_seq_length():
            del asked[name]
    wants_dict = asked.pop("return_dict_in_generate", None)
    wants_dict = default("return_dict_in_generate") if wants_dict is None else wants_dict
    ids = asked.pop("inputs", None)
    asked["input_ids"] = asked.get("input_ids") if ids is None else ids
    output = drafter.spec_generate(target=model, return_dict_in_generate=True, **asked)
    model.dflash_stats = {name: getattr(output, name) for name in STATISTICS}
    if not wants_dict:
        return output.sequences
    kept = {"sequences": output.sequences, "scores": output.scores, "logits": output.logits}
    cache_name = next(name for name in CACHE_NAMES if name in GenerateDecoderOnlyOutput.__dataclass_fields__)
    kept[cache_name] = DynamicCache()  # an empty one keeps servers going
    return GenerateDecoderOnlyOutput(**kept)


def _warn(message: str) -> None:
    reason = re.sub(r"\d+", "#", message)
    if reason not in _warned:
        _warned.add(reason)
        logger.warning(message)


def _drafting(model: Any) -> Drafting:
    """The model's drafter, loaded at the first call and moved when the model has moved, and the settings."""
    embedding = model.get_input_embeddings()
    device = getattr(getattr(embedding, "_hf_hook", None), "execution_device", None)  # of weights that are elsewhere
    device = torch.device(next(embedding.parameters()).device if device is None else device)
    computing = (torch.float32, torch.bfloat16, torch.float16)  # a quantised model's other tensors
    dtype = next((tensor.dtype for tensor in model.parameters() if tensor.dtype in computing), torch.float32)
    with _loading, torch.inference_mode(mode=False):
        drafting = _of_models.get(model)
        if drafting is None:
            drafting = _of_models[model] = _load(model)
        drafter = drafting.drafter
        if drafter is not None and (drafter.device, drafter.dtype) != (device, dtype):
            drafter.to(device=device, dtype=dtype)
    return drafting


def _load(model: Any) -> Drafting:
    name, on_error = model.config._name_or_path, None
    try:
        folder = _folder(model)
        said = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        on_error, drafter, revision = said.get("on_error"), said["drafter"], said.get("revision")
        place = {"pretrained_model_name_or_path": str(folder / drafter)}
        if not (folder / drafter).is_dir():
            if not re.fullmatch("[0-9a-f]{40}", str(revision)):
                raise ValueError(f"{folder / drafter} is no folder, and code on the Hub is trusted at a commit alone")
            place = {"pretrained_model_name_or_path": drafter, "revision": revision, "code_revision": revision}
        loaded = AutoModel.from_pretrained(trust_remote_code=True, dtype="auto", **place).eval()
        if not hasattr(loaded, "spec_generate"):
            raise ValueError(f"{drafter} is a {type(loaded).__name__} and no drafter")
        # Beside the class, wherever transformers has put the code.
        code = importlib.import_module(f"{type(loaded).__module__.rpartition('.')[0]}.step_dflash")
        try:
            code.check_pair(model, loaded)
        except ValueError as error:
            if type(error).__name__ != "InexactError":  # which depends on the request
                raise
        return Drafting(loaded, dict(said.get("settings") or {}))
    except Exception as error:  # of reading, of importing code, of loading weights
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        message = f"The pair {name} has no drafter that can be used ({reason})"
        if on_error != "plain":
            remedy = 'run `dflash pair` again, pass dflash=False, or write "on_error": "plain" into dflash.json.'
            raise ValueError(f"{message}: {remedy}") from error
        logger.warning(f"{message}: its text is generated without drafts.")
        return Drafting(None, {})


def _folder(model: Any) -> Path:
    """Where the pair's files are; those of the Hub at the commit of this file."""
    name = str(model.config._name_or_path)
    if os.path.isdir(name):
        return Path(name)
    if "/" not in name or name.startswith((".", os.sep)):
        raise ValueError(f"{name} is no folder any more")
    commit = Path(__file__).absolute().parent.parent.name  # transformers keeps code of the Hub under its commit
    return Path(snapshot_download(name, revision=commit, allow_patterns=[SETTINGS, f"{DRAFTER}/*"]))


def keep_pair(model: Any, folder: str | os.PathLike[str]) -> None:
    """Makes a folder to which a pair's model was saved a pair; a drafter that is gone is warned about."""
    try:
        source, folder = _folder(model), Path(folder)
        is_adapter = not (folder / "config.json").is_file()
        if is_adapter or source.resolve() == folder.resolve():
            return
        (folder / "custom_generate").mkdir(exist_ok=True)
        shutil.copyfile(__file__, folder / "custom_generate" / "generate.py")
        if (source / DRAFTER).is_dir():
            shutil.copytree(source / DRAFTER, folder / DRAFTER, dirs_exist_ok=True)
        shutil.copyfile(source / SETTINGS, folder / SETTINGS)
    except Exception as error:  # hours of training are worth more
        logger.warning(f"{folder} holds the target alone, because its pair cannot be copied ({error}).")


def _keep_of(model: Any) -> Callable[..., None] | None:
    """The `keep_pair` of a pair's model; `None` for another model."""
    return getattr(getattr(vars(model).get("generate"), "func", None), "keep_pair", None)


def _keeping(name: str, is_upload: bool) -> None:
    """Has `PreTrainedModel.<name>` keep pairs, once in a process; `__wrapped__` is what it was.

    transformers calls no code of a folder when its model is saved, and gives this file no model before the first request.
    Other models are saved as before.
    """
    whole: Callable[..., Any] = getattr(PreTrainedModel, name)
    if hasattr(whole, "keeps_pairs"):
        return

    @functools.wraps(whole)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        keep = _keep_of(self)
        asked = inspect.signature(whole).bind(self, *args, **kwargs).arguments if keep else {}
        if keep is None or not asked.get("is_main_process", True):
            return whole(self, *args, **kwargs)
        folder = Path(list(asked.values())[1])
        if is_upload:
            keep(self, folder)
            for path in filter(Path.exists, (folder / name for name in (SETTINGS, DRAFTER, "custom_generate"))):
                os.utime(path)  # only files that are new are uploaded
            return whole(self, *args, **kwargs)
        for path in filter(Path.is_symlink, list(folder.iterdir()) if (folder / SETTINGS).is_file() else ()):
            path.unlink()  # else the target's own weights would be overwritten
        saved = whole(self, *args, **kwargs)
        keep(self, folder)
        return saved

    method.keeps_pairs = True  # type: ignore[attr-defined]
    setattr(PreTrainedModel, name, method)


def _warn_where_nothing_drafts() -> None:
    """Has continuous batching warn once that it does not draft; it begins without a call of this folder's `generate`."""
    whole: Callable[..., Any] = GenerationMixin.init_continuous_batching
    if hasattr(whole, "warns_of_pairs"):
        return

    @functools.wraps(whole)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _keep_of(self) is not None:
            _warn(
                "Generated without drafts: continuous batching (generate_batch) does not draft yet, and generate does."
            )
        return whole(self, *args, **kwargs)

    method.warns_of_pairs = True  # type: ignore[attr-defined]
    GenerationMixin.init_continuous_batching = method  # type: ignore[method-assign]


generate.keep_pair = keep_pair  # type: ignore[attr-defined]
_warn_where_nothing_drafts()
_keeping("save_pretrained", is_upload=False)
_keeping("_upload_modified_files", is_upload=True)
