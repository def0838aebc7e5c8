"""The demo's figures for people: names with units, the promise beside each, and whether it holds. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.demo.figures import LEAST_HIT_RATIO, LEAST_STICKY_RATIO, PREDICTION_TOLERANCE, Figures

NAMES = {
    "requests": "requests",
    "failed": "requests failed",
    "traces": "rows recorded",
    "traces_in_stream": "rows in the stream",
    "sessions": "sessions",
    "input_tokens": "input tokens",
    "cached_tokens_predicted": "cached tokens, predicted",
    "cached_tokens_reported": "cached tokens, reported",
    "hit_ratio": "input tokens from a cache",
    "sticky_ratio": "later turns on their session's worker",
    "decision_ms_p50": "decision time, p50",
    "decision_ms_p99": "decision time, p99",
    "ttft_ms_p50": "time to first token, p50",
    "ttft_ms_p99": "time to first token, p99",
    "decisions": "decisions on the bus",
    "decisions_match_served": "decisions match the engines",
}
"""Field of `Figures` to what people read, in the table's order."""

PROMISES = {
    "requests": "at least 1",
    "failed": "none",
    "traces": "one a request",
    "traces_in_stream": "one a request",
    "cached_tokens_reported": f"within {100 * PREDICTION_TOLERANCE:g} % of predicted",
    "hit_ratio": f"at least {100 * LEAST_HIT_RATIO:g} %",
    "sticky_ratio": f"at least {100 * LEAST_STICKY_RATIO:g} %",
    "decisions": "one a served request",
    "decisions_match_served": "yes",
}


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table. ``holds`` is ``None`` where nothing is promised, or the figure is not known."""

    name: str
    value: str
    promise: str
    holds: bool | None


def lines_of(figures: Figures) -> list[Line]:
    """The whole table."""
    return [_line(figures, field) for field in NAMES]


def _line(figures: Figures, field: str) -> Line:
    value = getattr(figures, field)
    promise = PROMISES.get(field, "")
    holds = field not in figures.broken if promise and value is not None else None
    return Line(NAMES[field], _text(field, value), promise, holds)


def _text(field: str, value: float | bool | None) -> str:
    if value is None:
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if field.endswith("_ratio"):
        return f"{100 * value:.2f} %"
    if "_ms_" in field:
        return f"{value:.3g} ms" if value < 1000 else f"{value:.0f} ms"
    return f"{value:,}"
