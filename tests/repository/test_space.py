"""What the folder of the Space promises without being run: its front matter, its requirements, and text shown as text."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dflash import Block


ROOT = Path(__file__).parents[2]
SPACE = ROOT / "examples" / "space"


@pytest.fixture(scope="module")
def view() -> Any:
    """The module that draws the page; it needs no Gradio."""
    spec = importlib.util.spec_from_file_location("space_view", SPACE / "view.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


class Letters:
    """A tokenizer whose ids are code points."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))


def test_front_matter_names_what_is_here_and_what_is_pinned() -> None:
    """Promise: the Hub runs the app of this folder on the Gradio that the tests run."""
    card = yaml.safe_load((SPACE / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert (card["sdk"], card["license"]) == ("gradio", "apache-2.0")
    assert f"gradio=={card['sdk_version']}" in pins
    assert (SPACE / card["app_file"]).is_file()
    assert len(card["short_description"]) <= 60  # the Hub refuses longer ones


def test_requirements_name_the_distribution_and_not_the_registrys_dflash() -> None:
    lines = [
        line for line in (SPACE / "requirements.txt").read_text().splitlines() if not line.startswith(("#", "--"))
    ]
    assert len(lines) == 1
    assert lines[0].startswith("dflash-transformers>=")


def test_screenshot_is_small() -> None:
    """Promise: the picture that the README shows is here, and not a burden to a clone."""
    assert "(screenshot.png)" in (SPACE / "README.md").read_text(encoding="utf-8")
    assert (SPACE / "screenshot.png").stat().st_size < 150_000


def test_app_is_short() -> None:
    for name in ("app.py", "view.py"):
        assert (SPACE / name).read_text(encoding="utf-8").count("\n") < 250


def test_text_is_shown_as_text(view: Any) -> None:
    """Promise: what a model, a prompt or an error says is never HTML."""
    harm = "<script>alert(1)</script>&"
    plain, fast = view.Answer(Letters()), view.Answer(Letters())
    plain.add_tokens([*map(ord, harm)])
    fast.add_block(Block([ord(harm[0])], 0, 0, is_prefill=True))
    fast.add_block(Block([*map(ord, harm[1:])], num_proposals=40, num_accepted=len(harm) - 3))
    for html in (view.page(plain, fast, harm, harm), view.problem(harm)):
        assert "<script" not in html
        assert "&lt;script&gt;" in html
    words = re.sub(r"<[^>]+>", "", view.page(plain, fast))
    assert words.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;") == 2


def test_figures_are_those_of_the_blocks(view: Any) -> None:
    """Tau before the last cut, tokens per step after it, and nothing where nothing was verified."""
    fast = view.Answer(Letters())
    assert math.isnan(fast.tau)
    assert math.isnan(fast.tokens_per_step)
    assert math.isnan(fast.tokens_per_second)
    fast.add_block(Block([65], 0, 0, is_prefill=True))
    fast.add_block(Block([65] * 4, num_proposals=7, num_accepted=3))
    fast.add_block(Block([65] * 2, num_proposals=7, num_accepted=5))  # cut: 2 of 6
    fast.end(seconds=0.5)
    assert (fast.tau, fast.tokens_per_step, fast.tokens_per_second) == (5.0, 3.0, 14.0)
    html = view.page(fast, fast)
    assert 'aria-label="Acceptance lengths: 4, 6"' in html
    assert 'aria-label="Steps of length 1, 2, …: 0, 0, 0, 1, 0, 1, 0, 0"' in html
    assert "1.00×" in html
    assert "the cost of a step, here 3.00 plain steps.</p>" in html
    assert '<div class="axis" aria-hidden="true"><b>8</b><b>4</b><b>0</b></div>' in html  # block size 8
    slow = view.Answer(Letters())
    slow.add_tokens([65] * 7)
    assert "plain steps" not in view.page(slow, fast)  # before there is a speed-up
    slow.end(seconds=2.0)
    assert "here 0.75 plain steps: target.generate does more work" in view.page(
        slow, fast
    )  # 4 times as fast at 3 tokens a step


def test_a_step_longer_than_a_block_is_explained(view: Any) -> None:
    """Bug: "block size 16" stood under bars up to 32, without a word."""
    note = view.setup(16, "float32", "2 CPU threads")
    assert note.startswith("Greedy, batch 1, block size 16, float32, 2 CPU threads. ")
    assert "can add more tokens than a block has" in note
    assert note in view.page(note=note)
    app = (SPACE / "app.py").read_text(encoding="utf-8")
    assert "note = view.setup(" in app
    assert "block size" not in app  # said in one place


def test_half_a_character_waits(view: Any) -> None:
    """Promise: no replacement sign while a character's other bytes are still to come, and none lost at the end."""

    class Bytes:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            return bytes(token_ids).decode("utf-8", errors="replace")

    answer = view.Answer(Bytes())
    first, second = "é".encode()
    answer.add_tokens([first])
    assert answer.steps[-1].own == ""
    answer.add_tokens([second])
    assert answer.steps[-1].own == "é"
    answer.add_tokens([first])
    answer.end(1.0)
    assert answer.rest == "�"
    assert "é�</p>" in view.page(answer)
