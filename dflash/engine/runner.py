"""The engine's side of the loop: which caches, proposers and steps a request gets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from dflash.model.acceptance_dflash import Acceptor, Proposals
from dflash.model.cache_dflash import PreallocatedCache
from dflash.model.decoding_dflash import Block, Decoder, EagerRunner, Step
from dflash.model.drafting_dflash import DrafterContext, DraftProposer, Proposer
from dflash.model.requests_dflash import Request
from dflash.model.sequences_dflash import TextSequence
from dflash.model.targets_dflash import text_config

from .compiled import AutoRunner, CompiledRunner
from .conversations import KeptConversations
from .history import History
from .lookup import LookupProposer, PromptLookup
from .options import Options
from .recorded import AutoRecordedRunner, RecordedRunner, make_room
from .state import PairState
from .steps import WholeRunner, why_not
from .together import Together
from .trees import TreeAcceptance, TreeCache, TreeProposals, TreeProposer
from .widths import WidthProposer
from .windows import WindowedCache, WindowedContext


# The runners that "auto" stands for, by kind of device. AMD's GPUs are "cuda" to torch, too, and nothing has run on one.
AUTO_RUNNERS: dict[str, type[WholeRunner]] = {"cpu": AutoRunner}
if torch.version.hip is None:
    AUTO_RUNNERS["cuda"] = AutoRecordedRunner


class EngineDecoder(Decoder):
    """The loop with the engine's proposers and steps."""

    may_reuse = True  # what `keep_conversations` keeps

    def __init__(
        self, request: Request, acceptor: Acceptor, cut: Callable[[TextSequence, list[int]], list[int]]
    ) -> None:
        super().__init__(request, acceptor, cut)
        self.options = Options.of(request)
        self.pair = PairState.of(request.drafter, request.target)
        if request.target.device.type == "cuda":
            with self.pair.lock:
                make_room(self.pair.recordings, request.input_ids.numel(), request.target.device)
        self.together: Together | None = None
        self.kept: KeptConversations | None = None
        is_single = len(request.input_ids) == 1 and not request.prompt_inputs
        if self.may_reuse and is_single and request.conversation is None:
            self.kept = getattr(request.drafter, "kept_conversations", None)
        if self.kept is not None:
            sequence = TextSequence(0, request.input_ids[0])
            prompt_ids = self.prompt_of(sequence)
            taken = self.kept.take(prompt_ids, request.target, request.drafter)
            self.conversation, self.weights = taken

    def close(self) -> None:
        """As `Decoder.close`. The caches may be kept for a later request."""
        super().close()
        if self.kept is not None:
            self.kept.give(self.conversation, self.weights, self.request.target, self.request.drafter)

    def prompt_of(self, sequence: TextSequence) -> list[int]:
        """The prompt of a sequence, without padding."""
        prompt_ids = sequence.prompt_ids
        mask = self.request.attention_mask
        if mask is not None:
            prompt_ids = prompt_ids[mask[sequence.index].bool()]
        return prompt_ids.tolist()

    def ask_together(self, criteria: list[Any]) -> None:
        """Has criteria look at all texts at once."""
        self.together = Together(self.request, criteria)

    @torch.no_grad()
    def commit(self, step: Step) -> list[Block]:
        """As `Decoder.commit`. Blocks of texts that criteria look at together come when their text has ended."""
        sequences = self.sequences
        blocks = super().commit(step)
        if self.options.history is not None:
            self._remember(self.options.history, sequences)
        for watch in self.pair.watchers:
            watch(sequences, blocks)
        together = self.together
        if together is None:
            return blocks
        ended = together.take(blocks, {sequence.index for sequence in self.sequences})
        live = [place for place, sequence in enumerate(self.sequences) if not together.is_stopped[sequence.index]]
        self._keep_live(live)
        return ended

    def _remember(self, history: History, sequences: list[TextSequence]) -> None:
        """Adds the texts that have ended to the earlier ones."""
        for sequence in sequences:
            if sequence.is_done and self.is_whole(sequence):
                history.add(self.prompt_of(sequence) + sequence.new_ids)

    def is_whole(self, sequence: TextSequence) -> bool:
        """Whether a text that has ended is the target's to its end."""
        return True

    def new_caches(self, num_sequences: int, length: int) -> tuple[PreallocatedCache, DrafterContext]:
        """Empty caches; the drafter's has the request's window."""
        drafter = self.request.drafter
        target = self.target
        target_cache = TreeCache(target.num_layers, length, num_sequences, mixers=target.mixers)
        num_layers = drafter.config.num_hidden_layers
        window = self.options.draft_window
        if window is None:
            draft_cache = PreallocatedCache(num_layers, length, num_sequences)
            return target_cache, DrafterContext(drafter, draft_cache)
        capacity = min(sum(window), length)
        windowed = WindowedCache(num_layers, capacity, num_sequences, window=window)
        return target_cache, WindowedContext(drafter, windowed)

    def new_runner(self) -> EagerRunner:
        """The runner of this request's steps."""
        request = self.request
        options = self.options
        # Without draws, a text depends on its seed alone, and not on the clock that chooses widths.
        may_draw = not options.adaptive
        drafts = DraftProposer(request, self.target, self.conversation.context, self.acceptor, may_draw)
        proposer: Proposer = drafts
        most = drafts.num_proposals
        if options.draft_tree:
            proposer = TreeProposer(drafts, options.draft_tree)
            most = options.draft_tree
        if options.adaptive and most:
            is_greedy = self.acceptor.uniforms_of is None
            kind = replace(options, history=None)  # which is large, and outlives no request
            setting = (request.block_size, kind, is_greedy)
            proposer = WidthProposer(proposer, self.pair, most, setting)
        num_looked_up = options.prompt_lookup_num_tokens
        history = options.history
        if num_looked_up or history is not None:
            ngram_size = options.max_matching_ngram_size
            vocabulary_size = text_config(request.target).vocab_size
            lookup = partial(PromptLookup, num_looked_up, ngram_size, history, drafts.num_proposals, vocabulary_size)
            proposer = LookupProposer(proposer, lookup)
        runner_class = self._runner_class(drafts)
        return runner_class(request, self.target, self.conversation, self.acceptor, proposer)

    def _runner_class(self, drafts: DraftProposer) -> type[EagerRunner]:
        """What runs this text's steps: whole where they need no word from the host and that was asked for, or pays."""
        request = self.request
        options = self.options
        if options.draft_tree:
            return TreeRunner
        needs_host = options.adaptive or options.history or request.keeping or request.prompt_inputs
        # After a lookup an eager step reads more of a window together with the block, and would draw others.
        needs_host = needs_host or (options.draft_window and drafts.draws)
        acceptor: Any = self.acceptor  # a `TreeAcceptor`
        if needs_host or not drafts.num_proposals or not acceptor.can_fuse:
            return EagerRunner
        runner_class = self._whole_runner_class()
        if runner_class is None:
            return EagerRunner
        self.pair.refresh()
        reason = why_not(request.target, request.drafter)
        if reason is None:
            return runner_class
        if runner_class.is_asked_for:
            self.pair.give_up(runner_class.keyword, reason)
        return EagerRunner

    def _whole_runner_class(self) -> type[WholeRunner] | None:
        """What runs whole steps: what was asked for, else what pays on this kind of device."""
        options = self.options
        if options.cuda_graph is True:
            return RecordedRunner
        if options.compile is True:
            return CompiledRunner
        target, drafter = self.request.target, self.request.drafter
        runner_class = AUTO_RUNNERS.get(target.device.type)
        if runner_class is None or getattr(options, runner_class.keyword) != "auto":
            return None
        if runner_class is not AutoRecordedRunner:
            return runner_class
        # Training, which a callback may pause for a text, needs the memory of recordings.
        if target.training or drafter.training or self.pair.watchers:
            with self.pair.lock:
                self.pair.recordings.clear()
            return None
        # A recording would store all keys of the drafter.
        return None if options.draft_window else runner_class


class TreeRunner(EagerRunner):
    """Verifies trees of proposals, and keeps the columns of the accepted paths."""

    def verify(self, token_ids: torch.Tensor, proposals: Proposals) -> tuple[torch.Tensor, torch.Tensor]:
        """As `EagerRunner.verify`."""
        if not isinstance(proposals, TreeProposals):
            return super().verify(token_ids, proposals)
        cache: Any = self.conversation.target_cache  # a `TreeCache`
        with cache.recording(token_ids.shape[1], proposals.ancestors):
            return self.target.verify_columns(token_ids, cache, proposals.depths, proposals.ancestors)

    def keep(self, step: Step, num_kept: list[int]) -> None:
        """As `EagerRunner.keep`."""
        if isinstance(step.acceptance, TreeAcceptance) and step.features is not None:
            cache: Any = self.conversation.target_cache
            cache.bring_to_front(step.acceptance.columns)
            step.features = step.acceptance.before_tokens(step.features)
        super().keep(step, num_kept)
