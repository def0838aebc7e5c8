"""Tokens of conversations that are sent again and again: a prompt that was seen before costs only its new tail.

The rendered text is cut before each special token of the tokenizer. That is exact: a special token is matched before
anything else, so the ids of the pieces back to back are the ids of the whole (spec: performance §D). What was seen
of a conversation is kept as its text, its token ids, their chain, and where its pieces end in both.

A conversation is looked up by digests of its text's beginnings at fixed places (`mark_places`), and then compared byte
for byte with those that share the longest of them, so that no digest is ever believed. That costs some 0.5 us a KB, and
nothing for a piece (docs/adr/0027). Nobody finds what was kept apart from him: how long a prompt takes would tell what
others have said.

The encoder is handed in and is the only slow part: `PrefixTokenCache.find` and `PrefixTokenCache.keep` are short and
must not run at the same time in two threads; `Plan.fill` between them touches nothing shared.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain, pairwise

from xxhash import xxh3_64, xxh3_64_intdigest

from kvcore import pack_tokens
from services.ingress.tokens import HASH_BYTES, TOKEN_BYTES, PromptTokens, chained

FIRST_MARK = 128
"""A text without a whole piece in its first so many bytes is cheaper to encode than to keep."""
DENSE_MARKS, DENSE_STEP, STEP = 16_384, 1_024, 4_096
"""Up to the first so many bytes a mark stands at every second of these, beyond at every third: what is encoded though
it was known is less than a step, of conversations that differ no earlier."""
AT_A_MARK = 16
"""Conversations that are known by one beginning; the one seen longest ago is forgotten there."""
MARK_BYTES = 300
"""What one mark costs: its number, a tuple of conversations, its place in a table (measured: 190 to 290)."""
ENTRY_BYTES = 1_000
"""What one conversation costs beside its text, tokens, chain and marks (measured: 900)."""
END_BYTES = 8
"""What one end of a piece costs: its place in the text and in the tokens."""
_LEAP = 16_384

Namespace = tuple[int, str | None, str | None]
"""Block size, salt and adapter: what a chain of the same tokens depends on."""

Encode = Callable[[list[str]], Sequence[Sequence[int]]]
"""Token ids of each text; special tokens in it are recognised, none are added."""


def mark_places(size: int) -> Iterator[int]:
    """Where a text of ``size`` bytes has marks, ascending."""
    return chain(
        (at for at in (FIRST_MARK, 2 * FIRST_MARK, 4 * FIRST_MARK) if at <= size),
        range(DENSE_STEP, min(size, DENSE_MARKS) + 1, DENSE_STEP),
        range(DENSE_MARKS + STEP, size + 1, STEP),
    )


class Cutter:
    """Cuts text before each of the tokenizer's special tokens. Only tokens that are matched verbatim belong here: none
    that strips or needs space beside it, or is matched after normalisation. ``longest``: bytes of the longest."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        ordered = sorted({token for token in special_tokens if token}, key=lambda token: (-len(token), token))
        encoded = [_bytes(token) for token in ordered]
        self.longest = max(map(len, encoded), default=0)
        self._places = re.compile(b"|".join(map(re.escape, encoded))) if ordered else None

    def starts(self, text: bytes, begin: int = 0) -> list[int]:
        """Where the special tokens of ``text`` begin, from ``begin`` on, at which none may be cut in two."""
        return [] if self._places is None else [match.start() for match in self._places.finditer(text, begin)]

    def cut(self, text: str) -> list[str]:
        """``text`` in pieces, each but the first beginning with a special token; no empty ones."""
        data = _bytes(text)
        return _pieces(data, [0, *self.starts(data), len(data)])


