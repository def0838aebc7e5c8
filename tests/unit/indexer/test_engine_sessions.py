"""Blocks that engines name a session for: its answer becomes known, and nothing else changes."""

from __future__ import annotations

import msgspec
import pytest

from kvcore import chain_hashes, pack_tokens
from schemas.session import SessionKey
from services.indexer.config import IndexerSettings
from services.indexer.core import IndexerCore
from tests.unit.replica.bridge import BLOCK, Bridge, bridge, placed

SESSION = SessionKey(family="claude_code", root="s", agent="a1")
PROMPT, ANSWER = 3, 2
TOKENS = pack_tokens(range(100, 100 + (PROMPT + ANSWER) * BLOCK))
CHAIN = chain_hashes(TOKENS, BLOCK)


def event(first: int, blocks: int, **changes: object) -> dict[str, object]:
    """Blocks of the session's tokens, from number ``first`` on, as vLLM 0.30 sends them."""
    hashes = [1000 + number for number in range(first, first + blocks)]
    start = 100 + first * BLOCK
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": 999 + first if first else None,
        "token_ids": list(range(start, start + blocks * BLOCK)),
        "block_size": BLOCK,
        "session_id": "a1",
        **changes,
    }


def batch(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([1.0, list(events)])


@pytest.fixture
def at() -> tuple[IndexerCore, Bridge]:
    """An indexer that knows the session's prompt, whose blocks are at the engine."""
    core = IndexerCore(IndexerSettings(instance="indexer-1"), 7)
    worker = bridge()
    worker.core = core.replica
    worker.beat()
    worker.publish(batch(event(0, PROMPT)))
    core.handle(placed(0, CHAIN[: PROMPT * 8], session=SESSION), 1.0)
    return core, worker


def depth(core: IndexerCore) -> int:
    found = core.sessions.index.get(SESSION)
    assert found is not None
    return found.depth


def test_an_answer_becomes_known(at: tuple[IndexerCore, Bridge]) -> None:
    """Blocks after the prompt's are the session's frontier, in one run or one by one; the next prompt's likely length
    still goes by prompts."""
    core, worker = at
    worker.publish(batch(event(PROMPT, 1)))
    worker.publish(batch(event(PROMPT + 1, 1)))
    assert depth(core) == PROMPT + ANSWER
    assert core.sessions.index.chain(SESSION) == CHAIN
    assert core.engine_sessions.outcomes["taken"] == 2
    longer = chain_hashes(pack_tokens(range(100, 100 + 8 * BLOCK)), BLOCK)
    core.handle(placed(1, longer, session=SESSION), 2.0)
    found = core.sessions.index.get(SESSION)
    assert found is not None
    assert found.expected == 8 + (8 - PROMPT)


def test_a_run_that_begins_inside_the_prompt(at: tuple[IndexerCore, Bridge]) -> None:
    """An engine may store a prompt's last blocks and the answer's first in one event."""
    core, worker = at
    worker.publish(batch(event(PROMPT - 1, 1 + ANSWER)))
    assert depth(core) == PROMPT + ANSWER


def test_what_was_removed_stays_known(at: tuple[IndexerCore, Bridge]) -> None:
    """A hint, not residency (spec: thunderagent-and-hints §5.2)."""
    core, worker = at
    worker.publish(batch(event(PROMPT, ANSWER)))
    removed: dict[str, object] = {
        "type": "BlockRemoved",
        "block_hashes": [1000 + number for number in range(PROMPT + ANSWER)],
    }
    worker.publish(batch(removed))
    assert depth(core) == PROMPT + ANSWER


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        ({"session_id": "nobody"}, "unknown_session"),
        ({"parent_block_hash": 5}, "unknown_blocks"),
        ({"parent_block_hash": None}, "no_prefix"),
        ({"session_id": None}, None),
    ],
)
def test_everything_else_changes_nothing(
    at: tuple[IndexerCore, Bridge], change: dict[str, object], outcome: str | None
) -> None:
    """Sessions and parents that nobody knows, blocks without a session: counted, where they name one."""
    core, worker = at
    before = core.engine_sessions.outcomes.total()
    worker.publish(batch(event(PROMPT, ANSWER, **change)))
    assert depth(core) == PROMPT
    assert core.engine_sessions.outcomes.total() == before + (outcome is not None)
    if outcome is not None:
        assert core.engine_sessions.outcomes[outcome] == 1 + (outcome == "unknown_session")  # the prompt's own event


def test_an_older_turn_says_nothing_new(at: tuple[IndexerCore, Bridge]) -> None:
    """A run inside of what is known."""
    core, worker = at
    worker.publish(batch(event(1, PROMPT - 1)))
    assert depth(core) == PROMPT
    assert core.engine_sessions.outcomes["nothing_new"] == 1
