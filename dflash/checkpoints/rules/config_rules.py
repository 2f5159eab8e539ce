"""Rules of config.json. Each yields what it finds wrong, and nothing that another rule reports."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import dflash.dialects as dialects
from dflash.common.messages import counted
from dflash.dialects import ASSISTANT, DEEPSPEC, SPECULATORS, ZLAB
from dflash.model.configuration_dflash import ARCHITECTURES, CAUSALITY_FIELDS, HEAD_FIELDS, LARGEST_BLOCK, is_number

from .checkpoint_files import SPECIAL_TOKENS, Checkpoint, token_ids
from .engine_readings import (
    READERS,
    LayerAttention,
    declared_layer_types,
    mapping,
    transformers_layer_types,
    whole_number,
)
from .findings import CONVERT, TRANSFORMERS, Finding, Severity, all_but, engine_names, error, note, shown, warning


DOUBLED = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")

SERVERS = ("vllm", "sglang")
# Fields that change what a drafter computes: the values that mean "absent", the engines that read the field, and how bad it is
# that the others do not.
VARIANT_FIELDS: dict[str, tuple[tuple[Any, ...], tuple[str, ...], Severity]] = {
    "attention_sink_bias": ((None, 0), SERVERS, "error"),
    "attention_value_scale": ((None, 1), SERVERS, "error"),
    "conv_kernel_size": ((None, 0), SERVERS, "error"),
    "selector_rank": ((None, 0), SERVERS, "error"),
    "projector_type": ((None,), ("sglang",), "error"),
    "markov_rank": ((None, 0), SERVERS, "error"),
    "input_embedding_scale": ((None, 1), ("vllm",), "error"),
    "output_multiplier": ((None, 1), SERVERS, "warning"),
    "final_logit_softcapping": ((None, 0), SERVERS, "warning"),
}

# Above 0 these keep the order of the logits, and so every proposal, unless a head adds to them.
MONOTONE = ("output_multiplier", "final_logit_softcapping")


def field_type(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Fields that are not of the kind that every reader expects."""
    for name, value, kind, remedy in dialects.kind_faults(checkpoint.config):
        yield error(name, value, f"it is not {kind}.", f"{remedy}.")


