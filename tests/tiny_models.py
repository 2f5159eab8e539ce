"""Tiny random targets and drafters, and a drafter whose acceptance lengths are written in advance.

A random drafter is never right, so a test of losslessness that uses one never exercises acceptance. `ScriptedDrafter` does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    TextStreamer,
)
from transformers.modeling_outputs import BaseModelOutput

from dflash import DFlashConfig, DFlashDraftModel
from dflash.model.cache_dflash import CACHE_NAMES


VOCAB_SIZE = 96
HIDDEN_SIZE = 32
NUM_TARGET_LAYERS = 4
BLOCK_SIZE = 6
MASK_TOKEN_ID = VOCAB_SIZE - 1
PAD_TOKEN_ID = 0
MOST_SCRIPTED = 24  # new tokens of texts that `scripted` knows
WRONG_OFFSET = 5  # a wrong proposal is the right one plus this

DIMENSIONS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
# Qwen3's defaults name ids far outside a tiny vocabulary; a test that wants one sets it.
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

# Fields of a drafter of one layer, for a target of two: half the time where many steps are run or captured.
SMALL: dict[str, Any] = {"num_hidden_layers": 1, "num_target_layers": 2, "target_layer_ids": [0]}

# What is asked where a text is compared with `greedy`'s.
GREEDY: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": [], "return_dict_in_generate": True}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# Kind of target, and a seed whose text is varied: one that repeats a token would hide a wrong rollback.
TARGET_SEEDS = {"qwen3": 4, "qwen3_tied": 2, "qwen3_sliding": 4, "llama": 22, "llama_tied": 22}
TARGET_KINDS = tuple(TARGET_SEEDS)


def make_target(kind: str = "qwen3", seed: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A random fp32 target of one of `TARGET_KINDS`, in eval mode; its layers are large enough for varied text."""
    fields = {**DIMENSIONS, **NO_SPECIAL_TOKENS, "num_hidden_layers": NUM_TARGET_LAYERS}
    fields["tie_word_embeddings"] = kind.endswith("_tied")
    if kind == "qwen3_sliding":
        kinds = ["sliding_attention", "full_attention"]
        fields.update(
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=0,
            layer_types=kinds * (NUM_TARGET_LAYERS // 2),
        )
    if kind.startswith("llama"):
        fields.update(rope_theta=500000.0, rope_scaling=dict(LLAMA3_ROPE))
    fields.update(overrides)
    torch.default_generator.manual_seed(TARGET_SEEDS[kind] if seed is None else seed)
    config_class, model_class = (
        (LlamaConfig, LlamaForCausalLM) if kind.startswith("llama") else (Qwen3Config, Qwen3ForCausalLM)
    )
    return model_class(config_class(**fields)).float().eval()


def drafter_config(**overrides: Any) -> DFlashConfig:
    """The configuration of a two-layer drafter for `make_target()`."""
    fields = {
        **DIMENSIONS,
        "num_hidden_layers": 2,
        "block_size": BLOCK_SIZE,
        "mask_token_id": MASK_TOKEN_ID,
        "num_target_layers": NUM_TARGET_LAYERS,
        "target_layer_ids": [0, 2],
        **overrides,
    }
    return DFlashConfig(**fields)


def make_drafter(seed: int = 1, **overrides: Any) -> DFlashDraftModel:
    """A random fp32 drafter for `make_target()`, in eval mode."""
    torch.default_generator.manual_seed(seed)
    return DFlashDraftModel(drafter_config(**overrides)).float().eval()


def make_prompt(length: int = 9, seed: int = 2, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Random ids [1, length] without pad and mask id.

    A pad id inside a prompt makes `generate` infer an attention mask, and a correct loop then looks wrong.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(PAD_TOKEN_ID + 1, vocab_size - 1, (1, length), generator=generator)


def left_padded(prompts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts [1, S] as one batch [B, longest] and its attention mask."""
    longest = max(prompt.shape[1] for prompt in prompts)
    ids = torch.full((len(prompts), longest), PAD_TOKEN_ID)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - prompt.shape[1] :] = prompt[0]
        mask[row, longest - prompt.shape[1] :] = 1
    return ids, mask


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }} {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant {% if enable_thinking is defined and not enable_thinking %}"
    "[] {% endif %}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, `VOCAB_SIZE` in all, with a chat template that knows `enable_thinking`."""
    specials = ["<pad>", "<|im_start|>", "<|im_end|>"]
    characters = [chr(code) for code in range(32, 32 + VOCAB_SIZE - len(specials) - 1)]
    vocabulary = {token: index for index, token in enumerate([*specials, *characters, "<mask>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|im_end|>",
        extra_special_tokens={"start": "<|im_start|>", "mask": "<mask>"},
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def greedy(target: PreTrainedModel, prompt_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Plain greedy decoding by transformers: the oracle."""
    kwargs.setdefault("max_new_tokens", 30)
    return target.generate(prompt_ids, do_sample=False, **kwargs)


_remembered: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, torch.Tensor]] = weakref.WeakKeyDictionary()


def remembered_greedy(target: PreTrainedModel, prompt_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """`greedy` of a read-only target that tests share, computed once; `kwargs` are numbers and lists of them.

    Two thirds of the time of a test of the loop went into writing its reference again.
    """
    texts = _remembered.setdefault(target, {})
    asked = repr((prompt_ids.tolist(), sorted(kwargs.items())))
    assert "tensor" not in asked, "a tensor is printed in part"
    assert " at 0x" not in asked, "an object is printed without what it holds"
    if asked not in texts:
        texts[asked] = greedy(target, prompt_ids, **kwargs)
    return texts[asked].clone()


class ScriptedDrafter(DFlashDraftModel):
    """A drafter that proposes `truth` and goes wrong after `script[i]` tokens of block i (the script repeats).

    The real forward runs and fills the cache; then the rows it returns are replaced by ones that the target's head maps
    to the wanted token. Behind the wrong token the proposals are right again, so that a loop that counts
    matches instead of the matching prefix fails.

    Args:
        target: The target, whose head must be able to say every wanted token (asserted).
        truth: The text that the target will write, prompt included and padding left out: [S], [1, S], or a list of such.
        script: Numbers of right proposals per block; row r of a batch starts at its r-th entry.
        overrides: Fields of the configuration.
    """

    def __init__(self, target: PreTrainedModel, truth: Any, script: list[int], **overrides: Any) -> None:
        config = target.config.get_text_config(decoder=True)
        shape = {name: getattr(config, name) for name in ("vocab_size", "hidden_size")}
        torch.default_generator.manual_seed(3)
        super().__init__(drafter_config(**{**shape, "num_target_layers": config.num_hidden_layers, **overrides}))
        self.eval()
        rows = truth if isinstance(truth, list) else [truth]
        self.truths = [torch.as_tensor(row).flatten().tolist() for row in rows]
        self.live = list(range(len(rows)))
        self.script = list(script)
        self.num_blocks = 0
        weight = target.get_output_embeddings().weight.detach().float()
        embedding = target.get_input_embeddings()
        with torch.no_grad():  # as its forward gives them: some families scale them
            self.embeddings = embedding(torch.arange(len(weight))).clone()
        weight = weight * (4.0 / weight.norm(dim=1, keepdim=True))
        self.sayings = weight  # row t is the hidden state that says token t
        self.can_say = (weight @ target.get_output_embeddings().weight.detach().float().T).argmax(dim=1)

    def forward(self, noise_embeds: Any = None, context_hidden_states: Any = None, **kwargs: Any) -> Any:
        """The real forward, with the scripted rows in place of its own."""
        num_rows, width = noise_embeds.shape[:2]
        cache, position_ids = given_cache(kwargs), kwargs.get("position_ids")
        held = 0 if cache is None else int(cache.get_seq_length())
        if position_ids is None:
            anchors = [held + context_hidden_states.shape[1]] * num_rows
        else:  # given for batches, and by native decoding, which counts padding in its cache
            anchors = position_ids[:, -width].tolist()
        output = super().forward(noise_embeds, context_hidden_states, **kwargs)
        if held == 0:
            self.live, self.num_blocks = list(range(len(self.truths))), 0
        self._find_live(anchors, noise_embeds[:, 0])
        states = output.last_hidden_state.clone()
        for place, (row, anchor) in enumerate(zip(self.live, anchors, strict=True)):
            num_right = self.script[(self.num_blocks + row) % len(self.script)]
            first = 0 if self.config.sample_from_anchor else 1
            for i in range(first, width):
                offset = i + 1 - first
                token = self.truths[row][anchor + offset] if anchor + offset < len(self.truths[row]) else 1
                if offset == num_right + 1:
                    token = (token + WRONG_OFFSET) % self.config.vocab_size
                assert int(self.can_say[token]) == token, f"the head cannot say {token}: choose another seed"
                states[place, i] = self.sayings[token].to(states.dtype)
        self.num_blocks += 1
        output.last_hidden_state = states
        return output

    def _find_live(self, anchors: list[int], embeds: torch.Tensor) -> None:
        """Drops rows that are done: those whose text does not hold the anchor that comes next in their place."""
        if len(anchors) == len(self.live):
            return
        left, self.live = self.live, []
        for anchor, embed in zip(anchors, embeds, strict=True):
            while True:
                assert left, "texts part: no text that the target writes holds the anchor that comes next"
                row = left.pop(0)
                text = self.truths[row]
                if anchor < len(text) and torch.equal(self.embeddings[text[anchor]].to(embed.dtype), embed):
                    break
            self.live.append(row)


class ForkingDrafter(ScriptedDrafter):
    """Where the script goes wrong, the right token is the second best: a chain falls there and a tree goes on."""

    def compute_logits(self, hidden_states: torch.Tensor, head: Any) -> torch.Tensor:
        """One token for certain, or two of which the wrong one is a little likelier."""
        best = head(hidden_states).argmax(dim=-1)
        num_right = self.script[(self.num_blocks - 1) % len(self.script)]
        logits = torch.full((*best.shape, self.config.vocab_size), -30.0)
        logits.scatter_(-1, best[..., None], 0.0)
        if num_right < min(best.shape[1], self.config.block_size - 1):
            wrong = best[0, num_right]
            logits[0, num_right, (wrong - 5) % self.config.vocab_size] = -0.1  # WRONG_OFFSET of the script
        return logits


class PlacedDrafter(ScriptedDrafter):
    """Proposes texts that it knows, and goes wrong after as many tokens as its script says of the anchor's position.

    It asks nothing but positions and computes on the device alone: it can be compiled, run ahead, and run again at the
    same place. Rows of a batch are told apart by where they stand (`follow`).

    Args:
        target: The target, whose head must be able to say every token.
        overrides: Fields of the configuration.
    """

    def __init__(self, target: PreTrainedModel, **overrides: Any) -> None:
        super().__init__(target, [0], [0], **overrides)
        assert torch.equal(self.can_say, torch.arange(len(self.can_say))), "choose another seed"
        self.follow([], [0])

    def follow(self, texts: list[torch.Tensor], script: list[int], starts: Sequence[int] = ()) -> None:
        """Takes what is to be proposed, and how many tokens of it in a row are right.

        Args:
            texts: Of each row [1, S], or one whose beginnings all rows are.
            script: Numbers of right proposals, by the position of the anchor; it repeats.
            starts: From where on each row's text counts; two rows may not count at the same place.
        """
        length = self.config.max_position_embeddings + 2 * BLOCK_SIZE  # a block may reach beyond the last position
        known = torch.ones(length, dtype=torch.long)
        for text, start in zip(texts, starts or [0], strict=bool(starts)):
            known[start : text.shape[1]] = text[0, start:]
        self.text, self.sayings = known.to(self.device), self.sayings.to(self.device)
        self.rights = torch.tensor(script).repeat(length)[:length].to(self.device)

    def forward(self, noise_embeds: Any = None, context_hidden_states: Any = None, **kwargs: Any) -> Any:
        """The real forward, whose states are replaced by those that say the text."""
        width, positions = noise_embeds.shape[1], kwargs.get("position_ids")
        if positions is None:
            end = given_cache(kwargs).get_seq_length() + context_hidden_states.shape[1] + width
            positions = torch.arange(end, device=noise_embeds.device)[None]
        super(ScriptedDrafter, self).forward(noise_embeds, context_hidden_states, **kwargs)
        positions = positions[:, -width:]
        anchors = positions[:, :1]
        said = positions + 1 if self.config.sample_from_anchor else positions
        is_wrong = said - anchors == self.rights[anchors] + 1
        token_ids = (self.text[said] + is_wrong * WRONG_OFFSET) % self.config.vocab_size
        return BaseModelOutput(last_hidden_state=self.sayings[token_ids])


class BatchScriptedDrafter(ScriptedDrafter):
    """Proposes each row's own truth and goes wrong after a number of tokens that differs from row to row and step to step.

    A row is known by its anchor's token and position, so rows may leave the batch.
    """

    def __init__(self, target: PreTrainedModel, truths: list[torch.Tensor], **overrides: Any) -> None:
        super().__init__(target, truths[0], [0], **overrides)
        self.truths = [truth.flatten().tolist() for truth in truths]
        self.embeddings = target.get_input_embeddings().weight.detach()

    def forward(self, noise_embeds: Any = None, context_hidden_states: Any = None, **kwargs: Any) -> Any:
        cache, positions = given_cache(kwargs), kwargs.get("position_ids")
        starts = [cache.get_seq_length() + context_hidden_states.shape[1]]
        if positions is not None:
            starts = positions[:, -noise_embeds.shape[1]].tolist()
        output = super(ScriptedDrafter, self).forward(noise_embeds, context_hidden_states, **kwargs)
        rows = output.last_hidden_state.clone()
        for place, start in enumerate(starts):
            anchor = int((self.embeddings - noise_embeds[place, 0]).square().sum(dim=1).argmin())
            # A text that processors bend away from every truth gets proposals that are mostly wrong.
            truth = next((t for t in self.truths if start < len(t) and t[start] == anchor), self.truths[0])
            num_right = (3 * start + truth[0]) % BLOCK_SIZE
            for i in range(1, rows.shape[1]):
                token = truth[start + i] if start + i < len(truth) else 1
                token = (token + 5) % self.config.vocab_size if i == num_right + 1 else token
                rows[place, i] = self.sayings[token].to(rows.dtype)
        output.last_hidden_state = rows
        return output


def scripted(target: PreTrainedModel, prompts: list[torch.Tensor], **overrides: Any) -> BatchScriptedDrafter:
    return BatchScriptedDrafter(
        target, [greedy(target, prompt, max_new_tokens=MOST_SCRIPTED + BLOCK_SIZE) for prompt in prompts], **overrides
    )


def small_target(kind: str) -> PreTrainedModel:
    """A target of two layers, for `SMALL` drafters."""
    windows = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "qwen3_sliding" else {}
    return make_target(kind, num_hidden_layers=2, **windows)


def given_cache(kwargs: dict[str, Any]) -> Any:
    """The cache among a forward's keywords, under the name of any transformers; `None`: there is none."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)


def expected_lengths(script: list[int], num_new_tokens: int, block_size: int = BLOCK_SIZE) -> list[int]:
    """What a script gives: acceptance lengths per verify step until `num_new_tokens` are written, the prefill's first.

    Blocks are whole: the last one counts as it was verified, before the text's limit cuts it.
    """
    lengths: list[int] = []
    written = 1
    while written < num_new_tokens:
        is_last_token = num_new_tokens - written == 1  # for which nothing is drafted
        lengths.append(1 if is_last_token else min(script[len(lengths) % len(script)], block_size - 1) + 1)
        written += lengths[-1]
    return lengths


class CollectingStreamer(TextStreamer):
    """Collects the token ids that it is given, and -1 at the end."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.token_ids += value.flatten().tolist()

    def end(self) -> None:
        self.token_ids.append(-1)


@contextmanager
def counted_forwards(model: torch.nn.Module) -> Iterator[list[int]]:
    """A list that grows by one entry per forward of `model` inside the `with`."""
    calls: list[int] = []
    handle = model.register_forward_pre_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


def num_hooks(model: torch.nn.Module) -> int:
    """Forward hooks that stand on any module of `model`."""
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def plain_loop(
    target: PreTrainedModel,
    prompt_ids: torch.Tensor,
    max_new_tokens: int,
    pick: Callable[[torch.Tensor, torch.Tensor, int], int],
) -> torch.Tensor:
    """One token per full forward, no cache: `pick(scores [1, V], text [1, S], index)` chooses. The naive twin of the loop."""
    text = prompt_ids
    with torch.no_grad():
        for index in range(max_new_tokens):
            scores = target(text, use_cache=False).logits[:, -1].float()
            text = torch.cat([text, text.new_tensor([[pick(scores, text, index)]])], dim=1)
    return text


def request_of(num_sequences: int = 1, **fields: Any) -> Any:
    """What an acceptor reads of a request."""
    do_sample = fields.pop("do_sample", False)
    input_ids = torch.tensor([[1, 2]]).repeat(num_sequences, 1)
    own: dict[str, Any] = {
        "keeping": set(),
        "uniforms_generator": torch.Generator().manual_seed(0),
        "verification": "auto",
    }
    return SimpleNamespace(config=SimpleNamespace(do_sample=do_sample), input_ids=input_ids, **{**own, **fields})


def save_target(folder: Path, **fields: Any) -> Path:
    """A target's folder with its tokenizer."""
    make_target(**fields).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
