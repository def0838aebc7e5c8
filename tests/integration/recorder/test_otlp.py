"""The sink ``otlp`` against a real collector's protocol, by OpenTelemetry's own SDK."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Span, Status

from bus.errors import SettingsError
from bus.nats import NatsBus
from bus.subjects import TRACE_SUBJECTS, trace
from schemas.base import to_json
from schemas.session import SessionKey
from schemas.trace import AgentContext, FinishMetadata, RequestMetrics, ToolCall, ToolRun, TracedWorker, TraceRow
from services.recorder.config import RecorderSettings
from services.recorder.errors import SinkError
from services.recorder.shell.otlp import OtlpSink
from services.recorder.shell.otlp_sender import Session
from services.recorder.shell.sink import Batch
from services.recorder.spans import SCHEMA_URL
from tests.support.collector import Collector, collector, values
from tests.support.nats import NatsServer
from tests.support.processes import python_process, settings_arguments

HTTPS = b"Client sent an HTTP request to an HTTPS server.\n"
RUN = AgentContext(session_id="run", session=SessionKey(family="dynamo", root="run"))


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    with collector() as one:
        yield one


def sink_to(own: Collector, **said: object) -> OtlpSink:
    return OtlpSink(RecorderSettings(otlp_endpoint=own.url, otlp_timeout_s=1.0, **said))  # type: ignore[arg-type]


def request(name: str, context: AgentContext | None = RUN) -> bytes:
    metrics = RequestMetrics(
        request_id=name,
        model=name,
        outcome="upstream_error" if name == "bad" else "completed",
        request_received_ms=1_000,
        total_time_ms=20.0,
        ttft_ms=5.0,
        input_tokens=12,
        worker=TracedWorker(worker="engine-1"),
        finish_reason_metadata=FinishMetadata(tool_calls=(ToolCall(id="call-1", name="bash"),)),
    )
    return to_json(TraceRow(event_type="request_end", event_time_unix_ms=1_020, agent_context=context, request=metrics))


def tool() -> bytes:
    run = ToolRun(tool_call_id="call-1", tool_class="bash", duration_ms=10.0)
    return to_json(TraceRow(event_type="tool_end", event_time_unix_ms=1_040, agent_context=RUN, tool=run))


def batch(*rows: bytes) -> Batch:
    return Batch(rows=rows, received_s=(0.0,) * len(rows))


async def test_spans_and_records_arrive(own: Collector) -> None:
    """Ids, parents, names, attributes, events, status; headers from the environment; the service's name."""
    sink = sink_to(own)
    await sink.open()
    written = await sink.write(batch(request("a"), request("bad"), tool()))
    await sink.close()
    assert written.refused == 0
    found = own.by_name()
    assert sorted(found) == ["chat a", "chat bad", "execute_tool bash", "invoke_agent"]
    root, first, ran = found["invoke_agent"], found["chat a"], found["execute_tool bash"]
    assert len({span.trace_id for span in own.spans}) == 1
    assert (len(root.trace_id), len(root.span_id), root.parent_span_id) == (16, 8, b"")
    assert first.parent_span_id == root.span_id
    assert ran.parent_span_id == found["chat bad"].span_id  # both asked for it: the last one counts
    assert (first.kind, ran.kind) == (Span.SPAN_KIND_CLIENT, Span.SPAN_KIND_INTERNAL)
    assert (first.start_time_unix_nano, first.end_time_unix_nano) == (1_000_000_000, 1_020_000_000)
    assert [(event.name, event.time_unix_nano) for event in first.events] == [("first_token", 1_005_000_000)]
    said = values(first.attributes)
    assert (said["gen_ai.request.model"], said["gen_ai.usage.input_tokens"], said["session.id"]) == ("a", 12, "run")
    assert first.status.code == Status.STATUS_CODE_UNSET
    assert (found["chat bad"].status.code, found["chat bad"].status.message) == (
        Status.STATUS_CODE_ERROR,
        "upstream_error",
    )
    assert (own.resource["service.name"], own.schema_urls) == ("tidegate", {SCHEMA_URL})
    assert {each["authorization"] for each in own.headers} == {"Bearer secret"}
    assert [record.event_name for record in own.records] == 2 * ["tidegate.request_end"] + ["tidegate.tool_end"]
    assert [record.span_id for record in own.records] == [first.span_id, found["chat bad"].span_id, root.span_id]
    assert json.loads(own.records[0].body.string_value)["request"]["request_id"] == "a"


