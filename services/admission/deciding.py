"""From ask to answer: line up, ask the index, ask the route policy, grant.

Invariants: asks of one session are granted in the order of their arrival; the questions open for a model never exceed
its free places; an answer to a question that is not open any more changes nothing; a request has one grant at most.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import msgspec

from schemas.admit import AdmitCancel, AdmitRequest, Grant, Granted, Held, Refused
from schemas.decision import Decision
from schemas.index import MatchReply, MatchRequest
from schemas.policy import RouteAnswer, RouteQuestion
from schemas.session import MOVES_SESSION, SessionKey
from services.admission.asks import Ask, Stage
from services.admission.cost import Prompt, booked_prefill_tokens, predicted_cached_tokens
from services.admission.effects import AskIndex, AskPolicy, Effect, Publish, PublishDecision, Reply
from services.admission.facts import FactWriter
from services.admission.grants import OpenGrant
from services.admission.holds import HoldQueue
from services.admission.placement import EVENT_LAG_S, NO_PREFERENCE, IndexView, Placement, Preference, place
from services.admission.replies import granted_reply
from services.admission.requests import RequestRecord
from services.admission.state import AdmissionState
from services.admission.workers import Worker

DEFAULT_BLOCK_SIZE = 16
"""Tokens a block, where neither the ask nor a worker's profile says."""


