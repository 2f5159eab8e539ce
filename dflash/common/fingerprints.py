"""Short hashes by which models and data are recognised, wherever they were loaded from."""

import hashlib
import json
from collections.abc import Iterator
from itertools import chain, starmap
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


# Values of each tensor in a model's fingerprint: enough to tell two trainings apart, and cheap.
SAMPLED_VALUES = 64

# Fields of a config that depend on the machine or the installation.
NOT_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


def model_fingerprint(model: nn.Module) -> str:
    """A short hash of a model's tensors by name, shape and some of their values, the same in every dtype."""
    digest = hashlib.sha256()
    entries = sorted(model.state_dict().items())
    for name, tensor in chain.from_iterable(starmap(_plain_tensors, entries)):
        header = f"{name} {tuple(tensor.shape)} "
        digest.update(header.encode())
        if not tensor.is_meta:  # as offloaded weights are
            values = tensor.detach().flatten()
            step = max(1, len(values) // SAMPLED_VALUES)
            sample = values[::step][:SAMPLED_VALUES]
            sample = sample.to("cpu", torch.bfloat16).float()
            digest.update(sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _plain_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor by its name, or those that a quantised one consists of; nothing of what is no tensor."""
    if is_traceable_wrapper_subclass(value):
        inner_names, _ = value.__tensor_flatten__()
        for inner_name in inner_names:
            yield from _plain_tensors(f"{name}.{inner_name}", getattr(value, inner_name))
    elif isinstance(value, torch.Tensor):
        yield name, value


def config_fingerprint(config: Any, generation_config: Any) -> str:
    """A short hash of both configs, wherever the model was loaded from."""
    contents = []
    for settings in (config, generation_config):
        if settings is not None:
            fields = settings.to_dict().items()
            contents.append({name: value for name, value in fields if name not in NOT_THE_MODEL})
    return fingerprint(contents)


def fingerprint(value: Any) -> str:
    """A short hash of a value by its JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
