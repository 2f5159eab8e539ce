"""A block's attention where heads share keys: the same as transformers', and no copy of the keys for each head."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tiny_models import make_drafter, make_prompt, make_target
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dflash import generate_blocks, spec_generate
from dflash.model import attention_dflash
from dflash.model.attention_dflash import (
    STEP,
    attention_of,
    expanded_attention,
    grouped_attention,
    mask_in_step,
    step_attention,
    without_cudnn,
)
from dflash.model.cache_dflash import CACHE_NAME


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


def lower_right(width: int, num_keys: int) -> torch.Tensor:
    """Whether each of the last queries sees a key, bool [1, 1, S, K]."""
    return torch.ones(width, num_keys, dtype=torch.bool).tril(num_keys - width)[None, None]


@pytest.mark.parametrize(("batch", "masks"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("heads", [(8, 2), (4, 1), (4, 4)])
def test_attention_for_cudas_kernels_gives_the_same(heads: tuple[int, int], batch: int, masks: int) -> None:
    """Promise: keys of stride 0 are the keys of each head. This form runs on CUDA alone, and here to be compared."""
    torch.manual_seed(0)
    query = torch.randn(batch, 5, heads[0], 8).transpose(1, 2)  # as a projection leaves it
    key, value = torch.randn(2, batch, heads[1], 32, 8)[:, :, :, :11].unbind()  # a part of a cache's storage
    mask = torch.where(torch.rand(masks, 1, 5, 11) < 0.6, 0.0, -10.0)
    options = {"attention_mask": mask, "scaling": 0.3, "is_causal": False}
    expected, _ = grouped_attention(torch.nn.Module(), query, key, value, **options)
    with _Largest() as copies:
        output = expanded_attention(query, key, value, mask, scale=0.3)
    torch.testing.assert_close(output.transpose(1, 2), expected)
    assert batch > 1 or copies.most <= query.numel()


def efficient_attention_of_cuda(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What CUDA's kernel computes, on the CPU."""
    assert scale is not None
    scores = query @ key.transpose(2, 3) * scale + bias
    return scores.softmax(dim=-1) @ value, scores.logsumexp(dim=-1)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
