"""The engine of one process: its ranks, tokenizer, flags and ledgers. Everything but HTTP."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import zmq

from bus.errors import SettingsError
from bus.tasks import Tasks
from kvcore import local_hashes, seed_of
from kvcore.hashing import chain_of
from load.engine.config import EngineSettings
from load.engine.hint_actions import Result
from load.engine.hints import PROTOCOL_VERSION, Action, Envelope, session_of
from load.engine.kv_cache import BlockContent
from load.engine.kv_events import AllBlocksCleared
from load.engine.kv_publisher import KvPublisher
from load.engine.metrics import EngineMetrics
from load.engine.outputs import Speaker
from load.engine.pool_pages import PoolPages
from load.engine.rank import Rank, Ticket
from load.engine.shared_pool import SharedPool
from load.engine.tokens import Tokenizer

INLINE_CHARS = 16_384
"""New text up to this length is tokenised on the loop (about 2 ms), longer text in a thread."""
LEDGER_ENTRIES = 100_000


class Ledger:
    """Which requests began, ended well, were left by their client, or were lost by the engine. Bounded."""

    def __init__(self) -> None:
        self.started: deque[str] = deque(maxlen=LEDGER_ENTRIES)
        self.served: deque[str] = deque(maxlen=LEDGER_ENTRIES)
        self.counts = {"started": 0, "served": 0, "disconnected": 0, "lost": 0, "refused": 0}

    def start(self, request_id: str) -> None:
        self.started.append(request_id)
        self.counts["started"] += 1

    def serve(self, request_id: str) -> None:
        self.served.append(request_id)
        self.counts["served"] += 1

    def count(self, what: str) -> None:
        self.counts[what] += 1

    def page(self) -> dict[str, Any]:
        return {"started": list(self.started), "served": list(self.served), "counts": dict(self.counts)}


class Engine:
    """Ranks and what they share. `start`, then `submit` tickets; `stop`."""

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.flags = msgspec.structs.replace(settings.misbehave)
        self.tokenizer = Tokenizer()
        self.speaker = Speaker(self.tokenizer, mean_tokens=settings.mean_output_tokens, seed=settings.seed)
        self.ledger = Ledger()
        self.ranks: list[Rank] = []
        self.stopping = asyncio.Event()
        self.max_model_len = settings.sizes.max_model_len
        self.metrics = self._new_metrics()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._threads = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenize")
        self._next_rank = 0
        self.pages = PoolPages(settings.pool_layout())
        self.pool: SharedPool | None = None

    def _new_metrics(self) -> EngineMetrics:
        return EngineMetrics(self.settings, lambda: [rank.stats() for rank in self.ranks], self.flags, time.time())

    def start(self, tasks: Tasks) -> None:
        """Bind the event sockets and start the ranks. Raises `SettingsError` when an endpoint cannot be had."""
        settings = self.settings
        if settings.pool_url:
            self.pool = SharedPool(
                settings.pool_url,
                settings.pool_name or settings.instance or "engine-1",
                settings.pool_capacity_bytes,
                self.pages,
                settings.pool_threshold_tokens,
            )
            tasks.start("pool", self.pool.run())
        for number in range(settings.ranks):
            publisher = KvPublisher(
                self._context, settings.publisher_config(number), settings.encoder(number), self.flags
            )
            try:
                publisher.open()
            except zmq.ZMQError as error:
                where = f"{publisher.endpoint} or {publisher.replay_endpoint}"
                problem = "is taken" if error.errno == zmq.EADDRINUSE else f"cannot be bound: {error.strerror}"
                raise SettingsError("kv_events_endpoint", f"{where} {problem}") from error
            rank = Rank(number, settings.core_config(), settings.timing, publisher, speed=settings.speed)
            self.ranks.append(rank)
            if self.pool is not None:
                rank.on_put = self.pool.put
            self._announce_start(rank)
            tasks.start(f"rank-{number}", rank.run())

    def _announce_start(self, rank: Rank) -> None:
        """SGLang's stream begins with AllBlocksCleared, vLLM's with nothing."""
        if self.settings.event_form == "sglang":
            rank.publisher.publish([AllBlocksCleared()], time.time())

    def stop(self) -> None:
        """Close sockets and threads; the ranks' tasks belong to whoever started them."""
        self.stopping.set()
        for rank in self.ranks:
            rank.publisher.close()
        self._context.term()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def restart(self) -> None:
        """As if the process had died and come back: requests lost, caches empty, counters and sequences at 0."""
        self.metrics = self._new_metrics()
        for rank in self.ranks:
            await rank.restart()
            self._announce_start(rank)

    # Requests

    def choose_rank(self, pinned: int | None) -> Rank:
        """The pinned rank, else the least loaded one; ties in turn."""
        if pinned is not None:
            return self.ranks[pinned]
        count = len(self.ranks)
        order = [self.ranks[(self._next_rank + offset) % count] for offset in range(count)]
        chosen = min(order, key=lambda rank: rank.load)
        self._next_rank = (chosen.number + 1) % count
        return chosen

    def submit(self, ticket: Ticket) -> None:
        """Queue a ticket at its rank. Raises `EngineError`."""
        self.ranks[ticket.rank].submit(ticket)
        self.ledger.start(ticket.name)

    async def look_into_pool(self, ticket: Ticket) -> None:
        """Ask the shared pool, if there is one, for what is missing here of a request's prefix."""
        if self.pool is None or not self.settings.prefix_caching:
            return
        request = ticket.request
        request.in_pool = await self.pool.find(request, self.ranks[ticket.rank].core.local_reach(request))

    async def take_hints(self, envelope: Envelope, rank: int | None) -> list[Result]:
        """Carry out an envelope's actions in order. ``rank`` ``None``: each at the rank that knows its session."""
        if envelope.protocol_version != PROTOCOL_VERSION:
            reason = "protocol_version"
            return [Result(action.action_id, action.action_type, "unsupported", reason) for action in envelope.actions]
        results = []
        for action in envelope.actions:
            at = self.ranks[rank] if rank is not None else self._rank_of(action)
            in_pool = range(0)
            wanted = at.core.hints.wanted_contents(action)
            if wanted and self.pool is not None:
                in_pool = await self.pool.find_contents(wanted, 0)
            results.append(at.hint(action, in_pool))
        return results

    def _rank_of(self, action: Action) -> Rank:
        session_id = session_of(action)
        knowing = [rank for rank in self.ranks if session_id is not None and rank.core.hints.knows(session_id)]
        return (knowing or self.ranks)[0]

    def close_ticket(self, ticket: Ticket, reason: str) -> None:
        """A request is over (``reason``: stop, length, tool_calls, abort): free what it holds, count it."""
        self.ranks[ticket.rank].abort(ticket)
        now = time.monotonic()
        started = ticket.started_s
        self.metrics.ended(
            ticket.rank,
            reason,
            queue_s=None if ticket.admitted_s is None else max(0.0, ticket.admitted_s - started),
            ttft_s=None if ticket.first_token_s is None else ticket.first_token_s - started,
            total_s=now - started,
            tokens=ticket.produced,
        )

    async def tokenize(self, text: str) -> array[int]:
        """Token ids of ``text``, off the loop when much of it is new."""
        tokenizer = self.tokenizer
        segments = tokenizer.segments(text)
        known = tokenizer.known(segments)
        missing = [segment for segment in dict.fromkeys(segments) if segment not in known]
        if sum(map(len, missing)) <= INLINE_CHARS:
            return tokenizer.join(segments, known, missing, tokenizer.encode_segments(missing))
        loop = asyncio.get_running_loop()
        encoded = await loop.run_in_executor(self._threads, tokenizer.encode_segments, missing)
        return tokenizer.join(segments, known, missing, encoded)

    def reset_prefix_cache(self, *, reset_running: bool) -> bool:
        """All ranks or, while one is busy, those that can. vLLM publishes it with the next step, SGLang at once."""
        done = [rank.core.reset_prefix_cache(reset_running=reset_running) for rank in self.ranks]
        if self.settings.event_form == "sglang":
            for rank in self.ranks:
                rank.flush_events()
        return all(done)

    # What it says of itself

    def event_sources(self) -> dict[str, Any]:
        """``GET /kv_event_sources`` (vLLM 0.31+): resolved endpoints by rank."""
        return {
            str(rank.number): {
                "enable_kv_cache_events": self.settings.kv_events,
                "publisher": "zmq",
                "endpoint": rank.publisher.endpoint,
                "replay_endpoint": rank.publisher.replay_endpoint,
                "buffer_steps": rank.publisher.config.buffer_steps,
                "hwm": rank.publisher.config.hwm,
                "max_queue_size": rank.publisher.config.hwm,
                "topic": rank.publisher.config.topic,
            }
            for rank in self.ranks
        }

    def resident(self) -> dict[str, Any]:
        """For tests: every resident block of every rank, by our chain hash and by the engine's, in the same order."""
        pages = {}
        for rank in self.ranks:
            blocks = list(rank.core.cache.resident())
            below = {tier.name: list(tier.resident()) for tier in rank.core.tiers.tiers}
            encoder = self.settings.encoder(rank.number)
            pages[str(rank.number)] = {
                "seq": rank.publisher.seq,
                "chain_hashes": [f"{value:016x}" for value in own_chain(blocks, self.settings.block_size)],
                "engine_hashes": [_hex(encoder.hash(block.digest)) for block in blocks],
                "tiers": {
                    name: [f"{value:016x}" for value in own_chain(contents, self.settings.block_size)]
                    for name, contents in below.items()
                },
            }
        return {"ranks": pages}


def own_chain(blocks: Sequence[BlockContent], block_size: int) -> list[int]:
    """This project's chain hash (`kvcore.hashing`) of each block, from tokens and typed extra keys alone."""
    chain: dict[bytes, int] = {}
    for block in blocks:
        missing = []
        node: BlockContent | None = block
        while node is not None and node.digest not in chain:
            missing.append(node)
            node = node.before
        for part in reversed(missing):
            seed = seed_of(part.extra.lora_name, part.extra.cache_salt)
            local = local_hashes(part.tokens, block_size, seed=seed)
            chain[part.digest] = chain_of(local, None if part.before is None else chain[part.before.digest])[0]
    return [chain[block.digest] for block in blocks]


def _hex(value: int | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else f"{value & (1 << 64) - 1:016x}"
