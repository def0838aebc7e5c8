"""When rows become a batch, and that no row is lost or doubled."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.recorder.core import BatchRules, RecorderCore
from services.recorder.effects import Acknowledge, DropRow, Effect, WriteBatch
from services.recorder.errors import BadRowError
from services.recorder.events import BatchWritten, RowsReceived, StopAsked, TimePassed
from services.recorder.rows import fingerprint, one_line

RULES = BatchRules(flush_bytes=1_000, flush_rows=100, flush_interval_s=1.0)


def row(number: int, size: int = 0) -> bytes:
    return b'{"request_id":"%d","pad":"%s"}' % (number, b"x" * size)


def received(*rows: tuple[bytes, object]) -> RowsReceived:
    return RowsReceived([payload for payload, _ in rows], [token for _, token in rows])


def writes(effects: list[Effect]) -> list[WriteBatch]:
    return [effect for effect in effects if isinstance(effect, WriteBatch)]


def tokens(effects: list[Effect]) -> list[object]:
    return [token for effect in effects if isinstance(effect, Acknowledge) for token in effect.tokens]


def reasons(effects: list[Effect]) -> list[str]:
    return [effect.reason for effect in effects if isinstance(effect, DropRow)]


def test_nothing_is_acknowledged_before_its_batch_is_written() -> None:
    """A row on its way to the sink is still the stream's; only `BatchWritten` lets it go."""
    core = RecorderCore(RULES)
    assert core.handle(received((row(1), "t1")), 100.0) == []
    (write,) = writes(core.handle(StopAsked(), 100.5))
    assert (write.rows, write.received_s) == ((row(1),), (100.0,))
    assert core.waiting_rows == 1
    assert core.handle(BatchWritten(write.number), 100.6) == [Acknowledge(tokens=("t1",))]
    assert core.waiting_rows == 0


def test_a_batch_is_flushed_by_age_and_by_size() -> None:
    """The first row's age or the batch's bytes, whichever comes first; rows that came together may make several."""
    core = RecorderCore(RULES)
    assert core.next_flush_in_s(0.0) is None
    core.handle(received((row(1), 1)), 10.0)
    assert core.next_flush_in_s(10.25) == 0.75
    assert core.handle(TimePassed(), 10.9) == []
    assert len(writes(core.handle(TimePassed(), 11.0))) == 1
    assert core.next_flush_in_s(11.0) is None
    together = [(row(number, size=600), number) for number in range(2, 7)]
    assert [len(write.rows) for write in writes(core.handle(received(*together), 20.0))] == [2, 2]
    assert core.waiting_rows == 6


def test_a_clock_that_is_set_back_does_not_delay_a_flush() -> None:
    """The wall clock goes back an hour while a row waits: it is flushed an interval later, not an hour later."""
    core = RecorderCore(RULES)
    core.handle(received((row(1), 1)), 10_000.0)
    assert core.handle(TimePassed(), 6_400.0) == []
    assert len(writes(core.handle(TimePassed(), 6_401.0))) == 1


def test_a_redelivered_row_is_written_once() -> None:
    """Written: acknowledged again, not written again. Still waiting: neither, its first delivery will be."""
    core = RecorderCore(RULES)
    core.handle(received((row(1), "first")), 0.0)
    waiting = core.handle(received((row(1), "again")), 0.1)
    assert (tokens(waiting), reasons(waiting)) == ([], ["duplicate"])
    (write,) = writes(core.handle(StopAsked(), 0.2))
    assert write.rows == (row(1),)
    assert tokens(core.handle(BatchWritten(write.number), 0.3)) == ["first"]
    assert tokens(core.handle(received((row(1), "late")), 0.4)) == ["late"]
    assert writes(core.handle(StopAsked(), 0.5)) == []


def test_a_row_written_before_a_kill_is_known_after_it() -> None:
    """The fingerprints read back from the old segments stop a row whose acknowledgement was lost."""
    core = RecorderCore(RULES, written=[fingerprint(row(1))])
    assert tokens(core.handle(received((row(1), "t")), 0.0)) == ["t"]
    assert core.handle(StopAsked(), 0.0) == []


