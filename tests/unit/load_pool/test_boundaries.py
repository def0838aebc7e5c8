"""The pool's pure modules stay pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import load.pool

FORBIDDEN = {"asyncio", "time", "socket", "zmq", "os", "nats", "uvloop", "web", "threading", "subprocess", "datetime"}


@pytest.mark.parametrize("name", ["store", "events", "misbehave", "bodies"])
def test_no_clock_and_no_sockets(name: str) -> None:
    """Whoever owns the store tells it the time."""
    imported = set()
    for node in ast.walk(ast.parse((Path(load.pool.__path__[0]) / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.split(".")[0])
    assert imported & FORBIDDEN == set()
