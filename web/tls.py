"""TLS of a server: its files read and proven before they are used, and what becomes of handshakes. Of a client: whom it
trusts."""

from __future__ import annotations

import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from web.errors import BadTlsFileError

MOST_RESULTS = 32
"""Different results of handshakes that are counted by name; OpenSSL has more, and clients choose them."""

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_EXPIRED, _NOT_YET = 10, 9
"""OpenSSL's X509_V_ERR_CERT_HAS_EXPIRED and X509_V_ERR_CERT_NOT_YET_VALID."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files. ``certificate``: ours, and those between it and its authority. ``key``: its private key; empty: in the
    same file. ``client_ca``: who vouches for clients, which then must bring a certificate; empty: they need none."""

    certificate: str
    key: str = ""
    client_ca: str = ""

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(Path(path) for path in (self.certificate, self.key, self.client_ca) if path)


@dataclass(frozen=True, slots=True)
class ServerTls:
    """``context``: for `web.server.HttpServer`. ``expires_at``: Unix seconds."""

    context: ssl.SSLContext
    expires_at: float


class Handshakes:
    """``results``: ``completed``, or OpenSSL's reason in lower case. A client that goes away, or is cut at the
    deadline, is in ``started`` and in no result. ``under_way``: begun, and neither ended nor given up. ``may_begin``:
    whether there is room for one more; without it the client is cut before it is read (``no_room``)."""

    def __init__(self) -> None:
        self.started = 0
        self.under_way = 0
        self.results: Counter[str] = Counter()
        self.may_begin: Callable[[], bool] = lambda: True

    def ended(self, result: str) -> None:
        known = result in self.results or len(self.results) < MOST_RESULTS
        self.results[result if known else "other"] += 1

    def count(self, context: ssl.SSLContext) -> None:
        """Count those of ``context`` here. Event loops tell nobody of a handshake that fails."""
        handshakes = self

        class Counted(ssl.SSLObject):
            _begun = False
            _under_way = False

            def do_handshake(self) -> None:
                if not self._begun:
                    self._begin()
                try:
                    super().do_handshake()
                except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                    raise
                except ssl.SSLError as error:
                    self._end((error.reason or "unknown").lower())
                    raise
                self._end("completed")

            def _begin(self) -> None:
                self._begun = True
                handshakes.started += 1
                if not handshakes.may_begin():
                    handshakes.ended("no_room")
                    raise ssl.SSLError("no room for another connection")
                self._under_way = True
                handshakes.under_way += 1

            def _end(self, result: str) -> None:
                self._give_up()
                handshakes.ended(result)

            def _give_up(self) -> None:
                if self._under_way:
                    self._under_way = False
                    handshakes.under_way -= 1

            def __del__(self) -> None:
                # Nobody is told when a client leaves in the middle, or is cut; the object goes with its connection.
                self._give_up()

        context.sslobject_class = Counted


def load_tls(files: TlsFiles, handshakes: Handshakes) -> ServerTls:
    """What the files say, proven by a handshake in memory. Blocks. Raises `BadTlsFileError`."""
    certificate = _read("certificate", files.certificate)
    if _CERTIFICATE not in certificate:
        raise BadTlsFileError("certificate", files.certificate, "holds no certificate in PEM form")
    if b"PRIVATE KEY-----" not in _read("key", files.key or files.certificate):
        raise BadTlsFileError("key", files.key or files.certificate, "holds no private key in PEM form")
    expires_at = _prove(files, _context(files))
    context = _context(files)
    if files.client_ca:
        if _CERTIFICATE not in _read("client_ca", files.client_ca):
            raise BadTlsFileError("client_ca", files.client_ca, "holds no certificate in PEM form")
        try:
            context.load_verify_locations(cafile=files.client_ca)
        except OSError as error:  # OpenSSL's errors are some, a file that has gone since is another
            raise BadTlsFileError("client_ca", files.client_ca, f"cannot be used: {_why(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    handshakes.count(context)
    return ServerTls(context, expires_at)


def client_tls(ca: str = "") -> ssl.SSLContext:
    """TLS 1.2 or newer, HTTP/1.1, of a client that trusts the authorities in the PEM file ``ca`` and no others; empty:
    the system's (``SSL_CERT_FILE`` names others). Blocks. Raises `BadTlsFileError`."""
    if ca and _CERTIFICATE not in _read("ca", ca):
        raise BadTlsFileError("ca", ca, "holds no certificate in PEM form")
    try:
        context = ssl.create_default_context(cafile=ca or None)
    except OSError as error:
        raise BadTlsFileError("ca", ca, f"cannot be used: {_why(error)}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _read(what: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise BadTlsFileError(what, path, f"cannot be read: {_why(error)}") from error


def _why(error: OSError) -> str:
    said = error.reason if isinstance(error, ssl.SSLError) else error.strerror
    return said or str(error)


def _context(files: TlsFiles) -> ssl.SSLContext:
    """TLS 1.2 or newer, HTTP/1.1. Raises `BadTlsFileError`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    key = files.key or files.certificate

    def no_passphrase() -> bytes:
        # Without this OpenSSL asks whoever sits at the terminal.
        raise BadTlsFileError("key", key, "is encrypted; give one without a passphrase, readable by this user only")

    try:
        context.load_cert_chain(files.certificate, key, no_passphrase)
    except OSError as error:
        if isinstance(error, ssl.SSLError) and error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            raise BadTlsFileError(
                "key", key, f"is not the key of the first certificate in {files.certificate}"
            ) from error
        raise BadTlsFileError("certificate", files.certificate, f"cannot be used: {_why(error)}") from error
    return context


def _prove(files: TlsFiles, ours: ssl.SSLContext) -> float:
    """A client that trusts just this certificate must accept it now; when it will have expired. Raises
    `BadTlsFileError`."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        trusting.load_verify_locations(cafile=files.certificate)
        client = trusting.wrap_bio(to_client, to_server)
        server = ours.wrap_bio(to_server, to_client, server_side=True)
        for _ in range(4):
            for side in (client, server):
                _step(side)
    except ssl.SSLCertVerificationError as error:
        why = {_EXPIRED: "has expired", _NOT_YET: "is not valid yet"}.get(error.verify_code, error.verify_message)
        raise BadTlsFileError("certificate", files.certificate, why) from error
    except OSError as error:
        raise BadTlsFileError("certificate", files.certificate, f"cannot be used: {_why(error)}") from error
    said = client.getpeercert() or {}
    return float(ssl.cert_time_to_seconds(str(said["notAfter"])))


def _step(side: ssl.SSLObject) -> None:
    try:
        side.do_handshake()
    except ssl.SSLWantReadError:
        return
