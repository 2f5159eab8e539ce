"""Words for a user."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without the advice that libraries add; its type if it has none."""
    return str(error).strip().split("\n")[0] or type(error).__name__
