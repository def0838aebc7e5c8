"""Policy ``kv``: which rank takes this prompt, by cost, with the session's previous worker preferred.

Candidates are all ranks of the workers that serve the model. Each gets its cost or the reason it is excluded. The
least cost wins; equal costs are drawn uniformly. The preferred worker (the session's previous one, or at a child's
first placement its parent's) is taken instead while it costs at most ``margin`` times what it holds of the prompt
more: a worker that has lost the session's blocks is preferred to nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from schemas.decision import Candidate
from schemas.index import ChainUnit, MatchReply, SourceHealth, TierBlocks, WorkerMatch
from services.admission.cost import CostWeights, Prompt, cost, shared_run
from services.admission.grants import Ledger
from services.admission.workers import Worker, load_of

Choose = Callable[[int], int]
"""A number below n, drawn uniformly (a seeded generator's ``randrange``)."""

EQUAL = 1e-9
"""Costs closer than this, in blocks, are equal."""

EVENT_LAG_S = 1.0
"""An engine's events of a turn that ended less than this ago may not have reached the index yet (measured with a real
vLLM: a few ms, tail 100 ms)."""

_NOTHING = TierBlocks()


@dataclass(frozen=True, slots=True)
class Preference:
    """The rank to prefer: by how much (times the blocks it holds), and what it may still hold, in blocks.

    ``affinity_blocks`` counts as held only where the index is blind, is approximate and has nothing of the prompt, or
    cannot know yet (``fresh``: the session's last turn has just ended there).
    """

    worker: str | None = None
    rank: int | None = None
    margin: float = 0.0
    affinity_blocks: int = 0
    fresh: bool = False


NO_PREFERENCE = Preference()


@dataclass(frozen=True, slots=True)
class IndexView:
    """What the index said about one prompt: ``matches`` by (worker, rank), or ``None`` and the reason. ``unit``: of the
    chain that was asked about; blocks are the placement's in any case."""

    reason: str | None = None
    matches: Mapping[tuple[str, int], WorkerMatch] | None = None
    shared: tuple[tuple[int, int], ...] = ()
    unit: ChainUnit = "tokens"

    @classmethod
    def blind(cls, reason: str) -> IndexView:
        """The index did not say anything."""
        return cls(reason=reason)

    @classmethod
    def of(cls, reply: MatchReply) -> IndexView:
        """As answered."""
        if reply.error is not None:
            return cls.blind(reply.error)
        return cls(None, {(match.worker, match.rank): match for match in reply.matches}, reply.shared)

    @classmethod
    def of_text(cls, reply: MatchReply, text_block: int, block_size: int) -> IndexView:
        """An answer about text, whose blocks are about ``text_block`` tokens, in blocks of ``block_size`` tokens."""
        if reply.error is not None:
            return cls.blind(reply.error)
        matches = {}
        for match in reply.matches:
            blocks = TierBlocks(device=match.blocks.reach * text_block // block_size)
            matches[match.worker, match.rank] = msgspec.structs.replace(match, blocks=blocks)
        return cls(None, matches, unit="text")

    def indexed(self, chosen: Candidate) -> int | None:
        """Blocks that the chosen rank held by its events, where those can be compared with what the engine reports
        (`schemas.placed.Placed.indexed`)."""
        match = (self.matches or {}).get((chosen.worker, chosen.rank))
        if match is None or self.unit == "text" or chosen.health == "blind":
            return None
        return match.blocks.reach if match.health == "synced" else match.indexed


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice (an index into ``candidates``), or why there is none (``None``, ``reason``)."""

    candidates: tuple[Candidate, ...]
    choice: int | None
    reason: str | None = None

    @property
    def chosen(self) -> Candidate:
        """The chosen candidate. Only when there is a choice."""
        if self.choice is None:
            raise ValueError("nothing was chosen")
        return self.candidates[self.choice]


def place(
    workers: Sequence[Worker],
    ledger: Ledger,
    prompt: Prompt,
    index: IndexView,
    *,
    weights: CostWeights,
    max_grants_per_rank: int,
    choose: Choose,
    preference: Preference = NO_PREFERENCE,
    excluded: tuple[str, ...] = (),
) -> Placement:
    """Score every rank of ``workers`` and choose one."""
    loads = [(worker, rank, load_of(worker, rank, ledger)) for worker in workers for rank in worker.ranks]
    least = min((load.prefill_tokens for worker, _, load in loads if worker.placeable), default=0)
    candidates: list[Candidate] = []
    for worker, rank, load in loads:
        view = _view(worker, rank, prompt, index, preference)
        blind = view.health == "blind"
        value, parts = cost(
            weights,
            prompt,
            load,
            blocks=view.blocks,
            shared_blocks=0 if blind else shared_run(index.shared, view.blocks.reach),
            affinity_blocks=preference.affinity_blocks if view.unknown and view.sticky else 0,
            least_prefill_tokens=least,
        )
        open_grants = ledger.account(worker.name, rank).requests
        candidates.append(
            Candidate(
                worker=worker.name,
                rank=rank,
                cost=value,
                parts=parts,
                blocks=view.blocks,
                open_grants=open_grants,
                health=view.health,
                health_reason=view.reason,
                sticky=view.sticky,
                excluded=_excluded(worker, open_grants, max_grants_per_rank, excluded),
            )
        )
    choice = _choose(candidates, prompt, preference, choose)
    return Placement(tuple(candidates), choice, None if choice is not None else _no_choice(candidates))


def _excluded(worker: Worker, open_grants: int, limit: int, excluded: tuple[str, ...]) -> str | None:
    if worker.name in excluded:
        return "failed_before"
    if not worker.placeable:
        return worker.state.health
    if open_grants >= limit:
        return "at_limit"
    return None


@dataclass(frozen=True, slots=True)
class _View:
    """What is known of one rank's cache for this prompt, and whether it is the preferred rank."""

    health: SourceHealth
    reason: str | None
    blocks: TierBlocks
    sticky: bool

    @property
    def unknown(self) -> bool:
        """Nothing is known, so that what the session left there has to do."""
        return _is_unknown(self.health, self.blocks)


def _view(worker: Worker, rank: int, prompt: Prompt, index: IndexView, preference: Preference) -> _View:
    sticky = worker.name == preference.worker and preference.rank in (None, rank)
    if index.unit == "tokens" and worker.state.profile.block_size not in (None, prompt.block_size):
        return _View("blind", "block_size", _NOTHING, sticky)
    if index.matches is None:
        return _View("blind", index.reason, _NOTHING, sticky)
    match = index.matches.get((worker.name, rank))
    if match is None:
        return _View("blind", "no_source", _NOTHING, sticky)
    return _View(match.health, match.reason, _NOTHING if match.health == "blind" else match.blocks, sticky)


def _choose(candidates: Sequence[Candidate], prompt: Prompt, preference: Preference, choose: Choose) -> int | None:
    eligible = [(each.cost or 0.0, place) for place, each in enumerate(candidates) if each.excluded is None]
    if not eligible:
        return None
    best = min(eligible)[0]
    if preference.worker is not None:
        own = [pair for pair in eligible if candidates[pair[1]].sticky]
        if own:
            least, place = min(own)
            if least <= best + preference.margin * _held(candidates[place], prompt, preference) + EQUAL:
                eligible, best = own, least
    tied = [place for value, place in eligible if value <= best + EQUAL]
    return tied[0] if len(tied) == 1 else tied[choose(len(tied))]


def _held(candidate: Candidate, prompt: Prompt, preference: Preference) -> float:
    """Blocks of the prompt on the preferred rank: what the index says, else what the session left there."""
    if candidate.health == "blind":
        return preference.affinity_blocks or prompt.request_blocks
    trusted = preference.fresh or _is_unknown(candidate.health, candidate.blocks)
    return max(candidate.blocks.reach, preference.affinity_blocks if trusted else 0)


def _is_unknown(health: SourceHealth, blocks: TierBlocks) -> bool:
    """Blind, or approximate without a trace of the prompt: it may have been sent there before anybody took notes."""
    return health == "blind" or (health == "approximate" and blocks.reach == 0)


def _no_choice(candidates: Sequence[Candidate]) -> str:
    """Why nothing could be chosen: ``at_limit`` when a place will come free, else ``no_worker``."""
    return "at_limit" if any(each.excluded == "at_limit" for each in candidates) else "no_worker"
