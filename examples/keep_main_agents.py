"""Keep main agents' caches before sub-agents': a hint policy.

    [[hints.policies]]
    name = "keep-main-agents"

A sub-agent is asked once and goes; the main agent comes back to its prefix again and again. So what the planner would
retain of a main agent is retained two steps higher, and of sub-agents nothing is pinned. Everything else is left as
the planner wants it.

Run it beside the system: ``python examples/keep_main_agents.py`` (``--nats URL``, or ``TIDEGATE_NATS_URL``).
"""

from msgspec.structs import replace

from schemas.session import SessionFact
from tidegate import HintQuestion, PlannedAction, Policy, SessionKey

policy = Policy("keep-main-agents")

SUB_AGENTS = 100_000
sub_agents: dict[SessionKey, None] = {}
"""The last ones that were opened; the oldest first."""


@policy.on("tg.v1.session.opened.*")
def opened(fact: SessionFact) -> None:
    if fact.parent is not None or fact.session.agent:
        sub_agents[fact.session] = None
    while len(sub_agents) > SUB_AGENTS:
        del sub_agents[next(iter(sub_agents))]


@policy.hint
def hint(question: HintQuestion) -> list[PlannedAction] | None:
    if question.session in sub_agents:
        return [action for action in question.builtin if action.action_type != "pin"]
    if not any(action.action_type == "retain" for action in question.builtin):
        return None  # nothing that we would do otherwise
    return [
        replace(action, priority=(action.priority or 0) + 2) if action.action_type == "retain" else action
        for action in question.builtin
    ]


if __name__ == "__main__":
    policy.main()
