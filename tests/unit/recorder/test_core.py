"""When a batch is flushed, when a segment is left, and that no row is lost or doubled."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.recorder import segment
from services.recorder.core import RecorderCore, RollingRules
from services.recorder.effects import Acknowledge, DropRow, Effect, WriteMember
from services.recorder.events import MemberWritten, RowReceived, StopAsked, TimePassed
from services.recorder.recent import fingerprint

RULES = RollingRules(flush_bytes=1_000, flush_interval_s=1.0, roll_bytes=10_000, roll_lines=0)


def row(number: int, size: int = 0) -> bytes:
    return b'{"request_id":"%d","pad":"%s"}' % (number, b"x" * size)


def writes(effects: list[Effect]) -> list[WriteMember]:
    return [effect for effect in effects if isinstance(effect, WriteMember)]


def tokens(effects: list[Effect]) -> list[object]:
    return [token for effect in effects if isinstance(effect, Acknowledge) for token in effect.tokens]


def test_nothing_is_acknowledged_before_its_member_is_written() -> None:
    """A row on its way to the disk is still the stream's; only `MemberWritten` lets it go."""
    core = RecorderCore(RULES, first_segment=0, opened_s=100.0)
    assert core.handle(RowReceived(row(1), token="t1"), 100.0) == []
    (write,) = core.handle(StopAsked(), 100.5)
    assert isinstance(write, WriteMember)
    assert core.waiting_rows == 1
    assert core.handle(MemberWritten(write.number), 100.6) == [Acknowledge(tokens=("t1",))]
    assert core.waiting_rows == 0


def test_a_batch_is_flushed_by_age_and_by_size() -> None:
    """The first row's age or the batch's bytes, whichever comes first."""
    core = RecorderCore(RULES, first_segment=0, opened_s=0.0)
    assert core.next_flush_in_s(0.0) is None
    core.handle(RowReceived(row(1), token=1), 10.0)
    assert core.next_flush_in_s(10.25) == 0.75
    assert core.handle(TimePassed(), 10.9) == []
    assert len(writes(core.handle(TimePassed(), 11.0))) == 1
    assert core.next_flush_in_s(11.0) is None
    assert len(writes(core.handle(RowReceived(row(2, size=1_000), token=2), 20.0))) == 1


def test_a_clock_that_is_set_back_does_not_delay_a_flush() -> None:
    """The wall clock goes back an hour while a row waits: it is flushed an interval later, not an hour later."""
    core = RecorderCore(RULES, first_segment=0, opened_s=0.0)
    core.handle(RowReceived(row(1), token=1), 10_000.0)
    assert core.handle(TimePassed(), 6_400.0) == []
    assert len(writes(core.handle(TimePassed(), 6_401.0))) == 1


def test_timestamp_counts_from_the_opening() -> None:
    """The envelope's timestamp is milliseconds since the sink opened (spec: record envelope on disk)."""
    core = RecorderCore(RULES, first_segment=0, opened_s=100.0)
    core.handle(RowReceived(row(1), token=1), 101.5)
    (write,) = writes(core.handle(StopAsked(), 101.5))
    assert write.lines.startswith(b'{"timestamp":1500,"event":{')


def test_one_line_a_segment_gives_one_segment_a_row() -> None:
    """Oracle of the peer: roll_lines 1 and two rows give segments 000000 and 000001 (spec §8.3)."""
    rules = RollingRules(flush_bytes=10**6, flush_interval_s=1.0, roll_bytes=10**6, roll_lines=1)
    core = RecorderCore(rules, first_segment=0, opened_s=0.0)
    effects = core.handle(RowReceived(row(1), token=1), 0.0) + core.handle(RowReceived(row(2), token=2), 0.0)
    effects += core.handle(StopAsked(), 0.0)
    assert [write.segment for write in writes(effects)] == [0, 1]


def test_a_segment_is_left_before_the_line_that_would_exceed_it() -> None:
    """Bytes are uncompressed bytes; a line larger than a segment has one for itself."""
    rules = RollingRules(flush_bytes=10**6, flush_interval_s=1.0, roll_bytes=300, roll_lines=0)
    core = RecorderCore(rules, first_segment=5, opened_s=0.0)
    effects: list[Effect] = []
    for number, size in enumerate((50, 50, 50, 500, 50)):
        effects += core.handle(RowReceived(row(number, size), token=number), 0.0)
    effects += core.handle(StopAsked(), 0.0)
    segments = [(write.segment, len(write.rows)) for write in writes(effects)]
    assert segments == [(5, 2), (6, 1), (7, 1), (8, 1)]


