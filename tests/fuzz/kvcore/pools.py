"""Cases of the pool core: keys, messages, histories and files of any kind, told to both twins."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

import msgspec

from kvcore.dump import at_once
from kvcore.pool_dump import DELTA, DUMP, decode
from kvcore.pool_index import PoolIndex, PoolLimits
from kvcore.pool_layout import LayoutSet, PoolLayout
from tests.fuzz.kvcore.compare import hold, outcome, same
from tests.fuzz.kvcore.damage import damaged_bytes, damaged_value
from tests.unit.kvcore.pool_making import POOL_TWINS, SETS, PoolTwin, frames_of, page_of, payload, removed, stored
from tests.unit.kvcore.twins import Twin

PYTHON = POOL_TWINS[0]
MESSAGES = tuple(frame for name in SETS for frame in frames_of(name) if len(frame) < 4_000)
_PARTS = (
    *("@", "_", "@", "_", "", "0", "17", "m", "Qwen/Qwen3", "half", "k", "v", "_0_k", "__k", "\u65e5", "\ud800", "\0"),
    *("tp_rank:0", "head_or_tp_rank:1", "pcp0", "dcp2", "dcp:3", "pp_rank:0", "group:1", "layer_id:4"),
    *("cache_role:kv", "cache_role:", "cache_family:x", "tp_rank:", "tp_rank:\u0663", "@1@0@", "@tp_rank:0@"),
    *(page_of(0), page_of(1), page_of(0)[:32], page_of(0)[:16], page_of(0)[:8], page_of(0)[:7], page_of(0) * 2),
    page_of(0).upper(),
)
_COMPONENTS = ("_0_k", "_0_v", "_1_k", "_swa")
_PREFIXES = ("", "m_", "tag_m_", "m@x_")
_TENANTS = ("default", None, "b", "")
_MEDIA = ("cpu", "CPU", "disk", None, "tape", "m2", "m3", "m4", "m5", "m6", "m7", "\u00c9A")
_STATS = ("pages", "objects", "prefixes", "unparsed", "unknown_media", "rejected",
          "tenants", "backend_id")  # fmt: skip


def twin_of(twin: Twin) -> PoolTwin:
    """The pool core of the same twin."""
    return next((each for each in POOL_TWINS if each.name == twin.name), PYTHON)


def pool_keys(rng: Random, twin: Twin) -> None:
    """Any text is taken apart alike, as text and as bytes."""
    key = "".join(rng.choice(_PARTS) for _ in range(rng.randrange(16)))
    most = rng.choice((4096, 4096, len(key), 64))
    other = twin_of(twin)
    for form in (key, key.encode("utf-8", "surrogatepass"), damaged_bytes(rng, key.encode("utf-8", "surrogatepass"))):
        same(f"key {form!r}", PYTHON.parse_key(form, most), other.parse_key(form, most))


def pool_messages(rng: Random, twin: Twin) -> None:
    """Damaged messages of a real master: the same counts, or the same refusal."""
    pair = Pools(twin_of(twin))
    for _ in range(rng.choice((1, 1, 6))):
        message = rng.choice(MESSAGES)
        if rng.randrange(2):
            message = msgspec.msgpack.encode(damaged_value(rng, msgspec.msgpack.decode(message)))
        pair.apply(damaged_bytes(rng, message) if rng.randrange(3) else message)
    pair.check()


def pool_history(rng: Random, twin: Twin) -> None:
    """Any history of events, lists, reconciles, clears and reloads: every answer and count alike."""
    pair = Pools(twin_of(twin))
    keys = [_key(rng) for _ in range(rng.choice((4, 12, 60)))]
    for _ in range(rng.choice((5, 20, 40))):
        match rng.randrange(12):
            case 0:
                tenant = rng.choice((None, "default", "b"))
                for index in pair.both:
                    index.clear(tenant)
            case 1:
                pair.add_keys(keys_text(rng, keys))
            case 2 | 3:
                pair.reconcile(rng, keys)
            case 4:
                pair.reload(rng)
            case _:
                pair.apply(_message(rng, keys))
        pair.check_match(rng)
    pair.check()


def pool_bounds(rng: Random, twin: Twin) -> None:
    """Under tight bounds each twin by itself: they hold, and nothing is there that nobody told of."""
    limits = PoolLimits(
        max_pages=rng.choice((1, 3, 10)),
        max_prefixes=rng.choice((1, 2, 4096)),
        max_components=rng.choice((1, 2, 1024)),
        max_key_bytes=rng.choice((60, 72, 4096)),
    )
    keys = [_key(rng) for _ in range(30)]
    for each in (PYTHON, twin_of(twin)):
        told, index = PYTHON.PoolIndex(), each.PoolIndex(limits)
        for _ in range(12):
            message = _message(rng, keys, _MEDIA[:6])  # so that none is refused for want of room
            told.apply_payload(message)
            index.apply_payload(message)
            if rng.randrange(6) == 0:
                at_once(index.load(at_once(index.dump())))
            stats = index.stats()
            hold(f"{stats} is within {limits}", stats.pages <= limits.max_pages)
            hold(f"{stats} is within {limits}", stats.prefixes <= limits.max_prefixes)
            hold("components", stats.components <= limits.max_components * max(1, stats.prefixes))
            for key in keys:
                hold(f"{key} is there and nobody told", index.present(key) <= told.present(key))


def pool_files(rng: Random, twin: Twin) -> None:
    """Damaged dumps and deltas are refused by both, with nothing changed, or taken alike by both."""
    keys = [_key(rng) for _ in range(8)]
    source = rng.choice((PYTHON, twin_of(twin))).PoolIndex()
    source.apply_payload(_message(rng, keys))
    dump = at_once(source.dump())
    deltas = PYTHON.PoolIndex().difference(_copy(PYTHON, source), tenant=None) or [DELTA]
    pair = Pools(twin_of(twin))
    pair.apply(_message(rng, keys))
    for data in (dump, rng.choice(deltas), DELTA + dump[4:], DUMP + deltas[0][4:]):
        data = damaged_bytes(rng, data)
        loaded = [outcome(partial(lambda index, data: at_once(index.load(data)), index, data)) for index in pair.both]
        same(f"load of {data.hex()}", *loaded)
        same(f"delta {data.hex()}", *(outcome(partial(index.apply_delta, data)) for index in pair.both))
    pair.check()


class Pools:
    """An index of each twin, told the same."""

    def __init__(self, other: PoolTwin) -> None:
        self.twins = (PYTHON, other)
        self.both: tuple[PoolIndex, PoolIndex] = (PYTHON.PoolIndex(), other.PoolIndex())
        self.same_order = True
        self.layouts: list[PoolLayout] = []
        """Asked for before: what an index made of one must not outlive what it holds."""

    def apply(self, message: bytes) -> None:
        same(f"message {message.hex()}", *(outcome(partial(index.apply_payload, message)) for index in self.both))

    def add_keys(self, keys: bytes) -> None:
        same("a key list", *(index.add_keys(keys) for index in self.both))

    def reconcile(self, rng: Random, keys: list[str]) -> None:
        """Both become as a list says, by each other's deltas."""
        text, tenant = keys_text(rng, keys), rng.choice(("default", None))
        targets = [twin.PoolIndex() for twin in self.twins]
        same("a list", *(one.add_keys(text, known=index) for one, index in zip(targets, self.both, strict=True)))
        size = rng.choice((100, 1_000_000))
        deltas = [
            index.difference(target, tenant=tenant, part_bytes=size)
            for index, target in zip(self.both, targets, strict=True)
        ]
        python, other = (list(parts) for parts in rng.sample(deltas, 2))
        if len(python) > 1:
            # A deployment may be empty, and its counters begin again, between two parts.
            rng.shuffle(python)
            self.same_order = False
        for index, parts in zip(self.both, (python, other), strict=True):
            for delta in parts:
                index.apply_delta(delta)
        for index, target in zip(self.both, targets, strict=True):
            hold("nothing is left to change", index.difference(target, tenant=tenant) == [])

    def reload(self, rng: Random) -> None:
        """Each loads a dump of either."""
        dumps = [at_once(index.dump()) for index in self.both]
        rng.shuffle(dumps)
        for index, dump in zip(self.both, dumps, strict=True):
            at_once(index.load(dump))

    def check_match(self, rng: Random) -> None:
        names = [rng.randrange(6) for _ in range(rng.randrange(12))]
        asked = b"".join(bytes.fromhex(page_of(name))[:16] for name in names) + rng.randbytes(rng.randrange(3))
        sets = [
            LayoutSet(
                tuple(rng.sample(_COMPONENTS, rng.randrange(3))),
                rng.choice(("all_pages", "trailing_pages")),
                rng.randrange(4),
            )
            for _ in range(rng.randrange(4))
        ]
        layout = PoolLayout("sglang_hicache", rng.choice(_PREFIXES), (LayoutSet(_COMPONENTS[:1]), *sets))
        if self.layouts and rng.randrange(2):
            layout = rng.choice(self.layouts)
        self.layouts.append(layout)
        tenant = rng.choice(("default", "b"))
        same(f"match of {layout}", *(index.match(layout, asked, tenant=tenant) for index in self.both))

    def check(self) -> None:
        """Counts and content are alike."""
        same("stats", *({name: getattr(index.stats(), name) for name in _STATS} for index in self.both))
        if self.same_order:
            same("unmatched", *((index.stats().unmatched, index.stats().components) for index in self.both))
            same("prefixes", *(index.prefixes() for index in self.both))
        python, other = self.both[0], _copy(PYTHON, self.both[1])
        same("objects", python.difference(other, tenant=None), [])
        same("objects", other.difference(python, tenant=None), [])
        same("media", *(_media(index) for index in (python, other)))


