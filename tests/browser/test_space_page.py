"""The page of examples/space in a real Chromium, headless: what a visitor types, sees, and leaves behind.

Forwards of the target pass a gate that a test may hold, so that nothing here waits for a clock.
"""

from __future__ import annotations

import html
import importlib.util
import json
import math
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Semaphore
from typing import Any

import pytest
import torch
from tiny_models import make_drafter

from dflash.checkpoints import embedded_path
from dflash.evaluation import Difference


pytestmark = pytest.mark.browser
gr = pytest.importorskip("gradio", reason="needs gradio: pip install '.[space]'")
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright, the Python client")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("needs a chromium on the path", allow_module_level=True)

SPACE = Path(__file__).parents[2] / "examples" / "space"
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PROMPT = "Ann has 3 apples and buys 4 more. How many apples has she?"
TIMEOUT = 120_000  # ms, for a machine that does other things too
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Gate:
    """Stands before every forward of the target: counts them, and lets them pass one by one while it is held."""

    def __init__(self) -> None:
        self.reset()

    def __call__(self, *_: Any) -> None:
        self.num_forwards += 1
        if self.is_held:
            self._arrived.release()
            self._passes.acquire()

    def let_one_pass(self, wait: bool = False) -> None:
        """The forward that stands here, or with `wait` the next one that comes."""
        if self._arrived.acquire(blocking=wait):
            self._passes.release()

    def open(self) -> None:
        self.is_held = False
        self._passes.release(1000)

    def reset(self) -> None:
        self.num_forwards = 0
        self._arrived, self._passes = Semaphore(0), Semaphore(0)
        self.is_held = False


class Space:
    """The running app, its address, its gate, and what it or its pages tried to reach outside this machine."""

    def __init__(self, app: Any, url: str) -> None:
        self.app, self.url, self.gate = app, url, Gate()
        self.outside: list[str] = []
        self.pair = app.load("", "")
        self.pair.target.register_forward_pre_hook(self.gate)


@pytest.fixture(scope="module")
def space() -> Iterator[Space]:
    """The app, served from this process on a free port of the loopback device."""
    reached: list[str] = []
    is_over = Event()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo") and not is_over.is_set():
            place = arguments[1][0] if event == "socket.connect" and isinstance(arguments[1], tuple) else arguments[0]
            if isinstance(place, str) and place not in LOOPBACK:
                reached.append(f"{event} {place}")

    sys.addaudithook(note)
    with pytest.MonkeyPatch.context() as patch, socket.socket() as free:
        patch.setenv("GRADIO_ANALYTICS_ENABLED", "False")
        patch.syspath_prepend(str(SPACE))
        spec = importlib.util.spec_from_file_location("space_app", SPACE / "app.py")
        app = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(app)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        app.serve(prevent_thread_lock=True, server_name="127.0.0.1", server_port=port, quiet=True)
        served = Space(app, f"http://127.0.0.1:{port}/")
        served.outside = reached
        yield served
        app.demo.close()
    is_over.set()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as client:
        chromium = client.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(space: Space, browser: Any) -> Iterator[Callable[..., Any]]:
    """`visit(**options)`: a new visitor's page; no page may reach outside, and the gate is open again at the end."""
    contexts = []
    space.gate.reset()

    def open_page(**options: Any) -> Any:
        context = browser.new_context(**options)
        context.set_default_timeout(TIMEOUT)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: note(request.url))
        page.goto(space.url)
        page.wait_for_selector("#result .race")
        return page

    def note(url: str) -> None:
        if not url.startswith((space.url, "data:", "blob:")):
            space.outside.append(url)

    yield open_page
    space.gate.open()
    for context in contexts:
        context.close()
    space.app.DECODER.submit(int).result()  # nothing of this test runs into the next
    assert space.outside == []


def unfold(page: Any) -> None:
    """Opens the fields of another pair.

    Gradio mounts them at the first opening, and at the next frame sets the values that they had from the server again: what
    a robot fills in between is lost. The second frame comes after that.
    """
    page.get_by_text("Another pair, another length").click()
    page.wait_for_selector("#drafter textarea, #drafter input")
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def ask(page: Any, prompt: str = PROMPT, **pair: Any) -> None:
    """Types a prompt, and a pair if one is named, and asks for the answers."""
    if pair:
        unfold(page)
    for name, value in pair.items():
        page.fill(f"#{name} textarea, #{name} input", value)
    page.fill("#prompt textarea", prompt)
    page.click("#write")


