"""A pair's folder in tools that call `generate`, each beside the target alone: the same text, and drafted.

    pip install "transformers[serving]" openai lm-eval lighteval trl
    python examples/tools/clients.py            # or: … pipeline serve lm_eval lighteval trl --output tools.json

It uses the embedded pair in float32, on a CPU and without a download. A tool that is not installed is skipped by name.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch

from dflash.checkpoints import DRAFTER_NAME, TARGET_NAME, embedded_path, heldout_problems, make_pair, save_pair
from dflash.common.provenance import record, write_result


TARGET = embedded_path(TARGET_NAME)
OPTIONS: dict[str, Any] = {"trust_remote_code": True, "dtype": "float32"}
CHATS = [[{"role": "user", "content": problem.question}] for problem in heldout_problems()[:8]]


def same(drafted: Any, plain: Any) -> str:
    """How many of two lists of texts are identical."""
    equal = [one == other for one, other in zip(drafted, plain, strict=True)]
    return f"{sum(equal)} of {len(equal)} texts identical"


def pipeline(pair: Path) -> str:
    """Chats one by one and in padded batches of four."""
    from transformers import pipeline as make

    told = []
    for batch_size in (1, 4):
        written, taus = [], []
        for folder in (pair, TARGET):
            writer = make("text-generation", str(folder), **OPTIONS)
            writer.tokenizer.padding_side = "left"
            written.append(writer(CHATS, batch_size=batch_size, max_new_tokens=96, do_sample=False))
            taus.append(getattr(writer.model, "dflash_stats", {}).get("tau"))
        told.append(f"batches of {batch_size}: {same(*written)}, tau of the last {taus[0]:.2f}")
    return "; ".join(told)


def served(**options: Any) -> tuple[Any, Any]:
    """A running `transformers serve`, and a client of it."""
    import openai
    from transformers.cli.serve import Serve

    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    server = Serve(trust_remote_code=True, device="cpu", dtype="float32", port=port, non_blocking=True, **options)
    return server, openai.OpenAI(base_url=f"http://localhost:{port}/v1", api_key="none", max_retries=20)


def serve(pair: Path) -> str:
    """`transformers serve` and the openai client: plain, streamed, two at once, one that cannot be drafted, the target."""
    server, client = served()

    def ask(chat: Any, folder: Path = pair, **options: Any) -> str:
        asked = {"messages": chat, "max_tokens": 96, "temperature": 0.0, **options}
        return client.chat.completions.create(model=str(folder), **asked).choices[0].message.content

    def stream(chat: Any) -> str:
        asked: dict[str, Any] = {"messages": chat, "max_tokens": 96, "temperature": 0.0, "stream": True}
        chunks = client.chat.completions.create(model=str(pair), **asked)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)

    try:
        drafted, streamed = [ask(chat) for chat in CHATS], [stream(chat) for chat in CHATS]
        with ThreadPoolExecutor(2) as two:
            at_once = list(two.map(ask, CHATS))
        tau = server._model_manager.loaded_models[str(pair)].model.dflash_stats["tau"]
        beams = json.dumps({"num_beams": 2, "max_new_tokens": 96})
        undrafted = [ask(chat, extra_body={"generation_config": beams}) for chat in CHATS[:2]]
        plain = [ask(chat, TARGET) for chat in CHATS]
        wide = [ask(chat, TARGET, extra_body={"generation_config": beams}) for chat in CHATS[:2]]
        again = [ask(chat) for chat in CHATS]
    finally:
        server.kill_server()
    told = {"plain": drafted, "streamed": streamed, "two at once": at_once, "after another model": again}
    return "; ".join(f"{name}: {same(texts, plain)}" for name, texts in told.items()) + (
        f"; beams: {same(undrafted, wide)}; tau of the last {tau:.2f}"
    )


def serve_batches(pair: Path) -> str:
    """`transformers serve --continuous-batching`: eight at once, and eight of which every other one is cancelled."""
    written = []
    for folder in (pair, TARGET):
        server, client = served(continuous_batching=True)
        options: dict[str, Any] = {"model": str(folder), "max_tokens": 96, "temperature": 0.0}

        def stream(number: int, is_cancelled: bool = False, client: Any = client, options: Any = options) -> str:
            chunks = client.chat.completions.create(messages=CHATS[number], stream=True, **options)
            text = ""
            for chunk in chunks:
                text += chunk.choices[0].delta.content or "" if chunk.choices else ""
                if is_cancelled and text:
                    chunks.close()
                    return text
            return text

        def ask(number: int, client: Any = client, options: Any = options) -> str:
            answer = client.chat.completions.create(messages=CHATS[number], **options)
            return answer.choices[0].message.content

        numbers = range(len(CHATS))
        try:
            with ThreadPoolExecutor(8) as eight:
                at_once = [*eight.map(ask, numbers), *eight.map(stream, numbers)]
                beside = list(eight.map(stream, numbers, [number % 2 == 1 for number in numbers]))[::2]
        finally:
            manager = server._generation_state._cb_manager._cb
            server.kill_server()
        written.append((at_once, beside, type(manager).__name__))
    (at_once, beside, manager), (plain, plain_beside, _) = written
    return f"{manager}; eight at once: {same(at_once, plain)}; beside cancelled ones: {same(beside, plain_beside)}"


def lm_eval(pair: Path) -> str:
    """A generation task from local files: the same texts and the same score."""
    import lm_eval as harness
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    folder = Path(tempfile.mkdtemp())
    rows = [{"question": one.question, "final": one.answer.rpartition("#### ")[2]} for one in heldout_problems()[:12]]
    (folder / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": "problems",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "problems.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{final}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 96, "do_sample": False},
        "filter_list": [
            {
                "name": "final",
                "filter": [{"function": "regex", "regex_pattern": "#### (\\S+)"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    (folder / "problems.yaml").write_text(json.dumps(task))  # JSON is YAML
    scores, texts, tau = [], [], 0.0
    for name in (pair, TARGET):
        model = HFLM(pretrained=str(name), device="cpu", batch_size=4, **OPTIONS)
        manager = TaskManager(include_path=str(folder), include_defaults=False)
        options: dict[str, Any] = {"apply_chat_template": True, "log_samples": True, "bootstrap_iters": 0}
        done = harness.simple_evaluate(model=model, tasks=["problems"], task_manager=manager, **options)
        scores.append(done["results"]["problems"]["exact_match,final"])
        texts.append([sample["resps"] for sample in done["samples"]["problems"]])
        tau = getattr(model.model, "dflash_stats", {"tau": tau})["tau"]
    return f"batches of 4: {same(*texts)}; scores {scores[0]:.3f} and {scores[1]:.3f}; tau of the last {tau:.2f}"


LIGHTEVAL_TASK = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc


def prompt(line, task_name=None):
    return Doc(task_name=task_name, query=line["question"], choices=[line["answer"]], gold_index=0)


TASKS_TABLE = [
    LightevalTaskConfig(
        name="problems", prompt_function=prompt, hf_repo=FOLDER, hf_subset="default", metrics=[Metrics.expr_gold_metric],
        hf_avail_splits=["test"], evaluation_splits=["test"], generation_size=96,
    )
]
"""


