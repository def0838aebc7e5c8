"""The indexer's one door: a replica of the index, the sessions beside it, and the three questions.

What only an indexer does: it answers on the bus, it says how far it trusts each source, it knows which session has
which prefix, and whose turn a prompt is that names nobody.
"""

from __future__ import annotations

import re

import msgspec

from bus import subjects
from kvcore.session_index import SessionLimits
from replica.core import HASH_BYTES, Replica
from replica.effects import SourceChanged
from replica.errors import BadQuestionError
from replica.events import PromptPlaced
from schemas.base import UNDECODABLE, BadMessageError, from_json, to_json
from schemas.index import (
    IndexSource,
    MatchReply,
    MatchRequest,
    RecogniseReply,
    RecogniseRequest,
    SessionQuery,
    SessionResidency,
)
from schemas.session import SessionKey
from services.indexer.config import IndexerSettings
from services.indexer.effects import IndexerEffect, Publish
from services.indexer.engine_sessions import EngineSessions
from services.indexer.events import EndHeard, IndexerEvent, RequestHeard
from services.indexer.recognising import FAMILY, Recogniser
from services.indexer.sessions import Named, SessionTable

_BLOCK = re.compile(r"[0-9a-fA-F]{1,16}")

MAX_SESSIONS = 1000
"""Sessions named in one answer about a block."""

MAX_RELATED = 100
"""Sessions named as sharing, and as children, in one answer about a session."""

_request_decoder = msgspec.msgpack.Decoder(MatchRequest)
_recognise_decoder = msgspec.msgpack.Decoder(RecogniseRequest)
_reply_encoder = msgspec.msgpack.Encoder()


class IndexerCore:
    """An indexer. ``epoch``: Unix ms of its start."""

    def __init__(self, settings: IndexerSettings, epoch: int) -> None:
        self.name = settings.instance or "indexer-1"
        self.replica = Replica(settings.replica(), self.name)
        self.sessions = SessionTable(settings.sessions, settings.session_blocks, settings.session_bytes)
        self.recogniser = Recogniser(SessionLimits(settings.sessions, settings.session_blocks), since=epoch / 1000)
        self.engine_sessions = EngineSessions(self.replica.index, self.sessions)
        self.replica.applied = self.engine_sessions.applied
        self.bad_questions = 0
        self.bad_facts = 0
        self._epoch = epoch
        self._seq = 0

    def handle(self, event: IndexerEvent, now: float) -> list[IndexerEffect]:
        """What to do about ``event``, in this order. ``now``: Unix seconds."""
        match event:
            case PromptPlaced():
                self.sessions.placed(event.placed)
                self.recogniser.placed(event.placed, now)
                return []
            case RequestHeard(fact=accepted):
                if accepted.identity.key.family == FAMILY:
                    self.recogniser.accepted(accepted.identity.key, accepted.request_id, now)
                return []
            case EndHeard(fact=end):
                self.sessions.ended(end.identity.key)
                self.recogniser.ended(end, now)
                return []
            case SourceChanged():
                return [self._fact(event, now)]

    def match(self, payload: bytes, now: float) -> bytes:
        """Answer ``tg.v1.index.match``: one decode, one look into the index, one encode."""
        try:
            request = _request_decoder.decode(payload)
            reply = self.replica.match(request, now)
        except (*UNDECODABLE, BadQuestionError) as error:
            self.bad_questions += 1
            reason = getattr(error, "reason", BadMessageError.reason)
            return _reply_encoder.encode(MatchReply(indexer=self.name, error=f"{reason}: {error}"))
        return _reply_encoder.encode(reply)

    def recognise(self, payload: bytes, now: float) -> bytes:
        """Answer ``tg.v1.index.recognise``: whose turn a prompt is that names nobody."""
        try:
            request = _recognise_decoder.decode(payload)
            if len(request.message_chain) % HASH_BYTES:
                raise BadMessageError(f"a chain is whole u64 hashes, not {len(request.message_chain)} bytes")
        except (*UNDECODABLE, BadMessageError) as error:
            self.bad_questions += 1
            return _reply_encoder.encode(RecogniseReply(indexer=self.name, error=f"{BadMessageError.reason}: {error}"))
        return _reply_encoder.encode(self.recogniser.recognise(request, self.name, now))

    def session(self, payload: bytes, now: float) -> bytes:
        """Answer ``tg.v1.index.session`` (JSON): a session's prefix and where it is, or a block's sessions."""
        try:
            query = from_json(payload, SessionQuery)
            if (query.session is None) == (query.block is None):
                raise BadMessageError("a question names either a session or a block")
            if query.block is not None:
                if not _BLOCK.fullmatch(query.block):
                    raise BadMessageError("a block is the hex of a u64")
                block = int(query.block, 16)
                named = Named.of(self.sessions.index.having(block), MAX_SESSIONS)
                return to_json(SessionResidency(sessions=named.sessions, truncated=named.more))
        except (BadMessageError, ValueError) as error:
            self.bad_questions += 1
            return to_json(SessionResidency(error=f"bad_message: {error}"))
        assert query.session is not None
        return to_json(self._residency(query.session, now))

    def _residency(self, session: SessionKey, now: float) -> SessionResidency:
        known = self.sessions.get(session)
        if known is None:
            return SessionResidency(session=session, error="unknown_session")
        prefix, pool = known
        index = self.sessions.index
        asked = MatchRequest(model=pool.model, block_size=pool.block_size, chain=index.chain(session), unit=pool.unit)
        reply = self.replica.match(asked, now)
        sharing = Named.of(index.sharing(session), MAX_RELATED, session.tenant)
        children = Named.of(index.forked(session), MAX_RELATED, session.tenant)
        return SessionResidency(
            session=session,
            frontier=f"{prefix.frontier:016x}" if prefix.frontier is not None else None,
            depth=prefix.depth,
            parent=prefix.parent if prefix.parent is None or prefix.parent.tenant == session.tenant else None,
            resident=tuple(match for match in reply.matches if match.blocks.reach),
            unit=pool.unit,
            block_size=pool.block_size,
            unique_blocks=prefix.unique,
            shared_blocks=prefix.shared,
            expected_blocks=prefix.expected,
            sharing=sharing.sessions,
            children=children.sessions,
            pools=reply.pools,
            truncated=sharing.more or children.more,
        )

    def _fact(self, change: SourceChanged, now: float) -> Publish:
        fact = IndexSource(
            source=self.name,
            epoch=self._epoch,
            seq=self._seq,
            at_ms=round(now * 1000),
            worker=change.worker,
            rank=change.rank,
            health=change.health,
            reason=change.reason,
            incarnation=change.incarnation,
            seq_applied=change.applied,
            blocks=change.blocks,
        )
        self._seq += 1
        return Publish(subjects.index_source(change.worker, change.rank), to_json(fact))
