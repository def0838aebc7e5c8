"""A scheduling policy in the running service: workers become seats, sessions programs, asks and facts its events.

One policy serves one pool: the workers of one model, under whatever names they serve it. Leader and standby tell their
policies the same; what a policy did not admit itself (another leader's grant, an ingress's own choice, a retry) it is
told by `Policy.turn_runs`. Everything here is by request id, so that what is told twice, or late, is nothing.

A worker whose KV size or block size is not known has no seat. Pins are not lowered to anything: engines outside the
laboratory cannot be told to keep blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from schemas.admit import AdmitRequest
from schemas.request import RequestEnd
from schemas.session import SessionKey
from schemas.tool import ToolEvent
from schemas.worker import WorkerProfile
from services.admission.consulting import NO_VERDICT, Verdict
from services.admission.driving import PolicyDriver
from services.admission.engine_costs import EngineCosts
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.outcomes import Let, Place
from services.admission.placement import IndexView
from services.admission.pools import KnownWorker, Pool
from services.admission.remembered import Remembered, Stored
from services.admission.requests import RequestRecord
from services.admission.scheduled_facts import advised, sizes, tool_seconds
from services.admission.scheduling.interface import TurnUsage
from services.admission.workers import Worker

MAX_POOLS = 64
"""Models with a policy of their own; workers of more have no seats."""


class Scheduled(PolicyDriver):
    """What happens in the service, as the policies' events. See `PolicyDriver`."""

    def __init__(
        self,
        policy: str,
        parameters: Mapping[str, Any],
        choose: Callable[[int], int],
        is_known: Callable[[SessionKey], bool],
        now: float,
        lease_s: float,
    ) -> None:
        super().__init__(policy, parameters, choose, is_known, now, lease_s)
        self.remembered = Remembered()
        self.costs = EngineCosts()
        self._workers: dict[str, KnownWorker] = {}
        self._profiles: dict[str, WorkerProfile] = {}

    # Workers

    def worker(self, name: str, worker: Worker | None, *, lost: bool) -> set[Place]:
        """The worker's state changed, or it is gone (``None``). ``lost``: all that ran there is over.

        Returns the ranks that have become seats: what runs there already is to be told by `runs`.
        """
        before = self._workers.get(name)
        wanted = sizes(worker, before, self.pools[before.pool].learned if before is not None else None)
        if before is not None and (
            lost or wanted is None or (wanted.pool, len(wanted.ranks)) != (before.pool, len(before.ranks))
        ):
            self._close_seats(name)
            before = None
        if worker is None or wanted is None or wanted == before:
            return set()
        pool = self._pool(wanted.pool)
        if pool is None:
            self.ignored["pool"] += 1
            return set()
        self._workers[name], self._profiles[name] = wanted, worker.state.profile
        self._set_costs(pool)
        opened = set()
        for rank, facts in enumerate(wanted.ranks):
            place = name, rank
            if place not in pool.seats:
                pool.open_seat(place)
                opened.add(place)
            if pool.sizes.get(place) != facts:
                pool.sizes[place] = facts
                self._tell_seat(pool, pool.seats[place], facts)
        return opened

    def _close_seats(self, name: str) -> None:
        known = self._workers.pop(name)
        self._profiles.pop(name, None)
        pool = self.pools[known.pool]
        for rank in range(len(known.ranks)):
            del pool.sizes[name, rank]  # first: a policy that has to take over now is not to hear of it
            self._tell_seat(pool, pool.seats[name, rank], None)
            self._outcomes += pool.end_leases("worker_lost", pool.seats[name, rank])
            pool.close_seat((name, rank))
        for turn in [turn for turn in self.turns.values() if turn.place is not None and turn.place[0] == name]:
            self._over(turn)

    def _pool(self, name: str) -> Pool | None:
        pool = self.pools.get(name)
        if pool is None:
            if len(self.pools) >= MAX_POOLS:
                empty = next((each for each, pool in self.pools.items() if self._is_deserted(each, pool)), None)
                if empty is None:
                    return None
                self._outcomes += self.pools.pop(empty).end_pauses("policy_restarted")
                self.remembered.forget(empty)
            pool = self.pools[name] = Pool(name, self._remembered(name), self._now)
            pool.restorable = not self.remembered.is_read
            self._begin(pool)
        return pool

    def _is_deserted(self, name: str, pool: Pool) -> bool:
        return not pool.seats and all(turn.pool != name for turn in self.turns.values())

    def _pool_of(self, workers: Sequence[Worker]) -> Pool | None:
        """The pool of the first of these that has a seat."""
        for worker in workers:
            known = self._workers.get(worker.name)
            if known is not None:
                return self.pools[known.pool]
        return None

    # Turns

    def ready(
        self,
        request: AdmitRequest,
        workers: Sequence[Worker],
        index: int,
        view: IndexView | None,
        verdict: Verdict = NO_VERDICT,
    ) -> bool:
        """The request may run from now on. ``workers`` serve its model; ``index`` counts its session's turns;
        ``verdict``: what users' policies say.

        ``False``: there is no seat for it, and no policy has heard of it.
        """
        pool = self._pool_of(workers)
        if pool is None or pool.policy is None or request.request_id in self.turns:
            return False
        turn = self._turn(request, pool, index, request.max_output_tokens, expected=request.expected_output_tokens)
        turn.facts = advised(turn.facts, verdict, pool.seats)
        turn.view = view
        self._tell_ready(pool, turn)
        return True

    def let_at_once(self, request_id: str) -> Let | None:
        """Where the policy has sent a request that it was just told of, taken out of the answers."""
        turn = self.turns.get(request_id)
        if turn is None or turn.place is None:
            return None
        let = next(each for each in self._outcomes if isinstance(each, Let) and each.request_id == request_id)
        self._outcomes.remove(let)
        return let

    def runs(self, record: RequestRecord, worker: str, rank: int, index: int = 0, held_s: float = 0.0) -> None:
        """The request runs there, whoever has sent it, and held it for so long."""
        known = self._workers.get(worker)
        place = worker, rank
        if record.request_id in self.turns or known is None or place not in self.pools[known.pool].seats:
            return
        pool = self.pools[known.pool]
        turn = self._turn(record, pool, index, None, held_s)
        turn.place = place
        self._tell_runs(pool, turn, pool.seats[place])

    def place_of(self, request_id: str) -> Place | None:
        """Where the policy has the request run."""
        turn = self.turns.get(request_id)
        return turn.place if turn is not None else None

    def place_in_line(self, request_id: str) -> int | None:
        """The request's place in the policy's order, counted from 1; ``None``: it does not wait, or nobody knows."""
        turn = self.turns.get(request_id)
        if turn is None or turn.place is not None:
            return None
        before = self._ask(self.pools[turn.pool], "place", lambda policy: policy.place(turn.number))
        return None if before is None else before + 1

    def has_turn(self, key: SessionKey) -> bool:
        """Whether a turn of the session runs or waits."""
        name = key.text()
        return any((pool, name) in self._of_program for pool in self.pools)

    def figures(self, pool: Pool, seat: int) -> Mapping[str, float]:
        """What the policy goes by at the seat, by name."""
        return self._ask(pool, "figures", lambda policy: policy.figures(seat)) or {}

    def first_token(self, request_id: str) -> None:
        """Its prompt is computed."""
        turn = self.turns.get(request_id)
        if turn is not None:
            number = turn.number
            self._tell(self.pools[turn.pool], "first_token", lambda policy: policy.first_token(self._now, number))

    def finished(self, fact: RequestEnd, input_tokens: int) -> None:
        """It ran to its end. ``input_tokens``: of its prompt, where the engine did not say."""
        turn = self.turns.get(fact.request_id)
        if turn is None:
            return
        if turn.place is None:  # it waited, and ran somewhere that we were not told of
            self.withdraw(fact.request_id)
            return
        pool, name = self.pools[turn.pool], turn.program.name
        usage = fact.usage
        tool = fact.tool_names[0] if fact.tool_names else None
        is_over = self._sub_agents.ended(name, tool, completed=True)
        facts = TurnUsage(
            turn=turn.number,
            program=name,
            seat=pool.seats[turn.place],
            prompt_tokens=usage.input_tokens if usage.input_tokens is not None else input_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens or 0,
            tool=tool,
            final=turn.program.single or fact.kind == "final" or bool(fact.identity.final) or is_over,
            spawned=self._sub_agents.of(name),
        )
        if facts.final:
            self._sub_agents.forget(name)
        self._forget(turn)
        self._tell(pool, "turn_finished", lambda policy: policy.turn_finished(self._now, facts))

    def withdraw(self, request_id: str) -> None:
        """It is over without usage, or waits no more: all that it booked is given back."""
        turn = self.turns.get(request_id)
        if turn is not None:
            self._over(turn)

    def closed(self, key: SessionKey) -> None:
        """The session is over."""
        name = key.text()
        self._sub_agents.forget(name)
        self._close(name)

    def lease_advice(self, key: SessionKey, keep: bool, until: float | None) -> None:
        """What users' policies say of the KV that an idle session keeps; ``until`` in Unix seconds."""
        name = key.text()
        until = None if until is None else until + self._ahead
        for pool in self.pools.values():
            if any(program == name for program, _ in pool.leases):
                self._tell(pool, "lease_advice", lambda policy: policy.lease_advice(self._now, name, keep, until))

    def tool_event(self, fact: ToolEvent) -> None:
        """A harness says how long a call took. What was only inferred from requests, we know ourselves."""
        seconds = tool_seconds(fact)
        if seconds is None:
            return
        name = fact.session.text()
        for pool in self.pools.values():
            self._tell(pool, "tool_ended", lambda policy: policy.tool_ended(self._now, name, fact.tool_class, seconds))

    # What is known from before

    def due(self, every_s: float) -> list[Stored]:
        """What was learned and not stored for so long (`Remembered.due`)."""
        return self.remembered.due(self.pools.values(), self._now, every_s=every_s)

    def read_learned(self, values: Mapping[str, bytes]) -> None:
        """All that is stored of pools. One that began before this was known begins again with it."""
        self.remembered.read(values)
        for pool in self.pools.values():
            if pool.restorable and self.remembered.has(pool.name):
                pool.learned = self._remembered(pool.name)
                self._set_costs(pool)
                self._begin(pool)
            pool.restorable = False

    def _remembered(self, name: str) -> LearnedPool:
        learned, refused = self.remembered.begun(name)
        for error in refused:
            self._notice("learned_state_refused", pool=name, part=error.part, reason=error.reason, detail=str(error))
        return learned

    def calibrated(self, key: str, payload: bytes | None) -> None:
        """A measured curve, or none any more."""
        self._outcomes += self.costs.take(key, payload)
        for pool in self.pools.values():
            self._set_costs(pool)

    def _set_costs(self, pool: Pool) -> None:
        names = (name for name, known in self._workers.items() if known.pool == pool.name)
        self._outcomes += self.costs.apply(pool, (self._profiles[name] for name in names))
