"""The core of a pool's bridge: one numbering, and a picture that agrees with the master although that is silent."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bridge.effects import Publish
from services.bridge.events import Beat, EngineBatch, EngineConnected, EngineDisconnected, Stopping
from services.bridge.pool.core import BATCH_BYTES
from services.bridge.pool.events import KeysListed, ListEnded, Polled, PollFailed
from services.bridge.pool.report import EventStatus, MasterMetrics, PoolReport
from tests.unit.bridge.pool.house import Room, event, key_of, payload_of


def agreed() -> Room:
    """A room in which two pages are known and nothing is doubted."""
    room = Room()
    room.put(key_of(1))
    room.put(key_of(2))
    room.begin()
    assert room.core.health() == ("synced", None)
    return room


def test_a_bridge_begins_with_a_reset_and_the_list() -> None:
    """What was stored before the bridge came is told by the list: a reset under number 0, then the difference to
    nothing. Without the master nothing is said to be known."""
    room = Room()
    room.keys = {key_of(1): {"cpu"}}
    room.seq = 500
    room.handle(Beat())
    assert (room.state.health, room.state.reason) == ("catching_up", "not_seen_yet")
    room.handle(EngineConnected(0))
    room.poll()
    assert (room.state.health, room.state.reason) == ("catching_up", "reconciling")
    room.settle()
    assert [reset.reason for reset in room.receiver.resets] == ["bridge_started"]
    assert room.receiver.origins == ["reconcile"]
    assert room.known() == room.known(room.receiver.index) == room.keys
    assert (room.state.health, room.state.pool_seq, room.state.gaps) == ("synced", 1, 0)


def test_batches_go_on_at_once_and_untouched() -> None:
    """A batch of the master is published as it came, under the next number, and known at once."""
    room = agreed()
    before = room.receiver.seq
    payload = payload_of(event("stored", key_of(3)))
    effects = room.core.handle(EngineBatch(0, 3, payload), room.now)
    assert [effect.payload for effect in effects if isinstance(effect, Publish) and effect.headers] == [payload]
    assert room.core.seq == before + 1
    assert key_of(3) in room.known()


def test_silent_eviction_is_noticed_by_the_counter() -> None:
    """The master evicts without an event (spec: pool-events §3); the counter rises, the list is fetched, the page is
    taken back everywhere, and health is no worse meanwhile: every full pool evicts."""
    room = agreed()
    room.evict(key_of(1))
    room.now += 5
    room.poll()
    assert room.core.reconciling is not None
    assert room.core.reconciling.reasons == ("eviction",)
    assert room.core.health() == ("synced", None)
    while room.work():
        pass
    assert room.known() == room.known(room.receiver.index) == {key_of(2): {"cpu"}}
    room.handle(Beat())
    assert (room.state.reconcile_added, room.state.reconcile_removed) == (0, 1)


def test_a_lost_batch_is_noticed_by_its_number() -> None:
    """Dynamo #11239: a hole in the numbers marks the picture as doubtful until the list was agreed with."""
    room = agreed()
    room.put(key_of(3))
    room.wire.clear()
    room.put(key_of(4))
    room.deliver()
    assert room.core.health() == ("approximate", "gap")
    assert room.known().keys() == {key_of(1), key_of(2), key_of(4)}
    room.settle()
    assert room.core.health() == ("synced", None)
    assert room.known() == room.known(room.receiver.index) == room.keys
    assert room.state.gaps == 1


def test_a_lost_tail_is_noticed_while_nothing_follows() -> None:
    """Dynamo #14965: a last batch that was lost leaves no hole; the master's status says that it published more."""
    room = agreed()
    room.remove(key_of(1))
    room.wire.clear()
    room.now += 1
    room.poll()
    assert room.core.health() == ("synced", None)  # it may still be on its way
    room.now += 1
    room.poll()
    assert room.core.health() == ("approximate", "tail_lost")
    room.settle()
    assert room.core.health() == ("synced", None)
    assert room.known() == {key_of(2): {"cpu"}}
    assert room.lists == 2


