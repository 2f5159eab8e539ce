"""Writes answers with the target in this process: token ids in, token ids out.

Without a drafter, `generate` of transformers writes the answers. A logits processor then chooses the tokens with the
same uniform random numbers as the loop with a drafter, so that both choose the same tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation import logits_process as processing
from transformers.modeling_utils import PreTrainedModel

from dflash.common.fingerprints import config_fingerprint, model_fingerprint
from dflash.common.logits import broken_logits, check_logits, dtype_name, is_broken
from dflash.model.cache_dflash import CACHE_NAME, PreallocatedCache
from dflash.model.configuration_dflash import check_values
from dflash.model.decoding_dflash import Block
from dflash.model.generation_dflash import generate_blocks
from dflash.model.requests_dflash import SETTINGS
from dflash.model.sampling_dflash import PositionUniforms, choose_sampled, place_uniforms
from dflash.model.targets_dflash import LINEAR_TYPES, max_positions
from dflash.training import Example, Trace, stop_ids, was_rejected, with_response


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: greedily at temperature 0, else sampled as by `generate`.

    Raises:
        ValueError: for a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0  # 0 for all tokens

    def __post_init__(self) -> None:
        check_values(vars(self), SETTINGS)


@dataclass(frozen=True)
class AnswerRequest:
    """A prompt to answer, the seed of its sampling, and the largest number of tokens that the answer may have."""

    prompt_ids: Sequence[int]
    seed: int
    max_new_tokens: int


@dataclass(frozen=True)
class Answer:
    """The target's answer to a prompt, and how it was written."""

    token_ids: list[int]  # the stop token included
    ended: bool  # False if `max_new_tokens` cut it off
    acceptance_lengths: list[int] = field(default_factory=list)  # per verify step, with a drafter
    is_encoded: bool = False  # whether the ids were encoded from the answer's text, because a server did not send them
    is_miscounted: bool = False  # if they were, whether the server counted another number of tokens in the answer


