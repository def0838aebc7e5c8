"""Shared pools in a replica: one numbered stream per pool, its health, layouts that must agree, answers. No bus."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import PoolIndex
from kvcore.dump import at_once
from kvcore.hashing import chain_hashes, pack_chain, pack_tokens
from replica import pools
from replica.config import ReplicaSettings
from replica.core import Replica
from replica.errors import BadQuestionError
from replica.events import PoolBatchReceived, PoolSnapshotReceived, RequestEnded, Work
from replica.pool_layouts import AGREED_S, PoolLayouts, compiled
from replica.pools import AT_ONCE, MISSES
from schemas.index import MatchRequest, SourceHealth
from schemas.pool import ComponentSet, PoolHeaders, SharedLayout
from schemas.request import Usage
from schemas.worker import WorkerProfile
from tests.unit.replica.bridge import BLOCK, ended, placed, stored
from tests.unit.replica.pool_bridge import PREFIX, PoolBridge, followed, keys, layout, prompt, told


def test_pages_are_there_when_every_object_is() -> None:
    """User cases: Mooncake #1887, #2127: one rank's half, or K without V, is no page; all four objects are."""
    at, tokens = followed(), prompt(4)
    objects = keys(tokens, layout())
    at.store(objects[:-1])
    assert (at.found(tokens).ranges, at.found(tokens).health) == (((0, 3),), "synced")
    at.store(objects[-1:])
    assert at.found(tokens).ranges == ((0, 4),)
    at.remove(objects[5:6])
    assert at.found(tokens).ranges == ((0, 1), (2, 4))
    (match,) = at.match(tokens).matches
    assert match.pool == "p"
    assert at.match(tokens).shared == ((0, 1), (2, 4))


def test_a_reconcile_changes_what_the_stream_had_wrong() -> None:
    """Silent evictions (spec: pool-events §3): the bridge's difference, numbered like any batch, puts it right."""
    at, tokens = followed(), prompt(3)
    objects = keys(tokens, layout())
    at.store(objects)
    at.reconcile(objects[:4])
    assert at.found(tokens).ranges == ((0, 1),)
    at.now += 5
    at.beat()
    assert at.found(tokens).age_ms is not None
    assert 5000 <= (at.found(tokens).age_ms or 0) <= 5200


def test_a_lost_batch_is_filled_by_a_snapshot() -> None:
    """What comes behind a hole waits; the bridge's picture stands for all of it. Meanwhile what is known is said."""
    at, tokens = followed(), prompt(4)
    objects = keys(tokens, layout())
    at.store(objects[:4])
    at.store(objects[4:8], heard=False)
    at.store(objects[8:])
    assert (at.found(tokens).ranges, at.found(tokens).health) == (((0, 1),), "catching_up")
    assert len(at.asked) == 1
    at.answer()
    assert (at.found(tokens).ranges, at.found(tokens).health) == (((0, 4),), "synced")


def test_a_lost_tail_shows_in_the_heartbeat() -> None:
    """The pool is quiet, the last batch was lost: the bridge's heartbeat names its number."""
    at, tokens = followed(), prompt(2)
    at.store(keys(tokens, layout()), heard=False)
    at.beat()
    at.beat()
    at.answer()
    assert at.found(tokens).ranges == ((0, 2),)


def test_a_reader_that_comes_late_asks_for_all_of_it() -> None:
    """A pool is taken in from when somebody reads it; before that its messages are counted, and forgotten."""
    at, tokens = PoolBridge(), prompt(2)
    at.reset()
    at.store(keys(tokens, layout()))
    at.beat()
    assert (len(at.core.pools.sources), at.core.pools.counters.unread) == (0, 3)
    at.worker("a", layout())
    at.beat()
    at.answer()
    assert at.found(tokens).ranges == ((0, 2),)


