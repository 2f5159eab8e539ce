"""What answers in an evaluation: a pair in this process, or two servers. Each takes token ids and returns a timed continuation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import DynamicCache
from transformers.modeling_utils import PreTrainedModel

from dflash.common.fingerprints import config_fingerprint, model_fingerprint
from dflash.common.logits import check_logits
from dflash.common.provenance import environment
from dflash.model.cache_dflash import CACHE_NAME
from dflash.model.decoding_dflash import Conversation
from dflash.model.targets_dflash import max_positions

from .memory import PeakMemory
from .methods import OURS, PLAIN, VARIANTS, Method, decoding_methods
from .text_difference import num_shared
from .timed_server import Server, drafting
from .timing import TimedRun


DEFAULT_NEW_TOKENS = 2048

# Makes the methods of a dialogue. The texts of the others are compared with those of the first.
Begin = Callable[[], dict[str, Method]]


@dataclass(frozen=True)
class Backend:
    """The methods that answer, and the facts that their figures depend on."""

    begin: Begin  # makes the methods of a dialogue
    max_new_tokens: int
    environment: dict[str, Any]  # versions, hardware and the like
    decoding: dict[str, Any]  # more for the record
    memory: PeakMemory | None = None  # read around each run; `None` for servers, whose memory is not visible here
    max_prompt_tokens: int | None = None  # the longest that leaves room for the answer, `None` for any


def pair_backend(
    target: PreTrainedModel,
    drafter: PreTrainedModel,
    max_new_tokens: int | None = None,
    methods: Sequence[str] | None = None,
) -> Backend:
    """A pair in this process. `methods` are names of [`METHODS`] besides plain decoding; `None` for all.

    Without `max_new_tokens` an answer has at most 2048 tokens, or half of the target's positions if that is less.
    ValueError if the target's positions leave no room for a prompt, or its logits are NaN or infinite.
    """
    limit = max_positions(target)
    if max_new_tokens is None:
        max_new_tokens = DEFAULT_NEW_TOKENS if limit is None else min(DEFAULT_NEW_TOKENS, limit // 2)
    if limit is not None and max_new_tokens >= limit:
        raise ValueError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt: the target has {limit} positions, use fewer."
        )
    check_logits(target)
    begin = pair_dialogues(target, drafter, max_new_tokens, methods)
    keeping = keeping_methods(target)
    return Backend(
        begin,
        max_new_tokens,
        {**environment(target, drafter), **_fingerprints("target", target), **_fingerprints("drafter", drafter)},
        {"caches_kept_between_turns": [name for name in begin() if name in keeping]},
        PeakMemory(target.device.type == "cuda"),
        None if limit is None else limit - max_new_tokens,
    )


def _fingerprints(role: str, model: PreTrainedModel) -> dict[str, str]:
    """By which a model is known that was trained on in its folder."""
    return {
        f"{role}_weights": model_fingerprint(model),
        f"{role}_config": config_fingerprint(model.config, getattr(model, "generation_config", None)),
    }


def pair_dialogues(
    target: PreTrainedModel, drafter: PreTrainedModel, max_new_tokens: int, names: Sequence[str] | None = None
) -> Begin:
    """The methods of [`decoding_methods`], greedy. Within a dialogue, plain decoding and ours keep their caches.

    If only one of the two kept them, later turns would compare prompts and not decoders.
    """
    methods = decoding_methods(target, drafter, max_new_tokens, names)
    keeping = keeping_methods(target)

    def begin() -> dict[str, Method]:
        of_dialogue = dict(methods)
        for name, method in methods.items():
            if name == PLAIN and name in keeping:
                of_dialogue[name] = PlainDialogue(target, method)
            elif name in keeping:
                of_dialogue[name] = partial(method, conversation=Conversation())
        return of_dialogue

    return begin


def keeping_methods(target: PreTrainedModel) -> tuple[str, ...]:
    """The methods that keep their caches between turns; none with windows or recurrent layers, which cannot crop."""
    layers = getattr(DynamicCache(config=target.config), "layers", [])
    can_crop = all(type(layer).__name__ == "DynamicLayer" for layer in layers)
    return (PLAIN, *VARIANTS) if can_crop else ()


class PlainDialogue:
    """`target.generate` with a cache that is kept between turns, so that each turn computes only its new tokens."""

    def __init__(self, target: PreTrainedModel, method: Method) -> None:
        self._target = target
        self._method = method
        self._cache: Any = None
        self._cached_ids: list[int] = []

    def __call__(self, input_ids: torch.Tensor) -> TimedRun:
        """The continuation of input_ids [1, S], the whole dialogue so far."""
        prompt_ids = input_ids[0].tolist()
        length = num_shared(self._cached_ids, prompt_ids[:-1])
        surplus = len(self._cached_ids) - length
        if length == 0:
            self._cache = DynamicCache(config=self._target.config)
        elif surplus:
            self._cache.crop(-surplus)
        cache = {CACHE_NAME: self._cache}
        run = self._method(input_ids, **cache)
        self._cached_ids = prompt_ids + run.token_ids[:-1]
        return run


def server_backend(
    server: Server,
    baseline: Server,
    tokenizer: Any,
    max_new_tokens: int | None = None,
    model: str | None = None,
    hardware: str | None = None,
    baseline_model: str | None = None,
) -> Backend:
    """A server with DFlash and one without as the two methods.

    One request is under way at a time, because the counters of a server are read around it: nobody else may use the
    servers meanwhile. Engines that do not count by position (SGLang) give verify steps and no acceptance lengths. The
    text of engines that do not send ids is encoded again, which is exact for most texts and not for all.

    `server` serves the target with its drafter under the name `model` (`None`: its only model), `baseline` serves the
    target alone under `baseline_model` (`None`: under that name too). An answer has at most `max_new_tokens` tokens, 2048
    by default. `hardware` is that of the servers, for the record. ValueError if a server does not answer, or serves
    several models and none is named.
    """
    longest = DEFAULT_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    methods: dict[str, Method] = {}
    servers = {}
    engines: dict[str, None] = {}
    for name, asked, model_name in (
        (PLAIN, baseline, baseline_model or model),
        (OURS, server, model),
    ):
        served = asked.only_model(model_name)
        methods[name] = partial(_timed, asked, served, tokenizer, longest, is_plain=name == PLAIN)
        servers[name] = {"url": asked.url, "model": served}
        engine = asked.engine()
        if engine is not None:
            engines[engine] = None
    setup = {"engine": " / ".join(engines) or None, "device": hardware}
    return Backend(lambda: dict(methods), longest, setup, {"servers": servers})


def _timed(
    server: Server,
    model: str,
    tokenizer: Any,
    max_new_tokens: int,
    input_ids: torch.Tensor,
    is_plain: bool = False,
) -> TimedRun:
    """The time of a request; the counters are read outside the clock. Without them a plain step gives one token."""
    before = server.counters()
    prompt_ids = input_ids[0].tolist()
    reply = server.complete(model, prompt_ids, max_new_tokens, tokenizer)
    drafts = drafting(before, server.counters())
    token_ids = list(reply.token_ids)
    if not token_ids:
        token_ids = tokenizer(reply.text, add_special_tokens=False)["input_ids"]
    lengths: list[int] = []
    num_forwards = reply.num_tokens if is_plain or reply.num_tokens == 1 else None
    if drafts is not None:
        lengths = drafts.acceptance_lengths
        num_steps = len(lengths) or round(drafts.steps)
        num_forwards = 1 + num_steps if num_steps else num_forwards
    return TimedRun(
        token_ids,
        reply.seconds,
        reply.seconds_to_first_token,
        num_forwards,
        lengths,
    )