@dataclass
class _Text:
    """An answer in progress."""

    request: AnswerRequest
    stops: set[int]
    token_ids: list[int] = field(default_factory=list)
    acceptance_lengths: list[int] = field(default_factory=list)
    rejected: list[int] = field(default_factory=list)  # the anchors of rejected drafts, as indices into `all_ids`

    @property
    def all_ids(self) -> list[int]:
        """The token ids of the prompt and of the answer so far."""
        return [*self.request.prompt_ids, *self.token_ids]

    @property
    def ended(self) -> bool:
        """Whether the answer's last token is a stop token."""
        return bool(self.token_ids) and self.token_ids[-1] in self.stops

    @property
    def is_done(self) -> bool:
        """Whether the answer ended or has `max_new_tokens` tokens."""
        return self.ended or self.num_left == 0

    @property
    def num_left(self) -> int:
        """The number of tokens that the answer may still get."""
        return self.request.max_new_tokens - len(self.token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Appends tokens until the answer is done, and drops the rest.

        A batch is written until all its texts are done, so a text may get more tokens than it needs.
        """
        for token_id in token_ids:
            if self.is_done:
                return
            self.token_ids.append(token_id)

    def take(self, block: Block) -> None:
        """Records a block: its tokens, its acceptance length and, if its draft was rejected, its anchor."""
        if self.is_done:
            return
        if was_rejected(block):
            self.rejected.append(len(self.all_ids) - 1)
        if not block.is_prefill:
            self.acceptance_lengths.append(block.acceptance_length)
        self.append(block.token_ids)


class TargetWriter:
    """Answers requests with the target in this process. A drafter can save steps. In fp32 it does not change a token.

    An answer depends on its prompt, its seed and the sampling. It depends on the other prompts of its batch only
    through rounding. With large batches, decoding with a drafter may be slower than without. With a `trace`, each text
    and the anchors of its rejected drafts are recorded there.

    Raises:
        ValueError: when it is made or in an answer, if the target's logits are NaN or infinite.
    """

    is_concurrent: Literal[False] = False  # only one thread at a time may call it

    def __init__(
        self,
        target: PreTrainedModel,
        drafter: PreTrainedModel | None = None,
        batch_size: int = 8,
        trace: Trace | None = None,
    ) -> None:
        check_logits(target)
        self.target = target
        self.drafter = drafter
        self.batch_size = batch_size
        self.trace = trace
        self.positions = max_positions(target)  # length of the longest sequence, `None` if the config does not give it
        self.revision = getattr(target.config, "_commit_hash", None)
        self.facts = {  # what the answers depend on besides the requests and the sampling
            "weights": model_fingerprint(target),
            "config": config_fingerprint(target.config, target.generation_config),
            "dtype": dtype_name(target),
        }

    def __call__(self, requests: Sequence[AnswerRequest], sampling: Sampling) -> list[Answer]:
        """Returns the answer to each request, in order.

        All requests share one batch. With a drafter, texts with much less room in the target's positions than others
        get batches of their own.
        """
        stops = stop_ids(self.target.generation_config)
        texts = [_Text(request, stops) for request in requests]
        if self.drafter is None:
            self._finish(texts, sampling)
        else:
            for batch in self._roomy_first(texts):
                self._draft(batch, sampling)
                self._finish(batch, sampling)
        answers = []
        for text in texts:
            if self.trace is not None:
                prompt_ids = text.request.prompt_ids
                self.trace.append(prompt_ids, text.token_ids, text.rejected)
            answer = Answer(text.token_ids, text.ended, text.acceptance_lengths)
            answers.append(answer)
        return answers

    def _finish(self, texts: Sequence[_Text], sampling: Sampling) -> None:
        """Completes each text in place with the target alone."""
        uniforms = PositionUniforms(len(texts), _generators(texts))
        while True:
            indices = [index for index, text in enumerate(texts) if not text.is_done]
            if not indices:
                return
            unfinished = [texts[index] for index in indices]
            prompts = [text.all_ids for text in unfinished]
            width = max(map(len, prompts))
            # All unfinished texts have the same number of new tokens, because each was in every batch so far.
            num_new = len(unfinished[0].token_ids)
            choose = _ByUniforms(uniforms, indices, width - num_new)
            num_steps = self._num_steps(unfinished)
            written = _write(self.target, prompts, num_steps, sampling, choose)
            for text, token_ids in zip(unfinished, written, strict=True):
                text.append(token_ids)

    def _num_steps(self, texts: Sequence[_Text]) -> int:
        """Returns the number of tokens to write next: until all texts are complete, or the longest fills the positions.

        After that the other texts go on without the longest one. Beyond its positions, a target with learned position
        embeddings fails. A target whose rotary frequencies depend on the length would change the answers of the whole
        batch.
        """
        num_left = max(text.num_left for text in texts)
        max_length = max(len(text.all_ids) for text in texts)
        if self.positions is None or max_length >= self.positions:  # a request may ask for more than the positions
            return num_left
        return min(num_left, self.positions - max_length)

    def _roomy_first(self, texts: Sequence[_Text]) -> list[list[_Text]]:
        """Returns the texts in batches, those with most room first.

        Each batch can draft at least half as many tokens as its text with the most room could draft alone. A batch
        drafts until its longest text fills the positions, so one text that nearly fills them would end the drafts of
        all. A batch that has ended cannot be continued, because each call of the loop draws its random numbers from the
        beginning.
        """
        batches: list[list[_Text]] = []
        roomiest = 0
        by_room = sorted(texts, key=lambda text: self._num_steps([text]), reverse=True)
        for text in by_room:
            if batches and 2 * self._num_steps([*batches[-1], text]) >= roomiest:
                batches[-1].append(text)
            else:
                batches.append([text])
                roomiest = self._num_steps([text])
        return batches

    def _draft(self, texts: Sequence[_Text], sampling: Sampling) -> None:
        """Extends each text in place with the drafter.

        It ends when all texts are complete, or when the longest has as many tokens as the target has positions.
        """
        drafter: Any = self.drafter
        options: dict[str, Any] = {"temperature": sampling.temperature}
        if sampling.temperature:
            options |= {"top_p": sampling.top_p, "top_k": sampling.top_k}
        if self.trace is not None:  # so that only the drafter's own drafts are recorded
            options["prompt_lookup_num_tokens"] = 0
        blocks = generate_blocks(
            drafter,
            self.target,
            [torch.tensor(text.request.prompt_ids) for text in texts],
            max_new_tokens=self._num_steps(texts),
            generator=_generators(texts),
            verification="match",  # so that a position's random number chooses the same token as without a drafter
            **options,
        )
        for block in blocks:
            texts[block.sequence].take(block)


def _generators(texts: Sequence[_Text]) -> list[torch.Generator]:
    """Returns a new random generator for each text, with the seed of its request."""
    return [torch.Generator().manual_seed(text.request.seed) for text in texts]


@dataclass(frozen=True)
class Regenerated:
    """The target's answer to `prompts[index]`. `ended` is False if `max_new_tokens` cut it off."""

    index: int
    example: Example
    ended: bool


def regenerate(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling | None = None,
    seed: int = 0,
    drafter: PreTrainedModel | None = None,
) -> Iterator[Regenerated]:
    """Yields the target's response to each prompt, greedy by default, in the order in which batches finish.

    Prompts of similar length share a batch. A sampled response depends on `seed` and the index of its prompt, not on
    the batch. The global random state does not change.
    """
    write = TargetWriter(target, drafter, batch_size)
    sampling = sampling or Sampling()
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    while order:
        batch = order[:batch_size]
        order = order[batch_size:]
        requests = []
        for index in batch:
            request = AnswerRequest(prompts[index], row_seed(seed, index), max_new_tokens)
            requests.append(request)
        answers = write(requests, sampling)
        for index, answer in zip(batch, answers, strict=True):
            example = with_response(prompts[index], answer.token_ids)
            yield Regenerated(index, example, answer.ended)


def row_seed(seed: int, *numbers: int) -> int:
    """Returns a seed below 2**63 for `numbers`, such as the number of a row and the index of a turn."""
    digest = hashlib.sha256(repr((seed, *numbers)).encode())
    return int(digest.hexdigest()[:16], 16) >> 1


@torch.inference_mode()
def _write(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    choose: _ByUniforms,
) -> list[list[int]]:
    """Returns the new tokens after each prompt of a batch. Tokens after a stop token are not removed.

    ValueError if a logit was NaN or +inf.
    """
    width = max(map(len, prompts))
    pad = partial(pad_sequence, batch_first=True, padding_side="left")
    input_ids = pad([torch.tensor(prompt) for prompt in prompts])
    attention_mask = pad([torch.ones(len(prompt), dtype=torch.long) for prompt in prompts])
    watch = _Watch()
    processors = processing.LogitsProcessorList([watch])
    if sampling.temperature:
        # They come after the processors that the target's config asks for, in the order of `generate`.
        processors.append(processing.TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            processors.append(processing.TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1:
            processors.append(processing.TopPLogitsWarper(sampling.top_p))
        processors.append(choose)
    options: dict[str, Any] = {}
    config = target.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or ()
    if not set(LINEAR_TYPES) & set(layer_types):  # linear layers have caches of their own
        length = width + max_new_tokens
        options[CACHE_NAME] = PreallocatedCache(config.num_hidden_layers, length)  # faster than a growing cache
    settings: Any = target.generation_config
    stops = stop_ids(settings)
    if stops and settings.pad_token_id is None:
        options["pad_token_id"] = min(stops)
    generate: Any = target.generate  # mixed into every causal model; the type of PreTrainedModel does not show it
    sequences = generate(
        input_ids.to(target.device),
        attention_mask=attention_mask.to(target.device),
        max_new_tokens=max_new_tokens,
        logits_processor=processors,
        do_sample=False,
        temperature=None,  # these three are unused; `generate` would warn about values in the target's settings
        top_p=None,
        top_k=None,
        **options,
    )
    if watch.is_broken:
        raise broken_logits(target)
    return sequences[:, width:].tolist()


class _Watch(processing.LogitsProcessor):
    """Records in `is_broken` whether any score was NaN or +inf. Read it once, because reading waits for the device."""

    is_broken: bool | torch.Tensor = False

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns the scores [B, V] unchanged."""
        self.is_broken = is_broken(scores) | self.is_broken
        return scores


class _ByUniforms(processing.LogitsProcessor):
    """Samples the token of each sequence with the random numbers of that sequence, as decoding with a drafter does."""

    def __init__(self, uniforms: PositionUniforms, sequences: Sequence[int], first_column: int) -> None:
        self.uniforms = uniforms
        self.sequences = sequences  # the index in `uniforms` of each sequence of the batch
        self.first_column = first_column  # the column of the first new token

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
        """Returns new scores [B, V]: 0 for the chosen token, -inf for all others."""
        position = input_ids.shape[1] - self.first_column
        sequence_uniforms = []
        for sequence in self.sequences:
            sequence_uniforms.append(self.uniforms(sequence, position, 1))
        uniforms = torch.stack(sequence_uniforms)  # [B, 1]
        uniforms = place_uniforms(uniforms, scores.device)
        position_scores = scores.unsqueeze(1)  # [B, 1, V]
        choices = choose_sampled(position_scores, uniforms)  # [B, 1]
        chosen: Any = torch.full_like(scores, -torch.inf)
        chosen.scatter_(1, choices, 0.0)
        return chosen
