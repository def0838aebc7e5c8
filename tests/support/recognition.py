"""Recorded harnesses without their headers: whose turn does the recogniser take each request for?

``python -m tests.support.recognition`` prints the figures as one JSON object. The recordings are
``tests/fixtures/harness/conversations.jsonl.gz``; who sent what is known from their headers, where they have some, else
from `WHO` (spec: harness.md §1-§5). Every request goes through the front door's own reading of its body and then to the
recogniser, with nothing but its messages; it is over before the next one comes, as nothing else was recorded.
"""

from __future__ import annotations

import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvcore.session_index import SessionLimits
from schemas.index import RecogniseReply, RecogniseRequest
from schemas.placed import Placed
from schemas.request import Outcome, RequestEnd, Usage
from schemas.session import SessionIdentity, SessionKey
from services.indexer.recognising import Recogniser
from services.ingress.endpoints import endpoint_of, read_request
from services.ingress.identity import read_headers, resolve
from services.ingress.message_chain import MessageChain, message_chain

FIXTURE = Path(__file__).parents[1] / "fixtures" / "harness" / "conversations.jsonl.gz"

WHO = {
    ("aider-0.86.2", "two-runs-restore-history"): "A*2",
    ("mini-swe-agent-2.4.6", "run"): "A*4",
    ("openai-agents-0.24.0", "chat-agent-as-tool"): "A*2 A>a A*3",
    ("openai-agents-0.24.0", "responses-agent-as-tool"): "A*2 A>a A*3",
    ("langgraph-1.2.24", "chat-subgraph"): "A*2 A>a*2 A*3",
    ("langgraph-1.2.24", "responses-subgraph"): "A*2 A>a*2 A*3",
    ("pi-1.6.0", "anthropic-continue"): "A*4",
    ("pi-1.6.0", "chat-continue"): "A*4",
    ("qwen-code-0.24.4", "chat-subagent-continue"): "A*3 A>a*2 A*3",
    ("qwen-code-0.24.4", "responses-subagent-continue"): "A*2 A>a A A>a A*3",
}
"""Who sent what where no header says so: ``A`` the root agent, ``A>a`` its sub-agent, ``*3`` three times."""

HASH_BYTES = 8
NO_USAGE = Usage()


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request. ``who``: its conversation, by scenario; ``parent``: of a sub-agent, its parent's."""

    harness: str
    scenario: str
    who: str
    parent: str | None
    kind: str
    failed: bool
    at_s: float
    chain: MessageChain

    @property
    def hashes(self) -> bytes:
        return self.chain.hashes

    def begins_with(self, other: Recorded) -> bool:
        return self.hashes.startswith(other.hashes)


def recorded() -> list[Recorded]:
    """All of them, in the order of the fixture: scenario by scenario, in order of arrival."""
    with gzip.open(FIXTURE, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    tables = {key: iter(list(_notation(text))) for key, text in WHO.items()}
    return [_recorded(row, tables) for row in rows]


def _recorded(row: dict[str, Any], tables: dict[tuple[str, str], Iterator[str]]) -> Recorded:
    endpoint = endpoint_of(row["path"].partition("?")[0])
    assert endpoint is not None
    request = read_request(endpoint, json.dumps(row["body"]).encode())
    headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in row["headers"]]
    resolved = resolve(read_headers(headers), request.facts, endpoint, request_id="unknown")
    chain = message_chain(request)
    assert chain is not None
    key = (row["harness"], row["scenario"])
    if key in tables:
        who = next(tables[key])
        parent = who.rpartition(">")[0] or None
    else:
        identity = resolved.identity
        assert identity.key.family != "request"
        who, parent = identity.key.text(), identity.parent.text() if identity.parent is not None else None
    return Recorded(
        *key, "|".join((*key, who)), "|".join((*key, parent)) if parent is not None else None, resolved.kind,
        row["failed"], row["at_s"], chain,
    )  # fmt: skip


def _notation(text: str) -> Iterator[str]:
    for entry in text.split():
        who, _, times = entry.partition("*")
        yield from [who] * int(times or 1)


