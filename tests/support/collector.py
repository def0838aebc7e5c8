"""A collector: real OTLP over HTTP, decoded with OpenTelemetry's own messages, that answers as a test wants."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.trace.v1.trace_pb2 import Span

Answer = Callable[[str, list[str]], tuple[int, bytes]]
"""Of a path and the names of the spans, or bodies of the records, that came: status and body."""


class Collector:
    """What came and was taken (2xx), and how often anything came."""

    def __init__(self) -> None:
        self.url = ""
        self.requests = 0
        self.spans: list[Span] = []
        self.records: list[LogRecord] = []
        self.headers: list[dict[str, str]] = []
        self.resource: dict[str, str] = {}
        self.schema_urls: set[str] = set()
        self.answer: Answer = lambda path, names: (200, b"")
        self.answer_headers = {"content-type": "application/x-protobuf"}
        self.changed = threading.Condition()

    def take(self, path: str, body: bytes) -> tuple[int, bytes]:
        with self.changed:
            self.requests += 1
            if path == "/v1/traces":
                said = ExportTraceServiceRequest.FromString(body).resource_spans
                scopes = [scope for each in said for scope in each.scope_spans]
                spans = [span for scope in scopes for span in scope.spans]
                status, answer = self.answer(path, [span.name for span in spans])
                if status == 200:
                    self.spans += spans
                self.resource = {key: str(value) for key, value in values(said[0].resource.attributes).items()}
                self.schema_urls |= {scope.schema_url for scope in scopes}
            else:
                logs = ExportLogsServiceRequest.FromString(body).resource_logs
                records = [record for each in logs for scope in each.scope_logs for record in scope.log_records]
                status, answer = self.answer(path, [record.body.string_value for record in records])
                if status == 200:
                    self.records += records
            self.changed.notify_all()
            return status, answer

    def by_name(self) -> dict[str, Span]:
        return {span.name: span for span in self.spans}


def values(attributes: list[KeyValue]) -> dict[str, object]:
    """Attributes as Python values."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value") for each in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens, until the block ends."""
    own = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            own.headers.append({name.lower(): value for name, value in self.headers.items()})
            status, answer = own.take(self.path, body)
            self.send_response(status)
            for name, value in (own.answer_headers | {"content-length": str(len(answer))}).items():
                self.send_header(name, value)
            self.end_headers()
            with suppress(BrokenPipeError):  # whoever asked gave up waiting
                self.wfile.write(answer)

        def do_GET(self) -> None:
            """A page, as of a login or a dashboard."""
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    own.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield own
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
