"""What clients send is held within bounds: long prompts, many bodies, slow bodies."""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from services.ingress.endpoints import ChatPrompt, read_request
from services.ingress.shell.local_tokenizer import LocalTokenizer
from tests.integration.ingress.support import ASSETS, JSON, Door, Stage, chat, until
from tests.support.pace import stands_still
from tests.support.processes import python_process, settings_arguments
from web.client import AnswerStream, HttpClient
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")

MIB = 1024 * 1024


STALLED = 40


def resident_bytes(pid: int | str = "self") -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


async def metric(door: Door, line: str) -> float:
    """The value of the metric that is written so."""
    page = (await door.get("/metrics")).body.decode()
    found = [row.rpartition(" ")[2] for row in page.splitlines() if row.rpartition(" ")[0] == line]
    return float(found[0]) if found else 0.0


async def test_a_prompt_over_its_bound_is_placed_without_its_chain(stage: Stage) -> None:
    """It is neither rendered nor tokenised: counted `too_large`, and served like any other. One below it is counted."""
    tokenizers = {chat()["model"]: str(ASSETS)}
    async with stage.door(tokenizers=tokenizers, tokenize="local", prompt_bytes=2000, admit_idle_s=0.05) as door:
        assert (await door.post(chat("x " * 1000))).status == 200
        assert await metric(door, 'tidegate_ingress_prompts_total{how="too_large"}') == 1
        assert door.service.cached_tokens() == (0, 0)
        assert (await door.post({**chat(), "messages": [], "prompt": [1] * 1000}, path="/v1/completions")).status == 200
        assert await metric(door, 'tidegate_ingress_prompts_total{how="too_large"}') == 2
        assert (await door.post(chat("x " * 100))).status == 200
        assert await metric(door, 'tidegate_ingress_prompts_total{how="tokenizer"}') == 1


async def test_an_engine_is_not_asked_to_count_a_prompt_over_its_bound(stage: Stage) -> None:
    """Nor is a prompt over the bound copied to an engine's `/tokenize`."""
    async with stage.door(tokenize="engine", prompt_bytes=2000, admit_idle_s=0.05) as door:
        assert (await door.post(chat("x " * 1000))).status == 200
        assert await metric(door, 'tidegate_ingress_prompts_total{how="too_large"}') == 1


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
async def test_what_a_long_prompt_needed_is_given_back() -> None:
    """The tokenizer needs some 200 bytes a token while it works (hundreds of MB here); afterwards little more
    than the cache's share stays with the process, whichever thread did it."""
    tokenizer = LocalTokenizer(ASSETS, cache_bytes=64 * MIB)
    warm, long = (
        read_request("chat_completions", json.dumps(chat(text)).encode()).prompt
        for text in ("hello", "one two three four five six seven " * 70_000)
    )
    assert isinstance(warm, ChatPrompt)
    assert isinstance(long, ChatPrompt)
    await asyncio.to_thread(tokenizer.count, warm, 16)
    before = resident_bytes()
    counted = await asyncio.to_thread(tokenizer.count, long, 16)
    assert len(counted) > 400_000
    assert resident_bytes() - before < 100 * len(counted), "250 bytes a token stay where nothing is given back"


async def test_bodies_over_what_may_be_held_are_refused_in_the_api_s_shape(stage: Stage) -> None:
    """503 `busy` with Retry-After; the gauge says what is held, and is 0 when the requests are over."""
    release = asyncio.Event()

    async def wait(request: Request, responder: Responder) -> None:
        await release.wait()
        responder.send(200, [(b"content-type", b"application/json")], b'{"choices":[]}')

    for engine in stage.engines.values():
        engine.script = wait
    bounds = {"body_bytes": 3000, "held_body_bytes": 4000}
    async with stage.door(tokenize="none", admit_idle_s=0.05, **bounds) as door:
        first = asyncio.create_task(door.post(chat("x" * 2500)))
        await until(lambda: any(engine.seen for engine in stage.engines.values()))
        held = await metric(door, "tidegate_ingress_held_body_bytes")
        assert 2500 < held < 3000
        answer = await door.post(chat("x" * 2500))
        assert (answer.status, answer.header("retry-after")) == (503, b"1")
        assert answer.header("x-tidegate-reason") == b"busy"
        assert json.loads(answer.body)["error"]["code"] == "busy"
        assert await metric(door, 'tidegate_ingress_http_refusals_total{reason="busy"}') == 1
        release.set()
        assert (await first).status == 200
        async with asyncio.timeout(30):
            while await metric(door, "tidegate_ingress_held_body_bytes"):  # noqa: ASYNC110 - a page, without an event
                await asyncio.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