async def test_a_batch_is_sent_again_where_it_was_not_taken(own: Collector) -> None:
    """The collector is away for logs: the batch fails; spans that it has are not sent twice, and ids stay."""
    sink = sink_to(own)
    await sink.open()
    given = batch(request("a"), tool())
    own.answer = lambda path, names: (503 if path == "/v1/logs" else 200, b"")
    with pytest.raises(SinkError, match="answered 503"):
        await sink.write(given)
    own.answer = lambda path, names: (200, b"")
    await sink.write(given)
    assert (len(own.spans), len(own.records)) == (3, 2)
    await sink.close()
    # A recorder that was killed has the rows again: the same spans.
    again = sink_to(own)
    await again.open()
    await again.write(given)
    await again.close()
    assert len({span.span_id for span in own.spans}) == 3


def test_what_failed_is_what_was_answered_when_no_time_is_left(own: Collector) -> None:
    """The SDK tries again with no time at all where it slept too long before: that is nobody's answer."""
    own.answer = lambda path, names: (503, b"away")
    url, said = f"{own.url}/v1/traces", ExportTraceServiceRequest(resource_spans=[ResourceSpans()]).SerializeToString()
    with Session() as session:
        assert session.post(url, said, timeout=30.0).status_code == 503
        with pytest.raises(requests.Timeout):
            session.post(url, said, timeout=0.0)
        assert session.what_failed() == "it answered 503: away"


async def test_wrong_credentials_lose_nothing(own: Collector) -> None:
    """401 and 404 are about a setting: the rows wait until it is right."""
    sink = sink_to(own, otlp_signals=("traces",))
    await sink.open()
    for status in (401, 404):
        own.answer = lambda path, names, status=status: (status, b"")  # type: ignore[misc]
        with pytest.raises(SinkError, match=f"answered {status}"):
            await sink.write(batch(request("a")))
    await sink.close()


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [
        (302, {"location": "/login"}, "answered 302: .*it wants another address"),
        (200, {"content-type": "text/html; charset=utf-8"}, "answered 200: a web page"),
        (400, {"content-type": "text/plain"}, "answered 400: Client sent an HTTP request to an HTTPS server."),
    ],
)
async def test_what_is_no_collector_loses_nothing(
    own: Collector, status: int, headers: dict[str, str], said: str
) -> None:
    """A login page, a dashboard, a port that wants TLS: each answers, none has taken anything. The rows wait until the
    address is right, and the log says what is wrong."""
    right = own.answer_headers
    own.answer, own.answer_headers = lambda path, names: (status, HTTPS), headers
    sink = sink_to(own, otlp_signals=("traces",))
    await sink.open()
    given = batch(request("a", None), request("b", None))
    with pytest.raises(SinkError, match=said):
        await sink.write(given)
    own.spans.clear()
    own.answer, own.answer_headers = lambda path, names: (200, b""), right
    assert (await sink.write(given)).refused == 0
    assert sorted(own.by_name()) == ["chat a", "chat b"]
    own.answer, own.answer_headers = lambda path, names: (400, b"bad"), {"content-type": "text/plain"}
    assert (await sink.write(batch(request("c", None)))).refused == 1  # it has taken some: now it may blame a row
    await sink.close()


async def test_a_certificate_that_is_not_there_loses_nothing(own: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is sent, and no row is to blame."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", "/nowhere/client.pem")
    settings = RecorderSettings(otlp_endpoint=own.url.replace("http", "https"), otlp_timeout_s=0.5)
    sink = OtlpSink(settings)
    await sink.open()
    with pytest.raises(SinkError, match=r"/nowhere/client\.pem"):
        await sink.write(batch(request("a")))
    await sink.close()