def placed(session: SessionKey, request_id: str, chain: MessageChain, *, parent: SessionKey | None = None) -> Placed:
    """What is said of a prompt that was placed."""
    return Placed(
        source="admission-1", epoch=1, seq=1, at_ms=1, request_id=request_id, model="m", worker="w", rank=0,
        session=session, parent=parent, message_chain=chain.hashes, preamble=chain.preamble,
    )  # fmt: skip


@dataclass(slots=True)
class House:
    """A recogniser, and what a front door and an admission do around it."""

    recogniser: Recogniser = field(default_factory=lambda: Recogniser(SessionLimits()))
    requests: int = 0

    def send(self, chain: MessageChain, now: float, *, failed: bool = False) -> tuple[SessionKey, RecogniseReply]:
        """One request from its question to its end: the session it was taken for, and the answer."""
        reply = self.begin(chain, now)
        session = self.session_of(reply)
        self.end(session, failed=failed, now=now)
        return session, reply

    def begin(self, chain: MessageChain, now: float) -> RecogniseReply:
        """It is asked about, and placed."""
        self.requests += 1
        question = RecogniseRequest(
            model="m", message_chain=chain.hashes, preamble=chain.preamble, request_id=self.request_id
        )
        reply = self.recogniser.recognise(question, "indexer-1", now)
        self.recogniser.placed(placed(self.session_of(reply), self.request_id, chain, parent=reply.parent), now)
        return reply

    def end(
        self,
        session: SessionKey,
        *,
        request_id: str | None = None,
        failed: bool = False,
        outcome: Outcome | None = None,
        usage: Usage = NO_USAGE,
        now: float = 0.0,
    ) -> None:
        """It is over."""
        end = RequestEnd(
            source="ingress-1", epoch=1, seq=1, at_ms=1, request_id=request_id or self.request_id, model="m",
            identity=SessionIdentity(key=session, session_id=session.root),
            outcome=outcome or ("upstream_error" if failed else "completed"), usage=usage,
        )  # fmt: skip
        self.recogniser.ended(end, now)

    def session_of(self, reply: RecogniseReply) -> SessionKey:
        """Whose it is by that answer: of a new session, the request's own."""
        return reply.session or SessionKey(family="prefix", root=self.request_id)

    @property
    def request_id(self) -> str:
        """Of the newest request."""
        return f"r{self.requests}"


@dataclass(slots=True)
class Evaluation:
    """Replays requests into one house, and counts by what each was in truth and what it was taken for."""

    house: House = field(default_factory=House)
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    before: list[Recorded] = field(default_factory=list)
    last_of: dict[SessionKey, Recorded] = field(default_factory=dict)

    def replay(self, requests: Iterable[Recorded]) -> Evaluation:
        for now, request in enumerate(requests):
            session, reply = self.house.send(request.chain, float(now), failed=request.failed)
            self._count(request, reply)
            self.last_of[session] = request
            self.before.append(request)
        return self

    def _count(self, request: Recorded, reply: RecogniseReply) -> None:
        """What it was, by its own conversation and everybody's content; and whether that was seen."""
        counts = self.counts
        counts["requests"] += 1
        given = self.last_of[reply.session] if reply.session is not None else None
        own = [each for each in self.before if each.who == request.who and each.kind == "turn"]
        extended = [each for each in self.before if request.begins_with(each)]
        right = given is not None and given.who == request.who
        label = f"{request.harness}/{request.scenario} #{len(own)} of {request.who}: {reply.relation} {reply.reason}"
        if request.kind != "turn":
            self._apart("side", request, given, label)
        elif any(each.hashes == request.hashes for each in own):
            self._apart("resent", request, given, label)
        elif not own and any(len(each.hashes) > request.chain.preamble * HASH_BYTES for each in extended):
            counts["forks_at_the_end"] += 1
            counts["forks_at_the_end_taken_as_continuing"] += given is not None
        elif extended and any(each in own for each in extended):
            counts["extending"] += 1
            counts["extending_right"] += right
            if given is None:
                self.missed.append(label)
            elif not right:
                self.wrong.append(label)
        elif own:
            self._apart("rewritten", request, given, label)
        else:
            what = "sub_agents" if request.parent is not None else "first_turns"
            counts[what] += 1
            counts[f"{what}_told_apart"] += given is None
            if given is not None:
                self.wrong.append(label)

    def _apart(self, what: str, request: Recorded, given: Recorded | None, label: str) -> None:
        self.counts[what] += 1
        if given is None:
            return
        if given.who == request.who:
            self.counts[f"{what}_right"] += 1
        else:
            self.wrong.append(label)

    def figures(self) -> dict[str, Any]:
        counts = self.counts
        return {
            **{name: counts[name] for name in sorted(counts)},
            "share_right": round(counts["extending_right"] / counts["extending"], 4) if counts["extending"] else None,
            "wrong": len(self.wrong),
            "missed": self.missed,
            "wrong_ones": self.wrong,
        }