@pytest.mark.parametrize(("batch", "masks"), [(1, 1), (3, 1), (3, 3)])
@pytest.mark.parametrize("heads", [(8, 2), (4, 1), (4, 4)])
def test_keys_in_parts_give_the_same(
    heads: tuple[int, int], batch: int, masks: int, lowest: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: also where a row sees no key of some parts, and keys are a part of a cache's storage."""
    seen: list[tuple[int, ...]] = []

    def attend(query: torch.Tensor, key: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(tuple(key.shape))
        return efficient_attention_of_cuda(query, key, *args)

    monkeypatch.setattr(attention_dflash, "efficient_attention", attend)
    torch.manual_seed(0)
    query = torch.randn(batch, 5, heads[0], 8).transpose(1, 2)
    key, value = torch.randn(2, batch + 1, heads[1], 512, 8)[:, :batch, :, :384].unbind()
    visible = torch.rand(masks, 1, 5, 384) < 0.3
    visible[..., 150:] = False  # the last part
    visible[:, :, 2:4, :128] = False  # of two rows the first part
    visible[..., 140] = True
    mask = torch.where(visible, 0.0, lowest)
    options = {"attention_mask": mask, "scaling": 0.3, "is_causal": False}
    expected, _ = grouped_attention(torch.nn.Module(), query, key, value, **options)
    output = expanded_attention(query, key, value, mask, scale=0.3)
    torch.testing.assert_close(output.transpose(1, 2), expected)
    assert seen == [(batch * heads[1], 3, 128, 8)]


@pytest.mark.parametrize(
    ("batch", "num_keys", "width", "expected"),
    [
        (1, 2048, 16, 16),  # parts of 128 keys
        (1, 65536, 16, 32),
        (1, 3072, 16, 24),
        (1, 6144, 16, 24),
        (8, 2048, 16, 4),
        (1, 2048, 64, 8),
        (1, 2050, 16, 1),
        (1, 128, 16, 1),
        (128, 2048, 16, 1),
    ],
)
def test_keys_are_split_until_the_gpu_is_full(batch: int, num_keys: int, width: int, expected: int) -> None:
    """The shapes are those of Qwen3-8B."""
    query = torch.empty(batch, 32, width, 128, device="meta")
    key = torch.empty(batch, 8, num_keys, 128, device="meta")
    mask = torch.empty(1, 1, width, num_keys, device="meta")
    assert attention_dflash._num_parts(query, key, key, mask) == expected


def test_keys_are_split_only_where_the_kernel_gives_what_sdpa_gives() -> None:
    """Promise: not in another dtype, nor where there is a gradient, a compiler, or a user who wants another kernel."""
    query, key = torch.empty(1, 4, 16, 64), torch.empty(1, 2, 512, 64)
    mask = torch.empty(1, 1, 16, 512)

    def number(*changed: torch.Tensor) -> int:
        query_, key_, value_, mask_ = changed
        return attention_dflash._num_parts(query_, key_, value_, mask_)

    assert number(query, key, key, mask) == 4
    assert number(query, key, key[..., :32], mask) == 4
    assert number(query, key, key.bfloat16(), mask) == 1
    assert number(query, key, key, mask > 0) == 1
    assert number(query.double(), key.double(), key.double(), mask.double()) == 1
    assert number(query, key, key[..., :33], mask) == 1
    query.requires_grad_()
    assert number(query, key, key, mask) == 1
    with torch.no_grad():
        assert number(query, key, key, mask) == 4
        with sdpa_kernel([SDPBackend.MATH]):
            assert number(query, key, key, mask) == 1
        with mock.patch.object(torch.compiler, "is_compiling", return_value=True):
            assert number(query, key, key, mask) == 1


@pytest.mark.parametrize("num_keys", [11, 384])
def test_values_of_another_size_than_keys_are_attended_to_on_cuda(
    num_keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Known bug: multi-head latent attention failed wherever there was a mask."""
    monkeypatch.setattr(attention_dflash, "efficient_attention", efficient_attention_of_cuda)
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 5, 24), torch.randn(2, 4, num_keys, 24), torch.randn(2, 4, num_keys, 16)
    mask = torch.where(torch.rand(2, 1, 5, num_keys) < 0.6, 0.0, -10.0)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=0.3)
    torch.testing.assert_close(expanded_attention(query, key, value, mask, scale=0.3), expected)


def test_a_later_chunk_is_causal() -> None:
    """Known bug: another thread's step renamed the attention of a chunk without a mask, whose first row then saw one key."""
    torch.manual_seed(0)
    query, (key, value) = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 2, 11, 8).unbind()
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    mask = lower_right(3, 11).expand(2, -1, -1, -1)
    expected, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, scaling=0.3)
    output, _ = ALL_ATTENTION_FUNCTIONS[STEP](module, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(output, expected)


def test_arguments_of_a_family_reach_transformers_function() -> None:
    """Promise: an argument that changes scores is not swallowed; a later chunk without a mask stays causal beside it."""
    seen: list[Any] = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        seen.append((mask, kwargs))
        return query, None

    query, key = torch.randn(1, 4, 3, 8), torch.randn(1, 4, 11, 8)
    bias = torch.randn(1, 4, 3, 11)
    module: Any = SimpleNamespace(num_key_value_groups=1, is_causal=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, "sdpa", attend)
        grouped_attention(module, query, key, key, None, scaling=0.3, position_bias=bias)
    mask, options = seen[0]
    assert torch.equal(mask == 0, lower_right(3, 11))
    assert (options["position_bias"] is bias, options["scaling"], options["is_causal"]) == (True, 0.3, False)


def test_cudnn_is_kept_out_of_attention_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known trap: cuDNN plans for 30 ms whenever the number of keys is new, in every step of every text."""
    seen: list[bool] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*args, **kwargs)

    monkeypatch.setattr(attention_dflash.functional, "scaled_dot_product_attention", watched)
    with without_cudnn():
        grouped_attention(torch.nn.Module(), *torch.randn(3, 1, 2, 4, 8), None, is_causal=False)
    with pytest.raises(KeyError), without_cudnn():
        raise KeyError
    assert (seen, torch.backends.cuda.cudnn_sdp_enabled()) == ([False], True)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), without_cudnn():  # nothing else is left: it stays
        assert torch.backends.cuda.cudnn_sdp_enabled()


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
    assert (target.config._attn_implementation, attention_of(target)) == (STEP, "sdpa")
    for prompt, truth in zip(prompts, expected, strict=True):
        assert torch.equal(spec_generate(drafter, target, prompt, **options), truth)
    both = [prompts[1], torch.cat([prompts[0], prompts[0][:, :3]], dim=1)]
    spec_generate(drafter, target, torch.cat(both), **options)  # rows refuse an attention that takes no mask
    spec_generate(drafter, target, prompts[0], draft_tree=4, **options)  # and so do trees
    assert target.config._attn_implementation == STEP
    may_leave.set()
    thread.join()
    assert target.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("kind", ["config", "file", "copy"])
def test_a_config_that_is_saved_during_a_step_is_the_models(kind: str, tmp_path: Path) -> None:
    """Promise: nothing of a step is in what another thread writes meanwhile."""
    target = make_target()

    def written() -> Any:
        if kind == "config":
            return target.config.to_dict(), target.config.to_json_string()
        if kind == "copy":
            return copy.deepcopy(target.config).to_dict()
        target.save_pretrained(tmp_path)
        return [(tmp_path / "config.json").read_text(), sorted(path.name for path in tmp_path.iterdir())]

    before, attributes = written(), set(vars(target))
    with step_attention(target):
        assert written() == before
    assert set(vars(target)) == attributes


@pytest.mark.parametrize("is_aligning", [False, True])
def test_a_later_chunk_needs_a_mask_on_a_cpu_alone(is_aligning: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: with or without a mask it is the chunk that "sdpa" computes; one mask serves all layers."""
    target, ids = make_target(), make_prompt(9)
    masks: list[Any] = []

    def watched(*args: Any, **kwargs: Any) -> Any:
        masks.append(args[4])
        return grouped_attention(*args, **kwargs)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, STEP, watched)
    # A checkpoint's own code that ran in this process has put its copy there.
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, STEP, mask_in_step)
    monkeypatch.setattr(attention_dflash, "ALIGNING_DEVICES", ("cpu",) if is_aligning else ("cuda",))
    with torch.no_grad():
        expected = target(ids).logits
        cache = target(ids[:, :4], use_cache=True).past_key_values
        with step_attention(target):
            output = target(ids[:, 4:], **{CACHE_NAME: cache}).logits
    torch.testing.assert_close(output, expected[:, 4:])
    assert len(masks) == target.config.num_hidden_layers
    assert all(mask is (None if is_aligning else masks[0]) for mask in masks)
    assert is_aligning or masks[0].dtype == torch.float32


