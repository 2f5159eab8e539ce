"""Loads the target, its tokenizer, the data and the drafter by their names, and checks them against each other."""

import copy
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel

from dflash.common.devices import device_fault
from dflash.common.fingerprints import model_fingerprint
from dflash.common.manifest import manifest_path, read_manifest
from dflash.common.messages import OWN_CODE, Announce, as_sentence, say_nothing, without_load_report
from dflash.common.remote_code import refuse_own_generate
from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import check_pair, max_positions, text_config

from .adaptation_trace import check_trace
from .data import Wanted, in_words, mixed, parts_of
from .data_checks import check_mask_token, check_tokenizer, usable
from .device import computes_in_bf16
from .encoding_cache import cached_examples
from .examples import Example, Examples, Prompts, has_rejected, selected
from .initialization import BLOCK_SIZE, find_mask_token, initialize_head, new_drafter, window_fields
from .settings import Facts, TrainingSettings
from .sources import Source, read_rows


# A held-out text without a prompt is continued after this many of its tokens.
SHORTEST_PROMPT = 8

# Settings that change the config of an initial drafter (`init`).
CHANGEABLE = ("block_size", "mask_token_id", "is_causal")
# Config fields that the setting `confidence` turns on.
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
# Settings of the parts that can be added to an initial drafter. At first, an added part has no effect (convolutions,
# Domino's and DSpark's heads) or little effect (the selector).
PART_SETTINGS = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "gru_hidden_dim",
    "emb_dim",
    "pure_draft_prefix_len",
    "markov_rank",
    "markov_head_type",
)
# Settings that decide the shape of a new drafter. An initial drafter has its own.
SHAPE = ("num_hidden_layers", "intermediate_size", "num_taps", "target_layer_ids", *PART_SETTINGS)
# Values of `device_map` that spread a model over devices.
WAYS_TO_SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass
class Prepared:
    """All that a run trains with: the models, the examples to train on, and the held-out prompts."""

    target: PreTrainedModel
    tokenizer: Any
    drafter: DFlashDraftModel
    examples: Examples
    held_out: Prompts
    init_weights: str | None = None  # fingerprint of the drafter of `init`, before anything was added to it


def prepare(
    target: Source, data: Source | Sequence[Source], settings: TrainingSettings, announce: Announce = say_nothing
) -> Prepared:
    """Loads and checks the models and the data of a run; announces how much data is left out, and why.

    Raises:
        ValueError: for a target, a drafter or data that cannot be read, or that do not belong together.
        FileNotFoundError: for data that does not exist.
    """
    parts = parts_of(data)
    sources = [source for source, _ in parts]
    weights = [weight for _, weight in parts]
    ready, source_examples = load(target, sources, settings, announce)
    evaluation = None if settings.eval_data is None else source_examples.pop()
    ready.examples = _mixed(source_examples, weights, settings, announce)
    if evaluation is None:
        take_prompts(ready, settings, announce)
        return ready
    generator = random.Random(f"held-out-{settings.seed}")
    drawn = generator.sample(evaluation, min(settings.held_out, len(evaluation)))
    ready.held_out = [prompt_of(example) for example in drawn]
    return ready


