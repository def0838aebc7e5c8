"""Which bus does a command mean? The option, the environment, a system running in the workdir, the usual address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bus.errors import NotConnectedError
from bus.nats import NatsBus, connect
from tidegate.errors import NoBusError
from tidegate.supervisor.state import SystemState, read_state

USUAL_URL = "nats://127.0.0.1:4222"
ENVIRONMENT_KEY = "TIDEGATE_NATS_URL"


@dataclass(frozen=True, slots=True)
class Located:
    """The address, who gave it, and the state of the local system if there is one."""

    nats_url: str
    source: str
    state: SystemState | None


def locate(nats: str | None, workdir: Path, environ: Mapping[str, str] | None = None) -> Located:
    """``nats`` is the option's value."""
    environ = os.environ if environ is None else environ
    state = read_state(workdir)
    if nats:
        return Located(nats, "--nats", state if state and state.nats_url == nats else None)
    if environ.get(ENVIRONMENT_KEY):
        url = environ[ENVIRONMENT_KEY]
        return Located(url, ENVIRONMENT_KEY, state if state and state.nats_url == url else None)
    if state is not None:
        return Located(state.nats_url, str(workdir / "up.json"), state)
    return Located(USUAL_URL, "the usual address", None)


async def open_bus(located: Located, name: str, timeout_s: float = 3.0) -> NatsBus:
    """Raises `NoBusError`, which says what to do."""
    try:
        return await connect(located.nats_url, name=name, timeout_s=timeout_s)
    except NotConnectedError as error:
        raise NoBusError(
            f"no bus answers at {located.nats_url} (from {located.source}); start a system with `tidegate up`, "
            "or name the bus with --nats"
        ) from error
