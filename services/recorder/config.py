"""Settings of the recorder (section ``recorder``; environment ``TIDEGATE_RECORDER_<KEY>``)."""

from __future__ import annotations

import re
from typing import Literal

from bus.settings import CommonSettings
from bus.subjects import TRACE_SUBJECTS
from services.recorder.tool_messages import DEFAULT_TOPIC

Sink = Literal["file", "stdout", "otlp"]
OtlpSignal = Literal["traces", "logs"]
Fsync = Literal["member", "segment", "never"]

MOST_FLUSH_BYTES = 8_388_608
"""Half of what may wait for a sink: while one batch is written, the next is filled."""

_NAME = re.compile(r"[^\s.*>/\\]+")
_TOKEN = re.compile(r"[\x21-\x7e]+")


def check_token(token: str) -> None:
    """Raises `ValueError` for a bearer token that no header can bring."""
    if not _TOKEN.fullmatch(token):
        raise ValueError("a token is printable ASCII without spaces")


class RecorderSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where rows go.

    Each of ``sinks`` gets every row, by a consumer of its own: ``durable`` names that of ``file``, ``<durable>-<sink>``
    the others. Two recorders with the same ``durable`` share the rows between them, two names each get all.
    ``ack_wait_s``: rows that a killed recorder had taken come again after it. ``recent_rows`` is how far back a
    redelivered row is recognised.

    ``file`` writes segments of ``prefix`` into ``directory``. A segment is left at ``roll_bytes`` (uncompressed), and
    at ``roll_lines`` or when it is ``roll_age_s`` old, where those are set. The newest ``keep_segments``, at most
    ``keep_bytes`` (on the disk) and ``keep_age_s`` old, stay, the others are removed; 0: all stay. ``fsync`` says when
    the disk must have rows. They are acknowledged to JetStream after that, so a killed process loses nothing in any
    mode. ``member`` (default, one sync per flush) also survives a power cut; ``segment`` and ``never`` may lose the
    rows of the last seconds in one.

    Tool events of harnesses come in at ``tool_events``, the ZeroMQ endpoint that we bind (empty: none), where only
    messages of ``tool_events_topic`` are taken (empty: any), and at ``POST /v1/tool_events`` of
    ``tool_events_http_host``, ``tool_events_http_port`` (0 picks one, -1: none). ``tenant``: whose sessions they
    are. ``tool_sessions``: session ids that are known, and events that are told from repeated ones. ``tool_rows``: rows
    of them, and of loads, that may wait for the stream. ``infer_tools``: of sessions whose harness tells nothing, tools
    are inferred from their requests, as facts. With ``tool_events_token`` (or the one in ``tool_events_token_file``)
    HTTP takes only events that bring it as bearer token.

    The sink ``otlp`` sends ``otlp_signals`` to the collector at ``otlp_endpoint`` (its base URL; empty: what
    ``OTEL_EXPORTER_OTLP_*`` say, which are heeded for headers and certificates in any case), each request within
    ``otlp_timeout_s``. It needs the extra ``otlp``.

    Every ``load_samples_s`` each worker's load becomes a row ``worker_load`` (0: never).
    """

    sinks: tuple[Sink, ...] = ("file",)
    directory: str = "traces"
    prefix: str = "tidegate"
    durable: str = "recorder"
    filter_subject: str = TRACE_SUBJECTS
    fetch_rows: int = 256
    ack_wait_s: float = 5.0
    flush_bytes: int = 1_048_576
    flush_interval_ms: int = 1_000
    roll_bytes: int = 268_435_456
    roll_lines: int = 0
    roll_age_s: float = 0.0
    keep_segments: int = 0
    keep_bytes: int = 0
    keep_age_s: float = 0.0
    fsync: Fsync = "member"
    recent_rows: int = 65_536
    tool_events: str = ""
    tool_events_topic: str = DEFAULT_TOPIC
    tool_events_http_host: str = "127.0.0.1"
    tool_events_http_port: int = -1
    tool_events_token: str = ""
    tool_events_token_file: str = ""
    tenant: str = "default"
    tool_sessions: int = 65_536
    tool_rows: int = 10_000
    infer_tools: bool = False
    load_samples_s: float = 5.0
    otlp_endpoint: str = ""
    otlp_signals: tuple[OtlpSignal, ...] = ("traces", "logs")
    otlp_timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.sinks:
            raise ValueError('sinks must name at least one, for example "file"')
        if len(set(self.sinks)) != len(self.sinks):
            raise ValueError("sinks must name each sink once")
        if not self.otlp_signals:
            raise ValueError('otlp_signals must name at least one of "traces" and "logs"')
        if self.otlp_endpoint and not self.otlp_endpoint.startswith(("http://", "https://")):
            raise ValueError("otlp_endpoint must be a URL, such as http://collector:4318")
        if not 0.1 <= self.otlp_timeout_s <= 600:
            raise ValueError("otlp_timeout_s must be from 0.1 to 600")
        if not self.prefix or "/" in self.prefix:
            raise ValueError("prefix must be a file name's beginning, without '/'")
        if not _NAME.fullmatch(self.durable):
            raise ValueError("durable must be a consumer's name: no spaces, and none of . * > / \\")
        sizes = (
            "fetch_rows",
            "flush_bytes",
            "flush_interval_ms",
            "roll_bytes",
            "recent_rows",
            "tool_sessions",
            "tool_rows",
        )
        for key in sizes:
            if getattr(self, key) < 1:
                raise ValueError(f"{key} must be at least 1")
        for key in ("roll_lines", "roll_age_s", "keep_segments", "keep_bytes", "keep_age_s"):
            if not getattr(self, key) >= 0:
                raise ValueError(f"{key} must be 0 (no limit) or more")
        if self.flush_bytes > MOST_FLUSH_BYTES:
            raise ValueError(f"flush_bytes must be at most {MOST_FLUSH_BYTES}")
        if not self.ack_wait_s * 1000 >= 5 * self.flush_interval_ms:
            raise ValueError("ack_wait_s must be at least five flush intervals, or rows come again while they wait")
        if not self.tenant:
            raise ValueError("tenant must not be empty")
        if not -1 <= self.tool_events_http_port <= 65_535:
            raise ValueError("tool_events_http_port must be a port, 0 (any) or -1 (none)")
        if self.tool_events_token:
            if self.tool_events_token_file:
                raise ValueError("tool_events_token and tool_events_token_file cannot both be set")
            check_token(self.tool_events_token)
        if not (self.load_samples_s == 0 or 0.1 <= self.load_samples_s <= 86_400):
            raise ValueError("load_samples_s must be 0 (none) or from 0.1 to 86400")

    @property
    def opens_tool_events(self) -> bool:
        """Whether any way in is open."""
        return bool(self.tool_events) or self.tool_events_http_port >= 0

    def durable_of(self, sink: str) -> str:
        """Name of a sink's consumer."""
        return self.durable if sink == "file" else f"{self.durable}-{sink}"

    @property
    def takes_tool_events(self) -> bool:
        """Whether any way in is open, or tools are inferred."""
        return self.opens_tool_events or self.infer_tools
