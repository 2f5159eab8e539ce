"""Writes one card for each published drafter, and their index, from `drafters.json`.

    python model_cards/build.py

With `--check` it writes nothing, and fails if a card differs from the data. It reads only that file and no network. A null
field is shown as "not published": the public sources that the card names do not state it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


FOLDER = Path(__file__).parent
DATA = FOLDER / "drafters.json"
NOT_PUBLISHED = "not published"
NOT_KNOWN = "not known"
TARGET = "TARGET"  # in code, where the target's id is not published
ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM", "mlx": "MLX"}

CARD = """\
---
{metadata}
---
<!-- Written by model_cards/build.py from drafters.json: change the data, not this file. -->

# {id}

{family} for {target}: a small network that proposes {proposals} in one forward.
The target checks them in one forward of its own, and every token of the text is the target's choice. The drafter is not a
language model by itself.

## Facts

{facts}

Sources: {fact_sources}. "{not_published}" means that the public copies of these sources do not state it.
The sections on loading follow from the layout and the kind of target; nothing was run for this card.

## With this library

{library}

## In transformers' own loop

{native}

## In serving engines

{engines}

## Published figures

`tau` is the mean number of tokens that one verify step commits, the target's own included. The speed-up is over plain
decoding of the same target.

{results}

## Known limits

{limits}

## Citation

```bibtex
@inproceedings{{chen2026dflash,
  title     = {{{{DFlash: Block Diffusion for Flash Speculative Decoding}}}},
  author    = {{Chen, Jian and Liang, Yesheng and Liu, Zhijian}},
  booktitle = {{International Conference on Machine Learning}},
  year      = {{2026}},
  url       = {{https://arxiv.org/abs/2602.06036}}
}}
```{method}
"""

LIBRARY = """\
```python
from transformers import {auto_class}, AutoTokenizer

from dflash import DFlashDraftModel

options = {{"dtype": "auto", "device_map": "auto"}}
draft = DFlashDraftModel.from_pretrained("{id}", **options)
target = {auto_class}.from_pretrained("{target}", **options)
tokenizer = AutoTokenizer.from_pretrained("{target}")

messages = [{{"role": "user", "content": "How many positive whole-number divisors does 196 have?"}}]
inputs = tokenizer.apply_chat_template(
    messages,
    add_generation_prompt=True,
    return_tensors="pt",
    return_dict=True,{thinking}
).to(target.device)
output = draft.spec_generate(inputs, target=target, max_new_tokens=512, temperature=0.0)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```

`dflash` is the import name of the distribution `dflash-transformers`. Until it is on an index, install it from a checkout."""

NATIVE = """\
With transformers 5.15 or later and the objects above, one prompt at a time:

```python
output = target.generate(
    **inputs, assistant_model=draft, speculation_type="dflash", max_new_tokens=512, do_sample=False
)
```"""

VLLM = """\
```bash
vllm serve {target} \\
  --speculative-config '{{"method": "{method}", "model": "{id}"{proposals}}}'
```"""

NON_CAUSAL = (
    "The drafter needs an attention backend with non-causal attention, such as `--attention-backend flash_attn`."
)

SGLANG = """\
```bash
python -m sglang.launch_server --model-path {target} --trust-remote-code{hybrid} \\
  --speculative-algorithm {algorithm} --speculative-draft-model-path {id}{width}
```"""

TRTLLM = """\
```python
from tensorrt_llm.llmapi import LLM, DFlashDecodingConfig

llm = LLM(
    model="{target}",
    speculative_config=DFlashDecodingConfig(
        max_draft_len={proposals},
        speculative_model="{id}",
    ),
)
```"""

MLX = """\
With z-lab's own package. Its import name is `dflash` too, so use another environment:

```python
from dflash.model_mlx import load, load_draft, stream_generate

model, tokenizer = load("{target}")
draft = load_draft("{id}")
for part in stream_generate(model, draft, tokenizer, "196 =", block_size={block_size}, max_tokens=512):
    print(part.text, end="", flush=True)
```"""


def cite(data: dict[str, Any], drafter: dict[str, Any], source: str) -> str:
    """A link to `source`: a key of `sources`, `card` (the drafter's own page), or an `owner/repo#number` of GitHub."""
    if source == "card":
        return f"[{drafter['id']}](https://huggingface.co/{drafter['id']})"
    if "#" in source:
        repository, number = source.split("#")
        return f"[{source}](https://github.com/{repository}/issues/{number})"
    return f"[{data['sources'][source]['title']}]({data['sources'][source]['url']})"


def table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [header, ["---"] * len(header), *rows])


def shown(value: Any) -> str:
    """A value of the data as a cell; null reads "not published"."""
    if value is None:
        return NOT_PUBLISHED
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join("–" if item is None else str(item) for item in value)
    return str(value)


def family_of(data: dict[str, Any], drafter: dict[str, Any]) -> dict[str, Any]:
    """The method that the drafter was trained for, with its names in engines."""
    return data["families"][data["dialects"][drafter["dialect"]]["family"]]


def num_proposals(data: dict[str, Any], drafter: dict[str, Any]) -> int | None:
    """Tokens that one forward proposes: one fewer than the block has, unless the layout's anchor proposes too."""
    block_size = drafter["block_size"]
    if block_size is None or data["dialects"][drafter["dialect"]]["anchor_proposes"]:
        return block_size
    return block_size - 1


def is_causal_alone(drafter: dict[str, Any]) -> bool:
    """Whether every layer is causal inside the block."""
    return drafter["is_causal"] is True and drafter["sliding_layers"] in (0, drafter["num_layers"])


def attention(drafter: dict[str, Any]) -> str:
    """The layers' windows, and whether attention in the block is causal."""
    sliding, window, layers = drafter["sliding_layers"], drafter["window"], drafter["num_layers"]
    if sliding is None:
        return NOT_PUBLISHED if window is None else f"window {window}; which layers: {NOT_PUBLISHED}"
    if sliding == 0:
        return f"{layers} full, {'causal' if drafter['is_causal'] else 'bidirectional'} in the block"
    causal = "bidirectional" if drafter["is_causal"] is False else "causal"
    parts = [f"{sliding} sliding (window {window}), {causal} in the block"]
    if sliding < layers:
        parts.append(f"{layers - sliding} full, bidirectional")
    return "; ".join(parts)


def metadata(data: dict[str, Any], drafter: dict[str, Any]) -> str:
    """The card's front matter, which the Hub reads."""
    license_, target = drafter["license"] or {}, drafter["target"]["id"]
    fields = {
        "license": license_.get("id"),
        "license_name": license_.get("name"),
        "license_link": license_ and f"https://huggingface.co/{drafter['id']}",
        "base_model": target,
        "library_name": "transformers",
        "pipeline_tag": drafter["pipeline_tag"],
    }
    family = data["dialects"][drafter["dialect"]]["family"]
    tags = [*dict.fromkeys(("dflash", family)), "speculative-decoding", "block-diffusion", "draft-model"]
    return "\n".join(
        [*(f"{name}: {value}" for name, value in fields.items() if value), "tags:", *(f"- {t}" for t in tags)]
    )


def facts(data: dict[str, Any], drafter: dict[str, Any]) -> str:
    """The table of the checkpoint's facts, and the changes if it was trained again under the same name."""
    target, license_ = drafter["target"], drafter["license"] or {}
    fields = {
        "target": target["id"] or target["name"],
        "target's revision": target["revision"],
        "target's layers": target["num_layers"],
        "drafter's revision": drafter["revision"],
        "layout of the checkpoint": data["dialects"][drafter["dialect"]]["name"],
        "thinking mode": drafter["thinking"],
        "block size, anchor included": drafter["block_size"],
        "layers": drafter["num_layers"],
        "taps (0-based target layers)": drafter["target_layer_ids"],
        "mask token id": drafter["mask_token_id"],
        "attention and windows": attention(drafter),
        "hidden size": drafter["hidden_size"],
        "intermediate size": drafter["intermediate_size"],
        "heads, key-value heads, head size": drafter["heads"],
        "rotary embedding": drafter["rope"],
        "positions": drafter["max_position_embeddings"],
        "vocabulary": drafter["vocab_size"],
        "parameters": drafter["parameters"],
        "size of the weights": drafter["file_size"],
        "licence": license_.get("name") or license_.get("id"),
    }
    rows = table(["fact", "value"], [[label, shown(value)] for label, value in fields.items()])
    changed = ", ".join(f"{label} {value}" for label, value in (drafter["retrain"] or {}).items())
    return rows + (f"\n\nTrained again under the same name; published of the newer one: {changed}." if changed else "")