def test_another_threads_chunk_outlives_a_step_on_cuda() -> None:
    """Promise: if a step ends between that chunk's mask and its attention, "sdpa" gets the mask that it needs."""
    target, ids = make_target(), make_prompt(9)
    logits: list[torch.Tensor] = []

    def mask_after_which_the_step_ends(**kwargs: Any) -> Any:
        mask = mask_in_step(**kwargs)
        target.config._attn_implementation = "sdpa"
        return mask

    def run() -> None:
        with torch.no_grad():
            cache = target(ids[:, :4], use_cache=True).past_key_values
            target.config._attn_implementation = STEP
            logits.append(target(ids[:, 4:], **{CACHE_NAME: cache}).logits)

    with torch.no_grad():
        expected = target(ids).logits[:, 4:]
    with pytest.MonkeyPatch.context() as patch, step_attention(target):
        patch.setattr(attention_dflash, "ALIGNING_DEVICES", ("cpu",))
        patch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, STEP, mask_after_which_the_step_ends)
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    torch.testing.assert_close(logits[0], expected)


def test_padding_of_another_threads_batch_is_masked() -> None:
    """Promise: a plain forward of a padded batch, while a step of ours runs on the same target, is what it would be alone."""
    target, mask = make_target(), torch.ones(2, 9, dtype=torch.long)
    ids = torch.cat([make_prompt(9, seed=1), make_prompt(9, seed=2)])
    mask[1, :4] = 0
    with torch.no_grad():
        alone = target(ids, attention_mask=mask).logits
        with step_attention(target):
            beside = target(ids, attention_mask=mask).logits
    torch.testing.assert_close(beside[0], alone[0])
    torch.testing.assert_close(beside[1, 4:], alone[1, 4:])


def test_a_model_and_its_wrapper_leave_the_step_one_after_another() -> None:
    """Bug: the first of them to end its step took the attention from under the other, in another thread."""
    target = make_target()
    other = type(target)(target.config)  # as peft's, with the same config and embedding
    other.set_input_embeddings(target.get_input_embeddings())
    with step_attention(target):
        with step_attention(other):
            pass
        assert target.config._attn_implementation == STEP
    assert target.config._attn_implementation == "sdpa"
