"""Finds out why a pair accepts little: measures it as it is, and with one change at a time of what is usually wrong.

A change is tried on a copy of the drafter's modules that shares its weights, so the loaded models stay as they are.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel

from dflash.checkpoints import Card
from dflash.common.cards import stated_taus
from dflash.common.fingerprints import model_fingerprint
from dflash.common.messages import first_line
from dflash.common.provenance import environment, record
from dflash.dialects import rope_theta
from dflash.model.generation_dflash import generate_blocks

from .measurements import rounded
from .methods import EAGER
from .results import grouped
from .task_answers import chat_encoder
from .timing import Progress, silent, tau


# A change helps if tau rises by a twentieth over all prompts, and rises on two of three.
LEAST_GAIN = 1.05
SHARE_OF_PROMPTS = 2 / 3
OF_PROMPTS = ("thinking", "template")  # kinds of changes after which the target writes another text
MOST_MASKS = 6  # other mask tokens that are tried, at most
NO_CARD = Card(Path(), {}, "", {})
TRAIN_ON = "or train on with `dflash train --init`"

# The default prompts: a question of each kind that drafters are usually measured on.
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
class VerifyStep:
    """A verify step: the prompt's number, the tokens before the block, the proposals and how many were accepted."""

    prompt: int
    position: int
    num_proposals: int
    num_accepted: int


@dataclass(frozen=True)
class Trial:
    """A change of the setup, and what was accepted with it."""

    kind: str  # what the change is about; one change of a kind is advised
    change: str  # empty for the pair as it is
    reason: str  # what it differs from
    setup: Setup
    steps: tuple[VerifyStep, ...] = ()
    error: str = ""  # why it could not be measured

    @property
    def worth(self) -> float:
        """tau; 1 where no step was measured, which is plain decoding's value."""
        return worth_of(self.steps)

    def accepted_at(self) -> list[float | None]:
        """For position 1, 2, …: the share of proposals there that were accepted."""
        proposed: Counter[int] = Counter()
        accepted: Counter[int] = Counter()
        for step in self.steps:
            proposed.update(range(step.num_proposals))
            accepted.update(range(step.num_accepted))
        shares = []
        for position in sorted(proposed):
            share = accepted[position] / proposed[position]
            shares.append(rounded(share))
        return shares

    def helps(self, before: Trial) -> bool:
        """Whether more is accepted than in `before`, by more than chance and rounding explain."""
        if self.worth < LEAST_GAIN * before.worth:
            return False
        old = grouped(before.steps, lambda step: step.prompt)
        new = grouped(self.steps, lambda step: step.prompt)
        prompts = old.keys() | new.keys()
        num_better = 0
        for prompt in prompts:
            num_better += worth_of(new.get(prompt, [])) > worth_of(old.get(prompt, []))
        return num_better >= SHARE_OF_PROMPTS * len(prompts)

    def row(self, after: Sequence[str] = ()) -> dict[str, Any]:
        """The row of a result; `after` names the changes that were kept before this one."""
        row = {
            "change": self.change,
            "after": list(after),
            "tau": rounded(tau_of(self.steps)),
            "steps": len(self.steps),
            "accepted_at": self.accepted_at(),
        }
        if not self.steps:
            row["error"] = self.error or "the texts end before a draft"
        return row


def tau_of(steps: Sequence[VerifyStep]) -> float:
    """Mean acceptance length; NaN without a step."""
    return tau([step.num_accepted + 1 for step in steps])


def worth_of(steps: Sequence[VerifyStep]) -> float:
    """tau; 1 without a step, which is plain decoding's value."""
    return tau_of(steps) if steps else 1.0


def run_doctor(
    target: PreTrainedModel,
    setup: Setup,
    tokenizer: Any,
    dialogues: Sequence[list[dict[str, str]]],
    max_new_tokens: int = 128,
    card: Card | None = None,
    decoding: dict[str, Any] | None = None,
    progress: Progress = silent,
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
    card = card or NO_CARD
    taus = stated_taus(card.fields, card.text, card.facts)
    possible = partial(changes, target=target, tokenizer=tokenizer, dialogues=dialogues)
    measure = partial(_measured, target, tokenizer, dialogues, max_new_tokens)
    first = measure({}, Trial("", "", "", setup))
    kept, rows = _search(first, possible, measure, progress)
    if first.error and len(kept) == 1:
        raise ValueError(first.error)
    of_names = _of_names(tokenizer, card, names.get("target"))
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
        published=[{"measured_on": where, "tau": figure} for where, figure in taus],
        summary=rows,
        advice=_advice(kept),
        observations=[*_of_target(target, card), *of_names, *_of_lengths(first, card)],
    )


