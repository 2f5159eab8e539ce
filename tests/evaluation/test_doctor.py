"""`dflash doctor`: each planted fault is named first with its gain, and a healthy pair gets no advice."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PlacedDrafter, greedy, make_drafter, make_target, make_tokenizer

from dflash import DFlashDraftModel
from dflash.checkpoints import Card, embedded_path, heldout_problems, load_embedded_pair
from dflash.cli import loading
from dflash.common.cards import stated_taus
from dflash.common.fingerprints import model_fingerprint
from dflash.evaluation import Setup, chat_encoder, run_doctor


QUESTIONS = [problem.question for problem in heldout_problems()[:2]]
DIALOGUES = [[{"role": "user", "content": question}] for question in QUESTIONS]


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any, Any]:
    """The embedded target, drafter and tokenizer; read-only."""
    return load_embedded_pair()


def planted(folder: Path, **fields: Any) -> Path:
    """A copy of the embedded drafter whose config.json has other fields, in both places."""
    shutil.copytree(embedded_path("tiny-DFlash"), folder)
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config["dflash_config"]):
        part.update({name: value for name, value in fields.items() if name in part})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_healthy_pair_gets_no_advice(pair: Any) -> None:
    """Promise: every change accepts less or the same, and the loaded models are afterwards as they were."""
    target, drafter, tokenizer = pair
    before = [(model_fingerprint(model), model.config.to_dict()) for model in (target, drafter)]
    result = run_doctor(target, Setup(drafter), tokenizer, DIALOGUES, 12)
    assert (result["advice"], result["observations"]) == ([], [])
    healthy, template, *others = result["summary"]
    assert (healthy["tau"] > 5, len(healthy["accepted_at"])) == (True, 15)
    assert (template["tau"], template["error"]) == (None, "the texts end before a draft")
    kinds = [row["change"].split()[0] for row in others]
    assert kinds == ["target_layer_ids"] * 2 + ["mask_token_id"] * 2 + ["sample_from_anchor"]
    assert all(row["tau"] <= healthy["tau"] and row["steps"] <= healthy["steps"] for row in others)
    assert before == [(model_fingerprint(model), model.config.to_dict()) for model in (target, drafter)]


def test_two_faults_are_named_in_order_with_their_gains(tmp_path: Path, dflash_command: Any) -> None:
    """Promise: a wrong mask token and taps off by one, in a saved copy; the terminal, the file and the JSON say the same."""
    drafter = planted(tmp_path / "tiny-DFlash", mask_token_id=7, target_layer_ids=[0, 1, 2, 3, 4])
    (tmp_path / "prompts.txt").write_text("\n".join(QUESTIONS))
    loading.say_once.cache_clear()
    words = ["doctor", embedded_path("tiny-target"), drafter, "--prompts", tmp_path / "prompts.txt"]
    words += ["--limit", 1, "--max-new-tokens", 24, "--dtype", "float32", "--output", tmp_path / "doctor.json"]
    status, out, err = dflash_command(*words)
    assert status == 0, err
    result = json.loads((tmp_path / "doctor.json").read_text())
    first, second = result["advice"]
    assert (first["change"], second["change"]) == ("mask_token_id 3", "target_layer_ids [1, 2, 3, 4, 5]")
    assert first["tau_before"] < 2 < first["tau"] == second["tau_before"] < second["tau"]
    (as_it_is,) = (line for line in out.splitlines() if line.startswith("as it is"))
    assert as_it_is.count("%") == 5  # at 1, 2, 4, 8 and the last position
    said = " ".join(out.split())
    gains = [f"tau {one['tau_before']:.2f} → {one['tau']:.2f}" for one in result["advice"]]
    assert (
        f"1. mask_token_id 3: {gains[0]} (<|mask|>; config.json says 7) 2. target_layer_ids [1, 2, 3, 4, 5]: {gains[1]}"
        in said
    )
    assert "Published tau: " in said
    published = json.loads((embedded_path("tiny-DFlash") / "training.json").read_text())["figures"][
        "heldout_templates"
    ]
    assert f"{published['tau']:.2f} (held-out templates (wordings and stories))" in said
    assert "proposes 15 tokens at once: at most 16 tokens a step" in err
    assert {tuple(row["after"]) for row in result["summary"]} == {
        (), ("mask_token_id 3",), ("mask_token_id 3", "target_layer_ids [1, 2, 3, 4, 5]")
    }  # fmt: skip


def test_a_wrong_rope_and_a_dtype_that_overflows_are_named(pair: Any, tmp_path: Path) -> None:
    """Promise: the target's base is tried where the drafter's differs, and float32 where it was loaded in less."""
    rope = {"rope_theta": 100.0, "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
    drafter = DFlashDraftModel.from_pretrained(planted(tmp_path / "tiny-DFlash", **rope), dtype=torch.float16).eval()
    drafter.layers[0].mlp.up_proj.weight.data *= 4096
    drafter.layers[0].mlp.down_proj.weight.data /= 4096
    half = model_fingerprint(drafter)
    result = run_doctor(pair[0], Setup(drafter), pair[2], DIALOGUES[:1], 12)
    assert [one["change"] for one in result["advice"]] == ["drafter in float32", "rope_theta 10000"]
    assert result["advice"][0]["reason"] == "it was loaded in float16"
    assert (drafter.dtype, model_fingerprint(drafter)) == (torch.float16, half)
    assert "NaN or infinite" in result["summary"][0]["error"]


@pytest.mark.parametrize(("template", "thinking", "change"), [
    (True, True, "thinking on"), (True, False, "prompts with the chat template")
])  # fmt: skip
def test_prompts_of_another_kind_than_those_of_the_training_are_named(
    template: bool, thinking: bool, change: str
) -> None:
    """Promise: the other thinking mode, and a template that was dropped."""
    target, tokenizer = make_target(), make_tokenizer()
    dialogue = [{"role": "user", "content": "How many?"}]
    drafter = PlacedDrafter(target)
    trained = chat_encoder(tokenizer, thinking, template)(dialogue)
    drafter.follow([greedy(target, trained)], [4, 2, 3])
    setup = Setup(drafter, chat_template=change.startswith("thinking"))
    result = run_doctor(target, setup, tokenizer, [dialogue], 16)
    assert result["advice"][0]["change"] == change
    assert result["advice"][0]["tau"] > 2


def test_a_change_that_the_template_refuses_is_a_trial_that_says_so(pair: Any) -> None:
    """Bug: a template that raises for the other thinking mode ended the doctor after the pair was measured."""
    target, drafter, tokenizer = pair
    tokenizer = copy.deepcopy(tokenizer)
    refusal = "{% if enable_thinking %}{{ raise_exception('no thinking here') }}{% endif %}"
    tokenizer.chat_template = refusal + tokenizer.chat_template
    healthy, thinking, *_ = run_doctor(target, Setup(drafter), tokenizer, DIALOGUES[:1], 4)["summary"]
    assert healthy["tau"] > 1
    assert (thinking["change"], thinking["tau"]) == ("thinking on", None)
    assert "no thinking here" in thinking["error"]


def test_what_cannot_be_tried_is_said() -> None:
    """Promise: another target by name, weights or revision, a quantised one, no template, and texts beyond the training."""
    target, tokenizer = make_target(), make_tokenizer()
    tokenizer.chat_template = None
    target.config._commit_hash = "def"
    facts = {"target": {"fingerprint": "0", "revision": "abc"}, "settings": {"max_length": 12}}
    card = Card(Path(), {"base_model": ["Qwen/Qwen3-8B"]}, "", facts)
    drafter = PlacedDrafter(target)
    text = chat_encoder(tokenizer)(dialogue := [{"role": "user", "content": "How many?"}])  # 9 tokens
    drafter.follow([greedy(target, text)], [2] * 12 + [0] * 500)
    ask = target, Setup(drafter), tokenizer, [dialogue], 16
    weights, name, template, length = run_doctor(*ask, card, {"target": "me/Qwen3-8B-tuned"})["observations"]
    assert "weights are not those that the drafter was trained for: load revision abc" in weights
    assert name.startswith("The card names Qwen/Qwen3-8B as the target, and this is me/Qwen3-8B-tuned")
    assert "no chat template" in template
    assert "trained on up to 12 tokens: tau is 3.00 before and 1.00 beyond" in length
    target.config.quantization_config, facts["settings"]["max_length"] = {"quant_method": "gptq"}, 512
    quantised, revision, _ = run_doctor(*ask, card, {"target": "other/qwen3-8b"})["observations"]
    assert "quantised (gptq)" in quantised
    assert revision == "The drafter was trained for revision abc of the target, and this is def."


def test_acceptance_is_read_where_cards_state_it() -> None:
    """Promise: a training's best point, a model index, tables by heading, sentences; and a speed-up is none of them."""
    facts = {"best_step": 2, "curve": [{"step": 1, "tau": 2.0}, {"step": 2, "tau": 3.5}]}
    metrics = [{"type": "acceptance_length", "value": 5.25}, {"type": "speedup", "value": 4.0}]
    fields = {"model-index": [{"results": [{"dataset": {"name": "GSM8K"}, "metrics": metrics}]}]}
    text = """
The mean acceptance length is 6.54, at 4.91x.

| task | speed-up | τ | acceptance length, T = 1 |
|---|---|---|---|
| MATH-500 | 6.09x | **7.84** | 6.67 |
| none | 1.0x | - | |

| step | loss | tau on 4 held-out prompts |
|---|---|---|
| 1 | 0.5 | 2.00 |
"""
    assert stated_taus(fields, text, facts) == [
        ("held-out prompts of its training", 3.5), ("GSM8K", 5.25), ("said in the text", 6.54), ("MATH-500", 7.84),
        ("MATH-500, acceptance length, T = 1", 6.67),
    ]  # fmt: skip
    assert stated_taus({}, "# tiny", {}) == []


