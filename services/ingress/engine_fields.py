"""Members of a request that tell an engine's cache something: each off unless switched on, and only for engines that
take it. What the client wrote beside them stays as it is (`splice`).

``session_id``: hints name a session by the id that its requests carried.

``vllm_xargs`` of the Continuum plug-in (spec scheduling §1.5): ``job_id``, the session's id; ``last_func_call``, the
tool whose result this request brings; ``is_last_step``, as 0 or 1. ``this_func_call``, the tool that the answer will
call, is not known before the answer: the plug-in reads it from there.

``kv_hints``: the envelope of hints for this session at this worker that came since its last request (spec
thunderagent-and-hints §5.3). The bridge has answered them with `deferred`; nobody hears what the engine did.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from schemas.base import UNDECODABLE, BadMessageError, from_json
from schemas.hint import PROTOCOL_VERSION
from schemas.session import MOVES_SESSION, SessionKey, engine_session_id
from schemas.worker import Engine
from services.ingress.effects import NO_FIELDS, EngineFields
from services.ingress.endpoints import ChatPrompt, Prompt
from services.ingress.requests import Record
from services.ingress.workers import Workers

CONTINUUM_ENGINES: frozenset[Engine] = frozenset({"vllm", "simulated"})
TAKES_ENVELOPES = "kv_hints"
TAKES_WITH_REQUESTS = "request:kv_hints"
"""Features of a worker: its engine takes hints from its bridge; its front end takes ``kv_hints`` (setting
``request_hints`` of its bridge)."""

HINTED = frozenset({TAKES_ENVELOPES, TAKES_WITH_REQUESTS})

MAX_COMMAND_BYTES = 64 * 1024
MAX_ACTIONS = 32
"""Of one session at one worker; over it the oldest go."""

MAX_WAITING_BYTES = 16 * 1024 * 1024
MAX_TOOL_MESSAGES = 64
"""A turn has that many results at most that are looked through for a name."""

MAX_TOOL_CHARACTERS = 256


class FieldRules:
    """``session_id``, ``continuum``, ``kv_hints``: which of them are on. ``waiting``: hints for requests to come."""

    def __init__(
        self, workers: Workers, *, session_id: bool = False, continuum: bool = False, kv_hints: bool = False
    ) -> None:
        self._workers = workers
        self._session_id = session_id
        self._continuum = continuum
        self._kv_hints = kv_hints
        self.waiting = WaitingHints()

    def heard(self, payload: bytes, now: float) -> None:
        """A command to a worker's bridge."""
        if self._kv_hints:
            self.waiting.heard(payload, self._workers, now)

    def of(self, record: Record, name: str, now: float) -> EngineFields:
        """For this request at the worker ``name``. Side requests share their session's id but not its prefix, and one
        without identity is nobody's: nothing."""
        worker = self._workers.get(name)
        if worker is None or record.kind not in MOVES_SESSION or record.identity.key.family == "request":
            return NO_FIELDS
        session_id = ""
        if self._session_id and not HINTED.isdisjoint(worker.profile.features):
            session_id = engine_session_id(record.identity.key, record.identity.session_id)
        xargs: tuple[tuple[str, bytes], ...] = ()
        if self._continuum and worker.profile.engine in CONTINUUM_ENGINES:
            xargs = continuum_xargs(record)
        hints = self.waiting.take(name, record.identity.key, now) if self._kv_hints else None
        return EngineFields(session_id, xargs, hints)


def continuum_xargs(record: Record) -> tuple[tuple[str, bytes], ...]:
    """Names and JSON values, in this order."""
    identity = record.identity
    tool = last_tool(record.request.prompt)
    named = () if tool is None else (("last_func_call", msgspec.json.encode(tool)),)
    last = b"1" if identity.final else b"0"
    job = engine_session_id(identity.key, identity.session_id)
    return (("job_id", msgspec.json.encode(job)), *named, ("is_last_step", last))


# The tool whose result a request brings


class _Function(msgspec.Struct):
    name: str = ""


class _Call(msgspec.Struct):
    id: str = ""
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    role: str = ""
    tool_call_id: str | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None


_message = msgspec.json.Decoder(_Message)


