"""Whose next turn is a prompt that names nobody? Known by content, or not at all (docs/adr/0016).

Sessions of the family ``prefix`` live here by their message chains (`schemas.index.RecogniseRequest`): where each one's
last prompt ended, whether that was answered, where its first one ended. Fed with what is said of every prompt that is
accepted or placed and of every request that ends, so that all indexers know the same; bounded as its
`kvcore.session_index` is.

The rules, in this order. ``known`` is how much of the asked chain anybody has; an *end* is where a session's last
prompt ended; a session is *busy* while a request of it is not over.

- The whole chain is known: it ``repeats``. A retry, where exactly one session ends there, nobody goes on from there or
  ends on the way, and its request has lately failed, with nothing that its client would have kept. Else a new session,
  a child of the one that was answered, if there is one.
- It goes on from the end of exactly one session, which is not busy; nobody else ever ended there, and nobody has what
  is new in it: it ``continues``.
  What is new begins with an answer. If not (some harnesses drop an answer that they cannot use), an answer that nobody
  else has must be in what is known, and nobody else may end on the way.
- It leaves a session's way behind that one's first answer: it ``forks`` from it. Of several that have the same
  beginning, from the one that all others descend from.
- Else it is ``new``. Having tools, system and a first question in common is not enough.

What two sessions could have said is nobody's (``ambiguous``). So equal conversations (rollouts of one task, people who
say "hi") are told apart once their answers differ, and are never taken for each other before.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcore.session_index import SessionIndex, SessionLimits
from schemas.index import RecogniseReply, RecogniseRequest, Relation
from schemas.placed import Placed
from schemas.request import RequestEnd
from schemas.session import SessionKey

HASH_BYTES = 8
FAMILY = "prefix"

SURE = 0.99
"""The session's own answer is in what both have: somebody else would have had to get the same."""
FIRST_PROMPT = 0.9
"""Only its first prompt is in it: somebody may have asked the same elsewhere, and gone on here."""
STARTED_LATELY = 0.5
"""The same, while we may not have heard of others who asked the same before, or who were forked from it."""
RETRY = 0.8
"""Nothing but the prompt says so: somebody else may ask the same just then."""

UNFINISHED_S = 3_600.0
"""A request whose end was never heard is taken for over after so long: the longest that an engine may take."""

RETRIED_S = 300.0
"""A request that failed is tried again within this time, or its prompt is somebody else's. Harnesses give up after some
70 s (spec: harness.md §2)."""

SETTLED_S = 600.0
"""A conversation's next turn comes within this time, mostly: after it there is nobody any more of whom we do not know
because he was there before us."""

MOST_ENDS = 8
"""Times the bound on sessions: places where prompts ended are remembered."""

MOST_OPEN = 64
"""Requests of one session that are not over, so many are remembered."""

MOST_OVER = 4_096
"""Requests that are over, so many are remembered, as their placement may be heard later."""

MOST_SHARING = 64
"""Of the sessions that have a beginning in common, so many are looked at; of more, none is chosen."""
MOST_FORKS = 64
"""So many forks of forks are followed to a common ancestor."""

Pool = tuple[str, str]
"""Tenant and model."""


@dataclass(slots=True)
class _Known:
    """A session's requests. ``first``: where its first prompt ended. ``open``: request ids that are not over, and since
    when (Unix s). ``failed_at``: the ``newest`` one is over without an answer, since then."""

    first: int
    open: dict[str, float] = field(default_factory=dict)
    failed_at: float | None = None
    newest: str = ""

    def busy(self, now: float) -> bool:
        return any(now - since < UNFINISHED_S for since in self.open.values())

    def begin(self, request_id: str, now: float) -> str | None:
        """A request of it begins, or goes on; the one that is forgotten for it, of too many."""
        self.open.setdefault(request_id, now)
        if len(self.open) <= MOST_OPEN:
            return None
        oldest = next(iter(self.open))
        del self.open[oldest]
        return oldest


@dataclass(frozen=True, slots=True)
class _Asked:
    """One question: the chain, how much of it is known, and the ends on its way, deepest first; of each place two
    sessions at most, for more than one are all the same."""

    pool: Pool
    chain: bytes
    length: int
    preamble: int
    known: int
    ends: list[tuple[int, list[SessionKey]]]

    def hash(self, depth: int) -> int:
        """The hash of the first ``depth`` parts."""
        return int.from_bytes(self.chain[(depth - 1) * HASH_BYTES : depth * HASH_BYTES], "little")

    def answered(self, position: int) -> bool:
        """Whether the model said the part at ``position``."""
        return bool(self.chain[position * HASH_BYTES] & 1)


