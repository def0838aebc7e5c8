"""Who we are on the bus, and whom we take for the bus: credentials, TLS, and the inbox that answers come to.

A password is sent to whoever answers at the address. `tls_context` says when TLS is wanted; then nothing is sent to a
server that does not offer it (see `bus.nats.client`).
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from bus.errors import SettingsError
from bus.settings import ENVIRONMENT_PREFIX, CommonSettings, redact
from bus.subjects import encode_id

DEFAULT_INBOX = "_INBOX"
SCHEMES = ("nats", "tls", "ws", "wss")
SCHEMES_WITH_TLS = ("tls", "wss")
_PREFIX = re.compile(r"[A-Za-z0-9_=-]+(\.[A-Za-z0-9_=-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class NatsAccess:
    """As the settings of the same names (`bus.settings.CommonSettings`). Paths are read when a connection is made."""

    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    creds: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    inbox_prefix: str = ""


@dataclass(frozen=True, slots=True)
class Login:
    """What nats-py is given. ``password``: itself, or what reads it anew for each connection. ``token``: of an address
    ``nats://token@host``."""

    user: str | None = None
    password: str | Callable[[], str] | None = field(default=None, repr=False)
    token: str | None = field(default=None, repr=False)


def access_of(settings: CommonSettings) -> NatsAccess:
    """What a service's settings say."""
    names = NatsAccess.__dataclass_fields__
    return NatsAccess(**{name: getattr(settings, f"nats_{name}") for name in names})


def access_from_environment(environ: Mapping[str, str]) -> NatsAccess:
    """What ``TIDEGATE_NATS_USER`` and the others say."""
    names = NatsAccess.__dataclass_fields__
    return NatsAccess(**{name: environ.get(f"{ENVIRONMENT_PREFIX}NATS_{name.upper()}", "") for name in names})


def servers_of(url: str) -> list[str]:
    """The addresses of ``url``, which are separated by commas. Raises `SettingsError` for what is no address."""
    servers = [part.strip() for part in url.split(",") if part.strip()]
    if not servers or any(urlsplit(server).scheme not in SCHEMES for server in servers):
        raise SettingsError("nats_url", f"{redact('url', url)!r} is not nats://host:port")
    return servers


def login_of(access: NatsAccess, servers: Sequence[str]) -> Login:
    """Who we are: as the settings say, else as the address does. Raises `SettingsError`, which shows no secret."""
    if access.password and access.password_file:
        raise SettingsError("nats_password", "and nats_password_file are both set; one is enough")
    password = access.password or (_secret(access.password_file) if access.password_file else "")
    if access.user and not password:
        raise SettingsError("nats_user", "needs nats_password or nats_password_file")
    if password and not access.user:
        raise SettingsError("nats_password", "needs nats_user")
    if access.creds and access.user:
        raise SettingsError("nats_creds", "and nats_user are both set; one is enough")
    if access.user:
        return Login(access.user, _reader(access.password_file, password) if access.password_file else password)
    if access.creds:
        _readable("nats_creds", access.creds)
        return Login()
    # nats-py takes them as they are written, and not for the servers that a cluster names later.
    for parts in map(urlsplit, servers):
        if parts.username and parts.password is None:
            return Login(token=unquote(parts.username))
        if parts.username:
            return Login(unquote(parts.username), unquote(parts.password or ""))
    return Login()


def without_login(server: str) -> str:
    """The address alone: nats-py would write what stands before the @ into its errors."""
    parts = urlsplit(server)
    if "@" not in parts.netloc:
        return server
    return SplitResult(parts.scheme, parts.netloc.rsplit("@", 1)[1], parts.path, parts.query, "").geturl()


def inbox_prefix_of(access: NatsAccess, login: Login) -> str:
    """Under which our answers come: ``_INBOX.<user>`` where there is a user, so that permissions can keep the answers
    of others from being read or forged. Raises `SettingsError`."""
    if access.inbox_prefix:
        if not _PREFIX.fullmatch(access.inbox_prefix):
            raise SettingsError("nats_inbox_prefix", f"{access.inbox_prefix!r} is not the beginning of a subject")
        return access.inbox_prefix
    return f"{DEFAULT_INBOX}.{encode_id(login.user)}" if login.user else DEFAULT_INBOX


def tls_context(access: NatsAccess, servers: Sequence[str]) -> ssl.SSLContext | None:
    """How the server is recognised; ``None`` where nobody asked for TLS. Raises `SettingsError`."""
    wanted = any(urlsplit(server).scheme in SCHEMES_WITH_TLS for server in servers)
    if not (wanted or access.tls_ca or access.tls_cert or access.tls_key):
        return None
    if bool(access.tls_cert) != bool(access.tls_key):
        given, other = ("tls_cert", "tls_key") if access.tls_cert else ("tls_key", "tls_cert")
        raise SettingsError(f"nats_{given}", f"needs nats_{other}")
    for name in ("tls_ca", "tls_cert", "tls_key"):
        if path := getattr(access, name):
            _readable(f"nats_{name}", path)
    try:
        context = ssl.create_default_context(cafile=access.tls_ca or None)
    except ssl.SSLError as error:
        raise SettingsError("nats_tls_ca", f"{access.tls_ca} holds no certificate: {error}") from error
    try:
        if access.tls_cert:
            context.load_cert_chain(access.tls_cert, access.tls_key)
    except ssl.SSLError as error:
        raise SettingsError("nats_tls_cert", f"{access.tls_cert} and nats_tls_key do not fit: {error}") from error
    return context


def _readable(key: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingsError(key, f"{path} cannot be read: {error.strerror or error}") from error


def _reader(path: str, first: str) -> Callable[[], str]:
    """Reads the password when a connection is made again: it may be another by then. ``first`` while it cannot."""

    def read() -> str:
        try:
            return _secret(path)
        except SettingsError:
            return first

    return read


def _secret(path: str) -> str:
    text = _readable("nats_password_file", path).decode("utf-8", "replace").strip("\r\n")
    if not text:
        raise SettingsError("nats_password_file", f"{path} is empty")
    return text
