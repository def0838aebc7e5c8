"""The house in front of a real vLLM with two data-parallel ranks, its event endpoints found by asking it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from schemas.trace import RequestMetrics
from tests.real.house import Conversation, House, assert_predicted, running_house, system_prompt
from tests.support.processes import eventually
from tests.support.vllm import Vllm, interpreter

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    directory = tmp_path_factory.mktemp("ranks")
    vllm = Vllm(interpreter(), tiny_model, directory, blocks=161, ranks=2)
    try:
        await vllm.start()
        async with running_house(directory, vllm, vllm.url, "local") as house:
            yield house
    finally:
        await vllm.kill()


def rank_of(row: RequestMetrics) -> int:
    assert row.worker is not None
    return row.worker.rank


async def test_each_rank_is_a_cache_of_its_own(house: House) -> None:
    """Both ranks' streams are found and synced. Eight sessions spread over both ranks and stay where they began; vLLM
    serves each on the rank that was decided, so that predictions hold; the index of a rank is that rank's cache."""
    await eventually(lambda: bool(house.states) and len(house.states[-1].streams) == 2, 20, "two streams")
    state = house.states[-1]
    assert state.profile.ranks == 2
    assert {stream.state for stream in state.streams} == {"synced"}
    sessions = [
        Conversation(house, f"ship-{number}", [{"role": "system", "content": system_prompt(f"ship {number}")}])
        for number in range(8)
    ]
    for turn in range(3):
        for number, session in enumerate(sessions):
            await session.turn(f"Watch {turn}.", stream=(turn + number) % 2 == 0)
    homes = []
    for session in sessions:
        rows = await house.rows_of(session.session)
        assert len({rank_of(row) for row in rows}) == 1
        assert_predicted(rows)
        homes.append(rank_of(rows[0]))
        tokens = session.tokens()
        assert (await house.agree(tokens, rank=homes[-1])).prefix(tokens) > 5
        assert (await house.agree(tokens, rank=1 - homes[-1])).prefix(tokens) == 0
    print(f"sessions on ranks {homes}")
    assert set(homes) == {0, 1}
