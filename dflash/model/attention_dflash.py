"""Who sees whom: attention masks, the same for decoding and training, and the attention of a step.

A mask is a boolean tensor [B, S, K] of what each query sees, which `additive_mask` makes one that attention adds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel


# `config._attn_implementation` during a step, in place of "sdpa". The name must not contain "flash": transformers would take
# it for a kernel without masks.
STEP = "step"
NUM_IN_STEPS = "_num_in_steps"  # attribute of an embedding: threads whose step runs on its model
# CUDA's kernels read masks whose rows begin at multiples of this number, and copy others in every layer.
ROW_ALIGNMENT = 8
# CUDA's kernel for masks walks all keys of a head in one thread block. Keys whose number is a multiple of `PART_STEP`, as that of
# a recorded step is, are split into parts that are walked side by side.
PART_STEP = 128
MOST_PARTS = 32
MOST_THREAD_BLOCKS = 256  # which fill a GPU: more parts take longer to merge
ROWS_OF_A_BLOCK = 64
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
AMPERE = (8, 0)  # the first GPUs whose kernels have bfloat16
# Added to the scores of unseen keys, if the dtype reaches so far: of a part without seen keys this kernel returns numbers. With the
# lowest float32 it would compute with infinities.
UNSEEN = -1e30
# Devices whose kernels align causal attention without a mask to the last keys.
ALIGNING_DEVICES = ("cuda",)

_lock = threading.Lock()
_thread = threading.local()


def sees(
    query: tuple[torch.Tensor, Any],  # position and block
    key: tuple[torch.Tensor, torch.Tensor],  # likewise; a negative block: context
    anchor: torch.Tensor | int,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Whether a query sees a key, for tensors that broadcast.

    A query sees the context strictly before its anchor and its own block (if `is_causal`, only positions up to its own), in
    both only keys less than `window` positions away (DFlash paper, section 4.2; the engines' rule `q - k < W`).
    """
    query_position, query_block = query
    key_position, key_block = key
    in_context = (key_block < 0) & (key_position < anchor)
    in_block = key_block == query_block
    if is_causal:
        in_block = in_block & (key_position <= query_position)
    visible = in_context | in_block
    if window is None:
        return visible
    distance = (query_position - key_position).abs()
    return visible & (distance < window)


def draft_sees(config: Any, layer_idx: int, starts: torch.Tensor, width: int, num_keys: int) -> torch.Tensor:
    """Which keys the positions of blocks from starts [B] see in a layer, bool [B, N, K]. Key k is at position k."""
    start = starts[:, None, None]
    key = torch.arange(num_keys, device=starts.device)
    position = start + torch.arange(width, device=starts.device)[:, None]
    # -2: keys after the block, left by an earlier forward; nobody sees them.
    block_or_after = torch.where(key < start + width, 0, -2)
    key_block = torch.where(key < start, -1, block_or_after)
    visible = sees(
        (position, 0),
        (key, key_block),
        anchor=start,
        is_causal=config.is_layer_causal(layer_idx),
        window=config.layer_window(layer_idx),
    )
    return visible.expand(-1, width, -1)


def target_sees(
    positions: torch.Tensor,  # [B, S]
    num_keys: int,
    ancestors: torch.Tensor | None = None,  # bool [B, S, S]
    window: int | None = None,
) -> torch.Tensor:
    """Which keys the target's columns at `positions` see, bool [B, S, K]: those up to their own, less than `window` away.

    Key k is at position k. Only the columns of a tree are stored in order from its anchor's position, whatever their own
    positions; each sees the text and its `ancestors`, itself included.
    """
    position = positions[..., None]
    key_position = torch.arange(num_keys, device=positions.device)
    if ancestors is None:
        visible = key_position <= position
    else:
        column = key_position - positions[:, :1]  # [B, K]
        index = column.clamp(0, positions.shape[1] - 1)
        is_column = column == index
        index_of_key = index[:, None].expand(-1, positions.shape[1], -1)
        is_ancestor = ancestors.gather(2, index_of_key)  # [B, S, K]
        is_text = (column < 0)[:, None]
        visible = is_text | (is_column[:, None] & is_ancestor)
        key_position = torch.where(is_column, positions.gather(1, index), key_position)[:, None]
    if window is None:
        return visible
    return visible & (position - key_position < window)


