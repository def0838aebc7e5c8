"""The engine as a client of a shared pool: asks what it has, puts pages into it, and lives as a client of it.

All over HTTP (`load.pool.client`). A pool that does not answer costs its answers and nothing else: requests go on
without it, and what was to be put is counted as lost.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Sequence

from bus.log import EventLog
from load.engine.block_hash import TOKEN_BYTES
from load.engine.kv_cache import BlockContent
from load.engine.pool_pages import PoolPages, reach_of
from load.engine.requests import EngineRequest
from load.engine.tier_scheduler import PoolPut
from load.pool.client import PoolClient, PoolUnreachableError

QUEUED_PUTS = 4096
"""Puts that wait; more are dropped, the oldest first."""
PING_S = 1.0
KEYS_AT_ONCE = 4096

log = EventLog(__name__)


class SharedPool:
    """One engine's side of the pool. `run` is its one task. ``counts``: of what went well and what did not."""

    def __init__(self, url: str, name: str, capacity_bytes: int, pages: PoolPages, threshold_tokens: int) -> None:
        self.pages = pages
        self.counts: Counter[str] = Counter()
        self._client = PoolClient(url, timeout_s=2.0)
        self._name = name
        self._capacity_bytes = capacity_bytes
        self._threshold_tokens = threshold_tokens
        self._puts: deque[tuple[float, PoolPut]] = deque()
        self._work = asyncio.Event()
        self._reachable = True

    @property
    def queued(self) -> int:
        return len(self._puts)

    def put(self, put: PoolPut, at: float) -> None:
        """Put these pages when the monotonic time ``at`` has come."""
        self._puts.append((at, put))
        if len(self._puts) > QUEUED_PUTS:
            self._puts.popleft()
            self.counts["puts_dropped"] += 1
        self._work.set()

    async def run(self) -> None:
        """Mount, ping, and put what is queued; ends by being cancelled."""
        try:
            await self._mount()
            ping_at = time.monotonic() + PING_S
            while True:
                now = time.monotonic()
                if now >= ping_at:
                    await self._ping()
                    ping_at = now + PING_S
                while self._puts and self._puts[0][0] <= time.monotonic():
                    await self._put(self._puts.popleft()[1])
                until = min(ping_at, self._puts[0][0]) if self._puts else ping_at
                self._work.clear()
                try:
                    await asyncio.wait_for(self._work.wait(), max(0.0, until - time.monotonic()))
                except TimeoutError:
                    continue
        finally:
            await self._client.close()

    async def find(self, request: EngineRequest, local_blocks: int) -> range:
        """The blocks of the request's prefix, beyond the ``local_blocks`` that are here, that the pool has."""
        size, page_blocks = self.pages.config.block_size, self.pages.page_blocks
        limit = (request.length - 1) // size
        if (limit - local_blocks) * size < self._threshold_tokens:
            return range(0)
        if self.pages.config.scheme == "vllm_mooncake":
            pages = self.pages.digest_pages(request.digests[:limit])
        else:
            tokens = request.tokens[: limit * size].tobytes()
            assert len(tokens) == limit * size * TOKEN_BYTES
            pages = self.pages.token_pages(tokens, request.extra.lora_name, request.extra.cache_salt)
        return await self._reach(pages, local_blocks // page_blocks)

    async def find_contents(self, contents: Sequence[BlockContent], local_blocks: int) -> range:
        """The same for a session's blocks."""
        return await self._reach(self.pages.pages(contents), local_blocks // self.pages.page_blocks)

    async def _reach(self, pages: Sequence[str], first: int) -> range:
        """Blocks of the pages from ``first`` on that are there without a gap; reading them grants leases. A pool that
        failed is not asked again before a ping was answered: one request waits for it, not all."""
        if not self._reachable:
            self.counts["asks_spared"] += 1
            return range(0)
        keys = [key for page in pages[first:] for key in self.pages.keys(page)]
        present: list[bool] = []
        try:
            for start in range(0, len(keys), KEYS_AT_ONCE):
                part = await self._client.exist(keys[start : start + KEYS_AT_ONCE])
                present += part
                if not all(part):
                    break
        except PoolUnreachableError as error:
            self._failed("asks_failed", error)
        found = reach_of(present, len(self.pages.components))
        self.counts["pages_found"] += found
        self.counts["pages_asked"] += len(pages) - first
        return range(first * self.pages.page_blocks, (first + found) * self.pages.page_blocks)

    async def _put(self, put: PoolPut) -> None:
        first = put.first // self.pages.page_blocks
        pages = self.pages.pages(put.contents)[first:]
        width = len(self.pages.components)
        for start in range(0, len(pages), max(1, KEYS_AT_ONCE // width)):
            part = pages[start : start + max(1, KEYS_AT_ONCE // width)]
            keys = [key for page in part for key in self.pages.keys(page)]
            groups = [self.pages.group_id(page) for page in part for _ in range(width)]
            sessions = [put.session_id] * len(keys)
            try:
                results = await self._client.put(
                    keys, self.pages.object_bytes, client=self._name, group_ids=groups, session_ids=sessions
                )
            except PoolUnreachableError as error:
                self._failed("puts_failed", error)
                return
            self._reachable = True
            good = sum(1 for result in results if result == 0)
            self.counts["objects_put"] += good
            self.counts["objects_refused"] += len(results) - good

    async def _mount(self) -> None:
        try:
            await self._client.mount(self._name, self._capacity_bytes)
        except PoolUnreachableError as error:
            self._failed("mounts_failed", error)

    async def _ping(self) -> None:
        """A pool that does not know this client has restarted: mount again."""
        try:
            if not await self._client.ping(self._name):
                self.counts["remounts"] += 1
                await self._mount()
            self._reachable = True
        except PoolUnreachableError as error:
            self._failed("pings_failed", error)

    def _failed(self, what: str, error: PoolUnreachableError) -> None:
        self.counts[what] += 1
        if self._reachable:
            log.warning("pool_unreachable", problem=str(error))
        self._reachable = False
