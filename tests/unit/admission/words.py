"""The facts of sessions as words: what may follow what, however things happen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from schemas.session import SessionFact, SessionKey
from services.admission.effects import Effect
from tests.unit.admission.build import facts


@dataclass
class SessionWords:
    """``opened (acting | leased | ... | paused resumed)* closed`` for each session; a process that has heard of nothing
    may open again what another leader had opened (``opened`` holds the epoch), and with it ends a pause."""

    opened: dict[SessionKey, int] = field(default_factory=dict)
    acted: set[SessionKey] = field(default_factory=set)
    paused: dict[SessionKey, SessionFact] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    """Reasons for which pauses ended, in order."""

    def hear(self, effects: Sequence[Effect]) -> None:
        for fact in facts(effects, SessionFact):
            self._hear(fact, fact.session)

    def _hear(self, fact: SessionFact, key: SessionKey) -> None:
        if fact.state == "opened":
            assert self.opened.get(key, -1) < fact.epoch, "opened twice"
            self.opened[key] = fact.epoch
            self.acted.discard(key)
            if self.paused.pop(key, None) is not None:
                self.ended.append("opened")
            return
        assert key in self.opened, f"{fact.state} of a session that nobody opened"
        match fact.state:
            case "acting":
                assert key not in self.paused, "acts while it is paused"
                self.acted.add(key)
            case "paused":
                assert key in self.acted, "paused before its first turn was over"
                assert key not in self.paused, "paused twice"
                assert fact.worker is not None
                self.paused[key] = fact
            case "resumed":
                assert self.paused.pop(key, None) is not None, "resumed, and was not paused"
                assert fact.reason
                self.ended.append(fact.reason)
            case "closed":
                del self.opened[key]
                self.acted.discard(key)
                if self.paused.pop(key, None) is not None:
                    self.ended.append("closed")
