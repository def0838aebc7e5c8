"""``tidegate replay`` against a simulated engine: what it sends, what it says, and how it ends."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import ssl
import sys
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import HelperProcess, python_process, settings_arguments, start_process
from tests.support.tls_proxy import tls_before
from web.client import HttpClient

BLOCK = 16
ENGINE = {"http_port": 0, "kv_events": False, "profile": "instant", "num_blocks": 4096}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[str]:
    """URL of an engine alone: no front door."""
    arguments = settings_arguments(ENGINE)
    async with python_process("load.engine", *arguments, directory=tmp_path, name="engine") as process:
        yield str(json.loads(await process.wait_line())["url"])


def row(
    name: str, session: str, start_ms: int, took_ms: int, hashes: list[int], *, output: int = 20, **fields: Any
) -> dict[str, Any]:
    """A request_end row of a prompt of whole blocks."""
    return {
        "schema": "tidegate.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": start_ms + took_ms,
        "event_source": "tidegate",
        "agent_context": {"session_id": session, **fields},
        "request": {
            "request_id": name,
            "model": "recorded-model",
            "output_tokens": output,
            "request_received_ms": start_ms,
            "total_time_ms": took_ms,
            "replay": {
                "trace_block_size": BLOCK,
                "input_length": BLOCK * len(hashes),
                "input_sequence_hashes": hashes,
            },
        },
    }


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


async def replayed(directory: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> HelperProcess:
    """The command, at its end."""
    command = [sys.executable, "-m", "tidegate", "replay", *arguments]
    process = await start_process(command, directory, name="replay", environment=environment)
    try:
        await process.wait(30)
    finally:
        await process.close()
    return process


async def test_a_trace_is_played_with_its_order_lengths_and_answers(tmp_path: Path, engine: str) -> None:
    """Three turns and a sub-agent that overlaps its parent's first: ids as recorded, exact lengths, the engine finds
    each prompt and answer again in the next turn, and the sub-agent's prompt in its parent's."""
    turns = [row("t1", "root", 1_000, 400, [1, 2, 3]), row("t2", "root", 1_500, 100, [1, 2, 3, 4, 5, 6])]
    turns.append(row("t3", "root", 1_700, 100, [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    child = row("c1", "child", 1_100, 100, [1, 2, 3, 90], parent_session_id="root")
    path = write(tmp_path / "trace.jsonl", [*turns, child])
    ended = await replayed(tmp_path, str(path), "--url", engine, "--json", "-o", str(tmp_path / "report.json"))
    assert ended.returncode == 0, ended.output
    report = json.loads(ended.stdout)
    assert json.loads((tmp_path / "report.json").read_text()) == report
    assert (report["requests"], report["answered"], report["failed"], report["plays_completed"]) == (4, 4, 0, 1)
    now, then = report["replayed"], report["recorded"]
    assert now["input_tokens"] == then["input_tokens"] == BLOCK * (3 + 6 + 9 + 4)
    assert now["output_tokens"] == then["output_tokens"] == 80
    # c1: what t1 had; t2: t1's prompt and the whole blocks of its answer; t3: the same of t2.
    assert now["cached_tokens"] == BLOCK * 3 + (BLOCK * 3 + 16) + (BLOCK * 6 + 16)
    assert report["answers_sent_back"] == 2
    assert "played with sim-8b" in ended.stderr
    client = HttpClient()
    try:
        served = json.loads((await client.fetch("GET", f"{engine}/sim/served", [], b"")).body)["served"]
    finally:
        await client.close()
    assert served == ["replay-probe", "t1", "c1", "t2", "t3"]


async def test_failed_requests_are_counted_and_fail_their_play(tmp_path: Path, engine: str) -> None:
    """A prompt that is too long is refused: the turn after it is skipped, other plays go on, the exit code is 1 unless
    that many may fail; the reason and the engine's words are in the report."""
    long = list(range(100, 100 + 131_072 // BLOCK + 2))
    rows = [row("a1", "a", 1_000, 10, long), row("a2", "a", 1_020, 10, [*long, 5]), row("b1", "b", 1_000, 10, [1])]
    path = write(tmp_path / "trace.jsonl", rows)
    ended = await replayed(tmp_path, str(path), "--url", engine, "--json")
    assert ended.returncode == 1, ended.output
    report = json.loads(ended.stdout)
    assert (report["answered"], report["failed"], report["skipped"]) == (1, 1, 1)
    assert report["failures"] == {"status_400": 1}
    assert "maximum context length" in report["examples"]["status_400"]
    allowed = await replayed(tmp_path, str(path), "--url", engine, "--allow-failed", "1")
    assert allowed.returncode == 0, allowed.output
    assert "1 plays failed, and 1 of their requests were not sent" in allowed.stdout


async def test_an_interrupted_run_reports_what_was_played(tmp_path: Path, engine: str) -> None:
    """Ctrl-C: the report as far as it goes, exit code 130, and nothing left behind."""
    rows = [row("a", "a", 1_000, 10, [1]), row("b", "b", 600_000, 10, [1])]
    path = write(tmp_path / "trace.jsonl", rows)
    command = [sys.executable, "-m", "tidegate", "replay", str(path), "--url", engine]
    process = await start_process(command, tmp_path, name="replay")
    client = HttpClient()
    try:
        served = b""
        while b'"a"' not in served:
            assert process.returncode is None, process.output
            served = (await client.fetch("GET", f"{engine}/sim/served", [], b"")).body
            await asyncio.sleep(0.05)
        process.signal(signal.SIGINT)
        assert await process.wait() == 130
    finally:
        await client.close()
        await process.close()
    assert "interrupted: 1 requests were not sent, " in process.stdout


async def test_an_endpoint_that_is_not_there_or_not_fit_is_named(tmp_path: Path, engine: str) -> None:
    """Before anything is played: nobody answers; a model that is not served; a file's problem with its line."""
    path = write(tmp_path / "trace.jsonl", [row("a", "a", 1_000, 10, [1])])
    gone = await replayed(tmp_path, str(path), "--url", "http://127.0.0.1:1")
    assert gone.returncode == 1
    assert "nobody answers at http://127.0.0.1:1" in gone.stderr
    other = await replayed(tmp_path, str(path), "--url", engine, "--model", "gpt-9")
    assert other.returncode == 1
    assert "serves no model 'gpt-9'; with --model name one of sim-8b" in other.stderr
    broken = write(tmp_path / "broken.jsonl", [row("a", "a", 1_000, 10, [1]), row("a", "a", 1_000, 10, [1])])
    wrong = await replayed(tmp_path, str(broken), "--url", engine)
    assert wrong.returncode == 1
    assert f"{broken}:2: request_id a was in {broken}:1 already [duplicate_request_id]" in wrong.stderr


async def test_an_endpoint_behind_tls_is_played_against(tmp_path: Path, engine: str) -> None:
    """https:// with a certificate that is trusted; one that is not is refused, and said."""
    if (openssl := shutil.which("openssl")) is None:
        pytest.skip("openssl is not installed")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    made = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    made += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(certificate)]
    assert await (await start_process(made, tmp_path, name="openssl")).wait() == 0
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    path = write(tmp_path / "trace.jsonl", [row("a", "a", 1_000, 10, [1, 2])])
    async with tls_before(engine, context) as address:
        url = f"{address}/v1"
        refused = await replayed(tmp_path, str(path), "--url", url)
        assert refused.returncode == 1
        assert "certificate verify failed" in refused.stderr
        trusting = {"SSL_CERT_FILE": str(certificate)}
        ended = await replayed(tmp_path, str(path), "--url", url, "--json", environment=trusting)
    assert ended.returncode == 0, ended.output
    report = json.loads(ended.stdout)
    assert (report["answered"], report["settings"]["url"]) == (1, url.removesuffix("/v1"))
