"""The linter: each rule finds its fault and blames the engines that it concerns; the readings are those of the engines.

The tables of readings are restated here from the engines' sources, by hand and not from the package.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.console import Console
from safetensors.torch import load_file, save_file
from tiny_models import MASK_TOKEN_ID, SMALL, make_drafter, save_target
from tokenizers import Tokenizer

from dflash import DFlashConfig, DFlashDraftModel
from dflash.checkpoints import ENGINES, Report, check, report_lines
from dflash.checkpoints.rules.engine_readings import READERS, LayerAttention, meant
from dflash.dialects import portable_fields


EVERY = set(ENGINES)
SERVERS = {"vllm", "sglang", "trtllm"}
SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter as this package writes it; read-only."""
    folder = tmp_path_factory.mktemp("portable") / "tiny-DFlash"
    make_drafter().to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "tiny-target"
    return save_target(folder)


@pytest.fixture
def drafter(portable: Path, tmp_path: Path) -> Path:
    """A copy to break."""
    return Path(shutil.copytree(portable, tmp_path / portable.name))


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def verdicts(report: Report) -> dict[str, str]:
    return {verdict.engine: verdict.verdict for verdict in report.verdicts}


def failing(report: Report) -> set[str]:
    return {engine for engine, verdict in verdicts(report).items() if verdict == "fails"}


def rules(report: Report, severity: str | None = None) -> set[str]:
    return {finding.rule for finding in report.findings if severity in (None, finding.severity)}


def test_a_portable_pair_works_everywhere_and_nothing_is_found(portable: Path, target_folder: Path) -> None:
    report = check(portable, str(target_folder))
    assert set(verdicts(report).values()) == {"works"}
    assert report.findings == ()
    assert report.is_ok