def test_a_reset_forgets_and_a_new_bridge_begins_anew() -> None:
    """The master or the bridge restarted: nothing of before counts, what is told afterwards does."""
    at, tokens = followed(), prompt(2)
    objects = keys(tokens, layout())
    at.store(objects)
    at.reset()
    assert at.found(tokens).ranges == ()
    at.store(objects)
    assert at.found(tokens).ranges == ((0, 2),)
    at.restart()
    assert at.found(tokens).ranges == ()
    at.store(objects[:4])
    assert (at.found(tokens).ranges, at.asked) == (((0, 1),), [])


def test_a_question_that_the_bridge_may_not_have_got_is_asked_again() -> None:
    """Its bridge has found the bus again: the question may have gone to the connection before."""
    at, tokens = followed(), prompt(2)
    at.store(keys(tokens, layout()), heard=False)
    at.beat()
    at.beat()
    (lost,) = at.asked
    at.reconnects = 1
    at.beat()
    at.beat()
    assert [question.ticket - lost.ticket for question in at.asked] == [0, 1]


def test_a_failed_snapshot_is_asked_for_again() -> None:
    """The first question fails; after a pause the next one is sent."""
    at, tokens = followed(), prompt(2)
    at.store(keys(tokens, layout()), heard=False)
    at.store([])
    at.fail()
    assert at.core.pools.gaps["p", "bus_timeout"] == 1
    at.live(2)
    at.answer()
    assert (at.found(tokens).ranges, at.found(tokens).health) == (((0, 2),), "synced")


@pytest.mark.parametrize(
    ("health", "reason"), [("catching_up", "reconciling"), ("approximate", "events_disabled"), ("blind", "master")]
)
def test_the_bridge_knows_best_how_far_it_can_be_trusted(health: SourceHealth, reason: str) -> None:
    """Its word is taken over; of a blind pool nothing is said."""
    at, tokens = followed(), prompt(2)
    at.store(keys(tokens, layout()))
    at.health, at.reason = health, reason
    at.beat()
    found = at.found(tokens)
    assert (found.health, found.reason) == (health, reason)
    assert found.ranges == (() if health == "blind" else ((0, 2),))
    assert at.match(tokens).shared == ()


def test_a_silent_bridge_is_not_believed_any_more() -> None:
    """It was killed: within `worker_lost_s` its pool is blind, and comes back with it."""
    at, tokens = followed(), prompt(2)
    at.store(keys(tokens, layout()))
    at.live(6, beats=False)
    assert (at.found(tokens).health, at.found(tokens).reason, at.found(tokens).ranges) == ("blind", "silent", ())
    at.beat()
    assert (at.found(tokens).health, at.found(tokens).ranges) == ("synced", ((0, 2),))


def test_a_bridge_whose_clock_went_back_is_believed_once_the_old_one_is_silent() -> None:
    """Its epoch is lower than that of the process before it: late words of an old process are not taken, but silence
    ends that."""
    at, tokens = followed(), prompt(2)
    at.store(keys(tokens, layout()))
    at.epoch -= 10
    at.beat()
    assert at.core.pools.sources["p"].state is not None
    assert at.core.pools.sources["p"].state.epoch == at.epoch + 10
    at.live(6, beats=False)
    assert at.found(tokens).reason == "silent"
    at.seq = -1
    at.reset()
    at.store(keys(tokens, layout()))
    at.beat()
    assert (at.found(tokens).health, at.found(tokens).ranges) == ("synced", ((0, 2),))


def test_a_batch_in_parts_is_one_batch() -> None:
    """Larger than a message: its parts are put together, and a part that is lost is a hole."""
    at, tokens = followed(), prompt(4)
    objects = keys(tokens, layout())

    def send(payload: bytes, parts: range) -> None:
        at.seq += 1
        at.index.apply_payload(payload)
        size = len(payload) // 3 + 1
        for part in parts:
            piece = payload[part * size : (part + 1) * size]
            at.give(PoolBatchReceived(PoolHeaders(pool="p", epoch=at.epoch, seq=at.seq, part=part, parts=3), piece))

    send(told("stored", objects[:8]), range(3))
    assert at.found(tokens).ranges == ((0, 2),)
    send(told("stored", objects[8:12]), range(1, 3))
    at.store(objects[12:])
    assert at.found(tokens).health == "catching_up"
    at.answer()
    assert (at.found(tokens).health, at.found(tokens).ranges) == ("synced", ((0, 4),))


