"""The JSON of docs/custom-policies.md is what travels, and its Python is a policy."""

from __future__ import annotations

import os
import re
from pathlib import Path

import msgspec
import pytest

from schemas.policy import ANSWERS, POLICY_ASKS, QUESTIONS
from services.admission.consulting import HOLD_MS, LEASE_TTL_S, MIN_HOLD_MS
from services.admission.user_policies import UserPolicy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "custom-policies.md").read_text()
KINDS = {kind.__name__: kind for kind in (*QUESTIONS.values(), *ANSWERS.values())}
BLOCKS = re.findall(r"```json (\w+)\n(.*?)```", PAGE, re.DOTALL)


def test_every_question_and_answer_is_shown_once() -> None:
    assert sorted(name for name, _ in BLOCKS) == sorted(KINDS)
    assert all(f"`tg.v1.policy.{ask}.<name>`" in PAGE for ask in POLICY_ASKS)


@pytest.mark.parametrize(("name", "text"), BLOCKS, ids=[name for name, _ in BLOCKS])
def test_what_is_shown_travels(name: str, text: str) -> None:
    """It reads as its message and says nothing that is not in it."""
    kind = KINDS[name]
    shown = msgspec.json.decode(text)
    assert isinstance(msgspec.json.decode(text, type=kind), kind)
    assert set(shown) <= {field.name for field in msgspec.structs.fields(kind)}
    if name.endswith("Question"):
        left_out = {field.name for field in msgspec.structs.fields(kind)} - set(shown)
        assert left_out == set(), "a question is shown whole"


def test_the_numbers_are_those_of_the_source() -> None:
    assert f"({MIN_HOLD_MS} to 30,000; {HOLD_MS} where it is missing)" in PAGE
    assert f"({LEASE_TTL_S:.0f} s where it is missing)" in PAGE
    defaults = UserPolicy(name="x")
    assert f'default "{defaults.weight}"' in PAGE
    assert f"default {defaults.deadline_ms}" in PAGE


def test_the_policy_of_the_tutorial_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    """It compiles, and answers what it is asked."""
    (text,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {"__name__": "night_shift"}
    exec(compile(text, os.devnull, "exec"), names)
    assert names["policy"].asks == ("admit",)  # type: ignore[attr-defined]
