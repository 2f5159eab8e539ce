"""The loop: draft a block, verify it in one forward of the target, commit what the target itself would have written.

Three altitudes: `generate_blocks` is a generator of committed blocks, `spec_generate` collects them into what
`target.generate` returns, and text is made above this file. Everything around the loop (the generation config, logits
processors, stopping criteria, masks of padded prompts) is prepared by the target's own `generate`, which runs the loop
as its `custom_generate`. The loop takes the drafter as an argument and knows no clock, no text and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.logits_process import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput, logging

from .cache_dflash import PreallocatedCache
from .masks_dflash import decoding_visibility
from .target_dflash import TappedTarget
from .validation_dflash import check_batch, check_pair, check_prepared, check_request, read_prompt
from .verification_dflash import PositionNoise, accept_prefix, choose_greedy, choose_sampled


logger = logging.get_logger(__name__)

# Room made at first for new text; storage doubles when a text outgrows it.
INITIAL_NEW_TOKENS = 1024

# Verify steps without a single accepted proposal after which the drafter is called inactive.
INACTIVE_STEPS = 32

# Processors that look at a row's scores alone, so that all rows of a block may share one call.
PREFIX_FREE_PROCESSORS = (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinPLogitsWarper,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)


@dataclass(frozen=True)
class Block:
    """What one forward of the target committed to one row of the batch.

    Attributes:
        token_ids: The committed tokens, cut where the text stops.
        num_proposals: Drafted tokens that were verified; 0 for the prefill's block.
        num_accepted: How many of them stood, before the cut.
        is_prefill: True for a row's first block, whose one token comes from the prompt's forward and not from a verify
            step.
        row: The row of the batch.
    """

    token_ids: list[int]
    num_proposals: int
    num_accepted: int
    is_prefill: bool = False
    row: int = 0

    @property
    def acceptance_length(self) -> int:
        """Tokens that the verify step gave before the cut: the accepted proposals and one of the target's own."""
        return self.num_accepted + 1


@dataclass
class DFlashOutput(ModelOutput):
    """What `spec_generate(return_dict_in_generate=True)` returns.

    Attributes:
        sequences: Prompts and new tokens, [B, S + new], padded on the right behind the rows that stopped first.
        acceptance_lengths: For each row, per verify step: accepted proposals + 1, before stop and length cuts.
        tau: Their mean over all rows and steps, as the DFlash paper and the engines count it; NaN without a step.
        tokens_per_step: Tokens kept, without the prefill's, per row and verify step: what a speed-up rests on.
    """

    sequences: torch.Tensor | None = None
    acceptance_lengths: list[list[int]] | None = None
    tau: float | None = None
    tokens_per_step: float | None = None


@dataclass
class _Row:
    """A prompt of the batch and what was written behind it."""

    index: int
    prompt_ids: torch.Tensor  # [S], with its padding
    new_ids: list[int] = field(default_factory=list)
    is_done: bool = False

    def text(self, more_ids: torch.Tensor) -> torch.Tensor:
        """Prompt, new tokens and `more_ids`, [1, S + new + more], as plain `generate` shows them to processors."""
        return torch.cat([self.prompt_ids, self.prompt_ids.new_tensor(self.new_ids), more_ids])[None]


@dataclass(frozen=True)
class _Context:
    """What the target's last forward computed behind text that stands, and the drafter's cache does not hold yet."""

    features: torch.Tensor  # [B, C, L * D]
    is_real: torch.Tensor  # bool [B, C]: the other columns are padding, or were computed behind a rejected token
    num_real: list[int]

    @classmethod
    def first_columns(cls, features: torch.Tensor, num_real: list[int]) -> _Context:
        """The first `num_real` columns of each row."""
        columns = torch.arange(max(num_real), device=features.device)
        counts = torch.tensor(num_real, device=features.device)
        return cls(features[:, : len(columns)], columns < counts[:, None], num_real)

    def of_rows(self, rows: list[int]) -> _Context:
        """Without the other rows of the batch; a single row's cache takes real columns alone."""
        features, is_real = self.features[rows], self.is_real[rows]
        if len(rows) == 1:
            features, is_real = features[is_real][None], is_real[is_real][None]
        return _Context(features, is_real, [self.num_real[row] for row in rows])


