"""Asking admission for a decision: replies until one of them decides, or why none will; and an indexer, whose turn it
is."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import aclosing

from bus import subjects
from bus.errors import BusError, BusTimeoutError, NoRespondersError
from bus.interface import Bus
from schemas.admit import AdmitReply, Granted, Refused
from schemas.base import BadMessageError, from_msgpack, to_msgpack
from schemas.index import RecogniseReply
from services.ingress.effects import AskAdmission, AskIndexer
from services.ingress.events import AdmitFailure, Recognised, RecogniseFailure

MARGIN_S = 0.02
"""This close to a question's deadline it has passed: the bus's timers and the wall clock differ by a little."""


class NoDecisionError(Exception):
    """Nobody decides; ``reason`` is an `AdmitFailure`."""

    def __init__(self, reason: AdmitFailure) -> None:
        super().__init__(reason)
        self.reason: AdmitFailure = reason


async def ask(
    bus: Bus,
    effect: AskAdmission,
    *,
    idle_s: float,
    counts: Callable[[AdmitReply], bool],
    told: Callable[[AdmitReply], None],
) -> None:
    """Every reply that ``counts`` is ``told``; the last one is a grant or a refusal. Raises `NoDecisionError`.

    A held request whose keep-alive stops is asked once more by its id: a new leader may have taken over, and the
    same question has the same grant (schemas.admit).
    """
    payload = to_msgpack(effect.question)
    held = True
    while held:
        held = False
        try:
            left_s = _left_s(effect)
            if left_s <= MARGIN_S:
                raise NoDecisionError("hold_timeout")
            idle_timeout_s = min(idle_s, left_s)
            replies = bus.request_many(effect.subject, payload, idle_timeout_s=idle_timeout_s, deadline_s=left_s)
            async with aclosing(replies):
                async for message in replies:
                    reply: AdmitReply = from_msgpack(message.payload, AdmitReply)  # type: ignore[arg-type]
                    if not counts(reply):
                        continue
                    told(reply)
                    if isinstance(reply, Granted | Refused):
                        return
                    held = True
        except NoRespondersError as error:
            raise NoDecisionError("no_responders") from error
        except BusTimeoutError as error:
            if _left_s(effect) <= MARGIN_S:
                raise NoDecisionError("hold_timeout") from error
            if not held:
                raise NoDecisionError("admit_silent") from error
        except BadMessageError as error:
            raise NoDecisionError("bad_reply") from error
        except BusError as error:
            raise NoDecisionError("bus_down") from error
    raise NoDecisionError("admit_silent")


async def ask_indexer(bus: Bus, effect: AskIndexer, *, deadline_s: float) -> Recognised:
    """Whose turn it is, or why nobody says so."""
    failure: RecogniseFailure
    try:
        answer = await bus.request(subjects.INDEX_RECOGNISE, to_msgpack(effect.question), timeout_s=deadline_s)
        reply = from_msgpack(answer.payload, RecogniseReply)
    except NoRespondersError:
        failure = "no_indexer"
    except BusTimeoutError:
        failure = "index_silent"
    except BadMessageError:
        failure = "bad_reply"
    except BusError:
        failure = "bus_down"
    else:
        if reply.error is None:
            return Recognised(request_id=effect.request_id, reply=reply)
        failure = "bad_reply"
    return Recognised(request_id=effect.request_id, failure=failure)


def _left_s(effect: AskAdmission) -> float:
    return effect.question.deadline_ms / 1000 - time.time()
