"""A chat in the terminal: answers are streamed, and each turn computes only its new tokens.

    python examples/chat.py
    python examples/chat.py --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16

Type a message and press enter; an empty line or Ctrl-D ends the chat. After each answer the chat prints its tau, and
how many of the prompt's tokens were in the caches from earlier turns. (The embedded pair answers one word problem at
a time; the earlier ones are still in its prompt.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pair import load, options, questions
from transformers import TextStreamer

from dflash import Conversation


def messages(is_tiny: bool) -> Iterator[str]:
    """The user's messages: lines of standard input, or two questions with `--tiny`."""
    if is_tiny:
        for question in questions(2):
            print(f"> {question}")
            yield question
        return
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if not text:
            return
        yield text


def main() -> None:
    """Chats until there is nothing more to answer."""
    arguments = options(__doc__).parse_args()
    target, drafter, tokenizer = load(arguments)
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    conversation = Conversation()
    turns: list[dict[str, Any]] = []
    for text in messages(arguments.tiny):
        turns.append({"role": "user", "content": text})
        # The whole chat each time: the part that the caches hold is found by its ids.
        prompt = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=True, enable_thinking=False
        )
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(target.device)
        prompt_length = inputs["input_ids"].shape[1]
        output = drafter.spec_generate(
            inputs,
            target=target,
            conversation=conversation,
            streamer=streamer,
            max_new_tokens=16 if arguments.tiny else 512,
            temperature=0.0,
            return_dict_in_generate=True,
        )
        answer = tokenizer.decode(output.sequences[0, prompt_length:], skip_special_tokens=True)
        turns.append({"role": "assistant", "content": answer})
        print(
            f"[tau {output.tau_with_lookup:.2f}, {conversation.num_reused} of {prompt_length} prompt tokens were computed before]\n"
        )


if __name__ == "__main__":
    main()
