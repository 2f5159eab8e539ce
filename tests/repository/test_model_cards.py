"""The model cards say what `drafters.json` says, the Hub can read them, and no figure stands without its source."""

import ast
import contextlib
import copy
import importlib.util
import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from dflash import DFlashConfig, DFlashDraftModel
from dflash.dialects import portable_fields
from dflash.model.targets_dflash import check_pair


FOLDER = Path(__file__).parents[2] / "model_cards"
DATA = json.loads((FOLDER / "drafters.json").read_text(encoding="utf-8"))
DRAFTERS = DATA["drafters"]
REQUIRED = {
    *("id", "revision", "target", "dialect", "thinking", "block_size", "num_layers", "target_layer_ids"),
    *("mask_token_id", "sliding_layers", "window", "is_causal", "hidden_size", "intermediate_size", "heads", "rope"),
    *("max_position_embeddings", "vocab_size", "parameters", "file_size", "license", "pipeline_tag", "retrain"),
    *("facts", "library", "engines", "results", "limits"),
}
# Published checkpoints that tap the target's last layer; each card must say so.
LAST_TAP = "last-tap"


def load_build():
    spec = importlib.util.spec_from_file_location("build_model_cards", FOLDER / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


build = load_build()


def each_drafter(applies=lambda drafter: True):
    return pytest.mark.parametrize("drafter", [*filter(applies, DRAFTERS)], ids=lambda drafter: drafter["id"])


def is_said_to_load_and_has_a_shape(drafter) -> bool:
    shape = ("hidden_size", "intermediate_size", "heads", "vocab_size", "mask_token_id", "target_layer_ids")
    return build.library_verdict(DATA, drafter)[0] is True and all(drafter[name] is not None for name in shape)


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def test_cards_are_what_the_data_gives():
    assert build.stale(FOLDER, build.pages(DATA)) == []


def test_a_changed_figure_and_an_unknown_card_are_noticed(tmp_path):
    """Guards the check itself: one figure differs in one card, one card belongs to no drafter, one is missing."""
    for name, text in build.pages(DATA).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    changed = copy.deepcopy(DATA)
    changed["drafters"][0]["results"][0]["rows"][0][1] += 0.01
    (tmp_path / "nobody.md").write_text("", encoding="utf-8")
    (tmp_path / build.file_name(DATA, DRAFTERS[1])).unlink()
    wanted = {"nobody.md", build.file_name(DATA, DRAFTERS[0]), build.file_name(DATA, DRAFTERS[1])}
    assert set(build.stale(tmp_path, build.pages(changed))) == wanted


def test_every_drafter_has_a_card_of_its_own():
    names = [build.file_name(DATA, drafter) for drafter in DRAFTERS]
    assert len({name.lower() for name in names}) == len(names) == len(list(FOLDER.glob("*.md"))) - 1  # and the index


@each_drafter()
def test_every_field_is_there_and_none_is_unknown(drafter):
    assert set(drafter) == REQUIRED
    assert set(drafter["target"]) == {"name", "id", "revision", "num_layers", "kind"}
    assert drafter["target"]["kind"] in DATA["target_support"]
    assert drafter["dialect"] in DATA["dialects"]
    assert drafter["thinking"] in (None, "on", "off")
    assert set(drafter["limits"]) <= set(DATA["limits"])
    assert set(drafter["engines"]) <= set(build.ENGINES)
    assert drafter["license"] is None or set(drafter["license"]) == {"id", "name"}


@each_drafter()
def test_metadata_is_what_the_hub_takes(drafter):
    card = ModelCard.load(FOLDER / build.file_name(DATA, drafter))
    fields = card.data.to_dict()
    assert fields["library_name"] == "transformers"
    assert fields["pipeline_tag"] in ("text-generation", "robotics")
    assert "dflash" in fields["tags"]
    assert fields.get("base_model") == drafter["target"]["id"]
    assert fields.get("license") == (drafter["license"] or {}).get("id")
    if fields.get("license") == "other":  # the Hub asks for a name and a link then
        assert fields["license_name"]
        assert fields["license_link"].startswith("https://")
    for repo_id in filter(None, (drafter["id"], drafter["target"]["id"])):
        validate_repo_id(repo_id)
    assert ModelCard(str(card)).data.to_dict() == fields


@each_drafter()
def test_every_figure_has_a_public_source(drafter):
    for group in drafter["results"]:
        assert re.fullmatch(r"\[.+\]\(https://\S+\)", build.cite(DATA, drafter, group["source"]))
        points = len(group["axis"]["values"]) if group["axis"] else 0
        for task, *cells in group["rows"]:
            assert task
            assert [cell is None for cell in cells] in ([False, False], [False, True], [True, False])
            for cell in cells:
                values = cell if isinstance(cell, list) else [cell]
                assert len(values) == points or not isinstance(cell, list)
                assert all(value is None or value > 0 for value in values)


@each_drafter()
def test_every_statement_names_a_source_that_exists(drafter):
    sources = [
        *drafter["facts"],
        *(source for name in drafter["limits"] for source in DATA["limits"][name]["sources"]),
    ]
    verdicts = [build.engine_verdict(DATA, drafter, engine) for engine in build.ENGINES]
    sources += [verdict["source"] for verdict in verdicts if verdict["serves"] is not None or verdict["text"]]
    assert drafter["facts"]
    for source in sources:
        assert "https://" in build.cite(DATA, drafter, source)


def test_every_limit_with_a_number_names_a_source():
    without = [
        name for name, limit in DATA["limits"].items() if re.search(r"\d", limit["text"]) and not limit["sources"]
    ]
    assert without == []


def test_nothing_in_the_data_is_unused():
    text = json.dumps([DATA[name] for name in ("commands", "dialects", "drafters", "families", "limits")])
    assert [name for name in DATA["sources"] if f'"{name}"' not in text] == []
    assert set(DATA["limits"]) == {name for drafter in DRAFTERS for name in drafter["limits"]}
    assert set(DATA["dialects"]) == {drafter["dialect"] for drafter in DRAFTERS}
    assert set(DATA["families"]) == {dialect["family"] for dialect in DATA["dialects"].values()}
    assert set(DATA["target_support"]) == {drafter["target"]["kind"] for drafter in DRAFTERS}


@each_drafter(lambda drafter: drafter["target_layer_ids"] is not None)
def test_taps_ascend_and_end_below_the_targets_last_layer(drafter):
    ids, depth = drafter["target_layer_ids"], drafter["target"]["num_layers"]
    assert all(a < b for a, b in pairwise(ids))
    assert ids[0] >= 0
    if depth is not None:
        assert (ids[-1] < depth - 1) == (LAST_TAP not in drafter["limits"])
        assert ids[-1] < depth


@each_drafter(lambda drafter: drafter["sliding_layers"] is not None)
def test_windows_fit_the_layers(drafter):
    assert 0 <= drafter["sliding_layers"] <= drafter["num_layers"]
    assert (drafter["sliding_layers"] > 0) == (drafter["window"] is not None)


@each_drafter(is_said_to_load_and_has_a_shape)
def test_a_drafter_that_is_said_to_load_has_a_configuration_that_loads(drafter):
    """The published fields are accepted by this library's class wherever the card says that it reads them."""
    heads, groups, head_dim = drafter["heads"]
    names = {"block_size", "target_layer_ids", "mask_token_id", "hidden_size", "intermediate_size", "vocab_size"}
    config = DFlashConfig(
        **{name: drafter[name] for name in names},
        num_hidden_layers=drafter["num_layers"],
        num_target_layers=drafter["target"]["num_layers"],
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
    )
    assert config.target_layer_ids == drafter["target_layer_ids"]


@each_drafter()
def test_code_of_a_card_parses_and_proposes_what_the_block_gives(drafter):
    card = (FOLDER / build.file_name(DATA, drafter)).read_text(encoding="utf-8")
    family, dialect = build.family_of(DATA, drafter), DATA["dialects"][drafter["dialect"]]
    for code in code_blocks(card, "python"):
        ast.parse(code)
    for code in code_blocks(card, "bash"):
        for given in re.findall(r"--speculative-config '(.*)'", code):
            spec = json.loads(given.replace(": N}", ": null}"))
            assert spec["model"] == drafter["id"]
            assert spec["method"] == family["vllm"]
            given = None if dialect["states_proposals"] else build.num_proposals(DATA, drafter)
            assert spec.get("num_speculative_tokens") == given
        assert re.findall(r"--speculative-algorithm (\w+)", code) in ([], [family["sglang"]])
    assert "pip install dflash" not in card


@each_drafter()
def test_a_card_shows_our_code_unless_it_says_not_supported(drafter):
    card = (FOLDER / build.file_name(DATA, drafter)).read_text(encoding="utf-8")
    refused = build.library_verdict(DATA, drafter)[0] is False
    assert ("Not supported today: " in card) == refused
    assert (f'DFlashDraftModel.from_pretrained("{drafter["id"]}"' in card) == (not refused)


def test_every_stand_in_is_explained_where_it_is_used():
    """Promise: nobody has to guess what to write for `TARGET` or `N` in a snippet."""
    shown = 0
    for drafter in DRAFTERS:
        card = (FOLDER / build.file_name(DATA, drafter)).read_text(encoding="utf-8")
        for section in re.split(r"^##+ ", card, flags=re.MULTILINE):
            code = " ".join(re.findall(r"```.*?```", section, flags=re.DOTALL))
            for name in re.findall(r"\b(TARGET|N)\b", code):
                shown += 1
                assert f"`{name}` is " in section, (drafter["id"], section)
    assert shown > 10


# The model types of targets that are published with an image encoder, or have an indexer.
MODEL_TYPES = {
    "Kimi-K2": "kimi_k25",
    "Muse-Glimmer": "muse_glimmer",
    "Muse-Spark": "muse_spark",
    "Step-3.7": "step3p7",
    "GLM-5.1": "glm_moe_dsa",
    "GLM-5.2": "glm_moe_dsa",
    "gemma-4": "gemma4",
    "Qwen3.5": "qwen3_5",
}


@each_drafter(lambda drafter: drafter["target"]["name"].startswith(tuple(MODEL_TYPES)))
def test_a_card_loads_its_target_by_a_class_that_takes_it(drafter):
    """Promise: the auto class of the snippet is one that transformers maps the target's type in."""
    (model_type,) = (kind for name, kind in MODEL_TYPES.items() if drafter["target"]["name"].startswith(name))
    classes = {
        "AutoModelForCausalLM": MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "AutoModelForImageTextToText": MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    takes = {name for name, types in classes.items() if model_type in types}
    if not takes:
        pytest.skip(f"this transformers has no {model_type}")
    name = DATA["target_support"][drafter["target"]["kind"]]["auto_class"]
    assert name in takes
    card = (FOLDER / build.file_name(DATA, drafter)).read_text(encoding="utf-8")
    if build.library_verdict(DATA, drafter)[0] is not False:
        assert f"import {name}, AutoTokenizer\n" in card
        assert f"target = {name}.from_pretrained(" in card


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 has no GLM of this kind")
def test_targets_with_an_indexer_are_refused_as_the_cards_say():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 2}
    with torch.device("meta"):  # only its config is looked at
        target = AutoModelForCausalLM.from_config(AutoConfig.for_model("glm_moe_dsa", **sizes, num_hidden_layers=4))
    config = DFlashConfig(**sizes, num_hidden_layers=1, block_size=4, mask_token_id=63, num_target_layers=4)
    assert DATA["target_support"]["indexed"]["supported"] is False
    with pytest.raises(ValueError, match=r"GlmMoeDsaForCausalLM .*index.* DFlash would not be lossless on it"):
        check_pair(target, DFlashDraftModel(config))


@pytest.mark.parametrize(
    ("model_type", "loader"),
    [("nemotron_h", AutoModelForCausalLM), ("glm5_next", AutoModelForImageTextToText)],
)
def test_targets_with_a_state_are_refused_as_the_cards_say(model_type, loader):
    if model_type not in CONFIG_MAPPING_NAMES or transformers.__version__.startswith("4."):
        pytest.skip(f"this transformers has no {model_type} that can be asked")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 2}
    target_config = AutoConfig.for_model(model_type)
    text = target_config.get_text_config()
    for name, value in {**sizes, "num_key_value_heads": 2, "pad_token_id": 0}.items():
        setattr(text, name, value)
    with torch.device("meta"):  # only its config is looked at
        target = loader.from_config(target_config)
    depth = text.num_hidden_layers
    config = DFlashConfig(**sizes, num_hidden_layers=1, block_size=4, mask_token_id=63, num_target_layers=depth)
    assert DATA["target_support"]["stateful"]["supported"] is False
    with pytest.raises(ValueError, match=r"keeps a state of its text .* cannot be rolled back exactly"):
        check_pair(target, DFlashDraftModel(config))


