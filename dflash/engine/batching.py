"""A batch whose sequences belong to requests of their own, and come and go one by one.

Each request reads its prompt into caches of its own (`Member`). Then its row joins the batch (`RowBatch`), whose rows are drafted and
verified together, and each is accepted by its own request's processors, uniforms and criteria. So a text is the one that
its request gets alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from dflash.common.messages import is_out_of_memory
from dflash.model.acceptance_dflash import Acceptance, Acceptor, Proposals
from dflash.model.cache_dflash import PreallocatedLayer, to_host
from dflash.model.decoding_dflash import INITIAL_NEW_TOKENS, Block, Conversation, EagerRunner, Step
from dflash.model.drafting_dflash import Context, DrafterContext, DraftProposer, num_proposals
from dflash.model.requests_dflash import Request, check_masks
from dflash.model.sequences_dflash import TextSequence
from dflash.model.targets_dflash import InexactError

from .conversations import Conversations
from .lookup import LookupProposer
from .runner import EngineDecoder
from .trees import TreeAcceptor, TreeCache


# Keywords that need a batch that stays as it is.
FIXED_BATCH = ("compile", "conversation", "cuda_graph", "draft_tree", "token_streamer")


# -- caches


class RowCache(TreeCache):
    """A cache to whose batch sequences of other caches can be added."""

    def append_sequence(self, source: RowCache, origin: int) -> None:
        """Adds a copy of sequence `origin` of another cache of the same model."""
        place = self.batch_size
        lengths = [*self.lengths, source.lengths[origin]]
        for layer, own in zip(self.attention_layers(), source.attention_layers(), strict=True):
            _copy_sequence(own, origin, layer, place)
        for index, running in self._running.items():
            running.forget()
            whole = running.layer
            own = source._running[index].layer
            _append_states(own.conv_states, origin, whole.conv_states)
            _append_states(own.recurrent_states, origin, whole.recurrent_states)
        self._num_recorded = 0
        self._set_lengths(lengths)

    def hold_sequence(self, source: RowCache, origin: int) -> None:
        """Holds a copy of sequence `origin` of another cache, and nothing else."""
        for layer, theirs in zip(self.attention_layers(), source.attention_layers(), strict=True):
            _copy_sequence(theirs, origin, layer, 0)
        row = torch.tensor([origin])
        for index, running in self._running.items():
            states = copy.deepcopy(source._running[index].layer)
            states.reorder_cache(row)
            running.layer = states
            self.layers[index] = states
        length = source.lengths[origin]
        self._set_lengths([length])


def _copy_sequence(source: PreallocatedLayer, origin: int, layer: PreallocatedLayer, place: int) -> None:
    """Copies sequence `origin` of a layer to `place` of another, which gets room for it."""
    if not source.is_initialized:  # it reads the keys of another layer
        return
    if not layer.is_initialized:
        layer.lazy_initialization(source.keys[:1], source.values[:1])
    num_missing = place + 1 - len(layer.keys)
    if num_missing > 0:
        num_added = max(num_missing, len(layer.keys))  # doubled, so that few sequences are copied again
        padding = (0, 0, 0, 0, 0, 0, 0, num_added)
        with torch.inference_mode(False):  # as in `reserve`
            padded_keys = functional.pad(layer.keys, padding)
            padded_values = functional.pad(layer.values, padding)
        layer.keys = padded_keys  # both or none, if memory lacks
        layer.values = padded_values
    end = source.length
    keys = source.keys[origin, :, :end]
    values = source.values[origin, :, :end]
    layer.reserve(end)
    layer.keys[place, :, :end] = keys
    layer.values[place, :, :end] = values


def _append_states(source: dict[int, Any], origin: int, whole: dict[int, Any]) -> None:
    """Adds sequence `origin` of a mixer's states to those of a batch."""
    for index, state in source.items():
        if state is not None:
            whole[index] = torch.cat([whole[index], state[origin : origin + 1]])


def append_context(context: DrafterContext, source: DrafterContext, origin: int) -> None:
    """Adds sequence `origin` of a drafter's context, of which nothing waits, to a batch."""
    cache: Any = context.cache  # a `RowCache`
    cache.append_sequence(source.cache, origin)
    waiting = context.waiting
    features = functional.pad(waiting.features, (0, 0, 0, 0, 0, 1))
    context.waiting = Context(features, [*waiting.num_real, 0])


