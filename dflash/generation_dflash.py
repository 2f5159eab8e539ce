"""How a request is put: what `spec_generate` and `generate_blocks` take, and what they return.

Everything around the loop (the generation config, logits processors, stopping criteria, expansion, special tokens) is
prepared by the target's own `generate`, which runs the loop as its `custom_generate`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput

from .compilation_dflash import compiled_pair
from .conversation_dflash import Conversation
from .decoding_dflash import Block, decode_blocks
from .drafting_dflash import LARGEST_TREE, Proposer
from .judging_dflash import Judge
from .latency_dflash import LatencyCurve
from .lookup_dflash import PromptLookup
from .rows_dflash import make_cutter, token_limit
from .target_dflash import TappedTarget
from .validation_dflash import (
    check_batch,
    check_pair,
    check_prepared,
    check_processors,
    check_request,
    check_settings,
    check_tree,
    read_prompt,
    read_prompt_inputs,
)
from .verification_dflash import PositionNoise


@dataclass
class DFlashOutput(ModelOutput):
    """What `spec_generate(return_dict_in_generate=True)` returns.

    Attributes:
        sequences: Prompts and new tokens, [B, S + new], padded on the right behind the rows that stopped first.
        acceptance_lengths: For each row, per verify step: accepted proposals + 1, before stop and length cuts.
        tau: Their mean over all rows and steps, as the DFlash paper and the engines count it; NaN without a step.
        tokens_per_step: Tokens kept, without the prefill's, per row and verify step: what a speed-up rests on.
        scores: With `output_scores=True`, the processed scores of each new position, [B, V] each; 0 behind a row's end.
        logits: With `output_logits=True`, the target's logits of each new position, in the same form.
    """

    sequences: torch.Tensor | None = None
    acceptance_lengths: list[list[int]] | None = None
    tau: float | None = None
    tokens_per_step: float | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None


def spec_generate(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor] | list[Any],
    *,
    streamer: Any = None,
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
        input_ids: Token ids [B, S], what a tokenizer returns (its attention mask is then used), or a list of prompts of
            any lengths.
        streamer: A `transformers` streamer; it gets the prompt, then the tokens as blocks commit. One prompt only.
        kwargs: Those of [`generate_blocks`], and through it those of `target.generate`. With
            `return_dict_in_generate=True` a [`DFlashOutput`] comes back.

    Returns:
        Prompts and new tokens [B, S + new], or a [`DFlashOutput`] that holds them.

    Raises:
        ValueError: for anything that cannot be run exactly, before any compute.
    """
    return _through_generate(custom_generate, drafter, target, input_ids, token_streamer=streamer, **kwargs)


