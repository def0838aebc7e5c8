"""Requests that mean harm against a whole front door: each is answered once, reaches no engine, costs nothing else."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.ingress.replies import REASON_HEADER
from tests.integration.ingress.support import MODEL, Door, Stage, chat
from tests.integration.ingress.test_keys import entry, key_of, settings
from tests.integration.web.support import RawClient, raw_client
from tests.support.hostile import BODY_BYTES, CHUNKED, HEADER_BYTES, HOSTILE, Hostile, post

pytestmark = pytest.mark.asyncio(loop_scope="session")

STRANGERS = 262_144
"""The length of a body that is too large to be read over."""


@asynccontextmanager
async def knocking(door: Door) -> AsyncIterator[RawClient]:
    async with raw_client(int(door.url.rpartition(":")[2])) as client:
        yield client


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    path.write_bytes(entry("acme"))
    path.chmod(0o600)
    return path


async def held(door: Door) -> int:
    """Bytes of bodies that are held."""
    page = (await door.get("/metrics")).body.decode()
    return int(float(page.partition("\ntidegate_ingress_held_body_bytes ")[2].partition("\n")[0]))


async def holds_nothing(door: Door) -> None:
    async with asyncio.timeout(30):
        while await held(door):  # noqa: ASYNC110 - the state is another object's, without an event
            await asyncio.sleep(0.01)


async def test_the_corpus(stage: Stage) -> None:
    """Status and reason are the table's, the error has its API's shape, the connection ends where what follows cannot
    be told apart, and afterwards the door holds nothing and serves as before. Each also byte by byte."""
    wrong = []
    async with stage.door(header_bytes=HEADER_BYTES, body_bytes=BODY_BYTES) as door:
        for hostile in HOSTILE:
            for dribbled in (False, True):
                async with knocking(door) as client:
                    said = await answer_to(client, hostile, dribbled)
                if said != (hostile.status, hostile.reason, hostile.stays):
                    wrong.append((hostile.name, dribbled, said))
        assert not wrong, "\n".join(map(str, wrong))
        assert not [request for engine in stage.engines.values() for request in engine.seen]
        await holds_nothing(door)
        assert (await door.post(chat())).status == 200


async def answer_to(client: RawClient, hostile: Hostile, dribbled: bool) -> tuple[int, str, bool]:
    """Status, reason, and whether the connection goes on."""
    if dribbled and len(hostile.wire) < 400:
        for at in range(len(hostile.wire)):
            client.send(hostile.wire[at : at + 1])
            await client.writer.drain()
    else:
        client.send(hostile.wire)
    status, headers, body = await client.answer()
    error = json.loads(body)["error"]
    assert error["code"] == headers[REASON_HEADER].decode()
    assert error["message"]
    if headers.get(b"connection") == b"close":
        assert await client.rest() == b"", "one answer, whatever is hidden behind the request"
        return status, error["code"], False
    client.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await client.answer())[2] == b"ok\n"
    return status, error["code"], True


async def test_a_strangers_body_is_not_read(stage: Stage, keys_file: Path) -> None:
    """401 comes after the headers, whatever the body's length and however it is sent, and nothing is held for it; a
    small body is read over and the connection goes on. With a key the same request waits for its body."""
    async with stage.door(**settings(keys_file)) as door:
        for headers in (
            (b"content-length: %d" % STRANGERS,),
            (CHUNKED,),
            (b"content-length: 10", b"expect: 100-continue"),
            (b"content-length: %d" % STRANGERS, b"expect: 100-continue", b"authorization: Bearer tg_none_x"),
        ):
            async with knocking(door) as client:
                client.send(post(*headers))
                status, answered, _ = await client.answer()
                assert (status, answered[REASON_HEADER]) == (401, b"invalid_api_key")
                assert answered[b"connection"] == b"close"
                assert answered[b"www-authenticate"] == b"Bearer"
                assert await held(door) == 0
        async with knocking(door) as client:
            for _ in range(3):
                client.send(post(b"content-length: 10", body=b"0123456789"))
                assert (await client.answer())[0] == 401
            body = json.dumps(chat()).encode()
            known = b"authorization: Bearer %b" % key_of("acme").encode()
            client.send(post(known, b"content-length: %d" % len(body), b"expect: 100-continue"))
            assert (await client.head())[0] == 100
            assert await held(door) == len(body)
            client.send(body)
            assert (await client.answer())[0] == 200
        await holds_nothing(door)


async def test_what_the_head_refuses_is_refused_before_the_body(stage: Stage) -> None:
    """404, 405, 400 and 415: a client learns it before it has sent anything, and no 100 invites it to."""
    length = b"content-length: %d" % STRANGERS
    async with stage.door() as door:
        for wire, status, reason in (
            (post(length, target=b"/nothing"), 404, b"unknown_url"),
            (post(length, target=b"/healthz"), 405, b"method_not_allowed"),
            (post(length).replace(b"POST", b"PUT", 1), 405, b"method_not_allowed"),
            (post(length, target=b"/metrics").replace(b"POST", b"GET", 1), 400, b"body_not_taken"),
            (post(length).replace(b"POST", b"OPTIONS", 1), 400, b"body_not_taken"),
            (post(length, b"content-encoding: zstd"), 415, b"content_encoding"),
            (post(length, b"content-encoding: zstd", b"expect: 100-continue"), 415, b"content_encoding"),
        ):
            async with knocking(door) as client:
                client.send(wire)
                got, headers, _ = await client.answer()
                assert (got, headers[REASON_HEADER], headers[b"connection"]) == (status, reason, b"close")


async def test_head_options_and_the_first_page(stage: Stage) -> None:
    """Claude Code asks ``HEAD /`` before anything else; whoever opens the address is told where they are."""
    async with stage.door() as door, knocking(door) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        status, headers, page = await client.answer()
        assert (status, b"/v1/models" in page) == (200, True)
        client.send(b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\nHEAD /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await client.head() == (200, headers)
        assert (await client.head())[0] == 200
        for target, allow in (
            (b"/", b"GET, HEAD, OPTIONS"),
            (b"*", b"GET, HEAD, POST, OPTIONS"),
            (b"/v1/chat/completions", b"POST, OPTIONS"),
            (b"/v1/models/%b" % MODEL.encode(), b"GET, HEAD, OPTIONS"),
        ):
            client.send(b"OPTIONS %b HTTP/1.1\r\nhost: x\r\n\r\n" % target)
            status, headers = await client.head()
            assert (status, headers[b"allow"]) == (204, allow)


async def test_slow_and_silent_clients(stage: Stage) -> None:
    """A body that drips is 408 when its time is over, whatever drips; one that a stranger's refusal waits for too."""
    async with stage.door(body_timeout_s=0.3) as door:
        for wire in (
            post(b"content-length: 100", body=b"{"),
            post(CHUNKED, body=b"1\r\n{\r\n"),
            post(CHUNKED, body=b"1\r\n{\r\n0\r\ntrailer: "),
            post(b"content-length: 100", target=b"/nothing"),
        ):
            async with knocking(door) as client:
                client.send(wire)
                status, headers, _ = await client.answer()
                assert (status, headers[REASON_HEADER]) == (408, b"request_timeout")
                assert await client.rest() == b""