def _search(
    first: Trial,
    possible: Callable[[Setup], Iterable[Trial]],
    measure: Callable[..., Trial],
    progress: Progress,
) -> tuple[list[Trial], list[dict[str, Any]]]:
    """The trials that are kept, each on top of those before it, and a row for every trial."""
    kept = [first]
    rows = [first.row()]
    while True:
        best = kept[-1]
        kinds = [trial.kind for trial in kept]
        todo = [trial for trial in possible(best.setup) if trial.kind not in kinds]
        after = [trial.change for trial in kept[1:]]
        num_steps = Counter(step.prompt for step in best.steps)
        helping = []
        for trial in progress(todo, "Trying"):
            most = {} if trial.kind in OF_PROMPTS else num_steps
            tried = measure(most, trial)
            rows.append(tried.row(after))
            if tried.helps(best):
                helping.append(tried)
        if not helping:
            return kept, rows
        best_helping = max(helping, key=lambda trial: trial.worth)
        kept.append(best_helping)


def _advice(kept: Sequence[Trial]) -> list[dict[str, Any]]:
    """The changes that are kept, with what each gains."""
    advice = []
    for before, trial in pairwise(kept):
        gain = {"tau_before": rounded(before.worth), "tau": rounded(trial.worth)}
        advice.append({"change": trial.change, "reason": trial.reason, **gain})
    return advice


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
            length = input_ids.shape[1]
            num_steps = 0
            for block in generate_blocks(trial.setup.drafter, target, input_ids, **options):
                if block.num_proposals:
                    steps.append(VerifyStep(number, length, block.num_proposals, block.num_accepted))
                    num_steps += 1
                length += len(block.token_ids)
                if num_steps and num_steps == most.get(number):  # what helps takes fewer steps for as many tokens
                    break
    except (ValueError, RuntimeError) as error:
        return replace(trial, error=first_line(error))
    return replace(trial, steps=tuple(steps))


def changes(setup: Setup, target: PreTrainedModel, tokenizer: Any, dialogues: Sequence[Any]) -> Iterator[Trial]:
    """One change of `setup` for each thing that usually is wrong, without those that change nothing here."""

    def prompts(setup: Setup) -> list[list[int]]:
        encode = chat_encoder(tokenizer, setup.thinking, setup.chat_template)
        with suppress(ValueError):  # which the trial says
            return [encode(dialogue)[0].tolist() for dialogue in dialogues]
        return []

    own_prompts = prompts(setup)
    other = replace(setup, thinking=not setup.thinking)
    if prompts(other) != own_prompts:
        switch = "on" if other.thinking else "off"
        reason = f"enable_thinking={other.thinking}: its text changes too"
        yield Trial("thinking", f"thinking {switch}", reason, other)
    other = replace(setup, chat_template=not setup.chat_template)
    if prompts(other) != own_prompts:
        word = "with" if other.chat_template else "without"
        reason = "the target is asked otherwise: its text changes too"
        yield Trial("template", f"prompts {word} the chat template", reason, other)
    config: Any = setup.drafter.config
    sizes = target.config.get_text_config(decoder=True)
    variants = chain(
        _other_taps(config, sizes.num_hidden_layers),
        _other_masks(config, sizes.vocab_size, tokenizer),
        _other_anchor(config),
        _other_rope(config, sizes),
    )
    for kind, change, reason, fields in variants:
        changed = replace(setup, drafter=_copy(setup.drafter, fields))
        yield Trial(kind, change, reason, changed)
    yield from _other_dtypes(setup, target.dtype)


# What a change is about, the change, what it differs from, and the other fields of the drafter's config.
Variant = tuple[str, str, str, dict[str, Any]]


def _other_taps(config: Any, num_layers: int) -> Iterator[Variant]:
    own = config.target_layer_ids
    reason = f"config.json says {own}"
    for shift in (-1, 1):
        ids = [layer_id + shift for layer_id in own]
        if ids[0] >= 0 and ids[-1] < num_layers - 1:
            yield "taps", f"target_layer_ids {ids}", reason, {"target_layer_ids": ids}


def _other_masks(config: Any, vocab_size: int, tokenizer: Any) -> Iterator[Variant]:
    """Other ids that may have filled the blocks of the training run, the likeliest first."""
    tokens = tokenizer.get_vocab()
    names: dict[int | None, str] = {}
    for token, token_id in sorted(tokens.items(), key=lambda entry: entry[1]):
        if "mask" in token.lower() and not token.isalnum():
            names[token_id] = token
    names.setdefault(tokenizer.mask_token_id, "the tokenizer's mask token")
    names.setdefault(max(tokens.values()) + 1, "the first row of the embedding that no token has")
    names.setdefault(tokenizer.pad_token_id, "the pad token")
    names.setdefault(tokenizer.unk_token_id, "the unknown token")
    names.setdefault(vocab_size - 1, "the last row of the embedding")
    names.setdefault(0, "the first row of the embedding")
    own = config.mask_token_id
    others = [token_id for token_id in names if token_id not in (None, own)]
    possible = [token_id for token_id in others if token_id < vocab_size]
    for token_id in possible[:MOST_MASKS]:
        reason = f"{names[token_id]}; config.json says {own}"
        yield "mask", f"mask_token_id {token_id}", reason, {"mask_token_id": token_id}


