"""What happens to a bridge: facts from the engine's sockets and pages, and questions from the bus."""

from __future__ import annotations

from dataclasses import dataclass

from services.bridge.adapters.actions import CallAnswer
from services.bridge.checkpoint import Restorable
from services.bridge.endpoints import RankSource
from services.bridge.engine import Sight
from services.bridge.profile import MetricsReport


@dataclass(frozen=True, slots=True)
class EngineBatch:
    """One message of a rank's PUB socket, as it came."""

    rank: int
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class EngineConnected:
    """The SUB socket of a rank has shaken hands with the engine: what is published from here on arrives."""

    rank: int


@dataclass(frozen=True, slots=True)
class EngineDisconnected:
    """The engine's side of a rank's socket went away: a restart, or the network."""

    rank: int


SubscriberEvent = EngineBatch | EngineConnected | EngineDisconnected


@dataclass(frozen=True, slots=True)
class Scraped:
    """The engine answered. ``asked_at``: when the question was sent (Unix seconds). ``metrics`` ``None``: no page."""

    asked_at: float
    metrics: MetricsReport | None
    sight: Sight | None = None


@dataclass(frozen=True, slots=True)
class ScrapeFailed:
    """The engine did not answer, or not intelligibly."""

    asked_at: float
    reason: str


@dataclass(frozen=True, slots=True)
class SourcesFound:
    """Where this engine process publishes its events; empty: nowhere."""

    sources: tuple[RankSource, ...]


@dataclass(frozen=True, slots=True)
class SocketsOpened:
    """The sockets of `effects.Subscribe` are open, or cannot be (``problem``) and will be tried again."""

    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ReplayAnswered:
    """One replay, or a part of it with ``more`` to follow. ``ticket`` of the question; ``problem`` when the end mark
    did not come in time."""

    rank: int
    ticket: int
    batches: tuple[tuple[int, bytes], ...]
    problem: str | None = None
    more: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointRead:
    """What the bridge before left behind, or that there is nothing that can be used."""

    restorable: Restorable | None


@dataclass(frozen=True, slots=True)
class HintReceived:
    """A command on ``tg.v1.hint.<worker>``."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class HintCallAnswered:
    """The call of `effects.CallEngine` is over."""

    ticket: int
    answer: CallAnswer


@dataclass(frozen=True, slots=True)
class SessionHeard:
    """A fact on ``tg.v1.session.closed.*`` or ``tg.v1.session.opened.*``."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class Beat:
    """Time for a heartbeat. ``reconnects``: how often the bus was found again."""

    reconnects: int = 0


@dataclass(frozen=True, slots=True)
class Stopping:
    """The bridge is told to stop; ``reason`` goes into the last fact."""

    reason: str


BridgeEvent = (
    EngineBatch
    | EngineConnected
    | EngineDisconnected
    | Scraped
    | ScrapeFailed
    | SourcesFound
    | SocketsOpened
    | ReplayAnswered
    | CheckpointRead
    | HintReceived
    | HintCallAnswered
    | SessionHeard
    | Beat
    | Stopping
)
