"""One run of the demo: a system on free ports (or one that runs already), the workload, the figures."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from bus.errors import BusError, SettingsError
from load.workload.client import WorkloadClient
from load.workload.sessions import WorkloadPlan, WorkloadShape, plan
from tidegate.demo.figures import Figures, Observed, measure
from tidegate.demo.observe import Watcher, fetch_served, recorded_requests
from tidegate.errors import TidegateError
from tidegate.front_door import first_model
from tidegate.locate import Located, open_bus
from tidegate.supervisor.config import UpSettings
from tidegate.supervisor.system import System

_ROWS_WAIT_S = 10.0
_REQUEST_TIMEOUT_S = 30.0


class Listener(Protocol):
    """Hears how a run goes on."""

    def stage(self, what: str) -> None:
        """``what`` the run does now, in a few words."""

    def planned(self, requests: int) -> None:
        """So many requests will be made."""

    def done(self, failed: bool) -> None:
        """One request ended."""


@dataclass(frozen=True, slots=True)
class Target:
    """A running system. ``engines``: worker to URL of those that say what they served; ``None``: they cannot be
    asked."""

    url: str
    bus: Located
    model: str
    engines: dict[str, str] | None = None


async def run_own(shape: WorkloadShape, seed: int, engines: int, listener: Listener) -> Figures:
    """Start a whole system, run the workload, stop it. Raises `TidegateError` when it does not start.

    Its folder is removed when the figures are good, else kept and named.
    """
    workdir = Path(tempfile.mkdtemp(prefix="tidegate-demo-"))
    # Whatever the environment says of the recorder's folder: old rows there would be counted.
    overrides = {"recorder": {"directory": str(workdir / "traces")}}
    settings = UpSettings(port=0, engines=engines, workdir=str(workdir))
    system = System(settings, usual_ports=False, overrides=overrides)
    listener.stage(f"starting {engines} simulated engines and the services")
    nothing_to_keep = False
    try:
        state = await system.start()
        workers = {engine.worker: engine.url for engine in state.engines if engine.worker is not None}
        bus = Located(state.nats_url, "the demo", state)
        observed = await drive(Target(state.url, bus, state.model or "", workers), plan(shape, seed), listener)
    except (asyncio.CancelledError, SettingsError):
        nothing_to_keep = True
        raise
    except (TidegateError, BusError) as error:
        raise TidegateError(f"{error}\n  the logs are kept in {workdir / 'logs'}") from error
    finally:
        listener.stage("stopping")
        killed = await system.stop()
        if nothing_to_keep:
            await asyncio.to_thread(shutil.rmtree, workdir)
    recorded = await asyncio.to_thread(recorded_requests, workdir / "traces")
    figures = measure(msgspec.structs.replace(observed, recorded=tuple(recorded)))
    if killed:
        problem = f"did not stop in time and were killed: {', '.join(killed)}"
        figures = msgspec.structs.replace(figures, problems=(*figures.problems, problem))
    if figures.good:
        await asyncio.to_thread(shutil.rmtree, workdir)
    else:
        listener.stage(f"logs and traces are kept in {workdir}")
    return figures


async def run_against(
    url: str, bus: Located, model: str | None, shape: WorkloadShape, seed: int, listener: Listener
) -> Figures:
    """The same workload through a system that runs already, others' requests left out of the figures."""
    model = model or await first_model(url)
    if model is None:
        raise TidegateError(f"the front door at {url} names no model; is it ready? see {url}/readyz, or give --model")
    workload = plan(shape, seed, run_id=f"demo-{uuid.uuid4().hex[:8]}")
    observed = await drive(Target(url, bus, model), workload, listener)
    ours = {session.session_id for session in workload.sessions}
    rows = {
        request: row
        for request, row in observed.rows.items()
        if row.agent_context is not None and row.agent_context.session_id in ours
    }
    decisions = {worker: [request for request in ids if request in rows] for worker, ids in observed.decisions.items()}
    stored = tuple(request for request in observed.stored if request in rows)
    return measure(msgspec.structs.replace(observed, rows=rows, stored=stored, decisions=decisions))


async def drive(target: Target, workload: WorkloadPlan, listener: Listener) -> Observed:
    """The workload through ``target``, watched on the bus until every request has its row."""
    bus = await open_bus(target.bus, "tidegate-demo")
    watcher = Watcher(bus)
    client = WorkloadClient(target.url, target.model, timeout_s=_REQUEST_TIMEOUT_S)
    try:
        await watcher.start()
        listener.planned(workload.requests)
        listener.stage(f"{len(workload.sessions)} sessions, {workload.requests} requests")
        results = await client.run(workload, lambda result: listener.done(result.failed))
        requests = {result.request_id for result in results if result.request_id is not None}
        await watcher.wait_for_rows(requests, _ROWS_WAIT_S)
        served = None if target.engines is None else await fetch_served(target.engines)
    finally:
        await client.close()
        await watcher.stop()
        await bus.close()
    return Observed(
        results=tuple(results),
        rows=dict(watcher.rows),
        stored=tuple(watcher.stored),
        recorded=None,
        decisions=dict(watcher.decisions),
        served=served,
    )
