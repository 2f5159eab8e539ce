"""A target's own answers as training data: to rows of any form, here or on a server, resumed where a run was stopped."""

from .answering import Answer, Regenerated, Request, Sampling, TargetWriter, regenerate
from .run import RegenerationRecord, RegenerationSettings, regenerate_data
from .server_writer import ServerWriter


__all__ = [
    "Answer",
    "Regenerated",
    "RegenerationRecord",
    "RegenerationSettings",
    "Request",
    "Sampling",
    "ServerWriter",
    "TargetWriter",
    "regenerate",
    "regenerate_data",
]
