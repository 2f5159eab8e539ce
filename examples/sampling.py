"""Sampling: the text has the target's distribution, and a seed gives the same text at every block size.

    python examples/sampling.py
    python examples/sampling.py --temperature 1.5 --seed 3

Prints a few different answers to one question, then whether smaller blocks write the same text from the same seed.
"""

from __future__ import annotations

from typing import Any

import torch
from pair import chat, load, options, questions


def main() -> None:
    """Samples three answers at once, and one again in smaller blocks."""
    parser = options(__doc__)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    target, drafter, tokenizer = load(arguments)
    inputs = tokenizer(chat(tokenizer, questions(1)[0]), return_tensors="pt").to(target.device)

    def sample(**request: Any) -> list[str]:
        sequences = drafter.spec_generate(
            inputs,
            target=target,
            max_new_tokens=16 if arguments.tiny else 256,
            temperature=arguments.temperature,
            top_p=0.95,
            generator=torch.Generator().manual_seed(arguments.seed),
            **request,
        )
        new_ids = sequences[:, inputs["input_ids"].shape[1] :]
        return tokenizer.batch_decode(new_ids, skip_special_tokens=True)

    for answer in sample(num_return_sequences=3):
        print(answer, end="\n\n")
    smaller = drafter.config.block_size // 2
    print(f"the same in blocks of {smaller}: {sample() == sample(block_size=smaller)}")


if __name__ == "__main__":
    main()
