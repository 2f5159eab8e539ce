"""Sampling on a device without float64: at the same seed it writes the text of the CPU.

Every test runs in a copy of the process, because a device stays known to torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from narrow_device import NarrowDevice
from processes import forked
from tiny_models import PAD_TOKEN_ID, left_padded, make_drafter, make_prompt, make_target

from dflash import DFlashOutput, spec_generate
from dflash.model.sampling_dflash import has_float64


VOCAB = 8  # so few words that a random drafter is right now and then
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "mask_token_id": VOCAB - 1,
    "num_target_layers": 2,
    "target_layer_ids": [0],
}
CONV = {"conv_kernel_size": 2, "conv_group_size": 4}
HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "selector": {"selector_rank": 8, "selector_top_k": 4, **CONV},
    "Domino": {"gru_hidden_dim": 8, "emb_dim": 6},
}
NEW_TOKENS = 8


def run_check(check: Callable[[], None]) -> None:
    """Runs `check` in a process of its own; an error there is one here."""
    ended = forked(check)
    assert ended.returncode == 0, ended.stderr[-3000:]


class Both:
    """A pair whose texts on the CPU and on the device are compared."""

    def __init__(self, head: str) -> None:
        self.target = make_target("qwen3", num_hidden_layers=2, vocab_size=VOCAB)
        self.drafter = make_drafter(7, num_hidden_layers=1, **SHAPE, **HEADS[head])
        prompts = [make_prompt(length, seed=length, vocab_size=VOCAB) for length in (7, 4, 9)]
        self.batch, self.mask = left_padded(prompts)
        self.prompt = prompts[0]

    def write(self, num_sequences: int, seeds: list[int] | None, **asked: Any) -> DFlashOutput:
        """The text at those seeds: torch's own without any, one for all sequences, or one for each."""
        prompts = {"input_ids": self.batch, "attention_mask": self.mask} if num_sequences > 1 else self.prompt
        generators = [torch.Generator().manual_seed(seed) for seed in seeds or ()]
        torch.manual_seed(11)
        return spec_generate(
            self.drafter,
            self.target,
            prompts,
            generator=generators if len(generators) > 1 else (generators or [None])[0],
            max_new_tokens=NEW_TOKENS,
            stop_token_ids=[],
            pad_token_id=PAD_TOKEN_ID,
            return_dict_in_generate=True,
            **asked,
        )

    def compare(self, requests: list[dict[str, Any]]) -> None:
        """Text, acceptance and scores of the requests are equal on both devices."""
        on_cpu = [self.write(**request) for request in requests]
        with NarrowDevice() as device:
            for model in (self.target, self.drafter):
                device.move(model)
            for request, expected in zip(requests, on_cpu, strict=True):
                output = self.write(**request)
                assert str(output.sequences.device) == device.device, "the text was written elsewhere"
                assert output.sequences.tolist() == expected.sequences.tolist(), request
                assert output.acceptance_lengths == expected.acceptance_lengths, request
                for mine, theirs in zip(output.scores or (), expected.scores or (), strict=True):
                    torch.testing.assert_close(mine.cpu(), theirs, rtol=0, atol=1e-4)
        lengths = [length for output in on_cpu for sequence in output.acceptance_lengths for length in sequence]
        assert max(lengths) > 1, "nothing is accepted"


@pytest.mark.parametrize("verification", ["match", "rejection", "block"])
@pytest.mark.parametrize("head", HEADS)
def test_sampled_text_is_that_of_the_cpu(head: str, verification: str) -> None:
    """Every head, every rule, alone and in a batch, with torch's seed, a generator, and one for each sequence.

    On Apple's GPUs every sampled text raised `TypeError`.
    """
    asked: dict[str, Any] = {"temperature": 1.3, "verification": verification}
    requests = [
        {"num_sequences": 1, "seeds": None, "top_k": 5, "top_p": 0.9, **asked},
        {"num_sequences": 1, "seeds": [3], "repetition_penalty": 1.2, "output_scores": True, **asked},
        {"num_sequences": 3, "seeds": [4, 5, 6], "top_p": 0.9, **asked},
    ]
    run_check(lambda: Both(head).compare(requests))


@pytest.mark.parametrize("head", HEADS)
def test_other_ways_of_drafting_write_the_text_of_the_cpu(head: str) -> None:
    """Greedy text, draft trees, and a sampled text that looks its proposals up in itself."""
    requests: list[dict[str, Any]] = [
        {"num_sequences": 3, "seeds": None, "temperature": 0.0},
        {"num_sequences": 1, "seeds": [3], "temperature": 1.3, "draft_tree": 6},
        {"num_sequences": 1, "seeds": [3], "temperature": 0.6, "max_matching_ngram_size": 1},
    ]
    run_check(lambda: Both(head).compare(requests))


def test_adaptive_text_is_that_of_the_cpu() -> None:
    """The clock decides how much is drafted, so only the texts are compared."""

    def check() -> None:
        both = Both("selector")
        requests: list[dict[str, Any]] = [
            {"num_sequences": 1, "seeds": [3], "temperature": temperature, "adaptive": True}
            for temperature in (0.0, 1.3)
        ]
        on_cpu = [both.write(**request).sequences.tolist() for request in requests]
        with NarrowDevice() as device:
            for model in (both.target, both.drafter):
                device.move(model)
            assert [both.write(**request).sequences.tolist() for request in requests] == on_cpu

    run_check(check)


def test_the_device_refuses_what_such_devices_refuse() -> None:
    """The test of the test: no float64 gets onto the device, and no operation mixes it with the CPU."""

    def check() -> None:
        with NarrowDevice() as device:
            assert not has_float64(torch.device(device.device))
            assert has_float64(torch.device("cpu"))
            numbers = torch.ones(3, device=device.device)
            for work in (
                lambda: torch.ones(3, dtype=torch.float64, device=device.device),
                lambda: numbers.double(),
                lambda: torch.ones(3, dtype=torch.float64).to(device.device),
            ):
                with pytest.raises(TypeError, match="no float64"):
                    work()
            with pytest.raises(RuntimeError, match="same device"):
                numbers + torch.ones(3)
            assert (numbers.cpu().double() + 1).tolist() == [2.0, 2.0, 2.0]

    run_check(check)
