"""A report for the terminal: a line for each engine, then the findings with their remedies."""

from collections import Counter
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from dflash.common.messages import counted

from .findings import ALL, SEVERITIES, Finding, engine_names, shown
from .report import Report, Verdict


LOOKS = {"error": ("✗", "bold red"), "warning": ("!", "yellow"), "note": ("·", "dim")}
LOOKS |= {"works": ("✓", "green"), "degraded": LOOKS["warning"], "fails": LOOKS["error"]}
LONGEST_VALUE = 60
INDENT = (0, 0, 0, 2)  # below a finding's field


def report_lines(report: Report) -> RenderableType:
    """The verdicts and the findings, for any width from 60 columns on."""
    title = Text.assemble((report.name or str(report.folder), "bold"), (f"  {report.dialect} form", "dim"))
    if report.target is not None:
        title.append(f", target {report.target}", "dim")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for verdict in report.verdicts:
        mark, style = LOOKS[verdict.verdict]
        table.add_row(
            Text(f"{mark} {verdict.verdict}", style),
            verdict.name,
            Text(_because(verdict), "dim"),
        )
    parts: list[RenderableType] = [title, Text(), table]
    for finding in report.findings:
        parts.append(Text())
        parts += _finding(finding, report)
    counts = Counter(finding.severity for finding in report.findings)
    endings = [counted(counts[name], name) for name in SEVERITIES if counts[name]]
    ending = Text(", ".join(endings) or "nothing found", "dim")
    return Group(*parts, Text(), ending)


def _because(verdict: Verdict) -> str:
    """The fields that decide, each once, the worst ones alone."""
    worst = [finding.field for finding in verdict.findings if finding.severity == verdict.findings[0].severity]
    return ", ".join(dict.fromkeys(worst))


def _finding(finding: Finding, report: Report) -> Iterator[RenderableType]:
    """The field and its value, where it stands and for whom it is wrong, why, and the remedy."""
    value = shown(finding.value)
    if len(value) > LONGEST_VALUE:
        value = value[: LONGEST_VALUE - 1] + "…"
    mark, style = LOOKS[finding.severity]
    place = Text(_place(finding, report), "dim")
    remedy = Table.grid(padding=(0, 1))
    remedy.add_row(
        Text("→", "green"),
        Text(finding.fix),
    )
    yield Text.assemble(
        (f"{mark} ", style),
        (finding.field, "bold"),
        f" = {value}",
    )
    for line in (place, Text(finding.why), remedy):
        yield Padding(line, INDENT)


def _place(finding: Finding, report: Report) -> str:
    """The file, the rule, and the engines, unless the finding concerns them all."""
    place = f"{finding.file} · {finding.rule}"
    if set(finding.engines) == set(ALL):
        return place
    asked = [verdict.engine for verdict in report.verdicts]
    engines = tuple(engine for engine in asked if engine in finding.engines)
    return f"{place} · {engine_names(engines)}"