def test_a_restart_is_noticed_by_its_numbers() -> None:
    """Another process begins at 1, with an empty store: everything is forgotten at once, and told so."""
    room = agreed()
    room.restart()
    room.put(key_of(5))
    room.deliver()
    assert [reset.reason for reset in room.receiver.resets] == ["bridge_started", "master_restarted"]
    assert room.known() == room.known(room.receiver.index) == {key_of(5): {"cpu"}}
    assert room.core.health()[0] == "catching_up"
    room.settle()
    assert room.core.health() == ("synced", None)
    assert room.known() == room.keys
    assert room.state.restarts == 1


def test_a_restart_is_noticed_by_the_status_of_an_idle_master() -> None:
    """A restarted master that publishes nothing has published less than before."""
    room = agreed()
    room.restart()
    room.now += 1
    room.poll()
    assert room.known() == room.known(room.receiver.index) == {}
    assert room.state.restarts == 1
    room.settle()
    assert (room.core.health(), room.state.restarts) == (("synced", None), 1)


def test_a_restart_is_noticed_although_no_status_was_seen_in_between() -> None:
    """Batches came after the last status of the old process; what the new one published was lost, and is less."""
    room = agreed()
    for page in (3, 4, 5):
        room.put(key_of(page))
    room.deliver()
    room.handle(PollFailed("connect_failed"))
    room.restart()
    room.put(key_of(6))
    room.wire.clear()
    room.poll()
    assert [reset.reason for reset in room.receiver.resets] == ["bridge_started", "master_restarted"]
    room.settle()
    assert (room.core.health(), room.known()) == (("synced", None), {key_of(6): {"cpu"}})


def test_a_batch_that_comes_while_a_status_is_read_is_no_restart() -> None:
    """The status was written before it."""
    room = agreed()
    room.handle(EngineBatch(0, room.seq + 1, payload_of(event("stored", key_of(3)))))
    room.poll()
    assert (room.state.restarts, key_of(3) in room.known()) == (0, True)


@pytest.mark.parametrize("what", ["segment", "client"])
def test_a_vanished_node_is_noticed(what: str) -> None:
    """A client that closes takes its segment and keys along, without an event. One that was killed is only suspected
    at first: its keys are hidden while its segment still stands, and only the metrics tell (0.3.14)."""
    room = agreed()
    room.keys.clear()
    if what == "segment":
        room.segments = frozenset()
    else:
        room.liveness = (("master_client_liveness_suspected_transitions_total", 1),)
    room.now += 1
    room.poll()
    assert room.core.health() == ("approximate", what)
    room.settle()
    assert room.core.health() == ("synced", None)
    assert room.known() == room.known(room.receiver.index) == {}


def test_a_lost_connection_is_doubted_until_the_list_after_it() -> None:
    """Dynamo #14965: what was published while the socket was away is lost without a hole, if nothing follows."""
    room = agreed()
    room.handle(EngineDisconnected(0))
    assert room.core.health() == ("approximate", "disconnected")
    room.evict(key_of(1))
    room.handle(EngineConnected(0))
    assert room.core.health() == ("approximate", "reconnect")
    room.settle()
    assert (room.core.health(), room.known()) == (("synced", None), {key_of(2): {"cpu"}})


def test_events_that_are_off_are_said_once_and_lists_do() -> None:
    """Mooncake #4039: published wheels had events compiled out, and say so in their status alone."""
    room = Room()
    room.enabled = False
    room.keys = {key_of(1): {"cpu"}}
    room.settle()
    room.settle()
    assert room.core.health() == ("approximate", "events_disabled")
    assert [say.event for say in room.said if say.event == "pool_events_disabled"] == ["pool_events_disabled"]
    assert room.known() == {key_of(1): {"cpu"}}
    room.keys = {key_of(2): {"cpu"}}
    room.settle(seconds=61)
    assert room.known() == room.known(room.receiver.index) == {key_of(2): {"cpu"}}


