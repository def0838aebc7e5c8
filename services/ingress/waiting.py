"""What a streaming client is told while its request is held: comments, which every reader of an event stream skips.

The first comment takes the answer's head with it: status 200 and ``text/event-stream`` stand from then on, whatever
comes. What fails afterwards is said inside the stream, in its API's own shape (docs/adr/0010).
"""

from __future__ import annotations

import re

from services.ingress.answers import AnswerFacts
from services.ingress.effects import Answer, BreakOff, HeldComment
from services.ingress.replies import error_event, error_reply
from services.ingress.requests import Record

_NOT_PLAIN = re.compile(r"[^\w.: -]+", re.ASCII)
_MOST_REASON = 64


def comment(record: Record, every_s: float, now: float) -> HeldComment | None:
    """The comment that is due: the first when a stream has been held for ``every_s``, the next after as long, until its
    engine answers. ``every_s`` 0: never."""
    if not every_s or not record.request.stream or record.asked_at is None:
        return None
    if record.state != "held" and not (record.is_open and record.state in ("asking", "dispatched")):
        return None
    if now - (record.commented_at or record.asked_at) < every_s:
        return None
    record.is_open, record.commented_at = True, now
    if record.state == "dispatched":
        return HeldComment(record.request_id, b": waiting for the engine\n\n")
    reason = _NOT_PLAIN.sub("_", record.hold_reason or "")[:_MOST_REASON]
    return HeldComment(record.request_id, f": held {now - record.received_at:.0f} s, {reason}\n\n".encode())


def broken(record: Record, status: int, reason: str, answer: AnswerFacts | None, message: str) -> BreakOff:
    """What is said of an answer that broke after something of it was sent: an event, in a stream."""
    if not record.request.stream:
        return BreakOff(record.request_id, b"")
    text = f"{message}: {reason.replace('_', ' ')}."
    number = answer.next_number if answer is not None else 0
    return BreakOff(record.request_id, error_event(record.request.endpoint, status, reason, text, number))


def failure(
    record: Record, status: int, reason: str, message: str, retry_after_s: int | None = None
) -> Answer | BreakOff:
    """What is said of a request that fails before its engine's first byte: a whole answer, or after a comment an event
    that ends the stream (and says in words when to try again)."""
    endpoint = record.request.endpoint
    if not record.is_open:
        reply = error_reply(endpoint, status, reason, message, retry_after_s=retry_after_s)
        return Answer(record.request_id, reply)
    if retry_after_s is not None:
        message = f"{message} Try again in {retry_after_s} s."
    return BreakOff(record.request_id, error_event(endpoint, status, reason, message))