@pytest.mark.parametrize(("shared", "alarms"), [(16 * BLOCK, 0), (None, 1)])
def test_what_a_pool_gave_is_no_news_of_the_rank_s_own_tiers(shared: int | None, alarms: int) -> None:
    """An engine reports what it loaded from its pool as cached. Where that was promised, the index of its own tiers is
    not to blame; where nothing was promised, it is wrong (user case A14)."""
    at = followed("w")
    at.workers["w"].publish(stored(0))
    for number in range(12):
        at.give(placed(number, pack_chain(range(1000 * number, 1000 * number + 17)), indexed=0))
        end = ended(number, Usage(input_tokens=18 * BLOCK, output_tokens=1, cached_tokens=16 * BLOCK), 0).end
        at.give(RequestEnded(msgspec.structs.replace(end, predicted_shared_tokens=shared)))
    at.workers["w"].now = at.now
    at.workers["w"].beats(4)
    assert at.core.counters.parity_alarms == alarms
    assert at.core.predicted["w"] == 12 * (shared or 0)


def test_what_was_never_or_long_ago_reconciled_is_likely_not_sure() -> None:
    """Spec: pool-events §4.6: between reconciles an entry is only likely; after `pool_stale_s` the answer says so."""
    at, tokens = followed(), prompt(2)
    at.store(keys(tokens, layout()))
    at.reconciled_s = None
    at.beat()
    assert (at.found(tokens).health, at.found(tokens).age_ms) == ("approximate", None)
    at.reconciled_s = at.now - 200
    at.beat()
    assert (at.found(tokens).health, at.found(tokens).reason) == ("approximate", "not_reconciled")


def test_a_pool_that_nobody_reads_any_more_is_forgotten_with_its_bridge() -> None:
    """The last reader left and the bridge is silent: its memory is given back."""
    at = followed()
    at.store(keys(prompt(2), layout()))
    at.leave("a")
    assert "p" in at.core.pools.sources
    at.live(6, beats=False)
    assert at.core.pools.sources == {}
    assert at.core.pools.gaps == {}


# Layouts


def test_workers_that_disagree_switch_the_pool_off_with_one_line() -> None:
    """The issue, bad input: another TP size in one pool: no credit for anybody of the model, one clear line, a metric;
    and on again when they have agreed for a while."""
    at, tokens = followed("a", "b"), prompt(2)
    at.store(keys(tokens, layout()))
    at.worker("b", layout(tp=4))
    reply = at.match(tokens)
    assert [each.pool for each in reply.matches] == [None, None]
    assert [(each.health, each.reason, each.ranges) for each in reply.pools] == [("blind", "layouts_disagree", ())]
    at.live(3)
    (line,) = at.events("pool_layouts_disagree")
    assert line.warning
    assert line.fields["model"] == "m"
    assert [text.split(":")[0] for text in line.fields["layouts"]] == ["a", "b"]
    assert at.core.pools.counters.disagreements == 1
    at.worker("b", layout())
    assert at.found(tokens).reason == "layouts_disagree"
    at.live(int(AGREED_S) + 1)
    assert at.found(tokens).ranges == ((0, 2),)
    assert [each.pool for each in at.match(tokens).matches] == ["p", "p"]


def test_a_worker_that_says_now_this_now_that_does_not_flap() -> None:
    """It changes its word every other second: the pool stays off, and the line is not said again."""
    at, tokens = followed("a", "b"), prompt(2)
    at.store(keys(tokens, layout()))
    for number in range(6):
        at.worker("b", layout(prefix="other_" if number % 2 == 0 else PREFIX))
        at.live(2)
        assert at.found(tokens).ranges == ()
    assert len(at.events("pool_layouts_disagree")) == 1
    assert len(at.events("pool_layout")) == 1


def test_the_one_that_differs_leaves() -> None:
    """With it goes the disagreement."""
    at, tokens = followed("a", "b"), prompt(2)
    at.store(keys(tokens, layout()))
    at.worker("b", layout(tp=4))
    at.leave("b")
    at.live(int(AGREED_S) + 1)
    assert at.found(tokens).ranges == ((0, 2),)


