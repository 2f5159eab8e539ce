"""A saved drafter stands alone: loaded where the package is not importable, by either version, and natively."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from scripts import MESSAGES, NUM_NEW, PACKAGE_ROOT, PRELUDE, run_script
from test_dialects import deepspec, speculators_reduced, zlab_dflash2
from tiny_models import (
    BLOCK_SIZE,
    PAD_TOKEN_ID,
    ScriptedDrafter,
    counted_forwards,
    greedy,
    make_drafter,
    make_prompt,
    make_target,
    make_tokenizer,
    save_target,
)
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)

import dflash
from dflash.checkpoints import convert_checkpoint


SHIPPED_CODE = {
    "acceptance_dflash.py",
    "attention_dflash.py",
    "cache_dflash.py",
    "configuration_dflash.py",
    "decoding_dflash.py",
    "drafting_dflash.py",
    "generation_dflash.py",
    "heads_dflash.py",
    "layers_dflash.py",
    "modeling_dflash.py",
    "requests_dflash.py",
    "sampling_dflash.py",
    "sequences_dflash.py",
    "targets_dflash.py",
}
HAS_NATIVE_DFLASH = hasattr(GenerationConfig(), "speculation_type")
# The published snippet, with local folders in place of Hub ids.
SNIPPET = """
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

draft = AutoModel.from_pretrained(DRAFTER, trust_remote_code=True, dtype="auto", device_map="cpu").eval()
target = AutoModelForCausalLM.from_pretrained(TARGET, dtype="auto", device_map="cpu").eval()
tokenizer = AutoTokenizer.from_pretrained(TARGET)
input_ids = tokenizer.apply_chat_template(messages, return_tensors="pt", add_generation_prompt=True,
                                          enable_thinking=False).to(draft.device)
output = draft.spec_generate(input_ids=input_ids, max_new_tokens=NUM_NEW, temperature=0.0, target=target)
"""

PROBE = """
generator = torch.Generator().manual_seed(3)
config = draft.config
block = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
features = torch.randn(1, 9, len(config.target_layer_ids) * config.hidden_size, generator=generator)
with torch.no_grad():
    hidden = draft(block, features).last_hidden_state
probe = {"hidden": hidden.flatten().tolist()[:40], "inv_freq": draft.rotary_emb.inv_freq.tolist()}
"""

REPORT = """
native = None
from transformers import GenerationConfig
if hasattr(GenerationConfig(), "speculation_type"):
    ids = input_ids if isinstance(input_ids, torch.Tensor) else input_ids["input_ids"]
    native = target.generate(ids, max_new_tokens=NUM_NEW, do_sample=False, assistant_model=draft,
                             speculation_type="dflash")[0].tolist()
sampled = draft.spec_generate(input_ids=input_ids, max_new_tokens=8, temperature=1.0, target=target,
                              generator=torch.Generator().manual_seed(5))
if RESAVED:
    draft.save_pretrained(RESAVED)
print(json.dumps({"text": output[0].tolist(), "sampled": sampled[0].tolist(), "native": native,
                  "module": type(draft).__module__, "config_module": type(draft.config).__module__,
                  "class": type(draft).__name__, "dtype": str(draft.dtype), **probe}))
"""

# Run by another interpreter, with this package and these tests on its path.
SAVE_DRAFTER = """
from tiny_models import make_drafter
make_drafter(rope_theta=500000.0, seed=21).save_pretrained(FOLDER)
print("{}")
"""
SAVE_TARGET = """
from tiny_models import make_target, make_tokenizer
make_target("qwen3").save_pretrained(FOLDER)
make_tokenizer().save_pretrained(FOLDER)
print("{}")
"""


@pytest.fixture(scope="module")
def drafter_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter saved by this version, under a name with "DFlash" in it, by which vLLM knows the method."""
    folder = tmp_path_factory.mktemp("saved") / "tiny-DFlash"
    make_drafter(rope_theta=500000.0, seed=21).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its target with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("saved") / "tiny-target"
    return save_target(folder, kind="qwen3")


