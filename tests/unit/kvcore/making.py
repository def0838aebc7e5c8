"""Events and chains made for the index tests: block size 4, one integer names a block's tokens."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.events import Batch, Cleared, Event, Removed, Stored, Tier
from kvcore.hashing import chain_hashes, pack_tokens
from kvcore.index import PrefixIndex
from tests.unit.kvcore.twins import Twin

BLOCK_SIZE = 4


def tokens_of(names: Sequence[int]) -> bytes:
    return pack_tokens([name * 10 + offset for name in names for offset in range(BLOCK_SIZE)])


def chain_of_names(names: Sequence[int], *, adapter: str | None = None, salt: str | None = None) -> bytes:
    return chain_hashes(tokens_of(names), BLOCK_SIZE, adapter=adapter, salt=salt)


def stored(
    names: Sequence[int],
    parent: int | None = None,
    tier: Tier = Tier.DEVICE,
    *,
    group: int | None = None,
    kind: str | None = None,
    adapter: str | None = None,
    salt: str | None = None,
    with_tokens: bool = True,
    connector: bool = False,
) -> Stored:
    """Blocks whose engine hashes are 100 + name; ``parent`` is a name."""
    return Stored(
        hashes=tuple(100 + name for name in names),
        parent=None if parent is None else 100 + parent,
        tokens=tokens_of(names) if with_tokens else b"",
        block_size=BLOCK_SIZE if with_tokens else 0,
        tier=tier,
        group=group,
        group_kind=kind,
        adapter=adapter,
        salt=salt,
        connector=connector,
    )


def removed(names: Sequence[int], tier: Tier = Tier.DEVICE, group: int | None = None) -> Removed:
    return Removed(hashes=tuple(100 + name for name in names), tier=tier, group=group)


def batch(*events: Event) -> Batch:
    return Batch(ts=0.0, rank=None, events=events)


def index_of(twin: Twin, *events: Event) -> PrefixIndex:
    """An index of one rank that was told these events, one batch each."""
    index = twin.PrefixIndex()
    for event in events:
        index.apply("w", 0, batch(event))
    return index


def tiers(index: PrefixIndex, chain: bytes) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    """Matches as device, host, disk, external per (worker, rank)."""
    matches = index.match(chain)
    assert len({(match.worker, match.rank) for match in matches}) == len(matches)
    return {(match.worker, match.rank): (match.device, match.host, match.disk, match.external) for match in matches}


def reach(index: PrefixIndex, names: Sequence[int]) -> int:
    """Blocks of the chain that rank 0 of worker ``w`` can reach."""
    return sum(tiers(index, chain_of_names(names)).get(("w", 0), (0, 0, 0, 0)))


CLEARED = Cleared()
