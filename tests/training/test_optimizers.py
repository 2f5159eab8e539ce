"""Muon in fp32, for CPUs that emulate bf16."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dflash.training import build_optimizers
from dflash.training.optimizers import Muon, orthogonalized


CPUS = {"avx2": {"architecture": "x86_64"}, "avx512_bf16": {"architecture": "x86_64", "avx512_bf16": True}}
OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


def weights() -> list[nn.Parameter]:
    """A wide, a tall and a square matrix, and one that gets no gradient; equal in every call."""
    noise = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=noise)) for shape in ((6, 20), (20, 6), (8, 8), (3, 3))]


def give_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    for parameter in parameters[:-1]:
        parameter.grad = torch.randn(parameter.shape, generator=noise)


def test_muon_of_a_cpu_without_bf16_is_torchs_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of one goes on in the other."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's, without its rounding
    ours, theirs = weights(), weights()
    first, second = Muon(ours, **OPTIONS), torch.optim.Muon(theirs, **OPTIONS)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        first.step()
        second.step()
        if step == 1:
            before = first.state_dict()
            first.load_state_dict(second.state_dict())
            second.load_state_dict(before)
    for one, other, start in zip(ours[:-1], theirs, weights(), strict=False):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        assert (one - start).abs().max() > 0.01
    assert torch.equal(ours[-1], weights()[-1])


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (8, 8)])
def test_orthogonalising_leaves_directions_and_evens_lengths(shape: tuple[int, int]) -> None:
    """The singular values are near 1, the singular vectors those of the matrix."""
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    made = orthogonalized(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    left, lengths, right = torch.linalg.svd(matrix, full_matrices=False)
    is_large = lengths > 0.1 * lengths.max()  # five iterations do not lift a tiny one to 1
    new_lengths = left.T @ made @ right.T
    assert ((new_lengths.diagonal()[is_large] - 0.95).abs() < 0.35).all()
    assert (new_lengths - torch.diag(new_lengths.diagonal())).abs().max() < 1e-3


@pytest.mark.parametrize(("cpu", "kind"), [("avx2", Muon), ("avx512_bf16", torch.optim.Muon)])
def test_bf16_is_not_emulated_by_muon(cpu: str, kind: type[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without bf16 products torch's Muon took four fifths of a training step."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: CPUS[cpu], raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    muon, _ = build_optimizers(nn.Sequential(nn.Linear(4, 4)), 1e-3, 0.0, 2e-3)
    assert type(muon) is kind
