"""Tokens by prefix: always what encoding from scratch gives, at the cost of the new tail only."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from xxhash import xxh3_64_intdigest

from kvcore.hashing import chain_hashes, chain_of, pack_tokens, sequence_hashes_with_tail
from services.ingress.prefix_tokens import AT_A_MARK, Cutter, PrefixTokenCache, common_bytes
from services.ingress.tokens import (
    PageRule,
    PromptTokens,
    chained,
    from_ids,
    shared_blocks,
    trace_block_size,
)

ASSET = Path(__file__).parents[3] / "load" / "engine" / "assets" / "tokenizer.json"
TOKENIZER = Tokenizer.from_file(str(ASSET))
SPECIAL = [token.content for token in TOKENIZER.get_added_tokens_decoder().values() if token.special]
BLOCK = 4


class Encoder:
    """The real tokenizer, which also notes what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, texts: list[str]) -> list[list[int]]:
        self.asked.append(texts)
        return [encoding.ids for encoding in TOKENIZER.encode_batch_fast(texts, add_special_tokens=False)]


def from_scratch(text: str, leading: bytes = b"") -> PromptTokens:
    """The whole text in one call of the tokenizer, hashed from the start."""
    tokens = leading + pack_tokens(TOKENIZER.encode(text, add_special_tokens=False).ids)
    return PromptTokens(tokens, BLOCK, chain_hashes(tokens, BLOCK))


def rendered(messages: list[tuple[str, str]]) -> str:
    """ChatML, as the simulated engine's template writes it."""
    said = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages)
    return said + "<|im_start|>assistant\n"


words = st.sampled_from([*"ab \n.é漢🙂", "<|im_start|>", "<|im_end|>", "<|im_", "def f(x):"])
texts = st.lists(words, max_size=12).map("".join)
messages = st.tuples(st.sampled_from(["user", "assistant", "tool"]), texts)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("grow"), st.lists(messages, min_size=1, max_size=3)),
        st.tuples(st.just("fork"), st.integers(0, 6)),
        st.tuples(st.just("rewrite"), st.integers(0, 6), messages),
        st.tuples(st.just("repeat")),
    ),
    max_size=10,
)


@pytest.mark.long
@given(steps, st.sampled_from([1_500, 4_000, 1_000_000]), st.sampled_from([b"", pack_tokens([1])]))
def test_cached_is_what_encoding_from_scratch_gives(
    script: list[tuple[object, ...]], max_bytes: int, leading: bytes
) -> None:
    """Conversations that grow, fork, are rewritten or sent again, with room for all, few or none of them: tokens, chain
    and replay hashes are always those of the whole text."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=max_bytes)
    branches: list[list[tuple[str, str]]] = [[("system", "be brief " * 20)]]
    for step in script:
        branch = list(branches[-1])
        match step:
            case ("grow", list(more)):
                branch += more
            case ("fork", int(at)):
                branch = branch[: max(1, at)]
            case ("rewrite", int(at), tuple(message)):
                branch[min(at, len(branch) - 1)] = message
        branches.append(branch)
        text = rendered(branch)
        expected = from_scratch(text, leading)
        prompt = cache.prompt(text, BLOCK, Encoder(), leading)
        assert prompt == expected
        assert prompt.trace_hashes(BLOCK) == sequence_hashes_with_tail(prompt.tokens, BLOCK)
        assert cache.size_bytes <= max_bytes


def test_a_resent_conversation_costs_only_its_new_tail() -> None:
    """The next turn encodes the pieces after the last known one, and nothing else."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=1 << 20)
    encoder = Encoder()
    first = [("system", "long " * 500), ("user", "one")]
    cache.prompt(rendered(first), BLOCK, encoder)
    encoder.asked.clear()
    second = [*first, ("assistant", "two"), ("user", "three")]
    prompt = cache.prompt(rendered(second), BLOCK, encoder)
    assert encoder.asked == [
        [
            "<|im_start|>assistant\ntwo",
            "<|im_end|>\n",
            "<|im_start|>user\nthree",
            "<|im_end|>\n",
            "<|im_start|>assistant\n",
        ]
    ]
    assert prompt == from_scratch(rendered(second))
    assert cache.hit_tokens > 500


