"""The `generate` of a pair's folder: the target's own text, drafted.

`dflash pair` writes this file into the folder as `custom_generate/generate.py`, and nowhere else. Where the folder is loaded with
`trust_remote_code=True`, transformers binds `generate` to the model, and `AutoModelForCausalLM` loads it through `DraftedModel`, so
that the package can bind continuous batching. Nothing but that model is changed.

The first request loads the drafter. The package does it (`dflash-transformers`, imported as `dflash`) where one is installed that
is not older than the folder; its engine then makes the steps faster. Else the code beside the drafter's weights runs.
"""

import copy
import importlib
import json
import re
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import logging


logger = logging.get_logger(__name__)

SETTINGS = "dflash.json"
COMMIT = re.compile("[0-9a-f]{40}")
# A copy of that in `cache_dflash`: this file stands alone in a pair's folder.
CACHE_NAMES = ("cache", "past_key_values")
# Fields of the loop's output that `model.dflash_stats` holds.
STATISTICS = ("tau", "tau_with_lookup", "tokens_per_step", "acceptance_lengths")
# Keywords of the package's engine, in the loop's own spelling.
ENGINE_KEYWORDS = (
    "adaptive",
    "compile",
    "cuda_graph",
    "draft_tree",
    "draft_window",
    "history",
    "ngram_size",
    "num_looked_up",
)
# Settings that the package's engine knows, and the code of a drafter's folder does not.
ENGINE_SETTINGS = (*ENGINE_KEYWORDS, "keep_conversations", "max_matching_ngram_size", "prompt_lookup_num_tokens")
# Keywords that plain `generate` does not know.
KEYWORDS = (
    *ENGINE_KEYWORDS,
    "as_blocks",
    "block_size",
    "conversation",
    "decoder_class",
    "drafter",
    "max_draft_tokens",
    "stop_token_ids",
    "token_streamer",
    "uniforms_generator",
    "verification",
)


Keywords = dict[str, Any]


class Drafting:
    """What a model drafts with; an attribute of the model. Its copies and pickles are empty: each model loads a drafter."""

    def __init__(self) -> None:
        self.is_loaded = False
        self.drafter: Any = None  # None: the text is plain
        self.settings: Keywords = {}  # defaults of the requests
        self.lock = threading.RLock()

    def __reduce__(self) -> Any:
        return Drafting, ()


class DraftedModel:
    """What `AutoModelForCausalLM` loads a pair's folder by: the target's own class, drafted wherever the package can."""

    @staticmethod
    def register_for_auto_class(auto_class: Any = None) -> None:
        """Does nothing: a saved model is the target alone, without code."""

    @staticmethod
    def from_pretrained(name: Any, *args: Any, config: Any, trust_remote_code: bool = False, **kwargs: Any) -> Any:
        """As that of the target's class. Where the package is installed, its `draft_batches` binds continuous batching."""
        own_config = _config_of_target(config)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            *args,
            config=own_config,
            trust_remote_code=trust_remote_code,
            **kwargs,
        )
        if _why_own_code("0") is None:
            package: Any = importlib.import_module("dflash")
            if hasattr(package, "draft_batches"):  # which earlier ones lack
                has_report = isinstance(loaded, tuple)
                package.draft_batches(loaded[0] if has_report else loaded)
        return loaded

    @staticmethod
    def _from_config(config: Any, **kwargs: Any) -> Any:
        return AutoModelForCausalLM.from_config(_config_of_target(config), **kwargs)


def _config_of_target(config: Any) -> Any:
    """A pair's config as the target's, by which its own class is loaded and saved."""
    config = copy.deepcopy(config)
    del config.auto_map
    config.architectures = config.architectures[1:]
    return config


