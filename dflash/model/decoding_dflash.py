"""The loop: propose a block, verify it in one forward of the target, accept a prefix, commit it.

`decode_blocks` is the loop and `EagerRunner.run` is a step. Whatever is proposed, the text is the target's: its own choices, or drawn
from its distribution (`acceptance_dflash`). The package's engine has further proposers and runs steps compiled or recorded; the loop is
the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .acceptance_dflash import DRAFTER_BROKE, Acceptance, Acceptor, Proposals
from .cache_dflash import PreallocatedCache, chosen, to_device, to_host
from .drafting_dflash import Context, DrafterContext, DraftProposer, Proposer
from .sequences_dflash import TextSequence
from .targets_dflash import Target


logger = logging.get_logger(__name__)

INITIAL_NEW_TOKENS = 1024  # initial room for new tokens; storage doubles when a text outgrows it
MOST_PROPOSALS = 2**31  # where a target does not say how many positions it has


@dataclass(frozen=True)
class Block:
    """The tokens that one forward of the target commits to one sequence of the batch, with their counts.

    Attributes:
        token_ids (`list[int]`): The committed tokens, cut where the text stops.
        num_proposals (`int`): Number of verified proposals; 0 for the prompt's block.
        num_accepted (`int`): Number of accepted proposals, before the cut.
        is_prefill (`bool`, defaults to `False`): Whether the token comes from the prompt's forward, not from a verify step.
        sequence (`int`, defaults to 0): Index of the sequence in the batch.
        is_lookup (`bool`, defaults to `False`): Whether proposals come from the text itself or from earlier ones.
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
        num_reused (`int`): Number of tokens of the last prompt that were reused.

    Example:
        >>> conversation = Conversation()
        >>> first = drafter.spec_generate(turn_1_ids, target=target, conversation=conversation)
        >>> second = drafter.spec_generate(turn_2_ids, target=target, conversation=conversation)
    """

    target_cache: PreallocatedCache
    context: DrafterContext

    def __init__(self) -> None:
        self.num_reused = 0
        self._prompt_ids: list[int] = []
        self._new_ids: list[int] = []
        self._models: tuple[Any, Any] | None = None

    @property
    def token_ids(self) -> list[int]:
        """The text that the caches hold: all tokens but the last, which is the next anchor."""
        return self._prompt_ids + self._new_ids[:-1]

    def hold(self, prompt_ids: list[int], new_ids: list[int]) -> None:
        """Says that the caches hold a prompt and the new tokens that are appended to `new_ids`."""
        self._prompt_ids = prompt_ids
        self._new_ids = new_ids

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
        num_shared = 0
        for own_id, prompt_id in zip(self.token_ids, prompt_ids[:-1], strict=False):
            if own_id != prompt_id:
                break
            num_shared += 1
        # 0 where running states cannot go back.
        self.num_reused = self.target_cache.truncate(num_shared) if num_shared else 0
        if self.num_reused:
            self.context.truncate(self.num_reused)
        return self.num_reused

    def begin(self, target_cache: PreallocatedCache, context: DrafterContext, models: tuple[Any, Any]) -> None:
        """Starts with new caches of a target and a drafter."""
        self.target_cache = target_cache
        self.context = context
        self.num_reused = 0
        self._models = models

    def is_of(self, new_ids: list[int]) -> bool:
        """Whether the text that it holds is still the one with these new tokens."""
        return self._new_ids is new_ids

    def forget(self) -> None:
        """Drops the text: nothing of it is reused."""
        self.hold([], [])


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
        numbers = torch.cat([num_accepted, self.acceptance.token_ids], dim=1)
        self._read = to_host(numbers)

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
        logits, features = self.verify(token_ids, proposals)
        return self.accept(sequences, proposals, logits, features)

    def verify(self, token_ids: torch.Tensor, proposals: Proposals) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and context features of anchors and proposals, token_ids [B, 1 + n], which `keep` rolls back."""
        return self.target.verify(token_ids, self.conversation.target_cache)

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
            outputs["logits"] = acceptance.before_tokens(logits)
        return Step(proposals, acceptance, features, outputs)

    def keep(self, step: Step, num_kept: list[int]) -> None:
        """Keeps each sequence's first `num_kept` columns of a step: the anchor and the tokens before its new anchor."""
        if step.features is None:
            return
        width = step.features.shape[1]
        num_dropped = [width - count for count in num_kept]
        self.conversation.target_cache.rollback(num_dropped)
        features = step.features[:, : max(num_kept)]
        self.conversation.context.append(Context(features, num_kept))

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
        proposer = DraftProposer(
            self.request,
            self.target,
            self.conversation.context,
            self.acceptor,
        )
        return EagerRunner(
            self.request,
            self.target,
            self.conversation,
            self.acceptor,
            proposer,
        )

    # -- the prompt

    @torch.no_grad()
    def read_prompt(self) -> list[Block]:
        """Runs the part of the prompts that the caches do not hold, and commits the first tokens."""
        input_ids = self.request.input_ids
        mask = self.request.attention_mask
        if mask is None:
            mask = torch.ones_like(input_ids)
        is_real = mask.bool()
        texts = []
        self.sequences = []
        for index, prompt_ids in enumerate(input_ids):
            texts.append(prompt_ids[is_real[index]])
            self.sequences.append(TextSequence(index, prompt_ids))
        logits = self._read(texts)
        self.runner = self.new_runner()
        nothing = Proposals(input_ids[:, :0])
        step = self.runner.accept(self.sequences, nothing, logits, None)
        return self.commit(step)

    def _read(self, texts: list[torch.Tensor]) -> torch.Tensor:
        """Reads texts [S], a single one after what the conversation holds of it; logits of their last tokens, [B, 1, V]."""
        conversation = self.conversation
        first_ids = texts[0].tolist()
        num_reused = conversation.reuse(first_ids) if len(texts) == 1 else 0
        if num_reused:
            texts = [texts[0][num_reused:]]
        else:
            longest = max(map(len, texts))
            self._begin(len(texts), longest)
        logits = self._read_chunks(texts)
        conversation.hold(first_ids, self.sequences[0].new_ids)
        return logits

    def _begin(self, num_sequences: int, length: int) -> None:
        """Starts new caches for prompts of `length` tokens."""
        request = self.request
        num_new = min(request.max_new_tokens, INITIAL_NEW_TOKENS)
        room = num_new + 4 * request.drafter.config.block_size
        target_cache, context = self.new_caches(num_sequences, length + room)
        models = (request.target, request.drafter)
        self.conversation.begin(target_cache, context, models)

    def _read_chunks(self, texts: list[torch.Tensor]) -> torch.Tensor:
        """Reads texts chunk by chunk. The context of the last chunk waits for the first draft."""
        # Padding on the right: no token sees it, so the forward needs no mask.
        token_ids = pad_sequence(texts, batch_first=True)
        width = token_ids.shape[1]
        chunk_size = self.request.prefill_chunk_size or width
        context = self.conversation.context
        last_logits = {}
        for begin in range(0, width, chunk_size):
            context.absorb()
            chunk = token_ids[:, begin : begin + chunk_size]
            num_real = []
            for text in texts:
                num_left = max(len(text) - begin, 0)
                num_real.append(min(num_left, chunk_size))
            logits, features = self.target.read(chunk, self.conversation.target_cache, num_real)
            context.append(Context(features, num_real))
            for place, count in enumerate(num_real):
                if count:
                    last_logits[place] = logits[place]
        in_order = [last_logits[place] for place in range(len(texts))]
        return torch.stack(in_order)

    def close(self) -> None:
        """Ends the text, also before it is complete."""
        if hasattr(self, "runner"):
            self.runner.close()

    # -- a step

    @torch.no_grad()
    def run_step(self) -> Step:
        """The next step: proposed, verified, accepted. ValueError if another request has used the conversation since."""
        if self.request.conversation is not None and not self.conversation.is_of(self.sequences[0].new_ids):
            self.conversation = Conversation()  # the other request goes on with the caches
            raise ValueError(
                "The conversation went on with another request before this one had ended: read all blocks of one request "
                "before the next, or give each a conversation of its own."
            )
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

    @torch.no_grad()
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
        # As many columns as tokens: the anchor's column is kept, and the last token has none yet.
        num_kept = [len(block.token_ids) for block in blocks]
        self.runner.keep(step, num_kept)
        if step.features is not None:
            self.runner.proposer.record(step.proposals, blocks)
        anchors = step.acceptance.anchors
        self.anchors = to_device(anchors, self.request.input_ids.device)
        live = []
        for place, sequence in enumerate(self.sequences):
            if not sequence.is_done:
                live.append(place)
        self._keep_live(live)

    def _keep_live(self, live: list[int]) -> None:
        """Drops all sequences except those at these places."""
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


def decode_blocks(decoder: Decoder) -> Iterator[Block]:
    """Proposes, verifies, accepts and commits blocks until every sequence is done."""
    yield from decoder.read_prompt()
    while decoder.sequences:
        step = decoder.run_step()
        yield from decoder.commit(step)