def both(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Writes a doubled field in both places; `...` deletes it."""

    def change(config: dict[str, Any]) -> None:
        for fields in (config, config["dflash_config"]):
            fields.pop(name, None)
            if value is not ...:
                fields[name] = value

    return change


def top(**fields: Any) -> Callable[[dict[str, Any]], None]:
    def change(config: dict[str, Any]) -> None:
        for name, value in fields.items():
            config.pop(name, None)
            if value is not ...:
                config[name] = value

    return change


def nested(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: top(**fields)(config["dflash_config"])


def rope(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda config: top(**fields)(config["rope_parameters"])


# (name, change, rule that must speak, field that it names, engines that fail)
CONFIG_FAULTS: list[tuple[str, Callable[[dict[str, Any]], Any], str, str, set[str]]] = [
    ("block sizes differ", top(block_size=8), "doubles", "block_size", EVERY),
    ("mask ids differ", nested(mask_token_id=7), "doubles", "mask_token_id", EVERY),
    ("layer ids differ", nested(target_layer_ids=[1, 2]), "doubles", "target_layer_ids", EVERY),
    ("depths differ", nested(num_target_layers=5), "doubles", "num_target_layers", EVERY),
    ("causalities differ", lambda c: (top(is_causal=True)(c), nested(causal=False)(c)), "doubles", "is_causal", EVERY),
    ("rope bases differ", top(rope_theta=5.0), "doubles", "rope_theta", EVERY),
    ("rope scalings differ", top(rope_scaling={"type": "linear", "factor": 2.0}), "doubles", "rope_scaling", EVERY),
    ("ids of states differ", top(eagle_aux_hidden_state_layer_ids=[0, 1]), "doubles", "eagle_aux_hidden_state_layer_ids", EVERY),
    ("null hides the mask", nested(mask_token_id=None), "doubles", "dflash_config.mask_token_id", {"vllm", "sglang", "mlx"}),
    ("no block", both("block_size", ...), "block-size", "block_size", EVERY),
    ("block of one", both("block_size", 1), "block-size", "block_size", EVERY),
    ("block of a million", both("block_size", 1_000_000), "block-size", "block_size", EVERY),
    ("causal heads differ", lambda c: (top(is_causal=False)(c), nested(causal_head=True)(c)), "doubles", "is_causal", EVERY),
    ("block in quotes", both("block_size", "6"), "field-type", "block_size", EVERY),
    ("no mask", both("mask_token_id", ...), "mask-token", "mask_token_id", EVERY),
    ("mask out of range", both("mask_token_id", 96), "mask-token", "mask_token_id", EVERY),
    ("negative mask", both("mask_token_id", -1), "mask-token", "mask_token_id", EVERY),
    ("mask ends texts", top(eos_token_id=[3, MASK_TOKEN_ID]), "mask-token", "mask_token_id", EVERY),
    ("no layer ids", lambda c: (both("target_layer_ids", ...)(c), both("num_target_layers", ...)(c)), "taps", "target_layer_ids", EVERY),
    ("ids not ascending", both("target_layer_ids", [2, 0]), "taps", "target_layer_ids", EVERY),
    ("id twice", both("target_layer_ids", [1, 1]), "taps", "target_layer_ids", EVERY),
    ("last layer tapped", both("target_layer_ids", [1, 3]), "taps", "target_layer_ids", EVERY),
    ("ids no list", both("target_layer_ids", "0,2"), "field-type", "target_layer_ids", EVERY),
    ("depth nested alone", top(num_target_layers=...), "target-depth", "num_target_layers", {"mlx"}),
    ("block nested alone", top(block_size=...), "reading", "block_size", {"mlx"}),
    ("mask at the top alone", nested(mask_token_id=...), "reading", "mask_token_id", {"mlx"}),
    ("ids at the top alone", nested(target_layer_ids=...), "reading", "target_layer_ids", {"trtllm", "mlx"}),
    ("newer rope alone", top(rope_theta=..., rope_scaling=...), "reading", "rope_theta", {"mlx"}),
    ("no rope base", lambda c: (top(rope_theta=...)(c), rope(rope_theta=...)(c)), "rope", "rope_theta", EVERY),
    ("rope by layer", top(rope_parameters={FULL: {"rope_theta": 1e4}}), "rope", "rope_parameters", EVERY),
    ("partial rotary", rope(partial_rotary_factor=0.5), "rope", "rope_parameters.partial_rotary_factor", EVERY - SERVERS),
    ("interleaved rotary", top(is_neox_style=False), "rope", "is_neox_style", EVERY - {"vllm", "sglang"}),
    ("no depth", top(num_hidden_layers=...), "windows", "num_hidden_layers", EVERY),
    ("a layer type too many", top(layer_types=[FULL] * 3), "windows", "layer_types", EVERY),
    ("unknown layer type", top(layer_types=[FULL, "chunked"]), "windows", "layer_types", EVERY),
    ("window missing", top(layer_types=[SLIDING, FULL]), "windows", "sliding_window", EVERY),
    ("window switched off", top(layer_types=[SLIDING, FULL], sliding_window=8), "windows", "use_sliding_window", EVERY - {"mlx"}),
    ("heads not shared evenly", top(num_key_value_heads=3), "dimensions", "num_key_value_heads", EVERY),
    ("no hidden size", top(hidden_size=...), "dimensions", "hidden_size", EVERY),
    ("no head size", top(head_dim=...), "dimensions", "head_dim", EVERY),
    ("other activation", top(hidden_act="gelu"), "dimensions", "hidden_act", SERVERS | {"mlx"}),
    ("tie not said", top(tie_word_embeddings=...), "dimensions", "tie_word_embeddings", {"mlx"}),
    ("reduced vocabulary", top(draft_vocab_size=48), "vocabulary", "draft_vocab_size", EVERY),
    ("sinks", nested(attention_sink_bias=True), "variant", "attention_sink_bias", EVERY - {"vllm", "sglang"}),
    ("anchor predicts", both("sample_from_anchor", True), "variant", "sample_from_anchor", EVERY - {"remote-code"}),
    ("a head of Domino", nested(projector_type="domino", pure_draft_prefix_len=1), "variant", "projector_type", EVERY - {"sglang"}),
    ("no class", top(architectures=...), "names", "architectures", {"vllm", "sglang"}),
    ("class of another name", top(architectures=["DFlashQwen3"]), "names", "architectures", {"sglang"}),
    ("no code named", top(auto_map=...), "code", "auto_map.AutoModel", {"remote-code", "native"}),
    ("code not there", top(auto_map={"AutoModel": "dflash.DFlashDraftModel"}), "code", "auto_map.AutoModel", {"remote-code", "native"}),
    ("quantised", top(quantization_config={"quant_method": "fp8"}), "dtype", "quantization_config", {"mlx"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "rule", "field", "engines"), [row[1:] for row in CONFIG_FAULTS], ids=[row[0] for row in CONFIG_FAULTS]
)
def test_fault_of_the_config(
    drafter: Path, change: Callable[[dict[str, Any]], Any], rule: str, field: str, engines: set[str]
) -> None:
    """Promise: the rule names the field, and every engine that would fail is said to, and no other."""
    report = check(edit(drafter, change))
    spoken = [finding for finding in report.findings if finding.rule == rule and finding.field == field]
    assert spoken, report.findings
    assert failing(report) == engines
    assert not report.is_ok
    for finding in report.findings:
        assert finding.why.endswith(".")
        assert finding.fix.endswith(".")
        assert finding.engines


# (name, change, rule, engines that draft worse and do not fail)
CONFIG_WARNINGS: list[tuple[str, Callable[[dict[str, Any]], Any], str, set[str]]] = [
    ("mask is the pad token", top(pad_token_id=MASK_TOKEN_ID), "mask-token", EVERY),
    ("dtypes differ", top(torch_dtype="float16"), "doubles", {"remote-code", "native"}),
    ("dtype not the stored one", top(dtype="float16", torch_dtype="float16"), "dtype", EVERY),
    ("other backbone", top(model_type="llama"), "names", SERVERS | {"mlx"}),
    ("negative multiplier", nested(output_multiplier=-2.0), "variant", {"native", "trtllm", "mlx"}),
    (
        "JetSpec's causality",
        lambda c: (top(is_causal=...)(c), nested(causal_head=True)(c)),
        "reading",
        SERVERS | {"mlx"},
    ),
]


@pytest.mark.parametrize(
    ("change", "rule", "engines"), [row[1:] for row in CONFIG_WARNINGS], ids=[row[0] for row in CONFIG_WARNINGS]
)
def test_doubt_of_the_config(
    drafter: Path, change: Callable[[dict[str, Any]], Any], rule: str, engines: set[str]
) -> None:
    report = check(edit(drafter, change))
    assert rule in rules(report, "warning")
    assert {engine for engine, verdict in verdicts(report).items() if verdict == "degraded"} == engines
    assert report.is_ok


# Faults that these loaders cannot see: which code AutoModel would run, and which tokens the target's texts hold.
NOT_OF_THE_LOADER = ("mask ends texts", "no code named", "code not there")


@pytest.mark.parametrize(
    "change",
    [row[1] for row in CONFIG_FAULTS if "remote-code" in row[4] and row[0] not in NOT_OF_THE_LOADER],
    ids=[row[0] for row in CONFIG_FAULTS if "remote-code" in row[4] and row[0] not in NOT_OF_THE_LOADER],
)
def test_what_the_linter_fails_for_this_package_it_does_not_load(
    drafter: Path, change: Callable[[dict[str, Any]], Any]
) -> None:
    """Promise: one sentence, never a traceback of something else and never a drafter that computes other things."""
    with pytest.raises(ValueError, match=r"\S"):
        DFlashDraftModel.from_pretrained(edit(drafter, change))


@pytest.mark.parametrize("field", ["final_logit_softcapping", "output_multiplier"])
def test_what_keeps_the_order_of_the_logits_is_a_note(drafter: Path, field: str) -> None:
    """The proposals are the most probable tokens, which a soft cap or a positive factor leaves as they are."""
    report = check(edit(drafter, nested(**{field: 30.0})))
    assert set(verdicts(report).values()) == {"works"}
    assert {(f.severity, f.field) for f in report.findings} == {("note", field)}


def test_a_soft_cap_counts_where_a_selector_adds_to_the_logits(tmp_path: Path) -> None:
    fields = {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 3}
    make_drafter(**fields, final_logit_softcapping=30.0).to(torch.bfloat16).save_pretrained(tmp_path / "own-DFlash")
    report = check(edit(tmp_path / "own-DFlash", nested(final_logit_softcapping=...)))
    assert verdicts(report)["sglang"] == "degraded"


def test_a_raw_assistant_is_another_class_to_automodel(drafter: Path) -> None:
    def flatten(config: dict[str, Any]) -> None:
        top(model_type="dflash_assistant", auto_map=..., dflash_config=...)(config)

    edit_tensors(drafter, lambda tensors: tensors.update({"encoder.fc.weight": tensors.pop("fc.weight")}))
    report = check(edit(drafter, flatten))
    (finding,) = [f for f in report.findings if f.rule == "code"]
    assert (finding.severity, finding.field, finding.engines) == ("error", "model_type", ("remote-code",))
    assert "dflash convert" in finding.fix
    assert verdicts(report)["remote-code"] == "fails"


def _truncate(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-10])


def _append(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"of a longer file")


def _rename(folder: Path, name: str) -> None:
    (folder / "model.safetensors").rename(folder / name)


def _leave_in_another_file(folder: Path) -> None:
    fc = load_file(folder / "model.safetensors")["fc.weight"]
    save_file({"fc.weight": fc}, folder / "old.safetensors")
    edit_tensors(folder, lambda tensors: tensors.pop("fc.weight"))


def _unknown_dtype(folder: Path) -> None:
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole.replace(b'"BF16"', b'"XX16"', 1))


FILE_FAULTS: list[tuple[str, Callable[[Path], Any], str, str, set[str]]] = [
    ("tensor missing", lambda f: edit_tensors(f, lambda t: t.pop("fc.weight")), "tensors", "fc.weight", EVERY),
    ("tensor of another shape", lambda f: edit_tensors(f, lambda t: t.update({"fc.weight": t["fc.weight"][:, :32]})), "tensors", "fc.weight", EVERY),
    ("tensor too many", lambda f: edit_tensors(f, lambda t: t.update(extra=torch.zeros(1))), "tensors", "extra", {"remote-code", "vllm", "mlx"}),
    ("a head of its own", lambda f: edit_tensors(f, lambda t: t.update({"lm_head.weight": torch.zeros(96, 32)})), "tensors", "lm_head.weight", {"remote-code", "mlx"}),
    ("names with a prefix", lambda f: edit_tensors(f, lambda t: [t.update({f"model.{n}": t.pop(n)}) for n in list(t)]), "tensors", "model.fc.weight, model.hidden_norm.weight, model.layers.*.input_layernorm.weight and 11 more kinds", {"native", "vllm", "mlx"}),
    ("names of the assistant", lambda f: edit_tensors(f, lambda t: t.update({"encoder.fc.weight": t.pop("fc.weight")})), "tensors", "encoder.fc.weight", {"trtllm", "mlx"}),
    ("weights cut off", _truncate, "files", "weights", EVERY),
    ("bytes after the tensors", _append, "files", "weights", EVERY),
    ("a dtype that is not known here", _unknown_dtype, "finite", "weights", {"remote-code", "native"}),
    ("weights of another name", lambda f: _rename(f, "weights.safetensors"), "files", "weights", EVERY),
    ("a shard without an index", lambda f: _rename(f, "model-00001-of-00001.safetensors"), "files", "weights", EVERY),
    ("tensor in a file that is not read", _leave_in_another_file, "tensors", "fc.weight", EVERY),
    ("no weights", lambda f: (f / "model.safetensors").unlink(), "files", "weights", EVERY),
    ("a pickle instead", lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "files", "weights", EVERY),
    ("embedding of the mask", lambda f: (f / "mask_embedding.pt").write_bytes(b""), "files", "mask_embedding", EVERY - {"vllm", "sglang"}),
    ("shard missing", lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "two.safetensors"}}'), "files", "weight_map", EVERY),
    ("code missing", lambda f: (f / "modeling_dflash.py").unlink(), "code", "auto_map.AutoModel", {"remote-code", "native"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "rule", "field", "engines"), [row[1:] for row in FILE_FAULTS], ids=[row[0] for row in FILE_FAULTS]
)
def test_fault_of_the_files(
    drafter: Path, change: Callable[[Path], Any], rule: str, field: str, engines: set[str]
) -> None:
    change(drafter)
    report = check(drafter)
    assert (rule, field) in {(finding.rule, finding.field) for finding in report.findings}
    assert failing(report) == engines


@pytest.mark.parametrize(
    ("fields", "works_on"),
    [
        ({"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 4, "selector_top_k": 3}, {"vllm", "sglang"}),
        ({"gru_hidden_dim": 6, "emb_dim": 4, "pure_draft_prefix_len": 1}, {"sglang"}),
        ({"gru_hidden_dim": 6, "emb_dim": 4, "pure_draft_prefix_len": 1, "sample_from_anchor": True}, {"sglang"}),
        ({"gru_hidden_dim": 6, "emb_dim": 4}, set()),
        ({"draft_vocab_size": 48}, {"vllm"}),
        ({"sample_from_anchor": True}, set()),
        ({"attention_bias": True}, EVERY),
        ({"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True}, EVERY),
    ],
    ids=[
        "dflash2",
        "domino",
        "domino from the anchor",
        "domino, all of it",
        "reduced vocabulary",
        "anchor predicts",
        "biases",
        "windows",
    ],
)
def test_what_this_package_writes_it_loads(tmp_path: Path, fields: dict[str, Any], works_on: set[str]) -> None:
    """Promise: the linter's shapes and refusals are the library's, for every kind of drafter that it makes."""
    make_drafter(**fields).to(torch.bfloat16).save_pretrained(tmp_path / "own-DFlash")
    report = check(tmp_path / "own-DFlash")
    works = {engine for engine, verdict in verdicts(report).items() if verdict == "works"}
    assert works == works_on | {"remote-code"}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e5m2])
def test_weights_that_are_no_numbers_are_found(
    drafter: Path, dtype: torch.dtype, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: a single one, in any piece of any tensor, fails everywhere; the largest finite values do not."""
    monkeypatch.setattr("dflash.checkpoints.rules.checkpoint_files.PIECE", 7)
    name = "layers.1.mlp.up_proj.weight"

    def report_with(last: float) -> Report:
        def change(tensors: dict[str, torch.Tensor]) -> None:
            tensors[name] = torch.full_like(tensors[name], torch.finfo(dtype).max, dtype=dtype)
            tensors[name][-1, -1] = last

        return check(edit_tensors(drafter, change))

    assert "finite" not in rules(report_with(torch.finfo(dtype).min))
    report = report_with(value)
    (finding,) = [finding for finding in report.findings if finding.rule == "finite"]
    assert finding.field == "layers.*.mlp.up_proj.weight"
    assert failing(report) == EVERY


def test_a_wrong_fc_says_how_many_layers_it_holds(drafter: Path) -> None:
    """The usual trace of a drafter of another target."""
    edit_tensors(drafter, lambda tensors: tensors.update({"fc.weight": tensors["fc.weight"][:, :32]}))
    (finding,) = [f for f in check(drafter).findings if f.rule == "tensors"]
    assert finding.value == [32, 32]
    assert "these weights hold 1)" in finding.why


def test_a_pickle_beside_safetensors_is_a_doubt(drafter: Path) -> None:
    (drafter / "pytorch_model.bin").write_bytes(b"")
    report = check(drafter)
    assert report.is_ok
    assert {f.file for f in report.findings if f.severity == "warning"} == {"pytorch_model.bin"}


def test_what_belongs_to_a_generating_model_is_noted(drafter: Path) -> None:
    (drafter / "generation_config.json").write_text("{}")
    report = check(edit(drafter, top(temperature=0.7)))
    assert {"generation_config", "temperature"} <= {f.field for f in report.findings if f.severity == "note"}
    assert set(verdicts(report).values()) == {"works"}


def test_a_folder_without_dflash_in_its_name_is_noted_for_vllm(portable: Path, tmp_path: Path) -> None:
    report = check(shutil.copytree(portable, tmp_path / "drafter"))
    assert [(f.rule, f.severity, f.engines) for f in report.findings] == [("names", "note", ("vllm",))]


def test_nothing_that_a_checkpoint_brings_is_run(drafter: Path) -> None:
    """The code is parsed: a class that is there is found though the file would end the process."""
    path = drafter / "modeling_dflash.py"
    path.write_text("raise SystemExit\n" + path.read_text().replace("from __future__ import annotations\n", ""))
    assert check(drafter).is_ok


def test_code_that_native_generate_cannot_call(drafter: Path) -> None:
    """The published drafters' own forward has other names of arguments."""
    source = "class DFlashDraftModel:\n    def forward(self, noise_embedding, target_hidden):\n        return None\n"
    (drafter / "dflash.py").write_text(source)
    report = check(edit(drafter, top(auto_map={"AutoModel": "dflash.DFlashDraftModel"})))
    assert failing(report) == {"native"}
    assert verdicts(report)["remote-code"] == "degraded"


def test_code_of_an_older_version_is_found_and_what_renews_it(drafter: Path) -> None:
    """transformers 5.24 calls a drafter with `cache`, which the forward of older code ignored: 1.6 tokens a forward."""
    path = drafter / "modeling_dflash.py"
    text = path.read_text()
    path.write_text(f"{text}# older\n")
    report = check(drafter)
    assert [(f.severity, f.field) for f in report.findings if f.rule == "code"] == [("note", "modeling_dflash.py")]
    assert report.is_ok
    path.write_text(text.replace("        cache: Cache | None = None,\n", ""))
    report = check(drafter)
    assert failing(report) == {"remote-code", "native"}
    assert "`dflash convert`" in next(finding.fix for finding in report.findings if finding.rule == "code")


# Pairs.


def target_with(folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    return edit(Path(shutil.copytree(folder, tmp_path / "other-target")), change)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (top(hidden_size=64), "hidden_size"),
        (top(vocab_size=128), "vocab_size"),
        (top(num_hidden_layers=6), "num_target_layers"),
        (top(eos_token_id=MASK_TOKEN_ID), "mask_token_id"),
    ],
)
def test_a_pair_that_does_not_belong_together(
    portable: Path, target_folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], Any], field: str
) -> None:
    report = check(portable, str(target_with(target_folder, tmp_path, change)))
    assert field in {f.field for f in report.findings if f.severity == "error"}
    assert failing(report) == EVERY


