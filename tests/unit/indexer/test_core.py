"""The indexer's core: the questions it answers beside its replica, and what it says of its sources."""

from __future__ import annotations

import msgspec
import pytest

from bus.errors import SettingsError
from replica.config import ReplicaSettings
from replica.effects import SourceChanged
from schemas.base import from_json, from_msgpack, to_json, to_msgpack
from schemas.index import ChainUnit, IndexSource, MatchReply, MatchRequest, SessionQuery, SessionResidency
from schemas.session import SessionKey
from services.indexer.config import IndexerSettings
from services.indexer.core import IndexerCore
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
