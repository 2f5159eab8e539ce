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
    """The weights of Domino's GRU, named as in torch's module, which runs over whole sequences alone."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        num_gates = 3 * hidden_size
        self.weight_ih_l0 = nn.Parameter(torch.zeros(num_gates, input_size))
        self.weight_hh_l0 = nn.Parameter(torch.zeros(num_gates, hidden_size))


@dataclass(frozen=True)
class Path:
    """The tokens that a head chose, and what it chose them from."""

    token_ids: torch.Tensor  # [B, R]
    candidate_ids: torch.Tensor  # [B, R, K], the most probable tokens of each position
    scores: torch.Tensor  # [B, R, K] of the candidates, after the tokens chosen before
    states: torch.Tensor  # [B, R, H], before the previous token was read


class CausalHead:
    """Chooses a path from the anchor through the most probable tokens of each position, token by token.

    A head gives `features`, `rows`, `inputs`, `read` and `vector`. The first three take all positions of a block at once. The
    other two run once a position, on M paths at once, so each of their operations counts. The score of a candidate is its logit
    plus the dot product of its row and `vector`; a head that scores otherwise replaces `scores`.
    """

    top_k: int  # candidates of a position
    state_size: int  # H; the state is zero before the anchor

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What `vector` needs of hidden states [..., D], [..., F]."""
        raise NotImplementedError

    def rows(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rows [..., K, E] of candidates [..., K] at positions [...] of their blocks, counted from the first proposal."""
        raise NotImplementedError

    def inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What `read` needs of tokens [...], [..., I]."""
        raise NotImplementedError

    def read(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The states [M, H] that tokens leave, of their inputs [M, I] and the states before them."""
        raise NotImplementedError

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The vectors [M, E] of positions with features [M, F] after the tokens in the states."""
        raise NotImplementedError

    def scores(
        self, features: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """Scores [M, K] of candidates with logits [M, K] and rows [M, K, E], after the tokens in the states."""
        vector = self.vector(features, state).unsqueeze(-1)
        scores = torch.baddbmm(logits.unsqueeze(-1), rows, vector)
        return scores.squeeze(-1)

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
        top_ids = top.indices.to(device)
        num_sequences, num_positions, top_k = top_ids.shape
        # The tokens in one list: the anchors, then the candidates of each position.
        token_ids = torch.cat([anchors.to(device).flatten(), top_ids.flatten()])
        inputs = self.inputs(token_ids)
        firsts = torch.arange(num_sequences, len(token_ids), top_k, device=device)  # places of first candidates
        of_positions = zip(
            self.features(hidden_states).unbind(dim=1),
            top.values.to(hidden_states).unbind(dim=1),
            self.rows(top_ids, torch.arange(num_positions, device=device)).unbind(dim=1),
            firsts.view(-1, num_positions).unbind(dim=1),
            strict=True,
        )
        inputs_before = inputs[:num_sequences]
        state = hidden_states.new_zeros(num_sequences, self.state_size)
        places = []
        scores = []
        states = []
        for features, top_logits, rows, first in of_positions:
            states.append(state)
            state = self.read(inputs_before, state)
            of_candidates = self.scores(features, top_logits, rows, state)
            scores.append(of_candidates)
            if drawn is None:
                choice = of_candidates.argmax(dim=-1)
            else:
                temperature, uniforms = drawn
                weights = (of_candidates.float() / temperature).softmax(dim=-1)
                choice = pick(weights, uniforms[:, len(places)])
            place = first + choice
            places.append(place)
            inputs_before = inputs.index_select(0, place)
        return Path(
            token_ids[torch.stack(places, dim=1)],
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

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The projected hidden states [..., E]."""
        return self.hidden_projection(hidden_states)

    def rows(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The successors' rows, the same at all positions."""
        return functional.embedding(token_ids, self.successor_codebook)

    def inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The predecessors' rows."""
        return functional.embedding(token_ids, self.predecessor_codebook)

    def read(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The predecessors' rows alone."""
        return inputs

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The product of both."""
        return features * state


class DominoHead(CausalHead):
    """Domino's: a GRU reads the target's embeddings of the tokens chosen before."""

    def __init__(
        self, gru: PrefixGRU, projection: Any, embed: Callable[[torch.Tensor], torch.Tensor] | None, num_plain: int
    ) -> None:
        mix, _, table = projection
        self.top_k = min(DOMINO_TOP_K, len(table.weight))
        self.state_size = gru.weight_hh_l0.shape[1]
        self._num_plain = num_plain
        # Of both gates in one matrix, and of the new state.
        self._gates_of_inputs, self._new_of_inputs = gru.weight_ih_l0.T.tensor_split([-self.state_size], dim=1)
        self._gates_of_state, self._new_of_state = gru.weight_hh_l0.T.tensor_split([-self.state_size], dim=1)
        self._embed: Any = embed
        self._table = table.weight  # not always a parameter: training in low rank computes it
        self._of_hidden, self._of_state = mix.weight.T.tensor_split([-self.state_size])

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The part of the projection [..., E] that does not depend on chosen tokens."""
        return hidden_states @ self._of_hidden

    def rows(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The tokens' rows of the table, which are zero at the positions that the head leaves alone."""
        is_scored = positions >= self._num_plain
        rows = functional.embedding(token_ids, self._table)
        return rows * is_scored[..., None, None]

    def inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The target's embeddings of the tokens."""
        return self._embed(token_ids).to(self._table)

    def read(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The GRU's next state. Written out, because some devices have no `torch.gru_cell`."""
        gates = torch.addmm(inputs @ self._gates_of_inputs, state, self._gates_of_state)
        reset, update = gates.sigmoid().chunk(2, dim=1)
        new = torch.addcmul(inputs @ self._new_of_inputs, reset, state @ self._new_of_state)
        return torch.lerp(new.tanh(), state, update)

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The joint projection, activated."""
        return functional.silu(torch.addmm(features, state, self._of_state))