def test_the_last_layer_of_the_real_target_counts(drafter: Path, target_folder: Path) -> None:
    """A drafter that does not say its target's depth is held against the target's."""
    edit(drafter, both("num_target_layers", ...))
    edit(drafter, both("target_layer_ids", [1, 3]))
    assert "pair-taps" not in rules(check(drafter))
    assert "pair-taps" in rules(check(drafter, str(target_folder)))


def test_the_text_part_of_a_multimodal_target_is_compared(portable: Path, target_folder: Path, tmp_path: Path) -> None:
    text = json.loads((target_folder / "config.json").read_text())
    wrapped = target_with(target_folder, tmp_path, lambda c: (c.clear(), c.update(text_config=text, hidden_size=5)))
    assert check(portable, str(wrapped)).is_ok


def test_a_mask_that_text_can_hold(drafter: Path, target_folder: Path) -> None:
    report = check(edit(drafter, both("mask_token_id", 40)), str(target_folder))
    assert rules(report, "warning") == {"pair-mask"}


def test_another_mask_token_in_the_tokenizer(portable: Path, target_folder: Path, tmp_path: Path) -> None:
    """SGLang looks a missing id up by this name."""
    target = Path(shutil.copytree(target_folder, tmp_path / "other-target"))
    path = str(target / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_special_tokens(["<|MASK|>"])
    tokenizer.save(path)
    report = check(portable, str(target))
    assert [(f.rule, f.value) for f in report.findings] == [("pair-mask", MASK_TOKEN_ID)]


@pytest.mark.parametrize("text", ["{", "{}", '{"model": {"type": "of a later version"}}'])
def test_a_tokenizer_that_cannot_be_read_is_one_sentence(
    portable: Path, target_folder: Path, tmp_path: Path, text: str
) -> None:
    target = Path(shutil.copytree(target_folder, tmp_path / "other-target"))
    (target / "tokenizer.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"tokenizer\.json cannot be read \(.*\): fetch or write the file again, or install"
    ):
        check(portable, str(target))


def test_fewer_positions_than_the_target(drafter: Path, target_folder: Path) -> None:
    report = check(edit(drafter, top(max_position_embeddings=64)), str(target_folder))
    assert rules(report, "warning") == {"pair-positions"}


# The readings of the engines.

BASE = {"model_type": "qwen3", "num_hidden_layers": 2, "rope_theta": 1e6, "block_size": 16, "mask_token_id": 9}


def taps_of(engine: str, **fields: Any) -> tuple[int, ...] | None:
    return READERS[engine]({**BASE, **fields}).target_layer_ids


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "mlx"])
def test_nested_ids_are_decoder_layers(engine: str) -> None:
    assert taps_of(engine, dflash_config={"target_layer_ids": [1, 9]}) == (1, 9)


