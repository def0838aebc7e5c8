"""Memory below the device: what is copied where, what is loaded, who waits for it, and that events tell of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.engine.requests import EngineRequest
from tests.unit.engine.tiered import BLOCK, SLOW, Driver, check, core_of, request, turn


def test_what_the_device_evicted_is_loaded_instead_of_computed() -> None:
    """Write-through when a request ends; the next turn of its session takes it from the host and counts it."""
    driver = Driver(core_of(17, host=64))
    driver.serve(request("a", turn(0, 40)))
    driver.serve(request("b", turn(1, 64)))
    assert driver.core.stats().tier_blocks == {"host": 10 + 16}
    driver.serve(request("c", turn(0, 48)))
    assert driver.admitted == {"a": 0, "b": 0, "c": 40}
    found = driver.core.stats().found_tokens
    assert (found["device"], found["host"]) == (0, 40)
    assert driver.core.stats().prefix_hits == 0, "what is loaded is no hit of the device"


def test_without_tiers_it_is_computed_again() -> None:
    driver = Driver(core_of(17))
    for name, session, length in (("a", 0, 40), ("b", 1, 64), ("c", 0, 48)):
        driver.serve(request(name, turn(session, length)))
    assert driver.admitted["c"] == 0
    assert driver.core.next_due is None


def test_others_run_while_one_waits_for_its_load() -> None:
    """Spec scheduling §4.1: one shared link, first come, first served; the load holds blocks and a seat."""
    driver = Driver(core_of(21, host=64, block_s=1.0, profile=SLOW))
    driver.serve(request("a", turn(0, 40)))
    driver.serve(request("b", turn(1, 80)))
    driver.now = 100.0
    start = driver.now
    driver.core.add_request(request("c", turn(0, 40), output=3))
    driver.core.add_request(request("d", [7, 8, 9], output=5))
    driver.step()
    assert driver.core.stats().waiting == 1, "it waits for its load"
    assert driver.core.next_due == pytest.approx(start + 9.0), "all but the last block, which is computed again"
    driver.finish()
    assert driver.ended["d"] < start + 1.0
    assert driver.ended["c"] > start + 9.0
    check(driver, [])


def test_two_loads_share_the_link_and_a_hit_in_flight_is_waited_for() -> None:
    driver = Driver(core_of(65, host=200, block_s=1.0, profile=SLOW))
    for session in (0, 1):
        driver.serve(request(f"old{session}", turn(session, 41)))
    driver.serve(request("big", turn(9, 250)))
    driver.now = start = 200.0
    for session in (0, 1):
        driver.core.add_request(request(f"new{session}", turn(session, 41)))
    driver.core.add_request(request("same", turn(0, 41)))
    driver.finish()
    assert driver.ended["new0"] == pytest.approx(start + 10.0, abs=0.1)
    assert driver.ended["new1"] == pytest.approx(start + 20.0, abs=0.1)
    assert driver.ended["same"] == pytest.approx(start + 10.0, abs=0.1), "no load of its own, and not before the first"
    assert driver.admitted["same"] == 40


def test_a_copy_is_waited_for_on_the_link() -> None:
    """What is being copied down counts as there; whoever loads it waits behind its copy."""
    driver = Driver(core_of(17, host=64, block_s=1.0, profile=SLOW))
    driver.serve(request("a", turn(0, 41)))
    copied = driver.now + 10.0
    assert driver.core.tiers.tiers[0].link.free_s == pytest.approx(copied, abs=0.1)
    driver.serve(request("b", turn(1, 61)))
    behind = driver.core.tiers.tiers[0].link.free_s
    driver.serve(request("c", turn(0, 41)))
    assert driver.ended["c"] == pytest.approx(behind + 10.0, abs=0.1)


def test_the_host_overflows_to_the_disk_and_both_tell() -> None:
    driver = Driver(core_of(17, host=12, disk=40))
    for session in range(4):
        driver.serve(request(f"r{session}", turn(session, 40)))
    assert driver.core.stats().tier_blocks == {"host": 12, "disk": 28}
    check(driver, [])
    driver.serve(request("again", turn(0, 44)))
    assert driver.admitted["again"] == 40
    assert driver.core.stats().found_tokens["disk"] == 40
    check(driver, [])


def test_write_back_copies_what_the_device_evicts() -> None:
    driver = Driver(core_of(17, host=64, write="evict"))
    driver.serve(request("a", turn(0, 40)))
    assert driver.core.stats().tier_blocks == {"host": 0}
    driver.serve(request("b", turn(1, 60)))
    assert driver.core.stats().tier_blocks == {"host": 9}, "of 16 blocks 15 are b's: 9 of a's 10 had to go"
    driver.serve(request("c", turn(0, 48)))
    assert driver.admitted["c"] == 40
    check(driver, [])


def test_blocks_of_the_pool_are_loaded_and_new_pages_go_there() -> None:
    driver = Driver(core_of(17, pool=True))
    asked = request("a", turn(0, 40), session="s")
    asked.in_pool = range(5)
    driver.core.add_request(asked)
    puts = []
    while driver.core.unfinished:
        result = driver.step()
        puts += result.puts if result is not None else []
    assert driver.admitted == {"a": 5 * BLOCK}
    assert driver.core.stats().found_tokens["pool"] == 5 * BLOCK
    [put] = puts
    assert (put.first, len(put.contents), put.session_id) == (5, 10, "s"), "what came from there is not put again"


def test_a_reset_empties_the_tiers_only_where_the_engine_does_so() -> None:
    """Engine-events §6 rule 7: vLLM's connectors keep their blocks, SGLang's flush takes all."""
    for cleared, left in ((False, 10), (True, 0)):
        driver = Driver(core_of(host=64, cleared=cleared))
        driver.serve(request("a", turn(0, 40), session="s"))
        driver.hint("pin", ttl_ms=10_000)
        assert driver.core.reset_prefix_cache(), "a pin does not stand in its way"
        assert driver.core.stats().tier_blocks == {"host": left}


def test_an_aborted_load_gives_its_blocks_back() -> None:
    driver = Driver(core_of(17, host=64, block_s=1.0))
    driver.serve(request("a", turn(0, 40)))
    driver.serve(request("b", turn(1, 60)))
    driver.core.add_request(request("c", turn(0, 48)))
    driver.step()
    assert driver.core.stats().waiting == 1
    assert driver.core.abort("c")
    check(driver, [])
    driver.serve(request("d", turn(0, 48)))
    assert driver.admitted["d"] == 40


def test_a_load_may_push_its_own_blocks_out_of_a_small_tier() -> None:
    """Room for a load is made by evicting to the tier that it reads from: it has begun to read by then."""
    driver = Driver(core_of(21, disk=1, write="evict", budget=32))
    for name, session, length in (("a", 0, 36), ("b", 1, 46), ("c", 0, 37)):
        driver.core.add_request(request(name, turn(session, length)))
        driver.step()
    driver.finish()
    check(driver, [])


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 3), st.integers(1, 60)),
        st.tuples(st.just("step"), st.integers(1, 4), st.just(0)),
        st.tuples(st.just("abort"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("reset"), st.integers(0, 1), st.just(0)),
    ),
    max_size=40,
)


scenes = (
    actions,
    st.integers(0, 20),
    st.integers(0, 20),
    st.sampled_from(["through", "evict"]),
    st.sampled_from([0.0, 0.01]),
)


@pytest.mark.long
@given(*scenes)
def test_random_histories(
    history: list[tuple[str, int, int]], host: int, disk: int, write: str, block_s: float
) -> None:
    """Nothing is lost or doubled, capacities hold, events tell what is where, everybody gets the tokens that are due,
    and nothing is taken from a tier that does not hold it. More of them: tests/histories."""
    keep_books(history, host, disk, write, block_s)


def keep_books(history: list[tuple[str, int, int]], host: int, disk: int, write: str, block_s: float) -> None:
    """Run ``history`` and check everything after each step."""
    driver = Driver(core_of(21, host=host, disk=disk, write=write, block_s=block_s, budget=32))
    live: dict[str, EngineRequest] = {}
    expected: dict[str, list[int]] = {}
    for number, (action, which, length) in enumerate(history):
        if action == "add":
            item = request(f"r{number}", turn(which, length), output=3, session=f"s{which}")
            item.in_pool = range(number % 3)
            live[item.request_id] = item
            expected[item.request_id] = item.output.tolist()
            driver.core.add_request(item)
        elif action == "step":
            for _ in range(which):
                driver.step()
        elif action == "abort" and live:
            name = sorted(live)[which % len(live)]
            driver.core.abort(name)
            driver.known.apply(driver.core.cache.take_events())
            del live[name], expected[name]
        elif action == "reset":
            driver.core.reset_prefix_cache(reset_running=bool(which))
            driver.known.apply(driver.core.cache.take_events())
        for name in driver.ended:
            live.pop(name, None)
        check(driver, list(live.values()))
        for item in live.values():
            hit = item.digests[: item.computed // BLOCK]
            assert all(driver.core.cache.pool.find(digest) is not None for digest in hit)
    driver.finish()
    check(driver, [])
    assert {name: tokens for name, tokens in driver.outputs.items() if name in expected} == expected
