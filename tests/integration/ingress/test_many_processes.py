"""A front door of two processes behind one port: what clients, operators and its supervisor see of them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from schemas.trace import TraceRow
from services.ingress.replies import REASON_HEADER
from tests.integration.ingress.support import JSON, MODEL, Stage, System, chat
from tests.integration.ingress.test_keys import entry, key_of
from tests.support.processes import HelperProcess, eventually, python_process, settings_arguments
from web.client import AnswerStream, HttpClient, Timeouts
from web.errors import WebError
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")

PATIENCE = Timeouts(first_byte_s=30, total_s=60)


class ManyDoors:
    """The parent of ``processes``, and clients before them."""

    def __init__(self, process: HelperProcess) -> None:
        self.process = process
        self.client = HttpClient()

    @property
    def url(self) -> str:
        found = re.search(r"processes_started .*port=(\d+)", self.process.stderr)
        assert found is not None
        return f"http://127.0.0.1:{found[1]}"

    @property
    def pages(self) -> str:
        found = re.search(r" http_listening url=(\S+)", self.process.stderr)
        assert found is not None
        return found[1]

    async def page(self, path: str) -> tuple[int, str]:
        """The parent's."""
        answer = await self.client.fetch("GET", self.pages + path, [], b"", PATIENCE)
        return answer.status, answer.body.decode()

    async def metric(self, name: str) -> dict[str, float]:
        """Its samples by process, of a page on which both are."""
        async with asyncio.timeout(60):
            while True:
                page = (await self.page("/metrics"))[1]
                samples = [sample for family in text_string_to_metric_families(page) for sample in family.samples]
                up = [sample.value for sample in samples if sample.name == "tidegate_process_up"]
                if up == [1.0, 1.0]:
                    return {sample.labels["process"]: sample.value for sample in samples if sample.name == name}
                await asyncio.sleep(0.1)

    def children(self) -> set[int]:
        """Process ids."""
        text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return {int(pid) for pid in text.split()}

    async def ready(self, count: int = 2) -> None:
        async with asyncio.timeout(90):
            while f"ready ({count} of " not in (await self.page("/readyz"))[1]:  # noqa: ASYNC110 - a page
                await asyncio.sleep(0.1)

    async def post(self, *headers: tuple[bytes, bytes]) -> tuple[int, str]:
        """Status and reason of a chat, on a connection of its own: some process takes it."""
        client = HttpClient()
        try:
            answer = await client.fetch(
                "POST", f"{self.url}/v1/chat/completions", [*JSON, *headers], json.dumps(chat()).encode(), PATIENCE
            )
        finally:
            await client.close()
        return answer.status, (answer.header(REASON_HEADER.decode()) or b"").decode()


@asynccontextmanager
async def many_doors(nats_url: str, directory: Path, **settings: object) -> AsyncIterator[ManyDoors]:
    """Two processes, ready."""
    known = {
        "nats_url": nats_url,
        "port": 0,
        "http_port": 0,
        "admit_idle_s": 0.2,
        "instance": directory.name,
        **settings,
    }
    arguments = ["--workers", "2", *settings_arguments(known)]
    async with python_process("services.ingress", *arguments, directory=directory, name="doors") as process:
        doors = ManyDoors(process)
        await process.wait_said("processes_started")
        pids: set[int] = set()
        try:
            try:
                await doors.ready()
            except (WebError, TimeoutError) as error:
                raise AssertionError(process.output) from error
            pids = doors.children()
            yield doors
        finally:
            await doors.client.close()
            pids |= doors.children() if process.returncode is None else set()
            if process.returncode is None:
                await process.kill()
            await eventually(lambda: not any(alive(pid) for pid in pids), what="children outlive their parent")


