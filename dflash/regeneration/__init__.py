"""A target's own answers as training data: to rows of any form, written here or on a server, and resumed."""

from .answer_file import check_answer_file
from .run import RegenerationRecord, regenerate_data
from .server_writer import ServerWriter
from .settings import RegenerationSettings
from .sources import answer_sources
from .target_writer import Answer, Regenerated, Request, Sampling, TargetWriter, regenerate, row_seed


__all__ = [
    "Answer",
    "Regenerated",
    "RegenerationRecord",
    "RegenerationSettings",
    "Request",
    "Sampling",
    "ServerWriter",
    "TargetWriter",
    "answer_sources",
    "check_answer_file",
    "regenerate",
    "regenerate_data",
    "row_seed",
]
