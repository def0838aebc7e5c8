"""Prompts made of hashes: exact lengths, what was shared is shared, answers are where the engine cached them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tidegate.replay.making import BLOCK, node
from tidegate.replay.content import HIGHEST, LOWEST, Prompts
from tidegate.trace.play_nodes import PlayNode


def prompts(nodes: list[PlayNode], *, seed: int = 7, words: bool = False) -> Prompts:
    return Prompts(nodes, BLOCK, seed=seed, words=words)


def ids(text: bytes) -> list[int]:
    return [int(each) for each in text.split(b",")]


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.integers(1, BLOCK)), min_size=2, max_size=4
    )
)
def test_equal_hashes_are_equal_tokens(made: list[tuple[list[int], int]]) -> None:
    """Any two prompts share exactly the blocks in whose hashes they agree from the beginning, whatever their order;
    each has exactly its tokens, all of them in the vocabulary."""
    chains = [[hash(tuple(each[: end + 1])) & (1 << 64) - 1 for end in range(len(each))] for each, _ in made]
    nodes = [
        node(str(number), chain, tokens=(len(chain) - 1) * BLOCK + tail, play=str(number))
        for number, (chain, (_, tail)) in enumerate(zip(chains, made, strict=True))
    ]
    one = prompts(nodes)
    texts = [ids(one.prompt(number)) for number in range(len(nodes))]
    assert [len(text) for text in texts] == [each.input_tokens for each in nodes]
    assert all(LOWEST <= token <= HIGHEST for text in texts for token in text)
    for chain, text in zip(chains, texts, strict=True):
        for other_chain, other in zip(chains, texts, strict=True):
            whole = min(len(text), len(other)) // BLOCK
            for place in range(whole):
                same = text[: (place + 1) * BLOCK] == other[: (place + 1) * BLOCK]
                assert same == (chain[place] == other_chain[place])
    again, different = prompts(nodes), prompts(nodes, seed=8)
    assert [ids(again.prompt(number)) for number in range(len(nodes))] == texts
    assert ids(different.prompt(0))[:BLOCK] != texts[0][:BLOCK] or len(texts[0]) < 3


def conversation() -> list[PlayNode]:
    """A prompt of 40 tokens with an answer of 30, one of 90 that goes on from it, with one of 8, and one more."""
    last = (1, 2, 30, 40, 50, 61, 70)
    return [
        node("a", [1, 2, 3], tokens=40, output=30, content=((1, 2, 30, 40, 50), 70)),
        node("b", [1, 2, 30, 40, 50, 60], tokens=90, output=8, content=(last, 98)),
        node("c", last),
    ]


def test_the_answer_of_now_is_in_the_next_prompt() -> None:
    """The next prompt begins with the last one and its answer; who shares its blocks later shares them too."""
    one = prompts(conversation())
    first = ids(one.prompt(0))
    answer = list(range(100_000, 100_030))
    one.ended(0, answer)
    second = ids(one.prompt(1))
    assert second[:70] == first + answer
    assert len(second) == 90
    one.ended(1, list(range(8)))
    third = ids(one.prompt(2))
    assert third[:98] == [*second, *range(8)]
    assert len(third) == 7 * BLOCK
    assert (one.sent_back, one.not_told) == (2, 0)


def test_without_the_answers_tokens_the_prompt_still_goes_on() -> None:
    """An endpoint that tells no ids: the earlier prompt is kept to its last token, the answer is made up, and counted.
    With ``answers`` off it is made up, too, whatever comes."""
    one = prompts(conversation())
    first = ids(one.prompt(0))
    one.ended(0, None)
    second = ids(one.prompt(1))
    assert second[:40] == first
    assert (one.sent_back, one.not_told) == (0, 1)
    off = Prompts(conversation(), BLOCK, seed=7, answers=False)
    off.ended(0, [5] * 30)
    assert [ids(off.prompt(0)), ids(off.prompt(1))] == [first, second]


def test_turns_that_end_in_one_block_share_it_as_far_as_they_go() -> None:
    """Trace blocks of long prompts hold several turns: each turn's end has another hash, and all are the beginning of
    the block that is whole in the end, with their answers inside. An equal prompt elsewhere, which goes on otherwise,
    has the same tokens."""
    nodes = [
        node("a", [1, 2], tokens=18, output=3, content=((1, 50), 21)),
        node("b", [1, 3], tokens=23, output=2, content=((1, 50), 25)),
        node("c", [1, 50, 51]),
        node("a'", [1, 2], tokens=18, output=3, session="t", content=((1, 60), 21)),
        node("c'", [1, 60], session="t"),
    ]
    one = prompts(nodes)
    first, answer = ids(one.prompt(0)), [900_001, 900_002, 900_003]
    one.ended(0, answer)
    second = ids(one.prompt(1))
    assert second[:21] == first + answer
    one.ended(1, [800_001, 800_002])
    third = ids(one.prompt(2))
    assert third[:25] == [*second, 800_001, 800_002]
    assert ids(one.prompt(3)) == first
    one.ended(3, [7, 8, 9])
    assert ids(one.prompt(4))[:21] == [*first, 7, 8, 9]
    assert ids(one.prompt(1)) == second


def test_a_block_that_was_sent_keeps_its_tokens() -> None:
    """The next prompt, sent before the answer was there: what comes later agrees with it."""
    one = prompts(conversation())
    before = ids(one.prompt(1))
    one.ended(0, list(range(30)))
    assert ids(one.prompt(1)) == before


def test_words_are_json_and_share_prefixes() -> None:
    """For endpoints without ids: one word a token."""
    nodes = [node("a", [1, 2], tokens=20), node("b", [1, 3], session="t")]
    one = prompts(nodes, words=True)
    first, second = one.prompt(0).split(b" "), one.prompt(1).split(b" ")
    assert (len(first), len(second)) == (20, 32)
    assert first[:16] == second[:16]
    assert all(word.isalpha() for word in first)