def test_tenants_that_no_list_names_are_left_alone() -> None:
    """The list names the default tenant only: what events told of others stays, and health says that it is unsure."""
    room = agreed()
    room.publish(event("stored", key_of(7), tenant_id="team-b"))
    room.evict(key_of(1))
    room.settle()
    assert room.core.index.present(key_of(7), tenant="team-b") == {"cpu"}
    assert room.known() == {key_of(2): {"cpu"}}
    assert room.core.health() == ("approximate", "tenants_not_listed")
    other = agreed()
    other.tenants = ("default", "team-b")
    other.settle()
    assert other.core.health() == ("approximate", "tenants_not_listed")


def test_what_lies_on_disk_stays_there() -> None:
    """A list has no media: an object that is known to be on disk only does not come back into memory by it."""
    room = agreed()
    room.put(key_of(3), "disk")
    room.settle(seconds=61)
    assert room.known()[key_of(3)] == {"disk"}
    assert room.lists > 1


def test_a_master_that_is_gone_is_blind_after_three_looks() -> None:
    """And approximate as before when it answers again, until the list was agreed with."""
    room = agreed()
    for _ in range(2):
        room.handle(PollFailed("connect_failed"))
    assert room.core.health() == ("synced", None)
    room.handle(PollFailed("connect_failed"))
    assert room.core.health() == ("blind", "connect_failed")
    room.settle()
    assert room.core.health() == ("synced", None)


def test_a_master_that_says_nothing_while_it_lists_is_doubted() -> None:
    """It may be busy writing millions of keys, and is not gone for that; but a machine that hangs looks the same for as
    long as a list may take, and is not to be vouched for meanwhile."""
    room = agreed()
    room.now += 60
    room.poll()
    running = room.core.reconciling
    assert running is not None
    for _ in range(3):
        assert room.core.health() == ("synced", None)
        room.handle(PollFailed("first_byte_timeout"))
    assert room.core.health() == ("approximate", "not_answering")
    room.handle(KeysListed(running.ticket, b""))
    assert room.core.health() == ("synced", None)
    for _ in range(3):
        room.handle(PollFailed("first_byte_timeout"))
    room.handle(ListEnded(running.ticket, "first_byte_timeout"))
    assert room.core.health() == ("approximate", "not_answering")
    for _ in range(3):
        room.handle(PollFailed("first_byte_timeout"))
    assert room.core.health() == ("blind", "first_byte_timeout")


def test_pages_that_leave_numbers_out_are_no_restart() -> None:
    """Another release's status, or metrics of a master that is going down: nothing is forgotten for them."""
    room = agreed()
    room.evicted += 7
    room.settle(seconds=10)
    resets = len(room.receiver.resets)
    for status, metrics in (
        (EventStatus(True, 1, None), MasterMetrics(room.evicted)),
        (EventStatus(True), MasterMetrics(room.evicted)),
        (EventStatus(True, room.seq, 0), MasterMetrics()),
    ):
        room.handle(Polled(PoolReport(status, metrics, room.segments)))
    room.poll()
    assert (len(room.receiver.resets), room.core.master.restarts, room.known()) == (resets, 0, room.keys)
    room.evicted -= 1
    room.poll()
    assert (len(room.receiver.resets), room.core.master.restarts) == (resets + 1, 1)


def test_a_counter_that_appears_has_risen() -> None:
    """A master 0.3.14 leaves out what it has never counted: its first eviction is also the first time it says so."""
    room = Room()
    room.handle(EngineConnected(0))
    for evicted in (None, None, 1):
        room.now += 10
        room.handle(Polled(PoolReport(EventStatus(True, 0, 0), MasterMetrics(evicted), room.segments)))
        while room.work():
            pass
    assert room.core.outcomes.finished["eviction"] + (room.core.reconciling is not None) >= 1


