"""A drafter with `target.generate`: the loop of this library as `custom_generate`, or the loop of transformers.

    python examples/native_generate.py

Prints the answer, and whether both loops write the same text. Transformers has a DFlash of its own from 5.15 on: one
prompt at a time, and it misses a stop string that ends inside an accepted block.
"""

from __future__ import annotations

from typing import Any

from pair import chat, load, options, questions
from transformers import GenerationConfig

from dflash import custom_generate


def main() -> None:
    """Answers one question with plain decoding, with our loop and with the native one."""
    arguments = options(__doc__).parse_args()
    target, drafter, tokenizer = load(arguments)
    inputs = tokenizer(chat(tokenizer, questions(1)[0]), return_tensors="pt").to(target.device)
    request: dict[str, Any] = {"max_new_tokens": 16 if arguments.tiny else 256, "do_sample": False}

    plain = target.generate(**inputs, **request)
    print(tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))

    ours = target.generate(**inputs, **request, custom_generate=custom_generate, drafter=drafter)
    print(f"custom_generate writes the same: {ours.tolist() == plain.tolist()}")

    if hasattr(GenerationConfig(), "speculation_type"):
        native = target.generate(**inputs, **request, assistant_model=drafter, speculation_type="dflash")
        print(f"speculation_type='dflash' writes the same: {native.tolist() == plain.tolist()}")


if __name__ == "__main__":
    main()
