"""Fixtures for every test: a real nats-server, and a detector of calls that block the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import settings

from tests.support.nats import NatsServer

# Few examples by default, so that the unit part stays under 15 s; `--hypothesis-profile deep` looks longer where a test
# does not name its own number.
settings.register_profile("quick", max_examples=40, database=None)
settings.register_profile("deep", max_examples=1000)
settings.load_profile("quick")


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server of this test's own: subjects, streams and buckets have fixed names, so tests share none."""
    server = NatsServer(tmp_path / "nats").start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def no_blocking_calls() -> Iterator[None]:
    """Blocking calls of our own code on the event loop raise `blockbuster.BlockingError`."""
    with blockbuster_ctx(["bus", "web", "kvcore", "services"]):
        yield
