"""The loop: propose a block, verify it in one forward of the target, accept a prefix, commit it.

`decode_blocks` is the loop and `EagerRunner.run` is a step. Every committed token is the target's own choice, whatever was
proposed. The package's engine has further proposers and runs steps compiled or recorded; the loop is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .acceptance_dflash import DRAFTER_BROKE, Acceptance, Acceptor, Proposals
from .cache_dflash import PreallocatedCache, chosen, to_device, to_host
from .drafting_dflash import Context, DrafterContext, DraftProposer, Proposer, packed
from .sequences_dflash import TextSequence
from .targets_dflash import Target


logger = logging.get_logger(__name__)

INITIAL_NEW_TOKENS = 1024  # initial room for new tokens; storage doubles when a text outgrows it
MOST_PROPOSALS = 2**31  # where a target does not say how many positions it has
MOST_MASKED = 2**22  # elements of the mask of a batch's prompts; prompts with a larger one are read one by one


@dataclass(frozen=True)
class Block:
    """The tokens that one forward of the target commits to one sequence of the batch, with their counts.

    Attributes:
        token_ids (`list[int]`): The committed tokens, cut where the text stops.
        num_proposals (`int`): Number of verified proposals; 0 for the prompt's block.
        num_accepted (`int`): Number of accepted proposals, before the cut.
        is_prefill (`bool`, defaults to `False`): Whether the token comes from the prompt's forward, not from a verify step.
        sequence (`int`, defaults to 0): Index of the sequence in the batch.
        is_lookup (`bool`, defaults to `False`): Whether proposals come from the text itself (`prompt_lookup_num_tokens`).
        scores (`torch.Tensor` of shape `(tokens, V)`, *optional*): Processed scores of the tokens, with `output_scores=True`.
        logits (`torch.Tensor` of shape `(tokens, V)`, *optional*): The target's logits, with `output_logits=True`.

    Example:
        >>> blocks = list(generate_blocks(drafter, target, input_ids))
        >>> tau = mean(block.acceptance_length for block in blocks if not block.is_prefill)
    """

    token_ids: list[int]
    num_proposals: int
    num_accepted: int
    is_prefill: bool = False
    sequence: int = 0
    is_lookup: bool = False
    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    @property
    def acceptance_length(self) -> int:
        """Tokens of the verify step before the cut: the accepted proposals and one of the target's own."""
        return self.num_accepted + 1


class Conversation:
    """The caches of one text, kept from call to call, so that a shared beginning is computed once.

    Pass the whole text each time. The longest prefix that the caches hold is reused; the new text does not depend on it.

    Attributes:
        token_ids (`list[int]`): The text that the caches hold.
        num_reused (`int`): Number of tokens of the last prompt that were reused.

    Example:
        >>> conversation = Conversation()
        >>> first = drafter.spec_generate(turn_1_ids, target=target, conversation=conversation)
        >>> second = drafter.spec_generate(turn_2_ids, target=target, conversation=conversation)
    """

    target_cache: PreallocatedCache
    context: DrafterContext

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.num_reused = 0
        self._models: tuple[Any, Any] | None = None

    def check(self, target: PreTrainedModel, drafter: PreTrainedModel) -> None:
        """Raises ValueError if the caches belong to other models."""
        if self._models is None:
            return
        own_target, own_drafter = self._models
        if own_target is not target or own_drafter is not drafter:
            name = type(own_target).__name__
            raise ValueError(f"The conversation was begun with another {name} or another drafter: start a new one.")

    def reuse(self, prompt_ids: list[int]) -> int:
        """Keeps the longest prefix of a prompt that the caches hold; returns its length, at most all tokens but one."""
        pairs = zip(self.token_ids, prompt_ids[:-1], strict=False)
        num_shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        # 0 where running states cannot go back.
        self.num_reused = self.target_cache.truncate(num_shared) if num_shared else 0
        self.token_ids = self.token_ids[: self.num_reused]
        if self.num_reused:
            self.context.truncate(self.num_reused)
        return self.num_reused

    def begin(self, target_cache: PreallocatedCache, context: DrafterContext, models: tuple[Any, Any]) -> None:
        """Starts with new caches of a target and a drafter."""
        self.target_cache = target_cache
        self.context = context
        self.token_ids = []
        self.num_reused = 0
        self._models = models

    def forget(self) -> None:
        """Drops the text: nothing of it is reused."""
        self.token_ids = []


