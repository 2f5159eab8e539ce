"""Words for a user."""

import re


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
