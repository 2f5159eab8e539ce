"""A task with any pair: speed, acceptance and right answers of plain decoding and of DFlash.

    python examples/evaluation.py
    python examples/evaluation.py --target Qwen/Qwen3-4B --drafter z-lab/Qwen3-4B-DFlash-b16 --task math500

The embedded pair answers its own held-out problems, which are scored like GSM8K's. Another pair answers the task's
rows from the Hub. `dflash eval` does this for all tasks of the paper, with a progress bar, resumption, and several
GPUs.
"""

from __future__ import annotations

from pair import load, options

from dflash.checkpoints import heldout_problems
from dflash.evaluation import EvalPlan, Question, pair_backend, questions_of, run_eval


def main() -> None:
    """Evaluates one task."""
    parser = options(__doc__)
    parser.add_argument("--task", default="gsm8k", help="gsm8k, math500, humaneval, mt-bench …")
    parser.add_argument("--prompts", type=int, default=8)
    arguments = parser.parse_args()
    target, drafter, tokenizer = load(arguments)

    plan = EvalPlan(
        target=arguments.target or "embedded target",
        drafter=arguments.drafter or "embedded drafter",
        tasks=(arguments.task,),
        num_prompts=2 if arguments.tiny else arguments.prompts,
    )
    if arguments.target:
        questions = questions_of(plan)
    else:  # questions of your own, with the answers for the scorer
        questions = [
            Question("gsm8k", index, (problem.question,), problem.answer.split("####")[1].strip())
            for index, problem in enumerate(heldout_problems()[: plan.num_prompts])
        ]
    backend = pair_backend(target, drafter, 16 if arguments.tiny else 256, ["dflash"])
    result = run_eval(plan, questions, backend, tokenizer)

    plain, ours = result["summary"]
    for row in (plain, ours):
        score = "not scored" if row["score"] is None else f"{row['score']:.0%} right"
        print(f"{row['method']}: {score}, {row['tokens_per_second']:.0f} tokens/s")
    print(f"{ours['speedup']:.2f}x, tau {ours['tau_micro']:.2f}, acceptance lengths {ours['acceptance_histogram']}")
    print(
        f"{ours['identical']} of {ours['prompts']} texts identical, the same score: {plain['score'] == ours['score']}"
    )


if __name__ == "__main__":
    main()
