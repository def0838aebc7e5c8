"""What a simulated rank does for a hint: every action of `schemas.hint`, with what it costs.

Pins hold blocks that others cannot have, up to a share of the rank's memory; copies wait on the same links as loads and
take the place of what was used longest ago; what is dropped has to be computed again if it is wanted after all. An
action changes when things happen, and where KV lies, never what is answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from load.sim.content import Chain
from load.sim.engine import Rank
from load.sim.tiers import TierName
from schemas.hint import ActionType, HintOutcome

PINNED_SHARE = 0.5
"""Of a rank's memory, what it lets be pinned at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One action for the KV of program ``owner``: the first ``tokens`` of ``chain``. Times are picoseconds.

    ``ttl_ps``: of ``pin``, ``retain`` and ``demote``; ``priority``: of ``retain``; ``to``: of ``prefetch``, ``demote``
    and ``share``; ``source``: of ``share``, the rank that has it; ``reason``: of ``dereference``.
    """

    action_type: ActionType
    owner: str
    chain: Chain
    tokens: int
    ttl_ps: int | None = None
    priority: int = 0
    to: Literal["device", "host", "disk", "pool"] | None = None
    source: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Command:
    """An action, the rank that is asked for it, and what its sender calls it."""

    rank: int
    asked: Asked
    action_id: str = ""
    expires_ps: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of it, and why not more."""

    outcome: HintOutcome
    reason: str | None = None


LET_GO = -1
"""Priority of what nobody comes back to."""

DEMOTED = 9
"""Priority below the device of what was sent there, more than `retain` gives (0 to 8): what is there only because it
was copied is above too."""

ACCEPTED = Answer("accepted")
MISSING = Answer("missing")


