"""The cases that `python -m tests.fuzz.kvcore` once found, and a handful of each kind."""

from __future__ import annotations

import pytest

from tests.fuzz.kvcore.compare import DifferenceError, same
from tests.fuzz.kvcore.kinds import KINDS, WEIGHTS, run
from tests.unit.kvcore.captured import FOLDER
from tests.unit.kvcore.twins import Twin

KEPT = (FOLDER.parent / "fuzz" / "kvcore.txt").read_text().split()


def test_what_was_found_once(twin: Twin) -> None:
    """Mended, and stays so."""
    for case in KEPT:
        kind, _, number = case.partition("/")
        run(kind, int(number), twin)


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_some_of_every_kind(twin: Twin, kind: str) -> None:
    """The same few at every run; `make fuzz` looks longer."""
    for number in range(WEIGHTS[kind]):
        run(kind, number, twin)


def test_a_difference_is_told_from_likeness() -> None:
    """What differs stops the run and shows both sides."""
    same("nothing", [1], [1])
    with pytest.raises(DifferenceError, match=r"something:\n  python: 1\n  other:  2"):
        same("something", 1, 2)
