"""The loop: draft a block, verify it in one forward of the target, commit what the target itself would have written.

Three altitudes: `generate_blocks` is a generator of committed blocks, `spec_generate` collects them into what
`target.generate` returns, and text is made above this file. Everything around the loop (the generation config, logits
processors, stopping criteria, masks of padded prompts) is prepared by the target's own `generate`, which runs the loop
as its `custom_generate`. The loop takes the drafter as an argument and knows no clock, no text and no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
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
from .target_dflash import TappedTarget
from .validation_dflash import check_pair, check_prepared, check_request, read_prompt
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
    """What one forward of the target committed.

    Attributes:
        token_ids: The committed tokens, cut where the text stops.
        num_proposals: Drafted tokens that were verified; 0 for the prefill's block.
        num_accepted: How many of them stood, before the cut.
        is_prefill: True for the first block, whose one token comes from the prompt's forward and not from a verify
            step.
    """

    token_ids: list[int]
    num_proposals: int
    num_accepted: int
    is_prefill: bool = False

    @property
    def acceptance_length(self) -> int:
        """Tokens that the verify step gave before the cut: the accepted proposals and one of the target's own."""
        return self.num_accepted + 1


@dataclass
class DFlashOutput(ModelOutput):
    """What `spec_generate(return_dict_in_generate=True)` returns.

    Attributes:
        sequences: Prompt and new tokens, [B, S].
        acceptance_lengths: Per verify step, accepted proposals + 1, before stop and length cuts.
        tau: Their mean, as the DFlash paper and the engines count it; NaN without a verify step.
        tokens_per_step: Tokens kept, without the prefill's, per verify step: what a speed-up rests on.
    """

    sequences: torch.Tensor | None = None
    acceptance_lengths: list[int] | None = None
    tau: float | None = None
    tokens_per_step: float | None = None


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
        input_ids: Token ids [1, S], or what a tokenizer returns, whose attention mask is then used.
        attention_mask: 1 for real tokens, 0 for padding, [1, S].
        streamer: A `transformers` streamer; it gets the prompt, then the tokens as blocks commit.
        return_dict_in_generate: Return a [`DFlashOutput`] with acceptance statistics instead of the ids.
        kwargs: Those of [`generate_blocks`], and through it those of `target.generate`.

    Returns:
        Prompt and new tokens [1, S + new], or a [`DFlashOutput`] that holds them.

    Raises:
        ValueError: for anything that cannot be run exactly, before any compute.
    """
    prompt_ids, attention_mask = read_prompt(input_ids, attention_mask)
    blocks = generate_blocks(drafter, target, prompt_ids, attention_mask=attention_mask, **kwargs)
    if streamer is not None:
        streamer.put(prompt_ids.cpu())
    new_ids: list[int] = []
    lengths: list[int] = []
    for block in blocks:
        new_ids += block.token_ids
        if not block.is_prefill:
            lengths.append(block.acceptance_length)
        if streamer is not None:
            for token_id in block.token_ids:
                streamer.put(torch.tensor([token_id]))
    if streamer is not None:
        streamer.end()
    sequences = torch.cat([prompt_ids, prompt_ids.new_tensor([new_ids])], dim=1)
    if not return_dict_in_generate:
        return sequences
    steps = len(lengths)
    return DFlashOutput(
        sequences=sequences,
        acceptance_lengths=lengths,
        tau=sum(lengths) / steps if steps else float("nan"),
        tokens_per_step=(len(new_ids) - 1) / steps if steps else float("nan"),
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
    """Yields the target's continuation block by block, each as soon as it is committed.

    Nothing is computed before the first `next`. Closing the generator early leaves the target as it was.

    Args:
        drafter: A `DFlashDraftModel` trained for `target`.
        target: Any decoder-only `AutoModelForCausalLM`.
        input_ids: Token ids [1, S], or what a tokenizer returns.
        attention_mask: 1 for real tokens, 0 for padding, [1, S].
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
    if stop_strings is not None:
        if tokenizer is None:
            raise ValueError(
                f"stop_strings={stop_strings!r} needs the target's tokenizer: pass tokenizer=… beside it."
            )
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    return target.generate(
        prompt_ids.to(target.device),
        attention_mask=None if attention_mask is None else attention_mask.to(target.device),
        stopping_criteria=criteria,
        custom_generate=_decode,
        drafter=drafter,
        block_size=block_size,
        noise_generator=generator,
        **kwargs,
    )


