"""What the indexer knows of sessions: whose prefix is what, and who was forked from whom.

Learned from what is said of every turn that was placed (`schemas.placed.Placed`: whose it was, its chain), so that
every indexer knows every session. Kept for the most recently seen sessions, within bounds of sessions, of distinct
blocks and of the bytes of their names (a name is the client's, and may be long); the oldest go first. A session whose
prompts had no chain has no frontier. Chains are known by pool: model, block size and unit; whatever else divides an
engine's cache (salt, adapter) is in the hashes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

from kvcore.session_index import SessionIndex, SessionLimits, SessionPrefix
from schemas.index import ChainUnit
from schemas.placed import Placed
from schemas.session import SessionKey, engine_session_id

HASH_BYTES = 8
LOOKED_AT = 10


@dataclass(frozen=True, slots=True)
class ChainPool:
    """Where chains can meet."""

    model: str = ""
    block_size: int = 0
    unit: ChainUnit = "tokens"


@dataclass(frozen=True, slots=True)
class Named:
    """Sessions in an answer; ``more``: others are known, but not named."""

    sessions: tuple[SessionKey, ...]
    more: bool

    @classmethod
    def of(cls, sessions: Iterator[SessionKey], most: int, tenant: str | None = None) -> Named:
        """The first ``most`` of them; with ``tenant`` only its own, of as many as are looked at (`LOOKED_AT` times as
        many as are named)."""
        if tenant is None:
            named = tuple(islice(sessions, most + 1))
            return cls(named[:most], len(named) > most)
        looked_at = list(islice(sessions, LOOKED_AT * most + 1))
        own = tuple(session for session in looked_at if session.tenant == tenant)
        return cls(own[:most], len(own) > most or len(looked_at) > LOOKED_AT * most)


class SessionTable:
    """Bounded. ``evicted`` counts what the bounds cost."""

    def __init__(self, max_sessions: int, max_blocks: int, max_bytes: int) -> None:
        self.index: SessionIndex[SessionKey] = SessionIndex(SessionLimits(max_sessions, max_blocks))
        self._max_bytes = max_bytes
        self._sizes: dict[SessionKey, int] = {}
        self._by_id: dict[str, SessionKey | None] = {}
        self._of_id: Counter[str] = Counter()
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self.index)

    def placed(self, fact: Placed) -> None:
        """A prompt was placed. One that does not move a session says nothing here."""
        session = fact.session
        if session is None:
            return
        chain = fact.chain if len(fact.chain) % HASH_BYTES == 0 else b""
        pool = ChainPool(fact.model, fact.block_size, fact.unit)
        gone = self.index.place(session, pool, chain, fact.parent)
        if session not in self._sizes:
            own = _id(session)
            self._by_id[own] = None if own in self._by_id else session
            self._of_id[own] += 1
        if session not in self._sizes or fact.parent is not None:
            self._weigh(session, fact.parent)
        for each in gone:
            self._gone(each)
        while self.bytes > self._max_bytes and len(self.index) > 1:
            oldest = self.index.oldest()
            assert oldest is not None
            self.index.forget(oldest)
            self._gone(oldest)

    def ended(self, session: SessionKey) -> None:
        """A request of it is over: it was seen."""
        self.index.touch(session)

    def named(self, session_id: str) -> SessionKey | None:
        """The session whose own id this is, as engines are told it; ``None`` for no or several ones."""
        return self._by_id.get(session_id)

    def get(self, session: SessionKey) -> tuple[SessionPrefix[SessionKey], ChainPool] | None:
        """What is known of one session and where, without touching its place in line."""
        found = self.index.get(session)
        if found is None:
            return None
        return found, found.pool if isinstance(found.pool, ChainPool) else ChainPool()

    def _weigh(self, session: SessionKey, parent: SessionKey | None) -> None:
        keys = [key for key in (session, parent) if key is not None]
        size = sum(len(key.tenant) + len(key.root) + len(key.agent) for key in keys)
        self.bytes += size - self._sizes.get(session, 0)
        self._sizes[session] = size

    def _gone(self, session: SessionKey) -> None:
        own = _id(session)
        self._of_id[own] -= 1
        if not self._of_id[own]:  # else it stays nobody's: another one has it too
            del self._of_id[own], self._by_id[own]
        self.bytes -= self._sizes.pop(session, 0)
        self.evicted += 1


def _id(session: SessionKey) -> str:
    """What engines are told for this key (`schemas.session.SessionIdentity.session_id`)."""
    return engine_session_id(session, session.agent or session.root)
