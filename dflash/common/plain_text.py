"""Text that a tokenizer can take."""


def check_text(text: str, what: str = "The prompt") -> None:
    """Raises ValueError for half a surrogate pair: JSON can write one, and Python makes one of a byte that is not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = text[error.start]
        raise ValueError(
            f"{what} holds {half!r} at character {error.start + 1}, which is no character: give the text in UTF-8."
        ) from error