@dataclass
class Step:
    """A forward of the target and what was accepted of it, which is being copied to the host."""

    proposals: Proposals
    acceptance: Acceptance
    features: torch.Tensor | None = None  # of all columns, [B, 1 + n, L * D]; None: those of a prompt, read already
    # "scores" and "logits" of the tokens, [B, 1 + n, V], if requested.
    outputs: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        num_accepted = self.acceptance.num_accepted[:, None]
        self._read = to_host(torch.cat([num_accepted, self.acceptance.token_ids], dim=1))

    def read(self) -> list[tuple[int, list[int]]]:
        """For each sequence the accepted proposals and the committed tokens. The only place where the host waits."""
        return [(num_accepted, token_ids[: num_accepted + 1]) for num_accepted, *token_ids in self._read()]


class EagerRunner:
    """Runs a step as plain operations, and keeps both caches at the committed text."""

    def __init__(
        self, request: Any, target: Target, conversation: Conversation, acceptor: Acceptor, proposer: Proposer
    ) -> None:
        self.request = request
        self.target = target
        self.conversation = conversation
        self.acceptor = acceptor
        self.proposer = proposer

    def run(self, sequences: list[TextSequence], anchors: torch.Tensor, most: int) -> Step:
        """Proposes at most `most` tokens after anchors [B, 1], verifies them, and accepts a prefix."""
        proposals = self.proposer.propose(sequences, anchors, most)
        token_ids = torch.cat([anchors, proposals.token_ids], dim=1)  # [B, 1 + n]
        logits, features = self.target.verify(token_ids, self.conversation.target_cache)
        return self.accept(sequences, proposals, logits, features)

    def accept(
        self,
        sequences: list[TextSequence],
        proposals: Proposals,
        logits: torch.Tensor,
        features: torch.Tensor | None,
    ) -> Step:
        """Accepts proposals by the target's logits [B, 1 + n, V]."""
        acceptance = self.acceptor.accept(logits, sequences, proposals)
        outputs = {}
        if "scores" in self.request.keeping and acceptance.scores is not None:
            outputs["scores"] = acceptance.scores
        if "logits" in self.request.keeping:
            outputs["logits"] = logits
        return Step(proposals, acceptance, features, outputs)

    def keep(self, step: Step, num_kept: list[int]) -> None:
        """Keeps each sequence's first `num_kept` columns of a step: the anchor and the tokens before its new anchor."""
        if step.features is None:
            return
        width = step.features.shape[1]
        self.conversation.target_cache.rollback([width - count for count in num_kept])
        self.conversation.context.append(Context(step.features[:, : max(num_kept)], num_kept))

    def keep_sequences(self, places: list[int]) -> None:
        """Drops all sequences of the batch except these."""
        self.conversation.target_cache.keep_sequences(places)
        self.conversation.context.keep_sequences(places)

    def close(self) -> None:
        """Ends the text: no step follows."""


