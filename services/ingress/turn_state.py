"""``x-codex-turn-state``: where a turn ran, given to its client to send back, signed.

Codex sends back what an answer gave it, on every later request of the same turn (spec: harness.md §3). What it says is
the name of a worker, never an address; a request can go there only if that worker is alive, serves the model, and
would be allowed anyhow. A token is good for its own session and a limited time; any other is as none.
"""

from __future__ import annotations

import hashlib
import hmac
from base64 import urlsafe_b64decode, urlsafe_b64encode
from binascii import Error
from collections.abc import Iterable
from struct import Struct

HEADER = "x-codex-turn-state"
_NAME = HEADER.encode()
PREFIX = "tg1."
"""What ours begin with: those of others are an engine's own, and pass in both directions."""

TURN_STATE_FAMILY = "codex"
"""Whose clients send it back."""

MOST_CHARACTERS = 512
_MAC_BYTES = 16
_PERSON = b"tidegate-turn-1"
_EXPIRES = Struct("<Q")


def foreign(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without turn states of ours, which are no engine's."""
    ours = PREFIX.encode()
    return [(name, value) for name, value in headers if name.lower() != _NAME or not value.strip().startswith(ours)]


class TurnStates:
    """Makes and reads them. ``secret``: of all front doors that shall read each other's. ``lasts_s``: 0: none."""

    def __init__(self, secret: bytes, lasts_s: float) -> None:
        self._key = hashlib.blake2b(secret, digest_size=32, person=_PERSON).digest()
        self._lasts_s = lasts_s

    @property
    def on(self) -> bool:
        return self._lasts_s > 0

    def make(self, worker: str, session: str, now: float) -> bytes:
        """For ``session`` (its key's text), at Unix time ``now``."""
        said = _EXPIRES.pack(int(now + self._lasts_s)) + worker.encode()
        return PREFIX.encode() + urlsafe_b64encode(self._mac(said, session) + said).rstrip(b"=")

    def read(self, token: str | None, session: str, now: float) -> str | None:
        """The worker's name; ``None`` for a token that is absent, not ours, another session's, forged or too old."""
        if not self.on or token is None or not token.startswith(PREFIX) or len(token) > MOST_CHARACTERS:
            return None
        text = token.removeprefix(PREFIX)
        try:
            data = urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except (Error, ValueError):
            return None
        mac, said = data[:_MAC_BYTES], data[_MAC_BYTES:]
        if len(said) < _EXPIRES.size or not hmac.compare_digest(mac, self._mac(said, session)):
            return None
        return said[_EXPIRES.size :].decode() if now < _EXPIRES.unpack_from(said)[0] else None

    def _mac(self, said: bytes, session: str) -> bytes:
        framed = _EXPIRES.pack(len(said)) + said + session.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(framed, digest_size=_MAC_BYTES, key=self._key, person=_PERSON).digest()
