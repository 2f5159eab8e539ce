"""JSON that a person or another tool wrote: what Python's reader raises is one ValueError, whose message is a phrase."""

import json
from typing import Any


BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # with which Windows begins text files


def parsed_json(content: bytes) -> Any:
    """The value of a JSON text in UTF-8. A byte order mark is skipped.

    Raises:
        ValueError: what is wrong, to be read after the name of the file or line: "is not UTF-8".
    """
    try:
        return json.loads(content.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise ValueError("is not UTF-8") from error
    except json.JSONDecodeError as error:
        place = f"column {error.colno}"
        if error.lineno > 1:
            place = f"line {error.lineno}, {place}"
        raise ValueError(f"is not JSON ({error.msg}, {place})") from error
    except ValueError as error:  # a number of thousands of digits
        raise ValueError(f"cannot be read ({error})") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply to be read") from error