async def test_a_body_goes_at_its_engines_first_byte(stage: Stage, tmp_path: Path) -> None:
    """It is sent to no other engine after that: a stream that is open for an hour holds nothing of its prompt."""
    release, open_answers = asyncio.Event(), 0

    async def begin(request: Request, responder: Responder) -> None:
        nonlocal open_answers
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n')
        open_answers += 1
        await release.wait()
        responder.write(b"data: [DONE]\n\n")
        responder.finish()

    for engine in stage.engines.values():
        engine.script = begin
    settings = {"nats_url": stage.nats.url, "port": 0, "http_port": -1, "instance": "ingress-full", "tokenize": "none"}
    arguments = settings_arguments({**settings, "admit_idle_s": 0.05, "text_blocks": "false"})
    async with python_process("services.ingress", *arguments, directory=tmp_path, name="ingress") as process:
        await process.wait_said("front_door_open")
        url = process.output.split("front_door_open url=")[1].split()[0] + "/v1/chat/completions"
        client = HttpClient()

        async def stream() -> AnswerStream:
            answer = await client.open("POST", url, JSON, json.dumps(chat("x" * MIB, stream=True)).encode())
            assert await answer.read()
            return answer

        streams = [await stream()]
        before = resident_bytes(process.pid)
        streams += [await stream() for _ in range(STALLED)]
        assert open_answers == STALLED + 1
        assert (resident_bytes(process.pid) - before) / STALLED < MIB / 4
        release.set()
        for answer in streams:
            assert await answer.read() == b"data: [DONE]\n\n"
            assert await answer.read() == b""
        await client.close()
        assert await process.stop() == 0


async def test_a_body_that_dribbles_ends_with_408(stage: Stage) -> None:
    """`body_timeout_s` is for the whole body."""
    async with stage.door(tokenize="none", body_timeout_s=0.2) as door:
        host, port = door.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n{")
        answer = asyncio.ensure_future(reader.readline())
        while not answer.done():
            writer.write(b" ")
            await asyncio.wait((answer,), timeout=0.05)
        assert b" 408 " in await answer
        writer.close()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux's /proc")
async def test_clients_that_do_not_read_cost_bounded_memory(stage: Stage, tmp_path: Path) -> None:
    """40 of them before engines that send as fast as they can: each costs the two high-water marks and a read, not
    what its engine has to say, and `/healthz` answers meanwhile."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"' + b"x" * 64_000 + b'"}}]}\n\n'
    sent, open_answers, all_open = 0, 0, asyncio.Event()

    async def flood(request: Request, responder: Responder) -> None:
        nonlocal sent, open_answers
        responder.start(200, [(b"content-type", b"text/event-stream")])
        responder.write(event)
        open_answers += 1
        await all_open.wait()
        while not responder.gone.is_set():
            responder.write(event)
            sent += len(event)
            await responder.drain()
            await asyncio.sleep(0)
        open_answers -= 1

    for engine in stage.engines.values():
        engine.script = flood
    settings = {"nats_url": stage.nats.url, "port": 0, "http_port": -1, "instance": "ingress-full", "tokenize": "none"}
    arguments = settings_arguments({**settings, "admit_idle_s": 0.05})
    async with python_process("services.ingress", *arguments, directory=tmp_path, name="ingress") as process:
        await process.wait_said("front_door_open")
        url = process.output.split("front_door_open url=")[1].split()[0]
        host, port = url.removeprefix("http://").split(":")
        client = HttpClient()
        body = json.dumps(chat("x" * 50_000, stream=True)).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        await client.fetch("GET", f"{url}/healthz", [], b"")
        before = resident_bytes(process.pid)
        loop = asyncio.get_running_loop()
        with ExitStack() as stack:
            for _ in range(STALLED):
                connection = stack.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.setblocking(False)
                await loop.sock_connect(connection, (host, int(port)))
                await loop.sock_sendall(connection, head + body)
            await until(lambda: open_answers == STALLED)
            all_open.set()
            await stands_still(lambda: sent, 60)
            cost = (resident_bytes(process.pid) - before) / STALLED
            assert (await client.fetch("GET", f"{url}/healthz", [], b"")).status == 200
            assert cost < MIB
        await until(lambda: open_answers == 0)
        await client.close()
        assert await process.stop() == 0
