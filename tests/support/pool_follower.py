"""A replica of a shared pool reduced to its rules: it follows a bridge's numbers and has the picture that they give."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Protocol

from bus import subjects
from bus.interface import Bus
from kvcore import BadBatchError, PoolIndex
from schemas.base import from_json
from schemas.pool import PoolHeaders, PoolReset, PoolState


class Told(Protocol):
    """One message of a bridge."""

    @property
    def subject(self) -> str: ...
    @property
    def payload(self) -> bytes: ...
    @property
    def headers(self) -> Mapping[str, str]: ...


class PoolFollower:
    """Every number must be the one after the last, every state name the last one, every part its place."""

    def __init__(self, pool: str = "pool-a") -> None:
        self.pool = pool
        self.index = PoolIndex()
        self.seq = -1
        self.origins: list[str] = []
        self.states: list[PoolState] = []
        self.resets: list[PoolReset] = []
        self._parts: list[bytes] = []

    @classmethod
    async def of(cls, bus: Bus, pool: str = "pool-a") -> PoolFollower:
        """One that hears everything from now on."""
        follower = cls(pool)
        for subject in (subjects.pool(pool), subjects.pool_reset(pool), subjects.pool_state(pool)):
            await bus.subscribe(subject, follower.hear)
        await bus.flush()
        return follower

    @property
    def state(self) -> PoolState | None:
        """The newest one."""
        return self.states[-1] if self.states else None

    def has(self, *keys: str) -> bool:
        """Whether all these objects are known."""
        return all(self.index.present(key) for key in keys)

    def is_synced(self) -> bool:
        """The newest state says so."""
        return self.state is not None and self.state.health == "synced"

    def hear(self, message: Told) -> None:
        """The next message."""
        if message.subject == subjects.pool_state(self.pool):
            state = from_json(message.payload, PoolState)
            assert state.pool_seq == self.seq
            self.states.append(state)
        elif message.subject == subjects.pool_reset(self.pool):
            self.resets.append(from_json(message.payload, PoolReset))
            self._number(self.resets[-1].pool_seq)
            self.index = PoolIndex()
        else:
            assert message.subject == subjects.pool(self.pool)
            self._batch(PoolHeaders.from_headers(message.headers), message.payload)

    def _batch(self, headers: PoolHeaders, payload: bytes) -> None:
        assert headers.part == len(self._parts)
        self._parts.append(payload)
        if len(self._parts) < headers.parts:
            return
        whole = b"".join(self._parts)
        self._parts.clear()
        self._number(headers.seq)
        self.origins.append(headers.origin)
        if headers.origin == "reconcile":
            self.index.apply_delta(whole)
        else:
            with contextlib.suppress(BadBatchError):
                self.index.apply_payload(whole)

    def _number(self, seq: int) -> None:
        assert seq == self.seq + 1
        self.seq = seq
