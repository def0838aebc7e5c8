"""Does the index agree with what the engine reports? Predicted against reported cached tokens, per worker and rank.

Over the last ``window`` ended requests that carry both numbers: when the sums differ by more than ``alarm_ratio`` of
the larger one, and by more than ``floor_tokens`` a request, the source is `approximate` with reason ``parity`` until
the difference falls under half of that ratio (user case A14: another tokenizer or template than the engine's).

And: ``silent_requests`` requests that should each have stored a block, without one event, mean that events are off or
lost (``no_events``). Any event ends that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ParityRules:
    """``min_requests``: how many numbers are needed before the alarm may ring."""

    window: int = 32
    min_requests: int = 8
    alarm_ratio: float = 0.25
    floor_tokens: int = 32
    silent_requests: int = 16


@dataclass(slots=True)
class SourceParity:
    """The record of one (worker, rank)."""

    rules: ParityRules
    numbers: deque[tuple[int, int]] = field(default_factory=deque)
    predicted: int = 0
    reported: int = 0
    since_event: int = 0
    alarmed: bool = False

    def ended(self, input_tokens: int, block_size: int, predicted: int | None, reported: int | None) -> None:
        """A request ended well on this source; tokens, ``None`` where not known."""
        if block_size > 0 and input_tokens - max(predicted or 0, reported or 0) >= block_size:
            self.since_event += 1
        if predicted is None or reported is None:
            return
        self.numbers.append((predicted, reported))
        self.predicted += predicted
        self.reported += reported
        if len(self.numbers) > self.rules.window:
            old = self.numbers.popleft()
            self.predicted -= old[0]
            self.reported -= old[1]
        self._judge()

    def event(self) -> None:
        """A batch of events of this source was applied."""
        self.since_event = 0

    def restarted(self) -> None:
        """The source began anew: what was measured of the old one says nothing."""
        self.numbers.clear()
        self.predicted = self.reported = self.since_event = 0
        self.alarmed = False

    @property
    def problem(self) -> str | None:
        """``parity``, ``no_events``, or ``None``."""
        if self.alarmed:
            return "parity"
        return "no_events" if self.since_event >= self.rules.silent_requests else None

    def _judge(self) -> None:
        count = len(self.numbers)
        larger = max(self.predicted, self.reported)
        differ = abs(self.predicted - self.reported)
        if self.alarmed:
            self.alarmed = differ > larger * self.rules.alarm_ratio / 2
        elif count >= self.rules.min_requests:
            self.alarmed = differ > larger * self.rules.alarm_ratio and differ > self.rules.floor_tokens * count