def doubles(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Fields that are written twice, because engines look in either place, and differ."""
    config = checkpoint.config
    nested = checkpoint.nested
    places = [(name, name) for name in DOUBLED] + [("is_causal", name) for name in CAUSALITY_FIELDS]
    pairs = [(name, config.get(name), f"dflash_config.{inner}", nested.get(inner)) for name, inner in places]
    pairs += dialects.doubles(checkpoint.fields)
    for name, value, place, other in pairs:
        if None not in (value, other) and value != other:
            yield error(
                name,
                value,
                f"{place} says {shown(other)}; some engines read one and some the other.",
                "write the value that the drafter was trained with in both places.",
            )
    for name in DOUBLED:
        if nested.get(name, ...) is None and config.get(name) is not None:
            yield error(
                f"dflash_config.{name}",
                None,
                f"a null here hides the {config[name]} at the top level from engines.",
                "write the value, or delete the null.",
                SERVERS,
            )
    dtypes = config.get("dtype"), config.get("torch_dtype")
    if None not in dtypes and dtypes[0] != dtypes[1]:
        yield warning(
            "dtype", dtypes[0], f"torch_dtype says {dtypes[1]}.", "write the stored dtype in both.", TRANSFORMERS
        )


def block_size(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A block of at least an anchor and one draft."""
    size = checkpoint.meant.block_size
    if size is None:
        if checkpoint.either("block_size") is None:
            yield error(
                "block_size",
                None,
                "readers then guess 16, which is wrong for a drafter of another block.",
                "write the block size of the training run, anchor included.",
            )
    elif size < 2:
        yield error("block_size", size, "a block is an anchor and at least one draft.", "write 2 or more.")
    elif size > LARGEST_BLOCK:
        yield error(
            "block_size",
            size,
            f"no drafter has blocks of more than {LARGEST_BLOCK}, and a forward over this one takes all memory.",
            "write the block size of the training run.",
        )


def mask_token(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The id that fills the block: there, inside the vocabulary, and no token that means something else."""
    mask = checkpoint.meant.mask_token_id
    vocabulary = checkpoint.number("vocab_size")
    if mask is None:
        if checkpoint.either("mask_token_id") is None:
            yield error(
                "mask_token_id",
                None,
                "vLLM refuses, TensorRT-LLM takes vocab_size and MLX takes 0.",
                "write the id of the training run, at the top level and in dflash_config.",
            )
        return
    if mask < 0 or (vocabulary is not None and mask >= vocabulary):
        yield error(
            "mask_token_id",
            mask,
            f"it is outside the vocabulary of {vocabulary}, so it has no embedding.",
            "write the id of the training run.",
        )
    for name in SPECIAL_TOKENS:
        if mask in token_ids(checkpoint.config.get(name)):
            yield collision(mask, f"the config's {name}", "error" if name == "eos_token_id" else "warning")


def collision(mask: int, other: str, severity: Severity) -> Finding:
    """The mask id is a token that means something else."""
    return Finding(
        severity,
        "mask_token_id",
        mask,
        f"it is {other}, which occurs in text: a drafter trained so cannot tell a mask from it.",
        "train with an id that never occurs in text, such as an unused row of the embedding.",
    )


def taps(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Layers whose outputs are read: there, in order, once each, never the last."""
    ids = checkpoint.meant.target_layer_ids
    name = "aux_hidden_state_layer_ids" if checkpoint.form == SPECULATORS else "target_layer_ids"
    if ids is None:
        if checkpoint.either(name) is None:
            yield error(name, None, "readers then guess a spread of layers.", "write the layers of the training run.")
        return
    if any(later <= earlier for earlier, later in pairwise(ids)) or ids[0] < 0:
        yield error(
            name,
            list(ids),
            "engines capture layers from the first to the last, so fc would get its inputs in another order.",
            "list each layer once, ascending, from 0, and permute the column groups of fc.weight alike.",
        )
    yield from last_tap(checkpoint, checkpoint.own_number("num_target_layers"), name)


def last_tap(checkpoint: Checkpoint, depth: int | None, name: str) -> list[Finding]:
    """A tap on the last layer of a target of `depth` layers, or after it."""
    ids = checkpoint.meant.target_layer_ids
    if depth is None or not ids or max(ids) < depth - 1:
        return []
    layers = counted(depth, "layer")
    why = f"the target has {layers}, and transformers norms the output of its last one, which engines do not."
    fix = f"tap layers up to {depth - 2} and train again."
    if depth < 2:
        fix = "use a deeper target: this one has no layer that can be tapped."
    return [error(name, list(ids), why, fix)]


def target_depth(checkpoint: Checkpoint) -> Iterator[Finding]:
    """`num_target_layers`, which some readers need at the top level."""
    if checkpoint.config.get("num_target_layers") is None and checkpoint.form in (ZLAB, DEEPSPEC):
        yield error(
            "num_target_layers",
            None,
            "MLX needs the target's depth at the top level.",
            "write the target's num_hidden_layers.",
            ("mlx",),
        )


def windows(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One known layer type for each layer, and a window where one is asked for."""
    fields = checkpoint.fields
    types = fields.get("layer_types")
    depth = len(checkpoint.meant.attention)
    fix = "write one type for each layer."
    if depth == 0:
        depth_field = fields.get("num_hidden_layers")
        yield error(
            "num_hidden_layers", depth_field, "the drafter's depth is not known.", "write the number of its layers."
        )
    elif types is None:
        severity = warning if "sliding_attention" in transformers_layer_types(checkpoint.config) else note
        yield severity(
            "layer_types",
            None,
            "transformers then derives them from max_window_layers, other readers take full attention.",
            fix,
        )
    elif declared_layer_types(checkpoint.config) is None:
        yield error("layer_types", types, f"the drafter has {depth} layers.", fix)
    elif unknown := sorted(set(map(str, types)) - {"full_attention", "sliding_attention"}):
        yield error(
            "layer_types", unknown, "readers know full_attention and sliding_attention.", "write one of the two."
        )
    elif "sliding_attention" in types:
        yield from _window(checkpoint)


def _window(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The window of sliding layers: there, and switched on."""
    fields = checkpoint.fields
    window = fields.get("sliding_window")
    swa_window = checkpoint.either("swa_window_size")
    is_qwen3 = fields.get("model_type", checkpoint.config.get("model_type")) == "qwen3"
    if whole_number(window) is None and whole_number(swa_window) is None:
        yield error(
            "sliding_window", window, "layer_types holds sliding_attention.", "write the window of the training run."
        )
    elif is_qwen3 and not fields.get("use_sliding_window"):
        yield error(
            "use_sliding_window",
            fields.get("use_sliding_window"),
            "transformers' Qwen3Config drops sliding_window without it; what builds on it refuses, or attends fully.",
            "write true.",
            all_but("mlx"),
        )


def rope(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One rotary embedding over the whole head, its base written down."""
    fields = checkpoint.fields
    parameters = mapping(fields.get("rope_parameters"))
    if any(isinstance(value, Mapping) for value in parameters.values()):
        yield error(
            "rope_parameters",
            sorted(parameters),
            "engines fuse the keys of all layers, so they share one rotary embedding.",
            "write rope_theta and rope_type at the top of rope_parameters.",
        )
    elif checkpoint.meant.rope_theta is None:
        yield error(
            "rope_theta",
            fields.get("rope_theta"),
            "without it transformers takes 10000 and vLLM 1000000.",
            "write the base of the training run as rope_theta and in rope_parameters.",
        )
    for prefix, place in (("", fields), ("rope_parameters.", parameters)):
        factor = place.get("partial_rotary_factor")
        if factor not in (None, 1):
            name = f"{prefix}partial_rotary_factor"
            why = "transformers' Qwen3 rotates the whole head; vLLM, SGLang and TensorRT-LLM rotate this part of it."
            fix = "write 1 if the drafter was trained with transformers; else serve it with vLLM or SGLang."
            yield error(name, factor, why, fix, (*TRANSFORMERS, "mlx"))
            yield warning(name, factor, why, fix, (*SERVERS, "trtllm"))
    for name in ("is_neox_style", "rope_is_neox_style"):
        if fields.get(name) is False:
            yield error(
                name,
                False,
                "only vLLM and SGLang rotate interleaved pairs.",
                "serve it with vLLM or SGLang.",
                (*TRANSFORMERS, "trtllm", "mlx"),
            )


def dimensions(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The numbers that a network is built from."""
    fields = checkpoint.fields
    for name in ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size"):
        is_needed = name != "vocab_size" or checkpoint.form != ASSISTANT
        if is_needed and (checkpoint.number(name) or 0) < 1:
            yield error(
                name, fields.get(name), "no reader can build the network.", "write the number of the training run."
            )
    heads = checkpoint.number("num_attention_heads")
    groups = checkpoint.number("num_key_value_heads")
    if heads and groups and (groups < 1 or heads % groups):
        yield error(
            "num_key_value_heads", groups, f"{heads} heads do not share them evenly.", "write a divisor of it."
        )
    if checkpoint.number("head_dim") is None:
        yield error(
            "head_dim",
            fields.get("head_dim"),
            "MLX reads it and derives nothing, and transformers takes 128.",
            "write the size of a head.",
            ("mlx",),
        )
    if fields.get("hidden_act", "silu") != "silu":
        yield error(
            "hidden_act",
            fields["hidden_act"],
            "SGLang refuses, other engines compute silu.",
            "train with silu.",
            all_but(*TRANSFORMERS),
        )
    if "tie_word_embeddings" not in checkpoint.config and checkpoint.form != SPECULATORS:
        yield error(
            "tie_word_embeddings",
            None,
            "MLX needs the field, though a drafter has no embedding of its own.",
            "write false.",
            ("mlx",),
        )


def vocabulary(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A drafter proposes from the target's whole vocabulary; only vLLM reads a reduced vocabulary."""
    reduced = checkpoint.reduced_vocabulary
    if reduced is not None:
        whole = checkpoint.number("vocab_size")
        yield error(
            "draft_vocab_size",
            reduced,
            f"the drafter's own head has {reduced} of {whole} tokens, which these engines do not map.",
            "serve it with vLLM, or load it with this package.",
            all_but("vllm", "remote-code"),
        )


def variant(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Fields that change what the drafter computes, where an engine does not read them."""
    projector = checkpoint.either("projector_type")
    has_head = any(checkpoint.either(name) for name in ("projector_type", *HEAD_FIELDS))
    for name, (absent, readers, severity) in VARIANT_FIELDS.items():
        value = checkpoint.either(name)
        if value in absent:
            continue
        others = all_but(*readers, "remote-code")
        why = f"{engine_names(others)} do not compute it"
        if name in MONOTONE and is_number(value) and value > 0 and not has_head:
            severity = "note"
            why += ", and the most probable token stays the same"
        yield Finding(severity, name, value, f"{why}.", f"serve it with {engine_names(readers)}.", others)
        if name not in checkpoint.nested and "sglang" in readers:
            yield Finding(
                severity, name, value, "SGLang looks in dflash_config alone.", "write it there too.", ("sglang",)
            )
    plain = checkpoint.either("pure_draft_prefix_len") or 0
    if projector == "domino" and plain != 1:
        yield error(
            "pure_draft_prefix_len",
            plain,
            "SGLang leaves the first proposal alone and all others to the head.",
            "train the head with 1.",
            ("sglang",),
        )
    yield from _anchor(checkpoint, projector)


def _anchor(checkpoint: Checkpoint, projector: Any) -> Iterator[Finding]:
    """An anchor that proposes a token too."""
    declared = checkpoint.either("sample_from_anchor")
    is_implied = declared is None and checkpoint.form == DEEPSPEC
    if not declared and not is_implied:
        return
    where = "flat fields without dflash_config: " if is_implied else ""
    why = f"{where}the anchor proposes too, so engines read every proposal one position off and accept few."
    fix = "load it with this package, which knows the form."
    readers = ["remote-code"]
    if projector == "domino" and checkpoint.nested.get("shift_label") is True:
        readers.append("sglang")
    if checkpoint.either("markov_rank"):  # with DSpark's head they expect it
        readers += SERVERS
    yield error("sample_from_anchor", declared, why, fix, all_but(*readers))


def unused(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Fields that no reader here uses, which may change what the drafter computes."""
    for name, value in dialects.unused_fields(checkpoint.config, checkpoint.form).items():
        yield warning(
            name,
            value,
            "this library does not read it, and no engine is known to.",
            "delete it if it only describes the training; else use the tool that wrote it.",
        )


def form(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Forms of config that some engines cannot read at all."""
    fix = f"{CONVERT}."
    if checkpoint.form == SPECULATORS:
        yield error(
            "transformer_layer_config",
            "…",
            "only vLLM reads the form of speculators.",
            fix,
            all_but("vllm", "remote-code"),
        )
    if checkpoint.form == ASSISTANT:
        yield error(
            "model_type",
            checkpoint.config.get("model_type"),
            "an assistant's own model type is read by transformers, vLLM and SGLang alone.",
            fix,
            ("trtllm", "mlx"),
        )


def names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The names by which engines find the drafter's class."""
    if checkpoint.form == ASSISTANT:
        return
    config = checkpoint.config
    if checkpoint.form != SPECULATORS:
        named = [name for field, name in ARCHITECTURES.items() if checkpoint.either(field)]
        wanted = named[0] if named else "DFlashDraftModel"
        classes = config.get("architectures")
        first = str(classes[0]) if isinstance(classes, list) and classes else ""
        is_deepspecs = checkpoint.form == DEEPSPEC and first.endswith("DSparkModel")
        if first != wanted and not is_deepspecs:
            is_known_to_vllm = first.startswith("DFlash") or first.endswith("DFlash")
            why = "engines find the drafter's class by this name."
            engines = ("sglang",) if is_known_to_vllm else SERVERS
            yield error("architectures", classes, why, f'write ["{wanted}"].', engines)
        if config.get("model_type") != "qwen3":
            yield warning(
                "model_type",
                config.get("model_type"),
                "engines build a drafter as a Qwen3 decoder.",
                'write "qwen3" with the fields of a Qwen3 config.',
                (*SERVERS, "trtllm", "mlx"),
            )
    if "dflash" not in checkpoint.name.lower():
        yield note(
            "folder",
            checkpoint.name,
            "vLLM recognises a drafter by DFlash in its name.",
            'rename it, or give vLLM "method": "dflash".',
            ("vllm",),
            file=".",
        )


def reading(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What engines would take from the config, where that is not what the checkpoint means."""
    config = checkpoint.config
    readers = dict(READERS)
    if checkpoint.form == SPECULATORS:
        readers = {"vllm": READERS["vllm"]}
    elif mapping(config.get("auto_map")).get("AutoConfig") == "configuration_dflash.DFlashConfig":
        del readers["native"]  # which then runs our class, and that finds each field in either place
    readings = {engine: reader(config) for engine, reader in readers.items()}
    for name in ("block_size", "mask_token_id", "target_layer_ids", "rope_theta", "attention"):
        wanted = getattr(checkpoint.meant, name)
        if wanted is None:
            continue
        engines_of: dict[Any, list[str]] = {}
        for engine, taken in readings.items():
            engines_of.setdefault(getattr(taken, name), []).append(engine)
        for value, engines in engines_of.items():
            if value == wanted:
                continue
            if name == "attention":
                yield _other_attention(checkpoint, tuple(engines), wanted, value)
            else:
                yield _other_value(name, tuple(engines), wanted, value)


def _other_value(name: str, engines: tuple[str, ...], wanted: Any, value: Any) -> Finding:
    fix = "write rope_theta too." if name == "rope_theta" else "write it at the top level and in dflash_config."
    what = "not found" if value is None else f"read as {shown(value)}"
    meant = list(wanted) if isinstance(wanted, tuple) else wanted
    fault = f"{what} by {engine_names(engines)}."
    return error(name, meant, fault, fix, engines)


def _other_attention(checkpoint: Checkpoint, engines: tuple[str, ...], wanted: Any, value: Any) -> Finding:
    pairs = zip(wanted, value, strict=False)
    index, (ours, theirs) = next((index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1])
    name = "is_causal" if ours.window == theirs.window else "layer_types"
    fix = "serve it with another engine; only full, bidirectional attention is read alike by all."
    if checkpoint.nested.get("causal_head") is not None and checkpoint.config.get("is_causal") is None:
        name = "dflash_config.causal_head"
        fix = f"{CONVERT}, which writes is_causal for vLLM and SGLang."
    theirs = f"{_attention(theirs)} in {engine_names(engines)}"
    return warning(
        name,
        checkpoint.fields.get(name),
        f"layer {index} is {_attention(ours)}, and {theirs}: fewer drafts are accepted.",
        fix,
        engines,
    )


def _attention(layer: LayerAttention) -> str:
    direction = "causal" if layer.is_causal else "bidirectional"
    return f"{direction} and full" if layer.window is None else f"{direction} with window {layer.window}"
