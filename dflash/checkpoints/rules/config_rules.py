"""Rules of config.json. Each yields what it finds wrong, and nothing that another rule reports."""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import dflash.dialects as dialects
from dflash.common.messages import counted
from dflash.dialects import ASSISTANT, DEEPSPEC, SPECULATORS, ZLAB
from dflash.model.configuration_dflash import CAUSALITY_FIELDS, LARGEST_BLOCK

from .checkpoint_files import Checkpoint, token_ids
from .engine_readings import READERS, LayerAttention, declared_layer_types, transformers_layer_types, whole_number
from .findings import CONVERT, TRANSFORMERS, Finding, Severity, all_but, engine_names, error, note, shown, warning


DOUBLED = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")

# Fields that change what a drafter computes: the engines that read each, and the effect in engines that do not.
VARIANT_FIELDS: dict[str, tuple[tuple[Any, ...], tuple[str, ...], Severity]] = {
    "attention_sink_bias": ((None, False), ("vllm", "sglang"), "error"),
    "attention_value_scale": ((None, 1, 1.0), ("vllm", "sglang"), "error"),
    "conv_kernel_size": ((None, 0), ("vllm", "sglang"), "error"),
    "selector_rank": ((None, 0), ("vllm", "sglang"), "error"),
    "projector_type": ((None,), ("sglang",), "error"),
    "input_embedding_scale": ((None, 1, 1.0), ("vllm",), "error"),
    "output_multiplier": ((None, 1, 1.0), ("vllm", "sglang"), "warning"),
    "final_logit_softcapping": ((None, 0, 0.0), ("vllm", "sglang"), "warning"),
}

# Above 0 these keep the order of the logits, and so every proposal, unless a head adds to them.
MONOTONE = ("output_multiplier", "final_logit_softcapping")


