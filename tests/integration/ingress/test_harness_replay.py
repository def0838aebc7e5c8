"""Every recorded request of every harness, whole, through the front door to the simulated engine, in its own API.

A witness stands before the engine and keeps what it got and what it said, byte by byte. What must hold, harness.md §6:
bytes pass unchanged outside the documented splices, in both directions, with the headers that name a session; each
request is its agent's, and side requests move no session; every earlier message of a conversation is found again, so
that the engine's cache has it; and our tokens are the engine's.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

import pytest
import pytest_asyncio

from bus import subjects
from bus.interface import Bus, BusMessage
from schemas.base import from_json
from schemas.request import RequestAccepted
from schemas.session import SessionFact, SessionKey
from schemas.trace import RequestMetrics
from services.ingress.endpoints import endpoint_of, read_request
from services.ingress.message_chain import message_chain
from tests.integration.ingress.support import ASSETS, MODEL, Door, System, running_bridged, until
from tests.support.harness import (
    AIDER,
    CLAUDE,
    CODEX,
    HARNESSES,
    QWEN,
    WHO,
    Expected,
    Row,
    Whole,
    expectations,
    first_of,
    recorded,
    whole,
)
from tests.support.recognition import WHO as SENDERS
from web.client import Answer, HttpClient, Timeouts
from web.headers import Headers, find
from web.server import HttpServer, Request, Responder

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

HOP = {"host", "connection", "content-length", "accept-encoding"}
"""Headers that the replaying client writes itself."""

USAGE = b'"stream_options":{"include_usage":true}'
BLOCK = 16


@dataclass
class Seen:
    """One request as the engine got it, and what the engine said."""

    request: Request
    status: int = 0
    said: bytes = b""


class Witness:
    """What stands before an engine: passes everything on, and keeps it by our request id."""

    def __init__(self) -> None:
        self.seen: dict[str, Seen] = {}
        self._engine = ""
        self._client = HttpClient()
        self._server = HttpServer(self._handle)

    async def before(self, engine: str) -> str:
        """Its own URL, before the engine's."""
        self._engine = engine
        await self._server.start("127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.port}"

    async def close(self) -> None:
        await self._server.close()
        await self._client.close()

    async def _handle(self, request: Request, responder: Responder) -> None:
        headers = [(name, value) for name, value in request.headers if name.lower() not in (b"host", b"content-length")]
        url = self._engine + request.target
        answer = await self._client.fetch(request.method, url, headers, request.body, Timeouts(total_s=60))
        name = find(request.headers, b"x-request-id")
        if name is not None:
            self.seen[name.decode()] = Seen(request, answer.status, answer.body)
        framing = (b"content-length", b"transfer-encoding", b"connection")
        kept = [(name, value) for name, value in answer.headers if name.lower() not in framing]
        responder.send(answer.status, kept, answer.body)


@dataclass
class Sent:
    """One recorded request, sent again."""

    harness: str
    scenario: str
    expected: Expected
    row: Row
    headers: Headers
    body: bytes
    answer: Answer | None = None

    @property
    def request_id(self) -> str:
        assert self.answer is not None
        return (self.answer.header("x-request-id") or b"").decode()

    @property
    def agent(self) -> tuple[object, ...]:
        """Whose it is; of a request without identity: nobody's else."""
        return (self.harness, self.scenario, *(self.expected.path or (id(self),)))

    @property
    def moves(self) -> bool:
        return self.expected.kind == "turn"


@dataclass
class Replay:
    """Everything that was sent, and what the house said of it."""

    sent: list[Sent]
    seen: dict[str, Seen]
    rows: dict[str, RequestMetrics]
    accepted: dict[str, RequestAccepted]
    facts: dict[SessionKey, list[SessionFact]]
    head: Answer
    resident: set[int] = field(default_factory=set)

    def agents(self) -> dict[tuple[object, ...], list[Sent]]:
        """Requests by agent, in order of arrival."""
        agents: dict[tuple[object, ...], list[Sent]] = defaultdict(list)
        for sent in self.sent:
            agents[sent.agent].append(sent)
        return agents


def prepared() -> list[Sent]:
    """The recordings, for our model."""
    flat = [(scenario, row) for scenario, rows in recorded().items() for row in rows]
    expected = [entry for harness, scenario in recorded() for entry in expectations(WHO[harness][scenario])]
    return [
        Sent(harness, scenario, who, row, _headers(request), _body(request))
        for ((harness, scenario), row), who, request in zip(flat, expected, whole(), strict=True)
    ]


def _headers(request: Whole) -> Headers:
    return [(name.encode(), value.encode()) for name, value in request.headers if name.lower() not in HOP]


def _body(request: Whole) -> bytes:
    """As harnesses write it: compact, not escaped."""
    return json.dumps(request.body | {"model": MODEL}, ensure_ascii=False, separators=(",", ":")).encode()


async def replayed(door: Door, sent: list[Sent], house: House) -> None:
    """Scenarios beside each other, each in its order; token counts that follow each other at once, as they came. A
    turn comes when the one before is over for admission too, as after a tool."""
    places = asyncio.Semaphore(6)
    turns: Counter[object] = Counter()

    async def send(one: Sent) -> None:
        url = door.url + one.row["path"]
        one.answer = await door.client.fetch("POST", url, one.headers, one.body, Timeouts(total_s=60))
        if one.moves and one.expected.path:
            turns[one.agent] += 1
            await until(lambda: house.ended(one.request_id) >= turns[one.agent])

    async def play(scenario: list[Sent]) -> None:
        async with places:
            for kind, group in groupby(scenario, key=lambda one: one.expected.kind):
                if kind == "count_tokens":
                    await asyncio.gather(*map(send, group))
                else:
                    for one in group:
                        await send(one)

    scenarios = groupby(sent, key=lambda one: (one.harness, one.scenario))
    await asyncio.gather(*(play(list(scenario)) for _, scenario in scenarios))


class House:
    """What is said on the bus of requests and sessions."""

    def __init__(self) -> None:
        self.accepted: dict[str, RequestAccepted] = {}
        self.facts: dict[SessionKey, list[SessionFact]] = defaultdict(list)

    async def listen(self, bus: Bus) -> None:
        await bus.subscribe(f"{subjects.ROOT}.request.accepted.>", self._on_accepted)
        await bus.subscribe(f"{subjects.ROOT}.session.>", self._on_session)
        await bus.flush()

    def ended(self, request_id: str) -> int:
        """How many turns of this request's session are over."""
        known = self.accepted.get(request_id)
        return sum(fact.state == "acting" for fact in self.facts[known.identity.key]) if known else 0

    def _on_accepted(self, message: BusMessage) -> None:
        fact = from_json(message.payload, RequestAccepted)
        self.accepted[fact.request_id] = fact

    def _on_session(self, message: BusMessage) -> None:
        fact = from_json(message.payload, SessionFact)
        self.facts[fact.session].append(fact)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replay(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Replay]:
    """All recordings, sent once through one front door to one engine whose cache loses nothing."""
    async with AsyncExitStack() as stack:
        witness, heard = Witness(), House()
        stack.push_async_callback(witness.close)
        directory = tmp_path_factory.mktemp("harnesses")
        engine: dict[str, Any] = {"num_blocks": 300_000, "max_model_len": 300_000, "mean_output_tokens": 24}
        system = await stack.enter_async_context(running_bridged(directory, 1, front=witness.before, **engine))
        await heard.listen(system.bus)
        settings: dict[str, Any] = {"tokenizers": {MODEL: str(ASSETS)}, "tokenize": "local", "tokenize_timeout_s": 60.0}
        async with system.door(**settings, trace_fine_tokens=1_000_000, tokenize_queue=512) as door:
            sent = prepared()
            await replayed(door, sent, heard)
            head = await door.client.fetch("HEAD", door.url + "/", [], b"", Timeouts(total_s=10))
            assert door.service.in_flight == 0
            await until(lambda: len(_rows(system)) >= len(sent), 30)
        yield Replay(sent, witness.seen, _rows(system), heard.accepted, heard.facts, head, await _resident(system))


def _rows(system: System) -> dict[str, RequestMetrics]:
    return {row.request.request_id: row.request for row in system.rows.rows if row.request is not None}


async def _resident(system: System) -> set[int]:
    """Our hashes of all blocks that the engine has."""
    (engine,) = system.engines.values()
    answer = await engine.client.fetch("GET", f"{engine.url}/sim/resident", [], b"")
    ranks = json.loads(answer.body)["ranks"]
    return {int(value, 16) for rank in ranks.values() for value in rank["chain_hashes"]}


NAMES_A_SESSION = {
    b"anthropic-beta",
    b"anthropic-version",
    b"session-id",
    b"session_id",
    b"thread-id",
    b"user-agent",
    b"x-claude-code-agent-id",
    b"x-claude-code-parent-agent-id",
    b"x-claude-code-session-id",
    b"x-codex-parent-thread-id",
    b"x-codex-turn-metadata",
    b"x-codex-window-id",
    b"x-parent-session-id",
    b"x-session-affinity",
    b"x-session-id",
}
"""Headers that an engine must get as they came: both Rust routers lose some of them."""


def spliced(sent: Sent) -> bytes:
    """The recorded body with what the front door may put in front of its members, and nothing else."""
    members = []
    if sent.moves and sent.expected.path:
        members.append(b'"session_id":' + json.dumps(first_of(sent.row, HARNESSES[sent.harness].own)).encode())
    if asks_usage(sent):
        members.append(USAGE)
    return b"{" + b"".join(member + b"," for member in members) + sent.body[1:]


def asks_usage(sent: Sent) -> bool:
    """Whether usage is asked for in the client's place."""
    body = sent.row["body"]
    return "chat" in sent.row["path"] and bool(body.get("stream")) and not body.get("stream_options")


async def test_bytes_pass_unchanged(replay: Replay) -> None:
    """To the engine: the target, the body but for the splices, the headers that name a session. Back: every byte, but
    for the usage that the client did not ask for."""
    stripped = 0
    for sent in replay.sent:
        seen = replay.seen[sent.request_id]
        assert seen.request.target == sent.row["path"]
        assert seen.request.body == spliced(sent)
        named = [(name, value) for name, value in sent.headers if name.lower() in NAMES_A_SESSION]
        assert [each for each in seen.request.headers if each[0].lower() in NAMES_A_SESSION] == named
        assert sent.answer is not None
        assert (sent.answer.status, seen.status) == (200, 200)
        said = seen.said
        if asks_usage(sent):
            events = said.split(b"\n\n")
            said = b"\n\n".join(event for event in events if b'"choices":[]' not in event)
            stripped += len(said) != len(seen.said)
        assert sent.answer.body == said
    assert stripped == sum(map(asks_usage, replay.sent)) == 14


async def test_each_request_is_its_agents(replay: Replay) -> None:
    """One row and one fact each, with the agent and the kind that harness.md says; agents are told apart."""
    keys: dict[tuple[object, ...], SessionKey] = {}
    assert len(replay.rows) == len(replay.accepted) == len(replay.sent) == 326
    for sent in replay.sent:
        row, fact = replay.rows[sent.request_id], replay.accepted[sent.request_id]
        identity = fact.identity
        assert (row.outcome, row.kind, fact.kind) == ("completed", sent.expected.kind, sent.expected.kind)
        assert keys.setdefault(sent.agent, identity.key) == identity.key
        if not sent.expected.path:
            assert identity.key == SessionKey(family="request", root=sent.request_id)
            continue
        assert (identity.key.family, identity.weak) == (HARNESSES[sent.harness].family, sent.expected.weak)
        assert identity.session_id == first_of(sent.row, HARNESSES[sent.harness].own)
        parent = (sent.harness, sent.scenario, *sent.expected.path[:-1])
        assert identity.parent == (keys[parent] if len(sent.expected.path) > 1 else None)
    assert len(set(keys.values())) == len(keys)


async def test_only_turns_move_sessions(replay: Replay) -> None:
    """Each session opens once, below its parent, and acts after each turn; titles, compactions and counts leave its
    turns and its context as they are; a request without identity is a session that is over with it."""
    for requests in replay.agents().values():
        turns = [sent for sent in requests if sent.moves]
        last = replay.rows[turns[-1].request_id]
        identity = replay.accepted[requests[0].request_id].identity
        facts = [fact for fact in replay.facts[identity.key] if fact.state in ("opened", "acting", "closed")]
        if not requests[0].expected.path:
            assert [fact.state for fact in facts] == ["opened", "closed"]
            continue
        assert [fact.state for fact in facts] == ["opened"] + ["acting"] * len(turns)
        assert {fact.parent for fact in facts} == {identity.parent}
        assert facts[-1].turns == len(turns)
        assert facts[-1].context_tokens == (last.input_tokens or 0) + (last.output_tokens or 0)


async def test_every_earlier_message_matches(replay: Replay) -> None:
    """From turn to turn of each conversation, unless its harness has made its history shorter between them: all parts
    of the prompt before, in what the engine got; the engine had all of its blocks cached, and we knew it."""
    pairs, known, rewritten = 0, 0, []
    for talk, requests in conversations(replay.sent).items():
        numbers = [number for number, sent in enumerate(requests) if sent.moves]
        for one, two in pairwise(numbers):
            before, after = requests[one], requests[two]
            if any(sent.expected.kind == "compaction" for sent in requests[one:two]):
                continue
            if not parts(replay, after).startswith(parts(replay, before)):
                rewritten.append((*talk, one, two))
                continue
            row, earlier = replay.rows[after.request_id], replay.rows[before.request_id]
            cached, asked = row.cached_tokens or 0, earlier.input_tokens or 0
            assert asked - cached <= 2 * BLOCK  # the prompt's last words ask for an answer
            pairs += 1
            known += row.predicted_cached_tokens == cached
    assert sorted(rewritten) == sorted(REWRITTEN)
    assert pairs == 189
    assert known >= 0.9 * pairs  # an event may come after the next question


AIDER_AGAIN = (AIDER, "two-runs-restore-history", "A", 0, 1)
QWEN_RESUMED = [(QWEN, f"{api}-subagent-continue", "A", 3, 4) for api in ("chat", "responses")]
REWRITTEN = (AIDER_AGAIN, *QWEN_RESUMED)
"""Harness, scenario, agent and the numbers of two turns of his between which the harness itself changed what it had
said before; why, say the two tests below."""


def recorded_messages(talk: tuple[str, str, str, int, int]) -> tuple[list[Any], list[Any]]:
    """Of the two turns, as recorded."""
    requests = conversations(prepared())[talk[:3]]
    before, after = (json.loads(requests[number].body) for number in talk[3:])
    name = "messages" if "messages" in before else "input"
    return before[name], after[name]


async def test_aider_puts_what_it_restores_before_its_files() -> None:
    """Its second run has the first one's question and answer between the examples and the files, where the first run
    had the files at once: equal are the five messages before them, and the two of the files, two places later."""
    before, after = recorded_messages(AIDER_AGAIN)
    assert (len(before), len(after)) == (8, 10)
    assert after[:5] == before[:5]
    assert after[7:9] == before[5:7] != after[5:7]
    assert [message["role"] for message in after[5:7]] == ["user", "assistant"]


@pytest.mark.parametrize("talk", QWEN_RESUMED, ids=[talk[1] for talk in QWEN_RESUMED])
async def test_qwen_drops_a_reminder_when_it_is_resumed(talk: tuple[str, str, str, int, int]) -> None:
    """``-c``: the fourth of the five texts of its first user message is gone; all others, and all that was said since,
    are as they were."""
    before, after = recorded_messages(talk)
    first = next(number for number, message in enumerate(before) if message.get("role") == "user")
    said, says = before[first].pop("content"), after[first].pop("content")
    assert len(said) == 5
    assert says == said[:3] + said[4:]
    assert after[: len(before)] == before


def conversations(sent: Sequence[Sent]) -> dict[tuple[str, ...], list[Sent]]:
    """Requests by who sent them in truth, also where no header says so."""
    truth = {
        scenario: [
            who for entry in text.split() for who, _, times in [entry.partition("*")] for _ in range(int(times or 1))
        ]
        for scenario, text in SENDERS.items()
    }
    talks: dict[tuple[str, ...], list[Sent]] = defaultdict(list)
    for scenario, group in groupby(sent, key=lambda one: (one.harness, one.scenario)):
        for number, one in enumerate(group):
            who = (truth[scenario][number],) if scenario in truth else one.expected.path
            talks[(*scenario, *who)].append(one)
    return talks


def parts(replay: Replay, sent: Sent) -> bytes:
    """Hashes of all parts of the prompt that the engine got."""
    endpoint = endpoint_of(sent.row["path"])
    assert endpoint is not None
    chain = message_chain(read_request(endpoint, replay.seen[sent.request_id].request.body))
    assert chain is not None
    return chain.hashes


async def test_tokens_are_the_engines(replay: Replay) -> None:
    """Every block of every prompt, as we hash it, is one that the engine has; none is expected that was not there."""
    for sent in replay.sent:
        row = replay.rows[sent.request_id]
        if sent.expected.kind == "count_tokens":
            said = json.loads(replay.seen[sent.request_id].said)
            assert (row.input_tokens, row.grant_id, row.usage_estimated) == (said["input_tokens"], None, None)
            continue
        assert row.replay is not None
        assert (row.replay.trace_block_size, row.replay.input_length) == (BLOCK, row.input_tokens)
        whole_blocks = row.replay.input_sequence_hashes[: row.replay.input_length // BLOCK]
        assert replay.resident.issuperset(whole_blocks)
        assert (row.predicted_cached_tokens or 0) <= (row.cached_tokens or 0)


# What others stumble over: recorded, sent, and served like everything else above


async def test_head_of_the_root(replay: Replay) -> None:
    """Old versions of Claude Code ask `HEAD /` once at their start: answered, without a body, and no request."""
    assert (replay.head.status, replay.head.body) == (200, b"")
    assert len(replay.rows) == len(replay.sent) == 326


async def test_25_counts_at_once(replay: Replay) -> None:
    """`/context`: sent beside each other, each has the engine's number and one row, costs no grant, and is of the
    session whose header it carries."""
    counts: dict[str, list[Sent]] = defaultdict(list)
    for sent in replay.sent:
        if sent.expected.kind == "count_tokens":
            counts[sent.scenario].append(sent)
    assert sorted(map(len, counts.values())) == [24, 25]
    for group in counts.values():
        rows = [replay.rows[sent.request_id] for sent in group]
        assert {(row.kind, row.outcome, row.grant_id, row.output_tokens) for row in rows} == {
            ("count_tokens", "completed", None, 0)
        }
        said = [json.loads(replay.seen[sent.request_id].said)["input_tokens"] for sent in group]
        assert [row.input_tokens for row in rows] == said
        (session,) = {replay.accepted[sent.request_id].identity.key for sent in group}
        assert session.family == "claude_code"


async def test_tools_in_namespaces(replay: Replay) -> None:
    """Codex: a tool that holds tools passes as it came, and its functions are in the prompt, so that our tokens are the
    engine's (`test_tokens_are_the_engines`)."""
    with_namespace = []
    for sent in replay.sent:
        for tool in json.loads(sent.body).get("tools", ()):
            if tool.get("type") == "namespace":
                assert tool["tools"]
                assert json.loads(replay.seen[sent.request_id].request.body)["tools"].count(tool) == 1
                with_namespace.append(sent)
    assert len(with_namespace) == 76
    assert {sent.harness for sent in with_namespace} == {CODEX}
    assert {replay.rows[sent.request_id].outcome for sent in with_namespace} == {"completed"}


async def test_system_messages_in_a_conversation(replay: Replay) -> None:
    """Claude Code: `role: system` among Messages, whose texts become lists and plain again; each is a part of the
    prompt that is found again on the next turn (`test_every_earlier_message_matches`)."""
    with_system = [
        sent
        for sent in replay.sent
        if sent.row["path"].startswith("/v1/messages")
        and any(message["role"] == "system" for message in json.loads(sent.body)["messages"])
    ]
    assert len(with_system) == 78
    assert {sent.harness for sent in with_system} == {CLAUDE}
    assert {replay.rows[sent.request_id].outcome for sent in with_system} == {"completed"}
    shapes = {
        type(message["content"])
        for sent in with_system
        for message in json.loads(sent.body)["messages"]
        if message["role"] == "system"
    }
    assert shapes == {str, list}


async def test_headers_of_900_bytes(replay: Replay) -> None:
    """Codex's `x-codex-turn-metadata` reaches the engine whole, and the turn that it names is known."""
    name = b"x-codex-turn-metadata"
    found = {}
    for sent in replay.sent:
        said = find(sent.headers, name)
        if said is None:
            continue
        assert find(replay.seen[sent.request_id].request.headers, name) == said
        assert replay.accepted[sent.request_id].identity.turn_id == json.loads(said)["turn_id"]
        found[sent.request_id] = len(said)
    assert len(found) == sum(sent.harness == CODEX for sent in replay.sent) > 0
    assert max(found.values()) == 899
