"""kill -9 of engine, bridge and indexer in every order, under load: in the end the index is the engine's own truth."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import combinations, permutations

import pytest
import pytest_asyncio

from bus.nats import connect
from tests.support.nats import NatsServer
from tests.system.recovering import House, recovering_house

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]

PARTS = ("indexer", "bridge", "engine")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats")).start()
    yield server
    server.kill()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house(server: NatsServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[House]:
    bus = await connect(server.url, name="test", timeout_s=30)
    async with recovering_house(server.url, bus, tmp_path_factory.mktemp("recovery")) as house:
        await house.load.until_requests(100)
        await house.check()
        yield house
    await bus.close()


@pytest.mark.parametrize("order", list(permutations(PARTS)), ids="-".join)
async def test_one_after_the_other(order: tuple[str, ...], house: House) -> None:
    """User cases A3, A16: each is killed and started again before anybody has recovered from the one before, while
    sessions go on; then every source is synced, and bridge and indexer agree with the engine block by block."""
    house.load.resume()
    for name in order:
        await house.load.until_requests(10)
        await house.kill_and_restart(name)
    await house.load.until_requests(30)
    await house.check()


@pytest.mark.parametrize("names", [*combinations(PARTS, 2), PARTS], ids="-".join)
async def test_at_the_same_moment(names: tuple[str, ...], house: House) -> None:
    """Two of them, or all three, die at once."""
    house.load.resume()
    await house.load.until_requests(20)
    await house.kill_and_restart(*names)
    await house.load.until_requests(30)
    await house.check()


async def test_with_the_bus(server: NatsServer, house: House) -> None:
    """nats-server is killed and comes back on its store while the engine goes on."""
    house.load.resume()
    await house.load.until_requests(20)
    server.kill()
    await house.load.until_requests(20)
    server.start()
    await house.load.until_requests(20)
    await house.check()
