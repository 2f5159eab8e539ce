"""A target's own answers as training data: to rows of any form, written here or on a server, and resumed."""

from .answer_file import check_answer_file
from .run import RegenerationRecord, RegenerationRun, regenerate_data
from .server_writer import ServerWriter
from .settings import RegenerationSettings
from .target_writer import Answer, Regenerated, Request, Sampling, TargetWriter, regenerate, row_seed


__all__ = [
    "Answer",
    "Regenerated",
    "RegenerationRecord",
    "RegenerationRun",
    "RegenerationSettings",
    "Request",
    "Sampling",
    "ServerWriter",
    "TargetWriter",
    "check_answer_file",
    "regenerate",
    "regenerate_data",
    "row_seed",
]