@torch.no_grad()
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
    """The loop. `target.generate` calls it and prepares every argument but the last three."""
    check_prepared(generation_config)
    tapped = TappedTarget(target, drafter)
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    capacity = input_ids.shape[1] + min(max_new_tokens, INITIAL_NEW_TOKENS) + block_size
    target_cache = PreallocatedCache(tapped.num_layers, capacity)
    draft_cache = PreallocatedCache(drafter.config.num_hidden_layers, capacity)
    choose = _chooser(logits_processor, PositionNoise(1, noise_generator) if generation_config.do_sample else None)
    cut = _cutter(stopping_criteria, max_new_tokens)
    num_new = num_steps = num_accepted_in_all = 0
    # The committed text, with the prompt's padding, as plain `generate` shows it to processors and criteria.
    text_ids = input_ids

    # The prompt's forward is a step without proposals: its last row chooses the first token.
    proposals = input_ids[:, :0]
    logits, features = tapped.forward(_without_padding(input_ids, model_kwargs), target_cache, num_logits=1)
    while True:
        choices = choose(logits, text_ids, proposals, num_new)
        num_accepted, *chosen = torch.cat([accept_prefix(proposals, choices)[:, None], choices], dim=1)[0].tolist()
        token_ids, is_last = cut(chosen[: num_accepted + 1], text_ids, num_new)

        # Of the verified rows those stand that were computed behind kept text: the anchor and all kept tokens but the
        # last, whose keys and values the next forward computes, with it as the anchor.
        num_rejected = proposals.shape[1] + 1 - len(token_ids)
        target_cache.rollback(num_rejected)
        features = features[:, : features.shape[1] - num_rejected]
        text_ids = torch.cat([text_ids, choices[:, : len(token_ids)]], dim=1)
        num_new += len(token_ids)
        yield Block(token_ids, proposals.shape[1], num_accepted, is_prefill=num_steps == 0)
        if is_last:
            return
        num_accepted_in_all += num_accepted
        if num_steps == INACTIVE_STEPS and not num_accepted_in_all:
            _warn_inactive(drafter, target)

        width = min(block_size, max_new_tokens - num_new)  # never verify more than is still wanted
        proposals = _draft(drafter, tapped, draft_cache, text_ids[:, -1:], features, block_size)[:, : width - 1]
        logits, features = tapped.forward(
            torch.cat([text_ids[:, -1:], proposals], dim=1), target_cache, num_logits=width
        )
        num_steps += 1


def _draft(
    drafter: PreTrainedModel,
    tapped: TappedTarget,
    draft_cache: PreallocatedCache,
    anchor: torch.Tensor,  # [1, 1]
    features: torch.Tensor,  # [1, C, L * D] of the committed positions that draft_cache does not hold yet
    block_size: int,
) -> torch.Tensor:  # [1, block_size - 1]
    """The drafter's argmax for every row behind the anchor: one forward, after which its cache holds context alone.

    At a temperature too: proposing one token per row and letting the target sample accepts more than rows that are
    sampled independently of each other, at the same law (see `verification_dflash`).
    """
    masks = anchor.new_full((1, block_size - 1), drafter.config.mask_token_id)
    hidden_states = drafter(
        noise_embeds=tapped.embed(torch.cat([anchor, masks], dim=1)),
        context_hidden_states=features,
        past_key_values=draft_cache,
    ).last_hidden_state
    draft_cache.rollback(block_size)
    return choose_greedy(tapped.head(hidden_states[:, 1:])).to(anchor.device)


def _chooser(processors: LogitsProcessorList, noise: PositionNoise | None) -> Callable[..., torch.Tensor]:
    """`choose(logits, text_ids, proposals, num_new)`: the target's choice for every row, [1, N] of logits [1, N, V].

    Row i is processed behind the prefix it stands for, [text, proposals 1..i]; processors that never look at the
    prefix get all rows in one call. Without `noise` the choice is greedy.
    """
    is_prefix_free = all(isinstance(processor, PREFIX_FREE_PROCESSORS) for processor in processors)

    def process(logits: torch.Tensor, prefixes: torch.Tensor, length: int) -> torch.Tensor:
        scores = logits.float()
        if is_prefix_free:
            return processors(prefixes, scores[0])[None]
        rows = [processors(prefixes[:, : length + i], scores[:, i].clone()) for i in range(scores.shape[1])]
        return torch.stack(rows, dim=1)

    def choose(logits: torch.Tensor, text_ids: torch.Tensor, proposals: torch.Tensor, num_new: int) -> torch.Tensor:
        logits = logits.to(text_ids.device)
        if processors:
            logits = process(logits, torch.cat([text_ids, proposals], dim=1), text_ids.shape[1])
        if noise is None:
            return choose_greedy(logits)
        return choose_sampled(logits, noise(num_new, num_new + logits.shape[1], logits.device))

    return choose


def _cutter(criteria: StoppingCriteriaList, max_new_tokens: int) -> Callable[..., tuple[list[int], bool]]:
    """`cut(token_ids, text_ids, num_new)`: the new tokens up to where the text stops, and whether it does.

    A stop can lie anywhere inside a block, so every prefix is asked about, as plain `generate` does.
    """
    stop_ids: set[int] = set()
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            stop_ids.update(criterion.eos_token_id.tolist())
    others = StoppingCriteriaList(c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria)))

    def cut(token_ids: list[int], text_ids: torch.Tensor, num_new: int) -> tuple[list[int], bool]:
        prefix = text_ids
        for count, token_id in enumerate(token_ids, start=1):
            is_last = token_id in stop_ids or num_new + count == max_new_tokens
            if others:
                prefix = torch.cat([prefix, prefix.new_tensor([[token_id]])], dim=1)
                is_last = bool(others(prefix, None).all()) or is_last
            if is_last:
                return token_ids[:count], True
        return token_ids, False

    return cut


def _without_padding(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> torch.Tensor:
    """The prompt's visible tokens. Masked ones are seen by nobody and take up no position, so this is the same prompt."""
    attention_mask = model_kwargs.get("attention_mask")
    return input_ids if attention_mask is None else input_ids[attention_mask.bool()][None]


def _warn_inactive(drafter: PreTrainedModel, target: PreTrainedModel) -> None:
    logger.warning(
        f"{INACTIVE_STEPS} blocks were verified and not one drafted token was accepted: the text is right, but nothing is "
        f"gained. Likely causes: {drafter.config._name_or_path or 'the drafter'} was trained for another target than "
        f"{target.config._name_or_path or type(target).__name__}, the prompt does not use the chat template it was trained with "
        "(thinking on or off), or its target_layer_ids or mask_token_id are wrong."
    )
