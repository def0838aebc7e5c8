"""SGLang: what a server offers today, by asking it (spec engine-events §5, scheduling §5.2).

``/hicache/pin_prefix`` pins a prefix in the host tier for a time; only the releases between its two pull requests have
it (18941, 21884), and it wants the prefix as token ids, which only senders of their own put into the target
(``token_ids``). ``kv_hints`` on ``/generate`` is transport of a request and cannot be sent alone. Pages come up from
HiCache's storage when a request is queued; no endpoint asks for it before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from schemas.base import UNDECODABLE
from services.bridge.adapters.actions import Asked, Call, CallAnswer, Done, EngineFacts, Lowered, failed
from services.bridge.adapters.vllm import NO_INTERFACE, by_request

PIN_PREFIX = "/hicache/pin_prefix"
MAX_TOKENS = 1 << 20

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Target(msgspec.Struct):
    token_ids: Annotated[list[_Token], msgspec.Meta(max_length=MAX_TOKENS)] | None = None


class _Payload(msgspec.Struct):
    target: _Target


class _Answer(msgspec.Struct):
    message: str = ""


_payload = msgspec.json.Decoder(_Payload)
_answer = msgspec.json.Decoder(_Answer)

REASONS = {
    "pin": "no_pin_prefix",
    "retain": "request_priority_only",
    "prefetch": "storage_prefetch_by_request_only",
}
"""Why an action that has no endpoint cannot be done; any other: no interface at all."""


def lower(asked: Sequence[Asked], facts: EngineFacts) -> Lowered:
    """Pins by call where the server has the endpoint and the target its tokens; the rest is known at once."""
    lowered = Lowered()
    for each in asked:
        done = by_request(each, facts.by_request)
        if done is None and each.action_type == "pin" and each.read is not None and facts.has_pin_prefix:
            call = _pin(each)
            if call is not None:
                lowered.calls.append(call)
                continue
            done = Done("unsupported", "tokens_unknown")
        lowered.done[each.place] = done or _never(each)
    return lowered


def _never(asked: Asked) -> Done:
    if asked.read is None:
        return Done("unsupported", "action_type")
    reason = REASONS.get(asked.action_type)
    return Done("unsupported", reason) if reason is not None else NO_INTERFACE


def _pin(asked: Asked) -> Call | None:
    """``None``: the target does not say its tokens, or the pin has no time."""
    assert asked.read is not None
    try:
        tokens = _payload.decode(asked.payload).target.token_ids
    except UNDECODABLE:
        return None
    if not tokens or not asked.read.ttl_ms:
        return None
    body = {"token_ids": tokens, "ttl_seconds": math.ceil(asked.read.ttl_ms / 1000)}
    return Call(PIN_PREFIX, msgspec.json.encode(body), (asked,), _read)


def _read(call: Call, answer: CallAnswer) -> Mapping[int, Done]:
    """200: pinned, or in part where its message speaks of the budget. It says 400 where pinning is off."""
    broken = failed(call, answer)
    if broken is not None:
        return broken
    try:
        message = _answer.decode(answer.body).message
    except UNDECODABLE:
        message = ""
    partly = "budget" in message.lower()
    done = Done("clipped", "pin_budget") if partly else Done("accepted", "host_tier")
    return {call.asked[0].place: done}
