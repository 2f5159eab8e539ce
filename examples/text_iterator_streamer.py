"""One thread writes and the main thread reads: `TextIteratorStreamer`, as web front ends use it.

    python examples/text_iterator_streamer.py

Prints the answer piece by piece while a thread generates, then the number of pieces.
"""

from __future__ import annotations

from threading import Thread

from pair import chat, load, options, questions
from transformers import TextIteratorStreamer


def main() -> None:
    """Reads one answer while it is being written."""
    arguments = options(__doc__).parse_args()
    target, drafter, tokenizer = load(arguments)
    inputs = tokenizer(chat(tokenizer, questions(1)[0]), return_tensors="pt").to(target.device)

    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=600, skip_special_tokens=True)
    request = {
        "target": target,
        "streamer": streamer,
        "max_new_tokens": 16 if arguments.tiny else 256,
        "temperature": 0.0,
    }
    thread = Thread(target=drafter.spec_generate, args=(inputs,), kwargs=request)
    thread.start()
    num_pieces = 0
    for piece in streamer:
        print(piece, end="", flush=True)
        num_pieces += bool(piece)
    thread.join()
    print(f"\n{num_pieces} pieces")


if __name__ == "__main__":
    main()
