"""Where an engine publishes its KV events: from settings, vLLM's ``/kv_event_sources`` or SGLang's ``/server_info``.

Rule (spec: engine-events §2.6, §4): a PUB socket binds where its endpoint has a wildcard host or is ipc or inproc, so
we connect; with a concrete host the engine connects, so we bind. Rank r uses port base + r. The replay socket always
binds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import msgspec

from schemas.base import UNDECODABLE
from schemas.kv import MAX_RANKS
from services.bridge.errors import BadEndpointError

_TCP = re.compile(r"^tcp://(?P<host>\[[^\]]*\]|[^:\[\]]*):(?P<port>\d{1,5})$")
_WILDCARD_HOSTS = frozenset({"*", "0.0.0.0", "::", "[::]", "[::0]"})  # noqa: S104 - recognised, never bound


@dataclass(frozen=True, slots=True)
class RankSource:
    """One rank's sockets. ``bind``: the engine connects to us, so we bind ``events``; ``guessed``: as it looks, so
    connect where it cannot be bound. ``replay`` may be empty."""

    rank: int
    events: str
    replay: str = ""
    bind: bool = False
    topic: str = ""
    guessed: bool = False


def host_of(url: str) -> str:
    """The host part of an engine's URL, bracketed for IPv6. Raises `BadEndpointError`."""
    host = urlsplit(url).hostname
    if not host:
        raise BadEndpointError(url, "it has no host")
    return f"[{host}]" if ":" in host else host


def engine_binds(endpoint: str) -> bool:
    """Whether an engine configured with ``endpoint`` binds it (else it connects to us)."""
    return not endpoint.startswith("tcp://") or "*" in endpoint or "::" in endpoint


def as_seen_from_here(endpoint: str, host: str) -> str:
    """``endpoint`` with a wildcard host replaced by ``host``. Raises `BadEndpointError`."""
    if endpoint.startswith(("ipc://", "inproc://")):
        return endpoint
    found = _TCP.match(endpoint)
    if found is None or not 0 < int(found["port"]) < 65536:
        raise BadEndpointError(endpoint, "it is not tcp://host:port, ipc:// or inproc://")
    name = host if found["host"] in _WILDCARD_HOSTS or not found["host"] else found["host"]
    return f"tcp://{name}:{found['port']}"


def shifted(endpoint: str, offset: int) -> str:
    """``endpoint`` of rank ``offset``, given the one of rank 0. Raises `BadEndpointError` for one without a port."""
    if offset == 0:
        return endpoint
    found = re.search(r":(\d{1,5})$", endpoint) if endpoint.startswith("tcp://") else None
    if found is None:
        raise BadEndpointError(endpoint, "only a tcp endpoint can be the base of several ranks")
    return f"{endpoint[: found.start()]}:{int(found[1]) + offset}"


def from_settings(
    events: tuple[str, ...], replay: tuple[str, ...], *, ranks: int, host: str, bind: bool, topic: str
) -> tuple[RankSource, ...]:
    """Sources as configured: one endpoint per rank, or one base endpoint for ``ranks`` ranks.

    Raises `BadEndpointError` where the lists do not fit together or two ranks would share an endpoint.
    """
    if not events:
        return ()
    count = ranks or len(events)
    all_events = _per_rank(events, count)
    all_replay = _per_rank(replay, count) if replay else ("",) * count
    sources = tuple(
        RankSource(
            rank=rank,
            events=all_events[rank] if bind else as_seen_from_here(all_events[rank], host),
            replay=as_seen_from_here(all_replay[rank], host) if all_replay[rank] else "",
            bind=bind,
            topic=topic,
        )
        for rank in range(count)
    )
    return checked(sources)


def _per_rank(given: tuple[str, ...], count: int) -> tuple[str, ...]:
    if len(given) == count:
        return given
    if len(given) == 1:
        return tuple(shifted(given[0], rank) for rank in range(count))
    raise BadEndpointError(", ".join(given), f"{len(given)} endpoints for {count} ranks")


def checked(sources: Iterable[RankSource]) -> tuple[RankSource, ...]:
    """``sources`` by rank. Raises `BadEndpointError` where two sockets would be the same (user case A13)."""
    ordered = tuple(sorted(sources, key=lambda source: source.rank))
    seen: dict[str, str] = {}
    for source in ordered:
        for what, endpoint in (("events", source.events), ("replay", source.replay)):
            name = f"{what} of rank {source.rank}"
            if endpoint and endpoint in seen:
                raise BadEndpointError(endpoint, f"{name} and {seen[endpoint]} would share it")
            if endpoint:
                seen[endpoint] = name
    if len({source.rank for source in ordered}) != len(ordered):
        raise BadEndpointError(ordered[0].events, "two sources for one rank")
    return ordered


def from_vllm(body: bytes, host: str) -> tuple[RankSource, ...]:
    """Sources out of ``GET /kv_event_sources`` (vLLM 0.31+). Raises `BadEndpointError`."""
    sources = []
    for key, entry in _object(body, "/kv_event_sources").items():
        if not isinstance(entry, dict) or not re.fullmatch(r"[0-9]{1,4}", str(key)) or int(key) >= MAX_RANKS:
            raise BadEndpointError(str(key), "not a rank of /kv_event_sources")
        endpoint = entry.get("endpoint")
        if not entry.get("enable_kv_cache_events", True) or entry.get("publisher") == "null" or not endpoint:
            continue
        replay = entry.get("replay_endpoint")
        sources.append(
            RankSource(
                rank=int(key),
                events=as_seen_from_here(str(endpoint), host),
                replay=as_seen_from_here(str(replay), host) if replay else "",
                bind=not engine_binds(str(endpoint)),
                guessed=not engine_binds(str(endpoint)),
                topic=str(entry.get("topic") or ""),
            )
        )
    return checked(sources)


def from_sglang(body: bytes, host: str) -> tuple[RankSource, ...]:
    """Sources out of ``GET /server_info`` (SGLang 0.5.13+): its ``kv_events``. Raises `BadEndpointError`."""
    told = _object(body, "/server_info").get("kv_events")
    if not isinstance(told, dict) or told.get("publisher") in (None, "null"):
        return ()
    base, replay_base = told.get("endpoint_port_base"), told.get("replay_endpoint_port_base")
    if not isinstance(base, int):
        return ()
    named = str(told.get("endpoint_host") or "*")
    at = host if named in _WILDCARD_HOSTS else named
    ranks = told.get("dp_size")
    if isinstance(ranks, int) and ranks > MAX_RANKS:
        raise BadEndpointError("/server_info", f"more than {MAX_RANKS} ranks")
    return checked(
        RankSource(
            rank=rank,
            events=f"tcp://{at}:{base + rank}",
            replay=f"tcp://{at}:{replay_base + rank}" if isinstance(replay_base, int) else "",
            topic=str(told.get("topic") or ""),
        )
        for rank in range(ranks if isinstance(ranks, int) and ranks > 0 else 1)
    )


def _object(body: bytes, what: str) -> dict[Any, Any]:
    try:
        value = msgspec.json.decode(body)
    except UNDECODABLE as error:
        raise BadEndpointError(what, f"not JSON ({error})") from error
    if not isinstance(value, dict):
        raise BadEndpointError(what, "not a JSON object")
    return value
