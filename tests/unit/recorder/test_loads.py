"""Samples of workers' load: one of each worker in a while, the same ones whoever takes them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from bus.subjects import trace
from schemas.base import from_json
from schemas.trace import TraceRow
from schemas.worker import RankLoad, WorkerProfile, WorkerState
from services.recorder.loads import LoadRow, LoadSampler

NOW = 1_795_975_300.0


def state(worker: str = "engine-1", at_s: float = 0.0, *running: int, incarnation: str = "100.0") -> WorkerState:
    """At ``at_s`` after `NOW`; a rank for each of ``running``."""
    return WorkerState(
        source=f"bridge-{worker}",
        epoch=1,
        seq=0,
        at_ms=int((NOW + at_s) * 1000),
        worker=worker,
        incarnation=incarnation,
        health="ready",
        profile=WorkerProfile(url="http://x", model="qwen", kv_tokens=1_000),
        loads=tuple(RankLoad(rank=rank, running=count, kv_usage=0.25) for rank, count in enumerate(running)),
    )


def sampled(sampler: LoadSampler, facts: list[tuple[str, float, int]]) -> list[LoadRow]:
    found = [sampler.handle(state(worker, at_s, running), NOW + at_s) for worker, at_s, running in facts]
    return [row for row in found if row is not None]


def test_a_sample_says_what_the_bridge_said() -> None:
    """All ranks, the size of the KV cache, at the bridge's own time; under a message id that says when it was due."""
    row = LoadSampler(5.0).handle(state("engine 1", 7.25, 3, 0), NOW + 8)
    assert row is not None
    assert row.subject == trace("worker_load", "qwen", "engine 1")
    assert row.message_id == "load:engine=201:100=2E0:1795975305000"
    read = from_json(row.payload, TraceRow)
    assert (read.event_type, read.event_time_unix_ms) == ("worker_load", 1_795_975_307_250)
    assert read.worker_load is not None
    assert (read.worker_load.worker, read.worker_load.model, read.worker_load.kv_tokens) == ("engine 1", "qwen", 1_000)
    assert [(load.rank, load.running, load.kv_usage) for load in read.worker_load.loads] == [(0, 3, 0.25), (1, 0, 0.25)]
    assert b"null" not in row.payload


def test_a_worker_that_tells_no_load_has_no_rows_and_one_that_stops_has_a_last_one() -> None:
    """Else its last load would be drawn for ever."""
    sampler = LoadSampler(1.0)
    loads = [(), (), (2,), (), (), (1,)]
    rows = [sampler.handle(state("engine-1", second, *load), NOW + second) for second, load in enumerate(loads)]
    assert [row is not None for row in rows] == [False, False, True, True, False, True]
    assert rows[3] is not None
    last = from_json(rows[3].payload, TraceRow).worker_load
    assert last is not None
    assert last.loads == ()


facts = st.lists(
    st.tuples(st.sampled_from(["a", "b"]), st.floats(0.1, 3.0), st.integers(0, 3)), min_size=1, max_size=40
).map(
    lambda steps: [
        (worker, sum(step for _, step, _ in steps[: place + 1]), running)
        for place, (worker, _, running) in enumerate(steps)
    ]
)


@given(facts, st.integers(0, 10))
def test_several_recorders_name_a_sample_alike(heard: list[tuple[str, float, int]], missed: int) -> None:
    """Whoever comes later takes no sample that the first had not, so that the stream keeps one of each; and of each
    worker there is one in every five seconds in which it was heard well apart from the last."""
    first, second = sampled(LoadSampler(5.0), heard), sampled(LoadSampler(5.0), heard[missed:])
    due = {f"load:{worker}:100=2E0:{int((NOW + at_s) * 1000) // 5_000 * 5_000}" for worker, at_s, _ in heard}
    ids = [row.message_id for row in first]
    assert len(ids) == len(set(ids))
    assert {row.message_id for row in (*first, *second)} <= due


def test_a_clock_that_jumps_makes_no_flood() -> None:
    """A bridge whose clock is set at each fact, or who lies: no more rows than by our own clock are due."""
    sampler = LoadSampler(5.0)
    rows = [sampler.handle(state("engine-1", at_s * 1_000, 1), NOW + at_s) for at_s in range(60)]
    assert 6 <= sum(row is not None for row in rows) <= 24
    back = sampler.handle(state("engine-1", 0, 1), NOW - 1_000)
    assert back is not None, "a clock of ours that is set back must not end the samples"


def test_a_worker_whose_model_is_not_known_yet_is_not_sampled() -> None:
    """A bridge that has just begun knows its engine's load before its model."""
    early = msgspec.structs.replace(state("engine-1", 0, 1), profile=WorkerProfile(url="http://x", model=""))
    sampler = LoadSampler(1.0)
    assert sampler.handle(early, NOW) is None
    assert sampler.handle(state("engine-1", 0.5, 1), NOW + 0.5) is not None


def test_workers_are_bounded() -> None:
    """Whoever was heard longest ago is forgotten."""
    sampler = LoadSampler(5.0, workers=3)
    for number in range(10):
        sampler.handle(state(f"engine-{number}", 0, 1), NOW)
    assert len(sampler) == 3
    assert sampler.handle(state("engine-9", 1, 1), NOW + 1) is None
