"""Hints: what each action does, how it is answered, and that none of them changes what the engine says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.engine.errors import EngineError
from load.engine.hints import Action, HintsError, read_envelope, session_of
from load.engine.tool_pins import JobStep, ToolTimes, job_step_of
from tests.unit.engine.tiered import NOW_MS, SLOW, Driver, check, core_of, request, turn


def told(result: Any) -> tuple[str, str | None]:
    return result.outcome, result.reason


def with_session(blocks: int = 33, length: int = 41, **more: Any) -> Driver:
    """An engine that has served one turn of session ``s``."""
    driver = Driver(core_of(blocks, **more))
    driver.serve(request("first", turn(0, length), session="s"))
    return driver


def pressure(driver: Driver, name: str = "pressure", session: int = 7, length: int = 100) -> None:
    """Another session's prompt that wants most of the device."""
    driver.serve(request(name, turn(session, length)))


def test_pinned_blocks_survive_pressure_and_expire() -> None:
    driver = with_session()
    assert told(driver.hint("pin", ttl_ms=5_000)) == ("accepted", None)
    assert driver.core.stats().pinned_blocks == 10
    pressure(driver, length=80)
    driver.serve(request("second", turn(0, 41)))
    assert driver.admitted["second"] == 40
    driver.now = 6.0
    driver.core.tell_time(driver.now)
    assert driver.core.stats().pinned_blocks == 0
    pressure(driver, "later", 8, 120)
    driver.serve(request("third", turn(0, 41)))
    assert driver.admitted["third"] < 40
    check(driver, [])


def test_pins_are_clipped_by_the_share_of_the_device() -> None:
    driver = with_session(ratio=0.25)
    assert told(driver.hint("pin", ttl_ms=5_000)) == ("clipped", "pin_budget")
    assert driver.core.stats().pinned_blocks == 8
    driver.serve(request("other", turn(1, 41), session="t"))
    assert told(driver.hint("pin", "t", ttl_ms=5_000)) == ("rejected", "pin_budget")
    assert told(driver.hint("pin", ttl_ms=5_000, last=4)) == ("accepted", None), "its own pin makes room for it"
    assert told(driver.hint("pin", "t", ttl_ms=5_000, first=8)) == ("accepted", None)
    assert driver.core.stats().pinned_blocks == 6
    check(driver, [])


def test_pins_give_way_where_nothing_else_runs() -> None:
    """Rule A of scheduling §1.6 with its emergency release: a request that fits the engine is always served."""
    driver = with_session()
    driver.hint("pin", ttl_ms=500_000)
    driver.serve(request("whole", turn(5, 127)))
    assert driver.ended["whole"] >= 0
    assert driver.core.stats().pins_lost == 1
    check(driver, [])


def test_what_is_retained_leaves_after_others_and_what_is_dereferenced_before_them() -> None:
    driver = with_session(23)
    driver.serve(request("other", turn(1, 41), session="t"))
    assert told(driver.hint("retain", priority=5, ttl_ms=5_000)) == ("accepted", None)
    pressure(driver, length=44)
    driver.serve(request("again", turn(0, 41)))
    assert driver.admitted["again"] == 40, "though it was the least recently used"
    assert told(driver.hint("retain", priority=100)) == ("clipped", "priority")
    assert told(driver.hint("dereference", reason="closed")) == ("accepted", None)
    pressure(driver, "more", 8, 40)
    driver.serve(request("gone", turn(0, 41)))
    assert driver.admitted["gone"] < 40
    assert told(driver.hint("retain", priority=1)) == ("missing", "unknown_session"), "it is closed"
    check(driver, [])


def test_retention_ends() -> None:
    driver = with_session(23)
    driver.hint("retain", priority=5, ttl_ms=1_000)
    driver.now = 2.0
    pressure(driver, length=80)
    driver.serve(request("again", turn(0, 41)))
    assert driver.admitted["again"] < 40


