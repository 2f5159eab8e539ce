"""Streaming: through a transformers streamer, then block by block with the accepted tokens of each step.

    python examples/streaming.py

Prints the answer through `TextStreamer`, then again with the accepted tokens of each step in brackets, as in
`[ has 3 + 4] =`. The token after a bracket is the target's own.
"""

from __future__ import annotations

from pair import chat, load, options, questions
from transformers import TextStreamer

from dflash import generate_blocks


def main() -> None:
    """Streams one answer in both ways."""
    arguments = options(__doc__).parse_args()
    target, drafter, tokenizer = load(arguments)
    inputs = tokenizer(chat(tokenizer, questions(1)[0]), return_tensors="pt").to(target.device)
    request = {"max_new_tokens": 16 if arguments.tiny else 256, "temperature": 0.0}

    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    drafter.spec_generate(inputs, target=target, streamer=streamer, **request)

    num_steps = 0
    for block in generate_blocks(drafter, target, inputs, **request):
        num_steps += not block.is_prefill
        accepted = block.token_ids[: block.num_accepted]
        own = block.token_ids[block.num_accepted :]
        if accepted:
            print(f"[{tokenizer.decode(accepted, skip_special_tokens=True)}]", end="")
        print(tokenizer.decode(own, skip_special_tokens=True), end="", flush=True)
    print(f"\n{num_steps} steps after the prompt")


if __name__ == "__main__":
    main()
