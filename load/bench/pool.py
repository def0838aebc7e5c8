"""The index of a shared pool: a master's raw messages, memory at ten million objects, what a match adds.

Layouts: ``mha_tp2`` (four objects a page) and ``mla`` (one, the worst case for memory). The figure without a layout's
name is the worse of the two. ``python_`` is the pure-Python twin, on a hundredth of the objects.

Applying: messages of 64 events of 21 keys (`load.bench.pool_messages`), made beforehand, into an empty index, one
thread; per second of wall clock, and of the process's CPU time (``_per_cpu_s``). Memory: growth of the process over the
objects that it then holds, nothing else kept.

Match: conversations of 512 pages, of which the first 128 are one of eight preambles; 64 workers, a quarter of the
conversations with two of them. ``device_match_us``: `PrefixIndex.match` on their chains, the answer object out.
``match_added_us``: `PoolIndex.match` on their pages in the full pool, where they were stored 64 pages a turn with other
conversations between; p50 of one question after the other, both asked in turn, median of the runs. ``_half``: the pool
has the first half only, ``_miss``: nothing, ``_scattered``: every page, stored in any order. Hashing comes on top, and
apart: ``page_hash_us`` for 32,768 tokens in pages of 64, ``chain_hash_us`` for the chain beside it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from random import Random
from typing import Any

from kvcore import page_hash, pool_index, twin
from kvcore.index import PrefixIndex
from kvcore.pool_layout import LayoutSet, PoolLayout, mha_components, mla_components
from load.bench.index import Samples
from load.bench.measure import each_us, resident_bytes, without_collector
from load.bench.options import Options
from load.bench.pool_messages import DIGEST_BYTES, EVENTS, PREFIX, Messages, identities, random_pages

SEED = 1
OBJECTS = 10_000_000
TIMED = 1_000_000
LAYOUTS = {"mha_tp2": mha_components(2), "mla": mla_components()}
PAGES, PREAMBLE, PREAMBLES, TURN = 512, 128, 8, 64
CONVERSATIONS, WORKERS = 1_600, 64
TOKENS = 32_768
_SHARE_OF_PYTHON = 100
_PART = 65_536


def run(options: Options) -> dict[str, object]:
    """See the module."""
    return _Pool(options).measure()


def _layout(name: str) -> PoolLayout:
    return PoolLayout("sglang_hicache", PREFIX, (LayoutSet(LAYOUTS[name]),))


class _Conversations:
    """Pages and chains of all conversations."""

    def __init__(self, generator: Random, count: int) -> None:
        preambles = [random_pages(generator, PREAMBLE) for _ in range(PREAMBLES)]
        self.digests = [preambles[at % PREAMBLES] + random_pages(generator, PAGES - PREAMBLE) for at in range(count)]
        # The device's chain hashes are as random as the digests: their first eight bytes stand for them.
        self.chains = [b"".join(one[at : at + 8] for at in range(0, len(one), DIGEST_BYTES)) for one in self.digests]
        self.pages = [identities(one) for one in self.digests]

    def device(self) -> PrefixIndex:
        """The index of what the workers' devices hold."""
        index = twin.PrefixIndex()
        for number, chain in enumerate(self.chains):
            for copy in range(1 + (number % 4 == 0)):
                worker = f"worker-{(number + copy * 7) % WORKERS}"
                index.apply_hashes(worker, 0, chain, chain)
        return index

    def turns(self, generator: Random, upto: int = PAGES) -> bytes:
        """Their pages in the order of a pool: a turn of each, then the next one."""
        order = list(range(len(self.digests)))
        parts: list[bytes] = []
        for start in range(0, upto, TURN):
            generator.shuffle(order)
            parts += [self.digests[number][start * DIGEST_BYTES : (start + TURN) * DIGEST_BYTES] for number in order]
        return b"".join(parts)


