"""The Grafana board: ``python -m deploy.board`` writes ``deploy/monitoring/tidegate-board.json``; ``--check`` compares.

One table of panels, from which the JSON of Grafana's dashboard model (schema 39, Grafana 10.4 and later) is made.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).resolve().parent / "monitoring" / "tidegate-board.json"
WIDTH, HEIGHT, COLUMNS = 8, 7, 24
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph. ``queries``: PromQL by legend. ``unit``: Grafana's name of it. ``about``: what to read from it."""

    title: str
    unit: str
    about: str
    queries: dict[str, str]


def quantiles(metric: str, *shares: float, by: str = "") -> dict[str, str]:
    """Quantiles of a histogram over the panel's interval, one line each."""
    grouped = f"le, {by}" if by else "le"
    label = f" {{{{{by}}}}}" if by else ""
    return {
        f"p{share * 100:g}{label}": (
            f"histogram_quantile({share}, sum by ({grouped}) (rate({metric}_bucket[$__rate_interval])))"
        )
        for share in shares
    }


def rate(metric: str, by: str, where: str = "") -> dict[str, str]:
    """Per second, one line for each value of ``by``."""
    return {f"{{{{{by}}}}}": f"sum by ({by}) (rate({metric}{where}[$__rate_interval]))"}


ROWS: dict[str, list[Panel]] = {
    "Front door": [
        Panel(
            "Requests by outcome",
            "reqps",
            "Everything accepted ends in one of these, and in one row.",
            rate("tidegate_ingress_requests_total", "outcome"),
        ),
        Panel(
            "Time to first token",
            "s",
            "As clients see it, the time held at the door included.",
            quantiles("tidegate_ingress_ttft_seconds", 0.5, 0.95, 0.99),
        ),
        Panel(
            "Whole requests", "s", "From accepted to ended.", quantiles("tidegate_ingress_request_seconds", 0.5, 0.95)
        ),
        Panel(
            "In flight",
            "short",
            "Accepted and not ended; with the connections that carry them.",
            {
                "requests": "sum(tidegate_ingress_in_flight)",
                "client connections": "sum(tidegate_ingress_client_connections)",
                "engine connections": "sum(tidegate_ingress_engine_connections)",
            },
        ),
        Panel(
            "Turned away at the door",
            "reqps",
            "Before they were accepted, by reason: no row is written of these.",
            rate("tidegate_ingress_not_accepted_total", "reason"),
        ),
        Panel(
            "Retries",
            "reqps",
            "Asked for again elsewhere before the first byte.",
            {"retries": "sum(rate(tidegate_ingress_retries_total[$__rate_interval]))"},
        ),
    ],
    "Decisions": [
        Panel(
            "Placed, by mode",
            "reqps",
            "fallback means that admission did not answer.",
            rate("tidegate_ingress_decision_seconds_count", "mode"),
        ),
        Panel(
            "Time to decide",
            "s",
            "Inside admission, and as the front door sees it over the bus.",
            {
                "admission p99": next(iter(quantiles("tidegate_decision_seconds", 0.99).values())),
                **{
                    f"door {name}": query
                    for name, query in quantiles("tidegate_ingress_decision_seconds", 0.5, 0.99).items()
                },
            },
        ),
        Panel(
            "Held at the door",
            "short",
            "Turns that wait for room, and the grants that they wait for.",
            {
                "held": 'sum(tidegate_queue_depth{queue="admission_hold"})',
                "open grants": "sum(tidegate_open_grants)",
            },
        ),
        Panel("Time held", "s", "Of turns that were granted.", quantiles("tidegate_admission_wait_seconds", 0.5, 0.95)),
        Panel("Refused by admission", "reqps", "By reason.", rate("tidegate_admission_refused_total", "reason")),
        Panel(
            "Leaders",
            "short",
            "One of admission and one of the hint planner; two for longer than a moment is a fault.",
            {"{{service}}": "sum by (service) (tidegate_leader)"},
        ),
    ],
    "Caches": [
        Panel(
            "Cached tokens",
            "short",
            "What decisions counted on, and what engines reported.",
            {
                "predicted": "sum(rate(tidegate_admission_index_predicted_cached_tokens_total[$__rate_interval]))",
                "reported": "sum(rate(tidegate_admission_index_reported_cached_tokens_total[$__rate_interval]))",
            },
        ),
        Panel(
            "Knowledge of each engine",
            "short",
            "synced is exact; anything else is a guess or nothing.",
            {"{{state}}": "sum by (state) (tidegate_admission_index_state)"},
        ),
        Panel(
            "Gaps and alarms",
            "short",
            "Batches that were missed, and engines that report other than predicted.",
            {
                "gaps": "sum(rate(tidegate_kv_gaps_total[$__rate_interval]))",
                "parity alarms": "sum(increase(tidegate_parity_alarms_total[$__rate_interval]))",
            },
        ),
        Panel(
            "Blocks known",
            "short",
            "Resident blocks by worker.",
            {"{{worker}}": "max by (worker) (tidegate_admission_index_blocks)"},
        ),
        Panel(
            "Hints by outcome",
            "short",
            "What engines made of what they were told.",
            rate("tidegate_hint_results_total", "outcome"),
        ),
        Panel(
            "Pinned tokens",
            "short",
            "That the planner has asked engines to keep.",
            {"{{worker}}": "sum by (worker) (tidegate_pinned_tokens)"},
        ),
    ],
    "Workers and sessions": [
        Panel(
            "Health of workers",
            "short",
            "How many are in each.",
            {"{{health}}": "sum by (health) (tidegate_worker_health)"},
        ),
        Panel("Sessions", "short", "By state.", {"{{state}}": "sum by (state) (tidegate_sessions)"}),
        Panel(
            "Lost",
            "short",
            "Workers and requests that went without a word.",
            {
                "workers": "sum(increase(tidegate_workers_lost_total[$__rate_interval]))",
                "requests": "sum(increase(tidegate_requests_lost_total[$__rate_interval]))",
            },
        ),
    ],
    "Rows": [
        Panel("Written", "short", "Rows a second, by sink.", rate("tidegate_recorder_rows_total", "sink")),
        Panel(
            "Waiting",
            "short",
            "Rows on the way to the stream, and from it to a sink.",
            {
                "to the stream": "sum(tidegate_trace_rows_waiting)",
                "to {{sink}}": "sum by (sink) (tidegate_recorder_rows_waiting)",
            },
        ),
        Panel(
            "Lost or dropped",
            "short",
            "Must be nothing.",
            {
                "lost, {{sink}}": "sum by (sink) (increase(tidegate_recorder_rows_lost_total[$__rate_interval]))",
                "dropped before the stream": "sum(increase(tidegate_trace_rows_dropped_total[$__rate_interval]))",
                "dropped, {{sink}}": "sum by (sink) (increase(tidegate_recorder_rows_dropped_total[$__rate_interval]))",
            },
        ),
    ],
    "Processes": [
        Panel(
            "On the bus",
            "short",
            "Processes that are connected.",
            {"{{service}}": "sum by (service) (tidegate_bus_connected)"},
        ),
        Panel(
            "Messages lost to slow readers",
            "short",
            "Dropped by a subscription's bound; and facts that never came.",
            {
                "dropped": "sum(increase(tidegate_bus_dropped_total[$__rate_interval]))",
                "missed facts": "sum(increase(tidegate_facts_missed_total[$__rate_interval]))",
            },
        ),
        Panel(
            "Loop lag",
            "s",
            "How late an event loop is: above 0.1 s everything it does is late.",
            {"{{service}}": "max by (service) (tidegate_loop_lag_seconds)"},
        ),
    ],
}


