"""Asks that a standby remembers until it leads."""

from __future__ import annotations

from bus.interface import BusMessage
from services.admission.shell_unanswered import WAITS_S, Unanswered


def ask(number: int) -> BusMessage:
    return BusMessage(subject="tg.v1.admit.m", payload=b"%d" % number, reply=f"inbox.{number}")


def test_what_came_lately_is_taken_once_and_in_order() -> None:
    """Older than an ingress waits: nobody listens any more."""
    unanswered = Unanswered()
    for number in range(4):
        unanswered.add(ask(number), number * WAITS_S / 2)
    assert unanswered.take(3 * WAITS_S / 2) == [ask(1), ask(2), ask(3)]
    assert unanswered.take(3 * WAITS_S / 2) == []
    assert unanswered.dropped == 0


def test_no_more_are_kept_than_there_is_room_for() -> None:
    """The oldest go, and are counted; what is too old goes uncounted."""
    unanswered = Unanswered(most=2)
    for number in range(5):
        unanswered.add(ask(number), 0.0)
    assert (len(unanswered), unanswered.dropped) == (2, 3)
    unanswered.add(ask(5), WAITS_S + 1)
    assert (len(unanswered), unanswered.dropped) == (1, 3)
    assert unanswered.take(WAITS_S + 1) == [ask(5)]
