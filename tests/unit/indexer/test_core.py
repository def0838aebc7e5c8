"""The indexer's core: the questions it answers beside its replica, and what it says of its sources."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bus.errors import SettingsError
from kvcore import pack_chain, unpack_chain
from kvcore.hashing import chain_of
from replica.config import ReplicaSettings
from replica.effects import SourceChanged
from schemas.base import from_json, from_msgpack, to_json, to_msgpack
from schemas.index import (
    ChainUnit,
    IndexSource,
    MatchReply,
    MatchRequest,
    RecogniseReply,
    RecogniseRequest,
    SessionQuery,
    SessionResidency,
)
from schemas.request import RequestAccepted, RequestEnd
from schemas.session import SessionIdentity, SessionKey
from services.indexer.config import IndexerSettings
from services.indexer.core import IndexerCore
from services.indexer.events import EndHeard, RequestHeard
from tests.unit.replica.bridge import BLOCK, bridge, chain, placed, stored

SESSION = SessionKey(family="dynamo", root="s")


def core() -> IndexerCore:
    return IndexerCore(IndexerSettings(instance="indexer-1"), 7)


def test_bad_questions_get_an_answer() -> None:
    """Junk and broken chains are answered with a reason, and counted."""
    at = core()
    for payload in (b"\xc1", b"", to_msgpack(MatchRequest(model="m", block_size=4, chain=b"123"))):
        assert from_msgpack(at.match(payload, 1.0), MatchReply).error is not None
    assert at.bad_questions == 3


@pytest.mark.parametrize("unit", ["tokens", "text"])
def test_placed_turns_tell_a_session_s_frontier(unit: ChainUnit) -> None:
    """User case: where does this session's prefix end, and who holds it? Over text blocks too, and says so."""
    at = core()
    worker = bridge()
    worker.core = at.replica
    worker.beat()
    worker.publish(stored(0))
    turn = placed(0, chain(0), unit=unit, session=SESSION)
    worker.give(turn)
    assert at.handle(turn, 1.0) == []
    told = from_json(at.session(to_json(SessionQuery(session=SESSION)), 101.0), SessionResidency)
    assert (told.depth, told.unit, [match.worker for match in told.resident]) == (1, unit, ["w"])


def blocks(*locals_: int) -> bytes:
    return pack_chain(chain_of(list(locals_), None))


def asked(at: IndexerCore, **question: Any) -> SessionResidency:
    return from_json(at.session(to_json(SessionQuery(**question)), 101.0), SessionResidency)


def test_a_session_s_prefix_is_told_whole() -> None:
    """Frontier, unique tail and shared beginning, who shares it, children, the next prompt's likely length; and by a
    block, whose it is. A block of nobody, and a session nobody knows, are said to be so."""
    at = core()
    child = SessionKey(family="dynamo", root="child")
    at.handle(placed(0, blocks(0, 1), session=SESSION), 1.0)
    at.handle(placed(0, blocks(0, 1, 2, 3), session=SESSION), 2.0)
    at.handle(placed(0, blocks(0, 1, 5), session=child, parent=SESSION), 3.0)
    told = asked(at, session=SESSION)
    assert (told.depth, told.unique_blocks, told.shared_blocks, told.expected_blocks) == (4, 2, 2, 6)
    assert (told.sharing, told.children, told.block_size, told.truncated) == ((child,), (child,), BLOCK, False)
    assert asked(at, session=child).parent == SESSION
    stranger = SessionKey(tenant="other", family="dynamo", root="stranger")
    at.handle(placed(0, blocks(0, 1, 5), session=stranger, parent=SESSION), 4.0)
    assert (asked(at, session=stranger).sharing, asked(at, session=stranger).parent) == ((), None)
    assert asked(at, session=SESSION).children == (child,)
    at.sessions.index.forget(stranger)
    shared, own = (f"{hash_:016x}" for hash_ in unpack_chain(blocks(0, 1, 2))[1:])
    assert asked(at, block=shared).sessions == (SESSION, child)
    assert asked(at, block=own).sessions == (SESSION,)
    assert asked(at, block="77").sessions == ()
    assert asked(at, session=SessionKey(root="?")).error == "unknown_session"


