"""`tidegate calibrate` against a simulated engine's process and a real bus: the curve, the refusals, the store."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bus.nats import NatsBus
from bus.subjects import BUCKET_CALIBRATIONS, worker_state
from schemas.base import to_json
from schemas.worker import WorkerProfile, WorkerState
from services.admission.estimators.calibrations import CalibrationTable
from services.admission.estimators.reload_cost import H100_8B
from tests.integration.engine.engines import RunningEngine, running_engine, until
from tests.support.nats import NatsServer
from tests.support.pace import WITHOUT_PRESSURE, Stopwatch
from tests.support.processes import HelperProcess, start_process
from tidegate.calibrate.run import Wishes
from tidegate.calibrate.run import calibrate as run_calibration
from tidegate.calibrate.sweep import Run
from tidegate.locate import Located

SIM = ("--profile", "h100-8b")
SHORT = ("--contexts", "1000,2000,4000", "--runs", "1")
TOLERANCE, SLACK_S = 0.07, 0.010
"""A busy machine adds milliseconds; the constant of each iteration is 5 %, which PR(n) leaves out."""
RUNS = 15
"""Of one calibration: the time that the machine was short of processors is spread over them."""


@asynccontextmanager
async def calibrate(directory: Path, *arguments: str) -> AsyncIterator[HelperProcess]:
    command = [sys.executable, "-m", "tidegate", "calibrate", *arguments]
    process = await start_process(command, directory, name="calibrate", environment={"TIDEGATE_NATS_URL": ""})
    try:
        yield process
    finally:
        await process.close()


def told(process: HelperProcess) -> dict[str, Any]:
    return dict(json.loads(process.stdout.splitlines()[-1]))


async def test_a_known_engine_gives_its_curve_and_admission_can_read_it(
    nats_server: NatsServer, bus: NatsBus, tmp_path: Path
) -> None:
    """Spec scheduling §4.2: PR(n) of the profile that the engine runs by; stored under the documented key."""
    async with running_engine(tmp_path, *SIM) as engine:
        options = (engine.url, "--max-context", "16000", "--nats", nats_server.url, "--json")
        since = Stopwatch()
        async with calibrate(tmp_path, *options) as process:
            assert await process.wait() == 0, process.output
            lost_s = await since.lost_s()
            found = told(process)
            assert "measuring contexts of 1000, 2000, 4000, 8000, 16000 tokens, 3 times each" in process.stderr
    assert (found["stored"], found["not_stored"]) == (True, None)
    assert (found["bucket"], found["key"]) == (BUCKET_CALIBRATIONS, "sim-8b.vllm-410000")
    assert [len(point["runs_s"]) for point in found["calibration"]["points"]] == [3] * 5
    bucket = await bus.key_value(BUCKET_CALIBRATIONS)
    entry = await bucket.get(found["key"])
    assert entry is not None
    table = CalibrationTable()
    table.take(entry.key, entry.value)
    curve = table.find("sim-8b", "vllm", 412_000)
    assert curve is not None
    slack_s = WITHOUT_PRESSURE * SLACK_S if lost_s is None else SLACK_S + lost_s / RUNS
    for tokens in (4000, 8000, 12_000, 16_000):
        wanted = H100_8B.seconds(tokens)
        assert abs(curve.cost.seconds(tokens) - wanted) <= TOLERANCE * wanted + slack_s, (lost_s, curve.stored)
    assert curve.stored.worst < 0.15 + (slack_s - SLACK_S) / H100_8B.seconds(1000)
    assert not curve.stored.forced


async def test_by_its_workers_name(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """The bus tells the address, and the profile that admission will look the curve up by; others are named."""
    async with running_engine(tmp_path, *SIM) as engine:
        profile = WorkerProfile(
            url=engine.url, model="sim-8b", models=("sim-8b",), engine="simulated", kv_tokens=50_000, max_model_len=9000
        )
        state = WorkerState(
            source="bridge", epoch=1, seq=0, at_ms=1, worker="gpu 1", incarnation="i", health="ready", profile=profile
        )
        speaking = asyncio.create_task(speak(bus, state))
        try:
            async with calibrate(
                tmp_path, "--worker", "gpu 1", "--nats", nats_server.url, "--json", "--runs", "1"
            ) as process:
                assert await process.wait() == 0, process.output
                found = told(process)
            async with calibrate(tmp_path, "--worker", "gpu 2", "--nats", nats_server.url) as process:
                assert await process.wait() == 1
                assert "no worker 'gpu 2' is there (heard: gpu 1)" in process.stderr
        finally:
            speaking.cancel()
            await asyncio.gather(speaking, return_exceptions=True)
    assert found["key"] == "sim-8b.simulated-50000"
    assert found["calibration"]["worker"] == "gpu 1"
    assert [point["tokens"] for point in found["calibration"]["points"]] == [1000, 2000, 4000, 8000, 8999]


async def speak(bus: NatsBus, state: WorkerState) -> None:
    """As a bridge does, a little oftener."""
    while True:
        bus.publish(worker_state(state.worker), to_json(state))
        await asyncio.sleep(0.2)


async def test_a_busy_engine_is_refused_unless_forced(tmp_path: Path) -> None:
    """Before a prompt is sent; with --force it is measured, and the curve says so."""
    async with running_engine(tmp_path, *SIM) as engine:
        running = asyncio.create_task(engine.complete([5] * 16, max_tokens=4000))
        try:
            await until_running(engine)
            served = await engine.counts()
            async with calibrate(tmp_path, engine.url, "--no-store", *SHORT) as process:
                assert await process.wait() == 1
                assert "is busy: requests that run or wait there (now 1)" in process.stderr
                assert "--force" in process.stderr
            assert await engine.counts() == served
            async with calibrate(tmp_path, engine.url, "--no-store", "--force", "--json", *SHORT) as process:
                assert await process.wait() == 0, process.output
                assert told(process)["calibration"]["forced"] is True
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def until_running(engine: RunningEngine, count: int = 1) -> None:
    async def reached() -> bool:
        return sum((await engine.metric("vllm:num_requests_running")).values()) == count

    await until(reached)


async def test_without_a_bus_the_curve_is_shown_and_said_not_to_be_stored(tmp_path: Path) -> None:
    """Measuring takes minutes: it is not lost. Code 1 unless storing was not asked for."""
    async with running_engine(tmp_path, *SIM) as engine:
        async with calibrate(tmp_path, engine.url, *SHORT, "--nats", "nats://127.0.0.1:9") as process:
            assert await process.wait() == 1
            assert "tidegate: not stored: no bus answers at nats://127.0.0.1:9" in process.stderr
            assert "time to first token of n tokens:" in process.stdout
            assert "stored in" not in process.stdout
        async with calibrate(tmp_path, engine.url, *SHORT, "--no-store") as process:
            assert await process.wait() == 0
            assert "not stored" not in process.stderr


async def test_a_bus_that_nobody_named_is_not_written_to(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """Whoever listens on the usual address may be somebody else: a guess is good enough to look, not to store."""
    notes: list[str] = []

    class Quiet:
        def note(self, sentence: str) -> None:
            notes.append(sentence)

        def planned(self, contexts: Sequence[int], runs: int) -> None:
            return None

        def done(self, run: Run) -> None:
            return None

    async with running_engine(tmp_path, *SIM) as engine:
        wishes = Wishes(url=engine.url, contexts=(1000, 2000, 4000), runs=1)
        guessed = Located(nats_server.url, "the usual address", None, guess="nobody named it")
        outcome = await run_calibration(wishes, guessed, Quiet())
    assert not outcome.stored
    assert outcome.not_stored.startswith("no bus is named (--nats, --workdir or TIDEGATE_NATS_URL)")
    assert len(notes) == 1
    assert await (await bus.key_value(BUCKET_CALIBRATIONS)).keys() == []


async def test_wrong_use_and_wrong_engines_say_what_to_do(tmp_path: Path) -> None:
    """One sentence and no traceback: nobody there, no such model, too long a context, no engine at all."""
    async with running_engine(tmp_path, *SIM, "--max-model-len", "4096") as engine:
        for arguments, code, said in [
            (("http://127.0.0.1:9", "--no-store"), 1, "no engine answers at http://127.0.0.1:9"),
            (
                (engine.url, "--no-store", "--model", "other"),
                1,
                "serves no model 'other'; with --model name one of sim-8b",
            ),
            ((engine.url, "--no-store", "--max-context", "5000"), 2, "takes prompts of up to 4095 tokens"),
            ((engine.url, "--worker", "w"), 2, "name one engine"),
            ((engine.url, "--contexts", "1,2,x"), 2, "--contexts"),
            ((), 2, "name one engine"),
        ]:
            async with calibrate(tmp_path, *arguments) as process:
                assert await process.wait() == code, process.output
                assert said in process.stderr
                assert "Traceback" not in process.stderr
                assert process.stdout == ""


async def test_an_engine_that_fails_in_the_middle(tmp_path: Path) -> None:
    """What it answered, and what to do; a connection that is cut is told too."""
    async with running_engine(tmp_path, *SIM) as engine:
        for flags, said in [
            ({"error_requests": 1, "error_status": 404}, "status 404: the engine was told to fail; does it serve"),
            ({"error_requests": 1, "error_status": 500}, "status 500"),
            ({"error_requests": 1, "error_status": 400}, "--max-context"),
        ]:
            await engine.misbehave(**flags)
            async with calibrate(tmp_path, engine.url, "--no-store", *SHORT) as process:
                assert await process.wait() == 1
                (line,) = [line for line in process.stderr.splitlines() if line.startswith("tidegate:")]
                assert said in line


async def test_ctrl_c_ends_it_cleanly(nats_server: NatsServer, bus: NatsBus, tmp_path: Path) -> None:
    """Code 130, nothing stored, no traceback, and the engine is left with nothing to do."""
    async with running_engine(tmp_path, *SIM) as engine:
        async with calibrate(tmp_path, engine.url, "--nats", nats_server.url) as process:
            await process.wait_said("measuring contexts")
            await until_running(engine)
            process.signal(signal.SIGINT)
            assert await process.wait() == 130
            assert process.stderr.endswith("tidegate: interrupted; nothing was stored\n")
            assert "Traceback" not in process.stderr
            assert process.stdout == ""
        await until_running(engine, 0)
    assert await (await bus.key_value(BUCKET_CALIBRATIONS)).keys() == []