def test_dereferencing_leaves_what_others_share() -> None:
    """A closed child's own blocks go first; what it shares with its parent stays as it was."""
    driver = Driver(core_of(43))
    driver.serve(request("parent", turn(0, 41), session="p"))
    driver.serve(request("child", turn(0, 20) + turn(3, 21), session="c"))
    driver.hint("pin", "c", ttl_ms=60_000)
    assert told(driver.hint("dereference", "c", reason="closed")) == ("accepted", None)
    assert driver.core.stats().pinned_blocks == 0
    pressure(driver, length=100)
    driver.serve(request("parent again", turn(0, 41)))
    assert driver.admitted["parent again"] == 40


def test_unpinned_drops_the_pin_and_nothing_else() -> None:
    driver = with_session()
    driver.hint("pin", ttl_ms=60_000)
    assert told(driver.hint("dereference", reason="unpinned")) == ("accepted", None)
    assert driver.core.stats().pinned_blocks == 0
    assert driver.core.hints.knows("s")
    assert told(driver.hint("dereference", "nobody")) == ("missing", "unknown_session")


def test_demoted_blocks_free_the_device_and_come_back() -> None:
    driver = with_session(host=64)
    assert told(driver.hint("demote", to="host")) == ("accepted", None)
    assert driver.known.resident("device") == {}
    assert len(driver.known.resident("host")) == 10
    assert told(driver.hint("demote", to="host")) == ("missing", "not_resident")
    assert told(driver.hint("demote", to="disk")) == ("unsupported", "tier")
    driver.serve(request("second", turn(0, 45), session="s"))
    assert driver.admitted["second"] == 40
    check(driver, [])


def test_demoted_blocks_outlast_copies_of_what_is_on_the_device_anyway() -> None:
    """A host smaller than the device would else hold duplicates only: what was demoted went first."""
    driver = with_session(33, host=16)
    driver.hint("demote", to="host", ttl_ms=50_000)
    for number in range(3):
        driver.serve(request(f"busy{number}", turn(number + 1, 61)))
    driver.serve(request("back", turn(0, 45)))
    assert driver.admitted["back"] == 40
    driver.now = 60.0
    for number in range(3):
        driver.serve(request(f"later{number}", turn(number + 5, 61)))
    driver.hint("demote", "s", to="host")
    assert len(driver.known.resident("host")) == 16
    driver.serve(request("gone", turn(0, 45)))
    assert driver.admitted["gone"] < 40, "its time was over"
    check(driver, [])


def test_blocks_in_use_are_not_demoted() -> None:
    driver = with_session(host=64)
    running = request("running", turn(0, 41), output=5, session="s")
    driver.core.add_request(running)
    driver.step()
    assert told(driver.hint("demote", to="host")) == ("rejected", "in_use")
    driver.finish()
    check(driver, [])


def test_prefetch_loads_ahead_of_need() -> None:
    """On the device before the request comes, it does not wait; on the way, it waits for the rest only."""
    driver = with_session(host=64, block_s=1.0, profile=SLOW)
    driver.hint("demote", to="host")
    driver.now = 100.0
    assert told(driver.hint("prefetch", to="device")) == ("accepted", None)
    assert told(driver.hint("prefetch", to="device")) == ("accepted", "resident"), "one load is enough"
    driver.now = 104.0
    driver.serve(request("early", turn(0, 41)))
    assert driver.ended["early"] == pytest.approx(110.0, abs=0.1)
    assert driver.core.stats().found_tokens["device"] == 40
    check(driver, [])


