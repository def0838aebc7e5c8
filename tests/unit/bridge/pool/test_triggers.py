"""When the key list is fetched: soon enough, seldom enough, and never for nothing."""

from __future__ import annotations

from services.bridge.pool.triggers import Triggers


def settled(now: float = 100.0, took_s: float = 0.0) -> Triggers:
    triggers = Triggers(every_s=60, least_s=2)
    triggers.began()
    triggers.ended(now, took_s)
    return triggers


def test_the_first_list_is_due_at_once() -> None:
    """Nothing is known before it."""
    assert Triggers(every_s=60, least_s=2).due(0.0) == ("first",)


def test_reasons_are_gathered_for_the_least_time() -> None:
    """Debounced: however many there are, one list answers them."""
    triggers = settled()
    for at, reason in ((100.1, "gap"), (100.5, "segment"), (101.0, "gap")):
        triggers.want(reason, at)  # type: ignore[arg-type]
        assert triggers.due(at) == ()
    assert triggers.due(102.0) == ("gap", "segment")


def test_without_a_reason_the_timer_is_one() -> None:
    """What happened between the list and its answer stays wrong until the next (spec: pool-events §4.3)."""
    triggers = settled()
    assert triggers.due(159.0) == ()
    assert triggers.due(160.0) == ("timer",)


def test_a_reason_during_a_list_stays_for_the_next() -> None:
    """The list may have been written before it; the doubt stands from then on."""
    triggers = settled()
    triggers.want("gap", 103.0)
    triggers.began()
    doubts = [triggers.doubt]
    triggers.want("segment", 104.0)
    triggers.ended(105.0, took_s=2.0)
    doubts.append(triggers.doubt)
    assert doubts == ["gap", "segment"]
    assert triggers.due(115.0) == ("segment",)


def test_a_pool_that_evicts_all_the_time_is_not_listed_all_the_time() -> None:
    """Dynamo-sized pools take seconds to list: evictions alone may take a fifth of the time, but never more than the
    slow timer allows; what is urgent does not wait for that."""
    triggers = settled(took_s=5.0)
    triggers.want("eviction", 101.0)
    assert triggers.due(119.0) == ()
    assert triggers.due(120.0) == ("eviction",)
    triggers.want("gap", 103.0)
    assert triggers.due(103.0) == ("eviction", "gap")
    slow = settled(took_s=1000.0)
    slow.want("eviction", 101.0)
    assert slow.due(160.0) == ("eviction", "timer")


def test_an_eviction_alone_is_no_doubt() -> None:
    """Every full pool evicts; what is said of it is likely, not sure, at all times (spec: pool-events §4.6)."""
    triggers = settled()
    triggers.want("eviction", 101.0)
    assert triggers.doubt is None
