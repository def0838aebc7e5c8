"""``tidegate up`` serves, ``tail`` shows, ``doctor`` is content; sessions through the official client."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletionMessageParam

from tests.support.nats import NatsServer
from tests.support.processes import HelperProcess, eventually, python_process, start_process
from tests.support.system import RunningSystem, running_system

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningSystem]:
    async with running_system(tmp_path_factory.mktemp("up")) as system:
        yield system
        assert await system.process.stop(40) == 0, system.process.output
        assert not (system.workdir / "up.json").exists()


async def tidegate(directory: Path, *arguments: str, timeout_s: float = 30) -> HelperProcess:
    """A command, run to its end."""
    name = f"{arguments[0]}-{abs(hash(arguments))}"
    process = await start_process([sys.executable, "-m", "tidegate", *arguments], directory, name=name)
    try:
        await process.wait(timeout_s)
    finally:
        await process.close()
    return process


async def chat(client: openai.AsyncOpenAI, model: str, turns: int, headers: dict[str, str]) -> list[int]:
    """A streamed session of so many turns; the cached tokens that each answer reported."""
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "You are a careful agent. " * 40}]
    cached = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"Step {turn}: look at the next file and say what it does."})
        stream = await client.chat.completions.create(
            model=model,
            messages=messages,
            max_tokens=16,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=headers,
        )
        text = ""
        async with stream:
            async for chunk in stream:
                text += "".join(choice.delta.content or "" for choice in chunk.choices)
                if chunk.usage is not None:
                    details = chunk.usage.prompt_tokens_details
                    cached.append((details.cached_tokens if details else None) or 0)
        assert text
        messages.append({"role": "assistant", "content": text})
    return cached


async def test_sessions_are_served_and_their_rows_shown(system: RunningSystem, tmp_path: Path) -> None:
    """A 3-turn session with x-dynamo-session-id and its child with a parent id, streamed by the official client;
    `tidegate tail --json` prints their request_end rows live, with identity, usage and worker."""
    tail_command = [sys.executable, "-m", "tidegate", "tail", "--json", "--from-start", "--nats", system.nats_url]
    tails = {
        session: await start_process(
            [*tail_command, "--session", session, "--count", str(count)],
            tmp_path,
            name=f"tail-{count}",
        )
        for session, count in (("root:1", 3), ("child:1", 2))
    }
    client = openai.AsyncOpenAI(base_url=system.addresses["base_url"], api_key="none", max_retries=0, timeout=60)
    model = system.addresses["model"]
    try:
        cached = await chat(client, model, 3, {"x-dynamo-session-id": "root:1"})
        await chat(client, model, 2, {"x-dynamo-session-id": "child:1", "x-dynamo-parent-session-id": "root:1"})
        assert [await tail.wait(120) for tail in tails.values()] == [0, 0]
    finally:
        await client.close()
        for tail in tails.values():
            await tail.close()
    assert cached[0] <= cached[1] <= cached[2]
    assert cached[2] > 100
    rows, child_rows = ([json.loads(line) for line in tail.stdout.splitlines()] for tail in tails.values())
    assert [row["event_type"] for row in rows] == ["request_end"] * 3
    assert {row["agent_context"]["session_id"] for row in rows} == {"root:1"}
    assert [row["request"]["cached_tokens"] for row in rows] == cached
    assert len({row["request"]["worker"]["worker"] for row in rows}) == 1
    assert all(row["request"]["outcome"] == "completed" for row in rows)
    contexts = [row["agent_context"] for row in child_rows]
    assert [(c["session_id"], c["parent_session_id"]) for c in contexts] == [("child:1", "root:1")] * 2


async def test_tail_is_one_line_a_request_for_people(system: RunningSystem, tmp_path: Path) -> None:
    """Without --json: a line with outcome, worker, session and tokens."""
    client = openai.AsyncOpenAI(base_url=system.addresses["base_url"], api_key="none", max_retries=0, timeout=60)
    await chat(client, system.addresses["model"], 1, {"x-dynamo-session-id": "for-people"})
    await client.close()
    options = ("--from-start", "--count", "1", "--session", "for-people", "--workdir", str(system.workdir))
    (line,) = (await tidegate(tmp_path, "tail", *options)).stdout.splitlines()
    assert "completed" in line
    assert "for-people" in line
    assert "in " in line
    assert "ttft" in line


async def test_the_doctor_finds_everything_well(system: RunningSystem, tmp_path: Path) -> None:
    """Every check of a healthy system is ok, and the exit code 0."""
    process = await tidegate(tmp_path, "doctor", "--json", "--workdir", str(system.workdir))
    report = json.loads(process.stdout)
    assert [check for check in report["checks"] if check["verdict"] != "ok"] == []
    assert process.returncode == 0
    names = {check["name"].split(" ")[0] for check in report["checks"]}
    assert {"bus", "trace", "service", "worker", "events", "model", "index", "tokenizer", "engine", "front"} <= names


async def test_a_second_system_is_refused_with_one_sentence(system: RunningSystem, tmp_path: Path) -> None:
    """In the same workdir, and on the same port: one sentence that says what to do, and exit code 1."""
    same_folder = await tidegate(tmp_path, "up", "--port", "0", "--workdir", str(system.workdir))
    assert same_folder.returncode == 1
    assert "already runs" in same_folder.stderr
    assert "--workdir" in same_folder.stderr
    port = system.url.rsplit(":", 1)[1]
    same_port = await tidegate(tmp_path, "up", "--port", port, "--workdir", str(tmp_path / "other"))
    assert same_port.returncode == 1
    assert f"port {port} on 127.0.0.1 is taken" in same_port.stderr
    assert "Traceback" not in same_port.stderr + same_folder.stderr
    await eventually(lambda: (system.workdir / "up.json").exists())


async def test_the_demo_runs_against_a_running_system(system: RunningSystem, tmp_path: Path) -> None:
    """`tidegate demo --url --nats`: the same figures through a system that it did not start."""
    options = ("--sessions", "3", "--turns", "4", "--url", system.url, "--nats", system.nats_url, "--json")
    process = await tidegate(tmp_path, "demo", *options, timeout_s=180)
    figures = json.loads(process.stdout.splitlines()[-1])
    assert figures["failed"] == 0
    assert figures["traces"] == figures["requests"] == 3 * 4 + 1 * 4
    assert figures["decisions"] == figures["requests"]
    assert figures["sticky_ratio"] >= 0.9


async def test_engines_and_a_bus_that_run_already_are_used(tmp_path: Path) -> None:
    """`up --engine URL=EVENTS,replay=ENDPOINT --nats URL` starts neither; requests are served, the cache is used, and
    rows go where the settings file says."""
    server = NatsServer(tmp_path / "nats").start()
    try:
        async with python_process("load.engine", directory=tmp_path) as engine:
            ready = json.loads(await engine.wait_line())
            address = f"{ready['url']}={ready['kv_events'][0]},replay={ready['replay'][0]}"
            config = tmp_path / "tidegate.toml"
            config.write_text(f'[recorder]\ndirectory = "{tmp_path / "rows"}"\n')
            options = ("--engine", address, "--nats", server.url, "--config", str(config))
            async with running_system(tmp_path, *options) as own:
                assert own.nats_url == server.url
                assert own.addresses["model"] == ready["model"]
                assert own.child_pid("load.engine") is None
                client = openai.AsyncOpenAI(base_url=own.addresses["base_url"], api_key="none", max_retries=0)
                cached = await chat(client, ready["model"], 2, {"x-dynamo-session-id": "real"})
                await client.close()
                assert cached[1] > 0
                assert await own.process.stop(40) == 0
            assert engine.returncode is None
            assert own.addresses["traces"] == str(tmp_path / "rows")
            assert len(list((tmp_path / "rows").glob("*.jsonl.gz"))) == 1
    finally:
        server.stop()


async def test_a_wrong_setting_of_any_part_is_one_sentence(tmp_path: Path) -> None:
    """An unknown key in another service's table: the key is named, code 2, and nothing has been started."""
    config = tmp_path / "tidegate.toml"
    config.write_text("[indexer]\nmax_blockss = 3\n")
    process = await tidegate(tmp_path, "up", "--port", "0", "--workdir", str(tmp_path / "w"), "--config", str(config))
    assert process.returncode == 2
    assert "max_blockss" in process.stderr.splitlines()[-1]
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "w" / "logs" / "nats.log").exists()


async def test_a_certificate_that_is_not_there_is_said_before_anything_starts(tmp_path: Path) -> None:
    """Named, code 2, and no part of the system has been started."""
    files = ("--tls-cert", str(tmp_path / "none.pem"), "--tls-key", str(tmp_path / "none.key"))
    process = await tidegate(tmp_path, "up", "--port", "0", "--workdir", str(tmp_path / "w"), *files)
    assert process.returncode == 2
    (said,) = process.stderr.splitlines()
    assert said.startswith("tidegate: tls_cert: ")
    assert str(tmp_path / "none.pem") in said
    assert not (tmp_path / "w" / "logs" / "nats.log").exists()
