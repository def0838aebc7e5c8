"""The kinds of cases. Each makes its input of a seeded generator, feeds both twins, and raises `DifferenceError`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from kvcore import hashing
from kvcore.dump import at_once
from kvcore.errors import BadReplayError
from kvcore.events import Stored
from kvcore.index import IndexLimits, PrefixIndex
from kvcore.replay import ReplayBatch, parse_reply, reply_frames
from kvcore.stream import (
    Clear,
    Connected,
    Deliver,
    Fetch,
    LiveBatch,
    ReplayedBatch,
    ReplayEnded,
    StreamEffect,
    StreamEvent,
    StreamRecovery,
    Tick,
)
from tests.fuzz.kvcore.compare import Pair, exact_match, hold, outcome, read_batch, read_match, same
from tests.fuzz.kvcore.damage import PAYLOADS, damaged_bytes, damaged_dump, damaged_payload
from tests.fuzz.kvcore.engines import Engine, Forest
from tests.fuzz.kvcore.pools import pool_bounds, pool_files, pool_history, pool_keys, pool_messages
from tests.unit.kvcore.twins import PYTHON, Twin

RANKS = (("a", 0), ("a", 1), ("b", 0), ("c", 7))


def decode(rng: Random, twin: Twin) -> None:
    """A damaged payload is read alike: the batch field by field, or the same refusal."""
    payload = damaged_payload(rng) if rng.randrange(20) else rng.randbytes(rng.randrange(60))
    python = read_batch(outcome(lambda: PYTHON.decode_batch(payload)))
    same(f"batch {payload.hex()}", python, read_batch(outcome(lambda: twin.decode_batch(payload))))


def hashes(rng: Random, twin: Twin) -> None:
    """Every hash of any tokens, in any namespace, in any cut."""
    size = rng.choice((1, 2, 4, 16, 59, 60, 61, 64, 300))
    tokens = rng.randbytes(4 * rng.randrange(1 + 5 * size) + (rng.randrange(4) if rng.randrange(20) == 0 else 0))
    mm = {
        rng.randrange(-1, 6): [rng.randrange(2**64) for _ in range(rng.randrange(3))] for _ in range(rng.randrange(3))
    }
    names = (None, "", "a", "\u65e5\u672c", "\ud800", "x" * rng.randrange(300))
    adapter, salt, eagle = rng.choice(names), rng.choice(names), rng.randrange(4) == 0
    parent = rng.choice((None, 0, rng.randrange(2**64)))
    block_size = rng.choice((size, size, size, 0, -1, 2**40))

    def of(one: Twin) -> Any:
        seed = one.seed_of(adapter, salt)
        return [
            seed,
            outcome(lambda: one.local_hashes(tokens, block_size, seed=seed, mm=mm or None, eagle=eagle)),
            outcome(
                lambda: one.chain_hashes(
                    tokens, block_size, adapter=adapter, salt=salt, mm=mm or None, parent=parent, eagle=eagle
                )
            ),
            outcome(lambda: one.sequence_hashes_with_tail(tokens, block_size)),
            one.multimodal_hash(rng_text),
        ]

    rng_text = rng.choice(("a" * 64, "0" * 63 + "g", "", "f" * 64, rng.randbytes(32).hex(), "\u00e9" * 64))
    same("hashes", of(PYTHON), of(twin))


def history(rng: Random, twin: Twin) -> None:
    """Any history of several engines, contradictions and damage included: every answer, count and content alike, and
    what one twin dumps the other goes on with."""
    limits = rng.choice((IndexLimits(), IndexLimits(), IndexLimits(max_held=8), IndexLimits(max_remembered=3)))
    pair, forest = Pair.new(twin, limits), Forest(rng, rng.choice((3, 8, 30, 80)), rng.choice((1, 4, 4, 16)))
    tidy = rng.randrange(2) == 0
    engines = [Engine(rng, forest, *rank, tidy=tidy) for rank in RANKS[: rng.choice((1, 2, 4))]]
    for engine in engines:
        # Which of many blocks that leave at once are remembered is each twin's own affair.
        engine.clears = limits.max_remembered > 3
    reloads = limits == IndexLimits()
    damaged = False
    for step in range(rng.choice((10, 30, 80))):
        engine = rng.choice(engines)
        what = rng.randrange(40)
        if what == 0:
            for index in pair.both:
                index.clear_rank(engine.worker, engine.rank)
        elif what == 1:
            for index in pair.both:
                index.remove_worker(engine.worker)
        elif what == 2 and reloads:
            pair = reloaded(rng, pair, limits)
        elif what == 3 and reloads:
            prepared_aside(rng, pair, engines)
        elif what == 5 and tidy and not damaged:  # what is given is believed, so it must be right
            pair.apply_hashes(engine.worker, engine.rank, *engine.given())
        else:
            payload = engine.payload()
            damaged = damaged or what == 4
            pair.apply(engine.worker, engine.rank, damaged_bytes(rng, payload) if what == 4 else payload)
        if step % 4 == 0:
            pair.check_match(forest.questions(rng, 4))
    chains = forest.questions(rng, 12)
    pair.check_match(chains)
    pair.check_all()
    if not any(engine.grouped for engine in engines):
        content = pair.python.content()
        for chain in chains:
            same("match and content", exact_match(content, chain), read_match(pair.python, chain))
    for worker in {engine.worker for engine in engines}:
        for index in pair.both:
            index.remove_worker(worker)
    for index in pair.both:
        stats = index.stats()
        hold(f"everything was removed, left are {stats}", stats.known == stats.unique == stats.resident == 0)


def reloaded(rng: Random, pair: Pair, limits: IndexLimits) -> Pair:
    """Fresh indexes that loaded each other's dumps, of all workers or of one."""
    worker = rng.choice((None, None, "a"))
    dumps = [index.dump(worker) for index in pair.both]
    rng.shuffle(dumps)
    fresh = Pair.new(pair.twin, limits)
    if worker is not None and rng.randrange(2):
        fresh = pair  # in place: the worker's ranks are replaced by themselves
    same("what was loaded", *(sorted(index.load(dump)) for index, dump in zip(fresh.both, dumps, strict=True)))
    if worker is None:
        same("content after a load", pair.python.content(), fresh.python.content())
    fresh.check_all()
    return fresh


