"""The training loop: the paper's recipe on one process or several, with the frozen target giving its features online.

What is trained is the drafter alone; the target, its embedding and its head stay as they are. The loop keeps the drafter
that decodes best on held-out prompts, and knows no text.

Every process holds the whole drafter and takes its share of each batch. Losses, gradients and counts travel as sums, so
that the batch, and not the number of processes, decides what is learned.
"""

from __future__ import annotations

import copy
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from tqdm import tqdm
from transformers.modeling_utils import PreTrainedModel

from dflash.hub import check_replaceable, save_checkpoint
from dflash.modeling_dflash import DFlashDraftModel
from dflash.target_dflash import TappedTarget

from .acceptance import Acceptance, measure_acceptance
from .data import Batch, Example, epoch_batches, fingerprint
from .losses import DraftCounts, chunked_cross_entropy, count_drafts, default_gamma, position_weights
from .masks import lay_out_blocks
from .optimizers import build_optimizers, rate_factor


# Rows of the head come in multiples of this, for the same reason as the widths of batches do.
ROW_STEP = 256


@dataclass(frozen=True)
class TrainingSettings:
    """The recipe; the defaults are the paper's (DFlash, appendix A.1), where it states them.

    Attributes:
        steps: Optimiser steps; the data is passed over as often as that takes.
        learning_rate: Peak rate of AdamW.
        muon_learning_rate: Peak rate of Muon, which then trains the matrices; `None`, as in the paper, is AdamW alone.
        warmup_ratio: Share of the steps that the rate climbs, before it falls along a cosine.
        weight_decay: AdamW's.
        max_grad_norm: Gradients are clipped to this norm.
        num_anchors: Blocks per sequence, drawn anew each epoch.
        gamma: Decay of the position weights; the paper's for the block size by default.
        batch_tokens: Tokens of a batch, padding included, over all processes.
        chunk_rows: Rows whose logits exist at a time.
        mixed_precision: "bf16" computes in bf16 over fp32 weights, "no" in fp32.
        eval_every: Steps between measurements on the held-out prompts, and after the last step.
        eval_new_tokens: Length of the texts they are measured on.
        seed: Of the order of the data and of the anchors.
    """

    steps: int
    learning_rate: float = 6e-4
    muon_learning_rate: float | None = None
    warmup_ratio: float = 0.04
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    num_anchors: int = 512
    gamma: float | None = None
    batch_tokens: int = 4096
    chunk_rows: int = 4096
    mixed_precision: str = "bf16"
    eval_every: int = 500
    eval_new_tokens: int = 256
    seed: int = 0


@dataclass
class TrainingRecord:
    """What came of it: one point of the curve per measurement."""

    curve: list[dict[str, Any]] = field(default_factory=list)
    best_step: int = 0
    best_tau: float = float("-inf")


