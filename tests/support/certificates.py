"""Certificates for tests of TLS: an authority, its pairs as files, and contexts that trust it."""

from __future__ import annotations

import ssl
from datetime import UTC, datetime
from pathlib import Path

import trustme

HOSTS = ("localhost", "127.0.0.1")


class Authority:
    """Signs for loopback."""

    def __init__(self) -> None:
        self._ca = trustme.CA()

    def file(self, path: Path) -> Path:
        """Its own certificate."""
        self._ca.cert_pem.write_to_path(path)
        return path

    def pair(self, directory: Path, name: str = "server", expires: datetime | None = None) -> tuple[Path, Path]:
        """A certificate with its chain, and its key; each replaced whole."""
        return write_pair(self._ca.issue_cert(*HOSTS, not_after=expires), directory, name)

    def expired(self, directory: Path) -> tuple[Path, Path]:
        """A pair that was good once."""
        leaf = self._ca.issue_cert(
            *HOSTS, not_before=datetime(2001, 1, 1, tzinfo=UTC), not_after=datetime(2002, 1, 1, tzinfo=UTC)
        )
        return write_pair(leaf, directory, "expired")

    def context(self, cert: tuple[Path, Path] | None = None) -> ssl.SSLContext:
        """Of a client that trusts nobody else; ``cert``: what it brings."""
        context = ssl.create_default_context()
        self._ca.configure_trust(context)
        if cert is not None:
            context.load_cert_chain(*cert)
        return context


def write_pair(leaf: trustme.LeafCert, directory: Path, name: str) -> tuple[Path, Path]:
    """``name.pem`` and ``name.key``."""
    certificate, key = directory / f"{name}.pem", directory / f"{name}.key"
    for path, data in (
        (certificate, b"".join(blob.bytes() for blob in leaf.cert_chain_pems)),
        (key, leaf.private_key_pem.bytes()),
    ):
        fresh = path.with_suffix(path.suffix + ".new")
        fresh.write_bytes(data)
        fresh.replace(path)
    return certificate, key
