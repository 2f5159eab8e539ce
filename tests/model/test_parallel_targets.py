"""Targets that live in more than one place: offloaded by accelerate, or split over processes by transformers."""

from __future__ import annotations

import json
import socket
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from processes import Forked
from tiny_models import PAD_TOKEN_ID, ScriptedDrafter, make_drafter, make_prompt, make_target
from transformers import AutoModelForCausalLM, PreTrainedModel

from dflash import DFlashDraftModel, spec_generate


VOCAB = 8  # so few words that a random drafter is right now and then, by what it reads off the target
NUM_PROCESSES = 2
MODES = ["drafted at random", "drafted from a script", "sampled"]


def whole_target() -> PreTrainedModel:
    """A target in one place."""
    return make_target("qwen3", num_hidden_layers=2, vocab_size=VOCAB)


def drafter_for_it(seed: int = 7) -> DFlashDraftModel:
    """A random drafter; what it proposes depends on the states that it is given."""
    return make_drafter(
        seed, vocab_size=VOCAB, mask_token_id=VOCAB - 1, num_target_layers=2, target_layer_ids=[0], num_hidden_layers=1
    )


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Two prompts of different lengths [2, S], padded on the left, and their mask."""
    rows = [make_prompt(length, seed=length, vocab_size=VOCAB) for length in (7, 4)]
    ids = torch.cat([rows[0], torch.nn.functional.pad(rows[1], (3, 0), value=PAD_TOKEN_ID)])
    return ids, (ids != PAD_TOKEN_ID).long()


@cache
def truths() -> list[torch.Tensor]:
    """The texts of both prompts, without their padding."""
    ids, whole = batch()[0], whole_target()
    return [
        whole.generate(ids[row : row + 1, start:], do_sample=False, max_new_tokens=40)[0]
        for row, start in ((0, 0), (1, 3))
    ]


def written(target: PreTrainedModel) -> dict[str, Any]:
    """What `target` writes and accepts in every mode, as JSON holds it."""
    ids, mask = batch()
    options: dict[str, Any] = {"attention_mask": mask, "return_dict_in_generate": True}
    whole = whole_target()
    small = {"num_hidden_layers": 1, "target_layer_ids": [0], "mask_token_id": VOCAB - 1}
    outputs = [
        spec_generate(drafter_for_it(), target, ids, temperature=0.0, max_new_tokens=32, **options),
        spec_generate(
            ScriptedDrafter(whole, truths(), [5, 0, 3, 1], **small), target, ids, temperature=0.0, max_new_tokens=24, **options
        ),
        # Every process draws the same noise: from a generator of the same seed, as they have no stream in common.
        spec_generate(
            drafter_for_it(), target, ids, temperature=1.2, top_p=0.9, max_new_tokens=24,
            generator=torch.Generator().manual_seed(4), **options,
        ),
    ]  # fmt: skip
    texts = {
        mode: {"sequences": output.sequences.tolist(), "acceptance_lengths": output.acceptance_lengths}
        for mode, output in zip(MODES, outputs, strict=True)
    }
    return {**texts, "plain": target.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=32).tolist()}


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What the target writes in one place, which is what plain `generate` writes."""
    text = written(whole_target())
    assert text[MODES[0]]["sequences"] == text["plain"]
    for mode in MODES:
        assert max(map(max, text[mode]["acceptance_lengths"])) > 1, f"nothing is accepted: {mode}"
    return text


# Accelerate.

EVERY_MODULE = ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm", "model.rotary_emb", "lm_head"]
ON_DISK = {"layers": {"model.layers.1"}, "head": {"lm_head"}, "all": set(EVERY_MODULE)}


