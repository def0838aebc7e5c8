"""The session table: its transitions, side requests, anonymous sessions, bounds."""

from __future__ import annotations

import msgspec

from schemas.request import Usage
from schemas.session import RequestKind, SessionFact
from services.admission.sessions import TRANSITIONS, SessionEvent, SessionState, SessionTable
from tests.unit.admission.build import START, ask, driven, end, facts, identity

NONE = Usage()


def test_every_transition_is_in_the_table_and_nothing_leaves_closed() -> None:
    """The life of a session, in full: a change of the table is a change of this test."""
    drawn = {(state.value, event.value, after.value) for (state, event), after in TRANSITIONS.items()}
    assert drawn == {
        ("opened", "turn_began", "reasoning"),
        ("opened", "expired", "closed"),
        ("reasoning", "turn_began", "reasoning"),
        ("reasoning", "turn_ended", "reasoning"),
        ("reasoning", "last_turn_ended", "acting"),
        ("reasoning", "final_turn_ended", "closed"),
        ("acting", "turn_began", "reasoning"),
        ("acting", "expired", "closed"),
        ("acting", "paused", "paused"),
        ("paused", "resumed", "acting"),
        ("paused", "expired", "closed"),
    }
    assert all((SessionState.CLOSED, event) not in TRANSITIONS for event in SessionEvent)


def test_a_session_opens_acts_and_closes_with_its_numbers() -> None:
    """Opened at its first turn, acting after each, closed after the final one; facts carry tokens and turns."""
    table = SessionTable(10)
    who = identity("s")
    assert [each.state for each in table.begin_turn(who, "m", "turn", 1.0)] == ["opened"]
    (acting,) = table.end_turn(
        who.key, "turn", Usage(input_tokens=100, output_tokens=20, cached_tokens=64), 0, "completed", 2.0
    )
    assert (acting.state, acting.reason) == ("acting", "completed")
    assert acting.numbers == {"input_tokens": 100.0, "output_tokens": 20.0, "cached_tokens": 64.0, "turns": 1.0}
    assert acting.session.context_tokens == 120
    assert table.begin_turn(who, "m", "final", 3.0) == []
    (closed,) = table.end_turn(who.key, "final", NONE, 150, "completed", 4.0)
    assert (closed.state, closed.reason, closed.session.turns) == ("closed", "final", 2)
    assert table.get(who.key) is None


def test_a_session_that_comes_again_after_its_last_turn_is_open_again() -> None:
    """Only a turn that its ingress received later takes the word back: one that was merely placed later does not."""
    for received_ms, state in ((2_500, "acting"), (1_500, "closed")):
        table = SessionTable(10)
        who = identity("s")
        table.begin_turn(who, "m", "final", 2.0, received_ms=2_000)
        table.begin_turn(who, "m", "turn", 3.0, received_ms=received_ms)
        assert table.end_turn(who.key, "final", NONE, 0, "completed", 4.0) == []
        assert [each.state for each in table.end_turn(who.key, "turn", NONE, 0, "completed", 5.0)] == [state]


def test_a_last_turn_that_fails_leaves_its_session_open() -> None:
    """Its client sends it again, and that one closes the session: also when the first fails while the second runs."""
    core = driven()
    core.workers("a")
    who = identity("s", final=True)
    core.ask(ask("r0", who))
    (acting,) = facts(core.end(end("r0", who, outcome="upstream_error")), SessionFact)
    assert (acting.state, acting.reason) == ("acting", "upstream_error")
    core.ask(ask("r1", who))
    core.ask(msgspec.structs.replace(ask("r2", who), received_ms=int((START + 1) * 1000)))
    assert facts(core.end(end("r1", who, outcome="client_disconnect")), SessionFact) == []
    (closed,) = facts(core.end(end("r2", who)), SessionFact)
    assert (closed.state, closed.reason) == ("closed", "final")


def test_concurrent_turns_act_only_when_the_last_has_ended() -> None:
    """C1: two turns of one session; the first to end does not flip it to acting."""
    table = SessionTable(10)
    who = identity("s")
    table.begin_turn(who, "m", "turn", 1.0)
    table.begin_turn(who, "m", "turn", 1.5)
    assert table.end_turn(who.key, "turn", NONE, 0, "completed", 2.0) == []
    assert [each.state for each in table.end_turn(who.key, "turn", NONE, 0, "completed", 3.0)] == ["acting"]