def test_a_failed_list_is_tried_again_and_later_each_time() -> None:
    """Nothing of it is believed; health says why, and the master is not asked without pause."""
    room = agreed()
    room.evict(key_of(1))
    asked: list[float] = []
    for _ in range(200):
        room.now += 1
        room.poll()
        running = room.core.reconciling
        if running is not None:
            asked.append(room.now)
            room.handle(KeysListed(running.ticket, b""))
            room.handle(ListEnded(running.ticket, "http_500"))
            while room.work():
                pass
            assert room.core.health() == ("approximate", "http_500")
    assert [later - earlier for earlier, later in pairwise(asked)] == [4, 8, 16, 32, 64]
    assert room.known().keys() == {key_of(1), key_of(2)}
    room.settle(seconds=200)
    assert (room.core.health(), room.known()) == (("synced", None), {key_of(2): {"cpu"}})


def test_a_message_that_is_no_batch_is_counted_and_made_up_for() -> None:
    """Nobody is told of it, and no number is used up; what it may have said, the list says."""
    room = agreed()
    room.keys[key_of(3)] = {"cpu"}
    room.seq += 1
    told = room.core.seq
    room.handle(EngineBatch(0, room.seq, b"\xc1"))
    assert room.core.seq == told
    assert room.core.health() == ("approximate", "bad_batch")
    room.settle()
    assert (room.core.health(), room.known()) == (("synced", None), room.keys)
    assert room.core.counters.bad_batches == 1


def test_a_message_larger_than_any_master_s_is_not_read() -> None:
    """Whoever applies millions of events in one go answers nobody meanwhile; none is told of it."""
    room = agreed()
    told = room.core.seq
    room.publish(*[event("stored", key_of(page)) for page in range(BATCH_BYTES // 90)])
    room.deliver()
    assert (room.core.seq, room.core.counters.bad_batches) == (told, 1)
    room.settle()
    assert (room.core.health(), room.known()) == (("synced", None), room.keys)


def test_more_batches_than_may_wait_give_a_list_up() -> None:
    """Memory is bounded: the list is fetched again, and meanwhile the picture is what events say."""
    room = Room(pool_buffer_bytes=400)
    room.begin()
    room.evicted += 1
    room.now += 5
    room.poll()
    for page in range(8):
        room.put(key_of(page))
    room.deliver()
    while room.work():
        pass
    assert room.core.outcomes.given_up == {"buffer_full": 1}
    assert room.core.health() == ("approximate", "buffer_full")
    assert room.known() == room.known(room.receiver.index) == room.keys
    room.settle()
    assert room.core.health() == ("synced", None)


def test_batches_of_a_few_bytes_may_not_wait_in_any_number_either() -> None:
    """A master that sends nothing, very often, while a list is fetched and while it is compared."""
    room = Room(pool_buffer_bytes=64_000)
    room.begin()
    room.evicted += 1
    room.now += 5
    room.poll()
    running = room.core.reconciling
    assert running is not None
    for _ in range(1000):
        room.publish()
    room.deliver()
    assert running.void == "buffer_full"
    room.settle()
    room.evicted += 1
    room.now += 200
    room.poll()
    running = room.core.reconciling
    assert running is not None
    running.phase = "comparing"
    for _ in range(1000):
        room.publish()
    room.deliver()
    assert room.core.held + room.core.counters.held_dropped == 1000
    assert room.core.held <= 500


def test_batches_that_come_while_a_list_is_fetched_stand_on_top_of_it() -> None:
    """The list has no number and may be older than they are: for each key the last of them wins (spec: pool-events
    §4.3)."""
    room = agreed()
    room.evict(key_of(1))
    room.now += 5
    room.poll()
    running = room.core.reconciling
    assert running is not None
    room.handle(KeysListed(running.ticket, f"{key_of(2)}\n{key_of(4)}\n".encode()))
    room.keys[key_of(4)] = {"cpu"}
    room.put(key_of(3))
    room.remove(key_of(4))
    room.deliver()
    room.handle(ListEnded(running.ticket))
    while room.work():
        pass
    assert room.known() == room.known(room.receiver.index) == {key_of(2): {"cpu"}, key_of(3): {"cpu"}} == room.keys


def test_a_batch_that_is_older_than_the_list_does_not_stand_on_top_of_it() -> None:
    """It was published before the list was asked for, as the status said, and only came late: the object was evicted
    in between, silently, and is not in the list."""
    room = agreed()
    room.put(key_of(3))
    room.evict(key_of(3))
    room.now += 5
    room.poll()
    assert room.core.reconciling is not None
    room.deliver()
    while room.work():
        pass
    assert room.known() == room.known(room.receiver.index) == {key_of(1): {"cpu"}, key_of(2): {"cpu"}}


def test_batches_that_come_while_a_difference_is_told_wait_within_a_bound() -> None:
    """They are numbered after it, so that it takes nothing of theirs back; too many are a hole of our own."""
    room = agreed()
    room.evict(key_of(1))
    room.now += 5
    room.poll()
    while room.core.reconciling is not None and room.core.reconciling.phase != "telling":
        room.work()
    room.put(key_of(1))
    room.deliver()
    assert (room.core.held, room.known(room.receiver.index)[key_of(1)]) == (1, {"cpu"})
    room.settle()
    assert room.receiver.origins[-2:] == ["reconcile", "master"]
    assert room.known() == room.known(room.receiver.index) == room.keys


def test_a_large_delta_or_batch_goes_in_parts() -> None:
    """All with one number, as `schemas.pool.PoolHeaders` says."""
    room = Room(max_payload=1024 + 300)
    for page in range(10):
        room.keys[key_of(page)] = {"cpu"}
    room.begin()
    room.publish(*(event("stored", key_of(page)) for page in range(10, 12)))
    room.keys |= {key_of(page): {"cpu"} for page in range(10, 12)}
    room.settle()
    assert room.known() == room.known(room.receiver.index) == room.keys


def test_a_stopping_bridge_says_that_nothing_more_comes() -> None:
    """And fetches no list any more."""
    room = agreed()
    room.handle(Stopping("stopped"))
    assert (room.state.health, room.state.reason) == ("blind", "stopped")
    room.settle(seconds=61)
    assert room.core.reconciling is None


steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "disk", "remove", "evict"]), st.integers(0, 5)),
        st.tuples(
            st.sampled_from(["clear", "lose", "restart", "poll", "deliver", "work", "wait", "drop_list"]), st.just(0)
        ),
    ),
    max_size=60,
)


