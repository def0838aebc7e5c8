"""The conformance kit: asks one policy everything that admission may ask it, and more, and judges what it answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bus import subjects
from bus.errors import AnswerFailedError, BusError, BusTimeoutError, NoRespondersError
from bus.interface import Bus
from schemas.decision import PolicyAsk
from schemas.policy import POLICY_ASKS
from tidegate.doctor.checks import Check, failed
from tidegate.policy import judging
from tidegate.policy.judging import Heard, Latency
from tidegate.policy.listing import asked_by_admission
from tidegate.policy.questions import GARBAGE, Case, cases
from tidegate.services import find_services, subjects_of

GRACE_S = 1.0
"""So long after its deadline an answer is still waited for, to tell a late one from none."""
GARBAGE_S = 0.2
"""An answer to what is no question is waited for no longer."""
TIMED = 200
TOGETHER = 32
EXPIRED_MS = 60_000
USUAL_DEADLINE_MS = 50


@dataclass(slots=True)
class Report:
    """What was found about policy ``name`` within ``deadline_ms``; ``latency`` by what was asked."""

    name: str
    deadline_ms: int
    checks: list[Check] = field(default_factory=list)
    latency: dict[PolicyAsk, Latency] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return not failed(self.checks)


@dataclass(frozen=True, slots=True)
class Wishes:
    """``asks`` empty: whatever the policy answers. ``deadline_ms`` ``None``: as admission has it, where it asks the
    policy. ``timed``: questions that are timed one after the other."""

    name: str
    asks: tuple[PolicyAsk, ...] = ()
    deadline_ms: int | None = None
    timed: int = TIMED


def steps_of(ask: PolicyAsk, timed: int) -> int:
    """Steps of one kind of question, for a progress bar."""
    return len(cases(ask)) + len(GARBAGE) + timed + 2


async def check_policy(bus: Bus, wishes: Wishes, planned: Callable[[int], None], step: Callable[[str], None]) -> Report:
    """Everything about one policy. ``planned``: steps in all, once they are known; ``step``: one is done."""
    services = await find_services(bus, "INFO")
    known = asked_by_admission(services).get(wishes.name)
    report = Report(wishes.name, wishes.deadline_ms or (known.deadline_ms if known else None) or USUAL_DEADLINE_MS)
    served = {subject for service in services for subject in subjects_of(service)}
    asks = wishes.asks or await _answered(bus, wishes.name, served)
    if not asks:
        report.checks.append(judging.check_nobody("route", subjects.policy("route", wishes.name)))
        return report
    planned(sum(steps_of(ask, wishes.timed) for ask in asks))
    for ask in asks:
        subject = subjects.policy(ask, wishes.name)
        await Examination(bus, ask, subject, report.deadline_ms, wishes.timed, step).run(report, subject in served)
    return report


async def _answered(bus: Bus, name: str, served: set[str]) -> tuple[PolicyAsk, ...]:
    found = []
    for ask in POLICY_ASKS:
        subject = subjects.policy(ask, name)
        if subject in served or await _is_answered(bus, ask, subject):
            found.append(ask)
    return tuple(found)


async def _is_answered(bus: Bus, ask: PolicyAsk, subject: str) -> bool:
    """Of one that is no micro service. It is asked a good question: a bad one may be its end, which is for later."""
    try:
        await bus.request(subject, cases(ask)[0].payload(_now_ms() + 1_000), timeout_s=1.0)
    except NoRespondersError:
        return False
    except BusError:
        return True
    return True


class Examination:
    """One kind of question to one policy."""

    def __init__(
        self, bus: Bus, ask: PolicyAsk, subject: str, deadline_ms: int, timed: int, step: Callable[[str], None]
    ) -> None:
        self._bus = bus
        self._ask = ask
        self._subject = subject
        self._deadline_ms = deadline_ms
        self._timed = timed
        self._step = step
        self._cases = cases(ask)

    async def run(self, report: Report, is_service: bool) -> None:
        """Adds to ``report``; ends early where nobody answers at all."""
        plain = self._cases[0]
        if (await self._question(plain)).ending == "absent":  # its first answer may be slow: it does not count
            report.checks.append(judging.check_nobody(self._ask, self._subject))
            return
        report.checks.append(judging.check_presence(self._ask, self._subject, is_service))
        for case in self._cases:
            heard = await self._question(case)
            report.checks.append(
                judging.check_case(self._ask, case.name, case.question, heard, expects_nothing=case.expects_nothing)
            )
            self._step(case.name)
            if heard.ending == "silent" and case is plain:
                return  # nothing else can be told of one that says nothing
        expired = await self._request(plain.payload(_now_ms() - EXPIRED_MS), GARBAGE_S)
        report.checks.append(judging.check_expired(self._ask, expired, await self._question(plain)))
        self._step("deadline passed")
        for name, payload in GARBAGE.items():
            await self._request(payload, GARBAGE_S)
            report.checks.append(judging.check_garbage(self._ask, name, await self._question(plain)))
            self._step(name)
        timed = await self._time(plain)
        report.latency[self._ask] = judging.latency(timed, self._deadline_ms)
        report.checks.append(judging.check_speed(self._ask, report.latency[self._ask]))
        together = await asyncio.gather(*(self._question(plain) for _ in range(TOGETHER)))
        report.checks.append(judging.check_together(self._ask, together))
        self._step("at once")

    async def _time(self, plain: Case) -> Sequence[Heard]:
        heard = []
        for _ in range(self._timed):
            heard.append(await self._question(plain))
            self._step("speed")
            if heard[-1].ending in ("silent", "absent"):
                break  # each of these costs its whole grace
        return heard

    async def _question(self, case: Case) -> Heard:
        deadline_s = self._deadline_ms / 1000
        heard = await self._request(case.payload(_now_ms() + self._deadline_ms), deadline_s + GRACE_S)
        if heard.ending == "answered" and heard.took_ms > self._deadline_ms:
            return Heard("late", heard.took_ms, heard.payload)
        return heard

    async def _request(self, payload: bytes, timeout_s: float) -> Heard:
        began = time.perf_counter()

        def took_ms() -> float:
            return (time.perf_counter() - began) * 1000

        try:
            answer = await self._bus.request(self._subject, payload, timeout_s=timeout_s)
        except NoRespondersError:
            return Heard("absent", took_ms())
        except BusTimeoutError:
            return Heard("silent", took_ms())
        except AnswerFailedError as error:
            return Heard("error", took_ms(), problem=error.problem)
        except BusError as error:
            return Heard("error", took_ms(), problem=str(error))
        return Heard("answered", took_ms(), answer.payload)


def _now_ms() -> int:
    return int(time.time() * 1000)
