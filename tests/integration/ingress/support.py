"""A small system around one ingress: nats-server, engines and admission are real processes; the ingress runs in the
test's own process, so that a test sees its tables. The engines' heartbeats come from here too, so that a test can
make a worker leave or fall silent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from bus import subjects
from bus.facts import FactNumbers
from bus.interface import Bus, BusMessage
from bus.nats import NatsBus, connect
from bus.tasks import Tasks
from schemas.admit import AdmitReply, AdmitRequest
from schemas.base import from_json, from_msgpack, to_json, to_msgpack
from schemas.trace import RequestMetrics, TraceRow
from schemas.worker import Engine, WorkerHealth, WorkerProfile, WorkerState
from services.ingress.config import IngressSettings
from services.ingress.shell.service import IngressService
from tests.support.nats import NatsServer, running_bus
from tests.support.processes import HelperProcess, python_process, settings_arguments
from web.client import Answer, AnswerStream, HttpClient, Timeouts
from web.server import HttpServer, Request, Responder

MODEL = "sim-8b"
ASSETS = Path(__file__).resolve().parents[3] / "load" / "engine" / "assets"
JSON = [(b"content-type", b"application/json")]
PATIENCE = {"ingress_lost_s": 30.0, "worker_lost_s": 30.0, "grant_ttl_s": 60.0}
"""A front door and heartbeats in the test's own process are silent while the machine has no time for it, and nobody is
lost: admission would refuse with `no_worker`."""


async def until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for a state that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the state is another object's, without an event
            await asyncio.sleep(0.005)


@dataclass
class SimulatedEngine:
    """One engine process and how to make it misbehave."""

    worker: str
    url: str
    process: HelperProcess
    client: HttpClient

    async def misbehave(self, **flags: object) -> None:
        answer = await self.client.fetch("POST", f"{self.url}/sim/misbehave", JSON, json.dumps(flags).encode())
        assert answer.status == 200, answer.body

    async def behave(self) -> None:
        await self.misbehave(
            die_after_chunks=None, die_requests=-1, stall="none", stall_requests=-1, error_requests=0, usage="normal"
        )

    async def page(self) -> dict[str, Any]:
        answer = await self.client.fetch("GET", f"{self.url}/sim/served", [], b"")
        page: dict[str, Any] = json.loads(answer.body)
        return page

    async def counts(self) -> dict[str, int]:
        counts: dict[str, int] = (await self.page())["counts"]
        return counts


class Heartbeats:
    """What bridges say about their engines. ``silent``: workers that say nothing; ``engine``, ``features``: of all."""

    def __init__(self, bus: Bus, urls: dict[str, str], model: str = MODEL, ranks: int = 1) -> None:
        self._bus = bus
        self._urls = urls
        self._model = model
        self._ranks = ranks
        self._numbers = FactNumbers("bridges", int(time.time() * 1000))
        self.silent: set[str] = set()
        self.engine: Engine = "simulated"
        self.features: tuple[str, ...] = ()

    def say(self, worker: str, health: WorkerHealth = "ready") -> None:
        """One heartbeat now."""
        profile = WorkerProfile(
            url=self._urls[worker],
            model=self._model,
            engine=self.engine,
            block_size=16,
            ranks=self._ranks,
            features=self.features,
        )
        state = WorkerState(
            **self._numbers.stamp("worker.state", time.time()),
            worker=worker,
            incarnation="1",
            health=health,
            profile=profile,
        )
        self._bus.publish(subjects.worker_state(worker), to_json(state))

    async def run(self) -> None:
        while True:
            for worker in self._urls.keys() - self.silent:
                self.say(worker)
            await asyncio.sleep(0.05)


@dataclass
class Rows:
    """Every trace row of the stream, as it comes."""

    rows: list[TraceRow] = field(default_factory=list)

    def of(self, request_id: str) -> list[RequestMetrics]:
        return [row.request for row in self.rows if row.request is not None and row.request.request_id == request_id]

    def named(self, x_request_ids: Collection[str]) -> list[RequestMetrics]:
        """Rows of the requests that clients named so."""
        requests = [row.request for row in self.rows if row.request is not None]
        return [request for request in requests if request.x_request_id in x_request_ids]

    async def one(self, request_id: str, timeout_s: float = 30.0) -> RequestMetrics:
        """The row of this request; exactly one."""
        await until(lambda: bool(self.of(request_id)), timeout_s)
        found = self.of(request_id)
        assert len(found) == 1
        return found[0]

    async def by_x_request_id(self, x_request_id: str, timeout_s: float = 30.0) -> RequestMetrics:
        """The row of the request that a client named so."""

        await until(lambda: bool(self.named([x_request_id])), timeout_s)
        (found,) = self.named([x_request_id])
        return found

    async def follow(self, bus: Bus) -> None:
        async with aclosing(bus.tail(f"{subjects.ROOT}.trace.request_end.>", from_start=True)) as tail:
            async for stored in tail:
                self.rows.append(from_json(stored.payload, TraceRow))


@dataclass
class Door:
    """A running ingress and a client before it."""

    service: IngressService
    client: HttpClient
    tasks: Tasks
    bus: NatsBus

    @property
    def url(self) -> str:
        return self.service.url

    async def post(self, body: dict[str, Any] | bytes, path: str = "/v1/chat/completions", **headers: str) -> Answer:
        return await self.client.fetch(
            "POST", self.url + path, _headers(headers), _body(body), Timeouts(first_byte_s=20, total_s=30)
        )

    async def stream(
        self, body: dict[str, Any] | bytes, path: str = "/v1/chat/completions", **headers: str
    ) -> AnswerStream:
        return await self.client.open(
            "POST", self.url + path, _headers(headers), _body(body), Timeouts(first_byte_s=20, total_s=30)
        )

    async def get(self, path: str) -> Answer:
        return await self.client.fetch("GET", self.url + path, [], b"", Timeouts(total_s=10))


def _headers(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [*JSON, *((name.replace("_", "-").encode(), value.encode()) for name, value in headers.items())]


def _body(body: dict[str, Any] | bytes) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


LONG = "many words " * 800
"""A prompt that costs more to compute elsewhere than to queue behind a request or two: its session stays put."""


def chat(text: str = "hello", **members: Any) -> dict[str, Any]:
    """A chat body for `MODEL`."""
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8, **members}


@asynccontextmanager
async def open_door(nats_url: str, *, ready: bool = True, **settings: Any) -> AsyncIterator[Door]:
    """An ingress in this process; ``ready``: once some worker is known."""
    known: dict[str, Any] = {"instance": "ingress-test", "port": 0, "stop_timeout_s": 5.0, "nats_url": nats_url}
    configured = IngressSettings(**{**known, **settings})
    bus = await connect(nats_url, name=configured.instance, timeout_s=30)
    tasks = Tasks()
    service = IngressService(configured, CollectorRegistry())
    client = HttpClient()
    await service.start(bus, tasks)
    try:
        if ready:
            await until(lambda: service.not_ready() is None)
        yield Door(service, client, tasks, bus)
    finally:
        await client.close()
        await service.stop(configured.stop_timeout_s)
        assert not tasks.failed.done(), tasks.failed.result()
        await tasks.stop()
        await bus.close()


Script = Callable[[Request, Responder], Awaitable[None]]


async def answer_ok(request: Request, responder: Responder) -> None:
    """A short completion."""
    body = b'{"id":"x","choices":[{"index":0,"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}],'
    body += b'"usage":{"prompt_tokens":3,"completion_tokens":1,"total_tokens":4}}'
    responder.send(200, JSON, body)


class ScriptedEngine:
    """An engine that does what its ``script`` says and remembers every request."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.gone = 0
        self.script: Script = answer_ok
        self.tokenize: Callable[[Request], None] | None = None
        self._server = HttpServer(self._handle)

    async def _handle(self, request: Request, responder: Responder) -> None:
        if request.path == "/tokenize":
            if self.tokenize is not None:
                self.tokenize(request)
            responder.send(404, [], b"")
            return
        self.seen.append(request)
        await self.script(request, responder)
        self.gone += responder.gone.is_set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        await self._server.start("127.0.0.1", 0)

    async def close(self) -> None:
        await self._server.close()