def test_a_worker_that_names_ever_new_adapters_is_held_to_those_of_now() -> None:
    """Nothing that an engine says of itself may be kept for ever."""
    layouts = PoolLayouts()
    for number in range(100):
        layouts.worker("a", WorkerProfile(url="http://a:1", model="m", shared=layout(), adapters=(f"a{number}",)), 1.0)
    readers = layouts.of("a")
    assert readers is not None
    assert [number for number in range(100) if readers.is_adapter(f"a{number}")] == [99]
    layouts.worker("b", WorkerProfile(url="http://a:1", model="m", shared=layout()), 1.0)
    layouts.worker("a", None, 1.0)
    assert not readers.is_adapter("a99")


def test_models_may_differ_within_one_pool_and_workers_may_have_none() -> None:
    """A layout is one model's; a worker without a pool gets no credit and does no harm."""
    at, tokens = followed("a"), prompt(2)
    at.store(keys(tokens, layout()))
    at.worker("b", None)
    reply = at.match(tokens)
    assert [(each.worker, each.pool) for each in reply.matches] == [("a", "p"), ("b", None)]
    assert reply.shared == ((0, 2),)


def test_two_pools_are_told_apart() -> None:
    """Each worker's own is named; the one answer for all (`shared`) is not given."""
    at, tokens = followed("a"), prompt(2)
    at.store(keys(tokens, layout()))
    other = PoolBridge(at.core, "q", now=at.now)
    at.worker("b", layout(pool="q"))
    other.reset()
    other.beat()
    other.store(keys(tokens, layout(), [0]))
    reply = at.match(tokens)
    assert [(each.worker, each.pool) for each in reply.matches] == [("a", "p"), ("b", "q")]
    assert {each.pool: each.ranges for each in reply.pools} == {"p": ((0, 2),), "q": ((0, 1),)}
    assert reply.shared == ()


def test_pages_of_several_blocks_are_told_in_blocks() -> None:
    """Two blocks a page: positions are the prompt's blocks; a page that is no number of blocks gives no credit."""
    shared = layout(page_size=2 * BLOCK)
    at = followed("a", shared=shared)
    tokens = prompt(3, page_size=2 * BLOCK)
    at.store(keys(tokens, shared, [0, 2]))
    assert at.found(tokens, 2 * BLOCK).ranges == ((0, 2), (4, 6))
    assert (at.found(tokens).ranges, at.found(tokens).reason) == ((), "page_size")
    at.worker("a", layout(page_size=BLOCK + 1))
    assert (at.found(tokens, BLOCK + 1).ranges, at.found(tokens, BLOCK + 1).reason) == ((), "page_size")
    assert at.match(tokens).matches[0].pool is None


def test_a_window_needs_its_side_pool_for_the_last_pages_only() -> None:
    """Spec §5.1: trailing pages of a side pool are needed at the end of the run alone (sliding windows, states)."""
    window = ComponentSet(pool="swa", components=("__swa",), hit_policy="trailing_pages", trailing_pages=1)
    main = ComponentSet(components=("__k",))
    shared = SharedLayout(pool="p", scheme="sglang_hicache", page_size=BLOCK, key_prefix=PREFIX, sets=(main, window))
    at, tokens = followed("a", shared=shared), prompt(4)
    objects = keys(tokens, shared)
    at.store([key for key in objects if key.endswith("__k")])
    assert at.found(tokens).ranges == ()
    at.store([objects[5]])
    assert objects[5].endswith("__swa")
    assert at.found(tokens).ranges == ((0, 3),)


