"""How long tools take, per tool: bounded histories, and which of them answers (spec scheduling §1.3, §5.4).

A duration is the gap that the server sees, from the end of a turn to the arrival of the next one of the same program.
Tool names come from clients: their number and the samples of all of them together are bounded. The pause of a person
(`USER_TURN`) is a tool of its own (spec scheduling §5.5): it is not pooled with calls, nor predicted from them.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, NamedTuple

import msgspec

from services.admission.estimators.class_key import clean_label
from services.admission.estimators.ecdf import Durations, Ecdf, Exponential
from services.admission.estimators.errors import BadStateError, sample, stored_samples, stored_version
from services.admission.estimators.least_recent import LeastRecentlyUsed
from services.admission.estimators.windows import SortedWindow

USER_TURN = "user_turn"
HISTORY = 4096
HISTORY_THRESHOLD = 100
"""K_hist: a history that is not longer does not answer."""

MAX_TOOLS = 256
MAX_SAMPLES = 1 << 16
"""Of all tools together; the least recently used tools are forgotten for the others."""

STALE_SHARE = 32
"""A distribution is stale when one in so many of its samples is new: renewed only then, a sample costs O(1)."""

PROMPT_SAMPLES = 512
"""A stale distribution of no more samples is made anew when it is asked for: that takes well under a millisecond."""

OVERDUE_SHARE = 4
"""One of more samples waits for `ToolTimes.refresh`, unless one in so many is new."""

STATE_VERSION = 1

Source = Literal["tool", "pooled", "cold_start"]


class ToolDurations(NamedTuple):
    """A distribution, and whose it is."""

    durations: Durations
    source: Source


class ToolState(msgspec.Struct, frozen=True, kw_only=True):
    """One tool's durations in seconds, oldest first."""

    name: str
    durations: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_SAMPLES)] = ()


class ToolTimesState(msgspec.Struct, frozen=True, kw_only=True):
    """What `ToolTimes` writes. ``tools``: the least recently used first."""

    version: int = STATE_VERSION
    tools: Annotated[tuple[ToolState, ...], msgspec.Meta(max_length=MAX_SAMPLES)] = ()
    pooled: Annotated[tuple[float, ...], msgspec.Meta(max_length=MAX_SAMPLES)] = ()


class History:
    """The last durations of one tool, and their distribution, made when it is asked for."""

    def __init__(self, size: int, durations: tuple[float, ...] | list[float] = ()) -> None:
        self.window = SortedWindow(size, durations)
        self._new = len(self.window)
        self._ecdf: Ecdf | None = None

    def __len__(self) -> int:
        return len(self.window)

    def add(self, seconds: float) -> None:
        self.window.add(seconds)
        self._new += 1

    @property
    def is_stale(self) -> bool:
        """Whether `renew` would tell something new."""
        return self._new > len(self.window) // STALE_SHARE

    def renew(self) -> Ecdf:
        """The distribution of all samples, made anew; O(n). At least one sample."""
        self._ecdf = Ecdf(self.window.ascending)
        self._new = 0
        return self._ecdf

    def ecdf(self) -> Ecdf:
        """The distribution, made anew where that is cheap or overdue. At least one sample."""
        size = len(self.window)
        overdue = self._new > size // OVERDUE_SHARE or (size <= PROMPT_SAMPLES and self.is_stale)
        return self.renew() if self._ecdf is None or overdue else self._ecdf


