"""Reports of pip-audit: a weakness fails, ignorance is said and passes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy import audit
from deploy.audit import Audit, read

WEAK = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"], "description": "d"}
GOOD = {"name": "good", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "1", "vulns": [WEAK]}
UNKNOWN = {"name": "ours", "skip_reason": "Dependency not found"}


def test_reports() -> None:
    """What nobody looked up is no clean bill: pip-audit itself says "no known vulnerabilities" and exits with 0."""
    assert read({"dependencies": [GOOD, UNKNOWN]}) == Audit(packages=2, unknown=1)
    assert "not found" in (read({"dependencies": [UNKNOWN]}).skipped or "")
    assert read({"dependencies": []}).skipped is not None
    (line,) = read({"dependencies": [GOOD, BAD, UNKNOWN]}).weaknesses
    assert "bad 1: PYSEC-1" in line
    assert "2.0" in line


def test_a_weakness_may_be_accepted_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ACCEPTED", {"CVE-1": "we never call it"})
    assert read({"dependencies": [BAD]}).weaknesses == ()


@pytest.mark.parametrize(
    ("found", "code", "words"),
    [
        (Audit(weaknesses=("bad 1: PYSEC-1",)), 1, "PYSEC-1"),
        (Audit(skipped="no network"), 0, "audit: skipped: no network"),
        (Audit(packages=3, unknown=1), 0, "of 2 packages, 1 not looked up"),
    ],
)
def test_the_command(found: Audit, code: int, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Fails for a weakness alone; asks once a day for the same locks, and every time while there is a weakness."""
    asked: list[int] = []

    def counted() -> Audit:
        asked.append(1)
        return found

    monkeypatch.setattr(audit, "KEPT", tmp_path / "kept.json")
    monkeypatch.setattr(audit, "audit", counted)
    for _ in range(2):
        result = CliRunner().invoke(audit.main)
        assert (result.exit_code, words in result.output) == (code, True)
    assert len(asked) == (2 if found.weaknesses else 1)
    CliRunner().invoke(audit.main, ["--again"])
    assert len(asked) == (3 if found.weaknesses else 2)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('much\\nConnectionError: no route to host')", "cannot be asked: ConnectionError"),
        ("print('{}')", "cannot be asked: pip-audit said nothing"),
        ("import time; time.sleep(60)", "did not answer within"),
    ],
)
def test_a_service_that_cannot_be_asked(program: str, words: str, tmp_path: Path) -> None:
    """No network, no sense, no answer: said in a line."""
    timeout_s = 0.2 if "sleep" in program else 60.0
    found = audit.ask([tmp_path / "one.txt"], timeout_s, ("-c", program))
    assert words in (found.skipped or "")
    assert "\n" not in (found.skipped or "")