def test_pages_by_the_engines_own_hashes() -> None:
    """Spec: pool-events §6: vLLM's keys hold the engine's block hash, which its events tell; the last block of a page
    names it. What the connector tells as the engine's own lower tier is not counted beside it."""
    components = ("@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0",)
    shared = SharedLayout(
        pool="p",
        scheme="vllm_mooncake",
        page_size=2 * BLOCK,
        key_prefix="model",
        sets=(ComponentSet(components=components),),
        page_hash="engine",
    )
    at = followed("a", shared=shared)
    tokens = prompt(2, page_size=2 * BLOCK)
    chain = chain_hashes(tokens, BLOCK)
    names = [0x1111, 0x2222, 0x3333, 0x4444]
    ids = list(range(4 * BLOCK))
    for medium in ("GPU", "CPU"):
        event = ["BlockStored", names, None, ids, BLOCK, None, medium]
        at.workers["a"].publish(msgspec.msgpack.encode([1.0, [event], 0]))
    at.workers["a"].publish(msgspec.msgpack.encode([1.0, [["BlockRemoved", names[2:], "GPU"]], 0]))
    at.store([f"model{components[0]}@{0xABCDEF:048x}{name:016x}" for name in (0x2222, 0x4444)])
    reply = at.match(b"", chain=chain)
    assert reply.pools[0].ranges == ((0, 4),)
    assert (reply.matches[0].blocks.device, reply.matches[0].blocks.host) == (2, 0)
    (readers,) = at.core.pools.layouts.readers()
    at.remove([f"model{components[0]}@{0xABCDEF:048x}{0x2222:016x}"])
    at.match(b"", chain=chain[:16])
    assert readers.missed == 1
    at.core.index.keep_links(0)
    at.match(b"", chain=chain[:16])
    assert readers.missed == 1, "what it is called in the pool is not known: that it is not found says nothing"


# The alarm


def test_keys_under_a_prefix_that_nobody_asks_for_are_noticed() -> None:
    """User case: sglang 0.5.17 put the model into the prefix, a router asked for the old one and found nothing for
    months (spec: pool-events §8.8): a line that names both, a metric, a health reason."""
    at = followed("a", shared=layout(prefix="old_"))
    at.store(keys(prompt(4), layout()))
    at.live(2)
    (line,) = at.events("pool_no_matching_keys")
    assert (line.fields["asked"], line.fields["arriving"], line.warning) == ("old_", [PREFIX], True)
    assert (at.found(prompt(4)).health, at.found(prompt(4)).reason) == ("approximate", "no_matching_keys")
    assert at.core.pools.counters.alarms == 1
    at.worker("a", layout())
    assert at.found(prompt(4)).ranges == ((0, 4),)
    at.live(2)
    assert len(at.events("pool_matching_keys")) == 1
    assert at.found(prompt(4)).health == "synced"


def test_few_keys_are_no_alarm() -> None:
    """A pool that has just begun has somebody else's keys first."""
    at = followed("a", shared=layout(prefix="old_"))
    at.store(keys(prompt(1), layout()))
    at.live(3)
    assert at.events("pool_no_matching_keys") == []


def test_prompts_that_a_reader_holds_and_the_pool_never_has_are_noticed() -> None:
    """The prefix is right and the components are not (another TP size than the engine says): as soon as enough prompts
    were missed that must have been written. Prompts that are new to everybody prove nothing."""
    at = followed("a")
    at.store(keys(prompt(4), layout(tp=1)))
    for number in range(2 * MISSES):
        at.match(prompt(2, 1000 + 8 * number))
    at.live(2)
    assert at.events("pool_no_matching_keys") == []
    at.workers["a"].publish(stored(0))
    known = chain_hashes(pack_tokens(range(BLOCK)), BLOCK)
    for _ in range(MISSES):
        at.match(prompt(2), chain=known)
    at.live(2)
    assert len(at.events("pool_no_matching_keys")) == 1
    at.store(keys(prompt(4), layout()))
    at.match(prompt(2), chain=known)
    at.live(2)
    assert at.found(prompt(2)).reason is None


