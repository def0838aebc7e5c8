"""T: how long a program that lost its lease waits when it returns (spec scheduling §1.2, §1.3, §5.2)."""

from __future__ import annotations

import math
from collections import deque
from typing import Annotated

import msgspec

from services.admission.estimators.errors import sample, stored_samples, stored_version

WINDOW = 100
STATE_VERSION = 1
MAX_STORED = 1 << 16


class QueueingDelayState(msgspec.Struct, frozen=True, kw_only=True):
    """What `QueueingDelay` writes: delays in seconds, oldest first."""

    version: int = STATE_VERSION
    delays: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_STORED)] = ()


class QueueingDelay:
    """The mean over the last ``window`` returns without a lease, of hold and engine queue together; 0 at first."""

    def __init__(self, *, window: int = WINDOW) -> None:
        self._delays: deque[float] = deque(maxlen=window)
        self._mean: float | None = 0.0

    def __len__(self) -> int:
        return len(self._delays)

    def record(self, seconds: float) -> None:
        """A turn without a lease waited so long. Raises `BadSampleError`."""
        self._delays.append(sample("queueing delay", seconds))
        self._mean = None

    @property
    def mean(self) -> float:
        """T in seconds."""
        if self._mean is None:
            self._mean = math.fsum(self._delays) / len(self._delays)
        return self._mean

    def to_state(self) -> QueueingDelayState:
        return QueueingDelayState(delays=tuple(self._delays))

    @classmethod
    def from_state(cls, state: QueueingDelayState, *, window: int = WINDOW) -> QueueingDelay:
        """What was written; the latest, where the window is smaller. Raises `BadStateError`."""
        stored_version("queueing delay", state.version, STATE_VERSION)
        made = cls(window=window)
        for delay in stored_samples("queueing delay", state.delays, MAX_STORED):
            made.record(delay)
        return made
