"""The ways of decoding that are compared: plain `generate`, prompt lookup, native DFlash, ours and its variants."""

import copy
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import transformers
from transformers.modeling_utils import PreTrainedModel

from dflash.drafter import DFlashDraftModel

from .timing import TimedRun, timed_blocks, timed_generate


PLAIN = "target.generate"
OURS = "dflash"
RANDOM_DRAFTER = "random drafter adaptive"
OURS_LOOKING_UP, OURS_CHOOSING = "dflash with lookup", "dflash with lookup and trees"
PROMPT_LOOKUP = "prompt lookup"
NATIVE = "native dflash"

# Takes a prompt's ids [1, S] and gives its continuation under a clock. `on_step`, if given, is called after each step;
# other keywords are caches of earlier turns.
Method = Callable[..., TimedRun]

# The drafter alone, whose acceptance is that of the paper and of other engines.
ALONE = {"prompt_lookup_num_tokens": 0}
# The loop's options for each of its variants.
EAGER = {**ALONE, "compile": False, "cuda_graph": False, "adaptive": False, "draft_tree": False}
VARIANTS: dict[str, dict[str, Any]] = {
    OURS: ALONE,
    OURS_LOOKING_UP: {},
    OURS_CHOOSING: {"draft_tree": True},
    "dflash eager": EAGER,
    "dflash compiled": {**EAGER, "compile": True},
    "dflash adaptive": {**EAGER, "adaptive": True},
    "dflash tree": {**EAGER, "adaptive": True, "draft_tree": True},
    "dflash drafting nothing": {**ALONE, "max_draft_tokens": 0},
    RANDOM_DRAFTER: {**EAGER, "adaptive": True},
}
DRAFTS_AS_OURS = ("dflash eager", "dflash compiled")

# All names, in the order of a result's rows. Native DFlash exists from transformers 5.15 on.
HAS_NATIVE = hasattr(transformers.GenerationConfig(), "speculation_type")
METHODS = (PLAIN, PROMPT_LOOKUP, *([NATIVE] if HAS_NATIVE else []), *VARIANTS)

# All are given, because the target's own sampling defaults cause a warning otherwise.
GREEDY: dict[str, Any] = {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}

# 10 is what transformers' documentation uses; the 15 of a DFlash block would be too many for prompt lookup.
PROMPT_LOOKUP_TOKENS = 10


def check_methods(names: Iterable[str]) -> None:
    """Raises ValueError, with the names of [`METHODS`], for a name that is not one of them. Called before models are loaded."""
    unknown = [name for name in names if name not in METHODS]
    if unknown:
        raise ValueError(f"There is no method {', '.join(map(repr, unknown))}: choose from {', '.join(METHODS)}.")


def decoding_methods(
    target: PreTrainedModel, drafter: PreTrainedModel, max_new_tokens: int, names: Sequence[str] | None = None
) -> dict[str, Method]:
    """Greedy decoding by name: plain `target.generate` (always first), and the others of `names`, `None` for all.

    Two of them split a speed-up into its causes: the loop without any proposal, and an untrained drafter of the same
    shape. ValueError for a name that does not exist, with those that do.
    """
    check_methods(names or ())
    wanted = METHODS if names is None else (PLAIN, *names)
    chosen = [name for name in METHODS if name in wanted]

    plain = partial(timed_generate, target, max_new_tokens=max_new_tokens, **GREEDY)

    def method(name: str) -> Method:
        if name == PLAIN:
            return plain
        if name == PROMPT_LOOKUP:
            return partial(plain, prompt_lookup_num_tokens=PROMPT_LOOKUP_TOKENS)
        if name == NATIVE:
            assistant = _in_dtype_of(target, drafter)
            return partial(plain, assistant_model=assistant, speculation_type="dflash")
        return partial(
            timed_blocks,
            untrained(drafter) if name == RANDOM_DRAFTER else drafter,
            target,
            max_new_tokens=max_new_tokens,
            temperature=0.0,
            **VARIANTS[name],
        )

    return {name: method(name) for name in chosen}


def _in_dtype_of(target: PreTrainedModel, drafter: PreTrainedModel) -> PreTrainedModel:
    """The drafter for native decoding, which gives its hidden states to the target's head as they are."""
    if drafter.dtype == target.dtype:
        return drafter
    model: Any = copy.deepcopy(drafter)
    return model.to(target.dtype)


def untrained(drafter: PreTrainedModel) -> PreTrainedModel:
    """A drafter of the same shape, dtype and device with random weights; the global generator is left as it was."""
    config: Any = copy.deepcopy(drafter.config)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = DFlashDraftModel(config)
    model.to(drafter.device, drafter.dtype)
    return model.eval()
