"""The fuzzer of the front door: a few cases of each kind, and every case that ever went wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.front_door.kinds import KINDS, run_case

KEPT = Path(__file__).parents[2] / "fixtures" / "fuzz" / "front_door.txt"
CASES = [tuple(line.split("/")) for line in KEPT.read_text().splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("kind", KINDS)
def test_some_cases(kind: str) -> None:
    """Nothing is raised that the kind does not expect; `make fuzz` looks for minutes."""
    for number in range(30):
        run_case(kind, number)


@pytest.mark.parametrize(("kind", "number"), CASES)
def test_what_once_went_wrong(kind: str, number: str) -> None:
    run_case(kind, int(number))
