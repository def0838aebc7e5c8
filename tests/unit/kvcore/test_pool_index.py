"""The pool index: dialects and hostile messages, matching, key lists, deltas, dumps, bounds."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.dump import at_once
from kvcore.errors import BadBatchError, BadDumpError
from kvcore.pool_dump import DELTA, Section, encode
from kvcore.pool_index import PoolIndex, PoolLimits, PoolPrefix
from kvcore.pool_keys import HICACHE
from kvcore.pool_layout import LayoutSet, PoolLayout, mha_components
from tests.unit.kvcore.pool_making import (
    POOL_TWINS,
    PoolTwin,
    cleared,
    copy_of,
    hicache_key,
    page_of,
    pages_of,
    payload,
    ranges,
    removed,
    stored,
    told,
)

pytestmark = pytest.mark.parametrize("twin", POOL_TWINS, ids=str)

ONE = PoolLayout(HICACHE, "", (LayoutSet(("__k",)),))
KEY = hicache_key(0)


# Dialects


def test_main_of_august_2026(twin: PoolTwin) -> None:
    """Context fields nil, sequence hashes, a base index, no session; one stored event per put, removals always of
    medium cpu, and events without a key where the master is told so (spec: pool-events §1 dialects)."""
    base = {"base_block_idx": 0, "seq_hashes": [12345], "block_hashes": [12345]}
    event = {name: value for name, value in stored(KEY).items() if name != "session_id"} | base
    index = told(twin, event | {"dp_rank": None})
    assert index.present(KEY) == {"cpu"}
    applied = index.apply_payload(payload(removed(KEY, dp_rank=None), {**event, "object_key": None}))
    assert (applied.removed, applied.rejected) == (1, {"no_key": 1})
    del event["object_key"]
    assert index.apply_payload(payload(event)).rejected == {"no_key": 1}
    assert index.stats().objects == 0


def test_conductor_branch_of_july_2026(twin: PoolTwin) -> None:
    """Fields parsed from vLLM's keys beside the key itself, an event per medium, clears (spec: pool-events §1)."""
    key = f"rollout2@m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{page_of(1)}"
    more: dict[str, Any] = {
        "connector_block_hash": page_of(1),
        "cache_prefix": "rollout2",
        "tp_rank": 0,
        "pcp_rank": 0,
        "dcp_rank": 0,
        "pp_rank": 0,
        "layer_id": None,
        "seq_hashes": [int(page_of(1)[-16:], 16)],
        "group_id": "vllm-mooncake-store:rollout2@m",
    }
    index = told(twin, stored(key, **more), stored(key, "disk", **more))
    assert index.present(key) == {"cpu", "disk"}
    index.apply_payload(payload(removed(key, **more)))
    assert index.present(key) == {"disk"}
    index.apply_payload(payload(cleared()))
    assert index.present(key) == frozenset()


def test_without_the_legacy_names_and_with_nothing_else(twin: PoolTwin) -> None:
    """``event_type`` counts before ``type``; either is enough, and so are kind and key alone."""
    index = told(twin, {"event_type": "stored", "object_key": KEY}, {"type": "BlockStored", "object_key": "x__k"})
    assert index.present(KEY) == {"cpu"}
    assert index.stats().unparsed == 1
    assert index.apply_payload(payload({"type": "BlockRemoved", "object_key": KEY})).removed == 1
    applied = index.apply_payload(payload({"event_type": "tiered", "type": "BlockStored", "object_key": KEY}))
    assert applied.rejected == {"unknown_type": 1}


def test_media(twin: PoolTwin) -> None:
    """Unknown media are carried and counted; a removal that names none takes all, one that names an unknown one takes
    nothing; there are eight at most."""
    index = told(twin, stored(KEY, "CPU"), stored(KEY, "Tape"), stored(KEY, None))
    assert index.present(KEY) == {"cpu", "tape"}
    assert index.stats().unknown_media == 1
    applied = index.apply_payload(payload(removed(KEY, "moon"), removed(KEY, "disk")))
    assert (applied.unchanged, applied.unknown_media) == (2, 1)
    assert index.apply_payload(payload(removed(KEY, None))).removed == 1
    assert index.present(KEY) == frozenset()
    applied = index.apply_payload(payload(*(stored(KEY, f"m{number}") for number in range(9))))
    assert (applied.stored, applied.unknown_media, applied.rejected) == (5, 5, {"too_many_media": 4})


