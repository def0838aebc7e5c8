"""One question to a user's policy on the bus: its answer, or why there is none."""

from __future__ import annotations

from typing import Literal

from bus import subjects
from bus.errors import AnswerFailedError, BusError, BusTimeoutError, NoRespondersError
from bus.interface import Bus
from schemas.base import BadMessageError, from_json, to_json
from schemas.decision import PolicyAsk
from schemas.policy import ANSWERS, MAX_ANSWER_BYTES, PolicyAnswer, PolicyQuestion

NoAnswer = Literal["absent", "late", "failed", "malformed", "unsent"]
"""Nobody listens; past the deadline; its process raised; no such answer can be read; the bus was away."""


async def ask_policy(
    bus: Bus, ask: PolicyAsk, name: str, question: PolicyQuestion, timeout_s: float
) -> PolicyAnswer | NoAnswer:
    """Ask policy ``name`` and wait for at most ``timeout_s``. Never raises for what a policy or the bus does."""
    try:
        answer = await bus.request(subjects.policy(ask, name), to_json(question), timeout_s=timeout_s)
        if len(answer.payload) > MAX_ANSWER_BYTES:
            raise BadMessageError(f"{len(answer.payload)} bytes, at most {MAX_ANSWER_BYTES}")
        return from_json(answer.payload, ANSWERS[ask])
    except NoRespondersError:
        return "absent"
    except BusTimeoutError:
        return "late"
    except AnswerFailedError:
        return "failed"
    except BadMessageError:
        return "malformed"
    except BusError:
        return "unsent"
