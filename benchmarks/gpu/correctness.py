"""Texts on a device, compared with those of `target.generate`, for every kind of step: a wrong mask or a lost key shows here.

    benchmarks/gpu/run.sh --rows 'correctness/*'
    pytest -n0 -m gpu

The models are in float32: the embedded pair, whose drafts are accepted as those of a real one are, and for a long text a random
target that attends to single tokens. Each check also asserts that nothing fell back to eager steps.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from dflash import Conversation, DFlashConfig, DFlashDraftModel, generate_blocks
from dflash.checkpoints import DOMINO_NAME, heldout_problems, load_embedded_pair
from dflash.engine import fallback_reason
from dflash.engine.recorded import RECORDERS, Recording
from dflash.evaluation import GREEDY, chat_encoder


# Keywords of each kind of step.
MODES: dict[str, dict[str, Any]] = {
    "eager": {"compile": False, "cuda_graph": False},
    "recorded": {"cuda_graph": True},
    "compiled": {"compile": True},
}
NOTHING_LOOKED_UP = {"prompt_lookup_num_tokens": 0}
GREEDILY = {"temperature": 0.0}
SAMPLED = {"do_sample": True, "temperature": 1.0, "top_k": 20, "top_p": 0.95}
NEW_TOKENS = 48
KINDS = ("chain", "batch", "sampled", "drawn", "chunks", "conversation", "long")
# Lookups and trees verify a number of columns of their own. Where a mode is not named, their steps are eager in it, too.
OF_MODE = {"eager": ("lookup", "tree"), "recorded": ("lookup",)}
NAMES = [f"{mode}/{kind}" for mode in MODES for kind in (*KINDS, *OF_MODE.get(mode, ()))]
# Mean acceptance lengths below these mean a fault in drafting, which no text shows.
LEAST_TAU = {"chain": 6.5, "batch": 6.5, "drawn": 5.0, "chunks": 6.5, "lookup": 5.0, "tree": 8.0, "long": 7.0}

LONG_PROMPT = 4080  # tokens: the text passes 4,096
LONG_TARGET = {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
LONG_TARGET |= {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 8192}
SHARPNESS = 4.0  # of the long target's attention: with less of it each token sees a mean of thousands


class FollowingDrafter(DFlashDraftModel):
    """A random drafter that proposes, after each token, the one that last followed it in a text."""

    def follow(self, text_ids: torch.Tensor) -> None:
        """Makes it follow a text [S]."""
        followers = torch.zeros(self.config.vocab_size, dtype=torch.long)
        for token_id, follower in zip(text_ids[:-1].tolist(), text_ids[1:].tolist(), strict=True):
            followers[token_id] = follower
        self.register_buffer("followers", followers.to(text_ids.device), persistent=False)

    def propose(self, hidden_states: torch.Tensor, anchors: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """The drafter's own proposals, replaced by followers."""
        proposals = super().propose(hidden_states, anchors, *args, **kwargs)
        columns = [anchors]
        for _ in range(proposals.token_ids.shape[1]):
            columns.append(self.followers[columns[-1]])
        return replace(proposals, token_ids=torch.cat(columns[1:], dim=1))


