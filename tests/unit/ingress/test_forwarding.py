"""What reaches an engine of a client's headers: spoofed names in every spelling, credentials, and what steers."""

from __future__ import annotations

from itertools import product

import pytest

from services.ingress.shell.forwarding import ForwardList, is_internal

SPELLINGS = (
    str.lower,
    str.upper,
    str.title,
    lambda name: name.replace("-", "_"),
    lambda name: name.replace("-", "_", 1),
)
INTERNAL = (
    "x-tidegate-worker",
    "x-tidegate-tenant",
    "x-tidegate-session-id",
    "x-tidegate-priority",
    "x-dynamo-worker-instance-id",
    "x-dynamo-request-priority",
    "x-data-parallel-rank",
    "x-dp-rank",
)
STEERING = ("x-vllm-priority", "x-tenant-id", "x-override-priority", "x-override-rid", "x-smg-routing-key")
CREDENTIALS = ("authorization", "x-api-key", "api-key")


def names_sent(forwarding: ForwardList, *names: str) -> list[str]:
    """Of headers that came twice each, those that an engine gets."""
    headers = [(name.encode(), value) for name in names for value in (b"http://169.254.169.254/", b"2")]
    sent = forwarding.upstream(headers, "ours")
    assert sent[0] == (b"x-request-id", b"ours")
    return [name.decode().lower().replace("_", "-") for name, _ in sent[1:]]


@pytest.mark.parametrize("extra", [(), ("*",), ("x-*", "x_*"), INTERNAL])
def test_internal_names_pass_in_no_spelling_and_under_no_setting(extra: tuple[str, ...]) -> None:
    """F1: not even where the settings ask for everything, or name them."""
    spelled = [spell(name) for name, spell in product((*INTERNAL, "x-request-id"), SPELLINGS)]
    assert all(is_internal(name.encode()) or "request" in name.lower() for name in spelled)
    sent = names_sent(ForwardList(extra), *spelled)
    assert sent == []


def test_what_steers_an_engine_passes_only_when_named_in_full() -> None:
    """A pattern never stands for a priority, a tenant or a router's key; an operator who names one means it."""
    spelled = [spell(name) for name, spell in product(STEERING, SPELLINGS)]
    assert names_sent(ForwardList(("*",)), *spelled) == []
    assert set(names_sent(ForwardList(("x-vllm-priority",)), *spelled)) == {"x-vllm-priority"}


def test_whose_credentials_reach_an_engine() -> None:
    """Clients' own, where the front door asks for none; nobody's where it does, but for those that are named in full;
    the engine's own key in place of all."""
    assert set(names_sent(ForwardList(), *CREDENTIALS)) == set(CREDENTIALS)
    assert names_sent(ForwardList(("*",), keep_credentials=True), *CREDENTIALS, "x_api_key", "API_KEY") == []
    named = ForwardList(("Authorization",), keep_credentials=True)
    assert set(names_sent(named, *CREDENTIALS)) == {"authorization"}
    own = ForwardList(CREDENTIALS, engine_api_key="k").upstream([(b"authorization", b"theirs")], "id")
    assert own == [(b"x-request-id", b"id"), (b"authorization", b"Bearer k")]
