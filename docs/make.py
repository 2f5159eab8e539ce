"""Builds the documentation with Zensical: `python docs/make.py build`, or `serve` while you write.

Commands, files, cards and the changelog are pages that are made from their sources. They are written to `.docs/`, beside a copy of
the pages of this folder. Nothing there is committed, so no page can differ from its source.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import typer
import yaml


ROOT = Path(__file__).parents[1]
PROJECT = ROOT / ".docs"  # what Zensical reads
SITE = PROJECT / "site"
COMMANDS = "reference/commands"
# Links to files outside this folder, and where their copies are on the site.
OUTSIDE = {"](../benchmarks/results/": "](results/", "](../model_cards/README.md": "](cards/index.md"}


def main() -> int:
    """The exit status of Zensical. `build` fails for a warning too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["build", "serve"])
    what = parser.parse_args().what
    write_project(PROJECT)
    options = ["--strict"] if what == "build" else []
    config = str(PROJECT / "mkdocs.yml")
    status = subprocess.run([sys.executable, "-m", "zensical", what, "--config-file", config, *options]).returncode
    if status == 0 and what == "build":
        link_names(SITE)
    return status


def write_project(folder: Path) -> None:
    """Writes the configuration and all pages to `folder`. Pages that are as they were keep their time."""
    docs = folder / "docs"
    wanted = contents()
    for path in docs.rglob("*"):
        if path.is_file() and path.relative_to(docs).as_posix() not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = docs / name
        if not path.exists() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    settings = yaml.safe_dump(configuration(), sort_keys=False, allow_unicode=True)
    (folder / "mkdocs.yml").write_text(settings, encoding="utf-8")


def configuration() -> dict[str, Any]:
    """`mkdocs.yml` as Zensical reads it beside the pages: with the commands in the order of `dflash --help`."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    for section in config["nav"]:
        for entry in section.get("Reference", ()):
            if "Commands" in entry:
                pages = [{f"dflash {name}": f"{COMMANDS}/{name}.md"} for name in commands()]
                entry["Commands"] = [{"All commands": f"{COMMANDS}/index.md"}, *pages]
    return config


def contents() -> dict[str, bytes]:
    """Every file of the site, by its path: pages, made pages, pictures and styles."""
    folder = ROOT / "docs"
    paths = [path for path in sorted(folder.rglob("*")) if path.suffix in (".md", ".svg", ".css")]
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}
    files |= {name: text.encode() for name, text in pages().items()}
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files[f"results/{picture.name}"] = picture.read_bytes()
    for name, content in files.items():
        if name.endswith(".md"):
            for outside, here in OUTSIDE.items():
                content = content.replace(outside.encode(), here.encode())
            files[name] = content
    return files


def link_names(site: Path) -> None:
    """Links of docstrings: [`name`] leads to the entry of that name, where there is one."""
    reference = site / "reference"
    texts = {path.name: path.read_text(encoding="utf-8") for path in sorted(reference.glob("*.html"))}
    entries: dict[str, str] = {}
    for page, text in texts.items():
        for identifier in re.findall(r'id="(dflash[.\w]*)"', text):
            entries.setdefault(identifier.rpartition(".")[2], f"{page}#{identifier}")

    def linked(match: re.Match[str]) -> str:
        code = f"<code>{match[1]}</code>"
        entry = entries.get(match[1])
        return f'<a href="{entry}">{code}</a>' if entry else code

    for page, text in texts.items():
        (reference / page).write_text(re.sub(r"\[<code>(\w+)</code>\]", linked, text), encoding="utf-8")


def pages() -> dict[str, str]:
    """The text of every made page, by its path."""
    made = {f"{COMMANDS}/{name}.md": command_page(name, command) for name, command in commands().items()}
    made[f"{COMMANDS}/index.md"] = commands_page()
    made["reference/files.md"] = files_page()
    made["changelog.md"] = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").replace("](docs/", "](")
    for card in sorted((ROOT / "model_cards").glob("*.md")):
        name = "index" if card.stem == "README" else card.stem
        made[f"cards/{name}.md"] = card_page(card.read_text(encoding="utf-8"))
    return made


def commands() -> dict[str, Any]:
    """The sub-commands of `dflash`, by name."""
    from dflash.cli.app import app

    return dict(typer.main.get_command(app).commands)


def command_page(name: str, command: Any) -> str:
    """The help of `dflash NAME`, its options in the same groups."""
    with command.make_context(name, [], resilient_parsing=True) as context:
        usage = " ".join(["dflash", name, *command.collect_usage_pieces(context)])
        parts = [f"# dflash {name}", _paragraphs(command.help or ""), f"```text\n{usage}\n```"]
        groups: dict[str, list[str]] = {}
        for parameter in command.get_params(context):
            is_argument = parameter.param_type_name == "argument"
            panel = getattr(parameter, "rich_help_panel", None) or ("Arguments" if is_argument else "Options")
            record = parameter.get_help_record(context)
            if record is not None:
                groups.setdefault(panel, []).append(_entry(*record))
        parts += [f"## {panel}\n\n" + "\n".join(entries) for panel, entries in groups.items()]
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """The list of sub-commands."""
    lines = [
        f"- [`dflash {name}`]({name}.md): {_first_paragraph(command.help)}" for name, command in commands().items()
    ]
    return "# Commands\n\nEach page is made from the command's own `--help`.\n\n" + "\n".join(lines) + "\n"


def files_page() -> str:
    """Every module of the package with the first paragraph of its docstring."""
    parts = ["# Files", "One line for each module: the first of its docstring."]
    folders: dict[str, list[str]] = {}
    for path in sorted((ROOT / "dflash").rglob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        folder = path.parent.relative_to(ROOT).as_posix()
        if docstring:
            folders.setdefault(folder, []).append(f"- `{path.name}`: {_first_paragraph(docstring)}")
    return "\n\n".join([*parts, *(f"## {folder}\n\n" + "\n".join(lines) for folder, lines in folders.items())]) + "\n"


def card_page(card: str) -> str:
    """A model card without its metadata, and without links to files that are not on the site."""
    text = re.sub(r"\A---\n.*?\n---\n", "", card, flags=re.DOTALL)
    return re.sub(r"\[([\w.]+)\]\((?!http)[\w.]+\.json\)", r"`model_cards/\1`", text)


def _entry(name: str, said: str) -> str:
    return f"- `{name}`  \n  {_escaped(said)}" if said else f"- `{name}`"


def _paragraphs(text: str) -> str:
    """The paragraphs of a help text; a command on a line of its own stays there."""
    return re.sub(r"\n(torchrun [^\n,]+)", r"  \n`\1`  ", _escaped(text.replace("\b\n", "").strip())).replace(
        "\\_", "_"
    )


def _first_paragraph(text: str | None) -> str:
    return _escaped(" ".join((text or "").strip().split("\n\n")[0].split()))


def _escaped(text: str) -> str:
    """Plain text with its Markdown characters escaped."""
    return re.sub(r"([<\[\]*_])", r"\\\1", text) if "`" not in text else text.replace("<", "&lt;")


if __name__ == "__main__":
    sys.exit(main())
