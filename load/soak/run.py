"""One soak: the system up, agents at work, one fault after another, and the books at the end."""

from __future__ import annotations

import asyncio
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from bus.nats import connect
from bus.tasks import Tasks, end
from load.soak.agents import Agents
from load.soak.attribution import Fault
from load.soak.books import row_book, short_between
from load.soak.house import House
from load.soak.plan import ADMISSIONS, INGRESSES, LEADER, STANDBY, TAKEOVER_MS, Step, steps
from load.soak.report import Observed, Report, report
from load.soak.watch import Watch, recorded

_FIRST_REQUESTS, _CALM_REQUESTS = 20, 8
_WHOLE_S = 60.0
_SERVED_S = 60.0
_SETTLE_S = 60.0
_AGAIN_S = 1.0
_LOOK_S, _LEADER_LOOK_S = 0.1, 0.05
_WITHOUT_PRESSURE = 9
"""Times its bound that something may take longer where the machine does not say what it was short of."""
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}


class Progress(Protocol):
    """Is told what happens now, and how much of the time is over (0 to 1)."""

    def __call__(self, what: str, share: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Options:
    """``seconds``: how long faults are begun, ``faults``: how many at most. ``nats``: servers of the bus.
    ``directory``: where everything lies."""

    directory: Path
    seconds: float
    seed: int = 1
    nats: int = 1
    faults: int | None = None


async def soak(options: Options, progress: Progress) -> Report:
    """Raises `SoakError` where it cannot be done at all."""
    began = time.monotonic()
    house = House(options.directory, options.nats)
    progress("starting", 0.0)
    late: list[str] = []
    try:
        await house.start()
        run = _Run(options, house, progress)
        await run.all()
    finally:
        late = await house.stop()
    run.problems += [f"{name} did not stop by itself" for name in late]
    rows = await asyncio.to_thread(recorded, house.traces)
    return report(
        Observed(
            seed=options.seed,
            seconds=time.monotonic() - began,
            exchanges=run.agents.exchanges,
            rows=rows,
            faults=run.faults,
            short_s=run.short_s(),
            levels=run.watch.levels,
            two_leaders=run.watch.two_leaders,
            still=run.still,
            problems=run.problems,
            shortage=run.watch.shortage,
        )
    )


class _Run:
    """A soak between the start of its system and its end."""

    watch: Watch

    def __init__(self, options: Options, house: House, progress: Progress) -> None:
        self.faults: list[Fault] = []
        self._calm_at: list[float] = []
        self.problems: list[str] = []
        self.still: dict[str, int] = {}
        self._options = options
        self._house = house
        self._progress = progress
        doors = [(name, f"http://127.0.0.1:{house.ports.http[name]}") for name in INGRESSES]
        self.agents = Agents(options.seed, doors)

    async def all(self) -> None:
        """Chaos, then calm, then what is left in flight."""
        bus = await connect(self._house.nats_url, name="soak", timeout_s=30.0)
        self.watch = Watch(self._house, bus)
        tasks = Tasks()
        try:
            await self._until_whole()
            self.agents.start()
            await self._served(_FIRST_REQUESTS)
            tasks.start("levels", self.watch.sample())
            await self._chaos()
            self._progress("the last answers", 1.0)
            await self.agents.finish()
            await self._settle()
        finally:
            await tasks.stop()
            await self.agents.stop()
            await bus.close()
        for broken in (self.agents.broken, tasks.failed.result() if tasks.failed.done() else None):
            if broken is not None:
                self.problems.append(f"the soak itself failed: {broken!r}")

    def short_s(self) -> list[float]:
        """For each fault, until all was calm again, the seconds that do not count."""
        return [
            short_between(self.watch.shortage, fault.began_at, calm_at)
            if self.watch.shortage
            else _WITHOUT_PRESSURE * max(fault.promise.bound_ms, TAKEOVER_MS) / 1000
            for fault, calm_at in zip(self.faults, self._calm_at, strict=True)
        ]

    async def _chaos(self) -> None:
        start = time.monotonic()
        for step in steps(self._options.seed, self._options.nats):
            share = (time.monotonic() - start) / self._options.seconds
            if self._options.faults is not None:
                share = max(share, len(self.faults) / self._options.faults)
            if share >= 1.0 or self.agents.broken is not None:
                return
            self._progress(f"{step.what} {step.target}, {self.agents.failed} failed", share)
            await self._fault(step)

    async def _fault(self, step: Step) -> None:
        name = await self._named(step.target)
        began = time.time()
        led = asyncio.ensure_future(self._led_by_another(name)) if step.target == LEADER else None
        try:
            await self._done(step, name)
            mended = time.time()
            whole = await self._until_whole()
            await self._served(_CALM_REQUESTS)
            self.faults.append(Fault(step, name, began, mended, whole, await led if led is not None else None))
            self._calm_at.append(time.time())
        finally:
            if led is not None:
                await end(led)

    async def _done(self, step: Step, name: str) -> None:
        """The fault, from its beginning to its mending."""
        match step.what:
            case "kill" | "stop":
                if not await self._house.end_part(name, _SIGNALS[step.what]):
                    self.problems.append(f"{name} did not heed SIGTERM")
                await asyncio.sleep(step.lasts_s)
                await self._house.start_part(name)
            case "partition":
                self._house.cut_off(name)
                await asyncio.sleep(step.lasts_s)
                self._house.let_back(name)
            case "hang":
                self._house.signal_part(name, signal.SIGSTOP)
                await asyncio.sleep(step.lasts_s)
                self._house.signal_part(name, signal.SIGCONT)

    async def _led_by_another(self, name: str) -> float:
        """When (Unix) another admission leads; infinity when none does."""
        deadline = time.monotonic() + _WHOLE_S
        while time.monotonic() < deadline:
            if any(leader != name for leader in await self.watch.leaders()):
                return time.time()
            await asyncio.sleep(_LEADER_LOOK_S)
        return float("inf")

    async def _named(self, target: str) -> str:
        """The part; roles are looked up."""
        if target not in (LEADER, STANDBY):
            return target
        leaders = await self.watch.leaders()
        leader = leaders[0] if leaders else ADMISSIONS[0]
        return leader if target == LEADER else next(name for name in ADMISSIONS if name != leader)

    async def _until_whole(self) -> float:
        """When (Unix) all was well; infinity when it took too long. What ended by itself is started again, and told."""
        deadline = time.monotonic() + _WHOLE_S
        why: str | None = "not looked"
        while time.monotonic() < deadline:
            why = await self.watch.not_whole()
            if why is None:
                return time.time()
            for name in self._house.ended():
                self.problems.append(f"{name} ended by itself")
                await asyncio.sleep(_AGAIN_S)
                await self._house.start_part(name)
            await asyncio.sleep(_LOOK_S)
        self.problems.append(f"not whole in {_WHOLE_S:g} s: {why}")
        return float("inf")

    async def _served(self, count: int) -> None:
        if not await self.agents.served(count, _SERVED_S):
            self.problems.append(f"{count} requests did not succeed in {_SERVED_S:g} s")

    async def _settle(self) -> None:
        """Until nothing is in flight and every row is on the disk, or the time is over: the report will tell."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            still = await self.watch.still()
            rows = await asyncio.to_thread(recorded, self._house.traces)
            if (still.clean and not row_book(self.agents.exchanges, rows).lost) or time.monotonic() > deadline:
                self.still = asdict(still)
                return
            await asyncio.sleep(_LOOK_S)
