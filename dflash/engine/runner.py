"""The engine's side of the loop: which caches, proposers and steps a request gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from dflash.common.stopwatch import stopwatch
from dflash.model.acceptance_dflash import Acceptance, Acceptor, Proposals
from dflash.model.attention_dflash import step_attention
from dflash.model.cache_dflash import PreallocatedCache, to_device
from dflash.model.decoding_dflash import INITIAL_NEW_TOKENS, Decoder, EagerRunner, Step
from dflash.model.drafting_dflash import Context, DrafterContext, DraftProposer, Proposer
from dflash.model.requests_dflash import Request
from dflash.model.sequences_dflash import TextSequence

from .compiled import is_watched
from .lookup import LookupProposer
from .options import Options
from .recorded import Recording, capacity_for
from .state import PairState
from .trees import TreeAcceptance, TreeCache, TreeProposals, TreeProposer, verify_tree
from .whole import Drawn, Models, NotWholeError, Shape, State, WholeStep
from .widths import WidthProposer
from .windows import WindowedCache, WindowedContext


class EngineDecoder(Decoder):
    """The loop with the engine's proposers and steps."""

    def __init__(
        self, request: Request, acceptor: Acceptor, cut: Callable[[TextSequence, list[int]], list[int]]
    ) -> None:
        super().__init__(request, acceptor, cut)
        self.options = Options.of(request)

    def new_caches(self, num_sequences: int, length: int) -> tuple[PreallocatedCache, DrafterContext]:
        """Empty caches; the drafter's has the request's window."""
        drafter = self.request.drafter
        target_cache = TreeCache(self.target.num_layers, length, num_sequences, mixers=self.target.mixers)
        num_layers = drafter.config.num_hidden_layers
        window = self.options.draft_window
        if window is None:
            draft_cache = PreallocatedCache(num_layers, length, num_sequences)
            return target_cache, DrafterContext(drafter, draft_cache)
        windowed = WindowedCache(num_layers, sum(window), num_sequences, window=window)
        return target_cache, WindowedContext(drafter, windowed)

    def new_runner(self) -> EngineRunner:
        """The runner of this request's steps."""
        options = self.options
        # Without draws, a text depends on its seed alone, and not on the clock that chooses widths.
        may_draw = not options.adaptive
        drafts = DraftProposer(self.request, self.target, self.conversation.context, self.acceptor, may_draw)
        proposer: Proposer = drafts
        if options.num_nodes:
            proposer = TreeProposer(drafts, options.num_nodes)
        state = PairState.of(self.request.drafter, self.request.target)
        if options.adaptive:
            num_proposals = options.num_nodes or drafts.num_proposals
            is_greedy = self.acceptor.sampler is None
            setting = (self.request.block_size, options.num_nodes, options.draft_window, is_greedy)
            proposer = WidthProposer(proposer, state, num_proposals, setting)
        lookup = None
        if options.num_looked_up:
            lookup = LookupProposer(proposer, options.num_looked_up, options.ngram_size, drafts.num_proposals)
            proposer = lookup
        runner = EngineRunner(self.request, self.target, self.conversation, self.acceptor, proposer)
        runner.prepare(options, state, drafts, lookup)
        return runner