# -- a request


class Member(EngineDecoder):
    """One request of a batch. It reads its prompt alone, and its row is drafted and verified by the batch.

    Attributes:
        epoch (`int`): Of the batch when its prompt began to be read.
        error (`Exception`, *optional*): Why its text has ended early, or ends with the batch's next step.
        place (`int`): Its place in the caches that hold its prompt.
    """

    epoch = 0
    place = 0
    may_reuse = False  # a manager keeps conversations itself

    def __init__(
        self, request: Request, acceptor: Acceptor, cut: Callable[[TextSequence, list[int]], list[int]]
    ) -> None:
        super().__init__(request, acceptor, cut)
        keywords = {**vars(self.options), **vars(request)}
        for name in FIXED_BATCH:
            if keywords[name] not in (None, False, 0, "auto"):
                fault = f"{name} needs a batch that stays as it is, and requests come and go"
                raise InexactError(f"{fault}: leave it out.")
        check_masks({"target": request.target, "drafter": request.drafter}, "pass one prompt at a time to generate")
        # A window would need rows of its own; the drafter reads the whole text instead.
        self.options = replace(self.options, draft_window=None)
        self.error: Exception | None = None

    def new_caches(self, num_sequences: int, length: int) -> tuple[RowCache, DrafterContext]:
        """Empty caches that can join a batch."""
        drafter = self.request.drafter
        target_cache = RowCache(self.target.num_layers, length, num_sequences, mixers=self.target.mixers)
        draft_cache = RowCache(drafter.config.num_hidden_layers, length, num_sequences)
        return target_cache, DrafterContext(drafter, draft_cache)

    def accept_first(self, logits: torch.Tensor) -> Block:
        """Commits the first token, by logits [1, 1, V] after the prompt."""
        input_ids = self.request.input_ids
        self.sequences = [TextSequence(0, input_ids[0])]
        no_proposer: Any = None
        self.runner = EagerRunner(self.request, self.target, self.conversation, self.acceptor, no_proposer)
        nothing = Proposals(input_ids[:, :0])
        step = self.runner.accept(self.sequences, nothing, logits, None)
        [block] = self.commit(step)
        del self.runner  # it holds the caches, of which the batch gets a copy
        return block

    @property
    def most_columns(self) -> int:
        """Columns that a step may have: the anchor's, and those of proposals."""
        request = self.request
        most = max(num_proposals(request), self.options.prompt_lookup_num_tokens)
        return max(request.block_size, 1 + most)

    @property
    def longest(self) -> int:
        """Positions that the text and the last step may need."""
        return self.room(self.request.max_new_tokens)

    def room(self, num_new: int) -> int:
        """Positions of the prompt, `num_new` tokens and a step."""
        return self.request.input_ids.shape[1] + num_new + self.most_columns


def read_prompts(members: list[Member]) -> Iterator[torch.Tensor | None]:
    """Reads prompts together, or one after what its conversation holds of it, a chunk before each `next`.

    The last `next` gives logits after each prompt, [B, 1, V]; those before give `None`. Several prompts are one chunk.
    """
    leader = members[0]
    size: Any = leader.request.prefill_chunk_size
    texts = [member.request.input_ids[0] for member in members]
    token_ids = pad_sequence(texts, batch_first=True)  # on the right, where no token sees it
    width = token_ids.shape[1]
    conversation = leader.conversation
    start = conversation.reuse(texts[0].tolist())
    if not start:
        leader._begin(len(members), width)
    for place, member in enumerate(members):
        member.conversation = conversation
        member.place = place
    logits = None
    for begin in range(start, width, size):
        if begin > start:
            yield None
        num_real = [min(len(text) - begin, size) for text in texts]
        chunk = token_ids[:, begin : begin + size]
        logits, features = leader.target.read(chunk, conversation.target_cache, num_real)
        conversation.context.append(Context(features, num_real))
        conversation.context.absorb()
    yield logits


# -- the batch