def generate_blocks(
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: torch.Tensor | Mapping[str, torch.Tensor] | list[Any],
    **kwargs: Any,
) -> Iterator[Block]:
    """Yields the target's continuation block by block, each as soon as it is committed, one per row and step.

    Nothing is computed before the first `next`. Closing the generator early leaves the target as it was.

    Args:
        drafter: A `DFlashDraftModel` trained for `target`.
        target: Any decoder-only `AutoModelForCausalLM`.
        input_ids: Token ids [B, S], padded on the left, what a tokenizer returns, or a list of prompts of any lengths.
        kwargs: Any keyword of `target.generate` (`max_new_tokens`, `top_p`, `repetition_penalty`, `stop_strings` with
            `tokenizer`, `generation_config`, …); what cannot be exact is refused by name. And these:

            - `attention_mask`: 1 for real tokens, 0 for padding, [B, S].
            - `temperature`: 0 decodes greedily; above 0 samples. Default: the target's generation config decides.
            - `do_sample`: as in `generate`. Default: whether `temperature` is above 0, else the target's config.
            - `stop_token_ids`: ids that end the text, [] for none. Default: `eos_token_id` of the target's generation config.
            - `generator`: source of the sampling noise, or one for each prompt. With "match" the text depends on its seed
              alone, not on the block size.
            - `block_size`: tokens in a block, anchor included, if fewer than the drafter was trained for.
            - `verification`: "match", "rejection" or "block" (see `verification_dflash`), or "auto": "match" for
              drafters that propose one token per row, "block" for those that draw.
            - `conversation`: a [`Conversation`] whose caches are used and kept; one prompt only.
            - `max_draft_tokens`: proposals verified per step at most; 0 drafts nothing.
            - `adaptive`: verify as many proposals as pay, chosen step by step from the drafter's confidence and from how
              long the forwards take here, which is measured once per pair. A useless drafter then costs next to nothing.
            - `latency_curve`: a [`LatencyCurve`] measured before, for `adaptive`.
            - `draft_tree`: verifies a tree of the drafter's likeliest paths instead of one: its number of nodes, or True
              for as many as pay. One prompt at a time.
            - `compile`: True compiles both forwards once per pair; "auto" does so for a pair that has run a few thousand
              steps; False never. What cannot be compiled runs eagerly, and one warning says why. On CUDA a compiled step is
              launched before the last one is read, where its proposals and its verdict need nothing of the text.
            - `prompt_lookup_num_tokens`: lets proposals of that length, found earlier in the text, compete with the
              drafter's; `max_matching_ngram_size` (3) is how many tokens must have occurred.

    Raises:
        ValueError: for anything that cannot be run exactly, before any compute.
    """
    for name in ("streamer", "return_dict_in_generate"):
        if kwargs.get(name):
            raise ValueError(f"generate_blocks yields the blocks themselves: pass {name} to spec_generate.")
    return _through_generate(custom_generate, drafter, target, input_ids, as_blocks=True, **kwargs)


def _through_generate(
    decode: Callable[..., Any],
    drafter: PreTrainedModel,
    target: PreTrainedModel,
    input_ids: Any,
    *,
    attention_mask: torch.Tensor | None = None,
    temperature: float | None = None,
    do_sample: bool | None = None,
    stop_token_ids: int | list[int] | None = None,
    stop_strings: str | list[str] | None = None,
    tokenizer: Any = None,
    stopping_criteria: Any = None,
    generator: torch.Generator | list[torch.Generator] | None = None,
    **kwargs: Any,
) -> Any:
    """Checks the request, says it in `generate`'s words, and lets `generate` prepare it for `decode`."""
    check_pair(target, drafter)
    prompt_ids, attention_mask = read_prompt(input_ids, attention_mask, target)
    named = {"temperature": temperature, "do_sample": do_sample, "stop_token_ids": stop_token_ids}
    check_request(target, drafter, prompt_ids, attention_mask, kwargs | named)

    if temperature is not None:
        do_sample = temperature > 0 if do_sample is None else do_sample
        # Greedy choices do not depend on these, and a target's sampling defaults would only be warned about.
        kwargs.update(
            {"temperature": temperature} if temperature else dict.fromkeys(("temperature", "top_p", "top_k"))
        )
    if do_sample is not None:
        kwargs["do_sample"] = do_sample
    if stop_token_ids is not None:
        kwargs["eos_token_id"] = None if stop_token_ids == [] else stop_token_ids  # nothing stops it
    criteria = StoppingCriteriaList(stopping_criteria or ())
    # Made here, because `generate` hands no tokenizer on where a callable decodes; one for each string, because one
    # that can never match would hide behind the others.
    for stop_string in [stop_strings] if isinstance(stop_strings, str) else stop_strings or ():
        if tokenizer is None or not stop_string:
            remedy = "give a string that is not empty" if tokenizer else "pass the target's tokenizer=… beside it"
            raise ValueError(f"stop_strings={stop_strings!r} cannot stop a text: {remedy}.")
        criteria.append(StopStringCriteria(tokenizer, stop_string))
    # `generate` would take these for its own ways of decoding.
    ours = {"num_looked_up": kwargs.pop("prompt_lookup_num_tokens", None)}
    if ours["num_looked_up"] is not None:
        ours["ngram_size"] = kwargs.pop("max_matching_ngram_size", None)
    # Ids of a target whose embedding is offloaded ("meta" between calls) stay where they are.
    device = prompt_ids.device if target.device.type == "meta" else target.device
    generate: Any = target.generate  # mixed into every causal model; the type of PreTrainedModel does not show it
    return generate(
        prompt_ids.to(device),
        attention_mask=None if attention_mask is None else attention_mask.to(device),
        stopping_criteria=criteria,
        custom_generate=decode,
        drafter=drafter,
        noise_generator=generator,
        **{name: value for name, value in ours.items() if value is not None},
        **kwargs,
    )


