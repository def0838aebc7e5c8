"""The core's decisions, one story each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TypeVar

import msgspec
import pytest

from bus import subjects
from schemas.base import to_json
from schemas.ingress import InFlight, IngressState
from schemas.placed import Placed
from schemas.pool import SharedLayout
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken, RequestProgress, Usage
from schemas.worker import Engine
from services.ingress import events
from services.ingress.answers import AnswerFacts
from services.ingress.core import IngressRules
from services.ingress.effects import (
    Answer,
    AskAdmission,
    BreakOff,
    CancelAdmission,
    CloseUpstream,
    CountPrompt,
    Effect,
    Forward,
    Publish,
    PublishRow,
)
from services.ingress.errors import MisuseError
from services.ingress.requests import FAILURES, HEDGE_STEPS, RETRY_STATUSES, STEPS
from services.ingress.texts import TextBlocks
from services.ingress.tokens import PageRule, from_ids
from tests.unit.ingress.builders import GOOD, MODEL, Scene, counted, granted, held, received, refused, worker

R = "r1"
T = TypeVar("T")


def first_byte(status: int = 200, attempt: int = 0) -> events.FirstByte:
    return events.FirstByte(request_id=R, attempt=attempt, status=status)


def ended(attempt: int = 0, answer: AnswerFacts = GOOD) -> events.AnswerEnded:
    return events.AnswerEnded(request_id=R, attempt=attempt, answer=answer)


def failed(reason: events.AnswerFailure, attempt: int = 0, answer: AnswerFacts | None = None) -> events.AnswerFailed:
    return events.AnswerFailed(request_id=R, attempt=attempt, reason=reason, answer=answer)


def undecided(reason: events.AdmitFailure, attempt: int = 0) -> events.AdmitFailed:
    return events.AdmitFailed(request_id=R, attempt=attempt, reason=reason)


def kinds(effects: list[Effect]) -> list[str]:
    """Effects by name, facts by theirs."""
    return [type(one.fact if isinstance(one, Publish) else one).__name__ for one in effects]


def only(effects: list[Effect], kind: type[T]) -> T:
    """The one effect of this kind."""
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


def dispatched(*workers: str, **members: object) -> Scene:
    """A request that was granted the first of these workers and sent to it."""
    scene = Scene(*workers)
    scene.play(received(R, **members), counted(R), granted(R, workers[0]))  # type: ignore[arg-type]
    return scene


def test_a_request_from_beginning_to_end() -> None:
    """Accepted, counted, asked, granted, forwarded, relayed, ended: the effects of each step, in order."""
    scene = Scene("w1")
    headers = {"x-tidegate-session-id": "S"}
    arrival = received(R, headers=headers, x_request_id="mine", stream=True, max_tokens=5, priority=2)
    effects = scene.play(arrival)
    assert kinds(effects) == ["RequestAccepted", "CountPrompt"]
    assert only(effects, CountPrompt).block_size == 4

    ask = only(scene.play(counted(R), after_s=0.01), AskAdmission)
    assert ask.subject == subjects.admit(MODEL)
    question = ask.question
    assert (question.input_tokens, question.tokens_from, question.block_size) == (10, "tokenizer", 4)
    assert len(question.chain) == 2 * 8
    assert (question.max_output_tokens, question.priority, question.attempt, question.excluded) == (5, 2, 0, ())
    assert (question.ingress, question.ingress_epoch, question.deadline_ms) == ("ingress-1", 42, 1_600_010)

    effects = scene.play(granted(R, "w1"), after_s=0.02)
    assert kinds(effects) == ["RequestDispatched", "Forward"]
    assert only(effects, Forward) == Forward(R, 0, "w1", "http://w1", 0, 1, -3, session_id="S")

    effects = scene.play(first_byte(), after_s=0.3)
    assert kinds(effects) == ["Relay", "RequestFirstToken"]
    assert kinds(scene.play(events.AnswerProgress(request_id=R, attempt=0, chunks=2))) == ["RequestProgress"]
    assert kinds(scene.play(ended(), after_s=0.2)) == ["RequestEnd", "PublishRow"]
    assert len(scene.core) == 0

    end, _ = scene.end()
    assert (end.outcome, end.status, end.worker, end.grant_id, end.mode) == (
        "completed",
        200,
        "w1",
        "grant-r1-0",
        "policy",
    )
    assert (end.usage, end.finish_reason, end.predicted_cached_tokens) == (GOOD.usage, "stop", 8)
    facts = scene.facts()
    assert [type(fact) for fact in facts] == [
        RequestAccepted,
        RequestDispatched,
        RequestFirstToken,
        RequestProgress,
        RequestEnd,
    ]
    assert [fact.seq for fact in facts] == [0] * 5, "each event of a request's life is numbered by itself"
    assert {(fact.source, fact.epoch) for fact in facts} == {("ingress-1", 42)}


def test_subjects_name_model_and_session() -> None:
    """Facts go to their model's subject, the row to its model's and session's, under the request id."""
    scene = dispatched("w1", headers={"x-session-id": "a b"})
    scene.play(first_byte(), ended())
    published = [effect.subject for effect in scene.effects if isinstance(effect, Publish)]
    assert published[0] == "tg.v1.request.accepted.m"
    assert published[-1] == "tg.v1.request.end.m"
    row = only(scene.effects, PublishRow)
    assert row.message_id == R
    assert row.subject == subjects.trace("request_end", "m", "default/opencode/a%20b/")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": ["a", "b"]}),
        ("/v1/responses", {"input": "go on", "previous_response_id": "resp_1"}),
    ],
)
def test_what_cannot_be_scored_is_asked_for_at_once(path: str, body: dict[str, object]) -> None:
    """A batch of prompts, or one that the engine keeps: no tokens are counted, the request is placed by session and
    load (C6)."""
    scene = Scene("w1")
    effects = scene.play(received(R, path=path, **body))  # type: ignore[arg-type]
    assert kinds(effects) == ["RequestAccepted", "AskAdmission"]
    question = only(effects, AskAdmission).question
    assert (question.tokens_from, question.chain, question.block_size) == ("estimate", b"", 0)
    assert question.input_tokens > 0