SMUGGLED = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        (b"Transfer_Encoding: chunked",),
        (b"x-transfer-encoding: chunked",),
        (b"connection: content-length",),
        (b"x-http-method-override: GET", b"x-original-url: /metrics", b"x-rewrite-url: /metrics"),
        (b"upgrade: h2c", b"connection: upgrade, http2-settings", b"http2-settings: AAMAAABkAAQAAP__"),
    ],
)
async def test_a_request_inside_a_body_is_a_body(stage: Stage, headers: tuple[bytes, ...]) -> None:
    """Names that look like framing, or that other servers take for it, change nothing: one answer, then the next
    request's."""
    async with stage.door() as door, knocking(door) as client:
        client.send(post(*headers, b"content-length: %d" % len(SMUGGLED), body=SMUGGLED))
        client.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[0] == 400
        assert (await client.answer())[2] == b"ok\n"


async def test_names_and_states_that_steer_lead_nowhere_else(stage: Stage) -> None:
    """Headers by which other proxies are led to an address, and turn states that name a worker: a registered worker
    gets the request, and of the headers nothing."""
    places = ("http://169.254.169.254/", "worker-0", "tg1.d29ya2VyLTA", "127.0.0.1:1")
    names = ["x-forwarded-host", "forwarded", "x-original-url", "x-rewrite-url", "x-host", "x-codex-turn-state"]
    names += ["x-worker", "x-target-worker", "x-backend", "x-tidegate-worker-id", "x-override-routing", "via"]
    async with stage.door(admit_idle_s=0.01) as door:
        for place in places:
            answer = await door.post(chat(), **dict.fromkeys(names, place))
            assert answer.status == 200
    urls = {engine.url.removeprefix("http://").encode() for engine in stage.engines.values()}
    seen = [request for engine in stage.engines.values() for request in engine.seen]
    assert len(seen) == len(places)
    for request in seen:
        assert request.path == "/v1/chat/completions"
        assert request.header("host") in urls
        came = {name.lower() for name, _ in request.headers}
        assert not (came - {b"x-codex-turn-state"}) & {name.encode() for name in names}


async def test_a_flood_of_strangers_leaves_room_for_those_with_keys(stage: Stage, keys_file: Path) -> None:
    """Two hundred bodies that never come, twice what may be held: they hold nothing, and a key is served at once."""
    async with stage.door(**settings(keys_file, body_bytes=100_000, held_body_bytes=10_000_000)) as door:
        clients = [await RawClient.connect(int(door.url.rpartition(":")[2])) for _ in range(200)]
        try:
            for client in clients:
                client.send(post(b"content-length: 60000", body=b"{"))
            await asyncio.gather(*(client.writer.drain() for client in clients))
            answer = await door.post(chat(), authorization=f"Bearer {key_of('acme')}")
            assert answer.status == 200
            await holds_nothing(door)
        finally:
            for client in clients:
                client.writer.transport.abort()
