"""What strangers make up (workers, requests, ingresses, reasons) fills bounds, which are counted, and nothing else."""

from __future__ import annotations

import pytest

from schemas.admit import AdmitCancel
from services.admission.events import AdmitCancelled, WorkerStated
from services.admission.requests import MAX_LIVES, RequestRecord, RequestTable
from services.admission.workers import MAX_WORKERS
from tests.unit.admission.build import ask, driven, granted, identity, worker_state

BOUND = 100


def record(number: int, ingress: str = "ingress-1") -> RequestRecord:
    return RequestRecord(f"r{number}", "m", identity("s"), ingress, 1, 0, 0.0)


@pytest.mark.long
def test_workers_are_bounded() -> None:
    """Beyond the bound a new worker is counted and left out; a known one is still heard."""
    core = driven()
    core.do(WorkerStated(worker_state("a")))
    fleet = core.core.state.fleet
    for number in range(MAX_WORKERS + 4):
        fleet.stated(worker_state(f"x{number}", model=f"other-{number % 3}"), core.core.state.ledger, core.now)
    assert (len(fleet), fleet.refused) == (MAX_WORKERS, 5)
    assert granted(core.ask(ask("r"))).grant.worker == "a"


def test_requests_and_lives_of_ingresses_are_bounded() -> None:
    """Beyond the bound a new request is counted and not taken in; a known one still is, and an end makes room."""
    table = RequestTable(BOUND)
    table.heard("ingress-1", 1, 0.0)
    for number in range(BOUND):
        assert table.note(record(number)) is not None
    assert table.note(record(BOUND)) is None
    assert table.note(record(5)) is not None
    table.end("r5", 0.0)
    assert table.note(record(BOUND)) is not None
    assert (len(table), table.refused) == (BOUND, 1)
    for number in range(MAX_LIVES + 5):
        table.heard(f"x{number}", 1, 0.0)
    assert table.ingresses <= MAX_LIVES
    table.end("r6", 0.0)
    assert table.note(record(-1, f"x{MAX_LIVES + 4}")) is None


def test_reasons_of_cancels_are_bounded() -> None:
    """They are the sender's words, and labels of a counter."""
    core = driven()
    for number in range(1000):
        core.do(AdmitCancelled(AdmitCancel(request_id="r", ingress="i", reason=f"because {number}")))
    cancels = core.core.state.counters.cancels
    assert len(cancels) <= 33
    assert cancels.total() == 1000