def test_prefetch_to_the_host_and_from_the_pool() -> None:
    driver = with_session(17, host=12, disk=64)
    driver.serve(request("other", turn(1, 60)))
    assert told(driver.hint("prefetch", to="host")) == ("accepted", None)
    check(driver, [])
    host = {content.digest for content in driver.core.tiers.tiers[0].resident()}
    chain = {content.digest for content in driver.core._scheduler.sessions.chain("s")}
    assert chain - driver.known.resident("device").keys() <= host
    pooled = with_session(17, pool=True, ratio=0.75)
    pressure(pooled, length=60)
    assert told(pooled.hint("prefetch", to="device")) == ("missing", "not_resident")
    action = Action(
        action_id="x", action_type="prefetch", payload={"target": {"session_id": "s"}, "expires_ms": NOW_MS}
    )
    assert len(pooled.core.hints.wanted_contents(action)) == 10, "the pool is to be asked for all of it"
    assert told(pooled.hint("prefetch", in_pool=range(10))) == ("accepted", None)
    pooled.serve(request("again", turn(0, 41)))
    assert pooled.admitted["again"] == 40
    assert told(pooled.hint("prefetch", to="host")) == ("unsupported", "tier")
    narrow = with_session(17, pool=True)
    pressure(narrow, length=60)
    assert told(narrow.hint("prefetch", in_pool=range(10))) == ("clipped", "no_room"), "at most half of 16 blocks"
    check(pooled, [])


def test_share_puts_a_prefix_into_the_pool() -> None:
    driver = with_session(pool=True)
    driver.core.take_puts()
    assert told(driver.hint("share", last=20, block_size=1)) == ("accepted", None)
    [put] = driver.core.take_puts()
    assert (put.first, len(put.contents)) == (0, 5), "20 tokens are 5 of this engine's blocks"
    assert told(driver.hint("share", "child", parent="s")) == ("accepted", None)
    assert told(driver.hint("share", "child", parent="nobody")) == ("missing", "unknown_session")
    assert told(with_session().hint("share")) == ("unsupported", "tier")


def test_outcomes_of_what_cannot_be_done() -> None:
    driver = with_session()
    late = {"target": {"session_id": "s"}, "expires_ms": NOW_MS - 1, "ttl_ms": 5}
    for action, expected in (
        (Action(action_id="1", action_type="teleport"), ("unsupported", "action_type")),
        (Action(action_id="2", action_type="pin", action_version="9.9"), ("unsupported", "action_version")),
        (Action(action_id="3", action_type="pin", payload={"target": 7}), ("rejected", "bad_payload")),
        (Action(action_id="4", action_type="pin", payload=late), ("rejected", "expired")),
        (Action(action_id="4", action_type="pin", payload=late | {"expires_ms": NOW_MS}), ("rejected", "expired")),
        (Action(action_id="5", action_type="pin", payload=late | {"expires_ms": NOW_MS}), ("accepted", None)),
    ):
        assert told(driver.core.hints.carry_out(action, NOW_MS)) == expected
    assert told(driver.hint("pin", "nobody", ttl_ms=5)) == ("missing", "unknown_session")
    assert told(driver.hint("pin")) == ("rejected", "no_ttl")
    assert told(driver.hint("demote")) == ("unsupported", "tier")
    assert driver.core.hints.counts["other", "unsupported"] == 1


def test_an_action_takes_an_earlier_one_back() -> None:
    driver = with_session()
    pin = driver.hint("pin", ttl_ms=60_000)
    driver.hint("retain", priority=1, cancels=pin.action_id)
    assert driver.core.stats().pinned_blocks == 0
    assert told(driver.hint("retain", priority=1, cancels="never seen")) == ("accepted", None)


def test_envelopes_are_checked_and_unknown_things_carried() -> None:
    action = {"action_id": "a", "action_type": "fly", "action_version": "3", "payload": {"x": 1}, "more": 1}
    good = {"protocol_version": "0.1", "message_id": "m", "actions": [action], "new": True}
    envelope = read_envelope(json.dumps(good).encode())
    assert envelope.actions[0].payload == {"x": 1}
    assert session_of(envelope.actions[0]) is None
    wrongs: tuple[bytes | dict[str, Any], ...] = (
        b"no",
        b"[]",
        {**good, "actions": []},
        {**good, "actions": [action, action]},
        {**good, "message_id": ""},
        {**good, "actions": [{**action, "payload": 3}]},
    )
    for wrong in wrongs:
        with pytest.raises(HintsError):
            read_envelope(wrong)
    assert issubclass(HintsError, EngineError)


