"""The pool's store: what it holds, what it tells and what it keeps to itself, as a real master was seen to do."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.pool.events import PoolEvent
from load.pool.misbehave import PoolMisbehaviour
from load.pool.store import DEFAULT_TENANT, NO_SPACE, NO_SUCH_CLIENT, PoolStore, StoreLimits


def store_of(capacity: int = 1000, **limits: float) -> PoolStore:
    return PoolStore(StoreLimits(capacity_bytes=capacity, **limits))  # type: ignore[arg-type]


def told(store: PoolStore) -> list[tuple[str, str | None, str | None]]:
    return [(event.event_type, event.object_key, event.medium) for event in store.take_events()]


def test_put_get_remove() -> None:
    store = store_of()
    assert store.put(["a", "b"], 10, 0.0, group_ids=["g"], session_ids=[None, "s"]) == [0, 0]
    events = store.take_events()
    assert [(event.group_id, event.session_id) for event in events] == [("g", None), (None, "s")]
    assert store.put(["a"], 10, 0.0) == [0], "a key that is there: no error"
    assert told(store) == [], "and no event (pool-events §3)"
    assert store.touch(["a", "c"], 0.0) == [10, -1]
    assert store.remove(["a", "b", "c"], 1.0) == 1, "a read grants a lease"
    assert store.remove(["a"], 1.0, force=True) == 1
    assert told(store) == [("removed", "b", "cpu"), ("removed", "a", "cpu")]
    assert store.put(["a"], 10, 2.0, upsert=True) == [0]
    assert store.put(["a"], 20, 2.0, upsert=True) == [0]
    assert told(store) == [("stored", "a", "cpu"), ("removed", "a", "cpu"), ("stored", "a", "cpu")]
    assert store.remove_all() == 1
    assert told(store) == [("removed", "a", "cpu"), ("cleared", None, None)]
    assert store.used_bytes == 0


def test_eviction_is_silent_unless_disk_has_the_object() -> None:
    """Pool-events §3: 181 keys evicted, 0 removed; but removed(cpu) where a disk copy stays."""
    store = store_of(30)
    store.put(["a", "b", "c"], 10, 0.0)
    store.offload(["b"])
    store.take_events()
    store.touch(["a"], 0.0, lease=True)
    assert store.put(["d", "e"], 10, 0.0) == [0, 0]
    assert told(store) == [("removed", "b", "cpu"), ("stored", "d", "cpu"), ("stored", "e", "cpu")]
    assert set(store.readable_keys()) == {"a", "b", "d", "e"}
    assert store.evicted_memory == 2
    assert store.put(["f"], 31, 0.0) == [NO_SPACE]
    assert store.evict(None, 1) == 1
    assert told(store) == []


def test_a_client_that_closes_or_dies_takes_its_objects_silently() -> None:
    """Pool-events §3: close at once; killed: hidden while suspected, gone later, and never an event."""
    store = store_of(client_ttl_s=10.0, client_suspicion_s=20.0)
    assert store.put(["x"], 1, 0.0, client="nobody") == [NO_SUCH_CLIENT]
    for name in ("one", "two"):
        store.mount(name, f"{name}:1", 100, 0.0)
        store.put([f"{name}-key"], 1, 0.0, client=name)
    store.take_events()
    store.unmount("one")
    assert set(store.readable_keys()) == {"two-key"}
    store.tick(11.0)
    assert set(store.readable_keys()) == set(), "hidden while suspected"
    assert len(store) == 1
    assert store.ping("two", 12.0)
    assert set(store.readable_keys()) == {"two-key"}, "visible again"
    store.clients["two"].killed = True
    assert store.ping("two", 40.0)
    store.tick(43.0)
    assert len(store) == 0
    assert not store.ping("two", 44.0)
    assert [segment for segment, *_ in store.segments()] == ["pool-segment"]
    assert told(store) == []
    assert (store.suspicions, store.recoveries, store.lost_clients) == (2, 1, 1)


def test_tenants_and_patterns() -> None:
    store = store_of()
    store.put(["a1", "a2", "b1"], 1, 0.0)
    store.put(["a1"], 1, 0.0, tenant="other")
    assert store.remove_by_regex("^a", 0.0) == 2
    assert store.remove_all("other") == 1
    assert list(store.readable_keys()) == ["b1"]
    events = store.take_events()
    assert events[-1] == PoolEvent("cleared", "other")


actions = st.lists(
    st.tuples(st.sampled_from(["put", "get", "remove", "evict", "offload", "close"]), st.integers(0, 7)), max_size=40
)


@given(actions)
def test_random_histories_against_a_naive_model(history: list[tuple[str, int]]) -> None:
    """Capacity holds, byte counts agree, and a consumer of the events is wrong only about what leaves silently."""
    store = store_of(3)
    store.mount("c", "c:1", 2, 0.0)
    known: dict[str, set[str]] = defaultdict(set)
    for now, (action, number) in enumerate(history):
        key = f"k{number}"
        if action == "put":
            store.put([key], 1, float(now) * 100, client="c" if number % 2 and "c" in store.clients else None)
        elif action == "get":
            store.touch([key], float(now) * 100)
        elif action == "remove":
            store.remove([key], float(now) * 100, force=True)
        elif action == "evict":
            store.evict([key], 0)
        elif action == "offload":
            store.offload([key])
        elif number == 0:
            store.unmount("c")
        for event in store.take_events():
            assert event.object_key is not None
            assert event.medium is not None
            if event.event_type == "stored":
                known[event.object_key].add(event.medium)
            else:
                assert event.medium in known[event.object_key], "removed what was not stored"
                known[event.object_key].discard(event.medium)
        there = {key: set(entry.media) for (_, key), entry in store._objects.items()}
        assert all(media and media <= known[key] for key, media in there.items()), "nothing is there that was not told"
        silent = [key for key, media in known.items() if media - there.get(key, set())]
        assert all("disk" not in known[key] or "c" not in store.clients for key in silent)
        in_memory = sum("cpu" in media for media in there.values())
        assert store.used_bytes == in_memory == sum(used for *_, used, _ in store.segments())
        assert in_memory <= max(store.capacity_bytes, 3 + 2)


def test_bad_flags_are_refused() -> None:
    flags = PoolMisbehaviour()
    for wrong in ({"drop_batches": -2}, {"error_status": 200}, {"no_such_flag": 1}):
        with pytest.raises(ValueError, match=r".+"):
            flags.change(wrong)
    flags.change({"error_requests": 2, "only_path": "/get"})
    assert [flags.take("error_requests", path) for path in ("/metrics", "/get_all_keys", "/get_all_keys", "/get")] == [
        *(False, True, True, False)
    ]
    assert DEFAULT_TENANT == "default"
