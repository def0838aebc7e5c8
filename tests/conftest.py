"""Fixtures for every test: a real nats-server, and a detector of calls that block the event loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx

from tests.support.nats import NatsServer


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
