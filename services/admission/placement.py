"""Policy ``kv``: which rank takes this prompt, by cost, with the session's previous worker preferred.

Candidates are all ranks of the workers that serve the model. Each gets its cost or the reason it is excluded. The
least cost wins; equal costs are drawn uniformly. The preferred worker (the session's previous one, or at a child's
first placement its parent's) is taken instead while it costs at most ``margin`` times what it holds of the prompt
more: a worker that has lost the session's blocks is preferred to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from schemas.decision import Candidate
from schemas.index import ChainUnit, MatchReply, SourceHealth, TierBlocks, WorkerMatch
from services.admission.cost import CostWeights, Load, Pricing, Prompt, shared_run
from services.admission.grants import Ledger
from services.admission.workers import IDLE, Worker, load_beside, load_of

Choose = Callable[[int], int]
"""A number below n, drawn uniformly (a seeded generator's ``randrange``)."""

EQUAL = 1e-9
"""Costs closer than this, in blocks, are equal."""

EVENT_LAG_S = 1.0
"""An engine's events of a turn that ended less than this ago may not have reached the index yet (measured with a real
vLLM: a few ms, tail 100 ms)."""

_NOTHING = TierBlocks()


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
    """What the index said about one prompt: ``matches`` by (worker, rank), or ``None`` and the reason. ``unit``: of the
    chain that was asked about; blocks are the placement's in any case."""

    reason: str | None = None
    matches: Mapping[tuple[str, int], WorkerMatch] | None = None
    shared: tuple[tuple[int, int], ...] = ()
    unit: ChainUnit = "tokens"

    @classmethod
    def blind(cls, reason: str) -> IndexView:
        """The index did not say anything."""
        return cls(reason=reason)

    @classmethod
    def of(cls, reply: MatchReply) -> IndexView:
        """As answered."""
        if reply.error is not None:
            return cls.blind(reply.error)
        return cls(None, {(match.worker, match.rank): match for match in reply.matches}, reply.shared)

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

    def indexed(self, chosen: Seat) -> int | None:
        """Blocks that the chosen rank held by its events, where those can be compared with what the engine reports
        (`schemas.placed.Placed.indexed`)."""
        match = (self.matches or {}).get((chosen.worker, chosen.rank))
        if match is None or self.unit == "text" or chosen.health == "blind":
            return None
        return match.blocks.reach if match.health == "synced" else match.indexed


class Seat(msgspec.Struct, gc=False):
    """One rank as it was seen for one prompt, with the fields of its `Candidate`; ``load``, ``shared_blocks`` and
    ``affinity_blocks`` are what its cost was made of."""

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
                parts=self.pricing.parts(seat.load, seat.blocks, seat.shared_blocks, seat.affinity_blocks),
                blocks=seat.blocks,
                open_grants=seat.open_grants,
                health=seat.health,
                health_reason=seat.health_reason,
                sticky=seat.sticky,
                excluded=seat.excluded,
            )
            for seat in self.seats
        )


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
) -> Placement:
    """Score every rank of ``workers`` and choose one."""
    pricing = Pricing(weights, prompt, _least_prefill(workers, ledger) if weights.overlap_score_credit_decay else 0)
    seats: list[Seat] = []
    matches, shared, price, accounts = index.matches, index.shared, pricing.total, ledger.by_seat
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
            health, reason, blocks = _view(None if matches is None else matches.get(seat), index, misfit)
            sticky = name == preference.worker and preference.rank in (None, rank)
            pages = shared_run(shared, blocks.reach) if shared and health != "blind" else 0
            affinity = preference.affinity_blocks if sticky and _is_unknown(health, blocks) else 0
            full = "at_limit" if open_grants >= max_grants_per_rank else None
            seats.append(
                Seat(
                    name,
                    rank,
                    price(load, blocks, pages, affinity),
                    load,
                    blocks,
                    pages,
                    affinity,
                    open_grants,
                    health,
                    reason,
                    sticky,
                    barred or full,
                )
            )
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
    eligible = [(seat.cost, place) for place, seat in enumerate(seats) if seat.excluded is None]
    if not eligible:
        return None
    best = min(eligible)[0]
    if preference.worker is not None:
        own = [pair for pair in eligible if seats[pair[1]].sticky]
        if own:
            least, place = min(own)
            if least <= best + preference.margin * _held(seats[place], prompt, preference) + EQUAL:
                eligible, best = own, least
    tied = [place for value, place in eligible if value <= best + EQUAL]
    return tied[0] if len(tied) == 1 else tied[choose(len(tied))]


def _held(seat: Seat, prompt: Prompt, preference: Preference) -> float:
    """Blocks of the prompt on the preferred rank: what the index says, else what the session left there."""
    if seat.health == "blind":
        return preference.affinity_blocks or prompt.request_blocks
    trusted = preference.fresh or _is_unknown(seat.health, seat.blocks)
    return max(seat.blocks.reach, preference.affinity_blocks if trusted else 0)


def _is_unknown(health: SourceHealth, blocks: TierBlocks) -> bool:
    """Blind, or approximate without a trace of the prompt: it may have been sent there before anybody took notes."""
    return health == "blind" or (health == "approximate" and blocks.reach == 0)


def _no_choice(seats: Sequence[Seat]) -> str:
    """Why nothing could be chosen: ``at_limit`` when a place will come free, else ``no_worker``."""
    return "at_limit" if any(each.excluded == "at_limit" for each in seats) else "no_worker"