def texts(page: Any) -> tuple[str, str]:
    """What stands on both sides at the end."""
    page.wait_for_selector(".verdict")
    return page.inner_text(".side.plain .answer"), page.inner_text(".side.fast .answer")


def plain_text(space: Space, prompt: str) -> str:
    """What `target.generate` writes by itself."""
    pair = space.pair
    inputs = pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    sequences = pair.target.generate(**inputs, max_new_tokens=192, do_sample=False)
    return pair.tokenizer.decode(sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_both_sides_write_what_the_target_writes(space: Space, visit: Callable[..., Any]) -> None:
    """Promise: identical text, the accepted runs marked, the figures of the same decode, and a bar per verify step."""
    page = visit()
    ask(page)
    left, right = texts(page)
    assert left == right == plain_text(space, PROMPT).strip()
    assert "Identical" in page.inner_text(".verdict")
    blocks = page.locator(".side.fast .block")
    assert "".join(blocks.all_text_contents()).strip() == left
    assert page.locator(".side.plain .drafted").count() == 0
    assert page.locator(".side.fast .drafted").count() > 1

    bars = page.locator(".by-step .bars > i")
    lengths = [int(n) for n in re.findall(r"\d+", page.get_attribute(".by-step .bars", "aria-label"))]
    counts = [int(n) for n in page.get_attribute(".histogram .bars", "aria-label").split(": ")[1].split(", ")]
    assert bars.count() == len(lengths) == blocks.count() - 1  # the first block is the prompt's forward
    assert counts == [lengths.count(length) for length in range(1, 17)]
    heights = [bars.nth(i).locator(".drafted").bounding_box()["height"] for i in range(bars.count())]
    assert max(heights) > 20
    assert heights.index(max(heights)) == lengths.index(max(lengths))
    figures = dict(zip(page.locator("dt").all_inner_texts(), page.locator("dd").all_inner_texts(), strict=True))
    assert float(figures["tau"]) == pytest.approx(sum(lengths) / len(lengths), abs=0.01)
    assert float(figures["tokens per step"]) > 1
    assert float(figures["speed-up"].strip("×")) > 0
    rates = page.locator(".rate b").all_inner_texts()
    assert all(float(rate.replace(",", "")) > 0 for rate in rates)


def test_an_answer_streams(space: Space, visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Promise: text, rate and bars are there while the decoder is at work, the left side first."""
    page = visit()
    plain_text(space, PROMPT)
    num_plain = space.gate.num_forwards
    monkeypatch.setattr(space.app, "SECONDS_PER_FRAME", 0.0)
    space.gate.is_held = True
    ask(page)
    space.gate.let_one_pass(wait=True)
    page.wait_for_selector(".side.plain.writes")
    assert page.inner_text(".side.plain .rate small") == "1 tokens"
    assert page.locator(".side.fast.waits").count() == 1
    for _ in range(num_plain - 1 + 3):  # the left side's others; on the right the prompt and two blocks
        space.gate.let_one_pass(wait=True)
    page.wait_for_selector(".by-step .bars > i:nth-child(2)")
    assert page.locator(".side.plain.done").count() == page.locator(".side.fast.writes").count() == 1
    assert page.locator(".by-step .bars > i").count() == page.locator(".side.fast .block").count() - 1 == 2
    assert page.locator(".verdict").count() == 0
    space.gate.open()
    assert texts(page)[0]


def test_an_example_is_a_prompt(space: Space, visit: Callable[..., Any]) -> None:
    page = visit()
    page.get_by_role("button", name=re.compile("^Bob carried")).click()
    page.wait_for_function("document.querySelector('#prompt textarea').value.startsWith('Bob carried')")
    page.click("#write")
    left, right = texts(page)
    assert left == right
    assert left.endswith("#### 8")


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        ({"prompt": " \n"}, r"The prompt is empty: give some text\."),
        (
            {"prompt": "a" * 100_000},
            r"The prompt \(100,000 characters\) is longer than 1,023 tokens, .*: shorten it\.",
        ),
        ({"prompt": "apples " * 2_000}, r"The prompt \(14,000 characters\) is longer than 1,023 tokens, .*"),
        (
            {"target": "TARGET", "drafter": "OTHER"},
            r".*hidden_size is 32 and the target's is 192: load its own target\.",
        ),
        ({"target": "TARGET"}, r"Target and drafter go together: .*"),
        ({"target": "./nowhere", "drafter": "OTHER"}, r"target \./nowhere is not a folder: .*"),
        ({"target": "TARGET", "drafter": "no/such-DFlash"}, r"drafter no/such-DFlash: .*"),
    ],
    ids=["empty", "100k characters", "many tokens", "another target's", "half a pair", "no folder", "not on the Hub"],
)
def test_bad_input_is_one_sentence(
    request_: dict[str, str], said: str, space: Space, visit: Callable[..., Any], tmp_path: Path
) -> None:
    """Promise: refused before any forward of the target, and the page works on."""
    make_drafter().save_pretrained(tmp_path / "other-DFlash")
    paths = {"TARGET": str(embedded_path("tiny-target")), "OTHER": str(tmp_path / "other-DFlash")}
    page = visit()
    ask(page, **{name: paths.get(value, value) for name, value in request_.items()})
    page.wait_for_selector(".problem")
    sentence = page.inner_text(".problem")
    assert re.fullmatch(said, sentence), sentence
    assert "\n" not in sentence
    assert space.gate.num_forwards == 0
    page.fill("#prompt textarea", PROMPT)
    for name in request_.keys() - {"prompt"}:
        page.fill(f"#{name} textarea, #{name} input", "")
    page.click("#write")
    assert texts(page)[0]


def test_the_longest_answer_is_the_sliders(space: Space, visit: Callable[..., Any]) -> None:
    page = visit()
    unfold(page)
    length = page.get_by_label("number input for Longest answer, in tokens")
    length.fill("16")
    length.press("Tab")
    ask(page)
    texts(page)
    assert page.locator(".rate small").all_inner_texts() == ["16 tokens"] * 2


@pytest.mark.parametrize(
    ("margin", "said"),
    [(0.02, "where the target's two logits are 0.02 apart."), (math.nan, "where one of them ends.")],
)
def test_texts_that_part_are_not_called_identical(
    margin: float, said: str, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: the verdict is the comparison's; the embedded pair, in fp32, never shows this one."""
    monkeypatch.setattr(space.app, "first_difference", lambda *_: Difference(4, margin))
    *_, last = space.app.answer(PROMPT, "", "", 16)
    assert f"The texts differ from token 5 on, {said}" in html.unescape(last)
    assert "Identical" not in last


def test_a_chat_template_that_raises_is_one_sentence(space: Space, tmp_path: Path) -> None:
    """Bug: `answer` ended with a TemplateError of jinja2, and the page showed "Error"."""
    target = shutil.copytree(embedded_path("tiny-target"), tmp_path / "target")
    (target / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
    *_, last = space.app.answer(PROMPT, str(target), str(embedded_path("tiny-DFlash")), 16)
    assert "chat template does not take the prompt (roles must alternate)" in last


def test_a_full_device_is_one_sentence(space: Space, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(space.app, "timed_blocks", full)
    *_, last = space.app.answer(PROMPT, "", "", 16)
    assert "The device is out of memory: take a smaller pair or a shorter prompt." in last


def test_a_second_visitor_waits_in_line(space: Space, visit: Callable[..., Any]) -> None:
    """Promise: one answer at a time; who waits, on a phone too, sees why and where; both get the answer to their own prompt."""
    first, second = visit(), visit(viewport={"width": 360, "height": 740})
    other = "Tom has 9 pens and loses 2. How many pens has he left?"
    space.gate.is_held = True
    ask(first)
    space.gate.let_one_pass(wait=True)
    first.wait_for_selector(".side.plain.writes")
    ask(second, other)
    second.get_by_text("queue: 1/1").wait_for()
    box = second.locator("#line .progress-text").bounding_box()
    said = "getComputedStyle(document.querySelector('#line .progress-text'), '::before').content"
    assert "one answer is written at a time" in second.evaluate(said)
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 360
    assert box["y"] + box["height"] <= second.locator("#result").bounding_box()["y"]
    assert second.locator(".side.plain.waits").count() == 1
    assert space.gate.num_forwards <= 2  # the one that passed, and the one that waits
    space.gate.open()
    assert texts(first) == (plain_text(space, PROMPT),) * 2
    assert texts(second) == (plain_text(space, other),) * 2


def test_a_pair_that_is_slow_to_load_holds_up_nobody(
    space: Space, visit: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise: others are answered meanwhile. The pair was once loaded by the thread that decodes, for the first in line."""
    begun, is_over = Event(), Event()

    def load_pair(*_: Any) -> Any:
        begun.set()
        is_over.wait()
        raise ValueError("--target org/slow: it is not there.")

    monkeypatch.setattr(space.app, "load_pair", load_pair)
    first, second = visit(), visit()
    try:
        ask(first, target="org/slow", drafter="org/slow-DFlash")
        begun.wait()
        ask(second)
        assert texts(second) == (plain_text(space, PROMPT),) * 2
    finally:
        is_over.set()
    first.wait_for_selector(".problem")
    assert first.inner_text(".problem") == "target org/slow: it is not there."


def test_code_of_a_target_is_not_run(space: Space, tmp_path: Path) -> None:
    """Promise: the page has no flag for it, and says so."""
    shutil.copytree(embedded_path("tiny-target"), tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (tmp_path / "target" / "config.json").write_text(json.dumps(config))
    (tmp_path / "target" / "own.py").write_text("raise SystemExit('it ran')")
    make_drafter().save_pretrained(tmp_path / "other-DFlash")
    *_, (_, refusal) = space.app.fetch(str(tmp_path / "target"), str(tmp_path / "other-DFlash"))
    assert refusal == "This page runs no code of a checkpoint: name a pair that holds none."
    assert "runs no code" in next(space.app.answer(PROMPT, "", "", 16, refusal))


def leave(page: Any) -> None:
    page.close()


def press_stop(page: Any) -> None:
    page.click("#stop")
    page.wait_for_selector(".side.plain.stopped")


@pytest.mark.parametrize("go", [leave, press_stop])
def test_who_leaves_makes_room(go: Callable[[Any], None], space: Space, visit: Callable[..., Any]) -> None:
    """Promise: the decode of a visitor who left, or pressed Stop, ends early, and the next one is served."""
    first, second = visit(), visit()
    ask(second, space.app.PROBLEMS[0])
    texts(second)
    whole = space.gate.num_forwards
    space.gate.reset()
    space.gate.is_held = True
    ask(first, space.app.PROBLEMS[0])
    space.gate.let_one_pass(wait=True)
    first.wait_for_selector(".side.plain.writes")
    go(first)
    ask(second, space.app.PROBLEMS[0])
    while not second.locator(".side.plain.writes").count():
        space.gate.let_one_pass()
    assert space.gate.num_forwards < whole / 2
    space.gate.open()
    left, right = texts(second)
    assert left == right != ""
    assert whole < space.gate.num_forwards < whole * 1.5


CONTRAST = """() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = node => {
    for (; node; node = node.parentElement) {
      const colour = channels(getComputedStyle(node).backgroundColor);
      if (colour.length === 3 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const found = {};
  for (const name of ['h1', '.head p', '.answer', '.answer .drafted', '.answer .own', '.side small', '.verdict', 'dd',
                      'dt', 'figcaption', '.histogram b', '.note', '#line p']) {
    const node = document.querySelector(name);
    const [a, b] = [light(channels(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    found[name] = (a + 0.05) / (b + 0.05);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_readable(scheme: str, width: int, visit: Callable[..., Any]) -> None:
    """Promise: contrast as WCAG AA asks (4.5), light and dark, and nothing is wider than the window, a phone's too."""
    page = visit(viewport={"width": width, "height": 800}, color_scheme=scheme)
    ask(page)
    texts(page)
    assert ("dark" in (page.get_attribute("body", "class") or "").split()) == (scheme == "dark")
    contrast = page.evaluate(CONTRAST)
    assert min(contrast.values()) >= 4.5, contrast
    assert page.evaluate("document.documentElement.scrollWidth") == width
    left, right = page.locator(".side.plain").bounding_box(), page.locator(".side.fast").bounding_box()
    assert (left["y"] == right["y"]) == (width == 1280)