def alive(pid: int) -> bool:
    """Whether such a process runs (one that only waits to be collected does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_both_serve_and_stop_together(system: System, tmp_path: Path) -> None:
    """Connections are spread over both; each has its own name and its samples; probes ask the parent; SIGTERM and
    Ctrl-C end all with 0, and nobody else may listen there meanwhile."""
    async with many_doors(system.nats.url, tmp_path, stop_timeout_s=10) as doors:
        async with asyncio.timeout(90):
            while min((await doors.metric("tidegate_ingress_request_seconds_count")).values()) == 0:
                assert await doors.post() == (200, "")
        assert (await doors.page("/healthz")) == (200, "ok\n")
        assert await doors.metric("tidegate_process_up") == {"1": 1.0, "2": 1.0}
        assert (await doors.metric("process_resident_memory_bytes")).keys() == {"parent", "1", "2"}
        assert f"{tmp_path.name}-1 service_started" in doors.process.stderr
        assert f"{tmp_path.name}-2 service_started" in doors.process.stderr
        taken = settings_arguments({"nats_url": system.nats.url, "port": doors.url.rpartition(":")[2]})
        for more in ([], ["--workers", "2"]):
            async with python_process("services.ingress", *taken, *more, directory=tmp_path, name="late") as late:
                assert await late.wait() == 2
                assert "is taken; stop what listens there or choose another" in late.stderr
        doors.process.signal(signal.SIGINT)
        assert await doors.process.wait() == 0
        assert doors.process.stderr.count("service_stopped") == 3
        assert "Traceback" not in doors.process.stderr


async def test_one_is_killed_under_load(stage: Stage, tmp_path: Path) -> None:
    """Its streams break, those of the other go to their end; new requests are served; it returns under its name."""
    go_on = asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        await go_on.wait()
        responder.write(b"data: [DONE]\n\n")
        responder.finish()

    for engine in stage.engines.values():
        engine.script = slow
    async with many_doors(stage.nats.url, tmp_path) as doors:
        streams: list[tuple[HttpClient, AnswerStream]] = []
        async with asyncio.timeout(90):
            while min((await doors.metric("tidegate_ingress_in_flight")).values()) == 0:
                client = HttpClient()
                body = json.dumps(chat(stream=True)).encode()
                streams.append(
                    (client, await client.open("POST", f"{doors.url}/v1/chat/completions", JSON, body, PATIENCE))
                )
        victim = min(doors.children())
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: not alive(victim))
        go_on.set()
        ends = [await end_of(stream) for _, stream in streams]
        assert set(ends) == {True, False}
        assert (await doors.post())[0] == 200
        await doors.ready()
        assert victim not in doors.children()
        assert sum((await doors.metric("tidegate_process_restarts_total")).values()) == 1
        for client, _ in streams:
            await client.close()
        assert await doors.process.stop() == 0


async def end_of(stream: AnswerStream) -> bool:
    """Whether it ends as it should."""
    data = b""
    try:
        while piece := await stream.read():
            data += piece
    except WebError:
        return False
    return data.endswith(b"data: [DONE]\n\n")


async def test_a_drain_finishes_streams_of_both(stage: Stage, tmp_path: Path) -> None:
    """SIGTERM: nobody new comes in, who is in goes to the end, then all stop with 0."""
    go_on = asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        await go_on.wait()
        responder.write(b"data: [DONE]\n\n")
        responder.finish()

    for engine in stage.engines.values():
        engine.script = slow
    async with many_doors(stage.nats.url, tmp_path, stop_timeout_s=60) as doors:
        clients, streams = [], []
        for _ in range(8):
            clients.append(client := HttpClient())
            body = json.dumps(chat(stream=True)).encode()
            streams.append(await client.open("POST", f"{doors.url}/v1/chat/completions", JSON, body, PATIENCE))
        doors.process.signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            while await connects(doors.url):  # noqa: ASYNC110 - no event of another process
                await asyncio.sleep(0.05)
        assert (await doors.page("/readyz"))[0] == 503
        go_on.set()
        assert [await end_of(stream) for stream in streams] == [True] * 8
        assert await doors.process.wait() == 0
        for client in clients:
            await client.close()


async def connects(url: str) -> bool:
    """Whether somebody listens there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    except ConnectionError:
        return False
    writer.transport.abort()
    return True


async def test_a_keys_limit_is_of_both(stage: Stage, tmp_path: Path) -> None:
    """Ten at once and next to nothing after that: ten of forty, on connections that fall on both processes; who is
    started again does not begin with a full bucket."""
    keys = tmp_path / "keys.jsonl"
    keys.write_bytes(entry("aaaa", requests_per_s=0.001, burst=10))
    key = (b"authorization", f"Bearer {key_of('aaaa')}".encode())
    async with many_doors(stage.nats.url, tmp_path, keys_file=keys, splice_cache_salt="false") as doors:
        answers = [await doors.post(key) for _ in range(40)]
        assert answers == [(200, "")] * 10 + [(429, "rate_limited")] * 30
        served = await doors.metric("tidegate_ingress_not_accepted_total")
        assert served.keys() == {"1", "2"}
        for victim in doors.children():
            os.kill(victim, signal.SIGKILL)
            await eventually(lambda victim=victim: not alive(victim))  # type: ignore[misc]
        await doors.ready()
        assert await doors.post(key) == (429, "rate_limited")


