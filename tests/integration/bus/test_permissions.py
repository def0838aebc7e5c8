"""The users of ``deploy/nats-accounts.conf`` on a real nats-server: who may say what, and who cannot."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bus import subjects
from bus.errors import BusTimeoutError, NoRespondersError, NotConnectedError
from bus.nats import NatsBus, NatsOptions, connect
from bus.nats.access import NatsAccess
from bus.permissions import SERVICES_OF_THE_HOUSE, users
from bus.policy import Policy
from bus.policy_asking import ask_policy
from schemas.base import from_json, to_json
from schemas.catalog import CHANNELS, Channel
from schemas.hint import HintResult
from schemas.kv import SnapshotReply, SnapshotRequest
from schemas.policy import AdmitAnswer, AdmitQuestion
from tests.support.nats import NatsServer
from tests.support.processes import eventually, python_process, settings_arguments
from tidegate.policy.questions import IDENTITY
from tidegate.supervisor.nats_accounts import write_secrets

POLICY = "fair"
SAMPLES = Path(__file__).resolve().parents[2] / "fixtures" / "schemas"
MADE = users(policies=[POLICY, "other"], workers=["w-1"], kv_policies=["index"])


@dataclass(frozen=True)
class Secured:
    """A server with our accounts, and the folder of its passwords."""

    server: NatsServer
    secrets: Path

    async def bus(self, user: str, *, inbox_prefix: str = "") -> NatsBus:
        access = NatsAccess(user=user, password_file=str(self.secrets / user), inbox_prefix=inbox_prefix)
        return await connect(self.server.url, name=user, timeout_s=30, options=NatsOptions(access=access))


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    directory = tmp_path_factory.mktemp("secured")
    assert set(write_secrets(directory, MADE)) == {user.name for user in MADE}
    server = NatsServer(directory / "nats", config='include "../nats-accounts.conf"').start()
    yield Secured(server, directory)
    server.kill()


@pytest.fixture
async def operator(secured: Secured) -> AsyncIterator[NatsBus]:
    bus = await secured.bus("operator")
    yield bus
    await bus.close()


def example(channel: Channel, name: str = "x") -> str:
    """A subject of ``channel``."""
    return ".".join(name if token.startswith("{") else token for token in channel.address.split("."))


async def heard(listener: NatsBus, speaker: NatsBus, wanted: list[str]) -> set[str]:
    """Which of ``wanted`` reach ``listener`` when ``speaker`` publishes them all."""
    arrived: set[str] = set()
    watching = await listener.subscribe(f"{subjects.ROOT}.>", lambda message: arrived.add(message.subject))
    for subject in wanted:
        speaker.publish(subject, b"{}")
    await speaker.flush()
    await listener.flush()
    await watching.unsubscribe()
    return arrived


async def test_a_policy_says_nothing_but_its_intents(secured: Secured, operator: NatsBus) -> None:
    """Decisions, rows, KV batches, hints, heartbeats and the intents of another policy are refused; so are streams."""
    policy = await secured.bus(f"policy-{POLICY}")
    subjects_of_all = [example(channel) for channel in CHANNELS]
    own = subjects.hint_intent(POLICY)
    allowed = await heard(operator, policy, [*subjects_of_all, own, subjects.hint_intent("other")])
    assert allowed == {own, subjects.INDEX_SESSION}
    assert policy.stats().refused == len(CHANNELS) + 2 - len(allowed)
    with pytest.raises(BusTimeoutError):
        await policy.request("$JS.API.STREAM.LIST", b"", timeout_s=0.3)
    with pytest.raises(BusTimeoutError):
        await policy.request(f"$KV.{subjects.BUCKET_LEADERS}.admission", b"mine", timeout_s=0.3)
    await policy.close()


async def test_every_service_publishes_what_is_its_own(secured: Secured, operator: NatsBus) -> None:
    """Exactly the channels that the catalogue gives it; a bridge with a user of its own speaks for its worker only."""
    for service in SERVICES_OF_THE_HOUSE:
        bus = await secured.bus(service)
        arrived = await heard(operator, bus, [example(channel) for channel in CHANNELS if channel.name != "trace"])
        expected = {
            example(channel)
            for channel in CHANNELS
            if channel.name != "trace" and (service in channel.publisher or channel.publisher == "anyone")
        }
        assert arrived == expected, service
        await bus.close()
    bridge = await secured.bus("bridge-w-1")
    forged = [subjects.worker_state("w-2"), subjects.kv("w-2", 0), subjects.hint_result("w-2")]
    own = [subjects.worker_state("w-1"), subjects.kv("w-1", 0), subjects.hint_result("w-1")]
    assert await heard(operator, bridge, forged + own) == set(own)
    await bridge.close()


async def test_rows_have_their_own_publishers(secured: Secured, operator: NatsBus) -> None:
    """The ingress writes what became of a request, never a decision or a tool; the recorder never a request's end."""
    names = ("request_end", "tool", "decision", "worker_load")
    rows = {name: f"{subjects.ROOT}.trace.{name}.m.s" for name in names}
    for service, events in (("ingress", {"request_end"}), ("admission", {"request_end", "decision"}),
                            ("recorder", {"tool", "worker_load"}), ("hints", set())):  # fmt: skip
        bus = await secured.bus(service)
        assert await heard(operator, bus, list(rows.values())) == {rows[event] for event in events}, service
        await bus.close()


