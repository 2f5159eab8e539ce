"""Drafters as folders: converted, checked for each engine, published and served; and the embedded pair."""

from typing import TYPE_CHECKING

from dflash.common.lazy import lazy_names


if TYPE_CHECKING:
    from dflash.common.cards import drafter_card

    from .conversion import convert_checkpoint, export_checkpoint
    from .embedded import (
        DOMINO_NAME,
        DRAFTER_NAME,
        TARGET_NAME,
        Problem,
        embedded_path,
        export_embedded_pair,
        heldout_problems,
        load_embedded_pair,
    )
    from .folders import check_replaceable, replace_folder, save_checkpoint, written_aside
    from .licences import HOW_TO_STATE, Card, Licence, licence_lines, read_card, read_licence
    from .pairing import make_pair, save_pair
    from .publishing import Publication, Published, check_repository, check_token, plan_publication, publish
    from .rules import ENGINES, Finding, Report, Verdict, check, report_lines
    from .serving import ServerCommand, declared_block_size, refuse_unfit, run_server, server_command

__all__ = [
    "DOMINO_NAME",
    "DRAFTER_NAME",
    "ENGINES",
    "HOW_TO_STATE",
    "TARGET_NAME",
    "Card",
    "Finding",
    "Licence",
    "Problem",
    "Publication",
    "Published",
    "Report",
    "ServerCommand",
    "Verdict",
    "check",
    "check_replaceable",
    "check_repository",
    "check_token",
    "convert_checkpoint",
    "declared_block_size",
    "drafter_card",
    "embedded_path",
    "export_checkpoint",
    "export_embedded_pair",
    "heldout_problems",
    "licence_lines",
    "load_embedded_pair",
    "make_pair",
    "plan_publication",
    "publish",
    "read_card",
    "read_licence",
    "refuse_unfit",
    "replace_folder",
    "report_lines",
    "run_server",
    "save_checkpoint",
    "save_pair",
    "server_command",
    "written_aside",
]

__getattr__, __dir__ = lazy_names(__name__, __file__)