@pytest.mark.parametrize("on_disk", ON_DISK)
def test_target_loaded_onto_cpu_and_disk(alone: dict[str, Any], tmp_path: Path, on_disk: str) -> None:
    """Promise: a `device_map` that leaves modules on disk, the embedding among them, changes neither text nor acceptance."""
    pytest.importorskip("accelerate")
    whole_target().save_pretrained(tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(
        tmp_path / "target",
        device_map={name: "disk" if name in ON_DISK[on_disk] else "cpu" for name in EVERY_MODULE},
        offload_folder=tmp_path / "offload",
        dtype=torch.float32,
    ).eval()
    places = {parameter.device.type for parameter in target.parameters()}
    assert "meta" in places, "nothing is offloaded"
    assert written(target) == alone


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_target_offloaded_whole(alone: dict[str, Any], tmp_path: Path, place: str) -> None:
    """Promise: also where not one weight stays with the target between calls."""
    accelerate = pytest.importorskip("accelerate")
    target = whole_target()
    if place == "cpu":
        accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(target, str(tmp_path), execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in target.parameters()} == {"meta"}
    assert written(target) == alone


@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["own head", "tied head"])
def test_raw_embeddings_of_an_offloaded_target(tmp_path: Path, is_tied: bool, place: str) -> None:
    """Promise: a drafter that reads raw embeddings, of a target whose module scales them, gets those of a whole target.

    An embedding whose weight is on "meta" between calls raised `NotImplementedError`.
    """
    accelerate = pytest.importorskip("accelerate")
    target = FAMILIES["gemma3"].make(vocab_size=VOCAB, tie_word_embeddings=is_tied)
    shape = {"vocab_size": VOCAB, "mask_token_id": VOCAB - 1, "num_hidden_layers": 1}
    drafter = make_drafter(7, input_embedding_scale=0.5, **shape)
    ids, mask = batch()

    def everything() -> tuple[Any, ...]:
        embeddings = drafter.embed(ids, target.get_input_embeddings())
        asked = {"attention_mask": mask, "max_new_tokens": 32, "return_dict_in_generate": True}
        output = spec_generate(drafter, target, ids, temperature=0.0, prompt_lookup_num_tokens=0, **asked)
        return embeddings.tolist(), output.sequences.tolist(), output.acceptance_lengths

    weight = target.get_input_embeddings().weight
    expected = everything()
    assert expected[0] == (0.5 * weight[ids]).tolist()
    assert max(map(max, expected[2])) > 1, "nothing is accepted"
    if place == "cpu":
        accelerate.cpu_offload(target, execution_device=torch.device("cpu"))
    else:
        accelerate.disk_offload(target, str(tmp_path), execution_device=torch.device("cpu"))
    assert target.get_input_embeddings().weight.device.type == "meta"
    assert everything() == expected
    assert target.get_input_embeddings().weight.device.type == "meta", "the weight stays loaded"


# Tensor parallel.


def test_target_split_over_two_processes(alone: dict[str, Any], tmp_path: Path) -> None:
    """Promise: with torchrun's variables, `tp_plan="auto"` and a drafter in every process, each writes the text of one process."""
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this torch has no gloo backend")
    target = whole_target()
    target.save_pretrained(tmp_path / "target")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    torchrun = meeting | dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(NUM_PROCESSES))
    started = [
        Forked(lambda: one_process(tmp_path), **torchrun, **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)))
        for rank in range(NUM_PROCESSES)
    ]
    for ended in [process.finish() for process in started]:
        assert ended.returncode == 0, ended.stderr[-3000:]
    for rank in range(NUM_PROCESSES):
        said = json.loads((tmp_path / f"rank{rank}.json").read_text())
        heads = target.config.num_attention_heads
        assert said.pop("local_heads") == heads // NUM_PROCESSES, "the target is not split"
        assert said == alone, rank


def one_process(folder: Path) -> None:
    """What torchrun would start: writes this process's texts beside the target."""
    target = AutoModelForCausalLM.from_pretrained(folder / "target", tp_plan="auto", dtype=torch.float32).eval()
    weight: Any = target.model.layers[0].self_attn.q_proj.weight
    said = {"local_heads": weight.to_local().shape[0] // target.config.head_dim, **written(target)}
    rank = torch.distributed.get_rank()
    (folder / f"rank{rank}.json").write_text(json.dumps(said))