class Deciding:
    """Every unanswered ask. Only the leader's is ever filled."""

    def __init__(self, state: AdmissionState) -> None:
        self._state = state
        self._asks: dict[str, Ask] = {}
        self._open: dict[int, Ask] = {}
        self._open_by_model: Counter[str] = Counter()
        self._open_sessions: set[SessionKey] = set()
        self._arrivals = 0
        self._tickets = 0
        self._grants = 0
        self.holds = HoldQueue(state.settings.hold_queue_limit)

    def __len__(self) -> int:
        return len(self._asks)

    @property
    def held(self) -> int:
        """Asks that wait to be begun or let."""
        return len(self.holds)

    @property
    def open_questions(self) -> int:
        """Asks that wait for the index or the route policy."""
        return len(self._open)

    def waits(self, request_id: str) -> bool:
        """Whether this request has an unanswered ask."""
        return request_id in self._asks

    # What happens to an ask

    def asked(self, request: AdmitRequest, reply_to: str, record: RequestRecord, now: float) -> list[Effect]:
        """A turn asks to run, for the first time or again. ``record`` is its request's."""
        counters = self._state.counters
        pending = self._asks.get(request.request_id)
        if pending is not None and pending.request.attempt == request.attempt:
            counters.asks_again += 1
            pending.reply_to = reply_to
            return [self._say_held(pending, now)] if pending.stage is Stage.HELD else []
        if request.attempt < record.attempt:
            return [self._refuse(request, reply_to, "stale_attempt")]
        entry = self._state.ledger.get(request.request_id)
        if entry is not None:
            again = self._same_grant(request, record, entry)
            if again is not None:
                counters.asks_again += 1
                return [Reply(reply_to, again)]
            same = entry.attempt == request.attempt
            self._state.release(request.request_id, "worker_lost" if same else "attempt")
        if pending is not None:
            self._drop(pending)
        counters.asks += 1
        record.attempt = request.attempt
        self._arrivals += 1
        ask = Ask(request, reply_to, self._arrivals, now, self._deadline(request, now))
        self._asks[request.request_id] = ask
        self._line_up(ask, now)
        effects = self.pump(request.model, now)
        if ask.stage is Stage.HELD and self.waits(request.request_id):
            if len(self.holds) > self._state.settings.hold_queue_limit:
                return [*effects, self._give_up(ask, "hold_queue_full", 429)]
            if ask.hold_reason != "session_order":
                effects.append(self._say_held(ask, now))
        return effects

    def cancelled(self, cancel: AdmitCancel, now: float) -> list[Effect]:
        """Its ingress does not want the answer any more."""
        ask = self._asks.get(cancel.request_id)
        if ask is not None:
            self._drop(ask)
        self._state.release(cancel.request_id, "cancelled")
        return self.pump_all(now)

    def over(self, request_id: str) -> None:
        """The request ended: whatever it still asked is moot."""
        ask = self._asks.get(request_id)
        if ask is not None:
            self._drop(ask)

    def drop_all(self) -> None:
        """We do not lead any more: nobody gets an answer; ingresses ask the next leader."""
        for ask in list(self._asks.values()):
            self._drop(ask)

    def matched(self, ticket: int, reply: MatchReply, now: float) -> list[Effect]:
        """The index answered."""
        self._state.counters.index["answered" if reply.error is None else "error"] += 1
        ask = self._open.get(ticket)
        if ask is None:
            return []
        request = ask.request
        if request.chain_unit == "text":
            view = IndexView.of_text(reply, request.block_size, self._block_size(request))
        else:
            view = IndexView.of(reply)
        return self._index_known(ticket, view, now)

    def match_failed(self, ticket: int, reason: str, now: float) -> list[Effect]:
        """The index did not answer: decide by session affinity and load."""
        self._state.counters.index[reason] += 1
        return self._index_known(ticket, IndexView.blind(reason), now)

    def policy_answered(self, ticket: int, answer: RouteAnswer, now: float) -> list[Effect]:
        """The route policy answered; its answer counts only if it can be followed."""
        ask = self._open.get(ticket)
        if ask is None or ask.stage is not Stage.POLICY:
            return []
        return self._settle(ask, now, answer if answer.worker else None, "no_opinion")

    def policy_failed(self, ticket: int, reason: str, now: float) -> list[Effect]:
        """The route policy did not answer: the built-in choice stands."""
        ask = self._open.get(ticket)
        if ask is None or ask.stage is not Stage.POLICY:
            return []
        return self._settle(ask, now, None, reason)

    # The line

    def pump_all(self, now: float) -> list[Effect]:
        """Begin with whoever may run now, for every model."""
        effects: list[Effect] = []
        if len(self.holds):
            for model in self.holds.models():
                effects += self.pump(model, now)
        return effects

    def pump(self, model: str, now: float) -> list[Effect]:
        """Begin with whoever may run now, first come first."""
        line = self.holds.line(model)
        if not line:
            return []
        if now < self._state.warm_at:
            for ask in line:
                ask.hold_reason = ask.hold_reason or "warming_up"
            return []
        workers = [worker for worker in self._state.fleet.serving(model) if worker.placeable]
        if not workers:
            return [self._nobody_serves(ask) for ask in line]
        effects: list[Effect] = []
        free = self._free(workers, model, len(line))
        blocked: set[SessionKey] = set()
        for ask in line:
            if free <= 0 or len(self._open) >= self._state.settings.max_deciding:
                ask.hold_reason = "at_limit" if free <= 0 else ask.hold_reason or "max_deciding"
                continue
            key = ask.request.identity.key
            if key in self._open_sessions or key in blocked:
                ask.hold_reason = ask.hold_reason or "session_order"
                blocked.add(key)
                continue
            if ask.request.excluded:
                options = [worker for worker in workers if worker.name not in ask.request.excluded]
                if not options:
                    effects.append(self._give_up(ask, "no_worker", 503))
                    continue
                if self._room(options) <= 0:
                    ask.hold_reason = "at_limit"
                    blocked.add(key)
                    continue
            effects += self._begin(ask, now)
            free -= 1
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Keep-alives and deadlines of those who wait, and another look at the lines."""
        effects = self.pump_all(now)
        overdue: list[Ask] = []
        for place_in_line, ask in self.holds.in_line():
            if now >= ask.expires:
                overdue.append(ask)
            elif now >= ask.say_held_at:
                effects.append(self._say_held(ask, now, place_in_line))
        effects += [self._give_up(ask, "hold_deadline", 503) for ask in overdue]
        return effects

    def settle(self, now: float) -> list[Effect]:
        """Whatever an event has left to do, when it is taken in."""
        del now
        return []

    # Inside

    def _deadline(self, request: AdmitRequest, now: float) -> float:
        longest = now + self._state.settings.hold_deadline_s
        return min(longest, request.deadline_ms / 1000) if request.deadline_ms else longest

    def _same_grant(self, request: AdmitRequest, record: RequestRecord, entry: OpenGrant) -> Granted | None:
        """The answer of before, unless another attempt asks, or the granted worker cannot be used (B1)."""
        worker = self._state.fleet.get(entry.grant.worker)
        if entry.attempt != request.attempt or record.mode == "fallback" or worker is None or not worker.placeable:
            return None
        if entry.grant.worker in request.excluded:
            return None
        return granted_reply(self._facts.epoch, entry.grant, worker, record)

    @property
    def _facts(self) -> FactWriter:
        facts = self._state.facts
        if facts is None:
            raise RuntimeError("a standby decides nothing")
        return facts

    def _line_up(self, ask: Ask, now: float) -> None:
        ask.stage = Stage.HELD
        ask.held_since = now
        ask.say_held_at = now + self._state.settings.hold_keepalive_s
        self.holds.add(ask)

    def _free(self, workers: list[Worker], model: str, wanted: int) -> int:
        """Free places, counted no further than ``wanted``."""
        taken = self._open_by_model[model]
        return self._room(workers, wanted + taken) - taken

    def _room(self, workers: list[Worker], wanted: int = 1) -> int:
        limit, account = self._state.settings.max_grants_per_rank, self._state.ledger.account
        room = 0
        for worker in workers:
            for name, rank in worker.seats:
                room += max(0, limit - account(name, rank).requests)
                if room >= wanted:
                    return room
        return room

    def _say_held(self, ask: Ask, now: float, place_in_line: int | None = None) -> Reply:
        ask.say_held_at = now + self._state.settings.hold_keepalive_s
        reason = ask.hold_reason or "session_order"
        self._state.counters.held[reason] += 1
        place_now = self.holds.place(ask) if place_in_line is None else place_in_line
        held = Held(request_id=ask.request.request_id, epoch=self._facts.epoch, reason=reason, place=place_now)
        return Reply(ask.reply_to, held)

    def _refuse(self, request: AdmitRequest, reply_to: str, reason: str, status: int = 503) -> Reply:
        self._state.counters.refused[reason] += 1
        retry = self._state.settings.retry_after_s if status in (429, 503) else None
        refused = Refused(
            request_id=request.request_id, epoch=self._facts.epoch, reason=reason, status=status, retry_after_s=retry
        )
        return Reply(reply_to, refused)

    def refuse(self, request: AdmitRequest, reply_to: str, reason: str) -> Reply:
        """Refuse what is not even an ask (its request is over)."""
        return self._refuse(request, reply_to, reason)

    def _give_up(self, ask: Ask, reason: str, status: int) -> Reply:
        self._drop(ask)
        return self._refuse(ask.request, ask.reply_to, reason, status)

    def _nobody_serves(self, ask: Ask) -> Reply:
        fleet = self._state.fleet
        if fleet.models_seen and not fleet.known(ask.request.model):
            return self._give_up(ask, "unknown_model", 404)
        return self._give_up(ask, "no_worker", 503)

    def _drop(self, ask: Ask) -> None:
        """It is not answered, or was refused."""
        self._take_out(ask)

    def _take_out(self, ask: Ask) -> None:
        del self._asks[ask.request.request_id]
        if ask.stage is Stage.HELD:
            self.holds.remove(ask)
        else:
            self._close(ask)

    def _close(self, ask: Ask) -> None:
        """No question about it is open any more."""
        del self._open[ask.ticket]
        self._open_by_model[ask.request.model] -= 1
        self._open_sessions.discard(ask.request.identity.key)

    def _question(self, ask: Ask, stage: Stage) -> int:
        """Number the question that is open about this ask from now on."""
        self._tickets += 1
        if ask.stage is Stage.HELD:
            self._open_by_model[ask.request.model] += 1
            self._open_sessions.add(ask.request.identity.key)
        else:
            del self._open[ask.ticket]
        ask.stage, ask.ticket = stage, self._tickets
        self._open[ask.ticket] = ask
        return ask.ticket

    def _begin(self, ask: Ask, now: float) -> list[Effect]:
        """Out of the line, and on to the index."""
        self.holds.remove(ask)
        if ask.held_since is not None:
            ask.held_s += now - ask.held_since
            ask.held_since = None
        return self._ask_index(ask, now)

    def _ask_index(self, ask: Ask, now: float) -> list[Effect]:
        ask.started_at = now
        ticket = self._question(ask, Stage.INDEX)
        request = ask.request
        if not request.chain or request.block_size <= 0:
            self._state.counters.index["no_chain"] += 1
            return self._scored(ask, IndexView.blind("no_chain"), now)
        salt_rule = self._state.fleet.salt_rule(request.model)
        question = MatchRequest(
            model=request.model,
            block_size=request.block_size,
            chain=request.chain,
            unit=request.chain_unit,
        )
        if salt_rule is not None:
            question = msgspec.structs.replace(question, salt_rule=salt_rule)
        return [AskIndex(ticket, question, self._state.settings.index_deadline_ms)]

    def _index_known(self, ticket: int, index: IndexView, now: float) -> list[Effect]:
        ask = self._open.get(ticket)
        if ask is None or ask.stage is not Stage.INDEX:
            return []
        effects = self._scored(ask, index, now)
        return effects + self.pump(ask.request.model, now)

    def _scored(self, ask: Ask, index: IndexView, now: float) -> list[Effect]:
        ask.index = index
        settings = self._state.settings
        if not settings.route_policy:
            return self._commit(ask, self._place(ask, now), None, now)
        placement = self._place(ask, now)
        if placement.choice is None:
            return self._commit(ask, placement, None, now)
        request = ask.request
        question = RouteQuestion(
            request_id=request.request_id,
            model=request.model,
            identity=request.identity,
            candidates=placement.candidates(),
            choice=placement.choice,
            deadline_ms=int(now * 1000) + settings.route_policy_deadline_ms,
            kind=request.kind,
            input_tokens=request.input_tokens,
            previous_worker=self._previous_worker(request),
        )
        ticket = self._question(ask, Stage.POLICY)
        return [AskPolicy(ticket, settings.route_policy, question, settings.route_policy_deadline_ms)]

    def _settle(self, ask: Ask, now: float, answer: RouteAnswer | None, why_builtin: str) -> list[Effect]:
        """Grant by the policy's answer if it names a rank that can still be used, else by our own choice."""
        placement = self._place(ask, now)
        counters, followed = self._state.counters.policy, None
        if answer is None:
            counters[why_builtin] += 1
        else:
            choice = _follow(answer, placement)
            if choice is None:
                counters["unusable"] += 1
            else:
                counters["used"] += 1
                followed = self._state.settings.route_policy
                placement = replace(placement, choice=choice)
        return self._commit(ask, placement, followed, now) + self.pump(ask.request.model, now)

    def _block_size(self, request: AdmitRequest) -> int:
        """Tokens a block: of the chain of tokens, else of a worker's, so that costs are in blocks of the same size."""
        if request.block_size > 0 and request.chain_unit == "tokens":
            return request.block_size
        for worker in self._state.fleet.serving(request.model):
            if worker.state.profile.block_size:
                return worker.state.profile.block_size
        return DEFAULT_BLOCK_SIZE

    def _place(self, ask: Ask, now: float) -> Placement:
        """The built-in choice, by what is known at this moment."""
        state, request = self._state, ask.request
        prompt = Prompt(request.input_tokens, self._block_size(request))
        return place(
            state.fleet.serving(request.model),
            state.ledger,
            prompt,
            ask.index or IndexView.blind("not_asked"),
            weights=state.settings.weights,
            max_grants_per_rank=state.settings.max_grants_per_rank,
            choose=state.choose,
            preference=self._preference(request, prompt, now),
            excluded=request.excluded,
        )

    def _previous_worker(self, request: AdmitRequest) -> str | None:
        if request.kind not in MOVES_SESSION:
            return None
        session = self._state.sessions.get(request.identity.key)
        return session.worker if session is not None else None

    def _preference(self, request: AdmitRequest, prompt: Prompt, now: float) -> Preference:
        if request.kind not in MOVES_SESSION:
            return NO_PREFERENCE
        settings, sessions = self._state.settings, self._state.sessions
        session = sessions.get(request.identity.key)
        if session is not None and session.worker is not None:
            kept = min(session.context_tokens, request.input_tokens) // prompt.block_size
            fresh = now - session.touched <= EVENT_LAG_S
            return Preference(session.worker, session.rank, settings.stickiness, kept, fresh)
        if session is None and request.identity.parent is not None:
            parent = sessions.get(request.identity.parent)
            if parent is not None and parent.worker is not None:
                return Preference(parent.worker, parent.rank, settings.child_stickiness)
        return NO_PREFERENCE

    def _commit(self, ask: Ask, placement: Placement, policy: str | None, now: float) -> list[Effect]:
        """Grant, or (when what was free is not any more) back into the line, or refuse."""
        if placement.choice is None:
            if placement.reason != "at_limit":
                return [self._give_up(ask, "no_worker", 503)]
            self._close(ask)
            ask.hold_reason = "at_limit"
            self._line_up(ask, now)
            return [self._say_held(ask, now)]
        self._take_out(ask)
        state, request, chosen = self._state, ask.request, placement.chosen
        record = state.requests.get(request.request_id)
        worker = state.fleet.get(chosen.worker)
        if record is None or worker is None:
            raise RuntimeError(f"granted {request.request_id}, which is over, or on a worker that is gone")
        size = self._block_size(request)
        predicted = predicted_cached_tokens(chosen.blocks.reach, request.input_tokens, size)
        expires = now + state.settings.grant_ttl_s
        self._grants += 1
        grant = Grant(
            grant_id=f"{self._facts.epoch}-{self._grants}",
            request_id=request.request_id,
            worker=chosen.worker,
            rank=chosen.rank,
            owner=request.ingress,
            epoch=self._facts.epoch,
            expires_ms=int(expires * 1000),
        )
        prefill = booked_prefill_tokens(state.settings.weights, chosen.blocks, request.input_tokens, size)
        blocks = request.input_tokens // size
        state.ledger.open(OpenGrant(grant, request.attempt, prefill, blocks, expires))
        decision = self._facts.decision(
            ask,
            placement,
            grant,
            policy=policy,
            builtin=ask.builtin,
            block_size=size,
            predicted_cached_tokens=predicted,
            previous_worker=self._previous_worker(request),
            now=now,
        )
        self._count(decision)
        placed(record, decision)
        told = state.turn_placed(record, now)
        reply = Reply(ask.reply_to, granted_reply(self._facts.epoch, grant, worker, record))
        indexed = ask.index.indexed(chosen) if ask.index is not None else None
        return [
            reply,
            PublishDecision(decision, placement),
            Publish(self._facts.placed(request, decision, indexed, now)),
            *told,
        ]

    def _count(self, decision: Decision) -> None:
        counters = self._state.counters
        counters.grants[decision.mode] += 1
        counters.predicted_cached_tokens += decision.predicted_cached_tokens
        counters.input_tokens += decision.input_tokens
        if decision.previous_worker is not None:
            counters.sticky["kept" if decision.previous_worker == decision.worker else "moved"] += 1


def placed(record: RequestRecord, decision: Decision) -> None:
    """The record of a request that ``decision`` placed."""
    record.worker, record.rank = decision.worker, decision.rank
    record.grant_id, record.mode = decision.grant.grant_id, decision.mode
    record.attempt = decision.attempt
    record.predicted_cached_tokens = decision.predicted_cached_tokens
    record.input_tokens = decision.input_tokens or record.input_tokens
    record.decision = decision


def _follow(answer: RouteAnswer, placement: Placement) -> int | None:
    """The candidate that the policy means: the cheapest usable rank of its worker, or the rank it names."""
    usable = [
        (seat.cost, place_in_list)
        for place_in_list, seat in enumerate(placement.seats)
        if seat.excluded is None and seat.worker == answer.worker and answer.rank in (None, seat.rank)
    ]
    return min(usable)[1] if usable else None