def custom_generate(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    drafter: PreTrainedModel,
    block_size: int | None = None,
    max_draft_tokens: int | None = None,
    verification: str = "auto",
    conversation: Conversation | None = None,
    adaptive: bool = False,
    latency_curve: LatencyCurve | None = None,
    draft_tree: int | bool = False,
    compile: bool | str = "auto",
    num_looked_up: int | None = None,
    ngram_size: int = 3,
    noise_generator: torch.Generator | list[torch.Generator] | None = None,
    token_streamer: Any = None,
    as_blocks: bool = False,
    **model_kwargs: Any,
) -> torch.Tensor | DFlashOutput | Iterator[Block]:
    """The loop as the target's own `generate` runs it: `target.generate(ids, custom_generate=custom_generate, drafter=drafter)`.

    `generate` prepares everything and calls this. It keeps `streamer`, `tokenizer` and with them `stop_strings` for
    itself: pass a streamer as `token_streamer` (which gets the new tokens), and use [`spec_generate`] for stop strings.

    Args:
        target: Given by `generate`, as are the next four and `model_kwargs`.
        input_ids: [B, S]
        logits_processor: Made from the generation config.
        stopping_criteria: Made from the generation config.
        generation_config: Everything that was asked for.
        drafter: A `DFlashDraftModel` trained for `target`.
        block_size: As in [`generate_blocks`], like all down to `compile`.
        max_draft_tokens: Proposals per step at most.
        verification: One of "auto", "match", "rejection", "block".
        conversation: Caches to use and keep.
        adaptive: Verify as many proposals as pay.
        latency_curve: By which that is judged.
        draft_tree: Nodes of a draft tree.
        compile: True, False or "auto".
        num_looked_up: `prompt_lookup_num_tokens` of [`generate_blocks`], a name that `generate` keeps for itself.
        ngram_size: Its `max_matching_ngram_size`.
        noise_generator: Its `generator`.
        token_streamer: Gets the prompt and the tokens as blocks commit.
        as_blocks: Return what [`generate_blocks`] returns.
        model_kwargs: Holds the attention mask.
    """
    attention_mask, num_rows = model_kwargs.get("attention_mask"), len(input_ids)
    check_settings(drafter, block_size, verification, max_draft_tokens, adaptive, draft_tree, compile, latency_curve)
    check_prepared(generation_config, attention_mask, num_rows, conversation)
    check_processors(logits_processor)
    check_batch(target, drafter, num_rows)
    if token_streamer is not None and num_rows > 1:
        raise ValueError(f"A streamer takes one prompt at a time, not {num_rows}: read generate_blocks instead.")
    noise = PositionNoise(num_rows, noise_generator) if generation_config.do_sample else None
    judge = Judge(logits_processor, num_rows, noise, verification)
    chunk_size = getattr(generation_config, "prefill_chunk_size", None)
    prompt_inputs = read_prompt_inputs(target, model_kwargs, input_ids, conversation, chunk_size)
    if draft_tree:
        check_tree(target, drafter, num_rows, verification, prompt_inputs)
    if latency_curve is not None:
        latency_curve.check(target, drafter, bool(draft_tree))
    memory = Conversation() if conversation is None else conversation
    memory.check(target, drafter)
    compiled = None if prompt_inputs else compiled_pair(target, drafter, compile)
    tapped = TappedTarget(target, drafter, prompt_inputs, compiled)
    max_new_tokens = token_limit(stopping_criteria, input_ids.shape[1])
    is_adaptive = adaptive or latency_curve is not None or draft_tree is True
    proposer = Proposer(
        drafter,
        tapped,
        memory,
        block_size or drafter.config.block_size,
        max_draft_tokens,
        lookup=PromptLookup(num_looked_up, ngram_size) if num_looked_up is not None else None,
        # A width chosen by how likely the drawn tokens are would keep the likely ones: what is left is no draw from q.
        noise=noise if judge.takes_drawn_proposals and not is_adaptive else None,
        temperature=(generation_config.temperature or 1.0) if noise is not None else 1.0,
        is_adaptive=is_adaptive,
        latency_curve=latency_curve,
        draft_tree=LARGEST_TREE if draft_tree is True else int(draft_tree),
    )
    blocks = decode_blocks(
        tapped,
        proposer,
        judge,
        make_cutter(stopping_criteria, max_new_tokens),
        memory,
        input_ids,
        attention_mask,
        max_new_tokens,
        frozenset(name for name in ("scores", "logits") if getattr(generation_config, f"output_{name}", False)),
        chunk_size,
    )
    blocks = _naming_what_to_lower(blocks)
    return blocks if as_blocks else _collect(blocks, input_ids, generation_config, token_streamer)