def field_type(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Fields that are not of the kind that every reader expects."""
    for name, value, kind, remedy in dialects.kind_faults(checkpoint.config):
        yield error(name, value, f"it is not {kind}.", f"{remedy}.")


def doubles(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Fields that are written twice, because engines look in either place, and differ."""
    config, nested = checkpoint.config, checkpoint.nested
    pairs = [(name, config.get(name), f"dflash_config.{name}", nested.get(name)) for name in DOUBLED]
    for name in CAUSALITY_FIELDS:
        pairs.append(("is_causal", config.get("is_causal"), f"dflash_config.{name}", nested.get(name)))
    pairs += dialects.doubles(checkpoint.fields)
    for name, outer, other, inner in pairs:
        if outer is not None and inner is not None and outer != inner:
            why = f"{other} says {shown(inner)}; some engines read one and some the other."
            fix = "write the value that the drafter was trained with in both places."
            yield error(name, outer, why, fix)
    for name in DOUBLED:
        if name in nested and nested[name] is None and config.get(name) is not None:
            why = f"a null here hides the {config[name]} at the top level from engines."
            fix = "write the value, or delete the null."
            yield error(f"dflash_config.{name}", None, why, fix, ("vllm", "sglang"))
    outer, inner = config.get("dtype"), config.get("torch_dtype")
    if outer is not None and inner is not None and outer != inner:
        yield warning("dtype", outer, f"torch_dtype says {inner}.", "write the stored dtype in both.", TRANSFORMERS)


def block_size(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A block of at least an anchor and one draft."""
    size = checkpoint.meant.block_size
    if size is None and checkpoint.either("block_size") is None:
        why = "readers then guess 16, which is wrong for a drafter of another block."
        fix = "write the block size of the training run, anchor included."
        yield error("block_size", None, why, fix)
    elif size is not None and size < 2:
        yield error("block_size", size, "a block is an anchor and at least one draft.", "write 2 or more.")
    elif size is not None and size > LARGEST_BLOCK:
        why = f"no drafter has blocks of more than {LARGEST_BLOCK}, and a forward over this one takes all memory."
        yield error("block_size", size, why, "write the block size of the training run.")


def mask_token(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The id that fills the block: there, inside the vocabulary, and no token that means something else."""
    mask, vocabulary = checkpoint.meant.mask_token_id, checkpoint.number("vocab_size")
    if mask is None:
        if checkpoint.either("mask_token_id") is None:
            why = "vLLM refuses, TensorRT-LLM takes vocab_size and MLX takes 0."
            fix = "write the id of the training run, at the top level and in dflash_config."
            yield error("mask_token_id", None, why, fix)
        return
    if mask < 0 or (vocabulary is not None and mask >= vocabulary):
        why = f"it is outside the vocabulary of {vocabulary}, so it has no embedding."
        fix = "write the id of the training run."
        yield error("mask_token_id", mask, why, fix)
    for name, severity in (("eos_token_id", "error"), ("pad_token_id", "warning"), ("bos_token_id", "warning")):
        if mask in token_ids(checkpoint.config.get(name)):
            yield collision(mask, f"the config's {name}", "error" if severity == "error" else "warning")


def collision(mask: int, other: str, severity: Severity) -> Finding:
    """The mask id is a token that means something else."""
    why = f"it is {other}, which occurs in text: a drafter trained so cannot tell a mask from it."
    fix = "train with an id that never occurs in text, such as an unused row of the embedding."
    return Finding(severity, "mask_token_id", mask, why, fix)


def taps(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Layers whose outputs are read: there, in order, once each, never the last."""
    ids = checkpoint.meant.target_layer_ids
    name = "aux_hidden_state_layer_ids" if checkpoint.form == SPECULATORS else "target_layer_ids"
    if ids is None:
        if checkpoint.either(name) is None:
            yield error(name, None, "readers then guess a spread of layers.", "write the layers of the training run.")
        return
    if any(later <= earlier for earlier, later in pairwise(ids)) or ids[0] < 0:
        why = "engines capture layers from the first to the last, so fc would get its inputs in another order."
        fix = "list each layer once, ascending, from 0, and permute the column groups of fc.weight alike."
        yield error(name, list(ids), why, fix)
    depth = checkpoint.own_number("num_target_layers")
    if depth is not None and max(ids) >= depth - 1:
        yield last_tap(list(ids), depth, name)


def last_tap(ids: list[int], depth: int, name: str) -> Finding:
    """A tap on the target's last layer, or after it."""
    layers = counted(depth, "layer")
    why = f"the target has {layers}, and transformers norms the output of its last one, which engines do not."
    fix = f"tap layers up to {depth - 2} and train again."
    if depth < 2:
        fix = "use a deeper target: this one has no layer that can be tapped."
    return error(name, ids, why, fix)


def target_depth(checkpoint: Checkpoint) -> Iterator[Finding]:
    """`num_target_layers`, which some readers need at the top level."""
    if checkpoint.config.get("num_target_layers") is None and checkpoint.form in (ZLAB, DEEPSPEC):
        why = "MLX needs the target's depth at the top level."
        fix = "write the target's num_hidden_layers."
        yield error("num_target_layers", None, why, fix, ("mlx",))


def windows(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One known layer type for each layer, and a window where one is asked for."""
    config, fields = checkpoint.config, checkpoint.fields
    types, depth = fields.get("layer_types"), len(checkpoint.meant.attention)
    if depth == 0:
        why, fix = "the drafter's depth is not known.", "write the number of its layers."
        yield error("num_hidden_layers", fields.get("num_hidden_layers"), why, fix)
        return
    fix = "write one type for each layer."
    window, swa_window = fields.get("sliding_window"), checkpoint.nested.get("swa_window_size")
    is_switched_on = fields.get("model_type", config.get("model_type")) != "qwen3" or fields.get("use_sliding_window")
    if types is None:
        severity = warning if "sliding_attention" in transformers_layer_types(config) else note
        why = "transformers then derives them from max_window_layers, other readers take full attention."
        yield severity("layer_types", None, why, fix)
    elif declared_layer_types(config) is None:
        yield error("layer_types", types, f"the drafter has {depth} layers.", fix)
    elif unknown := sorted(set(map(str, types)) - {"full_attention", "sliding_attention"}):
        why = "readers know full_attention and sliding_attention."
        yield error("layer_types", unknown, why, "write one of the two.")
    elif "sliding_attention" in types and whole_number(window) is None and whole_number(swa_window) is None:
        why = "layer_types holds sliding_attention."
        yield error("sliding_window", window, why, "write the window of the training run.")
    elif "sliding_attention" in types and not is_switched_on:
        why = "transformers' Qwen3Config drops sliding_window without it; what builds on it refuses, or attends fully."
        yield error("use_sliding_window", fields.get("use_sliding_window"), why, "write true.", all_but("mlx"))


def rope(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One rotary embedding over the whole head, its base written down."""
    fields = checkpoint.fields
    parameters = fields.get("rope_parameters")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    if any(isinstance(value, Mapping) for value in parameters.values()):
        why = "engines fuse the keys of all layers, so they share one rotary embedding."
        fix = "write rope_theta and rope_type at the top of rope_parameters."
        yield error("rope_parameters", sorted(parameters), why, fix)
    elif checkpoint.meant.rope_theta is None:
        why = "without it transformers takes 10000 and vLLM 1000000."
        fix = "write the base of the training run as rope_theta and in rope_parameters."
        yield error("rope_theta", fields.get("rope_theta"), why, fix)
    for name, place in (("partial_rotary_factor", fields), ("rope_parameters.partial_rotary_factor", parameters)):
        factor = place.get("partial_rotary_factor")
        if factor not in (None, 1):
            why = "transformers' Qwen3 rotates the whole head; vLLM, SGLang and TensorRT-LLM rotate this part of it."
            fix = "write 1 if the drafter was trained with transformers; else serve it with vLLM or SGLang."
            yield error(name, factor, why, fix, (*TRANSFORMERS, "mlx"))
            yield warning(name, factor, why, fix, ("vllm", "sglang", "trtllm"))
    for name in ("is_neox_style", "rope_is_neox_style"):
        if fields.get(name) is False:
            why = "only vLLM and SGLang rotate interleaved pairs."
            yield error(name, False, why, "serve it with vLLM or SGLang.", (*TRANSFORMERS, "trtllm", "mlx"))


def dimensions(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The numbers that a network is built from."""
    config, fields = checkpoint.config, checkpoint.fields
    sizes = ["hidden_size", "num_attention_heads", "intermediate_size"]
    for name in sizes if checkpoint.form == ASSISTANT else [*sizes, "vocab_size"]:
        value = checkpoint.number(name)
        if value is None or value < 1:
            why, fix = "no reader can build the network.", "write the number of the training run."
            yield error(name, fields.get(name), why, fix)
    heads, groups = checkpoint.number("num_attention_heads"), checkpoint.number("num_key_value_heads")
    if heads and groups and (groups < 1 or heads % groups):
        why = f"{heads} heads do not share them evenly."
        yield error("num_key_value_heads", groups, why, "write a divisor of it.")
    if checkpoint.number("head_dim") is None:
        why = "MLX reads it and derives nothing, and transformers takes 128."
        yield error("head_dim", fields.get("head_dim"), why, "write the size of a head.", ("mlx",))
    if fields.get("hidden_act", "silu") != "silu":
        why = "SGLang refuses, other engines compute silu."
        yield error("hidden_act", fields["hidden_act"], why, "train with silu.", all_but(*TRANSFORMERS))
    if "tie_word_embeddings" not in config and checkpoint.form != SPECULATORS:
        why = "MLX needs the field, though a drafter has no embedding of its own."
        yield error("tie_word_embeddings", None, why, "write false.", ("mlx",))


def vocabulary(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A drafter proposes from the target's whole vocabulary; a reduced one of its own is read by vLLM alone."""
    reduced, whole = checkpoint.reduced_vocabulary, checkpoint.number("vocab_size")
    if reduced is not None:
        why = f"the drafter's own head has {reduced} of {whole} tokens, which these engines do not map."
        fix = "serve it with vLLM, or load it with this package."
        yield error("draft_vocab_size", reduced, why, fix, all_but("vllm", "remote-code"))


def variant(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Fields that change what the drafter computes, where an engine does not read them."""
    for name, (absent, readers, severity) in VARIANT_FIELDS.items():
        value = checkpoint.either(name)
        if value in absent:
            continue
        others = all_but(*readers, "remote-code")
        why = f"{engine_names(others)} do not compute it."
        is_positive = isinstance(value, (int, float)) and value > 0
        has_head = checkpoint.either("selector_rank") or checkpoint.either("projector_type")
        if name in MONOTONE and is_positive and not has_head:
            severity, why = "note", f"{why[:-1]}, and the most probable token stays the same."
        yield Finding(severity, name, value, why, f"serve it with {engine_names(readers)}.", others)
        if name not in checkpoint.nested and "sglang" in readers:
            why = "SGLang looks in dflash_config alone."
            yield Finding(severity, name, value, why, "write it there too.", ("sglang",))
    plain = checkpoint.either("pure_draft_prefix_len") or 0
    if checkpoint.either("projector_type") == "domino" and plain != 1:
        why = "SGLang leaves the first proposal alone and all others to the head."
        yield error("pure_draft_prefix_len", plain, why, "train the head with 1.", ("sglang",))
    declared = checkpoint.either("sample_from_anchor")
    if declared or (declared is None and checkpoint.form == DEEPSPEC):
        where = "" if declared else "flat fields without dflash_config: "
        why = f"{where}the anchor proposes too, so engines read every proposal one position off and accept few."
        fix = "load it with this package, which knows the form."
        is_domino = checkpoint.either("projector_type") == "domino"
        readers = ("sglang",) if is_domino and checkpoint.nested.get("shift_label") is True else ()
        yield error("sample_from_anchor", declared, why, fix, all_but("remote-code", *readers))


def unused(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Fields that no reader here uses, which may change what the drafter computes."""
    for name, value in dialects.unused_fields(checkpoint.config, checkpoint.form).items():
        why = "this library does not read it, and no engine is known to."
        fix = "delete it if it only describes the training; else use the tool that wrote it."
        yield warning(name, value, why, fix)


def form(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Forms of config that some engines cannot read at all."""
    if checkpoint.form == SPECULATORS:
        why, others = "only vLLM reads the form of speculators.", all_but("vllm", "remote-code")
        yield error("transformer_layer_config", "…", why, f"{CONVERT}.", others)
    if checkpoint.form == ASSISTANT:
        why = "an assistant's own model type is read by transformers, vLLM and SGLang alone."
        yield error("model_type", checkpoint.config.get("model_type"), why, f"{CONVERT}.", ("trtllm", "mlx"))


def names(checkpoint: Checkpoint) -> Iterator[Finding]:
    """The names by which engines find the drafter's class."""
    config = checkpoint.config
    found = config.get("architectures")
    first = str(found[0]) if isinstance(found, list) and found else None
    is_native, is_speculators = (checkpoint.form == form for form in (ASSISTANT, SPECULATORS))
    wanted = (
        "DFlash2DraftModel"
        if (checkpoint.either("conv_kernel_size") or checkpoint.either("selector_rank"))
        else "DFlashDraftModel"
    )
    if not is_native and not is_speculators and first != wanted:
        named = first is not None and (first.startswith("DFlash") or first.endswith("DFlash"))
        why = "engines find the drafter's class by this name."
        fix = f'write ["{wanted}"].'
        yield error("architectures", found, why, fix, ("sglang",) if named else ("vllm", "sglang"))
    if not is_native and not is_speculators and config.get("model_type") != "qwen3":
        why = "engines build a drafter as a Qwen3 decoder."
        fix = 'write "qwen3" with the fields of a Qwen3 config.'
        yield warning("model_type", config.get("model_type"), why, fix, ("vllm", "sglang", "trtllm", "mlx"))
    if "dflash" not in checkpoint.name.lower() and not is_native:
        why = "vLLM recognises a drafter by DFlash in its name."
        fix = 'rename it, or give vLLM "method": "dflash".'
        yield note("folder", checkpoint.name, why, fix, ("vllm",), file=".")


def reading(checkpoint: Checkpoint) -> Iterator[Finding]:
    """What engines would take from the config, where that is not what the checkpoint means."""
    config, auto_map = checkpoint.config, checkpoint.config.get("auto_map")
    readers = READERS
    if checkpoint.form == SPECULATORS:
        readers = {"vllm": READERS["vllm"]}
    elif isinstance(auto_map, Mapping) and auto_map.get("AutoConfig") == "configuration_dflash.DFlashConfig":
        # Native `generate` then runs our class, which finds each field in either place.
        readers = {engine: reader for engine, reader in READERS.items() if engine != "native"}
    taken = {engine: reader(config) for engine, reader in readers.items()}
    for name in ("block_size", "mask_token_id", "target_layer_ids", "rope_theta", "attention"):
        wanted = getattr(checkpoint.meant, name)
        those: dict[Any, list[str]] = {}
        for engine, read in taken.items():
            if wanted is not None and getattr(read, name) != wanted:
                those.setdefault(getattr(read, name), []).append(engine)
        for value, engines in those.items():
            if name == "attention":
                yield _other_attention(checkpoint, tuple(engines), wanted, value)
            else:
                yield _other_value(name, tuple(engines), wanted, value)


def _other_value(name: str, engines: tuple[str, ...], wanted: Any, read: Any) -> Finding:
    fix = "write rope_theta too." if name == "rope_theta" else "write it at the top level and in dflash_config."
    what = "not found" if read is None else f"read as {shown(read)}"
    value = list(wanted) if isinstance(wanted, tuple) else wanted
    return error(name, value, f"{what} by {engine_names(engines)}.", fix, engines)


def _other_attention(checkpoint: Checkpoint, engines: tuple[str, ...], wanted: Any, read: Any) -> Finding:
    index, ours, theirs = next((i, a, b) for i, (a, b) in enumerate(zip(wanted, read, strict=False)) if a != b)
    name = "is_causal" if ours.window == theirs.window else "layer_types"
    whom = engine_names(engines)
    why = f"layer {index} is {_attention(ours)}, and {_attention(theirs)} in {whom}: fewer drafts are accepted."
    fix = "serve it with another engine; only full, bidirectional attention is read alike by all."
    if checkpoint.nested.get("causal_head") is not None and checkpoint.config.get("is_causal") is None:
        name, fix = "dflash_config.causal_head", f"{CONVERT}, which writes is_causal for vLLM and SGLang."
    return warning(name, checkpoint.fields.get(name), why, fix, engines)


def _attention(layer: LayerAttention) -> str:
    window = "and full" if layer.window is None else f"with window {layer.window}"
    return f"{'causal' if layer.is_causal else 'bidirectional'} {window}"
