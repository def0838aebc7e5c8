"""What clients say of their requests (urgency, expected answers), as admission takes it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.admit import Granted
from schemas.policy import AdmitQuestion
from services.admission.consulting import NO_VERDICT
from services.admission.effects import Effect
from services.admission.scheduled_facts import MOST_WISHED_S, wished
from services.admission.user_policies import UserPolicy
from tests.unit.admission.build import Driven, accepted, ask, driven, granted, held, policy_questions, replies
from tests.unit.admission.test_scheduled import commit_of, committing, done


def asking(core: Driven, name: str, tokens: int, **said: Any) -> list[Effect]:
    """A first turn of a session of the same name."""
    core.accept(accepted(name, name))
    return core.ask(msgspec.structs.replace(ask(name, name, tokens=tokens), **said))


@pytest.mark.parametrize(
    ("said", "room"),
    [
        ({}, 100),
        ({"expected_output_tokens": 700}, 700),
        ({"expected_output_tokens": 40}, 40),
        ({"expected_output_tokens": 700, "max_output_tokens": 300}, 300),
        ({"expected_output_tokens": -5}, 100),
        ({"max_output_tokens": 60}, 60),
    ],
)
def test_room_for_the_answer_is_what_the_client_expects(said: dict[str, int], room: int) -> None:
    """Where it says so, within what it allows; else what the policy knows (here 100 tokens)."""
    core = committing()
    granted(asking(core, "s", 1_000, **said))
    (seat,) = commit_of(core).book.seats.values()
    assert seat.load == 1_000 + room


@pytest.mark.parametrize(("step_s", "first"), [(0.0, "patient"), (10.0, "urgent")])
def test_priorities_order_only_where_the_operator_says_what_a_step_is_worth(step_s: float, first: str) -> None:
    """Two new sessions wait for the same room; the later one says that it is urgent."""
    core = committing(client_priority_s=step_s)
    granted(asking(core, "runs", 15_000))
    assert held(asking(core, "patient", 15_000))
    core.wait(1.0)
    assert held(asking(core, "urgent", 15_000, priority=-2))
    effects = done(core, "runs", "runs", 15_000, tool=None)
    for _ in range(100):
        if replies(effects, Granted):
            break
        effects = core.wait(1.0)
    assert granted(effects).request_id == first


def test_users_policies_are_told() -> None:
    """Both, with what the client allows."""
    core = driven(policies=(UserPolicy(name="gate", asks=("admit",)),))
    core.workers("a")
    effects = asking(core, "s", 64, priority=-3, expected_output_tokens=90, max_output_tokens=256)
    (asked,) = policy_questions(effects)
    assert isinstance(asked.question, AdmitQuestion)
    said = asked.question
    assert (said.priority, said.expected_output_tokens, said.max_output_tokens) == (-3, 90, 256)


def test_a_wish_has_a_bound() -> None:
    """No number moves a turn by more than an hour, and none of zero moves anything."""
    assert wished(NO_VERDICT, -(1 << 53), 1.0).order_bias_s == -MOST_WISHED_S
    assert wished(NO_VERDICT, 1 << 53, 1e300).order_bias_s == MOST_WISHED_S
    assert wished(NO_VERDICT, 0, 1.0) is NO_VERDICT
    assert wished(NO_VERDICT, 5, 0.0) is NO_VERDICT
