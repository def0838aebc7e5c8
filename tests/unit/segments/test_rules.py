"""When a segment is left, and which segments go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segments.rules import Filling, OnDisk, Retention, Rolling, too_many


def fill(rolling: Rolling, lines: list[tuple[bytes, float]]) -> list[list[bytes]]:
    """The segments into which ``lines``, each at its time, go one after the other."""
    filling = Filling(rolling, 0)
    segments: dict[int, list[bytes]] = {}
    for line, now in lines:
        if filling.fits([line], now) == 0:
            filling.leave()
        assert filling.fits([line], now) == 1
        filling.add([line], now)
        segments.setdefault(filling.index, []).append(line)
    assert sorted(segments) == list(range(len(segments)))
    return list(segments.values())


def test_one_line_a_segment_gives_one_segment_a_line() -> None:
    """Oracle of the peer: one line a segment and two rows give segments 000000 and 000001 (spec §8.3)."""
    assert fill(Rolling(most_lines=1), [(b"a", 0.0), (b"b", 0.0)]) == [[b"a"], [b"b"]]


def test_a_segment_is_left_before_the_line_that_would_exceed_it() -> None:
    """Bytes are uncompressed, line ends included; a line larger than a segment has one for itself."""
    lines = [(b"x" * size, 0.0) for size in (99, 99, 99, 500, 50)]
    assert [len(segment) for segment in fill(Rolling(most_bytes=300), lines)] == [3, 1, 1]
    assert [len(segment) for segment in fill(Rolling(most_bytes=299), lines)] == [2, 1, 1, 1]


def test_a_segment_is_left_by_age_also_when_the_clock_goes_back() -> None:
    """The first line that comes ten seconds after the segment's first begins another; an hour back does not keep it
    open for that hour."""
    rolling = Rolling(most_age_s=10)
    assert fill(rolling, [(b"a", 100.0), (b"b", 109.0), (b"c", 110.0)]) == [[b"a", b"b"], [b"c"]]
    assert fill(rolling, [(b"a", 4000.0), (b"b", 400.0), (b"c", 411.0)]) == [[b"a", b"b"], [b"c"]]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.integers(0, 60), st.integers(0, 5))
def test_many_lines_at_once_go_where_they_go_one_by_one(sizes: list[int], most_bytes: int, most_lines: int) -> None:
    """A batch is split exactly where its lines alone would be."""
    lines = [b"x" * size for size in sizes]
    rolling = Rolling(most_bytes=most_bytes, most_lines=most_lines)
    filling = Filling(rolling, 0)
    counts: dict[int, int] = {}
    left = lines
    while left:
        count = filling.fits(left, 0.0)
        if count == 0:
            filling.leave()
            count = filling.fits(left, 0.0)
        assert count > 0
        filling.add(left[:count], 0.0)
        counts[filling.index] = counts.get(filling.index, 0) + count
        left = left[count:]
    assert list(counts.values()) == [len(segment) for segment in fill(rolling, [(line, 0.0) for line in lines])]


def test_the_oldest_go_and_the_newest_never() -> None:
    """By number, by bytes and by age; one that is larger or older than all limits stays when it is the last."""
    there = [OnDisk(index, 100, index * 10.0) for index in range(5)]

    def gone(retention: Retention) -> list[int]:
        return [each.index for each in too_many(there, retention, 50.0)]

    assert gone(Retention()) == []
    assert gone(Retention(most_segments=2)) == [0, 1, 2]
    assert gone(Retention(most_bytes=250)) == [0, 1, 2]
    assert gone(Retention(most_age_s=25)) == [0, 1, 2]
    assert gone(Retention(most_bytes=450, most_age_s=45)) == [0]
    assert gone(Retention(most_segments=1, most_bytes=1, most_age_s=1)) == [0, 1, 2, 3]
