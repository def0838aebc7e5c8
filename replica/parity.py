"""Does the index agree with what the engine reports? Predicted against reported cached tokens, per worker and rank.

Over the last ``window`` ended requests that carry both numbers: when the sums differ by more than ``alarm_ratio`` of
the larger one, and by more than ``floor_tokens`` a request, the source is `approximate` with reason ``parity`` until
the difference falls under half of that ratio (user case A14: another tokenizer or template than the engine's).

What is judged is always the index itself: what its events said when the request was placed (`Placed.indexed`), also
while the source is approximate and answered for from what was sent there. So the switch does not change what is
measured, and the way back is the same measure under the lower threshold. Requests that were placed without asking the
index (fallback, text, no chain, a source that was catching up) are not judged.

And: ``silent_requests`` requests that should each have stored a block, without one event, mean that events are off or
lost (``no_events``). Any event ends that.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ParityRules:
    """``min_requests``: how many numbers are needed before the alarm may ring."""

    window: int = 32
    min_requests: int = 8
    alarm_ratio: float = 0.25
    floor_tokens: int = 32
    silent_requests: int = 16


@dataclass(frozen=True, slots=True)
class Expected:
    """A request on its way: where it went, and the ``blocks`` of ``block_size`` tokens that the index saw there."""

    worker: str
    rank: int
    blocks: int
    block_size: int

    def cached_tokens(self, input_tokens: int) -> int:
        """Tokens that the engine should report as cached; the last token of a prompt is always computed."""
        return min(self.blocks, max(0, input_tokens - 1) // max(1, self.block_size)) * self.block_size


class Expectations:
    """Requests that have not ended, the oldest forgotten first; those are not judged."""

    def __init__(self, most: int = 32_768) -> None:
        self._most = most
        self._requests: OrderedDict[str, Expected] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def placed(self, request_id: str, expected: Expected | None) -> None:
        """The request was placed (again); ``None``: the index was not asked."""
        self._requests.pop(request_id, None)
        if expected is not None:
            self._requests[request_id] = expected
            if len(self._requests) > self._most:
                self._requests.popitem(last=False)

    def ended(self, request_id: str, worker: str, rank: int) -> Expected | None:
        """What was expected of a request that ended here, if anything."""
        expected = self._requests.pop(request_id, None)
        return expected if expected is not None and (expected.worker, expected.rank) == (worker, rank) else None


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
        """A request ended well on this source; tokens, ``None`` where not known or not to be judged."""
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