@pytest.mark.parametrize(("engine", "dialect"), [("sglang", "sglang"), ("vllm", "vllm"), ("unknown", "vllm")])
def test_an_answer_is_read_in_its_engines_dialect(engine: Engine, dialect: str) -> None:
    """A fleet may have both."""
    heard = worker("w1").state
    profile = msgspec.structs.replace(heard.profile, engine=engine)
    scene = Scene("w2")
    scene.play(events.WorkerHeard(state=msgspec.structs.replace(heard, profile=profile)))
    scene.play(received(R, path="/v1/messages"), counted(R))
    assert only(scene.play(granted(R, "w1")), Forward).dialect == dialect


COUNT = "/v1/messages/count_tokens"


def test_what_only_counts_asks_nobody() -> None:
    """A token count computes nothing: it goes to an engine without a decision, and nobody is told a worker that it
    would be booked on; it fails over once, and has one end and one row like any other (C6)."""
    scene = Scene("w1", "w2")
    effects = scene.play(received(R, path=COUNT))
    assert kinds(effects) == ["RequestAccepted", "Forward"]
    first = only(effects, Forward)
    scene.play(events.Tick())
    (state,) = [one.fact for one in scene.effects if isinstance(one, Publish) and isinstance(one.fact, IngressState)]
    assert [(each.request_id, each.worker) for each in state.in_flight] == [(R, None)]
    effects = scene.play(failed("connection_lost"))
    assert kinds(effects) == ["CloseUpstream", "Forward"]
    assert only(effects, Forward).worker != first.worker
    scene.play(first_byte(attempt=1), ended(attempt=1))
    row = only(scene.effects, PublishRow).row.request
    assert row is not None
    assert (row.outcome, row.kind, row.attempts, row.decision_mode) == ("completed", "count_tokens", 2, None)
    assert (row.ttft_ms is None, row.prefill_wait_time_ms, row.prefill_time_ms) == (False, None, None)
    assert not [one for one in scene.effects if isinstance(one, AskAdmission)]
    assert not [one for one in scene.effects if isinstance(one, Publish) and isinstance(one.fact, RequestDispatched)]


