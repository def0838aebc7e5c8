"""The front door under TLS, as clients see it: the official ones, another certificate while it runs, wrong files."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import AsyncExitStack
from pathlib import Path

import anthropic
import httpx2 as httpx
import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from services.ingress.replies import REASON_HEADER
from tests.integration.ingress.support import MODEL, Door, Stage, System, chat, running_bridged
from tests.support.certificates import Authority
from tests.support.processes import python_process, settings_arguments
from tests.support.tls_proxy import tls_before
from web.tls import Handshakes, TlsFiles, load_tls

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def serial_of(url: str, authority: Authority) -> str:
    """Of the certificate that a new connection is shown."""
    port = int(url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=authority.context(), server_hostname="127.0.0.1")
    try:
        return str(writer.get_extra_info("peercert")["serialNumber"])
    finally:
        writer.transport.abort()


async def shown(door: Door, authority: Authority, line: str) -> None:
    """Until the door's metrics have this line."""
    async with httpx.AsyncClient(verify=authority.context(), timeout=60) as http, asyncio.timeout(60):
        while line not in (await http.get(f"{door.url}/metrics")).text:  # noqa: ASYNC110 - a page
            await asyncio.sleep(0.1)


async def test_official_clients_over_tls(system: System, authority: Authority, tmp_path: Path) -> None:
    """OpenAI's and Anthropic's, streamed, with the authority that the user names; one that trusts others refuses
    the door, one without TLS is refused and counted."""
    certificate, key = authority.pair(tmp_path)
    async with system.door(tls_cert=str(certificate), tls_key=str(key)) as door:
        assert door.url.startswith("https://")
        async with httpx.AsyncClient(verify=authority.context(), timeout=60) as http:
            client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="none", http_client=http, max_retries=0)
            said: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]
            stream = await client.chat.completions.create(model=MODEL, messages=said, max_tokens=8, stream=True)
            async with stream:
                assert len([chunk async for chunk in stream]) > 1
        async with httpx.AsyncClient(verify=authority.context(), timeout=60) as http:
            asker = anthropic.AsyncAnthropic(base_url=door.url, api_key="none", http_client=http, max_retries=0)
            message = await asker.messages.create(
                model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "hello"}]
            )
            assert message.content
        async with httpx.AsyncClient(verify=ssl.create_default_context()) as stranger:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await stranger.get(f"{door.url}/healthz")
            with pytest.raises(httpx.TransportError):
                await stranger.get(f"http{door.url.removeprefix('https')}/healthz")
        await shown(door, authority, 'tidegate_ingress_tls_handshakes_total{result="http_request"} 1.0')


async def test_another_certificate_is_taken_and_a_broken_one_is_not(
    stage: Stage, authority: Authority, tmp_path: Path
) -> None:
    """The files are watched; one that cannot be used leaves the one from before in force, and counts."""
    certificate, key = authority.pair(tmp_path)
    async with stage.door(tls_cert=str(certificate), tls_key=str(key)) as door:
        before = await serial_of(door.url, authority)
        certificate.write_text("torn")
        await shown(door, authority, "tidegate_ingress_tls_reload_failures_total 1.0")
        assert await serial_of(door.url, authority) == before
        authority.pair(tmp_path)
        async with asyncio.timeout(60):
            while await serial_of(door.url, authority) == before:  # noqa: ASYNC110 - the door says so to nobody
                await asyncio.sleep(0.1)


async def test_files_that_cannot_be_used_end_the_start(stage: Stage, authority: Authority, tmp_path: Path) -> None:
    """One sentence with the setting's name and the file's, and exit code 2; an expired certificate too."""
    certificate, key = authority.expired(tmp_path)
    for files, says in (
        ({"tls_cert": certificate, "tls_key": key}, f"tls_cert: {certificate}: has expired"),
        ({"tls_cert": certificate, "tls_key": tmp_path / "none.key"}, f"tls_key: {tmp_path}/none.key: cannot be read"),
        ({"tls_key": key}, "tls_key and tls_client_ca need tls_cert"),
    ):
        settings = settings_arguments({"nats_url": stage.nats.url, "port": 0, **files})
        async with python_process("services.ingress", *settings, directory=tmp_path) as process:
            assert await process.wait() == 2
            assert f"tidegate ingress: {'settings: ' if len(files) == 1 else ''}{says}" in process.stderr
            assert "Traceback" not in process.stderr


async def test_engines_behind_tls(authority: Authority, tmp_path: Path) -> None:
    """Bridge and front door ask an engine at https:// by the authority that they are told; who trusts the system's only
    gets no answer, and says why."""
    certificate, key = authority.pair(tmp_path)
    ca = authority.file(tmp_path / "ca.pem")
    context = load_tls(TlsFiles(str(certificate), str(key)), Handshakes()).context
    async with AsyncExitStack() as stack:

        async def front(url: str) -> str:
            return await stack.enter_async_context(tls_before(url, context))

        house = await stack.enter_async_context(
            running_bridged(tmp_path, 1, front=front, bridge_settings={"engine_tls_ca": ca})
        )
        async with house.door(engine_tls_ca=str(ca)) as door:
            answer = await door.post(chat(max_tokens=3))
            assert answer.status == 200
            streamed = await door.post(chat(max_tokens=20, stream=True))
            assert streamed.body.endswith(b"data: [DONE]\n\n")
        async with house.door() as stranger:
            refused = await stranger.post(chat())
            assert refused.status == 502
            assert refused.header(REASON_HEADER.decode()) == b"connect_error"
        for service, more in (("bridge", {"engine_url": "https://localhost:1"}), ("ingress", {"port": 0})):
            settings = {"nats_url": house.nats.url, "engine_tls_ca": tmp_path / "none.pem", **more}
            arguments = settings_arguments(settings)
            async with python_process(f"services.{service}", *arguments, directory=tmp_path) as process:
                assert await process.wait() == 2
                assert f"tidegate {service}: engine_tls_ca: {tmp_path}/none.pem: cannot be read" in process.stderr
