"""The queue of questions for snapshots: bounds, pauses, and its cost."""

from __future__ import annotations

import time

from replica.asking import SnapshotQueue


def test_snapshot_queue_bounds_open_questions() -> None:
    """At most so many at once, one per worker, and none for a worker that is gone or was never heard."""
    queue = SnapshotQueue(at_once=2, retry_s=1.0, retry_max_s=4.0)
    queue.want("stranger")
    for worker in ("a", "b", "c"):
        queue.want(worker)
        queue.seen(worker)
    first = queue.ask(0.0)
    assert len(first) == 2
    assert queue.ask(0.0) == []
    assert not queue.close(first[0].worker, 99)
    assert queue.close(first[0].worker, first[0].ticket)
    queue.failed(first[0].worker, 0.0)
    queue.want(first[0].worker)
    (third,) = queue.ask(0.5)
    assert third.worker not in {question.worker for question in first}
    queue.forget(third.worker)
    assert [question.worker for question in queue.ask(1.0)] == [first[0].worker]
    queue.close(first[1].worker, first[1].ticket)
    assert queue.ask(9.0) == []
    queue.seen("stranger")
    assert [question.worker for question in queue.ask(9.0)] == ["stranger"]


def test_snapshot_queue_wanted_again_while_asked() -> None:
    """What is wanted while the question is open is asked for after its answer, and not before the pause is over."""
    queue = SnapshotQueue(at_once=2, retry_s=1.0, retry_max_s=4.0)
    queue.seen("a")
    queue.want("a")
    (question,) = queue.ask(0.0)
    queue.want("a")
    assert queue.ask(0.0) == []
    assert queue.close("a", question.ticket)
    queue.failed("a", 0.0)
    assert queue.ask(0.9) == []
    (again,) = queue.ask(1.0)
    assert (again.worker, queue.close("a", question.ticket)) == ("a", False)
    queue.forget("a")
    queue.seen("a")
    queue.want("a")
    assert [question.worker for question in queue.ask(1.0)] == ["a"]


def test_snapshot_queue_asks_again_what_went_to_a_connection_that_is_gone() -> None:
    """An open question is asked once more, at once, and only its second answer counts; pauses after failures stand."""
    queue = SnapshotQueue(at_once=1, retry_s=1.0, retry_max_s=4.0)
    queue.seen("a")
    queue.asked_in_vain("a")
    queue.asked_in_vain("stranger")
    assert queue.ask(0.0) == []
    queue.want("a")
    (lost,) = queue.ask(0.0)
    queue.asked_in_vain("a")
    (again,) = queue.ask(0.0)
    assert (queue.close("a", lost.ticket), queue.close("a", again.ticket)) == (False, True)
    queue.failed("a", 0.0)
    queue.want("a")
    queue.asked_in_vain("a")
    assert (queue.ask(0.9), len(queue.ask(1.0))) == ([], 1)


def test_a_clock_that_is_set_back_makes_no_pause_longer() -> None:
    """Who failed is asked again after its pause, whatever the clock says by then."""
    queue = SnapshotQueue(at_once=2, retry_s=1.0, retry_max_s=4.0)
    for worker in ("a", "b"):
        queue.seen(worker)
        queue.want(worker)
    for question in queue.ask(1000.0):
        queue.want(question.worker)
        queue.failed(question.worker, 1000.0)
        queue.close(question.worker, question.ticket)
    assert queue.ask(1000.5) == []
    assert queue.ask(500.0) == []
    assert [question.worker for question in queue.ask(500.5)] == ["a", "b"]


def test_asking_costs_the_same_for_any_number_of_workers() -> None:
    """It is done once per batch: 4,000 workers that wait for their time are not walked over 20,000 times."""
    queue = SnapshotQueue(at_once=8_000, retry_s=1.0, retry_max_s=4.0)
    for number in range(4_000):
        queue.seen(f"w{number}")
        queue.want(f"w{number}")
    for question in queue.ask(0.0):
        queue.close(question.worker, question.ticket)
        queue.failed(question.worker, 0.0)
        queue.want(question.worker)
    started = time.thread_time()
    assert not any(queue.ask(0.5) for _ in range(20_000))
    assert time.thread_time() - started < 1.0
    assert len(queue.ask(1.0)) == 4_000
