"""Trains a drafter while its target is trained: a few steps at a time, on the target's newest texts."""

import copy
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count, islice
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.drafter import DFlashDraftModel
from dflash.model.decoding_dflash import Block
from dflash.model.sequences_dflash import TextSequence
from dflash.model.targets_dflash import text_config

from .adaptation_trace import was_rejected
from .batches import Batch, BatchPlan, epoch_batches
from .device import computes_in_bf16
from .examples import Example
from .frozen_target import FrozenTarget
from .objective import DrafterLoss
from .optimizers import build_optimizers
from .settings import TrainingSettings


# Steps of warm-up at the beginning of a trainer's life, when the optimiser's moments are still near 0.
WARMUP_STEPS = 8


class Rollouts:
    """Collects a pair's newest texts as examples, with the anchors of rejected drafts, and counts acceptance.

    Args:
        most_texts: Number of texts to keep. A new text replaces the oldest one.

    Attributes:
        examples (`deque[Example]`): The texts as sequences to train on, the newest last.
    """

    def __init__(self, most_texts: int) -> None:
        self.examples: deque[Example] = deque(maxlen=most_texts)
        self._growing: dict[int, tuple[TextSequence, list[int]]] = {}  # by the `id` of the sequence
        self.clear_counts()

    def clear_counts(self) -> None:
        """Sets all acceptance counts to 0. The examples are kept."""
        self.num_accepted = 0
        self.num_rejected = 0
        self.num_kept = 0
        self.num_drafted_steps = 0
        self.num_steps = 0

    @property
    def tau(self) -> float:
        """Mean acceptance length of the verify steps whose proposals came from the drafter, not from lookup.

        The steps since `clear_counts` count; 1 if there were none.
        """
        return 1 + self.num_accepted / max(self.num_drafted_steps, 1)

    def tau_of(self, num_proposals: int) -> float:
        """Estimates tau for blocks of `num_proposals`.

        It assumes that each proposal is accepted with the same probability: accepted / (accepted + rejected) so far.
        Unlike `tau`, the estimate does not fall when steps verify fewer proposals.
        """
        num_decided = self.num_accepted + self.num_rejected
        rate = self.num_accepted / max(num_decided, 1)
        return sum(rate**length for length in range(num_proposals + 1))

    @property
    def tokens_per_step(self) -> float:
        """Kept tokens per verify step since the counts were cleared."""
        return self.num_kept / max(self.num_steps, 1)

    def watch(self, sequences: Sequence[TextSequence], blocks: Sequence[Block]) -> None:
        """Counts the blocks of one verify step.

        `blocks[i]` belongs to `sequences[i]`, whose `new_ids` hold the tokens of the block already.
        """
        for sequence, block in zip(sequences, blocks, strict=True):
            if block.is_prefill:
                continue
            _, rejected = self._growing.setdefault(id(sequence), (sequence, []))
            if was_rejected(block):
                self.num_rejected += 1
                num_before = len(sequence.new_ids) - len(block.token_ids)
                rejected.append(num_before - 1)
            self.num_steps += 1
            self.num_kept += len(block.token_ids)
            if block.num_proposals and not block.is_lookup:
                self.num_drafted_steps += 1
                self.num_accepted += block.num_accepted

    def collect(self, pad_token_id: int | None, shortest: int) -> int:
        """Moves the watched texts to `examples`, without their left padding; returns how many were usable.

        A text of fewer than `shortest` tokens, or without a valid anchor, is dropped.
        """
        num_texts = 0
        for sequence, rejected in self._growing.values():
            prompt_ids = sequence.prompt_ids.tolist()
            while len(prompt_ids) > 1 and prompt_ids[0] == pad_token_id:
                del prompt_ids[0]
            length = len(prompt_ids)
            mask = [0] * length + [1] * len(sequence.new_ids)
            anchors = [length + place for place in rejected]
            example = Example([*prompt_ids, *sequence.new_ids], mask, anchors)
            if example.has_anchor and len(example) >= shortest:
                self.examples.append(example)
                num_texts += 1
        self._growing.clear()
        return num_texts


class OnlineTrainer:
    """Trains an fp32 copy of a drafter, and copies its weights to the drafter at the end of each call of `train`.

    Args:
        drafter: The drafter that is used for decoding.
        target: Its target, which may itself be in training.
        settings: The recipe. Its settings of loss, blocks, batches, precision, learning rates and gradient clipping are
            read.
    """

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel, settings: TrainingSettings) -> None:
        self.drafter = drafter
        self.target = target
        self.settings = settings
        self.num_steps = 0
        self._num_epochs = 0
        self.student = copy.deepcopy(drafter).float().train().requires_grad_(True)
        self._optimizers = build_optimizers(
            self.student,
            settings.learning_rate,
            settings.weight_decay,
            settings.muon_rate(drafter.config.hidden_size),
        )
        self._peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in self._optimizers]
        self._plan = BatchPlan(
            settings.num_anchors,
            settings.batch_tokens,
            settings.seed,
            pad_token_id=text_config(target).pad_token_id or 0,
            rejected_share=settings.rejected_share,
        )

    def train(self, examples: Sequence[Example], num_steps: int) -> None:
        """Takes `num_steps` optimiser steps on `examples`, and copies the new weights to the drafter.

        Afterwards the target's train or eval modes, its `requires_grad` flags and torch's random state are restored.

        Raises:
            ValueError: if there are no examples.
            FloatingPointError: if loss or gradient are not finite; the drafter keeps its weights.
        """
        if not examples:
            raise ValueError("There are no examples to train on: watch some texts first.")
        device = self.drafter.device
        devices = [device] if device.type == "cuda" else []
        self.student.to(device)
        with torch.random.fork_rng(devices), torch.enable_grad(), _in_eval_mode(self.target):
            frozen: Any = FrozenTarget(self.target, self.student)
            loss_of = DrafterLoss(frozen, self.settings)
            batches = self._batches(examples)
            for batch in islice(batches, num_steps):
                self._step(loss_of, batch.to(device))
        learned = self.student.state_dict()
        with torch.no_grad():
            self.drafter.load_state_dict(learned)

    def _batches(self, examples: Sequence[Example]) -> Iterator[Batch]:
        for epoch in count(self._num_epochs):
            self._num_epochs = epoch + 1
            yield from epoch_batches(examples, epoch, self._plan)

    def _step(self, loss_of: DrafterLoss, batch: Batch) -> None:
        settings = self.settings
        precision = settings.mixed_precision or ("bf16" if computes_in_bf16() else "no")
        with torch.autocast(batch.input_ids.device.type, torch.bfloat16, enabled=precision == "bf16"):
            loss_sum, counts = loss_of(batch)
        loss = loss_sum / counts.weight_sum.clamp(min=1e-9)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.student.parameters(), settings.max_grad_norm)
        if not torch.stack([loss.detach(), norm.detach()]).isfinite().all():
            self.student.zero_grad()
            raise FloatingPointError(
                f"The drafter's loss is {loss.item()} with a gradient of norm {norm.item()}: lower learning_rate="
                f"{settings.learning_rate}."
            )
        self.num_steps += 1
        factor = min(1.0, self.num_steps / WARMUP_STEPS)
        for optimizer, peaks in zip(self._optimizers, self._peaks, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


@contextmanager
def _in_eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Inside the `with` the model is in eval mode; at its end all modes and `requires_grad` flags are restored."""
    modes = [(module, module.training) for module in model.modules()]
    gradients = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        for parameter, takes_gradient in gradients:
            parameter.requires_grad_(takes_gradient)
