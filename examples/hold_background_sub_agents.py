"""Hold sub-agents that nobody waits for while main agents wait: an admit policy.

    [[admission.policies]]
    name = "hold-background-sub-agents"
    asks = ["admit"]

A harness says that nobody waits for a sub-agent with the header ``x-tidegate-background: true`` on its requests;
``parent_session_id`` says that it is one. Those that run already run on; only the next turn is held.

Run it beside the system: ``python examples/hold_background_sub_agents.py`` (``--nats URL``, or ``TIDEGATE_NATS_URL``).
"""

from tidegate import AdmitAnswer, AdmitQuestion, Policy

policy = Policy("hold-background-sub-agents")


@policy.admit
def admit(question: AdmitQuestion) -> AdmitAnswer | None:
    identity = question.identity
    if identity.background and identity.parent_session_id is not None and question.waiting_main > 0:
        return AdmitAnswer(action="hold", hold_ms=500, reason="main agents wait")
    return None


if __name__ == "__main__":
    policy.main()
