"""vLLM: its Python OpenAI server takes no hint (spec engine-events §3: ``kv_hints`` reaches it through ``AsyncLLM`` and
the Rust front end only, and no release keeps, pins or moves blocks for a client). What the next request of the session
can carry is `deferred`, and only where the operator says that the front door puts it there."""

from __future__ import annotations

from collections.abc import Sequence

from services.bridge.adapters.actions import Asked, Done, EngineFacts, Lowered

NEXT_REQUEST = Done("deferred", "next_request")
NO_INTERFACE = Done("unsupported", "engine_has_no_hint_interface")


def lower(asked: Sequence[Asked], facts: EngineFacts) -> Lowered:
    """Everything is known at once."""
    return Lowered({each.place: by_request(each, facts.by_request) or _never(each) for each in asked})


def by_request(asked: Asked, carried: frozenset[str]) -> Done | None:
    """What waits for the session's next request; ``None``: nothing of it does.

    ``kv_hints``: the front end takes the envelope as a field of a request, and does not tell what became of it.
    ``continuum``: the plug-in pins by itself, by what requests say of their job (spec scheduling §1.5).
    """
    if asked.read is None:
        return None
    over = asked.action_type == "dereference" and asked.read.reason == "closed"
    if "kv_hints" in carried:
        return Done("unsupported", "no_next_request") if over else NEXT_REQUEST
    if "continuum" in carried and asked.action_type == "pin":
        return NEXT_REQUEST
    return None


def _never(asked: Asked) -> Done:
    """Why it cannot be done. A request's own priority orders queues and preemption; it keeps nothing afterwards."""
    if asked.read is None:
        return Done("unsupported", "action_type")
    return Done("unsupported", "request_priority_only") if asked.action_type == "retain" else NO_INTERFACE
