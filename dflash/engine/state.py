"""What the engine has made and learned of a drafter and a target. It lives on the drafter and ends with either model."""

from __future__ import annotations

import threading
import weakref
from typing import Any

from transformers.utils import logging

from .compiled import CompiledStep, fingerprint
from .recorded import RECORDERS, Recordings


logger = logging.get_logger(__name__)

ATTRIBUTE = "_dflash_pair_states"  # of the drafter


class PairState:
    """Compiled and recorded steps, and the statistics of widths, of one drafter and one target.

    Attributes:
        lock (`threading.RLock`): Held while something here is made.
        compiled (`CompiledStep`): Compiled steps.
        recordings (`Recordings`): Recorded steps.
        recording_reason (`str`, *optional*): Why steps are not recorded; `None`: they may be.
        widths (`dict[Any, Any]`): What `WidthProposer` has learned, by the kind of step.
    """

    def __init__(self, drafter: Any, target: Any) -> None:
        self._drafter = weakref.ref(drafter)
        self._target = weakref.ref(target)
        self._fingerprint: Any = None
        self._warned_reasons: set[str | None] = set()
        self.lock = threading.RLock()
        self.compiled = CompiledStep(target, drafter)
        self.recordings = Recordings()
        self.recording_reason = self.compiled.reason
        self.widths: dict[Any, Any] = {}

    @classmethod
    def of(cls, drafter: Any, target: Any) -> PairState:
        """The state of these two models. A copy of a drafter, shallow, deep or pickled, begins without any."""
        states = vars(drafter).get(ATTRIBUTE)
        if states is None or states.drafter() is not drafter:
            states = PairStates(drafter)
            vars(drafter)[ATTRIBUTE] = states  # past the hooks of `nn.Module`
        return states.of_target(target)

    def refresh(self) -> None:
        """Drops what was compiled or recorded if a model has changed since: cast, moved, hooked, or given an adapter."""
        drafter = self._drafter()
        target = self._target()
        with self.lock:
            if self._fingerprint is not None and self._fingerprint != fingerprint(target, drafter):
                self.compiled = CompiledStep(target, drafter)
                self.recordings.clear()
                self.recording_reason = self.compiled.reason
                self._fingerprint = None

    def remember_models(self) -> None:
        """Keeps the state of the models that the first compiled or recorded step was made of."""
        with self.lock:
            if self._fingerprint is None:
                self._fingerprint = fingerprint(self._target(), self._drafter())

    def can_compile(self) -> bool:
        """Whether steps may be compiled. Warns once if they may not."""
        if self.compiled.reason is None:
            return True
        self.remember_models()
        self.compiled.warn_of_reason()
        return False

    def can_record(self, device_type: str) -> bool:
        """Whether steps on a type of device may be recorded. Warns once if they may not."""
        if self.recording_reason is None and device_type not in RECORDERS:
            self.recording_reason = f"{device_type} is no CUDA device"
        if self.recording_reason is None:
            return True
        self.remember_models()
        self._warn_of_recording()
        return False

    def give_up_recording(self, error: Exception) -> None:
        """Records nothing from now on, and warns with the error. Texts on other recordings keep theirs."""
        first_line = str(error).strip().partition("\n")[0]
        with self.lock:
            self.recordings.clear()
            self.recording_reason = f"a step is not recorded ({type(error).__name__}: {first_line})"
        self._warn_of_recording()

    def _warn_of_recording(self) -> None:
        """Says why steps are not recorded, the same reason once."""
        if self.recording_reason not in self._warned_reasons:
            self._warned_reasons.add(self.recording_reason)
            logger.warning(f"Steps run eagerly and cuda_graph=True has no effect: {self.recording_reason}.")


class PairStates:
    """The states of one drafter, by target, which they do not keep alive."""

    def __init__(self, drafter: Any = None) -> None:
        self.drafter: Any = (lambda: None) if drafter is None else weakref.ref(drafter)
        self._lock = threading.Lock()
        self._by_target: weakref.WeakKeyDictionary[Any, PairState] = weakref.WeakKeyDictionary()

    def of_target(self, target: Any) -> PairState:
        """The state of the drafter and this target."""
        with self._lock:
            if target not in self._by_target:
                self._by_target[target] = PairState(self.drafter(), target)
            return self._by_target[target]

    def __reduce__(self) -> tuple[Any, ...]:
        return PairStates, ()  # copies and pickles are empty
