"""A real AIPerf against a real system: no request fails, its sessions are our sessions, and both count the same tokens.

AIPerf sends ``X-Session-Affinity`` (on by default) and, where asked, ``X-Dynamo-Session-ID``; both hold its
``x_correlation_id`` (spec: identity-and-traces §3.4). Its docs promise more than it does (`ai-dynamo/dynamo` documents
``--use-dynamo-conv-aware-routing``, which 0.13.0 has not), so what a user's command does is tried here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.aiperf import Report, executable, profile
from tests.support.processes import eventually
from tests.support.system import RunningSystem, running_system
from tests.unit.tidegate.trace.making import SAMPLE
from tidegate.cli import main
from tidegate.trace.errors import TraceFileError
from tidegate.trace.reading import read_trace
from tidegate.trace.rows import Request

pytestmark = [pytest.mark.real, pytest.mark.timeout(240), pytest.mark.asyncio(loop_scope="module")]

RUN = SAMPLE.with_name("agents.jsonl.gz")
"""Rows of ours: agents with tools and a sub-agent, prompts of about 8,000 tokens."""
TEMPLATE_TOKENS = 10
"""What the chat template adds to a prompt of one message. The trace's lengths are whole prompts; AIPerf makes one
user message of each."""
SERVER_COUNTS = "--use-server-token-count"
EXACT_OUTPUT = ("--extra-inputs", "ignore_eos:true")
"""Answers are as long as they are asked to be."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RunningSystem]:
    """Two simulated engines, for all tests of this module."""
    executable()
    async with running_system(tmp_path_factory.mktemp("aiperf")) as system:
        yield system


async def rows_of(system: RunningSystem, report: Report) -> dict[str, Request]:
    """The row of each of AIPerf's requests, by the request id that AIPerf gave it, once all are recorded."""
    rows: dict[str, Request] = {}

    def recorded() -> bool:
        try:
            requests = read_trace([Path(system.addresses["traces"])]).requests
        except TraceFileError:
            return False
        rows.update({request.metrics.x_request_id or "": request for request in requests})
        return report.exchanges.keys() <= rows.keys()

    await eventually(recorded, 15, "the recorder has a row of every request of AIPerf")
    return {request_id: rows[request_id] for request_id in report.exchanges}


def assert_agrees(report: Report, rows: Mapping[str, Request]) -> None:
    """Every request of AIPerf has its row: completed, of its session, and with AIPerf's counts, to the last token.
    Raises `AssertionError` with those that differ."""
    assert report.total("request_count") == len(rows) == len(report.exchanges)
    assert {row.metrics.outcome for row in rows.values()} == {"completed"}
    told = {
        request_id: (each.session, each.input_tokens, each.output_tokens, each.cached_tokens)
        for request_id, each in report.exchanges.items()
    }
    written = {
        request_id: (
            row.context.session_id if row.context else None,
            row.metrics.input_tokens,
            row.metrics.output_tokens,
            row.metrics.cached_tokens or 0,
        )
        for request_id, row in rows.items()
    }
    assert told == written
    assert report.total("total_isl") == sum(row.metrics.input_tokens or 0 for row in rows.values())
    assert report.total("total_osl") == sum(row.metrics.output_tokens or 0 for row in rows.values())


def conversations(report: Report, rows: Mapping[str, Request]) -> dict[str, list[Request]]:
    """Rows by session, in the order of AIPerf's turns."""
    found: dict[str, list[Request]] = {}
    for request_id, exchange in sorted(report.exchanges.items(), key=lambda item: item[1].turn):
        found.setdefault(exchange.session, []).append(rows[request_id])
    return found


def hit_ratio(rows: Mapping[str, Request]) -> float:
    """Cached tokens per input token."""
    cached = sum(row.metrics.cached_tokens or 0 for row in rows.values())
    return cached / sum(row.metrics.input_tokens or 0 for row in rows.values())


def stickiness(turns: list[Request]) -> tuple[int, int]:
    """How many turns went where the one before went, of how many."""
    workers = [turn.metrics.worker for turn in turns]
    return sum(before == after for before, after in pairwise(workers)), len(workers) - 1


async def test_conversations_are_sessions_without_any_setting(system: RunningSystem, tmp_path: Path) -> None:
    """A user's default command: each conversation is one session, its turns grow, stay where they were, and find what
    the turn before left."""
    sessions, turns = 6, 4
    shape = ["--num-conversations", str(sessions), "--conversation-turn-mean", str(turns), "--concurrency", "3"]
    shape += ["--isl", "300", "--osl", "24", "--shared-system-prompt-length", "600", SERVER_COUNTS, *EXACT_OUTPUT]
    report = await profile(tmp_path / "run", system.url, system.addresses["model"], *shape)
    rows = await rows_of(system, report)
    assert len(rows) == sessions * turns
    assert_agrees(report, rows)
    found = conversations(report, rows)
    assert [len(each) for each in found.values()] == [turns] * sessions
    keys = {row.context.session for row in rows.values() if row.context}
    assert {key.family for key in keys if key} == {"affinity"}
    for each in found.values():
        lengths = [turn.metrics.input_tokens or 0 for turn in each]
        assert all(after >= before + 300 for before, after in pairwise(lengths)), lengths
    stayed = [stickiness(each) for each in found.values()]
    assert sum(same for same, _ in stayed) > 0.9 * sum(of for _, of in stayed), stayed
    assert hit_ratio(rows) > 0.5