def library_verdict(data: dict[str, Any], drafter: dict[str, Any]) -> tuple[bool | None, list[str]]:
    """Whether this library runs the drafter with its target (null: not tried), and the remarks on that."""
    checkpoint = drafter["library"] or data["dialects"][drafter["dialect"]]["library"]
    verdicts = [checkpoint, data["target_support"][drafter["target"]["kind"]]]
    answers = [verdict["supported"] for verdict in verdicts]
    answer = False if False in answers else None if None in answers else True
    # For a refusal only its reasons are given; for a pair that runs, the conditions of drafter and target.
    told = [verdict for verdict in verdicts if verdict["supported"] is answer or answer is not False]
    return answer, [verdict["text"] for verdict in told if verdict["text"]]


def library(data: dict[str, Any], drafter: dict[str, Any]) -> str:
    """How to load the drafter with this library, or why it is refused."""
    answer, texts = library_verdict(data, drafter)
    said = "; ".join(texts)
    if answer is False:
        return f"Not supported today: {said}."
    code = LIBRARY.format(
        id=drafter["id"],
        target=drafter["target"]["id"] or TARGET,
        thinking="" if drafter["thinking"] is None else f"\n    enable_thinking={drafter['thinking'] == 'on'},",
        auto_class=data["target_support"][drafter["target"]["kind"]]["auto_class"],
    )
    if drafter["target"]["id"] is None:
        code += f" {stand_in(drafter)}."
    if answer is None:
        return f"Not tried: {said}.\n\n{code}"
    return f"{code}\n\n{said[:1].upper()}{said[1:]}." if said else code


def native(data: dict[str, Any], drafter: dict[str, Any]) -> str:
    """How to use transformers' own loop, or why it does not take this pair."""
    if drafter["dialect"] == "native":
        return (
            "transformers 5.15 or later has a class for this checkpoint. Pass it as `assistant_model` with "
            '`speculation_type="dflash"`, one prompt at a time.'
        )
    refusal = data["target_support"][drafter["target"]["kind"]]["native"]
    if refusal:
        return refusal
    reason = data["dialects"][drafter["dialect"]]["native"]
    if reason:
        return f"Not with this drafter: {reason}."
    answer, _ = library_verdict(data, drafter)
    return "Not possible without a class that reads the checkpoint." if answer is False else NATIVE


def stand_in(drafter: dict[str, Any]) -> str:
    """What `TARGET` in a card's code means."""
    return (
        f"`{TARGET}` is the id of the target ({drafter['target']['name']}), which was not found in the sources above"
    )


def engine_verdict(data: dict[str, Any], drafter: dict[str, Any], engine: str) -> dict[str, Any]:
    """What is known of `engine` and this checkpoint, or else of `engine` and its layout."""
    return drafter["engines"].get(engine) or data["dialects"][drafter["dialect"]]["engines"][engine]


