"""Why a pair accepts little: measured as it is, and with one change at a time of what usually is wrong.

A change is tried on a copy of the drafter's modules that shares its weights, so the loaded models stay as they are.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.checkpoints import Card
from dflash.common.fingerprints import model_fingerprint
from dflash.common.messages import first_line
from dflash.common.provenance import environment, record
from dflash.model.generation_dflash import generate_blocks

from .measurements import rounded
from .methods import EAGER
from .task_answers import chat_encoder
from .timing import tau


# A change helps if tau rises by a twentieth over all prompts, and rises on two of three.
LEAST_GAIN = 1.05
SHARE_OF_PROMPTS = 2 / 3
OF_PROMPTS = ("thinking", "template")  # kinds of changes after which the target writes another text
MOST_MASKS = 6  # other mask tokens that are tried, at most

# One question of each kind that drafters are measured on, for where no prompts are given.
DOCTORS_PROMPTS = (
    "A baker sells 24 rolls in the morning and twice as many in the afternoon, at $3 each. How much money is that?",
    "Write a Python function that returns the longest palindrome inside a string, and explain how it works.",
    "How many positive whole-number divisors does 196 have? Reason step by step.",
    "Explain in a few paragraphs why the sky is blue and sunsets are red.",
    "Write a SQL query for the three customers who spent most last month, from the tables customers and orders.",
    "Plan a week of meals for two people who eat no meat.",
)


@dataclass(frozen=True)
class Setup:
    """A drafter, and how the prompts are given to its target."""

    drafter: PreTrainedModel
    chat_template: bool = True
    thinking: bool = False


@dataclass(frozen=True)
class Step:
    """A verify step: the prompt's number, the tokens before the block, the proposals and how many were accepted."""

    prompt: int
    position: int
    num_proposals: int
    num_accepted: int


@dataclass(frozen=True)
class Trial:
    """What one change gives."""

    kind: str  # what the change is about; one change of a kind is advised
    change: str  # empty for the pair as it is
    reason: str  # what it differs from
    setup: Setup
    steps: tuple[Step, ...] = ()
    error: str = ""  # why it could not be measured

    @property
    def tau(self) -> float:
        """Mean acceptance length; NaN without a step."""
        return tau([step.num_accepted + 1 for step in self.steps])

    @property
    def worth(self) -> float:
        """tau, and 1, as without a drafter, where there was no step."""
        return self.tau if self.steps else 1.0

    @property
    def by_position(self) -> list[float]:
        """How often the proposal at position 1, 2, … was accepted, of the steps that had one there."""
        rates = []
        for position in range(1, max((step.num_proposals for step in self.steps), default=0) + 1):
            accepted = [step.num_accepted >= position for step in self.steps if step.num_proposals >= position]
            rates.append(sum(accepted) / len(accepted))
        return rates

    def part(self, chosen: Callable[[Step], bool]) -> Trial:
        """The same over the chosen steps."""
        return replace(self, steps=tuple(filter(chosen, self.steps)))

    def helps(self, before: Trial) -> bool:
        """Whether more is accepted than `before`, by more than chance and rounding give."""

        def taus(one: Trial) -> list[float]:
            accepted = [[s.num_accepted for s in one.steps if s.prompt == prompt] for prompt in prompts]
            return [1 + sum(counts) / max(1, len(counts)) for counts in accepted]

        prompts = sorted({step.prompt for step in (*before.steps, *self.steps)})
        rises = sum(old < new for old, new in zip(taus(before), taus(self), strict=True))
        return self.worth >= LEAST_GAIN * before.worth and rises >= SHARE_OF_PROMPTS * len(prompts)

    def row(self, after: Sequence[str] = ()) -> dict[str, Any]:
        """The figures, as a result holds them; `after` are changes that stay made."""
        rates = [rounded(rate) for rate in self.by_position]
        error = self.error or ("" if self.steps else "the texts end before a draft")
        row = {"change": self.change, "after": list(after), "tau": rounded(self.tau), "steps": len(self.steps)}
        return row | {"accepted_at": rates} | ({"error": error} if error else {})