def test_a_token_count_without_a_worker_is_refused() -> None:
    """The model is known, and nobody serves it now: 503."""
    scene = Scene("w1")
    scene.play(worker("w1", seq=1, health="left"))
    effects = scene.play(received(R, path=COUNT))
    assert only(effects, Answer).reply.status == 503


def test_an_engine_without_the_api_is_named_and_not_blamed() -> None:
    """Another worker may serve it; else 501 with a reason, and an outcome for which no session leaves its worker."""
    scene = dispatched("w1", "w2", path="/v1/messages")
    missing = events.AnswerFailed(request_id=R, attempt=0, reason="api_not_served", detail="Engine w1 does not.")
    effects = scene.play(missing)
    assert kinds(effects) == ["CloseUpstream", "AskAdmission"]
    scene.play(granted(R, "w2", attempt=1))
    effects = scene.play(replace(missing, attempt=1))
    reply = only(effects, Answer).reply
    assert (reply.status, reply.reason) == (501, "api_not_served")
    assert json.loads(reply.body) == {"type": "error", "error": {"type": "api_error", "message": "Engine w1 does not."}}
    row = only(effects, PublishRow).row.request
    assert row is not None
    assert (row.outcome, row.reason, row.status) == ("client_error", "api_not_served", 501)


@pytest.mark.parametrize(
    ("path", "last", "outcome"),
    [
        ("/v1/responses", True, "completed"),
        ("/v1/messages", True, "completed"),
        ("/v1/chat/completions", True, "completed"),
        ("/v1/responses", False, "client_disconnect"),
        ("/v1/chat/completions", False, "client_disconnect"),  # its usage may not have come yet
    ],
)
def test_who_leaves_after_the_last_event_has_it_all(path: str, last: bool, outcome: str) -> None:
    """Codex closes its connection at ``response.completed`` (harness.md §3), others at ``[DONE]``: their turns are not
    disconnects."""
    body = {"input": "x"} if path == "/v1/responses" else {}
    scene = dispatched("w1", path=path, stream=True, **body)
    scene.play(first_byte())
    effects = scene.play(events.ClientGone(request_id=R, answer=replace(GOOD, last_event=last)))
    assert kinds(effects) == ["CloseUpstream", "RequestEnd", "PublishRow"]
    end, _ = scene.end()
    assert end.outcome == outcome


def test_unknown_models_and_unknown_fleets() -> None:
    """No worker ever: 503 with Retry-After (B7). Workers, but not this model: 404. No facts, no row, for either."""
    scene = Scene()
    reply = only(scene.play(received(R)), Answer).reply
    assert (reply.status, reply.reason, dict(reply.headers)[b"retry-after"]) == (503, "no_worker", b"1")
    scene.play(worker("w1"))
    reply = only(scene.play(received(R, model="other")), Answer).reply
    assert (reply.status, reply.reason) == (404, "model_not_found")
    assert json.loads(reply.body)["error"]["code"] == "model_not_found"
    assert scene.facts() == []
    scene.play(worker("w1", 1, "left"))
    scene.play(received(R), counted(R))
    reply = only(scene.play(undecided("no_responders")), Answer).reply
    assert (reply.status, reply.reason) == (503, "no_worker")
    assert scene.end()[0].outcome == "refused"


def test_bounds_at_the_door() -> None:
    """More than the bound in flight: 429 with Retry-After. While stopping: 503. Neither is accepted."""
    scene = Scene("w1", rules=IngressRules(max_in_flight=1))
    scene.play(received(R))
    reply = only(scene.play(received("r2")), Answer).reply
    assert (reply.status, reply.reason) == (429, "too_many_requests")
    scene.play(events.StopAsked())
    assert only(scene.play(received("r3")), Answer).reply.reason == "stopping"
    with pytest.raises(MisuseError):
        Scene("w1").play(received(R), received(R))


