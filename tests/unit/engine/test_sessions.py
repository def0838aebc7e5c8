"""What the engine remembers of sessions: exact counts of who shares a block, and bounds that hold."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from load.engine.block_hash import ExtraKeys
from load.engine.kv_cache import BlockContent
from load.engine.sessions import SessionChains


def chain_of(fork: int, count: int) -> list[BlockContent]:
    """The first ``count`` blocks of a chain that leaves the common one after ``fork`` blocks."""
    return [
        BlockContent(bytes([place, 0 if place < fork else fork + 1]), None, b"", ExtraKeys(), place)
        for place in range(count)
    ]


operations = st.lists(
    st.tuples(st.sampled_from(["note", "use", "forget"]), st.integers(0, 5), st.integers(0, 4), st.integers(0, 8)),
    max_size=40,
)


@given(operations)
def test_against_a_naive_model(history: list[tuple[str, int, int, int]]) -> None:
    chains = SessionChains(max_sessions=3, max_blocks=10)
    model: OrderedDict[str, list[BlockContent]] = OrderedDict()
    for action, session, start, count in history:
        name = f"s{session}"
        if action == "note":
            contents = chain_of(start, count)
            chains.note(name, contents)
            model.pop(name, None)
            if contents:
                model[name] = contents
            while len(model) > 3 or (sum(map(len, model.values())) > 10 and len(model) > 1):
                model.popitem(last=False)
        elif action == "use":
            assert list(chains.chain(name)) == model.get(name, [])
            if name in model:
                model.move_to_end(name)
        else:
            assert chains.forget(name) == (model.pop(name, None) is not None)
        assert chains.blocks == sum(map(len, model.values()))
        assert len(chains) == len(model)
        for owner, contents in model.items():
            others = {content.digest for other, held in model.items() if other != owner for content in held}
            alone = [content for content in contents if content.digest not in others]
            assert chains.only_of(owner, contents) == alone
