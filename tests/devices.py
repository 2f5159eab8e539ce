"""Devices played on the CPU: a compiler that changes nothing, a recorder like CUDA graphs, a device that computes late.

`PlayedRecorder` records operations, and a replay runs these on the tensors of the recording: what the host knew then stays
as it was, what it asks for while recording is an error, and each replay overwrites the outputs of the last one.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import BLOCK_SIZE, PAD_TOKEN_ID, SMALL, PlacedDrafter, greedy, left_padded, make_prompt, make_target
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers import PreTrainedModel

from dflash import generate_blocks
from dflash.engine import recorded
from dflash.engine.state import PairState
from dflash.engine.waiting import Recordable, waits
from dflash.engine.whole import WholeStep
from dflash.evaluation import READS


TEXT_LENGTH = 280
NEW_TOKENS = 40
SCRIPT = [2, 0, BLOCK_SIZE - 1, 1, 3, 0, 4]  # proposals that are right, by the position of the anchor


class PlayedCompiler:
    """In place of `torch.compile`: its functions run as they are.

    Attributes:
        num_made: How many functions were compiled.
        num_calls: How often all of them ran.
        fails_at: The call that raises; 0: none.
        spoil: Changes the output of every call.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self.num_calls = 0
        self.fails_at = 0
        self.spoil: Callable[[WholeStep], WholeStep] = lambda output: output

    def __call__(self, function: Callable[..., WholeStep], **options: Any) -> Callable[..., WholeStep]:
        self.num_made += 1

        def run(*inputs: Any) -> WholeStep:
            self.num_calls += 1
            if self.num_calls == self.fails_at:
                raise RuntimeError("no C++ compiler\nand a second line")
            return self.spoil(function(*inputs))

        return run


