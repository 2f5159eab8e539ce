"""Drafters as folders: read from any dialect, written, checked for each engine, published and served; and the embedded pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dflash.common.lazy import lazy_names


if TYPE_CHECKING:
    from .conversion import convert_checkpoint, export_checkpoint
    from .embedded import (
        DRAFTER_NAME,
        TARGET_NAME,
        Problem,
        embedded_path,
        export_embedded_pair,
        heldout_problems,
        load_embedded_pair,
    )
    from .folders import check_replaceable, replace_folder, save_checkpoint
    from .publishing import Plan, Published, plan, publish
    from .rules import ENGINES, Finding, Report, Verdict, check, report_lines
    from .serving import Launch, declared_block_size, launch, refuse_unfit, run

__all__ = [
    "DRAFTER_NAME",
    "ENGINES",
    "TARGET_NAME",
    "Finding",
    "Launch",
    "Plan",
    "Problem",
    "Published",
    "Report",
    "Verdict",
    "check",
    "check_replaceable",
    "convert_checkpoint",
    "declared_block_size",
    "embedded_path",
    "export_checkpoint",
    "export_embedded_pair",
    "heldout_problems",
    "launch",
    "load_embedded_pair",
    "plan",
    "publish",
    "refuse_unfit",
    "replace_folder",
    "report_lines",
    "run",
    "save_checkpoint",
]

__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "conversion": ("convert_checkpoint", "export_checkpoint"),
        "embedded": (
            "DRAFTER_NAME",
            "TARGET_NAME",
            "Problem",
            "embedded_path",
            "export_embedded_pair",
            "heldout_problems",
            "load_embedded_pair",
        ),
        "folders": ("check_replaceable", "replace_folder", "save_checkpoint"),
        "publishing": ("Plan", "Published", "plan", "publish"),
        "rules": ("ENGINES", "Finding", "Report", "Verdict", "check", "report_lines"),
        "serving": ("Launch", "declared_block_size", "launch", "refuse_unfit", "run"),
    },
)
