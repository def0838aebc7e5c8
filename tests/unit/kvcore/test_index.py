"""The prefix index: the cases where a peer is wrong, user reports, and captured streams."""

from __future__ import annotations

import msgspec
import pytest

from kvcore.events import Batch, Event, Stored, Tier
from kvcore.hashing import chain_hashes, multimodal_hash, pack_tokens, unpack_chain
from kvcore.index import IndexLimits, PrefixIndex
from tests.unit.kvcore import captured
from tests.unit.kvcore.making import (
    CLEARED,
    batch,
    chain_of_names,
    index_of,
    reach,
    removed,
    stored,
    tiers,
    tokens_of,
)
from tests.unit.kvcore.twins import Twin, is_stored

# What is counted in the cases of `test_peer_cases`, and what the index does beyond them.


def test_a_child_before_its_parent(twin: Twin) -> None:
    """2 first, then 0 and 1: score 3 (the peer loses the child for good)."""
    index = twin.PrefixIndex()
    result = index.apply("w", 0, batch(stored([2], 1)))
    assert (result.stored, result.held, index.resident("w", 0)) == (1, 1, 0)
    index.apply("w", 0, batch(stored([0, 1])))
    assert reach(index, [0, 1, 2]) == 3
    assert index.stats().held == 0


def test_removing_an_unknown_block_does_nothing(twin: Twin) -> None:
    """A no-op, counted (the peer raises)."""
    index = index_of(twin, stored([0, 1]))
    result = index.apply("w", 0, batch(removed([7]), removed([1], Tier.HOST)))
    assert (result.removed, result.unknown_removed) == (0, 2)
    assert reach(index, [0, 1]) == 2
    assert twin.PrefixIndex().apply("w", 0, batch(removed([7]))).unknown_removed == 1


def test_a_duplicate_store_is_a_second_copy(twin: Twin) -> None:
    """The engine holds two physical copies: the block is gone after the second removal (spec: engine-events §2.4)."""
    index = index_of(twin, stored([0, 1]), stored([1], 0))
    index.apply("w", 0, batch(removed([1])))
    assert reach(index, [0, 1]) == 2
    index.apply("w", 0, batch(removed([1])))
    assert reach(index, [0, 1]) == 1


def test_each_position_counts_once_at_its_best_tier(twin: Twin) -> None:
    """A block on the device and in two lower tiers is one block, and it sinks as its copies go."""
    index = index_of(
        twin, stored([0, 1]), stored([0, 1], None, Tier.HOST), stored([0, 1], None, Tier.DISK), removed([1])
    )
    assert tiers(index, chain_of_names([0, 1])) == {("w", 0): (1, 1, 0, 0)}
    index.apply("w", 0, batch(removed([1], Tier.HOST)))
    assert tiers(index, chain_of_names([0, 1])) == {("w", 0): (1, 0, 1, 0)}


# User reports.


def test_both_layouts_in_one_batch(twin: Twin) -> None:
    """User case A5: array Stored, map Stored, junk, map Removed: three applied, one counted."""
    tokens = list(range(8))
    payload = msgspec.msgpack.encode(
        [
            1.0,
            [
                ["BlockStored", [1, 2], None, tokens, 4],
                {"type": "BlockStored", "block_hashes": [3], "parent_block_hash": 2, "token_ids": [8, 9, 10, 11]},
                {"type": "Junk"},
                {"type": "BlockRemoved", "block_hashes": [3]},
            ],
            0,
        ]
    )
    index = twin.PrefixIndex()
    result = index.apply("w", 0, twin.decode_batch(payload))
    assert (result.stored, result.removed, dict(result.rejected)) == (3, 1, {"unknown_tag": 1})
    assert tiers(index, chain_hashes(pack_tokens(range(12)), 4)) == {("w", 0): (2, 0, 0, 0)}


def test_a_store_without_tokens_resolves_through_its_hash(twin: Twin) -> None:
    """User case A9: an offload placeholder names blocks that are, were or will be known."""
    placeholder = stored([0, 1], tier=Tier.HOST, with_tokens=False)
    orders: list[list[Event]] = [
        [stored([0, 1]), placeholder, removed([0, 1])],
        [stored([0, 1]), removed([1, 0]), placeholder],
        [placeholder, stored([0, 1]), removed([0, 1])],
    ]
    for events in orders:
        index = index_of(twin, *events)
        assert tiers(index, chain_of_names([0, 1])) == {("w", 0): (0, 2, 0, 0)}
        index.apply("w", 0, batch(removed([0], Tier.HOST)))
        assert tiers(index, chain_of_names([0, 1])) == {}