def test_a_jobs_steps_pin_by_themselves() -> None:
    """Scheduling §1.5-1.7: two seconds, not for tools that take longer, never after the last step."""
    times = ToolTimes()
    step = job_step_of({"job_id": "j", "this_func_call": "ls"}, None)
    assert step is not None
    assert times.ended(step, 10.0) == 2.0
    times.began(JobStep("j", last_tool="ls"), 15.0)
    assert times.ttl_s("ls") == 0.0, "it took five seconds"
    assert times.ended(JobStep("j", next_tool="cat", is_last=True), 16.0) == 0.0
    assert times.ended(JobStep("j"), 16.0) == 0.0, "no tool"
    assert job_step_of({"job_id": "j", "is_last_step": 1}, "grep") == JobStep("j", None, "grep", True)
    assert job_step_of({"job_id": 3}, None) is None
    driver = Driver(core_of(tool_pin_s=2.0))
    driver.serve(request("a", turn(0, 41), job_step=JobStep("j", next_tool="ls")))
    assert driver.core.stats().pinned_blocks == 10
    driver.serve(request("b", turn(0, 45), job_step=JobStep("j", last_tool="ls", is_last=True)))
    assert driver.core.stats().pinned_blocks == 0
    check(driver, [])


kinds = st.sampled_from(["pin", "retain", "prefetch", "demote", "share", "dereference", "dance"])
hints = st.tuples(
    st.just("hint"),
    kinds,
    st.integers(0, 3),
    st.fixed_dictionaries(
        {"ttl_ms": st.sampled_from([0, 1, 10, 100_000])},
        optional={
            "priority": st.integers(-20, 20),
            "to": st.sampled_from(["device", "host", "disk", "pool"]),
            "first": st.integers(0, 6),
            "last": st.integers(0, 12),
            "reason": st.sampled_from(["closed", "unpinned", "superseded"]),
        },
    ),
)
adds = st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 60), st.booleans())
steps = st.tuples(st.just("step"), st.integers(1, 5))


scenes = (st.lists(st.one_of(adds, hints, steps), max_size=40), st.integers(0, 12), st.booleans())


@pytest.mark.long
@given(*scenes)
def test_hints_never_change_what_the_engine_says(history: list[Any], host: int, pool: bool) -> None:
    """The same requests with all hints, and with none: the same tokens for everybody; books balance throughout. More
    of them: tests/histories."""
    say_the_same(history, host, pool)


def say_the_same(history: list[Any], host: int, pool: bool) -> None:
    """Run ``history`` in two engines, in one of them without its hints."""
    hinted = Driver(core_of(21, host=host, disk=12, pool=pool, block_s=0.001))
    plain = Driver(core_of(21, host=host, disk=12, pool=pool, block_s=0.001))
    live: dict[str, Any] = {}
    for number, action in enumerate(history):
        if action[0] == "add":
            _, session, length, priority = action
            for driver in (hinted, plain):
                item = request(f"r{number}", turn(session, length), output=3, session=f"s{session}", priority=priority)
                driver.core.add_request(item)
                if driver is hinted:
                    live[item.request_id] = item
        elif action[0] == "step":
            for _ in range(action[1]):
                hinted.step()
        else:
            _, kind, session, payload = action
            hinted.hint(kind, f"s{session}", **payload)
        for name in hinted.ended:
            live.pop(name, None)
        check(hinted, list(live.values()))
        assert hinted.core.stats().pinned_blocks <= 10
    hinted.finish()
    plain.finish()
    check(hinted, [])
    assert hinted.outputs == plain.outputs