@dataclass(slots=True, eq=False)
class _Entry:
    """One conversation as last seen. ``ends``: where its pieces but the last end in ``text``; ``counts``: how many
    tokens it is to there, with the ``leading`` ones. ``keys``: digests of its beginnings."""

    text: bytes
    leading: bytes
    apart: str
    tokens: bytes
    chains: dict[Namespace, bytes]
    ends: array[int]
    counts: array[int]
    keys: list[int]

    @property
    def size_bytes(self) -> int:
        held = len(self.text) + len(self.tokens) + sum(map(len, self.chains.values()))
        return ENTRY_BYTES + held + END_BYTES * len(self.ends) + MARK_BYTES * len(self.keys)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a prompt and what must be encoded: ``missing``. ``known_tokens`` come from the cache."""

    missing: list[str]
    known_tokens: int
    missing_bytes: int
    _text: bytes = field(repr=False)
    _leading: bytes = field(repr=False)
    _apart: str = field(repr=False)
    _keys: list[int] = field(repr=False)
    _entry: _Entry | None = field(repr=False)
    _known: int = field(repr=False)
    _ends: list[int] = field(repr=False)

    def fill(
        self,
        encoded: Sequence[Sequence[int]],
        block_size: int | None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> Filled:
        """The whole prompt in the namespace of ``salt`` and ``adapter``, given the ids of `missing`."""
        entry, known = self._entry, self._known
        pieces: list[bytes | memoryview]
        pieces = [self._leading if entry is None else memoryview(entry.tokens)[: self.known_tokens * TOKEN_BYTES]]
        pieces += [ids.tobytes() if isinstance(ids, array) else pack_tokens(ids) for ids in encoded]
        ends, counts = (array("I"), array("I")) if entry is None else (entry.ends[:known], entry.counts[:known])
        count = self.known_tokens
        for piece, end in zip(pieces[1:], self._ends, strict=False):  # the last piece has no end
            count += len(piece) // TOKEN_BYTES
            ends.append(end)
            counts.append(count)
        prompt = chained(b"".join(pieces), block_size, self._start((block_size or 0, None, None)))
        prompt = prompt.under(salt, adapter, self._start((block_size or 0, salt, adapter)))
        chains: dict[Namespace, bytes] = {(prompt.block_size, None, None): prompt.chain}
        if prompt.salted is not None:
            chains[prompt.block_size, salt, adapter] = prompt.salted
        return Filled(prompt, self, ends, counts, chains if prompt.block_size else {})

    def _start(self, namespace: Namespace) -> bytes:
        """What is known of a chain."""
        if self._entry is None or not namespace[0]:
            return b""
        return self._entry.chains.get(namespace, b"")[: self.known_tokens // namespace[0] * HASH_BYTES]


@dataclass(frozen=True, slots=True)
class Filled:
    """A prompt's tokens, and where its pieces end in its text and in them."""

    prompt: PromptTokens
    plan: Plan = field(repr=False)
    ends: array[int] = field(repr=False)
    counts: array[int] = field(repr=False)
    chains: dict[Namespace, bytes] = field(repr=False)


