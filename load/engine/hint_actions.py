"""What the engine does about hints: pin, retain, prefetch, demote, share, dereference. Pure.

A hint means blocks of a session, as the engine remembers them (`load.engine.sessions`). It moves and keeps blocks and
nothing else: answers are the same without it. Outcomes: ``accepted``; ``clipped`` (less than was asked for);
``rejected`` (late, malformed, or nothing could be done); ``missing`` (session or blocks are not here); ``unsupported``
(this engine has not got it). Source: spec thunderagent-and-hints §5.3.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from load.engine.free_queue import HIGHEST, LOWEST, USUAL
from load.engine.hints import SUPPORTED, Action
from load.engine.kv_cache import BlockContent
from load.engine.tier_scheduler import TierScheduler
from schemas.hint import MAX_TTL_MS, ActionPayload, HintOutcome

MAX_REMEMBERED = 4096
"""Actions whose results are known, so that one that comes again changes nothing, and can be taken back."""
MAX_RETAINED = 4096
"""Sessions whose blocks have a level of their own."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one action. ``reason``: stable."""

    action_id: str
    action_type: str
    outcome: HintOutcome
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Done:
    """Outcome and reason, before anybody asks whose."""

    outcome: HintOutcome
    reason: str | None = None


ACCEPTED = Done("accepted")


@dataclass(frozen=True, slots=True)
class Retained:
    """Contents that have a level until ``until``."""

    contents: tuple[BlockContent, ...]
    until: float


