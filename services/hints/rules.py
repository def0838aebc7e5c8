"""The planner's own wishes: one function an action, each with its reason. Source: spec thunderagent-and-hints §5.3."""

from __future__ import annotations

import math

from schemas.hint import MAX_TTL_MS
from schemas.policy import PlannedAction
from services.hints.config import HintsSettings
from services.hints.return_times import ReturnTimes
from services.hints.sessions import Session
from services.hints.user_policies import HintPolicy
from services.hints.wishes import Place, Tier, Wish
from services.hints.workers import Workers

MOST_PRIORITY_AWAY = 4
"""From ``retain_priority``, either way, one for each halving of the time away."""

MAX_WORDS = 200
"""Characters of a policy's own words that travel on."""

LIKELY_SHARE = 0.25
"""A prefetch is for when so many of the sessions that are still away are back: the rest keep waiting with their KV on
the device, which costs room, while one that comes too late costs its session the whole way up."""


class Rules:
    """Wishes about sessions. They are made whole, whatever may be sent: `gate.Gate` judges that."""

    def __init__(self, settings: HintsSettings, workers: Workers, returns: ReturnTimes) -> None:
        self._settings = settings
        self._workers = workers
        self._returns = returns

    def block_size(self, session: Session, place: Place) -> int:
        """Tokens in a block there; 0 where nobody knows."""
        known = self._workers.get(place.worker)
        if known is not None and known.block_size:
            return known.block_size
        return session.known.block_size if session.known is not None else 0

    def expected_return(self, session: Session, now: float, share: float = LIKELY_SHARE) -> float | None:
        """Unix seconds at which the idle session is likely to come back."""
        elapsed = max(0.0, now - session.idle_since)
        remaining = self._returns.remaining(session.tool, elapsed, share)
        return now + remaining if remaining is not None else None

    # Keeping

    def priority(self, session: Session) -> int:
        """Higher for those who come back sooner: what a kept token is worth falls with the time that it is kept for
        (spec: scheduling §5.2, the lease index), and one step is a halving of that time."""
        base = self._settings.retain_priority
        expected, typical = self._returns.remaining(session.tool, 0.0, 0.5), self._returns.typical()
        if expected is None or typical is None or expected <= 0 or typical <= 0:
            return base
        away = -math.log2(expected / typical)
        return base + round(max(-MOST_PRIORITY_AWAY, min(MOST_PRIORITY_AWAY, away)))

    def retain(self, session: Session, place: Place) -> Wish:
        """The turn is over and its tools run: what they come back to should go after what nobody comes back to."""
        return Wish(
            action_type="retain",
            session=session.key,
            session_id=session.session_id,
            place=place,
            generation=session.generation,
            ttl_s=self._settings.retain_ttl_s,
            priority=self.priority(session),
        )

    def pin(self, session: Session, place: Place, now: float) -> Wish | None:
        """The router holds room for the session at this place: the cache should not give away what that room is for. A
        pin lasts as its lease, but never long at once (`HintsSettings.pin_ttl_s`)."""
        if session.lease is None:
            return None
        ttl_s = min(session.lease.expires_ms / 1000 - now, self._settings.pin_ttl_s, MAX_TTL_MS / 1000)
        if ttl_s <= 0:
            return None
        return Wish(
            action_type="pin",
            session=session.key,
            session_id=session.session_id,
            place=place,
            generation=session.generation,
            ttl_s=ttl_s,
            tokens=session.lease.tokens or session.context_tokens,
        )

    # Moving

    def demote(self, session: Session, place: Place, reason: str) -> Wish | None:
        """Nobody needs it on the device for a while: a lower tier keeps it at the price of a copy, not of a prefill.
        What others share stays, where it is known."""
        tier = self._workers.lowest(place)
        if tier is None:
            return None
        shared = session.known.shared if session.known is not None else 0
        return Wish(
            action_type="demote",
            session=session.key,
            session_id=session.session_id,
            place=place,
            generation=session.generation,
            ttl_s=self._settings.demote_ttl_s,
            to=tier,
            first=shared,
            block_size=self.block_size(session, place) if shared else 0,
            reason=reason,
            cancels=session.kept.pin if session.kept is not None and session.kept.place == place else None,
        )

    def prefetch(self, session: Session, place: Place, deadline: float, reason: str) -> Wish | None:
        """The session is about to come back: what waits in a lower tier should be up before it does. Nothing to do
        where all of it is on the device, as far as an indexer knows."""
        if self.is_resident(session, place):
            return None
        demoted = session.kept.demote if session.kept is not None and session.kept.place == place else None
        return Wish(
            action_type="prefetch",
            session=session.key,
            session_id=session.session_id,
            place=place,
            generation=session.generation,
            to="device",
            deadline=deadline,
            tokens=session.context_tokens,
            reason=reason,
            cancels=demoted,
        )

    def is_resident(self, session: Session, place: Place) -> bool:
        """Whether the whole prefix is on the device there, by the last answer of an indexer, with no demotion since."""
        known = session.known
        if known is None or (session.kept is not None and session.kept.demoted is not None):
            return False
        return place in known.on_device

    def prefetch_s(self, session: Session) -> float:
        """How long before its return the session's KV has to set out."""
        move_s = session.context_tokens * self._settings.prefetch_s_per_mtoken / 1e6
        return self._settings.prefetch_lead_s + move_s

    def share(self, parent: Session, child: Session, blocks: int, block_size: int) -> Wish | None:
        """A child begins elsewhere than its parent ran, with a prefix that is there: the parent's worker puts it into
        the pool that both read, so that it and its siblings need not compute it anew. Once: what is in the pool already
        is not put there again."""
        if parent.place is None or blocks <= parent.shared_blocks:
            return None
        return Wish(
            action_type="share",
            session=parent.key,
            session_id=parent.session_id,
            place=parent.place,
            generation=parent.generation,
            source=parent.place.worker,
            parent=parent.session_id,
            last=blocks,
            block_size=block_size,
            to="pool",
            reason=f"child:{child.session_id}"[:MAX_WORDS],
        )

    # Letting go

    def release(self, session: Session, place: Place, reason: str) -> Wish:
        """The session is over, or elsewhere: nobody comes back for what it has here."""
        kept = session.kept if session.kept is not None and session.kept.place == place else None
        return Wish(
            action_type="dereference",
            session=session.key,
            session_id=session.session_id,
            place=place,
            generation=session.generation,
            reason=reason,
            cancels=(kept.pin or kept.demote or kept.retain) if kept is not None else None,
        )

    def supersede(self, session: Session, place: Place, surviving_tokens: int, old_tokens: int) -> Wish:
        """The prompt was rewritten or compacted: what its earlier form had beyond the common part is of no use to
        anybody, and would be kept best of all, having been used last."""
        size = self.block_size(session, place)
        return Wish(
            action_type="dereference",
            session=session.key,
            session_id=session.session_id,
            place=place,
            generation=session.generation,
            reason="superseded",
            first=session.blocks(surviving_tokens, size),
            last=-(-old_tokens // size) if size else None,
            block_size=size,
            cancels=session.kept.pin if session.kept is not None and session.kept.place == place else None,
        )

    # Users' policies

    def of_policy(self, session: Session, action: PlannedAction, policy: HintPolicy, now: float) -> Wish | str:
        """A policy's action as a wish of its own, within what may be asked at all; or why it is none."""
        place, lets_go = Place(action.worker, action.rank), action.action_type == "dereference"
        if not lets_go and self._workers.get(action.worker) is None:
            return "unknown_worker"
        if action.action_type != "prefetch" and place != session.place:
            return "elsewhere"  # it has nothing there
        ttl_s = {"pin": self._settings.pin_ttl_s, "retain": self._settings.retain_ttl_s}.get(action.action_type)
        if action.action_type == "demote":
            ttl_s = self._settings.demote_ttl_s
        if action.ttl_ms is not None and ttl_s is not None:
            ttl_s = min(action.ttl_ms, MAX_TTL_MS) / 1000
        shares = action.action_type == "share"
        return Wish(
            action_type=action.action_type,
            session=session.key,
            session_id=session.session_id,
            place=place,
            generation=session.generation,
            ttl_s=ttl_s,
            priority=action.priority if action.action_type == "retain" else None,
            tokens=session.context_tokens if action.action_type in ("pin", "prefetch") else 0,
            to=self._tier(action, place),
            source=action.worker if shares else None,
            parent=session.session_id if shares else None,
            deadline=now + self._settings.prefetch_lead_s if action.action_type == "prefetch" else None,
            reason=("unpinned" if action.reason == "unpinned" else "policy") if lets_go else words(action.reason),
            policy=policy.name,
        )

    def _tier(self, action: PlannedAction, place: Place) -> Tier | None:
        if action.action_type == "demote":
            return self._workers.lowest(place)
        to: dict[str, Tier] = {"prefetch": "device", "share": "pool"}
        return to.get(action.action_type)


def words(reason: str | None) -> str | None:
    """A policy's own words, as one line that is not too long."""
    return " ".join(reason[: 4 * MAX_WORDS].split())[:MAX_WORDS] if reason else None
