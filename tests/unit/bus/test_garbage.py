"""Collections of a process that serves: what was there at its start is left out of them."""

from __future__ import annotations

import gc

import pytest

from bus import garbage


@pytest.mark.long
def test_what_is_there_is_left_out_meanwhile() -> None:
    """What was alive is not looked at any more, later garbage is found, and afterwards all is as before."""
    kept = [[number] for number in range(100)]
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with garbage.settled():
        assert gc.get_freeze_count() > frozen + len(kept)
        assert gc.get_threshold() == garbage.THRESHOLDS
        ring: list[object] = []
        ring.append(ring)
        del ring
        assert gc.collect() >= 1
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)
    gc.freeze()  # as tests/conftest.py leaves the collected tests out
