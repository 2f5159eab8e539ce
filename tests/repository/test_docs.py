"""README and docs/: every snippet runs, every command exists, every link leads somewhere, every public name has its entry."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from families import FAMILIES
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

import dflash
from dflash.checkpoints import export_embedded_pair
from dflash.cli import app as cli
from dflash.training import (
    BatchPlan,
    Example,
    TrainingSettings,
    build_optimizers,
    estimate_memory,
    new_drafter,
    read_yaml,
)


ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [path.relative_to(ROOT).as_posix() for path in PAGES]
COMMANDS = typer.main.get_command(cli.app).commands
MADE = {"docs/cards/", "docs/changelog.md", "docs/reference/commands/", "docs/reference/files.md"}  # by docs/make.py

# A published pair in a snippet is run with the embedded one.
STAND_INS = {
    '"z-lab/Qwen3-8B-DFlash-b16"': '"demo/tiny-DFlash"',
    '"Qwen/Qwen3-8B"': '"demo/tiny-target"',
    '"cuda"': '"cpu"',
}
NEW_TOKENS = "12"  # that a snippet writes at most: whether it runs does not depend on the length of its text
NOT_RUN = r"<!-- not run: ([^\n]+) -->\n"


def runs(why: str | None) -> bool:
    """Whether a snippet runs here, by why it is not run: one that needs a package does where that is installed."""
    needed = re.fullmatch(r"needs (\w+)", why or "")
    return why is None or (needed is not None and importlib.util.find_spec(needed[1]) is not None)


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name: str, language: str) -> list[tuple[str | None, str]]:
    """The fenced blocks of a page: why one is not run, if it says so, and its code."""
    found = re.findall(rf"(?:{NOT_RUN})?^( *)```{language}\n(.*?)^ *```", text_of(name), re.DOTALL | re.MULTILINE)
    return [(why or None, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)) for why, indent, code in found]


def commands(name: str) -> list[list[str]]:
    """The arguments of every `dflash ...` line of a page."""
    lines = [line for _, code in blocks(name, "bash") for line in code.splitlines()]
    found = [re.search(r"(?:^|[|] ?)dflash (.*)", line) for line in lines]
    return [shlex.split(match[1], comments=True) for match in found if match]


@pytest.fixture(scope="module")
def site() -> Any:
    spec = importlib.util.spec_from_file_location("docs_make", ROOT / "docs" / "make.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `dflash export-demo demo` writes; read-only."""
    folder = tmp_path_factory.mktemp("exported") / "demo"
    export_embedded_pair(folder)
    return folder


@pytest.fixture
def run(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, Any]], None]:
    """Runs a snippet beside the folders of `dflash export-demo demo`, a published pair replaced by these."""
    (tmp_path / "demo").symlink_to(demo)
    monkeypatch.chdir(tmp_path)

    def run(code: str, names: dict[str, Any]) -> None:
        for published, here in STAND_INS.items():
            code = code.replace(published, here)
        code = re.sub(r"(max_new_tokens(?:=|\": ))\d+", rf"\g<1>{NEW_TOKENS}", code)
        exec(compile(code, "<snippet>", "exec"), names)

    return run


def test_readme_is_short_and_begins_with_the_published_pair() -> None:
    readme = text_of("README.md")
    assert len(readme.split()) <= 1700
    code = blocks("README.md", "python")[0][1]
    assert all(published in code for published in STAND_INS)
    assert code == next(code for _, code in blocks("docs/quickstart.md", "python"))  # one snippet, not two versions


