"""The keys file as it stands, the secrets of salts and engines: read, watched, and what a request may do by them."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from dataclasses import replace
from pathlib import Path

from bus.errors import SettingsError
from bus.log import EventLog
from bus.tasks import Tasks
from services.ingress.config import IngressSettings
from services.ingress.endpoints import ClientRequest
from services.ingress.errors import ApiNotIsolatedError, KeysFileError, ModelNotAllowedError, UnavailableError
from services.ingress.keys import Key, Keyring, presented_key, read_keys
from services.ingress.limits import BYTES_PER_TOKEN, Charge, Limiter
from services.ingress.requests import COUNTING
from services.ingress.salt import LEAST_SECRET_BYTES, SALTED_ENDPOINTS, tenant_salt
from services.ingress.shared_buckets import SharedBuckets
from services.ingress.shell.metrics import IngressMetrics
from web.headers import Headers

log = EventLog(__name__)

POLL_S = 0.5
LARGEST_FILE = 64 * 1024 * 1024
UNREADABLE = KeysFileError.reason
Stamp = tuple[int, int, int] | None
"""Of a file that is there: inode, size, time of its last change (ns)."""


class Access:
    """Who may ask for what. Without ``keys_file`` everybody, as the settings' tenant, for everything.
    ``engine_api_key``: what engines want to be brought, if anything."""

    def __init__(self, settings: IngressSettings, metrics: IngressMetrics, shared: SharedBuckets | None = None) -> None:
        self._settings = settings
        self._metrics = metrics
        self._path = Path(settings.keys_file)
        self._keys: Keyring | None = None
        self._limiter = Limiter(shared)
        self._read_at: Stamp = None
        self._secret = b""
        self.engine_api_key = settings.engine_api_key

    @property
    def on(self) -> bool:
        """Whether keys are asked for."""
        return bool(self._settings.keys_file)

    def not_ready(self) -> str | None:
        """Why nobody can be let in: no keys file has been read yet."""
        return UNREADABLE if self.on and self._keys is None else None

    async def start(self, tasks: Tasks) -> None:
        """Read everything; a keys file that cannot be read is waited for. Raises `SettingsError` for a secret that
        cannot be read."""
        if self._settings.engine_api_key_file:
            self.engine_api_key = await asyncio.to_thread(_engine_api_key, self._settings.engine_api_key_file)
        if not self.on:
            return
        self._secret = await asyncio.to_thread(salt_secret, self._settings) if self._settings.salts else b""
        await self._read(await asyncio.to_thread(_stamp, self._path))
        tasks.start("keys", self._watch())

    async def _watch(self) -> None:
        """Read the file once it has changed and then stood still for one look: it is not read while it is written."""
        seen = self._read_at
        while True:
            await asyncio.sleep(POLL_S)
            now = await asyncio.to_thread(_stamp, self._path)
            if now == seen != self._read_at:
                await self._read(now)
            seen = now

    async def _read(self, stamp: Stamp) -> None:
        """Take the file's keys, or keep those that there are, and say so."""
        self._read_at = stamp
        try:
            keys, writable = await asyncio.to_thread(_read_file, self._path)
        except KeysFileError as error:
            kept = len(self._keys) if self._keys is not None else None
            self._metrics.keys_reload_failures.inc()
            log.error(  # noqa: TRY400 - the file's fault, no traceback
                "keys_file_broken",
                file=str(self._path),
                detail=str(error),
                keys_kept=kept if kept is not None else "none: every request gets 503 until it is mended",
            )
            return
        self._keys = keys
        self._limiter.keep(keys, time.monotonic())
        self._metrics.keys.set(len(keys))
        log.info("keys_read", file=str(self._path), keys=len(keys))
        if writable:
            log.warning("keys_file_writable", file=str(self._path), advice="others may add keys to it: chmod 600")

    # What a request may do

    def key(self, headers: Headers) -> Key | None:
        """Whose request it is; ``None`` where no keys are asked for. Raises `InvalidKeyError`, and `UnavailableError`
        while no file could be read."""
        if not self.on:
            return None
        if self._keys is None:
            raise UnavailableError("The API keys cannot be read at the moment.", UNREADABLE)
        return self._keys.find(presented_key(headers), time.time())

    def charge(self, key: Key | None, endpoint: str, body_bytes: int) -> Charge:
        """Take what a request probably needs. Raises `RateLimitedError`."""
        tokens = 0 if endpoint in COUNTING or endpoint == "passthrough" else body_bytes // BYTES_PER_TOKEN
        return Charge(tokens) if key is None else self._limiter.admit(key, tokens, time.monotonic())

    def granted(self, key: Key | None, request: ClientRequest) -> ClientRequest:
        """The request under its tenant's salt, or the client's own. Raises `ModelNotAllowedError`,
        `ApiNotIsolatedError`."""
        if key is not None and not key.may_use(request.model):
            raise ModelNotAllowedError(request.model)
        own = request.cache_salt or request.nvext_salt
        if key is None or not self._secret:
            return replace(request, apart=own) if own else request
        salt = tenant_salt(self._secret, key.tenant, own)
        if request.endpoint in COUNTING:
            return replace(request, apart=salt)
        salted = request.endpoint in SALTED_ENDPOINTS
        if not salted and self._settings.require_cache_salt:
            raise ApiNotIsolatedError(request.endpoint)
        return replace(request, tenant_salt=salt, cache_salt=salt if salted else None, apart=salt)


def salt_secret(settings: IngressSettings) -> bytes:
    """What salts are derived with. Raises `SettingsError`."""
    if settings.cache_salt_secret:
        return settings.cache_salt_secret.encode()
    path = settings.cache_salt_secret_file
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise SettingsError("cache_salt_secret_file", f"{path}: {error.strerror or error}") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise SettingsError("cache_salt_secret_file", f"{path}: must hold {LEAST_SECRET_BYTES} bytes or more")
    return secret


def _engine_api_key(path: str) -> str:
    """Raises `SettingsError`."""
    try:
        key = Path(path).read_bytes().strip().decode("ascii")
    except OSError as error:
        raise SettingsError("engine_api_key_file", f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError("engine_api_key_file", f"{path}: must hold printable ASCII") from error
    if not key or not key.isprintable():
        raise SettingsError("engine_api_key_file", f"{path}: must hold one line of printable ASCII")
    return key


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read_file(path: Path) -> tuple[Keyring, bool]:
    """The keys, and whether others may write the file. Raises `KeysFileError`."""
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise KeysFileError(0, f"cannot be read: {error.strerror or error}") from error
    if len(data) > LARGEST_FILE:
        raise KeysFileError(0, f"is larger than {LARGEST_FILE} bytes")
    return read_keys(data), bool(mode & (stat.S_IWGRP | stat.S_IWOTH))
