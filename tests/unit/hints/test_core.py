"""Leadership, envelopes, results: the hints service without its bus."""

from __future__ import annotations

from typing import Any

import msgspec

from bus.facts import FactNumbers
from schemas.hint import MAX_TTL_MS, ActionResult, HintAction, HintCommand, HintOutcome, HintResult
from services.hints.config import HintsSettings
from services.hints.core import Core
from services.hints.effects import SendHint
from services.hints.events import Answered, Commanded, Event, LeadershipChanged, SessionChanged, Tick
from services.hints.gate import MOST_KEPT
from services.hints.wishes import Place
from tests.unit.hints.support import START, key, session, worker


class Running:
    """A core with a clock."""

    def __init__(self, name: str = "hints-1", **settings: Any) -> None:
        self.core = Core(HintsSettings(ask_sessions=False, **settings), name)
        self.now = START
        self.numbers = FactNumbers("bridge-a", 1)
        self.do(worker("a", "tier:host"), worker("b", "tier:host"))

    def do(self, *events: Event) -> list[HintCommand]:
        effects = [effect for event in events for effect in self.core.handle(event, self.now)]
        return [effect.command for effect in effects if isinstance(effect, SendHint)]

    def result(self, command: HintCommand, *outcomes: HintOutcome) -> Answered:
        results = tuple(
            ActionResult(action_id=action.action_id, action_type=action.action_type, outcome=outcome)
            for action, outcome in zip(command.envelope.actions, outcomes, strict=False)
        )
        return Answered(
            HintResult(
                **self.numbers.stamp("hint.result", self.now),
                worker=command.worker,
                rank=0,
                session=command.session,
                message_id=command.envelope.message_id,
                results=results,
            )
        )


def acts(command: HintCommand) -> list[str]:
    return [action.action_type for action in command.envelope.actions]


def test_actions_of_one_moment_for_one_session_and_rank_share_an_envelope() -> None:
    """A real envelope: protocol version, unique ids, the payload's fields as they are named; numbered as facts."""
    running = Running()
    running.do(LeadershipChanged(5))
    (retain,) = running.do(session("s", "acting"))
    (pin,) = running.do(session("s", "leased", lease_until=START + 50))
    running.do(running.result(retain, "accepted"), running.result(pin, "accepted"))
    (both,) = running.do(session("s", "revoked"))
    assert acts(both) == ["dereference", "demote"]
    assert [(each.source, each.epoch, each.seq) for each in (retain, pin, both)] == [
        ("hints-1", 5, number) for number in range(3)
    ]
    action = retain.envelope.actions[0]
    assert (retain.envelope.protocol_version, action.action_version) == ("0.1", "1.0")
    assert action.payload == {
        "target": {"session_id": "s", "session": key("s").text()},
        "expires_ms": int((START + 5) * 1000),
        "ttl_ms": 120_000,
        "priority": 4,
    }
    ids = [each.action_id for command in (retain, pin, both) for each in command.envelope.actions]
    assert len({*ids, *(command.envelope.message_id for command in (retain, pin, both))}) == 7


def test_what_an_envelope_has_no_result_for_was_rejected() -> None:
    """Each action ends once: by its own result, or as unreadable. A result of another worker ends nothing."""
    running = Running()
    running.do(LeadershipChanged(5))
    (retain,) = running.do(session("s", "acting"))
    (pin,) = running.do(session("s", "leased", lease_until=START + 50))
    running.do(running.result(retain, "accepted"), running.result(pin, "accepted"))
    (both,) = running.do(session("s", "revoked"))
    running.do(running.result(msgspec.structs.replace(both, worker="b"), "accepted", "accepted"))
    running.do(running.result(both, "missing"))
    outcomes = running.core.planner.gate.outcomes
    assert running.core.planner.unknown_results == 2
    assert (outcomes["dereference", "missing", "simulated"], outcomes["demote", "rejected", "simulated"]) == (1, 1)
    (again,) = running.do(session("t", "acting"))
    running.do(running.result(again))
    assert outcomes["retain", "rejected", "simulated"] == 1
    assert running.core.planner.gate.retained.of("a") == 1


def test_a_command_that_could_not_be_sent_weighs_nothing() -> None:
    running = Running()
    running.do(LeadershipChanged(5))
    (retain,) = running.do(session("s", "acting"))
    running.core.not_sent(retain, running.now)
    assert len(running.core.planner.gate.flights) == 0
    assert running.core.planner.gate.outcomes == {("retain", "unsent", "simulated"): 1}


