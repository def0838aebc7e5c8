"""The workload's client against a server that breaks off."""

from __future__ import annotations

import asyncio

from load.workload.client import WorkloadClient
from load.workload.sessions import WorkloadShape, plan

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-request-id: r1\r\n\r\n"
CHUNK = b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m","choices":[]}\n\n'


async def break_off(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The beginning of a stream, then the connection ends, as when the front door is killed."""
    await reader.readuntil(b"\r\n\r\n")
    writer.write(HEAD + b"%x\r\n%s\r\n" % (len(CHUNK), CHUNK))
    await writer.drain()
    writer.close()


async def test_a_stream_that_breaks_off_is_a_failed_request_and_no_crash() -> None:
    """Every request of the plan has its result, each naming what went wrong."""
    server = await asyncio.start_server(break_off, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    workload = plan(WorkloadShape(sessions=1, turns=2, sub_agents=0, gap_s=(0.0, 0.0), spread_s=0.0))
    client = WorkloadClient(f"http://127.0.0.1:{port}", "m", timeout_s=5.0, failure_pause_s=0.0)
    try:
        results = await client.run(workload)
    finally:
        await client.close()
        server.close()
        await server.wait_closed()
    assert [(result.failed, result.hung) for result in results] == [(True, False)] * 2
    assert all((result.error or "").startswith("APIConnectionError") for result in results)
