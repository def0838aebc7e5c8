"""One policy, the seats that it decides about, and what it would have to be told again should it fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.session import SessionKey
from services.admission.estimators.calibrations import Curve
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.outcomes import LeaseTerms, LeaseTold, PauseTold, Place
from services.admission.placement import IndexView
from services.admission.scheduling.interface import (
    LeaseChange,
    PauseChange,
    Policy,
    ProgramFacts,
    TurnFacts,
    WorkerFacts,
)

FORGIVEN_S = 120.0
"""A failure longer ago than this is no reason to be careful, in seconds."""


@dataclass(eq=False, slots=True)
class Turn:
    """A request that the policy of ``pool`` knows as ``number``, since ``since``. ``place``: where it was let; ``None``
    while it waits."""

    request_id: str
    pool: str
    number: int
    program: ProgramFacts
    key: SessionKey
    facts: TurnFacts
    since: float
    place: Place | None = None
    view: IndexView | None = None


@dataclass(frozen=True, slots=True)
class KnownWorker:
    """A worker as its pool was told of it: one seat for each rank."""

    pool: str
    ranks: tuple[WorkerFacts, ...]


@dataclass(eq=False, slots=True)
class Pool:
    """``policy``: ``None`` while it failed too often; tried again at ``retry_at``. ``ticked``: when the policy was told
    the time last. ``leases``: what it keeps for idle programs, by program and seat. ``paused``: programs of sessions
    that it has put aside. ``curve``: the measurement that its costs are from. ``restorable``: it began before anybody
    knew what was stored of it."""

    name: str
    learned: LearnedPool
    ticked: float
    policy: Policy | None = None
    tick_s: float | None = None
    seats: dict[Place, int] = field(default_factory=dict)
    places: dict[int, Place] = field(default_factory=dict)
    sizes: dict[Place, WorkerFacts] = field(default_factory=dict)
    leases: dict[tuple[str, int], LeaseTerms] = field(default_factory=dict)
    paused: dict[str, None] = field(default_factory=dict)
    curve: Curve | None = None
    restorable: bool = False
    failed_at: float = float("-inf")
    failures: int = 0
    retry_at: float = float("inf")

    def open_seat(self, place: Place) -> int:
        """A number for a rank that has none yet: the lowest that is free."""
        number = next(number for number in range(len(self.seats) + 1) if number not in self.places)
        self.seats[place], self.places[number] = number, place
        return number

    def close_seat(self, place: Place) -> None:
        """The rank's number is free from now on. Its sizes were taken out before its policy was told."""
        del self.places[self.seats.pop(place)]

    def residency(self, view: IndexView | None) -> Sequence[int] | None:
        """Blocks of a prompt by seat; ``None`` where no seat's cache is known."""
        if view is None or view.matches is None:
            return None
        blocks, is_blind = [0] * (max(self.places, default=-1) + 1), True
        for seat, place in self.places.items():
            match = view.matches.get(place)
            if match is not None and match.health != "blind":
                blocks[seat], is_blind = match.blocks.reach, False
        return None if is_blind else blocks

    def loadable(self, view: IndexView | None) -> Sequence[float] | None:
        """Blocks of a prompt beyond its residency that each seat can load from its shared pool, by seat, each as much
        as it is sure; ``None`` where no pool holds any."""
        if view is None or view.matches is None or not view.pools:
            return None
        blocks = [0.0] * (max(self.places, default=-1) + 1)
        for seat, place in self.places.items():
            match = view.matches.get(place)
            reach = match.blocks.reach if match is not None and match.health != "blind" else 0
            pages, sureness = view.loadable(match, reach)
            blocks[seat] = pages * sureness
        return blocks

    def pause_s(self, now: float) -> float:
        """The policy failed: how long it is left alone, in seconds. The first time not at all, then twice as long each
        time, up to a minute."""
        self.failures = self.failures + 1 if now - self.failed_at <= FORGIVEN_S else 1
        self.failed_at = now
        return 0.0 if self.failures == 1 else float(min(60, 2 ** min(self.failures - 2, 6)))

    def lease_changed(
        self, change: LeaseChange, epoch: int | None, now: float, lease_s: float, ahead_s: float = 0.0
    ) -> LeaseTold | None:
        """What the policy did with a lease, to be told where it is a session's. ``epoch``: of our leadership; ``now``:
        by the policy's time, which is ``ahead_s`` ahead of the clock; ``lease_s``: when a lease ends by itself of which
        the policy does not say it."""
        key = change.program, change.seat
        if change.state == "leased":
            until = change.until if change.until is not None else now + lease_s
            terms = LeaseTerms(epoch, now - ahead_s, until - ahead_s, round(change.numbers.get("tokens", 0.0)))
            self.leases[key] = terms
        else:
            known = self.leases.pop(key, None)
            terms = known if known is not None else LeaseTerms(epoch, now - ahead_s, now - ahead_s, 0)
        place = self.places.get(change.seat)
        if place is None or ":" in change.program:
            return None
        session = SessionKey.from_text(change.program)
        return LeaseTold(session, *place, change.state, terms, change.numbers)

    def pause_changed(self, change: PauseChange) -> PauseTold | None:
        """The policy put a program aside, or resumed it; to be told where it is a session's."""
        if ":" in change.program or (change.program in self.paused) is (change.state == "paused"):
            return None
        if change.state == "paused":
            self.paused[change.program] = None
        else:
            del self.paused[change.program]
        place = self.places.get(change.seat) if change.seat is not None else None
        return PauseTold(SessionKey.from_text(change.program), change.state, place, "policy")

    def end_pauses(self, reason: str) -> list[PauseTold]:
        """No policy knows any longer whom it had paused."""
        names, self.paused = self.paused, {}
        return [PauseTold(SessionKey.from_text(name), "resumed", None, reason) for name in names]

    def end_leases(self, reason: str, seat: int | None = None) -> list[LeaseTold]:
        """Leases (at ``seat``, or all) that no policy keeps any longer, and has not spoken of."""
        ended = []
        for key, terms in list(self.leases.items()):
            program, there = key
            if seat is not None and there != seat:
                continue
            del self.leases[key]
            if ":" not in program and there in self.places:
                session, place = SessionKey.from_text(program), self.places[there]
                ended.append(LeaseTold(session, *place, "revoked", terms, {}, reason))
        return ended
