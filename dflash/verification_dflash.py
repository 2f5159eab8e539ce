"""Which drafted tokens stand: the accept rule and the target's choices, as functions of tensors.

Lossless by construction: the target chooses a token for every row of the block, `accept_prefix` counts how many
proposals equal those choices from the left, and what is committed are the choices themselves. A proposal only decides
how many rows of one forward were computed behind the right prefix, never which token is written.

 * Row i's logits are the target's logits behind [committed text, proposals 1..i], so they are the logits of plain
   decoding if proposals 1..i equal what plain decoding writes. The first i for which they do not ends the block, with
   the target's own token in its place. By induction every committed token is the one that plain decoding writes.
 * Greedy: the choice is the argmax. Sampled: the choice is the token that inverse transform sampling picks from the
   row's distribution with the noise of that position. The noise belongs to the position (`PositionNoise`), not to the
   step or to the block, and the drafter never sees it; so the text is the one that a loop of one token at a time
   writes with the same noise, and its law is the target's. For a drafter that proposes one token per row this accepts
   with the same probability as speculative sampling with a one-hot q (Leviathan et al. 2023, algorithm 1):
   p(proposal).
"""

from __future__ import annotations

import torch


# Uniforms are drawn in chunks of a fixed size so that position t's value depends neither on how many are asked for at
# a time nor on how long the text may become.
NOISE_CHUNK = 256


class PositionNoise:
    """One uniform number per row and position of the new text, the same for the same seed however text is drafted.

    Every row has its own stream on the CPU, seeded from `generator` (or torch's global one): row r's noise depends on
    the generator's state and on r alone, wherever the models run and in any batch.
    """

    def __init__(self, batch_size: int, generator: torch.Generator | None = None) -> None:
        device = "cpu" if generator is None else generator.device
        seeds = torch.randint(2**63 - 1, (batch_size,), generator=generator, device=device)
        self._streams = [torch.Generator().manual_seed(seed) for seed in seeds.tolist()]
        self._drawn = [torch.empty(0, dtype=torch.float64)] * batch_size

    def __call__(self, row: int, start: int, count: int) -> torch.Tensor:
        """Uniforms in [0, 1) of the row's new positions `start..start + count - 1`, float64 [count]."""
        while len(self._drawn[row]) < start + count:
            chunk = torch.rand(NOISE_CHUNK, generator=self._streams[row], dtype=torch.float64)
            self._drawn[row] = torch.cat([self._drawn[row], chunk])
        return self._drawn[row][start : start + count]


def choose_greedy(logits: torch.Tensor) -> torch.Tensor:
    """The target's choice for every row, [B, N] of logits [B, N, V]: its argmax."""
    return logits.argmax(dim=-1)


def choose_sampled(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The target's choice for every row, [B, N] of logits [B, N, V] and uniforms [B, N]: inverse transform sampling.

    Picks the token whose interval of the cumulative distribution holds the row's uniform. In float64, so that neither
    a large vocabulary's tail nor the last token's edge is lost; a token of probability zero is never picked.
    """
    if logits.device.type == "mps":  # which has no float64
        return choose_sampled(logits.cpu(), uniforms.cpu()).to(logits.device)
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)  # [B, N, V]
    # Scaled by the sum as it was computed, and kept below it, so that rounding cannot push a pick past the last token.
    total = cumulative[..., -1:]
    drawn = torch.minimum(uniforms[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, drawn, right=True).squeeze(-1)


def accept_prefix(proposals: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
    """How many proposals stand, [B] of proposals [B, N - 1] and choices [B, N]: the longest prefix that agrees.

    `choices[:, : num_accepted + 1]` is then what the target writes: the accepted proposals, which equal its choices,
    and one token of its own.
    """
    return (proposals == choices[:, : proposals.shape[1]]).long().cumprod(dim=1).sum(dim=1)
