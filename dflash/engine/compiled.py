"""Compiled steps: one Inductor function for the whole step, for all lengths of text.

The first output of each function is compared with that of the same step run eagerly.
"""

from __future__ import annotations

import re
from functools import partial
from types import FunctionType
from typing import Any

import torch
from transformers.utils import logging

from dflash.common.stopwatch import stopwatch
from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.decoding_dflash import EagerRunner, Step
from dflash.model.sequences_dflash import TextSequence

from .steps import WholeRunner, checked
from .whole import Inputs, State, Storage, WholeFunction, WholeStep, whole_step


logger = logging.get_logger(__name__)

BACKEND = "inductor"  # of torch.compile
# "auto" compiles a kind of step on a CPU once eager steps of that kind have taken so long: compiling takes about a minute there
# and saves about a third of a step.
AUTO_SECONDS = 200.0
# Names of the compiler's guards on the models: their modules, attributes and weights.
OF_MODELS = re.compile(r"\b(target|drafter|layout)\b")

try:
    from transformers.utils.output_capturing import _active_collector as collector
except ImportError:  # transformers 4
    collector = None  # type: ignore[assignment]


class CompiledRunner(WholeRunner):
    """Runs whole steps compiled, by one function for each kind of step."""

    keyword = "compile"

    def compute(self, state: State) -> WholeStep:
        """As `WholeRunner.compute`."""
        target_cache = self.conversation.target_cache
        draft_cache = self.conversation.context.cache
        width = self.kind.num_proposals + 1
        num_columns = self.kind.block_size + state.features.shape[1]
        target_storage = storage_of(target_cache, max(target_cache.lengths) + width)
        draft_storage = storage_of(draft_cache, max(draft_cache.lengths) + num_columns)
        inputs = self.inputs(state, target_storage, draft_storage)
        leave_open(inputs)
        function = self.pair.functions.get(self.kind)
        if function is not None:
            return function(inputs)
        logger.warning("Steps are being compiled, a minute once; compile=False avoids it.")
        function = compile_step(inputs.target)
        output = checked(partial(function, inputs), inputs)
        self.pair.functions[self.kind] = function
        return output


class AutoRunner(CompiledRunner):
    """Runs steps of a kind eagerly until they have taken so long that compiling pays."""

    is_asked_for = False

    def run(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Step:
        """As `EagerRunner.run`."""
        seconds = self.pair.eager_seconds
        if seconds[self.kind] >= AUTO_SECONDS:
            return super().run(sequences, anchors, most)
        elapsed = stopwatch()
        step = EagerRunner.run(self, sequences, anchors, most)
        seconds[self.kind] += elapsed()
        return step


def compile_step(target: Any) -> WholeFunction:
    """`whole_step`, compiled."""
    _request_hidden_states(target)
    # Dynamo caches, and limits, compilations by code object, so each pair and kind gets its own.
    code = whole_step.__code__.replace()
    function: Any = FunctionType(code, whole_step.__globals__, whole_step.__name__)
    compiled = torch.compile(function, backend=BACKEND, fullgraph=True, options={"guard_filter_fn": _chosen_guards})

    def run(inputs: Inputs) -> WholeStep:
        try:
            return compiled(inputs)
        finally:
            # Dynamo of torch 2.13 loses variables that are set in a graph, such as the collector's.
            if collector is not None:
                collector.reset(None)

    return run


def _request_hidden_states(target: Any) -> None:
    """Lets transformers 5 add its hooks, which it does in the first such forward, under a lock that cannot be traced."""
    some_id = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    target(input_ids=some_id, use_cache=False, output_hidden_states=True, logits_to_keep=1)


def _chosen_guards(guards: Any) -> list[bool]:
    """Not the thousands of guards on the models, which take as long as the step: `fingerprint` is compared once per text."""
    return [OF_MODELS.search(guard.name) is None for guard in guards]


def storage_of(cache: PreallocatedCache, num_keys: int) -> Storage:
    """The storage of a cache. It has more room than needed: the compiler unifies sizes that are equal in the first call."""
    cache.storage(num_keys + 1)
    return Storage.of(cache, num_keys)


def leave_open(inputs: Inputs) -> None:
    """Marks the sizes that the compiler leaves open: numbers of sequences and of keys."""
    for tensor in vars(inputs.state).values():
        if tensor is not None:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
    for storage in (inputs.target_storage, inputs.draft_storage):
        torch._dynamo.maybe_mark_dynamic(storage.index, 0)
        for states in storage.tensors:
            torch._dynamo.maybe_mark_dynamic(states, [0, 2])
