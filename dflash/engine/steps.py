"""When a step runs as one function, what holds it to eager steps, and what happens where it fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from dflash.model.acceptance_dflash import Acceptance, Proposals, rule_of
from dflash.model.attention_dflash import attention_of, step_attention
from dflash.model.cache_dflash import to_device
from dflash.model.decoding_dflash import EagerRunner, Step
from dflash.model.drafting_dflash import Context, num_proposals
from dflash.model.sequences_dflash import TextSequence
from dflash.model.targets_dflash import Layout

from .lookup import LookupProposer, Matches
from .state import PairState
from .whole import Inputs, Kind, State, Storage, WholeStep, whole_step


# Largest difference between outputs of compiled and eager steps, relative to the largest output.
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 5e-2
FEWEST_SAME_TOKENS = 0.75  # of all: near-ties may differ
CAPTURING = "transformers.utils.output_capturing"  # has hooks of its own, which stay


@dataclass(frozen=True)
class Plan:
    """What a step verifies."""

    matches: Matches
    drafts: bool  # whether the drafter runs: not where a single text has a match
    num_proposals: int  # longer matches in a batch are shortened


class WholeRunner(EagerRunner):
    """Runs a step as one function where that is possible, else eagerly. If it ever fails, the pair's texts go on eagerly."""

    keyword: ClassVar[str]  # that asks for it
    is_asked_for: ClassVar[bool] = True  # else no warning says that these models cannot have whole steps
    takes_lookups: ClassVar[bool] = False  # whether steps that verify what was looked up run whole

    @cached_property
    def pair(self) -> PairState:
        """What the engine has made of the two models."""
        return PairState.of(self.request.drafter, self.request.target)

    @cached_property
    def kind(self) -> Kind:
        """The kind of this text's steps."""
        verification = self.acceptor.verification
        if verification == "auto" and not self._draws:
            verification = "match"
        return Kind(
            block_size=self.request.block_size,
            num_proposals=num_proposals(self.request),
            num_candidates=getattr(self.acceptor.sampler, "num_candidates", None),
            verification=verification,
            is_batch=len(self.request.input_ids) > 1,
        )

    @cached_property
    def _draws(self) -> bool:
        """Whether drafts are drawn."""
        proposer: Any = self.proposer  # a `DraftProposer` or a `LookupProposer`
        return bool(proposer.draws)

    @cached_property
    def _takes_matches(self) -> bool:
        """Whether a step with matches can be whole.

        In a batch under "match" alone: it is narrower than an eager one, and other rules draw a number for each column.
        """
        return self.takes_lookups and (not self.kind.is_batch or self.kind.verification == "match")

    def compute(self, state: State) -> WholeStep:
        """The whole step after `state`."""
        raise NotImplementedError

    def run(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Step:
        """As `EagerRunner.run`."""
        if not self._may_be_whole():
            return super().run(sequences, anchors, most)
        plan = self._plan(sequences)
        if most < plan.num_proposals or (plan.matches and not self._takes_matches):
            return super().run(sequences, anchors, most)
        draws_fresh = self.kind.verification != "match"
        mark = self.acceptor.uniforms_of.mark() if draws_fresh else None
        try:
            return self.run_whole(sequences, anchors, plan)
        except Exception as error:  # of any type: a model, a quantiser, a missing compiler, or no memory raises it
            self.close()
            self.give_up(error)
        if mark is not None:
            self.acceptor.uniforms_of.go_back(mark)
        return super().run(sequences, anchors, most)

    def give_up(self, error: Exception) -> None:
        """Has the pair's texts go on eagerly."""
        self.pair.give_up(self.keyword, f"{error!r:.200}")

    def _may_be_whole(self) -> bool:
        """Whether nothing stands against a whole step: no earlier failure, and no hook or dispatch mode that watches it."""
        if self.keyword in self.pair.reasons:
            return False
        models = (self.request.target, self.request.drafter)
        is_hooked = any(model._forward_hooks or model._forward_pre_hooks for model in models)
        return not is_hooked and not is_in_torch_dispatch_mode()

    def _plan(self, sequences: list[TextSequence]) -> Plan:
        """What the next step verifies."""
        lookup = self.proposer
        matches = lookup.matches(sequences) if isinstance(lookup, LookupProposer) else {}
        if self._draws and len(matches) < len(sequences):
            matches = {}  # beside drawn proposals nothing is looked up
        if matches and not self.kind.is_batch:
            return Plan(matches, drafts=False, num_proposals=len(matches[0]))
        return Plan(matches, drafts=True, num_proposals=self.kind.num_proposals)

    # What is compiled and recorded outlives a text, and serves the next one in inference mode and outside.
    @torch.inference_mode(False)
    @torch.no_grad()
    def run_whole(self, sequences: list[TextSequence], anchors: torch.Tensor, plan: Plan) -> Step:
        """A step as one function."""
        state = self._state(sequences, anchors, plan)
        with self.pair.lock, step_attention(self.request.target):
            output = self.compute(state)
            self.pair.remember_models()
        # The caches hold the context, then the step's columns, which `keep` rolls back.
        if plan.drafts:
            context = self.conversation.context
            context.cache.advance(context.waiting.num_real)
            context.mark_read()
        width = output.features.shape[1]
        counts = [width] * len(sequences)
        self.conversation.target_cache.advance(counts)
        acceptance = Acceptance(output.num_accepted, output.token_ids)
        proposals = Proposals(output.proposed_ids, looked_up=tuple(plan.matches))
        return Step(proposals, acceptance, output.features)

    def _state(self, sequences: list[TextSequence], anchors: torch.Tensor, plan: Plan) -> State:
        """The state of the sequences."""
        device = anchors.device
        context = self.conversation.context
        if not any(context.cache.lengths):
            context.absorb()  # a cache has storage once something was read
        waiting = self._context_to_read() if plan.drafts else context.nothing
        acceptor = self.acceptor
        sampler = acceptor.sampler
        num_columns = plan.num_proposals + 1
        is_drawn = self._draws and plan.drafts
        draft_uniforms = None
        if is_drawn:
            draft_uniforms = acceptor.uniforms_of.fresh(sequences, plan.num_proposals, device)
        uniforms = None
        if sampler is not None:
            rule = rule_of(self.kind.verification, is_drawn)
            if rule == "match":
                uniforms = acceptor.uniforms(sequences, range(num_columns), device)
            else:
                uniforms = acceptor.uniforms_of.fresh(sequences, num_columns, device)
        return State(
            anchors=anchors.clone(),  # with the strides of a fresh tensor, also of a slice
            starts=self.conversation.target_cache.lengths_on(device),
            features=waiting.features.contiguous(),
            counts=waiting.counts,
            num_read=context.cache.lengths_on(device),
            uniforms=uniforms,
            settings=getattr(sampler, "settings", None),
            draft_uniforms=draft_uniforms,
            looked_up_ids=self._looked_up(len(sequences), plan),
        )

    def _looked_up(self, num_sequences: int, plan: Plan) -> torch.Tensor | None:
        """Proposals [R, n] that are looked up, -1 where nothing was found; `None`: nothing is looked up in such a step."""
        has_lookup = isinstance(self.proposer, LookupProposer)
        if plan.drafts and not (has_lookup and self.kind.is_batch and self._takes_matches):
            return None
        width = plan.num_proposals
        rows = []
        for place in range(num_sequences):
            found = plan.matches.get(place, [])[:width]
            missing = [-1] * (width - len(found))
            rows.append(found + missing)
        return to_device(torch.tensor(rows), self.request.input_ids.device)

    def _context_to_read(self) -> Context:
        """The context that the drafter reads, in as many columns as a drafted step gives. What has more is read before."""
        context = self.conversation.context
        num_columns = self.kind.num_proposals + 1
        if context.waiting.num_columns > num_columns:
            context.absorb()
        waiting = context.for_next_block()
        padding = num_columns - waiting.num_columns
        features = functional.pad(waiting.features, (0, 0, 0, padding))
        return Context(features, waiting.num_real)

    def inputs(self, state: State, target_storage: Storage, draft_storage: Storage) -> Inputs:
        """The inputs of a step over some storage."""
        target = self.request.target
        drafter = self.request.drafter
        return Inputs(target, drafter, self.target.layout, self.kind, state, target_storage, draft_storage)


def checked(function: Callable[[], WholeStep], inputs: Inputs) -> WholeStep:
    """The first output of a function. RuntimeError: it is not that of the same step run eagerly."""
    expected = whole_step(inputs)  # first: the caches keep what is written last
    output = function()
    if not agree(output, expected):
        raise RuntimeError("it computes something else than eagerly")
    return output


def agree(output: WholeStep, expected: WholeStep) -> bool:
    """Whether two outputs of a step are equal within rounding, up to the first proposal that differs, as near-ties may."""
    is_same_proposal = output.proposed_ids == expected.proposed_ids
    num_equal = is_same_proposal.long().cumprod(dim=1).sum(dim=1)
    first_other = int(num_equal.min())
    # Tokens before it: if drafts are drawn, the token of its own column may be that proposal.
    is_same_token = output.token_ids == expected.token_ids
    is_same_token = is_same_token[:, :first_other]
    least = FEWEST_SAME_TOKENS * is_same_token.numel()
    columns = slice(first_other + 1)
    features = expected.features[:, columns]
    largest = features.abs().max()
    largest = largest.clamp(min=1.0)
    tolerance = TOLERANCES.get(features.dtype, LOW_PRECISION_TOLERANCE)
    is_close = torch.allclose(
        output.features[:, columns],
        features,
        rtol=0.0,
        atol=float(tolerance * largest),
    )
    return is_close and bool(is_same_token.sum() >= least)


def why_not(target: Any, drafter: Any) -> str | None:
    """Why whole steps of these models cannot be compiled or recorded; `None`: they can."""
    name = type(target).__name__
    hooked = _hooked_module(target) or _hooked_module(drafter)
    if hooked is not None:
        return f"a hook of {hooked} would see no step"
    layout = Layout.of(target, drafter.config.target_layer_ids)
    attention = attention_of(drafter)
    if layout.makes_own_masks or layout.shares_keys:
        types = ", ".join(layout.types)
        return (
            f"{name} makes its own masks or shares keys between layers ({types}, {attention_of(target)!r} attention)"
        )
    if attention not in ("sdpa", "eager"):
        return f"the drafter's {attention!r} attention takes no 4-D mask"
    devices = {str(parameter.device) for model in (target, drafter) for parameter in model.parameters()}
    if len(devices) > 1:
        names = ", ".join(sorted(devices))
        return f"the models lie on several devices ({names})"
    return None


def _hooked_module(model: Any) -> str | None:
    """The name of a module inside a model that has a hook, which a whole step would freeze; `None`: none has."""
    for name, module in model.named_modules():
        if not name:  # hooks of the model itself are looked at before each step
            continue
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if not all(_is_of_library(hook) for hook in hooks):
            return f"{type(model).__name__}.{name}"
    return None


def _is_of_library(hook: Any) -> bool:
    """Whether a hook is a tap of another thread's forward, or one by which transformers collects hidden states."""
    return hasattr(hook, "is_tap") or getattr(hook, "__module__", None) == CAPTURING