@pytest.mark.parametrize(
    ("engine", "read"), [("vllm", (1, 9)), ("sglang", (1, 9)), ("native", (1, 9)), ("trtllm", None), ("mlx", None)]
)
def test_ids_at_the_top_are_decoder_layers_where_they_are_read(engine: str, read: tuple[int, ...] | None) -> None:
    assert taps_of(engine, target_layer_ids=[1, 9]) == read


def test_ids_that_count_the_embedding_are_one_more() -> None:
    """vLLM's own field, and speculators': 0 is the embedding's output."""
    assert taps_of("vllm", eagle_aux_hidden_state_layer_ids=[2, 10], target_layer_ids=[5]) == (1, 9)
    speculators = {"transformer_layer_config": {}, "aux_hidden_state_layer_ids": [2, 10]}
    assert taps_of("vllm", **speculators) == meant({**BASE, **speculators}).target_layer_ids == (1, 9)


def test_tensorrt_llm_sorts_the_ids() -> None:
    assert taps_of("trtllm", dflash_config={"target_layer_ids": [9, 1]}) == (1, 9)


CAUSAL, BOTH_WAYS = True, False
LEGACY = [(CAUSAL, 8), (BOTH_WAYS, None)]  # sliding layers causal, full ones not
MIXED = {"layer_types": [SLIDING, FULL], "sliding_window": 8, "use_sliding_window": True}
UNIFORM = {"layer_types": [SLIDING, SLIDING], "sliding_window": 8, "use_sliding_window": True}
ALL_FULL = {"layer_types": [FULL, FULL]}

