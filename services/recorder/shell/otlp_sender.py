"""Spans and log records to a collector over OTLP/HTTP, by OpenTelemetry's own SDK (extra ``otlp``).

Headers, certificates and compression are the SDK's: ``OTEL_EXPORTER_OTLP_*``, as are ``OTEL_SERVICE_NAME`` and
``OTEL_RESOURCE_ATTRIBUTES``. Its exporters say only whether they succeeded; what the collector answered is seen in the
HTTP session that they are given.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import requests
from google.protobuf.message import DecodeError
from opentelemetry._logs import LogRecord as SdkRecord
from opentelemetry._logs import SeverityNumber
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk._logs import ReadableLogRecord
from opentelemetry.sdk._logs.export import LogRecordExportResult
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from services.recorder.errors import SinkError
from services.recorder.span_builder import LogRecord, Severity
from services.recorder.spans import SCHEMA_URL, SCOPE, Kind, Span

SERVICE = "tidegate"
_TOO_LARGE = 413
_REFUSALS = frozenset({400, _TOO_LARGE, 422})
"""Answers by which the data is at fault. Any other one is about the moment, or a setting: it may be right later."""
_ABOUT_SETTINGS = {
    301: "it wants another address",
    302: "it wants another address",
    307: "it wants another address",
    308: "it wants another address",
    401: "look at OTEL_EXPORTER_OTLP_HEADERS",
    403: "look at OTEL_EXPORTER_OTLP_HEADERS",
    404: "look at the endpoint; a collector without this signal must not be sent it (otlp_signals)",
    405: "look at the endpoint",
}
_SHOWN_CHARACTERS = 200
_QUIET = ("opentelemetry.exporter.otlp", "opentelemetry.util.re")
"""Loggers of the SDK. What failed is said by our caller, once, with the reason; and the second one shows headers, which
may be secret, where it cannot read them."""

_KINDS: dict[Kind, SpanKind] = {"client": SpanKind.CLIENT, "internal": SpanKind.INTERNAL}
_SEVERITIES: dict[Severity, SeverityNumber] = {
    "info": SeverityNumber.INFO,
    "warn": SeverityNumber.WARN,
    "error": SeverityNumber.ERROR,
}
_SCOPE = InstrumentationScope(SCOPE, schema_url=SCHEMA_URL)
T = TypeVar("T")


class OtlpSender:
    """Sends until the collector has taken or refused everything. Blocking, used by one thread; `close` by any.

    ``endpoint``: the collector's base URL, below which ``/v1/traces`` and ``/v1/logs`` are; empty: what the environment
    says, else ``http://localhost:4318``. ``timeout_s``: for one request, with what the SDK tries again of it.
    """

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        base = endpoint.rstrip("/")
        self._session = Session()
        self._spans = OTLPSpanExporter(
            endpoint=f"{base}/v1/traces" if base else None, timeout=timeout_s, session=self._session
        )
        self._logs = OTLPLogExporter(
            endpoint=f"{base}/v1/logs" if base else None, timeout=timeout_s, session=self._session
        )
        self._resource = _resource()
        self._closed = threading.Event()
        self._known = False

    def send_spans(self, spans: Sequence[Span]) -> int:
        """How many were refused for good. Raises `SinkError`; some may have been taken then."""
        sdk = [_span(span, self._resource) for span in spans]
        return self._send(sdk, lambda part: self._spans.export(part) is SpanExportResult.SUCCESS, _rejected_spans)

    def send_logs(self, records: Sequence[LogRecord]) -> int:
        """How many were refused for good. Raises `SinkError`; some may have been taken then."""
        sdk = [_record(record, self._resource) for record in records]
        return self._send(sdk, lambda part: self._logs.export(part) is LogRecordExportResult.SUCCESS, _rejected_records)

    def close(self) -> None:
        """Ends what is under way as soon as its request ends."""
        self._closed.set()
        self._spans.shutdown()  # type: ignore[no-untyped-call]
        self._logs.shutdown()  # type: ignore[no-untyped-call]

    def _send(self, items: list[T], export: Callable[[list[T]], bool], rejected: Callable[[bytes], int]) -> int:
        """Halves what is refused, until it is known which items are."""
        refused = 0
        parts = [items] if items else []
        while parts:
            if self._closed.is_set():
                raise SinkError("the connection to the collector is closed")
            part = parts.pop()
            self._session.forget()
            if export(part) and self._session.took():
                self._known = True
                refused += rejected(self._session.answer)
            elif not self._session.blames_the_data(self._known):
                raise SinkError(f"the collector did not take {len(part)} items: {self._session.what_failed()}")
            elif len(part) == 1:
                refused += 1
            else:
                middle = len(part) // 2
                parts += [part[middle:], part[:middle]]
        return refused


class Session(requests.Session):
    """Remembers what came of its last request. Follows nobody elsewhere: a redirected POST is a GET, whose page looks
    like success."""

    def __init__(self) -> None:
        super().__init__()
        self.forget()

    def forget(self) -> None:
        self.answer = b""
        self._type = ""
        self._status: int | None = None
        self._failure: Exception | None = None

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        if kwargs.get("timeout") == 0 and self._status is not None:
            # The SDK slept through its time before it tried again: what was answered to the last try is what failed.
            raise requests.Timeout("no time is left")
        self.forget()
        kwargs["allow_redirects"] = False
        try:
            response = super().request(*args, **kwargs)
        except Exception as error:  # a certificate that is not there is an OSError, and the SDK keeps it to itself
            self._failure = error
            raise
        self._status, self.answer = response.status_code, response.content
        self._type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        return response

    def took(self) -> bool:
        """Whether a collector took it: the SDK takes a redirection for success, and no collector sends web pages."""
        return self._status is not None and 200 <= self._status < 300 and not self._is_web_page()

    def _is_web_page(self) -> bool:
        return self._type == "text/html"

    def blames_the_data(self, known: bool) -> bool:
        """Whether what was to be sent is at fault: it was refused, or could not even be encoded. A refusal that is not
        in OTLP counts only of who is ``known`` to take some: any server that is no collector may say 400."""
        if self._failure is not None:
            return False
        if self._status is None or self._status == _TOO_LARGE:
            return True
        in_otlp = self._type in ("application/x-protobuf", "application/json")
        return self._status in _REFUSALS and (in_otlp or known)

    def what_failed(self) -> str:
        if self._failure is not None:
            return str(self._failure)
        said = " ".join(self.answer[: 4 * _SHOWN_CHARACTERS].decode(errors="replace").split())[:_SHOWN_CHARACTERS]
        said = "".join(each for each in said if each.isprintable())
        if self._is_web_page():
            said = "a web page, it is no collector"
        parts = [f"it answered {self._status}", said, _ABOUT_SETTINGS.get(self._status or 0, "")]
        return ": ".join(part for part in parts if part)


def _rejected_spans(answer: bytes) -> int:
    try:
        return max(0, int(ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans))
    except DecodeError:  # whoever answers something else has taken all
        return 0


def _rejected_records(answer: bytes) -> int:
    try:
        return max(0, int(ExportLogsServiceResponse.FromString(answer).partial_success.rejected_log_records))
    except DecodeError:
        return 0


def _resource() -> Resource:
    """The environment's, with our name where it says none."""
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: SERVICE}))
    return resource


def _context(trace_id: int, span_id: int) -> SpanContext:
    return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _span(span: Span, resource: Resource) -> ReadableSpan:
    return ReadableSpan(
        name=span.name,
        context=_context(span.trace_id, span.span_id),
        parent=None if span.parent_id is None else _context(span.trace_id, span.parent_id),
        resource=resource,
        attributes=span.attributes,
        events=[Event(event.name, event.attributes, event.time_ns) for event in span.events],
        kind=_KINDS[span.kind],
        status=Status(StatusCode.UNSET) if span.error is None else Status(StatusCode.ERROR, span.error),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )


def _record(record: LogRecord, resource: Resource) -> ReadableLogRecord:
    place = Context() if record.place is None else set_span_in_context(NonRecordingSpan(_context(*record.place)))
    return ReadableLogRecord(
        SdkRecord(
            timestamp=record.time_ns,
            observed_timestamp=record.time_ns,
            context=place,
            severity_text=record.severity.upper(),
            severity_number=_SEVERITIES[record.severity],
            body=record.body,
            attributes=record.attributes,
            event_name=record.event_name,
        ),
        resource,
        _SCOPE,
    )
