"""Parity of predicted and reported cached tokens, and sources that fall silent."""

from __future__ import annotations

from replica.parity import ParityRules, SourceParity


def problem(parity: SourceParity) -> str | None:
    return parity.problem


RULES = ParityRules(window=16, min_requests=4, silent_requests=5)


def test_a_wrong_prediction_alarms_and_heals() -> None:
    """User case A14: predicted 400, reported 0, persistently, raises the alarm; agreement ends it."""
    parity = SourceParity(RULES)
    for _ in range(3):
        parity.ended(1000, 16, 400, 0)
    assert problem(parity) is None
    parity.ended(1000, 16, 400, 0)
    assert problem(parity) == "parity"
    parity.event()
    for _ in range(13):
        parity.ended(410, 16, 400, 400)
    assert problem(parity) == "parity"
    for _ in range(2):
        parity.ended(410, 16, 400, 400)
    assert problem(parity) is None


def test_more_reported_than_predicted_alarms_too() -> None:
    """An index that has lost blocks is as wrong as one that invents them."""
    parity = SourceParity(RULES)
    for _ in range(4):
        parity.ended(1000, 16, 0, 900)
    assert problem(parity) == "parity"


def test_small_differences_are_no_alarm() -> None:
    """A block more or less a request is the engine's rounding (the last block is always recomputed)."""
    parity = SourceParity(RULES)
    for _ in range(20):
        parity.ended(60, 16, 32, 16)
        parity.event()
    assert problem(parity) is None


def test_requests_without_numbers_say_nothing_about_parity() -> None:
    """An engine that reports no cached tokens is not compared."""
    parity = SourceParity(RULES)
    for _ in range(20):
        parity.ended(10, 16, 4000, None)
    assert problem(parity) is None


def test_silence_while_blocks_should_be_stored() -> None:
    """Requests with new full blocks and not one event mean that events are off; one event ends it."""
    parity = SourceParity(RULES)
    for _ in range(5):
        parity.ended(15, 16, None, None)
    assert problem(parity) is None
    for _ in range(5):
        parity.ended(100, 16, 0, None)
    assert problem(parity) == "no_events"
    parity.event()
    assert problem(parity) is None


def test_a_restart_forgets() -> None:
    """A new incarnation is judged by its own requests."""
    parity = SourceParity(RULES)
    for _ in range(6):
        parity.ended(1000, 16, 400, 0)
    parity.restarted()
    assert problem(parity) is None
    parity.ended(1000, 16, 400, 0)
    assert problem(parity) is None
