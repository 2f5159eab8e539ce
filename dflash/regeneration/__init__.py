"""Makes training data: a target writes new answers to the prompts of a data set, in this process or on a server."""

from .answer_file import check_answer_file
from .run import RegenerationRecord, RegenerationRun, regenerate_data
from .server_writer import ServerWriter, read_configs
from .settings import RegenerationSettings
from .sources import answer_sources
from .target_writer import Answer, AnswerRequest, Regenerated, Sampling, TargetWriter, regenerate, row_seed


__all__ = [
    "Answer",
    "AnswerRequest",
    "Regenerated",
    "RegenerationRecord",
    "RegenerationRun",
    "RegenerationSettings",
    "Sampling",
    "ServerWriter",
    "TargetWriter",
    "answer_sources",
    "check_answer_file",
    "read_configs",
    "regenerate",
    "regenerate_data",
    "row_seed",
]
