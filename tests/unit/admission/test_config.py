"""Rules between the keys of the admission settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bus.errors import SettingsError
from bus.settings import load_settings
from services.admission.config import AdmissionSettings
from services.admission.user_policies import UserPolicy


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"index_deadline_ms": 1500}, "index_deadline_ms"),
        ({"index_deadline_ms": 900, "policies": (UserPolicy(name="mine", deadline_ms=200),)}, "index_deadline_ms"),
        ({"policies": (UserPolicy(name="mine"), UserPolicy(name="mine"))}, "mine is there twice"),
        ({"policy": "kv", "policies": (UserPolicy(name="mine", asks=("lease",)),)}, "leases nothing"),
        ({"policy_questions": 0}, "policy_questions"),
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


def test_a_policy_that_nobody_waits_for_costs_no_time() -> None:
    """Leases are asked about beside everything else: their deadline does not add to the index's."""
    lease = UserPolicy(name="mine", asks=("lease",), deadline_ms=500)
    assert AdmissionSettings(policy="commit", index_deadline_ms=1000, policies=(lease,)).policies == (lease,)


def test_policies_are_a_list_of_tables_or_json(tmp_path: Path) -> None:
    """The same in the file, in the environment and in --set; a mistake names its key."""
    file = tmp_path / "tidegate.toml"
    file.write_text('[[admission.policies]]\nname = "a"\nasks = ["route", "admit"]\nweight = 1\n')
    text = '[{"name": "a", "asks": ["route", "admit"], "weight": 1}]'
    wanted = (UserPolicy(name="a", asks=("route", "admit"), weight=1.0),)
    for given in (
        {"file": file, "environ": {}},
        {"environ": {"TIDEGATE_ADMISSION_POLICIES": text}},
        {"environ": {}, "overrides": {"policies": text}},
    ):
        settings = load_settings("admission", AdmissionSettings, **given)
        assert settings.policies == wanted
    for wrong, said in (
        ('[{"name": "a", "asks": ["hint"]}]', "policies: [0].asks[0]: must be one of route, admit, lease"),
        ('[{"name": "a", "weight": "much"}]', "policies: [0].weight: must be a number, or decides"),
        ('[{"name": "a", "ask": ["route"]}]', "policies: [0]: has no key 'ask' (there are name, asks, order"),
        (
            '[{"name": "a", "weight": -1}]',
            'policies: [0]: a: weight must be "decides" or a number above 0, at most 1000000',
        ),
        ('[{"name": "a", "deadline_ms": 2000}]', "policies: [0]: a: deadline_ms must be from 1 to 1000"),
        ('[{"asks": ["route"]}]', "policies: [0]: lacks the key 'name'"),
        ('[{"name": "a"}, {"name": "a"}]', "settings: policies: a is there twice"),
    ):
        with pytest.raises(SettingsError) as caught:
            load_settings("admission", AdmissionSettings, environ={}, overrides={"policies": wrong})
        assert str(caught.value).startswith(said)


def test_a_mistake_in_the_replicas_table_names_its_key() -> None:
    """The replica's own rules hold in its table, and the key is named as its user wrote it."""
    settings = load_settings("admission", AdmissionSettings, environ={}, overrides={"replica": '{"hold_limit": 7}'})
    assert (settings.index, settings.replica.hold_limit, settings.replica.max_blocks) == ("own", 7, 8_000_000)
    with pytest.raises(SettingsError) as caught:
        load_settings("admission", AdmissionSettings, environ={}, overrides={"replica": '{"max_blocks": 0}'})
    assert str(caught.value) == "replica.max_blocks: must be positive"
