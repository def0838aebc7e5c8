"""Who runs in the next iteration: continuous batching with a token budget, chunked prefill and recompute preemption.

The order of vLLM's scheduler: running requests first, then waiting ones, until tokens, seats or blocks are used up.
A waiting request needs room for its first chunk only. When a running one finds no block, the youngest running one
(or with priorities: the one of worst priority) loses its blocks, goes back to the head of the queue and is recomputed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sized
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

SchedulingPolicy = Literal["fcfs", "priority"]


class Schedulable(Protocol):
    """What the scheduler knows of a request: tokens it has and has computed, its rank, its marks."""

    prompt_tokens: int
    cached_tokens: int | None
    created_tokens: int
    preemptions: int
    priority: int
    arrival: int

    @property
    def length(self) -> int: ...
    @property
    def remaining(self) -> int: ...


Request = TypeVar("Request", bound=Schedulable)
Held = TypeVar("Held", bound=Schedulable, contravariant=True)
Hits = TypeVar("Hits", bound=Sized)


class Cache(Protocol[Held, Hits]):
    """The KV cache that the scheduler fills: `load.engine.kv_cache` block by block, `load.sim` span by span."""

    block_size: int

    def lookup(self, request: Held) -> Hits: ...
    def allocate(self, request: Held, new_tokens: int, hits: Hits | None = None) -> bool: ...
    def free(self, request: Held) -> None: ...


class WaitingQueue(Protocol[Request]):
    """Requests that hold no blocks, in the order in which they will be tried."""

    def __len__(self) -> int: ...
    def add(self, request: Request) -> None: ...
    def put_back(self, request: Request) -> None: ...
    def head(self) -> Request: ...
    def pop(self) -> Request: ...
    def remove(self, request: Request) -> bool: ...


class ArrivalQueue(Generic[Request]):
    """First come, first served; a preempted request goes to the head."""

    def __init__(self) -> None:
        self._queue: deque[Request] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Request) -> None:
        self._queue.append(request)

    def put_back(self, request: Request) -> None:
        self._queue.appendleft(request)

    def head(self) -> Request:
        return self._queue[0]

    def pop(self) -> Request:
        return self._queue.popleft()

    def remove(self, request: Request) -> bool:
        if request not in self._queue:
            return False
        self._queue.remove(request)
        return True


class PriorityQueue(Generic[Request]):
    """Lowest (priority, arrival) first; a preempted request finds its place again by the same key."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.priority, request.arrival, request))

    put_back = add

    def head(self) -> Request:
        return self._heap[0][2]

    def pop(self) -> Request:
        return heapq.heappop(self._heap)[2]

    def remove(self, request: Request) -> bool:
        kept = [entry for entry in self._heap if entry[2] is not request]
        if len(kept) == len(self._heap):
            return False
        heapq.heapify(kept)
        self._heap = kept
        return True


@dataclass(slots=True)
class Batch(Generic[Request]):
    """One iteration: tokens per request in order, who came in, who was thrown out."""

    tokens: dict[Request, int] = field(default_factory=dict)
    admitted: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler(Generic[Request, Hits]):
    """Queues and the choice of each batch. Owns no time and produces no tokens."""

    def __init__(
        self, cache: Cache[Request, Hits], *, token_budget: int, max_num_seqs: int, policy: SchedulingPolicy
    ) -> None:
        self.cache = cache
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.policy = policy
        self.running: list[Request] = []
        self.waiting = self.make_queue()
        self.prefix_queries = 0
        self.prefix_hits = 0

    def make_queue(self) -> WaitingQueue[Request]:
        return PriorityQueue() if self.policy == "priority" else ArrivalQueue()

    def add(self, request: Request) -> None:
        self.waiting.add(request)

    def remove(self, request: Request) -> None:
        """Take ``request`` out wherever it is and free its blocks."""
        if request in self.running:
            self.running.remove(request)
            self.cache.free(request)
        else:
            self.waiting.remove(request)

    def preempt_all(self) -> list[Request]:
        """Send every running request back to the queue, oldest at the head."""
        victims = self.running[::-1]
        for victim in victims:
            self._preempt(victim)
        return victims

    def next_batch(self) -> Batch[Request]:
        """Choose the next iteration and take the blocks that it needs."""
        batch: Batch[Request] = Batch()
        budget = self._schedule_running(batch, self.token_budget)
        if not batch.preempted:
            self._schedule_waiting(batch, budget)
        return batch

    def _schedule_running(self, batch: Batch[Request], budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            count = min(request.remaining, budget)
            while not self.cache.allocate(request, count):
                if self.make_room(request, runs=True):
                    continue
                victim = self._victim()
                budget += batch.tokens.pop(victim, 0)
                if self.running.index(victim) < index:
                    index -= 1
                self._preempt(victim)
                batch.preempted.append(victim)
                if victim is request:
                    return budget
            batch.tokens[request] = count
            budget -= count
            index += 1
        return budget

    @property
    def in_flight(self) -> int:
        """Requests that left the queue."""
        return len(self.running)

    def _schedule_waiting(self, batch: Batch[Request], budget: int) -> None:
        while self.waiting and budget > 0 and self.in_flight < self.max_num_seqs:
            taken = self._take_next(batch, budget)
            if taken is None:
                return
            budget -= taken

    def _take_next(self, batch: Batch[Request], budget: int) -> int | None:
        """The head of the queue comes in, if there is room. Returns the tokens of ``budget`` that it takes; 0 where it
        is to be looked at again; ``None`` where nobody can come in."""
        request = self.waiting.head()
        hits = self.cache.lookup(request)
        cached = len(hits) * self.cache.block_size
        count = min(request.length - cached, budget)
        if not self.cache.allocate(request, count, hits):
            return 0 if self.make_room(request, runs=False) else None
        self.waiting.pop()
        self.running.append(request)
        batch.tokens[request] = count
        batch.admitted.append(request)
        self._found(request, cached)
        return count

    def _found(self, request: Request, cached: int) -> None:
        """The request left the queue, and so many of its tokens need not be computed."""
        if request.cached_tokens is None:
            request.cached_tokens = cached
            full = request.prompt_tokens - request.prompt_tokens % self.cache.block_size
            request.created_tokens = max(0, full - cached)
            self.prefix_queries += request.prompt_tokens
            self.prefix_hits += cached

    def make_room(self, request: Request, *, runs: bool) -> bool:
        """Whether something else gave way for ``request``, which runs or waits and found no room. Nothing does here."""
        del request, runs
        return False

    def _victim(self) -> Request:
        if self.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival))
        return self.running[-1]

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self.cache.free(request)
        request.preemptions += 1
        self.waiting.put_back(request)
