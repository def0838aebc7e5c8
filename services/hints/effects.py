"""What the hint planner wants done."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.hint import HintCommand


@dataclass(frozen=True, slots=True)
class SendHint:
    """Publish the command on its worker's subject."""

    command: HintCommand


Effect = SendHint