def _media(index: PoolIndex) -> dict[Any, Any]:
    """Where every object of a Python index is, by the file that it writes."""
    media, sections = at_once(decode(DUMP, at_once(index.dump())))
    found: dict[Any, Any] = {}
    for section in sections:
        for page, pattern in section.entries():
            for component, bits in section.patterns[pattern]:
                names = frozenset(name for place, name in enumerate(media) if bits >> place & 1)
                found[section.identity, page, section.components[component]] = names
    return found


def _copy(twin: PoolTwin, index: PoolIndex) -> PoolIndex:
    copy = twin.PoolIndex()
    at_once(copy.load(at_once(index.dump())))
    return copy


def _key(rng: Random) -> str:
    return f"{rng.choice(_PREFIXES)}{page_of(rng.randrange(6))}{rng.choice(_COMPONENTS)}"


def keys_text(rng: Random, keys: list[str]) -> bytes:
    """A key list of some of them, and of what is none."""
    lines = [*rng.sample(keys, rng.randrange(len(keys) + 1)), "", "12345", rng.choice(keys)]
    return rng.choice(("\n", "\r\n")).join(lines).encode()


def _message(rng: Random, keys: list[str], media: Sequence[str | None] = _MEDIA) -> bytes:
    events: list[dict[str, Any]] = []
    for _ in range(rng.choice((1, 4, 20))):
        make = rng.choice((stored, stored, removed))
        event = make(rng.choice(keys), rng.choice(media), rng.choice(_TENANTS))
        if rng.randrange(30) == 0:
            event |= {"event_type": "cleared", "object_key": None}
        if rng.randrange(20) == 0:
            event[rng.choice(sorted(event))] = rng.choice((None, 7, "x", b"x", [], "m" * 70))
        events.append(event)
    return payload(*events)
