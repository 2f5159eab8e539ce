"""Scripted pairs: what their scripts say holds wherever they are drawn."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
import torch
from simulated_pairs import (
    EAGERLY,
    SHAPES,
    Script,
    measure_point,
    measure_prefill,
    milliseconds,
    scripted_continuation,
    scripted_pair,
    scripted_prompt,
    useless,
)
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from dflash.evaluation import GREEDY, HAS_NATIVE, NATIVE, OURS, PLAIN, Measurement, timed_blocks, timed_generate


needs_native = pytest.mark.skipif(not HAS_NATIVE, reason="transformers has native DFlash from 5.15 on")


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


@pytest.fixture(scope="module")
def simulated():
    return scripted_pair("smoke", 4.0)


def test_a_simulated_target_counts(simulated):
    target, _ = simulated
    ids = scripted_prompt(target, 12)
    new = target.generate(ids, max_new_tokens=540, do_sample=False)[0, 12:]
    assert torch.equal(new, (ids[0, -1] + 1 + torch.arange(540)) % target.config.vocab_size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_script_decides_what_is_accepted(dtype):
    target, drafter = scripted_pair("smoke", 4.0, dtype)
    ids = scripted_prompt(target, 12)
    run = timed_blocks(drafter, target, ids, max_new_tokens=120, temperature=0.0)
    assert run.token_ids == target.generate(ids, max_new_tokens=120, do_sample=False)[0, 12:].tolist()
    anchor = run.token_ids[0]
    for length in run.acceptance_lengths[:-4]:  # the last ones are cut by what is still wanted
        assert length == drafter.runs[anchor] + 1
        anchor = (anchor + length) % target.config.vocab_size


def test_a_simulated_batch_is_each_row_alone(simulated):
    target, drafter = simulated
    prompts = scripted_prompt(target, 12, 3)
    together = timed_blocks(drafter, target, prompts, max_new_tokens=20, temperature=0.0).token_ids
    alone = [timed_blocks(drafter, target, row[None], max_new_tokens=20, temperature=0.0) for row in prompts]
    assert together == [token_id for run in alone for token_id in run.token_ids]


def test_a_script_has_the_mean_that_it_states():
    script = Script(6.5, 16)
    assert script.tau(16) == pytest.approx(6.5)
    assert 1 < script.tau(4) < 4
    assert script.tau(1) == 1
    lengths = script.runs(200_000).double() + 1
    assert lengths.mean() == pytest.approx(6.5, abs=0.05)
    assert lengths.max() == 16
    assert Script(1, 16).runs(1000).max() == 0
    assert Script(16, 16).runs(1000).min() == 15


@pytest.mark.parametrize(
    ("name", "tau", "said"), [("qwen9", 4, "choose from qwen3-8b"), ("smoke", 17, "tau 17 cannot")]
)
def test_what_cannot_be_simulated_is_refused(name, tau, said):
    with pytest.raises(ValueError, match=said):
        scripted_pair(name, tau)


def test_the_published_shape_has_the_published_size():
    target, drafter = scripted_pair("qwen3-8b", 6.5, torch.bfloat16, "meta")
    assert target.num_parameters() == 8_190_735_360
    assert drafter.config.target_layer_ids == [1, 9, 17, 25, 33]
    assert 1.0e9 < drafter.num_parameters() < 1.1e9
    assert SHAPES["small"].target["max_position_embeddings"] >= 8192 + 1024


# The sweep


def test_a_point_states_tau_and_never_measures_it(simulated):
    target, drafter = simulated
    plain, ours = measure_point(target, drafter, context=16, new_tokens=12, width=4, repeats=1)
    assert ours["stated_tau"] == pytest.approx(drafter.script.tau(4), abs=1e-4)
    assert plain["stated_tau"] == 1.0
    assert ours["is_simulated"]
    assert ours["is_identical"]
    assert not any("tau_micro" in row or "acceptance_histogram" in row for row in (plain, ours))
    assert ours["ms_per_token"] == pytest.approx(ours["ms_per_step"] / ours["stated_tau"], abs=1e-3)
    speedup = plain["ms_per_step"] * ours["stated_tau"] / ours["ms_per_step"]
    assert ours["speedup_at_stated_tau"] == pytest.approx(speedup, abs=1e-3)


@needs_native
def test_a_native_step_is_timed_and_its_tau_is_stated(simulated):
    """The native loop knows no script: its drafts are right by chance, so that nearly each of its steps gives one token."""
    target, drafter = simulated
    native = {"assistant_model": drafter, "speculation_type": "dflash", "max_new_tokens": 12}
    assert timed_generate(target, scripted_prompt(target, 16), **native, **GREEDY).num_forwards > 10
    rows = measure_point(target, drafter, context=16, new_tokens=12, methods=[NATIVE, EAGERLY], repeats=1)
    assert [row["method"] for row in rows] == [PLAIN, NATIVE, EAGERLY]
    assert [row["is_identical"] for row in rows] == [True] * 3
    assert [row["stated_tau"] for row in rows] == [1.0, 4.0, 4.0]


def test_a_tree_has_no_scripted_tau(simulated):
    _, ours = measure_point(*simulated, context=16, new_tokens=6, budget=8, repeats=1)
    assert ours["stated_tau"] is ours["ms_per_token"] is ours["speedup_at_stated_tau"] is None
    assert ours["tau_to_match_plain"] > 0
    assert ours["is_identical"]


def test_milliseconds_are_those_after_the_first_token():
    times = milliseconds(Measurement("t", 0, OURS, 9, 5, [], True, [5.0, 9.0, 3.0], [1.0, 1.0, 1.0]))
    assert (times["ms_per_step"], times["ms_per_step_fastest"], times["ms_per_step_slowest"]) == (
        1000.0,
        500.0,
        2000.0,
    )
    assert times["ms_to_first_token"] == 1000.0


def test_a_prefill_keeps_no_more_of_the_target_than_its_taps(simulated):
    plain, ours = measure_prefill(*simulated, context=1024)
    assert (plain["over_plain"], plain["taps_bytes"]) == (1.0, 0)
    assert 0 < ours["allocated_bytes"] - plain["allocated_bytes"] < 2.1 * ours["taps_bytes"], "no layer twice"