@pytest.fixture(scope="module")
def expected(target_folder: Path) -> dict[str, Any]:
    """What the snippet must print, worked out in this process by plain `generate` and by the package's own class."""
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    tokenizer = make_tokenizer()
    prompt = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert prompt.endswith("assistant [] ")
    input_ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    drafter = make_drafter(rope_theta=500000.0, seed=21)
    values: dict[str, Any] = {"draft": drafter, "torch": torch}
    exec(PROBE, values)  # the very lines that the subprocess runs
    sampled = drafter.spec_generate(
        input_ids=input_ids,
        max_new_tokens=8,
        temperature=1.0,
        target=target,
        generator=torch.Generator().manual_seed(5),
    )
    return {
        "text": greedy(target, input_ids, max_new_tokens=NUM_NEW)[0].tolist(),
        "sampled": sampled[0].tolist(),
        **values["probe"],
    }


def assert_as_expected(report: dict[str, Any], expected: dict[str, Any]) -> None:
    """Same text greedy, sampled and native; same network; and the class came out of the checkpoint."""
    assert report["text"] == expected["text"]
    assert report["sampled"] == expected["sampled"]
    assert report["native"] in (None, expected["text"])
    assert report["hidden"] == pytest.approx(expected["hidden"], abs=1e-5)
    assert report["inv_freq"] == pytest.approx(expected["inv_freq"], rel=1e-6)
    assert report["class"] == "DFlashDraftModel"
    assert report["module"].startswith("transformers_modules.")
    assert report["config_module"].startswith("transformers_modules.")


def shipped(folder: Path) -> set[str]:
    """The names of the files in a checkpoint's folder."""
    return {path.name for path in folder.iterdir()}


def test_the_exact_set_of_files_is_shipped(drafter_folder: Path) -> None:
    """Known traps: `from . import x` ships without x and says nothing; a class registered with Auto ships no code at all."""
    assert shipped(drafter_folder) == SHIPPED_CODE | {"config.json", "model.safetensors"}
    for name in SHIPPED_CODE:
        assert (drafter_folder / name).read_text() == (PACKAGE_ROOT / "dflash" / "model" / name).read_text()


def test_published_snippet_in_a_process_without_the_package(
    drafter_folder: Path, target_folder: Path, expected: dict[str, Any], tmp_path: Path
) -> None:
    """Promise: the published snippet runs where `dflash` cannot be imported, in another folder, offline.

    What it saves again is the same set of files, and loads and runs again (known trap: 4.57 with model_type qwen3 saved no
    code the second time).
    """
    resaved = tmp_path / "again-DFlash"
    report = run_script(
        PRELUDE + SNIPPET + PROBE + REPORT,
        tmp_path / "elsewhere",
        DRAFTER=drafter_folder,
        TARGET=target_folder,
        RESAVED=resaved,
    )
    assert_as_expected(report, expected)
    assert report["dtype"] == "torch.float32"
    if HAS_NATIVE_DFLASH:
        assert report["native"] == expected["text"]
    assert shipped(resaved) == shipped(drafter_folder)
    first, second = (json.loads((folder / "config.json").read_text()) for folder in (drafter_folder, resaved))
    assert {key.split("--")[-1] for key in second["auto_map"].values()} == set(first["auto_map"].values())
    for fields in (first, second):
        fields.pop("auto_map")
    assert first == second
    shutil.rmtree(tmp_path / "elsewhere")
    again = run_script(PRELUDE + SNIPPET + PROBE + REPORT, tmp_path / "third", DRAFTER=resaved, TARGET=target_folder)
    assert_as_expected(again, expected)


CONVERTED = """
from transformers import AutoModel
reports = []
for folder in FOLDERS:
    draft = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()
    config = draft.config
    generator = torch.Generator().manual_seed(3)
    block = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    features = torch.randn(1, 9, len(config.target_layer_ids) * config.hidden_size, generator=generator)
    weight = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    with torch.no_grad():
        rows = draft(block, features).last_hidden_state[:, -config.num_proposals:]
    proposals = draft.propose(rows, torch.tensor([[3]]), lambda hidden: hidden @ weight.T)
    reports.append({"rows": rows.flatten().tolist(), "ids": proposals.token_ids.tolist()})
"""


