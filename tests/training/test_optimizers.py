"""Muon in fp32, for CPUs that emulate bf16."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from dflash.training import build_optimizers


CPUS = {"avx2": {"architecture": "x86_64"}, "avx512_bf16": {"architecture": "x86_64", "avx512_bf16": True}}
RATE, DECAY = 0.02, 0.1


@pytest.fixture
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without bf16 products, and nothing else."""
    play(monkeypatch, "avx2")


def play(monkeypatch: pytest.MonkeyPatch, cpu: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: CPUS[cpu], raising=False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def matrices() -> nn.ParameterList:
    """A wide, a tall and a square matrix, and one that gets no gradient; equal in every call."""
    noise = torch.Generator().manual_seed(0)
    return nn.ParameterList(torch.randn(shape, generator=noise) for shape in ((6, 20), (20, 6), (8, 8), (3, 3)))


def give_gradients(model: nn.ParameterList, seed: int) -> None:
    noise = torch.Generator().manual_seed(seed)
    for matrix in list(model)[:-1]:
        matrix.grad = torch.randn(matrix.shape, generator=noise)


@pytest.mark.usefixtures("_emulated")
def test_muon_of_a_cpu_without_bf16_is_torchs_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """A state of one goes on in the other."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)  # torch's, without its rounding
    ours, theirs = matrices(), matrices()
    (first,) = build_optimizers(ours, 1e-3, DECAY, RATE)
    second = torch.optim.Muon(theirs, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    assert type(first) is not type(second)
    for step in range(4):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        first.step()
        second.step()
        if step == 1:
            before = first.state_dict()
            first.load_state_dict(second.state_dict())
            second.load_state_dict(before)
    for one, other, start in zip(list(ours)[:-1], theirs, matrices(), strict=False):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
        assert (one - start).abs().max() > 0.01
    assert torch.equal(ours[-1], matrices()[-1])


@pytest.mark.usefixtures("_emulated")
@pytest.mark.parametrize("index", [0, 1, 2])
def test_an_update_has_the_directions_of_the_gradient_and_even_lengths(index: int) -> None:
    """The singular values are near 1, the singular vectors those of the gradient."""
    model = matrices()
    give_gradients(model, 1)
    (muon,) = build_optimizers(model, 1e-3, 0.0, RATE)
    before, gradient = model[index].detach().clone(), model[index].grad
    muon.step()
    update = (before - model[index].detach()) / (RATE * 0.2 * math.sqrt(max(before.shape)))
    left, lengths, right = torch.linalg.svd(gradient, full_matrices=False)
    new_lengths = left.T @ update @ right.T
    is_large = lengths > 0.1 * lengths.max()  # five iterations do not lift a tiny one to 1
    assert ((new_lengths.diagonal()[is_large] - 0.95).abs() < 0.35).all()
    assert (new_lengths - torch.diag(new_lengths.diagonal())).abs().max() < 1e-3


@pytest.mark.parametrize(("cpu", "is_torchs"), [("avx2", False), ("avx512_bf16", True)])
def test_bf16_is_not_emulated_by_muon(cpu: str, is_torchs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU without bf16 products most of a training step was torch's Muon."""
    play(monkeypatch, cpu)
    (muon,) = build_optimizers(matrices(), 1e-3, 0.0, RATE)
    assert (type(muon) is torch.optim.Muon, isinstance(muon, torch.optim.Muon)) == (is_torchs, True)
