"""Tools that no harness tells of, inferred from a session's requests; never where one tells, nor across an overlap."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bus.subjects import tool
from schemas.base import from_json
from schemas.request import RequestAccepted, RequestEnd
from schemas.session import SessionIdentity, SessionKey
from schemas.tool import ToolEvent
from schemas.trace import ToolRun
from services.recorder.tool_events import PublishToolFact, SessionNamed, ToolEventCore, ToolReported, TurnEnded
from services.recorder.tool_inference import ToolInference
from services.recorder.tool_messages import ToolReport

KEY = SessionKey(family="dynamo", root="run-1")


def accepted(request_id: str, at_ms: int, key: SessionKey = KEY, **more: Any) -> RequestAccepted:
    identity = SessionIdentity(key=key, session_id=key.root)
    return RequestAccepted(
        source="i",
        epoch=1,
        seq=0,
        at_ms=at_ms,
        request_id=request_id,
        model="m",
        identity=identity,
        received_ms=at_ms,
        **more,
    )


def ended(request_id: str, at_ms: int, *tools: str, key: SessionKey = KEY, **more: Any) -> RequestEnd:
    identity = SessionIdentity(key=key, session_id=key.root)
    more.setdefault("outcome", "completed")
    return RequestEnd(
        source="i",
        epoch=1,
        seq=0,
        at_ms=at_ms,
        request_id=request_id,
        model="m",
        identity=identity,
        tool_names=tools,
        **more,
    )


def test_a_gap_between_two_turns_is_the_time_of_each_call() -> None:
    """The tools of one turn ran at most from its end to the next turn; their facts say that they are inferred."""
    core = ToolEventCore("recorder-1", 1, "default", 8, infer=True)
    for event in (SessionNamed(accepted("r1", 1_000)), TurnEnded(ended("r1", 2_000, "bash", "read"))):
        assert core.handle(event, 2.0) == []
    facts = []
    for effect in core.handle(SessionNamed(accepted("r2", 3_500)), 3.5):
        assert isinstance(effect, PublishToolFact)
        assert effect.subject == tool("end", KEY.text())
        facts.append(from_json(effect.payload, ToolEvent))
    assert [(fact.tool_class, fact.tool_call_id, fact.duration_ms) for fact in facts] == [
        ("bash", "r1:0", 1_500.0),
        ("read", "r1:1", 1_500.0),
    ]
    assert all(fact.inferred and fact.session == KEY for fact in facts)
    assert [fact.seq for fact in facts] == [0, 1]
    assert core.inferred == 2
    assert core.handle(SessionNamed(accepted("r3", 4_000)), 4.0) == []


def test_a_harness_that_tells_is_not_spoken_for() -> None:
    """Its first event ends the inference for its session, for good; another session's goes on."""
    core = ToolEventCore("recorder-1", 1, "default", 8, infer=True)
    other = SessionKey(family="dynamo", root="run-2")
    for key in (KEY, other):
        core.handle(SessionNamed(accepted("r1" + key.root, 1_000, key)), 1.0)
        core.handle(TurnEnded(ended("r1" + key.root, 2_000, "bash", key=key)), 2.0)
    run = ToolRun(tool_call_id="c", tool_class="bash")
    told = ToolReport(event_type="tool_start", at_ms=2_100, session_id="run-1", parent_session_id=None, tool=run)
    core.handle(ToolReported(told), 2.1)
    assert core.handle(SessionNamed(accepted("r2", 3_000)), 3.0) == []
    core.handle(TurnEnded(ended("r2", 4_000, "bash")), 4.0)
    assert core.handle(SessionNamed(accepted("r3", 5_000)), 5.0) == []
    assert len(core.handle(SessionNamed(accepted("r2", 3_000, other)), 3.0)) == 1


def test_what_infers_nothing() -> None:
    """A broken turn, a side request (which does not end the gap either), a request without session, an overlap."""
    inference = ToolInference(8)
    inference.accepted(accepted("r1", 0))
    inference.ended(ended("r1", 10, "bash", outcome="client_disconnect"))
    assert inference.accepted(accepted("r2", 20)) == []
    inference.accepted(accepted("r3", 30))  # while r2 runs
    inference.ended(ended("r2", 40, "bash"))
    assert inference.accepted(accepted("r4", 50)) == []
    inference.ended(ended("r4", 60, "bash"))
    assert inference.accepted(accepted("title", 70, kind="title")) == []
    inference.ended(ended("title", 80, kind="title"))
    (call,) = inference.accepted(accepted("r5", 90))
    assert (call.started_ms, call.ended_ms) == (60, 90)
    alone = SessionKey(family="request", root="r6")
    assert inference.accepted(accepted("r6", 0, alone)) == []
    assert len(inference) == 1


def test_strangers_fill_no_table() -> None:
    """Anybody may tell of any session, at any length: only those that made requests are remembered, and no giant id."""
    core = ToolEventCore("recorder-1", 1, "default", 8, infer=True)
    inference = ToolInference(8)
    inference.told(KEY)
    assert len(inference) == 0
    core.handle(SessionNamed(accepted("r1", 0, SessionKey(family="dynamo", root="x" * 60_000))), 0.0)
    assert len(core.sessions) == 0
    core.handle(SessionNamed(accepted("r1", 0, SessionKey(family="dynamo", root="x" * 2_000))), 0.0)
    assert len(core.sessions) == 1


def test_clocks_of_two_front_doors_never_make_a_negative_time() -> None:
    """The end is one door's time, the arrival another's."""
    inference = ToolInference(8)
    inference.accepted(accepted("r1", 0))
    inference.ended(ended("r1", 100, "bash"))
    (call,) = inference.accepted(accepted("r2", 50))
    assert (call.started_ms, call.ended_ms) == (100, 100)


@dataclass
class Model:
    """Of one session: every event so far, read anew each time."""

    events: list[tuple[str, int]]

    def inferred(self) -> bool:
        """Whether the arrival that comes last infers: before it stand an arrival and that turn's end, nothing else."""
        before = self.events[:-1]
        if any(kind == "told" for kind, _ in before):
            return False
        arrivals = [number for kind, number in before if kind == "accepted"]
        ends = [index for index, (kind, number) in enumerate(before) if kind == "ended" and arrivals[-1:] == [number]]
        return any("accepted" not in [kind for kind, _ in before[index:]] for index in ends)


@given(st.lists(st.tuples(st.sampled_from(["accepted", "ended", "ended", "told"]), st.integers(0, 3)), max_size=25))
def test_any_order_of_facts_agrees_with_the_whole_history(steps: list[tuple[str, int]]) -> None:
    """Ends before, after and without their arrivals, twice, of older turns: what is inferred is what history says."""
    inference = ToolInference(8)
    model = Model([])
    arrivals = 0
    for kind, back in steps:
        if kind == "accepted":
            model.events.append((kind, arrivals))
            calls = inference.accepted(accepted(f"r{arrivals}", arrivals))
            assert bool(calls) == model.inferred()
            arrivals += 1
        elif kind == "ended":
            model.events.append((kind, arrivals - 1 - back))
            inference.ended(ended(f"r{arrivals - 1 - back}", arrivals, "bash"))
        elif back == 0:
            if arrivals:  # else nobody knows the session yet
                model.events.append((kind, 0))
            inference.told(KEY)
