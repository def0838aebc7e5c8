"""Pins that the engine sets by itself between the turns of a job, as the Continuum plug-in does (simple version).

The request says of itself, in ``vllm_xargs``: ``job_id``; ``last_func_call``, the tool that has just returned;
``this_func_call``, the tool about to be called (else: the one that the answer calls); ``is_last_step``: no turn
follows. The preview's rule: pin for 2.0 s, unless the tool took longer than that on average; no tool, no pin; nothing
is pinned after the last step. Source: spec scheduling §1.5-1.7.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_TTL_S = 2.0
SHORTEST_TTL_S = 0.01
"""A shorter pin is none."""
MAX_JOBS = 4096
MAX_TOOLS = 1024


@dataclass(frozen=True, slots=True)
class JobStep:
    """What a request says of the job that it is a step of."""

    job_id: str
    last_tool: str | None = None
    next_tool: str | None = None
    is_last: bool = False


def job_step_of(xargs: Mapping[str, Any] | None, called_tool: str | None) -> JobStep | None:
    """Reads ``vllm_xargs`` (booleans as 0 or 1); ``None`` without a job. ``called_tool``: what the answer calls."""
    if not xargs:
        return None
    job_id = xargs.get("job_id")
    if not isinstance(job_id, str) or not job_id:
        return None
    return JobStep(
        job_id,
        _name(xargs.get("last_func_call")),
        _name(xargs.get("this_func_call")) or called_tool,
        bool(xargs.get("is_last_step")),
    )


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


class ToolTimes:
    """How long tools took, by what jobs say; decides how long a job's blocks are pinned. Bounded by jobs and tools."""

    def __init__(self, default_s: float = DEFAULT_TTL_S) -> None:
        self._default_s = default_s
        self._finished: OrderedDict[str, float] = OrderedDict()
        self._times: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def began(self, step: JobStep, now: float) -> None:
        """The next turn of a job arrives: its tool took the time since the turn before it ended."""
        ended = self._finished.pop(step.job_id, None)
        if ended is None or step.last_tool is None:
            return
        count, total = self._times.pop(step.last_tool, (0, 0.0))
        self._times[step.last_tool] = (count + 1, total + max(0.0, now - ended))
        if len(self._times) > MAX_TOOLS:
            self._times.popitem(last=False)

    def ended(self, step: JobStep, now: float) -> float:
        """A turn of a job ended; for how many seconds its blocks are pinned (0: not at all)."""
        self._finished.pop(step.job_id, None)
        if step.is_last:
            return 0.0
        self._finished[step.job_id] = now
        if len(self._finished) > MAX_JOBS:
            self._finished.popitem(last=False)
        return self.ttl_s(step.next_tool)

    def ttl_s(self, tool: str | None) -> float:
        """Seconds for ``tool``."""
        if tool is None:
            return 0.0
        count, total = self._times.get(tool, (0, 0.0))
        too_long = count > 0 and total / count > self._default_s
        return 0.0 if too_long or self._default_s <= SHORTEST_TTL_S else self._default_s
