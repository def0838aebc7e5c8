"""What the engine remembers of sessions: the blocks of each one's last request, by the id that requests carried.

A hint means a session's blocks; they may be anywhere, or gone. Bounded by sessions and by blocks: the least recently
used session is forgotten first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Sequence

from load.engine.kv_cache import BlockContent

MAX_SESSIONS = 4096
MAX_BLOCKS = 500_000


class SessionChains:
    """Session id to the contents of its blocks, first to last."""

    def __init__(self, max_sessions: int = MAX_SESSIONS, max_blocks: int = MAX_BLOCKS) -> None:
        self._max_sessions = max_sessions
        self._max_blocks = max_blocks
        self._chains: OrderedDict[str, tuple[BlockContent, ...]] = OrderedDict()
        self._sharers: Counter[bytes] = Counter()
        self.blocks = 0
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._chains)

    def __contains__(self, session_id: str) -> bool:
        return session_id in self._chains

    def note(self, session_id: str, contents: Sequence[BlockContent]) -> None:
        """The session's last request had these blocks."""
        old = self._chains.pop(session_id, ())
        kept = _common(old, contents)
        self._leave(old[kept:])
        self._sharers.update(content.digest for content in contents[kept:])
        self.blocks += len(contents) - len(old)
        if contents:
            self._chains[session_id] = tuple(contents)
        while len(self._chains) > self._max_sessions or (self.blocks > self._max_blocks and len(self._chains) > 1):
            self.forget(next(iter(self._chains)))
            self.forgotten += 1

    def chain(self, session_id: str) -> tuple[BlockContent, ...]:
        """Its blocks; none for a session that is not known. A use of it."""
        contents = self._chains.get(session_id, ())
        if contents:
            self._chains.move_to_end(session_id)
        return contents

    def only_of(self, session_id: str, contents: Sequence[BlockContent]) -> list[BlockContent]:
        """Those of ``contents``, blocks of the session, that no other known session has."""
        own = 1 if session_id in self._chains else 0
        return [content for content in contents if self._sharers[content.digest] <= own]

    def forget(self, session_id: str) -> bool:
        """Whether it was known."""
        contents = self._chains.pop(session_id, None)
        if contents is None:
            return False
        self.blocks -= len(contents)
        self._leave(contents)
        return True

    def _leave(self, contents: Sequence[BlockContent]) -> None:
        for content in contents:
            self._sharers[content.digest] -= 1
            if not self._sharers[content.digest]:
                del self._sharers[content.digest]


def _common(one: Sequence[BlockContent], other: Sequence[BlockContent]) -> int:
    """How many blocks two chains begin with alike: equal digests at a place mean equal ones before it."""
    shorter = min(len(one), len(other))
    return bisect_left(range(shorter), True, key=lambda place: one[place].digest != other[place].digest)
