"""The hint planner: what is asked of which worker, within its budget, and what became of it."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.admit import Grant
from schemas.decision import Decision
from schemas.hint import ActionResult, HintCommand, HintOutcome, HintResult
from schemas.session import Family, RequestKind, SessionFact, SessionIdentity, SessionKey
from services.hints.config import HintsSettings
from services.hints.core import Core
from services.hints.events import Answered, Decided, Event, LeadershipChanged, SessionChanged, Tick


def key(name: str, family: Family = "dynamo") -> SessionKey:
    return SessionKey(family=family, root=name)


def session(name: str, state: Any, worker: str | None = "a", *, family: Family = "dynamo") -> SessionChanged:
    fact = SessionFact(
        source="admission-1", epoch=1, seq=0, at_ms=0, session=key(name, family), session_id=name, state=state,
        worker=worker, rank=0,
    )  # fmt: skip
    return SessionChanged(fact)


def decided(name: str, worker: str, *, kind: RequestKind = "turn") -> Decided:
    grant = Grant(grant_id="g", request_id="r", worker=worker, rank=0, owner="i", epoch=1, expires_ms=0)
    decision = Decision(
        source="admission-1", epoch=1, seq=0, at_ms=0, request_id="r", model="m", worker=worker, rank=0,
        identity=SessionIdentity(key=key(name), session_id=name), grant=grant, kind=kind,
    )  # fmt: skip
    return Decided(decision)


def result(command: HintCommand, outcome: HintOutcome) -> Answered:
    action = command.envelope.actions[0]
    answer = HintResult(
        source="bridge-a", epoch=1, seq=0, at_ms=0, worker=command.worker, rank=0, session=command.session,
        message_id=command.envelope.message_id,
        results=(ActionResult(action_id=action.action_id, action_type=action.action_type, outcome=outcome),),
    )  # fmt: skip
    return Answered(answer)


class Planner:
    """A leading core with a clock."""

    def __init__(self, *, lead: bool = True, **settings: Any) -> None:
        self.core = Core(HintsSettings(**settings), "hints-1")
        self.now = 1000.0
        if lead:
            self.do(LeadershipChanged(5))

    def do(self, event: Event) -> list[HintCommand]:
        return [effect.command for effect in self.core.handle(event, self.now)]


def actions(commands: list[HintCommand]) -> list[tuple[str, str, str]]:
    return [(each.worker, each.session_id, each.envelope.actions[0].action_type) for each in commands]


def test_the_end_of_a_turn_retains_and_the_close_lets_go() -> None:
    """A real envelope: protocol version, unique ids, the session's id, priority and time to live; numbered as facts."""
    planner = Planner(retain_ttl_s=30.0, retain_priority=7)
    (retain,) = planner.do(session("s", "acting"))
    action = retain.envelope.actions[0]
    assert (retain.worker, retain.rank, retain.session, retain.session_id) == ("a", 0, key("s"), "s")
    assert (retain.source, retain.epoch, retain.seq) == ("hints-1", 5, 0)
    assert (retain.envelope.protocol_version, action.action_type, action.action_version) == ("0.1", "retain", "1.0")
    assert action.payload == {"session_id": "s", "session": key("s").text(), "priority": 7, "ttl_ms": 30_000}
    (close,) = planner.do(session("s", "closed"))
    assert close.envelope.actions[0].action_type == "dereference"
    assert close.seq == 1
    ids = {each.envelope.message_id for each in (retain, close)} | {
        each.envelope.actions[0].action_id for each in (retain, close)
    }
    assert len(ids) == 4


def test_a_session_that_moves_is_let_go_where_it_was() -> None:
    """A turn elsewhere makes the kept prefix useless; a turn on the same worker, or a side request, does not."""
    planner = Planner()
    planner.do(session("s", "acting", "a"))
    assert planner.do(decided("s", "a")) == []
    assert planner.do(decided("s", "b", kind="title")) == []
    assert actions(planner.do(decided("s", "b"))) == [("a", "s", "dereference")]
    assert actions(planner.do(session("s", "acting", "b"))) == [("b", "s", "retain")]
    assert actions(planner.do(session("s", "acting", "c"))) == [("b", "s", "dereference"), ("c", "s", "retain")]
    assert planner.core.retained.workers() == {"c": 1}


def test_what_never_ran_or_has_no_identity_gets_no_hint() -> None:
    """No worker, nobody to ask; an anonymous request leaves nothing worth keeping or dropping."""
    planner = Planner()
    assert planner.do(session("s", "acting", None)) == []
    assert planner.do(session("s", "closed", None)) == []
    assert planner.do(session("r", "closed", "a", family="request")) == []
    assert planner.do(session("s", "opened")) == []


def test_a_worker_is_never_asked_beyond_its_budget() -> None:
    """The third session is not asked for and counted; a close, the time to live, or a refusal makes room."""
    planner = Planner(max_retained_per_worker=2, retain_ttl_s=10.0)
    first = planner.do(session("s1", "acting"))
    planner.do(session("s2", "acting"))
    assert planner.do(session("s3", "acting")) == []
    assert planner.core.not_sent == {"over_budget": 1}
    assert actions(planner.do(session("s3", "acting", "b"))) == [("b", "s3", "retain")]
    assert len(planner.do(session("s1", "acting"))) == 1  # again, for longer: no more weight
    planner.do(session("s2", "closed"))
    assert len(planner.do(session("s4", "acting"))) == 1
    planner.do(result(first[0], "unsupported"))
    assert planner.core.retained.on("a") == 1
    assert len(planner.do(session("s5", "acting"))) == 1
    planner.now += 10.0
    planner.do(Tick())
    assert planner.core.retained.workers() == {}


@pytest.mark.parametrize("outcome", ["accepted", "clipped", "deferred", "rejected", "missing", "unsupported"])
def test_results_are_counted_and_remembered_by_outcome(outcome: HintOutcome) -> None:
    """Each envelope is answered once; a second answer, or one to nobody's envelope, is counted apart."""
    planner = Planner()
    (retain,) = planner.do(session("s", "acting"))
    planner.do(result(retain, outcome))
    assert planner.core.outcomes.outcomes == {("retain", outcome): 1}
    assert planner.core.outcomes.last == {("a", "retain"): outcome}
    assert (planner.core.retained.get(key("s")) is not None) == (outcome in ("accepted", "clipped", "deferred"))
    planner.do(result(retain, outcome))
    assert planner.core.outcomes.unknown_results == 1


def test_an_envelope_without_an_answer_is_given_up_at_its_deadline() -> None:
    """Soft: nothing waits for it, but it is counted."""
    planner = Planner(result_deadline_s=3.0)
    planner.do(session("s", "acting"))
    planner.now += 2.0
    planner.do(Tick())
    assert planner.core.outcomes.under_way == 1
    planner.now += 1.0
    planner.do(Tick())
    assert planner.core.outcomes.under_way == 0
    assert planner.core.outcomes.outcomes == {("retain", "unanswered"): 1}


def test_a_standby_sends_nothing_and_knows_what_is_retained() -> None:
    """After taking over it lets go of what the old leader asked to retain, with ids of its own epoch."""
    planner = Planner(lead=False)
    assert planner.do(session("s", "acting")) == []
    planner.do(LeadershipChanged(9))
    (close,) = planner.do(session("s", "closed"))
    assert close.worker == "a"
    assert close.envelope.message_id == "hints-1-9-1"
    planner.do(LeadershipChanged(None))
    assert planner.do(session("t", "acting")) == []