def run_doctor(
    target: PreTrainedModel,
    setup: Setup,
    tokenizer: Any,
    dialogues: Sequence[list[dict[str, str]]],
    max_new_tokens: int = 128,
    card: Card | None = None,
    decoding: dict[str, Any] | None = None,
    progress: Callable[[list[Trial]], Iterable[Trial]] = iter,
) -> dict[str, Any]:
    """Measures a pair as it is and with one change at a time, and says in order what to change and what that gains.

    Decoding is greedy and eager. The change that gains most is kept and the others are tried on top of it, until none
    helps. With the same text no trial takes more steps than the setup that it starts from: one that helps takes fewer.

    Args:
        target: The target.
        setup: The drafter, and how prompts are given at first.
        tokenizer: The target's.
        dialogues: Prompts as chat messages.
        max_new_tokens: Longest answer.
        card: The drafter's, by [`read_card`].
        decoding: More for the record: names of the pair.
        progress: Shows a bar over the trials of a round.

    Returns:
        A result. `summary` has a row for each trial, the pair as it is first; `advice` the changes that help;
        `observations` what cannot be tried; `published` the acceptance that the card states.

    Raises:
        ValueError: if the pair cannot decode the prompts, and no change helps.
    """
    names = decoding or {}
    measure = partial(_measured, target, tokenizer, dialogues, max_new_tokens)
    first = best = measure({}, Trial("", "", "", setup))
    rows, made = [first.row()], list[Trial]()
    advice: list[dict[str, Any]] = []
    while True:
        kinds, after = [one.kind for one in made], [one.change for one in made]
        todo = [one for one in changes(best.setup, target, tokenizer, dialogues) if one.kind not in kinds]
        most = Counter(step.prompt for step in best.steps)
        tried = [measure({} if one.kind in OF_PROMPTS else most, one) for one in progress(todo)]
        rows += [one.row(after) for one in tried]
        helping = [one for one in tried if one.helps(best)]
        if not helping:
            break
        before, best = best, max(helping, key=lambda one: one.worth)
        made.append(best)
        gain = {"tau_before": rounded(before.worth), "tau": rounded(best.tau)}
        advice.append({"change": best.change, "reason": best.reason, **gain})
    if first.error and not advice:
        raise ValueError(first.error)
    return record(
        "doctor",
        environment(target, setup.drafter),
        decoding={
            "temperature": 0.0,
            "batch_size": 1,
            "max_new_tokens": max_new_tokens,
            "prompts": len(dialogues),
            "chat_template": setup.chat_template and bool(tokenizer.chat_template),
            "enable_thinking": setup.thinking,
            **names,
        },
        published=[{"measured_on": where, "tau": figure} for where, figure in stated_acceptance(card)],
        summary=rows,
        advice=advice,
        observations=list(observations(target, first, tokenizer, card, names.get("target"))),
    )


def _measured(
    target: PreTrainedModel,
    tokenizer: Any,
    dialogues: Sequence[Any],
    max_new_tokens: int,
    most: Mapping[int, int],
    trial: Trial,
) -> Trial:
    """The trial with its steps, at most `most` by prompt, or with the reason why there are none."""
    encode = chat_encoder(tokenizer, trial.setup.thinking, trial.setup.chat_template)
    options = {**EAGER, "max_new_tokens": max_new_tokens, "temperature": 0.0}
    steps = []
    try:
        for number, dialogue in enumerate(dialogues):
            input_ids = encode(dialogue)
            length, taken = input_ids.shape[1], 0
            for block in generate_blocks(trial.setup.drafter, target, input_ids, **options):
                if block.num_proposals:
                    steps.append(Step(number, length, block.num_proposals, block.num_accepted))
                    taken += 1
                length += len(block.token_ids)
                if taken and taken == most.get(number):  # what helps takes fewer steps for as many tokens
                    break
    except (ValueError, RuntimeError) as error:
        return replace(trial, error=first_line(error))
    return replace(trial, steps=tuple(steps))