class _Tape(TorchDispatchMode):
    """Operations with their tensors, in the order in which they ran."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if waits(name, args, kwargs):
            raise RuntimeError(f"{name} is not permitted when a stream is capturing\nand a second line")
        result = func(*args, **kwargs)
        self._operations.append((func, args, kwargs, result))
        return result

    @torch.no_grad()
    def replay(self) -> None:
        """Runs the operations again. Their results are written where they lay."""
        for func, args, kwargs, result in self._operations:
            for old, new in zip(_tensors(result), _tensors(func(*args, **kwargs)), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


class PlayedRecorder:
    """Records and replays as a CUDA graph does.

    Attributes:
        num_made: How many steps were recorded.
        num_calls: How often all of them were replayed.
        error: What every further recording raises.
        fails_at: The replay that raises; 0: none.
        spoil: Changes the outputs of every replay in place.
    """

    def __init__(self) -> None:
        self.num_made = 0
        self.num_calls = 0
        self.error: Exception | None = None
        self.fails_at = 0
        self.spoil: Callable[[WholeStep], Any] = lambda outputs: None

    @classmethod
    def of_the_cpu(cls, monkeypatch: pytest.MonkeyPatch) -> PlayedRecorder:
        """A new one, which records the steps of the CPU."""
        recorder = cls()
        monkeypatch.setitem(recorded.RECORDERS, "cpu", recorder)
        monkeypatch.setattr(recorded, "SMALLEST_CAPACITY", 512)
        return recorder

    def __call__(self, function: Callable[[], WholeStep]) -> tuple[Callable[[], None], WholeStep]:
        if self.error is not None:
            raise self.error
        with Recordable("cpu"):
            function()
        tape = _Tape()
        with tape:
            outputs = function()
        self.num_made += 1

        def replay() -> None:
            self.num_calls += 1
            if self.num_calls == self.fails_at:
                raise RuntimeError("a replay failed")
            for output in outputs:
                output.fill_(float("nan") if output.is_floating_point() else -1)
            tape.replay()
            self.spoil(outputs)

        return replay, outputs


# By what a target is made of: writing them takes most of the time of a test of ten steps.
_texts: dict[str, torch.Tensor] = {}


@dataclass
class Pair:
    """A target, a drafter that is right as a script says, and what the target writes after every beginning of its text.

    Lengths below 0 mean beginnings of another text, about which the drafter is wrong.
    """

    target: PreTrainedModel
    drafter: PlacedDrafter
    text: torch.Tensor  # [1, S]
    other: torch.Tensor  # [1, S]

    @classmethod
    def make(cls, kind: str = "qwen3", **fields: Any) -> Pair:
        """A new pair, of which nothing is compiled or recorded."""
        if kind == "qwen3_sliding":
            fields["layer_types"] = ["sliding_attention", "full_attention"]
        target = make_target(kind, num_hidden_layers=2, **fields)
        pair = cls(target, PlacedDrafter(target, **SMALL), *torch.empty(2, 1, 0))
        pair.drafter.follow([], SCRIPT)
        made_of = repr((kind, sorted(fields.items())))
        if made_of not in _texts:
            pair.write_text(TEXT_LENGTH)
            _texts[made_of] = torch.stack([pair.text, pair.other])
        pair.text, pair.other = _texts[made_of].clone()
        pair.follow(pair.text)
        return pair

    def write_text(self, length: int = 100) -> None:
        """Takes what the target writes, as it is now, for the text: `length` tokens of it."""
        texts = [
            greedy(self.target, make_prompt(7, seed=seed), max_new_tokens=length - 7, eos_token_id=None)
            for seed in (3, 5)
        ]
        self.text, self.other = texts
        self.follow(self.text)

    def part(self, begin: int, length: int) -> torch.Tensor:
        """`length` tokens after a beginning of one of the texts, [1, length]; before its end if `length` is below 0."""
        text = self.text if begin > 0 else self.other
        end = abs(begin) + length
        return text[:, min(abs(begin), end) : max(abs(begin), end)]

    def follow(self, text: torch.Tensor) -> None:
        """Makes the drafter propose this text [1, S]; its tensors stay where they are."""
        self.drafter.text[: text.shape[1]] = text[0]

    @property
    def state(self) -> PairState:
        """What the engine keeps of the two."""
        return PairState.of(self.drafter, self.target)

    def blocks(self, lengths: Sequence[int], **keywords: Any) -> Any:
        """What is generated after beginnings of the text."""
        prompt_ids, mask = left_padded([self.part(length, -abs(length)) for length in lengths])
        defaults: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "stop_token_ids": []}
        if keywords.get("temperature"):
            defaults["generator"] = torch.Generator().manual_seed(11)
        keywords = {**defaults, "attention_mask": mask, "prompt_lookup_num_tokens": 0, **keywords}
        return generate_blocks(self.drafter, self.target, prompt_ids, pad_token_id=PAD_TOKEN_ID, **keywords)

    def write(self, lengths: Sequence[int], **keywords: Any) -> list[list[int]]:
        """The new tokens of each sequence."""
        return self.texts_of(self.blocks(lengths, **keywords), len(lengths))

    def texts_of(self, blocks: Any, num_sequences: int = 1) -> list[list[int]]:
        """The tokens of each sequence in `blocks`."""
        texts: list[list[int]] = [[] for _ in range(num_sequences)]
        for block in blocks:
            texts[block.sequence] += block.token_ids
        return texts

    def expected(self, lengths: Sequence[int], num_new: int = NEW_TOKENS) -> list[list[int]]:
        """What the target writes after beginnings of the text."""
        return [self.part(length, num_new)[0].tolist() for length in lengths]

    def check(self, lengths: Sequence[int], **keywords: Any) -> None:
        """What is generated is the target's own text."""
        num_new = keywords.get("max_new_tokens", NEW_TOKENS)
        assert self.write(lengths, **keywords) == self.expected(lengths, num_new)

    def check_in_threads(self, lengths: Sequence[int], **keywords: Any) -> None:
        """Each of these texts is right three times, written in a thread of its own."""
        texts: dict[int, list[list[int]]] = {}
        ready = threading.Barrier(len(lengths))

        def work(length: int) -> None:
            ready.wait(60)
            texts[length] = [self.write([length], **keywords)[0] for _ in range(3)]

        threads = [threading.Thread(target=work, args=(length,)) for length in lengths]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert texts == {length: self.expected([length]) * 3 for length in lengths}

    def follow_sampled(self, length: int, **keywords: Any) -> list[list[int]]:
        """What eager steps sample after a beginning, which the drafter proposes from now on."""
        sampled = self.write([length], compile=False, **keywords)
        self.follow(torch.cat([self.text[:, :length], torch.tensor(sampled)], dim=1))
        return sampled


def cast(pair: Pair) -> None:
    """Another dtype."""
    pair.target.to(torch.float64)
    pair.drafter.to(torch.float64)


def put_adapter(pair: Pair) -> None:
    """As an adapter that is loaded."""
    mlp = pair.target.model.layers[0].mlp
    mlp.down_proj = torch.nn.Sequential(mlp.down_proj, torch.nn.Linear(32, 32).requires_grad_(False))


