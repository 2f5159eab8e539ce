"""The findings of all rules, and what each engine would make of the checkpoint."""

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from inspect import isgeneratorfunction
from pathlib import Path
from types import ModuleType
from typing import Any

from . import config_rules, file_rules, pair_rules, weight_rules
from .checkpoint_files import read_checkpoint, read_target
from .engine_readings import ENGINES
from .findings import ALL, SEVERITIES, VERDICT_OF, Finding


def _rules(*modules: ModuleType) -> Iterator[Callable[..., Iterator[Finding]]]:
    """The public generator functions of modules, in the order in which they are written."""
    for module in modules:
        for name, value in vars(module).items():
            if isgeneratorfunction(value) and value.__module__ == module.__name__ and not name.startswith("_"):
                yield value


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
        verdicts = []
        for verdict in self.verdicts:
            because = [{"rule": f.rule, "field": f.field, "fix": f.fix} for f in verdict.findings]
            verdicts.append({"engine": verdict.engine, "verdict": verdict.verdict, "because": because})
        return {
            "folder": str(self.folder),
            "dialect": self.dialect,
            "target": self.target,
            "ok": self.is_ok,
            "verdicts": verdicts,
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
    unknown = sorted(set(engines) - set(ENGINES))
    if unknown:
        raise ValueError(f"{', '.join(unknown)} is no engine (--engine): name one of {', '.join(ENGINES)}.")
    checkpoint = read_checkpoint(folder)
    findings = _findings(_rules(config_rules, weight_rules, file_rules), checkpoint)
    if target is not None:
        findings += _findings(_rules(pair_rules), checkpoint, read_target(target))
    findings = _without_repeats([finding for finding in findings if set(finding.engines) & set(engines)])
    return Report(
        checkpoint.name,
        checkpoint.folder,
        checkpoint.form,
        target,
        tuple(findings),
        tuple(_verdict(engine, findings) for engine in engines),
    )


def _verdict(engine: str, findings: Iterable[Finding]) -> Verdict:
    """What follows for an engine from findings, the worst first: it fails for an error and is degraded for a warning."""
    own = [finding for finding in findings if engine in finding.engines]
    causes = [finding for finding in own if finding.severity != "note"]
    severity = causes[0].severity if causes else "note"
    verdict = VERDICT_OF[severity]
    return Verdict(engine, ENGINES[engine], verdict, tuple(causes))


def _findings(rules: Iterable[Callable[..., Iterator[Finding]]], *checked: Any) -> list[Finding]:
    """What the rules find, each finding with the name of its rule."""
    findings = []
    for rule in rules:
        name = rule.__name__.replace("_", "-")
        for finding in rule(*checked):
            findings.append(replace(finding, rule=name))
    return findings


def _without_repeats(findings: list[Finding]) -> list[Finding]:
    """The findings, worst first, and none twice.

    A reading is left out for an engine that a rule fails for the same field, and the library's own refusal where
    anything else already fails there.
    """
    failing: set[tuple[str, str]] = set()
    is_refused = False
    for finding in findings:
        if finding.severity == "error" and finding.rule != "reading":
            failing.update((engine, finding.field) for engine in finding.engines)
        if finding.severity == "error" and finding.rule not in ("library", "code"):
            is_refused = is_refused or "remote-code" in finding.engines
    once = []
    for finding in findings:
        engines = finding.engines
        if finding.rule == "library" and is_refused:
            continue
        if finding.rule == "reading":
            engines = tuple(engine for engine in engines if (engine, finding.field) not in failing)
        if engines:
            once.append(replace(finding, engines=engines))
    return sorted(once, key=lambda finding: SEVERITIES.index(finding.severity))