def last_tool(prompt: Prompt | None) -> str | None:
    """By the name of the call that the last message of a chat answers; ``None``: it answers none, or none that is
    named."""
    if not isinstance(prompt, ChatPrompt) or prompt.api != "chat" or not prompt.messages:
        return None
    last = _read(prompt.messages[-1])
    if last is None or last.role not in ("tool", "function"):
        return None
    name = last.name or _called(prompt.messages, last.tool_call_id)
    return name if name and len(name) <= MAX_TOOL_CHARACTERS else None


def _called(messages: Sequence[msgspec.Raw], call_id: str | None) -> str | None:
    """The name of the call with this id, in the answer that the last results belong to."""
    if not call_id:
        return None
    for raw in reversed(messages[-1 - MAX_TOOL_MESSAGES : -1]):
        message = _read(raw)
        if message is None or message.role == "tool":
            continue
        return next((call.function.name for call in message.tool_calls or () if call.id == call_id), None)
    return None


def _read(raw: msgspec.Raw) -> _Message | None:
    try:
        return _message.decode(raw)
    except UNDECODABLE:
        return None


# Hints that wait for a request


class _Envelope(msgspec.Struct):
    message_id: str
    actions: list[msgspec.Raw]
    protocol_version: str = PROTOCOL_VERSION


class _Command(msgspec.Struct):
    worker: str
    session: SessionKey
    envelope: _Envelope


class _Payload(msgspec.Struct):
    expires_ms: int


class _Action(msgspec.Struct):
    payload: _Payload


@dataclass(slots=True)
class _Waiting:
    message_id: str
    actions: list[tuple[int, bytes]]
    size: int = 0


class WaitingHints:
    """By worker and session, the ones heard of longest ago first; bounded by bytes. ``counts``: actions ``carried``,
    ``expired``, ``dropped`` (over a bound), and commands ``unreadable``."""

    def __init__(self, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self._max_bytes = max_bytes
        self._waiting: OrderedDict[tuple[str, str], _Waiting] = OrderedDict()
        self.size = 0
        self.counts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._waiting)

    def heard(self, payload: bytes, workers: Workers, now: float) -> None:
        """Keep a command's actions, if its worker's front end takes them."""
        try:
            if len(payload) > MAX_COMMAND_BYTES:
                raise BadMessageError(f"{len(payload)} bytes")
            command = from_json(payload, _Command)
            actions = [
                (from_json(bytes(raw), _Action).payload.expires_ms, bytes(raw)) for raw in command.envelope.actions
            ]
        except BadMessageError:
            self.counts["unreadable"] += 1
            return
        worker = workers.get(command.worker)
        if worker is None or TAKES_WITH_REQUESTS not in worker.profile.features or not actions:
            return
        if command.envelope.protocol_version != PROTOCOL_VERSION:
            self.counts["unreadable"] += 1
            return
        key = command.worker, command.session.text()
        waiting = self._waiting.pop(key, None) or _Waiting("", [])
        self.size -= waiting.size
        live = self._live([*waiting.actions, *actions], now)
        self.counts["dropped"] += max(0, len(live) - MAX_ACTIONS)
        waiting.actions = live[-MAX_ACTIONS:]
        waiting.message_id = command.envelope.message_id
        waiting.size = sum(len(raw) for _, raw in waiting.actions) + len(key[0]) + len(key[1])
        self._waiting[key] = waiting
        self.size += waiting.size
        while self.size > self._max_bytes:
            _, oldest = self._waiting.popitem(last=False)
            self.size -= oldest.size
            self.counts["dropped"] += len(oldest.actions)

    def take(self, worker: str, session: SessionKey, now: float) -> bytes | None:
        """The envelope for a request of this session at this worker, once; ``None``: nothing waits."""
        waiting = self._waiting.pop((worker, session.text()), None)
        if waiting is None:
            return None
        self.size -= waiting.size
        live = self._live(waiting.actions, now)
        self.counts["carried"] += len(live)
        if not live:
            return None
        return b'{"protocol_version":"%b","message_id":%b,"actions":[%b]}' % (
            PROTOCOL_VERSION.encode(),
            msgspec.json.encode(waiting.message_id),
            b",".join(raw for _, raw in live),
        )

    def _live(self, actions: list[tuple[int, bytes]], now: float) -> list[tuple[int, bytes]]:
        live = [each for each in actions if each[0] > now * 1000]
        self.counts["expired"] += len(actions) - len(live)
        return live
