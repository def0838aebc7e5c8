"""Metric families that every service makes alike: a number, or numbers by one label. Names begin with ``tidegate_``."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric


def gauge(name: str, text: str, value: float) -> Metric:
    """One number that goes up and down."""
    return GaugeMetricFamily(f"tidegate_{name}", text, value=value)


def total(name: str, text: str, value: float) -> Metric:
    """One number that only grows."""
    return CounterMetricFamily(f"tidegate_{name}", text, value=value)


def totals(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    """Numbers that only grow, one for each value of ``label``."""
    family = CounterMetricFamily(f"tidegate_{name}", text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