def test_block_size_is_learned_from_events(twin: Twin) -> None:
    """User case A10: unknown at first, then tokens over hashes; another size on the same rank is refused, counted."""
    index = twin.PrefixIndex()
    assert index.block_size("w", 0) is None
    assert index.apply("w", 0, batch(stored([9], with_tokens=False))).block_size is None
    assert index.apply("w", 0, batch(stored([0, 1]))).block_size == 4
    wrong = Stored(hashes=(7,), tokens=pack_tokens(range(8)), block_size=8)
    result = index.apply("w", 0, batch(wrong))
    assert (result.stored, dict(result.rejected), result.block_size) == (0, {"block_size": 1}, 4)
    assert index.apply("other", 0, batch(wrong)).block_size == 8
    index.clear_rank("w", 0)
    assert index.apply("w", 0, batch(wrong)).block_size == 8


def test_misaligned_tokens_are_rejected(twin: Twin) -> None:
    """User case A10: tokens that cannot be cut into one block per hash are not guessed at."""
    event = twin.decode_batch(msgspec.msgpack.encode([0.0, [["BlockStored", [1, 2], None, [1, 2, 3], 2]], 0])).events[0]
    result = twin.PrefixIndex().apply("w", 0, batch(event))
    assert (result.stored, dict(result.rejected)) == (0, {"misaligned": 1})


def test_namespaces_never_match_each_other(twin: Twin) -> None:
    """User case A11: same tokens as base, adapter, image and salt: four identities, no cross hit."""
    image = multimodal_hash("img")
    events: list[dict[str, object]] = [
        {},
        {"lora_name": "A", "extra_keys": [["A"], ["A"]]},
        {"extra_keys": [[["img", 0]], None]},
        {"extra_keys": [["X"], None]},
        {"lora_name": "X", "extra_keys": [["X"], ["X"]]},
    ]
    tokens = list(range(8))
    chains = [
        chain_hashes(pack_tokens(tokens), 4),
        chain_hashes(pack_tokens(tokens), 4, adapter="A"),
        chain_hashes(pack_tokens(tokens), 4, mm={0: (image,)}),
        chain_hashes(pack_tokens(tokens), 4, salt="X"),
        chain_hashes(pack_tokens(tokens), 4, adapter="X"),
    ]
    index = twin.PrefixIndex()
    for number, fields in enumerate(events):
        wire = {"type": "BlockStored", "block_hashes": [number * 2, number * 2 + 1], "token_ids": tokens, **fields}
        index.apply(f"w{number}", 0, twin.decode_batch(msgspec.msgpack.encode([0.0, [wire], 0])))
    for number, chain in enumerate(chains):
        assert tiers(index, chain) == {(f"w{number}", 0): (2, 0, 0, 0)}


def test_children_inherit_the_salt(twin: Twin) -> None:
    """User case A11: the event carries the salt on block 0 only; a later child belongs to the same namespace."""
    index = index_of(twin, stored([0], salt="s"), stored([1], 0), stored([2], 1))
    assert tiers(index, chain_of_names([0, 1, 2], salt="s")) == {("w", 0): (3, 0, 0, 0)}
    assert tiers(index, chain_of_names([0, 1, 2])) == {}


def test_ranks_are_apart_and_zero_is_a_rank(twin: Twin) -> None:
    """User case A13: worker identity is (worker, rank); rank 0 is a value; the same hashes on two ranks are two."""
    index = twin.PrefixIndex()
    index.apply("w", 0, batch(stored([0])))
    index.apply("w", 1, batch(stored([0, 1])))
    assert tiers(index, chain_of_names([0, 1])) == {("w", 0): (1, 0, 0, 0), ("w", 1): (2, 0, 0, 0)}
    index.clear_rank("w", 0)
    assert tiers(index, chain_of_names([0, 1])) == {("w", 1): (2, 0, 0, 0)}
    assert index.ranks() == [("w", 0), ("w", 1)]
    assert (index.resident("w", 0), index.resident("w", 1), index.resident("x", 0)) == (0, 2, 0)
    index.remove_worker("w")
    assert (index.ranks(), index.match(chain_of_names([0]))) == ([], [])


# Groups, clears, namespaces that the engine hides.


def test_only_full_attention_groups_count(twin: Twin) -> None:
    """The other groups of a hybrid model are counted, also when their removal does not repeat the kind."""
    index = twin.PrefixIndex()
    result = index.apply(
        "w",
        0,
        batch(
            stored([0, 1], group=0, kind="sliding_window"),
            stored([0, 1], group=1, kind="full_attention"),
            removed([0, 1], group=0),
            removed([1], group=1),
        ),
    )
    assert (result.other_groups, result.stored, result.removed) == (4, 2, 1)
    assert reach(index, [0, 1]) == 1
    assert index.apply("w", 0, batch(stored([0, 1], group=0))).other_groups == 2


