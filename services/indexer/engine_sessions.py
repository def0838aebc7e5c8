"""What engines say they stored for a session: blocks beyond its last prompt, that is its answer.

Engines name the session in ``BlockStored`` (vLLM from 0.30, SGLang from 0.5.20; spec: engine-events), where the request
named it (`[ingress] splice_session_id`). By engine hash the replica knows which blocks these are; what continues the
session's known prefix is taken in, everything else says nothing new. What was removed stays known: whether a block is
anywhere is asked of the replica, not of sessions.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import cast

from kvcore import BadBatchError, PrefixIndex, Stored, decode_batch
from schemas.session import SessionKey
from services.indexer.sessions import HASH_BYTES, ChainPool, SessionTable

_NAMED = re.compile(rb"\xaasession_id[^\xc0]")
"""A session id in a batch of maps, as those versions send it; most batches have none and are not decoded."""


class EngineSessions:
    """``outcomes`` counts runs of blocks that name a session: ``taken``, or why not."""

    def __init__(self, index: PrefixIndex, sessions: SessionTable) -> None:
        self._index = index
        self._sessions = sessions
        self.outcomes: Counter[str] = Counter()

    def applied(self, worker: str, rank: int, payload: bytes) -> None:
        """The replica has applied this batch."""
        if _NAMED.search(payload) is None:
            return
        try:
            batch = decode_batch(payload)
        except BadBatchError:
            return  # it was refused, and counted, by the replica
        for event in batch.events:
            session_id = getattr(event, "session_id", None)  # either twin has event classes of its own
            if session_id:
                self.outcomes[self._stored(worker, rank, session_id, cast(Stored, event))] += 1

    def _stored(self, worker: str, rank: int, session_id: str, event: Stored) -> str:
        session = self._sessions.named(session_id)
        known = self._sessions.get(session) if session is not None else None
        if session is None or known is None:
            return "unknown_session"
        prefix, pool = known
        if pool.unit != "tokens" or not prefix.depth or event.parent is None:
            return "no_prefix"
        owns = self._index.own_hashes(worker, rank, (event.parent, *event.hashes))
        parent, run = owns[:HASH_BYTES], owns[HASH_BYTES:]
        if any(not owns[at : at + HASH_BYTES].strip(b"\0") for at in range(0, len(owns), HASH_BYTES)):
            return "unknown_blocks"
        return "taken" if self._extend(session, pool, parent, run) else "nothing_new"

    def _extend(self, session: SessionKey, pool: ChainPool, parent: bytes, run: bytes) -> bool:
        """``run`` continues the session's prefix at its block ``parent``, or is somewhere in it already."""
        chain = self._sessions.index.chain(session)
        at = chain.rfind(parent)
        while at > 0 and at % HASH_BYTES:
            at = chain.rfind(parent, 0, at + HASH_BYTES - 1)
        if at < 0:
            return False
        longer = chain[: at + HASH_BYTES] + run
        return longer.startswith(chain) and self._sessions.index.extend(session, pool, longer)
