"""Whether the Hub answers. Its client asks for half a minute, file by file, before it says that it does not."""

from collections.abc import Callable

from huggingface_hub import constants, utils
from huggingface_hub.utils import get_session


SECONDS_TO_ANSWER = 5
# What the environment asks for (HF_HUB_OFFLINE).
IS_OFFLINE = constants.HF_HUB_OFFLINE


def hub_answers() -> bool:
    """Whether the Hub answers within a few seconds; false if the environment forbids to ask."""
    try:
        get_session().head(constants.ENDPOINT, timeout=SECONDS_TO_ANSWER)
    except Exception:  # depends on the HTTP library of this version
        return False
    return True


def read_cache_without_hub(say: Callable[[str], None]) -> None:
    """If the Hub does not answer, makes this process read files from the cache alone; `say` is called with a sentence on it."""
    if constants.HF_HUB_OFFLINE or hub_answers():
        return
    say(f"{constants.ENDPOINT} does not answer: what it holds is read from the cache alone.")
    _set_offline(True)


def ask_hub_again() -> None:
    """Undoes [`read_cache_without_hub`]: a server outlives a broken network."""
    _set_offline(IS_OFFLINE)


def _set_offline(is_offline: bool) -> None:
    constants.HF_HUB_OFFLINE = is_offline
    # Before 1.0 a session that was made online stays so.
    getattr(utils, "reset_sessions", lambda: None)()
