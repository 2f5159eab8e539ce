"""Writes the model card of a trained drafter: what it is, how it was trained, what was measured during training."""

from typing import Any

from dflash.checkpoints import drafter_card
from dflash.common.messages import counted

from .settings import Facts


# A template, filled from the content of `training.json` and a few texts of `model_card`.
TRAINING = """
## Training

{sequences}{of_source}, {data[tokens]:,} tokens of which {data[supervised_tokens]:,} are supervised (fingerprint \
{data[fingerprint]}); recipe {recipe}, loss {settings[loss]}, position weights {settings[position_weights]}, \
at most {settings[num_anchors]} anchors per document, seed {settings[seed]}. {parameters:,} parameters; the weights \
are those of step {best_step}; the run took {minutes:.1f} minutes on {on_processes}. Settings, versions, fingerprints \
and the whole curve are in `training.json`.

{paragraphs}| step | loss | accepted tokens per block, teacher-forced | tau on {held_out[prompts]} held-out prompts |
|---|---|---|---|
{points}

{command_line}{licence}"""

ANSWERS = """The answers{to_prompts} ({rows}{licence}) were written by {target} {manner}, thinking {thinking}, at most \
{max_new_tokens:,} tokens each.{command}"""


def model_card(config: Any, name: str, facts: Facts) -> str:
    """Returns the text of a trained drafter's README.md. `facts` is the content of its `training.json`."""
    answers = facts.get("answers")
    command = facts.get("command")
    source = facts.get("data_name")
    licence = facts["settings"]["license"]
    if not licence and answers:
        stated = answers["data"]["license"]
        licence = stated if stated and "," not in stated else None
    card = drafter_card(config, name, facts.get("target_name"))
    if facts.get("target_is_local"):
        card = card.replace(f"base_model: {facts['target_name']}\n", "", 1)
    if licence:
        card = card.replace("---\n", f"---\nlicense: {licence}\n", 1)
    paragraphs = []
    if answers:
        paragraphs.append(_answers_text(answers))
    if "adapted" in facts:
        paragraphs.append("\n".join(adaptation_lines(facts)))
    texts = {
        "sequences": counted(facts["data"]["examples"], "sequence"),
        "of_source": f" of {source}" if source else "",
        "minutes": facts["seconds"] / 60,
        "on_processes": "1 process" if facts["processes"] == 1 else f"{facts['processes']} processes",
        "paragraphs": "".join(f"{paragraph}\n\n" for paragraph in paragraphs),
        "points": "\n".join(map(_point_line, facts["curve"])),
        "command_line": f"`{command}`\n\n" if isinstance(command, str) else "",
        "licence": _licence_text(licence, facts),
    }
    return card + TRAINING.format_map(facts | texts).rstrip("\n") + "\n"


def _point_line(point: Facts) -> str:
    line = "| {step} | "
    line += "{loss:.3f} | {accepted_per_block:.2f} |" if "loss" in point else "| |"
    line += " {tau:.2f} |" if "tau" in point else " |"
    return line.format_map(point)


def adaptation_lines(facts: Facts) -> list[str]:
    """Returns Markdown lines: the adapted drafter, its licence, and each domain's acceptance before and after."""
    origin, curve = facts["adapted"], facts["curve"]
    licence = facts.get("init_licence")
    permission = " The licence allows no derivatives: whoever made this drafter stated that they have permission."
    stated = f"whose licence is {licence}." if licence else "which states no licence."
    lines = [
        f"Adapted from {_code(origin['name'])} (weights {origin['weights']}), {stated}"
        + (permission if facts.get("has_permission") else ""),
        "",
        "| domain | tau before | tau after | share accepted at positions 1, 2, 3, … before | the same after |",
        "|---|---|---|---|---|",
    ]
    best = next(point for point in curve if point["step"] == facts["best_step"])
    for name, before in curve[0]["domains"].items():
        after = best["domains"][name]
        taus = f"{before['tau']:.2f} | {after['tau']:.2f}"
        lines.append(f"| {name} | {taus} | {_shares(before)} | {_shares(after)} |")
    return lines


def _shares(figures: Facts) -> str:
    return " ".join(f"{share:.2f}" for share in figures["accepted"])


def _licence_text(stated: str | None, facts: Facts) -> str:
    """Returns a sentence on the licence of the initial drafter, or that no licence was stated.

    Empty if another part of the card says so.
    """
    inherited = facts.get("init_licence")
    if inherited is None:
        return "" if stated else "No licence was stated for these weights.\n"
    if "adapted" in facts:
        return ""
    return f"These weights were trained from those of a drafter whose licence is {inherited}.\n"


def _answers_text(answers: Facts) -> str:
    """Returns a paragraph on how the answers were generated. `answers` is the manifest of `dflash regenerate`."""
    settings, source = answers["settings"], answers["data"]
    manner = "greedily"
    if settings["temperature"]:
        manner = "at temperature {temperature:g}, top-p {top_p:g}, top-k {top_k}, seed {seed}".format_map(settings)
    revision = f" (revision {answers['revision']})" if answers.get("revision") else ""
    name = _code(source["name"])
    return ANSWERS.format(
        target=(_code(answers["target"]) or "the target") + revision,
        manner=manner,
        thinking="on" if settings["thinking"] else "off",
        max_new_tokens=settings["max_new_tokens"],
        to_prompts=f" to the prompts of {name}" if name else "",
        rows=counted(source["rows"], "row"),
        licence=f", licence {source['license']}" if source["license"] else "",
        command=f" `{answers['command']}`" if answers.get("command") else "",
    )


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""
