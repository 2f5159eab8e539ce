"""Words for a user."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager


# What transformers raises for a repository whose code nobody has trusted.
UNTRUSTED_CODE = re.compile(r"custom (generation )?code.*trust_remote_code", re.DOTALL)
OWN_CODE = "it holds code of its own, which runs only with --trust-remote-code: read that code first"
INSTALL_EVAL = "pip install '.[eval]' in the checkout"  # the package is on no index yet


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the advice that libraries add; its type if it has none.

    Of a repository that holds code, it is a sentence that names the flag of our commands.
    """
    if UNTRUSTED_CODE.search(str(error)):
        return OWN_CODE
    return str(error).strip().split("\n")[0] or type(error).__name__


@contextmanager
def without_load_report() -> Iterator[None]:
    """Hides the table of tensors that transformers logs in the body: what does not fit a drafter is refused in one sentence."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_error(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    logger.addFilter(is_error)  # of the logger's level other messages depend
    try:
        yield
    finally:
        logger.removeFilter(is_error)
