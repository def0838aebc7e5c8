"""How much a key may ask for: token buckets over requests and over tokens (docs/adr/0025).

A bucket fills at its rate up to its size. What is taken must be there; of something larger than the bucket a full one
lets one through and is in debt after it, so that a long prompt is served late and not never. Tokens are estimated from
the body when a request comes and settled when its answer has ended. Buckets are this process's own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.ingress.errors import RateLimitedError
from services.ingress.keys import Key, Keyring

BYTES_PER_TOKEN = 4
"""Of a body, where its tokens are not counted yet."""


class TokenBucket:
    """``size`` at most, ``per_s`` more each second; full at the beginning. Times in seconds that never go back (one
    that does adds nothing)."""

    def __init__(self, per_s: float, size: float, now: float) -> None:
        self.per_s = per_s
        self.size = size
        self.level = size
        self._at = now

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount`` (or a full bucket) is there; 0: now."""
        self._fill(now)
        return max(0.0, (min(amount, self.size) - self.level) / self.per_s)

    def take(self, amount: float) -> None:
        """Without asking; a negative amount is given back."""
        self.level = min(self.size, self.level - amount)

    def resize(self, per_s: float, size: float, now: float) -> None:
        """Other limits for what was taken so far: a key whose limits change does not begin with a full bucket."""
        self._fill(now)
        self.level = min(size, self.level + max(0.0, size - self.size))
        self.per_s, self.size = per_s, size

    def _fill(self, now: float) -> None:
        if now > self._at:
            self.level = min(self.size, self.level + (now - self._at) * self.per_s)
            self._at = now


@dataclass(slots=True)
class _Buckets:
    requests: TokenBucket | None
    tokens: TokenBucket | None


@dataclass(slots=True)
class Charge:
    """What one request was charged. `settle` it once it is known what it took."""

    estimated: int
    _bucket: TokenBucket | None = field(default=None)

    def settle(self, tokens: int | None) -> None:
        """Charge ``tokens`` instead of the estimate; ``None``: the estimate stands. Once; later calls do nothing."""
        if self._bucket is not None and tokens is not None:
            self._bucket.take(tokens - self.estimated)
        self._bucket = None


class Limiter:
    """The buckets of every key that has limits; made at a key's first request."""

    def __init__(self) -> None:
        self._buckets: dict[str, _Buckets] = {}

    def admit(self, key: Key, tokens: int, now: float) -> Charge:
        """Take one request and ``tokens`` at ``now``, or nothing of either. Raises `RateLimitedError`."""
        if key.requests_per_s is None and key.tokens_per_min is None:
            return Charge(tokens)
        buckets = self._of(key, now)
        waits = [
            (bucket.wait_s(amount, now), what)
            for bucket, amount, what in ((buckets.requests, 1, "requests"), (buckets.tokens, tokens, "tokens"))
            if bucket is not None
        ]
        wait_s, what = max(waits)
        if wait_s > 0:
            raise RateLimitedError(what, max(1, math.ceil(wait_s)))
        if buckets.requests is not None:
            buckets.requests.take(1)
        if buckets.tokens is not None:
            buckets.tokens.take(tokens)
        return Charge(tokens, buckets.tokens)

    def keep(self, keys: Keyring, now: float) -> None:
        """After the file changed: buckets of keys that are gone go, those of keys with other limits follow."""
        known = {key.id: key for key in keys}
        for key_id in list(self._buckets):
            key = known.get(key_id)
            if key is None:
                del self._buckets[key_id]
                continue
            old, fresh = self._buckets[key_id], _buckets(key, now)
            self._buckets[key_id] = _Buckets(
                _moved(old.requests, fresh.requests, now), _moved(old.tokens, fresh.tokens, now)
            )

    def _of(self, key: Key, now: float) -> _Buckets:
        found = self._buckets.get(key.id)
        if found is None:
            found = self._buckets[key.id] = _buckets(key, now)
        return found


def _buckets(key: Key, now: float) -> _Buckets:
    requests = tokens = None
    if key.requests_per_s is not None:
        requests = TokenBucket(key.requests_per_s, key.burst or max(1, math.ceil(key.requests_per_s)), now)
    if key.tokens_per_min is not None:
        tokens = TokenBucket(key.tokens_per_min / 60, key.tokens_per_min, now)
    return _Buckets(requests, tokens)


def _moved(old: TokenBucket | None, fresh: TokenBucket | None, now: float) -> TokenBucket | None:
    """The bucket with the new limits; what was taken from the old one is taken from it too."""
    if old is None or fresh is None:
        return fresh
    old.resize(fresh.per_s, fresh.size, now)
    return old