def _other_anchor(config: Any) -> Iterator[Variant]:
    own = config.sample_from_anchor
    change = f"sample_from_anchor {str(not own).lower()}"
    yield "anchor", change, f"config.json says {str(own).lower()}", {"sample_from_anchor": not own}


def _other_rope(config: Any, target_config: Any) -> Iterator[Variant]:
    own = rope_theta(config.to_dict())
    theta = rope_theta(target_config.to_dict())
    if own is None or theta is None or own == theta:
        return
    fields: dict[str, Any] = {"rope_theta": theta}
    parameters = getattr(config, "rope_parameters", None)
    if parameters:  # transformers 5 reads it there
        fields["rope_parameters"] = {**parameters, "rope_theta": theta}
    reason = f"that of the target; config.json says {own:g}"
    yield "rope", f"rope_theta {theta:g}", reason, fields


def _other_dtypes(setup: Setup, target_dtype: torch.dtype) -> Iterator[Trial]:
    drafter: Any = setup.drafter
    if getattr(drafter.config, "quantization_config", None):
        return
    for dtype in dict.fromkeys((torch.float32, target_dtype)):
        if dtype != drafter.dtype:
            with suppress(torch.OutOfMemoryError):  # other changes can be tried
                changed = copy.deepcopy(drafter).to(dtype)
                reason = f"it was loaded in {_name(drafter.dtype)}"
                yield Trial("dtype", f"drafter in {_name(dtype)}", reason, replace(setup, drafter=changed))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _copy(drafter: Any, fields: Mapping[str, Any]) -> Any:
    """Modules and a config of their own, with other fields; the tensors are the drafter's."""
    shared = {}
    for tensor in [*drafter.parameters(), *drafter.buffers()]:
        shared[id(tensor)] = tensor
    changed = copy.deepcopy(drafter, shared)
    for name, value in fields.items():
        setattr(changed.config, name, value)
    if "rope_theta" in fields:
        changed.rotary_emb = type(changed.rotary_emb)(changed.config).to(drafter.device)
    return changed


def _of_target(target: PreTrainedModel, card: Card) -> Iterator[str]:
    """Says if the target is quantised, or is not the one of the training."""
    quantised: Any = getattr(target.config, "quantization_config", None)
    if quantised:
        method = quantised["quant_method"] if isinstance(quantised, dict) else quantised.quant_method
        name = getattr(method, "value", method)
        yield (
            f"The target is quantised ({name}), and its hidden states differ from those that the drafter learned to read: "
            f"compare with the whole target, {TRAIN_ON}."
        )
    trained_for = card.facts.get("target") or {}
    revision = trained_for.get("revision")
    own_revision = getattr(target.config, "_commit_hash", None)
    is_whole = not quantised and not any(parameter.is_meta for parameter in target.parameters())
    fingerprint = trained_for.get("fingerprint")
    if is_whole and fingerprint and fingerprint != model_fingerprint(target):
        weights = f"revision {revision}" if revision and revision != own_revision else "those of its training"
        yield f"The target's weights are not those that the drafter was trained for: load {weights}, {TRAIN_ON}."
    elif revision and own_revision and revision != own_revision:
        yield f"The drafter was trained for revision {revision} of the target, and this is {own_revision}."


def _of_names(tokenizer: Any, card: Card, name: str | None) -> Iterator[str]:
    """Says if the card names another target than `name`, and if there is no chat template."""
    bases = card.fields.get("base_model") or []
    if isinstance(bases, str):
        bases = [bases]
    known = list(map(_last_part, bases))
    if known and name and _last_part(name) not in known:
        yield f"The card names {', '.join(bases)} as the target, and this is {name}: load that one, {TRAIN_ON}."
    if not tokenizer.chat_template:
        yield "The tokenizer has no chat template, in which most drafters are trained: load the target's own."


def _last_part(name: str) -> str:
    return name.split("/")[-1].lower()


def _of_lengths(first: Trial, card: Card) -> Iterator[str]:
    """Says if less is accepted beyond the length of the training's texts."""
    settings = card.facts.get("settings") or {}
    config: Any = first.setup.drafter.config
    limit = settings.get("max_length") or config.max_position_embeddings
    within = [step for step in first.steps if step.position < limit]
    beyond = [step for step in first.steps if step.position >= limit]
    if not beyond or tau_of(within) < LEAST_GAIN * tau_of(beyond):
        return
    before = ""
    if within:
        before = f"{tau_of(within):.2f} before and "
    yield (
        f"The drafter was trained on up to {limit:,} tokens: tau is {before}{tau_of(beyond):.2f} beyond. Give shorter texts, "
        f"{TRAIN_ON} and --max-length."
    )
