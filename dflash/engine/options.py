"""The keywords of the engine: their values, and which of them cannot be combined with a request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dflash.model.configuration_dflash import Checks, check_values, is_a, is_whole_number
from dflash.model.requests_dflash import Request, check_masks
from dflash.model.targets_dflash import InexactError, text_config

from .history import History


MOST_LOOKED_UP = 63  # tokens, so that a step has at most 64 columns
MOST_NODES = 1024  # of a draft tree: its mask grows with their square
LARGEST_CHOSEN_TREE = 63  # nodes, where the engine chooses; with the anchor 64 columns
MOST_TOKENS = 2**31  # of a window; any number that is larger than a text means the whole text


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_flag_or_auto(value: Any) -> bool:
    return isinstance(value, bool) or value == "auto"


def _is_tree(value: Any) -> bool:
    return isinstance(value, bool) or is_whole_number(value, 0, MOST_NODES)


def _is_window(value: Any) -> bool:
    if not isinstance(value, tuple | list) or len(value) != 2:
        return False
    first, newest = value
    return is_whole_number(first, 0, MOST_TOKENS) and is_whole_number(newest, 1, MOST_TOKENS)


SETTINGS: Checks = {
    "adaptive": (_is_flag, "use True or False"),
    "compile": (_is_flag_or_auto, "use True, False or 'auto'"),
    "cuda_graph": (_is_flag_or_auto, "use True, False or 'auto'"),
    "draft_tree": (_is_tree, f"use a number of nodes up to {MOST_NODES}, or True for as many as pay"),
    "draft_window": (
        _is_window,
        "use two numbers of tokens, (sink, window): the first and the newest that the drafter reads",
    ),
    "history": (is_a(History), "pass a dflash.History"),
    "prompt_lookup_num_tokens": (
        partial(is_whole_number, least=0, most=MOST_LOOKED_UP),
        f"use 1 to {MOST_LOOKED_UP}, or 0 to look nothing up",
    ),
    "max_matching_ngram_size": (partial(is_whole_number, least=1), "use at least 1, or leave it out"),
}


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raises ValueError for values that the engine's keywords cannot have, alone or together."""
    check_values(keywords, SETTINGS)
    if keywords.get("max_matching_ngram_size") is not None and keywords.get("prompt_lookup_num_tokens") == 0:
        raise ValueError("max_matching_ngram_size belongs to a prompt lookup, and prompt_lookup_num_tokens is 0.")
    if keywords.get("cuda_graph") is True and keywords.get("compile") is True:
        raise ValueError("cuda_graph=True and compile=True are two ways to run a step: pass one of them.")


@dataclass(frozen=True)
class Options:
    """What a request asks of the engine, by keyword."""

    adaptive: bool = False  # whether to choose the number of proposals by what steps have cost
    compile: bool | str = "auto"
    cuda_graph: bool | str = "auto"
    draft_tree: int = 0  # most nodes; 0: a chain
    draft_window: tuple[int, int] | None = None  # positions that the drafter reads: the first and the newest
    history: History | None = None
    prompt_lookup_num_tokens: int = 31  # 0: nothing is looked up in the text itself
    max_matching_ngram_size: int = 5

    @classmethod
    def of(cls, request: Request) -> Options:
        """The options of a request. Raises ValueError where they cannot be run exactly with it."""
        keywords = {}
        for name, value in request.engine_keywords.items():
            if value is not None:
                keywords[name] = value
        tree = keywords.get("draft_tree")
        if tree:
            _check_tree(request)
        history = keywords.get("history")
        if history is not None:
            history.check_vocabulary(text_config(request.target).vocab_size)
        if tree is True:
            keywords |= {"draft_tree": LARGEST_CHOSEN_TREE, "adaptive": True}
        config = request.drafter.config
        own_window = getattr(config, "draft_window", None)
        window = keywords.get("draft_window", own_window)
        check_values({"draft_window": window}, SETTINGS)
        layers = range(config.num_hidden_layers)
        is_sliding = any(config.layer_window(layer) for layer in layers)
        if window and is_sliding:
            raise ValueError(f"draft_window={window}: this drafter has sliding layers, leave it out.")
        keywords["draft_window"] = window and tuple(window)
        options = cls(**keywords)
        if request.max_draft_tokens is None:
            return options
        most = min(options.prompt_lookup_num_tokens, request.max_draft_tokens)
        return replace(options, prompt_lookup_num_tokens=most)


def _check_tree(request: Request) -> None:
    """Refuses a draft tree that cannot be verified exactly."""
    if request.verification not in ("auto", "match"):
        given = f"verification={request.verification!r}"
        raise ValueError(f"{given}: a draft_tree is verified by the target's own choices, use 'match'.")
    if request.prompt_inputs:
        names = ", ".join(sorted(request.prompt_inputs))
        raise InexactError(f"draft_tree came with {names}, but it supports only token ids: leave it out.")
    check_masks({"target": request.target}, "pass no draft_tree")
