"""Rules of a drafter together with its target."""

from collections.abc import Iterator

from .checkpoint_files import SPECIAL_TOKENS, Checkpoint, TargetFiles, token_ids
from .config_rules import collision, last_tap
from .engine_readings import whole_number
from .findings import Finding, error, warning


DEFAULT_MASK_TOKEN = "<|MASK|>"
# Sizes that a drafter has of its target: its field, and the target's.
SHARED_SIZES = {
    "hidden_size": "hidden_size",
    "vocab_size": "vocab_size",
    "num_target_layers": "num_hidden_layers",
}


def pair_sizes(checkpoint: Checkpoint, target: TargetFiles) -> Iterator[Finding]:
    """Hidden size, vocabulary and depth are the target's."""
    sizes = {
        "hidden_size": checkpoint.number("target_hidden_size") or checkpoint.number("hidden_size"),
        "vocab_size": checkpoint.number("vocab_size"),
        "num_target_layers": checkpoint.own_number("num_target_layers"),
    }
    for name, own in sizes.items():
        its_name = SHARED_SIZES[name]
        its = whole_number(target.config.get(its_name))
        if None not in (own, its) and own != its:
            yield error(
                name,
                own,
                f"{target.name} has {its_name} {its}.",
                "use this drafter with the target that it was trained for.",
            )


def pair_taps(checkpoint: Checkpoint, target: TargetFiles) -> Iterator[Finding]:
    """The tapped layers are the target's, the last one left out."""
    depth = whole_number(target.config.get("num_hidden_layers"))
    if depth != checkpoint.own_number("num_target_layers"):
        yield from last_tap(checkpoint, depth, "target_layer_ids")


def pair_mask(checkpoint: Checkpoint, target: TargetFiles) -> Iterator[Finding]:
    """The mask id inside the target's tokenizer."""
    mask = checkpoint.meant.mask_token_id
    named = [index for index, token in target.token_of.items() if token == DEFAULT_MASK_TOKEN]
    if named and named[0] != mask:
        yield warning(
            "mask_token_id",
            mask,
            f"{target.name}'s tokenizer holds {DEFAULT_MASK_TOKEN} as {named[0]}.",
            "make sure that it is the id of the training run.",
        )
    if mask is None or any(mask in token_ids(checkpoint.config.get(name)) for name in SPECIAL_TOKENS):
        return
    if mask in target.stop_ids:
        yield collision(mask, f"a stop token of {target.name}", "error")
    elif mask in token_ids(target.config.get("pad_token_id")):
        yield collision(mask, f"the pad token of {target.name}", "warning")
    elif mask in target.ordinary_ids:
        yield collision(mask, f"{target.token_of[mask]!r} in {target.name}'s tokenizer", "warning")


def pair_positions(checkpoint: Checkpoint, target: TargetFiles) -> Iterator[Finding]:
    """As many positions as the target has."""
    name = "max_position_embeddings"
    own = checkpoint.number(name)
    its = whole_number(target.config.get(name))
    if own is not None and its is not None and own < its:
        yield warning(
            name,
            own,
            f"{target.name} reaches {its}, and TensorRT-LLM sizes its rotary table by this.",
            f"write {its}.",
            ("sglang", "trtllm", "mlx"),
        )
