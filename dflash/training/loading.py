"""From names to models and data: the target, its tokenizer, the data and the drafter, loaded and checked against each other."""

import copy
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import PreTrainedModel

from dflash.common.fingerprints import model_fingerprint
from dflash.common.manifest import manifest_path, read_manifest
from dflash.common.messages import OWN_CODE, as_sentence, first_line, without_load_report
from dflash.common.remote_code import refuse_own_generate
from dflash.drafter import DFlashDraftModel
from dflash.model.targets_dflash import check_pair, max_positions

from .adaptation_trace import check_trace
from .data import Example, Wanted, mixed, parts_of
from .data_checks import check_mask_token, check_tokenizer, usable
from .device import computes_in_bf16
from .encoding_cache import StoredExamples, cached_examples
from .initialization import BLOCK_SIZE, begin_domino, find_mask_token, new_drafter, window_fields
from .lazy_sequences import chosen, shortened
from .settings import DRAFTER, PARTS, TrainingSettings
from .sources import Source, read_rows


# Where acceptance is measured, a text without a prompt is continued after this many of its tokens.
SHORTEST_PROMPT = 8

# Settings of the drafter that one of `init` can change, and those of parts that it can be given, which begin without effect
# (convolutions, Domino's head) or with little (the selector); the others are of the weights' shape, which only a new drafter takes.
CHANGEABLE = ("block_size", "mask_token_id", "is_causal")
ADDABLE = (
    *("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    *("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len"),
)
PART_NAMES = ("_conv.", "candidate_selector.", "prefix_gru.", "embed_proj.")  # in the names of their weights
NEW_DRAFTER_FIELDS = {one.name for one in fields(TrainingSettings) if one.metadata["topic"] in (DRAFTER, PARTS)}
NEW_DRAFTER_FIELDS -= {"init", "from_target", "freeze_init", "sliding_window", *CHANGEABLE}


@dataclass
class Prepared:
    """The models, the data to train on, and prompts that nothing is trained on."""

    target: PreTrainedModel
    tokenizer: Any
    drafter: DFlashDraftModel
    examples: Sequence[Example]
    held_out: list[list[int]]
    init_weights: str | None = None  # fingerprint of the drafter of `init`, before anything was added to it


def prepare(
    target: str | os.PathLike[str],
    data: Source | Sequence[Source],
    settings: TrainingSettings,
    announce: Callable[[str], None] | None = None,
    ready: Prepared | None = None,
    needs_held_out: bool = False,
) -> Prepared:
    """Loads data and models, the small ones first; `announce` is told in a sentence what is left out.

    With `ready`, of other data, its models are taken.

    Raises:
        ValueError: with `needs_held_out`, for data of which nothing can be held out.
        ValueError: for a target, a drafter or data that cannot be read, or that do not belong together.
    """
    _check_device_map(settings.device_map)
    sources, weights = zip(*parts_of(data), strict=True)
    with _named_target(target):
        if ready is None:
            tokenizer = AutoTokenizer.from_pretrained(target, trust_remote_code=settings.trust_remote_code)
        else:
            tokenizer = ready.tokenizer
    begun = ready.drafter if ready else _drafter_to_begin_with(settings)
    begun_weights = ready.init_weights if ready else None if begun is None else model_fingerprint(begun)
    wanted = _wanted(settings, begun)
    how: dict[str, Any] = {
        "split": settings.split,
        "max_length": settings.max_length,
        "streaming": settings.streaming,
        "announce": announce,
        "enable_thinking": settings.thinking,
    }
    if settings.drop_long and settings.max_length is not None:
        how["max_length"] += 1  # by which a longer one is still known
    bounds = [wanted] * len(sources)
    if settings.eval_data is not None:  # what is measured on is read whole, unless that has no end
        sources, bounds = (*sources, settings.eval_data), [*bounds, wanted if settings.streaming else None]
    parts: list[Sequence[Example]] = [
        cached_examples(source, tokenizer, wanted=bound, **how) for source, bound in zip(sources, bounds, strict=True)
    ]
    model, drafter = (ready.target, ready.drafter) if ready else _load_models(target, tokenizer, settings, begun)
    positions = max_positions(model)
    for place, (source, bound, part) in enumerate(zip(sources, bounds, parts, strict=True)):
        if bound is not None and announce is not None and (taken := sum(map(bound.takes, part))) < bound.samples:
            announce(f"{source} has {taken:,} usable rows, not {bound.samples:,}.")
        try:  # all at once, so that what is refused is named by its row
            if _has_rejected(part):
                rows = islice(read_rows(source, settings.split, settings.streaming), len(part))
                check_trace(rows, target, tokenizer, model)
            if positions is not None:
                part = shortened(part, positions)
            parts[place] = usable(part, drafter, model, announce)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from error
    others: Sequence[Example] = parts.pop() if settings.eval_data is not None else []
    usable_ones, left_out = mixed(parts, weights, settings)
    if left_out and announce is not None:
        announce(f"Left out: {', '.join(f'{count:,} {why}' for why, count in left_out.items())}.")
    if others:
        drawn = random.Random(f"held-out-{settings.seed}").sample(others, min(settings.held_out, len(others)))
        return Prepared(model, tokenizer, drafter, usable_ones, list(map(prompt_of, drawn)), begun_weights)
    found = f"data has {len(usable_ones)} usable sequences, of which a tenth may be held out:"
    if needs_held_out and not min(settings.held_out, len(usable_ones) // 10):
        raise ValueError(
            f"{', '.join(map(str, sources))} has {len(usable_ones)} usable sequences, and none is held out to see what accepts "
            "more: give ten or more, and a held_out above 0."
        )
    if settings.held_out > len(usable_ones):
        raise ValueError(f"held_out={settings.held_out}: the {found} give at most {len(usable_ones) // 10}.")
    examples, held_out = hold_out(usable_ones, settings.held_out, settings.seed)
    if len(held_out) < settings.held_out and announce is not None:
        left = "true acceptance is not measured, and the last weights are kept"
        announce(f"The {found} {f'{len(held_out)} are, not {settings.held_out}' if held_out else left}.")
    return Prepared(model, tokenizer, drafter, examples, held_out, begun_weights)


def _has_rejected(part: Sequence[Example]) -> bool:
    """Whether a source is a trace; the table of one knows it."""
    return part.has_rejected if isinstance(part, StoredExamples) else any(example.rejected for example in part)


def _drafter_to_begin_with(settings: TrainingSettings) -> DFlashDraftModel | None:
    """The drafter of `init`; `None` for a new one."""
    if settings.init is not None:
        with without_load_report():
            return DFlashDraftModel.from_pretrained(settings.init, dtype=torch.float32)
    if settings.lora_rank is not None:
        raise ValueError(
            f"lora_rank={settings.lora_rank} changes a trained drafter: give init (--init), or leave it out."
        )
    if settings.freeze_init:
        raise ValueError("freeze_init keeps the weights of a trained drafter: give init (--init), or leave it out.")
    return None


def _wanted(settings: TrainingSettings, begun: DFlashDraftModel | None) -> Wanted | None:
    """The examples that are taken from each source; `None` for all."""
    if settings.samples is None:
        return None
    block_size = settings.block_size or (BLOCK_SIZE if begun is None else begun.config.block_size)
    longest = settings.max_length if settings.drop_long else None
    return Wanted(settings.samples, max(block_size, settings.min_length or 0), longest)


def _load_models(
    target: str | os.PathLike[str], tokenizer: Any, settings: TrainingSettings, begun: DFlashDraftModel | None
) -> tuple[PreTrainedModel, DFlashDraftModel]:
    """The target, and `begun` or a new drafter, checked against each other."""
    with _named_target(target):
        is_free = settings.target_dtype == "auto" and settings.mixed_precision != "bf16"
        dtype = "float32" if is_free and not computes_in_bf16() else settings.target_dtype
        place: dict[str, Any] = {"dtype": dtype, "device_map": settings.device_map}
        refuse_own_generate(os.fspath(target), settings.trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(target, trust_remote_code=settings.trust_remote_code, **place)
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    check_tokenizer(tokenizer, vocab_size)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        drafter = make_drafter(model, tokenizer, settings, begun)
    check_pair(model, drafter)
    ends = {tokenizer.eos_token_id} - {None}
    check_mask_token(drafter.config.mask_token_id or 0, vocab_size, tokenizer.pad_token_id, ends)
    return model, drafter


def _check_device_map(device_map: str | None) -> None:
    """Raises ValueError for a name that is neither a way of spreading a model nor a device of this machine."""
    if device_map in (None, "auto", "balanced", "balanced_low_0", "sequential"):
        return
    try:
        torch.empty(0, device=device_map)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        said = first_line(error)
        raise ValueError(f"device_map={device_map!r} cannot be used ({said}): give auto, cpu or cuda:0.") from error


@contextmanager
def _named_target(target: str | os.PathLike[str]) -> Iterator[None]:
    """Names the target in what is wrong with it. A name that no Hub id can have is a ValueError of transformers."""
    try:
        yield
    except Exception as error:
        sentence = as_sentence(error)
        if sentence is None:
            raise
        reason = sentence.rstrip(".")
        if reason == OWN_CODE:
            raise ValueError(f"The target {target}: {reason}.") from error
        raise ValueError(
            f"The target {target} cannot be loaded ({reason}): give a local folder, or an id on the Hub that can be reached."
        ) from error


def answers_of(
    data: str | os.PathLike[str], target: PreTrainedModel, announce: Callable[[str], None] | None = None
) -> dict[str, Any] | None:
    """The manifest of `dflash regenerate` beside one source of the data; `None` for data that it did not write.

    `announce` is told if answers are missing, or if another target wrote them.
    """
    path = Path(data).expanduser()
    if not path.is_file() or not manifest_path(path).is_file():
        return None
    manifest = read_manifest(path)
    weights = manifest["settings"].get("weights")
    if announce is not None and not manifest.get("complete"):
        announce(f"{path.name} is unfinished: dflash regenerate --resume writes the rest of it.")
    if announce is not None and weights not in (None, model_fingerprint(target)):
        announce(
            f"{path.name} holds the answers of another target ({manifest.get('target')}, weights {weights}): a drafter "
            "learns more from the answers of its own."
        )
    return {name: value for name, value in manifest.items() if name != "complete"}


def make_drafter(
    target: PreTrainedModel, tokenizer: Any, settings: TrainingSettings, begun: DFlashDraftModel | None = None
) -> DFlashDraftModel:
    """A new drafter of the shape that the settings ask for, or `begun`, the one of `init`, with what they change; in fp32."""
    config = target.config.get_text_config(decoder=True)
    given: dict[str, Any] = {name: value for name, value in vars(settings).items() if value is not None}
    asked = {name: value for name, value in given.items() if name in NEW_DRAFTER_FIELDS}
    if "gru_hidden_dim" in asked:
        asked.setdefault("pure_draft_prefix_len", 1)
    changeable = {name: value for name, value in given.items() if name in CHANGEABLE}
    if begun is None:
        layers = config.num_hidden_layers
        if settings.num_taps is not None and settings.num_taps > layers - 1:
            raise ValueError(
                f"num_taps={settings.num_taps}: the target has {layers} layers, all but the last of which can be read: give at "
                f"most {layers - 1}."
            )
        if settings.mask_token_id is None:
            changeable["mask_token_id"] = find_mask_token(tokenizer, config.vocab_size)
        changeable |= {"sliding_window": settings.sliding_window, "from_target": settings.begins_at_target}
        return new_drafter(target, **asked, **changeable)
    config = copy.deepcopy(begun.config)
    added = {name: asked.pop(name) for name in ADDABLE if name in asked and not getattr(config, name)}
    if asked:
        raise ValueError(
            f"init={settings.init!r} has weights of its own shape: leave out {', '.join(asked)}, or leave out init to begin "
            "with a new drafter."
        )
    weights = begun.state_dict()
    parts = {name for name in weights if any(part in name for part in PART_NAMES)}
    if settings.freeze_init and not added and not parts:
        raise ValueError(
            f"freeze_init: init={settings.init!r} has no part of DFlash2 or Domino and is given none, so nothing would be "
            "trained: give gru_hidden_dim and emb_dim, selector_rank and selector_top_k, or conv_kernel_size and "
            "conv_group_size, or leave it out."
        )
    kept = set(weights) if added else set(weights) - parts
    if added and settings.lora_rank is not None:
        raise ValueError(
            f"lora_rank={settings.lora_rank} changes matrices that are there and would leave what {', '.join(added)} adds "
            "untrained: leave it out."
        )
    if settings.sliding_window is not None:
        changeable |= window_fields(config.num_hidden_layers, settings.sliding_window)
    if not changeable and not added:
        return _frozen(begun, kept) if settings.freeze_init else begun
    if "conv_kernel_size" in added and config.input_embedding_scale is None:
        if hasattr(target.get_input_embeddings(), "embed_scale"):
            raise ValueError(
                f"conv_kernel_size={added['conv_kernel_size']}: convolutions read the target's embeddings as they are, and "
                f"init={settings.init!r} reads them scaled: leave it out."
            )
        config.input_embedding_scale = 1.0
    if "gru_hidden_dim" in added:
        added |= {"projector_type": "domino", "shift_label": config.sample_from_anchor}
    for name, value in (changeable | added).items():
        setattr(config, name, value)
    config.dflash_config = {}  # the older copy of the same fields
    reshaped = DFlashDraftModel(config)
    if "emb_dim" in added:
        begin_domino(reshaped, target)
    reshaped.load_state_dict(reshaped.state_dict() | weights)
    return _frozen(reshaped, kept) if settings.freeze_init else reshaped


def _frozen(drafter: DFlashDraftModel, kept: set[str]) -> DFlashDraftModel:
    """`drafter`, whose weights of the names `kept` are not trained."""
    for name, parameter in drafter.named_parameters():
        parameter.requires_grad_(name not in kept)
    return drafter


def hold_out(examples: Sequence[Example], count: int, seed: int) -> tuple[Sequence[Example], list[list[int]]]:
    """The examples to train on, and the prompts of `count` others, but of no more than a tenth of all."""
    count = min(count, len(examples) // 10)
    drawn = set(random.Random(f"held-out-{seed}").sample(range(len(examples)), count))
    kept = chosen(examples, (index for index in range(len(examples)) if index not in drawn))
    return kept, [prompt_of(examples[index]) for index in sorted(drawn)]


def prompt_of(example: Example) -> list[int]:
    """The prompt of an example: all before its first supervised token, or the beginning of a text."""
    begin = example.mask_array.index(1) if 1 in example.mask_array else len(example)
    return example.input_ids[: max(begin, min(SHORTEST_PROMPT, len(example) // 2), 1)]
