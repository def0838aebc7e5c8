"""What becomes of the bus under a command that stays: lost, back, moved elsewhere, stopped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from bus.interface import Bus
from tidegate.errors import NoBusError
from tidegate.locate import Located, locate
from tidegate.supervisor.state import SystemState, read_state

_LOOK_S = 0.25
RESTART_GRACE_S = 10.0
"""A system that was stopped may be started again within this time, and is followed."""


async def watch(bus: Bus, located: Located, say: Callable[[str], None], *, grace_s: float = RESTART_GRACE_S) -> Located:
    """Ends with the new address when the system in the workdir has another bus. ``say`` hears one line for each change.

    An address that a person or the environment gave is waited for as long as it takes. Raises `NoBusError` when the
    system in the workdir was stopped, or the bus refuses us for good.
    """
    lost = asyncio.ensure_future(bus.wait_lost())
    loop = asyncio.get_running_loop()
    connected = True
    missing_since: float | None = None
    try:
        while True:
            await asyncio.wait({lost}, timeout=_LOOK_S)
            if lost.done():
                raise NoBusError(f"the bus at {located.shown_url} is gone for good: {lost.result()}")
            if bus.connected != connected:
                connected = bus.connected
                say(f"the bus at {located.shown_url} is {'back' if connected else 'gone; waiting for it'}")
            if located.workdir is None:
                continue
            state = read_state(located.workdir)
            if state is not None and state.nats_url != located.nats_url:
                found = locate(None, located.workdir)
                say(f"the system in {located.workdir} is on {found.shown_url} now; following it, from its next row on")
                return found
            if state is not None and (connected or _lives(state)):
                missing_since = None
                continue
            missing_since = missing_since or loop.time()
            if loop.time() - missing_since >= grace_s:
                raise NoBusError(f"the system in {located.workdir} was stopped")
    finally:
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)


def _lives(state: SystemState) -> bool:
    """Whether the process that wrote it runs: one that was killed leaves its state behind."""
    try:
        os.kill(state.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