class CacheActions:
    """Carries actions out on ``ranks``."""

    def __init__(self, ranks: Sequence[Rank], pinned_share: float = PINNED_SHARE) -> None:
        self._ranks = ranks
        self._pinned_share = pinned_share

    def carry_out(self, number: int, asked: Asked, now: int) -> Answer:
        """On rank ``number``, at ``now``. The caller looks at the rank again, and ends what ends (`end`)."""
        if not 0 <= number < len(self._ranks):
            return Answer("rejected", "no_rank")
        rank = self._ranks[number]
        rank.pause(now)
        if asked.action_type == "pin":
            return self._pin(rank, asked, now)
        if asked.action_type == "retain":
            return self._retain(rank, asked, now)
        if asked.action_type == "prefetch":
            return self._prefetch(rank, asked, now)
        if asked.action_type == "demote":
            return self._demote(rank, asked, now)
        if asked.action_type == "share":
            return self._share(rank, asked, now)
        return self._dereference(rank, asked, now)

    def end(self, number: int, asked: Asked, now: int) -> None:
        """The time of a ``pin``, a ``retain`` or a ``demote`` is over."""
        rank = self._ranks[number]
        rank.pause(now)
        if asked.action_type == "pin":
            rank.expire(asked.owner, now)
        else:
            self._prefer(rank, asked.chain, 0)

    def _pin(self, rank: Rank, asked: Asked, now: int) -> Answer:
        size = rank.config.block_size
        wanted = asked.tokens // size
        there = rank.cache.reach(asked.chain, wanted)
        others = sum(pin.holder.held for owner, pin in rank.scheduler.pins.items() if owner != asked.owner)
        room = int(self._pinned_share * rank.cache.usable) - others
        if not there:
            return MISSING
        if room <= 0:
            return Answer("rejected", "pin_limit")
        until_ps = None if asked.ttl_ps is None else now + asked.ttl_ps
        rank.pin(asked.owner, asked.chain, min(there, room) * size, now, until_ps=until_ps)
        if there <= room and there == wanted:
            return ACCEPTED
        return Answer("clipped", "pin_limit" if there > room else "partly_resident")

    def _retain(self, rank: Rank, asked: Asked, now: int) -> Answer:
        if not rank.depths(asked.chain, asked.tokens // rank.config.block_size, now).total:
            return MISSING
        self._prefer(rank, asked.chain, asked.priority)
        return ACCEPTED

    @staticmethod
    def _prefer(rank: Rank, chain: Chain, priority: int) -> None:
        rank.cache.prefer(chain, priority)
        if rank.tiered is not None:
            rank.tiered.memory.prefer(chain, priority)

    @staticmethod
    def _prefetch(rank: Rank, asked: Asked, now: int) -> Answer:
        tiered, limit = rank.tiered, asked.tokens // rank.config.block_size
        if tiered is None:
            return Answer("unsupported", "no_lower_tier")
        found = rank.cache.reach(asked.chain, limit)
        below = tiered.memory.find(asked.chain, found, limit)
        if not below:
            return ACCEPTED if found else MISSING
        if asked.to not in (None, "device"):
            tiered.memory.fetch(asked.chain, found, limit, now)
            return ACCEPTED
        if tiered.fetching(asked.chain):
            return Answer("rejected", "in_flight")
        fetched = tiered.fetch(asked.chain, limit)
        if found + fetched == below[-1].end:
            return ACCEPTED
        return Answer("clipped" if fetched else "deferred", "no_room")

    @staticmethod
    def _demote(rank: Rank, asked: Asked, now: int) -> Answer:
        there = rank.cache.reach(asked.chain, asked.tokens // rank.config.block_size)
        if rank.tiered is None:
            return Answer("unsupported", "no_lower_tier")
        if not there:
            return MISSING
        lowest: TierName = "host" if asked.to in (None, "device") else asked.to  # type: ignore[assignment]
        rank.unpin(asked.owner, now)
        rank.tiered.memory.demote(asked.chain, there, lowest, now)
        rank.cache.drop(asked.chain)
        rank.cache.prefer(asked.chain, 0)
        rank.tiered.memory.prefer(asked.chain, DEMOTED)
        return ACCEPTED

    def _share(self, rank: Rank, asked: Asked, now: int) -> Answer:
        """``to`` the pool: for whoever may want it. Else it comes from rank ``source``: over the pool's links of both,
        where they have one, or those of host memory."""
        if asked.source is None or not 0 <= asked.source < len(self._ranks):
            return Answer("rejected", "no_source")
        source, limit = self._ranks[asked.source], asked.tokens // rank.config.block_size
        if rank.tiered is None or source.tiered is None:
            return Answer("unsupported", "no_link")
        if asked.to == "pool":
            return self._publish(rank, asked, now)
        source.pause(now)
        own = source.depths(asked.chain, limit, now)
        there, end = rank.cache.reach(asked.chain, limit), own.device + own.host
        if end <= there:
            return ACCEPTED if there else MISSING
        if rank.tiered.fetching(asked.chain):
            return Answer("rejected", "in_flight")
        room = there + rank.cache.free_blocks // 2
        end, whole = min(end, room), end <= room
        if end <= there:
            return Answer("deferred", "no_room")
        links = [each.memory.tiers[-1].link for each in (rank.tiered, source.tiered)]
        rank.tiered.receive(asked.chain, end, max(link.copy(end - there, now) for link in links))
        return ACCEPTED if whole else Answer("clipped", "no_room")

    @staticmethod
    def _publish(rank: Rank, asked: Asked, now: int) -> Answer:
        assert rank.tiered is not None
        if rank.tiered.memory.tiers[-1].name != "pool":
            return Answer("unsupported", "no_pool")
        there = rank.depths(asked.chain, asked.tokens // rank.config.block_size, now).total
        rank.tiered.memory.demote(asked.chain, there, "pool", now)
        return ACCEPTED if there else MISSING

    def _dereference(self, rank: Rank, asked: Asked, now: int) -> Answer:
        """``unpinned``: only the pin ends. ``superseded``: what its latest prompt has no more: nothing here, where a
        chain only grows. ``moved``: nobody comes back to it here, so it goes before all else; what the pool has is
        for where it is now. Else nobody comes back at all."""
        had_pin = asked.owner in rank.scheduler.pins
        rank.unpin(asked.owner, now)
        memory = rank.tiered.memory if rank.tiered is not None else None
        if asked.reason in ("unpinned", "superseded"):
            return ACCEPTED if had_pin else MISSING
        if asked.reason == "moved":
            rank.cache.prefer(asked.chain, LET_GO)
            if memory is not None:
                memory.prefer(asked.chain, LET_GO, pool=False)
            return ACCEPTED
        rank.cache.prefer(asked.chain, 0)
        gone = rank.cache.drop(asked.chain) + (memory.drop(asked.chain) if memory is not None else 0)
        return ACCEPTED if gone or had_pin else MISSING
