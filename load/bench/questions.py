"""A question over a real nats-server: our client against nats-py used directly, in the same run and loop."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nats as nats_py
import uvloop

from bus.interface import BusMessage
from bus.nats import connect
from load.bench.measure import percentile
from load.bench.options import Options

QUESTION_BYTES = 4096
PER_ROUND = 400


async def _measure(url: str, rounds: int, per_round: int) -> dict[str, object]:
    ours_server = await connect(url, name="bench-server", timeout_s=10.0)
    ours = await connect(url, name="bench-client", timeout_s=10.0)
    plain = await nats_py.connect(url)
    plain_server = await nats_py.connect(url)

    def answer(message: BusMessage) -> None:
        ours_server.publish(message.reply, b"ok")

    async def answer_plainly(message: object) -> None:
        await message.respond(b"ok")  # type: ignore[attr-defined]

    await ours_server.subscribe("bench.ours", answer)
    await plain_server.subscribe("bench.plain", cb=answer_plainly)
    await ours_server.flush()
    await plain_server.flush()
    question = bytes(QUESTION_BYTES)
    ours_us: list[float] = []
    plain_us: list[float] = []
    for _ in range(rounds):
        for _ in range(per_round):
            start = time.perf_counter_ns()
            await ours.request("bench.ours", question, timeout_s=5.0)
            ours_us.append((time.perf_counter_ns() - start) / 1000)
        for _ in range(per_round):
            start = time.perf_counter_ns()
            await plain.request("bench.plain", question, timeout=5.0)
            plain_us.append((time.perf_counter_ns() - start) / 1000)
    for connection in (plain, plain_server):
        await connection.close()
    for bus in (ours, ours_server):
        await bus.close()
    return {
        "bench": "question",
        "question_bytes": QUESTION_BYTES,
        "ours_p50_us": round(percentile(ours_us, 50), 1),
        "ours_p99_us": round(percentile(ours_us, 99), 1),
        "nats_py_p50_us": round(percentile(plain_us, 50), 1),
        "nats_py_p99_us": round(percentile(plain_us, 99), 1),
        "ratio_p50": round(percentile(ours_us, 50) / percentile(plain_us, 50), 2),
    }


def run(options: Options) -> dict[str, object]:
    """p50 and p99 of one question at a time, 4 KiB (a chain of 512 blocks)."""
    executable = str(Path(sys.executable).parent / "nats-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        arguments = [executable, "--addr", "127.0.0.1", "--port", str(port), "--jetstream", "--store_dir", folder]
        server = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                per_round = 20 if options.quick else PER_ROUND
                return runner.run(_measure(f"nats://127.0.0.1:{port}", options.runs, per_round))
        finally:
            server.terminate()
            server.wait(timeout=10)
