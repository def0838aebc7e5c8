"""The table of hostile requests in docs/security.md says what the corpus shows."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.hostile import HOSTILE

PAGE = Path(__file__).resolve().parents[3] / "docs" / "security.md"
SHOWN_ELSEWHERE = {(401, "invalid_api_key"), (408, "request_timeout"), (503, "busy")}
"""They need keys, time, or others: tests/integration/ingress/test_hostile.py, tests/integration/web."""


def test_the_page_says_what_hostile_requests_get() -> None:
    """Every status and reason of the corpus is a row, and no row is without a request that gets it."""
    section = PAGE.read_text().partition("## What hostile requests get")[2].partition("\n## ")[0]
    rows = {(int(status), reason) for status, reason in re.findall(r"^\| (\d{3}) `(\w+)`", section, re.MULTILINE)}
    assert rows == {(hostile.status, hostile.reason) for hostile in HOSTILE} | SHOWN_ELSEWHERE


def test_each_hostile_request_has_a_name_of_its_own() -> None:
    assert len({hostile.name for hostile in HOSTILE}) == len(HOSTILE)