def test_one_model_that_finds_its_pages_does_not_hide_another_that_does_not() -> None:
    """Two models in one pool: the alarm is a model's own. One without traffic, whose keys nobody wrote yet, is none."""
    at = followed("a")
    other = at.worker("b", layout(prefix="wrong_"), model="other")
    at.store(keys(prompt(4), layout()))
    assert at.found(prompt(4)).ranges == ((0, 4),)
    at.live(2)
    assert at.events("pool_no_matching_keys") == []
    other.publish(stored(0))
    known = chain_hashes(pack_tokens(range(BLOCK)), BLOCK)
    for _ in range(MISSES):
        at.match(prompt(2), chain=known, model="other")
    at.live(2)
    (line,) = at.events("pool_no_matching_keys")
    assert (line.fields["model"], line.fields["asked"], line.fields["misses"]) == ("other", "wrong_", MISSES)
    (pool,) = at.match(prompt(2), model="other").pools
    assert (pool.health, pool.reason) == ("approximate", "no_matching_keys")
    assert (at.found(prompt(2)).health, at.core.pools.sources["p"].health) == ("synced", "synced")


# Bounds and bad input


def test_what_cannot_be_read_is_counted_and_the_rest_stands() -> None:
    """A garbled batch, a garbled delta, warm-up keys: counted; the numbering goes on."""
    at, tokens = followed(), prompt(2)
    at._number(b"\xc1", "master", True)
    at._number(b"nonsense", "reconcile", True)
    at.store(["sglang_mooncake_store_warmup_key0"])
    at.store(keys(tokens, layout()))
    assert at.core.pools.rejected.total() == 2
    assert at.core.pools.counters.unparsed == 1
    assert (at.found(tokens).ranges, at.found(tokens).health) == (((0, 2),), "synced")


def test_half_a_page_is_the_askers_mistake() -> None:
    """It is refused with a reason, as half a chain hash is; nothing else is lost."""
    at, tokens = followed(), prompt(2)
    at.store(keys(tokens, layout()))
    with pytest.raises(BadQuestionError) as caught:
        at.core.match(MatchRequest(model="m", block_size=BLOCK, chain=b"", pages=bytes(17), page_size=BLOCK), at.now)
    assert caught.value.reason == "bad_pages"
    assert at.found(tokens).ranges == ((0, 2),)


def test_pools_and_their_pages_are_bounded() -> None:
    """More pools than allowed are counted and not taken in; more pages than allowed push the oldest out."""
    at = PoolBridge(Replica(ReplicaSettings(pools=1, pool_pages=4), "index"))
    at.worker("a", layout())
    at.worker("b", layout(pool="q"))
    other = PoolBridge(at.core, "q", now=at.now)
    other.reset()
    assert list(at.core.pools.sources) == ["p"]
    assert at.core.pools.counters.refused > 0
    at.reset()
    for number in range(64):
        at.store(keys(prompt(64, 1000 * number), layout()))
    assert at.core.pools.sources["p"].index.stats().pages < 64 * 64
    assert at.core.pools.counters.evicted > 0


def behind(bytes_at_once: int, patch: pytest.MonkeyPatch) -> tuple[PoolBridge, bytes]:
    """A pool of which everything but the first batch waits behind a hole that a snapshot has just filled. Every batch
    has one page. ``bytes_at_once``: of what may be applied in one go."""
    patch.setattr(pools, "TURN_BYTES", bytes_at_once)
    at, tokens = followed(), prompt(AT_ONCE * 3)
    objects = keys(tokens, layout())
    at.store(objects[:4], heard=False)
    seq, index = at.seq, at_once(at.core.prepare_pool(at_once(at.index.dump())))
    for start in range(4, len(objects), 4):
        at.store(objects[start : start + 4])
    assert at.core.pools.sources["p"].machine.held == AT_ONCE * 3 - 1
    at.core.handle(PoolSnapshotReceived("p", at.asked.pop().ticket, at.epoch, seq, index), at.now)
    return at, tokens