def spec_generate(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor],
    *,
    attention_mask: torch.Tensor | None = None,
    streamer: Any = None,
    return_dict_in_generate: bool = False,
    **kwargs: Any,
) -> torch.Tensor | DFlashOutput:
    """The target's own continuation of a prompt, in fewer forwards of the target.

    Greedy text equals that of `target.generate(do_sample=False)` token for token wherever one forward over a block and
    one forward per token agree on the argmax: always in fp32 as far as we have tested; in bf16 a near-tie can flip,
    and every token is still the argmax of the forward that committed it. Sampled text has the law of
    `target.generate(do_sample=True)`.

    Args:
        drafter: A `DFlashDraftModel` trained for `target`.
        target: Any decoder-only `AutoModelForCausalLM`.
        input_ids: Token ids [B, S], or what a tokenizer returns, whose attention mask is then used.
        attention_mask: 1 for real tokens, 0 for padding, [B, S].
        streamer: A `transformers` streamer; it gets the prompt, then the tokens as blocks commit.
        return_dict_in_generate: Return a [`DFlashOutput`] with acceptance statistics instead of the ids.
        kwargs: Those of [`generate_blocks`], and through it those of `target.generate`.

    Returns:
        Prompts and new tokens [B, S + new], or a [`DFlashOutput`] that holds them.

    Raises:
        ValueError: for anything that cannot be run exactly, before any compute.
    """
    prompt_ids, attention_mask = read_prompt(input_ids, attention_mask)
    blocks = generate_blocks(drafter, target, prompt_ids, attention_mask=attention_mask, **kwargs)
    num_rows = len(prompt_ids) * (_setting("num_return_sequences", target, kwargs) or 1)
    if streamer is not None and num_rows > 1:
        raise ValueError(f"A streamer takes one prompt at a time, not {num_rows}: read generate_blocks instead.")
    if streamer is not None:
        streamer.put(prompt_ids.cpu())
    new_ids: list[list[int]] = [[] for _ in range(num_rows)]
    lengths: list[list[int]] = [[] for _ in range(num_rows)]
    for block in blocks:
        new_ids[block.row] += block.token_ids
        if not block.is_prefill:
            lengths[block.row].append(block.acceptance_length)
        if streamer is not None:
            for token_id in block.token_ids:
                streamer.put(torch.tensor([token_id]))
    if streamer is not None:
        streamer.end()
    longest, pad_token_id = max(map(len, new_ids)), _pad_token_id(target, kwargs)
    padded = [ids + [pad_token_id] * (longest - len(ids)) for ids in new_ids]
    prompts = prompt_ids.repeat_interleave(num_rows // len(prompt_ids), dim=0)
    sequences = torch.cat([prompts, prompt_ids.new_tensor(padded)], dim=1)
    if not return_dict_in_generate:
        return sequences
    num_steps = sum(map(len, lengths))
    return DFlashOutput(
        sequences=sequences,
        acceptance_lengths=lengths,
        tau=sum(map(sum, lengths)) / num_steps if num_steps else float("nan"),
        tokens_per_step=(sum(map(len, new_ids)) - num_rows) / num_steps if num_steps else float("nan"),
    )


def generate_blocks(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor],
    *,
    attention_mask: torch.Tensor | None = None,
    temperature: float | None = None,
    do_sample: bool | None = None,
    stop_token_ids: int | list[int] | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    stopping_criteria: Any = None,
    generator: torch.Generator | None = None,
    block_size: int | None = None,
    **kwargs: Any,
) -> Iterator[Block]:
    """Yields the target's continuation block by block, each as soon as it is committed, one per row and step.

    Nothing is computed before the first `next`. Closing the generator early leaves the target as it was.

    Args:
        drafter: A `DFlashDraftModel` trained for `target`.
        target: Any decoder-only `AutoModelForCausalLM`.
        input_ids: Token ids [B, S], padded on the left, or what a tokenizer returns.
        attention_mask: 1 for real tokens, 0 for padding, [B, S].
        temperature: 0 decodes greedily; above 0 samples. Default: the target's generation config decides.
        do_sample: As in `generate`. Default: whether `temperature` is above 0, else the target's generation config.
        stop_token_ids: Ids that end the text. Default: `eos_token_id` of the target's generation config.
        stop_strings: Strings that end the text; needs `tokenizer`.
        tokenizer: The target's tokenizer, for `stop_strings`.
        stopping_criteria: Further `StoppingCriteria`, asked about every prefix as plain `generate` asks them.
        generator: Source of the sampling noise. The text depends on its seed alone, not on the block size.
        block_size: Tokens in a block, anchor included, if fewer than the drafter was trained for.
        kwargs: Any other keyword of `target.generate`: `max_new_tokens`, `top_p`, `top_k`, `repetition_penalty`, …

    Raises:
        ValueError: for anything that cannot be run exactly, before any compute.
    """
    check_pair(target, drafter)
    prompt_ids, attention_mask = read_prompt(input_ids, attention_mask)
    block_size = drafter.config.block_size if block_size is None else block_size
    check_request(target, drafter, prompt_ids, block_size, temperature, do_sample, kwargs)

    if temperature is not None:
        do_sample = temperature > 0 if do_sample is None else do_sample
        # Greedy choices do not depend on these, and a target's sampling defaults would only be warned about.
        kwargs.update(
            {"temperature": temperature} if temperature else dict.fromkeys(("temperature", "top_p", "top_k"))
        )
    if do_sample is not None:
        kwargs["do_sample"] = do_sample
    if stop_token_ids is not None:
        kwargs["eos_token_id"] = stop_token_ids
    criteria = StoppingCriteriaList(stopping_criteria or ())
    if stop_strings is not None:  # made here: `generate` hands no tokenizer on where a callable decodes
        if tokenizer is None:
            raise ValueError(
                f"stop_strings={stop_strings!r} needs the target's tokenizer: pass tokenizer=… beside it."
            )
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    elif _setting("stop_strings", target, kwargs) is not None:
        raise ValueError(
            "A generation config holds stop_strings: pass them as stop_strings=… with tokenizer=… instead."
        )
    # Ids of a target whose embedding is offloaded ("meta" between calls) stay where they are.
    device = prompt_ids.device if target.device.type == "meta" else target.device
    generate: Any = target.generate  # mixed into every causal model; the type of PreTrainedModel does not show it
    return generate(
        prompt_ids.to(device),
        attention_mask=None if attention_mask is None else attention_mask.to(device),
        stopping_criteria=criteria,
        custom_generate=_decode,
        drafter=drafter,
        block_size=block_size,
        noise_generator=generator,
        **kwargs,
    )