async def test_a_policy_reads_facts_and_answers_its_own_questions(secured: Secured) -> None:
    """It is asked by admission and answers once, sees facts, and sees no question to anybody else."""
    policy = await secured.bus(f"policy-{POLICY}")
    fair = Policy(POLICY)
    seen: list[HintResult] = []
    fair.on("tg.v1.hint.result.*")(seen.append)

    @fair.admit
    def judge(question: AdmitQuestion) -> AdmitAnswer:
        return AdmitAnswer(action="hold", hold_ms=5, reason="later")

    await fair.start(policy)
    admission = await secured.bus("admission")
    now = int(time.time() * 1000)
    question = AdmitQuestion(request_id="r", model="m", identity=IDENTITY, deadline_ms=now + 60_000)
    answer = await ask_policy(admission, "admit", POLICY, question, timeout_s=30.0)
    assert isinstance(answer, AdmitAnswer)
    assert answer.reason == "later"
    bridge = await secured.bus("bridge")
    bridge.publish(subjects.hint_result("w"), (SAMPLES / "HintResult.json").read_bytes())
    await bridge.flush()
    with pytest.raises(Exception, match="answers"):
        await admission.request(subjects.kv_snapshot("w"), b"{}", timeout_s=1.0)
    async with asyncio.timeout(30):
        while not seen:
            await policy.flush()
    assert len(seen) == 1
    await fair.stop()
    for bus in (policy, admission, bridge):
        await bus.close()


async def test_kv_events_are_heard_by_those_who_keep_an_index(secured: Secured) -> None:
    """They carry the tokens of every tenant's prompts and answers: a policy, a front door, hints and the recorder do
    not hear them, by whatever pattern; a policy that was made for it does."""
    bridge = await secured.bus("bridge")
    names = (
        "ingress",
        "bridge-w-1",
        "hints",
        "recorder",
        f"policy-{POLICY}",
        "indexer",
        "admission",
        "policy-index",
        "watcher",
    )
    listeners = {name: await secured.bus(name) for name in names}
    arrived: set[str] = set()
    for name, bus in listeners.items():
        for pattern in (subjects.kv("w-1", 0), "tg.v1.kv.>", "tg.v1.kv.*.*", "tg.v1.>", ">", "*.*.kv.*.*"):
            await bus.subscribe(pattern, lambda message, name=name: arrived.add(name))  # type: ignore[misc]
        await bus.flush()
    bridge.publish(subjects.kv("w-1", 0), b"batch")
    await bridge.flush()
    for bus in listeners.values():
        await bus.flush()
        await bus.close()
    await bridge.close()
    assert arrived == {"indexer", "admission", "policy-index", "watcher"}


async def test_answers_to_others_can_neither_be_read_nor_forged(secured: Secured) -> None:
    """A policy that knows the inbox of a question gets nothing into it and hears nothing from it."""
    policy = await secured.bus(f"policy-{POLICY}")
    ingress = await secured.bus("ingress")
    got: list[bytes] = []
    inbox = "_INBOX.ingress.stolen"
    await ingress.subscribe(inbox, lambda message: got.append(message.payload))
    stolen: list[bytes] = []
    await policy.subscribe("_INBOX.ingress.>", lambda message: stolen.append(message.payload))
    policy.publish(inbox, b"forged")
    await policy.flush()
    admission = await secured.bus("admission")
    admission.publish(inbox, b"granted")  # the holds and the grant of one question are many answers
    await admission.flush()
    await ingress.flush()
    await policy.flush()
    assert (got, stolen) == ([b"granted"], [])
    for bus in (policy, ingress, admission):
        await bus.close()


