"""Where KV events are published: settings, vLLM's and SGLang's own words (spec: engine-events §2.6, §4)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from schemas.kv import MAX_RANKS
from services.bridge.endpoints import (
    RankSource,
    as_seen_from_here,
    engine_binds,
    from_settings,
    from_sglang,
    from_vllm,
    host_of,
    shifted,
)
from services.bridge.errors import BadEndpointError

FIXTURES = Path(__file__).parents[2] / "fixtures" / "engine_streams"


@pytest.mark.parametrize(
    ("endpoint", "binds"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///tmp/kv", True),
        ("inproc://kv", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://router.example:5557", False),
    ],
)
def test_who_binds(endpoint: str, binds: bool) -> None:
    """An engine binds wildcard, ipc and inproc endpoints and connects to every other."""
    assert engine_binds(endpoint) is binds


@pytest.mark.parametrize(
    ("endpoint", "seen"),
    [
        ("tcp://*:5557", "tcp://engine-7:5557"),
        ("tcp://0.0.0.0:5557", "tcp://engine-7:5557"),
        ("tcp://[::]:5557", "tcp://engine-7:5557"),
        ("tcp://10.0.0.9:5557", "tcp://10.0.0.9:5557"),
        ("ipc:///tmp/kv", "ipc:///tmp/kv"),
    ],
)
def test_wildcard_host_is_the_engines_host(endpoint: str, seen: str) -> None:
    """The host of the engine's URL stands for a wildcard, nothing else is touched."""
    assert as_seen_from_here(endpoint, "engine-7") == seen


@pytest.mark.parametrize("endpoint", ["tcp://h", "tcp://h:0", "tcp://h:70000", "udp://h:1", "5557", ""])
def test_unusable_endpoint_is_refused(endpoint: str) -> None:
    """What ZeroMQ could not use is named as such before a socket sees it."""
    with pytest.raises(BadEndpointError, match="KV event endpoint"):
        as_seen_from_here(endpoint, "h")


def test_host_of_url() -> None:
    """IPv6 hosts keep their brackets; a URL without host is refused."""
    assert host_of("http://engine:8000") == "engine"
    assert host_of("http://[fd00::1]:8000") == "[fd00::1]"
    with pytest.raises(BadEndpointError):
        host_of("nonsense")


def test_base_endpoint_and_ranks() -> None:
    """User case A13: ranks publish on base port + rank, and rank 0 is a rank like the others."""
    sources = from_settings(("tcp://*:5557",), ("tcp://*:6557",), ranks=2, host="h", bind=False, topic="kv")
    assert sources == (
        RankSource(0, "tcp://h:5557", "tcp://h:6557", topic="kv"),
        RankSource(1, "tcp://h:5558", "tcp://h:6558", topic="kv"),
    )
    assert shifted("ipc:///tmp/kv", 0) == "ipc:///tmp/kv"
    with pytest.raises(BadEndpointError, match="base of several ranks"):
        shifted("ipc:///tmp/kv", 1)


def test_one_endpoint_per_rank() -> None:
    """A list is taken as it is; a wildcard stays where we are the one to bind."""
    assert [
        source.events
        for source in from_settings(("tcp://a:1", "tcp://b:1"), (), ranks=0, host="h", bind=False, topic="")
    ] == [
        "tcp://a:1",
        "tcp://b:1",
    ]
    (source,) = from_settings(("tcp://*:9",), (), ranks=0, host="h", bind=True, topic="")
    assert (source.events, source.bind) == ("tcp://*:9", True)
    assert from_settings((), (), ranks=3, host="h", bind=False, topic="") == ()


def test_endpoint_lists_that_do_not_fit() -> None:
    """Two endpoints for three ranks is nobody's meaning."""
    with pytest.raises(BadEndpointError, match="2 endpoints for 3 ranks"):
        from_settings(("tcp://a:1", "tcp://b:1"), (), ranks=3, host="h", bind=False, topic="")


def test_port_collision_is_detected() -> None:
    """User case A13: base ranges of events and replay that overlap are refused with both names."""
    with pytest.raises(BadEndpointError, match="events of rank 1 and replay of rank 0"):
        from_settings(("tcp://*:5557",), ("tcp://*:5558",), ranks=2, host="h", bind=False, topic="")


def test_discovery_as_captured_from_vllm() -> None:
    """vLLM 0.32's ``/kv_event_sources`` with two ranks gives two sources, sorted, host substituted."""
    body = (FIXTURES / "vllm_0.32.0_two_ranks_kv_event_sources.json").read_bytes()
    assert from_vllm(body, "engine-7") == (
        RankSource(0, "tcp://engine-7:15557", "tcp://127.0.0.1:15568", topic="kv@test-pod@tiny"),
        RankSource(1, "tcp://engine-7:15558", "tcp://127.0.0.1:15569", topic="kv@test-pod@tiny"),
    )


def test_discovery_of_an_engine_that_connects_to_us() -> None:
    """A concrete host in vLLM's answer means that the engine connects, so the bridge binds."""
    body = json.dumps({"0": {"endpoint": "tcp://127.0.0.1:5557", "publisher": "zmq"}}).encode()
    assert from_vllm(body, "h") == (RankSource(0, "tcp://127.0.0.1:5557", bind=True, guessed=True),)


@pytest.mark.parametrize("body", [b"{}", b'{"0": {"publisher": "null"}}', b'{"0": {"enable_kv_cache_events": false}}'])
def test_vllm_without_events(body: bytes) -> None:
    """An engine whose events are off has no sources."""
    assert from_vllm(body, "h") == ()


@pytest.mark.parametrize("body", [b"", b"[]", b'{"a": {}}', b'{"0": 1}'])
def test_vllm_discovery_that_is_none(body: bytes) -> None:
    """An unintelligible answer is an error, not an empty list."""
    with pytest.raises(BadEndpointError):
        from_vllm(body, "h")


def test_discovery_from_sglang() -> None:
    """SGLang names port bases; the replay base may be missing."""
    told = {
        "kv_events": {"publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": 7000, "topic": "kv", "dp_size": 2}
    }
    assert from_sglang(json.dumps(told).encode(), "h") == (
        RankSource(0, "tcp://h:7000", topic="kv"),
        RankSource(1, "tcp://h:7001", topic="kv"),
    )
    told["kv_events"]["replay_endpoint_port_base"] = 7100
    assert [source.replay for source in from_sglang(json.dumps(told).encode(), "h")] == ["tcp://h:7100", "tcp://h:7101"]
    assert from_sglang(b"{}", "h") == ()


@pytest.mark.parametrize("rank", ["\u00b2", "99999999999", str(MAX_RANKS), "-1", ""])
def test_an_impossible_rank_is_refused(rank: str) -> None:
    """An engine's answer must not make us open ten thousand million sockets."""
    with pytest.raises(BadEndpointError):
        from_vllm(json.dumps({rank: {"endpoint": "tcp://*:5557"}}).encode(), "h")


def test_impossibly_many_ranks_are_refused() -> None:
    """SGLang's ``dp_size`` is looped over."""
    told = {"kv_events": {"publisher": "zmq", "endpoint_port_base": 5557, "dp_size": 10**12}}
    with pytest.raises(BadEndpointError):
        from_sglang(json.dumps(told).encode(), "h")