def test_a_kind_said_late_corrects_the_group(twin: Twin) -> None:
    """Group 0 without a kind is the main one until it is said to be another."""
    index = index_of(twin, stored([0, 1], group=0), stored([0, 1, 2], group=1, kind="mla_attention"))
    assert reach(index, [0, 1, 2]) == 2
    index.apply("w", 0, batch(stored([5], group=0, kind="sliding_window")))
    assert reach(index, [0, 1, 2]) == 3


def test_several_main_groups_must_all_hold_a_block(twin: Twin) -> None:
    """A position counts where every full-attention group has it, at the worst of their tiers."""
    index = index_of(
        twin,
        stored([0, 1, 2], group=0, kind="full_attention"),
        stored([0, 1], group=2, kind="full_attention"),
        stored([1], 0, Tier.HOST, group=2, kind="full_attention"),
        removed([1], group=2),
    )
    assert tiers(index, chain_of_names([0, 1, 2])) == {("w", 0): (1, 1, 0, 0)}
    index.apply("w", 0, batch(removed([0])))
    assert tiers(index, chain_of_names([0, 1, 2])) == {}


def test_clear_empties_the_engines_pool(twin: Twin) -> None:
    """AllBlocksCleared takes every tier and group of the pool, in order with the events around it."""
    index = twin.PrefixIndex()
    pool: list[Event] = [stored([0, 1]), stored([0, 1], tier=Tier.HOST), CLEARED, stored([0])]
    result = index.apply("w", 0, batch(*pool))
    assert result.cleared == 1
    assert tiers(index, chain_of_names([0, 1])) == {("w", 0): (1, 0, 0, 0)}


def test_clear_leaves_connectors_alone(twin: Twin) -> None:
    """A connector's blocks are not in the engine's pool (spec: engine-events §6 rule 7); a restart takes them too."""
    index = index_of(twin, stored([0, 1]), stored([0, 1], tier=Tier.HOST, connector=True), stored([3], 2), CLEARED)
    assert tiers(index, chain_of_names([0, 1])) == {("w", 0): (0, 2, 0, 0)}
    assert index.stats().held == 0
    index.apply("w", 0, batch(stored([2], 1), removed([0], Tier.HOST)))
    assert tiers(index, chain_of_names([0, 1, 2])) == {}
    index.apply("w", 0, batch(stored([0])))
    assert tiers(index, chain_of_names([0, 1, 2])) == {("w", 0): (2, 1, 0, 0)}
    index.clear_rank("w", 0)
    assert index.match(chain_of_names([0])) == []


def test_hidden_namespaces_share_their_copies(twin: Twin) -> None:
    """Two engine hashes of the same tokens: present until both are gone, in every tier (spec: engine-events §4)."""

    def other(names: list[int], tier: Tier = Tier.DEVICE) -> Stored:
        return Stored(hashes=tuple(500 + name for name in names), tokens=tokens_of(names), block_size=4, tier=tier)

    index = index_of(twin, stored([0, 1]), other([0, 1]), other([0], Tier.HOST), removed([0, 1]))
    assert tiers(index, chain_of_names([0, 1])) == {("w", 0): (2, 0, 0, 0)}
    index.apply("w", 0, batch(stored([2], 1)))
    assert tiers(index, chain_of_names([0, 1, 2])) == {("w", 0): (3, 0, 0, 0)}
    assert index.resident("w", 0) == 3


def test_one_hash_cannot_mean_two_blocks(twin: Twin) -> None:
    """A hash that the engine gives to other tokens while it holds the block is refused; afterwards it is free."""
    index = index_of(twin, stored([0]))
    clash = Stored(hashes=(100,), tokens=tokens_of([5]), block_size=4)
    assert dict(index.apply("w", 0, batch(clash)).rejected) == {"hash_conflict": 1}
    index.apply("w", 0, batch(removed([0]), clash))
    assert reach(index, [5]) == 1
    assert reach(index, [0]) == 0


def test_a_hash_with_a_second_meaning_proves_no_parent(twin: Twin) -> None:
    """Found by fuzzing: 1 and 2 left, 1's hash came back with other tokens, 2 without any: 2 is there again, but not
    what it hangs on, whatever its parent is called."""
    other = Stored(hashes=(101,), parent=100, tokens=tokens_of([7]), block_size=4)
    index = index_of(twin, stored([0, 1, 2]), removed([2, 1]), other, stored([2], with_tokens=False))
    copy = twin.PrefixIndex()
    copy.load(index.dump())
    for one in (index, copy):
        assert (reach(one, [0, 1, 2]), reach(one, [0, 7])) == (1, 2)
        one.apply("w", 0, batch(CLEARED, stored([0, 1])))
        assert (reach(one, [0, 1, 2]), one.stats().holed) == (2, 0)


