"""Measures how many drafted tokens a target accepts, by decoding prompts with the loop that users run."""

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
    """Acceptance counts, summed over verify steps. `a + b` are the counts over the steps of both.

    Attributes:
        steps: Number of verify steps.
        committed: Tokens committed: the accepted proposals and one token of the target per step, before a text is cut
            at a stop token or at its maximal length.
        kept: Tokens that remain after the cut.
        accepted: For each position of a draft, the number of steps in which the proposal there was accepted.
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
        """Mean acceptance length, as in the DFlash paper: committed tokens per verify step, 0 without steps."""
        return self.committed / max(1, self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Kept tokens per verify step, 0 without steps. The speed-up depends on this number."""
        return self.kept / max(1, self.steps)

    def figures(self) -> Facts:
        """Returns `tau`, `tokens_per_step` and `accepted`.

        `accepted` holds, for each position of a draft, the share of steps in which the proposal there was accepted.
        """
        steps = max(1, self.steps)
        shares = [round(count / steps, 4) for count in self.accepted]
        return {"tau": self.tau, "tokens_per_step": self.tokens_per_step, "accepted": shares}


@torch.no_grad()
def measure_acceptance(
    drafter: Any, target: PreTrainedModel, prompts: Prompts, max_new_tokens: int
) -> AcceptanceCounts:
    """Decodes greedily after each prompt, and returns the acceptance counts of all prompts together.

    At most `max_new_tokens` tokens are decoded after each prompt. Warnings of `drafting_dflash` are hidden: one says
    that no draft is accepted, which is normal when training begins.

    Raises:
        ValueError: for what `generate_blocks` refuses, for example logits of the drafter that are NaN.
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
                # Steps that are compiled after some time round near-ties differently, and recorded ones hold memory.
                compile=False,
                cuda_graph=False,
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
