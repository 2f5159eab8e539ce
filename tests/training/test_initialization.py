"""Where a new drafter begins: random weights, or those of some of the target's layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import disk_offload
from tiny_models import DIMENSIONS, MASK_TOKEN_ID, make_target, make_tokenizer
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from dflash.training import TrainingSettings, new_drafter, prepare


def begun(target: Any, **shape: Any) -> Any:
    torch.manual_seed(0)
    return new_drafter(target, mask_token_id=MASK_TOKEN_ID, **{"num_hidden_layers": 2, "from_target": True, **shape})


def test_a_drafter_begins_with_layers_of_the_target() -> None:
    """Promise: its layers are spread over the target's, from the first to the last; its final norm is the target's."""
    target = make_target("qwen3", seed=3)
    for module in target.modules():  # norms of a new model are all ones
        if "RMSNorm" in type(module).__name__:
            nn.init.uniform_(module.weight)
    drafter = begun(target, num_hidden_layers=3)
    layers = target.model.layers
    assert len(layers) == 4
    for own, theirs in zip(drafter.layers, (layers[0], layers[2], layers[3]), strict=True):
        for name, weight in own.named_parameters():
            torch.testing.assert_close(weight, theirs.get_parameter(name), msg=name)
    torch.testing.assert_close(drafter.norm.weight, target.model.norm.weight)
    torch.testing.assert_close(drafter.hidden_norm.weight, target.model.layers[-1].input_layernorm.weight)


def test_its_context_begins_as_the_mean_of_the_tapped_layers() -> None:
    """Promise: beside the random weights of `fc`, which are those of a random drafter of the same seed."""
    target = make_target("qwen3", seed=3)
    drafter, other = begun(target), begun(target, from_target=False)
    taps = len(drafter.config.target_layer_ids)
    states = torch.randn(3, taps, drafter.config.hidden_size)
    found = drafter.fc(states.flatten(1)) - other.fc(states.flatten(1))
    torch.testing.assert_close(found, states.mean(dim=1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("depth", "places"), [(1, [0]), (6, [0, 1, 1, 2, 2, 3])])
def test_a_drafter_of_any_depth_begins_with_the_target(depth: int, places: list[int]) -> None:
    target = make_target("qwen3", seed=3)
    for place, layer in zip(places, begun(target, num_hidden_layers=depth).layers, strict=True):
        assert torch.equal(layer.mlp.up_proj.weight, target.model.layers[place].mlp.up_proj.weight)


def test_what_has_another_shape_stays_random() -> None:
    """Promise: a narrower MLP is drawn, and the attention beside it copied."""
    target = make_target("qwen3", seed=3)
    drafter, other = begun(target, intermediate_size=8), begun(target, intermediate_size=8, from_target=False)
    assert torch.equal(drafter.layers[0].mlp.up_proj.weight, other.layers[0].mlp.up_proj.weight)
    assert torch.equal(drafter.layers[-1].self_attn.q_proj.weight, target.model.layers[-1].self_attn.q_proj.weight)


def test_scores_of_narrow_heads_may_be_as_large_as_those_of_wide_ones() -> None:
    """Promise: where the target norms no queries and keys, the largest score is that of a head of 128."""
    target = make_target("llama", seed=3)
    attention: Any = begun(target).layers[0].self_attn
    size = attention.head_dim
    largest = attention.q_norm.weight[0] * attention.k_norm.weight[0] * size**0.5
    assert largest.item() == pytest.approx(128**0.5, rel=1e-4)
    assert begun(target, head_dim=256).layers[0].self_attn.q_norm.weight.tolist() == [1.0] * 256


def test_norms_that_store_their_weight_less_one_are_read_as_they_multiply() -> None:
    """Promise: a Gemma's norms are copied by what they do; its norm before the MLP is the drafter's, and its global rope."""
    kinds: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    target = Gemma3ForCausalLM(
        Gemma3TextConfig(
            **DIMENSIONS,
            **kinds,
            num_hidden_layers=2,
            rope_theta=50000.0,
            bos_token_id=1,
            eos_token_id=1,
            pad_token_id=0,
        )
    )
    for module in target.modules():
        if "RMSNorm" in type(module).__name__:
            nn.init.uniform_(module.weight)
    drafter, last = begun(target), target.model.layers[-1]
    torch.testing.assert_close(drafter.norm.weight, 1 + target.model.norm.weight)
    own = drafter.layers[-1].post_attention_layernorm.weight
    torch.testing.assert_close(own, 1 + last.pre_feedforward_layernorm.weight)
    ropes = [getattr(config, "rope_parameters", None) for config in (target.config, drafter.config)]
    if ropes[0] is not None:  # transformers 5
        assert (
            ropes[1]["rope_theta"]
            == ropes[0]["full_attention"]["rope_theta"]
            != ropes[0]["sliding_attention"]["rope_theta"]
        )


def test_weights_that_are_offloaded_are_fetched(tmp_path: Path) -> None:
    """Promise: a target that is larger than the device gives its weights too."""
    target, other = make_target("qwen3", seed=3), make_target("qwen3", seed=3)
    disk_offload(target, tmp_path / "weights", execution_device=torch.device("cpu"))
    assert target.model.layers[0].mlp.up_proj.weight.device.type == "meta"
    for weight, expected in zip(begun(target).parameters(), begun(other).parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_packed_weights_are_not_taken_for_numbers() -> None:
    """Promise: a layer of fp8 stays random in the drafter, as its scale is stored elsewhere."""
    target = make_target("qwen3", seed=3)
    last = target.model.layers[-1].mlp
    last.up_proj.weight = nn.Parameter(last.up_proj.weight.data.to(torch.float8_e4m3fn), requires_grad=False)
    drafter, other = begun(target), begun(target, from_target=False)
    assert torch.equal(drafter.layers[-1].mlp.up_proj.weight, other.layers[-1].mlp.up_proj.weight)


def test_the_recipe_decides_where_a_drafter_begins(tmp_path: Path) -> None:
    target = make_target("qwen3", seed=3)
    target.save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    row = {"prompt_ids": [5, 6], "response_ids": list(range(7, 17))}
    (tmp_path / "data.jsonl").write_text(json.dumps(row))
    shape: dict[str, Any] = {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": MASK_TOKEN_ID, "held_out": 0}
    for recipe, begins_there in (("short", True), ("paper", False)):
        ready = prepare(tmp_path, tmp_path / "data.jsonl", TrainingSettings(recipe=recipe, **shape))
        found = ready.drafter.layers[0].mlp.up_proj.weight
        assert torch.equal(found, target.model.layers[0].mlp.up_proj.weight) == begins_there
    assert TrainingSettings().begins_at_target
    assert not TrainingSettings(recipe="paper").begins_at_target
    assert TrainingSettings(recipe="paper", from_target=True).begins_at_target
    assert not TrainingSettings(from_target=False).begins_at_target
    with pytest.raises(ValueError, match="init='some/drafter' and from_target: a drafter begins with one of them"):
        TrainingSettings(init="some/drafter", from_target=True)


def test_dominos_head_begins_without_effect_and_with_the_targets_directions() -> None:
    """Promise: the first proposals are the drafter's own; two tokens that the target's head likens are alike in the table."""
    target = make_target("qwen3", seed=3)
    drafter = begun(target, gru_hidden_dim=6, emb_dim=8)
    head = target.get_output_embeddings().weight.detach()
    nn.init.normal_(drafter.prefix_gru.weight_ih_l0)
    states, anchors = torch.randn(2, 5, drafter.config.hidden_size), torch.tensor([[3], [4]])
    proposals = drafter.propose(states, anchors, lambda hidden: hidden @ head.T, embed=target.get_input_embeddings())
    assert torch.equal(proposals.token_ids, (states @ head.T).argmax(dim=-1))
    rows = drafter.embed_proj[2].weight.detach()
    kept = torch.linalg.svd(head, full_matrices=False)
    expected = kept.U[:, :8] * kept.S[:8]
    found, theirs = (part @ part.T / part.square().sum() for part in (rows, expected))
    torch.testing.assert_close(found, theirs, rtol=1e-3, atol=1e-5)
    assert rows.std().item() == pytest.approx(0.3, rel=1e-3)