async def test_buckets_streams_and_objects_of_each(secured: Secured) -> None:
    """What each service keeps works under its user: leases, registry, snapshots, rows and their consumer."""
    async with asyncio.timeout(30):
        admission, hints, bridge = [await secured.bus(name) for name in ("admission", "hints", "bridge")]
        indexer, recorder, ingress = [await secured.bus(name) for name in ("indexer", "recorder", "ingress")]
        leaders = await admission.key_value(subjects.BUCKET_LEADERS)
        assert await leaders.put("admission", b"1") > 0
        assert await (await hints.key_value(subjects.BUCKET_LEADERS)).put("hints", b"2") > 0
        with pytest.raises(BusTimeoutError):
            await hints.request(f"$KV.{subjects.BUCKET_LEADERS}.admission", b"hints leads", timeout_s=0.3)
        entry = await leaders.get("admission")
        assert entry is not None
        assert entry.value == b"1"
        assert await (await bridge.key_value(subjects.BUCKET_WORKERS)).put("w", b"{}") > 0
        await (await bridge.objects(subjects.OBJECTS_SNAPSHOTS)).put("w.0", b"x" * 300_000)
        snapshots = await indexer.objects(subjects.OBJECTS_SNAPSHOTS)
        assert len(await snapshots.get("w.0")) == 300_000
        assert await ingress.publish_row("tg.v1.trace.request_end.m.s", b"{}", "one")
        consumer = await recorder.consume("recorder", subjects.TRACE_SUBJECTS)
        rows = await consumer.fetch(10, 5.0)
        assert [row.payload for row in rows] == [b"{}"]
        await consumer.ack_rows(rows)
        await recorder.flush()
        while await consumer.pending():
            await recorder.flush()
        operator = await secured.bus("operator")
        assert await (await operator.key_value(subjects.BUCKET_CALIBRATIONS)).put("m.p", b"curve") > 0
        measured = await (await admission.key_value(subjects.BUCKET_CALIBRATIONS)).get("m.p")
        assert measured is not None
        assert measured.value == b"curve"
        watcher = await secured.bus("watcher")
        tail = watcher.tail(subjects.TRACE_SUBJECTS, from_start=True)
        assert (await anext(tail)).payload == b"{}"
        await tail.aclose()
        for bus in (admission, hints, bridge, indexer, recorder, ingress, operator, watcher):
            await bus.close()


async def test_a_bridge_under_the_user_of_its_worker(secured: Secured, tmp_path: Path) -> None:
    """A real one does all of its work: registers, speaks for its engine, keeps and hands out a snapshot; what another
    worker is asked it does not see."""
    engine_settings = settings_arguments({"kv_events_endpoint": "tcp://127.0.0.1:*", "profile": "instant"})
    async with python_process("load.engine", *engine_settings, directory=tmp_path, name="engine") as engine:
        ready = json.loads(await engine.wait_line())
        bridge_settings = settings_arguments(
            {
                "nats_url": secured.server.url,
                "nats_user": "bridge-w-1",
                "nats_password_file": secured.secrets / "bridge-w-1",
                "engine_url": ready["url"],
                "worker": "w-1",
                "kv_events": json.dumps(ready["kv_events"]),
                "scrape_interval_s": 0.2,
            }
        )
        async with python_process("services.bridge", *bridge_settings, directory=tmp_path, name="bridge") as bridge:
            await bridge.wait_said("health=ready")
            admission = await secured.bus("admission")
            answer = await admission.request(
                subjects.kv_snapshot("w-1"), to_json(SnapshotRequest(indexer="test")), timeout_s=30
            )
            assert from_json(answer.payload, SnapshotReply).worker == "w-1"
            with pytest.raises(NoRespondersError):
                await admission.request(
                    subjects.kv_snapshot("w-2"), to_json(SnapshotRequest(indexer="test")), timeout_s=30
                )
            await admission.close()
            assert await bridge.stop() == 0
            assert "bus_refused" not in bridge.output


async def test_strangers_are_told_why(secured: Secured) -> None:
    """No user, a wrong password: no connection, and the reason in the error."""
    with pytest.raises(NotConnectedError, match="Authorization Violation"):
        await connect(secured.server.url, name="nobody", timeout_s=2.0)
    wrong = NatsOptions(access=NatsAccess(user="ingress", password="guess"))
    with pytest.raises(NotConnectedError, match="Authorization Violation"):
        await connect(secured.server.url, name="nobody", timeout_s=2.0, options=wrong)
    url = secured.server.url.replace("//", f"//watcher:{(secured.secrets / 'watcher').read_text().strip()}@")
    await (await connect(url, name="by-address", timeout_s=30)).close()


async def test_a_password_is_changed_while_a_process_runs(tmp_path: Path) -> None:
    """The server comes back with another: the process reads its file anew, and is on the bus again."""
    write_secrets(tmp_path, MADE)
    secured = Secured(NatsServer(tmp_path / "nats", config='include "../nats-accounts.conf"').start(), tmp_path)
    try:
        bus = await secured.bus("hints")
        (tmp_path / "hints").unlink()
        assert write_secrets(tmp_path, MADE) == ["hints"]
        await asyncio.to_thread(secured.server.restart)
        await eventually(lambda: bus.connected and bus.stats().reconnects == 1)
        await bus.flush()
        await bus.close()
    finally:
        secured.server.kill()
