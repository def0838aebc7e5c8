"""The ledger, rates, the agenda and times away: what is bounded stays so."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.hints.agenda import AT_ONCE, Agenda
from services.hints.budget import Charge, Ledger, RateLimit
from services.hints.return_times import ENOUGH, MAX_TOOLS, WINDOW, ReturnTimes
from services.hints.sessions import MAX_CLOSED_CHARACTERS, SessionTable
from services.hints.workers import MAX_POOLS, Workers
from tests.unit.hints.support import START, key, pool, worker

OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["charge", "free", "confirmed", "expire", "forget"]),
        st.sampled_from(["s", "t"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 9),
        st.sampled_from(["", "x"]),
    ),
    max_size=40,
)


@pytest.mark.long
@given(OPERATIONS)
def test_a_ledger_is_the_sum_of_the_heaviest_of_each_session(operations: list[tuple[str, str, str, int, str]]) -> None:
    """Against a list of charges."""
    ledger: Ledger[str] = Ledger()
    live: list[tuple[str, str, Charge]] = []
    now = 0.0
    for number, (what, name, seat, size, owner) in enumerate(operations):
        if what == "charge":
            charge = Charge(str(number), size, now + size, owner)
            ledger.charge(key(name), seat, charge)
            live.append((name, seat, charge))
        elif what == "free" and live:
            _, _, charge = live.pop(size % len(live))
            ledger.free(charge.action_id)
        elif what == "confirmed" and live:
            name, seat, charge = live[size % len(live)]
            ledger.confirmed(charge.action_id)
            earlier = live[: size % len(live)]
            live = [each for each in live if each not in earlier or each[:2] != (name, seat)]
        elif what == "expire":
            now += size / 2
            ledger.expire(now)
            live = [each for each in live if each[2].until > now]
        elif what == "forget":
            ledger.forget({seat})
            live = [each for each in live if each[1] != seat]
        heaviest: dict[tuple[str, str], int] = {}
        for name, seat, charge in live:
            heaviest[name, seat] = max(heaviest.get((name, seat), 0), charge.weight)
        for seat in ("a", "b"):
            assert ledger.of(seat) == sum(weight for (_, at), weight in heaviest.items() if at == seat)
        assert len(ledger) == len(heaviest)
        assert set(ledger.seats()) == {seat for _, seat in heaviest}


def test_a_rate_is_a_burst_and_then_so_many_a_second() -> None:
    """A clock that goes back gives nothing, and goes on from there."""
    rate = RateLimit(2.0, 3)
    assert [rate.take(START) for _ in range(4)] == [True, True, True, False]
    assert [rate.take(START + 0.5) for _ in range(2)] == [True, False]
    assert not rate.take(START)
    assert [rate.take(START + 100.0) for _ in range(4)] == [True, True, True, False]
    assert [rate.take(START - 3600.0 + second) for second in (0.0, 0.5, 0.6)] == [False, True, False]


def test_an_agenda_holds_no_more_than_its_limit_and_gives_so_many_at_once() -> None:
    agenda = Agenda(AT_ONCE + 10)
    for number in range(AT_ONCE + 12):
        agenda.add(START - number, "renew", key("s"), number)
    assert (len(agenda), agenda.dropped) == (AT_ONCE + 10, 2)
    assert agenda.due(START - AT_ONCE - 50) == []
    first = agenda.due(START)
    assert len(first) == AT_ONCE
    assert [entry.at for entry in first] == sorted(entry.at for entry in first)
    assert len(agenda.due(START)) == 10


def test_times_away_are_of_the_last_ones_and_of_the_last_tools() -> None:
    """Too few are no answer; those that were away for as long already are the ones that count."""
    returns = ReturnTimes()
    for _ in range(ENOUGH - 1):
        returns.add("t", 1.0)
    assert returns.remaining("t", 0.0, 0.5) is None
    returns.add("t", 1.0)
    assert returns.remaining("t", 0.0, 0.5) == 1.0
    assert returns.remaining("unknown", 0.0, 0.5) == 1.0, "all tools together"
    for _ in range(WINDOW):
        returns.add("t", 9.0)
    assert (returns.remaining("t", 0.0, 0.5), returns.remaining("t", 5.0, 0.5)) == (9.0, 4.0)
    assert returns.remaining("t", 9.0, 0.5) is None
    for number in range(MAX_TOOLS + 5):
        returns.add(f"tool-{number}", 1.0)
    assert len(returns) == MAX_TOOLS


def test_tables_forget_what_they_heard_longest_ago() -> None:
    workers = Workers(3, 60.0)
    for name in ("a", "b", "c", "a", "d"):
        workers.seen(worker(name).state)
    assert [workers.get(name) is not None for name in "abcd"] == [True, False, True, True]
    for number in range(MAX_POOLS + 1):
        workers.pool_seen(pool(f"p{number}").state)
    assert not workers.pool_is_usable("p0")
    assert workers.pool_is_usable(f"p{MAX_POOLS}")
    sessions = SessionTable(3)
    long = "x" * (MAX_CLOSED_CHARACTERS + 1)
    for name in ("s", long):
        sessions.touch(key(name), name, None)
        sessions.close(key(name))
    assert (sessions.was_closed(key("s")), sessions.was_closed(key(long))) == (True, False)


def test_long_ids_are_fewer_sessions() -> None:
    """A client may make an id as long as its headers: the oldest goes before they take the memory; one may be as long
    as it likes."""
    sessions = SessionTable(100, max_id_characters=1000)
    oldest = sessions.touch(key("a"), "a", None)
    sessions.touch(key("b"), "b", key("p"))
    sessions.touch(key("c" * 300), "c" * 300, None)
    assert sessions.overflow() is None
    sessions.touch(key("b"), "b" * 500, key("p"))
    assert sessions.overflow() is oldest
    sessions.close(key("a"))
    sessions.close(key("c" * 300))
    assert sessions.overflow() is None
    sessions.touch(key("b"), "b" * 5000, key("p"))
    assert sessions.overflow() is None
