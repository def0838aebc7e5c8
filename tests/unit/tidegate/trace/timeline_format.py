"""The Chrome trace event format as strictly as its document says it, and what trace processors want beyond it.

Source: "Trace Event Format" (Google, the document that Perfetto's importer of JSON follows): each phase's fields, flows
in pairs, slices of one thread nested in one another, times in µs.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from tests.unit.tidegate.trace.making import Row

Time = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Json = dict[str, Any]


class _Event(msgspec.Struct, tag_field="ph", forbid_unknown_fields=True, kw_only=True):
    name: Text
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    tid: Id


class Metadata(_Event, tag="M"):
    name: Literal["process_name", "process_sort_index", "thread_name", "thread_sort_index"]
    args: Json


class Complete(_Event, tag="X"):
    cat: Text
    ts: Time
    dur: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    args: Json = {}

    @property
    def end(self) -> int:
        return self.ts + self.dur


class Instant(_Event, tag="i"):
    cat: Text
    ts: Time
    s: Literal["t"]
    args: Json = {}


class Counters(_Event, tag="C"):
    ts: Time
    args: Annotated[dict[Text, float], msgspec.Meta(min_length=1)]


class FlowStart(_Event, tag="s"):
    cat: Text
    ts: Time
    id: Id


class FlowEnd(_Event, tag="f"):
    cat: Text
    ts: Time
    id: Id
    bp: Literal["e"]


Event = Metadata | Complete | Instant | Counters | FlowStart | FlowEnd


class Timeline(msgspec.Struct, forbid_unknown_fields=True):
    """The whole file."""

    displayTimeUnit: Literal["ms", "ns"]  # noqa: N815 - the format's own name
    traceEvents: list[Event]  # noqa: N815

    def of(self, category: str) -> list[Complete]:
        """Slices of ``tidegate.<category>``."""
        return [each for each in self.traceEvents if isinstance(each, Complete) and each.cat == f"tidegate.{category}"]

    def threads(self) -> dict[int, str]:
        return {
            each.tid: each.args["name"]
            for each in self.traceEvents
            if isinstance(each, Metadata) and each.name == "thread_name"
        }


def checked(events: list[Row]) -> Timeline:
    """Raises where anything is not as the format wants it."""
    return _checked(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode())


def checked_file(path: Path) -> Timeline:
    return _checked(path.read_bytes())


def _checked(data: bytes) -> Timeline:
    assert b"null" not in data.replace(b'"null', b"")
    timeline = msgspec.json.decode(data, type=Timeline)
    _check_names(timeline)
    _check_nesting(timeline)
    _check_flows(timeline)
    return timeline


def _check_names(timeline: Timeline) -> None:
    """Each process and thread is named and placed once, before or after its events; numbers of threads are unique."""
    metadata = [each for each in timeline.traceEvents if isinstance(each, Metadata)]
    counts = Counter((each.name, each.pid, each.tid) for each in metadata)
    assert set(counts.values()) <= {1}
    for each in metadata:
        key = "name" if each.name.endswith("_name") else "sort_index"
        assert list(each.args) == [key]
        assert isinstance(each.args[key], str if key == "name" else int)
        assert each.args[key] != ""
    processes = {each.pid for each in metadata if each.name == "process_name"}
    threads = {(each.pid, each.tid) for each in metadata if each.name == "thread_name"}
    assert len({tid for _, tid in threads}) == len(threads)
    assert not {tid for _, tid in threads} & processes, "a thread with its process's number is its main thread"
    for kind in ("process", "thread"):
        places = [each.args["sort_index"] for each in metadata if each.name == f"{kind}_sort_index"]
        assert len(places) == len(set(places)) == len(processes if kind == "process" else threads)
    for event in timeline.traceEvents:
        assert event.pid in processes
        if not isinstance(event, Metadata | Counters):
            assert (event.pid, event.tid) in threads


def _check_nesting(timeline: Timeline) -> None:
    """Slices of a thread lie within or behind one another; whoever encloses another comes before it in the file; a
    moment lies within a slice."""
    tracks: dict[int, list[Complete]] = defaultdict(list)
    for each in timeline.traceEvents:
        if isinstance(each, Complete):
            tracks[each.tid].append(each)
    for track in tracks.values():
        track.sort(key=lambda each: each.ts)  # stable, as the processor's: the file's order among equals
        open_slices: list[Complete] = []
        for each in track:
            while open_slices and open_slices[-1].end <= each.ts:
                open_slices.pop()
            assert not open_slices or each.end <= open_slices[-1].end, f"{each.name} leaves {open_slices[-1].name}"
            open_slices.append(each)
    for each in timeline.traceEvents:
        if isinstance(each, Instant | FlowStart | FlowEnd):
            assert any(one.ts <= each.ts < one.end for one in tracks[each.tid]), f"{each.name} is in no slice"


def _check_flows(timeline: Timeline) -> None:
    """Each arrow begins once and ends once, not before its beginning."""
    starts = {each.id: each for each in timeline.traceEvents if isinstance(each, FlowStart)}
    ends = {each.id: each for each in timeline.traceEvents if isinstance(each, FlowEnd)}
    assert starts.keys() == ends.keys()
    for kind in (FlowStart, FlowEnd):
        assert sum(isinstance(each, kind) for each in timeline.traceEvents) == len(starts)
    for number, start in starts.items():
        assert (start.name, start.cat) == (ends[number].name, ends[number].cat)
        assert start.ts <= ends[number].ts
