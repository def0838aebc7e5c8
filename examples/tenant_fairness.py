"""Hold a tenant that has more than its share of what runs, while others wait: an admit policy.

    [[admission.policies]]
    name = "tenant-fairness"
    asks = ["admit"]

The share is what runs, divided by the tenants that run or wait: never all of them have more, so that somebody always
goes. Whose a request is says the front door that it came through (``[ingress] tenant``).

Run it beside the system: ``python examples/tenant_fairness.py`` (``--nats URL``, or ``TIDEGATE_NATS_URL``).
"""

from tidegate import AdmitAnswer, AdmitQuestion, Policy

policy = Policy("tenant-fairness")


@policy.admit
def admit(question: AdmitQuestion) -> AdmitAnswer | None:
    others_wait = question.waiting > question.tenant_waiting
    if others_wait and question.tenant_open_grants * question.tenants > question.open_grants:
        return AdmitAnswer(action="hold", hold_ms=250, reason="its tenant runs more than its share")
    return None


if __name__ == "__main__":
    policy.main()