def test_a_refusal_reaches_the_client() -> None:
    """Status, reason and Retry-After are admission's; the row says refused."""
    scene = Scene("w1")
    scene.play(received(R), counted(R), held(R))
    effects = scene.play(refused(R))
    assert kinds(effects) == ["Answer", "RequestEnd", "PublishRow"]
    reply = only(effects, Answer).reply
    assert (reply.status, reply.reason, dict(reply.headers)[b"retry-after"]) == (429, "queue_full", b"2")
    end, row = scene.end()
    assert (end.outcome, end.reason, end.status, end.usage) == ("refused", "queue_full", 429, Usage())
    assert row.request is not None
    assert (row.request.hold_reason, row.request.queue_depth) == ("no_room", 2)


def test_a_policys_refusal_says_whose_it_is_and_why() -> None:
    """The user's policy has a word in the message; the code and the header stay the stable reason."""
    scene = Scene("w1")
    scene.play(received(R), counted(R))
    told = msgspec.structs.replace(
        refused(R).reply, reason="policy_refused", policy="night-shift", detail="batch work runs at night"
    )
    effects = scene.play(events.AdmitReplied(request_id=R, attempt=0, reply=told))
    answer = only(effects, Answer).reply
    assert answer.reason == "policy_refused"
    assert msgspec.json.decode(answer.body)["error"]["code"] == "policy_refused"
    assert b"Policy night-shift refused the request: batch work runs at night." in answer.body


@pytest.mark.parametrize("reason", ["admit_silent", "no_responders", "bus_down", "bad_reply"])
def test_without_a_leader_a_session_has_its_place(reason: events.AdmitFailure) -> None:
    """No decision: rendezvous hash, mode fallback, the same worker for each turn of a session (C9, DESIGN §8)."""
    chosen = set()
    for number in range(5):
        scene = Scene("w1", "w2", "w3")
        scene.play(received(R, headers={"x-session-id": "S"}, messages=[{"role": "user", "content": str(number)}]))
        scene.play(counted(R))
        effects = scene.play(undecided(reason))
        assert kinds(effects) == ["Placed", "RequestDispatched", "Forward"]
        chosen.add(only(effects, Forward).worker)
        _, fact = [effect.fact for effect in effects if isinstance(effect, Publish)]
        assert isinstance(fact, RequestDispatched)
        assert (fact.mode, fact.grant_id) == ("fallback", None)
    assert len(chosen) == 1


COMPACTION = {"x-claude-code-session-id": "S", "anthropic-beta": "fallback-credit-2026"}