async def test_headers_that_cannot_be_read_are_not_shown(
    own: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They may be secret; the collector's 401 says where to look."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Bearer hush")
    own.answer = lambda path, names: (401, b"")
    sink = sink_to(own)
    await sink.open()
    with pytest.raises(SinkError, match="answered 401: look at OTEL_EXPORTER_OTLP_HEADERS"):
        await sink.write(batch(request("a")))
    await sink.close()
    assert "hush" not in caplog.text


async def test_one_row_that_is_refused_takes_no_other_with_it(own: Collector) -> None:
    """400 for any request with it: it is found, counted and gone; so is what is no row, and what is rejected."""
    own.answer = lambda path, names: (400 if any("poison" in name for name in names) else 200, b"")
    sink = sink_to(own)
    await sink.open()
    rows = [request(name, None) for name in ("a", "b", "poison", "c", "d")]
    written = await sink.write(batch(*rows))
    assert sorted(own.by_name()) == ["chat a", "chat b", "chat c", "chat d"]
    assert len(own.records) == 4
    assert written.refused == 2  # as a span and as a record
    rejected = ExportTraceServiceResponse(partial_success=ExportTracePartialSuccess(rejected_spans=1))
    own.answer = lambda path, names: (200, rejected.SerializeToString() if path == "/v1/traces" else b"")
    written = await sink.write(batch(request("e", None), b"{}", b'{"event_type":"request_end"}'))
    assert written.refused == 3
    await sink.close()


async def test_a_collector_that_is_away_or_hangs(own: Collector) -> None:
    """It may be away at the start; a request to one that hangs ends with its deadline, the loop goes on meanwhile."""
    away = OtlpSink(RecorderSettings(otlp_endpoint="http://127.0.0.1:9", otlp_timeout_s=0.5))
    await away.open()
    with pytest.raises(SinkError, match="refused"):
        await away.write(batch(request("a")))
    await away.close()
    with own.changed:  # nobody answers while this is held
        sink = sink_to(own)
        await sink.open()
        writing = asyncio.ensure_future(sink.write(batch(request("a"))))
        await asyncio.sleep(0)
        assert not writing.done()
        with pytest.raises(SinkError, match="timed out"):
            await writing
        await sink.close()


async def test_a_missing_sdk_is_a_wrong_setting(own: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recorder says what to install, and does not start."""
    monkeypatch.setitem(sys.modules, "services.recorder.shell.otlp_sender", None)
    with pytest.raises(SettingsError, match=r"sinks: .*pip install 'tidegate\[otlp\]'"):
        await sink_to(own).open()
    for said in ({"otlp_signals": ()}, {"otlp_endpoint": "collector:4318"}, {"otlp_timeout_s": 0.0}):
        with pytest.raises(ValueError, match="otlp_"):
            RecorderSettings(**said)


async def test_a_collector_that_is_away_delays_no_other_sink(
    own: Collector, bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """The recorder as a process: the file has all rows while the collector refuses; then that has them, too."""
    own.answer = lambda path, names: (503, b"")
    settings = settings_arguments(
        {
            "nats_url": nats_server.url,
            "directory": tmp_path / "traces",
            "flush_interval_ms": 50,
            "sinks": '["file", "otlp"]',
            "otlp_endpoint": own.url,
            "otlp_timeout_s": 0.3,
        }
    )
    async with python_process("services.recorder", *settings, directory=tmp_path, name="recorder") as process:
        for number in range(20):
            subject = trace("request_end", "m", RUN.session.text() if RUN.session else "")
            await bus.publish_row(subject, request(f"r{number}"), message_id=f"r{number}")
        segment = tmp_path / "traces" / "tidegate.000000.jsonl.gz"
        await process.wait_for(
            lambda: segment.exists() and len(gzip.decompress(segment.read_bytes()).splitlines()) == 20
        )
        await process.wait_for(lambda: own.requests > 0)
        assert own.spans == []
        own.answer = lambda path, names: (200, b"")
        await process.wait_for(lambda: len(own.records) == 20)
        assert sorted(own.by_name()) == sorted(["invoke_agent", *(f"chat r{number}" for number in range(20))])
        assert len(own.spans) == 21
        process.signal(signal.SIGTERM)
        assert await process.wait() == 0


async def test_a_collector_that_hangs_holds_no_stop_up(
    own: Collector, bus: NatsBus, nats_server: NatsServer, tmp_path: Path
) -> None:
    """A request to it may take five minutes; the process ends after its own second, its rows still in the stream."""
    settings = settings_arguments(
        {
            "nats_url": nats_server.url,
            "flush_interval_ms": 50,
            "sinks": '["otlp"]',
            "otlp_endpoint": own.url,
            "otlp_timeout_s": 300,
            "stop_timeout_s": 1,
        }
    )
    with own.changed:  # nobody answers while this is held
        async with python_process("services.recorder", *settings, directory=tmp_path, name="recorder") as process:
            await process.wait_said("service_started")
            await bus.publish_row(trace("request_end", "m", "s"), request("r"), message_id="r")
            await process.wait_for(lambda: len(own.headers) > 0)
            assert await process.stop() == 0
            assert "drain_timed_out sink=otlp" in process.stderr
    consumer = await bus.consume("recorder-otlp", TRACE_SUBJECTS)
    assert await consumer.pending() == 1
    await consumer.close()