class ToolTimes:
    """Histories by tool. ``threshold``: K_hist; ``cold_start``: answers until enough is known."""

    def __init__(
        self,
        *,
        history: int = HISTORY,
        threshold: int = HISTORY_THRESHOLD,
        max_tools: int = MAX_TOOLS,
        max_samples: int = MAX_SAMPLES,
        cold_start: Durations | None = None,
    ) -> None:
        self._history = min(history, max_samples)
        self._threshold = threshold
        self._max_samples = max_samples
        self._cold_start = Exponential() if cold_start is None else cold_start
        self._pooled = History(self._history)
        self._max_tools = max_tools
        self._tools = self._no_tools()
        self._answers: dict[str, ToolDurations] = {}
        """Of `durations`, by tool, until something is learned."""
        self.samples = 0

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def evictions(self) -> int:
        """Tools forgotten for want of room."""
        return self._tools.evictions

    def _no_tools(self) -> LeastRecentlyUsed[str, History]:
        return LeastRecentlyUsed(self._max_tools, lambda: History(self._history), self._forget)

    def _forget(self, name: str, history: History) -> None:
        self.samples -= len(history)

    def record(self, tool: str, seconds: float) -> None:
        """A call of ``tool`` took so long, taken in microseconds. Raises `BadSampleError`."""
        seconds = round(sample("tool seconds", seconds), 6)
        name = clean_label(tool)
        history = self._tools.use(name)
        self.samples += len(history) < history.window.size
        self._answers.clear()
        history.add(seconds)
        if name != USER_TURN:
            self._pooled.add(seconds)
        while self.samples > self._max_samples:
            self._tools.evict()

    def durations(self, tool: str) -> ToolDurations:
        """The distribution to use for ``tool``: its own, the one of all calls, or the cold start's.

        Source: spec scheduling §1.3: cold start where |S| <= K, all calls where |S[f]| <= K.
        """
        known = self._answers.get(tool)
        if known is None:
            if len(self._answers) >= self._max_tools:
                self._answers.clear()
            known = self._answers[tool] = self._durations(clean_label(tool))
        return known

    def _durations(self, name: str) -> ToolDurations:
        own = self._tools.peek(name)
        if name != USER_TURN and len(self._pooled) <= self._threshold:
            return ToolDurations(self._cold_start, "cold_start")
        if own is not None and len(own) > self._threshold:
            return ToolDurations(own.ecdf(), "tool")
        if name == USER_TURN:
            return ToolDurations(self._cold_start, "cold_start")
        return ToolDurations(self._pooled.ecdf(), "pooled")

    def refresh(self) -> bool:
        """Makes one stale distribution anew (a few milliseconds at its bound), if there is one: for the idle moments of
        a caller, so that no decision has to wait for it. Returns whether there was one."""
        known = (history for _, history in self._tools.items() if len(history) > self._threshold)
        stale = next((history for history in (self._pooled, *known) if history.is_stale), None)
        if stale is not None:
            stale.renew()
            self._answers.clear()
        return stale is not None

    def to_state(self) -> ToolTimesState:
        return ToolTimesState(
            tools=tuple(
                ToolState(name=name, durations=history.window.ordered()) for name, history in self._tools.items()
            ),
            pooled=self._pooled.window.ordered(),
        )

    def restore(self, state: ToolTimesState) -> None:
        """Takes over what was written, in place of what is known; the most recent of it, where there is less room now.
        Raises `BadStateError`, and then nothing changed."""
        stored_version("tool times", state.version, STATE_VERSION)
        pooled = stored_samples("tool times", state.pooled, MAX_SAMPLES)
        tools = [(tool.name, stored_samples("tool times", tool.durations, MAX_SAMPLES)) for tool in state.tools]
        names = [name for name, _ in tools]
        if len(set(names)) < len(names) or any(clean_label(name) != name for name in names):
            raise BadStateError("tool times", "bad_value", "names of tools that are no names, or twice the same")
        self._tools, self.samples = self._no_tools(), 0
        self._answers.clear()
        self._pooled = History(self._history, pooled)
        for name, durations in tools:
            history = History(self._history, durations)
            self._tools.put(name, history)
            self.samples += len(history)
            while self.samples > self._max_samples:
                self._tools.evict()


def lease_index(return_rate: float, reload_seconds: float, context_tokens: float) -> float:
    """I_q, per token: what holding the KV of an idle program is worth, at best over all horizons.

    ``return_rate``: `Durations.return_rate` at the time the tool has run; ``reload_seconds``: R, to compute the context
    anew; ``context_tokens``: c. Source: spec policy §4 (``I_q``), which drops the queueing term of scheduling §5.2.
    """
    return return_rate * reload_seconds / context_tokens if context_tokens > 0 else 0.0


def return_rate_at(index: float, reload_seconds: float, context_tokens: float) -> float:
    """The return rate at which `lease_index` is ``index``: what `Durations.falls_below` and `rises_to` want. Infinite
    where there is nothing to reload."""
    return index * context_tokens / reload_seconds if reload_seconds > 0 else math.inf
