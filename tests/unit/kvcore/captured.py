"""The captured bytes of `tests/fixtures/kvcore`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "fixtures" / "kvcore"


@cache
def rows(name: str) -> tuple[dict[str, Any], ...]:
    """All rows of one file; ``payload`` or ``frames`` as bytes."""
    loaded: list[dict[str, Any]] = []
    for line in (FOLDER / name).read_text("utf-8").splitlines():
        row: dict[str, Any] = json.loads(line)
        if "hex" in row:
            row["payload"] = bytes.fromhex(row.pop("hex"))
        if "frames" in row:
            row["frames"] = [bytes.fromhex(frame) for frame in row["frames"]]
        loaded.append(row)
    return tuple(loaded)


def payload(path: str) -> bytes:
    """One payload by its path."""
    return next(bytes(row["payload"]) for row in rows("payloads.jsonl") if row["path"] == path)


def stream(name: str) -> list[tuple[int, int, bytes]]:
    """One captured stream as (rank, seq, payload), in order of arrival."""
    return [(row["rank"], row["seq"], row["payload"]) for row in rows("streams.jsonl") if row["stream"] == name]


def streams() -> list[str]:
    """The names of all captured streams."""
    return sorted({row["stream"] for row in rows("streams.jsonl")})
