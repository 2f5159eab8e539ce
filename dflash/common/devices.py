"""Whether a device can be used here."""

import torch

from .messages import first_line


def device_fault(device: str) -> str | None:
    """Why nothing can be computed on the device of this name; `None` if it can be used."""
    try:
        if torch.device(device).type == "meta":
            return "it holds shapes and no values"
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        return first_line(error)
    return None