def test_a_standby_sends_nothing_and_knows_what_its_leader_has_sent() -> None:
    """After taking over it is within the same budgets, takes the leader's results, renews its pins and lets go of what
    it kept; with ids of its own."""
    leader, standby = Running("hints-1"), Running("hints-2")
    leader.do(LeadershipChanged(5))
    lease = session("s", "leased", tokens=2000, lease_until=START + 500)
    for event in (session("s", "acting"), lease):
        assert standby.do(event) == []
        for command in leader.do(event):
            leader.do(Commanded(command))  # its own: nothing new
            standby.do(Commanded(command))
            answer = leader.result(command, "accepted")
            leader.do(answer)
            standby.do(answer)
    assert standby.core.planner.gate.pins.seats() == leader.core.planner.gate.pins.seats() == {("a", 0): 2000}
    assert standby.core.planner.gate.outcomes == {}, "counted by the one who leads"
    standby.do(LeadershipChanged(9))
    (unpin,) = standby.do(session("s", "revoked"))
    assert unpin.envelope.actions[0].payload["reason"] == "unpinned"
    assert standby.do(session("s", "closed")) == [], "one of a kind is under way"
    (close,) = standby.do(standby.result(unpin, "accepted", "accepted"))
    assert (close.worker, close.source, close.epoch) == ("a", "hints-2", 9)
    assert close.envelope.message_id == "hints-2-9-2"
    assert close.envelope.actions[0].payload["reason"] == "closed"
    standby.do(LeadershipChanged(None))
    assert standby.do(session("t", "acting")) == []


def test_a_hint_names_its_session_as_its_engine_knows_it() -> None:
    """Two tenants' sessions of one id are two to an engine."""
    running = Running()
    running.do(LeadershipChanged(5))
    fact = session("s", "acting").fact
    theirs = msgspec.structs.replace(fact.session, tenant="b")
    (command,) = running.do(SessionChanged(msgspec.structs.replace(fact, session=theirs)))
    target = command.envelope.actions[0].payload["target"]
    assert (target["session_id"], target["session"], command.session_id) == ("b/s", theirs.text(), "s")


def test_what_others_say_was_sent_ends_and_is_bounded() -> None:
    """Anybody on the bus may say so: no pin weighs longer than a pin may last, nor more than a planner would keep."""
    standby = Running("hints-2", max_sessions=2)
    forged = pin_of("other", 1)
    action = forged.envelope.actions[0]
    for_ever = msgspec.structs.replace(action, payload={**action.payload, "ttl_ms": 1 << 40})
    standby.do(Commanded(envelope_of(forged, for_ever)))
    pins = standby.core.planner.gate.pins
    assert pins.of(Place("a", 0)) == 500
    standby.now += MAX_TTL_MS / 1000
    standby.do(Tick())
    assert pins.of(Place("a", 0)) == 0
    for number in range(2 * MOST_KEPT + 20):
        standby.do(Commanded(pin_of("other", number)))
    assert len(pins) == 2 * MOST_KEPT


def test_a_lead_that_comes_and_goes_renews_once() -> None:
    """What is to be done later is found anew with each lead."""
    running = Running()
    running.do(LeadershipChanged(5))
    for event in (session("s", "acting"), session("s", "leased", lease_until=START + 500)):
        for command in running.do(event):
            running.do(running.result(command, "accepted"))
    for epoch in (6, 7, 8):
        running.do(LeadershipChanged(None), LeadershipChanged(epoch))
    pins = 0
    for _ in range(60):
        running.now += 1.0
        commands = running.do(Tick())
        pins += sum(acts(command) == ["pin"] for command in commands)
        for command in commands:
            assert running.do(running.result(command, "accepted")) == []
    assert pins == 2, "one now, one when three quarters of its time are over"


def pin_of(source: str, number: int) -> HintCommand:
    """A pin of 500 tokens at ``a``, as another planner sends it."""
    other = Running(source)
    other.do(LeadershipChanged(3))
    for command in other.do(session(f"s{number}", "acting")):
        other.do(other.result(command, "accepted"))
    (pin,) = other.do(session(f"s{number}", "leased", tokens=500, lease_until=START + 10_000))
    (action,) = pin.envelope.actions
    return envelope_of(pin, msgspec.structs.replace(action, action_id=f"{source}-{number}"))


def envelope_of(command: HintCommand, action: HintAction) -> HintCommand:
    envelope = msgspec.structs.replace(command.envelope, actions=(action,))
    return msgspec.structs.replace(command, envelope=envelope)