class DrafterLoss:
    """The drafter's loss on a batch, features and head taken from the target that `tapped` holds."""

    def __init__(self, drafter: DFlashDraftModel, tapped: TappedTarget, gamma: float, chunk_rows: int) -> None:
        self.drafter = drafter
        self.tapped = tapped
        self.chunk_rows = chunk_rows
        self.config = drafter.config
        self.weights = position_weights(self.config.block_size, gamma)

    def __call__(self, batch: Batch) -> tuple[torch.Tensor, DraftCounts]:
        """Weighted cross entropy, summed over the batch's blocks, and its counts."""
        layout = lay_out_blocks(batch.input_ids, batch.loss_mask, batch.document_ids, batch.anchors, self.config)
        with torch.no_grad():
            length = batch.input_ids.shape[1]
            _, features = self.tapped.forward(batch.input_ids, self.tapped.new_cache(length), num_logits=1)
            noise_embeds = self.tapped.embed(layout.token_ids)
        hidden_states = self.drafter(
            noise_embeds=noise_embeds,
            context_hidden_states=features,
            position_ids=layout.position_ids,
            attention_mask=layout.attention_mask,
        ).last_hidden_state  # [B, R, D]
        learned = layout.is_learned.flatten()  # [B * R]
        weights = self.weights.to(learned.device).repeat(len(learned) // self.config.block_size) * learned
        rows = learned.nonzero().flatten()  # [M]
        # Filled up with a row that is not learned, an anchor: its weight is 0.
        rows = torch.cat([rows, rows.new_zeros(-len(rows) % ROW_STEP)])
        losses = chunked_cross_entropy(
            hidden_states.flatten(0, 1).index_select(0, rows),
            layout.labels.flatten()[rows],
            weights[rows],
            self.tapped.head,
            self.chunk_rows,
        )
        is_correct = torch.zeros_like(learned)
        is_correct[rows] = losses.is_correct
        block_shape = (-1, self.config.block_size)
        counts = count_drafts(
            is_correct.view(block_shape), learned.view(block_shape), losses.loss_sum, losses.weight_sum
        )
        return losses.loss_sum, counts


def train(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    examples: Sequence[Example],
    held_out: Sequence[Sequence[int]],
    settings: TrainingSettings,
    output: Path,
    provenance: dict[str, Any] | None = None,
    show_progress: bool = True,
    on_point: Callable[[dict[str, Any]], None] | None = None,
) -> TrainingRecord:
    """Trains `drafter` in place and keeps in `output` the state of it that accepts most on the `held_out` prompts.

    Several processes (of `torchrun`, `accelerate launch`, or any that set the same environment) call it with the same
    arguments, train the same drafter and return the same record; the first one alone writes, draws and calls `on_point`.

    Args:
        drafter: The drafter, with fp32 weights.
        target: Its target; frozen here.
        examples: Sequences that the target would write.
        held_out: Prompts to decode for true acceptance; none keeps the last state.
        settings: The recipe.
        output: Folder of the checkpoint, replaced in one rename each time a better one is found.
        provenance: Facts to keep beside the checkpoint, such as where the data came from.
        show_progress: Draw a progress bar.
        on_point: Called with each new point of the curve.

    Raises:
        ValueError: if nothing in the data can be trained on.
        FloatingPointError: if the loss is not a number; the checkpoint in `output` is the last good one.
    """
    examples = [example for example in examples if any(example.loss_mask)]
    if not examples:
        raise ValueError("The data holds no supervised token: give chats in which the assistant says something.")
    check_replaceable(output.expanduser().absolute())  # rather now than when there is something to save
    # Without `cpu`, accelerate takes several processes without a GPU for as many runs of one.
    accelerator = accelerate.Accelerator(mixed_precision=settings.mixed_precision, cpu=not torch.cuda.is_available())
    index, count = accelerator.process_index, accelerator.num_processes
    is_first = accelerator.is_main_process
    target.requires_grad_(False).eval()
    # The drafter is moved but not wrapped: a wrapped forward would stay in bf16 when the drafter decodes.
    drafter.to(accelerator.device)
    if not hasattr(target, "hf_device_map"):
        movable: Any = target
        movable.to(accelerator.device)
    optimizers = [
        accelerator.prepare(optimizer)
        for optimizer in build_optimizers(
            drafter, settings.learning_rate, settings.weight_decay, settings.muon_learning_rate
        )
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    gamma = default_gamma(drafter.config.block_size) if settings.gamma is None else settings.gamma
    loss_of = DrafterLoss(drafter, TappedTarget(target, drafter), gamma, settings.chunk_rows)

    record = TrainingRecord()
    counts: DraftCounts | None = None
    batches = _endless_batches(examples, settings, target)
    show_progress &= is_first
    bar = tqdm(range(1, settings.steps + 1), desc="drafter", disable=not show_progress, dynamic_ncols=True)
    for step in bar:
        drafter.train()
        with accelerator.autocast():
            loss_sum, new_counts = loss_of(next(batches).share(index, count).to(accelerator.device))
        accelerator.backward(loss_sum)
        loss = join_gradients(accelerator, drafter, loss_sum, new_counts.weight_sum)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss of step {step} is {loss.item()}: lower learning_rate={settings.learning_rate}, or set "
                "mixed_precision='no'."
            )
        accelerator.clip_grad_norm_(drafter.parameters(), settings.max_grad_norm)
        factor = rate_factor(step, settings.steps, settings.warmup_ratio)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if counts is None:
            counts = new_counts
        else:
            counts += new_counts
        if step % settings.eval_every == 0 or step == settings.steps:
            drafter.eval()
            point = {"step": step, **join_counts(accelerator, counts).summary()}
            if held_out:
                measured = measure_acceptance(drafter, target, held_out[index::count], settings.eval_new_tokens)
                acceptance = join_acceptances(accelerator, measured)
                point |= {"tau": acceptance.tau, "tokens_per_step": acceptance.tokens_per_step}
            record.curve.append(point)
            if on_point is not None and is_first:
                on_point(point)
            counts = None
            bar.set_postfix({name: f"{value:.3f}" for name, value in point.items() if isinstance(value, float)})
            if not held_out or point["tau"] > record.best_tau:
                record.best_step, record.best_tau = step, point.get("tau", float("nan"))
                if is_first:
                    facts = describe_run(drafter, target, examples, settings, record, count) | (provenance or {})
                    save_drafter(drafter, output, facts)
    accelerator.wait_for_everyone()  # whoever returns finds the checkpoint
    return record


def join_gradients(
    accelerator: accelerate.Accelerator, drafter: DFlashDraftModel, loss_sum: torch.Tensor, weight_sum: torch.Tensor
) -> torch.Tensor:
    """Turns the gradients of each process's `loss_sum` into those of the mean loss over all, which is returned.

    They meet in one message: a sum of many small tensors would mostly wait.
    """
    gradients = {p: p.grad.flatten() for p in drafter.parameters() if p.grad is not None}
    sums = torch.cat([*gradients.values(), loss_sum.detach()[None], weight_sum[None]])
    total = accelerator.reduce(sums, reduction="sum")
    means = total[:-1] / total[-1].clamp(min=1e-9)
    parts = means[:-1].split([gradient.numel() for gradient in gradients.values()])
    for parameter, part in zip(gradients, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return means[-1]


def join_counts(accelerator: accelerate.Accelerator, counts: DraftCounts) -> DraftCounts:
    """The counts of all processes."""
    names = counts.__dataclass_fields__
    return DraftCounts(**{name: accelerator.reduce(getattr(counts, name), reduction="sum") for name in names})


def join_acceptances(accelerator: accelerate.Accelerator, acceptance: Acceptance) -> Acceptance:
    """The acceptance over the prompts of all processes."""
    sums = torch.tensor([acceptance.steps, acceptance.committed, acceptance.kept], device=accelerator.device)
    return Acceptance(*accelerator.reduce(sums, reduction="sum").tolist())


def _endless_batches(
    examples: Sequence[Example], settings: TrainingSettings, target: PreTrainedModel
) -> Iterator[Batch]:
    pad_token_id = target.config.get_text_config(decoder=True).pad_token_id or 0
    epoch = 0
    while True:
        yield from epoch_batches(
            examples,
            epoch,
            num_anchors=settings.num_anchors,
            batch_tokens=settings.batch_tokens,
            pad_token_id=pad_token_id,
            seed=settings.seed,
        )
        epoch += 1


def describe_run(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    examples: Sequence[Example],
    settings: TrainingSettings,
    record: TrainingRecord,
    num_processes: int = 1,
) -> dict[str, Any]:
    """What a reader needs to repeat the run, without a path of the machine it ran on."""
    return {
        "settings": asdict(settings),
        "processes": num_processes,
        "target": {
            "class": type(target).__name__,
            "parameters": sum(parameter.numel() for parameter in target.parameters()),
        },
        "parameters": sum(parameter.numel() for parameter in drafter.parameters()),
        "data": {
            "examples": len(examples),
            "tokens": sum(len(example.input_ids) for example in examples),
            "supervised_tokens": sum(sum(example.loss_mask) for example in examples),
            "fingerprint": fingerprint(examples),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "accelerate": accelerate.__version__,
        },
        "best_step": record.best_step,
        "curve": record.curve,
    }


def save_drafter(
    drafter: DFlashDraftModel, folder: Path, facts: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> None:
    """Writes the checkpoint in `dtype` with `facts` as `training.json`; a full disk or a kill leaves the older one."""
    rounded: Any = copy.deepcopy(drafter)
    save_checkpoint(rounded.to(dtype), folder, files={"training.json": json.dumps(facts, indent=2) + "\n"})