def prepare_domain(
    ready: Prepared, source: str, source_examples: Examples, settings: TrainingSettings, announce: Announce
) -> Prepared:
    """Returns the models of `ready` with `source_examples`, some of them held out. `source` names them in errors.

    Raises:
        ValueError: if no example can be held out.
    """
    examples = _mixed([source_examples], [None], settings, announce)
    if not min(settings.held_out, len(examples) // 10):
        raise ValueError(
            f"{source} has {len(examples)} usable sequences and held_out is {settings.held_out}, so none can be held "
            "out to measure acceptance: give ten sequences or more, and a held_out above 0."
        )
    domain = replace(ready, examples=examples)
    take_prompts(domain, settings, announce)
    return domain


def load(
    target: Source, sources: Sequence[str], settings: TrainingSettings, announce: Announce
) -> tuple[Prepared, list[Examples]]:
    """Returns the models, without data, and the usable examples of each source, those of `eval_data` last.

    The data is read first, so that wrong data is refused before the target is loaded. Errors are those of `prepare`.
    """
    _check_device_map(settings.device_map)
    with _named_target(target):
        tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=settings.trust_remote_code)
        config = AutoConfig.from_pretrained(target, trust_remote_code=settings.trust_remote_code)
    initial_drafter = _initial_drafter(settings)
    init_weights = None if initial_drafter is None else model_fingerprint(initial_drafter)
    positions = max_positions(cast("Any", SimpleNamespace(config=config)))
    wanted = _wanted(settings, initial_drafter)
    bounds = [(source, wanted) for source in sources]
    if settings.eval_data is not None:  # read whole, unless it is streamed
        bounds.append((settings.eval_data, wanted if settings.streaming else None))
    source_examples = [
        _read(
            source,
            tokenizer,
            settings,
            positions,
            bound,
            announce,
        )
        for source, bound in bounds
    ]
    model = _load_target(target, settings)
    vocab_size = text_config(model).vocab_size
    check_tokenizer(tokenizer, vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        drafter = make_drafter(model, tokenizer, settings, initial_drafter)
    check_pair(model, drafter)
    ends = {tokenizer.eos_token_id} - {None}
    check_mask_token(
        drafter.config.mask_token_id or 0,
        vocab_size,
        tokenizer.pad_token_id,
        ends,
    )
    ready = Prepared(model, tokenizer, drafter, [], [], init_weights)
    usable_examples = [
        _usable(
            source,
            examples,
            target,
            ready,
            settings,
            announce,
        )
        for (source, _), examples in zip(bounds, source_examples, strict=True)
    ]
    return ready, usable_examples


def _read(
    source: str,
    tokenizer: Any,
    settings: TrainingSettings,
    positions: int | None,
    wanted: Wanted | None,
    announce: Announce,
) -> Examples:
    """Returns the encoded examples of a source, cut to the length that settings and target allow."""
    longest = settings.max_length
    if settings.drop_above is not None:
        longest = settings.drop_above + 1  # so that a sequence above the limit is recognised
    limits = [limit for limit in (longest, positions) if limit is not None]
    examples = cached_examples(
        source,
        tokenizer,
        split=settings.split,
        max_length=min(limits, default=None),
        streaming=settings.streaming,
        wanted=wanted,
        announce=announce,
        enable_thinking=settings.thinking,
    )
    if wanted is not None:
        count = sum(map(wanted.is_usable, examples))
        if count < wanted.samples:
            announce(f"{source} has only {count:,} usable rows; samples asks for {wanted.samples:,}.")
    return examples


def _usable(
    source: str,
    examples: Examples,
    target: Source,
    ready: Prepared,
    settings: TrainingSettings,
    announce: Announce,
) -> Examples:
    """Returns the usable examples of a source; ValueError that names it for wrong data or another target's trace."""
    try:
        if has_rejected(examples):
            rows = read_rows(source, settings.split, settings.streaming)
            rows = islice(rows, len(examples))
            check_trace(rows, target, ready.tokenizer, ready.target)
        return usable(examples, ready.drafter, ready.target, announce)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def _mixed(
    parts: Sequence[Examples], weights: Sequence[float | None], settings: TrainingSettings, announce: Announce
) -> Examples:
    examples, left_out = mixed(parts, weights, settings)
    if left_out:
        announce(f"Left out: {in_words(left_out)}.")
    return examples


def _initial_drafter(settings: TrainingSettings) -> DFlashDraftModel | None:
    """Loads the initial drafter (`init`) in fp32. Returns `None` without `init`; ValueError if a setting needs it."""
    if settings.init is not None:
        with without_load_report():
            return DFlashDraftModel.from_pretrained(settings.init, dtype=torch.float32)
    remedy = "give init (--init), or leave"
    if settings.lora_rank is not None:
        raise ValueError(f"lora_rank={settings.lora_rank} changes a trained drafter: {remedy} lora_rank out.")
    if settings.freeze_init:
        raise ValueError(f"freeze_init keeps the weights of a trained drafter: {remedy} freeze_init out.")
    return None


def _wanted(settings: TrainingSettings, initial_drafter: DFlashDraftModel | None) -> Wanted | None:
    """Returns how many usable examples to take from each source, and how long they may be; `None` to take all.

    The shortest usable length is that of a block, which the settings or else `initial_drafter` decide.
    """
    if settings.samples is None:
        return None
    block_size = BLOCK_SIZE if initial_drafter is None else initial_drafter.config.block_size
    block_size = settings.block_size or block_size
    shortest = max(block_size, settings.min_length or 0)
    return Wanted(settings.samples, shortest, settings.drop_above)


def _load_target(target: Source, settings: TrainingSettings) -> PreTrainedModel:
    is_default = settings.target_dtype == "auto" and settings.mixed_precision != "bf16"
    dtype = "float32" if is_default and not computes_in_bf16() else settings.target_dtype
    with _named_target(target):
        refuse_own_generate(os.fspath(target), settings.trust_remote_code)
        return AutoModelForCausalLM.from_pretrained(
            target, dtype=dtype, device_map=settings.device_map, trust_remote_code=settings.trust_remote_code
        )


def take_prompts(ready: Prepared, settings: TrainingSettings, announce: Announce) -> None:
    """Moves `settings.held_out` examples, at most a tenth, to the held-out prompts; announces if there are fewer.

    ValueError if there are fewer than `held_out` examples.
    """
    count, wanted = len(ready.examples), settings.held_out
    most = count // 10
    subject = f"data has {count} usable sequences, of which a tenth may be held out:"
    if wanted > count:
        raise ValueError(f"held_out={wanted}: the {subject} give at most {most}.")
    ready.examples, ready.held_out = hold_out(ready.examples, wanted, settings.seed)
    if most >= wanted:
        return
    result = "tau is not measured, and the last weights are kept"
    if most:
        result = f"{most} are held out instead of {wanted}"
    announce(f"The {subject} {result}.")


def _check_device_map(device_map: str | None) -> None:
    """Raises ValueError for a name that is neither a way of spreading a model nor a device of this machine."""
    if device_map is None or device_map in WAYS_TO_SPREAD:
        return
    fault = device_fault(device_map)
    if fault is not None:
        raise ValueError(f"device_map={device_map!r} cannot be used ({fault}): give auto, cpu or cuda:0.")


@contextmanager
def _named_target(target: Source) -> Iterator[None]:
    """Inside the `with`, turns an error that the user can fix into a ValueError that names the target."""
    try:
        yield
    except Exception as error:  # transformers raises different types, even ValueError for a name that is not a Hub id
        sentence = as_sentence(error)
        if sentence is None:
            raise
        reason = sentence.rstrip(".")
        if reason == OWN_CODE:
            raise ValueError(f"The target {target}: {reason}.") from error
        raise ValueError(
            f"The target {target} cannot be loaded ({reason}): give a local folder, or an id on the Hub that can be "
            "reached."
        ) from error


def answers_of(data: Source, target: PreTrainedModel, announce: Announce = say_nothing) -> Facts | None:
    """Returns the manifest that `dflash regenerate` wrote beside the file `data`; `None` if there is no such manifest.

    `announce` is told if answers are missing or were written by another target. ValueError for a damaged manifest.
    """
    path = Path(data).expanduser()
    if not path.is_file() or not manifest_path(path).is_file():
        return None
    manifest = read_manifest(path)
    if not manifest.get("complete"):
        announce(f"{path.name} is unfinished: dflash regenerate --resume writes the rest of it.")
    weights = manifest["settings"].get("weights")
    if weights not in (None, model_fingerprint(target)):
        announce(
            f"{path.name} holds the answers of another target ({manifest.get('target')}, weights {weights}): a drafter "
            "learns more from the answers of its own target."
        )
    manifest.pop("complete", None)
    return manifest


def make_drafter(
    target: PreTrainedModel,
    tokenizer: Any,
    settings: TrainingSettings,
    initial_drafter: DFlashDraftModel | None = None,
) -> DFlashDraftModel:
    """Returns the drafter to train: a new one in fp32, shaped by the settings, or the `initial_drafter` of `init`.

    The settings can change config fields of `initial_drafter`, and add parts to it; with `freeze_init` its weights are
    frozen here. ValueError for settings that do not fit the target or `initial_drafter`.
    """
    shape = settings.chosen(SHAPE)
    changes = settings.chosen(CHANGEABLE)
    if "gru_hidden_dim" in shape:
        shape.setdefault("pure_draft_prefix_len", 1)
    if settings.confidence:  # the confidence head reads the previous token too, as published ones do
        shape |= dict.fromkeys(CONFIDENCE, True)
    if initial_drafter is not None:
        return _changed_drafter(target, settings, initial_drafter, shape, changes)
    config = text_config(target)
    last = config.num_hidden_layers - 1
    if settings.num_taps is not None and settings.num_taps > last:
        raise ValueError(
            f"num_taps={settings.num_taps}: the target has {last + 1} layers, all but the last of which can be read: "
            f"give at most {last}."
        )
    if settings.mask_token_id is None:
        changes["mask_token_id"] = find_mask_token(tokenizer, config.vocab_size)
    return new_drafter(
        target,
        sliding_window=settings.sliding_window,
        from_target=settings.begins_at_target,
        **shape,
        **changes,
    )


def _changed_drafter(
    target: PreTrainedModel,
    settings: TrainingSettings,
    initial_drafter: DFlashDraftModel,
    shape: Facts,
    changes: Facts,
) -> DFlashDraftModel:
    """Returns `initial_drafter` with the config fields `changes`, and with the parts that the fields `shape` describe.

    With `freeze_init`, only the added parts remain trainable or, if none is added, the parts that `initial_drafter`
    has. ValueError if `shape` describes a part that `initial_drafter` has already, or a size that the weights of
    `initial_drafter` determine.
    """
    config = copy.deepcopy(initial_drafter.config)
    missing = [name for name in (*PART_SETTINGS, *CONFIDENCE) if not getattr(config, name)]
    added = {name: shape.pop(name) for name in missing if name in shape}
    if shape:
        raise ValueError(
            f"The weights of init={settings.init!r} fix {_settings_in(shape)}: leave these settings out, or leave init "
            "out to begin with a new drafter."
        )
    weights = initial_drafter.state_dict()
    modules = initial_drafter.head_names()
    parts = {name for name in weights if "_conv." in name or name.split(".")[0] in modules}
    if settings.freeze_init and not added and not parts:
        raise ValueError(
            f"freeze_init: init={settings.init!r} has no part of DFlash2, Domino or DSpark and is given none, so "
            "nothing would be trained: give head, or conv_kernel_size and conv_group_size, or leave freeze_init out."
        )
    if added and settings.lora_rank is not None:
        raise ValueError(
            f"lora_rank={settings.lora_rank} trains existing matrices only, and {_settings_in(added)} would add "
            "untrained ones: leave lora_rank out."
        )
    if "conv_kernel_size" in added and config.input_embedding_scale is None:
        if hasattr(target.get_input_embeddings(), "embed_scale"):
            raise ValueError(
                f"conv_kernel_size={added['conv_kernel_size']} cannot be added to init={settings.init!r}, which reads "
                "scaled embeddings of the target, while convolutions read unscaled ones: leave conv_kernel_size out."
            )
        changes["input_embedding_scale"] = 1.0
    if settings.sliding_window is not None:
        changes |= window_fields(config.num_hidden_layers, settings.sliding_window)
    drafter = initial_drafter
    if changes or added:
        for name, value in (changes | added).items():
            setattr(config, name, value)
        config.complete()
        config.dflash_config = {}  # the older copy of the same fields
        drafter = DFlashDraftModel(config)
        initialize_head(drafter, target)
        drafter.load_state_dict(drafter.state_dict() | weights)
    if settings.freeze_init:
        frozen = weights.keys() if added else weights.keys() - parts
        for name, parameter in drafter.named_parameters():
            parameter.requires_grad_(name not in frozen)
    return drafter


def _settings_in(shape: Facts) -> str:
    """Returns the names of the settings that gave the config fields `shape`, as text."""
    names = ["confidence" if name in CONFIDENCE else name for name in shape]
    return ", ".join(dict.fromkeys(names))


def hold_out(examples: Examples, count: int, seed: int) -> tuple[Examples, list[list[int]]]:
    """Draws `count` examples, at most a tenth of all; returns the other examples, and the prompts of those drawn."""
    total = len(examples)
    most = total // 10
    generator = random.Random(f"held-out-{seed}")
    drawn = generator.sample(range(total), min(count, most))
    drawn.sort()
    kept = sorted(set(range(total)) - set(drawn))
    prompts = [prompt_of(examples[place]) for place in drawn]
    return selected(examples, kept), prompts


def prompt_of(example: Example) -> list[int]:
    """Returns the token ids before the first supervised one, or all ids if none is supervised.

    They are at least the first `SHORTEST_PROMPT` ids of the sequence, or the first half of it if that is fewer.
    """
    length = len(example)
    first = example.mask_array.index(1) if 1 in example.mask_array else length
    shortest = min(SHORTEST_PROMPT, length // 2)
    return example.input_ids[: max(first, shortest, 1)]