@dataclass
class Stage:
    """A bus, scripted engines that are announced on it, and nobody else: no admission."""

    nats: NatsServer
    bus: NatsBus
    rows: Rows
    engines: dict[str, ScriptedEngine]
    heartbeats: Heartbeats

    def door(self, **settings: Any) -> AbstractAsyncContextManager[Door]:
        """An ingress in this process."""
        return open_door(self.nats.url, **settings)

    @asynccontextmanager
    async def leader(self, answer: Callable[[AdmitRequest], list[AdmitReply]]) -> AsyncIterator[list[AdmitRequest]]:
        """Somebody who answers admission's questions with ``answer``; yields the questions."""
        asked: list[AdmitRequest] = []

        def on_question(message: BusMessage) -> None:
            question = from_msgpack(message.payload, AdmitRequest)
            asked.append(question)
            for reply in answer(question):
                self.bus.publish(message.reply, to_msgpack(reply))

        subscription = await self.bus.subscribe(f"{subjects.ROOT}.admit.*", on_question)
        await self.bus.flush()
        try:
            yield asked
        finally:
            await subscription.unsubscribe()


@asynccontextmanager
async def running_stage(directory: Path, engines: int = 2) -> AsyncIterator[Stage]:
    """nats-server and scripted engines."""
    async with AsyncExitStack() as stack:
        nats, bus = await stack.enter_async_context(running_bus(directory))
        tasks = Tasks()
        stack.push_async_callback(tasks.stop)
        known = {f"worker-{number}": ScriptedEngine() for number in range(engines)}
        for engine in known.values():
            await engine.start()
            stack.push_async_callback(engine.close)
        heartbeats = Heartbeats(bus, {name: engine.url for name, engine in known.items()})
        tasks.start("heartbeats", heartbeats.run())
        rows = Rows()
        tasks.start("rows", rows.follow(bus))
        yield Stage(nats, bus, rows, known, heartbeats)


