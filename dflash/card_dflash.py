"""What a repository holds beside weights, config and code: a card, and the door of a target's own `generate`.

The one shipped file that writes files, into a folder that it is given. It knows nothing about connections.
"""

from __future__ import annotations

import os
from typing import Any


# The title of the card that transformers writes where a repository has none.
BLANK = "# Model Card for Model ID"


def write_card(config: Any, name: str, target: str | None = None) -> str:
    """The README.md of a drafter: what it is and how it is loaded, and no number that was not measured.

    Args:
        config: The drafter's.
        name: What `from_pretrained` is given: an id on the Hub, or a folder's name.
        target: Its target's id on the Hub, or a folder, of which the card keeps the name alone.
    """
    is_id = target is not None and not os.path.isdir(target)
    base = [f"base_model: {target}"] if is_id else []
    whose = "" if target is None else f" for `{target if is_id else os.path.basename(os.path.normpath(target))}`"
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            *base,
            "pipeline_tag: text-generation",
            "tags: [dflash, speculative-decoding]",
            "---",
            f"# {name.split('/')[-1]}",
            "",
            f"A DFlash drafter{whose}: {config.num_hidden_layers} layers, blocks of {config.block_size} tokens, target "
            f"layers {config.target_layer_ids}, mask token {config.mask_token_id}.",
            "",
            "```python",
            "from transformers import AutoModel",
            "",
            f'drafter = AutoModel.from_pretrained("{name}", trust_remote_code=True, dtype="auto")',
            "text = drafter.spec_generate(input_ids, target=target, max_new_tokens=256)",
            "```",
            "",
        ]
    )


def write_door(folder: str | os.PathLike[str]) -> None:
    """Puts `custom_generate/generate.py` into `folder`, where `target.generate(custom_generate=…)` looks for it."""
    source = os.path.join(os.path.dirname(__file__), "door_dflash.py")
    path = os.path.join(folder, "custom_generate", "generate.py")
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.exists(path):
        os.remove(path)  # so that the folder is newer than it was: by that transformers finds what to upload
    with open(source, encoding="utf-8") as door, open(path, "w", encoding="utf-8") as copy:
        copy.write(door.read())


def complete_upload(folder: str | os.PathLike[str], config: Any, name: str) -> None:
    """Adds to a folder that is about to be uploaded what transformers leaves out or blank: the door and the card."""
    write_door(folder)
    path = os.path.join(folder, "README.md")
    with open(path, encoding="utf-8") as card:
        is_blank = BLANK in card.read()
    if is_blank:
        with open(path, "w", encoding="utf-8") as card:
            card.write(write_card(config, name))
