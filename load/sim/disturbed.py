"""A simulation in which something goes wrong while it runs: `load.sim.perturb`.

A worker that is lost ends what runs there; its clients ask again. Another one, empty, comes back in its place. Memory
that is taken from a worker is what is free there, then what becomes free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from load.sim.clock import to_ps, to_s
from load.sim.content import Chain
from load.sim.perturb import NOTHING, PATIENCE_S, RETRY_S, Perturbation
from load.sim.programs import Program
from load.sim.requests import SimRequest
from load.sim.results import Result
from load.sim.run import HAPPENING, Event, OpenTurn, SimConfig, Simulation, simulate
from services.admission.scheduling.interface import Pin, Policy, TurnUsage

DISTURBED = 0
"""The worker that something happens to."""


@dataclass(eq=False)
class DisturbedSimulation(Simulation):
    """``perturbation`` says what happens."""

    perturbation: Perturbation = NOTHING
    _seen: list[dict[Chain, int]] = field(default_factory=list)
    _seen_ps: int = -1
    _cached_before: dict[str, int] = field(default_factory=dict)
    _lost: bool = False
    _taken: int = 0
    _wanted: int = 0

    def _prepare(self) -> None:
        if self.perturbation.fleet is not None:
            end_s = max((program.arrival_s for program in self.programs), default=0.0)
            for share, what in ((self.perturbation.from_share, "worse"), (self.perturbation.to_share, "better")):
                self._queue.put(to_ps(share * end_s), Event("fleet", word=what), HAPPENING)

    # What is known

    def _residency(self, number: int) -> list[int]:
        if not self.perturbation.index_s:
            return super()._residency(number)
        every_ps = to_ps(self.perturbation.index_s)
        current_ps = self._queue.now // every_ps * every_ps
        if current_ps != self._seen_ps:
            self._seen_ps = current_ps
            self._seen = [rank.reaches(self._queue.now) for rank in self._ranks]
        turn = self._open[number]
        full = turn.plan.prompt_tokens // self.config.block_size
        return [_reach(seen, turn.plan.chain, full) for seen in self._seen]

    def _usage(self, turn: OpenTurn, cached: int, *, final: bool) -> TurnUsage:
        usage = super()._usage(turn, cached, final=final)
        if self.perturbation.cached == "exact":
            return usage
        if self.perturbation.cached == "missing":
            return replace(usage, cached_tokens=None)
        before = self._cached_before.get(usage.program, 0)
        self._cached_before[usage.program] = cached
        return replace(usage, cached_tokens=before)

    # What happens

    def _ready(self, turn: OpenTurn) -> None:
        if turn.plan.fails and not turn.again:
            patience = Event("patience", turn.running, turn=turn.number)
            self._queue.put(self._queue.now + to_ps(PATIENCE_S), patience, HAPPENING)
        super()._ready(turn)

    def _first_tokens(self, requests: Sequence[SimRequest]) -> None:
        super()._first_tokens(requests)
        for request in requests:
            turn = self._open.get(request.number)
            if turn is not None and turn.plan.fails and not turn.again:
                self._fail(turn)

    def _happen(self, event: Event) -> None:
        if event.kind == "patience":
            turn = self._open.get(event.turn)
            if turn is not None and (turn.request is None or turn.request.first_token_ps is None):
                self._fail(turn)
        elif event.kind == "retry":
            turn = self._open.get(event.turn)
            assert turn is not None
            super()._ready(turn)
        elif event.kind == "fleet":
            self._fleet(event.word)
        else:
            super()._happen(event)

    def _fail(self, turn: OpenTurn) -> None:
        """Its client goes away; it asks again, or that was its program."""
        self._stop(turn)
        now = to_s(self._queue.now)
        if turn.plan.fails == "retry":
            self._act(self.policy.turn_aborted(now, turn.number))
            self._again(turn)
            return
        self.result.aborted += 1
        self._act(self.policy.turn_aborted(now, turn.number))
        self._act(self.policy.program_closed(now, turn.running.program.name))
        self._leave(turn.running)

    def _stop(self, turn: OpenTurn) -> None:
        """Nobody waits for it any more."""
        del self._open[turn.number]
        if turn.request is not None:
            self._ranks[turn.worker].abort(turn.request, self._queue.now)
            self._look_again(turn.worker)

    def _again(self, turn: OpenTurn) -> None:
        """The same request as another turn, after a while."""
        self.result.retried += 1
        number = self._turns
        time_ps = self._queue.now + to_ps(RETRY_S)
        self._turns += 1
        self._open[number] = OpenTurn(number, turn.running, turn.index, turn.plan, time_ps, again=True)
        self._queue.put(time_ps, Event("retry", turn.running, turn=number), HAPPENING)

    # The fleet

    def _fleet(self, word: str) -> None:
        now = self._queue.now
        rank = self._ranks[DISTURBED]
        if self.perturbation.fleet == "less":
            size = round(self.perturbation.less_memory * (rank.config.num_blocks - 1)) if word == "worse" else 0
            self._wanted = size
            self._take()
            tokens = rank.config.kv_tokens - size * rank.config.block_size
            facts = replace(rank.config.facts, kv_tokens=tokens)
            self._act(self.policy.worker_changed(to_s(now), DISTURBED, facts))
            self._look_again(DISTURBED)
        elif word == "worse":
            self._lose(now)
        else:
            self._ranks[DISTURBED] = self.config.ranks()[DISTURBED]
            self._lost = False
            self._act(self.policy.worker_changed(to_s(now), DISTURBED, rank.config.facts))

    def _lose(self, now: int) -> None:
        """The worker is gone, with its memory; what ran there is over."""
        self._lost = True
        gone = [turn for turn in self._open.values() if turn.request is not None and turn.worker == DISTURBED]
        before = self._ranks[DISTURBED].counters
        self.result.lost.append(before)
        self._ranks[DISTURBED] = self.config.ranks()[DISTURBED]
        self._pinned = {key: until for key, until in self._pinned.items() if key[1] != DISTURBED}
        for turn in gone:
            del self._open[turn.number]
        self._act(self.policy.worker_changed(to_s(now), DISTURBED, None))
        for turn in gone:
            self._act(self.policy.turn_aborted(to_s(now), turn.number))
            self._again(turn)

    def _is_there(self, seat: int) -> bool:
        return super()._is_there(seat) and not (self._lost and seat == DISTURBED)

    def _pin(self, pin: Pin) -> None:
        if self._is_there(pin.seat):
            super()._pin(pin)

    def _take(self) -> None:
        """As much of the disturbed worker's memory as is wanted and free; or give it back."""
        rank, now = self._ranks[DISTURBED], self._queue.now
        if self._taken < self._wanted:
            self._taken += rank.take_away(self._wanted - self._taken, now)
        elif self._taken > self._wanted:
            rank.give_back(self._taken - self._wanted, now)
            self._taken = self._wanted

    def _end(self, number: int) -> None:
        super()._end(number)
        if number == DISTURBED and self._taken != self._wanted:
            self._take()


def _reach(seen: dict[Chain, int], chain: Chain, limit: int) -> int:
    """Blocks of the prefix of ``chain``, where each chain was resident up to ``seen``."""
    blocks = 0
    for own, first, last in chain.path:
        wanted = min(last, limit)
        if own not in seen or wanted <= first:
            break
        blocks = min(wanted, seen[own])
        if blocks < wanted:
            break
    return blocks


def disturbed(
    programs: Sequence[Program], policy: Policy, config: SimConfig, perturbation: Perturbation = NOTHING
) -> Result:
    """As `load.sim.run.simulate`, while that goes wrong. ``programs``: as `load.sim.perturb.perturbed` made them."""
    if perturbation is NOTHING:
        return simulate(programs, policy, config)
    return DisturbedSimulation(programs, policy, config, perturbation=perturbation).run()