def test_tenants_are_apart(twin: PoolTwin) -> None:
    """The same key of two tenants is two objects, and a clear is one tenant's (spec: pool-events §1, §4 rule 1)."""
    index = told(twin, stored(KEY), stored(KEY, tenant="b"), stored(KEY, tenant=None), removed(KEY, tenant="c"))
    assert index.stats().tenants == ("b", "default")
    assert index.match(ONE, pages_of([0]), tenant="b") == index.match(ONE, pages_of([0])) == ((0, 1),)
    assert index.match(ONE, pages_of([0]), tenant="c") == ()
    index.apply_payload(payload(cleared("b")))
    assert index.present(KEY, tenant="b") == frozenset()
    assert index.present(KEY) == {"cpu"}
    index.clear()
    assert index.stats().pages == index.stats().components == 0


# Hostile input

BAD_EVENTS: list[object] = [
    None,
    7,
    "stored",
    [1, 2],
    {1: 2},
    {"event_type": 1, "object_key": KEY},
    {"event_type": "stored", "object_key": 7},
    {"event_type": "stored", "object_key": [KEY]},
    {"event_type": "stored", "object_key": KEY.encode()},
    {"event_type": "stored", "object_key": KEY, "medium": 1},
    {"event_type": "stored", "object_key": KEY, "medium": "m" * 65},
    {"event_type": "stored", "object_key": KEY, "tenant_id": {}},
    {"event_type": "stored", "object_key": KEY, "tenant_id": "t" * 5000},
    {"event_type": "stored", "object_key": KEY, "backend_id": "b" * 5000},
    {"event_type": "stored", "object_key": KEY, "backend_id": True},
]


def test_bad_events_cost_only_themselves(twin: PoolTwin) -> None:
    """Each is counted, the good ones around them stand."""
    index = twin.PoolIndex()
    applied = index.apply_payload(payload(*BAD_EVENTS, stored(KEY)))
    assert (applied.stored, applied.rejected) == (1, {"bad_field": len(BAD_EVENTS)})
    assert index.stats().rejected == {"bad_field": len(BAD_EVENTS)}


def test_texts_that_are_not_utf8(twin: PoolTwin) -> None:
    """In a field that is read, the event is bad; in one that is not, nobody looks."""
    whole = payload(stored(KEY, group_id="?GROUP"), stored("?KEY"))
    applied = twin.PoolIndex().apply_payload(whole.replace(b"?KEY", b"\xffKEY").replace(b"?GROUP", b"\xffGROUP"))
    assert (applied.stored, applied.rejected) == (1, {"bad_field": 1})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc0",
        b"\x90",
        b"\x91\x01",
        msgspec.msgpack.encode({"events": [], "ts": 1.0}),
        msgspec.msgpack.encode(["soon", [], 0]),
        msgspec.msgpack.encode([1, {}, 0]),
        msgspec.msgpack.encode([1, None, 0]),
        payload(stored(KEY))[:-1],
        payload(stored(KEY)) + b"\xc0",
        b"\x93\x01\xdd\xff\xff\xff\xff",
    ],
    ids=range(11),
)
def test_what_is_no_batch(twin: PoolTwin, data: bytes) -> None:
    """It is refused, and nothing changes."""
    index = told(twin, stored(KEY))
    with pytest.raises(BadBatchError):
        index.apply_payload(data)
    assert index.present(KEY) == {"cpu"}


def test_batches_of_other_shapes(twin: PoolTwin) -> None:
    """A float as timestamp, no rank, and more at the end are all the same."""
    for message in ([1.5, [stored(KEY)]], [1, [stored(KEY)], None, "more"], [1, (stored(KEY),), {"a": [1]}]):
        assert twin.PoolIndex().apply_payload(msgspec.msgpack.encode(message)).stored == 1


MESSAGE = payload(stored(KEY), removed(hicache_key(1), "disk"), cleared("b"), stored(hicache_key(2), "tape"))


