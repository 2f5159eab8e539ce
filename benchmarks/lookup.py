"""What prompt lookup gives beside the drafter: acceptance and speed with it and without, and one text.

    python benchmarks/lookup.py --gsm8k test.jsonl --code mbpp.jsonl --output benchmarks/results/lookup_tiny_cpu.json

The embedded pair on its held-out problems and on GSM8K. Then texts that it cannot write, which a logits processor prescribes: a
code file in which a name is changed, a table in which every third row is changed, and random tokens, which never repeat. There
the drafter is right as often as a script says, so acceptance is simulated; lookups and steps are real.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measuring import argument_parser, finish, heldout_prompts, parsed
from rich.progress import track
from simulated_pairs import Script

from dflash.checkpoints import load_embedded_pair
from dflash.evaluation import PLAIN, Prompt, chat_encoder, compare, summarise, timed_blocks, timed_generate
from dflash.model.acceptance_dflash import Proposals


MOST_TOKENS = 320  # of a prescribed answer, so that prompt and answer fit into the target's positions
NEW_TOKENS = 256  # of the pair's own answers
TAU = 6.5  # mean acceptance length of the script
LOOKUPS: dict[str, dict[str, Any]] = {
    f"lookup {count}" if count else "dflash": {"prompt_lookup_num_tokens": count} for count in (0, 31)
}
SETTINGS = {"temperature": 0.0, "compile": False, "cuda_graph": False}


class Prescribed:
    """A logits processor that prescribes an answer, and a drafter's `propose` that is right as often as a script says."""

    def __init__(self, prompt_ids: list[int], answer_ids: list[int], block_size: int) -> None:
        self.prompt_ids, self.size = prompt_ids, block_size - 1
        self.token_ids = [*answer_ids, *[answer_ids[-1]] * block_size]
        self.runs = Script(TAU, block_size).runs(len(self.token_ids)).tolist()
        self.num_written = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token_id = self.token_ids[input_ids.shape[1] - len(self.prompt_ids)]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token_id]), 0.0)

    def propose(self, hidden_states: Any, anchors: torch.Tensor, head: Any, *drawn: Any, **options: Any) -> Proposals:
        head(hidden_states).argmax(dim=-1)  # as the drafter's own
        right, run = self.token_ids[self.num_written :][: self.size], self.runs[self.num_written]
        token_ids = torch.tensor([[*right[:run], *(token_id ^ 1 for token_id in right[run:])]])
        return Proposals(token_ids[:, : hidden_states.shape[1]])

    def run(self, drafter: Any, target: Any, input_ids: torch.Tensor, **options: Any) -> Any:
        """`timed_blocks` with this drafter."""
        self.num_written, drafter.propose = 0, self.propose

        def note(block: Any) -> None:
            self.num_written += len(block.token_ids)

        try:
            return timed_blocks(drafter, target, input_ids, note, logits_processor=[self], **options)
        finally:
            del drafter.propose


def code_files(path: Path, ids_of: Any) -> Iterator[tuple[str, list[int]]]:
    """Requests to change the most frequent name in files of functions, and their answers."""
    code = ""
    for line in path.read_text(encoding="utf-8").splitlines():
        more = code + json.loads(line)["code"].replace("\r", "") + "\n\n"
        is_full = len(ids_of(more)) > MOST_TOKENS - 20
        if is_full and code:
            name = Counter(re.findall(r"[a-z_]{3,}", code)).most_common(1)[0][0]
            yield f"Rename {name} to value:\n{code}", ids_of(re.sub(rf"\b{name}\b", "value", code))
        code = "" if is_full else more


def tables(questions: list[str], ids_of: Any) -> Iterator[tuple[str, list[int]]]:
    """Requests to change the number of every third row in tables of questions, and their answers."""
    for begin in range(0, len(questions) - 10, 10):
        lines = [f"| {i} | {text[:24]} | {len(text)} |\n" for i, text in enumerate(questions[begin : begin + 10])]
        edited = [re.sub(r"\d+ \|\n", "0 |\n", line) if i % 3 == 2 else line for i, line in enumerate(lines)]
        if len(ids_of("".join(lines))) <= MOST_TOKENS:
            yield "Set every third number to 0:\n" + "".join(lines), ids_of("".join(edited))


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--gsm8k", type=Path, required=True, help="test.jsonl of GSM8K")
    parser.add_argument("--code", type=Path, required=True, help="JSON lines with code, such as mbpp.jsonl")
    parser.add_argument("--limit", type=int, default=40, help="prompts of each task")
    parser.add_argument("--texts", type=int, default=10, help="prescribed texts of each kind")
    parser.add_argument("--repeats", type=int, default=3)
    args = parsed(parser)
    target, drafter, tokenizer = load_embedded_pair()
    encode, ids_of = chat_encoder(tokenizer), lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]

    def asked(question: str) -> list[int]:
        return encode([{"role": "user", "content": question}])[0].tolist()

    questions = [json.loads(line)["question"] for line in args.gsm8k.read_text(encoding="utf-8").splitlines()]
    own = {"held-out templates": heldout_prompts(tokenizer), "GSM8K test": map(asked, questions)}
    prompts = [Prompt(task, torch.tensor([ids])) for task in own for ids in islice(own[task], args.limit)]
    methods: dict[str, Any] = {PLAIN: partial(timed_generate, target, max_new_tokens=NEW_TOKENS, do_sample=False)}
    for name, more in LOOKUPS.items():
        methods[name] = partial(timed_blocks, drafter, target, max_new_tokens=NEW_TOKENS, **SETTINGS, **more)
    summary = summarise(compare(methods, prompts, args.repeats, lambda items, what: track(items, description=what)))

    noise = torch.Generator().manual_seed(0)
    never = (("Write.", torch.randint(100, 2000, (MOST_TOKENS,), generator=noise).tolist()) for _ in range(args.texts))
    tasks = {"code file": code_files(args.code, ids_of), "table": tables(questions, ids_of), "never repeats": never}
    for task, texts in tasks.items():
        measurements = []
        for index, (question, answer_ids) in enumerate(track([*islice(texts, args.texts)], description=task)):
            text = Prescribed(asked(question), answer_ids, drafter.config.block_size)
            options = {"max_new_tokens": len(answer_ids), "stop_token_ids": [], **SETTINGS}
            ways = {name: partial(text.run, drafter, target, **options, **more) for name, more in LOOKUPS.items()}
            made = compare(ways, [Prompt(task, torch.tensor([text.prompt_ids]))], args.repeats)
            measurements += [replace(measurement, prompt_index=index) for measurement in made]
        summary += summarise(measurements)  # speed-ups over no lookups
    decoding = {**SETTINGS, "max_new_tokens": NEW_TOKENS, "repeats": args.repeats, "stated_tau": TAU}
    finish(args.output, "decode", (target, drafter), decoding=decoding, summary=summary)


if __name__ == "__main__":
    main()
