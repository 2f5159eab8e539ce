"""Many texts by transformers' names: `generate_batch`, and its manager on a drafter and on a pair's model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module
from transformers.utils import logging

from dflash.model.targets_dflash import InexactError

from .manager import BatchManager
from .tickets import BatchOutput


logger = logging.get_logger(__name__)


def draft_batches(model: Any) -> Any:
    """Has `generate_batch` and `init_continuous_batching` of a pair's model draft, and returns the model. No other is changed.

    `AutoModelForCausalLM` does this when it loads a pair's folder. A model that its own class has loaded takes this call.

    Raises:
        ValueError: for a model that was not loaded from a pair's folder with `trust_remote_code=True`.

    Example:
        >>> model = draft_batches(Qwen3ForCausalLM.from_pretrained(pair, trust_remote_code=True))
        >>> outputs = model.generate_batch(prompt_ids, generation_config=config)
    """
    _door_of(model)
    model.init_continuous_batching = partial(init_for_pair, model=model)
    return model


def _door_of(model: Any) -> Any:
    """The code in a pair's folder, which has bound the model's `generate`."""
    function = getattr(model.generate, "func", None)
    door: Any = sys.modules.get(getattr(function, "__module__", ""))
    if not hasattr(door, "drafting_of"):
        name = type(model).__name__
        raise ValueError(f"This {name} is no pair: load the folder of `dflash pair` with trust_remote_code=True.")
    return door


def drafting_of(model: Any) -> Any:
    """A pair's `drafter`, loaded if it was not, and its `settings`; ValueError for a model that is no pair's."""
    return _door_of(model).drafting_of(model)


def init_for_pair(*args: Any, model: Any, **keywords: Any) -> Any:
    """What a pair's `init_continuous_batching` returns: a [`BatchManager`], with the pair's settings or without, or the target's.

    `generate_batch` of transformers takes its manager from there. One warning for each reason says what was left out.
    """
    model.eval()  # as transformers' own does; trainers go back to training afterwards
    drafting = drafting_of(model)
    reason = _why_plain(drafting.drafter, model)
    if reason is None:
        ways = [drafting.settings, {}] if drafting.settings else [{}]
        for settings in ways:
            try:
                return BatchManager(drafting.drafter, model, *args, **{**settings, **keywords})
            except InexactError as error:  # which comes before any forward
                reason = str(error)
            if settings:
                logger.warning_once(f"Drafted without the settings of the pair: {reason}")
    logger.warning_once(f"Generated without drafts: {reason}")
    target_class: Any = type(model)
    return target_class.init_continuous_batching(model, *args, **keywords)


def _why_plain(drafter: Any, target: Any) -> str | None:
    """Why no batch of a pair is drafted; `None`: it may be."""
    if drafter is None:
        return "the pair has no drafter that can be used."
    if drafter.engine is None:
        return "the drafter runs by the code in its folder."
    if not hasattr(GenerationOutput, "is_finished"):  # its `generate_batch` waits forever for a request that failed
        return "continuous batching is drafted with transformers 5."
    if is_deepspeed_zero3_enabled() or is_fsdp_managed_module(target):
        return "processes that share weights (ZeRO-3 or FSDP) accept drafts differently."
    return None


def init_continuous_batching(drafter: Any, *args: Any, target: Any, **keywords: Any) -> BatchManager:
    """A [`BatchManager`] of these arguments, by transformers' name. Nothing runs before its `start`."""
    return BatchManager(drafter, target, *args, **keywords)


def generate_batch(
    drafter: Any,
    inputs: Sequence[Any],
    generation_config: Any = None,
    continuous_batching_config: Any = None,
    progress_bar: bool = False,
    *,
    target: Any,
    max_new_tokens: int | None = None,
    **keywords: Any,
) -> dict[str, BatchOutput]:
    """Writes the continuations of many prompts, a batch at a time whose rows are refilled. transformers' `generate_batch`.

    Each text is the one that `spec_generate` writes to its prompt alone. For sampled texts, request number i has a seed of its
    own, `seed + i`, where `seed` is the config's, or drawn once from `generator`, which is torch's global one by default.

    Args:
        drafter (`DFlashDraftModel`): A drafter trained for `target`.
        inputs (`list[list[int]]`): The token ids of each prompt.
        generation_config (`GenerationConfig`, *optional*): Of all requests. Default: the target's.
        continuous_batching_config (`ContinuousBatchingConfig`, *optional*): Bounds, as [`BatchManager`] reads them.
        progress_bar (`bool`, defaults to `False`): Whether to show how many texts are complete.
        target (`PreTrainedModel`): A decoder-only model, loaded by `AutoModelForCausalLM`.
        max_new_tokens (`int`, *optional*): Default: that of the generation config, or as many as the target has positions for.
        keywords: Keywords of [`generate_blocks`] for all requests.

    Returns:
        `dict[str, BatchOutput]`: By request id, in the order of `inputs`. A request that fails has an `error`; the others are
        not affected.

    Raises:
        ValueError: for settings that no request can have, before any forward.

    Example:
        >>> outputs = drafter.generate_batch(prompts, target=target, max_new_tokens=64)
        >>> texts = [tokenizer.decode(output.generated_tokens) for output in outputs.values()]
    """
    if not len(inputs):
        return {}
    manager = BatchManager(drafter, target, generation_config, continuous_batching_config, **keywords)
    manager._queue_size = 0  # all prompts are here already
    request_ids = manager.add_requests(inputs, max_new_tokens)
    results = {}
    for output in logging.tqdm(manager.run(), total=len(inputs), disable=not progress_bar, unit="text"):
        results[output.request_id] = output
        if output.error is not None:
            logger.warning(f"Request {output.request_id} failed: {output.error}")
    return {request_id: results[request_id] for request_id in request_ids}