class PrefixTokenCache:
    """Conversations by their beginnings, at most ``max_bytes`` in all; the least recently used goes first.

    ``hit_tokens`` and ``missed_tokens`` count since the start.
    """

    def __init__(self, special_tokens: Iterable[str], *, max_bytes: int) -> None:
        self._cutter = Cutter(special_tokens)
        self._max_bytes = max_bytes
        self._places: dict[int, tuple[_Entry, ...]] = {}
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self.size_bytes = 0
        self.hit_tokens = 0
        self.missed_tokens = 0

    def __len__(self) -> int:
        """Conversations kept."""
        return len(self._entries)

    def find(self, text: str, leading: bytes = b"", apart: str = "") -> Plan:
        """What of ``text`` is known under ``apart``. ``leading``: token ids that come before its own (u32
        little-endian).

        The last piece is never known: it is the one that the answer will be appended to.
        """
        data = _bytes(text)
        keys = _digests(data, leading, apart)
        entry, common = self._nearest(data, leading, apart, keys)
        known, count, begin = 0, len(leading) // TOKEN_BYTES, 0
        starts = None
        if entry is not None:
            known, begin, starts = self._known(entry, data, common)
            if known:
                count = entry.counts[known - 1]
                self._entries.move_to_end(id(entry))
            else:
                entry = None
        ends = [at for at in (self._cutter.starts(data) if starts is None else starts) if at > begin]
        missing = _pieces(data, [begin, *ends, len(data)])
        return Plan(missing, count, len(data) - begin, data, leading, apart, keys, entry, known, ends)

    def _nearest(self, text: bytes, leading: bytes, apart: str, keys: list[int]) -> tuple[_Entry | None, int]:
        """Who has the longest beginning in common with ``text``, of those that share its longest mark; and how many
        bytes it is."""
        for key in reversed(keys):
            best, most = None, 0
            for entry in self._places.get(key, ()):
                alike = entry.leading == leading and entry.apart == apart
                common = common_bytes(entry.text, text) if alike else 0
                if common > most:
                    best, most = entry, common
            if best is not None:
                return best, most
        return None, 0

    def _known(self, entry: _Entry, text: bytes, common: int) -> tuple[int, int, list[int]]:
        """How many pieces of ``entry`` are pieces of ``text``, which has ``common`` bytes in common with it; where they
        end, and where special tokens begin from about there on.

        What is matched at a place depends on the bytes up to the longest special token's end: so far before the last
        common byte the two are cut alike. The few ends after it are looked for.
        """
        known = bisect_right(entry.ends, common - self._cutter.longest)
        begin = entry.ends[known - 1] if known else 0
        starts = self._cutter.starts(text, begin)
        for start in starts:
            if start > begin and known < len(entry.ends) and start <= common and start == entry.ends[known]:
                begin = start
                known += 1
            elif start > begin:
                break
        return known, begin, starts

    def keep(self, filled: Filled) -> None:
        """Remember the prompt in place of the one that it goes on from."""
        plan, prompt = filled.plan, filled.prompt
        places = len(list(mark_places(filled.ends[-1]))) if filled.ends else 0
        if not places:
            return
        keys = plan._keys[:places]
        known = (plan._text, plan._leading, plan._apart, prompt.tokens)
        entry = _Entry(*known, filled.chains, filled.ends, filled.counts, keys)
        if entry.size_bytes > self._max_bytes:
            return
        old, gone = plan._entry, None
        if old is not None and plan._known == len(old.ends) and self._entries.get(id(old)) is old:
            gone = old
            self._forget(old, but=set(keys))
        self._entries[id(entry)] = entry
        self.size_bytes += entry.size_bytes
        alone = (entry,)
        for key in keys:
            others = self._places.get(key, ())
            if not others or (len(others) == 1 and others[0] is gone):
                self._places[key] = alone
            else:
                self._places[key] = (entry, *[other for other in others if other is not gone][: AT_A_MARK - 1])
        while self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._entries.values())))

    def _forget(self, entry: _Entry, but: Set[int] = frozenset()) -> None:
        """``but``: marks at which its follower takes its place."""
        del self._entries[id(entry)]
        self.size_bytes -= entry.size_bytes
        for key in entry.keys:
            if key in but:
                continue
            others = tuple(other for other in self._places.get(key, ()) if other is not entry)
            if others:
                self._places[key] = others
            else:
                self._places.pop(key, None)

    def prompt(self, text: str, block_size: int | None, encode: Encode, leading: bytes = b"") -> PromptTokens:
        """`find`, encode, `Plan.fill` and `keep` in one go, for a caller with one thread."""
        plan = self.find(text, leading)
        filled = plan.fill(encode(plan.missing) if plan.missing else [], block_size)
        self.count(plan, filled)
        self.keep(filled)
        return filled.prompt

    def count(self, plan: Plan, filled: Filled) -> None:
        """Count one prompt's hits and misses."""
        self.hit_tokens += plan.known_tokens
        self.missed_tokens += len(filled.prompt) - plan.known_tokens


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _pieces(text: bytes, places: list[int]) -> list[str]:
    return [text[start:end].decode("utf-8", "surrogatepass") for start, end in pairwise(places) if start < end]


def _digests(text: bytes, leading: bytes, apart: str) -> list[int]:
    """Of everything up to each mark. ``leading`` and ``apart`` are in their seed: each makes it another text."""
    running = xxh3_64(seed=xxh3_64_intdigest(leading, xxh3_64_intdigest(_bytes(apart))))
    view = memoryview(text)
    digests = []
    begin = 0
    for place in mark_places(len(text)):
        running.update(view[begin:place])
        digests.append(running.intdigest())
        begin = place
    return digests


def common_bytes(one: bytes, other: bytes) -> int:
    """How many bytes both begin with."""
    if other.startswith(one):
        return len(one)
    size = min(len(one), len(other))
    low = 0
    while low < size and one[low : low + _LEAP] == other[low : low + _LEAP]:
        low += _LEAP
    low, high = min(low, size), min(low + _LEAP, size)
    while low < high:  # the part that begins at ``low`` is the same up to some place, and other from there on
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
