"""Says at the end how many histories and events of each kind ran, in all processes together."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.unit.admission.scheduling.machine import Tally


def record(request: pytest.FixtureRequest, kind: str, tally: Tally) -> None:
    """``tally`` belongs to ``kind`` from now on."""
    request.node.user_properties.append(("histories", (kind, tally.histories, tally.events)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    histories: Counter[str] = Counter()
    events: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", None) != "call":
                continue
            for name, value in report.user_properties:
                if name == "histories":
                    kind, count, steps = value
                    histories[kind] += count
                    events[kind] += steps
    if not histories:
        return
    terminalreporter.section("histories")
    for kind in sorted(histories):
        terminalreporter.write_line(f"{histories[kind]:7,d} histories {events[kind]:10,d} events  {kind}")
    terminalreporter.write_line(f"{histories.total():7,d} histories {events.total():10,d} events  in all")
