"""The users of the bus, as text: nothing has drifted from the catalogue, and no secret is in the repository."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bus.permissions import ANSWERED_BY, KV_EVENTS, ROWS, publishers, users
from deploy import permissions
from schemas.catalog import CHANNELS

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"


def test_the_accounts_are_those_of_the_catalogue() -> None:
    """After a change of the catalogue: ``python -m deploy.permissions``."""
    assert CliRunner().invoke(permissions.main, ["--check"]).exit_code == 0


def test_everything_in_the_catalogue_has_somebody() -> None:
    """Who publishes each channel, who answers each question, who writes each kind of row."""
    assert all(publishers(channel) for channel in CHANNELS)
    assert {channel.name for channel in CHANNELS if channel.kind == "question"} == set(ANSWERED_BY)
    trace = next(channel for channel in CHANNELS if channel.name == "trace")
    assert {event for events in ROWS.values() for event in events} == set(trace.values["event_type"])
    assert set(ROWS) == publishers(trace)


def test_only_the_operator_rules_streams_and_a_policy_touches_none() -> None:
    """A consumer can be told to deliver anywhere: whoever may make one may put a stream's messages elsewhere."""
    for user in users(["p"], ["w"]):
        assert ("$JS.API.>" in user.publish) == (user.name == "operator")
        assert not any(subject in (">", "tg.v1.>", "_INBOX.>") for subject in user.publish)
        if user.name == "policy-p":
            assert [subject for subject in user.publish if subject.startswith("$")] == []


def test_a_policy_that_reads_kv_events_is_one_user() -> None:
    """Named both ways, it is the one that may."""
    made = {user.name: user for user in users(["p", "q"], kv_policies=["q", "r"])}
    reading = {name for name, user in made.items() if KV_EVENTS in user.subscribe}
    assert {name for name in made if name.startswith("policy-")} == {"policy-p", "policy-q", "policy-r"}
    assert reading == {"indexer", "admission", "policy-q", "policy-r"}


def test_users_that_would_share_a_password_are_refused() -> None:
    """By name: ``a.b`` and ``a-b`` are one variable of nats-server's."""
    with pytest.raises(ValueError, match="password_policy_a_b"):
        users(["a.b", "a-b"])


def test_passwords_are_made_once_and_only_for_their_owner(tmp_path: Path) -> None:
    """A second run keeps them and adds what is new; the folder is its owner's; nothing of it is in the repository."""
    folder = tmp_path / "secrets"
    runner = CliRunner()
    assert runner.invoke(permissions.main, ["--secrets", str(folder)]).exit_code == 0
    before = (folder / "ingress").read_text()
    again = runner.invoke(permissions.main, ["--secrets", str(folder), "--policy", "fair"])
    assert again.exit_code == 0
    assert "new passwords for policy-fair" in again.output
    assert (folder / "ingress").read_text() == before
    assert before.strip() in (folder / "passwords.conf").read_text()
    assert "policy-fair" in (folder / "nats-accounts.conf").read_text()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert not (DEPLOY / "passwords.conf").exists()
    assert "secrets/" in (DEPLOY.parent / ".gitignore").read_text().splitlines()
    assert runner.invoke(permissions.main, ["--policy", "fair"]).exit_code == 2