def generate(
    inputs: Any = None, generation_config: Any = None, *, model: Any, dflash: bool = True, **kwargs: Any
) -> Any:
    """The output of the model's own `generate`, in fewer forwards.

    A request that cannot be drafted exactly is generated plainly, and one warning for each reason says so. After each
    drafted request, `model.dflash_stats` holds its tau, with looked-up tokens and without, tokens per step and acceptance lengths.

    Args:
        inputs: The prompts' token ids, or `input_ids` as a keyword.
        generation_config: That of `generate`.
        model: The target, which transformers gives.
        dflash: `False` asks for plain generation.
        kwargs: Those of `generate` and of the drafter's `spec_generate`, which win over the settings in dflash.json.

    Raises:
        ValueError: for values that no request can have, and for a pair without a drafter that fits, unless dflash.json
            says `"on_error": "plain"`.
    """
    plain = type(model).generate
    if generation_config is not None:
        kwargs["generation_config"] = generation_config
    if inputs is not None:  # `generate` has two names for the prompt
        kwargs["input_ids"] = inputs
    if kwargs.get("custom_generate") is not None:  # the loop asks the class's own generate to prepare the request
        return plain(model, **kwargs)
    drafting = drafting_of(model) if dflash else Drafting()
    drafter = drafting.drafter
    plain_keywords = _for_plain(kwargs)
    if drafter is None:
        return plain(model, **plain_keywords)
    reason = _why_plain(drafter, model, kwargs)
    if reason is None:
        for settings in (drafting.settings, {}):
            try:
                return _drafted(drafter, model, {**settings, **kwargs})
            except drafter.InexactError as error:  # which comes before any forward
                reason = str(error)
            if settings:
                logger.warning_once(f"Drafted without the settings of {SETTINGS}: {reason}")
    logger.warning_once(f"Generated without drafts: {reason}")
    return plain(model, **plain_keywords)


def _for_plain(keywords: Keywords) -> Keywords:
    """A request in the words of plain `generate`."""
    plain = {name: value for name, value in keywords.items() if name not in (*KEYWORDS, "generator")}
    stop_token_ids = keywords.get("stop_token_ids")
    if stop_token_ids is not None:
        stops_nowhere = isinstance(stop_token_ids, (list, tuple)) and not stop_token_ids
        plain["eos_token_id"] = None if stops_nowhere else stop_token_ids
    if plain.get("prompt_lookup_num_tokens") == 0:  # no lookup, which plain `generate` has no number for
        del plain["prompt_lookup_num_tokens"]
        plain.pop("max_matching_ngram_size", None)
    return plain


def _why_plain(drafter: Any, model: Any, keywords: Keywords) -> str | None:
    """Why a request is not given to the loop; `None`: it is."""
    input_ids = keywords.get("input_ids")
    if input_ids is None:
        return "the loop takes the prompt as token ids alone."
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model):
        return "processes that share weights (ZeRO-3 or FSDP) run the same forwards, and accept drafts differently."
    num_texts = len(input_ids) * (_default(model, keywords, "num_return_sequences") or 1)
    for criterion in keywords.get("stopping_criteria") or ():
        kind = type(criterion)
        is_foreign = not kind.__module__.startswith("transformers.")
        if num_texts > 1 and is_foreign and drafter.engine is None:
            return f"{kind.__name__} may look at all {num_texts} texts at once, which needs the package."
    return None


# -- a request in the loop's words


def _drafted(drafter: Any, model: Any, keywords: Keywords) -> Any:
    """The output of `generate`, by the drafter's `spec_generate`."""
    wants_dict = _default(model, keywords, "return_dict_in_generate")
    keywords["return_dict_in_generate"] = True
    if keywords.get("temperature") is not None:
        # A temperature alone has `spec_generate` sample, and `generate` not.
        keywords["do_sample"] = bool(_default(model, keywords, "do_sample"))
    for name in CACHE_NAMES:
        cache = keywords.get(name)
        if cache is not None and not cache.get_seq_length():  # the loop refuses one, and an empty one says nothing
            del keywords[name]
    output = drafter.spec_generate(target=model, **keywords)
    model.dflash_stats = {name: getattr(output, name) for name in STATISTICS}
    if not wants_dict:
        return output.sequences
    fields = {"sequences": output.sequences, "scores": output.scores, "logits": output.logits}
    for name in CACHE_NAMES:
        if name in GenerateDecoderOnlyOutput.__dataclass_fields__:
            fields[name] = DynamicCache()  # an empty one keeps servers going
    return GenerateDecoderOnlyOutput(**fields)


def _default(model: Any, keywords: Keywords, name: str) -> Any:
    """A keyword of the request; where it has none, of its generation config, then of the model's."""
    value = keywords.get(name)
    for config in (keywords.get("generation_config"), model.generation_config):
        if value is None:
            value = getattr(config, name, None)
    return value


# -- the drafter


