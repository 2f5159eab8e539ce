"""Short hashes by which models and data are known again, wherever they were loaded from."""

import hashlib
import json
from typing import Any

import torch
from torch import nn


# Values of each tensor in a model's fingerprint: enough to tell two trainings apart, and cheap.
SAMPLED_VALUES = 64

# Fields of a config that depend on the machine or the installation.
NOT_THE_MODEL = {"_name_or_path", "transformers_version", "dtype", "torch_dtype"}


def model_fingerprint(model: nn.Module) -> str:
    """A short hash of a model's tensors by name, shape and some of their values, the same in every dtype."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        values = tensor.detach().flatten()
        chosen = values[:: max(1, len(values) // SAMPLED_VALUES)][:SAMPLED_VALUES]
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        if chosen.device.type != "meta":  # offloaded weights
            digest.update(chosen.to("cpu", torch.bfloat16).float().numpy().tobytes())
    return digest.hexdigest()[:16]


def config_fingerprint(config: Any, generation_config: Any) -> str:
    """A short hash of both configs, wherever the model was loaded from."""
    both = [one.to_dict() for one in (config, generation_config) if one is not None]
    return fingerprint([{name: said for name, said in one.items() if name not in NOT_THE_MODEL} for one in both])


def fingerprint(value: Any) -> str:
    """A short hash of a value by its JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
