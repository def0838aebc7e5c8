"""The pages of several processes as one: every sample of each, with the label ``process`` (one
that has it already keeps its own). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL = "process"


def merged(pages: Mapping[str, str]) -> list[Metric]:
    """``pages``: process to its page in Prometheus's text format. Samples are not added up: Prometheus does that, and
    of a sum one does not see which process is ill."""
    families: dict[str, Metric] = {}
    for process, page in pages.items():
        for family in text_string_to_metric_families(page):
            found = families.get(family.name)
            if found is None:
                found = families[family.name] = Metric(family.name, family.documentation, family.type)
            found.samples += [
                sample._replace(labels={LABEL: process, **sample.labels}, exemplar=None) for sample in family.samples
            ]
    return list(families.values())


class MergedCollector(Collector):
    """`merged` as prometheus_client wants it."""

    def __init__(self, pages: Mapping[str, str]) -> None:
        self._pages = pages

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        return merged(self._pages)