def drafting_of(model: Any) -> Drafting:
    """What the model drafts with, loaded at the first call. The drafter follows a model that has moved."""
    drafting: Drafting = vars(model).setdefault("_dflash_drafting", Drafting())
    embedding = model.get_input_embeddings()
    hook = getattr(embedding, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)  # of weights that are elsewhere
    if device is None:
        device = next(embedding.parameters()).device
    with drafting.lock, torch.inference_mode(mode=False):
        if not drafting.is_loaded:
            _load(model, drafting)
        drafter = drafting.drafter
        if drafter is not None:
            has_moved = drafter.device != torch.device(device)
            if has_moved or drafter.dtype != model.dtype:
                drafter.to(device=device, dtype=model.dtype)
    return drafting


def _load(model: Any, drafting: Drafting) -> None:
    """Fills `drafting`. What goes wrong is a ValueError, or a warning where the folder asks for plain text."""
    on_error = None
    try:
        folder = _folder_of(model)
        content = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        on_error = content.get("on_error")
        drafter, settings = _drafter_and_settings(folder, content)
        num_kept = settings.pop("keep_conversations", 0)
        if drafter.engine is not None:
            drafter.engine.keep_conversations(drafter, num_kept)
        with suppress(drafter.InexactError):  # each request says so, and is generated plainly
            drafter.check_target(model)
        drafting.drafter, drafting.settings = drafter, settings
    except Exception as error:  # of reading, of importing code, of loading weights
        reason = str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        message = f"The pair {model.config._name_or_path} has no drafter that can be used ({reason})"
        if on_error != "plain":
            remedy = 'run `dflash pair` again, pass dflash=False, or write "on_error": "plain" into dflash.json.'
            raise ValueError(f"{message}: {remedy}") from error
        logger.warning(f"{message}: its text is generated without drafts.")
    drafting.is_loaded = True


def _drafter_and_settings(folder: Path, content: Keywords) -> tuple[Any, Keywords]:
    """The drafter that dflash.json names, and those of its settings that the drafter's code knows."""
    name, revision = _location(folder, content["drafter"], content.get("revision"))
    settings = dict(content.get("settings") or {})
    reason = _why_own_code(content.get("version", "0"))
    if reason is None:
        model_class: Any = importlib.import_module("dflash").DFlashDraftModel
        drafter = model_class.from_pretrained(name, revision=revision, dtype="auto")
        return drafter.eval(), settings
    logger.info(f"{reason}: the folder's own code runs.")
    drafter = AutoModel.from_pretrained(
        name,
        revision=revision,
        code_revision=revision,
        dtype="auto",
        trust_remote_code=True,
    )
    left_out = []
    for setting in ENGINE_SETTINGS:
        if settings.pop(setting, None):
            left_out.append(setting)
    if left_out:
        names = ", ".join(left_out)
        logger.warning(f"Drafted without {names} of {SETTINGS}, which need the package: {reason}.")
    return drafter.eval(), settings


def _location(folder: Path, drafter: str, revision: Any) -> tuple[str, str | None]:
    """The name and the revision of the drafter: a folder in the pair's, or a repository on the Hub at a commit."""
    path = folder / drafter
    if path.is_dir():
        return str(path), None
    if not COMMIT.fullmatch(str(revision)):
        raise ValueError(f"{path} is no folder, and code on the Hub is trusted at a commit alone")
    return drafter, revision


def _why_own_code(version: str) -> str | None:
    """Why the package does not load the drafter of a folder that `version` has written; `None`: it does."""
    try:
        package: Any = importlib.import_module("dflash")
        installed = package.__version__ if hasattr(package, "spec_generate") else None
    except Exception:  # of any type, because another package may have this name
        installed = None
    if installed is None:
        return "dflash-transformers is not installed"
    if _release(installed) < _release(version):
        return f"dflash {installed} is older than the pair's {version}"
    return None


def _release(version: str) -> list[int]:
    """The first three numbers of a version."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]


def _folder_of(model: Any) -> Path:
    """Where the pair's files are; those of the Hub at the commit of this file."""
    name = str(model.config._name_or_path)
    if Path(name).is_dir():
        return Path(name)
    commit = Path(__file__).absolute().parent.parent.name  # transformers keeps code of the Hub under its commit
    if not COMMIT.fullmatch(commit):
        raise ValueError(f"{name} is no folder any more")
    return Path(snapshot_download(name, revision=commit, allow_patterns=[SETTINGS, "drafter/*"]))