def test_target_support_changes_in_one_place():
    """Whether recurrent targets run is one field: the cards of such targets follow it, and no other card does."""
    cards = []
    for supported in (False, True):
        changed = copy.deepcopy(DATA)
        changed["target_support"]["recurrent"]["supported"] = supported
        cards.append(build.pages(changed))
    moved = {name for name in cards[0] if cards[0][name] != cards[1][name]} - {"README.md"}
    assert moved <= {
        build.file_name(DATA, drafter) for drafter in DRAFTERS if drafter["target"]["kind"] == "recurrent"
    }
    assert "Not supported today" in cards[0]["Qwen3.5-4B-DFlash.md"]
    assert "DFlashDraftModel.from_pretrained" in cards[1]["Qwen3.5-4B-DFlash.md"]


@pytest.mark.skipif(transformers.__version__.startswith("4."), reason="transformers 4 rolls back no recurrent state")
def test_recurrent_targets_are_refused_exactly_where_the_cards_say_so():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 2, "head_dim": 16}
    target_config = AutoConfig.for_model(
        "qwen3_next",
        **sizes,
        num_hidden_layers=4,
        num_key_value_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=0,
    )
    target = AutoModelForCausalLM.from_config(target_config)
    config = DFlashConfig(
        **sizes, num_hidden_layers=1, num_key_value_heads=2, block_size=4, mask_token_id=63, num_target_layers=4
    )
    supported = DATA["target_support"]["recurrent"]["supported"]
    with contextlib.nullcontext() if supported else pytest.raises(ValueError, match="recurrent state"):
        check_pair(target, DFlashDraftModel(config))


