"""Hashes and index against NVIDIA Dynamo's published package (extra ``bench``): the same numbers, the same answers."""

from __future__ import annotations

import importlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcore.events import Batch, Cleared, Event, Removed, Stored
from kvcore.hashing import chain_hashes, chain_of, local_hashes, pack_tokens, seed_of, unpack_chain
from kvcore.index import PrefixIndex

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

BLOCK_SIZE = 4
_U32 = st.integers(0, 2**32 - 1)
_NAMES = st.one_of(st.none(), st.text(st.characters(exclude_categories=["Cs"]), max_size=12))
_PROFILE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@pytest.fixture(scope="module")
def dynamo() -> Any:
    """The peer's package; `Any`, because it is not installed where types are checked."""
    try:
        return importlib.import_module("dynamo.llm")
    except ImportError as error:
        pytest.skip(f"ai-dynamo-runtime is not installed (pip install 'tidegate[bench]'): {error}")


@_PROFILE
@given(
    tokens=st.lists(_U32, max_size=80),
    block_size=st.integers(1, 20),
    adapter=_NAMES,
    salt=_NAMES,
    eagle=st.booleans(),
)
def test_local_hashes_are_the_peers(
    dynamo: Any, tokens: list[int], block_size: int, adapter: str | None, salt: str | None, eagle: bool
) -> None:
    """Any tokens, block size, adapter and salt, with and without the Eagle window: the same hash for every block."""
    ours = local_hashes(pack_tokens(tokens), block_size, seed=seed_of(adapter, salt), eagle=eagle)
    theirs = dynamo.compute_block_hash_for_seq(
        tokens, block_size, lora_name=adapter, is_eagle=eagle, cache_namespace=salt
    )
    assert ours == theirs


@_PROFILE
@given(st.lists(st.lists(st.integers(0, 2**64 - 1), max_size=3), min_size=1, max_size=6))
def test_multimodal_hashes_are_the_peers(dynamo: Any, objects: list[list[int]]) -> None:
    """Objects enter a block's hash by their own hashes, in any order and wherever in the block they lie."""
    tokens = list(range(len(objects) * BLOCK_SIZE))
    infos = [
        {"mm_objects": [{"mm_hash": value, "offsets": [[place, place + 1]]} for place, value in enumerate(values)]}
        if values
        else None
        for values in objects
    ]
    theirs = dynamo.compute_block_hash_for_seq(tokens, BLOCK_SIZE, block_mm_infos=infos)
    assert local_hashes(pack_tokens(tokens), BLOCK_SIZE, mm=dict(enumerate(objects))) == theirs


def test_a_chain_goes_on_from_its_parent(dynamo: Any) -> None:
    """The chain over the peer's local hashes is the chain that we compute from tokens, in one go or turn by turn."""
    tokens = random.Random(7).choices(range(2**32), k=64 * 40)
    packed = pack_tokens(tokens)
    theirs = chain_of(dynamo.compute_block_hash_for_seq(tokens, 64))
    whole = unpack_chain(chain_hashes(packed, 64))
    first, rest = chain_hashes(packed[: 64 * 4 * 15], 64), packed[64 * 4 * 15 :]
    resumed = unpack_chain(chain_hashes(rest, 64, parent=unpack_chain(first)[-1]))
    assert list(whole) == theirs
    assert unpack_chain(first) + resumed == whole