@pytest.mark.parametrize(
    ("path", "headers", "is_turn"),
    [("/v1/chat/completions", {"x-session-id": "S"}, True), ("/v1/messages", COMPACTION, False)],
)
def test_what_we_place_ourselves_is_said(path: str, headers: dict[str, str], is_turn: bool) -> None:
    """Without a leader the ingress publishes what it sent where, as admission would; a side request names no session,
    for it does not move it."""
    scene = Scene("w1")
    scene.play(received(R, path=path, headers=headers))
    scene.play(counted(R))
    said = scene.play(undecided("bus_down"))[0]
    assert isinstance(said, Publish)
    assert (said.subject, said.packed) == ("tg.v1.placed.w1", True)
    assert isinstance(said.fact, Placed)
    assert (said.fact.request_id, said.fact.worker, said.fact.rank, said.fact.mode) == (R, "w1", 0, "fallback")
    assert (said.fact.session is not None, len(said.fact.chain) // 8, said.fact.block_size) == (is_turn, 2, 4)
    assert said.fact.indexed is None, "nobody asked the index: nothing to be compared"


def test_text_where_there_are_no_tokens() -> None:
    """The chain over text is asked with as such; tokens stay an estimate, and the row names no hashes of tokens."""
    scene = Scene("w1")
    scene.play(received(R))
    text = TextBlocks(64, bytes(16))
    ask = only(scene.play(events.PromptCounted(request_id=R, skipped="no_tokenizer", text=text)), AskAdmission).question
    assert (ask.chain_unit, ask.block_size, ask.chain, ask.tokens_from) == ("text", 64, bytes(16), "estimate")
    effects = scene.play(undecided("admit_silent"))
    placed = next(effect.fact for effect in effects if isinstance(effect, Publish))
    assert isinstance(placed, Placed)
    assert (placed.unit, placed.block_size, placed.chain) == ("text", 64, bytes(16))
    scene.play(first_byte(), ended(answer=AnswerFacts(complete=True)))
    _, row = scene.end()
    assert row.request is not None
    assert (row.request.replay, row.request.kv_hit_rate, row.request.usage_estimated) == (None, None, True)


def test_a_shared_pool_s_pages_go_with_the_question() -> None:
    """Workers read a shared pool by SGLang's rule: the prompt's pages are hashed by it once, and asked with."""
    scene = Scene()
    told = worker("w1").state
    shared = SharedLayout(pool="p", scheme="sglang_hicache", page_size=4)
    scene.play(
        events.WorkerHeard(
            state=msgspec.structs.replace(told, profile=msgspec.structs.replace(told.profile, shared=shared))
        )
    )
    assert only(scene.play(received(R)), CountPrompt).pages == PageRule(4)
    tokens = from_ids(range(10), 4).paged(PageRule(4), None)
    ask = only(
        scene.play(events.PromptCounted(request_id=R, tokens=tokens, tokens_from="tokenizer")), AskAdmission
    ).question
    assert (len(ask.pages), ask.page_size, len(ask.chain)) == (32, 4, 16)
    assert ask.pages == tokens.pages


def test_a_pool_that_does_not_say_its_block_size() -> None:
    """Engines without events may not name it: tokens are chained in blocks of 16 all the same."""
    scene = Scene()
    told = worker("w1").state
    unsized = msgspec.structs.replace(told, profile=msgspec.structs.replace(told.profile, block_size=None))
    scene.play(events.WorkerHeard(state=unsized))
    assert only(scene.play(received(R)), CountPrompt).block_size == 16


def test_fallback_can_be_switched_off() -> None:
    """With ``fallback`` off a silent leader means 503 (C9)."""
    scene = Scene("w1", rules=IngressRules(fallback=False))
    scene.play(received(R), counted(R))
    assert only(scene.play(undecided("admit_silent")), Answer).reply.reason == "admission_unavailable"


def test_held_too_long() -> None:
    """The deadline of a held request: 429, and the leader is told to forget it."""
    scene = Scene("w1")
    scene.play(received(R), counted(R), held(R))
    effects = scene.play(undecided("hold_timeout"))
    assert kinds(effects) == ["CancelAdmission", "Answer", "RequestEnd", "PublishRow"]
    assert only(effects, CancelAdmission).cancel.request_id == R
    assert only(effects, Answer).reply.status == 429


RETRYABLE = sorted(reason for reason, (_, again) in FAILURES.items() if again)


@pytest.mark.parametrize("reason", RETRYABLE)
def test_one_retry_on_another_worker_before_the_first_byte(reason: events.AnswerFailure) -> None:
    """The failed worker is excluded, the same tokens are asked with attempt 1, and a second failure is the end (B1,
    C2)."""
    scene = dispatched("w1", "w2")
    effects = scene.play(failed(reason))
    assert kinds(effects) == ["CloseUpstream", "AskAdmission"]
    assert only(effects, CloseUpstream) == CloseUpstream(R, 0)
    question = only(effects, AskAdmission).question
    assert (question.attempt, question.excluded, question.input_tokens) == (1, ("w1",), 10)
    scene.play(granted(R, "w2", 1))
    effects = scene.play(failed(reason, 1))
    assert kinds(effects) == ["CloseUpstream", "Answer", "RequestEnd", "PublishRow"]
    status = FAILURES[reason][0]
    assert only(effects, Answer).reply.status == status
    end, row = scene.end()
    outcome = {501: "client_error", 504: "upstream_timeout"}.get(status, "upstream_error")
    assert (end.outcome, end.reason) == (outcome, reason)
    assert row.request is not None
    assert (row.request.attempts, end.worker, end.grant_id) == (2, "w2", "grant-r1-1")


@pytest.mark.parametrize("status", sorted(RETRY_STATUSES))
def test_an_engine_that_is_not_up_is_retried_elsewhere(status: int) -> None:
    """502, 503, 504 before the first byte: another worker may do better; nothing of it reaches the client."""
    scene = dispatched("w1", "w2")
    assert kinds(scene.play(first_byte(status))) == ["CloseUpstream", "AskAdmission"]
    scene.play(undecided("admit_silent", 1))
    assert only(scene.effects[-2:], Forward).worker == "w2"
    assert kinds(scene.play(first_byte(attempt=1), ended(1)))[0] == "Relay"
    assert scene.end()[0].outcome == "completed"


def test_no_retry_where_it_cannot_help() -> None:
    """No other worker, retry off, total time-out, or any other status: the first failure is the end."""
    assert kinds(dispatched("w1").play(failed("connection_lost")))[1] == "Answer"
    assert kinds(dispatched("w1", "w2").play(failed("total_timeout")))[1] == "Answer"
    assert kinds(dispatched("w1", "w2").play(first_byte(500))) == ["Relay"]
    scene = Scene("w1", "w2", rules=IngressRules(retry=False))
    scene.play(received(R), counted(R), granted(R, "w1"))
    assert kinds(scene.play(failed("connect_error")))[1] == "Answer"


def test_what_comes_late_of_the_first_attempt_is_ignored() -> None:
    """Its first byte, its end, its failure, its grant: counted, without effect."""
    scene = dispatched("w1", "w2")
    scene.play(failed("first_byte_timeout"), granted(R, "w2", 1))
    assert scene.play(first_byte(attempt=0), ended(0), failed("connection_lost", 0), granted(R, "w1", 0)) == []
    assert sum(scene.core.late_events.values()) == 4
    scene.play(first_byte(attempt=1), ended(1))
    assert scene.end()[0].worker == "w2"


@pytest.mark.parametrize(
    ("status", "outcome"),
    [(400, "client_error"), (404, "client_error"), (429, "client_error"), (500, "upstream_error")],
)
def test_an_engines_own_error_is_passed_on(status: int, outcome: str) -> None:
    """4xx is the client's error and 5xx the engine's; the engine's words reach the client; no token was first (C8)."""
    scene = dispatched("w1", "w2")
    assert kinds(scene.play(first_byte(status))) == ["Relay"]
    scene.play(ended(answer=AnswerFacts(error="x")))
    end, _ = scene.end()
    assert (end.outcome, end.reason, end.status, end.usage) == (outcome, "engine_status", status, Usage())


def test_an_error_inside_the_stream() -> None:
    """An in-band error is an upstream error, although the status was 200."""
    scene = dispatched("w1", stream=True)
    scene.play(first_byte(), ended(answer=AnswerFacts(error="overloaded")))
    end, _ = scene.end()
    assert (end.outcome, end.reason, end.status) == ("upstream_error", "in_band_error", 200)


def test_a_stream_without_its_last_word_was_lost() -> None:
    """A stream that closed cleanly but never finished is no completed answer, and its client is told."""
    scene = dispatched("w1", stream=True)
    effects = scene.play(first_byte(), ended(answer=AnswerFacts(data_lines=2)))
    assert b"incomplete_answer" in only(effects, BreakOff).event
    end, _ = scene.end()
    assert (end.outcome, end.reason) == ("upstream_lost", "incomplete_answer")
    assert end.usage == Usage(input_tokens=10, output_tokens=2, estimated=True)


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_cannot_be_read_is_the_engines_fault(stream: bool) -> None:
    """A proxy's login page with status 200, half a document or an empty one is no completed answer."""
    scene = dispatched("w1", stream=stream)
    scene.play(first_byte(), ended(answer=AnswerFacts(unreadable=1, complete=True)))
    end, _ = scene.end()
    assert (end.outcome, end.reason, end.status) == ("upstream_error", "bad_answer", 200)


def test_one_unreadable_event_among_others_is_passed_over() -> None:
    """What an engine streams beside its answer is not ours to judge."""
    scene = dispatched("w1", stream=True)
    scene.play(first_byte(), ended(answer=AnswerFacts(unreadable=1, data_lines=3, complete=True)))
    end, _ = scene.end()
    assert (end.outcome, end.reason) == ("completed", None)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        ("connection_lost", "upstream_lost"),
        ("idle_timeout", "upstream_timeout"),
        ("total_timeout", "upstream_timeout"),
        ("event_too_large", "upstream_error"),
    ],
)
def test_after_the_first_byte_there_is_no_retry(reason: events.AnswerFailure, outcome: str) -> None:
    """An in-band error in the API's own shape, and the outcome says which failure it was (C2)."""
    scene = dispatched("w1", "w2", stream=True)
    scene.play(first_byte())
    effects = scene.play(failed(reason, answer=AnswerFacts(data_lines=4)))
    assert kinds(effects) == ["CloseUpstream", "BreakOff", "RequestEnd", "PublishRow"]
    assert reason.encode() in only(effects, BreakOff).event
    end, _ = scene.end()
    assert (end.outcome, end.reason, end.status) == (outcome, reason, 200)
    assert end.usage == Usage(input_tokens=10, output_tokens=4, estimated=True)


