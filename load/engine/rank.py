"""One data-parallel rank at work: steps its core in real time, publishes its events, tells requests of their tokens."""

from __future__ import annotations

import asyncio
import time

from load.engine.core import CoreConfig, CoreStats, EngineCore, StepResult
from load.engine.kv_publisher import KvPublisher
from load.engine.requests import EngineRequest
from load.engine.timing import Profile

SHORTEST_SLEEP_S = 0.001
"""Timers of the loop tick in milliseconds: shorter waits are added up and slept together."""
MOST_LAG_S = 0.05
"""An iteration that ends late is caught up with, but never by more than this."""


class Ticket:
    """What the engine owes one request: tokens produced so far, and how it ended. ``name``: the client's request id.

    ``lost``: the engine restarted under it. Times are monotonic seconds.
    """

    __slots__ = (
        "_every",
        "_news",
        "_seen",
        "admitted_s",
        "cached_tokens",
        "finished",
        "first_token_s",
        "gone",
        "lost",
        "name",
        "produced",
        "rank",
        "request",
        "started_s",
    )

    def __init__(self, request: EngineRequest, rank: int, name: str, every: int = 1) -> None:
        self.request = request
        self.name = name
        self.rank = rank
        self.produced = 0
        self.finished = False
        self.lost = False
        self.gone = False
        self.cached_tokens = 0
        self.started_s = time.monotonic()
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self._every = every
        self._seen = 0
        self._news = asyncio.Event()

    @property
    def over(self) -> bool:
        return self.finished or self.lost or self.gone

    async def progress(self) -> tuple[int, int]:
        """Wait for ``every`` more tokens, or the end; the half-open range of tokens that are new."""
        while not self.over and self.produced - self._seen < self._every:
            self._news.clear()
            await self._news.wait()
        start, self._seen = self._seen, self.produced
        return start, self._seen

    def leave(self) -> None:
        """The client went away."""
        self.gone = True
        self._news.set()

    # The rank's side

    def lose(self) -> None:
        self.lost = True
        self._news.set()

    def advance(self, produced: int, finished: bool) -> None:
        self.produced = produced
        self.finished = finished
        if finished or produced - self._seen >= self._every:
            self._news.set()


class Rank:
    """Owns one `EngineCore` and its event stream. `run` is its one task."""

    def __init__(
        self, number: int, config: CoreConfig, profile: Profile, publisher: KvPublisher, *, speed: float = 1.0
    ) -> None:
        self.number = number
        self.publisher = publisher
        self._config = config
        self._profile = profile
        self._speed = speed
        self._tickets: dict[str, Ticket] = {}
        self._work = asyncio.Event()
        self.core = EngineCore(config, profile)

    def submit(self, ticket: Ticket) -> None:
        """Queue a request. Raises `EngineError`."""
        self.core.add_request(ticket.request)
        self._tickets[ticket.request.request_id] = ticket
        self._work.set()

    def abort(self, ticket: Ticket) -> bool:
        """Forget a request and free its blocks; ``False`` when it is over already."""
        if self._tickets.pop(ticket.request.request_id, None) is None:
            return False
        return self.core.abort(ticket.request.request_id)

    def stats(self) -> CoreStats:
        return self.core.stats()

    @property
    def load(self) -> int:
        """What the choice of a rank goes by: a waiting request weighs four running ones (as vLLM's own balancer)."""
        stats = self.core.stats()
        return 4 * stats.waiting + stats.running

    def flush_events(self) -> None:
        """Publish what is pending now, without waiting for a step (as SGLang does)."""
        events = self.core.cache.take_events()
        if events:
            self.publisher.publish(events, time.time())

    async def restart(self) -> None:
        """Die and come back: every request is lost, the cache is empty, the stream begins at 0."""
        lost, self._tickets = self._tickets, {}
        self.core = EngineCore(self._config, self._profile)
        for ticket in lost.values():
            ticket.lose()
        await self.publisher.restart()

    async def run(self) -> None:
        """Iterate while there is work, wait for it otherwise; ends by being cancelled."""
        due = time.monotonic()
        while True:
            core = self.core
            result = core.step()
            if result is None:
                self._work.clear()
                await self._work.wait()
                due = time.monotonic()
                continue
            due = max(due, time.monotonic() - MOST_LAG_S) + result.duration_s / self._speed
            wait_s = due - time.monotonic()
            await asyncio.sleep(wait_s if wait_s >= SHORTEST_SLEEP_S else 0)
            if core is self.core:
                self._deliver(result)

    def _deliver(self, result: StepResult) -> None:
        now = time.monotonic()
        for request_id, cached in result.admitted:
            ticket = self._tickets.get(request_id)
            if ticket is not None and ticket.admitted_s is None:
                ticket.admitted_s = now - result.duration_s / self._speed
                ticket.cached_tokens = cached
        if result.events:
            self.publisher.publish(result.events, time.time())
        for output in result.outputs:
            finished = output.finish_reason is not None
            ticket = self._tickets.pop(output.request_id, None) if finished else self._tickets.get(output.request_id)
            if ticket is None:
                continue
            if ticket.first_token_s is None:
                ticket.first_token_s = now
            ticket.advance(output.produced, finished)