def _decode(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    drafter: PreTrainedModel,
    block_size: int,
    noise_generator: torch.Generator | None = None,
    **model_kwargs: Any,
) -> Iterator[Block]:
    """What `target.generate` calls, with everything prepared but our own three arguments: checks, then the loop."""
    attention_mask = model_kwargs.get("attention_mask")
    check_prepared(generation_config, attention_mask)
    check_batch(target, drafter, len(input_ids))
    noise = PositionNoise(len(input_ids), noise_generator) if generation_config.do_sample else None
    # A caller's own length criterion stands in place of the config's, as in `generate`.
    longest = min(c.max_length for c in stopping_criteria if isinstance(c, MaxLengthCriteria))
    max_new_tokens = longest - input_ids.shape[1]
    return _blocks(
        TappedTarget(target, drafter),
        drafter,
        input_ids,
        attention_mask,
        _chooser(logits_processor, noise, len(input_ids)),
        _cutter(stopping_criteria, max_new_tokens),
        max_new_tokens,
        block_size,
    )


@torch.no_grad()
def _blocks(
    tapped: TappedTarget,
    drafter: PreTrainedModel,
    input_ids: torch.Tensor,  # [B, S]
    attention_mask: torch.Tensor | None,  # [B, S]
    choose: Callable[..., torch.Tensor],
    cut: Callable[..., list[int]],
    max_new_tokens: int,
    block_size: int,
) -> Iterator[Block]:
    """The loop: draft, verify, accept and commit a block for every row that is not done."""
    rows = [_Row(index, prompt_ids) for index, prompt_ids in enumerate(input_ids)]
    capacity = input_ids.shape[1] + min(max_new_tokens, INITIAL_NEW_TOKENS) + block_size
    target_cache = PreallocatedCache(tapped.num_layers, capacity, len(rows))
    draft_cache = PreallocatedCache(drafter.config.num_hidden_layers, capacity, len(rows))
    num_steps = num_accepted_in_all = 0

    # The prompts' forward is a step without proposals: its last column chooses the first token.
    proposals = input_ids[:, :0]
    token_ids, is_real = _visible(input_ids, attention_mask)
    num_real = is_real.sum(dim=1).tolist()
    logits, features = tapped.forward(token_ids, target_cache, 1, is_real, num_real)
    context = _Context(features, is_real.to(features.device), num_real)
    while True:
        choices = choose(logits, rows, proposals)  # [B, width]
        outcome = torch.cat([accept_prefix(proposals, choices)[:, None], choices], dim=1).tolist()
        blocks = [
            Block(cut(row, chosen[: num_accepted + 1]), proposals.shape[1], num_accepted, num_steps == 0, row.index)
            for row, (num_accepted, *chosen) in zip(rows, outcome, strict=True)
        ]

        # Of the verified columns those stand that were computed behind kept text: the anchor and all kept tokens but
        # the last, whose keys and values the next forward computes, with it as the anchor.
        num_kept = [len(block.token_ids) for block in blocks]
        target_cache.rollback([proposals.shape[1] + 1 - kept for kept in num_kept])
        if num_steps:
            context = _Context.first_columns(features, num_kept)
        anchors = choices.gather(1, torch.tensor(num_kept, device=choices.device)[:, None] - 1)  # [B, 1]
        yield from blocks

        live = [place for place, row in enumerate(rows) if not row.is_done]
        if not live:
            return
        if len(live) < len(rows):  # rows that are done cost nothing from here on
            rows, anchors, context = [rows[place] for place in live], anchors[live], context.of_rows(live)
            target_cache.keep_rows(live)
            draft_cache.keep_rows(live)
        num_accepted_in_all += sum(block.num_accepted for block in blocks)
        if num_steps == INACTIVE_STEPS and not num_accepted_in_all:
            _warn_inactive(drafter, tapped.target)

        width = min(block_size, max_new_tokens - min(len(row.new_ids) for row in rows))  # no more than is still wanted
        proposals = proposals[live, :0]
        if width > 1:
            proposals = _draft(drafter, tapped, draft_cache, anchors, context, block_size)[:, : width - 1]
        logits, features = tapped.forward(torch.cat([anchors, proposals], dim=1), target_cache, num_logits=width)
        num_steps += 1