def prepared_aside(rng: Random, pair: Pair, engines: list[Engine]) -> None:
    """A dump loaded in steps while batches are applied; some of its ranks are adopted, the rest is discarded."""
    dump = rng.choice(pair.both).dump()
    prepared = []
    for index in pair.both:
        if rng.randrange(8) == 0:
            next(steps := index.prepare(dump), None)
            steps.close()
        prepared.append(at_once(index.prepare(dump)))
    for engine in engines[:2]:
        pair.apply(engine.worker, engine.rank, engine.payload())
    wanted = [rank for rank in RANKS if rng.randrange(2)]
    adopted = [sorted(index.adopt(part, wanted)) for index, part in zip(pair.both, prepared, strict=True)]
    same("adopted", *adopted)
    pair.check_all()
    for index, part in zip(pair.both, prepared, strict=True):
        at_once(index.discard(part))
    pair.check_all()


def bounds(rng: Random, twin: Twin) -> None:
    """Under tight bounds each twin by itself: the bound holds, nothing resident loses what it hangs on, and no answer
    is higher than without bounds."""
    limits = IndexLimits(
        max_blocks=rng.choice((1, 5, 20, 60)),
        max_held=rng.choice((1, 4, 8192)),
        max_remembered=rng.choice((0, 3, 4096)),
    )
    pair, free = Pair.new(twin, limits), PYTHON.PrefixIndex()
    forest = Forest(rng, rng.choice((8, 30, 80)), 4)
    engines = [Engine(rng, forest, *rank, tidy=True) for rank in RANKS[: rng.choice((1, 2, 4))]]
    for engine in engines:
        engine.grouped = engine.hidden = False
    for step in range(60):
        engine = rng.choice(engines)
        payload = engine.payload()
        free.apply_payload(engine.worker, engine.rank, payload)
        for index in pair.both:
            index.apply_payload(engine.worker, engine.rank, payload)
            stats = index.stats()
            hold(f"{stats} is within {limits}", stats.known <= limits.max_blocks)
            if rng.randrange(30) == 0:
                index.load(index.dump())
        if step % 6 == 0:
            for chain in forest.questions(rng, 6):
                most = read_match(free, chain)
                for index in pair.both:
                    for rank, blocks in read_match(index, chain).items():
                        hold(
                            f"{rank} answers {blocks}, at most {most.get(rank)}", sum(blocks) <= sum(most.get(rank, ()))
                        )


def dumps(rng: Random, twin: Twin) -> None:
    """A damaged dump is refused by both or loaded alike by both, and the index works afterwards."""
    forest, source = Forest(rng, 12, 4), Pair.new(twin)
    engines = [Engine(rng, forest, *name, tidy=rng.randrange(2) == 0) for name in RANKS[:2]]
    for engine in engines * 6:
        source.apply(engine.worker, engine.rank, engine.payload())
    data = damaged_dump(rng, rng.choice(source.both).dump())
    pair = Pair.new(twin)
    same("what a damaged dump gave", *(outcome(partial(index.load, data)) for index in pair.both))
    same("what a damaged dump held", *(sorted(index.content()) for index in pair.both))
    payloads = [(engine, engine.payload()) for engine in engines * 4]
    chains = forest.questions(rng, 6)
    for index in pair.both:
        for engine, payload in payloads:
            index.apply_payload(engine.worker, engine.rank, payload)
        for chain in chains:
            read_match(index, chain)
        for worker, _ in index.ranks():
            index.remove_worker(worker)
        hold("everything was removed", index.stats().unique == index.stats().known == 0)