@given(steps)
def test_in_any_order_of_things_the_picture_comes_to_agree(history: list[tuple[str, int]]) -> None:
    """Puts, removals, silent evictions, lost batches and restarts, at every place of a reconcile: the receiver's
    picture is the bridge's at every moment, and both are the master's once it is quiet and was looked at, without any
    help of the slow timer."""
    room = Room(pool_reconcile_s=1e9)
    room.handle(EngineConnected(0))
    for what, page in history:
        act(room, what, key_of(page))
        assert room.known(room.receiver.index) == room.known()
    room.settle()
    room.settle(seconds=100)
    assert room.core.health() == ("synced", None)
    assert room.known(room.receiver.index) == room.known()
    assert room.known().keys() == room.keys.keys()


def act(room: Room, what: str, key: str) -> None:
    """One thing that can happen."""
    running = room.core.reconciling
    match what:
        case "put":
            room.put(key)
        case "disk":
            room.put(key, "disk")
        case "remove":
            room.remove(key)
        case "evict":
            room.evict(key)
        case "clear":
            room.keys.clear()
            room.publish(event("cleared", None, None, tenant_id="default"))
        case "lose":
            room.wire.clear()
        case "restart":
            room.restart()
        case "poll":
            room.poll()
        case "deliver":
            room.deliver(2)
        case "work":
            room.work()
        case "wait":
            room.now += 3
        case "drop_list":
            if running is not None and running.phase == "listing":
                room.handle(ListEnded(running.ticket, "total_timeout"))
