"""Who answers on the bus: micro services, and whoever else subscribes to a question's subject."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import Any

from bus.errors import BusError, BusTimeoutError, NoRespondersError
from bus.interface import Bus, BusMessage

IDLE_S = 0.5
LISTEN_S = 2.5
_ASK_S = 2.0


async def find_services(bus: Bus, verb: str = "PING") -> list[dict[str, Any]]:
    """Answers to ``$SRV.PING`` or ``INFO``; whatever else answers there is no service."""
    answers: list[BusMessage] = []
    # Silence is the end of the answers, or there is nobody at all.
    with contextlib.suppress(BusTimeoutError, NoRespondersError):
        async for answer in bus.request_many(f"$SRV.{verb}", b"", idle_timeout_s=IDLE_S, deadline_s=LISTEN_S):
            answers += [answer]
    return [service for answer in answers if (service := _read(answer.payload)) is not None]


async def listens(bus: Bus, subject: str) -> bool:
    """Whether anybody subscribes to ``subject`` (who answers need not be a micro service); it is sent an empty
    question, which nobody can answer with an opinion."""
    try:
        await bus.request(subject, b"", timeout_s=_ASK_S)
    except NoRespondersError:
        return False
    except BusError:
        return True
    return True


def metadata_of(service: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a service says about itself; empty where it says nothing that can be read."""
    metadata = service.get("metadata")
    return metadata if isinstance(metadata, Mapping) else {}


def subjects_of(service: Mapping[str, Any]) -> list[str]:
    """Of the endpoints that a service's ``INFO`` names."""
    endpoints = service.get("endpoints")
    if not isinstance(endpoints, list):
        return []
    return [str(endpoint["subject"]) for endpoint in endpoints if isinstance(endpoint, dict) and "subject" in endpoint]


def _read(payload: bytes) -> dict[str, Any] | None:
    """A micro service's answer to a ping; ``None`` for what is none."""
    try:
        answer = json.loads(payload)
    except ValueError:
        return None
    return answer if isinstance(answer, dict) and "name" in answer else None
