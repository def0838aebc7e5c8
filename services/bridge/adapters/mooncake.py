"""A Mooncake store below an engine: what could be asked of the store itself, where the engine takes no hint.

Group and session ids travel with the puts of the engine's connector (spec pool-events §2); no later call changes them.
To move a session's objects a client of the store would have to name them, and a hint names a session: which objects are
its own only the engine can tell. The bytes of a put are in the engine alone. So the bridge has no client of the store,
and says why.
"""

from __future__ import annotations

from services.bridge.adapters.actions import Asked, Done

PUT_SIDE = Done("unsupported", "put_side_only")
KEYS_UNKNOWN = Done("unsupported", "store_keys_unknown")


def lower(asked: Asked) -> Done | None:
    """What the store says to an action that the engine has no interface for; ``None``: nothing."""
    if asked.read is None:
        return None
    if asked.action_type == "retain":
        return PUT_SIDE
    if asked.action_type in ("share", "prefetch") or (asked.action_type == "demote" and asked.read.to == "pool"):
        return KEYS_UNKNOWN
    return None
