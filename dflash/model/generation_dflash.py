"""The API: what `spec_generate` and `generate_blocks` take and return.

The target's own `generate` prepares the generation config, logits processors and stopping criteria, and runs the loop as its
`custom_generate`. What is refused, and with which sentence, is in `requests_dflash`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation import GenerationMixin
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import ModelOutput, logging

from .acceptance_dflash import Acceptor
from .configuration_dflash import check_values
from .decoding_dflash import Block, Conversation, Decoder, decode_blocks
from .requests_dflash import (
    NO_ENGINE,
    OTHER_NAMES,
    Generators,
    Prompts,
    Request,
    check_config,
    check_drafter,
    check_keywords,
    check_prepared,
    check_request,
    checked_verification,
    first_of,
    further_inputs,
    own_processors,
    read_prompt,
)
from .sequences_dflash import make_cutter
from .targets_dflash import InexactError, max_positions


logger = logging.get_logger(__name__)


@dataclass
class DFlashOutput(ModelOutput):
    """The output of `spec_generate(return_dict_in_generate=True)`.

    Attributes:
        sequences (`torch.Tensor` of shape `(B, S + new)`): Prompts and new tokens, padded on the right after early stops.
        acceptance_lengths (`list[list[int]]`): Accepted proposals + 1, before cuts, for each sequence and verify step.
        tau (`float`): Mean acceptance length of the steps whose proposals are all the drafter's, as the DFlash paper and the
            engines count it; NaN without such a step.
        tau_with_lookup (`float`): Mean of all `acceptance_lengths`: those of steps with looked-up tokens
            (`prompt_lookup_num_tokens`) count, too.
        tokens_per_step (`float`): Kept tokens, without the prompt's first one, per sequence and verify step.
        scores (`tuple[torch.Tensor]`, *optional*): With `output_scores=True`, processed scores of each new position, of shape
            `(B, V)` each; 0 after a sequence's end.
        logits (`tuple[torch.Tensor]`, *optional*): With `output_logits=True`, the target's logits, in the same form.

    Example:
        >>> output = drafter.spec_generate(input_ids, target=target, return_dict_in_generate=True)
        >>> text_ids, tau = output.sequences, output.tau
    """

    sequences: torch.Tensor | None = None
    acceptance_lengths: list[list[int]] | None = None
    tau: float | None = None
    tau_with_lookup: float | None = None
    tokens_per_step: float | None = None
    scores: tuple[torch.Tensor, ...] | None = None
    logits: tuple[torch.Tensor, ...] | None = None


def spec_generate(
    drafter: PreTrainedModel, target: PreTrainedModel, input_ids: Prompts, *, streamer: Any = None, **kwargs: Any
) -> torch.Tensor | DFlashOutput:
    """Generates the target's own continuation of a prompt, in fewer forwards of the target.

    Greedy text equals that of `target.generate(do_sample=False)` token for token, if a forward over a block and a forward for
    each token have the same argmax. In float32 they always had in our tests. In bfloat16 a near-tie may be decided differently;
    each token is still the argmax of the forward that committed it. Sampled text has the distribution of
    `target.generate(do_sample=True)`.

    Args:
        drafter (`DFlashDraftModel`): A drafter trained for `target`.
        target (`PreTrainedModel`): A decoder-only model, loaded by `AutoModelForCausalLM`.
        input_ids (`torch.Tensor` of shape `(B, S)`, a tokenizer's output, or a list): The prompt or prompts. A list holds the
            ids of one prompt, or one list or tensor of ids for each prompt, of any lengths.
        streamer (`BaseStreamer`, *optional*): Gets the prompt, then the tokens as blocks are committed. One prompt only.
        kwargs: The keywords of [`generate_blocks`], and with them those of `target.generate`.

    Returns:
        `torch.Tensor` of shape `(B, S + new)`: Prompts and new tokens. With `return_dict_in_generate=True`, a [`DFlashOutput`].

    Raises:
        ValueError: for anything that cannot be run exactly, before any forward, and for logits that are NaN or infinite.

    Example:
        >>> inputs = tokenizer("The capital of France is", return_tensors="pt")
        >>> text_ids = drafter.spec_generate(**inputs, target=target, max_new_tokens=64, temperature=0.0)
    """
    return _through_generate(drafter, target, input_ids, {"token_streamer": streamer, **kwargs})


def generate_blocks(
    drafter: PreTrainedModel, target: PreTrainedModel, input_ids: Prompts, **kwargs: Any
) -> Iterator[Block]:
    """Yields the target's continuation as [`Block`] objects, one for each sequence and step, as soon as it is committed.

    Nothing is computed before the first `next`. The generator can be closed early; the target is not changed.

    Args:
        drafter (`DFlashDraftModel`): A drafter trained for `target`.
        target (`PreTrainedModel`): A decoder-only model, loaded by `AutoModelForCausalLM`.
        input_ids (`torch.Tensor` of shape `(B, S)`, a tokenizer's output, or a list): As for [`spec_generate`].
        kwargs: Any keyword of `target.generate`, such as `max_new_tokens`, `top_p`, `repetition_penalty`, `generation_config`,
            or `stop_strings` with `tokenizer`. Keywords that cannot be exact are refused by name. Additional keywords:

            - **attention_mask** (`torch.Tensor` of shape `(B, S)`): 1 for tokens, 0 for padding, which is on the left.
            - **temperature** (`float`): 0 decodes greedily, above 0 samples. Default: the target's generation config.
            - **do_sample** (`bool`): As in `generate`. Default: `temperature > 0` if given, else the target's config.
            - **stop_token_ids** (`list[int]`): Ids that end the text, `[]` for none. Default: the config's `eos_token_id`.
            - **generator** (`torch.Generator` or a list of one for each prompt): Source of the uniforms for sampling. With
              "match" the text depends only on its seed, not on the block size.
            - **block_size** (`int`): Tokens in a block, anchor included; at most, and by default, that of the training.
            - **verification** (`str`, defaults to `"auto"`): "match", "rejection" or "block" (see `acceptance_dflash`).
              "auto" is "block" for drafters that draw their proposals and "match" for others.
            - **conversation** ([`Conversation`]): Its caches are reused and kept. One prompt only.
            - **max_draft_tokens** (`int`): Most proposals to verify in a step; 0 drafts nothing.

            Keywords of the engine, which the package has and a checkpoint's own code refuses. They change when a token comes,
            never the token, but for near-ties in low precision:

            - **adaptive** (`bool`, defaults to `False`): Verifies as many proposals as pay, by the time that steps have taken
              and by how many of their proposals were accepted.
            - **draft_tree** (`int` or `bool`, defaults to `False`): Verifies a tree of the drafter's most probable paths: its
              number of nodes, or `True` for as many as pay. In a batch each text has its own tree.
            - **draft_window** (`(int, int)`): How many of the first and of the newest tokens (up to an eighth more) a drafter
              with full attention reads, and keeps keys of. Default: that in the drafter's config, or all tokens.
            - **compile** (`bool` or `"auto"`, defaults to `"auto"`): `True` compiles in the first call, which takes up to a
              minute; `False` never does. "auto" does so on a CPU alone, for a kind of step, such as one of two prompts, once
              eager ones have taken 200 seconds. What does not compile runs eagerly, with a warning.
            - **cuda_graph** (`bool` or `"auto"`, defaults to `"auto"`): `True` records the eager step as a CUDA graph, in about
              a second; `False` never does. "auto" does so on an NVIDIA GPU for 64 new tokens or more, if keys and values of a
              recording take at most a quarter of the memory that is free, no model is in training mode and there is no
              `draft_window`. What cannot be recorded runs eagerly, with a warning.
            - **prompt_lookup_num_tokens** (`int`, defaults to 31): Proposals of a step, at most 63, where the text repeats
              itself. What followed the last tokens earlier is
              proposed. **max_matching_ngram_size** (`int`, defaults to 5) of them have to match. 0 looks nothing up.
            - **history** ([`History`]): Earlier texts, which are looked up too, and to which this text is added.

    Each sequence's first block holds one token, which the prompt's forward gives. Raises ValueError as [`spec_generate`].

    Example:
        >>> blocks = generate_blocks(drafter, target, input_ids, max_new_tokens=64)
        >>> text = "".join(tokenizer.decode(block.token_ids) for block in blocks)
    """
    for name in ("streamer", "return_dict_in_generate"):
        if kwargs.get(name):
            raise ValueError(f"generate_blocks yields the blocks themselves: pass {name} to spec_generate.")
    return _through_generate(drafter, target, input_ids, {"as_blocks": True, **kwargs})


def _through_generate(
    drafter: PreTrainedModel, target: PreTrainedModel, input_ids: Any, keywords: dict[str, Any]
) -> Any:
    """Checks a request, translates its keywords to those of `generate`, and lets `generate` call [`custom_generate`]."""
    check_drafter(drafter, target)
    mask = keywords.pop("attention_mask", None)
    prompt_ids, mask = read_prompt(input_ids, mask, target)
    check_keywords(target, prompt_ids, mask, keywords)
    _translate_sampling(keywords)
    criteria = list(keywords.pop("stopping_criteria", None) or ())
    criteria += _stop_string_criteria(target, keywords)
    settings = {OTHER_NAMES.get(name, name): value for name, value in keywords.items()}
    # Ids are not moved for a target whose embedding is offloaded ("meta" between calls).
    device = prompt_ids.device if target.device.type == "meta" else target.device
    if mask is not None:
        mask = mask.to(device)
    target_class: Any = type(target)  # its own `generate`, where a folder has bound another to the model
    return target_class.generate(
        target,
        prompt_ids.to(device),
        attention_mask=mask,
        stopping_criteria=StoppingCriteriaList(criteria),
        custom_generate=custom_generate,
        drafter=drafter,
        **settings,
    )


def _translate_sampling(keywords: dict[str, Any]) -> None:
    """Writes `temperature` and `stop_token_ids` as `generate` takes them."""
    temperature = keywords.get("temperature")
    if temperature is not None:
        keywords["do_sample"] = first_of(keywords.get("do_sample"), temperature > 0)
    if temperature == 0:
        # Greedy decoding ignores these, and `generate` would warn about the target's defaults.
        keywords.update(temperature=None, top_p=None, top_k=None)
    stop_token_ids = keywords.pop("stop_token_ids", None)
    if stop_token_ids is not None:
        stops_nowhere = isinstance(stop_token_ids, (list, tuple)) and not stop_token_ids
        keywords["eos_token_id"] = None if stops_nowhere else stop_token_ids


def _stop_string_criteria(target: PreTrainedModel, keywords: dict[str, Any]) -> list[StopStringCriteria]:
    """One criterion for each of `stop_strings`, because one that can never match would disable the others.

    Made here, because `generate` does not pass the tokenizer to a custom loop.
    """
    tokenizer = keywords.pop("tokenizer", None)
    config = keywords.get("generation_config")
    of_config = getattr(config, "stop_strings", None)
    strings = first_of(keywords.pop("stop_strings", None), of_config, target.generation_config.stop_strings)
    if strings is None:
        return []
    keywords["stop_strings"] = None  # instead of those of a config
    if tokenizer is None:
        raise ValueError(f"stop_strings={strings!r} cannot stop a text: pass the target's tokenizer=… beside it.")
    if isinstance(strings, str):
        strings = [strings]
    if not all(strings):
        raise ValueError(f"stop_strings={strings!r} cannot stop a text: give strings that are not empty.")
    return [StopStringCriteria(tokenizer, string) for string in strings]


def custom_generate(
    target: PreTrainedModel,
    input_ids: torch.Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    *,
    drafter: Any = None,
    block_size: int | None = None,
    max_draft_tokens: int | None = None,
    verification: str = "auto",
    conversation: Conversation | None = None,
    uniforms_generator: Generators = None,
    token_streamer: Any = None,
    as_blocks: bool = False,
    decoder_class: Any = None,
    adaptive: bool = False,
    compile: bool | str = "auto",
    cuda_graph: bool | str = "auto",
    draft_tree: int | bool = False,
    draft_window: tuple[int, int] | None = None,
    history: Any = None,
    num_looked_up: int | None = None,
    ngram_size: int | None = None,
    **model_inputs: Any,
) -> torch.Tensor | DFlashOutput | Iterator[Block] | Decoder:
    """The decoding loop for the target's own `generate`. Output and errors are those of [`spec_generate`].

    `generate` passes the target and what it has prepared: prompts [B, S], processors, criteria, generation config, and inputs of
    the target's forward. It does not pass on `generator`, `tokenizer` and `stop_strings`: use `uniforms_generator` for the first,
    and [`spec_generate`] for stop strings. A `streamer` is found, and gets the tokens as blocks are committed.
    `num_looked_up` and `ngram_size` are `prompt_lookup_num_tokens` and `max_matching_ngram_size`. With a `decoder_class`, the
    decoder of the request is returned and nothing is computed.

    Example:
        >>> target.generate(**inputs, custom_generate=custom_generate, drafter=drafter, max_new_tokens=64)
    """
    check_drafter(drafter, target)
    streamer = _streamer_of_generate()
    if streamer is not None and (token_streamer is not None or as_blocks):
        raise ValueError("streamer came with token_streamer or as_blocks: pass one of them.")
    check_config(generation_config)
    check_prepared(input_ids, model_inputs)
    engine_keywords = {
        "adaptive": adaptive,
        "compile": compile,
        "cuda_graph": cuda_graph,
        "draft_tree": draft_tree,
        "draft_window": draft_window,
        "history": history,
        "prompt_lookup_num_tokens": first_of(num_looked_up, generation_config.prompt_lookup_num_tokens),
        "max_matching_ngram_size": first_of(ngram_size, generation_config.max_matching_ngram_size),
    }
    if drafter.engine is None:
        check_values(engine_keywords, NO_ENGINE)
    else:
        drafter.engine.check_keywords(engine_keywords)
    prompt_inputs = further_inputs(model_inputs)
    if prompt_inputs:
        prompt_inputs["position_ids"] = model_inputs.get("position_ids")  # with three axes for images
    is_sampled = generation_config.do_sample
    longest = min(c.max_length for c in stopping_criteria if type(c) is MaxLengthCriteria)
    outputs = ("scores", "logits")
    request = Request(
        target=target,
        drafter=drafter,
        input_ids=input_ids,
        attention_mask=model_inputs.get("attention_mask"),
        prompt_inputs=prompt_inputs,
        config=generation_config,
        max_new_tokens=longest - input_ids.shape[1],
        max_length=max_positions(target),
        prefill_chunk_size=generation_config.prefill_chunk_size,
        block_size=first_of(block_size, drafter.config.block_size),
        max_draft_tokens=max_draft_tokens,
        verification=checked_verification(verification or "auto", is_sampled, logits_processor),
        temperature=(is_sampled and generation_config.temperature) or 1.0,
        keeping=frozenset(name for name in outputs if getattr(generation_config, f"output_{name}")),
        conversation=conversation,
        uniforms_generator=uniforms_generator,
        token_streamer=first_of(token_streamer, streamer),
        engine_keywords=engine_keywords,
    )
    check_request(request)
    name = drafter.name_or_path or "The drafter"
    depth = "%s: block_size=%s, max_draft_tokens=%s, draft_tree=%s"
    logger.info_once(depth, name, request.block_size, max_draft_tokens, draft_tree)
    decoder = _decoder(request, logits_processor, stopping_criteria, decoder_class)
    if decoder_class is not None:
        return decoder
    blocks = _guarded(decoder)
    return blocks if as_blocks else _collect(blocks, request, has_put_prompt=streamer is not None)


def _decoder(
    request: Request, processors: LogitsProcessorList, criteria: StoppingCriteriaList, decoder_class: Any
) -> Decoder:
    """The decoder of a request, which computes when its blocks are read."""
    conversation = request.conversation
    if conversation is not None:
        conversation.check(request.target, request.drafter)

    engine = request.drafter.engine  # None has none of it
    num_sequences = len(request.input_ids)
    of_batch = []
    if num_sequences > 1:
        # Without stop tokens `generate` pads no text: all grow until all are told to stop.
        is_padded = request.config._eos_token_tensor is not None
        of_batch = _criteria_of_batch(criteria, is_padded, engine)
    of_texts = StoppingCriteriaList(criterion for criterion in criteria if criterion not in of_batch)

    def is_done(text_ids: torch.Tensor) -> bool:
        return bool(of_texts(text_ids, None).all())

    own = own_processors(processors, num_sequences)
    cut = make_cutter(of_texts, request.max_new_tokens)
    acceptor = getattr(engine, "acceptor", Acceptor)(request, own, is_done)
    decoder: Decoder = (decoder_class or getattr(engine, "decoder", Decoder))(request, acceptor, cut)
    if of_batch:
        decoder.ask_together(of_batch)  # type: ignore[attr-defined]
    return decoder


def _criteria_of_batch(criteria: StoppingCriteriaList, is_padded: bool, engine: Any) -> list[Any]:
    """The criteria that have to look at all texts of a batch at once. Without the engine, InexactError if texts are not padded."""
    others = [criterion for criterion in criteria if type(criterion) is not MaxLengthCriteria]
    if engine is not None:
        return engine.of_batch(others) if is_padded else others
    where = "in a batch without stop tokens, where no text ends before all do,"
    remedy = "give eos_token_id, or one prompt"
    if is_padded:
        others = [criterion for criterion in others if not type(criterion).__module__.startswith("transformers.")]
        where, remedy = "in a batch, where it may look at all texts at once,", "give one prompt"
    if others:
        need = "needs the package (pip install dflash-transformers)"
        raise InexactError(f"{type(others[0]).__name__} {where} {need}: {remedy}.")
    return []


def _streamer_of_generate() -> Any:
    """The `streamer` of the `generate` that calls this loop; `None` if it has none.

    `generate` gives it the prompt and hands it to no custom loop. It is read from the frame of `generate`: without it, whoever
    reads the stream would wait forever.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_locals.get("streamer")


def _guarded(decoder: Decoder) -> Iterator[Block]:
    """The blocks of a decoder. After an error the conversation forgets its text, and running out of memory is reported with remedies."""
    try:
        yield from decode_blocks(decoder)
    except (Exception, KeyboardInterrupt) as error:  # closed early, it is between two steps
        decoder.conversation.forget()
        if not isinstance(error, torch.OutOfMemoryError) and "can't allocate memory" not in str(error):
            raise
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        remedy = "lower prefill_chunk_size for a long prompt, the number of prompts, max_new_tokens, or draft_tree"
        raise torch.OutOfMemoryError(f"Out of memory ({first_line}): {remedy}.") from error
    finally:
        decoder.close()


def _collect(blocks: Iterator[Block], request: Request, has_put_prompt: bool) -> torch.Tensor | DFlashOutput:
    """Collects the blocks into the output of `generate`, and streams them."""
    input_ids = request.input_ids
    streamer = request.token_streamer
    if streamer is not None and not has_put_prompt:
        streamer.put(input_ids.cpu())
    by_sequence: list[list[Block]] = [[] for _ in input_ids]
    for block in blocks:
        by_sequence[block.sequence].append(block)
        if streamer is not None:
            for token_id in block.token_ids:
                streamer.put(torch.tensor([token_id]))
    if streamer is not None:
        streamer.end()
    new_ids = []
    for sequence in by_sequence:
        new_ids.append(torch.tensor([token_id for block in sequence for token_id in block.token_ids]))
    pad_token = request.config._pad_token_tensor
    pad_token_id = 0 if pad_token is None else int(pad_token)  # without one all sequences stop together
    padded = pad_sequence(new_ids, batch_first=True, padding_value=pad_token_id)
    sequences = torch.cat([input_ids, padded.to(input_ids)], dim=1)
    if not request.config.return_dict_in_generate:
        return sequences
    return _output(request, sequences, by_sequence)


def _output(request: Request, sequences: torch.Tensor, by_sequence: list[list[Block]]) -> DFlashOutput:
    """The output with its statistics, of the blocks of each sequence."""
    outputs: dict[str, Any] = {}
    for name in request.keeping:
        of_sequences = [torch.cat([getattr(block, name) for block in blocks]) for blocks in by_sequence]
        outputs[name] = pad_sequence(of_sequences).unbind(dim=0)  # [B, V] for each new position
    lengths = []
    steps: list[Block] = []
    for blocks in by_sequence:
        own_steps = [block for block in blocks if not block.is_prefill]
        lengths.append([block.acceptance_length for block in own_steps])
        steps += own_steps
    drafted = [block.acceptance_length for block in steps if not block.is_lookup]
    return DFlashOutput(
        sequences=sequences,
        acceptance_lengths=lengths,
        tau=_mean(drafted),
        tau_with_lookup=_mean([block.acceptance_length for block in steps]),
        tokens_per_step=_mean([len(block.token_ids) for block in steps]),
        **outputs,
    )


def _mean(numbers: list[int]) -> float:
    """The mean; NaN of none."""
    return torch.tensor(numbers, dtype=torch.float64).mean().item()


def generate(inputs: Any = None, *, model: Any, drafter: Any = None, **kwargs: Any) -> Any:
    """Runs the loop of the DFlash checkpoint that contains this file in a target's own `generate`.

        drafter = AutoModel.from_pretrained("org/drafter", trust_remote_code=True)
        target.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True, drafter=drafter)

    `drafter` is the model of that checkpoint; all other arguments are those of `generate`. Raises ValueError if the drafter is
    missing or the request cannot be exact.
    """
    if not hasattr(drafter, "spec_generate"):
        raise ValueError(f"drafter={drafter!r} cannot draft: pass AutoModel.from_pretrained(<this checkpoint>).")
    return drafter.spec_generate(kwargs.pop("input_ids", inputs), target=model, **kwargs)


def custom_generate_source() -> str:
    """The text of a checkpoint's `custom_generate/generate.py`."""
    return f"from typing import Any\n\n\n{inspect.getsource(generate)}"


def write_custom_generate(folder: str | Path) -> None:
    """Puts `custom_generate/generate.py` into `folder`, where `target.generate(custom_generate=…)` looks for it."""
    path = Path(folder, "custom_generate", "generate.py")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)  # transformers uploads only files that are new
    path.write_text(custom_generate_source(), encoding="utf-8")