def test_a_broken_answer_that_is_no_stream_is_cut() -> None:
    """There is no place for an error inside a JSON body: nothing is added, the connection is closed."""
    scene = dispatched("w1")
    scene.play(first_byte())
    assert only(scene.play(failed("connection_lost")), BreakOff).event == b""


def test_the_client_goes_in_every_state() -> None:
    """What others do for it is stopped: a question is cancelled, an engine's connection closed; one end (B2)."""
    gone = events.ClientGone(request_id=R)
    steps: list[events.Event] = [received(R), counted(R), held(R), granted(R, "w1"), first_byte()]
    stops = [None, CancelAdmission, CancelAdmission, CloseUpstream, CloseUpstream]
    for count, stop in enumerate(stops, start=1):
        scene = Scene("w1")
        scene.play(*steps[:count])
        effects = scene.play(gone)
        assert kinds(effects) == [*([stop.__name__] if stop else []), "RequestEnd", "PublishRow"]
        end, _ = scene.end()
        assert (end.outcome, end.reason) == ("client_disconnect", "client_gone")
        assert scene.play(gone, granted(R, "w1"), first_byte(), ended()) == []


def test_a_bug_of_ours_ends_the_request_too() -> None:
    """Before the first byte a 500, after it a broken stream; the row says internal_error."""
    scene = dispatched("w1", stream=True)
    effects = scene.play(events.RequestFailed(request_id=R))
    assert kinds(effects) == ["CloseUpstream", "Answer", "RequestEnd", "PublishRow"]
    assert (only(effects, Answer).reply.status, scene.end()[0].outcome) == (500, "internal_error")
    scene = dispatched("w1", stream=True)
    scene.play(first_byte())
    effects = scene.play(events.RequestFailed(request_id=R))
    assert kinds(effects) == ["CloseUpstream", "BreakOff", "RequestEnd", "PublishRow"]