def engine_section(data: dict[str, Any], drafter: dict[str, Any], engine: str) -> str:
    """The engine's command if it is known to read the checkpoint, else what is known."""
    verdict, names = (
        engine_verdict(data, drafter, engine),
        {"id": drafter["id"], "target": drafter["target"]["id"] or TARGET},
    )
    source = verdict["source"] and cite(data, drafter, verdict["source"])
    heading = f"### {ENGINES[engine]}\n\n"
    if verdict["serves"] is None:
        why = f": {verdict['text']} ({source})" if verdict["text"] else ""
        return f"{heading}{NOT_KNOWN.capitalize()}{why}."
    if verdict["serves"] is False:
        return f"{heading}Does not serve it: {verdict['text']} ({source})."
    if verdict["text"]:  # by another command than the usual one
        return f"{heading}Serves it: {verdict['text']} ({source})."
    dialect, family = data["dialects"][drafter["dialect"]], family_of(data, drafter)
    proposals = num_proposals(data, drafter)
    count = "N" if proposals is None else str(proposals)
    if engine == "vllm":
        # Where the config does not hold the number of proposals the user gives it.
        given = "" if dialect["states_proposals"] else f', "num_speculative_tokens": {count}'
        code = VLLM.format(**names, method=family["vllm"], proposals=given)
        if not is_causal_alone(drafter):
            code += f"\n\n{NON_CAUSAL}"
    elif engine == "sglang":
        flag = data["target_support"][drafter["target"]["kind"]]["sglang_flag"]
        # SGLang counts the anchor too. Without the option it reads the config, as it should for an anchor that proposes.
        width = (
            f" --speculative-num-draft-tokens {proposals + 1}" if proposals and family["sglang"] == "DFLASH" else ""
        )
        code = SGLANG.format(**names, algorithm=family["sglang"], hybrid=f" {flag}" if flag else "", width=width)
    elif engine == "trtllm":
        code = TRTLLM.format(**names, proposals=count)
    else:
        code = MLX.format(**names, block_size=drafter["block_size"] or "N")
    stand_ins = []
    if drafter["target"]["id"] is None:
        stand_ins.append(stand_in(drafter))
    if proposals is None and ("N}" in code or "=N" in code):
        size = "" if dialect["anchor_proposes"] else "one less than "
        stand_ins.append(f"`N` is {size}the `block_size` of the checkpoint's config.json")
    command = cite(data, drafter, family["commands"].get(engine) or data["commands"][engine])
    note = f"\n\n{'. '.join(stand_ins)}." if stand_ins else ""
    return f"{heading}{code}{note}\n\nKnown from {source}; the form of the command from {command}."


def results(data: dict[str, Any], drafter: dict[str, Any]) -> str:
    """Every published figure under its source."""
    blocks = []
    for group in drafter["results"]:
        source = cite(data, drafter, group["source"]) + (f", {group['where']}" if group["where"] else "")
        axis = f" at {group['axis']['name']} {', '.join(map(str, group['axis']['values']))}" if group["axis"] else ""

        def column(name: str, index: int, axis: str = axis, rows: list[list[Any]] = group["rows"]) -> str:
            return name + (axis if any(isinstance(row[index], list) for row in rows) else "")

        columns = [
            (name, index) for name, index in (("tau", 1), ("speed-up", 2)) if any(row[index] for row in group["rows"])
        ]
        header = ["task", *(column(name, index) for name, index in columns)]
        places = {index: decimals([row[index] for row in group["rows"]]) for _, index in columns}
        rows = [[row[0], *(figures(row[index], places[index]) for _, index in columns)] for row in group["rows"]]
        blocks.append(f"{group['setup']} ({source}):\n\n{table(header, rows)}")
    return "\n\n".join(blocks) or f"{NOT_PUBLISHED.capitalize()}."


def decimals(cells: list[Any]) -> int:
    """The decimals of the finest figure in a column."""
    values = [value for cell in cells for value in (cell if isinstance(cell, list) else [cell]) if value is not None]
    return max(len(str(float(value)).split(".")[1]) for value in values)


def figures(cell: Any, places: int) -> str:
    """A figure, or one for each point of the axis, with equally many decimals."""
    values = cell if isinstance(cell, list) else [cell]
    return ", ".join("–" if value is None else f"{value:.{places}f}" for value in values)


