"""The README.md of a drafter and of a pair on the Hub: what it says, and what one states of acceptance."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


# The name of an acceptance length, and such a length in a sentence.
TAU_NAME = re.compile(r"\btau\b|τ|accept\w*[ _-]len", re.IGNORECASE)
TAU_IN_TEXT = re.compile(r"(?:\btau\b|τ|accept\w*[ _-]length)\D{0,20}?(\d+\.\d+)", re.IGNORECASE)

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


def stated_taus(fields: Mapping[str, Any], text: str, facts: Mapping[str, Any]) -> list[tuple[str, float]]:
    """Acceptance lengths that a drafter's card states, and what each was measured on.

    `fields` is the front matter of its README.md, `text` the whole file, and `facts` its `training.json`.
    """
    figures = [*_taus_of_training(facts), *_taus_of_index(fields), *_taus_in(text)]
    return list(dict.fromkeys(figures))


def _taus_of_training(facts: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """What a training run measured at the step that was kept."""
    for point in facts.get("curve", ()):
        if "tau" in point and point["step"] == facts.get("best_step"):
            yield "held-out prompts of its training", float(point["tau"])


def _taus_of_index(fields: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The acceptance lengths in the model index of a card's front matter."""
    for model in _objects(fields.get("model-index")):
        for result in _objects(model.get("results")):
            data = result.get("dataset")
            measured_on = data.get("name") if isinstance(data, Mapping) else data
            for metric in _objects(result.get("metrics")):
                name = f"{metric.get('type')} {metric.get('name')}"
                value: Any = metric.get("value")
                if TAU_NAME.search(name) and type(value) in (int, float):
                    yield str(measured_on), float(value)


def _objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list; none of what is no list."""
    items = value if isinstance(value, list) else []
    return [item for item in items if isinstance(item, Mapping)]


def _taus_in(text: str) -> Iterator[tuple[str, float]]:
    """The acceptance lengths in the sentences and tables of a README.md."""
    headings: list[str] = []
    for line in text.splitlines():
        if not line.lstrip().startswith("|"):
            headings = []
            for figure in TAU_IN_TEXT.findall(line):
                yield "said in the text", float(figure)
            continue
        row = line.strip().strip("|")
        cells = [cell.strip(" *`") for cell in row.split("|")]
        headings = headings or cells
        if headings[0].lower() == "step":  # the curve of a training run
            continue
        for heading, cell in zip(headings, cells, strict=False):
            figure = re.match(r"\d+(\.\d+)?", cell)
            if figure and TAU_NAME.search(heading):
                where = cells[0] if heading.lower() in ("tau", "τ") else f"{cells[0]}, {heading}"
                yield where, float(figure[0])
