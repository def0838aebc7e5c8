"""Tests by name, for tables that say which test proves what."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


@cache
def functions(file: str) -> dict[str, str]:
    """Name and docstring of each test of a file below ``tests/``."""
    tree = ast.parse((TESTS / file).read_text())
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name: ast.get_docstring(node) or "" for node in found}


def docstring(proof: str) -> str:
    """Of a test written ``file::name``. Raises `AssertionError` when it is not there."""
    file, _, name = proof.partition("::")
    assert (TESTS / file).exists(), proof
    assert name in functions(file), proof
    return functions(file)[name]