def test_dflash2_is_supported_exactly_where_the_cards_say_so():
    """Its convolutions are in the model, or its fields are refused: the cards say which."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64, "num_attention_heads": 2, "head_dim": 16}
    dflash2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 4}
    block = {"block_size": 4, "mask_token_id": 63, "num_target_layers": 4}
    try:
        model = DFlashDraftModel(
            DFlashConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2, dflash_config={**block, **dflash2})
        )
    except ValueError:
        computed = False
    else:
        computed = any("attention_conv" in name for name in model.state_dict())
    assert DATA["dialects"]["dflash2"]["library"]["supported"] == computed


LAYERS = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rope_theta": 1e6,
    "model_type": "qwen3",
}
TAPS = {"mask_token_id": 63, "target_layer_ids": [1, 2]}
ZLAB = {**LAYERS, "block_size": 4, "num_target_layers": 5, "dflash_config": TAPS}
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla"}
DEEPSPEC = {**LAYERS, **TAPS, **MARKOV, "block_size": 4, "num_target_layers": 5, "architectures": ["Qwen3DSparkModel"]}
SPECULATORS = {
    "transformer_layer_config": LAYERS,
    "speculators_model_type": "dspark",
    "block_size": 4,
    "mask_token_id": 63,
    "aux_hidden_state_layer_ids": [2, 3],
    "draft_vocab_size": 32,
    **MARKOV,
}


def of_laguna(tensors):
    """The layer's projections in one tensor, a gate, and a norm for each tap."""
    prefix = "layers.0.self_attn."
    tensors[prefix + "qkv_proj.weight"] = torch.cat([tensors.pop(f"{prefix}{name}_proj.weight") for name in "qkv"])
    tensors[prefix + "g_proj.weight"] = torch.zeros(2, 32)
    tensors["aux_hidden_norms.0.weight"] = torch.ones(32)