# fields, then what is meant, and what vLLM, SGLang, TensorRT-LLM and MLX take (None: as it is meant)
ATTENTION = [
    ("full", ALL_FULL, [(BOTH_WAYS, None)] * 2, None, None, None, None),
    ("nothing said", {}, [(BOTH_WAYS, None)] * 2, None, None, None, None),
    ("mixed, legacy", MIXED, LEGACY, None, None, None, None),
    ("mixed, not causal", {**MIXED, "is_causal": False}, [(BOTH_WAYS, 8), (BOTH_WAYS, None)], None, None, LEGACY, LEGACY),
    ("mixed, causal", {**MIXED, "is_causal": True}, [(CAUSAL, 8), (CAUSAL, None)], None, None, LEGACY, LEGACY),
    ("sliding, legacy", UNIFORM, [(CAUSAL, 8)] * 2, None, None, None, None),
    ("sliding, not causal", {**UNIFORM, "is_causal": False}, [(BOTH_WAYS, 8)] * 2, None, None, [(CAUSAL, 8)] * 2, [(CAUSAL, 8)] * 2),
    ("nested causal", {**ALL_FULL, "dflash_config": {"causal": True}}, [(CAUSAL, None)] * 2, None, [(BOTH_WAYS, None)] * 2, [(BOTH_WAYS, None)] * 2, [(BOTH_WAYS, None)] * 2),
    ("top level wins", {**ALL_FULL, "is_causal": True, "dflash_config": {"causal": False}}, [(CAUSAL, None)] * 2, None, None, [(BOTH_WAYS, None)] * 2, [(BOTH_WAYS, None)] * 2),
    ("use_swa over full", {**ALL_FULL, "dflash_config": {"use_swa": True, "swa_window_size": 4}}, [(BOTH_WAYS, 4)] * 2, None, [(BOTH_WAYS, None)] * 2, None, [(BOTH_WAYS, None)] * 2),
    ("use_swa alone", {"dflash_config": {"use_swa": True, "swa_window_size": 4, "causal": False}}, [(BOTH_WAYS, 4)] * 2, None, [(BOTH_WAYS, None)] * 2, None, [(BOTH_WAYS, None)] * 2),
    ("window of its own", {**UNIFORM, "dflash_config": {"swa_window_size": 4}}, [(CAUSAL, 4)] * 2, None, [(CAUSAL, 8)] * 2, [(CAUSAL, 8)] * 2, [(CAUSAL, 8)] * 2),
]  # fmt: skip


