"""Heads that choose a block's tokens one after another: DFlash2's selector and Domino's recurrent head.

A drafter without one proposes the most probable token of each position. Dimensions are those of `modeling_dflash`; K is here
the number of candidates of a position, E the size of a candidate's row, H that of a state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .configuration_dflash import DFlashConfig
from .sampling_dflash import pick


DOMINO_TOP_K = 16  # candidates of Domino's head, as many as DFlash2's; the published form scores the whole vocabulary


class PrefixGRU(nn.Module):
    """Domino's GRU, a step at a time. Its weights have the names of torch's module, which runs over whole sequences alone.

    Written out, because some devices have no `torch.gru_cell`.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        num_gates = 3 * hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.zeros(num_gates, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(num_gates, hidden_size))

    def forward(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The next state [..., H], of inputs [..., D]."""
        of_inputs = functional.linear(inputs, self.weight_ih_l0)
        of_state = functional.linear(state, self.weight_hh_l0)
        reset, update, new = of_inputs.chunk(3, dim=-1)
        reset_before, update_before, new_before = of_state.chunk(3, dim=-1)
        reset = reset + reset_before
        update = update + update_before
        new = new + reset.sigmoid() * new_before
        new = new.tanh()
        change = update.sigmoid() * (state - new)
        return new + change


@dataclass(frozen=True)
class Path:
    """The tokens that a head chose, and what it chose them from."""

    token_ids: torch.Tensor  # [B, R]
    candidate_ids: torch.Tensor  # [B, R, K], the most probable tokens of each position
    scores: torch.Tensor  # [B, R, K] of the candidates, after the tokens chosen before
    states: torch.Tensor  # [B, R, H], before the previous token was read


class CausalHead:
    """Chooses a path from the anchor through the most probable tokens of each position, token by token.

    A candidate's score is its logit plus the dot product of its row and a vector of the position and the tokens before it.
    """

    rows: torch.Tensor  # [V, E]
    top_k: int  # candidates of a position
    state_size: int
    num_plain = 0  # positions at the beginning whose scores are their logits

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What `vector` needs of hidden states [..., D], for all positions at once."""
        raise NotImplementedError

    def read(self, token_ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The state [..., H] after tokens [...] that follow a state."""
        raise NotImplementedError

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The vector [..., E] of a position with these features after the tokens in the state."""
        raise NotImplementedError

    def scores(self, position: Any, features: Any, logits: Any, candidate_ids: Any, state: Any) -> torch.Tensor:
        """Scores [..., K] of candidates at a position of the block, with logits [..., K], after the token in the state."""
        vector = self.vector(features, state)
        vector = vector * (position >= self.num_plain)
        rows = self.rows[candidate_ids]  # [..., K, E]
        products = rows * vector.unsqueeze(-2)
        return logits + products.sum(dim=-1)

    def choose_path(
        self,
        hidden_states: torch.Tensor,  # [B, R, D]
        logits: torch.Tensor,  # [B, R, V]
        anchors: torch.Tensor,  # [B, 1]
        drawn: tuple[float, torch.Tensor] | None = None,
    ) -> Path:
        """The path of the best candidates, or, with `drawn`, of those drawn at a temperature by uniforms [B, R]."""
        device = hidden_states.device
        top = logits.topk(self.top_k, dim=-1)
        top_logits = top.values.to(device)
        top_ids = top.indices.to(device)
        features = self.features(hidden_states)
        previous = anchors[:, 0].to(device)
        state = hidden_states.new_zeros(len(previous), self.state_size)
        token_ids = []
        scores = []
        states = []
        for i, candidates in enumerate(top_ids.unbind(dim=1)):  # [B, K]
            states.append(state)
            state = self.read(previous, state)
            of_candidates = self.scores(
                i,
                features[:, i],
                top_logits[:, i],
                candidates,
                state,
            )
            scores.append(of_candidates)
            if drawn is None:
                choice = of_candidates.argmax(dim=-1)
            else:
                temperature, uniforms = drawn
                weights = (of_candidates.float() / temperature).softmax(dim=-1)
                choice = pick(weights, uniforms[:, i])
            previous = candidates.gather(1, choice[:, None]).squeeze(1)
            token_ids.append(previous)
        return Path(
            torch.stack(token_ids, dim=1),
            top_ids,
            torch.stack(scores, dim=1),
            torch.stack(states, dim=1),
        )


class CandidateSelector(CausalHead, nn.Module):
    """DFlash2's: predecessor[previous token] * projected(hidden state) is scored with successor[candidate]."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.top_k = int(config.selector_top_k or 0)
        self.state_size = int(config.selector_rank or 0)
        shape = (config.vocab_size, self.state_size)
        self.hidden_projection = nn.Linear(
            config.hidden_size,
            self.state_size,
            bias=False,
        )
        self.predecessor_codebook = nn.Parameter(torch.zeros(shape))
        self.successor_codebook = nn.Parameter(torch.zeros(shape))

    @property
    def rows(self) -> torch.Tensor:  # type: ignore[override]
        """The successors."""
        return self.successor_codebook

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The projected hidden states [..., E]."""
        return self.hidden_projection(hidden_states)

    def read(self, token_ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The predecessor's row [..., E] alone."""
        return self.predecessor_codebook[token_ids]

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The product of both."""
        return features * state


class DominoHead(CausalHead):
    """Domino's: a GRU reads the target's embeddings of the tokens chosen before."""

    def __init__(
        self, gru: PrefixGRU, projection: Any, embed: Callable[[torch.Tensor], torch.Tensor] | None, num_plain: int
    ) -> None:
        mix, _, table = projection
        self.rows = table.weight  # not always a parameter: training in low rank computes it
        self.top_k = min(DOMINO_TOP_K, len(self.rows))
        self.state_size = gru.weight_hh_l0.shape[1]
        self.num_plain = num_plain
        self._gru = gru
        self._embed: Any = embed
        self._of_hidden, self._of_state = mix.weight.tensor_split([-self.state_size], dim=1)

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The part of the projection [..., E] that does not depend on chosen tokens."""
        return functional.linear(hidden_states, self._of_hidden)

    def read(self, token_ids: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The GRU's next state [..., H]."""
        embeddings = self._embed(token_ids).to(state)
        return self._gru(embeddings, state)

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The joint projection, activated."""
        of_state = functional.linear(state, self._of_state)
        return functional.silu(features + of_state)
