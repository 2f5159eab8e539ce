"""True acceptance: what a drafter saves in decoding, measured by the loop that users run."""

import logging
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.model import drafting_dflash
from dflash.model.generation_dflash import generate_blocks

from .examples import Prompts
from .settings import Facts


@dataclass(frozen=True)
class AcceptanceCounts:
    """Sums over the verify steps of some prompts; `a + b` joins those of two sets.

    Attributes:
        steps: Verify steps.
        committed: Accepted proposals and one token of the target's own per step, before stop and length cuts.
        kept: Tokens kept after these cuts.
        accepted: For each position of a draft, the number of steps in which it was accepted.
    """

    steps: int
    committed: int
    kept: int
    accepted: tuple[int, ...] = ()

    def __add__(self, other: "AcceptanceCounts") -> "AcceptanceCounts":
        accepted = tuple(map(sum, zip_longest(self.accepted, other.accepted, fillvalue=0)))
        return AcceptanceCounts(
            self.steps + other.steps,
            self.committed + other.committed,
            self.kept + other.kept,
            accepted,
        )

    @property
    def tau(self) -> float:
        """Mean acceptance length, as the DFlash paper counts it."""
        return self.committed / max(1, self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Tokens kept per verify step, on which a speed-up rests."""
        return self.kept / max(1, self.steps)

    def figures(self) -> Facts:
        """Tau, tokens a step, and the share of the steps in which each position was accepted."""
        steps = max(1, self.steps)
        shares = [round(count / steps, 4) for count in self.accepted]
        return {"tau": self.tau, "tokens_per_step": self.tokens_per_step, "accepted": shares}


@torch.no_grad()
def measure_acceptance(
    drafter: Any, target: PreTrainedModel, prompts: Prompts, max_new_tokens: int
) -> AcceptanceCounts:
    """Greedy acceptance over `prompts`, each decoded by `generate_blocks`.

    The engine's warning about a drafter of which nothing is accepted is hidden: training begins in that state.
    """
    total = AcceptanceCounts(
        0,
        0,
        0,
        (0,) * drafter.config.num_proposals,
    )
    logger = drafting_dflash.logger
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        for prompt in prompts:
            blocks = generate_blocks(
                drafter,
                target,
                torch.tensor([list(prompt)], device=target.device),
                max_new_tokens=max_new_tokens,
                temperature=0.0,
                compile=False,  # a near-tie must not depend on how long this process has decoded before
                prompt_lookup_num_tokens=0,
            )
            for block in blocks:
                if block.is_prefill:
                    continue
                accepted = (1,) * block.num_accepted
                total += AcceptanceCounts(
                    1,
                    block.acceptance_length,
                    len(block.token_ids),
                    accepted,
                )
    finally:
        logger.setLevel(level)
    return total
