"""Alert rules and the board's expressions, read by Prometheus' own checker."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.deploy.test_monitoring import MONITORING, expressions


@pytest.fixture
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    return found


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=MONITORING)


def test_alerts_fire_when_they_should(promtool: str) -> None:
    """The rules load, and do on made-up series what they are for."""
    done = run(promtool, "check", "rules", "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    done = run(promtool, "test", "rules", "alerts.test.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_board_asks_in_promql(promtool: str, tmp_path: Path) -> None:
    """Each expression, as if it were a rule."""
    rules = [
        {"record": f"board:{number}", "expr": text.replace("$__rate_interval", "1m")}
        for number, text in enumerate(expressions())
    ]
    file = tmp_path / "board.yaml"
    file.write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    done = run(promtool, "check", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
