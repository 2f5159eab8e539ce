"""Where proposals come from: one forward of the drafter per block or, where it pays, the text's own past."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import logging

from .cache_dflash import bucket
from .compilation_dflash import CompiledPair
from .conversation_dflash import Context, Conversation
from .latency_dflash import LatencyCurve, measured_curve
from .lookup_dflash import PromptLookup
from .masks_dflash import decoding_visibility
from .pacing_dflash import Habits, Pacer
from .rows_dflash import Row
from .target_dflash import TappedTarget
from .trees_dflash import DraftTree, grow_tree
from .verification_dflash import PositionNoise, Proposals


logger = logging.get_logger(__name__)

# Verify steps without a single accepted proposal after which the drafter is called inactive.
INACTIVE_STEPS = 32

# Tokens of a position that a tree looks at, at most: the ninth best is hardly ever among the likeliest paths.
TREE_BRANCHES = 8

# Nodes of a draft tree whose size is chosen step by step, at most.
LARGEST_TREE = 64


class Proposer:
    """`propose(rows, anchors, num_wanted)`: what the next verify step is to judge.

    Args:
        drafter: A `DFlashDraftModel`.
        tapped: Its target.
        memory: The caches; the drafter reads the context that waits there.
        block_size: Tokens in a block, anchor included.
        max_draft_tokens: Proposals of a step at most; 0: the drafter never runs.
        lookup: Competes with the drafter; `None`: the drafter alone.
        noise: For drafters whose proposals are drawn; `None`: they propose their likeliest path.
        temperature: Of the draws.
        is_adaptive: Verify as many proposals as pay, step by step.
        latency_curve: What that is judged by; `None`: it is measured here.
        draft_tree: Nodes of a tree that stands in place of the likeliest path; 0: none.
    """

    def __init__(
        self,
        drafter: PreTrainedModel,
        tapped: TappedTarget,
        memory: Conversation,
        block_size: int,
        max_draft_tokens: int | None = None,
        lookup: PromptLookup | None = None,
        noise: PositionNoise | None = None,
        temperature: float = 1.0,
        is_adaptive: bool = False,
        latency_curve: LatencyCurve | None = None,
        draft_tree: int = 0,
    ) -> None:
        self.drafter = drafter
        self.tapped = tapped
        self.memory = memory
        self.block_size = block_size
        self.max_draft_tokens = max_draft_tokens
        self.lookup = lookup
        self.noise = noise
        self.temperature = temperature
        self.is_adaptive = is_adaptive
        self.latency_curve = latency_curve
        self.draft_tree = draft_tree
        self._pacer: Pacer | None = None
        self._num_steps = self._num_accepted = 0

    @property
    def num_proposals(self) -> int:
        """Proposals of a whole block."""
        count = self.block_size - (0 if self.drafter.config.sample_from_anchor else 1)
        return count if self.max_draft_tokens is None else min(count, self.max_draft_tokens)

    @property
    def runs_ahead(self) -> bool:
        """Whether every block is a whole one that is drafted without knowing the text before it."""
        is_plain = self.lookup is None and not self.is_adaptive and not self.draft_tree
        return is_plain and self.num_proposals < self.block_size  # a step's features are context for one block

    def propose(
        self, rows: list[Row], anchors: torch.Tensor, num_wanted: int, unread: Context | None = None
    ) -> Proposals:
        """At most `num_wanted` tokens deep behind the anchors [B, 1] of all rows.

        With an `unread` context, which the memory does not hold yet, the memory and its caches stay as they are; raises
        NotCompiledError where that cannot be done.
        """
        nothing = Proposals(anchors[:, :0])
        if self.max_draft_tokens is not None:
            num_wanted = min(num_wanted, self.max_draft_tokens)
        if not num_wanted:
            return nothing
        found = self.lookup.propose(rows) if self.lookup is not None else {}
        if len(found) == len(rows):
            return Proposals(anchors.new_tensor(list(found.values())), looked_up=tuple(found)).first(num_wanted)
        if self._pacer is not None and not self._pacer.wants_draft(len(rows)):
            return nothing
        proposals = self._draft(rows, anchors, num_wanted, unread)
        return proposals.with_lookups(found) if found else proposals

    def record(self, proposals: Proposals, num_accepted: Sequence[int]) -> None:
        """Takes note of how many of each row's proposals stood."""
        for place, count in enumerate(num_accepted):
            self._num_accepted += count
            if self.lookup is not None:
                self.lookup.record(place in proposals.looked_up, count)
        if self._pacer is not None and not proposals.looked_up:
            self._pacer.record(proposals.token_ids.shape[1], sum(num_accepted))
        if proposals.token_ids.shape[1]:
            self._num_steps += 1
            if self._num_steps == INACTIVE_STEPS and not self._num_accepted:
                _warn_inactive(self.drafter, self.tapped.target)

    def _draft(
        self, rows: list[Row], anchors: torch.Tensor, num_wanted: int, unread: Context | None = None
    ) -> Proposals:
        """What the drafter proposes behind the anchors: one forward, after which its cache holds context alone.

        A drafter whose positions know nothing of each other proposes its argmax, at a temperature too: letting the target
        sample accepts more than positions that are sampled independently, at the same law (`verification_dflash`).
        """
        context = unread or self.memory.context
        if context is None:
            raise RuntimeError("The drafter has read all that the target computed: nothing stands before the anchor.")
        hidden_states = self._hidden_states(anchors, context)
        if unread is None:
            self.memory.mark_read()
        if self.is_adaptive and self._pacer is None:  # the drafter's cache holds the text now, as in later steps
            hidden_states = hidden_states.clone()  # a CUDA graph's output, which its next run overwrites
            self._pacer = Pacer(self.latency_curve or self._measure(anchors), len(rows), Habits.of(self.drafter))
            self._pacer.wants_draft(len(rows))
        proposing = hidden_states[:, 0 if self.drafter.config.sample_from_anchor else 1 :]
        count, proposing = proposing.shape[1], proposing[:, :num_wanted]
        if self.draft_tree and (self._pacer is None or self._pacer.wants_tree()):
            return self._grow_tree(proposing, anchors)
        propose: Any = self.drafter.propose
        options: dict[str, Any] = {"with_confidences": True} if self._pacer is not None else {}
        if self.noise is not None:
            uniforms = torch.stack([self.noise.fresh(row.index, count)[:num_wanted] for row in rows])
            options |= {"temperature": self.temperature, "uniforms": uniforms}
        proposals: Proposals = propose(proposing, anchors, self.tapped.head, **options)
        if self._pacer is None or proposals.confidences is None:
            return proposals
        survival = proposals.confidences.cumprod(dim=1).sum(dim=0)
        return proposals.first(self._pacer.choose(survival.tolist())[0])

    def _grow_tree(self, proposing: torch.Tensor, anchors: torch.Tensor) -> Proposals:
        """The likeliest paths of a single row, as many as pay; where a chain pays more, that."""
        tree = self._whole_tree(proposing)
        if self._pacer is not None:
            count, is_tree = self._pacer.choose([tree.probabilities[i] for i in tree.chain()], tree.probabilities)
            if not is_tree:
                return Proposals(anchors.new_tensor([[tree.token_ids[i] for i in tree.chain()[:count]]]))
            tree = tree.first(count)
        return Proposals(anchors.new_tensor([tree.token_ids]), tree=tree)

    def _whole_tree(self, proposing: torch.Tensor) -> DraftTree:
        compute_logits: Any = self.drafter.compute_logits
        budget = self.draft_tree if self.max_draft_tokens is None else min(self.draft_tree, self.max_draft_tokens)
        logits = compute_logits(proposing, self.tapped.head)[0].float() / self.temperature  # [n, V]
        best, token_ids = logits.log_softmax(dim=-1).topk(min(budget, TREE_BRANCHES, logits.shape[-1]), dim=-1)
        best, token_ids = torch.stack([best.double(), token_ids.double()]).tolist()  # one synchronisation
        return grow_tree(best, [list(map(int, row)) for row in token_ids], budget)

    def _hidden_states(self, anchors: torch.Tensor, context: Context) -> torch.Tensor:
        """The drafter's last hidden states [B, N, D] of the block; its cache holds the context then, and no block."""
        masks = anchors.new_full((len(anchors), self.block_size - 1), self.drafter.config.mask_token_id)
        token_ids, cache = torch.cat([anchors, masks], dim=1), self.memory.draft_cache

        def eagerly() -> torch.Tensor:
            output = self.drafter(
                noise_embeds=self.tapped.embed(token_ids),
                context_hidden_states=context.features,
                past_key_values=cache,
                **self._placed(context),
            )
            cache.rollback(self.block_size)
            return output.last_hidden_state

        pair = self.tapped.compiled
        fits = context.is_packed and context.features.shape[1] <= self.block_size and cache.get_seq_length() > 0
        kind, models = f"a draft for {'one row' if len(anchors) == 1 else 'rows'}", (self.tapped.target, self.drafter)
        counts = context.num_real if context.counts is None else context.counts

        def compiled() -> torch.Tensor:
            return cast(CompiledPair, pair).draft(*models, token_ids, context.features, counts, cache)

        if pair is not None and context.counts is not None:
            return pair.ahead(kind, *models, compiled)
        if pair is None or not fits:
            return eagerly()
        return pair.either(kind, *models, compiled, eagerly, lambda: cache.advance(context.num_real))

    def _placed(self, context: Context) -> dict[str, Any]:
        """Positions and mask of rows of different lengths; a single row's follow from its cache."""
        cache = self.memory.draft_cache
        if not cache.is_ragged:
            return {}
        is_block = context.is_real.new_ones(len(context.num_real), self.block_size)
        slots = cache.plan(
            torch.cat([context.is_real, is_block], dim=1), [count + self.block_size for count in context.num_real]
        )
        num_keys = cache.get_seq_length() + slots.shape[1]
        visible = decoding_visibility(self.drafter.config, slots[:, -self.block_size :], num_keys)
        return {"position_ids": slots, "attention_mask": visible}

    def _measure(self, anchors: torch.Tensor) -> LatencyCurve:
        """The pair's curve behind a text of this length. What is run for it is taken back."""
        tapped, memory = self.tapped, self.memory
        num_rows, length = len(anchors), max(memory.target_cache.lengths)

        def verify(width: int) -> torch.Tensor:
            logits, _ = tapped.forward(anchors.expand(-1, width), memory.target_cache, num_logits=width)
            memory.target_cache.rollback([width] * num_rows)
            return logits.argmax(dim=-1)

        def verify_tree(width: int) -> torch.Tensor:
            tree = self._whole_tree(proposing).first(width - 1)
            ids = torch.cat([anchors, anchors.new_tensor([tree.token_ids])], dim=1)
            logits, _ = tapped.forward(ids, memory.target_cache, num_logits=ids.shape[1], tree=tree)
            columns = [0, *range(2, ids.shape[1], 2)]
            memory.target_cache.keep_columns(ids.shape[1], columns)
            memory.target_cache.rollback(len(columns))
            return logits.argmax(dim=-1)

        def draft() -> torch.Tensor:
            count = min(self.block_size // 2 + 1, max(1, length))
            size = len(self.drafter.config.target_layer_ids) * self.drafter.config.hidden_size
            weight: Any = self.drafter.get_parameter("norm.weight")
            features = weight.new_zeros(num_rows, count, size)
            hidden_states = self._hidden_states(anchors, Context.first_columns(features, [count] * num_rows))
            memory.draft_cache.rollback([count] * num_rows)
            return tapped.head(hidden_states).argmax(dim=-1)

        widest = 1 + (self.draft_tree or self.block_size)
        widths = [width for width in (1, 2, 4, 8, 16, 32, 64, 128) if width < widest] + [widest]
        pair = tapped.compiled
        setting = (num_rows, bucket(length), self.block_size, pair is not None and pair.is_active, self.draft_tree)
        proposing = self.drafter.get_parameter("norm.weight").expand(1, self.block_size - 1, -1)
        options = {"verify_tree": verify_tree} if self.draft_tree else {}
        return measured_curve(tapped.target, self.drafter, setting, widths, verify, draft, **options)


def _warn_inactive(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    logger.warning(
        f"{INACTIVE_STEPS} blocks were verified and not one drafted token was accepted: the text is right, but nothing is "
        f"gained. Likely causes: {drafter.config._name_or_path or 'the drafter'} was trained for another target than "
        f"{target.config._name_or_path or type(target).__name__}, the prompt does not use the chat template it was trained with "
        "(thinking on or off), or its target_layer_ids or mask_token_id are wrong."
    )