def test_a_conversation_is_kept_once() -> None:
    """A turn takes the place of the turns it begins with: twenty turns hold one buffer, two forks hold two."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=1 << 20)
    said = [("system", "s")]
    for turn in range(20):
        said += [("user", f"question {turn}"), ("assistant", f"answer {turn}")]
        cache.prompt(rendered(said), BLOCK, Encoder())
    assert len(cache) == 1
    cache.prompt(rendered([*said[:9], ("user", "otherwise")]), BLOCK, Encoder())
    assert len(cache) == 2


def test_a_conversation_that_is_kept_apart_is_found_by_nobody_else() -> None:
    """Another tenant who sends the same pays for all of it: its time tells nothing. Its own next turn does not."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=1 << 20)
    text = rendered([("system", "long " * 500), ("user", "one")])
    expected = from_scratch(text)

    def known(apart: str) -> int:
        plan = cache.find(text, b"", apart)
        filled = plan.fill(Encoder()(plan.missing), BLOCK)
        cache.keep(filled)
        assert filled.prompt == expected
        return plan.known_tokens

    assert [known(apart) for apart in ("", "one", "two")] == [0, 0, 0]
    assert all(known(apart) > 500 for apart in ("", "one", "two"))
    assert len(cache) == 3


def test_the_least_recently_used_conversation_goes_first() -> None:
    """Over the bound the oldest is forgotten whole, and the newest stays."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=6_000)
    talks = [[("system", f"{number} " * 300)] for number in range(6)]
    for talk in talks:
        cache.prompt(rendered(talk), None, Encoder())
    assert cache.size_bytes <= 6_000
    assert cache.find(rendered(talks[0])).known_tokens == 0
    assert cache.find(rendered(talks[-1])).known_tokens > 0
    kept = len(cache)
    cache.prompt(rendered([("system", "z " * 10_000)]), None, Encoder())
    assert len(cache) == kept, "what does not fit is not kept, and displaces nothing"


@pytest.mark.long
@pytest.mark.parametrize(("conversations", "messages"), [(1, 2000), (1000, 1), (60, 30)])
def test_what_is_counted_is_what_is_held(conversations: int, messages: int) -> None:
    """The bound is one of memory: few long conversations or many short ones, no less is counted than they hold."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=1 << 30)
    gc.collect()
    tracemalloc.start()
    for number in range(conversations):
        text = "".join(f"<|im_start|>{number:0150} {place}" for place in range(messages)) + "<|im_start|>"
        cache.prompt(text, BLOCK, lambda texts: [[1, 2, 300]] * len(texts))
    del text
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(cache) == conversations
    assert held <= cache.size_bytes <= 2 * held


def test_two_conversations_with_one_beginning_are_forgotten_one_by_one() -> None:
    """Both are known by their common beginning; looking the older up (a prompt that is too large to keep, a second
    thread) makes the newer the first to go. Then the other one goes as well."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=8_000)
    system = ("system", "be brief " * 20)
    for name in ("first", "second"):
        cache.prompt(rendered([system, ("user", name)]), BLOCK, Encoder())
    cache.find(rendered([system, ("user", "first"), ("user", "more")]))
    for number in range(40):
        talk = [("system", f"{number} " * 60), ("user", "go on")]
        assert cache.prompt(rendered(talk), BLOCK, Encoder()) == from_scratch(rendered(talk))
        assert cache.size_bytes <= 8_000
    assert cache.find(rendered([system, ("user", "first"), ("user", "more")])).known_tokens == 0


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 4)), max_size=30))
def test_a_mark_leads_only_to_what_is_kept(turns: list[tuple[int, int, int]]) -> None:
    """Whoever goes on, forks or is forgotten: each conversation is at its own marks, once, and nowhere else."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=20_000)
    for start, fork, length in turns:
        talk = [("system", f"{start} " * 100), *[("user", f"{fork} {turn} " * 60) for turn in range(length)]]
        cache.prompt(rendered(talk), BLOCK, lambda texts: [[1, 2, 300]] * len(texts))
        at = [(key, id(entry)) for key, entries in cache._places.items() for entry in entries]
        kept = [(key, number) for number, entry in cache._entries.items() for key in entry.keys]
        assert sorted(at) == sorted(kept)  # fewer than `AT_A_MARK` at any
        assert cache.size_bytes == sum(entry.size_bytes for entry in cache._entries.values())