def lighteval(pair: Path) -> str:
    """The problems as a custom task: the same texts and the same score."""
    from lighteval.logging.evaluation_tracker import EvaluationTracker
    from lighteval.models.transformers.transformers_model import TransformersModelConfig
    from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
    from lighteval.tasks.registry import Registry

    # Its own tasks, all of which it imports, connect to the Hub with an argument that huggingface_hub 2 does not know.
    Registry.load_all_task_configs = staticmethod(
        lambda custom_tasks, **_: {
            one.name: one for one in Registry.create_custom_tasks_module(custom_tasks).TASKS_TABLE
        }
    )
    folder = Path(tempfile.mkdtemp())
    rows = [{"question": one.question, "answer": one.answer.rpartition("#### ")[2]} for one in heldout_problems()[:8]]
    (folder / "data").mkdir()
    (folder / "data" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = folder / "problems.py"
    task.write_text(f"FOLDER = {str(folder / 'data')!r}\n{LIGHTEVAL_TASK}")
    texts, scores, taus = [], [], []
    target = shutil.copytree(TARGET, folder / "target")  # it writes its cache into a model's folder
    for name in (pair, target):
        run = Pipeline(
            tasks="problems|0",
            pipeline_parameters=PipelineParameters(ParallelismManager.ACCELERATE, custom_tasks_directory=str(task)),
            evaluation_tracker=EvaluationTracker(output_dir=str(folder / "out")),
            model_config=TransformersModelConfig(model_name=str(name), device="cpu", batch_size=4, **OPTIONS),
        )
        model = run.model.model
        run.evaluate()
        taus.append(getattr(model, "dflash_stats", {}).get("tau"))
        scores.append(run.get_results()["results"]["all"]["extractive_match"])
        texts.append([row.model_response.text for row in next(iter(run.get_details().values()))])
    figures = f"scores {scores[0]:.3f} and {scores[1]:.3f}; tau of the last {taus[0]:.2f}"
    return f"batches of 4: {same(*texts)}; {figures}"


def trainer_of(name: str, pair: Path, callback: Any, **settings: Any) -> Any:
    """A trainer of trl that is to take two steps with a pair, rewarded for digits."""
    import trl
    from datasets import Dataset

    def reward(completions: Any, **_: Any) -> list[float]:
        return [float(sum(map(str.isdigit, completion[0]["content"]))) for completion in completions]

    torch.set_grad_enabled(True)  # lighteval switches it off in the whole process
    config = getattr(trl, f"{name}Config")(
        tempfile.mkdtemp(),
        max_steps=2,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=64,
        model_init_kwargs=OPTIONS,
        report_to="none",
        use_cpu=True,
        bf16=False,
        logging_steps=1,
        save_strategy="no",
        **settings,
    )
    data = Dataset.from_list([{"prompt": chat} for chat in CHATS])
    trainer_class = getattr(trl, f"{name}Trainer")
    return trainer_class(str(pair), reward, args=config, train_dataset=data, callbacks=[callback])


def trl(pair: Path) -> str:
    """Two steps of GRPO: the target's weights change, its text stays its own."""
    import transformers

    taus: list[float] = []

    class Log(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
            taus.append(model.dflash_stats["tau"])

    trainer = trainer_of("GRPO", pair, Log(), learning_rate=1e-3, temperature=1.5)
    before = trainer.model.get_output_embeddings().weight.detach().clone()
    trainer.train()
    change = (trainer.model.get_output_embeddings().weight - before).abs().max()
    folder = save_pair(trainer.model, Path(tempfile.mkdtemp()) / "pair")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    saved = AutoModelForCausalLM.from_pretrained(folder, **OPTIONS).eval()
    tokenizer, texts = AutoTokenizer.from_pretrained(folder), []
    for is_drafted in (True, False):
        texts.append([])
        for chat in CHATS:
            text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, return_tensors="pt")
            texts[-1].append(saved.generate(**ids, max_new_tokens=96, do_sample=False, dflash=is_drafted)[0].tolist())
    return (
        f"weights changed by up to {change:.4f}; tau of the steps {', '.join(f'{tau:.2f}' for tau in taus)}; saved and "
        f"loaded again: {same(*texts)}, tau of the last {saved.dflash_stats['tau']:.2f}"
    )


def trl_batches(pair: Path) -> str:
    """Two steps of GRPO and of RLOO whose texts come from `generate_batch`, beside a callback that trains the drafter."""
    from dflash.trl import DrafterCallback

    said = []
    for name in ("GRPO", "RLOO"):
        callback = DrafterCallback(every=1, steps=1)
        trainer = trainer_of(name, pair, callback, use_transformers_continuous_batching=True)
        trainer.train()
        lines = [line for line in trainer.state.log_history if "drafter/tau" in line]
        taus = ", ".join(f"{line['drafter/tau']:.2f}" for line in lines)
        said.append(f"{name}: tau of the steps {taus}, {lines[-1]['drafter/steps']} steps of the drafter")
    return "; ".join(said)


TOOLS = {
    "pipeline": ("transformers", pipeline),
    "serve": ("openai", serve),
    "serve_batches": ("openai", serve_batches),
    "lm_eval": ("lm_eval", lm_eval),
    "lighteval": ("lighteval", lighteval),
    "trl": ("trl", trl),
    "trl_batches": ("trl", trl_batches),
}


def main() -> None:
    """Prints a row for each tool, and writes them for `dflash report`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", choices=[[], *TOOLS], help="default: all")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    torch.manual_seed(0)
    pair = make_pair(TARGET, embedded_path(DRAFTER_NAME), Path(tempfile.mkdtemp()) / "tiny-pair")
    summary = []
    for name in args.tools or TOOLS:
        package, run = TOOLS[name]
        try:
            said = name.replace("_", "-"), f"{package.replace('_', '-')} {version(package)}", run(pair)
            print(*said, sep=" | ", flush=True)
            summary.append(dict(zip(("tool", "version", "result"), said, strict=True)))
        except ImportError as error:
            print(f"{name} | not installed: {error}", flush=True)
    if args.output is not None:
        facts = {package: version(package) for package in ("torch", "transformers")}
        write_result(args.output, record("tools", facts, summary=summary))


if __name__ == "__main__":
    main()
