"""What admission measures, as Prometheus families read from the core when somebody asks for the page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.facts import GapCounter
from bus.metric_families import gauge, total, totals
from schemas.decision import Decision
from services.admission.core import Core
from services.admission.scheduled import Scheduled

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class AdmissionMetrics(Collector):
    """Counters and tables of one core. Never labelled by session or request. ``unanswered``: asks that a standby had
    no room to remember."""

    def __init__(self, core: Core, gaps: GapCounter, unanswered: Callable[[], int] = lambda: 0) -> None:
        self._core = core
        self._gaps = gaps
        self._unanswered = unanswered
        self.bad_messages: Counter[str] = Counter()
        self.publish_failed: Counter[str] = Counter()
        self.decision_rows_dropped = 0
        self._wait = Histogram(
            "tidegate_admission_wait_seconds",
            "From a turn's ask to its grant, holds included.",
            buckets=SECONDS,
            registry=None,
        )
        self._decision = Histogram(
            "tidegate_decision_seconds",
            "From the beginning of a decision to its grant: index, users' policies, placement.",
            buckets=SECONDS,
            registry=None,
        )
        self.policy_answers = Histogram(
            "tidegate_policy_answer_seconds",
            "From a question to a user's policy to its answer.",
            ["policy", "ask"],
            buckets=SECONDS,
            registry=None,
        )

    def granted(self, decision: Decision) -> None:
        """One grant was given."""
        decide_s = decision.decide_us / 1e6
        self._decision.observe(decide_s)
        self._wait.observe(decision.hold_ms / 1000 + decide_s)

    def collect(self) -> Iterable[Metric]:
        yield from self._wait.collect()
        yield from self._decision.collect()
        yield from self.policy_answers.collect()
        yield from self._tables()
        yield from self._totals()

    def _tables(self) -> Iterable[Metric]:
        state, deciding = self._core.state, self._core.deciding
        yield gauge("leader", "1 while this process is the admission leader.", float(self._core.leading))
        depth = GaugeMetricFamily("tidegate_queue_depth", "Entries that wait, by queue.", labels=["queue"])
        depth.add_metric(["admission_hold"], deciding.held)
        depth.add_metric(["admission_questions"], deciding.open_questions)
        depth.add_metric(["policy_questions"], deciding.users.consulting.open_questions)
        yield depth
        grants = GaugeMetricFamily("tidegate_open_grants", "Turns admitted and not ended.", labels=["worker", "rank"])
        for (worker, rank), account in state.ledger.accounts():
            grants.add_metric([worker, str(rank)], account.requests)
        yield grants
        sessions = GaugeMetricFamily("tidegate_sessions", "Sessions known, by state.", labels=["state"])
        for name, count in state.sessions.states().items():
            sessions.add_metric([name], count)
        yield sessions
        yield gauge("workers", "Workers heard of.", len(state.fleet))
        yield gauge("ingresses", "Ingresses heard of.", state.requests.ingresses)
        yield gauge("requests_open", "Requests accepted and not ended.", len(state.requests))

    def _totals(self) -> Iterable[Metric]:
        counters = self._core.state.counters
        yield total("admission_asks", "Asks, without repeated ones.", counters.asks)
        yield total("admission_asks_forgotten", "Asks that a standby had no room to remember.", self._unanswered())
        yield total("admission_asks_again", "Repeated asks.", counters.asks_again)
        yield total("resent_turns", "Turns sent again, as the last had not come through.", counters.resends)
        yield total(
            "predicted_cached_tokens", "Prompt tokens predicted to be cached.", counters.predicted_cached_tokens
        )
        yield total(
            "predicted_shared_tokens",
            "Prompt tokens predicted to be found in the chosen worker's shared pool beyond its own tiers.",
            counters.predicted_shared_tokens,
        )
        yield total("admitted_input_tokens", "Prompt tokens of granted turns.", counters.input_tokens)
        yield total("admission_workers_refused", "Facts of workers beyond the bound.", self._core.state.fleet.refused)
        yield total(
            "admission_requests_refused", "Requests beyond the bound on known ones.", self._core.state.requests.refused
        )
        yield total("requests_vanished", "Requests that no fact named any more.", counters.vanished)
        yield totals("grants", "Grants.", "mode", counters.grants)
        yield totals("sticky_placements", "Turns by what became of the previous worker.", "outcome", counters.sticky)
        yield totals("grants_released", "Grants released.", "reason", counters.released)
        yield totals("admission_refused", "Asks refused.", "reason", counters.refused)
        yield totals("admission_cancelled", "Asks cancelled.", "reason", counters.cancels)
        yield totals("hedges", "Second sendings of slow requests: granted, or why not.", "outcome", counters.hedges)
        yield totals("held_replies", "Held replies sent.", "reason", counters.held)
        yield totals("index_questions", "Questions to the index.", "outcome", counters.index)
        yield _policy_questions(counters.policies)
        yield totals("requests_lost", "Requests ended for their lost ingress.", "reason", counters.lost)
        yield totals("workers_lost", "Workers lost.", "reason", counters.workers_lost)
        yield totals("session_transitions", "Transitions of sessions.", "state", counters.sessions)
        if self._core.state.scheduled is not None:
            yield from _of_policies(self._core.state.scheduled)
        yield totals("facts_missed", "Facts lost on the way, by family.", "family", self._gaps.missed)
        yield totals("admission_bad_messages", "Messages that could not be read.", "kind", self.bad_messages)
        yield total(
            "decision_rows_dropped",
            "Rows of decisions that were not sent: the bus was away.",
            self.decision_rows_dropped,
        )
        yield totals("admission_publish_failed", "Messages that could not be sent.", "reason", self.publish_failed)


def _of_policies(scheduled: Scheduled) -> Iterable[Metric]:
    """What only scheduling policies have."""
    yield totals("policy_ignored", "What a scheduling policy wanted and cannot have.", "what", scheduled.ignored)
    yield totals("policy_failed", "Calls of a scheduling policy that raised.", "call", scheduled.failed)
    refused = scheduled.remembered.refused
    yield totals("learned_state_refused", "Stored values of what was learned that are of no use.", "reason", refused)
    refused = scheduled.costs.refused
    yield totals("calibrations_refused", "Stored calibrations that are of no use.", "reason", refused)
    costs = GaugeMetricFamily(
        "tidegate_reload_seconds", "Seconds to compute 10,000 lost tokens anew.", labels=["pool", "source"]
    )
    learned = GaugeMetricFamily("tidegate_learned_samples", "Samples since the start, by pool.", labels=["pool"])
    predicted = GaugeMetricFamily(
        "tidegate_predicted_context_tokens", "Context that a new program is predicted to end with.", labels=["pool"]
    )
    leases = GaugeMetricFamily("tidegate_leases", "Idle programs whose KV is kept, by pool.", labels=["pool"])
    foreign = GaugeMetricFamily(
        "tidegate_foreign_kv_tokens", "KV in use that is not ours, as policies were told.", labels=["worker", "rank"]
    )
    figures = GaugeMetricFamily(
        "tidegate_policy_figure", "What a scheduling policy goes by, by name.", labels=["worker", "rank", "name"]
    )
    for name, pool in scheduled.pools.items():
        source = "default" if pool.curve is None else "calibration"
        costs.add_metric([name, source], pool.learned.reload_cost.seconds(10_000))
        learned.add_metric([name], pool.learned.samples)
        final = pool.learned.pooled.context.mean_residual(0.0)
        if final is not None:
            predicted.add_metric([name], final)
        leases.add_metric([name], len(pool.leases))
        for (worker, rank), facts in pool.sizes.items():
            foreign.add_metric([worker, str(rank)], facts.foreign_tokens)
        for (worker, rank), seat in pool.seats.items():
            for what, value in scheduled.figures(pool, seat).items():
                figures.add_metric([worker, str(rank), what], value)
    yield from (costs, learned, predicted, leases, foreign, figures)


def _policy_questions(counts: Mapping[tuple[str, str, str], int]) -> Metric:
    family = CounterMetricFamily(
        "tidegate_policy_questions",
        "Questions to users' policies, by what became of them.",
        labels=["policy", "ask", "outcome"],
    )
    for labels, value in counts.items():
        family.add_metric(labels, value)
    return family
