"""``session.paused`` and ``session.resumed``: who is told to be paused, where to, and that every pause ends once."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from schemas.admit import Granted
from schemas.decision import Decision
from schemas.session import SessionFact
from services.admission.config import AdmissionSettings
from services.admission.core import Core
from services.admission.effects import Effect, PublishDecision
from services.admission.events import LeadershipChanged, PauseHeard, WorkerStated
from services.admission.scheduling.interface import Actions, Admission, Base, PauseChange, TurnFacts, TurnUsage
from tests.unit.admission.build import (
    START,
    ask,
    driven,
    end,
    facts,
    granted,
    held,
    identity,
    in_flight,
    refused,
    replies,
    worker_state,
)
from tests.unit.admission.pair import Pair, choose
from tests.unit.admission.test_scheduled import done
from tests.unit.admission.words import SessionWords


class Valve(Base):
    """Lets turns run while it is open, and pauses and resumes as it is told: a policy for tests."""

    tick_s: float | None = 0.05

    def __init__(self) -> None:
        self.is_open = True
        self.waiting: dict[int, TurnFacts] = {}
        self.paused: dict[str, int] = {}
        self.changes: list[PauseChange] = []
        self.seats: dict[int, None] = {}
        self.has_order = True

    def worker_changed(self, now: float, seat: int, facts: object) -> Actions:
        self.seats.pop(seat, None)
        if facts is not None:
            self.seats[seat] = None
        return ()

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if self.is_open:
            return [Admission(turn.turn, next(iter(self.seats)))]
        self.waiting[turn.turn] = turn
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        return ()

    def turn_aborted(self, now: float, turn: int) -> Actions:
        self.waiting.pop(turn, None)
        return ()

    def program_closed(self, now: float, program: str) -> Actions:
        return [PauseChange(program, None, "resumed")] if self.paused.pop(program, None) is not None else ()

    def tick(self, now: float) -> Actions:
        changes, self.changes = self.changes, []
        let: list[TurnFacts] = []
        if self.is_open:
            let, self.waiting = list(self.waiting.values()), {}
        return [*changes, *(Admission(turn.turn, next(iter(self.seats))) for turn in let)]

    def place(self, turn: int) -> int | None:
        return list(self.waiting).index(turn) if self.has_order else None


class Room:
    """A leader with policy `Valve`, one worker, and sessions that have had a turn each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sessions: str, workers: tuple[str, ...] = ("a",), **more: Any):
        self.valve = Valve()
        monkeypatch.setattr("services.admission.driving.make_policy", lambda *_: self.valve)
        self.core = driven(policy="concur", hold_deadline_s=3600.0, **more)
        self.words = SessionWords()
        self.heard = 0
        for worker in workers:
            self.core.do(WorkerStated(worker_state(worker)))
        for session in sessions:
            granted(self.core.ask(ask(f"{session}-0", session, tokens=1_000)))
            done(self.core, f"{session}-0", session, 1_000)
        self.told()

    def told(self) -> list[tuple[str, str, str | None, str | None]]:
        """(state, session, worker, reason) of what was told of pauses since the last time."""
        effects = self.core.said[self.heard :]
        self.heard = len(self.core.said)
        self.words.hear(effects)
        told = [fact for fact in facts(effects, SessionFact) if fact.state in ("paused", "resumed")]
        return [(fact.state, fact.session.root, fact.worker, fact.reason) for fact in told]

    def wait(self, seconds: float) -> list[tuple[str, str, str | None, str | None]]:
        self.core.wait(seconds, ingresses=("ingress-1",))
        return self.told()

    def policy_says(
        self, session: str, state: Any, seat: int | None = 0
    ) -> list[tuple[str, str, str | None, str | None]]:
        program = identity(session).key.text()
        self.valve.changes.append(PauseChange(program, seat, state))
        if state == "paused":
            self.valve.paused[program] = 0
        else:
            self.valve.paused.pop(program, None)
        return self.wait(0.2)


