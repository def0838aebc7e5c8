"""Where a request goes when nobody decides: the same place for the same session, by every ingress, without talking.

Rendezvous (highest random weight) hashing: each (worker, rank) gets a score from its name and the session; the
highest wins. A worker that comes or goes moves only its own sessions. Source: Thaler and Ravishankar, "A name-based
mapping scheme for rendezvous", 1996.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from xxhash import xxh3_64_intdigest

from schemas.worker import WorkerState


def score(session: str, worker: str, rank: int) -> int:
    """How much this session wants this rank: XXH3-64 of the three, length-framed."""
    parts = (session.encode(), worker.encode(), str(rank).encode())
    return xxh3_64_intdigest(b"".join(b"%d:%b" % (len(part), part) for part in parts))


def place(
    session: str, workers: Iterable[WorkerState], excluded: Collection[str] = ()
) -> tuple[WorkerState, int] | None:
    """The worker and rank of this session (its key's text) among ``workers``; ``None`` when all are excluded."""
    best: tuple[int, str, int, WorkerState] | None = None
    for state in workers:
        if state.worker in excluded:
            continue
        for rank in range(max(1, state.profile.ranks)):
            candidate = (score(session, state.worker, rank), state.worker, rank, state)
            if best is None or candidate[:3] > best[:3]:
                best = candidate
    return (best[3], best[2]) if best else None
