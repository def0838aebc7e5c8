"""One message of every type, filled as it would be in life; the golden bytes are written from them.

``python -m tests.unit.schemas.samples`` writes the files that are missing and never changes one that exists: a golden
file that no longer fits means that the wire format changed. Remove it by hand if that is what you want.
"""

from __future__ import annotations

from pathlib import Path

from schemas.admit import AdmitCancel, AdmitRequest, Grant, Granted, Held, Refused
from schemas.base import Message, to_json, to_msgpack
from schemas.decision import Candidate, Decision
from schemas.hint import ActionResult, HintAction, HintCommand, HintEnvelope, HintIntent, HintResult
from schemas.index import (
    IndexSource,
    MatchReply,
    MatchRequest,
    RecogniseReply,
    RecogniseRequest,
    SessionQuery,
    SessionResidency,
    TierBlocks,
    WorkerMatch,
)
from schemas.ingress import HedgePlace, InFlight, IngressState
from schemas.kv import KvHeaders, RankMark, SnapshotReply, SnapshotRequest
from schemas.placed import Placed
from schemas.policy import (
    AdmitAnswer,
    AdmitQuestion,
    BuiltinLease,
    HintAnswer,
    HintQuestion,
    LeaseAnswer,
    LeaseQuestion,
    PlannedAction,
    RouteAnswer,
    RouteQuestion,
)
from schemas.pool import PoolReset, PoolSnapshotReply, PoolSnapshotRequest, PoolState
from schemas.request import (
    RequestAccepted,
    RequestDispatched,
    RequestEnd,
    RequestFirstToken,
    RequestProgress,
    Usage,
)
from schemas.session import Lease, SessionFact, SessionIdentity, SessionKey
from schemas.tool import ToolEvent
from schemas.trace import (
    AgentContext,
    ChoiceFinish,
    Compaction,
    FinishMetadata,
    ReplayBlock,
    RequestMetrics,
    ToolCall,
    TracedDecision,
    TracedLoad,
    TracedWorker,
    TraceRow,
    TurnFacts,
)
from schemas.worker import RankLoad, RankStream, WorkerProfile, WorkerState

DIRECTORY = Path(__file__).resolve().parents[2] / "fixtures" / "schemas"
AT_MS = 1_760_000_000_123

KEY = SessionKey(tenant="acme", family="claude_code", root="3f6c", agent="research:1")
PARENT = SessionKey(tenant="acme", family="claude_code", root="3f6c")
IDENTITY = SessionIdentity(
    key=KEY, session_id="research:1", parent_session_id="3f6c", parent=PARENT, final=False, weak=True, turn_id="t1"
)
GRANT = Grant(
    grant_id="g1",
    request_id="r1",
    worker="w1",
    rank=1,
    owner="ingress-1",
    epoch=42,
    expires_ms=AT_MS + 10_000,
)
CANDIDATES = (
    Candidate(
        worker="w1",
        rank=1,
        cost=12.5,
        parts={"prefill": 10.0, "load": 2.5},
        blocks=TierBlocks(device=30, host=4, disk=0, external=2),
        open_grants=3,
        health="synced",
        sticky=True,
    ),
    Candidate(worker="w2", rank=0, health="blind", health_reason="block_size", excluded="starting"),
)

