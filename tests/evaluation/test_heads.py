"""The test kit for heads: the library's own pass it, and each fault of a broken one is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from dflash.evaluation import check_head
from dflash.model.heads_dflash import CausalHead, DominoHead, MarkovHead, SelectorHead


class NewHead(CausalHead):
    """A head by the page of the documentation: a bias of the candidate after all tokens before it, their mean."""

    field = "memory_size"

    def __init__(self, drafter: Any, embed: Any) -> None:
        self.top_k = 4
        self.state_size = drafter.config.memory_size
        self.parts = drafter.memory

    @classmethod
    def weights(cls, config: Any) -> dict[str, nn.Module]:
        size = config.memory_size
        parts = {
            "before": nn.Embedding(config.vocab_size, size),
            "after": nn.Embedding(config.vocab_size, size),
            "gate": nn.Linear(config.hidden_size, size),
        }
        return {"memory": nn.ModuleDict(parts)}

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.parts["gate"](hidden_states).sigmoid()

    def rows(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids, self.parts["after"].weight)

    def inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        return functional.embedding(token_ids, self.parts["before"].weight)

    def read(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return torch.lerp(inputs, state, 0.5)

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        return features * state


@pytest.mark.parametrize(
    ("head", "fields"),
    [
        (SelectorHead, {"selector_rank": 4, "selector_top_k": 3}),
        (DominoHead, {"gru_hidden_dim": 6, "emb_dim": 4, "pure_draft_prefix_len": 1}),
        (
            MarkovHead,
            {
                "markov_rank": 4,
                "markov_head_type": "gated",
                "enable_confidence_head": True,
                "confidence_head_with_markov": True,
            },
        ),
        (MarkovHead, {"markov_rank": 4}),
        (NewHead, {"memory_size": 4}),
    ],
    ids=["selector", "Domino", "DSpark, gated", "DSpark", "new"],
)
def test_heads_keep_the_protocol(
    head: type[CausalHead], fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if head is not NewHead:  # laws of the library's own are held to by `test_proposers.py`
        monkeypatch.setattr("dflash.evaluation.heads.NUM_TEXTS", 500)
    report = check_head(head, **fields)
    assert report.faults == []
    assert 0 < report.operations < 30
    assert report.num_weights > 0


class Unnormalised(NewHead):
    """Probabilities that are no distribution: the kit says their sum, and that sampled texts are wrong."""

    def probabilities(self, scores: torch.Tensor, temperature: float) -> torch.Tensor:
        return (scores / temperature).sigmoid()


class Forgetful(NewHead):
    """Keeps the state itself, so that it does not follow from the tokens."""

    kept: Any = None

    def read(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        before = state if type(self).kept is None else type(self).kept.mean(dim=0)
        type(self).kept = torch.lerp(inputs, before.expand_as(inputs), 0.5)
        return type(self).kept


class Mixing(NewHead):
    """Reads another text of the batch."""

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().features(hidden_states) + hidden_states.mean()


class DeafAndSlow(NewHead):
    """Never reads a weight that it has, and computes over the vocabulary at each position, in many operations."""

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return torch.ones(*hidden_states.shape[:-1], self.state_size)

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        everywhere = state @ self.parts["after"].weight.T
        for _ in range(50):
            everywhere = everywhere + 1
        return features * state + 0 * everywhere[:, :1]


class Broken(NewHead):
    """Raises."""

    def inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no table")


@pytest.mark.parametrize(
    ("head", "said"),
    [
        (Unnormalised, ["probabilities: those of a position have a sum of", "sampled texts have another one"]),
        (Forgetful, ["differ when they are computed alone, as trees and training do"]),
        (Mixing, ["scores: those of a text differ alone and in a batch"]),
        (
            DeafAndSlow,
            ["gradients: memory.gate.weight gets none", "operations, more than", "reads the whole vocabulary"],
        ),
        (Broken, ["probabilities cannot be checked: RuntimeError: no table"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_broken_heads_fault_is_named(
    head: type[CausalHead], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if head is not Unnormalised:  # the only fault that sampled texts show
        monkeypatch.setattr("dflash.evaluation.heads.NUM_TEXTS", 100)
    faults = check_head(head, memory_size=4).faults
    for sentence in said:
        assert any(sentence in fault for fault in faults), faults
