"""Criteria that look at all texts of a batch, as those of lm-eval and lighteval do, asked as `generate` asks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import StoppingCriteriaList

from dflash.model.decoding_dflash import Block
from dflash.model.requests_dflash import Request


def of_batch(criteria: StoppingCriteriaList) -> list[Any]:
    """The criteria that may look at all texts of a batch at once: those that are not of transformers."""
    return [criterion for criterion in criteria if not type(criterion).__module__.startswith("transformers.")]


class Together:
    """Asks criteria about texts of equal length, after each token, though drafted texts grow apart.

    A text may be ahead of the others. It is asked about once all have its length, and its blocks are held until it has ended.

    Args:
        request: What the texts begin with, and whether one pads after its end.
        criteria: What is asked.
    """

    def __init__(self, request: Request, criteria: Sequence[Any]) -> None:
        self.criteria = StoppingCriteriaList(criteria)
        self.prompt_ids = request.input_ids
        # Without stop tokens `generate` pads no text: all grow until all are told to stop.
        self.pads = request.config._eos_token_tensor is not None
        pad = request.config._pad_token_tensor
        self.pad_id = 0 if pad is None else int(pad)
        num_texts = len(request.input_ids)
        self.blocks: list[list[Block]] = [[] for _ in range(num_texts)]
        self.texts: list[list[int]] = [[] for _ in range(num_texts)]
        self.is_told = [False] * num_texts  # to stop
        self.is_stopped = [False] * num_texts
        self.num_asked = 0  # tokens after the prompts

    def take(self, blocks: Sequence[Block], growing: set[int]) -> list[Block]:
        """Takes a step's blocks, and gives those of texts that have ended. Texts outside of `growing` get no further block."""
        for block in blocks:
            self.blocks[block.sequence].append(block)
            self.texts[block.sequence] += block.token_ids
        ended: list[Block] = []
        while not all(self.is_stopped):
            behind = [index for index in growing if not self.is_stopped[index]]
            if any(len(self.texts[index]) == self.num_asked for index in behind):
                break
            self._ask()
            for index, text in enumerate(self.texts):
                self.is_told[index] |= index not in growing and len(text) <= self.num_asked
            if self.pads or all(self.is_told):
                self.is_stopped = list(self.is_told)
                ended += self._cut()
        return ended

    def _ask(self) -> None:
        """Asks about one token more of all texts."""
        self.num_asked += 1
        texts = [torch.tensor(text[: self.num_asked]) for text in self.texts]
        new_ids = pad_sequence(texts, batch_first=True, padding_value=self.pad_id)
        new_ids = new_ids.to(self.prompt_ids)
        text_ids = torch.cat([self.prompt_ids, new_ids], dim=1)
        stops = self.criteria(text_ids, None)
        for index, stop in enumerate(stops.tolist()):
            self.is_told[index] |= stop

    def _cut(self) -> list[Block]:
        """The blocks of the texts that stop here, without later tokens."""
        blocks = []
        for index, stops in enumerate(self.is_stopped):
            if not stops:
                continue
            num_left = self.num_asked
            del self.texts[index][num_left:]
            for block in self.blocks[index]:
                if num_left > 0:
                    blocks.append(_first_tokens(block, num_left))
                num_left -= len(block.token_ids)
            self.blocks[index] = []
        return blocks


def _first_tokens(block: Block, count: int) -> Block:
    """A block's first `count` tokens."""
    outputs: dict[str, Any] = {}
    for name in ("scores", "logits"):
        of_tokens = getattr(block, name)
        if of_tokens is not None:
            outputs[name] = of_tokens[:count]
    return replace(block, token_ids=block.token_ids[:count], **outputs)
