"""The whole of one calibration: find, look, warm up, sweep, fit, store."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from bus.errors import BusError
from bus.nats import NatsBus
from schemas.calibration import Calibration
from tidegate.calibrate.engine import MeasuredEngine
from tidegate.calibrate.store import find_worker, store
from tidegate.calibrate.sweep import OVERHEAD_TOKENS, Prompts, Run, choose_contexts, to_calibration
from tidegate.errors import NoBusError
from tidegate.locate import Located, open_bus

WARM_UPS = 2
"""Runs of the shortest prompts that are thrown away: the first one pays for lazy loading and for the connection."""

OVERHEAD_RUNS = 5
"""More than of a context: every point has the overhead taken off, and one costs a few milliseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What was asked for. ``url`` or ``worker`` is given. ``contexts``: empty for the usual sweep."""

    url: str | None = None
    worker: str | None = None
    model: str | None = None
    contexts: tuple[int, ...] = ()
    max_context: int | None = None
    runs: int = 3
    force: bool = False
    keep: bool = True
    api_key: str = ""


class Listener(Protocol):
    """Told how far it is."""

    def note(self, sentence: str) -> None: ...

    def planned(self, contexts: Sequence[int], runs: int) -> None: ...

    def done(self, run: Run) -> None: ...


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """``not_stored``: why not, and what to do; empty where it was stored, or was not to be."""

    calibration: Calibration
    stored: bool
    not_stored: str = ""


async def calibrate(wishes: Wishes, located: Located, listener: Listener) -> Outcome:
    """Raises `TidegateError`. Nothing but a bus that is not there leaves a curve that is not stored."""
    bus, why_not = await _bus(wishes, located)
    try:
        if why_not:
            listener.note(f"{why_not}: the curve will be shown, and not stored")
        worker = None
        if wishes.worker is not None and bus is not None:
            worker = await find_worker(bus, wishes.worker)
        engine = MeasuredEngine(worker.profile.url if worker else wishes.url or "", wishes.api_key)
        try:
            subject = await engine.describe(wishes.model, worker)
            contexts = choose_contexts(subject, wishes.contexts, wishes.max_context)
            listener.planned(contexts, wishes.runs)
            sweep = Sweep(engine, subject.model, listener, idle=not wishes.force)
            overhead, runs = await sweep.all(contexts, wishes.runs)
        finally:
            await engine.close()
        at_ms = int(time.time() * 1000)
        measured = to_calibration(subject, overhead, runs, forced=wishes.force, at_ms=at_ms)
        if bus is not None and wishes.keep:
            try:
                await store(bus, measured)
            except BusError as error:
                why_not = f"the bus at {located.shown_url} did not take it: {error} ({error.reason})"
        return Outcome(calibration=measured, stored=wishes.keep and not why_not, not_stored=why_not)
    finally:
        if bus is not None:
            await bus.close()


async def _bus(wishes: Wishes, located: Located) -> tuple[NatsBus | None, str]:
    """The bus where it is needed, or why there is none. Raises `NoBusError` where nothing can be done without."""
    if wishes.worker is None:
        if not wishes.keep:
            return None, ""
        if located.guess:
            return None, "no bus is named (--nats, --workdir or TIDEGATE_NATS_URL)"
    try:
        return await open_bus(located, "tidegate-calibrate"), ""
    except NoBusError as error:
        if wishes.worker is not None:
            raise
        return None, str(error).split(";")[0]


class Sweep:
    """The requests of one sweep, one after the other. ``idle``: the engine must have nothing else to do."""

    def __init__(self, engine: MeasuredEngine, model: str, listener: Listener, *, idle: bool) -> None:
        self._engine = engine
        self._model = model
        self._listener = listener
        self._idle = idle

    async def all(self, contexts: Sequence[int], runs: int) -> tuple[list[Run], dict[int, list[Run]]]:
        """Runs of the overhead's prompt, and of each context. Rounds over all contexts, so that a drift (a machine
        that gets warm) is in every point alike. Raises `CalibrationError`."""
        await self._check()
        prompts = Prompts(secrets.randbits(128), await self._engine.vocabulary(self._model))
        for _ in range(WARM_UPS):
            await self._engine.measure(self._model, prompts.draw(OVERHEAD_TOKENS))
            await self._engine.measure(self._model, prompts.draw(contexts[0]))
        overhead = [
            await self._engine.measure(self._model, prompts.draw(OVERHEAD_TOKENS))
            for _ in range(max(runs, OVERHEAD_RUNS))
        ]
        found: dict[int, list[Run]] = {context: [] for context in contexts}
        for _ in range(runs):
            for context in contexts:
                await self._check()
                run = await self._engine.measure(self._model, prompts.draw(context))
                found[context].append(run)
                self._listener.done(run)
        await self._check()
        return overhead, found

    async def _check(self) -> None:
        if self._idle:
            await self._engine.check_idle()
