"""Approximate sources: answered for by what was sent there, measured by their events, and back without flapping."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.hashing import chain_hashes, pack_tokens
from replica.events import PromptPlaced, RequestEnded, WorkerSeen
from schemas.index import MatchRequest, WorkerMatch
from schemas.request import Usage
from schemas.worker import RankStream, WorkerProfile
from tests.unit.replica.bridge import BLOCK, Bridge, bridge, chain, ended, placed, stored

PROFILE = WorkerProfile(url="http://e", model="tiny", block_size=BLOCK, ranks=2)
LONG = chain_hashes(pack_tokens(range(10 * BLOCK)), BLOCK)
"""Ten blocks, whose first is block 0 of the builders."""


def ask(at: Bridge, blocks: bytes, unit: str = "tokens", size: int = BLOCK) -> list[WorkerMatch]:
    request = MatchRequest(model="tiny", block_size=size, chain=blocks, unit=unit)  # type: ignore[arg-type]
    return list(at.core.match(request, at.now).matches)


def without_events(**settings: object) -> Bridge:
    """A worker of two ranks whose engine publishes no events."""
    at = bridge(**settings)
    at.beat(streams=(), profile=PROFILE)
    return at


def test_an_engine_without_events_is_known_by_what_was_sent_there() -> None:
    """Each rank has what it was sent, the beginning of a longer prompt too; a rank that got nothing has nothing."""
    at = without_events()
    at.give(placed(0, LONG[: 6 * 8]))
    first, second = ask(at, LONG)
    assert (first.health, first.reason, first.blocks.reach, first.blocks.device) == ("approximate", "no_events", 6, 6)
    assert (second.health, second.reason, second.blocks.reach) == ("approximate", "no_events", 0)
    assert (first.resident_blocks, first.indexed) == (6, None)
    at.give(placed(1, LONG, rank=1))
    assert [match.blocks.reach for match in ask(at, LONG)] == [6, 10]


def test_sent_blocks_have_their_time_and_their_room() -> None:
    """A time-to-live, and as many blocks as the worker says it has, else as set; the tail goes first."""
    at = without_events(approximate_ttl_s=10.0, approximate_blocks=4)
    at.give(placed(0, LONG))
    assert ask(at, LONG)[0].blocks.reach == 4
    sized = msgspec.structs.replace(PROFILE, kv_tokens=7 * BLOCK + 1)
    at.beat(streams=(), profile=sized)
    at.give(placed(1, LONG))
    assert ask(at, LONG)[0].blocks.reach == 7
    at.now += 10.0
    assert ask(at, LONG)[0].blocks.reach == 0
    at.beat(streams=(), profile=sized)
    at.tick()
    assert len(at.core.approximate.tokens) == 0


def test_a_new_engine_is_empty() -> None:
    """The engine of a worker began anew: its cache is, and with it what was sent there, text too; so with a worker that
    leaves."""
    at = without_events()
    for gone in ("restart", "left"):
        at.give(placed(0, LONG))
        at.give(placed(1, LONG, unit="text"))
        assert [ask(at, LONG, unit)[0].blocks.reach for unit in ("tokens", "text")] == [10, 10]
        if gone == "restart":
            state = at.state(streams=(), profile=PROFILE)
            at.give(WorkerSeen(msgspec.structs.replace(state, incarnation="2000")))
        else:
            at.beat("left")
            at.beat(streams=(), profile=PROFILE)
        assert [ask(at, LONG, unit)[0].blocks.reach for unit in ("tokens", "text")] == [0, 0]
        at.beat(streams=(), profile=PROFILE)


def test_a_bridge_that_begins_again_empties_nothing() -> None:
    """Until it has read the engine's page it cannot name the engine's process: the same one still has what it had."""
    at = without_events()
    at.give(placed(0, LONG))
    at.epoch += 1
    for process, reach in (("", 10), ("1000", 10), ("", 10), ("2000", 0)):
        state = at.state(streams=(), profile=PROFILE)
        at.give(WorkerSeen(msgspec.structs.replace(state, incarnation=process)))
        assert ask(at, LONG)[0].blocks.reach == reach


def test_an_engine_that_drops_its_cache_says_so() -> None:
    """`AllBlocksCleared` empties what was sent as well, where events come at all."""
    at = disagreeing()
    for number in range(8):
        turn(at, number, reported=0)
    at.give(placed(8, LONG, unit="text"))
    assert [ask(at, LONG, unit)[0].blocks.reach for unit in ("tokens", "text")] == [10, 10]
    at.publish(msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]], 0]))
    assert [ask(at, LONG, unit)[0].blocks.reach for unit in ("tokens", "text")] == [0, 0]


def test_a_question_without_a_chain() -> None:
    """What the doctor asks: health and how much is known, of every rank."""
    at = without_events()
    at.give(placed(0, LONG))
    first, second = ask(at, b"")
    assert (first.health, first.resident_blocks, second.resident_blocks) == ("approximate", 10, 0)


def test_an_exact_source_keeps_no_notes() -> None:
    """While a source is synced nothing is noted; what was noted before is forgotten."""
    at = bridge()
    at.beat(streams=())
    at.give(placed(0, LONG))
    assert ask(at, LONG)[0].blocks.reach == 10
    at.beat()
    at.publish(stored(0))
    match = ask(at, LONG)[0]
    assert (match.health, match.blocks.reach, match.indexed) == ("synced", 1, None)
    at.give(placed(1, LONG))
    assert (len(at.core.approximate.tokens), at.core.approximate.sources) == (0, {})


def test_history_that_is_gone_counts_beside_what_was_sent() -> None:
    """What its events say is true, and is not all: the longer of the two counts; it is not judged by it."""
    at = bridge()
    at.beat()
    at.publish(stored(0))
    stream = RankStream(rank=0, incarnation="1000.0", seq=0, state="catching_up", reason="history_gone")
    at.beat(streams=(stream,))
    match = ask(at, LONG)[0]
    assert (match.health, match.reason, match.blocks.reach) == ("approximate", "history_gone", 1)
    at.give(placed(0, LONG[:40]))
    assert (ask(at, LONG)[0].blocks.reach, ask(at, LONG)[0].indexed) == (5, None)


def turn(at: Bridge, number: int, reported: int) -> WorkerMatch:
    """A request for LONG, decided by what the replica answers, and what its engine reports."""
    match = ask(at, LONG)[0]
    indexed = match.blocks.reach if match.health == "synced" else match.indexed
    at.give(placed(number, LONG, indexed=indexed))
    at.give(ended(number, Usage(input_tokens=10 * BLOCK + 1, cached_tokens=reported)))
    at.beats(2)
    return match


def disagreeing() -> Bridge:
    at = bridge(parity_min_requests=4, parity_window=8, parity_floor_tokens=1, silent_requests=1000)
    at.beat()
    batch = [1.0, [["BlockStored", list(range(1, 11)), None, list(range(10 * BLOCK)), BLOCK]], 0]
    at.publish(msgspec.msgpack.encode(batch))
    return at


def test_parity_turns_to_what_was_sent_and_comes_back() -> None:
    """User case A14: the index predicts, the engine reports nothing: an alarm, and `approximate`. What the index would
    say is measured on, so that agreement brings the source back; the alarm rings once."""
    at = disagreeing()
    for number in range(4):
        assert turn(at, number, reported=0).health == "synced"
    match = ask(at, LONG)[0]
    assert (match.health, match.reason, match.blocks.reach, match.indexed) == ("approximate", "parity", 0, 10)
    for number in range(4, 200):
        assert turn(at, number, reported=0).health == "approximate"
    assert ask(at, LONG)[0].blocks.reach == 10, "it was sent there"
    assert at.core.counters.parity_alarms == 1
    healed = [turn(at, number, reported=10 * BLOCK).health for number in range(200, 220)]
    assert healed == sorted(healed), "approximate, then synced, and not back again"
    assert healed[-1] == "synced"
    assert (at.core.counters.parity_alarms, len(at.core.approximate.tokens)) == (1, 0)
    assert [change for change in at.told() if change[1] == "parity"] == [("approximate", "parity")]


def test_an_index_that_knows_less_is_wrong_too() -> None:
    """Another template here than at the engine: never a block in common with its events, and the engine reports hits.
    What was sent has the prefixes."""
    at = bridge(parity_min_requests=4, parity_window=8, parity_floor_tokens=1)
    at.beat()
    at.publish(stored(7))
    for number in range(5):
        turn(at, number, reported=10 * BLOCK)
    match = turn(at, 5, reported=10 * BLOCK)
    assert (match.health, match.reason, match.blocks.reach, match.indexed) == ("approximate", "parity", 10, 0)


def lag(at: Bridge, numbers: range, indexed: int) -> None:
    """Requests of which the engine finds more than the index said."""
    for number in numbers:
        at.give(placed(number, LONG, indexed=indexed))
        at.give(ended(number, Usage(input_tokens=10 * BLOCK + 1, cached_tokens=10 * BLOCK)))


def test_a_bridge_that_dies_makes_its_index_no_liar() -> None:
    """Killed under load (seen in a soak): what its engine stored meanwhile nobody told. The requests of these seconds
    are not held against the index, whether the next bridge finds a hole or the same one was cut off and goes on."""
    at = bridge(parity_min_requests=4, parity_window=8, parity_floor_tokens=1, silent_requests=1000)
    at.beats(3)
    at.publish(stored(7))
    lag(at, range(10), indexed=0)
    at.epoch += 1
    stream = RankStream(rank=0, incarnation=at.incarnation, seq=at.seq, state="catching_up", reason="connecting")
    at.beat(streams=(stream,))
    at.live(4)
    assert (at.match().health, at.core.counters.parity_alarms) == ("synced", 0)
    lag(at, range(10, 20), indexed=0)
    at.tick(4.0)
    at.live(4)
    assert (at.match().health, at.core.counters.parity_alarms) == ("synced", 0)
    lag(at, range(20, 30), indexed=0)
    at.beats(2)
    assert at.core.counters.parity_alarms == 1, "with its bridge there all the time it would be"


def test_a_fan_out_is_no_disagreement() -> None:
    """Siblings with one new prefix are placed before the first is computed: the index rightly saw nothing, and the
    engine reports the prefix for all but one of them."""
    at = bridge(parity_min_requests=4, parity_window=8, parity_floor_tokens=1, silent_requests=1000)
    at.beat()
    at.publish(stored(0))
    for burst in range(5):
        prefix = chain_hashes(pack_tokens(range(1000 * burst, 1000 * burst + 10 * BLOCK)), BLOCK)
        requests = range(burst * 10, burst * 10 + 6)
        for number in requests:
            at.give(placed(number, prefix + bytes([number]) * 8, indexed=0))
        for number in requests:
            reported = 0 if number == requests[0] else 10 * BLOCK
            at.give(ended(number, Usage(input_tokens=11 * BLOCK + 1, cached_tokens=reported)))
        at.beats(2)
    assert (at.match().health, at.core.counters.parity_alarms) == ("synced", 0)


@pytest.mark.parametrize("told", [True, False])
def test_events_that_come_late_are_no_disagreement(told: bool) -> None:
    """A sibling that comes when the first has ended, and its events are still on their way: the index rightly saw
    nothing. What it knows by the sibling's own end agrees with the engine; what it never hears of does not."""
    at = bridge(parity_min_requests=4, parity_window=8, parity_floor_tokens=1, silent_requests=1000)
    at.beat()
    at.publish(stored(0))
    for burst in range(1, 9):
        tokens = list(range(1000 * burst, 1000 * burst + 10 * BLOCK))
        prompt = chain_hashes(pack_tokens(tokens), BLOCK)
        for number, reported in ((10 * burst, 0), (10 * burst + 1, 10 * BLOCK)):
            at.give(placed(number, prompt, indexed=0))
            if reported and told:
                hashes = list(range(1000 * burst, 1000 * burst + 10))
                at.publish(msgspec.msgpack.encode([1.0, [["BlockStored", hashes, None, tokens, BLOCK]], 0]))
            at.give(ended(number, Usage(input_tokens=10 * BLOCK + 1, cached_tokens=reported)))
        at.beats(2)
    assert at.match().health == ("synced" if told else "approximate")
    assert at.core.counters.parity_alarms == (0 if told else 1)


