"""Exact distributions of short sampled texts over a handful of words, samples of them, and the chi-square test between the two."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from tiny_models import drafter_config, make_target
from transformers import LogitsProcessorList, PreTrainedModel

from dflash import DFlashDraftModel


VOCAB = 5
DEPTH = 4
PROMPT = torch.tensor([[1, 2]])
PAD = 0
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.4,  # large, so that every word depends much on those before it
}


def make_distribution_target(seed: int = 8) -> PreTrainedModel:
    """A target of five words, whose texts of four words can all be enumerated."""
    return make_target("qwen3", seed=seed, num_hidden_layers=2, **SHAPE)


class HabitDrafter(DFlashDraftModel):
    """Proposes what mostly follows the anchor, whatever stands before it: often right and often wrong, in any batch.

    It looks at the anchor alone and holds no state, so rows may be sampled, leave, and differ in length.
    """

    def __init__(self, target: PreTrainedModel, block_size: int = DEPTH) -> None:
        torch.default_generator.manual_seed(3)
        fields = {
            "num_hidden_layers": 1,
            "target_layer_ids": [0],
            "mask_token_id": VOCAB - 1,
            "block_size": block_size,
        }
        super().__init__(drafter_config(**SHAPE, **fields, num_target_layers=target.config.num_hidden_layers))
        self.eval()
        self.words = target.get_input_embeddings().weight.detach()
        head = target.get_output_embeddings().weight.detach()
        self.sayings = head * (4.0 / head.norm(dim=1, keepdim=True))  # row t is the hidden state that says token t
        assert (self.sayings @ head.T).argmax(dim=1).tolist() == list(range(VOCAB)), "choose another seed"
        with torch.no_grad():
            follower = target(torch.arange(VOCAB)[:, None], use_cache=False).logits[:, -1].argmax(dim=-1)
        habits = [follower]
        for _ in range(block_size - 2):
            habits.append(follower[habits[-1]])
        self.habits = torch.stack(habits, dim=1)  # [V, N - 1]

    def forward(self, noise_embeds: Any = None, context_hidden_states: Any = None, **kwargs: Any) -> Any:
        """The real forward, with the habitual rows in place of its own."""
        output = super().forward(noise_embeds, context_hidden_states, **kwargs)
        anchors = torch.cdist(noise_embeds[:, 0], self.words).argmin(dim=1)
        states = output.last_hidden_state.clone()
        states[:, 1:] = self.sayings[self.habits[anchors, : states.shape[1] - 1]]
        output.last_hidden_state = states
        return output


def prepared_processors(target: PreTrainedModel, prompt_ids: torch.Tensor, **options: Any) -> LogitsProcessorList:
    """What `generate` makes of these keywords, in its order."""

    def hand_back(model: Any, input_ids: Any, logits_processor: Any = None, **_: Any) -> Any:
        return logits_processor

    return target.generate(prompt_ids, custom_generate=hand_back, **options)


@torch.no_grad()
def exact_distribution(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    processors: LogitsProcessorList,
    stop_ids: Collection[int] = (),
    depth: int = DEPTH,
) -> torch.Tensor:
    """The probability of every text of `depth` words [V ** depth], by enumeration: each prefix processed by itself.

    A text that a stop id ends is filled up with `PAD`.
    """
    vocab_size = target.config.vocab_size
    distribution = torch.zeros(vocab_size**depth, dtype=torch.float64)
    open_texts: list[tuple[list[int], float]] = [([], 1.0)]
    for step in range(depth):
        words = torch.tensor([text for text, _ in open_texts], dtype=torch.long).view(len(open_texts), step)
        prefixes = torch.cat([prompt_ids.expand(len(open_texts), -1), words], dim=1)
        logits = target(prefixes, use_cache=False).logits[:, -1].float()
        longer = []
        for place, (text, probability) in enumerate(open_texts):
            scores = processors(prefixes[place : place + 1], logits[place : place + 1])
            for token, share in enumerate(scores[0].double().softmax(dim=-1).tolist()):
                if token in stop_ids or step == depth - 1:
                    padded = [*text, token] + [PAD] * (depth - step - 1)
                    distribution[cells(torch.tensor([padded]), vocab_size)] += probability * share
                elif share > 0:
                    longer.append(([*text, token], probability * share))
        open_texts = longer
    assert abs(float(distribution.sum()) - 1) < 1e-9
    return distribution


def cells(words: torch.Tensor, vocab_size: int = VOCAB) -> torch.Tensor:
    """The index in `exact_distribution` of each text of words [B, depth]: [B]."""
    places = vocab_size ** torch.arange(words.shape[1] - 1, -1, -1)
    return (words * places).sum(dim=1)


def p_value(drawn: torch.Tensor, distribution: torch.Tensor) -> float:
    """Of the chi-square test that the cells `drawn` [B] come from `distribution`; cells expected less than 5 times are pooled."""
    counts = torch.bincount(drawn, minlength=len(distribution)).double()
    if (counts[distribution == 0] > 0).any():
        return 0.0
    expected = distribution * len(drawn)
    rare = expected < 5
    pooled_counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    pooled = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if pooled[-1] < 5:  # too little is left over to be a cell
        pooled_counts, pooled = pooled_counts[:-1], pooled[:-1]
    degrees = torch.tensor(float(len(pooled) - 1), dtype=torch.float64)
    assert degrees >= 5, "the distribution has too few likely texts to test"
    statistic = ((pooled_counts - pooled) ** 2 / pooled).sum()
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


@contextmanager
def leaning(target: PreTrainedModel, strength: float = 4.0) -> Iterator[None]:
    """A planted bias: wherever the target verifies a block it favours the tokens it is shown, as a lenient rule would."""

    def favour(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        token_ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if token_ids.shape[1] > 1 and output.logits.shape[:2] == token_ids.shape:  # a block, not a prompt
            shown = token_ids[:, 1:, None]
            output.logits = output.logits.clone()
            output.logits[:, :-1].scatter_add_(2, shown, torch.full(shown.shape, strength))
        return output

    handle = target.register_forward_hook(favour, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def new_words(sequences: torch.Tensor, prompt_length: int, depth: int = DEPTH) -> torch.Tensor:
    """The new words of sequences [B, S + new], filled up with `PAD`: [B, depth]."""
    words = sequences[:, prompt_length:]
    return torch.nn.functional.pad(words, (0, depth - words.shape[1]), value=PAD)


def drawn_cells(generate: Any, seeds: Sequence[int]) -> torch.Tensor:
    """The cells of what `generate(seed)` writes after `PROMPT`, for all seeds."""
    return torch.cat([cells(new_words(generate(seed), PROMPT.shape[1])) for seed in seeds])