@pytest.mark.parametrize("row", ATTENTION, ids=[row[0] for row in ATTENTION])
def test_causality_and_windows(row: Any) -> None:
    """Promise: each engine's order of resolution, field by field."""
    _, fields, wanted, *by_engine = row
    config = {**BASE, **fields}
    assert meant(config).attention == tuple(LayerAttention(*layer) for layer in wanted)
    for engine, read in zip(("vllm", "sglang", "trtllm", "mlx"), by_engine, strict=True):
        layers = tuple(LayerAttention(*layer) for layer in (wanted if read is None else read))
        assert READERS[engine](config).attention == layers, engine


@pytest.mark.parametrize(
    "fields",
    [
        ALL_FULL,
        MIXED,
        UNIFORM,
        {**MIXED, "is_causal": False},
        {**ALL_FULL, "dflash_config": {"causal": True}},
        {**ALL_FULL, "use_swa": True, "swa_window_size": 4},
        {**ALL_FULL, "dflash_config": {"use_swa": True, "swa_window_size": 4}, "swa_window_size": 6},
        {**UNIFORM, "dflash_config": {"swa_window_size": 4}},
    ],
    ids=["full", "mixed", "sliding", "not causal", "nested causal", "use_swa at the top", "two windows", "own window"],
)
def test_what_is_meant_is_what_this_package_runs(fields: dict[str, Any]) -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
    config = {**BASE, **sizes, **fields}
    config["dflash_config"] = {"target_layer_ids": [0], **fields.get("dflash_config", {})}
    own = DFlashConfig(**portable_fields(config))
    layers = tuple(LayerAttention(own.is_layer_causal(i), own.layer_window(i)) for i in range(2))
    assert meant(config).attention == layers


