"""Files of a server's TLS: what is wrong with them is said in one sentence, before anybody connects."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from tests.support.certificates import Authority
from web.errors import BadTlsFileError
from web.tls import MOST_RESULTS, Handshakes, TlsFiles, load_tls


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def test_a_good_pair_is_taken_and_its_end_known(authority: Authority, tmp_path: Path) -> None:
    """In two files, or both in one."""
    certificate, key = authority.pair(tmp_path)
    assert load_tls(TlsFiles(str(certificate), str(key)), Handshakes()).expires_at > time.time()
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    assert load_tls(TlsFiles(str(both)), Handshakes()).expires_at > time.time()


def missing(authority: Authority, directory: Path) -> TlsFiles:
    return TlsFiles(str(directory / "none.pem"))


def of_another(authority: Authority, directory: Path) -> TlsFiles:
    return TlsFiles(str(authority.pair(directory)[0]), str(authority.pair(directory, "other")[1]))


def expired(authority: Authority, directory: Path) -> TlsFiles:
    certificate, key = authority.expired(directory)
    return TlsFiles(str(certificate), str(key))


def swapped(authority: Authority, directory: Path) -> TlsFiles:
    certificate, key = authority.pair(directory)
    return TlsFiles(str(key), str(certificate))


def no_key(authority: Authority, directory: Path) -> TlsFiles:
    return TlsFiles(str(authority.pair(directory)[0]))


def torn(authority: Authority, directory: Path) -> TlsFiles:
    certificate, key = authority.pair(directory)
    certificate.write_bytes(certificate.read_bytes()[:300])
    return TlsFiles(str(certificate), str(key))


def encrypted(authority: Authority, directory: Path) -> TlsFiles:
    certificate, key = authority.pair(directory)
    locked = serialization.load_pem_private_key(key.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    key.write_bytes(locked)
    return TlsFiles(str(certificate), str(key))


def bad_ca(authority: Authority, directory: Path) -> TlsFiles:
    certificate, key = authority.pair(directory)
    return TlsFiles(str(certificate), str(key), str(key))


@pytest.mark.parametrize(
    ("files", "what", "says"),
    [
        (missing, "certificate", "none.pem: cannot be read: No such file or directory"),
        (of_another, "key", "other.key: is not the key of the first certificate in"),
        (expired, "certificate", "expired.pem: has expired"),
        (swapped, "certificate", "server.key: holds no certificate in PEM form"),
        (no_key, "key", "server.pem: holds no private key in PEM form"),
        (torn, "certificate", "server.pem: cannot be used"),
        (encrypted, "key", "server.key: is encrypted"),
        (bad_ca, "client_ca", "server.key: holds no certificate in PEM form"),
    ],
)
def test_what_is_wrong_is_named(
    files: Callable[[Authority, Path], TlsFiles], what: str, says: str, authority: Authority, tmp_path: Path
) -> None:
    """The file, and what to look for in it; nobody is asked for a passphrase."""
    with pytest.raises(BadTlsFileError, match=says) as caught:
        load_tls(files(authority, tmp_path), Handshakes())
    assert caught.value.what == what


@pytest.mark.parametrize("gone", ["door.pem", "door.key"])
def test_a_file_that_goes_while_it_is_read_is_named(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """As when both are being replaced: an error of the files, and not one that ends whoever watches them."""
    certificate, key = authority.pair(tmp_path)
    paths = {"door.pem": certificate, "door.key": key}
    read = Path.read_bytes

    def read_and_lose(path: Path) -> bytes:
        data = read(path)
        if path == paths[gone]:
            path.unlink()
        return data

    monkeypatch.setattr(Path, "read_bytes", read_and_lose)
    with pytest.raises(BadTlsFileError, match="No such file"):
        load_tls(TlsFiles(str(certificate), str(key)), Handshakes())


def test_results_that_clients_choose_are_bounded() -> None:
    """A label for each reason would be theirs to invent."""
    handshakes = Handshakes()
    for number in range(3 * MOST_RESULTS):
        handshakes.ended(f"reason {number}")
    assert len(handshakes.results) == MOST_RESULTS + 1
    assert handshakes.results["other"] == 2 * MOST_RESULTS