def test_prompts_are_recognised_by_what_was_placed() -> None:
    """From the facts alone: placed, ended, and asked again as a next turn. Junk and half hashes are answered."""
    at = core()
    session = SessionKey(family="prefix", root="r1")
    begun = (2).to_bytes(8, "little")
    at.handle(placed(0, chain(0), session=session, message_chain=begun), 1.0)
    next_turn = begun + (5).to_bytes(8, "little") + (8).to_bytes(8, "little")

    def recognised(request_id: str) -> RecogniseReply:
        question = RecogniseRequest(model="tiny", message_chain=next_turn, request_id=request_id)
        return from_msgpack(at.recognise(to_msgpack(question), 3.0), RecogniseReply)

    assert recognised("r2").reason == "in_flight"
    identity = SessionIdentity(key=session, session_id="r1")
    end = RequestEnd(
        source="i", epoch=1, seq=1, at_ms=1, request_id="0", model="tiny", identity=identity, outcome="completed"
    )
    at.handle(EndHeard(end), 2.0)
    heard = RequestAccepted(
        source="i", epoch=1, seq=1, at_ms=1, request_id="r0", model="tiny", identity=identity, received_ms=1
    )
    at.handle(RequestHeard(heard), 2.0)
    assert recognised("r3").reason == "in_flight"
    at.handle(EndHeard(msgspec.structs.replace(end, request_id="r0")), 2.5)
    reply = recognised("r4")
    assert (reply.relation, reply.session, reply.indexer) == ("continues", session, "indexer-1")
    for payload in (b"\xc1", to_msgpack(RecogniseRequest(model="m", message_chain=b"123"))):
        assert from_msgpack(at.recognise(payload, 1.0), RecogniseReply).error is not None
    assert at.bad_questions == 2


def test_a_question_s_session_is_ignored() -> None:
    """`MatchRequest.session` of older askers changes nothing: what is placed is said by itself."""
    at = core()
    asked = MatchRequest(model="tiny", block_size=BLOCK, chain=chain(0), session=SESSION)
    assert from_msgpack(at.match(to_msgpack(asked), 1.0), MatchReply).error is None
    assert len(at.sessions) == 0


def test_changes_of_health_become_numbered_facts() -> None:
    """Each change of a source is a fact on the source's subject, numbered without a gap."""
    at = core()
    worker = bridge()
    worker.core = at.replica
    worker.beat()
    worker.publish(stored(0))
    changes = [effect for effect in worker.out if isinstance(effect, SourceChanged)]
    facts = [from_json(effect.payload, IndexSource) for change in changes for effect in at.handle(change, 2.0)]
    assert [fact.seq for fact in facts] == list(range(len(changes)))
    assert (facts[-1].source, facts[-1].epoch, facts[-1].health) == ("indexer-1", 7, "synced")


def test_every_setting_of_a_replica_is_a_key_of_the_indexer() -> None:
    """The flat keys of old stay, with the replica's types and defaults, and reach it."""
    own = {field.name: field for field in msgspec.structs.fields(IndexerSettings)}
    for field in msgspec.structs.fields(ReplicaSettings):
        assert (own[field.name].type, own[field.name].default) == (field.type, field.default)
    assert IndexerSettings(hold_limit=7, parity_floor_tokens=3).replica() == ReplicaSettings(
        hold_limit=7, parity_floor_tokens=3
    )


def test_settings_name_their_key() -> None:
    """A mistake names its key, in the replica's part too."""
    for key, values in {"max_blocks": {"max_blocks": 0}, "sessions": {"sessions": 0}}.items():
        with pytest.raises(SettingsError) as caught:
            IndexerSettings(**values)  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.key == key