def of_gemma(tensors):
    """Norms around the MLP, a scalar, and values that are the keys."""
    tensors["layers.0.pre_feedforward_layernorm.weight"] = torch.ones(32)
    tensors["layers.0.layer_scalar"] = torch.ones(1)
    del tensors["layers.0.self_attn.v_proj.weight"]


def write_tiny(folder, config, rearrange=None):
    """A checkpoint with `config` and the tensors of our drafter of this shape, `rearrange`d as another layout has them."""
    fields = {"block_size": 4, **config}
    tensors = dict(DFlashDraftModel(DFlashConfig(**portable_fields(fields))).state_dict())
    if rearrange:
        rearrange(tensors)
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


READ = {
    "jetspec": {**ZLAB, "dflash_config": {**TAPS, "causal_head": True}},
    "deepspec-dspark": DEEPSPEC,
    "specforge-dspark": {**ZLAB, "dflash_config": {**TAPS, **MARKOV, "projector_type": "dspark"}},
}
REFUSED = {
    "laguna": (ZLAB, of_laguna, "does not fill a DFlash drafter exactly"),
    "dspark_gemma4_12b_block7": (DEEPSPEC, of_gemma, "does not fill a DFlash drafter exactly"),
    "Dogacel/Qwen3-8B-DSpark": (
        {name: value for name, value in DEEPSPEC.items() if name != "block_size"},
        None,
        "holds no block_size",
    ),
}