class Checks:
    """The checks on one device. Each returns figures; it raises AssertionError for a wrong text and for steps that fell back."""

    def __init__(self, device: torch.device | str, is_compiler_left_out: bool = False) -> None:
        self.device = torch.device(device)
        self.is_compiler_left_out = is_compiler_left_out
        self._mode = ""
        self._expected: dict[tuple[int, ...], list[int]] = {}

    @cached_property
    def pair(self) -> tuple[Any, Any]:
        """The embedded target and drafter."""
        target, drafter, _ = load_embedded_pair()
        return target.requires_grad_(False).to(self.device), drafter.requires_grad_(False).to(self.device)

    @cached_property
    def head_pair(self) -> tuple[Any, Any]:
        """The embedded target and the drafter with Domino's head."""
        _, drafter, _ = load_embedded_pair(drafter=DOMINO_NAME)
        return self.pair[0], drafter.requires_grad_(False).to(self.device)

    @cached_property
    def prompts(self) -> list[torch.Tensor]:
        """Questions [1, S] of different lengths, which the pair was not trained on."""
        encode = chat_encoder(load_embedded_pair()[2])
        asked = [encode([{"role": "user", "content": problem.question}])[0] for problem in heldout_problems()[:3]]
        assert len(set(map(len, asked))) == len(asked)
        return [ids[None].to(self.device) for ids in asked]

    @cached_property
    def sampled_alone(self) -> list[list[int]]:
        """What the target, without drafts, samples on the CPU after the first prompts, from the seeds 0 and 1."""
        alone = Checks("cpu")
        prompts = [prompt_ids.cpu() for prompt_ids in self.prompts]
        texts, _ = alone._sample(prompts, alone.pair, {**MODES["eager"], "max_draft_tokens": 0})
        return texts

    @cached_property
    def drawn_on_cpu(self) -> list[list[int]]:
        """What eager steps on the CPU sample after the first prompts, with proposals that Domino's head draws."""
        on_cpu = Checks("cpu")
        prompts = [prompt_ids.cpu() for prompt_ids in self.prompts]
        texts, _ = on_cpu._sample(prompts, on_cpu.head_pair, MODES["eager"])
        return texts

    @cached_property
    def long_pair(self) -> tuple[Any, Any, torch.Tensor]:
        """A random target, a drafter that follows its text, and a prompt [1, S]."""
        torch.manual_seed(0)
        ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        config = Qwen3Config(**LONG_TARGET, **ends, num_hidden_layers=4, initializer_range=0.1)
        target: Any = Qwen3ForCausalLM(config).eval().requires_grad_(False)
        for layer in target.model.layers:
            layer.self_attn.q_norm.weight.fill_(SHARPNESS)
        layers = {"num_hidden_layers": 1, "num_target_layers": 4, "target_layer_ids": [0, 2]}
        config = DFlashConfig(**LONG_TARGET, **ends, **layers, block_size=16, mask_token_id=1023)
        drafter = FollowingDrafter(config).eval().requires_grad_(False).to(self.device)
        target = target.to(self.device)
        prompt_ids = torch.randint(1023, (1, LONG_PROMPT)).to(self.device)
        text_ids = [int(prompt_ids[0, -1]), *self.expected(target, prompt_ids)]
        drafter.follow(torch.tensor(text_ids, device=self.device))
        return target, drafter, prompt_ids

    def check(self, name: str) -> dict[str, Any]:
        """Runs the check of a name of `NAMES`."""
        mode, _, kind = name.partition("/")
        if mode != self._mode:
            self._renew_drafters()
            self._mode = mode
        run: Callable[[dict[str, Any]], dict[str, Any]] = getattr(self, f"_{kind}")
        # Not the graph's own method: recordings that serve further checks hold it.
        with mock.patch.object(Recording, "run", autospec=True, side_effect=Recording.run) as replay:
            figures = run(MODES[mode])
        tau = figures.get("tau", math.inf)
        assert tau >= LEAST_TAU.get(kind, 0), (
            f"Drafts are bad: tau is {tau:.2f} instead of at least {LEAST_TAU[kind]}."
        )
        target, drafter, *_ = {"long": self.long_pair, "drawn": self.head_pair}.get(kind, self.pair)
        reason = fallback_reason(drafter, target)
        if mode == "recorded" and self.device.type not in RECORDERS:
            assert reason is not None, "Nothing can be recorded on a CPU, and no reason was given."
            assert "CUDA device" in reason, f"The reason on a CPU is another one: {reason}"
        elif mode != "compiled" or not self.is_compiler_left_out:
            assert reason is None, f"Steps fell back to eager ones: {reason}"
            assert mode != "recorded" or replay.called, "No recorded step ran, and no reason was given."
        return figures

    def _renew_drafters(self) -> None:
        """Copies the drafters: why steps fell back is remembered with a drafter, for all modes."""
        target, drafter = self.pair
        self.pair = target, copy.deepcopy(drafter)
        target, drafter = self.head_pair
        self.head_pair = target, copy.deepcopy(drafter)
        target, drafter, prompt_ids = self.long_pair
        self.long_pair = target, copy.deepcopy(drafter), prompt_ids

    def _chain(self, mode: dict[str, Any]) -> dict[str, Any]:
        """One prompt after another."""
        return self._compared(self.prompts, **mode, **NOTHING_LOOKED_UP)

    def _chunks(self, mode: dict[str, Any]) -> dict[str, Any]:
        """Prompts that are read in pieces."""
        return self._compared(self.prompts, prefill_chunk_size=16, **mode, **NOTHING_LOOKED_UP)

    def _tree(self, mode: dict[str, Any]) -> dict[str, Any]:
        """A draft tree."""
        return self._compared(self.prompts[:2], draft_tree=32, **mode, **NOTHING_LOOKED_UP)

    def _lookup(self, mode: dict[str, Any]) -> dict[str, Any]:
        """A prompt that asks its question twice, with lookups."""
        target = self.pair[0]
        prompts = []
        for ids in self.prompts[:2]:
            answer = torch.tensor([self.expected(target, ids)], device=self.device)
            prompts.append(torch.cat([ids, answer, ids], dim=1))
        return self._compared(prompts, **mode)

    def _batch(self, mode: dict[str, Any]) -> dict[str, Any]:
        """Prompts of different lengths at once; their texts end at different steps."""
        target = self.pair[0]
        texts, tau = self._read([ids[0] for ids in self.prompts], **GREEDILY, **mode, **NOTHING_LOOKED_UP)
        for index, prompt_ids in enumerate(self.prompts):
            same(texts[index], self.expected(target, prompt_ids), f"sequence {index} of the batch")
        return {"texts": len(texts), "tau": tau}

    def _sampled(self, mode: dict[str, Any]) -> dict[str, Any]:
        """Sampled texts, equal to those that the target alone samples on the CPU from the same seeds."""
        texts, _ = self._sample(self.prompts, self.pair, mode)
        for seed, expected in enumerate(self.sampled_alone):
            same(texts[seed], expected, f"the text sampled from seed {seed}")
        return {"texts": len(texts)}

    def _drawn(self, mode: dict[str, Any]) -> dict[str, Any]:
        """Texts sampled with drawn proposals, equal to those of eager steps on the CPU with the same seeds."""
        texts, tau = self._sample(self.prompts, self.head_pair, mode)
        for seed, expected in enumerate(self.drawn_on_cpu):
            same(texts[seed], expected, f"the text drawn from seed {seed}")
        return {"texts": len(texts), "tau": tau}

    def _sample(self, prompts: list[torch.Tensor], pair: Any, mode: dict[str, Any]) -> tuple[list[list[int]], float]:
        """The texts after the first prompts, sampled from the seeds 0 and 1, and the mean tau."""
        options = {**mode, **SAMPLED, **NOTHING_LOOKED_UP}
        runs = []
        for seed, prompt_ids in enumerate(prompts[:2]):
            generator = torch.Generator().manual_seed(seed)
            runs.append(self._read(prompt_ids, pair, **options, generator=generator))
        return [texts[0] for texts, _ in runs], sum(tau for _, tau in runs) / len(runs)

    def _conversation(self, mode: dict[str, Any]) -> dict[str, Any]:
        """Two turns that keep their caches."""
        conversation = Conversation()
        text_ids = self.prompts[0][:, :0]
        for turn, question_ids in enumerate(self.prompts[:2]):
            text_ids = torch.cat([text_ids, question_ids], dim=1)
            options = {**GREEDILY, **mode, **NOTHING_LOOKED_UP, "conversation": conversation}
            answer = self._read(text_ids, **options)[0][0]
            same(answer, self.expected(self.pair[0], text_ids), f"turn {turn}")
            assert turn == 0 or conversation.num_reused, "A turn read again what the caches held."
            text_ids = torch.cat([text_ids, torch.tensor([answer], device=self.device)], dim=1)
        return {"texts": 2}

    def _long(self, mode: dict[str, Any]) -> dict[str, Any]:
        """A text that passes 4,096 tokens."""
        target, drafter, prompt_ids = self.long_pair
        return self._compared([prompt_ids], (target, drafter), **mode, **NOTHING_LOOKED_UP)

    def _compared(self, prompts: list[torch.Tensor], pair: Any = None, **options: Any) -> dict[str, Any]:
        """Compares the text after each prompt; the number of texts, and the mean tau."""
        target, _ = pair or self.pair
        taus = []
        for prompt_ids in prompts:
            texts, tau = self._read(prompt_ids, pair, **GREEDILY, **options)
            same(texts[0], self.expected(target, prompt_ids), f"the text after {prompt_ids.shape[1]} tokens")
            taus.append(tau)
        return {"texts": len(prompts), "tau": sum(taus) / len(taus)}

    def _read(self, prompts: Any, pair: Any = None, **options: Any) -> tuple[dict[int, list[int]], float]:
        """The tokens of each sequence, and the mean acceptance length."""
        target, drafter = pair or self.pair
        texts: dict[int, list[int]] = {}
        lengths = []
        for block in generate_blocks(drafter, target, prompts, max_new_tokens=NEW_TOKENS, **options):
            texts.setdefault(block.sequence, []).extend(block.token_ids)
            if not block.is_prefill:
                lengths.append(block.acceptance_length)
        return texts, sum(lengths) / len(lengths)

    def expected(self, target: Any, prompt_ids: torch.Tensor) -> list[int]:
        """What `target.generate` writes greedily after a prompt [1, S]."""
        key = tuple(prompt_ids[0].tolist())
        if key not in self._expected:
            mask = torch.ones_like(prompt_ids)
            text = target.generate(prompt_ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, **GREEDY)
            self._expected[key] = text[0, prompt_ids.shape[1] :].tolist()
        return self._expected[key]


def same(token_ids: list[int], expected: list[int], what: str) -> None:
    """Asserts that two texts are equal."""
    length = min(len(token_ids), len(expected))
    wrong = [place for place in range(length) if token_ids[place] != expected[place]]
    assert not wrong, f"WRONG TEXT: {what} differs from the target's at new token {wrong[0]}."
    assert len(token_ids) == len(expected), f"WRONG TEXT: {what} has {len(token_ids)} tokens, not {len(expected)}."