def test_only_the_newest_rows_are_known() -> None:
    """The window bounds the memory; a row that is written again moves to its end."""
    core = RecorderCore(RULES, written=[fingerprint(row(number)) for number in (1, 2, 1, 3)], window=2)
    effects = core.handle(received(*((row(number), number) for number in (1, 2, 3))), 0.0)
    assert tokens(effects) == [1, 3]
    assert [write.rows for write in writes(core.handle(StopAsked(), 0.0))] == [(row(2),)]


def test_a_bad_row_is_counted_acknowledged_and_harms_no_other() -> None:
    """Bad input is dropped with its reason; the rows around it are written."""
    core = RecorderCore(RULES)
    effects = core.handle(received((row(1), 1), (b"not json", 2), (row(3), 3)), 0.0)
    assert (tokens(effects), reasons(effects)) == ([2], ["bad_row"])
    (write,) = writes(core.handle(StopAsked(), 0.0))
    assert write.rows == (row(1), row(3))


def test_a_row_with_line_breaks_becomes_one_line() -> None:
    """A publisher's pretty-printed JSON must not split a line; a line break inside a string is escaped already."""
    assert one_line(b'{\n  "a": "x\\ny",\r\n "b": [1, 2]\n}') == b'{"a":"x\\ny","b":[1,2]}'
    assert one_line(msgspec.json.encode({"a": "x"})) == b'{"a":"x"}'


@pytest.mark.parametrize("payload", [b"", b"[1]", b'"text"', b"{", b'{"a":1}{"b":2}', b'{"a":[1,}', b"\xff\xfe"])
def test_what_is_no_json_object_is_refused(payload: bytes) -> None:
    """Bad input is named, so that it can be counted and skipped."""
    with pytest.raises(BadRowError):
        one_line(payload)


actions = st.lists(
    st.sampled_from(["row", "row", "row", "redeliver", "tick", "write", "torn_kill", "kill", "stop"]), max_size=60
)


@given(actions, st.integers(1, 200))
def test_rows_written_are_the_stream_s_rows_whatever_is_killed_when(steps: list[str], flush_bytes: int) -> None:
    """Kills between any two steps, acknowledgements lost or not: at the end each row is written exactly once."""
    rules = BatchRules(flush_bytes=flush_bytes, flush_rows=3, flush_interval_s=1.0)
    disk: list[bytes] = []
    stream: list[bytes] = []
    unacknowledged: set[int] = set()
    to_write: list[WriteBatch] = []
    now = 0.0

    def restart() -> RecorderCore:
        to_write.clear()
        return RecorderCore(rules, written=[fingerprint(line) for line in disk])

    def perform(effects: list[Effect], acknowledged: bool = True) -> None:
        to_write.extend(writes(effects))
        if acknowledged:
            unacknowledged.difference_update(token for token in tokens(effects) if isinstance(token, int))

    def write_all(acknowledged: bool = True) -> None:
        while to_write:
            effect = to_write.pop(0)
            disk.extend(effect.rows)
            perform(core.handle(BatchWritten(effect.number), now), acknowledged)

    def redeliver() -> None:
        rows = [(stream[number], number) for number in sorted(unacknowledged)]
        perform(core.handle(received(*rows), now))

    core = restart()
    for step in steps:
        now += 0.3
        if step == "row":
            number = len(stream)
            stream.append(row(number))
            unacknowledged.add(number)
            perform(core.handle(received((stream[number], number)), now))
        elif step == "redeliver":
            redeliver()
        elif step == "tick":
            perform(core.handle(TimePassed(), now))
        elif step == "write":
            write_all()
        elif step == "torn_kill":
            write_all(acknowledged=False)
            core = restart()
        elif step == "kill":
            core = restart()
        else:
            perform(core.handle(StopAsked(), now))
            write_all()
    write_all()
    core = restart()
    redeliver()
    perform(core.handle(StopAsked(), now))
    write_all()
    assert sorted(disk) == sorted(stream)
    assert unacknowledged == set()