def panels() -> Iterator[dict[str, Any]]:
    """Rows and panels with their places, in order."""
    number, top = 0, 0
    for title, graphs in ROWS.items():
        number += 1
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        top += 1
        for index, graph in enumerate(graphs):
            number += 1
            row, column = divmod(index, COLUMNS // WIDTH)
            yield _graph(graph, number, {"x": column * WIDTH, "y": top + row * HEIGHT, "w": WIDTH, "h": HEIGHT})
        top += HEIGHT * -(-len(graphs) // (COLUMNS // WIDTH))


def _graph(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": _SOURCE,
                "expr": query,
                "legendFormat": legend,
                "range": True,
            }
            for index, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def board() -> dict[str, Any]:
    """The whole board."""
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    return {
        "uid": "tidegate",
        "title": "Tidegate",
        "description": "Front door, decisions, caches, workers, rows. Generated: python -m deploy.board",
        "tags": ["tidegate"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": [source]},
        "links": [],
        "panels": list(panels()),
    }


def text() -> str:
    """The file."""
    return json.dumps(board(), indent=2) + "\n"


def main(arguments: list[str]) -> int:
    """0; 1 when ``--check`` finds the file out of date."""
    if "--check" in arguments:
        return 0 if FILE.exists() and FILE.read_text() == text() else 1
    FILE.write_text(text())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