def stream(rng: Random, twin: Twin) -> None:
    """A rank's batches lost, doubled, late and replayed through the recovery machine, the engine restarted or without
    its history: both indexes are told the same, and whenever the machine says synced they hold what the engine does."""
    forest = Forest(rng, 20, 4)
    pair, machine = Pair.new(twin), StreamRecovery("replay")
    engine = Engine(rng, forest, "w", 0, tidy=True)
    published: list[bytes] = []
    forgotten = 0
    now = 0.0
    fetch: Fetch | None = None

    def handle(*events: StreamEvent) -> None:
        nonlocal fetch
        for event in events:
            for effect in machine.handle(event, now):
                fetch = obey(effect) or fetch

    def obey(effect: StreamEffect) -> Fetch | None:
        match effect:
            case Deliver():
                pair.apply("w", 0, effect.payload)
            case Clear():
                for index in pair.both:
                    index.clear_rank("w", 0)
            case Fetch():
                return effect
            case _:
                pass
        return None

    handle(Connected())
    for _ in range(rng.choice((10, 40))):
        now += 1.0
        what = rng.randrange(12)
        if what == 0:
            published, forgotten = [], 0
            engine = Engine(rng, forest, "w", 0, tidy=True)
            handle(Connected())
        elif what == 1:
            forgotten = rng.randrange(len(published) + 1)
        else:
            published.append(engine.payload())
            if what > 3:
                handle(LiveBatch(len(published) - 1, published[-1]))
            if what == 11:
                again = rng.randrange(len(published))
                handle(LiveBatch(again, published[again]))
        if fetch is not None and rng.randrange(3):
            asked, fetch = fetch, None
            for seq in range(max(asked.from_seq, forgotten), len(published)):
                handle(ReplayedBatch(asked.token, *over_the_wire(rng, seq, published[seq])))
            handle(ReplayEnded(asked.token))
        if machine.wake_at is not None and machine.wake_at <= now:
            handle(Tick())
        if machine.state == "synced" and machine.last == len(published) - 1:
            check_truth(pair, published, forest.questions(rng, 3))
    pair.check_all()


def over_the_wire(rng: Random, seq: int, payload: bytes) -> tuple[int, bytes]:
    """A replayed batch read back from its frames; damaged ones are read or refused, nothing else."""
    frames = reply_frames(ReplayBatch(seq, payload), rng.choice((None, b"", b"kv@pod")))
    broken = [damaged_bytes(rng, frame) if rng.randrange(3) == 0 else frame for frame in frames]
    with contextlib.suppress(BadReplayError):
        parse_reply(broken[: rng.randrange(6)])
    answer = parse_reply(frames)
    hold("an answer is read back", answer == ReplayBatch(seq, payload))
    return seq, payload


def check_truth(pair: Pair, published: list[bytes], chains: list[bytes]) -> None:
    """Both answer as an index that was told everything since the engine's start."""
    truth = PrefixIndex()
    for payload in published:
        truth.apply_payload("w", 0, payload)
    for chain in chains:
        same("a synced stream's answer", read_match(truth, chain), read_match(pair.python, chain))
    pair.check_match(chains)


def captured(rng: Random, twin: Twin) -> None:
    """Captured payloads in any order, some damaged, told to few ranks: alike in everything."""
    pair = Pair.new(twin)
    chains: list[bytes] = []
    for _ in range(rng.choice((5, 25))):
        payload = rng.choice(PAYLOADS) if rng.randrange(3) else damaged_payload(rng)
        pair.apply(*rng.choice(RANKS[:2]), payload)
        batch = outcome(partial(PYTHON.decode_batch, payload))
        chains += [
            hashing.chain_hashes(event.tokens, event.tokens_per_block, salt=event.salt)
            for event in (() if isinstance(batch, str) else batch.events[:2])
            if isinstance(event, Stored) and 0 < event.tokens_per_block < 4096
        ]
    pair.check_match(chains[:8])
    pair.check_all()


KINDS: dict[str, Callable[[Random, Twin], None]] = {
    kind.__name__: kind
    for kind in (
        *(decode, hashes, history, bounds, dumps, stream, captured),
        *(pool_keys, pool_messages, pool_history, pool_bounds, pool_files),
    )
}
WEIGHTS = {"decode": 40, "hashes": 10, "history": 10, "bounds": 3, "dumps": 8, "stream": 3, "captured": 4}
WEIGHTS |= {"pool_keys": 20, "pool_messages": 10, "pool_history": 5, "pool_bounds": 3, "pool_files": 5}
"""How often each kind is drawn: the cheap ones more often."""


def run(kind: str, seed: int, twin: Twin) -> None:
    """One case. Raises `DifferenceError`, or whatever a twin raises that it must not."""
    KINDS[kind](Random(f"{kind}/{seed}"), twin)
