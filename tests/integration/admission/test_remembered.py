"""What admission's policy has learned outlives the process: a real bus, real processes, kill -9."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from bus import subjects
from bus.nats import NatsBus
from schemas.base import to_json
from schemas.calibration import Calibration, CalibrationPoint
from schemas.session import SessionIdentity
from services.admission.estimators.learned_state import decode
from tests.integration.admission.processes import is_ready, metric
from tests.integration.admission.world import MODEL, World, identity
from tests.integration.bridge.house import until_async
from tests.support.processes import HelperProcess, python_process, settings_arguments

KEY = subjects.encode_id(MODEL)
CONTEXT = 3_010.0
"""Of every session in its end: prompt and answer."""


@pytest.fixture
async def world(bus: NatsBus) -> AsyncIterator[World]:
    world = World(bus, workers=("w1",))
    await world.start(index=False)
    yield world
    await world.stop()


@asynccontextmanager
async def admission(url: str, directory: Path, label: str, **more: object) -> AsyncIterator[HelperProcess]:
    settings: dict[str, object] = {"nats_url": url, "instance": "admission-1", "warmup_s": 0.3, "policy": "commit"}
    arguments = settings_arguments({**settings, **more})
    async with python_process("services.admission", *arguments, directory=directory, name=label) as process:
        await process.wait_said("service_started")
        await until_async(lambda: asyncio.to_thread(is_ready, process), f"{label} is ready")
        yield process


async def sessions(world: World, first: int, count: int) -> None:
    """One after the other, each with a single turn that is its last."""
    for number in range(first, first + count):
        known = identity(f"s{number}")
        last = SessionIdentity(key=known.key, session_id=known.session_id, final=True)
        request = world.request(f"r{number}", f"s{number}", tokens=3_000, identity=last)
        world.end(request, (await world.grant(request)).grant.worker)


def predicted(process: HelperProcess) -> float:
    return metric(process, "tidegate_predicted_context_tokens")


async def until_predicted(process: HelperProcess) -> None:
    async def known() -> bool:
        return await asyncio.to_thread(predicted, process) == CONTEXT

    await until_async(known, "a prediction")


async def test_a_killed_admission_knows_again_what_it_had_learned(
    url: str, bus: NatsBus, world: World, tmp_path: Path
) -> None:
    bucket = await bus.key_value(subjects.BUCKET_LEARNED)
    async with admission(url, tmp_path, "first", store_learned_s=0.2) as process:
        await sessions(world, 0, 6)
        await until_predicted(process)
        learned = await asyncio.to_thread(metric, process, "tidegate_learned_samples")
        await until_async(lambda: stored_after(bus, learned), "stored")
        await process.kill()
    assert await bucket.keys() == [KEY]
    async with admission(url, tmp_path, "second", store_learned_s=3_600) as process:
        await until_predicted(process)  # its pool begins with the first heartbeat of a worker
        assert await asyncio.to_thread(metric, process, "tidegate_learned_samples") == 0
        await sessions(world, 10, 1)
        before = await bucket.get(KEY)
        await until_async(lambda: learned_more(process), "learned")
        await process.stop()
    after = await bucket.get(KEY)
    assert before is not None
    assert after is not None
    assert after.revision > before.revision  # at a clean stop, however long ago it was stored


async def stored_after(bus: NatsBus, samples: float) -> bool:
    """Whether the value that is stored holds as many sessions' totals."""
    entry = await (await bus.key_value(subjects.BUCKET_LEARNED)).get(KEY)
    if entry is None or entry.value is None:
        return False
    pooled = decode(entry.value)[0].pooled
    return pooled is not None and len(pooled.context.completed) == 6 <= samples


async def learned_more(process: HelperProcess) -> bool:
    return await asyncio.to_thread(metric, process, "tidegate_learned_samples") > 0


async def test_a_damaged_value_is_refused_and_everything_else_runs(
    url: str, bus: NatsBus, world: World, tmp_path: Path
) -> None:
    """And a measured curve is decided by from the moment it is stored."""
    bucket = await bus.key_value(subjects.BUCKET_LEARNED)
    await bucket.put(KEY, b"\x00 no state")
    async with admission(url, tmp_path, "damaged") as process:
        await process.wait_said("learned_state_refused")
        assert await asyncio.to_thread(metric, process, "tidegate_learned_state_refused_total") == 1
        await sessions(world, 0, 1)
        point = CalibrationPoint(tokens=10_000, runs_s=(2.0,), seconds=2.0)
        curve = Calibration(
            model=MODEL, engine="unknown", kv_tokens=16_000, quadratic=0.0, linear=2e-4, points=(point,)
        )
        calibrations = await bus.key_value(subjects.BUCKET_CALIBRATIONS)
        await calibrations.put(subjects.calibration(MODEL, curve.profile), to_json(curve))
        await process.wait_said("engine_costs")
        assert await asyncio.to_thread(metric, process, "tidegate_reload_seconds") == pytest.approx(2.0)
