"""Prompts without content: token ids (or words) made of hashes, so that what was shared is shared again. Pure.

The tokens of a block are a function of the seed and of the block's sequence hash, which stands for the block and all
before it: equal hashes are equal tokens, within a session, across sessions, and across runs with the same seed.

A prompt seldom ends where a block ends, and in the prompt that goes on from it the block it ended in has another hash.
Nor does a hash tell the tokens of an answer, which engines cache too, and of which another one comes now. So where the
trace shows which blocks hold a prompt's end and its answer (`tidegate.trace.play_nodes.contents`), the prompt's last
tokens are the first of that block, and behind them come the tokens of *this* run's answer. What was sent stays as it
is to the end of the run.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

from tidegate.trace.play_nodes import PlayNode

LOWEST, HIGHEST = 1_000, 30_000
"""Token ids that every common vocabulary has, and that are nobody's control tokens."""

CACHED_TOKENS = 1 << 22
"""Of blocks whose text is kept: about 40 MB."""

_TEXT = """
able about above act add after again age ago air all also and any area ask away back bad ball bank base bed
best big bit black blue board boat body book both box boy bring build busy buy call car care case cause city
class clear close cold come cost cut dark data day deal deep door down draw drive dry each early earth east
easy edge end even every eye face fact fall far fast feel few field fill find fine fire first fish five flat
floor food foot form four free full game girl give glass good great green ground group grow half hand hard
have head hear heart heat help here high hill hold home hope hot hour house idea inch job just keep kind king
know lake land large last late lead learn left less let life light like line list long look lot love low main
make man many map mark mean meet mind money moon more most move much music name near need new next night north
note now off old once one only open order other out over own page paper part pass past pay plan plant play
point power press pull push put rain read ready real red rest rich ride right ring rise river road rock roll
room round rule run safe same say school sea seat see seem self sell send serve set seven shape ship short
show side sign simple sing sit six size sky sleep slow small snow soft some song soon sound south space speak
stand star start state stay step still stone stop story street strong such sun sure table take talk tell ten
test than that then there thing think this three time told too top town travel tree true try turn two under
unit until use very voice wait walk wall want warm watch water way week well west what wheel when white whole
why wide wind wish wood word work world write year yes you young
"""
WORDS = tuple(_TEXT.split())
"""For endpoints that take no token ids: common words, a token each in most vocabularies."""


