"""Settings that cannot work are refused at the start."""

from __future__ import annotations

from typing import Any

import pytest

from services.ingress.config import IngressSettings


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"body_bytes": 1000, "held_body_bytes": 999}, "held_body_bytes must not be less than body_bytes"),
        ({"prompt_bytes": 0}, "prompt_bytes must be greater than 0"),
        ({"body_timeout_s": 0.0}, "body_timeout_s must be greater than 0"),
    ],
)
def test_bounds_that_let_nothing_through(settings: dict[str, Any], said: str) -> None:
    """A bound of 0, and one below what a single request may have, are mistakes."""
    with pytest.raises(ValueError, match=said):
        IngressSettings(instance="i", **settings)
