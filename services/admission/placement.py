"""Policy ``kv``: which rank takes this prompt, by cost, with the session's previous worker preferred.

Candidates are all ranks of the workers that serve the model. Each gets its cost or the reason it is excluded; the rule
is `services.admission.scoring`'s. Preferred is the session's previous worker, or at a child's first placement its
parent's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from schemas.decision import Candidate
from schemas.index import ChainUnit, MatchReply, PoolMatch, SourceHealth, TierBlocks, WorkerMatch
from services.admission.cost import CostWeights, Load, Pricing, Prompt, Ranges, joined, shared_run
from services.admission.grants import Ledger
from services.admission.scoring import Choose, cheapest, held_blocks
from services.admission.workers import IDLE, Worker, load_beside, load_of

Bias = Callable[[str, int], float]
"""Blocks added to the cost of (worker, rank), negative where it is preferred."""

_NOTHING = TierBlocks()


@dataclass(frozen=True, slots=True)
class SharedPages:
    """What a shared pool holds of one prompt: half-open ranges of positions in blocks, in order and with holes between
    them, and how sure that is (0..1)."""

    ranges: Ranges
    sureness: float


_NO_POOLS: Mapping[str | None, SharedPages] = {}


def shared_pages(pools: Sequence[PoolMatch], unsure: float) -> Mapping[str | None, SharedPages]:
    """Pools that hold something of a prompt, by name. ``unsure``: how sure a page of a pool is whose picture is known
    not to be complete; of a blind one nothing counts (docs/adr/0015)."""
    sureness = {"synced": 1.0, "catching_up": unsure, "approximate": unsure}
    found: dict[str | None, SharedPages] = {
        pool.pool: SharedPages(joined(pool.ranges), sureness[pool.health])
        for pool in pools
        if pool.ranges and pool.health in sureness
    }
    return found or _NO_POOLS


@dataclass(frozen=True, slots=True)
class Preference:
    """The rank to prefer: by how much (times the blocks it holds), and what it may still hold, in blocks.

    ``affinity_blocks`` counts as held only where the index is blind, is approximate and has nothing of the prompt, or
    cannot know yet (``fresh``: the session's last turn has just ended there).
    """

    worker: str | None = None
    rank: int | None = None
    margin: float = 0.0
    affinity_blocks: int = 0
    fresh: bool = False


NO_PREFERENCE = Preference()


@dataclass(frozen=True, slots=True)
class IndexView:
    """What the index said about one prompt: ``matches`` by (worker, rank), or ``None`` and the reason. ``pools``: what
    the shared pools hold of it. ``unit``: of the chain that was asked about; blocks are the placement's in any case."""

    reason: str | None = None
    matches: Mapping[tuple[str, int], WorkerMatch] | None = None
    pools: Mapping[str | None, SharedPages] = field(default_factory=dict)
    unit: ChainUnit = "tokens"

    @classmethod
    def blind(cls, reason: str) -> IndexView:
        """The index did not say anything."""
        return cls(reason=reason)

    @classmethod
    def of(cls, reply: MatchReply, unsure: float = CostWeights().shared_unsure_multiplier) -> IndexView:
        """As answered. ``unsure``: see `shared_pages`."""
        if reply.error is not None:
            return cls.blind(reply.error)
        pools = shared_pages(reply.pools, unsure) if reply.pools else _NO_POOLS
        return cls(None, {(match.worker, match.rank): match for match in reply.matches}, pools)

    @classmethod
    def of_text(cls, reply: MatchReply, text_block: int, block_size: int) -> IndexView:
        """An answer about text, whose blocks are about ``text_block`` tokens, in blocks of ``block_size`` tokens."""
        if reply.error is not None:
            return cls.blind(reply.error)
        matches = {}
        for match in reply.matches:
            blocks = TierBlocks(device=match.blocks.reach * text_block // block_size)
            matches[match.worker, match.rank] = msgspec.structs.replace(match, blocks=blocks)
        return cls(None, matches, unit="text")

    def loadable(self, match: WorkerMatch | None, reach: int) -> tuple[int, float]:
        """Blocks in the shared pool of ``match`` that continue a reach of ``reach`` blocks, and how sure they are."""
        pages = self.pools.get(match.pool) if match is not None else None
        return (shared_run(pages.ranges, reach), pages.sureness) if pages is not None else (0, 1.0)

    def indexed(self, chosen: Seat) -> int | None:
        """Blocks that the chosen rank held by its events, where those can be compared with what the engine reports
        (`schemas.placed.Placed.indexed`)."""
        match = (self.matches or {}).get((chosen.worker, chosen.rank))
        if match is None or self.unit == "text" or chosen.health == "blind":
            return None
        return match.blocks.reach if match.health == "synced" else match.indexed


class Seat(msgspec.Struct, gc=False):
    """One rank as it was seen for one prompt, with the fields of its `Candidate`; ``load``, ``shared_blocks`` and
    ``affinity_blocks`` are what its cost was made of. ``sureness`` (0..1): of the shared blocks. ``bias``: what users'
    policies add to it, in blocks."""

    worker: str
    rank: int
    cost: float
    load: Load
    blocks: TierBlocks
    shared_blocks: int
    affinity_blocks: int
    open_grants: int
    health: SourceHealth
    health_reason: str | None
    sticky: bool
    excluded: str | None
    sureness: float = 1.0
    bias: float = 0.0


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice (an index into ``seats``), or why there is none (``None``, ``reason``)."""

    seats: Sequence[Seat]
    pricing: Pricing
    choice: int | None
    reason: str | None = None

    @property
    def chosen(self) -> Seat:
        """The chosen rank. Only when there is a choice."""
        if self.choice is None:
            raise ValueError("nothing was chosen")
        return self.seats[self.choice]

    def candidates(self) -> tuple[Candidate, ...]:
        """Every rank with the terms of its cost, for those who want to know why. Made when asked for: nobody waits for
        an answer meanwhile."""
        return tuple(
            Candidate(
                worker=seat.worker,
                rank=seat.rank,
                cost=seat.cost,
                parts=self._parts(seat),
                blocks=seat.blocks,
                open_grants=seat.open_grants,
                health=seat.health,
                health_reason=seat.health_reason,
                sticky=seat.sticky,
                excluded=seat.excluded,
            )
            for seat in self.seats
        )

    def _parts(self, seat: Seat) -> dict[str, float]:
        shared = seat.shared_blocks * seat.sureness
        parts = self.pricing.parts(seat.load, seat.blocks, shared, seat.affinity_blocks)
        return {**parts, "policy": seat.bias} if seat.bias else parts


def place(
    workers: Sequence[Worker],
    ledger: Ledger,
    prompt: Prompt,
    index: IndexView,
    *,
    weights: CostWeights,
    max_grants_per_rank: int,
    choose: Choose,
    preference: Preference = NO_PREFERENCE,
    excluded: tuple[str, ...] = (),
    bias: Bias | None = None,
) -> Placement:
    """Score every rank of ``workers`` and choose one. ``bias``: what users' policies add to its cost, where they have
    a word."""
    pricing = Pricing(weights, prompt, _least_prefill(workers, ledger) if weights.overlap_score_credit_decay else 0)
    seats: list[Seat] = []
    matches, pools, price, accounts = index.matches, index.pools, pricing.total, ledger.by_seat
    sizes = (None, prompt.block_size)
    for worker in workers:
        name, foreign = worker.name, worker.foreign
        misfit = index.unit == "tokens" and worker.state.profile.block_size not in sizes
        barred = "failed_before" if name in excluded else None if worker.placeable else worker.state.health
        for seat in worker.seats:
            rank, ours = seat[1], accounts.get(seat)
            load, open_grants = foreign.get(rank, IDLE), 0
            if ours is not None and ours.requests:
                load, open_grants = load_beside(load, ours), ours.requests
            match = None if matches is None else matches.get(seat)
            health, reason, blocks = _view(match, index, misfit)
            sticky = name == preference.worker and preference.rank in (None, rank)
            affinity = preference.affinity_blocks if sticky and _is_unknown(health, blocks) else 0
            pages, sureness = 0, 1.0
            shared = pools.get(match.pool) if pools and match is not None and not misfit else None
            if shared is not None:
                pages, sureness = shared_run(shared.ranges, blocks.reach or affinity), shared.sureness
            full = "at_limit" if open_grants >= max_grants_per_rank else None
            seats.append(
                Seat(
                    name,
                    rank,
                    price(load, blocks, pages * sureness, affinity),
                    load,
                    blocks,
                    pages,
                    affinity,
                    open_grants,
                    health,
                    reason,
                    sticky,
                    barred or full,
                    sureness,
                )
            )
    if bias is not None:
        for each in seats:
            each.bias = bias(each.worker, each.rank)
    choice = _choose(seats, prompt, preference, choose)
    return Placement(seats, pricing, choice, None if choice is not None else _no_choice(seats))


def _least_prefill(workers: Sequence[Worker], ledger: Ledger) -> int:
    loads = (load_of(worker, rank, ledger) for worker in workers if worker.placeable for _, rank in worker.seats)
    return min((load.prefill_tokens for load in loads), default=0)


def _view(match: WorkerMatch | None, index: IndexView, misfit: bool) -> tuple[SourceHealth, str | None, TierBlocks]:
    """What is known of one rank's cache for this prompt."""
    if misfit:
        return "blind", "block_size", _NOTHING
    if match is None:
        return "blind", index.reason if index.matches is None else "no_source", _NOTHING
    health = match.health
    return health, match.reason, _NOTHING if health == "blind" else match.blocks


def _choose(seats: Sequence[Seat], prompt: Prompt, preference: Preference, choose: Choose) -> int | None:
    eligible = [(seat.cost + seat.bias, place) for place, seat in enumerate(seats) if seat.excluded is None]
    if not eligible:
        return None
    own = [pair for pair in eligible if seats[pair[1]].sticky] if preference.worker is not None else []
    return cheapest(eligible, own, lambda place: preference.margin * _held(seats[place], prompt, preference), choose)


def _held(seat: Seat, prompt: Prompt, preference: Preference) -> int:
    return held_blocks(
        seat.blocks.reach,
        preference.affinity_blocks,
        blind=seat.health == "blind",
        trusted=preference.fresh or _is_unknown(seat.health, seat.blocks),
        request_blocks=prompt.request_blocks,
    )


def _is_unknown(health: SourceHealth, blocks: TierBlocks) -> bool:
    """Blind, or approximate without a trace of the prompt: it may have been sent there before anybody took notes."""
    return health == "blind" or (health == "approximate" and blocks.reach == 0)


def _no_choice(seats: Sequence[Seat]) -> str:
    """Why nothing could be chosen: ``at_limit`` when a place will come free, else ``no_worker``."""
    return "at_limit" if any(each.excluded == "at_limit" for each in seats) else "no_worker"
