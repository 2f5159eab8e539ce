"""Heads that choose a block's tokens one after another: DFlash2's selector, Domino's recurrent head and DSpark's Markov head.

A drafter without one proposes the most probable token of each position. `CausalHead` is the protocol of a head and `HEADS` lists
them: nothing else in the library knows one by its name. Dimensions are those of `modeling_dflash`; K is here the number of
candidates of a position, E the size of a candidate's row, H that of a state, and M counts paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from .sampling_dflash import pick


TOP_K = 16  # candidates of heads whose published form scores the whole vocabulary; as many as DFlash2's

Embed = Callable[[torch.Tensor], torch.Tensor]


class HeadWeights(nn.Module):
    """Weights of a head. Those that belong to no linear layer or embedding are drawn as those of linear layers."""


class PrefixGRU(HeadWeights):
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
    probabilities: torch.Tensor | None  # [B, R, K], that the tokens were drawn by; None: each is the best one


class CausalHead:
    """Chooses a path from the anchor through the most probable tokens of each position, token by token.

    A new head gives `weights`, `features`, `rows`, `inputs`, `read` and `vector`. `features`, `rows` and `inputs` take all positions of a
    block at once. `read` and `vector` run once a position, on M paths at once, so each of their operations counts. The score of a candidate is its logit
    plus the dot product of its row and `vector`; a head that scores otherwise replaces `scores`. An object is made for each
    block, of a drafter's weights as they are then.
    """

    field: ClassVar[str]  # of the config, which a drafter with this head has, and no other
    top_k: int  # candidates of a position
    state_size: int  # H; the state is zero before the anchor

    def __init__(self, drafter: Any, embed: Embed | None) -> None:
        """Takes what the head needs of the drafter. `embed` gives the target's embeddings [..., D] of tokens [...]."""

    @classmethod
    def weights(cls, config: Any) -> dict[str, nn.Module]:
        """The modules that the head adds to a drafter, by name. Names and shapes of their tensors are those of checkpoints."""
        raise NotImplementedError

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
        """The vectors [M, E], whose products with candidates' rows are added to their logits.

        Of positions with features [M, F], after the tokens in the states.
        """
        raise NotImplementedError

    def scores(
        self, features: torch.Tensor, logits: torch.Tensor, rows: torch.Tensor, state: torch.Tensor
    ) -> torch.Tensor:
        """Scores [M, K] of candidates with logits [M, K] and rows [M, K, E], after the tokens in the states."""
        vector = self.vector(features, state).unsqueeze(-1)
        scores = torch.baddbmm(logits.unsqueeze(-1), rows, vector)
        return scores.squeeze(-1)

    def probabilities(self, scores: torch.Tensor, temperature: float | torch.Tensor) -> torch.Tensor:
        """Probabilities [M, K] that candidates with these scores are drawn by. Their sum is 1, or sampled text is wrong."""
        return (scores.float() / temperature).softmax(dim=-1)

    def confidences(self, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """Logits [...] of the chance that proposals after tokens [...] are accepted if those before them are, or `None`."""
        return None

    def choose_path(
        self,
        hidden_states: torch.Tensor,  # [B, R, D]
        logits: torch.Tensor,  # [B, R, V]
        anchors: torch.Tensor,  # [B, 1]
        drawn: tuple[float | torch.Tensor, torch.Tensor] | None = None,
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
        places: list[torch.Tensor] = []
        scores = []
        probabilities = []
        for features, top_logits, rows, first in of_positions:
            state = self.read(inputs_before, state)
            of_candidates = self.scores(features, top_logits, rows, state)
            scores.append(of_candidates)
            if drawn is None:
                choice = of_candidates.argmax(dim=-1)
            else:
                temperature, uniforms = drawn
                weights = self.probabilities(of_candidates, temperature)
                choice = pick(weights, uniforms[:, len(places)])
                probabilities.append(weights)
            place = first + choice
            places.append(place)
            inputs_before = inputs.index_select(0, place)
        return Path(
            token_ids[torch.stack(places, dim=1)],
            top_ids,
            torch.stack(scores, dim=1),
            torch.stack(probabilities, dim=1) if probabilities else None,
        )


class SelectorWeights(HeadWeights):
    """The weights of DFlash2's selector."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank = config.selector_rank
        self.hidden_projection = nn.Linear(config.hidden_size, rank, bias=False)
        self.predecessor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(config.vocab_size, rank))


class SelectorHead(CausalHead):
    """DFlash2's: predecessor[previous token] * projected(hidden state) is scored with successor[candidate]."""

    field = "selector_rank"

    def __init__(self, drafter: Any, embed: Embed | None) -> None:
        self.top_k = drafter.config.selector_top_k
        self.state_size = drafter.config.selector_rank
        self._weights = drafter.candidate_selector

    @classmethod
    def weights(cls, config: Any) -> dict[str, nn.Module]:
        """`candidate_selector`."""
        return {"candidate_selector": SelectorWeights(config)}

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The projected hidden states [..., E]."""
        return self._weights.hidden_projection(hidden_states)

    def rows(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The successors' rows, the same at all positions."""
        return functional.embedding(token_ids, self._weights.successor_codebook)

    def inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The predecessors' rows."""
        return functional.embedding(token_ids, self._weights.predecessor_codebook)

    def read(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The predecessors' rows alone."""
        return inputs

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The product of both."""
        return features * state


class DominoHead(CausalHead):
    """Domino's: a GRU reads the target's embeddings of the tokens chosen before."""

    field = "gru_hidden_dim"

    def __init__(self, drafter: Any, embed: Embed | None) -> None:
        mix, _, table = drafter.embed_proj
        self._table = table.weight  # not always a parameter: training in low rank computes it
        self.top_k = min(TOP_K, len(self._table))
        self.state_size = drafter.config.gru_hidden_dim
        self._num_plain = drafter.config.pure_draft_prefix_len
        self._embed: Any = embed
        # Of both gates in one matrix, and of the new state.
        gates = [2 * self.state_size]
        of_inputs = drafter.prefix_gru.weight_ih_l0.T
        of_state = drafter.prefix_gru.weight_hh_l0.T
        self._gates_of_inputs, self._new_of_inputs = of_inputs.tensor_split(gates, dim=1)
        self._gates_of_state, self._new_of_state = of_state.tensor_split(gates, dim=1)
        joint = mix.weight.T
        self._of_hidden, self._of_state = joint.tensor_split([-self.state_size])

    @classmethod
    def weights(cls, config: Any) -> dict[str, nn.Module]:
        """`prefix_gru`, and `embed_proj`: the joint projection and the table of tokens."""
        size = config.hidden_size
        mix = nn.Linear(size + config.gru_hidden_dim, config.emb_dim, bias=False)
        table = nn.Linear(config.emb_dim, config.vocab_size, bias=False)
        return {
            "prefix_gru": PrefixGRU(size, config.gru_hidden_dim),
            "embed_proj": nn.Sequential(mix, nn.SiLU(), table),
        }

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
        new_of_inputs = inputs @ self._new_of_inputs
        new_of_state = state @ self._new_of_state
        new = torch.addcmul(new_of_inputs, reset, new_of_state)
        return torch.lerp(new.tanh(), state, update)

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The joint projection, activated."""
        return functional.silu(torch.addmm(features, state, self._of_state))


class MarkovHead(CausalHead):
    """DSpark's: a bias of the candidate after the previous token, in low rank. `gated` lets the hidden state weigh the rank.

    Its confidence is learned beside it: the chance that the proposal is accepted.
    """

    field = "markov_rank"

    def __init__(self, drafter: Any, embed: Embed | None) -> None:
        config = drafter.config
        weights = drafter.markov_head
        self._before = weights.markov_w1.weight
        self._after = weights.markov_w2.weight
        self.top_k = min(TOP_K, len(self._after))
        self.state_size = config.markov_rank
        self._own_ids = None  # of the drafter's vocabulary, ascending
        if drafter.d2t is not None:
            self._own_ids = drafter.d2t + torch.arange(len(drafter.d2t), device=drafter.d2t.device)
        self._gate = None
        if config.markov_head_type == "gated":
            self._gate = weights.gate_proj
            self._gate_of_hidden, gate_of_state = self._gate.weight.tensor_split([config.hidden_size], dim=1)
            self._gate_of_state = gate_of_state.T
        self._confidence = drafter.confidence_head.proj if config.enable_confidence_head else None

    @classmethod
    def weights(cls, config: Any) -> dict[str, nn.Module]:
        """`markov_head`, whose second matrix has the drafter's own vocabulary if there is one, and `confidence_head`."""
        rank = config.markov_rank
        size = config.hidden_size
        markov = {
            "markov_w1": nn.Embedding(config.vocab_size, rank),
            "markov_w2": nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False),
        }
        if config.markov_head_type == "gated":
            markov["gate_proj"] = nn.Linear(size + rank, rank)
        modules: dict[str, nn.Module] = {"markov_head": nn.ModuleDict(markov)}
        if config.enable_confidence_head:
            width = size + rank if config.confidence_head_with_markov else size
            modules["confidence_head"] = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        return modules

    def features(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the gate takes from the hidden states; without a gate nothing reads them."""
        if self._gate is None:
            return hidden_states
        return functional.linear(hidden_states, self._gate_of_hidden, self._gate.bias)

    def rows(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The candidates' rows, the same at all positions. Tokens outside the drafter's vocabulary have that of another."""
        if self._own_ids is not None:
            places = torch.searchsorted(self._own_ids, token_ids)
            token_ids = places.clamp(max=len(self._own_ids) - 1)
        return functional.embedding(token_ids, self._after)

    def inputs(self, token_ids: torch.Tensor) -> torch.Tensor:
        """The previous tokens' rows."""
        return functional.embedding(token_ids, self._before)

    def read(self, inputs: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The previous tokens' rows alone."""
        return inputs

    def vector(self, features: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """The previous tokens' rows, weighed by the gate."""
        if self._gate is None:
            return state
        gate = torch.addmm(features, state, self._gate_of_state).sigmoid()
        return gate * state

    def confidences(self, hidden_states: torch.Tensor, previous_ids: torch.Tensor) -> torch.Tensor | None:
        """A linear function of the hidden states and, if it was trained so, of the previous tokens' rows."""
        if self._confidence is None:
            return None
        known = hidden_states
        if self._confidence.in_features > hidden_states.shape[-1]:
            known = torch.cat([hidden_states, self.inputs(previous_ids)], dim=-1)
        return self._confidence(known).squeeze(-1)


HEADS: tuple[type[CausalHead], ...] = (SelectorHead, DominoHead, MarkovHead)


def head_of(config: Any) -> type[CausalHead] | None:
    """The head that a drafter with this config has; `None`: each position proposes its most probable token."""
    for head in HEADS:
        if getattr(config, head.field) is not None:
            return head
    return None