def test_converted_checkpoints_stand_alone(tmp_path: Path) -> None:
    """Promise: what another tool wrote, once converted, is the same drafter where neither tool nor package is there."""
    folders = []
    for maker in (zlab_dflash2, speculators_reduced, deepspec):
        source = maker().write(tmp_path / maker.__name__)
        folders.append(str(convert_checkpoint(source, tmp_path / f"{maker.__name__}-DFlash")))
    report = run_script(
        PRELUDE + CONVERTED + "print(json.dumps({'reports': reports}))", tmp_path / "elsewhere", FOLDERS=folders
    )
    here = "class AutoModel:\n    from_pretrained = lambda folder, trust_remote_code, **k: DFlashDraftModel.from_pretrained(folder, **k)"
    values: dict[str, Any] = {"FOLDERS": folders, "torch": torch, "DFlashDraftModel": dflash.DFlashDraftModel}
    exec(CONVERTED.replace("from transformers import AutoModel", here), values)  # the very lines of the subprocess
    for got, expected in zip(report["reports"], values["reports"], strict=True):
        assert got["ids"] == expected["ids"]
        assert got["rows"] == pytest.approx(expected["rows"], abs=1e-5)


def test_package_class_loads_what_it_saved(
    drafter_folder: Path, target_folder: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: `DFlashDraftModel.from_pretrained` needs no trust and takes what the snippet's tokenizer returns."""
    drafter = dflash.DFlashDraftModel.from_pretrained(drafter_folder, dtype="auto", device_map="cpu").eval()
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype="auto", device_map="cpu").eval()
    assert type(drafter).__module__ == "dflash.model.modeling_dflash"
    input_ids = make_tokenizer().apply_chat_template(
        MESSAGES, return_tensors="pt", add_generation_prompt=True, enable_thinking=False
    )
    input_ids = input_ids.to(drafter.device)
    output = drafter.spec_generate(input_ids=input_ids, max_new_tokens=NUM_NEW, temperature=0.0, target=target)
    assert output[0].tolist() == expected["text"]


@pytest.mark.skipif(not os.environ.get("DFLASH_OTHER_PYTHON"), reason="DFLASH_OTHER_PYTHON names no other interpreter")
@pytest.mark.parametrize("saved_by", ["this", "other"])
def test_saved_by_one_version_loaded_by_the_other(
    drafter_folder: Path, target_folder: Path, expected: dict[str, Any], tmp_path: Path, saved_by: str
) -> None:
    """Known bug: 4.57 reads a config that 5.x saved silently with another rope theta. Both directions, whole snippet.

    The target and its tokenizer, which are transformers' own, are saved by the version that loads them.
    """
    other, path = os.environ["DFLASH_OTHER_PYTHON"], (PACKAGE_ROOT, Path(__file__).parents[1])
    if saved_by == "this":
        loader, drafter_path, target_path = other, drafter_folder, tmp_path / "target"
        run_script(SAVE_TARGET, tmp_path / "save", other, path, FOLDER=target_path)
    else:
        loader, drafter_path, target_path = sys.executable, tmp_path / "tiny-DFlash", target_folder
        run_script(SAVE_DRAFTER, tmp_path / "save", other, path, FOLDER=drafter_path)
    report = run_script(
        PRELUDE + SNIPPET + PROBE + REPORT, tmp_path / "elsewhere", loader, DRAFTER=drafter_path, TARGET=target_path
    )
    assert_as_expected(report, expected)


def test_importing_the_package_leaves_qwen3_alone(target_folder: Path) -> None:
    """Known trap: a configuration whose model_type is "qwen3" must not be registered with the Auto classes."""
    assert type(AutoConfig.from_pretrained(target_folder)) is Qwen3Config
    assert type(AutoModelForCausalLM.from_pretrained(target_folder)) is Qwen3ForCausalLM
    assert type(AutoModel.from_pretrained(target_folder)) is Qwen3Model
    assert AutoConfig.for_model("qwen3").__class__ is Qwen3Config