def changes(setup: Setup, target: PreTrainedModel, tokenizer: Any, dialogues: Sequence[Any]) -> Iterator[Trial]:
    """One change of `setup` for each thing that usually is wrong, without those that change nothing here."""

    def prompts(one: Setup) -> list[list[int]]:
        encode = chat_encoder(tokenizer, one.thinking, one.chat_template)
        return [encode(dialogue)[0].tolist() for dialogue in dialogues]

    thinking, template = not setup.thinking, not setup.chat_template
    others: tuple[tuple[str, str, str, dict[str, Any]], ...] = (
        ("thinking", f"thinking {'on' if thinking else 'off'}", f"enable_thinking={thinking}", {"thinking": thinking}),
        ("template", f"prompts with{'' if template else 'out'} the chat template", "", {"chat_template": template}),
    )
    for kind, change, reason, other in others:
        if prompts(changed := replace(setup, **other)) != prompts(setup):
            yield Trial(kind, change, f"{reason or 'the target is asked otherwise'}: its text changes too", changed)
    for kind, change, reason, drafter in _drafters(setup.drafter, target, tokenizer):
        yield Trial(kind, change, reason, replace(setup, drafter=drafter))


def _drafters(drafter: Any, target: Any, tokenizer: Any) -> Iterator[tuple[str, str, str, Any]]:
    """Copies of the drafter with another config or dtype: kind, change and reason of a [`Trial`], and the copy."""
    config, its = drafter.config, target.config.get_text_config(decoder=True)
    says = "config.json says"
    for shift in (-1, 1):
        ids = [tap + shift for tap in config.target_layer_ids]
        if ids[0] >= 0 and ids[-1] < its.num_hidden_layers - 1:
            reason = f"{says} {config.target_layer_ids}"
            yield "taps", f"target_layer_ids {ids}", reason, _copy(drafter, target_layer_ids=ids)
    for mask, name in _masks(config.mask_token_id, its.vocab_size, tokenizer):
        reason = f"{name}; {says} {config.mask_token_id}"
        yield "mask", f"mask_token_id {mask}", reason, _copy(drafter, mask_token_id=mask)
    own = config.sample_from_anchor
    reason = f"{says} {str(own).lower()}"
    yield "anchor", f"sample_from_anchor {str(not own).lower()}", reason, _copy(drafter, sample_from_anchor=not own)
    theta, others = _rope_theta(config), _rope_theta(its)
    if None not in (theta, others) and theta != others:
        turned = _copy(drafter, rope_theta=others)
        if getattr(config, "rope_parameters", None):  # transformers 5 reads it there
            turned.config.rope_parameters = {**config.rope_parameters, "rope_theta": others}
        turned.rotary_emb = type(turned.rotary_emb)(turned.config).to(drafter.device)
        yield "rope", f"rope_theta {others:g}", f"that of the target; {says} {theta:g}", turned
    for dtype in dict.fromkeys((torch.float32, target.dtype)):
        if dtype != drafter.dtype and dtype.is_floating_point and not getattr(config, "quantization_config", None):
            was, name = (str(one).removeprefix("torch.") for one in (drafter.dtype, dtype))
            with suppress(torch.OutOfMemoryError):  # the others can be tried
                made = copy.deepcopy(drafter).to(dtype)
                yield "dtype", f"drafter in {name}", f"it was loaded in {was}", made


def _copy(drafter: Any, **fields: Any) -> Any:
    """Modules and a config of their own, with other fields; the tensors are the drafter's."""
    shared = {id(tensor): tensor for tensor in (*drafter.parameters(), *drafter.buffers())}
    made = copy.deepcopy(drafter, shared)
    for name, value in fields.items():
        setattr(made.config, name, value)
    return made


def _rope_theta(config: Any) -> float | None:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_theta", getattr(config, "rope_theta", None))


def _masks(mask_token_id: int, vocab_size: int, tokenizer: Any) -> list[tuple[int, str]]:
    """Other ids that may have filled the blocks of the training run, the likeliest first, and what they are."""
    known = tokenizer.get_vocab()
    named = {index: token for token, index in known.items() if "mask" in token.lower() and not token.isalnum()}
    found: dict[int | None, str] = dict(sorted(named.items()))
    for token_id, name in (
        (tokenizer.mask_token_id, "the tokenizer's mask token"),
        (max(known.values()) + 1, "the first row of the embedding that no token has"),
        (tokenizer.pad_token_id, "the pad token"),
        (tokenizer.unk_token_id, "the unknown token"),
        (vocab_size - 1, "the last row of the embedding"),
        (0, "the first row of the embedding"),
    ):
        found.setdefault(token_id, name)
    wrong = (None, mask_token_id)
    return [(one, name) for one, name in found.items() if one not in wrong and one < vocab_size][:MOST_MASKS]


