"""Live workers, pools, and where a session goes when nobody decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.pool import SharedLayout
from schemas.worker import LOW_FIRST, Engine, WorkerHealth, WorkerProfile, WorkerState
from services.ingress.placement import place
from services.ingress.tokens import PageRule
from services.ingress.workers import MAX_WORKERS, Workers


def state(
    worker: str,
    seq: int = 0,
    *,
    model: str = "m",
    block_size: int | None = 16,
    health: WorkerHealth = "ready",
    ranks: int = 1,
    epoch: int = 1,
    models: tuple[str, ...] = (),
    adapters: tuple[str, ...] = (),
    salt_rule: str = "cache_salt",
    shared: SharedLayout | None = None,
    engine: Engine = "unknown",
    features: tuple[str, ...] = (),
) -> WorkerState:
    """One fact of a bridge."""
    profile = WorkerProfile(
        url=f"http://{worker}",
        model=model,
        models=models,
        adapters=adapters,
        block_size=block_size,
        ranks=ranks,
        salt_rule=salt_rule,
        shared=shared,
        engine=engine,
        features=features,
    )
    return WorkerState(
        source=f"bridge-{worker}",
        epoch=epoch,
        seq=seq,
        at_ms=0,
        worker=worker,
        incarnation="1",
        health=health,
        profile=profile,
    )


def heard(*states: WorkerState) -> Workers:
    """A table that heard these at time 0."""
    workers = Workers(lost_s=5.0)
    for one in states:
        workers.hear(one, 0.0)
    return workers


def names(workers: Workers, model: str = "m", now: float = 0.0) -> list[str]:
    """Who takes requests for a model."""
    return [one.worker for one in workers.placeable(model, now)]


def test_an_adapter_s_pool_says_so() -> None:
    """A11: a request for an adapter is chained under it, one for the model or a second name of it is not."""
    workers = heard(state("w1", models=("m", "alias", "lora"), adapters=("lora",)))
    assert [workers.pool(name, 0.0).adapter for name in ("m", "alias", "lora", "other")] == [None, None, "lora", None]


def test_silence_is_loss() -> None:
    """A worker silent for five seconds gets nothing; a fact brings it back."""
    workers = heard(state("w1"), state("w2"))
    workers.hear(state("w2", 1), 3.0)
    assert names(workers, now=5.0) == ["w1", "w2"]
    assert names(workers, now=5.1) == ["w2"]
    assert workers.expire(5.1) == ["w1"]
    assert workers.get("w1") is None
    workers.hear(state("w1", 2), 6.0)
    assert names(workers, now=6.0) == ["w1", "w2"]


@pytest.mark.parametrize("jump_s", [60.0, -60.0])
def test_who_was_away_finds_nobody_silent(jump_s: float) -> None:
    """A loop that slept, or a clock that was set, has heartbeats unread: requests that come first find the workers of
    before, and each has `lost_s` again in which to be heard."""
    workers = heard(state("w1"), state("w2"))
    assert workers.expire(1.0) == []
    now = 1.0 + jump_s
    assert (names(workers, now=now), workers.models(now)) == (["w1", "w2"], ["m"])
    workers.hear(state("w2", 1), now)
    assert names(workers, now=now) == ["w1", "w2"]
    assert workers.expire(now + 0.5) == []
    workers.hear(state("w2", 2), now + 2.0)
    assert workers.expire(now + 4.0) == []
    workers.hear(state("w2", 3), now + 5.0)
    assert names(workers, now=now + 5.1) == ["w2"]
    assert workers.expire(now + 5.1) == ["w1"]


def test_leaving_and_health() -> None:
    """``left`` is at once; unhealthy and starting workers get nothing; a mismatch is placed by load (A10)."""
    workers = heard(
        state("w1", health="starting"), state("w2", health="unhealthy"), state("w3", health="mismatch"), state("w4")
    )
    assert names(workers) == ["w3", "w4"]
    workers.hear(state("w4", 1, health="left"), 1.0)
    assert names(workers, now=1.0) == ["w3"]
    assert len(workers) == 3


def test_an_older_fact_changes_nothing() -> None:
    """Facts may overtake each other on reconnect: (epoch, seq) of the source decides."""
    workers = heard(state("w1", 5))
    workers.hear(state("w1", 4, health="left"), 1.0)
    assert names(workers) == ["w1"]
    workers.hear(state("w1", 0, epoch=2, health="unhealthy"), 1.0)
    assert names(workers) == []
    workers.hear(state("w1", 9, epoch=1), 2.0)
    assert names(workers) == []


def test_models_are_remembered() -> None:
    """A model whose workers are gone is known (503), one that nobody served is not (404)."""
    workers = heard(state("w1", models=("m", "m-lora")))
    assert workers.models(0.0) == ["m", "m-lora"]
    workers.hear(state("w1", 1, health="left"), 1.0)
    assert workers.models(1.0) == []
    assert (workers.knows("m-lora"), workers.knows("other"), workers.knows_any) == (True, False, True)


def test_a_pool_is_what_most_workers_are() -> None:
    """The chain is made for the block size and salt rule of most ready workers; a mismatch has no say (A10)."""
    assert heard().pool("m", 0.0).block_size is None
    assert heard(state("w1", block_size=None)).pool("m", 0.0).block_size is None
    workers = heard(
        state("w1", block_size=64),
        state("w2", block_size=16),
        state("w3", block_size=16),
        state("w4", block_size=64, health="mismatch"),
        state("w5", block_size=64, health="mismatch"),
        state("w6", block_size=8, model="other"),
    )
    assert workers.pool("m", 0.0).block_size == 16
    assert workers.pool("other", 0.0).block_size == 8
    assert heard(state("w1", block_size=64), state("w2", block_size=16)).pool("m", 0.0).block_size == 16


workers_of = st.lists(
    st.builds(state, st.sampled_from([f"w{n}" for n in range(8)]), ranks=st.integers(1, 3)),
    min_size=1,
    max_size=8,
    unique_by=lambda one: one.worker,
)


@given(workers_of, st.text(max_size=12))
def test_placement_is_stable(states: list[WorkerState], session: str) -> None:
    """The same session goes to the same place whatever the order, and moves only when its own worker goes."""
    chosen = place(session, states)
    assert chosen is not None
    worker, rank = chosen
    assert 0 <= rank < worker.profile.ranks
    assert place(session, list(reversed(states))) == chosen
    for other in states:
        left = [one for one in states if one is not other]
        if other is not worker:
            assert place(session, left) == chosen
            assert place(session, states, excluded=[other.worker]) == chosen
    assert place(session, states, excluded=[one.worker for one in states]) is None


def test_placement_spreads_sessions() -> None:
    """A thousand sessions over four workers of two ranks: every rank gets its share, within a third."""
    states = [state(f"w{n}", ranks=2) for n in range(4)]
    counts: dict[tuple[str, int], int] = {}
    for number in range(1000):
        chosen = place(f"session-{number}", states)
        assert chosen is not None
        key = (chosen[0].worker, chosen[1])
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 8
    assert all(83 < count < 167 for count in counts.values())


def test_made_up_workers_are_bounded() -> None:
    """Somebody who makes up names fills the table only up to its bound; the workers that are in it stay."""
    workers = heard(*(state(f"w{number}", model=f"m{number % 7}") for number in range(MAX_WORKERS + 10)))
    assert len(workers) == MAX_WORKERS
    workers.hear(state("w0", 1, health="unhealthy"), 0.0)
    assert workers.get("w0") is not None
    assert names(workers, "m0")[:1] == ["w1001"]


def test_pages_are_hashed_by_the_rule_of_most_readers_of_a_pool() -> None:
    """Only where pages follow from the tokens: a pool that is keyed by the engines' own hashes needs none."""
    small = SharedLayout(pool="p", scheme="sglang_hicache", page_size=16)
    large = SharedLayout(pool="p", scheme="sglang_hicache", page_size=64, pairs=True)
    engines = SharedLayout(pool="q", scheme="vllm_mooncake", page_size=16, page_hash="engine")
    assert heard(state("a"), state("b", shared=engines)).pool("m", 0.0).pages is None
    assert heard(state("a", shared=engines), state("b", shared=large)).pool("m", 0.0).pages == PageRule(64, pairs=True)
    even = heard(state("a", shared=small), state("b", shared=large))
    assert even.pool("m", 0.0).pages == PageRule(16)
    even.hear(state("c", shared=large), 0.0)
    assert even.pool("m", 0.0).pages == PageRule(64, pairs=True)
    assert heard(state("a", shared=small, block_size=None)).pool("m", 0.0).pages == PageRule(16)


def test_which_priorities_most_of_a_models_engines_run_first() -> None:
    """SGLang's the higher ones, unless it was told otherwise."""
    up, down = state("a", engine="sglang"), state("b", engine="vllm")
    assert heard(up).high_first("m", 0.0)
    assert not heard(down).high_first("m", 0.0)
    assert not heard(up, down).high_first("m", 0.0)
    assert heard(up, down, state("c", engine="sglang")).high_first("m", 0.0)
    assert not heard(state("a", engine="sglang", features=(LOW_FIRST,))).high_first("m", 0.0)
    assert not heard(up).high_first("other", 0.0)