def test_only_what_the_index_was_asked_is_judged() -> None:
    """Placed without it (fallback, text, no chain), on another worker in the end, or never heard of: no judgement."""
    at = disagreeing()
    wrong = Usage(input_tokens=10 * BLOCK + 1, cached_tokens=0)
    for number in range(0, 40, 4):
        at.give(placed(number, LONG))
        at.give(placed(number + 1, LONG, unit="text", indexed=10))
        at.give(placed(number + 2, LONG, indexed=10, worker="elsewhere"))
        for request in range(number, number + 4):
            at.give(ended(request, wrong, predicted=40))
        at.beats(2)
    assert at.match().health == "synced"
    assert (at.core.predicted["w"], at.core.reported["w"]) == (1600, 0), "counted it is"


def test_a_retry_is_judged_where_it_ended() -> None:
    """The same request placed again replaces what was expected of it; ends of requests that failed forget it."""
    at = disagreeing()
    at.give(placed(1, LONG, indexed=10, worker="elsewhere"))
    at.give(placed(1, LONG, indexed=10))
    assert len(at.core.expectations) == 1
    at.give(ended(1, Usage(input_tokens=41, cached_tokens=0)))
    assert len(at.core.expectations) == 0


@pytest.mark.parametrize("how", ["retried", "refused", "without the index"])
def test_what_never_ran_here_excuses_nothing(how: str) -> None:
    """A request that was placed anew elsewhere, or ended before it was sent, is not on its way here any more: nobody
    can have found its blocks."""
    at = disagreeing()
    source = at.core.sources["w"][0]
    at.give(placed(1, LONG, indexed=None if how == "without the index" else 0))
    assert len(source.parity.on_their_way) == 1
    if how == "retried":
        at.give(placed(1, LONG, indexed=0, worker="elsewhere"))
    else:
        end = ended(1, Usage())
        at.give(RequestEnded(msgspec.structs.replace(end.end, outcome="client_disconnect", worker=None, rank=None)))
    assert (len(source.parity.on_their_way), len(at.core.expectations)) == (0, 0)


