"""What a client asks of the scheduler: how urgent a request is, and how long its answer will be.

In the body by the peer's names (``nvext.agent_hints``; spec: identity-and-traces §1.6) or by the engine's own
(``priority``), in headers by ours and the peer's. A header stands before the body, ours before the peer's, and one that
cannot be read is no hint. Clients and the peer count up, the more urgent the higher; the engines' ``priority`` counts
down (vLLM) or up (SGLang), and everything here down: `ClientRequest.priority` is lower for what runs earlier, 0 for
everybody else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from services.ingress.endpoints import LARGEST_NUMBER, ClientRequest
from services.ingress.identity import Signals

PRIORITY_HEADERS = ("x-tidegate-priority", "x-dynamo-request-priority")
EXPECTED_HEADERS = ("x-tidegate-expected-output-tokens",)
_NUMBER = re.compile(r"[+-]?[0-9]{1,10}")


def with_hints(request: ClientRequest, signals: Signals, high_first: Callable[[str], bool]) -> ClientRequest:
    """The request with what its headers say of it. ``high_first``: whether engines of a model run a higher ``priority``
    first."""
    if not request.as_engine_counts and not any(name in signals for name in (*PRIORITY_HEADERS, *EXPECTED_HEADERS)):
        return request
    urgency, expected = _first(signals, PRIORITY_HEADERS), _first(signals, EXPECTED_HEADERS)
    priority = request.priority
    if urgency is not None:
        priority = -urgency
    elif request.as_engine_counts and high_first(request.model):
        priority = -priority
    return replace(
        request,
        priority=priority,
        as_engine_counts=False,
        expected_output_tokens=expected if expected is not None and expected > 0 else request.expected_output_tokens,
    )


def _first(signals: Signals, names: tuple[str, ...]) -> int | None:
    """The first of these headers that is a number."""
    for name in names:
        value = signals.get(name, "")
        if _NUMBER.fullmatch(value):
            return max(-LARGEST_NUMBER, min(LARGEST_NUMBER, int(value)))
    return None