@pytest.mark.parametrize("name", [name for name in NAMES if any(runs(why) for why, _ in blocks(name, "python"))])
def test_snippets_run(name: str, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Promise: what a page shows can be typed in, after the snippet that loads the pair; what is not run says why."""
    names: dict[str, Any] = {"__name__": "__main__"}
    if name not in ("README.md", "docs/quickstart.md") and "quickstart" in text_of(name):
        run(blocks("README.md", "python")[0][1], names)
    has_native_loop = hasattr(GenerationConfig(), "speculation_type")  # transformers 5.15 or later
    for why, code in blocks(name, "python"):
        if runs(why) and (has_native_loop or "speculation_type" not in code):
            run(code, names)
    if name == "README.md":
        assert re.search(r"tau \d+\.\d\d, \d+\.\d\d tokens per step", capsys.readouterr().out)


@pytest.mark.parametrize("name", [name for name in NAMES if commands(name)])
def test_commands_are_those_that_exist(name: str) -> None:
    """Promise: every command of a page is parsed as it stands: its name, its flags, their values."""
    for arguments in commands(name):
        command = COMMANDS[arguments[0]]
        with command.make_context(arguments[0], arguments[1:]):
            pass


@pytest.fixture(scope="module")
def eight_b() -> Any:
    """Qwen3-8B and a new drafter for it, without storage."""
    shape = {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        config = Qwen3Config(**shape, head_dim=128, intermediate_size=12288, vocab_size=151936)
        target = Qwen3ForCausalLM(config).to(torch.bfloat16)
        return SimpleNamespace(target=target, drafter=new_drafter(target, mask_token_id=151669).float())


@pytest.mark.parametrize(("place", "processes"), [(0, 1), (1, 8)], ids=["one GPU", "eight GPUs"])
def test_the_configurations_of_an_8b_target_are_settings_that_fit(
    place: int, processes: int, eight_b: Any, tmp_path: Path
) -> None:
    """Promise: every line is a setting, and the estimate leaves a tenth of 80 GB, whatever the length of the texts."""
    _, text = blocks("docs/how-to/training.md", "yaml")[place]
    (tmp_path / "run.yaml").write_text(text)
    given = read_yaml(tmp_path / "run.yaml", ["target", "data", "output"])
    settings = TrainingSettings(**{name: given[name] for name in given.keys() - {"target", "data", "output"}})
    rates = settings.learning_rate, settings.weight_decay, settings.muon_rate(4096)
    where = {"num_processes": processes, "device": torch.device("cuda")}
    trainer: Any = SimpleNamespace(
        **vars(eight_b),
        settings=settings,
        accelerator=SimpleNamespace(**where),
        optimizers=build_optimizers(eight_b.drafter, *rates),
        precision=settings.mixed_precision,
        attention="flex_blocks",
        plan=BatchPlan(settings.num_anchors, settings.batch_tokens),
        num_micro_batches=processes * settings.gradient_accumulation_steps,
    )
    for length in (64, 256, 540, 1000, settings.max_length):
        one = Example([5] * length, [1] * length)
        trainer.examples = [one] * (2 * settings.batch_tokens // length)
        assert sum(estimate_memory(trainer).values()) < 0.9 * 80e9, length


def test_a_flag_that_does_not_exist_is_noticed() -> None:
    """Guards the check itself."""
    with pytest.raises(Exception, match="No such option"):
        COMMANDS["demo"].make_context("demo", ["--promts", "5"])


def test_quickstart_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Promise: the commands that need no download work as they stand, one after another."""
    monkeypatch.chdir(tmp_path)
    done = []
    for arguments in commands("docs/quickstart.md"):
        if not any("Qwen/" in argument for argument in arguments) and "--prompt" not in arguments:
            cli.app(arguments, standalone_mode=False)
            done.append(arguments[0])
    assert done == ["demo", "export-demo", "check", "serve"]
    assert "vllm serve demo/tiny-target" in capsys.readouterr().out


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r" ", "-", re.sub(r"[^\w\- ]", "", heading.lower())) for heading in headings}


@pytest.mark.parametrize("name", [*NAMES, "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"])
def test_links_lead_somewhere(name: str) -> None:
    """Promise: in the repository every relative link is a file and every anchor a heading. The built site is checked by Zensical."""
    text = re.sub(r"```.*?```", "", text_of(name), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / name).parent / path if path else ROOT / name
        relative = target.resolve().relative_to(ROOT.resolve()).as_posix()
        if any(f"{relative}/".startswith(made) or relative == made for made in MADE):
            continue
        assert target.exists(), f"{name}: {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{name}: {link}"


def test_the_number_of_families_is_that_of_the_table() -> None:
    """Bug: README said "more than 50" of 50."""
    text = {family.kind for family in FAMILIES.values() if family.images is None}
    with_images = {family.kind for family in FAMILIES.values() if family.images is not None}
    said = f"{len(text)} families, from Qwen3, Llama and Gemma to gpt-oss, DeepSeek-V3 and Qwen3.5, and {len(with_images - text)} more that"
    assert said in text_of("README.md")


def test_every_public_name_has_an_entry() -> None:
    """Promise: what `dflash` exports is in the reference, once, and nothing else is."""
    entries = re.findall(r"^::: dflash\.(\w+)$", text_of("docs/reference/python.md"), re.MULTILINE)
    assert sorted(entries) == sorted(dflash.__all__)
    for name in dflash.__all__:
        assert (getattr(dflash, name).__doc__ or "").strip(), name


def test_every_room_has_a_page() -> None:
    """Promise: the packages that export names of their own are in the reference; their entries follow `__all__`."""
    shown = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    for path in sorted((ROOT / "dflash").glob("*/__init__.py")):
        if re.search(r"^__all__", path.read_text(encoding="utf-8"), re.MULTILINE):
            assert re.search(rf"^::: dflash\.{path.parent.name}$", shown, re.MULTILINE), path.parent.name


def test_made_pages_say_what_their_sources_say(site: Any) -> None:
    """Promise: a page for every command with all its flags, a line for every module, a page for every card."""
    pages = site.pages()
    for name, command in COMMANDS.items():
        page = pages[f"reference/commands/{name}.md"]
        shown = [
            parameter for parameter in command.params if not getattr(parameter, "hidden", False)
        ]  # others are removed
        flags = [flag for parameter in shown for flag in (*parameter.opts, *parameter.secondary_opts)]
        assert flags
        assert all(flag in page for flag in flags if flag.startswith("--")), name
        assert f"({name}.md)" in pages["reference/commands/index.md"]
    for path in (ROOT / "dflash" / "model").glob("*_dflash.py"):
        assert f"`{path.name}`: " in pages["reference/files.md"]
    assert {f"cards/{path.stem}.md" for path in (ROOT / "model_cards").glob("*.md")} - set(pages) == {
        "cards/README.md"
    }