@pytest.mark.parametrize(("bytes_at_once", "batches"), [(1 << 20, AT_ONCE), (1, 1)])
def test_a_long_hole_is_worked_off_a_little_at_a_time(
    bytes_at_once: int, batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waited is applied between other work, few batches in one go, or few bytes where they are the differences of
    a reconcile; and the pool says that it is behind."""
    at, tokens = behind(bytes_at_once, monkeypatch)
    source = at.core.pools.sources["p"]
    for turn in range(1, 3):
        assert (at.found(tokens).ranges, at.found(tokens).reason) == (((0, 1 + turn * batches),), "backlog")
        at.core.handle(Work(), at.now)
    at.live(1)
    assert (at.found(tokens).ranges, at.found(tokens).health) == (((0, AT_ONCE * 3),), "synced")
    assert (len(source.backlog), source.backlog_bytes) == (0, 0)


def test_what_waits_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen thousand differences of a reconcile would be gigabytes: the first of them is applied at once."""
    monkeypatch.setattr(pools, "BACKLOG_BYTES", 10_000)
    at, _ = behind(1, monkeypatch)
    source = at.core.pools.sources["p"]
    assert 5_000 < source.backlog_bytes == sum(len(each) for each in source.backlog) <= 10_000
    at.reset()
    assert source.index.stats().pages == source.backlog_bytes == 0


@pytest.mark.long
@given(
    st.lists(
        st.tuples(
            st.sampled_from(("store", "remove", "reconcile", "reset", "restart", "live", "answer")),
            st.integers(0, 5),
            st.booleans(),
        ),
        max_size=25,
    )
)
def test_whatever_is_lost_it_ends_like_the_bridge(steps: list[tuple[str, int, bool]]) -> None:
    """Batches, differences and resets, heard or lost, in any order: once heartbeats and answers have come, the replica
    holds what the bridge holds."""
    at, shared = followed(), layout()
    groups = [keys(prompt(2, 100 * number), shared) for number in range(6)]
    for action, number, heard in steps:
        match action:
            case "store":
                at.store(groups[number], heard=heard)
            case "remove":
                at.remove(groups[number][number % 3 :], heard=heard)
            case "reconcile":
                at.reconcile([key for group in groups[:number] for key in group], heard=heard)
            case "reset":
                at.reset(heard=heard)
            case "restart":
                at.restart()
            case "live":
                at.live(1)
            case _:
                if at.asked:
                    at.answer()
    for _ in range(8):
        at.live(2)
        if at.asked:
            at.answer()
    source = at.core.pools.sources["p"]
    assert (source.health, source.machine.last) == ("synced", at.seq)
    for number in range(6):
        tokens = prompt(2, 100 * number)
        assert at.found(tokens).ranges == _held(at.index, shared, tokens)


def _held(index: PoolIndex, shared: SharedLayout, tokens: bytes) -> tuple[tuple[int, int], ...]:
    """By asking for every object alone."""
    per_page = 4
    objects = keys(tokens, shared)
    pages = [all(index.present(key) for key in objects[place : place + per_page]) for place in (0, per_page)]
    runs = {(True, True): ((0, 2),), (True, False): ((0, 1),), (False, True): ((1, 2),)}
    return runs.get((pages[0], pages[1]), ())


def test_a_layout_of_too_many_objects_is_not_followed() -> None:
    """No bridge sends one. 300 of 16,000 objects each on the bus kept admission busy until it lost its leadership."""
    sets = tuple(ComponentSet(pool=f"p{k}", components=tuple(f"_{k}_{n}" for n in range(600))) for k in range(2))
    layouts = PoolLayouts()
    for name, shared in (("big", msgspec.structs.replace(layout(), sets=sets)), ("small", layout())):
        layouts.worker(name, WorkerProfile(url="u", model="m", shared=shared), 0.0)
    assert layouts.of("big") is None
    (readers,) = layouts.readers()
    assert (list(readers.layouts), readers.usable, readers.differ) == (["small"], True, False)


def test_a_layout_is_asked_as_it_was_described() -> None:
    """Scheme, prefix, and each set with its own rule."""
    asked = compiled(layout())
    assert (asked.scheme, asked.key_prefix) == ("sglang_hicache", PREFIX)
    assert [(each.components, each.hit_policy) for each in asked.sets] == [
        (("_0_k", "_0_v", "_1_k", "_1_v"), "all_pages")
    ]
    assert told("stored", []) != told("removed", ["x"])
