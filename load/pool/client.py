"""A client of the simulated pool: for the simulated engine, and for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from web.client import HttpClient, Timeouts
from web.errors import WebError

TIMEOUT_S = 5.0


class PoolUnreachableError(Exception):
    """The pool did not answer, or not with what was asked (the pool's fault)."""

    reason = "pool_unreachable"


class PoolClient:
    """Speaks ``/sim/*`` of a pool at ``url``; every question ends within ``timeout_s``. `close` when done."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S) -> None:
        self.url = url.rstrip("/")
        self._http = HttpClient()
        self._timeouts = Timeouts(total_s=timeout_s)

    async def close(self) -> None:
        await self._http.close()

    async def put(
        self,
        keys: Sequence[str],
        size_bytes: int = 1,
        *,
        client: str | None = None,
        group_ids: Sequence[str | None] = (),
        session_ids: Sequence[str | None] = (),
        **more: Any,
    ) -> list[int]:
        """Result codes by key (`load.pool.store`)."""
        body = {"keys": list(keys), "size_bytes": size_bytes, "client": client, **more}
        body |= {"group_ids": list(group_ids), "session_ids": list(session_ids)}
        return list((await self.post("put", body))["results"])

    async def exist(self, keys: Sequence[str]) -> list[bool]:
        """Which objects can be read; each gets a lease."""
        return [bool(there) for there in (await self.post("exist", {"keys": list(keys)}))["results"]]

    async def probe(self, keys: Sequence[str]) -> list[bool]:
        """Which objects can be read, without a lease."""
        return [bool(there) for there in (await self.post("probe", {"keys": list(keys)}))["results"]]

    async def get(self, keys: Sequence[str]) -> list[int]:
        """Sizes in bytes, -1 for what is not there."""
        return list((await self.post("get", {"keys": list(keys)}))["results"])

    async def remove(self, keys: Sequence[str] = (), **more: Any) -> int:
        """How many were removed; ``regex``, ``all``, ``force``, ``tenant`` as `load.pool.bodies.RemoveBody`."""
        return int((await self.post("remove", {"keys": list(keys), **more}))["removed"])

    async def evict(self, keys: Sequence[str] | None = None, count: int = 0) -> int:
        return int((await self.post("evict", {"keys": keys, "count": count}))["evicted"])

    async def offload(self, keys: Sequence[str]) -> int:
        return int((await self.post("offload", {"keys": list(keys)}))["copied"])

    async def mount(self, client: str, capacity_bytes: int = 0, segment: str | None = None) -> None:
        await self.post("mount", {"client": client, "capacity_bytes": capacity_bytes, "segment": segment})

    async def ping(self, client: str) -> bool:
        """Whether the pool knows the client."""
        return bool((await self.post("ping", {"client": client}))["known"])

    async def unmount(self, client: str) -> None:
        await self.post("unmount", {"client": client})

    async def misbehave(self, **flags: Any) -> dict[str, Any]:
        return dict(await self.post("misbehave", flags))

    async def keys(self) -> set[str]:
        """``GET /get_all_keys``."""
        return set((await self.fetch("GET", "/get_all_keys")).decode().splitlines())

    async def get_json(self, path: str) -> Any:
        return msgspec.json.decode(await self.fetch("GET", path))

    async def post(self, what: str, body: Any) -> Any:
        """``POST /sim/<what>``. Raises `PoolUnreachableError`."""
        return msgspec.json.decode(await self.fetch("POST", f"/sim/{what}", msgspec.json.encode(body)))

    async def fetch(self, method: str, path: str, body: bytes = b"") -> bytes:
        """The body of a good answer. Raises `PoolUnreachableError`."""
        try:
            answer = await self._http.fetch(method, self.url + path, [], body, self._timeouts)
        except (WebError, OSError) as error:
            raise PoolUnreachableError(f"{method} {path}: {error}") from error
        if answer.status != 200:
            raise PoolUnreachableError(f"{method} {path}: {answer.status} {answer.body[:200]!r}")
        return answer.body
