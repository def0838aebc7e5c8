"""How much a key may ask for: token buckets over requests and over tokens (docs/adr/0025).

A bucket fills at its rate up to its size. What is taken must be there; of something larger than the bucket a full one
lets one through and is in debt after it, so that a long prompt is served late and not never. Tokens are estimated from
the body when a request comes and settled when its answer has ended; what is refused instead of served is given back.
Buckets are this process's own, or those of all processes of this front door (`services.ingress.shared_buckets`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from services.ingress.errors import RateLimitedError
from services.ingress.keys import Key, Keyring
from services.ingress.shared_buckets import SharedBucket, SharedBuckets

BYTES_PER_TOKEN = 4
"""Of a body, where its tokens are not counted yet."""


class TokenBucket:
    """``size`` at most, ``per_s`` more each second; full at the beginning. Times in seconds that never go back (one
    that does adds nothing)."""

    ours = True

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


Bucket = TokenBucket | SharedBucket


@dataclass(slots=True)
class _Buckets:
    requests: Bucket | None
    tokens: Bucket | None

    @property
    def ours(self) -> bool:
        """Whether they still are this key's (`SharedBucket.ours`)."""
        return all(bucket is None or bucket.ours for bucket in (self.requests, self.tokens))


@dataclass(slots=True)
class Charge:
    """What one request was charged. `settle` it once it is known what it took, or `refund` it; whichever comes first
    counts, later calls do nothing."""

    estimated: int
    _bucket: Bucket | None = field(default=None)
    _requests: Bucket | None = field(default=None)

    def settle(self, tokens: int | None) -> None:
        """Charge ``tokens`` instead of the estimate; ``None``: the estimate stands."""
        if self._bucket is not None and tokens is not None:
            self._bucket.take(tokens - self.estimated)
        self._bucket = self._requests = None

    def refund(self) -> None:
        """Nothing was served: give the request back, and its tokens."""
        if self._requests is not None:
            self._requests.take(-1)
        self.settle(0)


class Limiter:
    """The buckets of every key that has limits; made at a key's first request. ``shared``: where all processes of the
    front door keep them."""

    def __init__(self, shared: SharedBuckets | None = None) -> None:
        self._buckets: dict[str, _Buckets] = {}
        self._shared = shared

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
        return Charge(tokens, buckets.tokens, buckets.requests)

    def keep(self, keys: Keyring, now: float) -> None:
        """After the file changed: buckets of keys that are gone go, those of keys with other limits follow."""
        known = {key.id: key for key in keys}
        for key_id in list(self._buckets):
            key = known.get(key_id)
            if key is None:
                del self._buckets[key_id]
                continue
            old = self._buckets[key_id]
            self._buckets[key_id] = _Buckets(
                self._moved(old.requests, key.id, _requests(key), now),
                self._moved(old.tokens, key.id, _tokens(key), now),
            )

    def _of(self, key: Key, now: float) -> _Buckets:
        found = self._buckets.get(key.id)
        if found is None or not found.ours:
            found = self._buckets[key.id] = _Buckets(
                self._made(key.id, _requests(key), now), self._made(key.id, _tokens(key), now)
            )
        return found

    def _made(self, key_id: str, rule: _Rule | None, now: float, used: float = 0.0) -> Bucket | None:
        """A bucket of which ``used`` is missing, unless all processes have it already."""
        if rule is None:
            return None
        if self._shared is not None:
            shared = self._shared.allot(f"{key_id} {rule.what}", rule.per_s, rule.size, used, now)
            if shared is not None:
                return shared
        bucket = TokenBucket(rule.per_s, rule.size, now)
        bucket.take(used)
        return bucket

    def _moved(self, old: Bucket | None, key_id: str, rule: _Rule | None, now: float) -> Bucket | None:
        """The bucket with the new limits; what was taken from the old one is taken from it too."""
        if old is None or rule is None:
            return self._made(key_id, rule, now)
        if (old.per_s, old.size) == (rule.per_s, rule.size):
            return old
        if isinstance(old, TokenBucket):
            old.resize(rule.per_s, rule.size, now)
            return old
        level = min(rule.size, old.level(now) + max(0.0, rule.size - old.size))
        return self._made(key_id, rule, now, rule.size - level)


@dataclass(frozen=True, slots=True)
class _Rule:
    """One limit of a key."""

    what: str
    per_s: float
    size: float


def _requests(key: Key) -> _Rule | None:
    if key.requests_per_s is None:
        return None
    return _Rule("requests", key.requests_per_s, key.burst or max(1, math.ceil(key.requests_per_s)))


def _tokens(key: Key) -> _Rule | None:
    return None if key.tokens_per_min is None else _Rule("tokens", key.tokens_per_min / 60, key.tokens_per_min)
