"""What clients say to the scheduler: the peer's members and headers, ours, and which of them stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from services.ingress.client_hints import with_hints
from services.ingress.endpoints import ClientRequest, Endpoint, read_request
from services.ingress.errors import BadRequestError
from services.ingress.identity import read_headers

BODIES: dict[Endpoint, dict[str, Any]] = {
    "chat_completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
    "count_tokens": {"messages": [{"role": "user", "content": "x"}]},
}


def read(
    endpoint: Endpoint, headers: dict[str, str] | None = None, *, high_first: bool = False, **members: Any
) -> ClientRequest:
    body = json.dumps({"model": "m", **BODIES[endpoint], **members}).encode()
    named = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    return with_hints(read_request(endpoint, body), read_headers(named), lambda model: high_first and model == "m")


@pytest.mark.parametrize("endpoint", BODIES)
def test_hints_in_the_body_of_every_api(endpoint: Endpoint) -> None:
    """The peer's priority is higher for earlier, the engine's lower; here all are lower for earlier."""
    hints = {"priority": 5, "osl": 300, "strict_priority": 1, "speculative_prefill": True, "latency_sensitivity": 0.5}
    hinted = read(endpoint, nvext={"agent_hints": hints})
    assert (hinted.priority, hinted.expected_output_tokens) == (-5, 300)
    engines = read(endpoint, priority=-7)
    assert (engines.priority, engines.expected_output_tokens) == (-7, None)
    plain = read(endpoint)
    assert (plain.priority, plain.expected_output_tokens) == (0, None)


@pytest.mark.parametrize(
    ("headers", "members", "expected"),
    [
        ({"x-tidegate-priority": "3"}, {}, (-3, None)),
        ({"X-Dynamo-Request-Priority": " -2 "}, {}, (2, None)),
        ({"x-tidegate-priority": "3", "x-dynamo-request-priority": "9"}, {}, (-3, None)),
        ({"x-tidegate-priority": "soon", "x-dynamo-request-priority": "9"}, {}, (-9, None)),
        ({"x-tidegate-priority": "3"}, {"nvext": {"agent_hints": {"priority": 8}}, "priority": 4}, (-3, None)),
        ({}, {"nvext": {"agent_hints": {"priority": 8}}, "priority": 4}, (-8, None)),
        ({}, {"nvext": {"agent_hints": {"osl": 0}}, "priority": 4}, (4, None)),
        ({"x-tidegate-priority": "+1", "x-tidegate-expected-output-tokens": "40"}, {}, (-1, 40)),
        ({"x-tidegate-expected-output-tokens": "40"}, {"nvext": {"agent_hints": {"osl": 7}}}, (0, 40)),
        ({"x-tidegate-expected-output-tokens": "0"}, {"nvext": {"agent_hints": {"osl": 7}}}, (0, 7)),
        ({"x-tidegate-expected-output-tokens": "-1"}, {}, (0, None)),
        ({"x-tidegate-priority": "1e3"}, {"priority": 2}, (2, None)),
        ({"x-tidegate-priority": "9" * 5000}, {"priority": 2}, (2, None)),
        ({"x-tidegate-priority": "٣"}, {"priority": 2}, (2, None)),
        ({"x-dynamo-worker-instance-id": "7", "x-dynamo-dp-rank": "1"}, {}, (0, None)),
    ],
)
def test_which_hint_stands(headers: dict[str, str], members: dict[str, Any], expected: tuple[int, int | None]) -> None:
    """A header before the body, ours before the peer's, what is said to a scheduler before what is said to the engine;
    what cannot be read is no hint."""
    request = read("chat_completions", headers, **members)
    assert (request.priority, request.expected_output_tokens) == expected


@pytest.mark.parametrize(
    ("headers", "members", "priority"),
    [
        ({}, {"priority": 7}, -7),
        ({}, {"priority": -7}, 7),
        ({}, {}, 0),
        ({"x-tidegate-expected-output-tokens": "40"}, {"priority": 7}, -7),
        ({"x-tidegate-priority": "3"}, {"priority": 7}, -3),
        ({}, {"nvext": {"agent_hints": {"priority": 8}}, "priority": 7}, -8),
    ],
)
def test_an_engines_own_priority_means_what_that_engine_takes_it_for(
    headers: dict[str, str], members: dict[str, Any], priority: int
) -> None:
    """SGLang runs the higher one first, vLLM the lower; what is said to a scheduler is the same for both."""
    assert read("chat_completions", headers, high_first=True, **members).priority == priority
    own = "nvext" not in members and "x-tidegate-priority" not in headers
    assert read("chat_completions", headers, **members).priority == (-priority if own else priority)


@pytest.mark.parametrize(
    "hints", [{"osl": -1}, {"osl": "many"}, {"priority": 1.5}, {"priority": True}, {"osl": 1, "unknown": 2}, [], "soon"]
)
def test_hints_that_are_none_are_refused_as_the_peer_does(hints: Any) -> None:
    """A 400 that names the member."""
    with pytest.raises(BadRequestError, match="invalid nvext") as caught:
        read("responses", nvext={"agent_hints": hints})
    assert (caught.value.status, caught.value.reason) == (400, "invalid_nvext")
    assert (caught.value.param or "").startswith("nvext.agent_hints")
