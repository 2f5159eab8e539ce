"""What is wrong with a drafter's checkpoint, and what each engine would make of it, before anything is run.

Reads config.json, the safetensors files and the text of the code beside them. Builds no model and runs nothing that a
checkpoint brings. `engine_readings`: what each engine takes from a config; `*_rules`: what is refused, one function a rule, its
engines named in what it yields.
"""

from .engine_readings import ENGINES
from .findings import Finding
from .report import Report, Verdict, check
from .terminal_report import report_lines


__all__ = ["ENGINES", "Finding", "Report", "Verdict", "check", "report_lines"]
