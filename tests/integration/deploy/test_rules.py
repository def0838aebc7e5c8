"""Alert rules and the board's expressions, read by Prometheus' own checker; the board, by Grafana's own schema."""

from __future__ import annotations

import copy
import importlib
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.unit.deploy.test_monitoring import BOARD, MONITORING, expressions


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


def test_grafana_s_own_schema_knows_every_field_of_the_board() -> None:
    """Read into the classes that Grafana makes of its schema and written again, nothing is lost and nothing changed; a
    name that Grafana would ignore is."""
    dashboard = pytest.importorskip(
        "grafana_foundation_sdk.models.dashboard",
        reason="no schema of Grafana here: pip install grafana-foundation-sdk",
    )
    encoder = importlib.import_module("grafana_foundation_sdk.cog.encoder").JSONEncoder()

    def through(board: dict[str, Any]) -> Any:
        return json.loads(encoder.encode(dashboard.Dashboard.from_json(board)))

    def beyond(known: Any, given: Any) -> list[str]:
        """What was given and is not known."""
        if isinstance(given, dict):
            return [key for key in given if key not in known] + [
                name for key in given.keys() & known.keys() for name in beyond(known[key], given[key])
            ]
        if isinstance(given, list):
            return [name for old, new in zip(known, given, strict=True) for name in beyond(old, new)]
        return [] if known == given else [str(given)]

    assert beyond(through(BOARD), BOARD) == []
    wrong = copy.deepcopy(BOARD)
    panel = next(one for one in wrong["panels"] if one["type"] != "row")
    panel["gridpos"] = panel.pop("gridPos")
    panel["fieldConfig"].setdefault("defaults", {})["units"] = "s"
    assert sorted(beyond(through(wrong), wrong)) == ["gridpos", "units"]