def test_a_name_in_a_docstring_leads_to_its_entry(site: Any, tmp_path: Path) -> None:
    """Promise: [`name`] of a docstring is a link on the reference's pages, without brackets where it has no entry."""
    reference = tmp_path / "reference"
    reference.mkdir()
    (reference / "python.html").write_text('<h2 id="dflash.DFlashOutput"></h2>')
    (reference / "engine.html").write_text("a [<code>DFlashOutput</code>] of [<code>nobody</code>]")
    site.link_names(tmp_path)
    link = '<a href="python.html#dflash.DFlashOutput"><code>DFlashOutput</code></a>'
    assert (reference / "engine.html").read_text() == f"a {link} of <code>nobody</code>"


def test_every_page_is_in_the_navigation_once(site: Any) -> None:
    """Promise: each entry of the navigation is a page, and each page but a card has one entry. Zensical looks for neither."""

    def entries(nav: Any) -> Iterator[str]:
        for item in nav.values() if isinstance(nav, dict) else nav:
            if isinstance(item, str):
                yield item
            else:
                yield from entries(item)

    in_navigation = sorted(entries(site.configuration()["nav"]))
    pages = [name for name in site.contents() if name.endswith(".md")]
    assert in_navigation == sorted(name for name in pages if not name.startswith("cards/") or name == "cards/index.md")


def test_links_that_leave_the_folder_lead_to_copies(site: Any) -> None:
    """Promise: plots and cards that docs show from other folders are on the site, and no page leads out of it."""
    contents = site.contents()
    for name in contents:
        if not name.endswith(".md"):
            continue
        text = re.sub(r"```.*?```|`[^`\n]*`", "", contents[name].decode(), flags=re.DOTALL)
        for link in re.findall(r"\]\(((?!http)[^)#\s]+)", text):
            path = os.path.normpath(Path("/") / name / ".." / link)
            assert path.lstrip("/") in contents, f"{name}: {link}"


def test_a_made_page_is_never_written_here() -> None:
    for made in MADE:
        assert not (ROOT / made).exists(), made


def test_memory_of_the_published_pair_is_that_of_its_shapes() -> None:
    """Promise: the gigabytes in README and quickstart follow from the shapes on the card, in bfloat16."""
    drafters = json.loads(text_of("model_cards/drafters.json"))["drafters"]
    drafter = next(drafter for drafter in drafters if drafter["id"] == "z-lab/Qwen3-8B-DFlash-b16")
    hidden, inner, heads, kv_heads, head, vocabulary, depth = 4096, 12288, 32, 8, 128, 151936, 36
    card = text_of("model_cards/Qwen3-8B-DFlash-b16.md")
    assert drafter
    for fact in (f"hidden size | {hidden}", f"intermediate size | {inner}", f"| {heads}, {kv_heads}, {head} |"):
        assert fact in card
    assert f"vocabulary | {vocabulary}" in card
    assert f"target's layers | {depth}" in card
    layer = hidden * head * (2 * heads + 2 * kv_heads) + 3 * hidden * inner
    target, draft = 2 * (depth * layer + 2 * vocabulary * hidden), 2 * (5 * layer + 5 * hidden * hidden)
    text = 1000 * 2 * 2 * kv_heads * head * (depth + 5)
    said = [f"{target / 1e9:.1f} GB", f"{draft / 1e9:.1f} GB", f"{text / 1e9:.1f} GB"]
    for name in ("README.md", "docs/quickstart.md"):
        assert all(size in text_of(name) for size in said), (name, said)


def without_tables(text: str) -> str:
    return re.sub(r"<!-- ([^>]+):begin -->.*?<!-- \1:end -->|```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "docs/architecture.md"])
def test_figures_outside_tables_are_cited(name: str) -> None:
    """Promise: a speed-up or a tau in prose is one of the paper's for the pair, beside the paper's name; ours stand in tables."""
    drafters = json.loads(text_of("model_cards/drafters.json"))["drafters"]
    paper = json.dumps([d["results"] for d in drafters if d["id"] == "z-lab/Qwen3-8B-DFlash-b16"])
    for paragraph in re.split(r"\n\s*\n", without_tables(text_of(name))):
        figures = re.findall(r"(\d+\.\d+)x|[tT]au (\d+\.\d+)(?: and (\d+\.\d+))?", paragraph)
        for figure in filter(None, (figure for found in figures for figure in found)):
            assert "paper" in paragraph, f"{name}: {figure}"
            assert re.search(rf"\b{figure}\b", paper), f"{name}: {figure}"
        assert not re.search(r"\d tokens/s|\d ms\b|±", paragraph), f"{name}: {paragraph[:200]}"
