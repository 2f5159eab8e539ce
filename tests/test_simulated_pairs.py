"""Scripted pairs: what their scripts say holds wherever they are drawn."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from dflash.evaluation import Script, scripted_continuation, scripted_pair, scripted_prompt, timed_blocks, useless


class RefusesForeignGenerators(TorchFunctionMode):
    """What `with torch.device("cuda")` does: tensors are made there, and a CPU's generator is refused."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if func in _device_constructors() and kwargs.get("device") is None and generator is not None:
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{generator.device.type}'")
        return func(*args, **kwargs)


def test_a_pair_is_drawn_where_generators_of_other_devices_are_refused(monkeypatch):
    """The script was drawn by the CPU's generator in the context of the GPU: no row could begin."""
    scripted = sys.modules[Script.__module__]
    new_weights = scripted._new_weights

    @contextmanager
    def on_a_gpu(dtype, device):
        with new_weights(dtype, device), RefusesForeignGenerators():
            yield

    with pytest.raises(RuntimeError, match="but found 'cpu'"), RefusesForeignGenerators():
        torch.rand(3, generator=torch.Generator())
    monkeypatch.setattr(scripted, "_new_weights", on_a_gpu)
    _, drafter = scripted_pair("smoke", 6.5, torch.bfloat16)
    assert torch.equal(drafter.runs, Script(6.5, 16).runs(512))


def test_a_script_drawn_in_bf16_has_the_mean_that_it_states():
    """Drawn in the default dtype, bf16, whose values are too few, the mean was 6.56."""
    exact = Script(6.5, 16).runs(400_000)
    torch.set_default_dtype(torch.bfloat16)
    try:
        runs = Script(6.5, 16).runs(400_000)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(runs, exact)
    assert runs.double().mean() + 1 == pytest.approx(6.5, abs=0.03)


def test_a_useless_drafter_is_never_right_and_shares_the_weights():
    target, drafter = scripted_pair("smoke", 6.5)
    before = drafter.runs.clone()
    twin = useless(drafter)
    ids = scripted_prompt(target, 12)
    run = timed_blocks(twin, target, ids, max_new_tokens=20, temperature=0.0)
    assert set(run.acceptance_lengths) == {1}
    assert run.token_ids == scripted_continuation(target, ids, 20)[0].tolist()
    assert torch.equal(drafter.runs, before)
    own = dict(drafter.named_parameters())
    assert all(parameter is own[name] for name, parameter in twin.named_parameters())
