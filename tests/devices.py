"""Devices with a queue, played on the CPU: graphs with fixed buffers, values that arrive late, threads that take turns.

`Graphs` replays compiled functions as CUDA graphs do. `LateDevice` knows which tensors lie on the device and what the host
does with them. `Turns` makes two threads meet where they may disturb each other.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tiny_models import WRONG_OFFSET, ScriptedDrafter, given_cache
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from transformers.modeling_outputs import BaseModelOutput

from dflash.evaluation import READING_OPERATIONS, READS
from dflash.model import step_dflash


TEXT_LENGTH = 320


class PlacedDrafter(ScriptedDrafter):
    """Proposes a text that it knows, and goes wrong after as many tokens as its script says of the anchor's position.

    It reads positions alone and computes on the device alone, so that it compiles and may run ahead. Its states are NaN
    where those of the real forward are: what it read of the context has to be numbers.
    """

    def follow(self, text: torch.Tensor, script: Sequence[int]) -> None:
        """Takes the text [1, S] and the script, which repeats."""
        for name in ("text", "rights"):
            if not hasattr(self, name):
                self.register_buffer(name, torch.zeros(TEXT_LENGTH, dtype=torch.long), persistent=False)
        self.text[: text.shape[1]] = text[0]
        self.rights.copy_(torch.tensor(script).repeat(TEXT_LENGTH)[:TEXT_LENGTH])

    def forward(self, noise_embeds: Any = None, context_hidden_states: Any = None, **kwargs: Any) -> Any:
        width, positions = noise_embeds.shape[1], kwargs.get("position_ids")
        if positions is None:
            end = given_cache(kwargs).get_seq_length() + context_hidden_states.shape[1] + width
            positions = torch.arange(end, device=noise_embeds.device)[None]
        output = super(ScriptedDrafter, self).forward(noise_embeds, context_hidden_states, **kwargs)
        positions = positions[:, -width:].clamp(max=TEXT_LENGTH - 1)
        anchors = positions[:, :1]
        is_wrong = positions - anchors == self.rights[anchors] + 1
        token_ids = (self.text[positions] + is_wrong * WRONG_OFFSET) % self.config.vocab_size
        return BaseModelOutput(last_hidden_state=self.sayings[token_ids] + 0.0 * output.last_hidden_state)


def _poison(tensor: torch.Tensor) -> None:
    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min // 2)


def _is_static(value: Any) -> bool:
    return isinstance(value, torch.nn.Parameter) or hasattr(value, "_dynamo_static_input_type")


class Graphs:
    """A backend of `torch.compile` whose functions run as CUDA graphs do.

    A graph belongs to a function, the shapes of its inputs and the addresses of those that are static. Other inputs are
    copied into its buffers. Its outputs lie in its buffers, and the next call of any graph overwrites them.

    Attributes:
        keys: The graphs that were recorded, in order.
        num_functions: Functions that were compiled.
        num_runs: Calls of all graphs.
        on_end: Called when a graph has run.
        spoil: Given how often a graph has run and its outputs, writes over them.
    """

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self.num_runs = self.num_functions = 0
        self.on_end: Callable[[], None] = lambda: None
        self.spoil: Callable[[int, list[torch.Tensor]], None] = lambda num_runs, outputs: None
        self._graphs: dict[Any, tuple[list[Any], list[torch.Tensor]]] = {}
        self._runs_of: dict[Any, int] = {}
        self._live: list[torch.Tensor] = []

    def __call__(self, module: Any, example_inputs: Any, **options: Any) -> Callable[..., Any]:
        function = self.num_functions
        self.num_functions += 1

        def run(*inputs: Any) -> Any:
            for output in self._live:
                _poison(output)
            shapes = tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in inputs)
            key = function, shapes, tuple(x.data_ptr() for x in inputs if _is_static(x))
            if key not in self._graphs:
                self.keys.append(key)
                self._graphs[key] = [x if _is_static(x) else x.clone() for x in inputs], []
            mine, outputs = self._graphs[key]
            for buffer, given in zip(mine, inputs, strict=True):
                if buffer is not given and not _is_static(given):
                    buffer.copy_(given)
            computed = list(module(*mine))
            if not outputs:
                outputs.extend(output.clone() for output in computed)
            for buffer, output in zip(outputs, computed, strict=True):
                buffer.copy_(output)
            self._live = outputs
            self.num_runs += 1
            self._runs_of[key] = self._runs_of.get(key, 0) + 1
            self.spoil(self._runs_of[key], outputs)
            self.on_end()
            return outputs

        return run

    def new_keys(self, work: Callable[[], Any]) -> int:
        """How many graphs are recorded in it."""
        before = len(self.keys)
        work()
        return len(self.keys) - before


class Turns:
    """Threads that run graphs in turn: who has run one goes on once every other waits for the lock, has run one or is done.

    So two threads meet at every step between a graph's end and the copy of what it gave.
    """

    PATIENCE = 60.0  # seconds after which a test fails that would hang

    def __init__(self, lock: Any) -> None:
        self._lock, self._changed, self._places = lock, threading.Condition(), dict[int, str]()
        self.num_meetings = 0

    def __enter__(self) -> None:
        self._be("at the lock")
        self._lock.acquire()
        self._be("running")

    def __exit__(self, *error: Any) -> None:
        self._lock.release()

    def _be(self, place: str) -> None:
        with self._changed:
            if threading.get_ident() in self._places:
                self._places[threading.get_ident()] = place
                self._changed.notify_all()

    def meet(self) -> None:
        """Called at a graph's end."""
        mine = threading.get_ident()
        if mine not in self._places:
            return
        self._be("after a graph")
        with self._changed:
            others = [of for of in self._places if of != mine]
            assert self._changed.wait_for(lambda: all(self._places[of] != "running" for of in others), self.PATIENCE)
            self.num_meetings += any(self._places[of] != "done" for of in others)
        self._be("running")

    def run(self, works: Sequence[Callable[[], Any]]) -> list[Any]:
        """What the works return, or the errors that they raise, each in its own thread."""
        results: list[Any] = [None] * len(works)
        ready = threading.Barrier(len(works))

        def work(index: int) -> None:
            self._places[threading.get_ident()] = "running"
            ready.wait(self.PATIENCE)
            try:
                results[index] = works[index]()
            except BaseException as error:
                results[index] = error
            finally:
                self._be("done")

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(works))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * self.PATIENCE)
        return results