class BatchUniforms:
    """The uniforms of each row: those of its own request. Sequences have the numbers of their requests."""

    def __init__(self, members: dict[int, Member]) -> None:
        self.members = members

    def __call__(self, number: int, start: int, count: int) -> torch.Tensor:
        """As `PositionUniforms`."""
        uniforms: torch.Tensor = self.members[number].acceptor.uniforms_of(0, start, count)
        return uniforms

    def fresh(self, sequences: Sequence[TextSequence], count: int, device: torch.device) -> torch.Tensor:
        """As `PositionUniforms.fresh`."""
        rows = []
        for sequence in sequences:
            member = self.members[sequence.index]
            rows.append(member.acceptor.uniforms_of.fresh(member.sequences, count, device))
        return torch.cat(rows)


class BatchAcceptor(TreeAcceptor):
    """Accepts each row as its own request does. All have the same settings."""

    def __init__(self, request: Request, processors: Sequence[Any], members: dict[int, Member]) -> None:
        super().__init__(request, [processors], lambda text_ids: False)
        self.members = members
        if self.uniforms_of is not None:
            self.uniforms_of = BatchUniforms(members)
        self._sampler = self.sampler  # of rows whose processors are those of `request`

    def accept(self, logits: torch.Tensor, sequences: list[TextSequence], proposals: Proposals) -> Acceptance:
        """As `Acceptor.accept`, with nothing accepted where logits are not finite; `read_codes` says where."""
        acceptance = super().accept(logits, sequences, proposals)
        self.read_codes = to_host(acceptance.num_accepted)
        num_accepted = acceptance.num_accepted.clamp(min=0)
        return replace(acceptance, num_accepted=num_accepted)

    def process(self, logits: torch.Tensor, sequences: list[TextSequence], proposals: Proposals) -> torch.Tensor:
        """As `Acceptor.process`. A request with its own stop token may have further processors."""
        kinds = [type(processor) for processor in self.processors]
        is_alike = True
        for sequence in sequences:
            own = self.members[sequence.index].acceptor.processors
            is_alike &= [type(processor) for processor in own] == kinds
        self.sampler = self._sampler if is_alike else None  # it stands for the processors of all rows
        process = super().process if is_alike else self.process_each
        return process(logits, sequences, proposals)

    def process_sequence(self, scores: torch.Tensor, sequence: TextSequence, place: int, proposals: Proposals) -> None:
        """As `Acceptor.process_sequence`. What fails ends this request alone."""
        member = self.members[sequence.index]
        member.acceptor.sampler = None  # its processors are called
        try:
            member.acceptor.process_sequence(scores, member.sequences[0], place, proposals)
        except Exception as error:  # of any type: the processor raises it
            member.error = error


class RowRunner(EagerRunner):
    """Runs the steps of a batch and tells it where its caches hold what a step has committed."""

    has_kept: Callable[[], None]

    def keep(self, step: Step, num_kept: list[int]) -> None:
        """As `EagerRunner.keep`."""
        super().keep(step, num_kept)
        self.has_kept()


