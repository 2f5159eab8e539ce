"""A pair's folder and many texts: what loads the folder and calls transformers' continuous batching gets drafted texts."""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    Qwen3ForCausalLM,
)
from transformers.generation.continuous_batching import continuous_api
from transformers.generation.continuous_batching.requests import GenerationOutput
from transformers.utils.logging import warning_once

from dflash import BatchManager, BatchOutput, draft_batches
from dflash.checkpoints import DRAFTER_NAME, TARGET_NAME, embedded_path, heldout_problems, make_pair


TARGET, DRAFTER = embedded_path(TARGET_NAME), embedded_path(DRAFTER_NAME)
SETTINGS: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
needs_5 = pytest.mark.skipif(
    not hasattr(GenerationOutput, "is_finished"), reason="transformers 4 waits forever for a request that failed"
)


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()


def load_by_name(folder: Path) -> Any:
    """As `transformers serve` and trl load a model: by the class that its config names."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model_class = getattr(transformers, config.architectures[0])
    return model_class.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded pair as one folder; read-only."""
    return make_pair(TARGET, DRAFTER, tmp_path_factory.mktemp("pairs") / "pair")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load(folder)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TARGET)


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    chats = [[{"role": "user", "content": problem.question}] for problem in heldout_problems()[:3]]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    ids: list[list[int]] = tokenizer(texts)["input_ids"]
    return ids


@pytest.fixture(scope="module")
def truths(prompts: list[list[int]]) -> list[list[int]]:
    """What plain `generate` of the target writes."""
    target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    texts = [target.generate(torch.tensor([prompt]), **SETTINGS)[0, len(prompt) :] for prompt in prompts]
    return [text.tolist() for text in texts]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The calls of the target's own method, which returns "plain"."""
    calls: list[Any] = []

    def init_continuous_batching(self: Any, *args: Any, **kwargs: Any) -> str:
        calls.append((args, kwargs))
        return "plain"

    monkeypatch.setattr(continuous_api.ContinuousMixin, "init_continuous_batching", init_continuous_batching)
    warning_once.cache_clear()
    return calls


@needs_5
def test_a_trainers_generate_batch_is_drafted(model: Any, prompts: list[list[int]], truths: list[list[int]]) -> None:
    """The call of TRL's GRPO and RLOO with `use_transformers_continuous_batching`, which read `generated_tokens`."""
    config = GenerationConfig(**SETTINGS)
    outputs = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    assert [output.generated_tokens for output in outputs.values()] == truths
    assert all(isinstance(output, BatchOutput) for output in outputs.values())
    lengths = [length for output in outputs.values() for length in output.acceptance_lengths]
    assert sum(lengths) / len(lengths) > 3


@needs_5
def test_a_text_without_a_length_ends_at_its_stop_token(model: Any, prompts: list[list[int]], truths: Any) -> None:
    """The call of lighteval with `continuous_batching=True`: the model's own config, which names no length."""
    outputs = model.generate_batch(inputs=prompts[:1], generation_config=model.generation_config)
    [output] = outputs.values()
    assert output.generated_tokens[:16] == truths[0]
    assert output.generated_tokens[-1] == SETTINGS["eos_token_id"]
    assert len(output.generated_tokens) > 16


@needs_5
def test_a_servers_manager_streams_cancels_and_answers(
    model: Any, tokenizer: Any, prompts: list[list[int]], truths: list[list[int]]
) -> None:
    """What `transformers serve --continuous-batching` does with a model: several requests at once, through its own class."""
    serving = pytest.importorskip("transformers.cli.serving.utils")
    config = GenerationConfig(**SETTINGS, use_cache=False)

    async def serve() -> tuple[Any, str]:
        server = serving.CBGenerateManager()
        server.init_cb(model, config)
        assert isinstance(server._cb, BatchManager)
        inputs = [{"input_ids": prompt} for prompt in prompts]
        queue, streamer = server.generate_streaming(model, tokenizer, inputs[0], config, "streamed")
        _, cancelled = server.generate_streaming(model, tokenizer, inputs[1], config, "cancelled")
        cancelled.cancel()
        answer = await server.generate_non_streaming(model, tokenizer, inputs[2], config, "answered")
        parts = []
        while (part := await queue.get()) is not None:
            parts.append(part)
        assert streamer.total_tokens == len(truths[0])
        assert server.is_alive()
        server.stop()
        return answer, "".join(parts)

    (text, num_prompt, token_ids), streamed = asyncio.run(serve())
    assert (num_prompt, token_ids) == (len(prompts[2]), truths[2])
    assert text == tokenizer.decode(truths[2], skip_special_tokens=True)
    assert streamed == tokenizer.decode(truths[0], skip_special_tokens=True)


@needs_5
def test_a_request_that_fails_is_reported_and_the_others_written(
    model: Any, prompts: list[list[int]], truths: list[list[int]]
) -> None:
    bad = [model.config.vocab_size]
    outputs = list(model.generate_batch([prompts[0], bad, prompts[1]], GenerationConfig(**SETTINGS)).values())
    assert [output.generated_tokens for output in outputs] == [truths[0], [], truths[1]]
    assert "outside the target's vocabulary" in outputs[1].error


