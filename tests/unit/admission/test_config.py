"""Rules between the keys of the admission settings."""

from __future__ import annotations

from typing import Any

import pytest

from bus.errors import SettingsError
from bus.settings import load_settings
from services.admission.config import AdmissionSettings


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"index_deadline_ms": 1500}, "index_deadline_ms"),
        ({"index_deadline_ms": 900, "route_policy": "mine", "route_policy_deadline_ms": 200}, "index_deadline_ms"),
        ({"hold_keepalive_s": 1.5}, "hold_keepalive_s"),
        ({"lease_s": 1.0}, "lease_s"),
        ({"grant_ttl_s": 5.0}, "grant_ttl_s"),
        ({"max_sessions": 0}, "max_sessions"),
    ],
)
def test_a_setting_that_breaks_a_rule_is_refused_by_name(settings: dict[str, Any], named: str) -> None:
    """While its questions are open an ask hears nothing: they must end before an ingress gives the leader up."""
    with pytest.raises(ValueError, match=named):
        AdmissionSettings(**settings)


def test_a_policy_that_is_not_asked_costs_no_time() -> None:
    """The policy's deadline counts only where there is a policy."""
    assert AdmissionSettings(index_deadline_ms=1000, route_policy_deadline_ms=500).route_policy == ""


def test_a_mistake_in_the_replicas_table_names_its_key() -> None:
    """The replica's own rules hold in its table, and the key is named as its user wrote it."""
    settings = load_settings("admission", AdmissionSettings, environ={}, overrides={"replica": '{"hold_limit": 7}'})
    assert (settings.index, settings.replica.hold_limit, settings.replica.max_blocks) == ("own", 7, 8_000_000)
    with pytest.raises(SettingsError) as caught:
        load_settings("admission", AdmissionSettings, environ={}, overrides={"replica": '{"max_blocks": 0}'})
    assert str(caught.value) == "replica.max_blocks: must be positive"
