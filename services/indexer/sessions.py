"""What the indexer knows of sessions: where each one's prefix ended last.

Learned from what is said of every turn that was placed (`schemas.placed.Placed`: whose it was, its chain, the rank that
got it), so that every indexer knows every session. Kept for the most recently seen sessions, within a bound of sessions
and of the bytes of their chains and names (a name is the client's, and may be long); the oldest go first. A session
whose prompts had no chain has no frontier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.index import ChainUnit
from schemas.placed import Placed
from schemas.session import SessionKey

HASH_BYTES = 8


@dataclass(slots=True)
class KnownSession:
    """One session. ``chain``: chain hashes (u64 little-endian) of the last prompt that had one, over blocks of
    ``block_size`` in ``unit``; ``worker``: the last one."""

    session: SessionKey
    model: str = ""
    block_size: int = 0
    unit: ChainUnit = "tokens"
    chain: bytes = b""
    parent: SessionKey | None = None
    worker: str | None = None
    rank: int | None = None

    @property
    def depth(self) -> int:
        """Blocks of the chain."""
        return len(self.chain) // HASH_BYTES

    @property
    def size(self) -> int:
        """Bytes of its chain, characters of its names."""
        names = (self.session, self.parent)
        named = sum(len(key.tenant) + len(key.root) + len(key.agent) for key in names if key is not None)
        return len(self.chain) + named + len(self.model) + len(self.worker or "")

    @property
    def frontier(self) -> str | None:
        """Hex of the last block's chain hash."""
        if not self.chain:
            return None
        return f"{int.from_bytes(self.chain[-HASH_BYTES:], 'little'):016x}"


class SessionTable:
    """Bounded map of sessions, least recently seen first out. ``evicted`` counts what the bounds cost."""

    def __init__(self, max_sessions: int, max_bytes: int) -> None:
        self._max_sessions = max_sessions
        self._max_bytes = max_bytes
        self._sessions: OrderedDict[SessionKey, KnownSession] = OrderedDict()
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def placed(self, fact: Placed) -> None:
        """A prompt was placed. One that does not move a session says nothing here."""
        if fact.session is None:
            return
        known = self._seen(fact.session)
        self.bytes -= known.size
        known.parent = fact.parent or known.parent
        known.worker, known.rank = fact.worker, fact.rank
        if fact.chain and len(fact.chain) % HASH_BYTES == 0:
            known.model, known.block_size, known.unit = fact.model, fact.block_size, fact.unit
            known.chain = fact.chain
        self.bytes += known.size
        self._evict()

    def get(self, session: SessionKey) -> KnownSession | None:
        """What is known of one session, without touching its place in line."""
        return self._sessions.get(session)

    def holding(self, block: int) -> Iterator[SessionKey]:
        """Sessions whose chain contains this chain hash. Linear in the bytes kept (bounded)."""
        wanted = block.to_bytes(HASH_BYTES, "little")
        for known in self._sessions.values():
            at = known.chain.find(wanted)
            while at >= 0 and at % HASH_BYTES:
                at = known.chain.find(wanted, at + 1)
            if at >= 0:
                yield known.session

    def _seen(self, session: SessionKey) -> KnownSession:
        known = self._sessions.get(session)
        if known is None:
            known = self._sessions[session] = KnownSession(session)
            self.bytes += known.size
        else:
            self._sessions.move_to_end(session)
        return known

    def _evict(self) -> None:
        while len(self._sessions) > self._max_sessions or (self.bytes > self._max_bytes and len(self._sessions) > 1):
            _, gone = self._sessions.popitem(last=False)
            self.bytes -= gone.size
            self.evicted += 1
