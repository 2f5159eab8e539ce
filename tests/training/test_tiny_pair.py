"""The embedded pair's problems: worked right, and held-out ones never trained on."""

import re
import sys
from pathlib import Path

import pytest
import torch

from dflash import generate_blocks
from dflash.checkpoints import DOMINO_NAME, heldout_problems, load_embedded_pair
from dflash.training import encode_prompt


sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "tiny_pair"))

from problems import FRAMES_HELD_OUT, generate


MARK = re.compile(r"<<([^=>]+)=([^>]+)>>")


@pytest.fixture(scope="module")
def splits():
    return {split: generate(1000, seed=7, split=split) for split in ("train", "heldout")}


def test_no_held_out_template_is_ever_trained_on(splits):
    trained = {problem.template for problem in splits["train"]}
    held_out = {problem.template for problem in splits["heldout"]}
    assert not trained & held_out
    assert len(trained) > 500
    assert not {problem.frame for problem in splits["train"]} & set(FRAMES_HELD_OUT)
    assert set(FRAMES_HELD_OUT) <= {problem.frame for problem in splits["heldout"]}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_answers_are_worked_right(splits, split):
    """Every calculator mark holds, the last one gives the final number, and there are 1 to 4 of them."""
    for problem in splits[split]:
        marks = MARK.findall(problem.answer)
        assert 1 <= len(marks) <= 4, problem.answer
        for expression, value in marks:
            assert re.fullmatch(r"[\d.+\-*/ ]+", expression), expression
            assert abs(eval(expression) - float(value)) < 1e-9, problem.answer
        assert problem.answer.rstrip().endswith(f"#### {problem.final}")
        assert float(marks[-1][1]) == float(problem.final)


def test_the_seed_decides(splits):
    assert generate(50, seed=7, split="heldout") == splits["heldout"][:50]
    assert generate(50, seed=8, split="heldout") != splits["heldout"][:50]


def test_the_second_drafter_is_the_first_one_with_a_head() -> None:
    """Its other weights are the same bits; the text is the target's, and the head accepts more of its own."""
    target, plain, tokenizer = load_embedded_pair()
    _, headed, _ = load_embedded_pair(drafter=DOMINO_NAME)
    weights = headed.state_dict()
    assert all(torch.equal(weights.pop(name), weight) for name, weight in plain.state_dict().items())
    assert {name.split(".")[0] for name in weights} == {"prefix_gru", "embed_proj"}
    steps = {plain: 0, headed: 0}
    for problem in heldout_problems()[:2]:
        prompt = torch.tensor([encode_prompt(problem.question, tokenizer)])
        expected = target.generate(prompt, max_new_tokens=96, do_sample=False)
        for drafter in steps:
            blocks = list(generate_blocks(drafter, target, prompt, max_new_tokens=96, temperature=0.0))
            assert [token_id for block in blocks for token_id in block.token_ids] == expected[
                0, prompt.shape[1] :
            ].tolist()
            steps[drafter] += len(blocks)
    assert steps[headed] < steps[plain]
