"""A block's attention where heads share keys: the same as transformers', and no copy of the keys for each head."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import make_drafter, make_prompt, make_target
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash import generate_blocks, spec_generate
from dflash.model.attention_dflash import (
    CHUNK,
    GROUPED,
    attention_of,
    grouped_attention,
    step_attention,
    step_mask,
    target_sees,
)


@pytest.mark.parametrize("heads", [(8, 2), (4, 1), (4, 4)])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("mask", ["bool", "additive", "none"])
def test_it_gives_what_transformers_gives(heads: tuple[int, int], batch: int, width: int, mask: str) -> None:
    torch.manual_seed(0)
    query = torch.randn(batch, heads[0], width, 8)
    key, value = torch.randn(2, batch, heads[1], 11, 8).unbind()
    visible = torch.rand(batch, 1, width, 11) < 0.6
    visible[..., 0] = True
    masks = {"bool": visible, "additive": torch.where(visible, 0.0, -torch.inf), "none": None}
    module: Any = SimpleNamespace(num_key_value_groups=heads[0] // heads[1], is_causal=False)
    options: dict[str, Any] = {"scaling": 0.3, "is_causal": False}
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, masks[mask], **options)
    output, _ = grouped_attention(module, query, key, value, masks[mask], **options)
    assert output.shape == (batch, width, heads[0], 8)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("name", [CHUNK, GROUPED])
def test_a_later_chunk_is_causal_by_either_name(name: str) -> None:
    """Known bug: another thread's step renamed the attention of a chunk without a mask, whose first row then saw one key."""
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 2, 11, 8).unbind()
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    mask = torch.ones(3, 11, dtype=torch.bool).tril(8)[None, None].expand(2, -1, -1, -1)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=0.3)
    output, _ = ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(output, expected)


class _Largest(TorchDispatchMode):
    """The most numbers in a copy that an operation made of something smaller: `repeat_kv`."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.clone.default, torch.ops.aten._unsafe_view.default):
            self.most = max(self.most, output.numel())
        return output


@pytest.mark.parametrize("options", [{}, {"draft_tree": 4}])
def test_no_step_copies_the_keys_for_each_head(options: dict[str, Any]) -> None:
    """Promise: nothing is allocated in a step that grows with the context as keys times heads do."""
    target, drafter = make_target(), make_drafter(attn_implementation="sdpa")
    prompt = make_prompt(300)
    with _Largest() as copies:
        steps = generate_blocks(drafter, target, prompt, max_new_tokens=12, temperature=0.0, **options)
        next(steps), next(steps)  # the prompt's forward, and the drafter's first, which reads all of the prompt
        copies.most = 0
        list(steps)
    assert 0 < copies.most < prompt.shape[1] * target.config.hidden_size


def test_a_model_is_left_as_it_was() -> None:
    target, drafter = make_target(), make_drafter()
    drafter.spec_generate(target=target, input_ids=make_prompt(), max_new_tokens=8, temperature=0.0)
    assert target.config._attn_implementation == "sdpa"
    with pytest.raises(KeyError), step_attention(target):
        raise KeyError
    assert target.config._attn_implementation == "sdpa"
    eager = make_target(attn_implementation="eager")
    with step_attention(eager):
        assert eager.config._attn_implementation == "eager"


def test_threads_that_are_inside_at_once() -> None:
    """Whoever leaves last puts the name back, and meanwhile nobody else takes the target for another one."""
    target, drafter = make_target(), make_drafter()
    prompts = [make_prompt(9), make_prompt(12)]
    options: dict[str, Any] = {"max_new_tokens": 8, "temperature": 0.0}
    expected = [spec_generate(drafter, target, prompt, **options) for prompt in prompts]
    is_inside, may_leave = threading.Event(), threading.Event()

    def stay() -> None:
        with step_attention(target):
            is_inside.set()
            may_leave.wait(60)

    thread = threading.Thread(target=stay)
    thread.start()
    assert is_inside.wait(60)
    assert (target.config._attn_implementation, attention_of(target)) == (GROUPED, "sdpa")
    for prompt, truth in zip(prompts, expected, strict=True):
        assert torch.equal(spec_generate(drafter, target, prompt, **options), truth)
    both = [prompts[1], torch.cat([prompts[0], prompts[0][:, :3]], dim=1)]
    spec_generate(drafter, target, torch.cat(both), **options)  # rows refuse an attention that takes no mask
    spec_generate(drafter, target, prompts[0], draft_tree=4, **options)  # and so do trees
    assert target.config._attn_implementation == GROUPED
    may_leave.set()
    thread.join()
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", [GROUPED, CHUNK])
def test_a_forward_attends_by_the_mask_that_it_has(name: str) -> None:
    """Promise: a thread that runs compiled gives a block mask, an eager one a dense mask, whatever name stands meanwhile."""
    starts, width, num_keys = torch.tensor([130, 7]), 4, 256
    generator = torch.Generator().manual_seed(2)
    query, key, value = (
        torch.randn(2, heads, n, 16, generator=generator) for heads, n in ((4, width), (2, 256), (2, 256))
    )
    sees = target_sees(starts[:, None] + torch.arange(width), None, None)
    outputs = []
    for dtype in (None, torch.float32):
        mask = step_mask(sees, starts, width, num_keys, None, dtype)
        module = torch.nn.Module()
        module.num_key_value_groups = 2
        outputs.append(ALL_ATTENTION_FUNCTIONS[name](module, query, key, value, mask, scaling=0.25)[0])
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("name", [GROUPED, CHUNK])
def test_padding_of_another_threads_batch_is_masked_under_either_name(name: str) -> None:
    """Promise: a plain forward of a padded batch, while a step of ours runs on the same target, is what it would be alone."""
    target, mask = make_target(), torch.ones(2, 9, dtype=torch.long)
    ids = torch.cat([make_prompt(9, seed=1), make_prompt(9, seed=2)])
    mask[1, :4] = 0
    with torch.no_grad():
        alone = target(ids, attention_mask=mask).logits
        with step_attention(target, name):
            beside = target(ids, attention_mask=mask).logits
    torch.testing.assert_close(beside[0], alone[0])
    torch.testing.assert_close(beside[1, 4:], alone[1, 4:])
