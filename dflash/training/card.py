"""The model card of a trained drafter: what it is, how it was trained, and what was measured meanwhile."""

from typing import Any

from dflash.checkpoints import drafter_card
from dflash.common.messages import counted


def model_card(config: Any, name: str, facts: dict[str, Any]) -> str:
    """The README.md of a trained drafter, filled from its `training.json`."""
    data, settings, answers = facts["data"], facts["settings"], facts.get("answers")
    stated = answers["data"]["license"] if answers else None
    licence = settings["license"] or (stated if stated and "," not in stated else None)
    card = drafter_card(config, name, facts.get("target_name"))
    if facts.get("target_is_local"):
        card = card.replace(f"base_model: {facts['target_name']}\n", "", 1)
    if licence:
        card = card.replace("---\n", f"---\nlicense: {licence}\n", 1)
    source = facts.get("data_name")
    processes = "1 process" if facts["processes"] == 1 else f"{facts['processes']} processes"
    points = [
        f"| {point['step']} | "
        + (f"{point['loss']:.3f} | {point['accepted_per_block']:.2f} | " if "loss" in point else "| | ")
        + (f"{point['tau']:.2f} |" if "tau" in point else " |")
        for point in facts["curve"]
    ]
    lines = [
        "## Training",
        "",
        f"{counted(data['examples'], 'sequence')}{f' of {source}' if source else ''}, {data['tokens']:,} tokens of which "
        f"{data['supervised_tokens']:,} supervised (fingerprint {data['fingerprint']}); recipe "
        f"{facts['recipe']}, loss {settings['loss']}, position weights {settings['position_weights']}, "
        f"{settings['num_anchors']} anchors a sequence, seed {settings['seed']}. {facts['parameters']:,} parameters; the "
        f"weights are those of step {facts['best_step']}, of {facts['seconds'] / 60:.1f} minutes on {processes} in all. Settings, "
        "versions, fingerprints and the whole curve are in `training.json`.",
        "",
        *([_answers_text(answers), ""] if answers else []),
        *([*adaptation_lines(facts), ""] if "adapted" in facts else []),
        f"| step | loss | accepted drafts per block, teacher-forced | tau on {facts['held_out']['prompts']} held-out prompts |",
        "|---|---|---|---|",
        *points,
        "",
        *([f"`{facts['command']}`", ""] if isinstance(facts.get("command"), str) else []),
        *_licence_lines(licence, facts),
    ]
    return card + "\n" + "\n".join(lines)


def adaptation_lines(facts: dict[str, Any]) -> list[str]:
    """What was adapted, under which licence, and the acceptance before and after, by texts and by position."""
    origin, curve, licence = facts["adapted"], facts["curve"], facts.get("init_licence")
    after = next(point for point in curve if point["step"] == facts["best_step"])["domains"]
    lines = [
        f"Adapted from {_code(origin['name'])} (weights {origin['weights']}), "
        + (f"whose licence is {licence}." if licence else "which states no licence.")
        + (
            " The licence allows no derivatives: who made this one stated to have permission."
            if facts.get("has_permission")
            else ""
        ),
        "",
        "| held-out prompts of | tau before | tau after | accepted at positions 1, 2, 3, … before | after |",
        "|---|---|---|---|---|",
    ]
    for name, before in curve[0]["domains"].items():
        shares = [" ".join(f"{share:.2f}" for share in one["accepted"]) for one in (before, after[name])]
        lines.append(f"| {name} | {before['tau']:.2f} | {after[name]['tau']:.2f} | {' | '.join(shares)} |")
    return lines


def _licence_lines(stated: str | None, facts: dict[str, Any]) -> list[str]:
    """What neither the front matter nor what was adapted says: the licence of the drafter of `init`, or that none is known."""
    inherited = facts.get("init_licence")
    if inherited is not None:
        line = f"These weights were trained from those of a drafter whose licence is {inherited}."
        return [] if "adapted" in facts else [line, ""]
    return [] if stated else ["No licence was stated for these weights.", ""]


def _answers_text(answers: dict[str, Any]) -> str:
    """How the answers in the data were written, by the manifest beside it."""
    how, source = answers["settings"], answers["data"]
    manner = "greedily"
    if how["temperature"]:
        manner = (
            f"at temperature {how['temperature']:g}, top-p {how['top_p']:g}, top-k {how['top_k']}, seed {how['seed']}"
        )
    revision = f" (revision {answers['revision']})" if answers.get("revision") else ""
    licence = f", licence {source['license']}" if source["license"] else ""
    return (
        f"Its answers were written by {_code(answers['target']) or 'the target'}{revision} {manner}, thinking "
        f"{'on' if how['thinking'] else 'off'}, at most {how['max_new_tokens']:,} tokens each, to "
        f"{_code(source['name']) or 'rows'} ({counted(source['rows'], 'row')}{licence})."
        + (f" `{answers['command']}`" if answers.get("command") else "")
    )


def _code(name: str | None) -> str:
    return f"`{name}`" if name else ""
