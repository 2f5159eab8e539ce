"""The keywords of the engine: their values, and which of them cannot be combined with a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dflash.model.requests_dflash import Request, check_masks, check_settings, first_of, is_whole
from dflash.model.targets_dflash import InexactError


MOST_LOOKED_UP = 63  # tokens, so that a step has at most 64 columns
DEFAULT_LOOKED_UP = 31
DEFAULT_NGRAM_SIZE = 5
MOST_NODES = 1024  # of a draft tree: its mask grows with their square
LARGEST_CHOSEN_TREE = 63  # nodes, where the engine chooses; with the anchor 64 columns
MOST_TOKENS = 2**31  # of a window; any number that is larger than a text means the whole text


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_compile(value: Any) -> bool:
    return isinstance(value, bool) or value == "auto"


def _is_tree(value: Any) -> bool:
    return isinstance(value, bool) or is_whole(value, 0, MOST_NODES)


def _is_window(value: Any) -> bool:
    is_pair = isinstance(value, tuple | list) and len(value) == 2
    return is_pair and all(is_whole(size, 0, MOST_TOKENS) for size in value) and value[1] > 0


def _is_lookup(value: Any) -> bool:
    return is_whole(value, 0, MOST_LOOKED_UP)


def _is_ngram_size(value: Any) -> bool:
    return is_whole(value, 1)


# For each keyword: whether a value is valid, and the remedy.
SETTINGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "adaptive": (_is_flag, "use True or False"),
    "compile": (_is_compile, "use True, False or 'auto'"),
    "cuda_graph": (_is_flag, "use True or False"),
    "draft_tree": (_is_tree, f"use a number of nodes up to {MOST_NODES}, or True for as many as pay"),
    "draft_window": (
        _is_window,
        "use two numbers of tokens, (sink, window): the first and the newest that the drafter reads",
    ),
    "prompt_lookup_num_tokens": (_is_lookup, f"use 1 to {MOST_LOOKED_UP}, or 0 to look nothing up"),
    "max_matching_ngram_size": (_is_ngram_size, "use at least 1, or leave it out"),
}


def check_keywords(keywords: Mapping[str, Any]) -> None:
    """Raises ValueError for values that the engine's keywords cannot have, alone or together."""
    check_settings(keywords, SETTINGS)
    if keywords.get("max_matching_ngram_size") is not None and keywords.get("prompt_lookup_num_tokens") == 0:
        raise ValueError("max_matching_ngram_size belongs to a prompt lookup, and prompt_lookup_num_tokens is 0.")
    if keywords.get("cuda_graph") and keywords.get("compile") is True:
        raise ValueError("cuda_graph=True and compile=True are two ways to run a step: pass one of them.")


@dataclass(frozen=True)
class Options:
    """What a request asks of the engine."""

    adaptive: bool  # whether to choose the number of proposals by what steps have cost
    compile: bool | str  # True, False or "auto"
    cuda_graph: bool
    num_nodes: int  # of a draft tree; 0: a chain
    draft_window: tuple[int, int] | None  # positions that the drafter reads: the first and the newest
    num_looked_up: int  # tokens of a prompt lookup; 0: none
    ngram_size: int

    @classmethod
    def of(cls, request: Request) -> Options:
        """The options of a request. Raises ValueError where they cannot be run exactly with it."""
        keywords = request.engine_keywords
        tree = keywords.get("draft_tree") or False
        if tree:
            _check_tree(request)
        config = request.drafter.config
        window = first_of(keywords.get("draft_window"), getattr(config, "draft_window", None))
        check_settings({"draft_window": window}, SETTINGS)
        if window and any(config.layer_window(layer) for layer in range(config.num_hidden_layers)):
            raise ValueError(f"draft_window={window}: this drafter has sliding layers, leave it out.")
        return cls(
            adaptive=bool(keywords.get("adaptive")) or tree is True,
            compile=first_of(keywords.get("compile"), "auto"),
            cuda_graph=bool(keywords.get("cuda_graph")),
            num_nodes=LARGEST_CHOSEN_TREE if tree is True else int(tree),
            draft_window=None if window is None else (int(window[0]), int(window[1])),
            num_looked_up=first_of(keywords.get("prompt_lookup_num_tokens"), DEFAULT_LOOKED_UP),
            ngram_size=first_of(keywords.get("max_matching_ngram_size"), DEFAULT_NGRAM_SIZE),
        )


def _check_tree(request: Request) -> None:
    """Refuses a draft tree that cannot be verified exactly."""
    num_sequences = len(request.input_ids)
    if num_sequences > 1:
        raise InexactError(f"draft_tree takes one prompt at a time, not {num_sequences}: pass them one by one.")
    if request.verification not in ("auto", "match"):
        given = f"verification={request.verification!r}"
        raise ValueError(f"{given}: a draft_tree is verified by the target's own choices, use 'match'.")
    if request.prompt_inputs:
        names = ", ".join(sorted(request.prompt_inputs))
        raise InexactError(f"draft_tree came with {names}, but it supports only token ids: leave it out.")
    check_masks({"target": request.target}, "a draft tree", "pass no draft_tree")
