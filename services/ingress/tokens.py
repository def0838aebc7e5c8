"""A prompt's tokens and its chain, so that a conversation that is sent again costs only its new tail.

The rendered text is cut before each special token of the tokenizer. That is exact: a special token is matched before
anything else, so the ids of the pieces back to back are the ids of the whole (spec: performance §D). What was seen
of a conversation is kept as one buffer of token ids with its chain; the next turn finds its longest known beginning
by a running digest of the pieces, encodes the pieces after it and hashes the blocks after it.

The encoder is handed in and is the only slow part: `PrefixTokenCache.find` and `PrefixTokenCache.keep` are short and
must not run at the same time in two threads; `Plan.fill` between them touches nothing shared.
"""

from __future__ import annotations

import re
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise

from xxhash import xxh3_64_intdigest

from kvcore import chain_hashes, pack_tokens, page_hashes
from kvcore.hashing import SEED, chain_of, chain_view

TOKEN_BYTES = 4
HASH_BYTES = 8
COARSE_BLOCK = 512
"""Tokens in a block of a long prompt's row, at most: the peer's default for traces."""
MARK_BYTES = 300
"""What one remembered place in a buffer costs: a digest, a number, two tuples, its place in a table (measured: 180 to
270)."""
ENTRY_BYTES = 600
"""What one conversation costs beside its tokens, chain and marks (measured: 540)."""

Encode = Callable[[list[str]], list[list[int]]]
"""Token ids of each text; special tokens in it are recognised, none are added."""


@dataclass(frozen=True, slots=True)
class PageRule:
    """How pages of a shared pool are cut and hashed: ``size`` in tokens; ``pairs``: over pairs of tokens (EAGLE). Spec:
    pool-events §6, page hash."""

    size: int
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """``tokens``: ids, u32 little-endian. ``chain``: chain hashes of the full blocks of ``block_size`` tokens, u64
    little-endian; both are empty where the block size is not known (0). ``salted``: the chain under the request's
    cache salt and adapter, where it has one; rows hash without them. ``pages``: the hashes of its full pages of
    ``page_size`` tokens in a shared pool, 16 bytes each; empty where no worker reads one."""

    tokens: bytes
    block_size: int = 0
    chain: bytes = b""
    salted: bytes | None = None
    pages: bytes = b""
    page_size: int = 0

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def cached_as(self) -> bytes:
        """The chain under which an engine keeps these blocks."""
        return self.chain if self.salted is None else self.salted

    def under(self, salt: str | None, adapter: str | None = None) -> PromptTokens:
        """The same prompt in the namespace of ``salt`` and ``adapter``. Spec: index-and-routing §1.1."""
        if not (salt or adapter) or not self.block_size:
            return self
        return replace(self, salted=chain_hashes(self.tokens, self.block_size, salt=salt, adapter=adapter))

    def paged(self, rule: PageRule | None, salt: str | None, adapter: str | None = None) -> PromptTokens:
        """The same prompt with its pages by ``rule``, in the namespace of ``salt`` and ``adapter``."""
        if rule is None:
            return self
        pages = page_hashes(self.tokens, rule.size, adapter=adapter, salt=salt, pairs=rule.pairs)
        return replace(self, pages=pages, page_size=rule.size)

    def trace_hashes(self, block_size: int) -> tuple[int, ...]:
        """The prompt's hashes for its row in blocks of ``block_size`` tokens, a multiple of our own: every so many-th
        one of the chain, and the partial tail block hashed like a full one: ceil(tokens / block size) hashes (spec:
        identity-and-traces §2.5, docs/adr/0018). Empty without a block size."""
        return trace_hashes(self.tokens, self.chain, self.block_size, block_size) if self.block_size else ()

    def answered(self, generated: Sequence[int], block_size: int) -> tuple[int, ...]:
        """Like `trace_hashes`, of the prompt and the token ids that were generated after it; only blocks that the
        prompt does not fill are hashed. Raises `TokensError` for what is no token id."""
        if not self.block_size:
            return ()
        done = len(self.chain) // HASH_BYTES * self.block_size * TOKEN_BYTES
        tokens = self.tokens + pack_tokens(generated)
        parent = int.from_bytes(self.chain[-HASH_BYTES:], "little") if self.chain else None
        chain = self.chain + chain_hashes(tokens[done:], self.block_size, parent=parent)
        return trace_hashes(tokens, chain, self.block_size, block_size)


