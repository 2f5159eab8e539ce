"""Lets a target's own `generate` run the loop of the DFlash checkpoint that this file lies in.

    drafter = AutoModel.from_pretrained("org/drafter", trust_remote_code=True)
    target.generate(**inputs, custom_generate="org/drafter", trust_remote_code=True, drafter=drafter)

Sampling, stopping and streaming are `generate`'s own arguments; what cannot be exact is refused by name.
"""

from typing import Any


def generate(model: Any, inputs: Any = None, drafter: Any = None, **kwargs: Any) -> Any:
    """`drafter.spec_generate` with `generate`'s arguments, which arrive as the caller gave them.

    Args:
        model: The target, whose `generate` was called.
        inputs: The prompt's ids, under `generate`'s first name for them.
        drafter: The DFlash model, loaded from the checkpoint.
        kwargs: All other arguments of `generate`.

    Raises:
        ValueError: without a drafter.
    """
    if not hasattr(drafter, "spec_generate"):
        raise ValueError(
            f"drafter={drafter!r} cannot draft: pass drafter=AutoModel.from_pretrained(<this checkpoint>, "
            "trust_remote_code=True) to generate."
        )
    given = {name: value for name, value in kwargs.items() if value is not None}
    input_ids = given.pop("input_ids", inputs)
    return drafter.spec_generate(input_ids=input_ids, target=model, **given)