def test_layer_types_that_transformers_derives() -> None:
    """Without `layer_types` a window that is on counts from `max_window_layers`, for what builds on transformers."""
    fields = {**BASE, "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}
    assert [layer.window for layer in READERS["vllm"](fields).attention] == [None, 8]
    assert [layer.window for layer in READERS["mlx"](fields).attention] == [None, None]


def test_a_window_that_is_switched_off() -> None:
    """transformers' Qwen3Config drops it, and with it what builds on that config; MLX reads the file."""
    fields = {**BASE, "layer_types": [SLIDING, FULL], "sliding_window": 8}
    for engine, window in (("vllm", None), ("sglang", None), ("trtllm", None), ("mlx", 8)):
        assert [layer.window for layer in READERS[engine](fields).attention] == [window, None]


def test_a_window_that_is_switched_on_and_not_given() -> None:
    fields = {**BASE, "layer_types": [SLIDING, FULL], "use_sliding_window": True}
    for engine, window in (("vllm", 4096), ("sglang", 4096), ("mlx", None)):
        assert [layer.window for layer in READERS[engine](fields).attention] == [window, None]


def test_a_window_that_an_engine_does_not_keep_is_a_doubt_for_it_alone(drafter: Path) -> None:
    report = check(edit(drafter, top(**UNIFORM, is_causal=False)))
    assert verdicts(report) == {
        "remote-code": "works", "native": "works", "vllm": "works", "sglang": "works", "trtllm": "degraded", "mlx": "degraded"
    }  # fmt: skip
    (finding,) = report.findings
    assert (finding.field, finding.value, finding.engines) == ("is_causal", False, ("trtllm", "mlx"))
    assert "layer 0 is bidirectional with window 8, and causal with window 8 in TensorRT-LLM, MLX:" in finding.why


# Published forms, as their config.json says it.

QWEN3_8B = {
    "architectures": ["DFlashDraftModel"], "attention_bias": False, "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16, "bos_token_id": 151643, "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
    "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 12288, "layer_types": [FULL] * 5, "max_position_embeddings": 40960, "max_window_layers": 5,
    "model_type": "qwen3", "num_attention_heads": 32, "num_hidden_layers": 5, "num_key_value_heads": 8,
    "num_target_layers": 36, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip
DFLASH2 = {
    **{name: value for name, value in QWEN3_8B.items() if name not in ("auto_map", "block_size", "rope_theta", "rope_scaling")},
    "architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": [SLIDING] * 5, "sliding_window": 2048,
    "use_sliding_window": True, "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
    "dflash_config": {"block_size": 8, "conv_group_size": 16, "conv_kernel_size": 2, "mask_token_id": 151669,
                      "selector_rank": 256, "selector_top_k": 16, "target_layer_ids": [1, 9, 17, 25, 33]},
}  # fmt: skip
GPT_OSS = {
    **QWEN3_8B, "attention_bias": True, "block_size": 8, "eos_token_id": 200002, "bos_token_id": 199998, "head_dim": 64,
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]}, "hidden_size": 2880,
    "intermediate_size": 7680, "layer_types": [FULL] * 8, "model_type": "gpt_oss", "num_attention_heads": 64,
    "num_hidden_layers": 8, "num_target_layers": 24, "rope_theta": 150000, "vocab_size": 201088,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
}  # fmt: skip
DEEPSPEC = {
    **{name: value for name, value in QWEN3_8B.items() if name not in ("auto_map", "dflash_config")},
    "block_size": 7, "mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33],
}  # fmt: skip
SPECULATORS = {
    "speculators_model_type": "dflash", "architectures": ["DFlashDraftModel"], "block_size": 16, "mask_token_id": 151669,
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34], "draft_vocab_size": 32000, "sliding_window_non_causal": True,
    "transformer_layer_config": {name: QWEN3_8B[name] for name in (
        "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types", "max_position_embeddings", "model_type",
        "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps", "rope_theta", "vocab_size")},
}  # fmt: skip


def published(tmp_path: Path, config: dict[str, Any]) -> Report:
    """The report on a config alone: a folder with no code, and weights whose header lists what `config` asks for."""
    folder = tmp_path / "some-DFlash"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return check(folder)


def config_errors(report: Report) -> dict[str, set[str]]:
    """Rules with errors by engine, the missing weights and code aside."""
    found: dict[str, set[str]] = {engine: set() for engine in ENGINES}
    for finding in report.findings:
        if finding.severity == "error" and finding.rule not in ("files", "code"):
            for engine in finding.engines:
                found[engine].add(finding.rule)
    return found


def test_the_first_published_form(tmp_path: Path) -> None:
    """Servers and MLX read it; native generate finds no mask and no layers at the top."""
    errors = config_errors(published(tmp_path, QWEN3_8B))
    assert errors == {**{engine: set() for engine in ENGINES}, "native": {"reading"}}


def test_the_second_published_form(tmp_path: Path) -> None:
    errors = config_errors(published(tmp_path, DFLASH2))
    assert {engine for engine, found in errors.items() if not found} == {"remote-code", "vllm", "sglang"}
    assert all("variant" in errors[engine] for engine in ("native", "trtllm", "mlx"))


def test_the_form_of_gpt_oss_drafters(tmp_path: Path) -> None:
    report = published(tmp_path, GPT_OSS)
    assert config_errors(report)["vllm"] == set()
    assert "model_type" in {finding.field for finding in report.findings if finding.severity == "warning"}


