"""Every subject of ``tg.v1``: its kind, who publishes it, what it carries, and what is lost when a message is.

``asyncapi.yaml`` is generated from this table (`schemas.asyncapi`); the policy SDK decodes by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec

from schemas.admit import AdmitCancel, AdmitRequest, Granted, Held, Refused
from schemas.base import BadMessageError, Message, from_json, from_msgpack
from schemas.decision import Decision
from schemas.hint import HintCommand, HintIntent, HintResult
from schemas.index import (
    IndexSource,
    MatchReply,
    MatchRequest,
    RecogniseReply,
    RecogniseRequest,
    SessionQuery,
    SessionResidency,
)
from schemas.ingress import IngressState
from schemas.kv import KvHeaders, SnapshotReply, SnapshotRequest
from schemas.placed import Placed
from schemas.policy import (
    AdmitAnswer,
    AdmitQuestion,
    HintAnswer,
    HintQuestion,
    LeaseAnswer,
    LeaseQuestion,
    RouteAnswer,
    RouteQuestion,
)
from schemas.pool import PoolHeaders, PoolReset, PoolSnapshotReply, PoolSnapshotRequest, PoolState
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken, RequestProgress
from schemas.session import SessionFact, SessionFactState
from schemas.tool import ToolEvent
from schemas.trace import TraceRow
from schemas.worker import WorkerState

Kind = Literal["fact", "question", "command", "row"]
"""``fact``: numbered, at most once. ``question``: answered on its reply subject. ``command``: asks for something to be
done, soft. ``row``: durable, in the stream."""

Encoding = Literal["json", "msgpack", "engine"]
"""``engine``: the engine's own bytes, untouched; our facts are in the headers."""

CONTENT_TYPES: Mapping[Encoding, str] = {
    "json": "application/json",
    "msgpack": "application/msgpack",
    "engine": "application/msgpack",
}

