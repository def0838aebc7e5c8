"""Asking from several threads while one applies: what the native twin allows, since it lets go of the GIL meanwhile."""

from __future__ import annotations

import threading

import msgspec
import pytest

from kvcore.hashing import chain_hashes, unpack_tokens
from tests.unit.kvcore.making import chain_of_names, tokens_of
from tests.unit.kvcore.twins import NATIVE

NAMES = list(range(300))


@pytest.mark.long
@pytest.mark.skipif(NATIVE is None, reason="the Python twin is for one thread")
def test_threads_ask_while_one_applies() -> None:
    """No call fails or waits for ever, and each batch is seen whole or not at all."""
    assert NATIVE is not None
    tokens = unpack_tokens(tokens_of(NAMES))
    event = {"type": "BlockStored", "block_hashes": NAMES, "token_ids": tokens, "block_size": 4}
    store, clear = (msgspec.msgpack.encode([1.0, [one], 0]) for one in (event, {"type": "AllBlocksCleared"}))
    index, chain = NATIVE.PrefixIndex(), chain_of_names(NAMES)
    assert chain == chain_hashes(tokens_of(NAMES), 4)
    seen: set[int] = set()
    failures: list[BaseException] = []
    over = threading.Event()

    def ask() -> None:
        try:
            while not over.is_set():
                seen.update(match.reach for match in index.match(chain))
                index.stats()
                index.dump()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failures.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(1000):
        index.apply_payload("w", number % 2, store)
        index.apply_payload("w", number % 2, clear)
    index.apply_payload("w", 0, store)
    over.set()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert [match.reach for match in index.match(chain)] == [len(NAMES)]
    assert failures == []
    assert seen <= {len(NAMES)}