def move_parameter(pair: Pair) -> None:
    """A weight of another address."""
    projection = pair.target.model.layers[1].mlp.up_proj
    projection.weight = torch.nn.Parameter(-projection.weight.detach())


def replace_method(pair: Pair) -> None:
    """As a patch."""
    mlp = pair.target.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda states: forward(states) * -1.0


def put_number(pair: Pair) -> None:
    """Another whole number."""
    pair.target.model.layers[0].mlp.top_k = 1


def replace_activation(pair: Pair) -> None:
    """Another module."""
    pair.target.model.layers[0].mlp.act_fn = torch.nn.Tanh()


def replace_number(pair: Pair) -> None:
    """Another number."""
    pair.target.model.layers[0].input_layernorm.variance_epsilon = 10.0


CHANGES = [cast, put_adapter, move_parameter, replace_method, put_number, replace_activation, replace_number]


class LateDevice(TorchFunctionMode):
    """Tells tensors of the host from those of a device that computes later, though both lie on the CPU.

    Weights lie on the device, and so does what is computed with anything that does. The host waits where it reads what
    `to_host` copies. Every other read of the device, and every way there but `to_device`, is a fault: it waits, too.

    Attributes:
        num_waits: How often the host has waited.
        faults: What else happened, and where.
    """

    def __init__(self, *models: torch.nn.Module) -> None:
        super().__init__()
        self.num_waits = 0
        self.faults: list[str] = []
        self._operations = _Operations(self)
        for model in models:
            for tensor in (*model.parameters(), *model.buffers(), *vars(model).values()):
                if isinstance(tensor, torch.Tensor):
                    tensor._place = "device"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts its two ways between host and device in place of the library's."""
        modules = [module for name, module in sys.modules.items() if name.startswith("dflash.")]
        for module in modules:
            for name in ("to_device", "to_host"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The one way to the device."""
        with _disable_current_modes():
            moved = tensor.clone()
        moved._place = "device"
        return moved

    def to_host(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """The one way back."""
        is_late = place_of(tensor) == "device"
        with _disable_current_modes():
            copy = tensor.clone()

        def read() -> Any:
            self.num_waits += is_late
            with _disable_current_modes():
                return copy.tolist()

        return read

    def fault(self, what: str) -> None:
        """Takes note of one, with the innermost line of the library."""
        frames = [frame for frame in traceback.extract_stack() if "/dflash/" in frame.filename]
        self.faults.append(f"{what} in {frames[-1].filename}:{frames[-1].lineno}" if frames else what)

    def __enter__(self) -> LateDevice:
        self._operations.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._operations.__exit__(*error)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Looks at what reads and what copies, and calls."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if func in READS and place_of(args[0]) == "device":
            self.fault(name)
            with _disable_current_modes():
                return func(*args, **kwargs)
        names_device = "device" in kwargs or any(isinstance(arg, (torch.device, str)) for arg in args[1:])
        is_copy = name == "to" and place_of(args[0]) == "host" and names_device
        is_list_index = name in ("__getitem__", "__setitem__") and isinstance(args[1], list)
        if is_copy or name == "new_tensor" or (name in ("tensor", "as_tensor") and "device" in kwargs):
            self.fault(f"a copy by {name}")
        elif is_list_index and place_of(args[0]) == "device":
            self.fault("a list as index")
        result = func(*args, **kwargs)
        if func in _device_constructors() and isinstance(result, torch.Tensor) and place_of(result) is None:
            result._place = "host" if kwargs.get("device") in (None, "cpu") else "device"
        elif is_copy or name == "new_tensor":
            result = self.to_device(result, result.device)
        return result


def place_of(value: Any) -> str | None:
    """ "device" or "host" or, for what no numbers were put into, `None`."""
    return getattr(value, "_place", None) if isinstance(value, torch.Tensor) else None


class _Operations(TorchDispatchMode):
    """Says of every result where it lies."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = [tensor for value in (*args, *(kwargs or {}).values()) for tensor in _tensors(value)]
        places = [place_of(tensor) for tensor in flat]
        place = "device" if "device" in places else "host" if "host" in places else None
        if place == "device":
            name = func.overloadpacket.__name__
            if waits(name, args, kwargs or {}):
                self._device.fault(name)
            if any(of == "host" and tensor.ndim for of, tensor in zip(places, flat, strict=True)):
                self._device.fault(f"{func.overloadpacket.__name__} of tensors of both")
        for tensor in _tensors(result):
            if place is not None:
                tensor._place = place
        return result
