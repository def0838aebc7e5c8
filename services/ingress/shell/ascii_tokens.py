"""Token ids of ASCII text by tiktoken's encoder, in a third of the time that the tokenizer's own takes.

That is done only where it is proved to give the same ids. The tokenizer must be a byte-level BPE whose vocabulary is in
the order of its merges, with one merge for each token. tiktoken merges any two neighbours that are a token together,
the tokenizer only those that it has a merge for; the two are the same where no token can come about in another way than
by its own merge, which is checked for each (`_arises_only_so`). ASCII only: what is a letter or a space there is the
same for both regular expression engines and every version of Unicode, and no normalisation changes it. Only regular
expressions that are known take part (`_PATTERNS`). Last, what both make of some texts is compared (0035).
"""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tiktoken

LONGEST = 64 * 1024
"""Characters; a longer text goes to the tokenizer itself: the other's regular expressions may give up in it."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What a ByteLevel pre-tokenizer cuts text by of its own accord."""
_CONTRACTIONS, _SPACES = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS, _MARKED = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_OTHERS, _MARKED_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
_PATTERNS = frozenset(
    {
        _GPT2,
        "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}", _OTHERS, _SPACES)),  # Qwen2 to Qwen3
        "|".join((_CONTRACTIONS, _MARKED, r"\p{N}", _MARKED_OTHERS, _SPACES)),  # Qwen3.5
        "|".join((_CONTRACTIONS, _LETTERS, r"\p{N}{1,3}", _OTHERS, _SPACES)),  # Llama 3, GLM-4
    }
)
"""None of them takes long over any text, or gives up, up to eight times `LONGEST`."""
_BYTES = 256
_SAMPLES, _SAMPLE_CHARACTERS = 24, 400

Tokenize = Callable[[str], Sequence[int]]


class UnsuitableError(Exception):
    """This tokenizer is not of the kind; the text says why."""