@given(st.integers(0, len(MESSAGE) - 1), st.binary(min_size=1, max_size=4), st.booleans())
def test_damaged_messages(twin: PoolTwin, at: int, noise: bytes, insert: bool) -> None:
    """Whatever bytes come, only `BadBatchError` leaves, and both twins count the same."""
    data = MESSAGE[:at] + noise + MESSAGE[at if insert else at + len(noise) :]
    outcomes: list[object] = []
    for each in {str(POOL_TWINS[0]): POOL_TWINS[0], str(twin): twin}.values():
        index = each.PoolIndex()
        try:
            applied = index.apply_payload(data)
        except BadBatchError:
            outcomes.append(None)
        else:
            counts = (applied.stored, applied.removed, applied.unchanged, applied.cleared, applied.unparsed)
            outcomes.append((*counts, applied.unknown_media, dict(applied.rejected), index.stats().objects))
    assert outcomes[0] == outcomes[-1]


# Matching


def test_a_page_counts_when_every_object_is_there(twin: PoolTwin) -> None:
    """K, V and every rank, in whatever medium each lies (Mooncake #1887, #2127, #3589)."""
    layout = PoolLayout(HICACHE, "m_", (LayoutSet(mha_components(2)),))
    index = twin.PoolIndex()
    for component in mha_components(2):
        assert index.match(layout, pages_of([0, 1])) == ()
        media = ("disk", "cpu")[component.endswith("k") :]
        for name in (0, 1):
            key = hicache_key(name, component, "m_")
            index.apply_payload(payload(*(stored(key, medium) for medium in media)))
    assert index.match(layout, pages_of([0, 1])) == ((0, 2),)
    index.apply_payload(payload(removed(hicache_key(0, "_1_v", "m_"), "cpu")))
    assert index.match(layout, pages_of([0, 1])) == ((0, 2),)
    index.apply_payload(payload(removed(hicache_key(0, "_1_v", "m_"), "disk")))
    assert index.match(layout, pages_of([0, 1])) == ((1, 2),)


def test_the_layout_that_the_engine_says_is_used(twin: PoolTwin) -> None:
    """Side pools under their own suffixes and hit rules: a hybrid model was always missed where its suffixes were
    guessed (sglang #40467, dynamo #14720). A sliding window must be there only at the end of what is loaded."""
    window = LayoutSet(("_0_0_swa_k",), "trailing_pages", 2)
    layout = PoolLayout(HICACHE, "m_", (LayoutSet(("__k", "__indexer")), window))
    index = twin.PoolIndex()
    for name in range(5):
        index.apply_payload(payload(*(stored(hicache_key(name, part, "m_")) for part in ("__k", "__indexer"))))
    asked = pages_of(range(6))
    assert index.match(layout, asked) == ()
    index.apply_payload(payload(stored(hicache_key(2, "_0_0_swa_k", "m_"))))
    assert index.match(layout, asked) == ()
    index.apply_payload(payload(stored(hicache_key(1, "_0_0_swa_k", "m_"))))
    assert index.match(layout, asked) == ((0, 3),)
    index.apply_payload(payload(removed(hicache_key(0, "__k", "m_"))))
    assert index.match(layout, asked) == ((1, 3),)
    index.apply_payload(payload(removed(hicache_key(1, "_0_0_swa_k", "m_"))))
    assert index.match(layout, asked) == ()
    assert index.match(layout, asked[2 * 16 :]) == ((0, 1),)
    assert index.match(layout, pages_of(["not there", 2])) == ((1, 2),)


GRID = st.lists(st.sets(st.sampled_from("abc")), max_size=9)
LAYOUT_SETS = st.lists(
    st.tuples(
        st.sets(st.sampled_from("abcd"), max_size=2),
        st.sampled_from(["all_pages", "trailing_pages"]),
        st.integers(0, 3),
    ),
    max_size=3,
)


@pytest.mark.long
@given(GRID, LAYOUT_SETS)
def test_any_match_is_what_its_words_say(
    twin: PoolTwin, grid: list[set[str]], sets: list[tuple[set[str], str, int]]
) -> None:
    """Ranges of complete pages, each ending where what is needed at its end allows; against the rule read aloud."""
    parts = tuple(LayoutSet(tuple(f"_{name}" for name in sorted(names)), rule, n) for names, rule, n in sets)
    layout = PoolLayout(HICACHE, "", parts)
    positions = {position: frozenset(f"_{name}" for name in names) for position, names in enumerate(grid)}
    index = told(twin, *(stored(hicache_key(at, part)) for at, names in positions.items() for part in names))
    expected = ranges(positions, len(grid), layout)
    assert index.match(layout, pages_of(range(len(grid)))) == expected
    assert sum(prefix.matched for prefix in index.prefixes()) == sum(end - start for start, end in expected)


