"""One prompt with greedy decoding: the target's own text, and the tokens that each forward committed.

    python examples/quickstart.py
    python examples/quickstart.py --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16

Prints the question, the answer, the acceptance length of every step and their mean, and whether plain `generate` writes
the same text (in float32 it does; in bfloat16 a near-tie can flip).
"""

from __future__ import annotations

from pair import chat, load, options, questions


def main() -> None:
    """Answers one question twice."""
    arguments = options(__doc__).parse_args()
    target, drafter, tokenizer = load(arguments)
    question = questions(1)[0]
    inputs = tokenizer(chat(tokenizer, question), return_tensors="pt").to(target.device)
    max_new_tokens = 16 if arguments.tiny else 256

    output = drafter.spec_generate(
        inputs, target=target, max_new_tokens=max_new_tokens, temperature=0.0, return_dict_in_generate=True
    )

    prompt_length = inputs["input_ids"].shape[1]
    print(question)
    print(tokenizer.decode(output.sequences[0, prompt_length:], skip_special_tokens=True))
    print(f"acceptance lengths {output.acceptance_lengths[0]}, tau {output.tau:.2f}")
    plain = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    print(f"the same as target.generate: {plain.tolist() == output.sequences.tolist()}")


if __name__ == "__main__":
    main()
