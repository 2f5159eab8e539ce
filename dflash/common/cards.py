"""The README.md of a drafter and of a pair on the Hub."""

import os
from pathlib import Path
from typing import Any


# Title of the card that transformers writes for a repository without one.
BLANK = "# Model Card for Model ID"

FRONT_MATTER = """---
library_name: transformers
{base}pipeline_tag: text-generation
tags: [dflash, speculative-decoding]
---
# {title}
"""

DRAFTER_CARD = """
A DFlash drafter{of_target}: {config.num_hidden_layers} layers, blocks of {config.block_size} tokens, target layers \
{config.target_layer_ids}, mask token {config.mask_token_id}.

```python
from transformers import AutoModel

drafter = AutoModel.from_pretrained("{name}", trust_remote_code=True, dtype="auto")
text = drafter.spec_generate(input_ids, target=target, max_new_tokens=256)
```
"""

PAIR_CARD = """
{what}: the target's own text, in fewer of its forwards.

```python
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{name}", trust_remote_code=True)
text_ids = model.generate(input_ids, max_new_tokens=256)  # dflash=False generates without drafts
```
"""


def drafter_card(config: Any, name: str, target: str | None = None, licence: str = "") -> str:
    """The README.md of a drafter that is loaded by `name`.

    `target` is its target's id on the Hub or a folder, `licence` is front matter.
    """
    of_target = "" if target is None else f" for {_shown(target)}"
    return _front_matter(name, target, licence) + DRAFTER_CARD.format(of_target=of_target, config=config, name=name)


def pair_card(name: str, target: str | None = None, drafter: str = "its DFlash drafter", licence: str = "") -> str:
    """The README.md of a pair that is loaded by `name`; its two models are ids or folders, `licence` is front matter."""
    what = f"{_shown(target)} with {_shown(drafter)}" if target else f"A target with {drafter}"
    return _front_matter(name, target, licence) + PAIR_CARD.format(what=what, name=name)


def complete_card(folder: str | os.PathLike[str], config: Any, name: str) -> None:
    """Replaces the blank card that transformers wrote into the folder of an upload."""
    card = Path(folder, "README.md")
    if BLANK in card.read_text(encoding="utf-8"):
        card.write_text(drafter_card(config, name), encoding="utf-8")


def _front_matter(name: str, target: str | None, licence: str = "") -> str:
    base = "" if target is None or _is_folder(target) else f"base_model: {target}\n"
    return FRONT_MATTER.format(base=base + licence, title=name.split("/")[-1])


def _shown(model: str) -> str:
    return f"`{Path(model).expanduser().resolve().name if _is_folder(model) else model}`"


def _is_folder(model: str) -> bool:
    return Path(model).expanduser().is_dir()