def as_it_is(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """In place of `torch.compile`: captures nothing."""
    return function


def where() -> str:
    """The innermost line of the shipped code that runs."""
    frames = [frame for frame in traceback.extract_stack() if "/dflash/model/" in frame.filename]
    return f"{frames[-1].filename.rsplit('/', 1)[1]}: {frames[-1].line}" if frames else "elsewhere"


class LateDevice(TorchFunctionMode):
    """Tells tensors of the host from those of a device that computes later, though both lie on the CPU.

    Weights lie on the device, and so does what is computed with anything that does. Its values exist where `to_host` is
    read. Every other read, and every way to the device but `to_device`, is a fault.

    Attributes:
        events: "graph", "wait" and "commit" in order. Of reads whose values arrive together the first one waits.
        faults: What happened, and where.
    """

    def __init__(self, *models: torch.nn.Module) -> None:
        super().__init__()
        self.events: list[str] = []
        self.faults: list[str] = []
        self.is_watching = True
        self._num_sent = self._num_arrived = 0
        self._operations = _Operations(self)
        self._inside = 0
        for model in models:
            for tensor in (*model.parameters(), *model.buffers(), *vars(model).values()):
                if isinstance(tensor, torch.Tensor):
                    tensor._place = "device"

    def fault(self, what: str) -> None:
        """Takes note of one."""
        if self.is_watching:
            self.faults.append(f"{what} in {where()}")

    def waits(self, what: str) -> None:
        """A read that has to wait for all that was launched."""
        self.fault(what)
        self.events.append("wait")
        self._num_arrived = self._num_sent

    def to_device(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The one way to the device."""
        with _disable_current_modes():
            moved = tensor.clone()
        moved._place = "device"
        return moved

    def to_host(self, tensor: torch.Tensor) -> Callable[[], Any]:
        """The one way back: the values are those of now, and they arrive in the order in which they were sent."""
        is_here = place_of(tensor) != "device"
        with _disable_current_modes():
            copy = tensor.clone()
        if not is_here:
            self._num_sent += 1
        number = self._num_sent

        def read() -> Any:
            if not is_here and number > self._num_arrived:
                self._num_arrived = number
                self.events.append("wait")
            with _disable_current_modes():
                return copy.tolist()

        return read

    @contextmanager
    def unwatched(self) -> Iterator[None]:
        """Nothing that happens inside is a fault."""
        before, self.is_watching = self.is_watching, False
        try:
            yield
        finally:
            self.is_watching = before

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts its two ways in place of the shipped ones."""
        modules = [module for name, module in sys.modules.items() if name.startswith("dflash.model.")]
        for module in modules:
            for name in ("to_device", "to_host"):
                if hasattr(module, name):
                    monkeypatch.setattr(module, name, getattr(self, name))
        monkeypatch.setattr(step_dflash, "is_in_torch_dispatch_mode", lambda: False)  # this one is nobody's

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
            self.waits(name)
            with _disable_current_modes():
                return func(*args, **kwargs)
        self._check_copies(name, args, kwargs)
        result = func(*args, **kwargs)
        if func in _device_constructors() and isinstance(result, torch.Tensor) and place_of(result) is None:
            result._place = "host" if kwargs.get("device") in (None, "cpu") else "device"
        elif name == "new_tensor" or (name == "to" and place_of(args[0]) == "host" and _names_a_device(args, kwargs)):
            result = self.to_device(result, result.device)
        return result

    def _check_copies(self, name: str, args: Any, kwargs: Any) -> None:
        if name in ("tensor", "as_tensor") and "device" in kwargs and not isinstance(args[0], torch.Tensor):
            self.fault("a copy by torch.tensor(device=)")
        elif name == "new_tensor":
            self.fault("a copy by new_tensor")
        elif name == "to" and place_of(args[0]) == "host" and _names_a_device(args, kwargs):
            self.fault("a copy by to")
        elif name in ("__getitem__", "__setitem__") and place_of(args[0]) == "device":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(part, list) for part in index):
                self.fault("a copy of a list as index")


def place_of(value: Any) -> str | None:
    """ "device" or "host" or, for what no numbers were put into, `None`."""
    return getattr(value, "_place", None) if isinstance(value, torch.Tensor) else None


def _names_a_device(args: Any, kwargs: Any) -> bool:
    return "device" in kwargs or any(isinstance(arg, (torch.device, str)) for arg in args[1:])


class _Operations(TorchDispatchMode):
    """Says of every result where it lies."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        flat = [tensor for value in (*args, *(kwargs or {}).values()) for tensor in _tensors(value)]
        places = [place_of(tensor) for tensor in flat]
        if "device" not in places:
            place = "host" if "host" in places else None
        else:
            place = "device"
            name = func.overloadpacket.__name__
            is_masked = name.startswith("index") and any(
                index.dtype == torch.bool for value in args[1:2] for index in _tensors(value)
            )
            if name in READING_OPERATIONS or is_masked:
                self._device.waits(name)
            if any(of == "host" and tensor.ndim for of, tensor in zip(places, flat, strict=True)):
                self._device.fault(f"{name} of tensors of both")
        for tensor in _tensors(result):
            if place is not None:
                tensor._place = place
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, (list, tuple)) else []


class OtherDefaultDevice(TorchFunctionMode):
    """As under `torch.device("cuda")`: what draws random numbers on no stated device refuses a generator of the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Checks and calls."""
        kwargs = kwargs or {}
        generator = kwargs.get("generator")
        if generator is not None and func in _device_constructors():
            device = torch.device(kwargs.get("device") or "cuda")
            if device.type != generator.device.type:
                raise RuntimeError(f"Expected a {device.type!r} generator but found {generator.device.type!r}")
        return func(*args, **kwargs)
