"""The findings of all rules, and what each engine would make of the checkpoint."""

import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from inspect import isgeneratorfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from . import config_rules, file_rules, pair_rules, weight_rules
from .checkpoint_files import read_checkpoint, read_target
from .engine_readings import ENGINES
from .findings import ALL, SEVERITIES, VERDICT_OF, Finding


def _rules(*modules: ModuleType) -> list[Callable[..., Iterator[Finding]]]:
    """The public generator functions of modules, in the order in which they are written."""
    own = [
        one for module in modules for one in vars(module).values() if getattr(one, "__module__", "") == module.__name__
    ]
    return [one for one in own if isgeneratorfunction(one) and not one.__name__.startswith("_")]


@dataclass(frozen=True)
class Verdict:
    """What one engine makes of the checkpoint: works, degraded (it runs and drafts worse) or fails; and why."""

    engine: str
    name: str
    verdict: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Report:
    """The findings, worst first, and a verdict for each engine that was asked about."""

    name: str
    folder: Path
    dialect: str
    target: str | None
    findings: tuple[Finding, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def is_ok(self) -> bool:
        """Whether no engine that was asked about fails."""
        return all(verdict.verdict != "fails" for verdict in self.verdicts)

    def as_json(self) -> dict[str, Any]:
        """The report as JSON can hold it; a verdict names its rules."""
        return {
            "folder": str(self.folder),
            "dialect": self.dialect,
            "target": self.target,
            "ok": self.is_ok,
            "verdicts": [
                {
                    "engine": verdict.engine,
                    "verdict": verdict.verdict,
                    "because": [{"rule": f.rule, "field": f.field, "fix": f.fix} for f in verdict.findings],
                }
                for verdict in self.verdicts
            ],
            "findings": [{**asdict(finding), "engines": list(finding.engines)} for finding in self.findings],
        }


def check(folder: str | os.PathLike[str], target: str | None = None, engines: tuple[str, ...] = ALL) -> Report:
    """Everything that the rules find in a drafter's checkpoint, for `engines`; reads all weights and builds no model.

    Args:
        folder: The checkpoint: a folder or an id on the Hub.
        target: Its target's folder or Hub id; with it the pair is checked too.
        engines: Keys of `ENGINES`; findings that concern none of them are left out.

    Raises:
        ValueError: if there is no config.json in `folder` or at `target`, or it is not a JSON object; for an engine that
            is not one of `ENGINES`.

    Example:
        >>> report = check("drafter-DFlash", target="Qwen/Qwen3-8B")
        >>> print([verdict.engine for verdict in report.verdicts if verdict.verdict == "works"])
    """
    if unknown := set(engines) - set(ENGINES):
        raise ValueError(f"{', '.join(sorted(unknown))} is no engine (--engine): name one of {', '.join(ENGINES)}.")
    checkpoint = read_checkpoint(folder)
    asked = [(rule.__name__, rule(checkpoint)) for rule in _rules(config_rules, weight_rules, file_rules)]
    if target is not None:
        read = read_target(target)
        asked += [(rule.__name__, rule(checkpoint, read)) for rule in _rules(pair_rules)]
    found = [replace(finding, rule=name.replace("_", "-")) for name, findings in asked for finding in findings]
    findings = _without_repeats([finding for finding in found if set(finding.engines) & set(engines)])
    verdicts = []
    for engine in engines:  # fails for an error, degraded for a warning
        mine = tuple(one for one in findings if engine in one.engines and one.severity != "note")
        verdicts.append(Verdict(engine, ENGINES[engine], VERDICT_OF[mine[0].severity if mine else "note"], mine))
    return Report(checkpoint.name, checkpoint.folder, checkpoint.form, target, tuple(findings), tuple(verdicts))


def _without_repeats(found: list[Finding]) -> list[Finding]:
    """Worst first, nothing said twice.

    A reading is left out for an engine that a rule fails for the same field, and the library's own refusal where
    anything else already fails there.
    """
    errors = [finding for finding in found if finding.severity == "error"]
    said = {(engine, f.field) for f in errors if f.rule != "reading" for engine in f.engines}
    is_refused = any("remote-code" in f.engines and f.rule not in ("library", "code") for f in errors)
    kept = []
    for finding in found:
        if finding.rule == "library" and is_refused:
            continue
        if finding.rule == "reading":
            engines = tuple(engine for engine in finding.engines if (engine, finding.field) not in said)
            if not engines:
                continue
            finding = replace(finding, engines=engines)
        kept.append(finding)
    return sorted(kept, key=lambda finding: SEVERITIES.index(finding.severity))
