"""Rules of the tensors: their names, shapes and dtypes against the config."""

import re
from collections.abc import Iterator

from dflash.common.messages import first_line
from dflash.dialects import COPIES_OF_THE_TARGET, TENSOR_NAMES, ZLAB

from .checkpoint_files import Checkpoint, is_finite
from .engine_readings import num_layers
from .file_rules import own_config
from .findings import ALL, CONVERT, RETRAIN, TRANSFORMERS, WEIGHTS, Finding, all_but, error, note, summary, warning


ALIASES = ("encoder.fc.weight", "encoder.output_norm_enc.weight")
OWN_VOCABULARY = ("embed_tokens.weight", "lm_head.weight", "d2t", "t2d")
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}


def tensors(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Tensors with the names and shapes that the config asks for, and no others."""
    if not checkpoint.tensors or checkpoint.unreadable:
        return
    stored = {_canonical(name): name for name in checkpoint.tensors}
    yield from _foreign_names(checkpoint)
    expected = expected_shapes(checkpoint)
    if not expected or checkpoint.config.get("quantization_config"):
        return
    missing = [name for name in expected if name not in stored]
    if missing:
        yield error(
            summary(missing),
            None,
            "loaders fill these at random or not at all, and the drafter proposes nothing useful.",
            "save them, or correct the config that asks for them.",
            file=WEIGHTS,
        )
    for name, shape in expected.items():
        tensor = checkpoint.tensors.get(stored.get(name, name))
        if tensor is not None and tensor.shape != shape:
            yield error(
                name,
                list(tensor.shape),
                f"the config asks for {list(shape)}{_shape_hint(name, tensor.shape, checkpoint)}.",
                "correct the config: the weights are what was trained.",
                file=tensor.file,
            )
    yield from _extra_tensors(checkpoint, stored, expected)


def _extra_tensors(
    checkpoint: Checkpoint, stored: dict[str, str], expected: dict[str, tuple[int, ...]]
) -> Iterator[Finding]:
    """Tensors that the config does not ask for; `stored` are names in the files by portable name."""
    copies = COPIES_OF_THE_TARGET.get(checkpoint.form, [])
    unknown = set(stored) - set(expected) - set(OWN_VOCABULARY)
    extra = [stored[key] for key in stored if key in unknown and not any(re.search(copy, key) for copy in copies)]
    if extra:
        why = "vLLM, MLX and this package refuse tensors that they do not know; SGLang and TensorRT-LLM drop them."
        engines = ("remote-code", "vllm", "mlx")
        yield error(summary(extra), None, why, "leave it out.", engines, checkpoint.tensors[extra[0]].file)
    own = [name for name in OWN_VOCABULARY if name in stored and name not in expected]
    if own and checkpoint.form == ZLAB:
        yield error(
            summary(own),
            None,
            "MLX and this package refuse an embedding or head of the drafter's own; all others but vLLM ignore it.",
            "leave it out.",
            ("remote-code", "mlx"),
            WEIGHTS,
        )


def expected_shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors that the config describes, by portable name; empty if the config describes no drafter."""
    if not num_layers(checkpoint.config):
        return {}
    import torch

    from dflash.drafter import DFlashDraftModel

    try:
        with torch.device("meta"):  # shapes without values
            state = DFlashDraftModel(own_config(checkpoint)).state_dict()
    except Exception:  # another rule says what is wrong with the config
        return {}
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _canonical(name: str) -> str:
    """The portable name of a stored tensor."""
    name = name.removeprefix("model.")
    for pattern, portable in TENSOR_NAMES.items():
        name = re.sub(pattern, portable, name)
    return name


def _foreign_names(checkpoint: Checkpoint) -> Iterator[Finding]:
    prefixed = [name for name in checkpoint.tensors if name.startswith("model.")]
    if prefixed:
        why = "vLLM puts `model.` before every name, and MLX knows the names without it."
        file = checkpoint.tensors[prefixed[0]].file
        yield error(summary(prefixed), None, why, f"{CONVERT}.", ("vllm", "mlx", "native"), file)
    aliased = [name for name in ALIASES if name in checkpoint.tensors]
    if aliased:
        yield error(
            summary(aliased),
            None,
            "TensorRT-LLM drops these names and MLX refuses them.",
            f"{CONVERT}.",
            ("trtllm", "mlx"),
            WEIGHTS,
        )
    others = [name for name in checkpoint.tensors if _canonical(name) != name and name not in (*prefixed, *aliased)]
    if others:
        why = "engines know these tensors by other names."
        file = checkpoint.tensors[others[0]].file
        yield error(summary(others), None, why, f"{CONVERT}.", all_but("remote-code"), file)


def _shape_hint(name: str, shape: tuple[int, ...], checkpoint: Checkpoint) -> str:
    """How many layers an fc of another width takes: the usual sign of wrong layers or of another target."""
    ids = checkpoint.meant.target_layer_ids or ()
    width = checkpoint.number("target_hidden_size") or checkpoint.number("hidden_size")
    is_projection = name == "fc.weight" and len(shape) == 2
    if not is_projection or not width:
        return ""
    num_held = shape[1] / width
    return f", {len(ids)} layers of {width} (these weights hold {num_held:g})"


def finite(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Files that safetensors reads, and no weight that is NaN or infinite."""
    from safetensors import SafetensorError

    tensors = checkpoint.tensors
    broken = []
    unreadable = set()
    for name, tensor in tensors.items():
        if tensor.file in unreadable:
            continue
        try:
            if not is_finite(checkpoint.folder / tensor.file, name):
                broken.append(name)
        except SafetensorError as reason:
            why = f"safetensors cannot read it ({first_line(reason)})."
            fix = "fetch or save the file again, or install a newer version of safetensors."
            yield error("weights", tensor.file, why, fix, TRANSFORMERS, tensor.file)
            unreadable.add(tensor.file)
    if broken:
        yield error(
            summary(broken),
            None,
            "NaN or infinite weights make everything that is computed from them NaN.",
            RETRAIN,
            file=tensors[broken[0]].file,
        )


def _is_quantised(name: str, dtype: str) -> bool:
    """Whether a tensor is stored as integers, apart from the maps between vocabularies, which are."""
    return dtype[0] in "IU" and name not in ("d2t", "t2d")


def dtype(checkpoint: Checkpoint) -> Iterator[Finding]:
    """One dtype, the one that the config names."""
    config = checkpoint.config
    if config.get("quantization_config"):
        yield note(
            "quantization_config",
            "…",
            "vLLM before 0.33 corrupts the context of a quantised drafter, and MLX quantises by itself.",
            "use vLLM 0.33 or newer.",
            ("vllm",),
        )
        yield error("quantization_config", "…", "MLX reads plain weights.", "convert from the plain ones.", ("mlx",))
        return
    integers = [name for name, tensor in checkpoint.tensors.items() if _is_quantised(name, tensor.dtype)]
    if integers:
        yield error(
            summary(integers),
            checkpoint.tensors[integers[0]].dtype,
            "these weights are stored as integers, and no quantization_config says what they mean.",
            "save the weights that were trained, as bfloat16.",
            ALL,
            WEIGHTS,
        )
    stored = sorted({DTYPES[tensor.dtype] for tensor in checkpoint.tensors.values() if tensor.dtype in DTYPES})
    declared = config.get("dtype") or config.get("torch_dtype")
    if declared is None:
        yield note(
            "dtype",
            None,
            "transformers 4.57 then loads float32, twice the memory.",
            "write the stored dtype as dtype and torch_dtype.",
            TRANSFORMERS,
        )
    elif stored and str(declared).removeprefix("torch.") not in stored:
        yield warning(
            "dtype",
            declared,
            f"the weights are stored as {', '.join(stored)}.",
            "write the stored dtype, or save again.",
            ALL,
        )
    if len(stored) > 1:
        yield note("dtype", stored, "loaders cast all to one dtype.", "save in one dtype.", ALL, WEIGHTS)
    if {"float32", "float64"} & set(stored):
        yield note(
            "dtype",
            stored,
            "the file is twice as large as it need be, and engines cast it to bfloat16.",
            "save in bfloat16.",
            ALL,
            WEIGHTS,
        )