def _naming_what_to_lower(blocks: Iterator[Block]) -> Iterator[Block]:
    """The blocks; running out of memory is said with what would have needed less."""
    try:
        yield from blocks
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        raise torch.OutOfMemoryError(
            f"Out of memory ({str(error).splitlines()[0]}): lower prefill_chunk_size for a long prompt, the number of prompts, "
            "max_new_tokens, or draft_tree."
        ) from error


def _collect(
    blocks: Iterator[Block], input_ids: torch.Tensor, generation_config: Any, streamer: Any
) -> torch.Tensor | DFlashOutput:
    """The blocks as what `generate` returns, streamed on the way."""
    if streamer is not None:
        streamer.put(input_ids.cpu())
    of_rows: list[list[Block]] = [[] for _ in input_ids]
    for block in blocks:
        of_rows[block.row].append(block)
        if streamer is not None:
            for token_id in block.token_ids:
                streamer.put(torch.tensor([token_id]))
    if streamer is not None:
        streamer.end()

    new_ids = [[token_id for block in row for token_id in block.token_ids] for row in of_rows]
    longest, pad_token = max(map(len, new_ids)), getattr(generation_config, "_pad_token_tensor", None)
    pad_token_id = 0 if pad_token is None else int(pad_token)  # without one no row stops before another
    padded = [ids + [pad_token_id] * (longest - len(ids)) for ids in new_ids]
    sequences = torch.cat([input_ids, input_ids.new_tensor(padded)], dim=1)
    if not generation_config.return_dict_in_generate:
        return sequences
    lengths = [[block.acceptance_length for block in row if not block.is_prefill] for row in of_rows]
    num_steps = sum(map(len, lengths))
    return DFlashOutput(
        sequences=sequences,
        acceptance_lengths=lengths,
        tau=sum(map(sum, lengths)) / num_steps if num_steps else float("nan"),
        tokens_per_step=(sum(map(len, new_ids)) - len(new_ids)) / num_steps if num_steps else float("nan"),
        scores=_by_position(of_rows, "scores", longest),
        logits=_by_position(of_rows, "logits", longest),
    )


def _by_position(of_rows: list[list[Block]], name: str, longest: int) -> tuple[torch.Tensor, ...] | None:
    """A field of all rows' blocks as `generate` gives it: for each new position [B, V]."""
    if getattr(of_rows[0][0], name) is None:
        return None
    rows = [torch.cat([getattr(block, name) for block in row]) for row in of_rows]  # [new, V] each
    return torch.nn.utils.rnn.pad_sequence(rows).unbind(dim=0)
