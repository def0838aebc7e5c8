"""Token buckets against what they promise, in virtual time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.errors import RateLimitedError
from services.ingress.keys import Key, Keyring
from services.ingress.limits import Limiter, TokenBucket

STEPS = st.lists(st.tuples(st.floats(-1, 30), st.integers(0, 150)), max_size=60)


@given(STEPS, st.sampled_from([0.5, 1.0, 7.0]), st.sampled_from([1, 40, 100]))
def test_a_bucket_lets_through_what_it_says(steps: list[tuple[float, int]], rate: float, size: int) -> None:
    """In every window no more than its size and what it fills, but for one that is larger than the bucket; after the
    wait that it tells, and not before, there is room; clocks that go back give nothing."""
    now = latest = 1000.0
    bucket = TokenBucket(rate, size, now)
    taken: list[tuple[float, int]] = []
    for wait, amount in steps:
        now += wait
        latest = max(latest, now)
        short = bucket.wait_s(amount, now)
        if short > 0:
            assert bucket.wait_s(amount, latest + short * 0.9) > 0
            now = latest = latest + short * 1.001 + 1e-6
            assert bucket.wait_s(amount, now) == 0
        bucket.take(amount)
        taken.append((latest, amount))
    for first in range(len(taken)):
        total = 0
        for at, amount in taken[first:]:
            total += amount
            assert total <= size + max(0, amount - size) + rate * (at - taken[first][0]) + 1e-3


def test_requests_and_tokens_are_taken_together_or_not_at_all() -> None:
    """A request without room for its tokens costs no request; the error says which limit, and for how long."""
    limiter = Limiter()
    key = Key(id="aaaa", sha256="", tenant="t", requests_per_s=1, burst=2, tokens_per_min=600)
    limiter.admit(key, 600, 0.0)
    for _ in range(5):
        with pytest.raises(RateLimitedError) as caught:
            limiter.admit(key, 100, 0.0)
        assert (caught.value.what, caught.value.retry_after_s) == ("tokens", 10)
    limiter.admit(key, 0, 0.0)
    with pytest.raises(RateLimitedError) as caught:
        limiter.admit(key, 0, 0.0)
    assert (caught.value.what, caught.value.retry_after_s) == ("requests", 1)
    limiter.admit(key, 100, 10.0)


def test_what_was_estimated_is_settled_once() -> None:
    """Less than estimated comes back, more is a debt; nothing twice, and nothing where the end tells no figure."""
    limiter = Limiter()
    key = Key(id="aaaa", sha256="", tenant="t", tokens_per_min=60)
    charge = limiter.admit(key, 60, 0.0)
    charge.settle(10)
    charge.settle(0)
    limiter.admit(key, 50, 0.0).settle(None)
    with pytest.raises(RateLimitedError):
        limiter.admit(key, 1, 0.0)
    limiter.admit(key, 1, 1.0).settle(120)  # an answer that was long: two minutes of it are owed
    with pytest.raises(RateLimitedError) as caught:
        limiter.admit(key, 1, 1.0)
    assert caught.value.retry_after_s == 120


def test_what_is_refused_is_given_back_once() -> None:
    """The request and its tokens, whichever limits there are; nothing after it was settled, no more than was taken."""
    limiter = Limiter()
    both = Key(id="aaaa", sha256="", tenant="t", requests_per_s=1, burst=2, tokens_per_min=60)
    for _ in range(5):
        charge = limiter.admit(both, 60, 0.0)
        charge.refund()
        charge.refund()
    limiter.admit(both, 30, 0.0)
    settled = limiter.admit(both, 30, 0.0)
    settled.settle(30)
    settled.refund()
    for tokens, what in ((0, "requests"), (30, "tokens")):
        with pytest.raises(RateLimitedError) as caught:
            limiter.admit(both, tokens, 0.0)
        assert caught.value.what == what
    for rule in ({"requests_per_s": 1.0, "burst": 1}, {"tokens_per_min": 1}, {}):
        only = Key(id=f"only{len(rule)}", sha256="", tenant="t", **rule)
        for _ in range(3):
            limiter.admit(only, 1, 0.0).refund()


def test_a_changed_file_gives_nobody_a_full_bucket() -> None:
    """What was used stays used; a larger limit gives the difference, a key that is gone leaves nothing."""
    limiter = Limiter()
    key = Key(id="aaaa", sha256="", tenant="t", requests_per_s=1, burst=2)
    limiter.admit(key, 0, 0.0)
    limiter.admit(key, 0, 0.0)
    limiter.keep(Keyring([key]), 0.0)
    with pytest.raises(RateLimitedError):
        limiter.admit(key, 0, 0.0)
    more = Key(id="aaaa", sha256="", tenant="t", requests_per_s=1, burst=3)
    limiter.keep(Keyring([more]), 0.0)
    limiter.admit(more, 0, 0.0)
    with pytest.raises(RateLimitedError):
        limiter.admit(more, 0, 0.0)
    limiter.keep(Keyring(), 0.0)
    limiter.admit(more, 0, 0.0)
