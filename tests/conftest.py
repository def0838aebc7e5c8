"""Fixtures for every test: a real nats-server, and a detector of calls that block the event loop."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from blockbuster import blockbuster_ctx
from hypothesis import HealthCheck, settings

from tests.support.nats import NatsServer

# Few examples by default, so that the unit part stays under 15 s; the profiles `thorough` (of `make test-histories`)
# and `deep` look longer. How long an example takes is the machine's affair: no profile has a deadline. Where CI is set,
# as .ci/run does, examples are the same in every run: what chance finds is found by people, not by somebody's merge.
settings.register_profile(
    "quick",
    max_examples=20,
    deadline=None,
    database=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("quick"), max_examples=100)
settings.register_profile("deep", settings.get_profile("quick"), max_examples=1000)
settings.load_profile("quick")

# Who starts tests in the background of a script has them ignore Ctrl-C, and so would every process that they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests come to stay: no garbage collection looks through them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """A command that a test calls sets the process's logging up for itself: not for the tests after it."""
    root = logging.getLogger()
    level, handlers = root.level, set(root.handlers)
    yield
    root.setLevel(level)
    for handler in set(root.handlers) - handlers:
        root.removeHandler(handler)


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
