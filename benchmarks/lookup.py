"""What prompt lookup gives beside the drafter: acceptance and speed with it and without, and one text.

    python benchmarks/lookup.py --gsm8k test.jsonl --code mbpp.jsonl --output benchmarks/results/lookup_tiny_cpu.json

The embedded pair on its held-out problems and on GSM8K. Then texts that it cannot write, which a logits processor prescribes: a
code file in which a name is changed, a table in which every third row is changed, and random tokens, which never repeat. There
the drafter is right as often as a script with `--tau` says, so acceptance is simulated; lookups and steps are real.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import argument_parser, finish, heldout_prompts, parsed
from rich.progress import track

from dflash.checkpoints import load_embedded_pair
from dflash.evaluation import PLAIN, Prompt, Script, chat_encoder, compare, summarise, timed_blocks, timed_generate
from dflash.model.verification_dflash import Proposals


MOST_TOKENS = 320  # of a prescribed answer, so that prompt and answer fit into the target's positions


class Prescribed:
    """A text that a target is made to write, and a drafter that is right as often as a script says.

    It is a logits processor for a single prompt, and `propose` replaces that of the drafter.
    """

    def __init__(self, prompt_ids: list[int], answer_ids: list[int], tau: float, block_size: int) -> None:
        self.prompt_ids, self.answer_ids = prompt_ids, answer_ids
        self.runs, self.size = Script(tau, block_size).runs(len(answer_ids) + 1).tolist(), block_size - 1
        self.num_written = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token_id = self._text(input_ids.shape[1] - len(self.prompt_ids), 1)[0]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token_id]), 0.0)

    def propose(self, hidden_states: Any, anchors: torch.Tensor, head: Any, **options: Any) -> Proposals:
        right = self._text(self.num_written, self.size)
        run = self.runs[min(self.num_written, len(self.runs) - 1)]
        head(hidden_states).argmax(dim=-1)  # as the drafter's own
        return Proposals(torch.tensor([[*right[:run], *(token_id ^ 1 for token_id in right[run:])]]))

    def run(self, drafter: Any, target: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        """`timed_blocks` with this drafter."""
        self.num_written, drafter.propose = 0, self.propose

        def note(block: Any) -> None:
            self.num_written += len(block.token_ids)

        try:
            return timed_blocks(drafter, target, input_ids, note, logits_processor=[self], **options)
        finally:
            del drafter.propose

    def _text(self, begin: int, count: int) -> list[int]:
        return [*self.answer_ids[begin : begin + count], *[self.answer_ids[-1]] * count][:count]


def code_files(path: Path, ids_of: Any) -> list[tuple[str, str]]:
    """Files of functions, and each with its most frequent name changed."""
    files, code = [], ""
    for line in path.read_text(encoding="utf-8").splitlines():
        more = code + json.loads(line)["code"].replace("\r", "") + "\n\n"
        if len(ids_of(more)) > MOST_TOKENS - 20:
            name = Counter(re.findall(r"[a-z_]{3,}", code)).most_common(1)[0][0] if code else ""
            files += [(f"Rename {name} to value:\n{code}", re.sub(rf"\b{name}\b", "value", code))] if code else []
            more = ""
        code = more
    return files


def tables(path: Path, ids_of: Any) -> list[tuple[str, str]]:
    """Tables of questions, and each with the number of every third row changed."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    made = []
    for begin in range(0, len(rows) - 10, 10):
        lines = [
            f"| {i} | {row['question'][:24]} | {len(row['question'])} |\n"
            for i, row in enumerate(rows[begin : begin + 10])
        ]
        edited = [re.sub(r"\d+ \|\n", "0 |\n", line) if i % 3 == 2 else line for i, line in enumerate(lines)]
        if len(ids_of("".join(lines))) <= MOST_TOKENS:
            made.append(("Set every third number to 0:\n" + "".join(lines), "".join(edited)))
    return made


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--code", type=Path, required=True, help="JSON lines with code, such as mbpp.jsonl")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each task")
    parser.add_argument("--texts", type=int, default=10, help="prescribed texts of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tau", type=float, default=6.5, help="mean acceptance length of the script")
    parser.add_argument("--num-tokens", type=int, nargs="+", default=[31], help="prompt_lookup_num_tokens")
    args = parsed(parser)
    target, drafter, tokenizer = load_embedded_pair()
    encode, settings = chat_encoder(tokenizer), {"temperature": 0.0, "compile": False}
    lookups = {"dflash": {}, **{f"lookup {count}": {"prompt_lookup_num_tokens": count} for count in args.num_tokens}}

    def asked(question: str) -> list[int]:
        return encode([{"role": "user", "content": question}])[0].tolist()

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    questions = [json.loads(line)["question"] for line in args.gsm8k.read_text(encoding="utf-8").splitlines()]
    prompts = [Prompt("held-out templates", torch.tensor([ids])) for ids in heldout_prompts(tokenizer)[: args.limit]]
    prompts += [Prompt("GSM8K test", torch.tensor([asked(question)])) for question in questions[: args.limit]]
    length = {"max_new_tokens": args.max_new_tokens}
    methods: dict[str, Any] = {PLAIN: partial(timed_generate, target, **length, do_sample=False)}
    for name, more in lookups.items():
        methods[name] = partial(timed_blocks, drafter, target, **length, **settings, **more)
    summary = summarise(compare(methods, prompts, args.repeats, lambda items: track(items, description="prompts")))

    noise = torch.Generator().manual_seed(0)
    never = [("Write.", torch.randint(100, 2000, (MOST_TOKENS,), generator=noise).tolist()) for _ in range(args.texts)]
    tasks = {"code file": code_files(args.code, ids_of), "table": tables(args.gsm8k, ids_of), "never repeats": never}
    for task, pairs in tasks.items():
        measurements = []
        for index, (question, answer) in enumerate(track(pairs[: args.texts], description=task)):
            answer_ids = answer if isinstance(answer, list) else ids_of(answer)
            text = Prescribed(asked(question), answer_ids, args.tau, drafter.config.block_size)
            options = {"max_new_tokens": len(answer_ids), "stop_token_ids": [], **settings}
            ways = {name: partial(text.run, drafter, target, **options, **more) for name, more in lookups.items()}
            made = compare(ways, [Prompt(task, torch.tensor([text.prompt_ids]))], args.repeats)
            measurements += [replace(measurement, prompt_index=index) for measurement in made]
        summary += summarise(measurements)  # speed-ups over no lookups
    decoding = {**settings, "max_new_tokens": args.max_new_tokens, "repeats": args.repeats, "stated_tau": args.tau}
    finish(args.output, "decode", (target, drafter), decoding=decoding, summary=summary)


if __name__ == "__main__":
    main()