def test_state_is_said_every_second_in_parts() -> None:
    """Everyone in flight, with worker and grant; an empty table is said too; large ones in numbered parts."""
    scene = Scene("w1", rules=IngressRules(in_flight_part=2))
    (empty,) = [effect.fact for effect in scene.play(events.Tick()) if isinstance(effect, Publish)]
    assert isinstance(empty, IngressState)
    assert (empty.ingress, empty.in_flight, empty.part, empty.parts, empty.final) == ("ingress-1", (), 0, 1, False)
    for number in range(3):
        scene.play(received(f"r{number}"), counted(f"r{number}"))
    scene.play(granted("r1", "w1"))
    states = [effect.fact for effect in scene.play(events.Tick()) if isinstance(effect, Publish)]
    assert [len(state.in_flight) for state in states if isinstance(state, IngressState)] == [2, 1]
    assert [state.seq for state in states] == [1, 2]
    placed = {one.request_id: one for state in states if isinstance(state, IngressState) for one in state.in_flight}
    assert set(placed) == {"r0", "r1", "r2"}
    one = placed["r1"]
    assert (one.worker, one.rank, one.grant_id, one.grant_epoch, one.mode) == ("w1", 0, "grant-r1-0", 7, "policy")
    assert (one.input_tokens, one.predicted_cached_tokens) == (10, 8)
    assert placed["r0"].worker is None


