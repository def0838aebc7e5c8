"""How a real engine is written on the command line: ``URL[=EVENTS[,EVENTS...][,replay=ENDPOINT...]]``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from tidegate.errors import WrongUseError

_FORM = "http://HOST:PORT[=tcp://HOST:PORT[,replay=tcp://HOST:PORT]]"


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """A real engine. ``events``: its ZMQ PUB endpoints, one a rank (empty: the bridge asks the engine or does without);
    ``replay``: its ROUTER endpoints, likewise."""

    url: str
    events: tuple[str, ...] = ()
    replay: tuple[str, ...] = ()


def parse_engine(text: str) -> EngineAddress:
    """Raises `WrongUseError` with the form that is wanted."""
    url, equals, sources = text.partition("=")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise WrongUseError(f"--engine {text}: {url!r} is no http address; write {_FORM}")
    events: list[str] = []
    replay: list[str] = []
    for item in filter(None, (item.strip() for item in sources.split(","))):
        target, endpoint = (replay, item.removeprefix("replay=")) if item.startswith("replay=") else (events, item)
        if not endpoint.startswith(("tcp://", "ipc://", "inproc://")):
            raise WrongUseError(f"--engine {text}: {endpoint!r} is no ZeroMQ endpoint; write {_FORM}")
        target.append(endpoint)
    if equals and not events:
        raise WrongUseError(f"--engine {text}: no event endpoint after '='; write {_FORM}")
    return EngineAddress(url=url, events=tuple(events), replay=tuple(replay))