class RowBatch(Member):
    """The rows of many requests, drafted and verified together.

    Attributes:
        epoch (`int`): Raised where the models may have changed: rows that began before are not kept.
        members (`dict[int, Member]`): The requests of its rows, by number, which is the index of their sequence.
        conversations (`Conversations`, *optional*): What keeps the caches of rows that end.
    """

    members: dict[int, Member]
    acceptor: BatchAcceptor
    conversations: Conversations | None = None

    def __init__(self, request: Request, acceptor: Acceptor, cut: Any = None) -> None:
        self.members = {}
        own = BatchAcceptor(request, acceptor.processors, self.members)
        super().__init__(request, own, self._cut)

    def _cut(self, sequence: TextSequence, token_ids: list[int]) -> list[int]:
        """What a row's own request commits: nothing after an error."""
        member = self.members[sequence.index]
        if member.error is None:
            try:
                return member.cut(sequence, token_ids)
            except Exception as error:  # of any type: a criterion raises it
                member.error = error
        sequence.is_done = True
        return []

    def commit(self, step: Step) -> list[Block]:
        """As `Decoder.commit`. Logits that are not finite end their request alone."""
        for place, code in enumerate(self.acceptor.read_codes()):
            if code < 0:
                self.members[self.sequences[place].index].error = self._broken(code)
                self._erase(place)
        return super().commit(step)

    def _erase(self, place: int) -> None:
        """Clears a row of the caches: NaN there would spoil the next row at this place, although a mask hides it."""
        for cache in (self.conversation.target_cache, self.conversation.context.cache):
            for layer in cache.attention_layers():
                if layer.is_initialized:  # else it reads the keys of another layer
                    layer.keys[place] = 0
                    layer.values[place] = 0

    def prompt_of(self, sequence: TextSequence) -> list[int]:
        """The prompt of a row, which has no padding."""
        return sequence.prompt_ids.tolist()

    def is_whole(self, sequence: TextSequence) -> bool:
        """Whether a row has ended without an error."""
        return self.members[sequence.index].error is None

    def new_runner(self) -> EagerRunner:
        """The runner of the batch's steps."""
        runner = EngineDecoder.new_runner(self)
        runner.has_kept = self._keep_ended  # type: ignore[attr-defined]
        return runner

    def _runner_class(self, drafts: DraftProposer) -> type[EagerRunner]:
        return RowRunner  # whole steps keep their batch

    def _keep_ended(self) -> None:
        """Copies the rows that end with this step, where prompts may go on from their texts."""
        if self.conversations is None:
            return
        for place, sequence in enumerate(self.sequences):
            is_of_epoch = self.members[sequence.index].epoch == self.epoch
            if sequence.is_done and self.is_whole(sequence) and is_of_epoch:
                try:
                    conversation = self._copy(self.conversation, place, sequence.length)
                except Exception as error:  # of any type: a lack of memory
                    if not is_out_of_memory(error):
                        raise
                    self.conversations.drop_to(0)  # the rows need the memory more
                    return
                conversation.hold(self.prompt_of(sequence), sequence.new_ids)
                self.conversations.add(conversation)

    def _copy(self, whole: Any, place: int, length: int) -> Conversation:
        """A copy of one sequence of a conversation's caches, with initial room for `length` tokens."""
        target_cache, context = self.new_caches(1, length)
        target_cache.hold_sequence(whole.target_cache, place)
        draft_cache: Any = context.cache  # a `RowCache`
        draft_cache.hold_sequence(whole.context.cache, place)
        context.waiting = whole.context.waiting.of_sequences([place])
        conversation = Conversation()
        conversation.begin(target_cache, context, (self.request.target, self.request.drafter))
        return conversation

    def admit(self, number: int, member: Member) -> None:
        """Adds the row of a request whose prompt has been read. If it fails, the others stay as they were."""
        [own] = member.sequences
        row = TextSequence(number, own.prompt_ids, own.new_ids)
        source = member.conversation
        if self.sequences:
            try:
                self._append(source, member)
            except Exception:  # of any type: a lack of memory
                self.runner.keep_sequences(list(range(len(self.sequences))))
                raise
        else:
            num_new = min(member.request.max_new_tokens, INITIAL_NEW_TOKENS)
            self.conversation = self._copy(source, member.place, member.room(num_new))
            self.runner = self.new_runner()
            self.anchors = member.anchors
        self.members[number] = member
        self.sequences = [*self.sequences, row]
        member.conversation = Conversation()  # the batch holds a copy

    def _append(self, source: Conversation, member: Member) -> None:
        cache: Any = self.conversation.target_cache  # a `RowCache`
        cache.append_sequence(source.target_cache, member.place)
        append_context(self.conversation.context, source.context, member.place)
        self.anchors = torch.cat([self.anchors, member.anchors])

    def leave(self, number: int) -> None:
        """Forgets a request whose row has left. The caches of the last one are freed."""
        del self.members[number]
        if not self.members:
            self.clear()
            return
        proposer = self.runner.proposer
        if isinstance(proposer, LookupProposer):
            proposer.forget(number)

    def clear(self) -> None:
        """Drops all rows and their caches."""
        self.members.clear()
        self.sequences = []
        self.conversation = Conversation()
        if hasattr(self, "runner"):
            del self.runner  # it holds the caches, too
