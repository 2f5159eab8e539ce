"""Drafters of other kinds in the loop: an anchor row that proposes too, and proposals that are drawn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, SMALL, ScriptedDrafter, greedy, make_drafter, make_prompt, make_target
from transformers import PreTrainedModel

from dflash import generate_blocks, spec_generate


@pytest.mark.parametrize("script", [[BLOCK_SIZE], [0], [3, 6, 1]], ids=str)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_an_anchor_row_that_proposes(tiny_target: PreTrainedModel, script: list[int], num_rows: int) -> None:
    """Promise: N rows give N proposals, N + 1 columns are verified, and the text is the target's."""
    prompts = [make_prompt(9 - i, seed=30 + i) for i in range(num_rows)]
    truths = [greedy(tiny_target, prompt, max_new_tokens=26) for prompt in prompts]
    drafter = ScriptedDrafter(tiny_target, truths, script, sample_from_anchor=True)
    blocks = list(generate_blocks(drafter, tiny_target, [p[0] for p in prompts], max_new_tokens=26, temperature=0.0))
    for row, (prompt, truth) in enumerate(zip(prompts, truths, strict=True)):
        mine = [block for block in blocks if block.sequence == row]
        assert [t for block in mine for t in block.token_ids] == truth[0, prompt.shape[1] :].tolist()
        assert mine[1].num_proposals == BLOCK_SIZE
    accepted = [block.num_accepted for block in blocks if block.sequence == 0 and not block.is_prefill]
    assert accepted[: len(script)] == script[: len(accepted)]


SELECTOR = {"selector_rank": 8, "selector_top_k": 4}
LAW = {
    "vocab_size": 4,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.4,
}


DOMINO = {"gru_hidden_dim": 8, "emb_dim": 6}
DSPARK = {"markov_rank": 8, "markov_head_type": "gated", "enable_confidence_head": True}


@pytest.mark.parametrize(
    "head", [{"selector_rank": 8, "selector_top_k": 3}, DOMINO, DSPARK], ids=["selector", "Domino", "DSpark"]
)
@pytest.mark.parametrize("verification", ["auto", "match", "rejection"])
def test_drawn_proposals_keep_the_targets_distribution(verification: str, head: dict[str, int]) -> None:
    """Promise: text sampled with a causal head's draws has the distribution of ancestral sampling, under every rule."""
    target = make_target("qwen3", seed=8, num_hidden_layers=2, **LAW)
    shape = {"mask_token_id": 3, "block_size": 3, "conv_kernel_size": 2, "conv_group_size": 4}
    drafter = make_drafter(seed=5, **{**LAW, **SMALL}, **shape, **head)
    prompt = torch.tensor([[1, 2]])
    num_rows = 6000
    texts = spec_generate(
        drafter,
        target,
        prompt.repeat(num_rows, 1),
        max_new_tokens=3,
        temperature=1.4,
        top_k=0,
        generator=torch.Generator().manual_seed(1),
        verification=verification,
    )[:, 2:]
    every = torch.cartesian_prod(*[torch.arange(4)] * 3)
    with torch.no_grad():
        logits = target(torch.cat([prompt.expand(len(every), -1), every], dim=1)).logits[:, 1:-1].double() / 1.4
    distribution = logits.softmax(dim=-1).gather(-1, every[..., None]).squeeze(-1).prod(dim=1)
    counts = torch.bincount((texts * torch.tensor([16, 4, 1])).sum(dim=1), minlength=64).double()
    expected = distribution * num_rows
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]]).clamp_min(1e-9)
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2) > 1e-3


def test_auto_draws_only_where_it_helps(tiny_target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: a selector draws when sampling under auto, rejection and block; never greedily nor under match."""
    drafter = make_drafter(**SELECTOR)
    drawn: list[bool] = []
    propose = drafter.propose

    def noted(hidden_states: Any, anchors: Any, head: Any, drawn_with: Any = None, **kwargs: Any) -> Any:
        drawn.append(drawn_with is not None)
        return propose(hidden_states, anchors, head, drawn_with, **kwargs)

    monkeypatch.setattr(drafter, "propose", noted)
    for verification, temperature, draws in (
        ("auto", 1.0, True),
        ("rejection", 1.0, True),
        ("block", 1.0, True),
        ("match", 1.0, False),
        ("auto", 0.0, False),
    ):
        drawn.clear()
        spec_generate(
            drafter, tiny_target, make_prompt(), max_new_tokens=5, temperature=temperature, verification=verification
        )
        assert drawn
        assert set(drawn) == {draws}