def test_a_redelivered_row_is_written_once() -> None:
    """On disk: acknowledged again, not written again. Still waiting: neither, its first delivery will be."""
    core = RecorderCore(RULES, first_segment=0, opened_s=0.0)
    core.handle(RowReceived(row(1), token="first"), 0.0)
    waiting = core.handle(RowReceived(row(1), token="again"), 0.1)
    assert tokens(waiting) == []
    assert [effect.reason for effect in waiting if isinstance(effect, DropRow)] == ["duplicate"]
    (write,) = writes(core.handle(StopAsked(), 0.2))
    assert write.rows == (row(1),)
    assert tokens(core.handle(MemberWritten(write.number), 0.3)) == ["first"]
    assert tokens(core.handle(RowReceived(row(1), token="late"), 0.4)) == ["late"]
    assert writes(core.handle(StopAsked(), 0.5)) == []


def test_a_row_written_before_a_kill_is_known_after_it() -> None:
    """The fingerprints read back from the old segments stop a row whose acknowledgement was lost."""
    core = RecorderCore(RULES, first_segment=3, opened_s=0.0, written=[fingerprint(row(1))])
    assert tokens(core.handle(RowReceived(row(1), token="t"), 0.0)) == ["t"]
    assert core.handle(StopAsked(), 0.0) == []


def test_a_bad_row_is_counted_acknowledged_and_harms_no_other() -> None:
    """Bad input is dropped with its reason; the rows around it are written."""
    core = RecorderCore(RULES, first_segment=0, opened_s=0.0)
    core.handle(RowReceived(row(1), token=1), 0.0)
    effects = core.handle(RowReceived(b"not json", token=2), 0.0)
    core.handle(RowReceived(row(3), token=3), 0.0)
    assert tokens(effects) == [2]
    assert [effect.reason for effect in effects if isinstance(effect, DropRow)] == ["bad_row"]
    (write,) = writes(core.handle(StopAsked(), 0.0))
    assert write.rows == (row(1), row(3))


actions = st.lists(
    st.sampled_from(["row", "row", "row", "redeliver", "tick", "write", "torn_kill", "kill", "stop"]), max_size=60
)


@settings(max_examples=60)
@given(actions, st.integers(1, 4), st.integers(1, 200))
def test_rows_on_disk_are_the_stream_s_rows_whatever_is_killed_when(
    steps: list[str], roll_lines: int, flush_bytes: int
) -> None:
    """Kills between any two steps, acknowledgements lost or not: at the end each row is on disk exactly once."""
    rules = RollingRules(flush_bytes=flush_bytes, flush_interval_s=1.0, roll_bytes=10**6, roll_lines=roll_lines)
    disk: dict[int, list[bytes]] = {}
    stream: list[bytes] = []
    unacknowledged: set[int] = set()
    to_write: list[WriteMember] = []
    now = 0.0

    def restart() -> RecorderCore:
        to_write.clear()
        lines = [line for index in sorted(disk) for line in disk[index]]
        return RecorderCore(
            rules, first_segment=max(disk, default=-1) + 1, opened_s=now, written=[fingerprint(line) for line in lines]
        )

    def perform(effects: list[Effect], acknowledged: bool = True) -> None:
        to_write.extend(writes(effects))
        if acknowledged:
            unacknowledged.difference_update(token for token in tokens(effects) if isinstance(token, int))

    def write_all(acknowledged: bool = True) -> None:
        while to_write:
            effect = to_write.pop(0)
            disk.setdefault(effect.segment, []).extend(effect.rows)
            perform(core.handle(MemberWritten(effect.number), now), acknowledged)

    core = restart()
    for step in steps:
        now += 0.3
        if step == "row":
            number = len(stream)
            stream.append(row(number))
            unacknowledged.add(number)
            perform(core.handle(RowReceived(stream[number], token=number), now))
        elif step == "redeliver":
            for number in sorted(unacknowledged):
                perform(core.handle(RowReceived(stream[number], token=number), now))
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
    for number in sorted(unacknowledged):
        perform(core.handle(RowReceived(stream[number], token=number), now))
    perform(core.handle(StopAsked(), now))
    write_all()
    written = [line for index in sorted(disk) for line in disk[index]]
    assert sorted(written) == sorted(stream)
    assert unacknowledged == set()
    assert all(len(lines) <= roll_lines for lines in disk.values())
    assert all(segment.unwrap(segment.wrap(line, 0)) == line for line in written)
