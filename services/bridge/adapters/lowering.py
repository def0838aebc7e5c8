"""Which adapter an engine gets, and what every outcome goes through."""

from __future__ import annotations

from collections.abc import Sequence

from services.bridge.adapters import mooncake, sglang, simulated, vllm
from services.bridge.adapters.actions import Asked, Done, EngineFacts, Lowered


def lower(asked: Sequence[Asked], facts: EngineFacts, message_id: str, rank: int) -> Lowered:
    """Each action is in ``done`` or in exactly one call. An engine that says that it takes envelopes gets them,
    whatever it is."""
    if facts.page is not None:
        return simulated.lower(asked, facts, message_id, rank)
    lowered = sglang.lower(asked, facts) if facts.kind == "sglang" else vllm.lower(asked, facts)
    if facts.pool:
        for each in asked:
            done = lowered.done.get(each.place)
            if done is not None and done.outcome == "unsupported":
                lowered.done[each.place] = mooncake.lower(each) or done
    return lowered


def clipped(asked: Asked, done: Done) -> Done:
    """What the judge took off an action is told, unless the engine has something worse to tell."""
    return Done("clipped", asked.clipped) if asked.clipped is not None and done.outcome == "accepted" else done
