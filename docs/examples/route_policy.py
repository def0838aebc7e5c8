"""Keep each tenant on its own workers as long as it can: a route policy in 30 lines.

Start it beside `tidegate up`, with admission's setting `route_policy = "tenant-home"`:

    python docs/examples/route_policy.py
"""

from collections import Counter

from schemas.decision import Candidate, Decision
from schemas.policy import RouteQuestion
from tidegate import Policy

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
    policy.run()
