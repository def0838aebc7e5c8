"""Which sinks the settings name."""

from __future__ import annotations

from services.recorder.config import RecorderSettings
from services.recorder.shell.file import FileSink
from services.recorder.shell.otlp import OtlpSink
from services.recorder.shell.sink import Sink
from services.recorder.shell.stdout import StdoutSink


def make_sinks(settings: RecorderSettings) -> list[Sink]:
    """One of each name, in the order of the settings, not open yet."""
    sinks: list[Sink] = []
    for name in settings.sinks:
        if name == "file":
            sinks.append(FileSink(settings))
        elif name == "otlp":
            sinks.append(OtlpSink(settings))
        else:
            sinks.append(StdoutSink())
    return sinks