class HintActions:
    """Carries out actions on one rank's cache, tiers and pins. ``counts``: by (action type, outcome)."""

    def __init__(self, scheduler: TierScheduler, *, max_pinned_ratio: float) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._tiers = scheduler.tiers
        self._sessions = scheduler.sessions
        self._max_pinned = int(max_pinned_ratio * self._cache.pool.usable)
        self._retained: dict[str, Retained] = {}
        self._results: OrderedDict[str, tuple[Result, str]] = OrderedDict()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._acts: dict[str, Callable[[ActionPayload, range], Done]] = {
            "pin": self._pin,
            "retain": self._retain,
            "prefetch": self._prefetch,
            "demote": self._demote,
            "share": self._share,
            "dereference": self._dereference,
        }

    def knows(self, session_id: str) -> bool:
        return session_id in self._sessions

    def wanted_contents(self, action: Action) -> Sequence[BlockContent]:
        """The blocks, from the session's first on, up to the end of what a prefetch asks for: what the shared pool is
        to be asked about first. None for other actions."""
        payload = self._payload_of(action)
        if action.action_type != "prefetch" or payload is None or not self._tiers.config.pool:
            return ()
        chain = self._sessions.chain(payload.target.session_id)
        _, last = self._range(payload, len(chain))
        return chain[:last]

    def carry_out(self, action: Action, now_ms: int, in_pool: range = range(0)) -> Result:
        """Do it, once. ``now_ms``: Unix milliseconds. ``in_pool``: blocks of the session that the pool has."""
        known = self._results.get(action.action_id)
        if known is not None:
            return known[0]
        session_id, done = "", self._unsupported(action)
        if done is None:
            payload = self._payload_of(action)
            if payload is None:
                done = Done("rejected", "bad_payload")
            elif payload.expires_ms < now_ms:
                done = Done("rejected", "expired")
            else:
                session_id = payload.target.session_id
                if payload.cancels is not None:
                    self._take_back(payload.cancels)
                done = self._acts[action.action_type](payload, in_pool)
        result = Result(action.action_id, action.action_type, done.outcome, done.reason)
        self.counts[action.action_type if action.action_type in self._acts else "other", done.outcome] += 1
        self._results[action.action_id] = (result, session_id)
        if len(self._results) > MAX_REMEMBERED:
            self._results.popitem(last=False)
        return result

    def expire(self, now: float) -> None:
        """What was retained until now goes as usual."""
        for session_id in [session_id for session_id, kept in self._retained.items() if kept.until <= now]:
            self._unretain(session_id)

    # Reading

    @staticmethod
    def _unsupported(action: Action) -> Done | None:
        if action.action_type not in SUPPORTED:
            return Done("unsupported", "action_type")
        if action.action_version not in SUPPORTED[action.action_type]:
            return Done("unsupported", "action_version")
        return None

    @staticmethod
    def _payload_of(action: Action) -> ActionPayload | None:
        try:
            return msgspec.convert(action.payload, ActionPayload)
        except msgspec.ValidationError:
            return None

    def _range(self, payload: ActionPayload, blocks: int) -> tuple[int, int]:
        """The target's half-open range in this engine's blocks; only whole blocks are meant."""
        target, size = payload.target, self._cache.block_size
        asked = target.block_size or size
        first = -(-target.first * asked // size)
        last = blocks if target.last is None else min(blocks, target.last * asked // size)
        return min(first, blocks), last

    def _target(self, payload: ActionPayload) -> tuple[BlockContent, ...]:
        chain = self._sessions.chain(payload.target.session_id)
        first, last = self._range(payload, len(chain))
        return chain[first:last]

    def _take_back(self, action_id: str) -> None:
        """An action that holds something is undone; what was moved stays where it is."""
        known = self._results.get(action_id)
        if known is None:
            return
        result, session_id = known
        if result.action_type == "pin":
            self._scheduler.unpin(session_id)
        elif result.action_type == "retain":
            self._unretain(session_id)

    # Acting

    def _pin(self, payload: ActionPayload, in_pool: range) -> Done:
        session_id = payload.target.session_id
        contents = self._target(payload)
        if not payload.ttl_ms:
            return Done("rejected", "no_ttl")
        pins = self._scheduler.pins
        held = self._scheduler.pinned_blocks - (len(pins[session_id].blocks) if session_id in pins else 0)
        here = [content for content in contents if self._cache.pool.find(content.digest) is not None]
        if not here:
            return Done("missing", "not_resident" if contents else "unknown_session")
        room = self._max_pinned - held
        if room <= 0:
            return Done("rejected", "pin_budget")
        ttl_s = min(payload.ttl_ms, MAX_TTL_MS) / 1000
        self._scheduler.pin(session_id, here[:room], ttl_s * self._scheduler.clock_rate)
        if len(here) > room:
            return Done("clipped", "pin_budget")
        if len(here) < len(contents):
            return Done("clipped", "not_resident")
        return ACCEPTED if payload.ttl_ms <= MAX_TTL_MS else Done("clipped", "ttl")

    def _retain(self, payload: ActionPayload, in_pool: range) -> Done:
        session_id = payload.target.session_id
        contents = self._target(payload)
        if not contents:
            return Done("missing", "unknown_session")
        if len(self._retained) >= MAX_RETAINED and session_id not in self._retained:
            return Done("rejected", "too_many")
        wanted = round(payload.priority or 0)
        level = max(LOWEST, min(HIGHEST, wanted))
        ttl_s = min(payload.ttl_ms or MAX_TTL_MS, MAX_TTL_MS) / 1000
        self._unretain(session_id)
        self._retained[session_id] = Retained(contents, self._scheduler.now + ttl_s * self._scheduler.clock_rate)
        self._set_level(contents, level)
        return ACCEPTED if level == wanted else Done("clipped", "priority")

    def _prefetch(self, payload: ActionPayload, in_pool: range) -> Done:
        to = payload.to or "device"
        if to not in ("device", "host") or (to == "host" and self._tiers.tier("host") is None):
            return Done("unsupported", "tier")
        session_id = payload.target.session_id
        chain = self._sessions.chain(session_id)
        if not chain:
            return Done("missing", "unknown_session")
        digests = [content.digest for content in chain]
        first, last = self._range(payload, len(chain))
        while first < last and self._cache.pool.find(digests[first]) is not None:
            first += 1
        if first == last:
            return Done("accepted", "resident")
        pieces = self._tiers.pieces(digests, first, last, in_pool)
        if not pieces:
            return Done("missing", "not_resident")
        end = pieces[-1].end
        partly = None if end == last else Done("clipped", "not_resident")
        if to == "host":
            self._tiers.fetch(chain, pieces, self._scheduler.now)
            return partly or ACCEPTED
        missing = [content for content in chain[first:end] if self._cache.pool.find(content.digest) is None]
        brought = self._bring(chain, first, missing, in_pool, session_id)
        if not brought:
            return Done("rejected", "no_room")
        return partly or (ACCEPTED if brought == len(missing) else Done("clipped", "no_room"))

    def _bring(
        self, chain: Sequence[BlockContent], first: int, missing: list[BlockContent], in_pool: range, session_id: str
    ) -> int:
        """Load ``missing``, blocks of ``chain`` from ``first`` on, onto the device as far as there is room; how many.
        What such loads hold is bounded as pins are: or they would take blocks from requests that run."""
        pool, scheduler = self._cache.pool, self._scheduler
        digests = [content.digest for content in chain]
        here = [block for digest in digests if (block := pool.find(digest)) is not None]
        pool.touch(here)  # or room would be made by evicting what belongs to it
        on_their_way = sum(len(blocks) for _, blocks in scheduler.fetching)
        wanted = missing[: max(0, min(pool.free_blocks, self._max_pinned - on_their_way))]
        if wanted:
            pieces = self._tiers.pieces(digests, first, wanted[-1].index + 1, in_pool)
            due = self._tiers.load(digests, pieces, scheduler.now)
            blocks = self._cache.insert(wanted, session_id)
            self._cache.arriving.update((content.digest, due) for content in wanted)
            scheduler.fetching.append((due, blocks))
        pool.release(here)
        return len(wanted)

    def _demote(self, payload: ActionPayload, in_pool: range) -> Done:
        to = payload.to or "host"
        number = next((place for place, tier in enumerate(self._tiers.tiers) if tier.name == to), None)
        if number is None and not (to == "pool" and self._tiers.config.pool):
            return Done("unsupported", "tier")
        session_id = payload.target.session_id
        contents = self._target(payload)
        if not contents:
            return Done("missing", "unknown_session")
        here = [content for content in contents if self._cache.pool.find(content.digest) is not None]
        if not here:
            return Done("missing", "not_resident")
        self._scheduler.unpin(session_id)
        self._unretain(session_id)
        if number is None:
            last = here[-1].index + 1
            self._scheduler.put(self._sessions.chain(session_id)[:last], here[0].index, session_id)
        else:
            self._tiers.store(here, self._scheduler.now, session_id, start=number)
            here = [content for content in here if any(content.digest in tier for tier in self._tiers.tiers)]
            self._keep_below(session_id, here, payload)
        freed = sum(self._cache.drop(content) for content in reversed(here))
        if not freed:
            return Done("rejected", "in_use")
        return ACCEPTED if freed == len(here) else Done("clipped", "in_use")

    def _keep_below(self, session_id: str, contents: list[BlockContent], payload: ActionPayload) -> None:
        """What is demoted is wanted again, and is the only copy: below the device it goes after all that is copied
        there anyway, until its ``ttl_ms`` or the session's next retention."""
        if len(self._retained) >= MAX_RETAINED:
            return
        ttl_s = min(payload.ttl_ms or MAX_TTL_MS, MAX_TTL_MS) / 1000
        until = self._scheduler.now + ttl_s * self._scheduler.clock_rate
        self._retained[session_id] = Retained(tuple(contents), until)
        for content in reversed(contents):
            for tier in self._tiers.tiers:
                tier.set_level(content.digest, HIGHEST)

    def _share(self, payload: ActionPayload, in_pool: range) -> Done:
        if not self._tiers.config.pool:
            return Done("unsupported", "tier")
        for session_id in (payload.parent, payload.target.session_id):
            chain = self._sessions.chain(session_id) if session_id is not None else ()
            if chain:
                break
        else:
            return Done("missing", "unknown_session")
        first, last = self._range(payload, len(chain))
        whole = chain[:last]
        here = 0
        while here < last and self._is_here(whole[here]):
            here += 1
        if here <= first:
            return Done("missing", "not_resident")
        self._scheduler.put(whole[:here], first, session_id)
        return ACCEPTED if here == last else Done("clipped", "not_resident")

    def _is_here(self, content: BlockContent) -> bool:
        on_device = self._cache.pool.find(content.digest) is not None
        return on_device or any(content.digest in tier for tier in self._tiers.tiers)

    def _dereference(self, payload: ActionPayload, in_pool: range) -> Done:
        session_id = payload.target.session_id
        known = session_id in self._sessions
        held = self._scheduler.unpin(session_id)
        self._unretain(session_id)
        if not known:
            return ACCEPTED if held else Done("missing", "unknown_session")
        if payload.reason == "unpinned":
            return ACCEPTED
        own = self._sessions.only_of(session_id, self._target(payload))
        self._set_level(own, LOWEST)
        if payload.target.first == 0 and payload.target.last is None and payload.reason != "moved":
            self._sessions.forget(session_id)
        return ACCEPTED

    def _set_level(self, contents: Sequence[BlockContent], level: int) -> None:
        """The tail first: of equals, it goes first."""
        for content in reversed(contents):
            self._cache.pool.set_level(content.digest, level)
            for tier in self._tiers.tiers:
                tier.set_level(content.digest, level)

    def _unretain(self, session_id: str) -> None:
        kept = self._retained.pop(session_id, None)
        if kept is not None:
            self._set_level(kept.contents, USUAL)
