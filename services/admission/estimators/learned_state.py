"""What a pool has learned, to be written down and taken over again; a part that is damaged costs that part alone.

`encode_within` makes the bytes, `decode` and `from_state` take them over (`services.admission.remembered`). Programs
that run are not in it, nor are cost models: those are configured, or calibrated and stored on their own
(`reload_cost.to_state`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, TypeVar

import msgspec

from schemas.base import UNDECODABLE, to_msgpack
from services.admission.estimators.class_key import ClassKey, Role, clean_label
from services.admission.estimators.errors import BadStateError, stored_version
from services.admission.estimators.growth import ContextGrowth, GrowthState, OutputLength, OutputLengthState
from services.admission.estimators.learned_pool import ClassEstimators, LearnedPool
from services.admission.estimators.order_correlation import OrderCorrelation, OrderCorrelationState
from services.admission.estimators.queueing import QueueingDelay, QueueingDelayState
from services.admission.estimators.residual import (
    MIN_COMPLETIONS_CONTEXT,
    MIN_COMPLETIONS_WORK,
    ResidualEstimator,
    ResidualState,
)
from services.admission.estimators.tool_times import ToolTimesState

STATE_VERSION = 1
MAX_STORED_CLASSES = 1 << 12

KEPT_DURATIONS = (None, 1024, 256, 64, 16)
"""The latest durations of each tool that are stored, the first that fits (None: all)."""

S = TypeVar("S", bound=msgspec.Struct)
T = TypeVar("T")


class ClassState(msgspec.Struct, frozen=True, kw_only=True):
    """One class: its labels, and what its estimators wrote."""

    agent_type: str = ""
    role: Role = "main"
    model: str = ""
    work: ResidualState = ResidualState()
    context: ResidualState = ResidualState()
    growth: GrowthState = GrowthState()
    output: OutputLengthState = OutputLengthState()


class LearnedState(msgspec.Struct, frozen=True, kw_only=True):
    """``pool``: its name. ``classes``: the least recently used first. A part that is None was not there, or was
    refused."""

    version: int = STATE_VERSION
    pool: str = ""
    classes: Annotated[tuple[ClassState, ...], msgspec.Meta(max_length=MAX_STORED_CLASSES)] = ()
    pooled: ClassState | None = None
    tools: ToolTimesState | None = None
    order_correlation: OrderCorrelationState | None = None
    queueing_delay: QueueingDelayState | None = None


class _Parts(msgspec.Struct, frozen=True, kw_only=True):
    """The same with every part as the bytes it came in."""

    version: int
    pool: str = ""
    classes: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_STORED_CLASSES)] = ()
    pooled: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    tools: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    order_correlation: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    queueing_delay: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


def encode(state: LearnedState) -> bytes:
    """The state as MessagePack bytes; at its bounds under 2 MiB."""
    return to_msgpack(state)


def decode(payload: bytes) -> tuple[LearnedState, list[BadStateError]]:
    """The state in these bytes, and what of it could not be read. Raises `BadStateError` where nothing could."""
    try:
        parts = msgspec.msgpack.decode(payload, type=_Parts)
    except UNDECODABLE as error:
        raise BadStateError("pool", "undecodable", str(error)) from error
    stored_version("pool", parts.version, STATE_VERSION)
    refused: list[BadStateError] = []

    def part(name: str, raw: msgspec.Raw | msgspec.UnsetType, kind: type[S]) -> S | None:
        if isinstance(raw, msgspec.UnsetType):
            return None
        try:
            return msgspec.msgpack.decode(raw, type=kind | None)
        except UNDECODABLE as error:
            refused.append(BadStateError(name, "undecodable", str(error)))
            return None

    classes = [part("class", raw, ClassState) for raw in parts.classes]
    state = LearnedState(
        pool=parts.pool,
        classes=tuple(found for found in classes if found is not None),
        pooled=part("pooled", parts.pooled, ClassState),
        tools=part("tool times", parts.tools, ToolTimesState),
        order_correlation=part("order correlation", parts.order_correlation, OrderCorrelationState),
        queueing_delay=part("queueing delay", parts.queueing_delay, QueueingDelayState),
    )
    return state, refused


def encode_within(pool: LearnedPool, name: str, most_bytes: int) -> bytes | None:
    """`encode` in at most so many bytes: where the durations of tools need more, the latest of each are kept. None:
    even with few of them there is no room."""
    state = to_state(pool, name)
    for keep in KEPT_DURATIONS:
        payload = encode(state if keep is None or state.tools is None else _shortened(state, state.tools, keep))
        if len(payload) <= most_bytes:
            return payload
    return None


def _shortened(state: LearnedState, tools: ToolTimesState, keep: int) -> LearnedState:
    each = tuple(msgspec.structs.replace(tool, durations=tool.durations[-keep:]) for tool in tools.tools)
    shorter = msgspec.structs.replace(tools, tools=each, pooled=tools.pooled[-keep:])
    return msgspec.structs.replace(state, tools=shorter)


def renewed(pool: LearnedPool) -> LearnedPool:
    """A pool that knows as much, and has no programs: for a new owner."""
    fresh = LearnedPool(work_cost=pool.work_cost, reload_cost=pool.reload_cost)
    from_state(to_state(pool), fresh)
    return fresh


def to_state(pool: LearnedPool, name: str = "") -> LearnedState:
    """What the pool has learned."""
    return LearnedState(
        pool=name,
        classes=tuple(_class_to_state(key, estimators) for key, estimators in pool.classes.items()),
        pooled=_class_to_state(ClassKey("", "main", ""), pool.pooled),
        tools=pool.tools.to_state(),
        order_correlation=pool.order_correlation.to_state(),
        queueing_delay=pool.queueing_delay.to_state(),
    )


def from_state(state: LearnedState, pool: LearnedPool) -> list[BadStateError]:
    """Gives a pool that knows nothing yet what was written. Returns the parts that were refused; they stay as they are.

    Raises `BadStateError` for a version that is not ours.
    """
    stored_version("pool", state.version, STATE_VERSION)
    refused: list[BadStateError] = []

    def taken(part: S | None, make: Callable[[S], T], otherwise: T) -> T:
        if part is None:
            return otherwise
        try:
            return make(part)
        except BadStateError as error:
            refused.append(error)
            return otherwise

    for stored in state.classes:
        estimators = taken(stored, _class_from_state, None)
        if estimators is not None:
            pool.classes.put(
                ClassKey(clean_label(stored.agent_type), stored.role, clean_label(stored.model)), estimators
            )
    pool.pooled = taken(state.pooled, _class_from_state, pool.pooled)
    taken(state.tools, pool.tools.restore, None)
    pool.order_correlation = taken(state.order_correlation, OrderCorrelation.from_state, pool.order_correlation)
    pool.queueing_delay = taken(state.queueing_delay, QueueingDelay.from_state, pool.queueing_delay)
    return refused


def _class_to_state(key: ClassKey, estimators: ClassEstimators) -> ClassState:
    return ClassState(
        agent_type=key.agent_type,
        role=key.role,
        model=key.model,
        work=estimators.work.to_state(),
        context=estimators.context.to_state(),
        growth=estimators.growth.to_state(),
        output=estimators.output.to_state(),
    )


def _class_from_state(state: ClassState) -> ClassEstimators:
    made = ClassEstimators()
    made.work = ResidualEstimator.from_state(state.work, min_completions=MIN_COMPLETIONS_WORK, quantity="work")
    made.context = ResidualEstimator.from_state(
        state.context, min_completions=MIN_COMPLETIONS_CONTEXT, quantity="context"
    )
    made.growth = ContextGrowth.from_state(state.growth)
    made.output = OutputLength.from_state(state.output)
    return made
