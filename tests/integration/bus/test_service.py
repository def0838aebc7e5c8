"""The process runtime: settings, waiting for the bus, health pages, signals, failures, exit codes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
from pathlib import Path

import pytest

from bus.nats import connect
from tests.support.nats import NatsServer
from tests.support.processes import HelperProcess, eventually, python_process

MODULE = "tests.integration.bus.sample_service"


async def page(process: HelperProcess, path: str, method: str = "GET") -> tuple[int, str]:
    """Status and body of one of its pages."""
    await process.wait_said("http_listening")
    found = re.search(r"http_listening url=http://127\.0\.0\.1:(\d+)", process.stderr)
    assert found is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", int(found[1]))
    writer.write(f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    head, _, body = (await asyncio.wait_for(reader.read(), 30)).decode().partition("\r\n\r\n")
    writer.close()
    await writer.wait_closed()
    return int(head.split()[1]), body


async def test_starts_without_a_bus_and_becomes_ready_when_it_appears(tmp_path: Path, nats_server: NatsServer) -> None:
    """User case E4: alive and not ready with the reason, one clear line; then ready; SIGTERM ends with 0."""
    nats_server.stop()
    async with python_process(MODULE, "--set", f"nats_url={nats_server.url}", directory=tmp_path) as process:
        assert (await page(process, "/healthz"))[0] == 200
        status, reason = await page(process, "/readyz")
        assert status == 503
        assert f"waiting for the bus at {nats_server.url}" in reason
        await process.wait_said("bus_unreachable")
        await asyncio.to_thread(nats_server.start)
        await process.wait_said("service_started")
        assert await page(process, "/readyz") == (200, "ready\n")
        assert await process.stop() == 0
        assert "Traceback" not in process.stderr
        assert process.stderr.count("bus_unreachable") == 1
        assert "service_stopped" in process.stderr


async def test_told_to_stop_while_it_waits_for_the_bus(tmp_path: Path, nats_server: NatsServer) -> None:
    """User case E4: SIGTERM while there is no bus ends it cleanly too."""
    nats_server.stop()
    async with python_process(MODULE, "--set", f"nats_url={nats_server.url}", directory=tmp_path) as process:
        await process.wait_said("bus_unreachable")
        assert await process.stop() == 0
        assert "Traceback" not in process.stderr


async def test_a_service_says_which_kvcore_it_works_with(tmp_path: Path, nats_server: NatsServer) -> None:
    """One line and a metric, where a service uses it at all; a twin that nobody knows ends it, and is named."""
    nats_server.stop()
    settings = ("--set", f"nats_url={nats_server.url}", "--set", "engine_url=http://127.0.0.1:9")
    python = {"TIDEGATE_KVCORE": "python"}
    async with python_process("services.bridge", *settings, directory=tmp_path, environment=python) as process:
        await process.wait_said("bus_unreachable")
        assert process.stderr.count(" kvcore ") == 1
        assert "implementation=python why=" in process.stderr
        assert 'tidegate_kvcore_info{implementation="python"} 1.0' in (await page(process, "/metrics"))[1]
        assert await process.stop() == 0
    async with python_process(MODULE, *settings[:2], directory=tmp_path) as process:
        await process.wait_said("bus_unreachable")
        assert "kvcore" not in process.stderr
    wrong = {"TIDEGATE_KVCORE": "rust"}
    async with python_process("services.bridge", *settings, directory=tmp_path, environment=wrong) as process:
        assert await process.wait() == 2
        assert "TIDEGATE_KVCORE must be one of auto, native, python, not 'rust'" in process.stderr


async def test_a_running_service(tmp_path: Path, nats_server: NatsServer) -> None:
    """Answers, shows why it is not ready, counts itself, appears in ``$SRV``, and notices that the bus went."""
    settings = ("--set", f"nats_url={nats_server.url}", "--set", "greeting=hi", "--set", "log_format=text")
    async with python_process(MODULE, *settings, directory=tmp_path) as process:
        await process.wait_said("service_started")
        bus = await connect(nats_server.url, name="test", timeout_s=30)
        assert (await bus.request("sample.echo", b"", timeout_s=30)).payload == b"hi"
        assert b'"sample"' in (await bus.request("$SRV.PING.sample", b"", timeout_s=30)).payload
        await bus.request("sample.busy", b"catching_up", timeout_s=30)
        assert await page(process, "/readyz") == (503, "catching_up\n")
        await bus.request("sample.busy", b"", timeout_s=30)
        status, metrics = await page(process, "/metrics")
        assert status == 200
        assert "tidegate_bus_connected 1.0" in metrics
        assert re.search(r"tidegate_loop_lag_seconds [0-9.e-]+\n", metrics)
        assert re.search(r"tidegate_bus_delivered_total [1-9]", metrics)
        assert 'tidegate_bus_dropped_total{reason="slow_consumer"} 0.0' in metrics
        assert "process_cpu_seconds_total" in metrics
        assert (await page(process, "/nothing"))[0] == 404
        assert (await page(process, "/readyz", "POST"))[0] == 405
        await bus.close()
        nats_server.stop()
        await process.wait_said("bus_disconnected")
        assert await page(process, "/readyz") == (503, "bus_down\n")
        await asyncio.to_thread(nats_server.start)
        await process.wait_said("bus_reconnected")
        assert (await page(process, "/readyz"))[0] == 200
        assert "tidegate_bus_reconnects_total 1.0" in (await page(process, "/metrics"))[1]
        process.signal(signal.SIGINT)
        assert await process.wait() == 0


async def test_a_failed_task_ends_the_process_with_1(tmp_path: Path, nats_server: NatsServer) -> None:
    """So that the supervisor restarts it; the log says which task and why."""
    async with python_process(MODULE, "--set", f"nats_url={nats_server.url}", directory=tmp_path) as process:
        await process.wait_said("service_started")
        bus = await connect(nats_server.url, name="test", timeout_s=30)
        bus.publish("sample.fail", b"")
        assert await process.wait() == 1
        assert "task fail failed" in process.stderr
        assert "told to fail" in process.stderr
        await bus.close()


async def test_a_stop_that_takes_too_long_is_cut(tmp_path: Path, nats_server: NatsServer) -> None:
    """``stop_timeout_s`` bounds the drain; the exit code tells it was not clean. A second signal cuts it at once."""
    settings = ("--set", f"nats_url={nats_server.url}", "--set", "drain_s=60")
    async with python_process(MODULE, *settings, "--set", "stop_timeout_s=0.2", directory=tmp_path) as process:
        await process.wait_said("service_started")
        assert await process.stop(20) == 1
        assert "stop_timed_out" in process.stderr
    second = tmp_path / "second"
    second.mkdir()
    async with python_process(MODULE, *settings, "--set", "stop_timeout_s=60", directory=second) as process:
        await process.wait_said("service_started")
        process.signal(signal.SIGTERM)
        await process.wait_said("stop_asked")
        process.signal(signal.SIGTERM)
        assert await process.wait(20) == 1


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (("--set", "greting=x"), {}, "greting: unknown setting (--set); did you mean greeting?"),
        (("--set", "http_port=many"), {}, "http_port: must be a whole number, not 'many' (--set)"),
        (("--set", "greeting=rude"), {}, "greeting: must be polite"),
        (("--config", "absent.toml"), {}, "absent.toml: cannot be read: No such file or directory"),
        ((), {"TIDEGATE_INDEXER_GREETINGS": "x"}, "TIDEGATE_INDEXER_GREETINGS: unknown setting"),
        (("--set", "nats_url=http://x"), {}, "nats_url: 'http://x' is not nats://host:port"),
        (("--set", "http_host=203.0.113.1"), {}, "http_port: cannot listen on 203.0.113.1:0"),
        (("--nonsense",), {}, "No such option"),
    ],
)
async def test_a_wrong_setting_is_one_sentence_and_2(
    tmp_path: Path,
    nats_server: NatsServer,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    sentence: str,
) -> None:
    """It names the key as its user wrote it; no traceback; restarting would not help, which the exit code says."""
    environment = {"TIDEGATE_NATS_URL": nats_server.url, **environment}
    async with python_process(MODULE, *arguments, directory=tmp_path, environment=environment) as process:
        assert await process.wait() == 2
        assert sentence in process.stderr
        assert "Traceback" not in process.stderr


async def test_print_config_and_help(tmp_path: Path) -> None:
    """Both end with 0 and need no bus; secrets are not printed; help names every setting and its variable."""
    file = tmp_path / "tidegate.toml"
    file.write_text('[common]\nlog_level = "debug"\n[indexer]\napi_token = "hunter2"\n[ingress]\nother = 1\n')
    arguments = ("--config", str(file), "--set", "drain_s=1.5", "--print-config")
    async with python_process(MODULE, *arguments, directory=tmp_path, name="print") as process:
        assert await process.wait() == 0
        assert 'log_level = "debug"  # tidegate.toml [common]' in process.stdout
        assert "drain_s = 1.5  # --set" in process.stdout
        assert "hunter2" not in process.stdout
    async with python_process(MODULE, "--help", directory=tmp_path, name="help") as process:
        assert await process.wait() == 0
        for text in ("TIDEGATE_INDEXER_DRAIN_S", "TIDEGATE_NATS_URL", "What the sample needs.", "/readyz"):
            assert text in process.stdout


async def test_json_logs(tmp_path: Path, nats_server: NatsServer) -> None:
    """``log_format=json``: every line is one object."""
    settings = ("--set", f"nats_url={nats_server.url}", "--set", "log_format=json")
    async with python_process(MODULE, *settings, directory=tmp_path) as process:
        await eventually(lambda: "service_started" in process.stderr, 20)
        assert await process.stop() == 0
        lines = [json.loads(line) for line in process.stderr.splitlines()]
        assert {"time", "level", "instance", "logger", "event"} <= set(lines[0])
        assert [line["instance"] for line in lines] == ["indexer-1"] * len(lines)