def test_conversations_with_one_beginning_are_each_known_to_their_ends() -> None:
    """Many sessions begin with the same tools and system prompt: the one that goes on finds its own, not the last."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=1 << 20)
    system = ("system", "be brief " * 1000)
    talks = [[system, ("user", f"question {number} " * 20), ("assistant", "yes")] for number in range(AT_A_MARK)]
    for talk in talks:
        cache.prompt(rendered(talk), BLOCK, Encoder())
    for talk in talks:
        plan = cache.find(rendered([*talk, ("user", "more")]))
        assert plan.missing == ["<|im_start|>user\nmore", "<|im_end|>\n", "<|im_start|>assistant\n"]
    assert len(cache) == len(talks)


@given(st.binary(max_size=40), st.binary(max_size=40), st.integers(0, 3), st.integers(0, 50_000))
def test_a_beginning_is_compared_and_not_believed(one: bytes, other: bytes, side: int, size: int) -> None:
    """Two texts are alike up to their first difference, wherever in a long text that is."""
    same = b"x" * size
    ends = [(one, other), (b"", other), (one, b""), (b"", b"")][side]
    first, second = ends
    alike = next((at for at, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    expected = size + (min(len(first), len(second)) if alike is None else alike)
    assert common_bytes(same + first, same + second) == expected


special = st.sampled_from(["<a>", "<ab>", "<a><b>", "<b><c>"])
bits = st.lists(st.sampled_from([*"ab<>xé", "<a>", "<ab>", "<a><b>", "<b>", "<b><c>", "y" * 90]), max_size=60).map(
    "".join
)


@given(st.lists(special, max_size=4), bits, bits, bits)
def test_pieces_that_are_known_are_pieces_of_the_text(tokens: list[str], begin: str, one: str, other: str) -> None:
    """Special tokens that overlap or begin alike, and texts that part anywhere in them: what is known and what is
    missing are the text's own pieces."""
    cache = PrefixTokenCache(tokens, max_bytes=1 << 20)
    cutter = Cutter(tokens)

    def encode(texts: list[str]) -> list[list[int]]:
        return [[len(text), *map(ord, text)] for text in texts]

    for text in (begin + one, begin + other, begin, begin + one + other):
        expected = [number for ids in encode(cutter.cut(text)) for number in ids]
        assert cache.prompt(text, BLOCK, encode).tokens == pack_tokens(expected)


def test_the_chain_goes_on_where_it_was_known() -> None:
    """A pool whose block size changed gets a chain of the new size from the same tokens."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=1 << 20)
    text = rendered([("system", "one two three four five six seven eight nine ten")])
    small = cache.prompt(text, 4, Encoder())
    large = cache.prompt(text, 8, Encoder())
    none = cache.prompt(text, None, Encoder())
    assert small.tokens == large.tokens == none.tokens
    assert (large.block_size, large.chain) == (8, chain_hashes(large.tokens, 8))
    assert (none.block_size, none.chain, none.trace_hashes(8)) == (0, b"", ())


def test_replay_hashes_of_known_tokens() -> None:
    """The golden vectors of identity-and-traces §2.5, the partial tail included."""
    assert from_ids(range(1, 7), 2).trace_hashes(2) == (
        10773075109927122010,
        5890102321129957602,
        3801924459721183657,
    )
    assert from_ids(range(1, 6), 2).trace_hashes(2)[-1] == 2656991839890933969
    assert from_ids([1, 2, 1, 2], 2).trace_hashes(2) == (10773075109927122010, 8239003849983528482)
    assert from_ids([], 2).trace_hashes(2) == ()
    assert from_ids([1], 2).trace_hashes(2) == sequence_hashes_with_tail(pack_tokens([1]), 2)


def test_a_salt_moves_the_chain_and_not_the_row() -> None:
    """An engine keeps a salted prompt's blocks under other hashes; rows of traces hash without the salt."""
    plain = from_ids(range(10), 4)
    salted = plain.under("tenant-a")
    assert plain.under(None) is plain.under("") is plain
    assert plain.cached_as == plain.chain
    assert salted.cached_as == chain_hashes(plain.tokens, 4, salt="tenant-a") != plain.chain
    assert (salted.chain, salted.trace_hashes(4)) == (plain.chain, plain.trace_hashes(4))


def test_an_adapter_s_blocks_are_nobody_else_s() -> None:
    """A11: the base model's prompt, the same under an adapter, and under adapter and salt never match each other."""
    plain = from_ids(range(40), 4)
    chains = {plain.cached_as, plain.under(None, "lora").cached_as, plain.under("tenant-a", "lora").cached_as}
    assert len(chains) == 3
    assert plain.under(None, "lora").cached_as == chain_hashes(plain.tokens, 4, adapter="lora")
    assert from_ids(range(10), None).under("tenant-a").cached_as == b""


def test_pages_of_a_shared_pool_are_hashed_beside_the_chain() -> None:
    """Spec: pool-events §6, vector 1 and 3: the pool's own rule, the first 16 bytes of each digest; a salt or an
    adapter moves them, the partial page at the end has none, and without a rule nothing is hashed."""
    rule = PageRule(4)
    paged = from_ids(range(10), 4).paged(rule, None)
    assert (paged.page_size, paged.pages.hex()) == (
        4,
        "baed642339816affb3fe8719792d0e4c" + "01414b052706d93bd0f1f1646c0e8ca2",
    )
    salted = from_ids(range(100, 108), None).paged(rule, "tenant-a")
    assert salted.pages.hex() == "ba8fe3ecf621d94507e99bc0c73884f9" + "86f91a36dc16cf11adb029805d1342fd"
    kinds = {from_ids(range(10), 4).paged(rule, *names).pages for names in ((None,), ("a",), (None, "a"), ("a", "a"))}
    kinds.add(from_ids(range(10), 4).paged(PageRule(4, pairs=True), None).pages)
    assert len(kinds) == 5
    assert from_ids(range(10), 4).paged(None, "tenant-a").pages == b""
    assert paged.under("tenant-a").pages == paged.pages


