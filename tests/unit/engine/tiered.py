"""An engine core with memory below the device, run by hand; what a consumer of its events knows, tier by tier."""

from __future__ import annotations

from array import array
from collections import Counter, defaultdict
from typing import Any

from load.engine.block_hash import ExtraKeys
from load.engine.core import CoreConfig, EngineCore, StepResult
from load.engine.hint_actions import Result
from load.engine.hints import Action
from load.engine.kv_events import BlockRemoved, BlockStored, KvEvent
from load.engine.requests import EngineRequest
from load.engine.scheduler import SchedulingPolicy
from load.engine.tiers import TierConfig
from load.engine.timing import H100_8B, INSTANT, Profile

BLOCK = 4
NOW_MS = 1_000


def core_of(
    blocks: int = 33,
    *,
    host: int = 0,
    disk: int = 0,
    pool: bool = False,
    block_s: float = 0.0,
    write: Any = "through",
    budget: int = 2048,
    policy: SchedulingPolicy = "fcfs",
    profile: Profile = INSTANT,
    ratio: float = 0.5,
    tool_pin_s: float = 0.0,
    cleared: bool = False,
) -> EngineCore:
    """``block_s``: of every link. ``blocks`` includes the null block."""
    tiers = TierConfig(
        host_blocks=host,
        host_block_s=block_s,
        host_write=write,
        disk_blocks=disk,
        disk_block_s=10 * block_s,
        pool=pool,
        pool_block_s=2 * block_s,
        cleared_with_device=cleared,
    )
    config = CoreConfig(
        num_blocks=blocks,
        block_size=BLOCK,
        token_budget=budget,
        policy=policy,
        tiers=tiers,
        max_pinned_ratio=ratio,
        tool_pin_s=tool_pin_s,
    )
    return EngineCore(config, profile)


def request(
    name: str, prompt: list[int], output: int = 1, *, session: str | None = None, priority: int = 0, **more: Any
) -> EngineRequest:
    tokens = array("I", range(5000, 5000 + output))
    return EngineRequest(
        name, array("I", prompt), tokens, session_id=session, priority=priority, extra=ExtraKeys(), **more
    )


class Driver:
    """Steps a core in its own time. ``now``: its clock; ``outputs``: tokens by request, in order."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.now = 0.0
        self.outputs: dict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, float] = {}
        self.admitted: dict[str, int] = {}
        self.known = Known()

    def step(self) -> StepResult | None:
        """One iteration; jumps to the next load's end where nothing can be done before."""
        result = self.core.step(self.now)
        if result is None:
            due = self.core.next_due
            if self.core.unfinished and due is not None:
                self.now = max(self.now, due)
            return None
        self.now += result.duration_s
        self.known.apply(result.events)
        self.admitted.update(result.admitted)
        for output in result.outputs:
            self.outputs[output.request_id].append(output.token)
            if output.finish_reason is not None:
                self.ended[output.request_id] = self.now
        return result

    def finish(self) -> None:
        for _ in range(10_000):
            if not self.core.unfinished:
                return
            self.step()
        raise AssertionError("it never ends")

    def serve(self, *requests: EngineRequest) -> None:
        for item in requests:
            self.core.add_request(item)
        self.finish()

    def hint(self, kind: str, session: str = "s", **payload: Any) -> Result:
        """Carry out one action; ``first``, ``last`` and ``block_size`` belong to its target."""
        target = {"session_id": session}
        target |= {name: payload.pop(name) for name in ("first", "last", "block_size") if name in payload}
        fields = {"target": target, "expires_ms": NOW_MS + 1, **payload}
        number = sum(self.core.hints.counts.values())
        in_pool = fields.pop("in_pool", range(0))
        action = Action(action_id=f"{kind}-{number}", action_type=kind, payload=fields)
        self.core.tell_time(self.now)
        result = self.core.hints.carry_out(action, NOW_MS, in_pool)
        self.known.apply(self.core.cache.take_events())
        return result


class Known:
    """The resident sets as a consumer of the events knows them: stores and removals counted, per tier."""

    def __init__(self) -> None:
        self.copies: dict[str, Counter[bytes]] = defaultdict(Counter)

    def apply(self, events: list[KvEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                self.copies[event.tier].update(event.digests)
            elif isinstance(event, BlockRemoved):
                assert self.copies[event.tier][event.digest] > 0, f"removed from {event.tier} what was not stored"
                self.copies[event.tier][event.digest] -= 1
            else:
                self.copies["device"].clear()

    def resident(self, tier: str) -> dict[bytes, int]:
        return {digest: copies for digest, copies in self.copies[tier].items() if copies}


def check(driver: Driver, live: list[EngineRequest]) -> None:
    """References equal what requests, pins and loads hold; every tier holds no more than it can, and what it told."""
    core = driver.core
    pool, scheduler = core.cache.pool, core._scheduler
    held = Counter(block for item in live for block in item.blocks)
    held.update(block for pin in scheduler.pins.values() for block in pin.blocks)
    held.update(block for _, blocks in scheduler.fetching for block in blocks)
    for block in range(pool.num_blocks):
        assert pool.references(block) == held[block]
    assert pool.used_blocks + pool.free_blocks == pool.usable
    assert driver.known.resident("device") == dict(pool.resident())
    for tier in core.tiers.tiers:
        assert len(tier) <= tier.capacity
        assert driver.known.resident(tier.name) == {content.digest: 1 for content in tier.resident()}


def turn(session: int, length: int) -> list[int]:
    """Prompts of one session share their beginning."""
    return [100_000 * (session + 1) + position for position in range(length)]


FAST, SLOW = INSTANT, H100_8B