def trace_block_size(tokens: int, block_size: int, fine_tokens: int) -> int:
    """Block size in which a prompt of ``tokens`` is written into its row: the pool's own up to ``fine_tokens``, else
    its largest multiple that is at most `COARSE_BLOCK` (docs/adr/0018)."""
    if tokens <= fine_tokens:
        return block_size
    return block_size * max(1, COARSE_BLOCK // block_size)


def trace_hashes(tokens: bytes, chain: bytes, block_size: int, trace_block: int) -> tuple[int, ...]:
    """Hashes of ``tokens`` in blocks of ``trace_block``, given their chain in blocks of ``block_size``, which divides
    it."""
    hashes = tuple(chain_view(chain)[trace_block // block_size - 1 :: trace_block // block_size])
    tail = tokens[len(hashes) * trace_block * TOKEN_BYTES :]
    if not tail:
        return hashes
    return (*hashes, *chain_of([xxh3_64_intdigest(tail, SEED)], hashes[-1] if hashes else None))


def chained(tokens: bytes, block_size: int | None, start: bytes = b"") -> PromptTokens:
    """``tokens`` with their chain, whose beginning ``start`` is known."""
    if not block_size:
        return PromptTokens(tokens)
    if not start:
        return PromptTokens(tokens, block_size, chain_hashes(tokens, block_size))
    done = len(start) // HASH_BYTES * block_size * TOKEN_BYTES
    parent = int.from_bytes(start[-HASH_BYTES:], "little")
    return PromptTokens(tokens, block_size, start + chain_hashes(tokens[done:], block_size, parent=parent))


def from_ids(ids: Iterable[int], block_size: int | None) -> PromptTokens:
    """Token ids that somebody else counted (the client, the engine)."""
    return chained(pack_tokens(ids), block_size)


class Cutter:
    """Cuts text before each of the tokenizer's special tokens. Only tokens that are matched verbatim belong here: none
    that strips or needs space beside it, or is matched after normalisation."""

    def __init__(self, special_tokens: Iterable[str]) -> None:
        ordered = sorted({token for token in special_tokens if token}, key=lambda token: (-len(token), token))
        self._places = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def cut(self, text: str) -> list[str]:
        """``text`` in pieces, each but the first beginning with a special token; no empty ones."""
        if self._places is None:
            return [text] if text else []
        starts = [0, *(match.start() for match in self._places.finditer(text)), len(text)]
        return [text[start:end] for start, end in pairwise(starts) if start < end]


@dataclass(slots=True, eq=False)
class _Entry:
    """One conversation as last seen. ``marks``: digest of a beginning, and how many tokens it is."""

    tokens: bytes
    chains: dict[int, bytes]
    marks: list[tuple[bytes, int]]
    reachable: int = 0

    @property
    def size_bytes(self) -> int:
        return ENTRY_BYTES + len(self.tokens) + sum(map(len, self.chains.values())) + MARK_BYTES * len(self.marks)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is known of a prompt and what must be encoded: ``missing``. ``known_tokens`` come from the cache."""

    missing: list[str]
    known_tokens: int
    _start: bytes = field(repr=False)
    _chains: dict[int, bytes] = field(repr=False)
    _known_marks: list[tuple[bytes, int]] = field(repr=False)
    _new_keys: list[bytes] = field(repr=False)

    def fill(self, encoded: Sequence[Sequence[int]], block_size: int | None) -> Filled:
        """The whole prompt, given the ids of `missing`."""
        buffer = bytearray(self._start)
        marks = list(self._known_marks)
        for position, ids in enumerate(encoded):
            buffer += ids.tobytes() if isinstance(ids, array) else pack_tokens(ids)
            if position < len(self._new_keys):
                marks.append((self._new_keys[position], len(buffer) // TOKEN_BYTES))
        return Filled(chained(bytes(buffer), block_size, self._chains.get(block_size or 0, b"")), marks)


@dataclass(frozen=True, slots=True)
class Filled:
    """A prompt's tokens, and where its pieces end in them."""

    prompt: PromptTokens
    marks: list[tuple[bytes, int]]


class PrefixTokenCache:
    """Conversations by their beginnings, at most ``max_bytes`` in all; the least recently used goes first.

    ``hit_tokens`` and ``missed_tokens`` count since the start.
    """

    def __init__(self, special_tokens: Iterable[str], *, max_bytes: int) -> None:
        self._cutter = Cutter(special_tokens)
        self._max_bytes = max_bytes
        self._places: dict[bytes, tuple[_Entry, int]] = {}
        self._entries: OrderedDict[int, _Entry] = OrderedDict()
        self.size_bytes = 0
        self.hit_tokens = 0
        self.missed_tokens = 0

    def __len__(self) -> int:
        """Conversations kept."""
        return len(self._entries)

    def find(self, text: str, leading: bytes = b"") -> Plan:
        """What of ``text`` is known. ``leading``: token ids that come before its own (u32 little-endian).

        The last piece is never looked up: it is the one that the answer will be appended to.
        """
        pieces = self._cutter.cut(text)
        keys = _running_digests(pieces[:-1], leading)
        for known in range(len(keys), 0, -1):
            place = self._places.get(keys[known - 1])
            if place is not None:
                return self._known(pieces, keys, known, *place)
        return Plan(pieces, 0, leading, {}, [], keys)

    def keep(self, filled: Filled) -> None:
        """Remember the prompt in place of the shorter ones that it begins with."""
        prompt = filled.prompt
        if not filled.marks:
            return
        entry = _Entry(prompt.tokens, {prompt.block_size: prompt.chain} if prompt.block_size else {}, filled.marks)
        if entry.size_bytes > self._max_bytes:
            return
        for key, count in filled.marks:
            old = self._places.get(key)
            if old is not None:
                self._unreach(old[0])
            self._places[key] = (entry, count)
            entry.reachable += 1
        self._entries[id(entry)] = entry
        self.size_bytes += entry.size_bytes
        while self.size_bytes > self._max_bytes:
            self._forget(next(iter(self._entries.values())))

    def _known(self, pieces: list[str], keys: list[bytes], known: int, entry: _Entry, count: int) -> Plan:
        self._entries.move_to_end(id(entry))
        start = entry.tokens[: count * TOKEN_BYTES]
        chains = {size: chain[: count // size * HASH_BYTES] for size, chain in entry.chains.items()}
        marks = [(key, self._places[key][1]) for key in keys[:known] if key in self._places]
        return Plan(pieces[known:], count, start, chains, marks, keys[known:])

    def _unreach(self, entry: _Entry) -> None:
        """One beginning of ``entry`` now belongs to another; with the last one it is of no use."""
        entry.reachable -= 1
        if entry.reachable == 0:
            del self._entries[id(entry)]
            self.size_bytes -= entry.size_bytes

    def _forget(self, entry: _Entry) -> None:
        del self._entries[id(entry)]
        self.size_bytes -= entry.size_bytes
        for key, _ in entry.marks:
            place = self._places.get(key)
            if place is not None and place[0] is entry:
                del self._places[key]

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


def _running_digests(pieces: list[str], leading: bytes) -> list[bytes]:
    """After each piece, a digest of everything up to it."""
    digests = []
    # Its length first, so that no text can go on where another's leading tokens end.
    running = blake2b(b"%d:%b" % (len(leading), leading), digest_size=16)
    for piece in pieces:
        running.update(piece.encode("utf-8", "surrogatepass"))
        digests.append(running.digest())
    return digests


def shared_blocks(one: bytes, other: bytes) -> int:
    """How many blocks two chains have in common from their start: where a prompt's cached prefix breaks (spec:
    user-cases C5)."""
    count = min(len(one), len(other)) // HASH_BYTES
    low, high = 0, count
    while low < high:  # a chain hash stands for everything before it, so equality is a prefix
        middle = (low + high + 1) // 2
        end = middle * HASH_BYTES
        if one[end - HASH_BYTES : end] == other[end - HASH_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low
