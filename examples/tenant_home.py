"""Keep each tenant on its own workers as long as it can: a route policy that learns from the bus.

    [[admission.policies]]
    name = "tenant-home"
    asks = ["route"]

Run it beside the system: ``python examples/tenant_home.py`` (``--nats URL``, or ``TIDEGATE_NATS_URL``).
"""

from collections import Counter

from tidegate import Candidate, Decision, Policy, RouteQuestion

policy = Policy("tenant-home")
turns: Counter[tuple[str, str]] = Counter()


@policy.on("tg.v1.decision.>")
def remember(decision: Decision) -> None:
    turns[decision.identity.key.tenant, decision.worker] += 1


@policy.route
def route(question: RouteQuestion) -> Candidate | None:
    tenant = question.identity.key.tenant
    usable = [one for one in question.candidates if one.excluded is None]
    return max(usable, key=lambda one: (turns[tenant, one.worker], -one.open_grants), default=None)


if __name__ == "__main__":
    policy.main()