def additive_mask(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, the dtype's minimum elsewhere: a mask that both SDPA and eager attention accept."""
    *shape, num_keys = visible.shape
    padding = -num_keys % ROW_ALIGNMENT
    rows = torch.zeros(*shape, num_keys + padding, dtype=dtype, device=visible.device)
    mask = rows[..., :num_keys]
    lowest = torch.finfo(dtype).min
    return mask.masked_fill_(~visible, lowest)


# -- the attention of a step


def grouped_attention(
    module: nn.Module,
    query: torch.Tensor,  # [B, H, S, E]
    key: torch.Tensor,  # [B, G, K, E], G divides H
    value: torch.Tensor,  # likewise
    attention_mask: torch.Tensor | None,  # [B or 1, H or 1, S, K]
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As "sdpa", [B, S, H, E], but keys and values are not copied for the heads that share them.

    Causal attention without a mask is aligned to the last keys, so that a block after its text needs no mask.
    """
    width = query.shape[2]
    num_keys = key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = is_causal and attention_mask is None and width > 1
    is_later = is_causal and width < num_keys
    # Some families pass these; transformers' own function handles or refuses them.
    is_uncommon = kwargs.get("position_bias") is not None or kwargs.get("softcap") is not None
    if is_uncommon and is_later:
        is_causal = False
        attention_mask = _lower_right(query, num_keys)
    is_on_cuda = query.is_cuda and not torch.compiler.is_compiling()
    with without_cudnn() if is_on_cuda else nullcontext():
        if is_uncommon or (attention_mask is None and not is_later):
            return ALL_ATTENTION_FUNCTIONS["sdpa"](
                module,
                query,
                key,
                value,
                attention_mask,
                dropout=dropout,
                scaling=scaling,
                is_causal=is_causal,
                **kwargs,
            )
        if attention_mask is not None and attention_mask.shape[1] == 1 and query.is_cuda:
            output = expanded_attention(query, key, value, attention_mask, dropout, scaling)
        else:
            bias: Any = causal_lower_right(width, num_keys) if is_later else attention_mask
            is_shared = query.shape[1] != key.shape[1]
            output = functional.scaled_dot_product_attention(
                query,
                key,
                value,
                bias,
                dropout,
                scale=scaling,
                enable_gqa=is_shared,
            )
    return output.transpose(1, 2).contiguous(), None


def expanded_attention(
    query: torch.Tensor,  # [B, H, S, E]
    key: torch.Tensor,  # [B, G, K, E]
    value: torch.Tensor,  # likewise
    mask: torch.Tensor,  # [B or 1, 1, S, K]
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:  # [B, H, S, E]
    """SDPA by CUDA's kernels that take a mask. They do not know shared keys, but read keys of stride 0."""
    groups = key.shape[1]
    num_shared = query.shape[1] // groups
    num_parts = 1 if dropout else _num_parts(query, key, value, mask)
    if num_parts > 1:
        return split_attention(query, key, value, mask, num_parts, scale)
    of_groups = mask.expand(len(query), groups, -1, -1)
    output = functional.scaled_dot_product_attention(
        query.unflatten(1, (groups, num_shared)).flatten(0, 1),
        _repeated(key, num_shared),
        _repeated(value, num_shared),
        of_groups.flatten(0, 1).unsqueeze(1),  # a copy only for several sequences
        dropout,
        scale=scale,
    )
    return output.reshape(*query.shape[:3], -1)  # values may have another size than keys


def split_attention(
    query: torch.Tensor,  # [B, H, S, E]
    key: torch.Tensor,  # [B, G, K, E]
    value: torch.Tensor,  # likewise
    mask: torch.Tensor,  # [B or 1, 1, S, K]
    num_parts: int,  # divides K
    scale: float | None = None,
) -> torch.Tensor:  # [B, H, S, E]
    """SDPA over equal parts of the keys, merged by their log-sum-exp. The heads that share keys are rows of one query."""
    num_sequences, _, width, _ = query.shape
    groups = key.shape[1]
    of_groups = query.unflatten(1, (groups, -1))  # [B, G, H / G, S, E]
    num_shared = of_groups.shape[2]
    rows = of_groups.reshape(num_sequences * groups, 1, num_shared * width, -1)
    of_parts = mask.unflatten(-1, (num_parts, -1))  # [B or 1, 1, S, parts, K / parts]
    of_parts = of_parts.permute(0, 3, 1, 2, 4)
    of_heads = of_parts.expand(-1, -1, num_shared, -1, -1)
    lowest = max(UNSEEN, torch.finfo(mask.dtype).min)
    bias = of_heads.clamp(min=lowest).flatten(2, 3)  # [B or 1, parts, H / G * S, K / parts]
    bias = bias.unsqueeze(1)
    bias = bias.expand(num_sequences, groups, -1, -1, -1)
    outputs, log_sums = efficient_attention(
        rows.expand(-1, num_parts, -1, -1),
        key.flatten(0, 1).unflatten(1, (num_parts, -1)),
        value.flatten(0, 1).unflatten(1, (num_parts, -1)),
        bias.flatten(0, 1),  # a copy only for several sequences
        scale,
    )
    weights = log_sums.softmax(dim=1).unsqueeze(-1)
    merged = (outputs * weights).sum(dim=1)
    return merged.to(query.dtype).view(*of_groups.shape[:4], -1).flatten(1, 2)


def efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, H, S, E] of CUDA's kernel for masks, and the logarithm of each row's sum [B, H, S], in float32."""
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    outputs, log_sums, *_ = attend(query, key, value, bias, compute_log_sumexp=True, scale=scale)
    return outputs, log_sums[..., : query.shape[2]]  # padded to a multiple of 32 rows


def _num_parts(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> int:
    """Into how many equal parts the keys are split: as many as fill a GPU. 1: they are not split."""
    if torch.compiler.is_compiling() or key.shape[2] % PART_STEP:
        return 1
    if not _has_efficient_kernel(query, key, value, mask):
        return 1
    num_sequences, groups, num_keys, _ = key.shape
    num_rows = query.shape[1] * query.shape[2] // groups  # of the heads that share keys
    num_blocks = num_sequences * groups * -(-num_rows // ROWS_OF_A_BLOCK)
    num_steps = num_keys // PART_STEP
    most = min(MOST_PARTS, MOST_THREAD_BLOCKS // num_blocks, num_steps)
    for num_parts in range(most, 1, -1):
        if num_steps % num_parts == 0:
            return num_parts
    return 1


def _has_efficient_kernel(*tensors: torch.Tensor) -> bool:
    """Whether `efficient_attention` runs on these tensors and is what SDPA might run, too."""
    dtype = tensors[0].dtype
    device = tensors[0].device
    for tensor in tensors:
        # Under autocast keys may have another dtype than values.
        if tensor.dtype != dtype or tensor.shape[-1] % ROW_ALIGNMENT:
            return False
        if tensor.requires_grad and torch.is_grad_enabled():  # the logarithms have no gradient
            return False
    if dtype not in KERNEL_DTYPES or torch.version.hip is not None:
        return False
    if dtype == torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) < AMPERE:
        return False
    return torch.backends.cuda.mem_efficient_sdp_enabled()  # the user's choice


def _repeated(states: torch.Tensor, num_shared: int) -> torch.Tensor:
    """States [B, G, K, E] as [B * G, H / G, K, E], without a copy."""
    of_groups = states.flatten(0, 1)
    return of_groups.unsqueeze(1).expand(-1, num_shared, -1, -1)


def _lower_right(query: torch.Tensor, num_keys: int) -> torch.Tensor:
    """The causal mask of the last queries, additive [1, 1, S, K]."""
    width = query.shape[2]
    every = torch.ones(1, 1, width, num_keys, dtype=torch.bool, device=query.device)
    visible = every.tril(num_keys - width)
    return additive_mask(visible, query.dtype)


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Without cuDNN's attention inside: it plans for 30 ms whenever a number of keys is new to it."""
    if not torch.backends.cuda.math_sdp_enabled():  # then nothing else might be left
        yield
        return
    with _lock:  # the process has one switch
        was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(was_enabled)


def mask_in_step(*args: Any, local_size: int | None = None, **kwargs: Any) -> torch.Tensor | None:
    """The mask of transformers, additive, so that SDPA does not convert a boolean one in every layer.

    `None` where it would be only causal, in this thread's step on a device whose kernels align causal attention.
    """
    is_causal_alone = local_size is None and kwargs.get("attention_mask") is None
    may_be_skipped = kwargs.get("allow_is_causal_skip", True)
    positions = kwargs.get("cache_position")  # in transformers 4, which passes no device
    device = kwargs.get("device", "cpu") if positions is None else positions.device
    # Not for a forward of another thread, which may attend by "sdpa" when this thread's step has ended.
    is_in_step = getattr(_thread, "is_in_step", False)
    is_aligned = is_in_step and torch.device(device).type in ALIGNING_DEVICES
    if is_causal_alone and may_be_skipped and is_aligned:
        return None
    visible = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"](*args, local_size=local_size, **kwargs)
    if visible is None:
        return None
    return additive_mask(visible, kwargs["dtype"])


def attention_of(model: PreTrainedModel) -> str:
    """The attention that a model was loaded with, also during a step of another thread."""
    implementation = model.config._attn_implementation
    return "sdpa" if implementation == STEP else str(implementation)


@contextmanager
def step_attention(model: PreTrainedModel) -> Iterator[None]:
    """Forwards inside attend by `grouped_attention` where the model was loaded with "sdpa".

    Several threads may be inside at once; the last one restores the model. Forwards of other threads stay right meanwhile.
    """
    config = model.config.get_text_config(decoder=True)
    if not model._supports_attention_backend or config._attn_implementation not in ("sdpa", STEP):
        yield
        return
    # Of the embedding, which a wrapper such as peft's shares with its model, and not of the config, which may be saved meanwhile.
    attributes = vars(model.get_input_embeddings())
    with _lock:
        attributes[NUM_IN_STEPS] = attributes.get(NUM_IN_STEPS, 0) + 1
        config._attn_implementation = STEP
    _thread.is_in_step = True
    try:
        yield
    finally:
        _thread.is_in_step = False
        with _lock:
            attributes[NUM_IN_STEPS] -= 1
            if not attributes[NUM_IN_STEPS]:
                del attributes[NUM_IN_STEPS]
                config._attn_implementation = "sdpa"


ALL_ATTENTION_FUNCTIONS.register(STEP, grouped_attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(STEP, mask_in_step)