def test_a_session_whose_turn_is_held_is_paused_after_a_while_and_resumed_with_its_grant(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room(monkeypatch, "s")
    room.valve.is_open = False
    assert held(room.core.ask(ask("s-1", "s", tokens=1_100)))
    assert room.wait(0.8) == []
    room.core.wait(0.4, ingresses=("ingress-1",))
    (fact,) = [each for each in facts(room.core.said, SessionFact) if each.state == "paused"]
    assert (fact.worker, fact.rank, fact.context_tokens, fact.turns, fact.reason) == ("a", 0, 1_050, 1, "policy")
    assert 1.0 <= fact.numbers["held_s"] <= 1.2
    assert (fact.numbers["place"], fact.numbers["in_line"]) == (1, 1)
    assert room.told() == [("paused", "s", "a", "policy")]
    assert room.wait(3.0) == []
    assert room.core.core.state.sessions.states()["paused"] == 1
    room.valve.is_open = True
    assert room.wait(0.3) == [("resumed", "s", "a", "granted")]
    assert not room.words.paused


def test_it_is_resumed_before_its_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hint planner takes a decision for the beginning of the turn: a resume after it would undo that."""
    room = Room(monkeypatch, "s", paused_after_s=0.0)
    room.valve.is_open = False
    room.core.ask(ask("s-1", "s", tokens=1_100))
    room.valve.is_open = True
    effects = room.core.wait(0.3)
    kinds = [type(each) for each in facts(effects, Decision | SessionFact)]  # type: ignore[arg-type]
    assert kinds == [SessionFact, Decision]


def test_without_a_delay_it_is_paused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s", paused_after_s=0.0)
    room.valve.is_open = False
    room.core.ask(ask("s-1", "s", tokens=1_100))
    assert room.told() == [("paused", "s", "a", "policy")]


@pytest.mark.parametrize("what", ["first turn", "side request", "worker lost", "turn runs"])
def test_what_has_no_kv_to_move_is_not_paused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    room = Room(monkeypatch, "s", workers=("b", "a") if what == "worker lost" else ("a",))
    if what == "turn runs":
        room.core.ask(ask("s-1", "s", tokens=1_100))
    if what == "worker lost":
        room.core.do(WorkerStated(worker_state("b", health="left")))
    room.valve.is_open = False
    session = "new" if what == "first turn" else "s"
    room.core.ask(ask("r", session, tokens=1_100, kind="title" if what == "side request" else "turn"))
    assert room.wait(3.0) == []
    assert room.core.core.deciding.waits("r")


def test_a_turn_that_waits_no_more_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose client went away is idle as before; nobody knows where it would go."""
    room = Room(monkeypatch, "s")
    room.valve.is_open = False
    room.core.ask(ask("s-1", "s", tokens=1_100))
    room.wait(1.5)
    room.core.cancel("s-1")
    assert room.told() == [("resumed", "s", None, "cancelled")]
    assert room.wait(3.0) == []
    assert room.core.core.state.sessions.states()["acting"] == 1


def test_a_turn_that_is_refused_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s")
    room.valve.is_open = False
    deadline = int((room.core.now + 4.0) * 1000)
    room.core.ask(ask("s-1", "s", tokens=1_100, deadline_ms=deadline))
    assert room.wait(3.0) == [("paused", "s", "a", "policy")]
    assert refused(room.core.wait(2.0, ingresses=("ingress-1",))).reason == "hold_deadline"
    assert room.told() == [("resumed", "s", None, "hold_deadline")]


def test_another_attempt_goes_on_with_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s")
    room.valve.is_open = False
    room.core.ask(ask("s-1", "s", tokens=1_100))
    room.wait(1.5)
    room.core.ask(ask("s-1", "s", tokens=1_100, attempt=1))
    assert room.wait(2.0) == []
    room.valve.is_open = True
    assert room.wait(0.3) == [("resumed", "s", "a", "granted")]


def test_a_session_that_closes_while_it_is_paused_is_only_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s", session_idle_s=5.0)
    room.valve.is_open = False
    room.core.ask(ask("s-1", "s", tokens=1_100))
    assert room.wait(8.0) == [("paused", "s", "a", "policy")]
    assert room.words.ended == ["closed"]
    assert not room.core.core.state.sessions.paused
    room.core.cancel("s-1")
    assert room.told() == []


def test_a_turn_that_others_placed_ends_the_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ingress waited long enough and chose by itself."""
    room = Room(monkeypatch, "s")
    room.valve.is_open = False
    room.core.ask(ask("s-1", "s", tokens=1_100))
    room.wait(1.5)
    room.core.dispatched("s-1", "a", mode="fallback")
    assert room.told() == [("resumed", "s", "a", "adopted")]


def test_it_is_soon_its_turn_when_it_has_moved_up_and_there_is_one_rank_to_go_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = Room(monkeypatch, "s0", "s1", "s2", "s3")
    room.valve.is_open = False
    for session in ("s0", "s1", "s2", "s3"):
        room.core.ask(ask(f"{session}-1", session, tokens=1_100))
    assert [each[:2] for each in room.wait(2.0)] == [("paused", f"s{number}") for number in range(4)]
    room.core.cancel("s0-1")
    assert room.wait(1.0) == [
        ("resumed", "s0", None, "cancelled"),
        ("resumed", "s1", "a", "soon"),
        ("resumed", "s2", "a", "soon"),
    ]
    assert room.wait(3.0) == []


def test_soon_is_said_once_and_only_where_the_rank_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for workers, expected in ((("a",), [("resumed", "s2", "a", "soon")]), (("a", "b"), [])):
        room = Room(monkeypatch, "s0", "s1", "s2", workers=workers)
        room.valve.is_open = False
        for session in ("s0", "s1", "s2"):
            room.core.ask(ask(f"{session}-1", session, tokens=1_100))
        room.wait(1.5)
        room.core.cancel("s0-1")
        told = [each for each in room.wait(3.0) if each[1] == "s2"]
        assert told == expected
        room.valve.is_open = True
        assert ("resumed", "s2", "a", "granted") in room.wait(0.3) or expected


def test_a_policy_without_an_order_says_soon_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s0", "s1", "s2")
    room.valve.is_open = room.valve.has_order = False
    for session in ("s0", "s1", "s2"):
        room.core.ask(ask(f"{session}-1", session, tokens=1_100))
    room.wait(1.5)
    room.core.cancel("s0-1")
    assert room.wait(3.0) == [("resumed", "s0", None, "cancelled")]


def test_a_policy_pauses_an_idle_session_and_resumes_it_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s", workers=("a", "b"))
    assert room.policy_says("s", "paused") == [("paused", "s", "a", "idle")]
    assert room.policy_says("s", "resumed", seat=1) == [("resumed", "s", "b", "policy")]


def test_a_policys_pause_outlasts_a_turn_that_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s")
    room.valve.is_open = False
    room.core.ask(ask("s-1", "s", tokens=1_100))
    assert room.policy_says("s", "paused") == []  # its turn waits, and not yet for long
    assert room.wait(1.0) == [("paused", "s", "a", "policy")]
    room.core.cancel("s-1")
    assert room.told() == []
    assert room.policy_says("s", "resumed", seat=None) == [("resumed", "s", None, "policy")]
    room.core.ask(ask("s-2", "s", tokens=1_100))
    assert room.policy_says("s", "paused") == []
    room.core.cancel("s-2")
    assert room.told() == [("paused", "s", "a", "idle")]


def test_a_policy_that_pauses_while_a_turn_runs_is_heard_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s")
    granted(room.core.ask(ask("s-1", "s", tokens=1_100)))
    assert room.policy_says("s", "paused") == []
    effects = done(room.core, "s-1", "s", 1_100)
    assert [fact.state for fact in facts(effects, SessionFact)] == ["acting", "paused"]


def test_a_policy_that_fails_pauses_nobody_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A session whose turn waits stays paused till that is placed: by cost, when the policy fails too often."""
    room = Room(monkeypatch, "idle", "waits")
    room.policy_says("idle", "paused")
    room.valve.is_open = False
    room.core.ask(ask("waits-1", "waits", tokens=1_100))
    room.wait(1.5)

    def broken(now: float) -> Actions:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(room.valve, "tick", broken)
    told = room.wait(0.3)
    assert ("resumed", "idle", None, "policy_restarted") in told
    assert ("resumed", "waits", "a", "granted") in told
    assert not room.words.paused


def test_a_lease_is_no_pause() -> None:
    """Its room is kept for it: what waits is only its turn."""
    core = driven(policy="commit", policy_parameters={"output_tokens": 100}, hold_deadline_s=3600.0)
    core.do(WorkerStated(worker_state("a")))
    core.ask(ask("r1", "s1", tokens=3_000))
    core.ask(ask("r2", "s2", tokens=9_000))
    effects = done(core, "r1", "s1", 3_000)
    assert [fact.state for fact in facts(effects, SessionFact)] == ["acting", "leased"]
    effects = core.ask(ask("r3", "s1", tokens=9_000))
    for _ in range(4):
        effects += core.state(in_flight("r2", "s2", worker="a"), in_flight("r3", "s1"))
        effects += core.wait(1.0)
    assert not replies(effects, Granted)
    assert "paused" not in [fact.state for fact in facts(effects, SessionFact)]


# Leaders


def test_a_new_leader_ends_the_pauses_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s")
    room.valve.is_open = False
    room.core.ask(ask("s-1", "s", tokens=1_100))
    room.wait(1.5)
    room.core.do(LeadershipChanged(None))
    assert room.told() == []
    room.core.do(LeadershipChanged(11))
    assert room.told() == [("resumed", "s", None, "leader_changed")]
    room.core.ask(ask("s-1", "s", tokens=1_100))
    assert room.wait(1.5) == [("paused", "s", "a", "policy")]


def test_a_new_leader_ends_pauses_of_sessions_whose_turns_were_before_it_began() -> None:
    """Found by `test_every_pause_ends_once`: nobody ended such a pause unless the session came again."""
    core = driven(lead=False)
    core.do(WorkerStated(worker_state("a")))
    paused = SessionFact(
        source="admission-0", epoch=9, seq=0, at_ms=0, session=identity("s").key, session_id="s", state="paused",
        worker="a", rank=0, turns=3, context_tokens=1_050, reason="idle",
    )  # fmt: skip
    assert core.do(PauseHeard(paused)) == []
    (fact,) = facts(core.do(LeadershipChanged(10)), SessionFact)
    assert (fact.state, fact.session, fact.reason) == ("resumed", identity("s").key, "leader_changed")
    assert (fact.turns, fact.context_tokens) == (3, 1_050)


def test_what_an_old_leader_says_too_late_is_ended_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(monkeypatch, "s")
    late = SessionFact(
        source="admission-0", epoch=9, seq=0, at_ms=0, session=identity("s").key, session_id="s", state="paused"
    )
    (fact,) = facts(room.core.do(PauseHeard(late)), SessionFact)
    assert (fact.state, fact.reason, fact.worker) == ("resumed", "leader_changed", None)
    assert room.core.do(PauseHeard(msgspec.structs.replace(late, epoch=10))) == []  # our own


# Histories


SETTINGS: dict[str, dict[str, Any]] = {
    "thunderagent": {"policy_parameters": {"dynamo": {"scheduler_interval_seconds": 1.0}}},
    "paper": {
        "policy": "thunderagent",
        "policy_parameters": {"form": "paper", "paper": {"scheduler_interval": 1.0}},
    },
    "concur": {"policy_parameters": {"initial": 1.0}},
    "commit": {"policy_parameters": {"output_tokens": 100, "idle_expiry_s": 3.0}},
}


class History:
    """A leader under pressure, its standby, sessions of a few turns each."""

    def __init__(self, policy: str) -> None:
        given = {"policy": policy, "warmup_s": 0.0, "session_idle_s": 12.0, "paused_after_s": 0.3, **SETTINGS[policy]}

        def process(name: str, now: float) -> Core:
            return Core(AdmissionSettings(**given), name, choose(7), now)

        self.words = SessionWords()
        self.pair = Pair(process("admission-1", START), fresh=process)
        self.epoch = 10
        self.pair.do(LeadershipChanged(self.epoch))
        for worker in ("a", "b"):
            self.pair.do(WorkerStated(worker_state(worker)))
        self.count = 0
        self.open: dict[str, tuple[str, int]] = {}
        self.running: dict[str, str] = {}

    def saw(self, effects: list[Effect]) -> None:
        self.words.hear(effects)
        for effect in effects:
            if isinstance(effect, PublishDecision):
                self.running[effect.decision.request_id] = effect.decision.worker
        told = {key for key, session in self._sessions() if session.pause is not None}
        assert told == set(self.words.paused) == set(self.pair.core.state.sessions.paused)

    def _sessions(self) -> list[Any]:
        table = self.pair.core.state.sessions
        return [(key, session) for key in self.words.opened if (session := table.get(key)) is not None]

    def step(self, what: str, number: int, tokens: int) -> None:
        session = f"s{number}"
        mine = [each for each, (owner, _) in self.open.items() if owner == session]
        if what == "ask" and (not mine or number == 0):
            self.count += 1
            self.open[f"r{self.count}"] = session, tokens
            self.saw(self.pair.ask(ask(f"r{self.count}", session, tokens=tokens)))
        elif what == "end" and mine and mine[0] in self.running:
            self.open.pop(mine[0])
            self.saw(done(self.pair, mine[0], session, tokens))
        elif what == "cancel" and mine:
            self.open.pop(mine[0])
            self.saw(self.pair.cancel(mine[0]))
            self.saw(self.pair.end(end(mine[0], session, outcome="client_disconnect")))
        elif what == "lead":
            self.epoch += 1
            self.saw(self.pair.take_over(self.epoch, crashed=False))
            for request_id in [each for each in self.open if each not in self.running]:
                owner, size = self.open[request_id]
                self.saw(self.pair.ask(ask(request_id, owner, tokens=size)))
        elif what == "wait":
            self.saw(self.pair.state(*(self._named(each) for each in self.open)))
            self.saw(self.pair.wait(2.0))

    def give_up(self) -> None:
        """Every client goes away, and nobody comes back."""
        for request_id, (session, _) in self.open.items():
            self.saw(self.pair.cancel(request_id))
            self.saw(self.pair.end(end(request_id, session, outcome="client_disconnect")))
        self.saw(self.pair.wait(14.0, ingresses=("ingress-1",)))

    def _named(self, request_id: str) -> Any:
        session, _ = self.open[request_id]
        return in_flight(request_id, session, worker=self.running.get(request_id))


MOVES = ("ask",) * 6 + ("end",) * 5 + ("wait",) * 4 + ("cancel", "lead")
TOKENS = (1_000, 4_000, 7_000, 9_000)
STEPS = st.tuples(st.sampled_from(MOVES), st.integers(0, 4), st.sampled_from(TOKENS))


@pytest.mark.long
@pytest.mark.parametrize("policy", sorted(SETTINGS))
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=10, max_size=30))
def test_every_pause_ends_once(policy: str, steps: list[tuple[str, int, int]]) -> None:
    """Whatever happens, in whatever order, and whoever leads."""
    history = History(policy)
    for step in steps:
        history.step(*step)
    history.give_up()
    assert not history.words.paused
    assert not history.pair.core.state.sessions.paused
