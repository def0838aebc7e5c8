"""What harnesses that tell nothing leave to be inferred: from the end of a turn that called tools to the arrival of the
session's next turn they ran (spec: identity-and-traces §2.11). An upper bound, the same for all calls of one turn.

Only sessions that have never told of a tool themselves. Only turns that follow each other: where a session's next
request is accepted before the last has ended, nothing is said.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from schemas.request import RequestAccepted, RequestEnd
from schemas.session import MOVES_SESSION, SessionIdentity, SessionKey


@dataclass(frozen=True, slots=True)
class InferredCall:
    """One call. ``call_id`` is ours: the request's id and the call's place in its answer. Times in Unix ms."""

    identity: SessionIdentity
    call_id: str
    tool: str
    started_ms: int
    ended_ms: int


@dataclass(slots=True)
class _Turn:
    """A session's last turn: its request, and since when which tools run. ``tells``: its harness speaks for itself."""

    request_id: str = ""
    tools: tuple[str, ...] = ()
    ended_ms: int = 0
    tells: bool = False


class ToolInference:
    """The last turn of ``limit`` sessions, least recently heard of first out."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._turns: OrderedDict[SessionKey, _Turn] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def accepted(self, fact: RequestAccepted) -> list[InferredCall]:
        """A request arrives; what its session's tools did until now, where nobody said it."""
        identity = fact.identity
        if identity.key.family == "request" or fact.kind not in MOVES_SESSION:
            return []
        turn = self._of(identity.key)
        calls = [
            InferredCall(
                identity, f"{turn.request_id}:{index}", tool, turn.ended_ms, max(turn.ended_ms, fact.received_ms)
            )
            for index, tool in enumerate(turn.tools)
        ]
        turn.request_id, turn.tools = fact.request_id, ()
        return calls

    def ended(self, fact: RequestEnd) -> None:
        """A turn is over, and its tools begin."""
        turn = self._turns.get(fact.identity.key)
        if turn is not None and turn.request_id == fact.request_id and fact.outcome == "completed" and not turn.tells:
            turn.tools, turn.ended_ms = fact.tool_names, fact.at_ms

    def told(self, key: SessionKey) -> None:
        """Its harness tells of tools: from now on nothing is inferred of this session. One that has made no request is
        not remembered: anybody may tell of any."""
        turn = self._turns.get(key)
        if turn is not None:
            turn.tells, turn.tools = True, ()

    def _of(self, key: SessionKey) -> _Turn:
        turn = self._turns.setdefault(key, _Turn())
        self._turns.move_to_end(key)
        while len(self._turns) > self._limit:
            self._turns.popitem(last=False)
        return turn