def test_an_incomplete_page_at_the_end_is_ignored(twin: PoolTwin) -> None:
    """As are no pages at all."""
    index = told(twin, stored(KEY))
    assert index.match(ONE, b"") == index.match(ONE, pages_of([0])[:-1]) == ()
    assert index.match(ONE, pages_of([0]) + b"abc") == ((0, 1),)


def test_deployments_are_apart_and_a_wrong_prefix_shows(twin: PoolTwin) -> None:
    """The same page under another tag, type or model is another page: neither type nor layout is in SGLang's keys
    (vllm #38362, #45767, lmdeploy #4930). A router that asked under the bare hash when 0.5.17 put the model in front
    saw a hit rate of 0 and no error (dynamo #14952): here what arrives and is never found is counted by prefix."""
    index = told(twin, *(stored(hicache_key(0, "__k", prefix)) for prefix in ("bf16_m_", "fp8_m_")))
    assert index.match(ONE, pages_of([0])) == ()
    assert index.stats().unmatched == 2
    fp8 = PoolLayout(HICACHE, "fp8_m_", ONE.sets)
    assert index.match(fp8, pages_of([0])) == ((0, 1),)
    assert index.stats().unmatched == 1
    assert set(index.prefixes()) == {
        PoolPrefix("default", HICACHE, "bf16_m_", pages=1, objects=1, arrived=1, matched=0),
        PoolPrefix("default", HICACHE, "fp8_m_", pages=1, objects=1, arrived=1, matched=1),
    }


# Key lists and deltas


def test_key_lists(twin: PoolTwin) -> None:
    """Media that are known stay; an object that only the other index knows brings its own; else it is in cpu."""
    live = told(twin, stored(KEY, "disk"), stored(hicache_key(1), "disk"), stored(hicache_key(1)))
    listed = "\r\n".join([KEY, hicache_key(1), "", hicache_key(2), "12345"]).encode() + b"\n\xff\n"
    target = told(twin, stored(hicache_key(1)))
    applied = target.add_keys(listed, known=live)
    assert (applied.stored, applied.unchanged, applied.unparsed) == (2, 1, 2)
    assert target.present(KEY) == {"disk"}
    assert target.present(hicache_key(1)) == target.present(hicache_key(2)) == {"cpu"}
    assert target.stats().unparsed == 2


def test_a_removal_after_the_list_spares_what_lies_on_disk(twin: PoolTwin) -> None:
    """The list has no media: without the live index's, the removal of the copy in memory that comes after it would
    take the object away, though it lies on disk (spec: pool-events §3, §4 rules 3 and 4)."""
    live = told(twin, stored(KEY), stored(KEY, "disk"), removed(KEY))
    target = twin.PoolIndex()
    target.add_keys(KEY.encode(), known=live)
    target.apply_payload(payload(removed(KEY)))
    assert target.present(KEY) == {"disk"}
    assert live.difference(target) == []


def test_a_difference_is_of_one_tenant_and_of_objects(twin: PoolTwin) -> None:
    """Silent evictions go, missed objects come with their media, those in both keep theirs, other tenants' are left
    alone: the list has only the default one's (spec: pool-events §3, §4 rule 4)."""
    live = told(twin, stored(KEY, "disk"), stored(hicache_key(1)), stored(hicache_key(1), "disk"))
    live.apply_payload(payload(stored(KEY, tenant="b")))
    target = told(twin, stored(KEY), stored(hicache_key(2), "tape"), stored(hicache_key(2)))
    (delta,) = live.difference(target)
    applied = live.apply_delta(delta)
    assert (applied.stored, applied.removed, applied.unchanged) == (1, 1, 0)
    assert [set(live.present(hicache_key(name))) for name in range(3)] == [{"disk"}, set(), {"cpu", "tape"}]
    assert live.present(KEY, tenant="b") == {"cpu"}
    assert live.difference(target) == []
    again = live.apply_delta(delta)
    assert (again.stored, again.removed, again.unchanged) == (0, 0, 2)
    (everything,) = live.difference(target, tenant=None)
    live.apply_delta(everything)
    assert live.present(KEY, tenant="b") == frozenset()


