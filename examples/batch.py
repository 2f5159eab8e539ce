"""Several prompts of different lengths at once: each sequence accepts its own number of tokens in each step.

    python examples/batch.py

Prints each answer after its question, with the acceptance lengths of its sequence. No sequence waits for the slowest.
"""

from __future__ import annotations

from pair import chat, load, options, questions


def main() -> None:
    """Answers four questions in one batch."""
    arguments = options(__doc__).parse_args()
    target, drafter, tokenizer = load(arguments)
    asked = questions(2 if arguments.tiny else 4)
    tokenizer.padding_side = "left"
    prompts = [chat(tokenizer, question) for question in asked]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True).to(target.device)

    output = drafter.spec_generate(
        inputs,
        target=target,
        max_new_tokens=16 if arguments.tiny else 256,
        temperature=0.0,
        return_dict_in_generate=True,
    )

    prompt_length = inputs["input_ids"].shape[1]
    for question, sequence, lengths in zip(asked, output.sequences, output.acceptance_lengths, strict=True):
        print(question)
        print(tokenizer.decode(sequence[prompt_length:], skip_special_tokens=True))
        print(f"acceptance lengths {lengths}\n")
    print(f"{len(asked)} answers, tau {output.tau:.2f}")


if __name__ == "__main__":
    main()