class _Pool:
    def __init__(self, options: Options) -> None:
        self.options = options
        self.samples = Samples()
        self.objects = OBJECTS // 100 if options.quick else OBJECTS
        self.timed = TIMED // 50 if options.quick else TIMED
        self.mismatches = 0
        if twin.IMPLEMENTATION == "python":
            self.objects //= _SHARE_OF_PYTHON
            self.timed //= _SHARE_OF_PYTHON

    def measure(self) -> dict[str, object]:
        self._apply()
        conversations = _Conversations(Random(SEED), 40 if self.options.quick else CONVERSATIONS)
        device = conversations.device()
        for name in LAYOUTS:
            self._full(name, conversations, device)
        self._hashing()
        return self._report()

    def _stage(self, text: str, done: int = 0, total: int | None = None) -> None:
        self.options.progress(text, done, total)

    # Applying

    def _apply(self) -> None:
        for number in range(self.options.runs):
            for name in LAYOUTS:
                self._stage(f"run {number + 1}: applying, {name}")
                self._apply_once(name, "", twin.PoolIndex, self.timed)
                if twin.IMPLEMENTATION != "python":
                    self._apply_once(name, "python_", pool_index.PoolIndex, self.timed // _SHARE_OF_PYTHON)

    def _apply_once(self, name: str, prefix: str, new_index: type[pool_index.PoolIndex], objects: int) -> None:
        messages = Messages(LAYOUTS[name])
        payloads = list(messages.of(random_pages(Random(SEED), max(objects // EVENTS, 1) * messages.pages)))
        index = new_index()
        apply = index.apply_payload
        with without_collector():
            start, cpu = time.perf_counter(), time.process_time()
            for payload in payloads:
                apply(payload)
            spent, cpu = time.perf_counter() - start, time.process_time() - cpu
        told = len(payloads) * EVENTS
        self.mismatches += index.stats().objects != told
        self.samples.add(f"{prefix}{name}_objects_per_s", told / spent)
        self.samples.add(f"{prefix}{name}_objects_per_cpu_s", told / cpu)
        self.samples.add("message_bytes", len(payloads[0]))

    # Ten million objects

    def _full(self, name: str, conversations: _Conversations, device: PrefixIndex) -> None:
        generator = Random(SEED + 1)
        messages = Messages(LAYOUTS[name])
        scattered = _Conversations(generator, 40)
        half = _Conversations(generator, 40)
        shuffled = [one[at : at + DIGEST_BYTES] for one in scattered.digests for at in range(0, len(one), DIGEST_BYTES)]
        generator.shuffle(shuffled)
        known = [conversations.turns(generator), half.turns(generator, PAGES // 2), b"".join(shuffled)]
        before = resident_bytes()
        index = twin.PoolIndex()
        for digests in known:
            for message in messages.of(digests):
                index.apply_payload(message)
        while (objects := index.stats().objects) < self.objects:
            self._stage(f"filling, {name}", objects, self.objects)
            pages = min(_PART, max((self.objects - objects) // len(LAYOUTS[name]), 1))
            for message in messages.of(random_pages(generator, pages)):
                index.apply_payload(message)
        stats = index.stats()
        self.samples.add(f"{name}_objects", stats.objects)
        self.samples.add(f"{name}_pages", stats.pages)
        self.samples.add(f"{name}_bytes_per_object", (resident_bytes() - before) / stats.objects)
        self.samples.add(f"{name}_own_bytes_per_object", stats.memory_bytes / stats.objects)
        missing = _Conversations(generator, 40).pages
        whole, nothing = ((0, PAGES),), ()
        self._match(name, "", index, conversations.pages, whole, device, conversations.chains)
        self._match(name, "_half", index, half.pages, ((0, PAGES // 2),))
        self._match(name, "_miss", index, missing, nothing)
        self._match(name, "_scattered", index, scattered.pages, whole)

    def _match(
        self,
        name: str,
        suffix: str,
        index: pool_index.PoolIndex,
        pages: list[bytes],
        expected: tuple[tuple[int, int], ...],
        device: PrefixIndex | None = None,
        chains: list[bytes] | None = None,
    ) -> None:
        layout = _layout(name)
        match: Callable[[Any], object] = lambda asked: index.match(layout, asked)  # noqa: E731
        self.mismatches += sum(match(asked) != expected for asked in pages)
        order = list(range(len(pages)))
        for number in range(max(self.options.runs, 1)):
            self._stage(f"run {number + 1}: questions, {name}{suffix}")
            Random(number).shuffle(order)
            with without_collector():
                if device is not None and chains is not None:
                    device_spent = each_us(device.match, [chains[at] for at in order])  # type: ignore[arg-type]
                    self.samples.spent(f"{name}_device_match", device_spent)
                spent = each_us(match, [pages[at] for at in order])
            self.samples.spent(f"{name}_match_added{suffix}", spent)
            if device is not None:
                ratio = statistics.median(spent) / statistics.median(device_spent)
                self.samples.add(f"{name}_match_added_ratio", ratio)

    # Hashing

    def _hashing(self) -> None:
        tokens = Random(SEED).randbytes(TOKENS * 4)
        self.mismatches += twin.page_hashes(tokens, 64) != page_hash.page_hashes(tokens, 64)
        for _ in range(max(self.options.runs, 1)):
            with without_collector():
                pages = each_us(lambda asked: twin.page_hashes(asked, 64), [tokens] * 20)  # type: ignore[arg-type]
                chain = each_us(lambda asked: twin.chain_hashes(asked, 64), [tokens] * 20)  # type: ignore[arg-type]
            self.samples.add("page_hash_us", statistics.median(pages))
            self.samples.add("chain_hash_us", statistics.median(chain))

    def _report(self) -> dict[str, object]:
        figures = self.samples.medians()

        def of(key: str, worst: Callable[..., float]) -> float:
            return worst(float(figures[key.format(name)] or 0) for name in LAYOUTS)

        return {
            "bench": "pool",
            "kvcore": twin.IMPLEMENTATION,
            "quick": self.options.quick,
            "runs": self.options.runs,
            "objects": self.objects,
            "objects_per_s": of("{}_objects_per_s", min),
            "objects_per_cpu_s": of("{}_objects_per_cpu_s", min),
            "bytes_per_object": of("{}_bytes_per_object", max),
            "device_match_us": of("{}_device_match_p50_us", max),
            "match_added_us": of("{}_match_added_p50_us", max),
            "match_added_ratio": of("{}_match_added_ratio", max),
            **figures,
            "mismatches": self.mismatches,
        }
