"""The Grafana board and the alert rules: well formed, and made from what the repository says."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import yaml

from deploy import board

MONITORING = Path(__file__).resolve().parents[3] / "deploy" / "monitoring"
BOARD: dict[str, Any] = json.loads((MONITORING / "tidegate-board.json").read_text())
RULES: list[dict[str, Any]] = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"][0]["rules"]


def expressions() -> list[str]:
    """Every PromQL expression of the board and of the alerts."""
    shown = [target["expr"] for panel in BOARD["panels"] for target in panel.get("targets", ())]
    return shown + [rule["expr"] for rule in RULES]


def metric_names() -> set[str]:
    """What they read."""
    return {name for text in expressions() for name in re.findall(r"\btidegate_\w+", text)}


def test_the_board_is_the_one_of_its_table() -> None:
    """After a change: ``python -m deploy.board``."""
    assert board.main(["--check"]) == 0


def test_panels_have_places_of_their_own() -> None:
    """Numbers differ, nothing overlaps, everything fits, each says what it shows and asks the chosen source."""
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for one, other in itertools.combinations([panel["gridPos"] for panel in panels], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        if panel["type"] == "row":
            continue
        assert panel["description"]
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEF"[: len(panel["targets"])])
        assert {target["datasource"]["uid"] for target in panel["targets"]} == {"${datasource}"}


def test_alerts_say_what_is_wrong_and_what_to_do() -> None:
    """A name of their own, a known severity, a summary and a description."""
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("page", "ticket"), rule["alert"]
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"].endswith((".", "?"))


def test_every_alert_is_seen_to_fire_and_to_be_silent() -> None:
    """By a case of its own each, which Prometheus' checker runs where it is installed."""
    groups = yaml.safe_load((MONITORING / "alerts.test.yaml").read_text())["tests"]
    cases = [case for group in groups for case in group["alert_rule_test"]]
    names = {rule["alert"] for rule in RULES}
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == names
    assert {case["alertname"] for case in cases if not case["exp_alerts"]} == names


def test_what_alerts_read_is_explained() -> None:
    """On the page of operations, whose table says what to look at; admission's own index under its one line."""
    page = (MONITORING.parents[1] / "docs" / "operations.md").read_text()
    read = {name for rule in RULES for name in re.findall(r"\btidegate_\w+", rule["expr"])}
    known = {name.removesuffix("_count") for name in read if not name.startswith("tidegate_admission_index_")}
    assert sorted(name for name in known if f"`{name}" not in page) == []
    assert "`tidegate_admission_index_…`" in page