class EngineRunner(EagerRunner):
    """Runs a step as one compiled or recorded function where that is possible and asked for, else eagerly; and trees."""

    def prepare(
        self, options: Options, state: PairState, drafts: DraftProposer, lookup: LookupProposer | None
    ) -> None:
        """Decides which steps of this text can be whole."""
        request = self.request
        sampler = self.acceptor.sampler
        num_candidates = 0 if sampler is None else sampler.num_candidates
        is_batch = len(request.input_ids) > 1
        has_window = options.draft_window is not None
        self._state = state
        self._lookup = lookup
        self._recording: Recording | None = None
        self._shape = Shape(request.block_size, drafts.num_proposals, num_candidates)
        self._models = Models(request.target, request.drafter, self.target.layout)
        self._kind = (self._shape, is_batch, sampler is None, has_window)
        self._mode = self._chosen_mode(options) if self._can_be_whole(options, drafts) else None

    def _can_be_whole(self, options: Options, drafts: DraftProposer) -> bool:
        """Whether a step of this text is one function of device state: a whole chain, without a word from the host."""
        is_chain = options.num_nodes == 0 and drafts.num_proposals > 0
        needs_host = options.adaptive or drafts.draws or bool(self.request.keeping)
        return is_chain and not needs_host and self.acceptor.can_fuse and not self.request.prompt_inputs

    def _chosen_mode(self, options: Options) -> str | None:
        """How whole steps run: "compiled", "recorded", "auto" (compiled once that pays), or `None`: eagerly."""
        state = self._state
        device_type = self.request.target.device.type
        state.refresh()
        if options.cuda_graph:
            return "recorded" if state.can_record(device_type) else None
        if options.compile is True:
            return "compiled" if state.can_compile() else None
        # Never by itself on an accelerator: nothing measured there says that compiling pays.
        is_auto = options.compile == "auto" and device_type == "cpu"
        return "auto" if is_auto else None

    # -- a step

    def run(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Step:
        """As `EagerRunner.run`."""
        is_whole = most >= self._shape.num_proposals and not self._has_match(sequences)
        if self._mode is None or not is_whole or is_watched(self._models.target, self._models.drafter):
            return self._run_eager(sequences, anchors, most)
        if self._mode == "auto" and not self._state.compiled.is_due(self._kind):
            return self._run_timed(sequences, anchors, most)
        try:
            return self.run_whole(sequences, anchors)
        except NotWholeError:
            self._mode = None
            return self._run_eager(sequences, anchors, most)

    def _run_timed(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Step:
        """An eager step, which "auto" weighs."""
        elapsed = stopwatch()
        step = self._run_eager(sequences, anchors, most)
        step.read()
        self._state.compiled.note_eager(self._kind, elapsed())
        return step

    def _has_match(self, sequences: list[TextSequence]) -> bool:
        return self._lookup is not None and self._lookup.has_match(sequences)

    def _run_eager(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Step:
        proposals = self.proposer.propose(sequences, anchors, most)
        token_ids = torch.cat([anchors, proposals.token_ids], dim=1)
        cache: Any = self.conversation.target_cache  # a `TreeCache`
        if isinstance(proposals, TreeProposals):
            logits, features = verify_tree(self.target, token_ids, cache, proposals.tree)
        else:
            logits, features = self.target.verify(token_ids, cache)
        return self.accept(sequences, proposals, logits, features)

    def accept(
        self,
        sequences: list[TextSequence],
        proposals: Proposals,
        logits: torch.Tensor,
        features: torch.Tensor | None,
    ) -> Step:
        """As `EagerRunner.accept`; of a tree, the logits along the accepted path."""
        step = super().accept(sequences, proposals, logits, features)
        if isinstance(step.acceptance, TreeAcceptance) and "logits" in step.outputs:
            step.outputs["logits"] = logits[:, step.acceptance.columns]
        return step

    def keep(self, step: Step, num_kept: list[int]) -> None:
        """As `EagerRunner.keep`; of a tree, the columns of the accepted path."""
        if step.features is None or not isinstance(step.acceptance, TreeAcceptance):
            super().keep(step, num_kept)
            return
        columns = step.acceptance.columns[: num_kept[0]]
        width = step.features.shape[1]
        cache: Any = self.conversation.target_cache
        cache.keep_columns(width, columns)
        index = to_device(torch.tensor(columns), step.features.device)
        features = step.features.index_select(1, index)
        self.conversation.context.append(Context(features, num_kept))

    # -- a whole step

    # What is compiled and recorded outlives a text, and serves the next one in inference mode and outside.
    @torch.inference_mode(False)
    @torch.no_grad()
    def run_whole(self, sequences: list[TextSequence], anchors: torch.Tensor) -> Step:
        """A step as one function. NotWholeError: this text's steps have to run eagerly from now on."""
        context = self.conversation.context
        target_cache = self.conversation.target_cache
        state = self._device_state(anchors)
        drawn = self._drawn(sequences, anchors.device)
        try:
            output = self._recorded(state, drawn) if self._mode == "recorded" else self._compiled(state, drawn)
        finally:
            self._state.remember_models()
        # The caches hold the context, then the step's columns, which `keep` rolls back.
        context.cache.advance(context.waiting.num_real)
        context.mark_read()
        width = output.features.shape[1]
        target_cache.advance([width] * len(sequences))
        acceptance = Acceptance(output.num_accepted, output.token_ids)
        return Step(Proposals(output.proposed_ids), acceptance, output.features)

    def _device_state(self, anchors: torch.Tensor) -> State:
        """The state of the sequences. A context with more columns than a step gives is read before it."""
        device = anchors.device
        context = self.conversation.context
        cache = context.cache
        num_columns = self._shape.num_proposals + 1
        if context.waiting.num_columns > num_columns or not any(cache.lengths):
            context.absorb()
        waiting = context.for_next_block()
        padding = num_columns - waiting.num_columns
        features = functional.pad(waiting.features, (0, 0, 0, padding))
        starts = torch.tensor(self.conversation.target_cache.lengths)
        dropped = torch.zeros_like(starts)
        if isinstance(cache, WindowedCache):
            dropped = torch.tensor(cache.dropped)
        return State(
            anchors=anchors.clone(),  # with the strides of a fresh tensor, also of a slice
            starts=to_device(starts, device),
            features=features.contiguous(),
            counts=waiting.counts,
            dropped=to_device(dropped, device),
        )

    def _drawn(self, sequences: list[TextSequence], device: torch.device) -> Drawn | None:
        sampler = self.acceptor.sampler
        if sampler is None:
            return None
        positions = range(self._shape.num_proposals + 1)
        uniforms = self.acceptor.uniforms(sequences, positions, device)
        return Drawn(uniforms, sampler.settings)

    def _compiled(self, state: State, drawn: Drawn | None) -> WholeStep:
        caches = (self.conversation.target_cache, self.conversation.context.cache)
        return self._state.compiled.run(self._models, state, caches, self._shape, drawn, self._kind)

    def _recorded(self, state: State, drawn: Drawn | None) -> WholeStep:
        try:
            with self._state.lock, step_attention(self.request.target):
                recording = self._open_recording(state, drawn)
                return recording.run(state, drawn)
        except Exception as error:  # of any type: a model that waits for the device raises it, or no memory is left
            self.close()
            self._state.give_up_recording(error)
            raise NotWholeError from error

    def _open_recording(self, state: State, drawn: Drawn | None) -> Recording:
        """The recording that this text runs on; the text moves to a larger one when it has outgrown its own.

        It has also outgrown it if an eager step between was too wide for it, which moves a cache to other storage.
        """
        num_columns = self._shape.num_proposals + 1
        longest = max(self.conversation.target_cache.lengths)
        length = longest + 2 * num_columns + self._shape.block_size
        caches = (self.conversation.target_cache, self.conversation.context.cache)
        recording = self._recording
        if recording is not None and length <= recording.capacity and recording.holds(*caches):
            return recording
        self.close()
        room = min(self.request.max_new_tokens, INITIAL_NEW_TOKENS)
        capacity = capacity_for(length + room)
        key = (len(state.anchors), capacity, self._kind)
        recording = self._state.recordings.take(key, lambda: self._new_recording(state, drawn, capacity))
        self._recording = recording
        recording.lend(*caches)
        if recording.is_new and not recording.is_right(state, drawn):
            raise RuntimeError("recorded, it computes something else than eagerly")
        return recording

    def _new_recording(self, state: State, drawn: Drawn | None, capacity: int) -> Recording:
        target_keys = self.conversation.target_cache.storage(0)
        draft_keys = self.conversation.context.cache.storage(0)
        return Recording(self._models, state, target_keys, draft_keys, self._shape, drawn, capacity)

    def close(self) -> None:
        """Ends the text: its caches go on in storage of their own, and its recording is free for another text."""
        recording = self._recording
        if recording is None:
            return
        self._recording = None
        self.conversation.target_cache.release()
        self.conversation.context.cache.release()
        recording.is_free = True
