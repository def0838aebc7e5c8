"""Which bus does a command mean? The options, the environment, a system running here, the usual address."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bus.errors import NotConnectedError
from bus.nats import NatsBus, NatsOptions, connect, options_from_environment
from bus.nats.connection import REFUSED_LOGIN
from bus.settings import redact
from tidegate.errors import NoBusError, NoSystemError
from tidegate.supervisor.state import DEFAULT_WORKDIR, FILE_NAME, SystemState, read_state

USUAL_URL = "nats://127.0.0.1:4222"
ENVIRONMENT_KEY = "TIDEGATE_NATS_URL"


@dataclass(frozen=True, slots=True)
class Located:
    """The address, who gave it, and the state of the local system if there is one.

    ``workdir``: the folder whose ``up.json`` gave the address. ``guess``: nobody gave it; a sentence that says so.
    """

    nats_url: str
    source: str
    state: SystemState | None
    workdir: Path | None = None
    guess: str = ""

    @property
    def shown_url(self) -> str:
        """Without a password."""
        return str(redact("nats_url", self.nats_url))


def locate(nats: str | None, workdir: Path | None, environ: Mapping[str, str] | None = None) -> Located:
    """``nats`` and ``workdir`` are the options' values. Raises `NoSystemError` for a ``workdir`` without a system."""
    environ = os.environ if environ is None else environ
    folder = workdir or Path(DEFAULT_WORKDIR)
    state = read_state(folder)
    if nats:
        return Located(nats, "--nats", state if state and state.nats_url == nats else None)
    if workdir is not None and state is None:
        raise NoSystemError(f"no system runs in {workdir} (it holds no {FILE_NAME}); start one with `tidegate up`")
    if workdir is None and environ.get(ENVIRONMENT_KEY):
        url = environ[ENVIRONMENT_KEY]
        return Located(url, ENVIRONMENT_KEY, state if state and state.nats_url == url else None)
    if state is not None:
        return Located(state.nats_url, str(folder / FILE_NAME), state, folder)
    guess = (
        f"no system runs in {folder}, and neither --nats nor {ENVIRONMENT_KEY} is given: looking at {USUAL_URL}, which "
        "may be somebody else's"
    )
    return Located(USUAL_URL, "the usual address", None, guess=guess)


async def open_bus(located: Located, name: str, timeout_s: float = 3.0) -> NatsBus:
    """Raises `NoBusError`, which says what to do."""
    try:
        options = _options(located)
        return await connect(located.nats_url, name=name, timeout_s=timeout_s, options=options)
    except NotConnectedError as error:
        if REFUSED_LOGIN in str(error):
            raise NoBusError(
                f"the bus at {located.shown_url} (from {located.source}) knows us not: set TIDEGATE_NATS_USER and "
                "TIDEGATE_NATS_PASSWORD_FILE, or name it as nats://user:password@host:port"
            ) from error
        raise NoBusError(
            f"no bus answers at {located.shown_url} (from {located.source}); start a system with `tidegate up`, "
            "or name the bus with --nats"
        ) from error


def _options(located: Located) -> NatsOptions:
    """Who we are: as the environment says, else as the system here tells its commands."""
    given = options_from_environment()
    state = located.state
    if state is None or not state.nats_user or given.access.user or given.access.creds:
        return given
    access = replace(given.access, user=state.nats_user, password_file=state.nats_password_file)
    return replace(given, access=access)