def limits(data: dict[str, Any], drafter: dict[str, Any]) -> str:
    """Known limits with their sources."""
    lines = []
    for name in drafter["limits"]:
        sources = ", ".join(cite(data, drafter, source) for source in data["limits"][name]["sources"])
        lines.append(f"- {data['limits'][name]['text']}" + (f" ({sources})" if sources else ""))
    return "\n".join(lines) or f"{NOT_PUBLISHED.capitalize()}."


def card(data: dict[str, Any], drafter: dict[str, Any]) -> str:
    """The whole card of one drafter."""
    target, proposals, family = drafter["target"], num_proposals(data, drafter), family_of(data, drafter)
    named = f"[{family['name']}]({family['url']})"
    is_dflash = family is data["families"]["dflash"]
    return CARD.format(
        id=drafter["id"],
        target=f"[{target['id']}](https://huggingface.co/{target['id']})" if target["id"] else target["name"],
        family=f"A {named} drafter" if is_dflash else f"A {named} drafter, of the DFlash family,",
        method="" if is_dflash else f"\n\nThe drafter's own method: {named}.",
        proposals="several tokens" if proposals is None else f"{proposals} tokens",
        metadata=metadata(data, drafter),
        facts=facts(data, drafter),
        fact_sources=", ".join(cite(data, drafter, source) for source in drafter["facts"]),
        not_published=NOT_PUBLISHED,
        library=library(data, drafter),
        native=native(data, drafter),
        engines="\n\n".join(engine_section(data, drafter, engine) for engine in ENGINES),
        results=results(data, drafter),
        limits=limits(data, drafter),
    )


def index(data: dict[str, Any]) -> str:
    """The folder's README: a table of all cards and of what runs each drafter."""
    words = {True: "yes", False: "no", None: "?"}
    rows = []
    for drafter in data["drafters"]:
        serves = [words[engine_verdict(data, drafter, engine)["serves"]] for engine in ENGINES]
        name, runs = f"[{drafter['id']}]({file_name(data, drafter)})", words[library_verdict(data, drafter)[0]]
        shape = [shown(drafter["block_size"]), shown(drafter["num_layers"])]
        rows.append([name, drafter["target"]["name"], *shape, runs, *serves])
    header = ["drafter", "target", "block", "layers", "this library", *ENGINES.values()]
    return (
        "# Published DFlash drafters\n\n"
        "Each drafter has a card. `python model_cards/build.py` writes the cards from [drafters.json](drafters.json); change only that\n"
        'file. "Yes" means that the source named in the card reads the layout, "no" that it does not read it or that the target is\n'
        'refused, "?" that it is not known. "Not published" means that the sources of the card do not state the field.\n\n'
        f"{table(header, rows)}\n"
    )


def file_name(data: dict[str, Any], drafter: dict[str, Any]) -> str:
    """The name of the drafter's card: without its publisher, unless two publishers chose the same name."""
    name = drafter["id"].split("/")[1]
    is_shared = sum(other["id"].split("/")[1].lower() == name.lower() for other in data["drafters"]) > 1
    return f"{drafter['id'].replace('/', '-') if is_shared else name}.md"


def pages(data: dict[str, Any]) -> dict[str, str]:
    """The text of every file that this script owns, by name."""
    return {file_name(data, drafter): card(data, drafter) for drafter in data["drafters"]} | {"README.md": index(data)}


def stale(folder: Path, wanted: dict[str, str]) -> list[str]:
    """Names of the cards in `folder` that differ from `wanted`, are missing, or belong to no drafter."""
    found = {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.md")}
    return sorted(name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name))


def main() -> int:
    """Writes what differs, or says it and fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    wanted = pages(json.loads(DATA.read_text(encoding="utf-8")))
    names = stale(FOLDER, wanted)
    if args.check:
        if names:
            sys.stderr.write(f"{', '.join(names)} differ from drafters.json: run `python model_cards/build.py`.\n")
        return int(bool(names))
    for name in names:
        if name in wanted:
            (FOLDER / name).write_text(wanted[name], encoding="utf-8")
        else:
            (FOLDER / name).unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