@pytest.mark.parametrize(
    "index",
    [
        ["x"],
        "x",
        [
            {
                "results": [
                    "x",
                    {"dataset": "GSM8K", "metrics": [{"type": "tau", "value": "7.87x"}, {"type": "tau"}, "x"]},
                ]
            }
        ],
    ],
)
def test_a_foreign_model_index_is_skipped(index: Any) -> None:
    assert stated_taus({"model-index": index}, "", {}) == []


def test_the_card_is_read_before_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: what is wrong with a card is said at once; nothing is measured first, which takes minutes."""

    def refuse(*_: Any) -> Any:
        raise ValueError("the card")

    monkeypatch.setattr("dflash.evaluation.doctor.stated_taus", refuse)
    with pytest.raises(ValueError, match="the card"):
        run_doctor(None, Setup(None), None, [])


def test_the_depth_is_logged_once(tiny_target: Any, prompt_ids: Any, caplog: Any) -> None:
    """Promise: who asks for INFO sees block, drafts a step and tree, once for each drafter and request."""
    drafter = make_drafter()
    drafter.name_or_path = "me/logged-DFlash"
    with caplog.at_level("INFO", logger="dflash.model.generation_dflash"):
        for block_size in (6, 6, 5):
            drafter.spec_generate(prompt_ids, target=tiny_target, max_new_tokens=2, block_size=block_size)
    said = "me/logged-DFlash: block_size={}, max_draft_tokens=None, draft_tree=False"
    assert [record.getMessage() for record in caplog.records] == [said.format(6), said.format(5)]