async def test_a_request_that_is_sent_again_is_the_same_to_admission(stage: Stage, tmp_path: Path) -> None:
    """Whichever process it comes to: its digest tells, not who asks."""
    session = (b"x-tidegate-session-id", b"again")
    async with stage.leader(lambda _: []) as asked, many_doors(stage.nats.url, tmp_path) as doors:
        async with asyncio.timeout(90):
            while len({question.ingress for question in asked}) < 2:
                assert await doors.post(session) == (200, "")
        assert {question.ingress for question in asked} == {f"{tmp_path.name}-1", f"{tmp_path.name}-2"}
        assert len({question.digest for question in asked}) == 1
        assert all(question.digest for question in asked)


async def test_a_turn_that_is_sent_again_to_both_is_accounted_once(stage: Stage, tmp_path: Path) -> None:
    """It fails at its engine and comes again, the same to the byte, now to one process, now to the other: to a real
    admission all but the first are the same turn, and each sending has its row."""

    async def fail(request: Request, responder: Responder) -> None:
        responder.send(500, JSON, b"{}")

    for engine in stage.engines.values():
        engine.script = fail
    session = (b"x-tidegate-session-id", tmp_path.name.encode())
    settings = settings_arguments({"nats_url": stage.nats.url, "http_port": 0, "warmup_s": 0.2, "worker_lost_s": 30.0})
    async with python_process("services.admission", *settings, directory=tmp_path, name="admission") as admission:
        await admission.wait_said("leadership")
        page = re.search(r" http_listening url=(\S+)", admission.stderr)
        assert page is not None
        async with many_doors(stage.nats.url, tmp_path, admit_idle_s=15, breaker_failures=0) as doors:
            sendings = 0
            async with asyncio.timeout(90):
                while min((await doors.metric("tidegate_ingress_request_seconds_count")).values()) == 0:
                    assert (await doors.post(session))[0] == 500
                    sendings += 1
            assert sendings >= 2
            again = (await doors.client.fetch("GET", f"{page[1]}/metrics", [], b"", PATIENCE)).body.decode()
            assert f"\ntidegate_resent_turns_total {sendings - 1:.1f}\n" in again
            await eventually(lambda: len(rows_of(stage, tmp_path.name)) == sendings)


def rows_of(stage: Stage, session: str) -> list[TraceRow]:
    return [row for row in stage.rows.rows if row.agent_context and row.agent_context.session_id == session]


async def test_children_end_with_their_parent(stage: Stage, tmp_path: Path) -> None:
    """Nobody is left behind by a parent that is killed: its port is free for the next one at once."""
    async with many_doors(stage.nats.url, tmp_path) as doors:
        pids = doors.children()
        assert len(pids) == 2
        await doors.process.kill()
        await eventually(lambda: not any(alive(pid) for pid in pids))
        assert not await connects(doors.url)


async def test_a_wrong_setting_ends_all(stage: Stage, tmp_path: Path) -> None:
    """One sentence, exit code 2, as with one process; a process that hangs is another matter."""
    known = settings_arguments(
        {"nats_url": stage.nats.url, "port": 0, "tokenizers": json.dumps({MODEL: str(tmp_path / "none")})}
    )
    async with python_process("services.ingress", "--workers", "2", *known, directory=tmp_path) as process:
        assert await process.wait() == 2
        assert "tokenizers" in process.stderr
        assert "Traceback" not in process.stderr


async def test_two_of_one_name(stage: Stage, tmp_path: Path) -> None:
    """The younger says so and ends; the older goes on."""
    settings = settings_arguments({"nats_url": stage.nats.url, "port": 0, "instance": "twin"})
    async with python_process("services.ingress", *settings, directory=tmp_path, name="older") as older:
        await older.wait_said("service_started")
        async with python_process("services.ingress", *settings, directory=tmp_path, name="younger") as younger:
            assert await younger.wait() == 2
            assert "another front door named twin is on this bus" in younger.stderr
        assert older.returncode is None
        assert await older.stop() == 0
