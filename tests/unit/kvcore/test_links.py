"""Engine hashes by chain hash, as pools of engine-hashed keys need them (spec: index-and-routing §5.2)."""

from __future__ import annotations

import random

import pytest

from kvcore import LayoutSet, PoolIndex, PoolLayout, pack_chain, unpack_chain
from kvcore.errors import HashesError
from kvcore.index import IndexLimits
from kvcore.links import EngineLinks, engine_pages
from kvcore.pool_layout import vllm_components
from tests.unit.kvcore.twins import Twin


def given(index: object, worker: str, engines: list[int], chain: list[int], parent: int | None = None) -> None:
    index.apply_hashes(worker, 0, pack_chain(engines), pack_chain(chain), parent)  # type: ignore[attr-defined]


def test_links_are_learned_and_outlive_the_blocks(twin: Twin) -> None:
    """The engine drops a block from its own memory; the pool may have it still, under the engine's hash."""
    index = twin.PrefixIndex(IndexLimits(links=100))
    given(index, "w", [11, 12, 13], [1, 2, 3])
    index.clear_rank("w", 0)
    index.remove_worker("w")
    assert unpack_chain(index.engine_hashes(pack_chain([1, 2, 3, 4]))) == (11, 12, 13, 0)
    assert index.stats().links == 3


def test_the_last_one_told_counts(twin: Twin) -> None:
    """An engine that was restarted with another hash seed names its blocks anew."""
    index = twin.PrefixIndex(IndexLimits(links=100))
    given(index, "w", [11], [1])
    given(index, "v", [21], [1])
    assert unpack_chain(index.engine_hashes(pack_chain([1]))) == (21,)


def test_nothing_is_kept_unless_asked_for(twin: Twin) -> None:
    """Off by default; switched on and off while the index lives, and the same limit again loses nothing."""
    index = twin.PrefixIndex()
    given(index, "w", [11], [1])
    assert index.engine_hashes(pack_chain([1])) == bytes(8)
    index.keep_links(10)
    given(index, "w", [12], [2], 11)
    index.keep_links(10)
    assert unpack_chain(index.engine_hashes(pack_chain([1, 2]))) == (0, 12)
    index.keep_links(0)
    assert (index.engine_hashes(pack_chain([2])), index.stats().links) == (bytes(8), 0)
    with pytest.raises(HashesError):
        index.engine_hashes(b"1234567")


def test_a_dump_brings_its_links(twin: Twin) -> None:
    """An indexer that starts from snapshots knows the engines' hashes at once."""
    source = twin.PrefixIndex()
    given(source, "w", [11, 12], [1, 2])
    index = twin.PrefixIndex(IndexLimits(links=100))
    index.load(source.dump())
    assert unpack_chain(index.engine_hashes(pack_chain([1, 2]))) == (11, 12)


@pytest.mark.parametrize("limit", [1, 2, 7, 64])
def test_the_bound_holds_and_both_twins_agree(twin: Twin, limit: int) -> None:
    """The half that was told last is always there; what is there is right."""
    generator = random.Random(limit)
    index, model = twin.PrefixIndex(IndexLimits(links=limit)), EngineLinks(limit)
    told: dict[int, int] = {}
    for number in range(300):
        own, engine = generator.randrange(1, 3 * limit + 2), number + 1
        given(index, f"w{number}", [engine], [own])
        model.store(own, engine)
        told.pop(own, None)
        told[own] = engine
        asked = pack_chain(list(told))
        answer = index.engine_hashes(asked)
        assert answer == model.engine_hashes(list(told))
        known = unpack_chain(answer)
        assert all(found in (0, told[own]) for own, found in zip(told, known, strict=True))
        assert all(known[-((limit + 1) // 2) :])
        assert index.stats().links == len(model) <= limit + 1


def test_pages_of_engine_hashes() -> None:
    """Eight zero bytes, then the end of the digest as the key has it (spec: pool-events §6 vLLM)."""
    assert engine_pages(pack_chain([0x0102030405060708])) == bytes(8) + bytes(range(1, 9))


@pytest.mark.parametrize("written", ["0" * 64, "0" * 16, "00000000", "ab" * 24 + "0" * 16])
def test_a_key_of_zeros_is_not_the_page_of_unknown_blocks(written: str) -> None:
    """Whoever may write to a pool could put one key under which every block is found of which nobody has told."""
    pool, layout = PoolIndex(), PoolLayout("vllm_mooncake", "m", (LayoutSet(vllm_components(1)),))
    pool.add_keys(f"m@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@{written}\n".encode())
    assert pool.match(layout, bytes(16)) == ((0, 1),)
    assert pool.match(layout, engine_pages(pack_chain([0, 7, 0]))) == ()


def test_chain_hashes_by_engine_hash(twin: Twin) -> None:
    """What an engine says of a block by its own hash alone is said of the chain that this rank told under it."""
    index = twin.PrefixIndex()
    given(index, "w", [11, 12], [1, 2])
    given(index, "v", [11], [9])
    assert unpack_chain(index.own_hashes("w", 0, [12, 13, 11])) == (2, 0, 1)
    assert unpack_chain(index.own_hashes("v", 0, (11,))) == (9,)
    assert index.own_hashes("nobody", 0, [11]) == bytes(8)
    assert index.own_hashes("w", 0, []) == b""