@pytest.fixture
def remote_code_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remote code is copied to and imported from a folder of this test's own, and forgotten after it."""

    def imported() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.split(".")[0] == "transformers_modules"}

    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    before = imported()
    for name in before:
        del sys.modules[name]
    yield
    for name in imported():
        del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.usefixtures("remote_code_apart")
def test_auto_model_in_a_process_with_the_package(drafter_folder: Path, tiny_target: PreTrainedModel) -> None:
    """Promise: both forms at once in one process: the remote class drafts for a target beside the package's own."""
    remote = AutoModel.from_pretrained(drafter_folder, trust_remote_code=True).eval()
    assert type(remote) is not dflash.DFlashDraftModel
    prompt = make_prompt()
    text = remote.spec_generate(input_ids=prompt, target=tiny_target, max_new_tokens=12, temperature=0.0)
    assert torch.equal(text, greedy(tiny_target, prompt, max_new_tokens=12))


# Native decoding of transformers.


@pytest.mark.skipif(not HAS_NATIVE_DFLASH, reason="transformers has no native DFlash before 5.15")
@pytest.mark.parametrize("script", [[0], [2], [BLOCK_SIZE - 1], [0, 5, 1, 4]], ids=str)
@pytest.mark.parametrize("padding", [0, 4])
@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_native_generate_agrees(kind: str, padding: int, script: list[int]) -> None:
    """Promise: our checkpoints run unchanged in `target.generate(assistant_model=…, speculation_type="dflash")`.

    With left padding too, and really accepted: fewer forwards of the target than tokens.
    """
    target, prompt = make_target(kind), make_prompt()
    expected = greedy(target, prompt, max_new_tokens=NUM_NEW)
    drafter = ScriptedDrafter(target, greedy(target, prompt, max_new_tokens=40), script)
    padded = torch.cat([torch.full((1, padding), PAD_TOKEN_ID), prompt], dim=1)
    options = {"attention_mask": (padded != PAD_TOKEN_ID).long()} if padding else {}
    with counted_forwards(target) as calls:
        text = greedy(
            target,
            padded,
            max_new_tokens=NUM_NEW,
            assistant_model=drafter,
            speculation_type="dflash",
            **options,
        )
    assert torch.equal(text[:, padding:], expected)
    if script != [0]:
        assert len(calls) < NUM_NEW
    if script == [BLOCK_SIZE - 1]:
        assert len(calls) <= NUM_NEW // BLOCK_SIZE + 2


@pytest.mark.skipif(not HAS_NATIVE_DFLASH, reason="transformers has no native DFlash before 5.15")
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"use_sliding_window": True, "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]},
        {
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": ["sliding_attention"] * 2,
            "is_causal": False,
        },
    ],
    ids=["full", "mixed", "sliding, not causal"],
)
@pytest.mark.parametrize("padding", [0, 4])
def test_native_generate_drafts_what_our_loop_drafts(
    tiny_target: PreTrainedModel, overrides: dict[str, Any], padding: int
) -> None:
    """Promise: the same network in both loops: from the same states, the same hidden rows of the first blocks.

    The texts agree whatever is drafted, so the rows are compared themselves: a mask or a position that is off in one of the
    loops would show in acceptance alone.
    """
    drafter, prompt = make_drafter(**overrides), make_prompt()
    padded = torch.cat([torch.full((1, padding), PAD_TOKEN_ID), prompt], dim=1)
    rows: list[torch.Tensor] = []
    handle = drafter.norm.register_forward_hook(lambda module, args, output: rows.append(output[:, 1:]))
    mask = (padded != PAD_TOKEN_ID).long()
    try:
        drafter.spec_generate(
            input_ids=padded, attention_mask=mask, target=tiny_target, max_new_tokens=20, temperature=0.0
        )
        ours, rows[:] = list(rows), []
        greedy(
            tiny_target,
            padded,
            attention_mask=mask,
            max_new_tokens=20,
            assistant_model=drafter,
            speculation_type="dflash",
        )
    finally:
        handle.remove()
    for one, other in zip(ours[:6], rows[:6], strict=True):
        torch.testing.assert_close(one, other[:, : one.shape[1]], rtol=0, atol=1e-4)
