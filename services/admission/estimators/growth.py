"""What the next turn adds: growth of the context, and length of the answer (spec policy §4, scheduling §5.2, §5.4)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from services.admission.estimators.errors import BadStateError, stored_samples, stored_version
from services.admission.estimators.errors import sample as checked
from services.admission.estimators.windows import SortedWindow

GROWTH_WEIGHT = 0.05
GROWTH_PRIOR = 2000.0
OUTPUT_WINDOW = 512
OUTPUT_PRIOR = 250.0
OUTPUT_SHARE = 0.9
MIN_SAMPLES = 20
"""Fewer do not speak for a class (growth) or for the outputs: the pooled estimate does, and then the prior."""

STATE_VERSION = 1
MAX_STORED = 1 << 16


class GrowthState(msgspec.Struct, frozen=True, kw_only=True):
    """What `ContextGrowth` writes: the mean in tokens, and of how many turns."""

    version: int = STATE_VERSION
    mean: float = GROWTH_PRIOR
    turns: int = 0


class ContextGrowth:
    """g: the exponentially weighted mean of what a turn adds to the context, in tokens; 2,000 at first."""

    def __init__(self, *, weight: float = GROWTH_WEIGHT, prior: float = GROWTH_PRIOR) -> None:
        self._weight = weight
        self.mean = prior
        self.turns = 0

    @property
    def is_ready(self) -> bool:
        """Whether enough turns were seen to speak for themselves."""
        return self.turns >= MIN_SAMPLES

    def record(self, tokens: float) -> None:
        """A turn added so many tokens. Raises `BadSampleError`."""
        self.mean += self._weight * (checked("context growth", tokens) - self.mean)
        self.turns += 1

    def to_state(self) -> GrowthState:
        return GrowthState(mean=self.mean, turns=self.turns)

    @classmethod
    def from_state(cls, state: GrowthState, *, weight: float = GROWTH_WEIGHT) -> ContextGrowth:
        """What was written. Raises `BadStateError`."""
        stored_version("context growth", state.version, STATE_VERSION)
        (mean,) = stored_samples("context growth", [state.mean], 1)
        if state.turns < 0:
            raise BadStateError("context growth", "bad_value", f"{state.turns!r} turns")
        made = cls(weight=weight, prior=mean)
        made.turns = state.turns
        return made


class OutputLengthState(msgspec.Struct, frozen=True, kw_only=True):
    """What `OutputLength` writes: tokens of answers, oldest first."""

    version: int = STATE_VERSION
    tokens: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_STORED)] = ()


class OutputLength:
    """out_P90: what nine of ten of the last ``window`` answers do not exceed, in tokens; 250 at first."""

    def __init__(self, *, window: int = OUTPUT_WINDOW) -> None:
        self._window = SortedWindow(window)

    def __len__(self) -> int:
        return len(self._window)

    @property
    def is_ready(self) -> bool:
        """Whether enough answers were seen to speak for themselves."""
        return len(self._window) >= MIN_SAMPLES

    def record(self, tokens: float) -> None:
        """An answer had so many tokens. Raises `BadSampleError`."""
        self._window.add(checked("output tokens", tokens))

    @property
    def p90(self) -> float:
        """The quantile (nearest rank), or the prior, in tokens."""
        return self._window.quantile(OUTPUT_SHARE) if self.is_ready else OUTPUT_PRIOR

    def to_state(self) -> OutputLengthState:
        return OutputLengthState(tokens=self._window.ordered())

    @classmethod
    def from_state(cls, state: OutputLengthState, *, window: int = OUTPUT_WINDOW) -> OutputLength:
        """What was written; the latest, where the window is smaller. Raises `BadStateError`."""
        stored_version("output length", state.version, STATE_VERSION)
        made = cls(window=window)
        made._window = SortedWindow(window, stored_samples("output length", state.tokens, MAX_STORED))
        return made
