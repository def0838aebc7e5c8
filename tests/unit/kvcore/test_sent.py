"""What was sent where: any history against a naive model, the bounds, and clocks that step back."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from kvcore.hashing import chain_view, pack_chain
from kvcore.sent import SentBlocks, SentLimits
from tests.unit.kvcore.test_index_model import CHAINS, PATHS

TTL_S = 10.0
CAPACITY = 5
RANKS = (("a", 0), ("a", 1), ("b", 0))
VIEWS = [chain_view(chain) for chain in CHAINS]

who, node = st.integers(0, len(RANKS) - 1), st.integers(0, len(CHAINS) - 1)
step = st.tuples(st.just("send"), who, node, st.sampled_from([0.0, 0.0, 1.0, 4.0, 11.0]))
rare = st.tuples(st.sampled_from(["clear", "gone", "expire"]), who, node, st.just(0.0))
histories = st.lists(st.one_of(step, step, step, step, rare), max_size=40)


@dataclass
class NaiveRank:
    """Every block ever sent: when last, and its place in the order of use (the head of a prompt after its tail)."""

    sent: dict[int, tuple[float, tuple[int, int]]] = field(default_factory=dict)

    def held(self, now: float, capacity: int) -> set[int]:
        """The last used ``capacity`` of those that are not too old."""
        youngest = sorted(self.sent, key=lambda block: self.sent[block][1], reverse=True)[:capacity]
        return {block for block in youngest if self.sent[block][0] > now - TTL_S}


@given(histories)
def test_any_history_against_a_naive_model(history: list[tuple[str, int, int, float]]) -> None:
    """Time-to-live and capacity: what counts is the last used, and of every chain a prefix."""
    sent = SentBlocks(SentLimits(ttl_s=TTL_S))
    naive = {rank: NaiveRank() for rank in RANKS}
    now = 0.0
    for number, (what, at, chosen, passed) in enumerate(history):
        now += passed
        worker, rank = RANKS[at]
        match what:
            case "send":
                sent.record(worker, rank, CHAINS[chosen], now, capacity=CAPACITY)
                for position, block in enumerate(PATHS[chosen][:CAPACITY]):
                    naive[worker, rank].sent[block] = (now, (number, -position))
            case "clear":
                sent.clear_rank(worker, rank)
                naive[worker, rank] = NaiveRank()
            case "gone":
                sent.remove_worker(worker)
                naive |= {key: NaiveRank() for key in RANKS if key[0] == worker}
            case "expire":
                sent.expire(now)
        for key, model in naive.items():
            held = model.held(now, CAPACITY)
            for path, chain in zip(PATHS, VIEWS, strict=True):
                expected = [block in held for block in path].count(True)
                assert sent.reach(*key, chain, now) == expected
                assert all(block in held for block in path[:expected])  # a prefix: none is held beyond a hole
            assert sent.resident(*key) <= CAPACITY
        assert len(sent) == sum(sent.resident(*key) for key in sent.ranks())
    sent.expire(now + TTL_S)
    assert (len(sent), list(sent.ranks())) == (0, [])


@given(st.lists(st.tuples(who, node), max_size=30))
def test_the_bound_over_all_ranks(sends: list[tuple[int, int]]) -> None:
    """It is never passed, the rank with the most pays, and what is left of each chain is a prefix."""
    sent = SentBlocks(SentLimits(ttl_s=TTL_S, max_blocks=6))
    for at, chosen in sends:
        sent.record(*RANKS[at], CHAINS[chosen], 0.0, capacity=100)
        assert len(sent) <= 6
        for key in RANKS:
            for chain in VIEWS:
                reach = sent.reach(*key, chain, 0.0)
                assert [sent.reach(*key, chain[:length], 0.0) for length in range(len(chain) + 1)] == [
                    min(length, reach) for length in range(len(chain) + 1)
                ]


def test_a_tail_goes_before_its_head() -> None:
    """Over the capacity a long prompt keeps its beginning, and so does the prompt before it."""
    sent = SentBlocks()
    first, second = pack_chain(range(1, 7)), pack_chain(range(11, 15))
    sent.record("w", 0, first, 0.0, capacity=8)
    sent.record("w", 0, second, 1.0, capacity=8)
    assert sent.reach("w", 0, chain_view(second), 1.0) == 4
    assert sent.reach("w", 0, chain_view(first), 1.0) == 4
    assert sent.evicted == 2
    sent.record("w", 0, pack_chain(range(100, 200)), 2.0, capacity=8)
    assert sent.reach("w", 0, tuple(range(100, 200)), 2.0) == 8
    assert sent.reach("w", 0, chain_view(first), 2.0) == 0


def test_time_to_live() -> None:
    """A block counts for so long after it was sent last; sending it again renews it and what it hangs on."""
    sent = SentBlocks(SentLimits(ttl_s=10.0))
    sent.record("w", 0, pack_chain([1, 2, 3]), 0.0, capacity=100)
    sent.record("w", 0, pack_chain([1, 2]), 8.0, capacity=100)
    chain = (1, 2, 3)
    assert [sent.reach("w", 0, chain, now) for now in (0.0, 9.9, 10.0, 17.9, 18.0)] == [3, 3, 2, 2, 0]
    sent.expire(18.0)
    assert len(sent) == 0
    assert sent.evicted == 0


def test_a_clock_that_steps_back_stands_still() -> None:
    """No block becomes younger than one sent after it."""
    sent = SentBlocks(SentLimits(ttl_s=10.0))
    sent.record("w", 0, pack_chain([1, 2]), 100.0, capacity=100)
    sent.record("w", 0, pack_chain([1, 3]), 50.0, capacity=100)
    assert sent.reach("w", 0, (1, 3), 50.0) == 2
    assert sent.reach("w", 0, (1, 2), 105.0) == 2
    assert sent.reach("w", 0, (1, 3), 110.0) == 0


def test_ranks_are_bounded() -> None:
    """Somebody makes up names: those beyond the bound are not taken in, and are counted."""
    sent = SentBlocks(SentLimits(max_ranks=2))
    for number in range(5):
        sent.record(f"w{number}", 0, pack_chain([1]), 0.0, capacity=100)
    assert len(list(sent.ranks())) == 2
    assert sent.refused == 3
    sent.record("w0", 0, pack_chain([1, 2]), 0.0, capacity=100)
    assert sent.reach("w0", 0, (1, 2), 0.0) == 2


def test_nothing_to_keep() -> None:
    """An empty chain, half a hash, no capacity: no entry."""
    sent = SentBlocks()
    sent.record("w", 0, b"", 0.0, capacity=100)
    sent.record("w", 0, b"1234567", 0.0, capacity=100)
    sent.record("w", 0, pack_chain([1]), 0.0, capacity=0)
    assert (len(sent), list(sent.ranks()), sent.reach("w", 0, (1,), 0.0)) == (0, [], 0)


@given(
    st.lists(
        st.tuples(
            who, st.lists(st.integers(1, 8), min_size=1, max_size=6), st.integers(1, 7), st.sampled_from([0.0, 4.0])
        ),
        max_size=40,
    )
)
def test_made_up_chains_harm_nobody(sends: list[tuple[int, list[int], int, float]]) -> None:
    """Blocks that come twice, or behind another prefix than before: no bound is passed, nothing stays for ever, and
    whoever sends honest chains beside them is answered as ever."""
    sent = SentBlocks(SentLimits(ttl_s=TTL_S, max_blocks=20))
    honest, now = pack_chain([101, 102]), 0.0
    for at, chain, capacity, passed in sends:
        now += passed
        sent.record(*RANKS[at], pack_chain(chain), now, capacity=capacity)
        sent.record(*RANKS[at], honest, now, capacity=100)
        assert sent.reach(*RANKS[at], chain_view(honest), now) == 2
        assert sent.resident(*RANKS[at]) <= capacity + 2
        assert len(sent) == sum(sent.resident(*key) for key in sent.ranks()) <= 20
    sent.expire(now + TTL_S)
    assert (len(sent), list(sent.ranks())) == (0, [])


def test_a_prompt_that_parts_from_another_renews_what_they_share() -> None:
    """Two that go on differently behind three blocks: what only the older one has goes first, and then its prefix
    serves the younger one alone."""
    sent = SentBlocks(SentLimits(ttl_s=10.0))
    older, younger = (1, 2, 3, 4, 5), (1, 2, 3, 6)
    sent.record("w", 0, pack_chain(older), 0.0, capacity=100)
    sent.record("w", 0, pack_chain(younger), 5.0, capacity=100)
    assert [sent.reach("w", 0, chain, 5.0) for chain in (older, younger)] == [5, 4]
    sent.record("w", 0, pack_chain(older[:2]), 9.0, capacity=100)
    assert [sent.reach("w", 0, chain, 10.0) for chain in (older, younger)] == [3, 4]
    sent.record("w", 0, pack_chain((*younger, 7)), 12.0, capacity=100)
    assert [sent.reach("w", 0, chain, 21.0) for chain in (older, (*younger, 7))] == [3, 5]
    assert sent.resident("w", 0) == 5