SAMPLES: tuple[Message, ...] = (
    WorkerState(
        source="bridge-1",
        epoch=AT_MS - 5_000,
        seq=5,
        at_ms=AT_MS,
        worker="w1",
        incarnation="1760000000.1",
        health="ready",
        profile=WorkerProfile(
            url="http://10.0.0.1:8000",
            model="qwen",
            models=("qwen", "qwen-lora"),
            engine="vllm",
            engine_version="0.24.0",
            ranks=2,
            block_size=16,
            block_size_from="events",
            kv_tokens=100_000,
            max_model_len=32_768,
            features=("priority",),
        ),
        reason="warm",
        loads=(RankLoad(rank=0, running=3, waiting=1, kv_usage=0.5), RankLoad(rank=1)),
        streams=(RankStream(rank=0, incarnation="1760000000.1", seq=9, gaps=1), RankStream(rank=1, incarnation="x")),
    ),
    IngressState(
        source="ingress-1",
        epoch=AT_MS,
        seq=0,
        at_ms=AT_MS,
        ingress="ingress-1",
        in_flight=(
            InFlight(
                request_id="r1",
                model="qwen",
                identity=IDENTITY,
                received_ms=AT_MS,
                worker="w1",
                rank=1,
                digest="0123456789abcdef",
                hedge=HedgePlace(worker="w2", grant_id="42-h7", grant_epoch=42),
            ),
            InFlight(
                request_id="r2",
                model="qwen",
                identity=IDENTITY,
                received_ms=AT_MS,
                kind="title",
                hold_reason="no_room",
                held_since_ms=AT_MS,
            ),
        ),
        final=True,
        part=1,
        parts=2,
    ),
    SnapshotRequest(indexer="indexer-1"),
    SnapshotReply(
        worker="w1",
        bucket="TG_SNAPSHOTS",
        key="w1",
        size_bytes=1_234,
        digest="0123456789abcdef",
        marks=(RankMark(rank=0, incarnation="1760000000.1", seq=9),),
    ),
    IndexSource(
        source="indexer-1",
        epoch=AT_MS,
        seq=3,
        at_ms=AT_MS,
        worker="w1",
        rank=1,
        health="catching_up",
        reason="gap",
        incarnation="1760000000.1",
        seq_applied=8,
        blocks=500,
    ),
    MatchRequest(model="qwen", block_size=64, chain=bytes(range(16)), unit="text"),
    MatchReply(
        indexer="indexer-1",
        matches=(
            WorkerMatch(worker="w1", rank=0, blocks=TierBlocks(device=2), resident_blocks=70),
            WorkerMatch(
                worker="w2", rank=0, blocks=TierBlocks(device=3), health="approximate", reason="parity", indexed=7
            ),
        ),
        shared=((2, 4),),
    ),
    SessionQuery(session=KEY),
    SessionResidency(
        session=KEY,
        frontier="00f1e2d3c4b5a697",
        depth=40,
        parent=PARENT,
        sessions=(KEY, PARENT),
        resident=(WorkerMatch(worker="w1", rank=0),),
        unit="text",
    ),
    AdmitRequest(
        request_id="r1",
        model="qwen",
        ingress="ingress-1",
        ingress_epoch=AT_MS,
        identity=IDENTITY,
        received_ms=AT_MS,
        deadline_ms=AT_MS + 60_000,
        attempt=1,
        input_tokens=640,
        tokens_from="tokenizer",
        block_size=16,
        chain=bytes(range(24)),
        chain_unit="text",
        max_output_tokens=256,
        expected_output_tokens=90,
        priority=-1,
        excluded=("w3",),
    ),
    AdmitCancel(request_id="r1", ingress="ingress-1", reason="hedge_lost", hedge=True),
    Held(request_id="r1", epoch=42, reason="full", place=3),
    Granted(
        request_id="r1",
        epoch=42,
        grant=GRANT,
        url="http://10.0.0.1:8000",
        predicted_cached_tokens=480,
        index_health="synced",
        hold_ms=120,
        hold_reason="full",
        priority=0,
    ),
    Refused(request_id="r1", epoch=42, reason="unknown_model", status=404, retry_after_s=2),
    Decision(
        source="admission-1",
        epoch=42,
        seq=7,
        at_ms=AT_MS,
        request_id="r1",
        model="qwen",
        worker="w1",
        rank=1,
        identity=IDENTITY,
        grant=GRANT,
        attempt=1,
        mode="custom",
        policy="mine",
        input_tokens=640,
        block_size=16,
        predicted_cached_tokens=480,
        previous_worker="w2",
        index_health="synced",
        hold_ms=120,
        hold_reason="full",
        decide_us=850,
        candidates=CANDIDATES,
    ),
    Placed(
        source="admission-1",
        epoch=42,
        seq=7,
        at_ms=AT_MS,
        request_id="r1",
        model="qwen",
        worker="w1",
        rank=1,
        session=KEY,
        parent=PARENT,
        mode="custom",
        unit="text",
        block_size=64,
        chain=bytes(range(24)),
        indexed=2,
    ),
    RequestAccepted(
        source="ingress-1",
        epoch=AT_MS,
        seq=1,
        at_ms=AT_MS,
        request_id="r1",
        model="qwen",
        identity=IDENTITY,
        received_ms=AT_MS,
        stream=True,
        x_request_id="client-7",
        digest="0123456789abcdef",
    ),
    RequestDispatched(
        source="ingress-1",
        epoch=AT_MS,
        seq=1,
        at_ms=AT_MS,
        request_id="r1",
        model="qwen",
        worker="w1",
        rank=1,
        attempt=1,
        mode="fallback",
        grant_id="g1",
    ),
    RequestFirstToken(
        source="ingress-1", epoch=AT_MS, seq=1, at_ms=AT_MS, request_id="r1", model="qwen", ttft_ms=81.25
    ),
    RequestProgress(source="ingress-1", epoch=AT_MS, seq=1, at_ms=AT_MS, request_id="r1", model="qwen", chunks=17),
    RequestEnd(
        source="ingress-1",
        epoch=AT_MS,
        seq=1,
        at_ms=AT_MS,
        request_id="r1",
        model="qwen",
        identity=IDENTITY,
        outcome="completed",
        status=200,
        worker="w1",
        rank=1,
        grant_id="g1",
        mode="policy",
        usage=Usage(input_tokens=640, output_tokens=25, cached_tokens=480, reasoning_tokens=0),
        predicted_cached_tokens=480,
        finish_reason="tool_calls",
        tool_names=("bash", "read"),
        total_ms=950.5,
    ),
    SessionFact(
        source="admission-1",
        epoch=42,
        seq=0,
        at_ms=AT_MS,
        session=KEY,
        session_id="research:1",
        state="leased",
        parent=PARENT,
        model="qwen",
        worker="w1",
        rank=1,
        turns=3,
        context_tokens=665,
        reason="tool_gap",
        numbers={"tau_s": 1.5, "benefit": 0.25},
        lease=Lease(owner=KEY.text(), epoch=41, since_ms=AT_MS, expires_ms=AT_MS + 600_000, tokens=665),
    ),
    ToolEvent(
        source="recorder-1",
        epoch=AT_MS,
        seq=0,
        at_ms=AT_MS,
        session=KEY,
        session_id="research:1",
        event="end",
        tool_call_id="call_1",
        tool_class="bash",
        status="succeeded",
        started_at_ms=AT_MS - 1_500,
        ended_at_ms=AT_MS,
        duration_ms=1_500.0,
    ),
    HintCommand(
        source="hints-1",
        epoch=AT_MS,
        seq=0,
        at_ms=AT_MS,
        worker="w1",
        rank=1,
        session=KEY,
        session_id="research:1",
        envelope=HintEnvelope(
            message_id="m1",
            actions=(HintAction(action_id="a1", action_type="retain", payload={"ttl_ms": 1_500, "priority": 1}),),
        ),
    ),
    HintResult(
        source="bridge-1",
        epoch=AT_MS,
        seq=0,
        at_ms=AT_MS,
        worker="w1",
        rank=1,
        session=KEY,
        message_id="m1",
        results=(ActionResult(action_id="a1", action_type="retain", outcome="unsupported", reason="engine"),),
    ),
    RouteQuestion(
        request_id="r1",
        model="qwen",
        identity=IDENTITY,
        candidates=CANDIDATES,
        choice=0,
        deadline_ms=AT_MS + 50,
        input_tokens=640,
        previous_worker="w2",
    ),
    RouteAnswer(worker="w1", rank=1, reason="because"),
    AdmitQuestion(
        request_id="r1",
        model="qwen",
        identity=IDENTITY,
        deadline_ms=AT_MS + 50,
        turn_index=3,
        input_tokens=640,
        max_output_tokens=256,
        expected_output_tokens=90,
        priority=-2,
        held_ms=500,
        expires_ms=AT_MS + 60_000,
        waiting=4,
        waiting_main=2,
        open_grants=16,
        tenants=3,
        tenant_open_grants=9,
        tenant_waiting=1,
    ),
    AdmitAnswer(action="hold", hold_ms=500, order_bias_s=-2.5, reason="more than its share"),
    LeaseQuestion(
        identity=IDENTITY,
        model="qwen",
        worker="w1",
        rank=1,
        deadline_ms=AT_MS + 50,
        turns=3,
        context_tokens=665,
        tool_names=("bash",),
        builtin=BuiltinLease(numbers={"tokens": 665.0, "index": 0.25}),
    ),
    HintQuestion(
        session=KEY,
        session_id="research:1",
        trigger="acting",
        deadline_ms=AT_MS + 50,
        worker="w1",
        rank=0,
        context_tokens=665,
        builtin=(PlannedAction(action_type="pin", worker="w1", ttl_ms=2_000, reason="leased"),),
    ),
    HintAnswer(actions=(PlannedAction(action_type="demote", worker="w1", rank=1),), reason="a long tool"),
    HintIntent(
        source="mine", epoch=42, seq=7, at_ms=AT_MS, policy="mine", session=KEY, action_type="retain", priority=9
    ),
    PoolReset(source="bridge-pool", epoch=42, seq=7, at_ms=AT_MS, pool="pool-a", pool_seq=12, reason="restarted"),
    PoolState(
        source="bridge-pool",
        epoch=42,
        seq=7,
        at_ms=AT_MS,
        pool="pool-a",
        health="synced",
        backend_id="pool-a",
        pool_seq=12,
        objects=4,
        pages=1,
        reconciled_ms=AT_MS - 1_000,
        reconcile_removed=2,
    ),
    PoolSnapshotRequest(indexer="indexer-1"),
    PoolSnapshotReply(
        pool="pool-a", epoch=42, pool_seq=12, bucket="TG_SNAPSHOTS", key="pool.0", size_bytes=9, digest="0" * 16
    ),
    RecogniseRequest(model="qwen", message_chain=bytes(range(16)), preamble=1, request_id="r1"),
    RecogniseReply(indexer="indexer-1", relation="continues", session=KEY, confidence=0.5, reason="one_block", depth=2),
    LeaseAnswer(keep=True, ttl_ms=2_000, reason="returns at once"),
    TraceRow(
        event_type="request_end",
        event_time_unix_ms=AT_MS,
        agent_context=AgentContext(
            session_id="research:1",
            parent_session_id="3f6c",
            session_final=False,
            input_trigger="tool_result",
            session=KEY,
            turn=TurnFacts(agent_name="/root/a", parent_turn_id="t1", forked_from_session_id="3f6b"),
            compaction=Compaction(trigger="auto"),
        ),
        request=RequestMetrics(
            request_id="r1",
            response_id="chatcmpl-1",
            model="qwen",
            outcome="completed",
            status=200,
            attempts=2,
            hedged="won",
            input_tokens=640,
            output_tokens=25,
            cached_tokens=480,
            ttft_ms=81.25,
            kv_hit_rate=0.75,
            worker=TracedWorker(worker="w1", rank=1),
            replay=ReplayBlock(trace_block_size=16, input_length=20, input_sequence_hashes=(2**64 - 1, 7)),
            finish_reason_metadata=FinishMetadata(
                finish_reason="tool_calls",
                backend_finish_reason="tool_use",
                tool_calls=(ToolCall(id="call_1", name="bash"),),
                choices=(ChoiceFinish(choice_index=0, finish_reason="tool_calls"),),
            ),
        ),
        decision=TracedDecision(
            request_id="r1", grant_id="g1", worker=TracedWorker(worker="w1"), model="qwen", candidates_seen=1
        ),
        worker_load=TracedLoad(worker="w1", model="qwen", loads=(RankLoad(rank=0, kv_usage=0.5),)),
    ),
)

KV_HEADERS = KvHeaders(worker="w1", rank=1, incarnation="1760000000.1", seq=9, part=1, parts=2, first=True)
MSGPACK = (
    MatchRequest,
    MatchReply,
    AdmitRequest,
    AdmitCancel,
    Held,
    Granted,
    Refused,
    Placed,
    RecogniseRequest,
    RecogniseReply,
)


def encoded(message: Message) -> bytes:
    """As it travels."""
    return to_msgpack(message) if isinstance(message, MSGPACK) else to_json(message)


def golden_file(message: Message) -> Path:
    """Where its bytes are kept."""
    return DIRECTORY / f"{type(message).__name__}.{'msgpack' if isinstance(message, MSGPACK) else 'json'}"


def main() -> None:
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    for message in SAMPLES:
        file = golden_file(message)
        if not file.exists():
            file.write_bytes(encoded(message))


if __name__ == "__main__":
    main()