async def test_sub_agents_are_sessions_with_a_parent(system: RunningSystem, tmp_path: Path) -> None:
    """Conversations that spawn others, with Dynamo's header asked for: it and ``X-Session-Affinity`` hold one id, and
    are one session; a sub-agent's row names its parent."""
    path = tmp_path / "agents.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for number in range(2) for line in agent_and_helper(number)))
    shape = ["--input-file", str(path), "--custom-dataset-type", "dag-jsonl", "--concurrency", "2", SERVER_COUNTS]
    environment = {"AIPERF_HTTP_X_DYNAMO_SESSION_ID_FROM_CORRELATION_ID": "1"}
    report = await profile(
        tmp_path / "run", system.url, system.addresses["model"], *shape, *EXACT_OUTPUT, environment=environment
    )
    rows = await rows_of(system, report)
    assert_agrees(report, rows)
    assert sorted(len(each) for each in conversations(report, rows).values()) == [2, 2, 3, 3]
    keys = {row.context.session for row in rows.values() if row.context}
    assert {key.family for key in keys if key} == {"dynamo"}
    parents = {request_id: row.context.parent_session_id for request_id, row in rows.items() if row.context}
    assert parents == {request_id: each.parent for request_id, each in report.exchanges.items()}
    assert sum(parent is not None for parent in parents.values()) == 4


def agent_and_helper(number: int) -> list[dict[str, object]]:
    """An agent of three turns that spawns a helper of two with its first, in AIPerf's ``dag_jsonl``."""

    def message(role: str, topic: str, sentences: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(f"{topic} reads file {line * 7}." for line in range(sentences))}

    def turns(*topics: str) -> list[dict[str, object]]:
        asked: list[dict[str, object]] = [
            {"messages": [message("user", f"{topic} {number}", 20)], "max_tokens": 20} for topic in topics
        ]
        asked[0]["messages"] = [message("system", "An agent", 60), message("user", f"{topics[0]} {number}", 20)]
        return asked

    agent, helper = turns("Plan", "Join", "End"), turns("Look", "Answer")
    agent[0]["spawns"] = [f"helper-{number}"]
    return [{"session_id": f"agent-{number}", "turns": agent}, {"session_id": f"helper-{number}", "turns": helper}]


async def test_a_recorded_run_on_its_schedule(system: RunningSystem, tmp_path: Path) -> None:
    """Our recording as a Mooncake trace of whole prompts: as many requests and tokens as were recorded, at their own
    times, and prompts that share what they shared. Each line is a session of its own."""
    path = tmp_path / "trace.jsonl"
    assert main(["trace", "export", str(RUN), "--as", "mooncake", "--open-loop", "-o", str(path)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    shape = ["--input-file", str(path), "--custom-dataset-type", "mooncake-trace", "--fixed-schedule", SERVER_COUNTS]
    report = await profile(tmp_path / "run", system.url, system.addresses["model"], *shape, *EXACT_OUTPUT)
    rows = await rows_of(system, report)
    assert_agrees(report, rows)
    assert len(rows) == len(lines)
    assert len(conversations(report, rows)) == len(lines)
    sent = sorted(row.metrics.input_tokens or 0 for row in rows.values())
    assert sent == pytest.approx(sorted(line["input_length"] + TEMPLATE_TOKENS for line in lines), rel=0.01)
    asked = sorted(line["output_length"] for line in lines)
    assert sorted(row.metrics.output_tokens or 0 for row in rows.values()) == asked
    recorded_ms = lines[-1]["timestamp"] - lines[0]["timestamp"]
    starts = [each.start_ms for each in report.exchanges.values()]
    assert max(starts) - min(starts) > 0.9 * recorded_ms
    assert hit_ratio(rows) > 0.4


async def test_a_recorded_run_in_sessions(system: RunningSystem, tmp_path: Path) -> None:
    """The same, each session's later lines holding only what is new: AIPerf puts the conversations together, with the
    answers that it gets, and its sessions are the recorded ones."""
    path = tmp_path / "trace.jsonl"
    assert main(["trace", "export", str(RUN), "--as", "mooncake", "--deltas", "-o", str(path)]) == 0
    shape = ["--input-file", str(path), "--custom-dataset-type", "mooncake-trace", "--fixed-schedule", SERVER_COUNTS]
    report = await profile(tmp_path / "run", system.url, system.addresses["model"], *shape, *EXACT_OUTPUT)
    rows = await rows_of(system, report)
    assert_agrees(report, rows)
    recorded = {
        tuple(turn.replay.input_length for turn in turns if turn.replay)
        for turns in read_trace([RUN]).sessions().values()
    }
    found = conversations(report, rows)
    played = sorted(tuple(turn.metrics.input_tokens or 0 for turn in turns) for turns in found.values())
    assert len(played) == len(recorded)
    for was, now in zip(sorted(recorded), played, strict=True):
        assert now == pytest.approx(was, rel=0.01)
    stayed = [stickiness(turns) for turns in found.values()]
    assert sum(same for same, _ in stayed) > 0.9 * sum(of for _, of in stayed), stayed
    assert hit_ratio(rows) > 0.7
