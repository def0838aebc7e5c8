"""One data-parallel rank at work: steps its core in real time, publishes its events, tells requests of their tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from load.engine.core import CoreConfig, CoreStats, EngineCore, StepResult
from load.engine.hint_actions import Result
from load.engine.hints import Action
from load.engine.kv_publisher import KvPublisher
from load.engine.requests import EngineRequest
from load.engine.tier_scheduler import PoolPut
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
    """Owns one `EngineCore` and its event stream. `run` is its one task. ``lost_s``: seconds that it was late by and
    could not catch up with: the machine was too slow for the engine. ``on_put``: takes what is to go into the shared
    pool, and the monotonic time when it has been copied."""

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
        self.lost_s = 0.0
        self.on_put: Callable[[PoolPut, float], None] | None = None
        self.core = self._new_core()

    def _new_core(self) -> EngineCore:
        core = EngineCore(self._config, self._profile)
        core.set_clock_rate(self._speed)
        return core

    def now(self) -> float:
        """Seconds of the engine's clock, which runs ``speed`` times as fast as everybody's."""
        return time.monotonic() * self._speed

    def hint(self, action: Action, in_pool: range = range(0)) -> Result:
        """Carry out one action now; what it did to blocks is published, and loads that it began are waited for."""
        self.core.tell_time(self.now())
        result = self.core.hints.carry_out(action, int(time.time() * 1000), in_pool)
        self.flush_events()
        self._put(self.core.take_puts())
        self._work.set()
        return result

    def submit(self, ticket: Ticket) -> None:
        """Queue a request. Raises `EngineError`."""
        self.core.add_request(ticket.request)
        self._tickets[ticket.request.request_id] = ticket
        self._work.set()

    def abort(self, ticket: Ticket) -> bool:
        """Forget a request and free its blocks; ``False`` when it is over already."""
        if self._tickets.pop(ticket.request.request_id, None) is None:
            return False
        here = self.core.abort(ticket.request.request_id)
        if self.core.tiers.tiers:  # what it had computed was copied down: a connector says so without a step
            self.flush_events()
        self._put(self.core.take_puts())
        return here

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
        self.core = self._new_core()
        for ticket in lost.values():
            ticket.lose()
        await self.publisher.restart()

    async def run(self) -> None:
        """Iterate while there is work, wait for it otherwise; ends by being cancelled."""
        due = time.monotonic()
        while True:
            core = self.core
            result = core.step(self.now())
            if result is None:
                await self._wait(core.next_due)
                due = time.monotonic()
                continue
            earliest = time.monotonic() - MOST_LAG_S
            self.lost_s += max(0.0, earliest - due)
            due = max(due, earliest) + result.duration_s / self._speed
            wait_s = due - time.monotonic()
            await asyncio.sleep(wait_s if wait_s >= SHORTEST_SLEEP_S else 0)
            if core is self.core:
                self._deliver(result)

    async def _wait(self, due: float | None) -> None:
        """For work, at most until the engine's clock says ``due``."""
        self._work.clear()
        if due is None:
            await self._work.wait()
            return
        try:
            await asyncio.wait_for(self._work.wait(), max(0.0, due - self.now()) / self._speed)
        except TimeoutError:
            return

    def _put(self, puts: list[PoolPut]) -> None:
        if self.on_put is not None:
            for put in puts:
                self.on_put(put, put.due / self._speed)

    def _deliver(self, result: StepResult) -> None:
        now = time.monotonic()
        for request_id, cached in result.admitted:
            ticket = self._tickets.get(request_id)
            if ticket is not None and ticket.admitted_s is None:
                ticket.admitted_s = now - result.duration_s / self._speed
                ticket.cached_tokens = cached
        self._put(result.puts)
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