def apart(requests: Iterable[Recorded]) -> Evaluation:
    """Each scenario in a house of its own, counted together."""
    scenarios: dict[tuple[str, str], list[Recorded]] = defaultdict(list)
    for request in requests:
        scenarios[request.harness, request.scenario].append(request)
    whole = Evaluation()
    for each in scenarios.values():
        one = Evaluation().replay(each)
        whole.counts.update(one.counts)
        whole.wrong += one.wrong
        whole.missed += one.missed
    return whole


def interleaved(requests: Iterable[Recorded]) -> list[Recorded]:
    """As if all scenarios had begun at once."""
    return sorted(requests, key=lambda request: request.at_s)


@dataclass(slots=True)
class Forks:
    """What becomes of forks of recorded conversations, one for every recorded turn that has an answer in it."""

    made: int = 0
    told_apart: int = 0
    parent_named: int = 0
    originals: int = 0
    originals_right: int = 0
    forks_continued: int = 0


def forked(requests: Iterable[Recorded]) -> Forks:
    """Before every recorded turn that goes on from another, somebody else forks from the middle of it: all but its last
    part, then something else. The conversation goes on all the same, and so does the fork, once."""
    result = Forks()
    scenarios: dict[tuple[str, str], list[Recorded]] = defaultdict(list)
    for request in requests:
        scenarios[request.harness, request.scenario].append(request)
    for each in scenarios.values():
        house, session_of, firsts = House(), dict[str, SessionKey](), dict[str, int]()
        for number, request in enumerate(each):
            if request.kind != "turn" or request.failed:
                continue
            session, _ = house.send(request.chain, float(number))
            before = session_of.get(request.who)
            if before is not None:
                result.originals += 1
                result.originals_right += session == before
            session_of[request.who] = session
            first = firsts.setdefault(request.who, len(request.hashes))
            middle = request.hashes[:-HASH_BYTES]
            if session != before or len(middle) <= first:
                continue
            _fork(house, middle, request.chain.preamble, session, number, result)
    return result


def _fork(house: House, middle: bytes, preamble: int, parent: SessionKey, number: int, result: Forks) -> None:
    given, answer, more = (((number + 1) << 16 | step).to_bytes(HASH_BYTES, "little") for step in (2, 5, 6))
    result.made += 1
    fork, reply = house.send(MessageChain(middle + given, preamble), float(number))
    result.told_apart += reply.session is None
    result.parent_named += reply.relation == "forks" and reply.parent == parent
    again, _ = house.send(MessageChain(middle + given + answer + more, preamble), float(number))
    result.forks_continued += again == fork


def report() -> dict[str, Any]:
    """All figures."""
    requests = recorded()
    by_harness = {
        name: apart(request for request in requests if request.harness == name).figures()
        for name in dict.fromkeys(request.harness for request in requests)
    }
    forks = forked(requests)
    return {
        "bench": "recognition",
        **apart(requests).figures(),
        "one_house": Evaluation().replay(requests).figures(),
        "one_house_interleaved": Evaluation().replay(interleaved(requests)).figures(),
        "forks": {name: getattr(forks, name) for name in Forks.__slots__},
        "by_harness": by_harness,
    }


if __name__ == "__main__":
    print(json.dumps(report()))