def test_a_forgotten_parent_with_a_second_meaning_proves_nothing(twin: Twin) -> None:
    """Found by review: 3 is forgotten while those after it are remembered; its engine hash comes back with other
    tokens, and they without any."""
    names = list(range(8))
    index = twin.PrefixIndex(IndexLimits(max_remembered=4))
    other = Stored(hashes=(103,), parent=102, tokens=tokens_of([99]), block_size=4)
    for event in (stored(names), removed(names[3:]), other, stored(names[4:], with_tokens=False)):
        index.apply("w", 0, batch(event))
    assert reach(index, names) == 3


# Captured streams.


def replay(twin: Twin, name: str) -> PrefixIndex:
    index = twin.PrefixIndex()
    for rank, _, payload in captured.stream(name):
        result = index.apply("w", rank, twin.decode_batch(payload))
        assert not result.rejected, name
        assert not result.held, name
    return index


@pytest.mark.parametrize("name", captured.streams())
def test_captured_streams(twin: Twin, name: str) -> None:
    """Every captured stream applies without a reject or an orphan and without holes, and dumps and loads alike."""
    index = replay(twin, name)
    stats = index.stats()
    assert (stats.held, stats.holed, stats.dropped) == (0, 0, 0)
    copy = twin.PrefixIndex()
    copy.load(index.dump())
    assert copy.content() == index.content()


def test_engines_with_different_hashes_share_one_index(twin: Twin) -> None:
    """The same prompts under five hash settings of vLLM, among them 0.23's arrays, give the same blocks."""
    names = [
        "vllm/v0.23.0_sha256_int",
        "vllm/v0.32.0_sha256_bytes",
        "vllm/v0.32.0_sha256_cbor_bytes",
        "vllm/v0.32.0_sha256_cbor_int",
        "vllm/v0.32.0_xxhash_bytes",
    ]
    index = twin.PrefixIndex()
    first: Batch | None = None
    for name in names:
        for rank, seq, payload in captured.stream(name):
            batch_ = twin.decode_batch(payload)
            if seq < 3:
                index.apply(name, rank, batch_)
                first = first or batch_
    assert first is not None
    event = first.events[0]
    assert is_stored(event)
    chain = chain_hashes(event.tokens, 32)
    assert len(unpack_chain(chain)) == 2
    assert tiers(index, chain) == {(name, 0): (2, 0, 0, 0) for name in names}
    salted = chain_hashes(event.tokens, 32, salt="tenant-A")
    assert tiers(index, salted) == {(name, 0): (2, 0, 0, 0) for name in names}


def test_lora_stream(twin: Twin) -> None:
    """Base, adapter and adapter with salt: three namespaces of the same tokens, as real vLLM published them."""
    index = replay(twin, "vllm/v0.32.0_lora")
    event = twin.decode_batch(captured.payload("vllm/v0.32.0_lora/01_base__0.bin")).events[0]
    assert is_stored(event)
    namespaces: list[tuple[str | None, str | None, int]] = [
        (None, None, 2),
        ("adapterA", None, 2),
        ("adapterA", "s", 2),
        (None, "s", 0),
        ("adapterB", None, 0),
    ]
    for adapter, salt, blocks in namespaces:
        chain = chain_hashes(event.tokens, 32, adapter=adapter, salt=salt)
        assert sum(match.reach for match in index.match(chain)) == blocks


def test_hicache_tiers(twin: Twin) -> None:
    """SGLang's tier moves: new copies are announced before old ones go, so the block is never lost between."""
    decoded = twin.decode_batch(captured.payload("sglang/v0.5.23_radix/hicache_tiers.bin"))
    first = decoded.events[0]
    assert is_stored(first)
    chain = chain_hashes(first.tokens, 16)
    index = twin.PrefixIndex()
    seen = []
    for event in decoded.events:
        index.apply("w", 0, batch(event))
        seen.append(tiers(index, chain).get(("w", 0)))
    assert seen[:4] == [(2, 0, 0, 0), (2, 0, 0, 0), (0, 2, 0, 0), (2, 0, 0, 0)]


def test_an_empty_question(twin: Twin) -> None:
    """No full block, no match; half a hash at the end is not a block."""
    index = index_of(twin, stored([0]))
    assert index.match(b"") == []
    assert len(index.match(chain_of_names([0]) + b"abc")) == 1


def test_events_of_one_batch_apply_in_order(twin: Twin) -> None:
    """Store, remove, store again in one batch leaves one copy."""
    events: list[Event] = [stored([0]), removed([0]), stored([0])]
    index = twin.PrefixIndex()
    index.apply("w", 0, batch(*events))
    assert [places for blocks in index.content().values() for places in blocks.values()] == [((0, 0, 1),)]