class Prompts:
    """Of a trace's nodes, as the inside of a JSON array (ids) or string (words).

    ``vocabulary``: lowest and highest id. ``answers`` off: answers in prompts are made up, too. ``sent_back``:
    of how many answers the tokens are in later prompts; ``not_told``: of how many they should be, but nobody told them.
    """

    def __init__(
        self,
        nodes: Sequence[PlayNode],
        block_size: int,
        *,
        seed: int,
        vocabulary: tuple[int, int] = (LOWEST, HIGHEST),
        words: bool = False,
        answers: bool = True,
    ) -> None:
        low, high = vocabulary
        if not 0 <= low < high:
            raise ValueError("the vocabulary is empty")
        self._nodes = nodes
        self._block_size = block_size
        self._seed = seed.to_bytes(16, "big")
        self._names = _Names(enumerate(map(str.encode, WORDS))) if words else _Names()
        self._ids, self._drawn = _tables(0, len(WORDS) - 1, words) if words else _tables(low, high, words)
        self._join = b" " if words else b","
        self._text = lru_cache(maxsize=max(1024, CACHED_TOKENS // block_size))(self._text_of)
        # Blocks that are to hold an answer: one that was sent whole is no longer open, and of the others so many tokens
        # were sent.
        self._open = _seen_again(nodes, block_size) if answers else set()
        self._sent: dict[int, int] = {}
        self._fixed: dict[int, array[int]] = {}
        self.sent_back = 0
        self.not_told = 0

    def prompt(self, number: int) -> bytes:
        """Comma-separated ids, or words with spaces."""
        node = self._nodes[number]
        whole = node.input_tokens // self._block_size
        rest = node.input_tokens - whole * self._block_size
        hashes = node.sequence_hashes[:whole]
        self._open.difference_update(hashes)
        pieces = [self._text(digest) for digest in hashes]
        if rest:
            pieces.append(self._written(self._tail(number)))
        return self._join.join(pieces)

    def ended(self, number: int, answer: Sequence[int] | None) -> None:
        """A node has its answer; ``answer``: its tokens, where they were told. To be called before the next node is
        asked for."""
        node, size, open_blocks = self._nodes[number], self._block_size, self._open
        first = node.input_tokens // size
        places = [
            place for place in range(first, len(node.content_hashes)) if node.content_hashes[place] in open_blocks
        ]
        if not places:
            return
        known = array("I", self._tail(number))
        if node.content_tokens > node.input_tokens:
            known.extend(answer or ())
            if answer:
                self.sent_back += 1
            else:
                self.not_told += 1
        kept = min(node.content_tokens - first * size, len(known))
        for place in places:
            offset = (place - first) * size
            self._write(node.content_hashes[place], known[offset : min(kept, offset + size)])

    def _write(self, digest: int, tokens: array[int]) -> None:
        """A block begins with ``tokens``, as far as it was not sent."""
        start = self._sent.get(digest, 0)
        if digest in self._open and start < len(tokens):
            fixed = self._fixed[digest] = array("I", self._tokens(digest))
            fixed[start : len(tokens)] = tokens[start:]

    def _tail(self, number: int) -> array[int]:
        """Tokens of the block that is not whole; none where all are."""
        node, size = self._nodes[number], self._block_size
        whole, rest = divmod(node.input_tokens, size)
        if not rest:
            return array("I")
        own, later = node.sequence_hashes[-1], node.sequence_hashes[-1]
        if whole < len(node.content_hashes):
            later = node.content_hashes[whole]
        if own != later and own not in self._fixed:
            self._fixed[own] = self._tokens(later)[:rest]
            self._sent[later] = max(rest, self._sent.get(later, 0))
        self._sent[own] = max(rest, self._sent.get(own, 0))
        return self._tokens(own)[:rest]

    def _tokens(self, digest: int) -> array[int]:
        fixed = self._fixed.get(digest)
        return self._made(digest) if fixed is None else fixed

    def _draw(self, digest: int) -> array[int]:
        """Two bytes for each token of a block."""
        drawn = hashlib.shake_128(self._seed + digest.to_bytes(8, "big")).digest(2 * self._block_size)
        return array("H", drawn)

    def _made(self, digest: int) -> array[int]:
        return array("I", map(self._ids.__getitem__, self._draw(digest)))

    def _text_of(self, digest: int) -> bytes:
        fixed = self._fixed.get(digest)
        if fixed is not None:
            return self._written(fixed)
        return self._join.join(map(self._drawn.__getitem__, self._draw(digest)))

    def _written(self, tokens: array[int]) -> bytes:
        return self._join.join(map(self._names.__getitem__, tokens))


def _seen_again(nodes: Sequence[PlayNode], block_size: int) -> set[int]:
    """Hashes of the blocks that hold a prompt's end or an answer, and are in another prompt."""
    behind = {digest for node in nodes for digest in node.content_hashes[node.input_tokens // block_size :]}
    return {digest for node in nodes for digest in node.sequence_hashes if digest in behind}


@lru_cache(maxsize=4)
def _tables(low: int, high: int, words: bool) -> tuple[array[int], list[bytes]]:
    """What is meant by each two bytes that are drawn: an id, and how it is written."""
    span = high - low + 1
    ids = array("I", (low + (drawn * span >> 16) for drawn in range(1 << 16)))
    return ids, [WORDS[token].encode() if words else b"%d" % token for token in ids]


class _Names(dict[int, bytes]):
    """What is written of an id."""

    def __missing__(self, token: int) -> bytes:
        name = self[token] = b"%d" % token
        return name
