"""How acceptance is averaged, wherever verify steps are counted."""


def tau(num_tokens: int, num_steps: int) -> float:
    """Mean acceptance length: the tokens that verify steps gave before stop and length cuts, per step; NaN without a step."""
    return num_tokens / num_steps if num_steps else float("nan")