@needs_5
def test_what_cannot_be_drafted_is_plain_with_one_warning(model: Any, plain: list[Any], caplog: Any) -> None:
    config = GenerationConfig(**SETTINGS, num_return_sequences=2, num_beams=2)
    for _ in range(2):
        assert model.init_continuous_batching(generation_config=config) == "plain"
    assert plain == 2 * [((), {"generation_config": config})]
    warnings = [record for record in caplog.records if "Generated without drafts" in record.message]
    assert len(warnings) == 1
    assert "num_return_sequences=2" in warnings[0].message


@needs_5
def test_settings_that_a_batch_cannot_have_are_left_out(
    folder: Path, tmp_path: Path, plain: list[Any], caplog: Any
) -> None:
    own = make_pair(TARGET, DRAFTER, tmp_path / "pair", settings={"draft_tree": 8})
    manager = load(own).init_continuous_batching(GenerationConfig(**SETTINGS))
    assert isinstance(manager, BatchManager)
    assert not plain
    assert any("Drafted without the settings" in record.message for record in caplog.records)


def test_without_the_package_the_methods_are_the_models_own(
    folder: Path, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "dflash", None)
    bare = load(folder)
    assert "init_continuous_batching" not in vars(bare)
    assert bare.init_continuous_batching() == "plain"
    assert "generate" in vars(bare)


@needs_5
def test_a_package_older_than_the_folder_writes_plain_batches_with_one_warning(
    tmp_path: Path, plain: list[Any], caplog: Any
) -> None:
    own = make_pair(TARGET, DRAFTER, tmp_path / "pair")
    content = json.loads((own / "dflash.json").read_text())
    (own / "dflash.json").write_text(json.dumps({**content, "version": "99.0.0"}))
    model = load(own)
    for _ in range(2):
        assert model.init_continuous_batching() == "plain"
    warnings = [record for record in caplog.records if "the code in its folder" in record.message]
    assert len(warnings) == 1


@needs_5
def test_a_tool_that_loads_by_the_configs_class_is_drafted(
    folder: Path, prompts: list[list[int]], truths: list[list[int]]
) -> None:
    outputs = load_by_name(folder).generate_batch(prompts, generation_config=GenerationConfig(**SETTINGS))
    assert [output.generated_tokens for output in outputs.values()] == truths
    assert all(isinstance(output, BatchOutput) for output in outputs.values())


@needs_5  # transformers 4 trusts a local folder's `generate`
def test_without_trust_the_folder_is_the_target_alone(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, dtype=torch.float32)
    assert type(model) is Qwen3ForCausalLM
    assert not {"generate", "init_continuous_batching"} & set(vars(model))


def test_a_saved_model_is_the_target_alone(model: Any, tmp_path: Path) -> None:
    assert model.config.architectures == ["Qwen3ForCausalLM"]
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "auto_map" not in config
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True)
    assert "generate" not in vars(saved)


def test_an_empty_model_of_the_config_is_the_targets(folder: Path) -> None:
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    assert type(empty) is Qwen3ForCausalLM
    assert config.architectures[0] == "AutoModelForCausalLM"  # the caller's config is not changed


@needs_5
def test_a_model_loaded_by_its_own_class_is_drafted_after_one_call(folder: Path) -> None:
    model = Qwen3ForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    assert "init_continuous_batching" not in vars(model)
    assert isinstance(draft_batches(model).init_continuous_batching(GenerationConfig(**SETTINGS)), BatchManager)


def test_a_target_with_code_of_its_own_keeps_it(folder: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(TARGET, tmp_path / "target"))
    config = json.loads((own / "config.json").read_text())
    own_map = {"AutoModelForCausalLM": "modeling_own.OwnModel"}
    (own / "config.json").write_text(json.dumps({**config, "auto_map": own_map}))
    pair = make_pair(own, DRAFTER, tmp_path / "pair")
    written = json.loads((pair / "config.json").read_text())
    assert written["auto_map"] == own_map
    assert written["architectures"] == config["architectures"]


@needs_5
def test_each_model_has_its_own_door(folder: Path) -> None:
    """A second load of the same folder, and a copy."""
    first, second = load(folder), load(folder)
    third = copy.deepcopy(first)
    for own in (first, second, third):
        assert own.init_continuous_batching.keywords["model"] is own
        assert own.generate.keywords["model"] is own


def test_a_model_that_is_no_pair_is_refused() -> None:
    target = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    with pytest.raises(ValueError, match="is no pair"):
        draft_batches(target)


def test_a_folder_that_is_copied_is_drafted(folder: Path, tmp_path: Path) -> None:
    moved = Path(shutil.copytree(folder, tmp_path / "moved"))
    assert "init_continuous_batching" in vars(load(moved))


@needs_5
def test_keywords_of_a_manager_win_over_the_pairs_settings(folder: Path, tmp_path: Path) -> None:
    own = load(
        make_pair(TARGET, DRAFTER, tmp_path / "pair", settings={"prompt_lookup_num_tokens": 3, "block_size": 4})
    )
    manager = own.init_continuous_batching(GenerationConfig(**SETTINGS), prompt_lookup_num_tokens=5)
    assert manager._batch.options.prompt_lookup_num_tokens == 5
    assert manager._batch.request.block_size == 4


@needs_5
def test_a_model_in_training_is_evaluated(folder: Path) -> None:
    """Promise: as with transformers' own manager, no text has dropout."""
    own = load(folder).train()
    assert isinstance(own.init_continuous_batching(GenerationConfig(**SETTINGS)), BatchManager)
    assert not own.training