def test_text_is_known_by_what_was_sent_alone() -> None:
    """Every rank of the model, exact or not, of whatever block size: approximate, and only by text."""
    at = bridge()
    at.beat(profile=PROFILE)
    at.publish(stored(0))
    at.give(placed(0, chain(0), unit="text", block_size=64))
    first, second = ask(at, LONG, "text", 64)
    assert {(match.health, match.reason) for match in (first, second)} == {("approximate", "text_blocks")}
    assert (first.blocks.reach, second.blocks.reach, first.resident_blocks, first.indexed) == (1, 0, 1, None)
    assert ask(at, LONG)[0].health == "synced"
    mismatched = at.state("mismatch", profile=PROFILE)
    at.give(WorkerSeen(mismatched))
    assert ask(at, LONG, "text", 64)[0].blocks.reach == 1


def test_a_worker_that_does_not_say_its_block_size() -> None:
    """Without events and metrics nobody knows it; what was sent there is known all the same."""
    at = bridge()
    at.beat(streams=(), profile=msgspec.structs.replace(PROFILE, block_size=None))
    at.give(placed(0, LONG))
    assert ask(at, LONG)[0].blocks.reach == 10
    at.beat(streams=(), profile=msgspec.structs.replace(PROFILE, block_size=BLOCK * 2))
    assert (ask(at, LONG)[0].health, ask(at, LONG)[0].reason) == ("blind", "block_size")