class Recogniser:
    """What an indexer knows of sessions that are known by their content. ``since``: what was before (Unix s) it has not
    heard. ``relations`` and ``reasons`` count answers since the start."""

    def __init__(self, limits: SessionLimits, since: float = float("-inf")) -> None:
        self.index: SessionIndex[SessionKey] = SessionIndex(limits)
        self.relations: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._known: dict[SessionKey, _Known] = {}
        self._requests: dict[str, SessionKey] = {}
        self._over: OrderedDict[str, float | None] = OrderedDict()
        self._ended: OrderedDict[tuple[Pool, int], SessionKey | None] = OrderedDict()
        self._most_ended = MOST_ENDS * limits.max_sessions
        self._since = since

    @property
    def open_requests(self) -> int:
        """Requests that are not known to be over."""
        return len(self._requests)

    # What happens

    def accepted(self, session: SessionKey, request_id: str, now: float) -> None:
        """A request is a known session's: that one is busy, though its prompt may be held for long. Whoever we took it
        for before (our answer came too late, or was not sure enough) is not."""
        before = self._requests.get(request_id)
        if before is not None and before != session:
            del self._requests[request_id]
            self._known[before].open.pop(request_id, None)
        known = self._known.get(session)
        if known is None or request_id in self._over:
            return
        forgotten = known.begin(request_id, now)
        if forgotten is not None:
            self._requests.pop(forgotten, None)
        self._requests[request_id] = session

    def placed(self, fact: Placed, now: float) -> None:
        """A prompt was placed: where its session ends now. Others than those known by content say nothing here."""
        session, chain = fact.session, fact.message_chain
        if session is None or session.family != FAMILY or not chain or len(chain) % HASH_BYTES:
            return
        pool = (session.tenant, fact.model)
        self._remember_end((pool, int.from_bytes(chain[-HASH_BYTES:], "little")), session)
        if self._has_gone_on(session, chain):
            self.accepted(session, fact.request_id, now)
            return
        gone = self.index.place(session, pool, chain, fact.parent)
        known = self._known.setdefault(session, _Known(len(chain) // HASH_BYTES))
        known.newest, known.failed_at = fact.request_id, self._over.get(fact.request_id)
        self.accepted(session, fact.request_id, now)
        for each in gone:
            self._forget(each)

    def _has_gone_on(self, session: SessionKey, chain: bytes) -> bool:
        """Whether this was an earlier prompt of it, heard of late: these sessions never go back."""
        found = self.index.get(session)
        if found is None or found.depth <= len(chain) // HASH_BYTES:
            return False
        return self.index.chain(session).startswith(chain)

    def _remember_end(self, place: tuple[Pool, int], session: SessionKey) -> None:
        """Who ends, or ever ended, at that place: one session, or several (``None``)."""
        self._ended[place] = session if self._ended.get(place, session) == session else None
        self._ended.move_to_end(place)
        if len(self._ended) > self._most_ended:
            self._ended.popitem(last=False)

    def ended(self, end: RequestEnd, now: float) -> None:
        """A request is over, answered or not. Facts of different kinds may overtake each other."""
        session = self._requests.pop(end.request_id, None)
        if session is None and end.identity.key.family != FAMILY:
            return
        failed_at = None if _has_answer(end) else now
        self._over[end.request_id] = failed_at
        if len(self._over) > MOST_OVER:
            self._over.popitem(last=False)
        known = self._known.get(session) if session is not None else None
        if known is None:
            return
        known.open.pop(end.request_id, None)
        if end.request_id == known.newest:
            known.failed_at = failed_at

    def _forget(self, session: SessionKey) -> None:
        known = self._known.pop(session, None)
        for request_id in known.open if known is not None else ():
            self._requests.pop(request_id, None)

    # The question

    def recognise(self, request: RecogniseRequest, indexer: str, now: float) -> RecogniseReply:
        """The answer by the rules above; its session is seen by it. ``now``: Unix seconds."""
        pool = (request.tenant, request.model)
        known, ends = self.index.ends_on(pool, request.message_chain, 2)
        length = len(request.message_chain) // HASH_BYTES
        preamble = min(request.preamble, length)
        ends = [(depth, sessions) for depth, sessions in ends if depth > preamble]
        asked = _Asked(pool, request.message_chain, length, preamble, known, ends)
        reply = self._answer(asked, indexer, now)
        self.relations[reply.relation] += 1
        if reply.reason is not None:
            self.reasons[reply.reason] += 1
        if reply.session is not None:
            self.index.touch(reply.session)
            if request.request_id and request.request_id not in self._requests:  # else facts have overtaken it
                self.accepted(reply.session, request.request_id, now)
        return reply

    def _answer(self, asked: _Asked, indexer: str, now: float) -> RecogniseReply:
        def say(
            relation: Relation,
            confidence: float,
            reason: str | None = None,
            *,
            session: SessionKey | None = None,
            parent: SessionKey | None = None,
        ) -> RecogniseReply:
            return RecogniseReply(
                indexer=indexer, relation=relation, session=session, parent=parent, confidence=confidence,
                reason=reason, depth=asked.known,
            )  # fmt: skip

        if asked.known <= asked.preamble:
            return say("new", 1.0)
        if asked.known == asked.length:
            retried = self._retried(asked, now)
            if retried is not None:
                return say("repeats", RETRY, "retry", session=retried)
            parent = self._forked(asked)
            return say("repeats", SURE, "asked_before", parent=parent)
        depth, sessions = asked.ends[0] if asked.ends else (0, [])
        if depth == asked.known and len(sessions) == 1:
            session = sessions[0]
            sure = depth > self._known[session].first
            if not asked.answered(depth) and (len(asked.ends) > 1 or not self._has_answer_alone(session, asked)):
                return say("new", 0.0, "no_answer")
            if self._ended.get((asked.pool, asked.hash(depth)), session) != session:
                reason = "ambiguous"
            elif self._known[session].busy(now):
                reason = "in_flight"
            elif sure:
                return say("continues", SURE, session=session)
            elif now - self._since < SETTLED_S:
                return say("continues", STARTED_LATELY, "started_lately", session=session)
            else:
                return say("continues", FIRST_PROMPT, "first_prompt", session=session)
        else:
            reason = "ambiguous" if depth else "other_branch"
        parent = self._forked(asked)
        if parent is not None:
            return say("forks", SURE, reason, parent=parent)
        return say("new", 0.0 if depth else FIRST_PROMPT, reason if depth else "same_beginning")

    def _has_answer_alone(self, session: SessionKey, asked: _Asked) -> bool:
        """Whether an answer is in the end of its way that nobody else has."""
        found = self.index.get(session)
        first = self._known[session].first
        alone = found.unique if found is not None else 0
        return any(asked.answered(position) for position in range(max(first, asked.known - alone), asked.known))

    def _retried(self, asked: _Asked, now: float) -> SessionKey | None:
        """The only session that ends where the chain ends, has not gone on, and got no answer just now. Of another one
        that ends on the way it might be the next turn."""
        if len(asked.ends) != 1 or asked.ends[0][0] != asked.length or len(asked.ends[0][1]) != 1:
            return None
        session = asked.ends[0][1][0]
        others = self.index.beyond(asked.pool, asked.chain, 2)
        known = self._known[session]
        if known.failed_at is None or now - known.failed_at > RETRIED_S or known.busy(now) or len(others) > 1:
            return None
        return session

    def _forked(self, asked: _Asked) -> SessionKey | None:
        """Of the sessions that have what is known of the chain, and in it an answer of their own, the one that all of
        them descend from; ``None`` where there is no such one."""
        sharing = self.index.beyond(asked.pool, asked.chain, MOST_SHARING + 1)
        if len(sharing) > MOST_SHARING:
            return None
        own = [session for session in sharing if self._known[session].first < asked.known]
        return self._ancestor(own)

    def _ancestor(self, sessions: Iterable[SessionKey]) -> SessionKey | None:
        candidates = set(sessions)
        tops = {session for session in candidates if not self._descends(session, candidates)}
        return tops.pop() if len(tops) == 1 else None

    def _descends(self, session: SessionKey, others: set[SessionKey]) -> bool:
        seen = {session}
        at: SessionKey | None = session
        for _ in range(MOST_FORKS):
            found = self.index.get(at) if at is not None else None
            at = found.parent if found is not None else None
            if at is None or at in seen:
                return False
            if at in others:
                return True
            seen.add(at)
        return False


def _has_answer(end: RequestEnd) -> bool:
    """Whether its client may go on from what it got. One that broke off a stream may keep what had come; one whose
    stream broke asks again."""
    broken_off = end.outcome == "client_disconnect" and bool(end.usage.output_tokens)
    return end.outcome == "completed" or broken_off
