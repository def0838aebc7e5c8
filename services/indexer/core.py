"""The indexer's one door: a replica of the index, the session table beside it, and the two questions.

What only an indexer does: it answers on the bus, it says how far it trusts each source, and it knows where each
session's prefix ended.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from bus import subjects
from replica.core import HASH_BYTES, Replica
from replica.effects import SourceChanged
from replica.errors import BadQuestionError
from replica.events import PromptPlaced
from schemas.base import UNDECODABLE, BadMessageError, from_json, to_json
from schemas.index import IndexSource, MatchReply, MatchRequest, SessionQuery, SessionResidency
from services.indexer.config import IndexerSettings
from services.indexer.effects import IndexerEffect, Publish
from services.indexer.events import IndexerEvent
from services.indexer.sessions import SessionTable

MAX_SESSIONS = 1000
"""Sessions named in one answer about a block."""

_request_decoder = msgspec.msgpack.Decoder(MatchRequest)
_reply_encoder = msgspec.msgpack.Encoder()


class IndexerCore:
    """An indexer. ``epoch``: Unix ms of its start."""

    def __init__(self, settings: IndexerSettings, epoch: int) -> None:
        self.name = settings.instance or "indexer-1"
        self.replica = Replica(settings.replica(), self.name)
        self.sessions = SessionTable(settings.sessions, settings.session_bytes)
        self.bad_questions = 0
        self._epoch = epoch
        self._seq = 0

    def handle(self, event: IndexerEvent, now: float) -> list[IndexerEffect]:
        """What to do about ``event``, in this order. ``now``: Unix seconds."""
        match event:
            case PromptPlaced():
                self.sessions.placed(event.placed)
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

    def session(self, payload: bytes, now: float) -> bytes:
        """Answer ``tg.v1.index.session`` (JSON): a session's frontier and residency, or a block's sessions."""
        try:
            query = from_json(payload, SessionQuery)
            if (query.session is None) == (query.block is None):
                raise BadMessageError("a question names either a session or a block")
            if query.block is not None:
                block = int(query.block, 16)
                if not 0 <= block < 1 << 8 * HASH_BYTES:
                    raise BadMessageError("a block is the hex of a u64")
                return to_json(SessionResidency(sessions=tuple(islice(self.sessions.holding(block), MAX_SESSIONS))))
        except (BadMessageError, ValueError) as error:
            self.bad_questions += 1
            return to_json(SessionResidency(error=f"bad_message: {error}"))
        assert query.session is not None
        known = self.sessions.get(query.session)
        if known is None:
            return to_json(SessionResidency(session=query.session, error="unknown_session"))
        asked = MatchRequest(model=known.model, block_size=known.block_size, chain=known.chain, unit=known.unit)
        reply = self.replica.match(asked, now)
        return to_json(
            SessionResidency(
                session=known.session,
                frontier=known.frontier,
                depth=known.depth,
                parent=known.parent,
                resident=tuple(match for match in reply.matches if match.blocks.reach),
                unit=known.unit,
            )
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