def test_a_large_difference_comes_in_parts(twin: PoolTwin) -> None:
    """Each of about the size asked for, each good alone and in any order."""
    names = range(300)
    target = told(twin, *(stored(hicache_key(name, part, "m_")) for name in names for part in ("_0_k", "_0_v")))
    live = told(twin, *(stored(hicache_key(name, prefix="old_")) for name in names))
    deltas = live.difference(target, part_bytes=1000)
    assert len(deltas) > 10
    assert max(map(len, deltas)) < 1200
    for delta in reversed(deltas):
        live.apply_delta(delta)
    assert live.difference(target) == []
    assert live.stats().objects == 600


def test_a_layout_that_was_asked_for_before_a_load(twin: PoolTwin) -> None:
    """The loaded pool met its components in another order: numbers of the old one say nothing about it."""
    layout = PoolLayout(HICACHE, "m_", (LayoutSet(("_0_k",)),))
    keys = [hicache_key(1, "_0_k", "m_"), hicache_key(2, "_0_v", "m_")]
    here, there = twin.PoolIndex(), twin.PoolIndex()
    here.apply_payload(payload(*map(stored, keys)))
    there.apply_payload(payload(*map(stored, reversed(keys))))
    assert here.match(layout, pages_of((1, 2))) == ((0, 1),)
    at_once(here.load(at_once(there.dump())))
    assert here.match(layout, pages_of((1, 2))) == ((0, 1),)


def test_both_twins_understand_each_other(twin: PoolTwin) -> None:
    """Dumps and deltas of either are read by the other."""
    index = told(twin, stored(KEY), stored(KEY, "tape"), stored(hicache_key(1, prefix="m_"), "disk", "b"))
    for other in POOL_TWINS:
        copy = copy_of(other, index)
        assert copy.difference(copy_of(other, index), tenant=None) == []
        assert copy.present(KEY) == {"cpu", "tape"}
        assert copy.present(hicache_key(1, prefix="m_"), tenant="b") == {"disk"}
        fresh = other.PoolIndex()
        for delta in twin.PoolIndex().difference(index, tenant=None):
            fresh.apply_delta(delta)
        assert copy_of(twin, fresh).difference(index, tenant=None) == []
        assert index.difference(copy_of(twin, fresh), tenant=None) == []
        assert copy_of(twin, fresh).present(KEY) == {"cpu", "tape"}


# Dumps


@pytest.mark.long
def test_a_dump_is_of_one_moment(twin: PoolTwin) -> None:
    """What is applied between its steps is not in it."""
    index = told(twin, *(stored(hicache_key(name)) for name in range(3000)))
    steps = index.dump()
    next(steps)
    index.apply_payload(payload(removed(KEY), stored(hicache_key("new"))))
    copy = twin.PoolIndex()
    at_once(copy.load(at_once(steps)))
    assert (copy.stats().pages, len(copy.present(hicache_key("new")))) == (3000, 0)
    assert copy.present(KEY) == {"cpu"}


@pytest.mark.long
def test_loading_replaces_everything_at_its_end(twin: PoolTwin) -> None:
    """Until then the index answers as before; its counters go on."""
    index = told(twin, stored(KEY), stored("no page"))
    steps = index.load(at_once(told(twin, *(stored(hicache_key(name)) for name in range(1, 4000))).dump()))
    next(steps)
    assert index.present(KEY) == {"cpu"}
    at_once(steps)
    assert (index.present(KEY), index.stats().pages, index.stats().unparsed) == (frozenset(), 3999, 1)


DUMP = at_once(told(POOL_TWINS[0], stored(KEY), stored(KEY, "tape"), stored(hicache_key(1), "disk")).dump())


@given(st.integers(0, len(DUMP) - 1), st.binary(min_size=1, max_size=3), st.sampled_from(["replace", "insert", "cut"]))
def test_damaged_dumps_and_deltas(twin: PoolTwin, at: int, noise: bytes, how: str) -> None:
    """They are refused with nothing changed, or they are a dump; both twins agree which."""
    rest = {"replace": noise + DUMP[at + len(noise) :], "insert": noise + DUMP[at:], "cut": b""}[how]
    data = DUMP[:at] + rest
    outcomes = []
    for each in {str(POOL_TWINS[0]): POOL_TWINS[0], str(twin): twin}.values():
        index = told(each, stored(hicache_key("kept")))
        try:
            at_once(index.load(data))
        except BadDumpError:
            assert index.present(hicache_key("kept")) == {"cpu"}
            outcomes.append(-1)
        else:
            outcomes.append(index.stats().objects)
        try:
            outcomes.append(index.apply_delta(b"TGPD" + data[4:]).stored)
        except BadBatchError:
            outcomes.append(-1)
    assert outcomes[:2] == outcomes[-2:]