def said_of(name):
    """The verdict of the cards on a layout, or on one drafter for itself."""
    own = [drafter["library"] for drafter in DRAFTERS if drafter["id"].endswith(name) and drafter["library"]]
    return (own[0] if own else DATA["dialects"][name]["library"])["supported"]


@pytest.mark.parametrize("name", READ)
def test_layouts_that_the_cards_call_read_are_read(name, tmp_path):
    """Promise: a tiny checkpoint in the layout loads, and its anchor and causality are those that the card says."""
    write_tiny(tmp_path, READ[name])
    config = DFlashDraftModel.from_pretrained(tmp_path).config
    assert said_of(name) is True
    assert config.sample_from_anchor == DATA["dialects"][name]["anchor_proposes"]
    assert bool(getattr(config, "is_causal", None)) == (name == "jetspec")


@pytest.mark.parametrize("name", REFUSED)
def test_layouts_that_the_cards_call_refused_are_refused(name, tmp_path):
    """Promise: the reason that the card gives is the library's own; a reader that learns the layout changes the card."""
    config, rearrange, reason = REFUSED[name]
    write_tiny(tmp_path, config, rearrange)
    assert said_of(name) is False
    with pytest.raises(ValueError, match=reason):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["modelopt-sinks", "modelopt-dspark-sinks"])
def test_attention_sinks_are_refused_as_the_cards_say(name):
    assert said_of(name) is False
    with pytest.raises(ValueError, match="attention_sink_bias=True is not supported"):
        DFlashConfig(**portable_fields({**DEEPSPEC, "attention_sink_bias": True}))


def test_a_mask_row_of_its_own_is_refused_as_the_cards_say(tmp_path):
    write_tiny(tmp_path, ZLAB)
    (tmp_path / "mask_embedding.pt").write_bytes(b"")
    assert said_of("dflash2-mask") is said_of("mimo") is False
    with pytest.raises(ValueError, match=r"mask_embedding\.pt"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize(("num_proposals", "proposes"), [(3, False), (4, True)])
def test_the_number_of_proposals_says_whether_the_anchor_is_silent(num_proposals: int, proposes: bool):
    """Known bug: a speculators DSpark config without `sample_from_anchor` was read one position off."""
    fields = {**SPECULATORS, "speculators_config": {"proposal_methods": [{"speculative_tokens": num_proposals}]}}
    assert portable_fields(fields)["sample_from_anchor"] is proposes
    assert said_of("speculators-dspark")
    assert portable_fields({**fields, "sample_from_anchor": not proposes})["sample_from_anchor"] is not proposes


@pytest.mark.parametrize(
    "stated", [[], "?", {"proposal_methods": []}, {"proposal_methods": [{"speculative_tokens": "3"}]}]
)
def test_what_says_nothing_of_the_anchor_is_no_fault(stated):
    """The default of speculators' DSpark holds: the anchor proposes."""
    assert portable_fields({**SPECULATORS, "speculators_config": stated})["sample_from_anchor"] is True
