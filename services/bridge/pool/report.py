"""What a Mooncake master says over HTTP, as far as a pool's bridge needs it (spec: pool-events §2, §4).

Read are ``/kv_events/status``, ``/get_segments_detail`` and a few series of ``/metrics``; none of them grants a lease.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from services.bridge.errors import ScrapeError

LISTED_TENANT = "default"
"""The only tenant whose objects ``/get_all_keys`` names."""

MAX_SEGMENTS = 65_536
"""Segments that are followed by name; a larger pool is watched by their number."""

_EVICTED = ("master_evicted_key_count_mem", "master_evicted_key_count_mem_total")
_LIVENESS = "master_client_liveness_"
_TENANT_BYTES = "mooncake_tenant_quota_charged_bytes"
_TENANT = re.compile(r'tenant_id="((?:[^"\\]|\\.)*)"')
_LARGEST = (1 << 53) - 1


@dataclass(frozen=True, slots=True)
class EventStatus:
    """``/kv_events/status``. ``published`` messages and ``dropped`` events since the master's start: together the
    number of its newest message, because each dropped event skips one number. ``None``: it does not say it."""

    enabled: bool
    published: int | None = None
    dropped: int | None = None

    @property
    def newest_seq(self) -> int | None:
        """Number of the newest message (0: none yet)."""
        return None if self.published is None or self.dropped is None else self.published + self.dropped


@dataclass(frozen=True, slots=True)
class MasterMetrics:
    """A few numbers of ``/metrics``: keys ``evicted`` from memory since the start (``None``: not said); ``liveness``:
    what is said of the clients' lives, any change of which makes keys appear or disappear; ``tenants`` that store
    something."""

    evicted: int | None = None
    liveness: tuple[tuple[str, int], ...] = ()
    tenants: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PoolReport:
    """One look at a master. ``segments``: name, client and status of each."""

    status: EventStatus
    metrics: MasterMetrics
    segments: frozenset[tuple[str, str, str]] = frozenset()


def parse_status(body: bytes) -> EventStatus:
    """Read ``/kv_events/status``. Raises `ScrapeError`."""
    told = _json_object(body, "/kv_events/status")
    return EventStatus(
        enabled=told.get("enabled") is True,
        published=_count(told.get("published_batches")),
        dropped=_count(told.get("dropped_events")),
    )


def parse_segments(body: bytes) -> frozenset[tuple[str, str, str]]:
    """Read ``/get_segments_detail``. Raises `ScrapeError`."""
    segments = _json_object(body, "/get_segments_detail").get("segments")
    if not isinstance(segments, list):
        raise ScrapeError("bad_answer", "/get_segments_detail names no segments")
    if len(segments) > MAX_SEGMENTS:
        return frozenset({(str(len(segments)), "", "")})
    return frozenset(_segment(each) for each in segments if isinstance(each, dict))


def _segment(told: dict[str, Any]) -> tuple[str, str, str]:
    # `segment_id` tells a client's second life from its first.
    name = told.get("segment_id") or told.get("segment_name")
    return str(name), str(told.get("client_id")), str(told.get("status"))


def parse_master_metrics(text: str) -> MasterMetrics:
    """Read the few series that are wanted."""
    evicted: int | None = None
    liveness: list[tuple[str, int]] = []
    tenants: list[str] = []
    for name, labels, value in _samples(text):
        if name in _EVICTED:
            evicted = max(evicted or 0, value)
        elif name.startswith(_LIVENESS) and not labels:
            liveness.append((name, value))
        elif name == _TENANT_BYTES and value and (found := _TENANT.search(labels)) and len(tenants) < MAX_SEGMENTS:
            tenants.append(found[1])
    return MasterMetrics(evicted, tuple(sorted(liveness)), tuple(tenants))


def _samples(text: str) -> Iterable[tuple[str, str, int]]:
    """(name, labels as written, value) of the series that are read; the page has hundreds of others."""
    for line in text.splitlines():
        if not line.startswith(("master_evicted_key_count_mem", _LIVENESS, _TENANT_BYTES)):
            continue
        series, _, value = line.rpartition(" ")
        name, _, labels = series.partition("{")
        try:
            number = float(value)
        except ValueError:
            continue
        if 0 <= number <= _LARGEST:
            yield name, labels, int(number)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _LARGEST else None


def _json_object(body: bytes, what: str) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise ScrapeError("bad_answer", f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ScrapeError("bad_answer", f"{what} is not a JSON object")
    return value
