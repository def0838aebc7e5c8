"""What an ingress says of its requests on the bus: facts, in the order of their numbers; questions to admission."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from bus import subjects
from bus.facts import FactNumbers
from schemas.admit import AdmitCancel, AdmitRequest, DecisionMode
from schemas.base import Fact
from schemas.ingress import IngressState
from schemas.placed import Placed
from schemas.request import (
    RequestAccepted,
    RequestDispatched,
    RequestEnd,
    RequestFirstToken,
    RequestProgress,
    Usage,
)
from schemas.session import MOVES_SESSION
from services.ingress import in_flight
from services.ingress.answers import AnswerFacts
from services.ingress.effects import AskAdmission, AskHedge, CancelAdmission, Publish
from services.ingress.requests import Record
from services.ingress.rows import Ending


class Facts:
    """Makes them; ``ingress`` is its name, ``epoch`` grows with each of its incarnations. Times in Unix seconds."""

    def __init__(self, ingress: str, epoch: int) -> None:
        self._ingress = ingress
        self._epoch = epoch
        self._numbers = FactNumbers(ingress, epoch)

    def question(self, record: Record, now: float, deadline_s: float, avoided: tuple[str, ...] = ()) -> AskAdmission:
        """Who may run it, and where, but not at ``avoided``; it may be held for ``deadline_s``."""
        unit, block_size, chain = record.chain
        question = AdmitRequest(
            request_id=record.request_id,
            model=record.model,
            ingress=self._ingress,
            ingress_epoch=self._epoch,
            identity=record.identity,
            received_ms=record.received_ms,
            deadline_ms=int((now + deadline_s) * 1000),
            attempt=record.attempt,
            kind=record.kind,
            endpoint=record.request.endpoint,
            input_tokens=record.input_tokens,
            tokens_from=record.tokens_from,
            block_size=block_size,
            chain=chain,
            chain_unit=unit,
            pages=record.tokens.pages if record.tokens is not None else b"",
            page_size=record.tokens.page_size if record.tokens is not None else 0,
            max_output_tokens=record.request.max_output_tokens,
            expected_output_tokens=record.request.expected_output_tokens,
            priority=record.request.priority,
            excluded=record.excluded,
            message_chain=record.messages.hashes if record.messages is not None else b"",
            preamble=record.messages.preamble if record.messages is not None else 0,
            avoided=avoided,
            sticky=record.sticky,
            digest=record.digest,
        )
        return AskAdmission(subjects.admit(record.model), question)

    def hedge_question(self, record: Record, now: float, deadline_s: float, avoided: tuple[str, ...]) -> AskHedge:
        """May it be sent once more, to none of those where it was sent?"""
        ask = self.question(record, now, deadline_s, avoided)
        sent = (*record.excluded, record.worker or "")
        question = msgspec.structs.replace(ask.question, attempt=record.attempt + 1, excluded=sent, hedge=True)
        return AskHedge(ask.subject, question)

    def cancel(self, record: Record, reason: str, *, hedge: bool = False) -> CancelAdmission:
        """No decision is wanted any more; ``hedge``: none on a second sending."""
        cancel = AdmitCancel(request_id=record.request_id, ingress=self._ingress, reason=reason, hedge=hedge)
        return CancelAdmission(subjects.admit_cancel(record.model), cancel)

    def accepted(self, record: Record, now: float) -> Publish:
        """Said once it is known whose request it is, and once only."""
        fact = RequestAccepted(
            **self._numbers.stamp("request.accepted", now),
            request_id=record.request_id,
            model=record.model,
            identity=record.identity,
            received_ms=record.received_ms,
            kind=record.kind,
            endpoint=record.request.endpoint,
            stream=record.request.stream,
            x_request_id=record.x_request_id,
            digest=record.digest.hex(),
        )
        return _of_request("accepted", record, fact)

    def placed(self, record: Record, worker: str, rank: int, now: float) -> Publish:
        """What we place ourselves we say ourselves: where approximate sources and sessions are known from."""
        unit, block_size, chain = record.chain
        moves = record.kind in MOVES_SESSION
        fact = Placed(
            **self._numbers.stamp("placed", now),
            request_id=record.request_id,
            model=record.model,
            worker=worker,
            rank=rank,
            session=record.identity.key if moves else None,
            parent=record.identity.parent if moves else None,
            mode="fallback",
            unit=unit,
            block_size=block_size,
            chain=chain,
            message_chain=record.messages.hashes if record.messages is not None else b"",
            preamble=record.messages.preamble if record.messages is not None else 0,
        )
        return Publish(subjects.placed(worker), fact, packed=True)

    def dispatched(self, record: Record, worker: str, rank: int, mode: DecisionMode, now: float) -> Publish:
        fact = RequestDispatched(
            **self._numbers.stamp("request.dispatched", now),
            request_id=record.request_id,
            model=record.model,
            worker=worker,
            rank=rank,
            attempt=record.attempt,
            mode=mode,
            grant_id=record.grant_id,
        )
        return _of_request("dispatched", record, fact)

    def first_token(self, record: Record, now: float) -> Publish:
        fact = RequestFirstToken(
            **self._numbers.stamp("request.first_token", now),
            request_id=record.request_id,
            model=record.model,
            ttft_ms=round(max(0.0, now - record.received_at) * 1000, 3),
        )
        return _of_request("first_token", record, fact)

    def progress(self, record: Record, now: float) -> Publish:
        fact = RequestProgress(
            **self._numbers.stamp("request.progress", now),
            request_id=record.request_id,
            model=record.model,
            chunks=record.chunks,
        )
        return _of_request("progress", record, fact)

    def end(self, record: Record, ending: Ending, usage: Usage, total_ms: float | None) -> Publish:
        """The one end."""
        answer = ending.answer or AnswerFacts()
        fact = RequestEnd(
            **self._numbers.stamp("request.end", ending.at),
            request_id=record.request_id,
            model=record.model,
            identity=record.identity,
            outcome=ending.outcome,
            kind=record.kind,
            endpoint=record.request.endpoint,
            reason=ending.reason,
            status=ending.status,
            worker=record.worker,
            rank=record.rank,
            grant_id=record.grant_id,
            mode=record.mode,
            usage=usage,
            predicted_cached_tokens=record.granted.predicted_cached_tokens if record.granted else None,
            predicted_shared_tokens=record.granted.predicted_shared_tokens if record.granted else None,
            finish_reason=answer.finish_reason,
            tool_names=tuple(call.name for call in answer.tool_calls if call.name),
            total_ms=total_ms,
        )
        return _of_request("end", record, fact)

    def state(self, records: Collection[Record], most: int, now: float, *, final: bool = False) -> list[Publish]:
        """Who is in flight, in as many messages of at most ``most`` requests as it takes."""
        parts = in_flight.parts(records, most)
        subject = subjects.ingress_state(self._ingress)
        return [
            Publish(
                subject,
                IngressState(
                    **self._numbers.stamp("ingress.state", now),
                    ingress=self._ingress,
                    in_flight=part,
                    final=final,
                    part=number,
                    parts=len(parts),
                ),
            )
            for number, part in enumerate(parts)
        ]


def _of_request(event: str, record: Record, fact: Fact) -> Publish:
    return Publish(subjects.request(event, record.model), fact)
