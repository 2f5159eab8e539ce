"""A transformers text-generation pipeline that decodes with DFlash.

    python examples/pipeline.py

Prints the pipeline's answer to a chat message, and whether it is what the pipeline writes without the drafter.
"""

from __future__ import annotations

from typing import Any

from pair import load, options, questions
from transformers import pipeline

from dflash import custom_generate


def main() -> None:
    """Answers one chat message."""
    arguments = options(__doc__).parse_args()
    target, drafter, tokenizer = load(arguments)
    writer = pipeline("text-generation", model=target, tokenizer=tokenizer)
    messages = [{"role": "user", "content": questions(1)[0]}]
    request: dict[str, Any] = {"max_new_tokens": 16 if arguments.tiny else 256, "do_sample": False}

    def answer(**way: Any) -> str:
        return writer(messages, **request, **way)[0]["generated_text"][-1]["content"]

    text = answer(custom_generate=custom_generate, drafter=drafter)
    print(text)
    print(f"the same without the drafter: {text == answer()}")


if __name__ == "__main__":
    main()
