"""When a child that ended is started again: back-off, and giving up on a crash loop; and when one hangs. Pure.

The delay starts at ``first_delay_s`` and grows by ``factor`` with each exit up to ``max_delay_s``; a child that ran for
``steady_s`` starts afresh. ``max_exits`` exits without a steady run are a crash loop: it is left alone, and its owner
told. One that was never ready gets ``first_exits`` tries only, however long each took (it may have been killed because
it hung), and an exit with code 2 then is a wrong setting, which no restart heals.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

WRONG_SETTING_EXIT = 2
_MOST_GROWTH = 100
"""Steps by which a delay grows; after some more its number would be too large."""


@dataclass(frozen=True, slots=True)
class RestartRules:
    """Times in seconds."""

    first_delay_s: float = 0.2
    factor: float = 2.0
    max_delay_s: float = 5.0
    steady_s: float = 10.0
    max_exits: int = 8
    first_exits: int = 3


@dataclass(frozen=True, slots=True)
class History:
    """What is remembered of one child: when it was started last, whether it was ever ready, exits without a steady run
    since, all restarts."""

    started_at: float = 0.0
    was_ready: bool = False
    exits: int = 0
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """Start it again after this many seconds."""

    delay_s: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Leave it; the sentence says why."""

    reason: Literal["wrong_setting", "crash_loop"]
    message: str


def started(history: History, now: float) -> History:
    """The child was started at ``now``."""
    return replace(history, started_at=now)


def became_ready(history: History) -> History:
    """Its settings are good, then."""
    return replace(history, was_ready=True)


def exited(history: History, code: int, now: float, rules: RestartRules) -> tuple[History, Restart | GiveUp]:
    """The child ended with ``code`` (negative: killed by that signal) although nobody asked it to."""
    if code == WRONG_SETTING_EXIT and not history.was_ready:
        return history, GiveUp("wrong_setting", "it refused its settings (exit code 2)")
    was_steady = history.was_ready and now - history.started_at >= rules.steady_s
    exits = 1 if was_steady else history.exits + 1
    history = replace(history, exits=exits)
    if exits >= (rules.max_exits if history.was_ready else rules.first_exits):
        without = f"running {rules.steady_s:g} s" if history.was_ready else "ever being ready"
        return history, GiveUp("crash_loop", f"it ended {exits} times without {without}")
    delay_s = min(rules.max_delay_s, rules.first_delay_s * rules.factor ** min(exits - 1, _MOST_GROWTH))
    return replace(history, restarts=history.restarts + 1), Restart(delay_s)


LEAST_LOOKS = 5
"""Without an answer, before a child is taken for hanging, however long they took: the watcher may have been asleep."""


class Silence:
    """Of a child that runs: ``looked`` each time it was asked whether it lives."""

    def __init__(self, hung_s: float) -> None:
        self._hung_s = hung_s
        self._since: float | None = None
        self._looks = 0

    def looked(self, answered: bool, now: float) -> bool:
        """Whether it hangs."""
        if answered:
            self._since, self._looks = None, 0
            return False
        if self._since is None:
            self._since = now
        self._looks += 1
        return self._looks >= LEAST_LOOKS and now - self._since >= self._hung_s