def test_the_bytes_of_version_1(twin: PoolTwin) -> None:
    """They are a contract between bridges and indexes of different age, so they stay as `kvcore.pool_dump` says; what
    another version wrote is refused."""

    def text(name: str) -> bytes:
        return len(name).to_bytes(4, "little") + name.encode()

    def number(value: int, size: int = 4) -> bytes:
        return value.to_bytes(size, "little")

    media = number(3, 1) + text("cpu") + text("disk") + text("tape")
    identity = number(1) + text("default") + text(HICACHE) + text("m_")
    components = number(2) + text("_0_k") + text("_0_v")
    patterns = number(2) + number(2, 2) + b"\0\0\1\1\0\5" + number(1, 2) + b"\1\0\2"
    pages = [pages_of([0]) + number(0), pages_of([1]) + number(1)]
    head = media + identity + components + patterns + number(2)
    bodies = [head + b"".join(order) for order in (pages, pages[::-1])]  # each twin has its own second chance
    index = told(
        twin,
        stored(hicache_key(0, "_0_k", "m_")),
        *(stored(hicache_key(0, "_0_v", "m_"), medium) for medium in ("tape", "cpu")),
        stored(hicache_key(1, "_0_v", "m_"), "disk"),
    )
    assert at_once(index.dump()) in [b"TGPI\x01" + body for body in bodies]
    assert twin.PoolIndex().difference(index) in [[b"TGPD\x01" + body] for body in bodies]
    for body in bodies:
        copy = twin.PoolIndex()
        at_once(copy.load(b"TGPI\x01" + body))
        assert copy.difference(index) == index.difference(copy) == []
    removal = number(1, 1) + text("cpu") + identity + number(1) + text("_0_v") + number(1) + number(1, 2) + b"\0\0\0"
    applied = index.apply_delta(b"TGPD\x01" + removal + number(1) + pages_of([1]) + number(0))
    assert (applied.removed, index.stats().pages) == (1, 1)
    with pytest.raises(BadDumpError, match="version 2"):
        at_once(index.load(b"TGPI\x02" + bodies[0]))


def test_a_dump_is_no_delta(twin: PoolTwin) -> None:
    """Nor the other way round."""
    index = told(twin, stored(KEY))
    with pytest.raises(BadBatchError):
        index.apply_delta(DUMP)
    with pytest.raises(BadDumpError):
        at_once(index.load(twin.PoolIndex().difference(index)[0]))


# Bounds


def test_the_limit_takes_the_oldest_pages_of_the_largest_deployment(twin: PoolTwin) -> None:
    """Never everything at once: the peer cleared its whole index at a million keys (dynamo #11239). Pages that a match
    found lately stay, small deployments stay, and what went is counted."""
    index = twin.PoolIndex(PoolLimits(max_pages=100))
    index.apply_payload(payload(*(stored(hicache_key(name, prefix="small_")) for name in range(10))))
    index.apply_payload(payload(*(stored(hicache_key(name)) for name in range(90))))
    assert index.match(ONE, pages_of(range(5))) == ((0, 5),)
    applied = index.apply_payload(payload(*(stored(hicache_key(name)) for name in range(90, 110))))
    assert applied.evicted == index.stats().evicted == 20
    assert index.stats().pages == 100
    assert index.match(ONE, pages_of(range(110))) == ((0, 5), (25, 110))
    assert all(index.present(hicache_key(name, prefix="small_")) for name in range(10))


def test_many_prefixes(twin: PoolTwin) -> None:
    """The deployment touched longest ago goes when there are too many; one that is asked for stays, and one that is
    written to."""
    index = twin.PoolIndex(PoolLimits(max_prefixes=4))
    index.apply_payload(payload(stored(KEY), stored(hicache_key(0, prefix="busy_"))))
    for number in range(50):
        index.apply_payload(payload(stored(hicache_key(0, prefix=f"p{number}_"))))
        assert index.match(ONE, pages_of([0])) == ((0, 1),)
        assert index.apply_payload(payload(stored(hicache_key(0, prefix="busy_")))).unchanged == 1
    stats = index.stats()
    assert (stats.prefixes, stats.pages, stats.components, stats.evicted) == (4, 4, 4, 48)