def test_what_was_sent_to_nobody_is_not_kept() -> None:
    """Workers and ranks that are not known: somebody makes up names."""
    at = without_events()
    for fact in (placed(0, LONG, worker="x"), placed(1, LONG, rank=7), placed(2, LONG[:3]), placed(3, b"")):
        at.give(fact)
    assert (len(at.core.approximate.tokens), len(at.core.approximate.text)) == (0, 0)
    assert isinstance(fact, PromptPlaced)


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["beat", "mute", "lost", "publish", "clear", "restart", "left", "place", "text", "end", "tick"]
        ),
        st.integers(0, 10),
        st.booleans(),
    ),
    max_size=40,
)


@pytest.mark.long
@given(steps)
def test_any_history(history: list[tuple[str, int, bool]]) -> None:
    """Whatever happens in whatever order: an exact source answers by its index alone and keeps no notes; an approximate
    one never claims more than its index has or it was sent; the table of those is right."""
    at = bridge(parity_min_requests=2, parity_window=4, parity_floor_tokens=0, silent_requests=3)
    sent = {"tokens": 0, "text": 0}
    life = 0
    for number, (what, blocks, flag) in enumerate(history):
        match what:
            case "beat":
                at.now += 1.0
                at.beat(profile=PROFILE)
            case "mute":
                at.beat(streams=(), profile=PROFILE)
            case "lost":
                stream = RankStream(rank=0, incarnation=at.incarnation, seq=at.seq, state="catching_up", reason="gone")
                at.beat(streams=(stream,), profile=PROFILE)
            case "publish":
                at.publish(stored(0), heard=flag)
            case "clear":
                at.publish(msgspec.msgpack.encode([1.0, [["AllBlocksCleared"]], 0]), heard=flag)
            case "restart":
                life += 1
                at.restart(f"{2000 + life}.0")
            case "left":
                at.beat("left")
                sent = dict.fromkeys(sent, 0)
            case "place" | "text":
                unit = "tokens" if what == "place" else "text"
                at.give(placed(number, LONG[: blocks * 8], unit=unit, indexed=blocks if flag else None))  # type: ignore[arg-type]
                sent[unit] = max(sent[unit], blocks)
            case "end":
                at.give(ended(number - 1, Usage(input_tokens=41, cached_tokens=4 * blocks)))
            case "tick":
                at.answer() if flag else at.fail()
                at.tick(0.5)
        sources = {(source.worker, source.rank): source for source in at.core.all_sources()}
        approximate = {key for key, source in sources.items() if source.health == "approximate"}
        assert set(at.core.approximate.sources) == approximate
        for match in ask(at, LONG):
            source = sources[match.worker, match.rank]
            indexed = next((found.device for found in at.core.index.match(LONG) if found.rank == match.rank), 0)
            assert match.health == source.health
            if match.health in ("synced", "catching_up"):
                assert match.blocks.reach == indexed
            assert match.blocks.reach <= max(indexed, sent["tokens"])
            if match.health == "synced":
                assert at.core.approximate.tokens.resident(match.worker, match.rank) == 0
        for match in ask(at, LONG, "text"):
            assert (match.health, match.blocks.reach <= sent["text"]) == ("approximate", True)
