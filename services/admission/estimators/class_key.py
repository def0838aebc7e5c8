"""The class of a program: who else's past tells its future (spec policy §4: agent type, main or sub, model).

Labels come from clients. They may be wrong, missing, endless in number or in length; a class only chooses which
history predicts, so a wrong one costs accuracy and nothing else.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

MAX_LABEL_CHARACTERS = 128
"""What is longer is cut: labels that share so much share a class."""

Role = Literal["main", "sub"]


class ClassKey(NamedTuple):
    """``agent_type``: what the client says it is, empty where it says nothing. ``role``: root agent or sub-agent."""

    agent_type: str
    role: Role
    model: str


def clean_label(label: str | None) -> str:
    """A label that is short enough to keep and can be written down as UTF-8."""
    return (label or "")[:MAX_LABEL_CHARACTERS].encode("utf-8", "replace").decode()


def class_key(*, agent_type: str | None, is_sub_agent: bool, model: str) -> ClassKey:
    """The class of a program, from labels of any kind."""
    return ClassKey(clean_label(agent_type), "sub" if is_sub_agent else "main", clean_label(model))
