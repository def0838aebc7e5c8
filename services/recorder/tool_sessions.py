"""Which session a harness means: it says an id only, the house's key has tenant, family, root and agent.

Learned from requests (`request.accepted`), whose headers say all of it. One tenant per table: an id of another tenant's
session is not found here.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from schemas.request import RequestAccepted
from schemas.session import SessionKey


@dataclass(frozen=True, slots=True)
class KnownSession:
    """A session that has made a request. ``weak``: its id is a guess from a body."""

    key: SessionKey
    model: str
    weak: bool


class KnownSessions:
    """The last ``limit`` session ids of one tenant, least recently named first out."""

    def __init__(self, tenant: str, limit: int) -> None:
        self._tenant = tenant
        self._limit = limit
        self._sessions: OrderedDict[str, KnownSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def see(self, accepted: RequestAccepted) -> None:
        """A request names its session. Of two sessions with one id the last counts, a weak one never over another."""
        identity = accepted.identity
        if identity.key.tenant != self._tenant or identity.key.family == "request":
            return
        known = self._sessions.get(identity.session_id)
        if known is None or known.weak or not identity.weak:
            self._sessions[identity.session_id] = KnownSession(identity.key, accepted.model, identity.weak)
        self._sessions.move_to_end(identity.session_id)
        while len(self._sessions) > self._limit:
            self._sessions.popitem(last=False)

    def find(self, session_id: str) -> KnownSession | None:
        """The session of this id, or ``None``."""
        known = self._sessions.get(session_id)
        if known is not None:
            self._sessions.move_to_end(session_id)
        return known

    def key_of_unknown(self, session_id: str) -> SessionKey:
        """An id that no request has named yet: that of the canonical header, which the peer's plug-ins send."""
        return SessionKey(tenant=self._tenant, family="dynamo", root=session_id)
