"""Every test that asks for ``twin`` runs with the Python twin of `kvcore`, and with the native one where there is one
(`test_twin.py` says why, where there is none)."""

from __future__ import annotations

import pytest

from tests.unit.kvcore.twins import NATIVE, PYTHON, Twin


@pytest.fixture(scope="session", params=[twin for twin in (PYTHON, NATIVE) if twin is not None], ids=str)
def twin(request: pytest.FixtureRequest) -> Twin:
    """One of the two."""
    chosen: Twin = request.param
    return chosen
