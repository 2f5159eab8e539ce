"""Pages that mkdocs makes from their sources: commands, files, cards, the changelog, and plots of results.

None of them is committed, so none can differ from its source.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import typer


ROOT = Path(__file__).parents[1]
COMMANDS = "reference/commands"


def on_config(config: Any) -> Any:
    """Puts the commands into the navigation, in the order of `dflash --help`."""
    for section in config.nav:
        for entry in section.get("Reference", ()):
            if "Commands" in entry:
                pages = [{f"dflash {name}": f"{COMMANDS}/{name}.md"} for name in commands()]
                entry["Commands"] = [{"All commands": f"{COMMANDS}/index.md"}, *pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages and pictures that are made or lie outside this folder."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    for picture in sorted((ROOT / "benchmarks" / "results").glob("*.png")):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Points links to files outside this folder at their copies on the site."""
    outside = {"](../benchmarks/results/": "](results/", "](../model_cards/README.md": "](cards/index.md"}
    for path, here in outside.items():
        markdown = markdown.replace(path, here)
    return markdown


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Links of docstrings: [`name`] leads to the entry of that name, where there is one."""
    link = r'<autoref optional identifier="dflash.\1"><code>\1</code></autoref>'
    return re.sub(r"\[<code>(\w+)</code>\]", link, html) if page.url.startswith("reference/") else html


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
