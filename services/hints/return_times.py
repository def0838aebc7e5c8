"""When a session is likely to come back: gaps between the end of a turn and the next one, by tool."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import OrderedDict, deque

WINDOW = 128
"""Gaps remembered of one tool; an older one goes for a new one."""
ENOUGH = 8
"""With fewer, those of all tools together are asked."""
MAX_TOOLS = 512
ALL = ""


class _Gaps:
    """The last gaps of one tool, in order of time and of length."""

    __slots__ = ("in_time", "sorted")

    def __init__(self) -> None:
        self.in_time: deque[float] = deque()
        self.sorted: list[float] = []

    def add(self, seconds: float) -> None:
        if len(self.in_time) >= WINDOW:
            del self.sorted[bisect_right(self.sorted, self.in_time.popleft()) - 1]
        self.in_time.append(seconds)
        insort(self.sorted, seconds)


class ReturnTimes:
    """Gaps by tool, and of all. Bounded: the tool that was used longest ago is forgotten."""

    def __init__(self) -> None:
        self._tools: OrderedDict[str, _Gaps] = OrderedDict()
        self._all = _Gaps()

    def __len__(self) -> int:
        return len(self._tools)

    def add(self, tool: str, seconds: float) -> None:
        """A session came back ``seconds`` after its turn; ``tool`` ran last, empty: nobody knows."""
        self._all.add(seconds)
        if not tool:
            return
        gaps = self._tools.setdefault(tool, _Gaps())
        self._tools.move_to_end(tool)
        gaps.add(seconds)
        while len(self._tools) > MAX_TOOLS:
            self._tools.popitem(last=False)

    def remaining(self, tool: str, elapsed: float, share: float) -> float | None:
        """In how many seconds ``share`` of the sessions that have been away for ``elapsed`` are back; ``None``: too few
        were away for so long to say."""
        gaps = self._tools.get(tool)
        for each in (gaps, self._all):
            if each is None:
                continue
            longer = each.sorted[bisect_right(each.sorted, elapsed) :]
            if len(longer) >= ENOUGH:
                return longer[min(int(share * len(longer)), len(longer) - 1)] - elapsed
        return None

    def typical(self) -> float | None:
        """The median of all gaps."""
        gaps = self._all.sorted
        return gaps[len(gaps) // 2] if len(gaps) >= ENOUGH else None
