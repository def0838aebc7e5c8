"""Frames: as they stand in the golden files, in any size, whatever strangers call themselves."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from tests.unit.tidegate.top.facts import START, House, identity, story, told
from tidegate.top.controls import SORTS, Controls, press, select
from tidegate.top.keys import KeyReader
from tidegate.top.snapshot import Snapshot
from tidegate.top.text import amount, bounded, cut, duration, fit
from tidegate.top.view import frame, page_of

GOLDEN = Path(__file__).parents[3] / "fixtures" / "top"
WHERE, CLOCK = "nats://127.0.0.1:4222", "12:00:10"


def shown(snapshot: Snapshot, controls: Controls, width: int, height: int) -> list[str]:
    return [line.plain for line in frame(snapshot, controls, width, height, where=WHERE, clock=CLOCK)]


@pytest.mark.parametrize(
    ("name", "width", "height", "controls"),
    [
        ("80x24", 80, 24, Controls()),
        ("160x50", 160, 50, Controls(sort="context", filter="e", paused=True)),
    ],
)
def test_golden_frames(name: str, width: int, height: int, controls: Controls) -> None:
    """To look at a change: write what `shown` gives into the file, and read the difference."""
    lines = shown(story().snapshot(START + 10.0), controls, width, height)
    assert [line.rstrip() for line in lines] == (GOLDEN / f"{name}.txt").read_text().splitlines()


# Class C, marks and line breaks among them, and characters of two cells.
hostile = st.text(st.one_of(st.characters(), st.sampled_from("\x1b\x9b\r\n\x07‮​́見a")), max_size=60)


@pytest.mark.long
@given(hostile, st.integers(0, 40), st.booleans())
def test_text_stays_in_its_cells_and_drives_nothing(text: str, width: int, right: bool) -> None:
    """Exactly so many cells, none of them a character that a terminal obeys, reorders or piles up."""
    for given_text in (text, text * 50):
        found = fit(given_text, width, right=right)
        assert cell_len(found) == width
        for character in found:
            category = unicodedata.category(character)
            assert category[0] not in "CM"
            assert category not in ("Zl", "Zp")


def test_long_ids_are_cut_and_stay_different() -> None:
    first, second = bounded("x" * 4096 + "1"), bounded("x" * 4096 + "2")
    assert first != second
    assert len(first) <= 256
    assert cut("a\x1b[31mred", 20) == "a\\x1b[31mred"
    assert cut("見出し語", 6) == "見出…"


# No lone surrogates: no JSON that the bus delivers has any.
names = hostile.map(lambda text: text.encode("utf-8", "ignore").decode())


@pytest.mark.long
@given(
    st.lists(names, min_size=1, max_size=8),
    st.integers(20, 200),
    st.integers(4, 60),
    st.sampled_from(list(SORTS)),
    st.booleans(),
    st.booleans(),
)
def test_a_frame_has_its_size_whatever_is_in_it(
    names: list[str], width: int, height: int, sort: str, workers: bool, sessions: bool
) -> None:
    """So many lines, none longer than the terminal is wide."""
    house = House()
    facts = [house.worker(0.0, name) for name in names]
    facts += [house.accepted(0.1, name, identity(name, tenant=name)) for name in names]
    facts += [house.dispatched(0.2, name, name) for name in names[::2]]
    snapshot = told(*facts).snapshot(START + 10.0)
    controls = Controls(sort=sort, filter=names[0][:2], workers=workers, sessions=sessions)
    lines = frame(snapshot, controls, width, height, where=names[0], clock=CLOCK, note=names[-1])
    assert len(lines) == height
    assert all(cell_len(line.plain) <= width for line in lines)
    assert all(unicodedata.category(character)[0] != "C" for line in lines for character in line.plain)


def test_more_workers_than_fit_are_said_and_nothing_is_lost_without_a_height() -> None:
    house = House()
    facts = [house.worker(0.0, f"w{number:02}") for number in range(30)]
    facts += [house.accepted(0.1, f"r{number}", identity(f"s{number:02}")) for number in range(30)]
    snapshot = told(*facts).snapshot(START + 10.0)
    lines = shown(snapshot, Controls(), 80, 24)
    names = [line.split()[0] for line in lines if line.startswith("w")]
    assert f"… {30 - len(names)} more" in lines
    whole = [line.plain for line in frame(snapshot, Controls(), 80, None, keys=False)]
    assert sum(line.startswith("held") for line in whole) == 30
    assert sum(line.startswith("w") for line in whole) == 30


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, ""), (-5, "0.0s"), (400, "0.4s"), (9_960, "9s"), (12_000, "12s"), (300_000, "5m"), (9e9, "104d")],
)
def test_durations_fit_four_cells(value: float | None, expected: str) -> None:
    assert duration(value) == expected


@given(st.integers(0, 1 << 53))
def test_amounts_fit_five_cells(count: int) -> None:
    assert len(amount(count)) <= 5


# Keys and controls


@pytest.mark.long
@given(
    st.lists(st.sampled_from([b"q", b"\x1b[A", b"\x1bOB", b"\x1b[5~", "é".encode(), b"\r", b"\x1b[99;5u"])), st.data()
)
def test_keys_are_the_same_in_whatever_pieces_they_come(pressed: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(pressed)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5)))
    reader, found = KeyReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        found += reader.feed(stream[start:end])
    assert found == KeyReader().feed(stream)
    names = {b"q": "q", b"\x1b[A": "up", b"\x1bOB": "down", b"\x1b[5~": "page_up", b"\r": "enter"}
    assert found == [names.get(key, "é") for key in pressed if key != b"\x1b[99;5u"]


def test_a_lone_escape_waits_for_what_may_follow() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.waiting
    assert reader.flush() == ["escape"]
    assert reader.feed(b"\x1b\x1b[A") == ["escape", "up"]
    assert reader.feed(b"\x1b[" + b"1" * 40) == ["escape", "[", *"1" * 40]  # no sequence is that long


def pressed(controls: Controls, *keys: str) -> Controls:
    for key in keys:
        controls = press(controls, key, rows=40, page=10)
    return controls


def test_what_keys_do() -> None:
    """Keys go into the filter while it is typed, Escape empties it; scrolling stays within the rows."""
    typed = pressed(Controls(), "/", "q", "s", "x", "backspace", "enter")
    assert (typed.filter, typed.typing, typed.quit, typed.sort) == ("qs", False, False, "state")
    assert pressed(typed, "escape").filter == ""
    assert pressed(Controls(), "up").first == 0
    assert pressed(Controls(), "page_down", "down").first == 11
    assert pressed(Controls(), "end", "down").first == 30
    assert pressed(Controls(), *["s"] * len(SORTS)) == Controls()
    assert pressed(Controls(), "p", "w", "t", "r") == replace(
        Controls(), paused=True, workers=False, sessions=False, reverse=True
    )
    assert pressed(Controls(), "q").quit


def test_selections() -> None:
    """By pattern and tenant as the command is given, and by what is typed, in each order; the unknown come last."""
    snapshot = story().snapshot(START + 10.0)

    def ids(**options: object) -> list[str]:
        return [row.session_id for row in select(snapshot.sessions, Controls(**options))]  # type: ignore[arg-type]

    assert ids(pattern="build*", sort="session") == ["build-api", "build-api/tests"]
    assert ids(pattern="42") == ["review-42"]
    assert ids(tenant="batch") == ["nightly"]
    assert ids(filter="ENGINE-2") == ["docs"]
    assert ids(filter="bash") == ["docs"]
    for sort, (value, descending) in SORTS.items():
        rows = select(snapshot.sessions, Controls(sort=sort))
        values = [value(row) for row in rows if value(row) is not None]
        assert values == sorted(values, reverse=descending)
        assert all(value(row) is None for row in rows[len(values) :])


def test_a_page_is_what_the_frame_shows() -> None:
    """Scrolling by pages leaves no session out."""
    house = House()
    facts = [house.accepted(0.1, f"r{number}", identity(f"s{number:02}")) for number in range(40)]
    snapshot = told(*facts).snapshot(START + 10.0)
    controls, names = Controls(sort="session"), []
    for _ in range(10):
        lines = shown(snapshot, controls, 80, 24)
        names += [line.split()[2] for line in lines if line.startswith("held")]
        controls = press(controls, "page_down", rows=40, page=page_of(snapshot, controls, 24))
    assert sorted(set(names)) == [f"s{number:02}" for number in range(40)]


def test_the_snapshot_is_plain_json() -> None:
    assert msgspec.json.decode(msgspec.json.encode(story().snapshot(START)), type=Snapshot) == story().snapshot(START)