PARAMETERS: Mapping[str, str] = {
    "worker": "Worker id, encoded as one token (docs/adr/0001-subjects-and-ids.md).",
    "rank": "Data-parallel rank of the worker, decimal.",
    "ingress": "Ingress id, encoded.",
    "model": "Model name, encoded.",
    "session": "The session key's text, encoded; its parts are in the payload.",
    "state": "The transition, as in the payload.",
    "event": "Which event, as in the payload.",
    "event_type": "request_end, tool or decision.",
    "name": "The policy's name, encoded.",
    "pool": "The shared pool's name, encoded.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """One subject pattern. ``address`` has its parameters in braces; ``messages`` may travel on it, ``replies`` answer.

    ``headers``: the struct whose fields travel as headers. ``several``: a question may get more than one reply.
    ``queue``: the queue group that answers, empty when every instance does.
    """

    name: str
    address: str
    kind: Kind
    publisher: str
    summary: str
    loss: str
    messages: tuple[type[Message], ...] = ()
    replies: tuple[type[Message], ...] = ()
    encoding: Encoding = "json"
    headers: type[Message] | None = None
    several: bool = False
    queue: str = ""
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def pattern(self) -> str:
        """What to subscribe to for all of it."""
        return ".".join("*" if token.startswith("{") else token for token in self.address.split("."))


_REQUEST_EVENTS: Mapping[str, type[Message]] = {
    "accepted": RequestAccepted,
    "dispatched": RequestDispatched,
    "first_token": RequestFirstToken,
    "progress": RequestProgress,
    "end": RequestEnd,
}
_GAP = "Numbered per source and family: a receiver sees the gap."

CHANNELS: tuple[Channel, ...] = (
    Channel(
        name="worker_state",
        address="tg.v1.worker.state.{worker}",
        kind="fact",
        publisher="bridge",
        summary="Profile, incarnation, load, health and stream positions of one worker, once a second; the last: left.",
        loss="The next one a second later says everything again; 5 s of silence mean lost.",
        messages=(WorkerState,),
    ),
    Channel(
        name="ingress_state",
        address="tg.v1.ingress.state.{ingress}",
        kind="fact",
        publisher="ingress",
        summary="Requests in flight with their grants, once a second: what a new leader rebuilds from.",
        loss="The next one a second later says everything again; 5 s of silence expire its grants.",
        messages=(IngressState,),
    ),
    Channel(
        name="kv",
        address="tg.v1.kv.{worker}.{rank}",
        kind="fact",
        publisher="bridge",
        summary="One KV-event batch of the engine, untouched; where it belongs is in the headers.",
        loss="Numbered per rank and incarnation: the indexer holds, asks kv.snapshot, and goes on.",
        encoding="engine",
        headers=KvHeaders,
    ),
    Channel(
        name="kv_snapshot",
        address="tg.v1.kv.snapshot.{worker}",
        kind="question",
        publisher="indexer, admission",
        summary="The bridge's own index of its engine, as an object, and the batches it stands for.",
        loss="The asker asks again.",
        messages=(SnapshotRequest,),
        replies=(SnapshotReply,),
        queue="q",
    ),
    Channel(
        name="pool",
        address="tg.v1.pool.{pool}",
        kind="fact",
        publisher="bridge",
        summary="One batch of a shared pool's key events, untouched, or what a reconcile found to be otherwise.",
        loss="Numbered per epoch of the bridge: the index holds, asks pool.snapshot, and goes on.",
        encoding="engine",
        headers=PoolHeaders,
    ),
    Channel(
        name="pool_reset",
        address="tg.v1.pool.reset.{pool}",
        kind="fact",
        publisher="bridge",
        summary="Forget everything of this pool: it is told again from here on.",
        loss="It has a number among the batches: its loss is a gap.",
        messages=(PoolReset,),
    ),
    Channel(
        name="pool_state",
        address="tg.v1.pool.state.{pool}",
        kind="fact",
        publisher="bridge",
        summary="How far the bridge's picture of a shared pool can be trusted, and its last number, once a second.",
        loss="The next one a second later says everything again; 5 s of silence: the pool is not counted on.",
        messages=(PoolState,),
    ),
    Channel(
        name="pool_snapshot",
        address="tg.v1.pool.snapshot.{pool}",
        kind="question",
        publisher="indexer, admission",
        summary="The bridge's whole picture of a pool, as an object, and the number it stands for.",
        loss="The asker asks again.",
        messages=(PoolSnapshotRequest,),
        replies=(PoolSnapshotReply,),
        queue="q",
    ),
    Channel(
        name="index_source",
        address="tg.v1.index.source.{worker}.{rank}",
        kind="fact",
        publisher="indexer",
        summary="How far an indexer trusts its picture of one source, on change.",
        loss=_GAP + " Every match answer carries the health again.",
        messages=(IndexSource,),
    ),
    Channel(
        name="index_match",
        address="tg.v1.index.match",
        kind="question",
        publisher="admission",
        summary="Who holds how much of this chain?",
        loss="After 50 ms the decision is made without, marked blind.",
        messages=(MatchRequest,),
        replies=(MatchReply,),
        encoding="msgpack",
        queue="q",
    ),
    Channel(
        name="index_recognise",
        address="tg.v1.index.recognise",
        kind="question",
        publisher="ingress",
        summary="Whose next turn is this prompt, which names nobody?",
        loss="Late or absent: the request is a new session.",
        messages=(RecogniseRequest,),
        replies=(RecogniseReply,),
        encoding="msgpack",
        queue="q",
    ),
    Channel(
        name="index_session",
        address="tg.v1.index.session",
        kind="question",
        publisher="anyone",
        summary="What is known of one session's prefix; or, by block, whose block it is.",
        loss="The asker asks again.",
        messages=(SessionQuery,),
        replies=(SessionResidency,),
        queue="q",
    ),
    Channel(
        name="admit",
        address="tg.v1.admit.{model}",
        kind="question",
        publisher="ingress",
        summary="Run now, where, or wait? Held at least once a second, then granted or refused.",
        loss="2 s of silence: the ingress places by itself, marked fallback. Asking again returns the same grant.",
        messages=(AdmitRequest,),
        replies=(Held, Granted, Refused),
        encoding="msgpack",
        several=True,
        queue="q",
    ),
    Channel(
        name="admit_cancel",
        address="tg.v1.admit.cancel.{model}",
        kind="command",
        publisher="ingress",
        summary="The client went while its turn waited; forget it.",
        loss="The turn is granted, nobody takes the grant, and it expires.",
        messages=(AdmitCancel,),
        encoding="msgpack",
    ),
    Channel(
        name="decision",
        address="tg.v1.decision.{worker}",
        kind="fact",
        publisher="admission",
        summary="The whole decision behind one grant: candidates, score parts, index health, hold time.",
        loss=_GAP,
        messages=(Decision,),
    ),
    Channel(
        name="placed",
        address="tg.v1.placed.{worker}",
        kind="fact",
        publisher="admission, ingress for a fallback",
        summary="What was sent where: one prompt's chain, its session, and the rank that got it.",
        loss=_GAP + " An approximate source counts a little less, a session's place is its turn before.",
        messages=(Placed,),
        encoding="msgpack",
    ),
    *(
        Channel(
            name=f"request_{event}",
            address=f"tg.v1.request.{event}.{{model}}",
            kind="fact",
            publisher="ingress, admission for a lost one" if event == "end" else "ingress",
            summary=(message.__doc__ or "").strip().splitlines()[0],
            loss=_GAP + (" The durable row says it again." if event == "end" else ""),
            messages=(message,),
        )
        for event, message in _REQUEST_EVENTS.items()
    ),
    Channel(
        name="session",
        address="tg.v1.session.{state}.{session}",
        kind="fact",
        publisher="admission",
        summary="A transition of a session, with the numbers that caused it.",
        loss=_GAP,
        messages=(SessionFact,),
        values={"state": get_args(SessionFactState)},
    ),
    Channel(
        name="tool",
        address="tg.v1.tool.{event}.{session}",
        kind="fact",
        publisher="recorder",
        summary="A harness's tool call starts, ends or fails.",
        loss=_GAP + " The durable row says it again.",
        messages=(ToolEvent,),
        values={"event": ("start", "end", "error")},
    ),
    Channel(
        name="hint",
        address="tg.v1.hint.{worker}",
        kind="command",
        publisher="hints",
        summary="One KvHint envelope for a worker's bridge.",
        loss="Soft: timing changes, nothing else.",
        messages=(HintCommand,),
    ),
    Channel(
        name="hint_result",
        address="tg.v1.hint.result.{worker}",
        kind="fact",
        publisher="bridge",
        summary="What became of each action of one envelope.",
        loss=_GAP,
        messages=(HintResult,),
    ),
    Channel(
        name="hint_intent",
        address="tg.v1.hint.intent.{name}",
        kind="fact",
        publisher="a user's policy",
        summary="What a user's policy would have the caches do, unasked; budgeted.",
        loss="Soft: timing changes, nothing else.",
        messages=(HintIntent,),
    ),
    Channel(
        name="policy_route",
        address="tg.v1.policy.route.{name}",
        kind="question",
        publisher="admission",
        summary="Which of these candidates? A user's policy answers before the deadline.",
        loss="Late, absent or unusable: the built-in choice stands.",
        messages=(RouteQuestion,),
        replies=(RouteAnswer,),
        queue="q",
    ),
    Channel(
        name="policy_admit",
        address="tg.v1.policy.admit.{name}",
        kind="question",
        publisher="admission",
        summary="May this turn run now? A user's policy lets it go on, holds it for a while, or refuses it.",
        loss="Late, absent or malformed: the turn goes on.",
        messages=(AdmitQuestion,),
        replies=(AdmitAnswer,),
        queue="q",
    ),
    Channel(
        name="policy_lease",
        address="tg.v1.policy.lease.{name}",
        kind="question",
        publisher="admission",
        summary="Should the KV of this idle session stay where it is? Asked when the built-in policy has leased it.",
        loss="Late, absent or malformed: the built-in lease stands.",
        messages=(LeaseQuestion,),
        replies=(LeaseAnswer,),
        queue="q",
    ),
    Channel(
        name="policy_hint",
        address="tg.v1.policy.hint.{name}",
        kind="question",
        publisher="hints",
        summary="This has happened to a session: what should the caches be told?",
        loss="Late, absent or malformed: the planner's own actions are sent.",
        messages=(HintQuestion,),
        replies=(HintAnswer,),
        queue="q",
    ),
    Channel(
        name="trace",
        address="tg.v1.trace.{event_type}.{model}.{session}",
        kind="row",
        publisher="ingress, admission, recorder",
        summary="A finished trace row in the stream TG_TRACES.",
        loss="Re-sent with the same Nats-Msg-Id until acknowledged, decisions sent once; the stream stores it once.",
        messages=(TraceRow,),
        values={"event_type": ("request_end", "tool", "decision", "worker_load")},
    ),
)


def channel_of(subject: str) -> Channel | None:
    """The channel that ``subject`` belongs to, or ``None``. Literal tokens win: ``kv.snapshot`` is not a worker."""
    tokens = subject.split(".")
    best: tuple[int, Channel] | None = None
    for channel in CHANNELS:
        wanted = channel.address.split(".")
        if len(wanted) != len(tokens):
            continue
        if all(want.startswith("{") or want == token for want, token in zip(wanted, tokens, strict=True)):
            literal = sum(not want.startswith("{") for want in wanted)
            if best is None or literal > best[0]:
                best = (literal, channel)
    return best[1] if best else None


def decode(subject: str, payload: bytes) -> Message:
    """``payload`` as the message that ``subject`` promises. Raises `BadMessageError`, also for an unknown subject."""
    channel = channel_of(subject)
    if channel is None or not channel.messages:
        raise BadMessageError(f"no message type is known for {subject}")
    kind = channel.messages[0]
    return from_msgpack(payload, kind) if channel.encoding == "msgpack" else from_json(payload, kind)


def message_types() -> tuple[type[msgspec.Struct], ...]:
    """Every struct that travels whole, headers included, in order of the table."""
    found: dict[type[msgspec.Struct], None] = {}
    for channel in CHANNELS:
        for kind in (*channel.messages, *channel.replies, *([channel.headers] if channel.headers else [])):
            found[kind] = None
    return tuple(found)