IS_TAU = re.compile(r"\btau\b|τ|accept\w*[ _-]len", re.IGNORECASE)
IN_TEXT = re.compile(r"(?:\btau\b|τ|accept\w*[ _-]length)\D{0,20}?(\d+\.\d+)", re.IGNORECASE)


def stated_acceptance(card: Card | None) -> list[tuple[str, float]]:
    """Acceptance lengths that a drafter's `training.json` and card state, and what each was measured on."""
    if card is None:
        return []
    best = [point for point in card.facts.get("curve", ()) if point["step"] == card.facts.get("best_step")]
    found = [("held-out prompts of its training", float(point["tau"])) for point in best if "tau" in point]
    for result in (result for model in card.fields.get("model-index") or () for result in model.get("results") or ()):
        stated = [one for one in result.get("metrics") or () if IS_TAU.search(f"{one.get('type')} {one.get('name')}")]
        found += [(str((result.get("dataset") or {}).get("name")), float(one["value"])) for one in stated]
    headings: list[str] = []
    for line in card.text.splitlines():
        cells = [cell.strip(" *`") for cell in line.strip().strip("|").split("|")]
        if not line.lstrip().startswith("|"):
            headings = []
            found += [("said in the text", float(figure)) for figure in IN_TEXT.findall(line)]
        elif not headings:
            headings = cells
        elif headings[0].lower() != "step":  # the curve of a training run
            for heading, cell in zip(headings, cells, strict=False):
                if IS_TAU.search(heading) and (figure := re.match(r"\d+(\.\d+)?", cell)):
                    where = cells[0] if heading.lower() in ("tau", "τ") else f"{cells[0]}, {heading}"
                    found.append((where, float(figure[0])))
    return list(dict.fromkeys(found))


def observations(
    target: PreTrainedModel, first: Trial, tokenizer: Any, card: Card | None, name: str | None
) -> Iterator[str]:
    """What lowers acceptance and cannot be tried with the models at hand; `name` is the target's."""
    facts, fields = (card.facts, card.fields) if card else ({}, {})
    train_on = "or train on with `dflash train --init`"
    quantised: Any = getattr(target.config, "quantization_config", None)
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        yield (
            f"The target is quantised ({getattr(method, 'value', method)}), and its hidden states differ from those that "
            f"the drafter learned to read: compare with the whole target, {train_on}."
        )
    known: dict[str, Any] = facts.get("target") or {}
    revision, its = known.get("revision"), getattr(target.config, "_commit_hash", None)
    is_whole = not quantised and not any(parameter.is_meta for parameter in target.parameters())
    if is_whole and known.get("fingerprint") not in (None, model_fingerprint(target)):
        which = f"revision {revision}" if revision and revision != its else "those of its training"
        yield f"The target's weights are not those that the drafter was trained for: load {which}, {train_on}."
    elif revision and its and revision != its:
        yield f"The drafter was trained for revision {revision} of the target, and this is {its}."
    base = fields.get("base_model")
    bases = [str(one) for one in (base if isinstance(base, list) else [base]) if one]
    if bases and name and name.split("/")[-1].lower() not in [one.split("/")[-1].lower() for one in bases]:
        yield f"The card names {', '.join(bases)} as the target, and this is {name}: load that one, {train_on}."
    if not tokenizer.chat_template:
        yield "The tokenizer has no chat template, in which most drafters are trained: load the target's own."
    limit = (facts.get("settings") or {}).get("max_length") or first.setup.drafter.config.max_position_embeddings
    beyond, within = first.part(lambda step: step.position >= limit), first.part(lambda step: step.position < limit)
    if beyond.steps and (not within.steps or within.tau >= LEAST_GAIN * beyond.tau):
        before = f"{within.tau:.2f} before and " if within.steps else ""
        yield (
            f"The drafter was trained on up to {limit:,} tokens: tau is {before}{beyond.tau:.2f} beyond. Give shorter "
            f"texts, {train_on} and --max-length."
        )