class AsciiEncoder:
    """Token ids of ASCII text. ``definition``: the parsed ``tokenizer.json``; ``tokenize``: the tokenizer's own ids of
    a text, without what it would add. Raises `UnsuitableError`. `encode` may be called from several threads at once."""

    def __init__(self, definition: dict[str, Any], tokenize: Tokenize) -> None:
        self._added = _added_tokens(definition)
        pattern = _pattern(definition)
        ranks = _ranks(definition, self._added)
        ordered = sorted(self._added, key=lambda token: (-len(token), token))
        self._places = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._encoding = tiktoken.Encoding("model", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        for text in _samples(list(ranks), list(self._added)):
            if self.encode(text).tolist() != list(tokenize(text)):
                raise UnsuitableError(f"other ids for {text!r}")

    def encode(self, text: str) -> array[int]:
        """The ids of ``text``, which is ASCII and no longer than `LONGEST`."""
        if self._places is None:
            return array("I", self._encoding.encode_ordinary(text))
        ids, begin = array("I"), 0
        for match in self._places.finditer(text):
            if match.start() > begin:
                ids.extend(self._encoding.encode_ordinary(text[begin : match.start()]))
            ids.append(self._added[match[0]])
            begin = match.end()
        if begin < len(text):
            ids.extend(self._encoding.encode_ordinary(text[begin:]))
        return ids


def _added_tokens(definition: dict[str, Any]) -> dict[str, int]:
    """Those that are matched verbatim before anything else, with their ids."""
    added = {}
    for token in definition.get("added_tokens") or ():
        if token["lstrip"] or token["rstrip"] or token["single_word"] or token["normalized"] or not token["content"]:
            raise UnsuitableError(f"the added token {token['content']!r} is not matched verbatim")
        added[token["content"]] = int(token["id"])
    return added


def _pattern(definition: dict[str, Any]) -> str:
    """The regular expression by which text is cut before it is merged."""
    normalizer = definition.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise UnsuitableError(f"the normalizer {normalizer['type']}")
    cutter = definition.get("pre_tokenizer") or {"type": "none"}
    steps = cutter["pretokenizers"] if cutter["type"] == "Sequence" else [cutter]
    last = steps[-1]
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        raise UnsuitableError(f"the pre-tokenizer {cutter['type']}")
    if len(steps) == 1 and last.get("use_regex", True):
        return _GPT2
    split = steps[0]
    if len(steps) != 2 or last.get("use_regex", True) or split["type"] != "Split":
        raise UnsuitableError("the steps of the pre-tokenizer")
    if split["behavior"] != "Isolated" or split["invert"] or "Regex" not in split["pattern"]:
        raise UnsuitableError("the pre-tokenizer's way to split")
    if split["pattern"]["Regex"] not in _PATTERNS:
        raise UnsuitableError("the pre-tokenizer's regular expression")
    return str(split["pattern"]["Regex"])


def _ranks(definition: dict[str, Any], added: dict[str, int]) -> dict[bytes, int]:
    """The tokens as bytes, with their ids, which are in the order in which they are merged."""
    model = definition["model"]
    odd = [name for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(name)]
    if model["type"] != "BPE" or odd:
        raise UnsuitableError(f"the model {model['type']} {odd}")
    vocabulary, of_character = model["vocab"], _byte_of_character()
    try:
        ranks = {bytes([byte]): int(vocabulary[character]) for character, byte in of_character.items()}
    except KeyError as error:
        raise UnsuitableError(f"no token for the byte {error}") from error
    halves: list[tuple[int, int, int]] = []
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        token = left + right
        ranks[bytes([of_character[character] for character in token])] = vocabulary[token]
        halves.append((vocabulary[token], vocabulary[left], vocabulary[right]))
    if len(ranks) != _BYTES + len(halves):
        raise UnsuitableError("several merges make the same token")
    if model.get("ignore_merges") and len(ranks) != len(vocabulary.keys() - added.keys()):
        raise UnsuitableError("there are tokens that no merge makes")
    _check_order(ranks, halves)
    return ranks


def _byte_of_character() -> dict[str, int]:
    """How a byte-level vocabulary spells bytes: printable ones as themselves, the others from U+0100 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(_BYTES) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(_BYTES + at): byte for at, byte in enumerate(others)}


def _check_order(ranks: dict[bytes, int], halves: list[tuple[int, int, int]]) -> None:
    """Raises `UnsuitableError` unless the tokens' order is the merges', and each token comes about by its own only."""
    made = [token for token, _, _ in halves]
    single = max(rank for token, rank in ranks.items() if len(token) == 1)
    if any(one >= other for one, other in zip([single, *made], made, strict=False)):
        raise UnsuitableError("the vocabulary is not in the order of the merges")
    joined = {(left, right): token for token, left, right in halves}
    split = {token: (left, right) for token, left, right in halves}
    for token, left, right in halves:
        if not _arises_only_so(token, left, right, joined, split):
            raise UnsuitableError(f"the token {token} is not what its bytes are merged to")


def _arises_only_so(
    token: int, left: int, right: int, joined: dict[tuple[int, int], int], split: dict[int, tuple[int, int]]
) -> bool:
    """Whether the bytes of ``left`` and ``right`` by themselves are merged to these two before anything is merged over
    the place between them: both are taken apart again, the later merge first, and at no time may there be a merge of
    the two neighbours at that place that comes before the one that was taken back."""
    limit = token
    while True:
        if joined.get((left, right), limit) < limit:
            return False
        if left in split and (left > right or right not in split):
            limit, left = left, split[left][1]
        elif right in split:
            limit, right = right + 1, split[right][0]
        else:
            return True


def _samples(tokens: list[bytes], added: list[str]) -> Iterator[str]:
    """Every pair of ASCII characters, and random texts of tokens, of characters and of added tokens."""
    characters = [chr(code) for code in range(128)]
    for first in characters:
        yield "".join(f"a{first}{second}" for second in characters)
    chance = random.Random(0)  # noqa: S311 - the same ones each time
    words = [token.decode() for token in tokens if token.isascii()]
    for number in range(_SAMPLES):
        pool = (words, characters, [*words[:100], *[token for token in added if token.isascii()]])[number % 3]
        yield "".join(chance.choices(pool, k=_SAMPLE_CHARACTERS))[: 4 * _SAMPLE_CHARACTERS]