def test_the_form_of_deepspec(tmp_path: Path) -> None:
    """Its anchor predicts and does not say so: engines load it and accept nothing."""
    report = published(tmp_path, DEEPSPEC)
    assert report.dialect == "DeepSpec"
    errors = config_errors(report)
    assert {engine for engine, found in errors.items() if "variant" in found} == EVERY - {"remote-code"}


def test_the_form_of_speculators(tmp_path: Path) -> None:
    report = published(tmp_path, SPECULATORS)
    assert report.dialect == "speculators"
    found = [f for f in report.findings if f.rule in ("form", "vocabulary") and f.field != "d2t"]
    assert {engine for finding in found for engine in finding.engines} == EVERY - {"vllm", "remote-code"}


# The report.


def test_json_and_exit_status(drafter: Path, dflash_command: Callable[..., Any]) -> None:
    def run(*arguments: str) -> tuple[int, str]:
        return dflash_command("check", *arguments)[:2]

    assert run(str(drafter), "--json")[0] == 0
    edit(drafter, top(block_size=...))
    status, out = run(str(drafter), "--json")
    assert status == 1
    report = json.loads(out)
    assert [row["verdict"] for row in report["verdicts"]].count("fails") == 1
    assert report["findings"][0] == {
        "rule": "reading", "severity": "error", "field": "block_size", "file": "config.json", "value": 6,
        "why": "not found by MLX.", "fix": "write it at the top level and in dflash_config.", "engines": ["mlx"],
    }  # fmt: skip
    assert run(str(drafter), "--engine", "vllm", "--engine", "sglang")[0] == 0
    status, out = run(str(drafter))
    assert status == 1
    assert re.search(r"fails +MLX +block_size", out)


@pytest.mark.parametrize("width", [80, 120])
def test_the_report_fits_the_terminal(drafter: Path, width: int) -> None:
    edit(drafter, lambda c: (both("target_layer_ids", [2, 0])(c), top(architectures=None, auto_map=None)(c)))
    console = Console(width=width, file=StringIO())
    console.print(report_lines(check(drafter)))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= width
    for engine in ENGINES.values():
        assert sum(line.count(engine) for line in lines[:9]) == 1
    assert lines[-1] == "3 errors"


@pytest.mark.parametrize(
    ("content", "phrase"),
    [(None, "no checkpoint"), ("{", "not JSON"), ("[]", "no object")],
    ids=["none", "cut", "list"],
)
def test_a_folder_that_is_no_checkpoint(tmp_path: Path, content: str | None, phrase: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ValueError, match=phrase):
        check(tmp_path)


def test_an_engine_that_is_none(tmp_path: Path) -> None:
    """Promise: it is named with those that there are, before the checkpoint is looked for."""
    with pytest.raises(
        ValueError, match=rf"^llama\.cpp is no engine \(--engine\): name one of {', '.join(ENGINES)}\.$"
    ):
        check(tmp_path / "none", engines=("mlx", "llama.cpp"))


def test_a_target_that_is_not_there(portable: Path) -> None:
    with pytest.raises(ValueError, match=r"^The target no/such is no folder and cannot be fetched"):
        check(portable, "no/such")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 200) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = (
    "block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "layer_types", "sliding_window", "is_causal",
    "rope_parameters", "rope_scaling", "rope_theta", "dflash_config", "architectures", "auto_map", "hidden_size", "head_dim",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "dtype", "eos_token_id", "model_type",
    "transformer_layer_config", "conv_kernel_size", "conv_group_size", "selector_rank", "draft_vocab_size", "max_window_layers",
)  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of one layer without code, which is read quickly, and beside its folder its config, to be written anew."""
    folder = tmp_path_factory.mktemp("small") / "tiny-DFlash"
    make_drafter(**SMALL).to(torch.bfloat16).save_pretrained(folder)
    for path in folder.glob("*.py"):
        path.unlink()
    shutil.copy(folder / "config.json", folder.parent)
    return folder


@settings(max_examples=150, deadline=None, derandomize=True)
@example({"dflash_config": {"a.b": 1, ".": 2}, "rope_theta": 1.0}, False)  # names with dots
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5), st.booleans())
def test_no_config_breaks_the_linter(small: Path, fields: dict[str, Any], is_nested: bool) -> None:
    """Promise: whatever stands in config.json, the answer is a report."""
    config = json.loads((small.parent / "config.json").read_text())
    (config["dflash_config"] if is_nested else config).update(fields)
    (small / "config.json").write_text(json.dumps(config))
    report = check(small)
    json.dumps(report.as_json())
    Console(file=StringIO()).print(report_lines(report))


def test_reading_a_checkpoint_loads_no_weights(drafter: Path) -> None:
    """Promise: headers are enough for names and shapes: the bytes are a hole in the file, and no loader is importable."""
    path = drafter / "model.safetensors"
    length = int.from_bytes(path.read_bytes()[:8], "little")
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.truncate(8 + length)
        file.truncate(size)
    hidden = "import sys\nsys.modules['safetensors'] = sys.modules['torch'] = None\n"
    program = f"{hidden}from dflash.checkpoints.rules.checkpoint_files import read_checkpoint\nprint(len(read_checkpoint({str(drafter)!r}).tensors))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [str(len(make_drafter().state_dict()))], done.stderr
