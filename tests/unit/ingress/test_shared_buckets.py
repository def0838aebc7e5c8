"""Buckets that several processes take from, against the bucket of a single one, in virtual time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.errors import RateLimitedError
from services.ingress.keys import Key, Keyring
from services.ingress.limits import Limiter, TokenBucket
from services.ingress.shared_buckets import STALE_S, SharedBucket, SharedBuckets, memory_bytes

COUNT = 3


def at_once(work: Callable[[], None]) -> bool:
    """Nobody else is there."""
    work()
    return True


def processes(count: int = COUNT) -> list[SharedBuckets]:
    """Each process's view of one memory."""
    memory = memoryview(bytearray(memory_bytes(count)))
    return [SharedBuckets(memory, number, count, at_once) for number in range(1, count + 1)]


def allotted(process: SharedBuckets, name: str = "a", now: float = 0.0, used: float = 0.0) -> SharedBucket:
    """Its bucket of this name: 2 a second, 10 at most."""
    bucket = process.allot(name, 2.0, 10.0, used, now)
    assert bucket is not None
    return bucket


@pytest.mark.long
@given(
    st.lists(st.tuples(st.floats(0, 30), st.integers(-5, 40), st.integers(0, COUNT - 1)), max_size=60),
    st.sampled_from([0.5, 1.0, 7.0]),
    st.sampled_from([1, 40, 100]),
)
def test_many_processes_see_one_bucket(steps: list[tuple[float, int, int]], rate: float, size: int) -> None:
    """Whoever takes, and gives back: each sees what one process would see that did it all."""
    now = 1000.0
    single = TokenBucket(rate, size, now)
    shared = [process.allot("a", rate, size, 0.0, now) for process in processes()]
    for wait, amount, who in steps:
        now += wait
        bucket = shared[who]
        assert bucket is not None
        assert bucket.wait_s(1, now) == pytest.approx(single.wait_s(1, now), abs=1e-6)
        assert bucket.wait_s(size + 1, now) == pytest.approx(single.wait_s(size + 1, now), abs=1e-6)
        bucket.take(amount)
        single.take(amount)


def test_who_is_started_again_goes_on() -> None:
    """What a process took stays taken when it dies; its successor finds the same bucket."""
    memory = memoryview(bytearray(memory_bytes(2)))
    first = allotted(SharedBuckets(memory, 1, 2, at_once))
    other = allotted(SharedBuckets(memory, 2, 2, at_once))
    assert first.wait_s(10, 0.0) == 0
    first.take(10)
    again = allotted(SharedBuckets(memory, 1, 2, at_once), now=1.0)
    assert again.level(1.0) == pytest.approx(2)
    again.take(2)
    assert other.level(1.0) == pytest.approx(0)


def test_a_place_that_nobody_used_for_long_goes_to_another_and_its_holder_sees_it() -> None:
    """Names that fall on the same place stand beside each other; only a stale one is replaced."""
    one, two, _ = processes()
    old = allotted(one, "old")
    old.take(3)
    assert allotted(two, "old").level(0.0) == pytest.approx(7)
    for number in range(200):
        assert allotted(two, f"other {number}", now=1.0).level(1.0) == pytest.approx(10)
    assert old.ours
    assert old.level(STALE_S) == pytest.approx(10)
    assert allotted(two, "old", now=STALE_S, used=9).level(STALE_S) == pytest.approx(10)


def test_what_is_settled_after_the_place_was_lost_is_charged_to_nobody() -> None:
    """A request that took longer than a place stays unused does not pay from another key's bucket."""
    memory = memoryview(bytearray(memory_bytes(2)))
    bucket = allotted(SharedBuckets(memory, 1, 2, at_once))
    bucket.take(3)
    memory[:] = bytes(len(memory))
    bucket.take(5)
    assert bytes(memory).count(0) == len(memory)


def test_no_place_is_no_answer() -> None:
    """While another process gives a place out."""
    memory = memoryview(bytearray(memory_bytes(1)))
    assert SharedBuckets(memory, 1, 1, lambda _: False).allot("a", 1.0, 1.0, 0.0, 0.0) is None


def test_a_keys_limits_are_of_all_processes_together() -> None:
    """Requests and tokens; and after a change of the file nobody begins with a full bucket."""
    one, two = (Limiter(process) for process in processes(2))
    key = Key(id="aaaa", sha256="", tenant="t", requests_per_s=1, burst=4, tokens_per_min=600)
    for limiter in (one, two, one, two):
        limiter.admit(key, 10, 0.0)
    for limiter in (one, two):
        with pytest.raises(RateLimitedError):
            limiter.admit(key, 10, 0.0)
    more = Key(id="aaaa", sha256="", tenant="t", requests_per_s=1, burst=5, tokens_per_min=600)
    one.keep(Keyring([more]), 0.0)
    two.keep(Keyring([more]), 0.0)
    two.admit(more, 10, 0.0)
    with pytest.raises(RateLimitedError):
        one.admit(more, 10, 0.0)


def test_a_limiter_that_gets_no_place_counts_by_itself() -> None:
    """Nobody waits for a lock on a request's way."""
    memory = memoryview(bytearray(memory_bytes(1)))
    limiter = Limiter(SharedBuckets(memory, 1, 1, lambda _: False))
    key = Key(id="aaaa", sha256="", tenant="t", requests_per_s=1, burst=1)
    limiter.admit(key, 0, 0.0)
    with pytest.raises(RateLimitedError):
        limiter.admit(key, 0, 0.0)
