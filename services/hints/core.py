"""The hints service without I/O: a `planner.Planner`, leadership, and envelopes. ``handle(event, now) -> effects``.

Leader and standby follow the same facts, and the standby the leader's commands as well; only the leader sends. Actions
of one moment for one session at one rank travel in one envelope.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from bus.facts import FactNumbers
from schemas.hint import ActionPayload, ActionResult, HintAction, HintCommand, HintEnvelope, HintResult
from services.hints.config import HintsSettings
from services.hints.effects import Effect, PlannedHint, PlannerEffect, SendHint
from services.hints.events import ActionAnswered, Answered, Commanded, Event, LeadershipChanged, NotSent
from services.hints.in_flight import MAX_IN_FLIGHT
from services.hints.planner import Planner


class Core:
    """``instance`` names us in facts and message ids."""

    def __init__(self, settings: HintsSettings, instance: str) -> None:
        self._instance = instance
        self._numbers: FactNumbers | None = None
        self._messages = 0
        self._actions: OrderedDict[str, tuple[str, tuple[str, ...]]] = OrderedDict()
        """(worker, actions) by message, of those that may still be answered."""
        self.unreadable = 0
        self.planner = Planner(settings)
        self.planner.follow()

    @property
    def leading(self) -> bool:
        return self._numbers is not None

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take in one event; ``now`` is Unix seconds."""
        match event:
            case LeadershipChanged(epoch):
                self._lead(epoch, now)
                return []
            case Commanded(command):
                self._commanded(command, now)
                return []
            case Answered(result):
                return self._answered(result, now)
            case _:
                return self._wrap(self.planner.handle(event, now), now)

    def _lead(self, epoch: int | None, now: float) -> None:
        if epoch is None:
            self._numbers = None
            self.planner.follow()
            return
        self._numbers, self._messages = FactNumbers(self._instance, epoch), 0
        self.planner.lead(f"{self._instance}-{epoch}-a", now)

    def _commanded(self, command: HintCommand, now: float) -> None:
        """What another planner sent. One that cannot be read is its worker's to complain about."""
        if self._numbers is not None and (command.source, command.epoch) == (self._instance, self._numbers.epoch):
            return
        for action in command.envelope.actions:
            try:
                payload = msgspec.convert(action.payload, ActionPayload)
            except msgspec.ValidationError:
                self.unreadable += 1
                continue
            hint = PlannedHint(
                command.worker,
                command.rank,
                command.session,
                command.session_id,
                action.action_id,
                action.action_type,
                payload,
            )
            self.planner.observe(hint, now)
        self._remember(
            command.envelope.message_id, command.worker, tuple(each.action_id for each in command.envelope.actions)
        )

    def _answered(self, result: HintResult, now: float) -> list[Effect]:
        """Each action of an envelope has a result, or could not be read: then it was rejected."""
        worker, actions = self._actions.get(result.message_id, (result.worker, ()))
        if worker == result.worker:
            self._actions.pop(result.message_id, None)
        effects: list[PlannerEffect] = []
        told = set()
        for each in result.results:
            told.add(each.action_id)
            effects += self.planner.handle(ActionAnswered(result.worker, each), now)
        for action_id in actions if worker == result.worker else ():
            flight = self.planner.gate.flights.get(action_id)
            if action_id not in told and flight is not None:
                answer = ActionResult(
                    action_id=action_id, action_type=flight.action_type, outcome="rejected", reason="unreadable"
                )
                effects += self.planner.handle(ActionAnswered(worker, answer), now)
        return self._wrap(effects, now)

    def _remember(self, message_id: str, worker: str, actions: tuple[str, ...]) -> None:
        self._actions[message_id] = (worker, actions)
        while len(self._actions) > MAX_IN_FLIGHT:
            self._actions.popitem(last=False)

    def _wrap(self, effects: list[PlannerEffect], now: float) -> list[Effect]:
        """Hints as commands, one for each session and place."""
        wrapped: list[Effect] = []
        together: dict[tuple[str, int, str], list[PlannedHint]] = {}
        for effect in effects:
            if isinstance(effect, PlannedHint):
                together.setdefault((effect.worker, effect.rank, effect.session.text()), []).append(effect)
            else:
                wrapped.append(effect)
        return [SendHint(self._command(hints, now)) for hints in together.values()] + wrapped

    def _command(self, hints: list[PlannedHint], now: float) -> HintCommand:
        assert self._numbers is not None  # nothing is planned otherwise
        self._messages += 1
        message_id = f"{self._instance}-{self._numbers.epoch}-{self._messages}"
        self._remember(message_id, hints[0].worker, tuple(hint.action_id for hint in hints))
        return HintCommand(
            **self._numbers.stamp("hint", now),
            worker=hints[0].worker,
            rank=hints[0].rank,
            session=hints[0].session,
            session_id=hints[0].session_id,
            envelope=HintEnvelope(
                message_id=message_id,
                actions=tuple(
                    HintAction(
                        action_id=hint.action_id,
                        action_type=hint.action_type,
                        payload=msgspec.to_builtins(hint.payload),
                    )
                    for hint in hints
                ),
            ),
        )

    def not_sent(self, command: HintCommand, now: float) -> list[Effect]:
        """The command could not be published."""
        self._actions.pop(command.envelope.message_id, None)
        effects: list[PlannerEffect] = []
        for action in command.envelope.actions:
            effects += self.planner.handle(NotSent(action.action_id), now)
        return self._wrap(effects, now)