def test_state_says_the_same_of_a_stream_until_its_end() -> None:
    """What is said of a request that is sent on is said of its stream, however far that is; of a retry, what is new."""
    scene = dispatched("w1", "w2", stream=True)
    assert [_said(scene).worker, _said(scene).attempt] == ["w1", 0]
    scene.play(failed("connection_lost"))
    assert [_said(scene).worker, _said(scene).attempt] == [None, 1]
    scene.play(granted(R, "w2", attempt=1))
    sent = _said(scene)
    assert [sent.worker, sent.attempt, sent.grant_id] == ["w2", 1, f"grant-{R}-1"]
    scene.play(first_byte(attempt=1))
    assert _said(scene) == sent
    scene.play(events.AnswerProgress(request_id=R, attempt=1, chunks=2))
    assert _said(scene) == sent


def _said(scene: Scene) -> InFlight:
    """Of the only request in flight."""
    (state,) = [effect.fact for effect in scene.play(events.Tick()) if isinstance(effect, Publish)]
    assert isinstance(state, IngressState)
    (one,) = state.in_flight
    return one


def test_stopping_leaves_nobody_behind() -> None:
    """What is still in flight ends as internal_error, and the last state says ``final``."""
    scene = dispatched("w1")
    effects = scene.play(events.Stopped())
    assert kinds(effects) == ["CloseUpstream", "Answer", "RequestEnd", "PublishRow", "IngressState"]
    assert scene.end()[0].reason == "stopping"
    last = scene.facts()[-1]
    assert isinstance(last, IngressState)
    assert (last.final, last.in_flight) == (True, ())


def test_a_rank_is_named_where_there_are_several() -> None:
    """The engine's rank travels with the forward; rank 0 is a value (A13)."""
    scene = Scene()
    scene.play(worker("w1", ranks=2), received(R), counted(R))
    assert only(scene.play(granted(R, "w1", rank=1)), Forward).rank == 1
    assert only(scene.effects, Forward).ranks == 2


def test_the_table_has_every_state_and_no_unknown_step() -> None:
    """Each state lists its events; the client's going and our own failure are handled in all of them."""
    for state, steps in STEPS.items():
        assert {events.ClientGone, events.RequestFailed} <= set(steps), state
    assert {step for steps in [*STEPS.values(), *HEDGE_STEPS.values()] for step in steps.values()} == {
        "ask",
        "recognised",
        "replied",
        "undecided",
        "begin",
        "progress",
        "complete",
        "retry_or_fail",
        "break_off",
        "leave",
        "give_up",
        "hedge_due",
        "hedge_decided",
        "hedge_begins",
        "hedge_fails",
    }


def test_hostile_ids_do_not_make_the_state_larger_than_a_message() -> None:
    """Session ids as long as a header may be: more parts, each below the bus's limit (8 MiB), nobody left out."""
    scene = Scene("w1")
    for number in range(200):
        scene.play(received(f"r{number}", headers={"x-session-id": f"{number}" + "s" * 60_000}))
    states = [effect.fact for effect in scene.play(events.Tick()) if isinstance(effect, Publish)]
    assert all(len(to_json(state)) < 6 * 1024 * 1024 for state in states)
    named = [one.request_id for state in states if isinstance(state, IngressState) for one in state.in_flight]
    assert sorted(named) == sorted(f"r{number}" for number in range(200))
    assert {state.parts for state in states if isinstance(state, IngressState)} == {len(states)}


def test_the_last_worker_list_outlives_an_outage_of_our_bus() -> None:
    """C9: nobody's silence counts while no fact can reach us; it counts again, from then on, when facts can."""
    scene = Scene("w1")
    for _ in range(20):
        scene.now += 1.0
        scene.play(events.Tick(connected=False))
    scene.play(received(R), counted(R))
    assert only(scene.play(undecided("bus_down")), Forward).worker == "w1"
    for _ in range(5):
        scene.now += 1.0
        scene.play(events.Tick())
    assert len(scene.core.workers) == 1
    scene.now += 1.0
    scene.play(events.Tick())
    assert len(scene.core.workers) == 0