class Decoder:
    """One request: its sequences, its caches, and the runner of its steps. `cut` is `make_cutter`'s."""

    runner: EagerRunner  # made when the prompt has been read

    def __init__(self, request: Any, acceptor: Acceptor, cut: Callable[[TextSequence, list[int]], list[int]]) -> None:
        self.request = request
        self.acceptor = acceptor
        self.cut = cut
        self.target = Target(request.target, request.drafter.config.target_layer_ids, request.prompt_inputs)
        self.conversation: Conversation = request.conversation or Conversation()
        self.sequences: list[TextSequence] = []
        self.anchors = torch.empty(0)

    # -- what the engine has variants of

    def new_caches(self, num_sequences: int, length: int) -> tuple[PreallocatedCache, DrafterContext]:
        """Empty caches of the target and the drafter, with initial room for `length` tokens."""
        target_cache = PreallocatedCache(self.target.num_layers, length, num_sequences, mixers=self.target.mixers)
        drafter = self.request.drafter
        draft_cache = PreallocatedCache(drafter.config.num_hidden_layers, length, num_sequences)
        return target_cache, DrafterContext(drafter, draft_cache)

    def new_runner(self) -> EagerRunner:
        """The runner of this request's steps, over the caches of its conversation."""
        proposer = DraftProposer(self.request, self.target, self.conversation.context, self.acceptor)
        return EagerRunner(self.request, self.target, self.conversation, self.acceptor, proposer)

    # -- the prompt

    def read_prompt(self) -> list[Block]:
        """Runs the part of the prompts that the caches do not hold, and commits the first tokens."""
        token_ids = self.request.input_ids
        mask = self.request.attention_mask
        if mask is None:
            mask = torch.ones_like(token_ids)
        is_real = mask.bool()
        self.sequences = []
        for index, prompt_ids in enumerate(token_ids):
            self.sequences.append(TextSequence(index, prompt_ids))
        if len(token_ids) == 1:
            text_ids = token_ids[is_real]
            logits = self._read_single(text_ids[None])
        else:
            self._begin(len(token_ids), token_ids.shape[1])
            logits = self._read_batch(token_ids, is_real)
        self.runner = self.new_runner()
        proposals = Proposals(token_ids[:, :0])
        return self.commit(self.runner.accept(self.sequences, proposals, logits, None))

    def _begin(self, num_sequences: int, length: int) -> None:
        """Starts new caches for prompts of `length` tokens."""
        request = self.request
        room = min(request.max_new_tokens, INITIAL_NEW_TOKENS) + 4 * request.drafter.config.block_size
        caches = self.new_caches(num_sequences, length + room)
        self.conversation.begin(*caches, (request.target, request.drafter))

    def _read_single(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Reads one prompt, token_ids [1, S], after what the conversation holds of it; logits of its last token."""
        conversation = self.conversation
        num_reused = conversation.reuse(token_ids[0].tolist())
        if not num_reused:
            self._begin(1, token_ids.shape[1])
        logits = self._read_chunks(token_ids[:, num_reused:], conversation.target_cache, conversation.context)
        conversation.token_ids = token_ids[0].tolist()
        return logits

    def _read_chunks(self, token_ids: torch.Tensor, cache: PreallocatedCache, context: DrafterContext) -> torch.Tensor:
        """Reads one text, token_ids [1, S], chunk by chunk. The context of the last chunk waits for the first draft."""
        width = token_ids.shape[1]
        chunk_size = self.request.chunk_size or width
        for begin in range(0, width, chunk_size):
            if begin:
                context.absorb()
            chunk = token_ids[:, begin : begin + chunk_size]
            logits, features = self.target.read(chunk, cache)
            context.append(Context(features, [chunk.shape[1]]))
        return logits

    def _read_batch(self, token_ids: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
        """Reads several prompts, token_ids [B, S]; logits of each one's last token, [B, 1, V]."""
        if token_ids.numel() * token_ids.shape[1] <= MOST_MASKED:
            return self._read_padded(token_ids, is_real)
        conversation = self.conversation
        last_logits = []
        for place, prompt_ids in enumerate(token_ids):
            text_ids = prompt_ids[is_real[place]][None]
            cache, context = self.new_caches(1, text_ids.shape[1])
            last_logits.append(self._read_chunks(text_ids, cache, context))
            context.absorb()
            conversation.target_cache.put_sequence(place, cache)
            conversation.context.put_sequence(place, context)
        return torch.cat(last_logits)

    def _read_padded(self, token_ids: torch.Tensor, is_real: torch.Tensor) -> torch.Tensor:
        """Reads several prompts together, with a mask that hides the padding."""
        conversation = self.conversation
        width = token_ids.shape[1]
        chunk_size = self.request.chunk_size or width
        for begin in range(0, width, chunk_size):
            columns = slice(begin, begin + chunk_size)
            is_token = is_real[:, columns]
            num_real = is_token.sum(dim=1).tolist()
            logits, features = self.target.read_batch(
                token_ids[:, columns], conversation.target_cache, is_token, num_real
            )
            conversation.context.append(packed(features, is_token, num_real))
        return logits

    def close(self) -> None:
        """Ends the text, also before it is complete."""
        if hasattr(self, "runner"):
            self.runner.close()

    # -- a step

    def run_step(self) -> Step:
        """The next step: proposed, verified, accepted."""
        return self.runner.run(self.sequences, self.anchors, self._most_proposals())

    def _most_proposals(self) -> int:
        """Number of proposals that fit into the target's positions. Blocks are not shortened at the end of a text."""
        limit = self.request.max_length
        num_new = [len(sequence.new_ids) for sequence in self.sequences]
        if self.request.max_new_tokens - min(num_new) == 1:
            return 0  # the last token needs no drafter
        longest = max(sequence.length for sequence in self.sequences)
        if limit is None:
            return MOST_PROPOSALS
        if longest > limit:
            remedy = "lower max_new_tokens or shorten the prompt"
            logger.warning_once(f"The text is longer than the target's {limit} positions: {remedy}.")
        return max(0, limit - longest - 1)

    def commit(self, step: Step) -> list[Block]:
        """Appends a step's tokens, up to where texts stop, and rolls both caches back; ValueError for logits not finite."""
        blocks = []
        for place, (sequence, outcome) in enumerate(zip(self.sequences, step.read(), strict=True)):
            num_accepted, token_ids = outcome
            if num_accepted < 0:
                raise self._broken(num_accepted)
            is_prefill = not sequence.new_ids
            committed = self.cut(sequence, token_ids)
            # Copied, because a recorded step overwrites its outputs.
            outputs: dict[str, Any] = {
                name: of_batch[place, : len(committed)].to(torch.float32, copy=True)
                for name, of_batch in step.outputs.items()
            }
            blocks.append(
                Block(
                    token_ids=committed,
                    num_proposals=step.proposals.token_ids.shape[1],
                    num_accepted=num_accepted,
                    is_prefill=is_prefill,
                    sequence=sequence.index,
                    is_lookup=place in step.proposals.looked_up,
                    **outputs,
                )
            )
        self._keep(step, blocks)
        return blocks

    def _keep(self, step: Step, blocks: Sequence[Block]) -> None:
        """Keeps what was committed in the caches, and the sequences that are not done."""
        num_kept = [len(block.token_ids) for block in blocks]
        self.runner.keep(step, num_kept)
        if step.features is not None:
            # The columns of the step hold the anchor before it and all new tokens but the last.
            new_ids = self.sequences[0].new_ids
            begin = len(new_ids) - num_kept[0] - 1
            self.conversation.token_ids += new_ids[begin:-1]
            self.runner.proposer.record(step.proposals, blocks)
        anchors = step.acceptance.anchors
        self.anchors = to_device(anchors, self.request.input_ids.device)
        self._drop_done()

    def _drop_done(self) -> None:
        """Drops the sequences that are done."""
        live = []
        for place, sequence in enumerate(self.sequences):
            if not sequence.is_done:
                live.append(place)
        if live and len(live) < len(self.sequences):
            self.runner.keep_sequences(live)
            self.anchors = chosen(self.anchors, 0, live)
        self.sequences = [self.sequences[place] for place in live]

    def _broken(self, code: int) -> ValueError:
        is_drafter = code == DRAFTER_BROKE
        model: Any = self.request.drafter if is_drafter else self.request.target
        name = "drafter" if is_drafter else "target"
        dtype = str(model.dtype).removeprefix("torch.")
        remedy = "load it in bfloat16 or float32, or check its weights"
        return ValueError(f"The {name}'s logits are NaN or infinite ({type(model).__name__} in {dtype}): {remedy}.")


@torch.no_grad()
def decode_blocks(decoder: Decoder) -> Iterator[Block]:
    """Proposes, verifies, accepts and commits blocks until every sequence is done."""
    yield from decoder.read_prompt()
    while decoder.sequences:
        step = decoder.run_step()
        yield from decoder.commit(step)