def _visible(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns to run, and which of them are tokens, both [B, S].

    Masked tokens are seen by nobody and take up no position, so a single prompt without them is the same prompt.
    """
    if attention_mask is None:
        return input_ids, torch.ones_like(input_ids, dtype=torch.bool)
    is_real = attention_mask.bool()
    return (input_ids, is_real) if len(input_ids) > 1 else (input_ids[is_real][None], is_real[is_real][None])


def _draft(
    drafter: PreTrainedModel,
    tapped: TappedTarget,
    draft_cache: PreallocatedCache,
    anchors: torch.Tensor,  # [B, 1]
    context: _Context,
    block_size: int,
) -> torch.Tensor:  # [B, block_size - 1]
    """The drafter's argmax for every row behind the anchor: one forward, after which its cache holds context alone.

    At a temperature too: proposing one token per position and letting the target sample accepts more than positions
    that are sampled independently of each other, at the same law (see `verification_dflash`).
    """
    masks = anchors.new_full((len(anchors), block_size - 1), drafter.config.mask_token_id)
    placed: dict[str, Any] = {}
    if draft_cache.is_ragged:
        is_block = context.is_real.new_ones(len(anchors), block_size)
        slots = draft_cache.plan(
            torch.cat([context.is_real, is_block], dim=1), [count + block_size for count in context.num_real]
        )
        num_keys = draft_cache.get_seq_length() + slots.shape[1]
        visible = decoding_visibility(drafter.config, slots[:, -block_size:], num_keys)
        placed = {"position_ids": slots, "attention_mask": visible}
    hidden_states = drafter(
        noise_embeds=tapped.embed(torch.cat([anchors, masks], dim=1)),
        context_hidden_states=context.features,
        past_key_values=draft_cache,
        **placed,
    ).last_hidden_state
    draft_cache.rollback(block_size)
    return choose_greedy(tapped.head(hidden_states[:, 1:])).to(anchors.device)


def _chooser(processors: Any, noise: PositionNoise | None, batch_size: int) -> Callable[..., torch.Tensor]:
    """`choose(logits, rows, proposals)`: the target's choice for every column, [B, N] of logits [B, N, V].

    Column i is processed behind the prefix it stands for, [text, proposals 1..i]; processors that never look at the
    prefix get all columns in one call. Without `noise` the choice is greedy.
    """
    is_prefix_free = all(type(processor) in PREFIX_FREE_PROCESSORS for processor in processors)

    def process(scores: torch.Tensor, rows: list[_Row], proposals: torch.Tensor) -> torch.Tensor:
        if is_prefix_free:
            return processors(proposals, scores.flatten(0, 1)).view_as(scores)
        processed = [
            processed_alone(row, row.text(proposed[:column]), scores[place, column])
            for place, (row, proposed) in enumerate(zip(rows, proposals, strict=True))
            for column in range(scores.shape[1])
        ]
        return torch.stack(processed).view_as(scores)

    def processed_alone(row: _Row, text_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # A processor may hold something for each row of the batch (the repetition penalty does: its padding), and rows
        # have prefixes of different lengths. So each asks as all rows of the batch, and takes the answer in its place.
        return processors(text_ids.expand(batch_size, -1), scores.repeat(batch_size, 1))[row.index]

    def choose(logits: torch.Tensor, rows: list[_Row], proposals: torch.Tensor) -> torch.Tensor:
        logits = logits.to(proposals.device)
        if processors:
            logits = process(logits.float(), rows, proposals)
        if noise is None:
            return choose_greedy(logits)
        uniforms = [noise(row.index, len(row.new_ids), logits.shape[1]) for row in rows]
        return choose_sampled(logits, torch.stack(uniforms).to(logits.device))

    return choose


def _cutter(criteria: StoppingCriteriaList, max_new_tokens: int) -> Callable[[_Row, list[int]], list[int]]:
    """`cut(row, token_ids)`: the new tokens up to where the text stops. They are written into the row.

    A stop can lie anywhere inside a block, so every prefix is asked about, as plain `generate` does.
    """
    stop_ids: set[int] = set()
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            stop_ids.update(criterion.eos_token_id.tolist())
    others = StoppingCriteriaList(c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria)))

    def cut(row: _Row, token_ids: list[int]) -> list[int]:
        for count, token_id in enumerate(token_ids, start=1):
            row.new_ids.append(token_id)
            row.is_done = token_id in stop_ids or len(row.new_ids) == max_new_tokens
            if others:
                row.is_done |= bool(others(row.text(row.prompt_ids[:0]), None).all())
            if row.is_done:
                return token_ids[:count]
        return token_ids

    return cut


def _setting(name: str, target: PreTrainedModel, kwargs: Mapping[str, Any]) -> Any:
    """A generation setting as `generate` finds it: a keyword, else the given generation config, else the target's."""
    for source in (
        kwargs,
        vars(kwargs.get("generation_config") or target.generation_config),
        vars(target.generation_config),
    ):
        if source.get(name) is not None:
            return source[name]
    return None


def _pad_token_id(target: PreTrainedModel, kwargs: Mapping[str, Any]) -> int:
    """What stands behind a row that stopped before the longest one: as in `generate`, the pad id, or the first stop id."""
    found = _setting("pad_token_id", target, kwargs)
    if found is None:
        found = kwargs.get("stop_token_ids")
    if found is None:
        found = _setting("eos_token_id", target, kwargs)
    if found is None:
        return 0  # without a stop id no row stops before another
    return found if isinstance(found, int) else found[0]


def _warn_inactive(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    logger.warning(
        f"{INACTIVE_STEPS} blocks were verified and not one drafted token was accepted: the text is right, but nothing is "
        f"gained. Likely causes: {drafter.config._name_or_path or 'the drafter'} was trained for another target than "
        f"{target.config._name_or_path or type(target).__name__}, the prompt does not use the chat template it was trained with "
        "(thinking on or off), or its target_layer_ids or mask_token_id are wrong."
    )