@dataclass
class System:
    """Everything but the ingress."""

    nats: NatsServer
    bus: NatsBus
    rows: Rows
    engines: dict[str, SimulatedEngine]
    heartbeats: Heartbeats

    def door(self, **settings: Any) -> AbstractAsyncContextManager[Door]:
        """An ingress in this process, ready; admission decides, however long it takes."""
        return open_door(self.nats.url, **{"admit_idle_s": 15.0, **settings})

    async def engine_of(self, session: str, door: Door) -> SimulatedEngine:
        """The engine on which a session lands: by asking once."""
        answer = await door.post(chat(LONG), x_tidegate_session_id=session)
        assert answer.status == 200, answer.body
        row = await self.rows.one((answer.header("x-request-id") or b"").decode())
        assert row.worker is not None
        return self.engines[row.worker.worker]


@asynccontextmanager
async def running_system(directory: Path, engines: int = 2, **admission_settings: object) -> AsyncIterator[System]:
    """nats-server, engines with their bridges, and admission with these settings."""
    async with AsyncExitStack() as stack:
        nats, bus = await stack.enter_async_context(running_bus(directory))
        client = HttpClient()
        stack.push_async_callback(client.close)
        admission = await stack.enter_async_context(
            python_process(
                "services.admission",
                *settings_arguments({"nats_url": nats.url, "warmup_s": 0.2, **PATIENCE, **admission_settings}),
                directory=directory,
                name="admission",
            )
        )
        known = {}
        for number in range(engines):
            known[f"worker-{number}"] = await _engine(stack, directory, f"worker-{number}", client)
        rows = Rows()
        tasks = Tasks()
        stack.push_async_callback(tasks.stop)
        heartbeats = Heartbeats(bus, {name: engine.url for name, engine in known.items()})
        tasks.start("heartbeats", heartbeats.run())
        await admission.wait_said("leadership")
        tasks.start("rows", rows.follow(bus))
        yield System(nats, bus, rows, known, heartbeats)


@asynccontextmanager
async def running_bridged(
    directory: Path,
    engines: int = 2,
    *,
    front: Callable[[str], Awaitable[str]] | None = None,
    bridge_settings: Mapping[str, object] | None = None,
    **engine: object,
) -> AsyncIterator[System]:
    """nats-server, engines with real bridges, and admission: what an engine has is known from its own events.

    ``front``: makes the URL at which an engine is reached from its own. ``bridge_settings``: more of the bridges'.
    ``engine``: more of the engines'.
    """
    async with AsyncExitStack() as stack:
        nats, bus = await stack.enter_async_context(running_bus(directory))
        client = HttpClient()
        stack.push_async_callback(client.close)
        settings: dict[str, object] = {"nats_url": nats.url, "warmup_s": 0.2, **PATIENCE}
        admission = await stack.enter_async_context(
            python_process("services.admission", *settings_arguments(settings), directory=directory, name="admission")
        )
        known = {}
        for worker in (f"worker-{number}" for number in range(engines)):
            options = settings_arguments({"model": MODEL, "profile": "instant", "instance": worker, **engine})
            process = await stack.enter_async_context(
                python_process("load.engine", *options, directory=directory, name=worker)
            )
            ready = json.loads(await process.wait_line())
            known[worker] = SimulatedEngine(worker, ready["url"], process, client)
            bridge = {
                "nats_url": nats.url,
                "worker": worker,
                "engine_url": ready["url"] if front is None else await front(ready["url"]),
                "kv_events": json.dumps(ready["kv_events"]),
                "kv_replay": json.dumps(ready["replay"]),
                "scrape_interval_s": 0.2,
                "heartbeat_interval_s": 0.2,
                **(bridge_settings or {}),
            }
            await stack.enter_async_context(
                python_process("services.bridge", *settings_arguments(bridge), directory=directory, name=f"b-{worker}")
            )
        rows = Rows()
        tasks = Tasks()
        stack.push_async_callback(tasks.stop)
        await admission.wait_said("leadership")
        tasks.start("rows", rows.follow(bus))
        yield System(nats, bus, rows, known, Heartbeats(bus, {name: each.url for name, each in known.items()}))


async def _engine(stack: AsyncExitStack, directory: Path, worker: str, client: HttpClient) -> SimulatedEngine:
    process = await stack.enter_async_context(
        python_process(
            "load.engine",
            *settings_arguments({"model": MODEL, "profile": "instant", "instance": worker}),
            directory=directory,
            name=worker,
        )
    )
    ready = json.loads(await process.wait_line())
    return SimulatedEngine(worker, ready["url"], process, client)
