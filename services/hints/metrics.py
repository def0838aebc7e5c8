"""What the hints service measures, read from the core when somebody asks for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.facts import GapCounter
from bus.metric_families import totals
from services.hints.core import Core


class HintMetrics(Collector):
    """Counters and tables of one core. Never labelled by session."""

    def __init__(self, core: Core, gaps: GapCounter) -> None:
        self._core = core
        self._gaps = gaps
        self.bad_messages: Counter[str] = Counter()
        self.publish_failed: Counter[str] = Counter()

    def collect(self) -> Iterable[Metric]:
        """See `docs/operations.md` for each family."""
        yield from self._tables()
        yield from self._actions()
        yield from self._policies()
        planner = self._core.planner
        yield totals("sessions_superseded", "Prompts that were rewritten.", "evidence", planner.superseded)
        for name, text, value in (
            ("hint_results_unknown", "Results of no action of ours.", planner.unknown_results),
            ("hint_commands_unreadable", "Actions of another planner that could not be read.", self._core.unreadable),
            ("hint_agenda_dropped", "Things to do later that did not fit.", planner.agenda.dropped),
            ("hint_session_questions", "Questions to an indexer.", planner.questions.asked),
            ("hint_session_questions_unanswered", "Of them, without an answer.", planner.questions.unanswered),
            ("hint_session_questions_skipped", "Questions not put: too many, or a pause.", planner.questions.skipped),
        ):
            yield CounterMetricFamily(f"tidegate_{name}", text, value=value)
        yield totals("facts_missed", "Facts lost on the way, by family.", "family", self._gaps.missed)
        yield totals("hints_bad_messages", "Messages that could not be read.", "kind", self.bad_messages)
        yield totals("hints_publish_failed", "Messages that could not be sent.", "reason", self.publish_failed)

    def _tables(self) -> Iterable[Metric]:
        core, planner = self._core, self._core.planner
        yield GaugeMetricFamily("tidegate_leader", "1 while this process leads.", value=float(core.leading))
        yield GaugeMetricFamily(
            "tidegate_hint_sessions", "Open sessions that are followed.", value=len(planner.sessions)
        )
        depth = GaugeMetricFamily("tidegate_queue_depth", "Entries that wait, by queue.", labels=["queue"])
        for queue, length in (
            ("hints_under_way", len(planner.gate.flights)),
            ("hints_waiting", planner.gate.flights.waiting),
            ("hints_agenda", len(planner.agenda)),
            ("session_questions", len(planner.questions)),
            ("policy_questions", planner.proposals.consulting.open_questions),
        ):
            depth.add_metric([queue], length)
        yield depth
        retained = GaugeMetricFamily("tidegate_retained_sessions", "Sessions retained.", labels=["worker"])
        for worker, count in planner.gate.retained.seats().items():
            retained.add_metric([worker], count)
        yield retained
        pinned = GaugeMetricFamily("tidegate_pinned_tokens", "Tokens of pins that may live.", labels=["worker", "rank"])
        for place, tokens in planner.gate.pins.seats().items():
            pinned.add_metric([place.worker, str(place.rank)], tokens)
        yield pinned

    def _actions(self) -> Iterable[Metric]:
        gate = self._core.planner.gate
        sent = CounterMetricFamily("tidegate_hint_actions", "Hint actions sent.", labels=["action"])
        for action, count in gate.sent.items():
            sent.add_metric([action], count)
        yield sent
        labels = ["action", "outcome", "engine"]
        results = CounterMetricFamily("tidegate_hint_results", "What became of actions.", labels=labels)
        for result, count in gate.outcomes.items():
            results.add_metric(list(result), count)
        yield results
        refused = CounterMetricFamily("tidegate_hints_not_sent", "Actions not sent.", labels=["action", "reason"])
        for why, count in gate.not_sent.items():
            refused.add_metric(list(why), count)
        yield refused

    def _policies(self) -> Iterable[Metric]:
        proposals = self._core.planner.proposals
        asked = CounterMetricFamily(
            "tidegate_policy_questions", "Questions to users' policies.", labels=["policy", "ask", "outcome"]
        )
        for (policy, outcome), count in proposals.consulting.counts.items():
            asked.add_metric([policy, "hint", outcome], count)
        yield asked
        labels = ["policy", "reason"]
        refused = CounterMetricFamily("tidegate_policy_hints_refused", "Their actions not sent.", labels=labels)
        for why, count in self._core.planner.gate.policy_refused.items():
            refused.add_metric(list(why), count)
        yield refused
        intents = CounterMetricFamily(
            "tidegate_policy_hint_intents", "What they said unasked.", labels=["policy", "outcome"]
        )
        for what, count in proposals.intents.items():
            intents.add_metric(list(what), count)
        yield intents
