"""A report for the terminal: a line for each engine, then the findings with their remedies."""

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


def report_lines(report: Report) -> RenderableType:
    """The verdicts and the findings, for any width from 60 columns on."""
    title = Text.assemble((report.name or str(report.folder), "bold"), (f"  {report.dialect} form", "dim"))
    if report.target is not None:
        title.append(f", target {report.target}", "dim")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for verdict in report.verdicts:
        mark, style = LOOKS[verdict.verdict]
        table.add_row(Text(f"{mark} {verdict.verdict}", style), verdict.name, Text(_because(verdict), "dim"))
    parts: list[RenderableType] = [title, Text(), table]
    for finding in report.findings:
        parts += [Text(), *_finding(finding, report)]
    counts = {name: sum(f.severity == name for f in report.findings) for name in SEVERITIES}
    ending = ", ".join(counted(count, name) for name, count in counts.items() if count)
    return Group(*parts, Text(), Text(ending or "nothing found", "dim"))


def _because(verdict: Verdict) -> str:
    """The fields that decide, each once, the worst ones alone."""
    worst = [finding for finding in verdict.findings if finding.severity == verdict.findings[0].severity]
    return ", ".join(dict.fromkeys(finding.field for finding in worst))


def _finding(finding: Finding, report: Report) -> list[RenderableType]:
    """The field and its value, where it stands and for whom it is wrong, why, and the remedy."""
    value = shown(finding.value)
    if len(value) > LONGEST_VALUE:
        value = value[: LONGEST_VALUE - 1] + "…"
    mark, style = LOOKS[finding.severity]
    head = Text.assemble((f"{mark} ", style), (finding.field, "bold"), f" = {value}")
    asked = [verdict.engine for verdict in report.verdicts if verdict.engine in finding.engines]
    whom = "" if set(ALL) <= set(finding.engines) else f" · {engine_names(tuple(asked))}"
    remedy = Table.grid(padding=(0, 1))
    remedy.add_row(Text("→", "green"), Text(finding.fix))
    lines: list[RenderableType] = [Text(f"{finding.file} · {finding.rule}{whom}", "dim"), Text(finding.why), remedy]
    return [head, *(Padding(line, (0, 0, 0, 2)) for line in lines)]