@dataclass
class Both:
    """The peer's tree and our index, told the same hole-free history: a child never outlives its parent."""

    dynamo: Any
    conversations: list[list[int]]
    index: PrefixIndex = field(default_factory=PrefixIndex)
    held: dict[int, dict[int, int | None]] = field(default_factory=dict)
    events: int = 0

    def __post_init__(self) -> None:
        self.tree = self.dynamo.RadixTree()
        self.chains = [unpack_chain(chain_hashes(pack_tokens(tokens), BLOCK_SIZE)) for tokens in self.conversations]

    def tell(self, worker: int, ours: Event, theirs: Any) -> None:
        self.index.apply(f"w{worker}", 0, Batch(ts=0.0, rank=0, events=(ours,)))
        self.events += 1
        event = {"event_id": self.events, "dp_rank": 0, "data": theirs}
        self.tree.apply_event(worker, json.dumps(event).encode())

    def store(self, worker: int, conversation: int, depth: int) -> None:
        """What of the first ``depth`` blocks is missing there becomes resident."""
        held = self.held.setdefault(worker, {})
        chain = self.chains[conversation][:depth]
        start = sum(block in held for block in chain)
        new = chain[start:]
        if not new:
            return
        parent = chain[start - 1] if start else None
        tokens = self.conversations[conversation][start * BLOCK_SIZE : depth * BLOCK_SIZE]
        local = self.dynamo.compute_block_hash_for_seq(tokens, BLOCK_SIZE)
        blocks = [{"block_hash": own, "tokens_hash": of} for own, of in zip(new, local, strict=True)]
        self.tell(
            worker,
            Stored(hashes=new, parent=parent, tokens=pack_tokens(tokens), block_size=BLOCK_SIZE),
            {"stored": {"parent_hash": parent, "blocks": blocks}},
        )
        for own in new:
            held[own], parent = parent, own

    def evict(self, worker: int, which: int) -> None:
        """One block that no resident block hangs on leaves, as engines evict."""
        held = self.held.get(worker, {})
        leaves = sorted(set(held) - set(held.values()))
        if leaves:
            gone = leaves[which % len(leaves)]
            del held[gone]
            self.tell(worker, Removed(hashes=(gone,)), {"removed": {"block_hashes": [gone]}})

    def clear(self, worker: int) -> None:
        self.held.pop(worker, None)
        self.tell(worker, Cleared(), "cleared")

    def leave(self, worker: int) -> None:
        self.held.pop(worker, None)
        self.index.remove_worker(f"w{worker}")
        self.tree.remove_worker(worker)

    def assert_equal(self) -> None:
        """Every conversation's prefix on every worker, by the peer, by us, and by what was told."""
        for tokens, chain in zip(self.conversations, self.chains, strict=True):
            local = self.dynamo.compute_block_hash_for_seq(tokens, BLOCK_SIZE)
            theirs = {f"w{worker}": blocks for (worker, _), blocks in self.tree.find_matches(local).scores.items()}
            ours = {match.worker: match.reach for match in self.index.match(chain_hashes(pack_tokens(tokens), 4))}
            told = {f"w{worker}": sum(own in held for own in chain) for worker, held in self.held.items()}
            assert ours == theirs == {worker: blocks for worker, blocks in told.items() if blocks}


def conversations() -> list[list[int]]:
    """Eight of them, 24 blocks each, that branch off each other at various depths."""
    random_ = random.Random(11)
    made = [random_.choices(range(1000), k=24 * BLOCK_SIZE)]
    for shared in (1, 3, 8, 8, 15, 23, 0):
        start = random_.choice(made)[: shared * BLOCK_SIZE]
        made.append(start + random_.choices(range(1000), k=24 * BLOCK_SIZE - len(start)))
    return made


_STEP = st.one_of(
    st.tuples(st.just("store"), st.integers(1, 4), st.integers(0, 7), st.integers(1, 24)),
    st.tuples(st.just("store"), st.integers(1, 4), st.integers(0, 7), st.integers(1, 24)),
    st.tuples(st.just("evict"), st.integers(1, 4), st.integers(0, 10_000)),
    st.tuples(st.just("evict"), st.integers(1, 4), st.integers(0, 10_000)),
    st.tuples(st.just("clear"), st.integers(1, 4)),
    st.tuples(st.just("leave"), st.integers(1, 4)),
)


@settings(_PROFILE, max_examples=60)
@given(st.lists(_STEP, min_size=5, max_size=40))
def test_the_index_answers_as_the_peers_tree(dynamo: Any, steps: list[tuple[Any, ...]]) -> None:
    """On histories without holes, where the peer is right, both give the same prefix for every conversation."""
    both = Both(dynamo, conversations())
    for name, *arguments in steps:
        getattr(both, name)(*arguments)
    both.assert_equal()


def test_a_long_history_of_stores_and_evictions(dynamo: Any) -> None:
    """3,000 steps over 4 workers, compared every 100."""
    random_ = random.Random(5)
    both = Both(dynamo, conversations())
    for step in range(3_000):
        worker = random_.randint(1, 4)
        if random_.random() < 0.15:
            both.store(worker, random_.randrange(8), random_.randint(1, 24))
        else:
            both.evict(worker, random_.randrange(10_000))
        if step % 100 == 0:
            both.assert_equal()
    both.assert_equal()
    assert both.events > 1_000