def test_a_turn_without_usage_keeps_what_was_known_of_the_context() -> None:
    """A disconnect reports nothing: the context stays that of the prompt, or of the turn before."""
    table = SessionTable(10)
    who = identity("s")
    table.begin_turn(who, "m", "turn", 1.0)
    table.end_turn(who.key, "turn", Usage(input_tokens=100, output_tokens=5), 0, "completed", 2.0)
    table.begin_turn(who, "m", "turn", 3.0)
    (acting,) = table.end_turn(who.key, "turn", NONE, 0, "client_disconnect", 4.0)
    assert (acting.reason, acting.session.context_tokens) == ("client_disconnect", 105)


def test_side_requests_never_move_a_session() -> None:
    """Title, compaction and count_tokens share the id, not the prefix: no state, turn, context or worker of theirs."""
    table = SessionTable(10)
    who = identity("s")
    table.begin_turn(who, "m", "turn", 1.0)
    table.placed(who.key, "turn", "a", 0)
    table.end_turn(who.key, "turn", Usage(input_tokens=10), 0, "completed", 2.0)
    sides: tuple[RequestKind, ...] = ("title", "compaction", "count_tokens")
    for kind in sides:
        assert table.begin_turn(who, "m", kind, 3.0) == []
        table.placed(who.key, kind, "b", 0)
        assert table.end_turn(who.key, kind, Usage(input_tokens=9999), 0, "completed", 4.0) == []
    session = table.get(who.key)
    assert session is not None
    assert (session.state, session.worker, session.turns, session.context_tokens) == (SessionState.ACTING, "a", 1, 10)
    other = identity("only-a-title")
    table.begin_turn(other, "m", "title", 5.0)
    assert table.get(other.key) is None


def test_a_request_without_identity_is_a_session_that_closes_with_it() -> None:
    """D3: anonymous requests never share a session, and leave nothing behind."""
    table = SessionTable(10)
    who = identity("r1", family="request")
    table.begin_turn(who, "m", "turn", 1.0)
    (closed,) = table.end_turn(who.key, "turn", NONE, 0, "completed", 2.0)
    assert (closed.state, closed.reason, len(table)) == ("closed", "single_request", 0)


def test_idle_sessions_close_and_running_ones_do_not() -> None:
    """The idle time counts from the last turn's begin or end, and never while a turn runs."""
    table = SessionTable(10)
    for name in ("idle", "running", "fresh"):
        table.begin_turn(identity(name), "m", "turn", 1.0)
    table.end_turn(identity("idle").key, "turn", NONE, 0, "completed", 2.0)
    table.end_turn(identity("fresh").key, "turn", NONE, 0, "completed", 50.0)
    assert [(each.session.identity.session_id, each.reason) for each in table.expire(40.0)] == [("idle", "idle")]
    assert len(table) == 2


def test_a_full_table_closes_the_longest_idle_session() -> None:
    """The bound holds, and what had to go is told."""
    table = SessionTable(2)
    table.begin_turn(identity("a"), "m", "turn", 1.0)
    table.begin_turn(identity("b"), "m", "turn", 2.0)
    table.end_turn(identity("b").key, "turn", NONE, 0, "completed", 3.0)
    changes = table.begin_turn(identity("c"), "m", "turn", 4.0)
    assert [(each.session.identity.session_id, each.state, each.reason) for each in changes] == [
        ("b", "closed", "table_full"),
        ("c", "opened", None),
    ]


def test_a_lost_worker_is_forgotten_by_every_session() -> None:
    """B1: no stale binding remains."""
    table = SessionTable(10)
    for name, worker in (("s1", "a"), ("s2", "b"), ("s3", "a")):
        table.begin_turn(identity(name), "m", "turn", 1.0)
        table.placed(identity(name).key, "turn", worker, 0)
    assert table.forget_worker("a") == 2
    workers = [session.worker for name in ("s1", "s2", "s3") if (session := table.get(identity(name).key))]
    assert workers == [None, "b", None]


def test_ids_of_any_length_are_bounded_together() -> None:
    """Clients choose their ids, up to a whole header: the longest idle sessions make room, and the sum is exact."""
    table = SessionTable(1000, max_id_characters=20_000)
    for number in range(50):
        who = identity(f"{number}".ljust(1000, "x"))
        closed = table.begin_turn(who, "m", "turn", float(number))[:-1]
        assert all(change.reason == "table_full" for change in closed)
        table.end_turn(who.key, "turn", NONE, 0, "completed", float(number))
        assert table.id_characters <= 20_000
    assert 5 <= len(table) <= 10
    table.begin_turn(who, "m", "final", 60.0)
    table.end_turn(who.key, "final", NONE, 0, "completed", 61.0)
    table.expire(100.0)
    assert (len(table), table.id_characters) == (0, 0)