@pytest.mark.long
def test_of_many_deployments_those_touched_longest_ago_go_first(twin: PoolTwin) -> None:
    """However often one has to go, and whatever was written to or asked for meanwhile: the order is exact."""
    index, generator = twin.PoolIndex(PoolLimits(max_prefixes=300)), random.Random(5)
    touched: OrderedDict[str, None] = OrderedDict()
    for _ in range(3000):
        prefix = f"p{generator.randrange(500)}_"
        if prefix in touched and generator.random() < 0.3:
            layout = PoolLayout(HICACHE, prefix, (LayoutSet(("_0_k",)),))
            assert index.match(layout, pages_of([0])) == ((0, 1),)
        else:
            index.apply_payload(payload(stored(hicache_key(0, "_0_k", prefix))))
        touched[prefix] = None
        touched.move_to_end(prefix)
        if len(touched) > 300:
            touched.popitem(last=False)
    assert [known.prefix for known in index.prefixes()] == list(touched)


def test_many_components(twin: PoolTwin) -> None:
    """Components beyond the bound are refused and counted; those known are still taken."""
    index = twin.PoolIndex(PoolLimits(max_components=8))
    applied = index.apply_payload(payload(*(stored(hicache_key(0, f"_{number}")) for number in range(50))))
    assert (applied.stored, applied.rejected) == (8, {"too_many_components": 42})
    assert index.apply_payload(payload(stored(hicache_key(1, "_7")))).stored == 1
    loaded = twin.PoolIndex(PoolLimits(max_components=4))
    at_once(loaded.load(at_once(index.dump())))
    assert (loaded.stats().objects, loaded.stats().rejected) == (4, {"too_many_components": 5})


@pytest.mark.long
def test_components_of_all_deployments_are_bounded(twin: PoolTwin) -> None:
    """Ever new deployments with ever new components: those touched longest ago make room."""
    components = [f"_{number}" for number in range(1000)]
    pattern = tuple((number, 1) for number in range(1000))
    page = bytearray(pages_of([0]) + bytes(4))
    sections = [Section(("default", HICACHE, f"p{number}_"), components, [pattern], page) for number in range(70)]
    index = twin.PoolIndex()
    applied = index.apply_delta(encode(DELTA, ["cpu"], sections))
    stats = index.stats()
    assert stats.components <= 65_536
    assert (applied.stored, stats.prefixes, stats.objects, stats.evicted) == (70_000, 65, 65_000, 5)
    assert index.present(hicache_key(0, "_999", "p69_")) == {"cpu"}


def test_huge_keys_are_not_kept(twin: PoolTwin) -> None:
    """They are counted as no page."""
    applied = twin.PoolIndex().apply_payload(
        payload(stored(f"{'m' * 100_000}_{page_of(0)}_0_k"), stored("x" * 100_000))
    )
    assert (applied.stored, applied.unparsed) == (0, 2)


LIMITED = PoolLimits(max_pages=6, max_prefixes=3, max_components=3)


@pytest.mark.long
@given(
    st.lists(
        st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 4), st.integers(0, 4)), max_size=12),
        max_size=6,
    )
)
def test_bounds_hold_whatever_comes(twin: PoolTwin, batches: list[list[tuple[bool, int, int, int]]]) -> None:
    """After every call the bounds hold, nothing is there that should not be, something of the deployment stored to last
    is there, and the counters add up. A dump of it loads under the same bounds."""
    index: PoolIndex = twin.PoolIndex(LIMITED)
    present: set[str] = set()
    for batch in batches:
        events = [(store, hicache_key(name, f"_{part}", f"p{where}_")) for store, name, where, part in batch]
        applied = index.apply_payload(payload(*(stored(key) if store else removed(key) for store, key in events)))
        for store, key in events:
            (present.add if store else present.discard)(key)
        stats = index.stats()
        assert (stats.pages <= 6, stats.prefixes <= 3, stats.components <= 9) == (True, True, True)
        held = {key for key in present if index.present(key)}
        assert len(held) == stats.objects
        taken = applied.stored + applied.removed + applied.unchanged
        assert taken + applied.rejected["too_many_components"] == len(events)
        if events and events[-1][0] and not applied.rejected:
            assert f"p{batch[-1][2]}_" in {prefix.prefix for prefix in index.prefixes()}
    copy = copy_of(twin, index)
    assert copy.difference(index) == index.difference(copy) == []
