"""The front door's certificate as it stands: read, watched, and taken for new connections when it changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterable
from ssl import SSLContext

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.errors import SettingsError
from bus.log import EventLog
from services.ingress.config import IngressSettings
from web.errors import BadTlsFileError
from web.tls import Handshakes, ServerTls, TlsFiles, load_tls

log = EventLog(__name__)

POLL_S = 0.5
_SETTINGS = {"certificate": "tls_cert", "key": "tls_key", "client_ca": "tls_client_ca"}
Stamp = tuple[tuple[int, int, int] | None, ...]
"""Of each file that is there: inode, size, time of its last change (ns)."""


def check_files(settings: IngressSettings) -> None:
    """What `DoorTls.load` would say of them, before anything is started. Blocks. Raises `SettingsError`."""
    if not settings.tls_cert:
        return
    try:
        load_tls(_files(settings), Handshakes())
    except BadTlsFileError as error:
        raise _wrong(error) from error


def _files(settings: IngressSettings) -> TlsFiles:
    return TlsFiles(settings.tls_cert, settings.tls_key, settings.tls_client_ca)


def _wrong(error: BadTlsFileError) -> SettingsError:
    return SettingsError(_SETTINGS[error.what], str(error))


class DoorTls(Collector):
    """The files of ``settings``, which has a ``tls_cert``; and what is counted of them."""

    def __init__(self, settings: IngressSettings) -> None:
        self._files = _files(settings)
        self.handshakes = Handshakes()
        self._read_at: Stamp = ()
        self._expires_at = 0.0
        self._failures = 0

    async def load(self) -> SSLContext:
        """At the start. Raises `SettingsError`."""
        try:
            return await self._load()
        except BadTlsFileError as error:
            raise _wrong(error) from error

    async def watch(self, use: Callable[[SSLContext], Awaitable[None]]) -> None:
        """Read the files once they have changed and then stood still for one look, and ``use`` what they say; what
        cannot be used is said, and the certificate from before stays."""
        seen = self._read_at
        while True:
            await asyncio.sleep(POLL_S)
            now = await asyncio.to_thread(_stamp, self._files)
            if now == seen != self._read_at:
                await self._reload(use)
            seen = now

    async def _reload(self, use: Callable[[SSLContext], Awaitable[None]]) -> None:
        before = self._expires_at
        try:
            await use(await self._load())
        except BadTlsFileError as error:
            self._failures += 1
            log.error("tls_files_broken", key=_SETTINGS[error.what], detail=str(error))  # noqa: TRY400 - the file's fault
        except OSError as error:  # no descriptor is left: tried again at the next look
            self._failures += 1
            self._read_at, self._expires_at = (), before
            log.error("tls_files_not_taken", error=error)  # noqa: TRY400 - the system's
        else:
            log.info("tls_files_read", file=self._files.certificate, expires_at=int(self._expires_at))

    async def _load(self) -> SSLContext:
        self._read_at = await asyncio.to_thread(_stamp, self._files)
        loaded: ServerTls = await asyncio.to_thread(load_tls, self._files, self.handshakes)
        self._expires_at = loaded.expires_at
        return loaded.context

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(
            "tidegate_ingress_tls_handshakes_started", "TLS handshakes begun.", value=self.handshakes.started
        )
        results = CounterMetricFamily(
            "tidegate_ingress_tls_handshakes",
            "TLS handshakes by what became of them; one that was begun and is in none was given up, or goes on.",
            labels=["result"],
        )
        for result, count in sorted(self.handshakes.results.items()):
            results.add_metric([result], count)
        yield results
        yield GaugeMetricFamily(
            "tidegate_ingress_tls_handshakes_under_way", "TLS handshakes that go on.", value=self.handshakes.under_way
        )
        yield GaugeMetricFamily(
            "tidegate_ingress_tls_expires_timestamp_seconds",
            "Unix time at which the certificate in use expires.",
            value=self._expires_at,
        )
        yield CounterMetricFamily(
            "tidegate_ingress_tls_reload_failures", "Times that changed files could not be used.", value=self._failures
        )


def _stamp(files: TlsFiles) -> Stamp:
    return tuple(_of(path) for path in files.paths)


def _of(path: os.PathLike[str]) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