def test_cutting() -> None:
    """Pieces begin with a special token, the longer of two that fit; nothing is lost or empty."""
    cutter = Cutter(["<a>", "<a><b>", ""])
    assert cutter.cut("x<a>y<a><b><a>") == ["x", "<a>y", "<a><b>", "<a>"]
    assert cutter.cut("<a>") == ["<a>"]
    assert cutter.cut("") == []
    assert Cutter([]).cut("x<a>y") == ["x<a>y"]


@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_a_chain_continues_exactly(block_size: int) -> None:
    """Any full-block beginning of a chain continues to the same chain."""
    tokens = pack_tokens(range(50))
    whole = chained(tokens, block_size)
    for blocks in range(len(whole.chain) // 8 + 1):
        assert chained(tokens, block_size, whole.chain[: blocks * 8]) == whole


@given(st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), max_size=40), st.integers(0, 40))
def test_where_two_prompts_part(one: list[int], other: list[int], common: int) -> None:
    """The break position is the number of equal blocks from the start (C5)."""
    other = one[:common] + other
    chains = [chain_hashes(pack_tokens(tokens), 2) for tokens in (one, other)]
    expected = 0
    for start in range(0, min(len(one), len(other)) - 1, 2):
        if one[start : start + 2] != other[start : start + 2]:
            break
        expected += 1
    assert shared_blocks(*chains) == expected


def test_a_tenant_s_chain_goes_on_too() -> None:
    """A conversation that grows under a salt, then is sent under another: each has the chain of its own namespace."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=1 << 20)
    encoder = Encoder()
    said = [("system", "be brief " * 40)]
    for turn, salt in enumerate(("a", "a", "b", None, "b", "a")):
        said.append(("user", f"question {turn}"))
        plan = cache.find(rendered(said))
        filled = plan.fill(encoder(plan.missing), BLOCK, salt, "lora" if salt else None)
        cache.keep(filled)
        assert filled.prompt == from_scratch(rendered(said)).under(salt, "lora" if salt else None)
    assert plan.known_tokens > 40


@given(st.integers(0, 90), st.integers(1, 5), st.integers(1, 4), st.integers(0, 30))
def test_hashes_of_larger_blocks(count: int, block_size: int, times: int, generated: int) -> None:
    """Every so many-th hash of the fine chain, and the tail since then; of prompt and answer the same, begun by the
    prompt's whole blocks (docs/adr/0018)."""
    prompt, size = from_ids(range(count), block_size), block_size * times
    fine = sequence_hashes_with_tail(prompt.tokens, block_size)
    hashes = prompt.trace_hashes(size)
    whole = count // size
    assert len(hashes) == -(-count // size)
    assert hashes[:whole] == fine[times - 1 : whole * times : times]
    if count % size:
        tail = xxh3_64_intdigest(prompt.tokens[whole * size * 4 :], 1337)
        assert hashes[whole:] == tuple(chain_of([tail], hashes[whole - 1] if whole else None))
    both = prompt.answered(range(1000, 1000 + generated), size)
    assert both == from_ids([*range(count), *range(1000, 1000 + generated)], block_size).trace_hashes(size)
    assert both[:whole] == hashes[:whole]


@pytest.mark.parametrize(
    ("tokens", "block_size", "fine", "expected"),
    [
        (8192, 16, 8192, 16),
        (8193, 16, 8192, 512),
        (8193, 48, 8192, 480),
        (8193, 512, 8192, 512),
        (8193, 784, 8192, 784),
        (1, 16, 0, 512),
        (0, 16, 0, 16),
    ],
)
def test_trace_block_size(tokens: int, block_size: int, fine: int, expected: int) -> None:
    """The pool's blocks up to the bound, then the largest multiple up to 512."""
    assert trace_block_size(tokens, block_size, fine) == expected


def test_leading_tokens_are_no_part_of_a_text() -> None:
    """The same cache with and without tokens before the text, and a text that begins with the bytes of those."""
    cache = PrefixTokenCache(SPECIAL, max_bytes=1 << 20)
    leading = pack_tokens([0x41414141])
    said = rendered([("user", "a"), ("assistant", "b")])
    for text, before in ((said, b""), (said, leading), (f"AAAA{said}", b""), (said, b""), (f"AAAA{said}", leading)):
        assert cache.prompt(text, BLOCK, Encoder(), before) == from_scratch(text, before)
