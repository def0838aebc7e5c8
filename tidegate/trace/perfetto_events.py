"""Events of the Chrome trace format, as short as a timeline needs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Event = dict[str, Any]
Span = tuple[int, int]
"""Start and end in µs."""


def us(ms: float) -> int:
    """Unix ms as the format's µs; nothing lies before 1970."""
    return max(0, round(ms * 1000))


def name_process(pid: int, name: str, place: int) -> Iterator[Event]:
    """Shown in the order of ``place``."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": place}}


def name_thread(pid: int, tid: int, name: str, place: int) -> Iterator[Event]:
    """Shown in the order of ``place`` within its process."""
    yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": place}}


def slice_of(pid: int, tid: int, name: str, category: str, span: Span, args: Event | None = None) -> Event:
    """Something that lasts."""
    start_us, end_us = span
    event: Event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": start_us}
    event["dur"] = max(1, end_us - start_us)
    if args:
        event["args"] = args
    return event


def instant(pid: int, tid: int, name: str, category: str, at_us: int, args: Event | None = None) -> Event:
    """A moment on a thread."""
    event: Event = {"ph": "i", "s": "t", "name": name, "cat": category, "pid": pid, "tid": tid, "ts": at_us}
    if args:
        event["args"] = args
    return event


def counter(pid: int, name: str, at_us: int, values: Mapping[str, float]) -> Event:
    """From now on it has these values: one for each series of the counter."""
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_us, "args": dict(values)}
