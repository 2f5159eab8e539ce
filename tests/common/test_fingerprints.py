"""Models are known by their weights, in whatever form these are kept."""

import torch
from torch.testing._internal.two_tensor import TwoTensor

from dflash.common.fingerprints import model_fingerprint


def test_quantised_weights_are_known_by_the_tensors_they_consist_of() -> None:
    """Such a tensor is one of several others, and need not know how to be flattened."""

    def fingerprint(scale: float) -> str:
        layer = torch.nn.Linear(2, 2, bias=False)
        values = torch.arange(4.0).view(2, 2)
        layer.weight = torch.nn.Parameter(TwoTensor(values, scale * torch.ones(2, 2)))
        return model_fingerprint(layer)

    assert fingerprint(1.0) == fingerprint(1.0)
    assert fingerprint(1.0) != fingerprint(2.0)


def test_what_is_no_tensor_is_passed_over() -> None:
    layer = torch.nn.Linear(2, 2)
    before = model_fingerprint(layer)
    layer.get_extra_state = lambda: {"scheme": "int4"}
    assert model_fingerprint(layer) == before
