"""Keys at the front door: who gets in, what each may do, what engines and rows see of it; clients the official ones."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from bus import subjects
from bus.interface import BusMessage
from bus.tasks import Tasks
from services.ingress.config import IngressSettings
from services.ingress.endpoints import PATHS as PATHS_OF_APIS
from services.ingress.endpoints import read_request
from services.ingress.keys import Key, digest
from services.ingress.replies import REASON_HEADER
from services.ingress.salt import tenant_salt
from services.ingress.shell.keys import Access
from services.ingress.shell.metrics import IngressMetrics
from tests.integration.ingress.support import (
    ASSETS,
    JSON,
    LONG,
    MODEL,
    Door,
    Stage,
    System,
    chat,
    running_bridged,
    until,
)
from tests.support.processes import python_process, settings_arguments
from web.client import Answer, Timeouts

pytestmark = pytest.mark.asyncio(loop_scope="session")

REASON = REASON_HEADER.decode()
SALT_SECRET = "0123456789abcdef"
PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens")


def key_of(key_id: str) -> str:
    return f"tg_{key_id}_{'s' * 40}{key_id}"


def entry(key_id: str, **members: Any) -> bytes:
    key = Key(id=key_id, sha256=digest(key_of(key_id)), tenant=members.pop("tenant", key_id), **members)
    return msgspec.json.encode(key) + b"\n"


def body(path: str, **members: Any) -> dict[str, Any]:
    """A body that the API of ``path`` takes."""
    return {**chat(**members), "prompt": "hello", "input": "hello"}


def replace_file(path: Path, data: bytes) -> None:
    """As `tidegate keys` and Kubernetes do it: in one step."""
    new = path.with_suffix(".new")
    new.write_bytes(data)
    new.replace(path)


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    limited = entry("slow1", requests_per_s=0.01, burst=2) + entry("few01", tokens_per_min=60)
    path.write_bytes(entry("acme") + entry("bees", models=("other-*",)) + entry("late", expires_at=1) + limited)
    path.chmod(0o600)
    return path


def settings(keys: Path, **more: Any) -> dict[str, Any]:
    return {"keys_file": str(keys), "cache_salt_secret": SALT_SECRET, "admit_idle_s": 0.05, **more}


async def ask(door: Door, key: str | None, path: str = PATHS[0], **members: Any) -> Answer:
    sent = {} if key is None else {"authorization": f"Bearer {key}"}
    return await door.post(body(path, **members), path, **sent)


def said(answer: Answer) -> tuple[int, str]:
    """Status, and the error's type."""
    return answer.status, json.loads(answer.body)["error"]["type"]


async def test_nobody_without_a_key_gets_anything(stage: Stage, keys_file: Path) -> None:
    """401 in the shape of each API, with no word of the key, and no engine sees it; pages for probes stay open."""
    async with stage.door(**settings(keys_file)) as door:
        for path in PATHS:
            for key in (None, "sk-other", key_of("none"), key_of("late"), f"{key_of('acme')}x"):
                answer = await ask(door, key, path)
                assert said(answer) == (401, "authentication_error")
                assert answer.header(REASON) == b"invalid_api_key"
                assert answer.header("www-authenticate") == b"Bearer"
                assert b"tg_" not in answer.body.replace(b"tg_...", b"")
        for path in ("/v1/models", f"/v1/models/{MODEL}"):
            assert (await door.get(path)).status == 401
        assert [(await door.get(path)).status for path in ("/healthz", "/readyz", "/metrics")] == [200] * 3
        metrics = (await door.get("/metrics")).body
        assert b'not_accepted_total{reason="invalid_api_key"} 27.0' in metrics
        assert b"tidegate_ingress_keys 5.0" in metrics
    assert not [request for engine in stage.engines.values() for request in engine.seen]


async def test_a_key_opens_its_tenants_door_and_goes_no_further(stage: Stage, keys_file: Path) -> None:
    """The row has the tenant, whatever headers say; engines see no credential, and a salt of ours in every API."""
    async with stage.door(**settings(keys_file, tenant="house", forward_headers=("x-*",))) as door:
        for number, (path, header) in enumerate(
            (path, name) for path in PATHS for name in ("authorization", "x-api-key")
        ):
            named = f"open-{number}"
            sent = {
                "x-request-id": named,
                "x-tidegate-tenant": "bees",
                "x-tenant-id": "bees",
                "x-tidegate-session-id": "s",
            }
            given = f"Bearer {key_of('acme')}" if header == "authorization" else key_of("acme")
            answer = await door.post(body(path, cache_salt="bees"), path, **{**sent, header: given})
            assert answer.status == 200
            row = await stage.rows.by_x_request_id(named)
            assert row.tenant == "acme"
        assert not (await door.get("/v1/models")).body.count(MODEL.encode())
        models = await door.client.fetch("GET", f"{door.url}/v1/models", [(b"x-api-key", key_of("acme").encode())], b"")
        assert [model["id"] for model in json.loads(models.body)["data"]] == [MODEL]
    seen = [request for engine in stage.engines.values() for request in engine.seen]
    assert len(seen) == 2 * len(PATHS)
    for request in seen:
        names = {name.lower() for name, _ in request.headers}
        assert not names & {b"authorization", b"x-api-key", b"api-key", b"x-tenant-id", b"x-tidegate-tenant"}
        assert not [value for _, value in request.headers if b"tg_" in value]
        salt = json.loads(request.body)["cache_salt"]
        counts = request.path.endswith("count_tokens")
        theirs = None if request.path == "/v1/messages" else "bees"
        assert salt == ("bees" if counts else tenant_salt(SALT_SECRET.encode(), "acme", theirs))


async def test_models_that_a_key_may_not_use(stage: Stage, keys_file: Path) -> None:
    """403 where it asks for one, none in its list, 404 for one by name: the list tells nothing of it."""
    async with stage.door(**settings(keys_file)) as door:
        for path in PATHS:
            answer = await ask(door, key_of("bees"), path)
            assert said(answer) == (403, "permission_error")
            assert answer.header(REASON) == b"model_not_allowed"
        headers = [(b"authorization", f"Bearer {key_of('bees')}".encode())]
        listed = await door.client.fetch("GET", f"{door.url}/v1/models", headers, b"")
        assert json.loads(listed.body)["data"] == []
        assert (await door.client.fetch("GET", f"{door.url}/v1/models/{MODEL}", headers, b"")).status == 404


async def test_what_is_kept_of_conversations_is_each_tenants_own(keys_file: Path) -> None:
    """In every API, counting included; a client's own salt separates within its tenant, and without keys too."""
    access = Access(IngressSettings(**settings(keys_file)), IngressMetrics(CollectorRegistry()))
    tasks = Tasks()
    await access.start(tasks)
    await tasks.stop()
    open_to_all = Access(IngressSettings(), IngressMetrics(CollectorRegistry()))

    def apart(door: Access, key_id: str | None, path: str, **members: Any) -> str:
        endpoint = PATHS_OF_APIS[path]
        request = read_request(endpoint, json.dumps(body(path, **members)).encode())
        key = None if key_id is None else door.key([(b"authorization", f"Bearer {key_of(key_id)}".encode())])
        return door.granted(key, request).apart

    for path in PATHS:
        assert apart(access, "acme", path) == apart(access, "acme", path) != ""
        assert apart(access, "acme", path) != apart(access, "slow1", path)
        assert apart(open_to_all, None, path) == ""
    salted = apart(access, "acme", PATHS[0], cache_salt="own")
    assert salted not in (apart(access, "acme", PATHS[0]), apart(access, "slow1", PATHS[0], cache_salt="own"), "own")
    assert apart(open_to_all, None, PATHS[0], cache_salt="own") == "own"


async def test_limits(stage: Stage, keys_file: Path) -> None:
    """429 with when to ask again; an answer's real tokens count, and other keys are not touched."""
    async with stage.door(**settings(keys_file)) as door:
        slow = [await ask(door, key_of("slow1"), path) for path in (*PATHS[:2], *PATHS)]
        assert [answer.status for answer in slow] == [200, 200, 429, 429, 429, 429, 429]
        for answer in slow[2:]:
            assert said(answer)[1] == "rate_limit_error"
            assert 40 <= int(answer.header("retry-after") or b"0") <= 100
            assert answer.header(REASON) == b"rate_limited"
        # The scripted engine reports 4 tokens; by the bodies' size the second would have to wait for half a minute.
        async with asyncio.timeout(20):
            for _ in range(3):
                while (await ask(door, key_of("few01"), text="many " * 10)).status != 200:  # noqa: ASYNC110 - settled
                    await asyncio.sleep(0.05)
        assert (await ask(door, key_of("acme"))).status == 200


async def test_what_is_refused_costs_nothing(stage: Stage, tmp_path: Path) -> None:
    """403, 400 and 404 use up no limit of the key, however many there are; what was taken on does."""
    path = tmp_path / "keys.jsonl"
    limits = {"requests_per_s": 0.01, "burst": 1, "tokens_per_min": 100}
    path.write_bytes(entry("nope1", models=("nope*",), **limits) + entry("slow1", **limits))
    path.chmod(0o600)
    async with stage.door(**settings(path)) as door:
        forbidden = [(await ask(door, key_of("nope1"), api)).status for api in PATHS]
        assert forbidden == [403] * len(PATHS)
        assert (await ask(door, key_of("nope1"), model="nope-1")).status == 404
        bearer = {"authorization": f"Bearer {key_of('slow1')}"}
        for sent, status in (
            (b"{not json", 400),
            (rb'{"model":"\ud83d"}', 400),
            ({"messages": []}, 400),
            (chat(model="no-such"), 404),
        ):
            for _ in range(2):
                assert (await door.post(sent, **bearer)).status == status
        assert [(await ask(door, key_of("slow1"))).status for _ in range(2)] == [200, 429]


async def test_the_file_changes_while_requests_run(stage: Stage, keys_file: Path) -> None:
    """Reload race: thousands of requests of a key that stays, files replaced beneath them: none is refused. A broken
    file and a missing one change nothing and are counted; a revoked key is out, one that is new is in."""
    kept = entry("acme")
    async with stage.door(**settings(keys_file)) as door:
        statuses: Counter[int] = Counter()
        over = asyncio.Event()

        async def keep_asking() -> None:
            while not over.is_set():
                statuses[(await ask(door, key_of("acme"))).status] += 1

        async def status(key_id: str, wanted: int) -> None:
            async with asyncio.timeout(30):
                while (await ask(door, key_of(key_id))).status != wanted:  # noqa: ASYNC110 - the file is polled
                    await asyncio.sleep(0.05)

        async def failures(wanted: int) -> None:
            async with asyncio.timeout(30):
                while f"reload_failures_total {wanted}.0".encode() not in (await door.get("/metrics")).body:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

        clients = [asyncio.create_task(keep_asking()) for _ in range(4)]
        replace_file(keys_file, kept + entry("newer"))
        await status("newer", 200)
        await status("slow1", 401)
        replace_file(keys_file, kept + b"{broken\n")
        await failures(1)
        await asyncio.to_thread(keys_file.unlink)
        await failures(2)
        assert (await ask(door, key_of("newer"))).status == 200
        assert (await door.get("/readyz")).status == 200
        await asyncio.to_thread(keys_file.write_bytes, kept)
        await status("newer", 401)
        over.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}


def put_volume(folder: Path, version: str, keys: bytes) -> None:
    """As the kubelet changes a Secret's volume: files are links into ``..data``, a link that is put in the place of the
    one before; then the old folder goes."""
    before = (folder / "..data").resolve() if (folder / "..data").exists() else None
    (folder / version).mkdir()
    (folder / version / "keys.jsonl").write_bytes(keys)
    new = folder / "..data_tmp"
    new.symlink_to(version)
    new.replace(folder / "..data")
    if before is None:
        (folder / "keys.jsonl").symlink_to("..data/keys.jsonl")
    else:
        (before / "keys.jsonl").unlink()
        before.rmdir()


async def test_a_secret_volume_of_kubernetes_changes_beneath_the_file(stage: Stage, tmp_path: Path) -> None:
    """The name stays, the link behind it moves: new keys open, old ones close, and back again; one that is broken on
    the way costs nobody anything."""
    put_volume(tmp_path, "..2026_1", entry("acme"))
    async with stage.door(**settings(tmp_path / "keys.jsonl")) as door:
        assert (await ask(door, key_of("acme"))).status == 200
        for version, key_id, others in (("..2026_2", "bees", "acme"), ("..2026_3", "acme", "bees")):
            put_volume(tmp_path, version, entry(key_id))
            async with asyncio.timeout(30):
                while (await ask(door, key_of(key_id))).status != 200:  # noqa: ASYNC110 - nobody says when
                    await asyncio.sleep(0.02)
            assert (await ask(door, key_of(others))).status == 401
        put_volume(tmp_path, "..2026_4", b"{")
        async with asyncio.timeout(30):
            while b"reload_failures_total 1.0" not in (await door.get("/metrics")).body:  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.02)
        assert (await ask(door, key_of("acme"))).status == 200


async def test_a_file_that_is_broken_at_the_start(stage: Stage, tmp_path: Path) -> None:
    """Not ready, everybody gets 503, and it says why; mended, it opens by itself."""
    path = tmp_path / "keys.jsonl"
    path.write_bytes(b"\nnonsense\n")
    async with stage.door(**settings(path), ready=False) as door:
        await until(lambda: door.service.workers > 0)
        assert (await door.get("/readyz")).body == b"keys_unreadable\n"
        answer = await ask(door, key_of("acme"))
        assert (answer.status, answer.header("retry-after")) == (503, b"1")
        path.write_bytes(entry("acme"))
        await until(lambda: door.service.not_ready() is None, 30)
        assert (await ask(door, key_of("acme"))).status == 200


async def test_no_key_is_in_any_line_of_the_log(stage: Stage, tmp_path: Path) -> None:
    """Not at debug either: those that are right, wrong, in broken files and in settings; and with keys there is no
    warning of an open door."""
    path = tmp_path / "keys.jsonl"
    path.write_bytes(entry("acme"))
    secret = tmp_path / "secret"
    secret.write_text("very-secret-salt-of-ours")
    given = {"nats_url": stage.nats.url, "port": 0, "host": "0.0.0.0", "http_port": -1, "log_level": "debug"}
    given |= {"keys_file": str(path), "cache_salt_secret_file": str(secret), "log_format": "json"}
    async with python_process(
        "services.ingress", *settings_arguments(given), directory=tmp_path, name="ingress"
    ) as process:
        await process.wait_said("keys_read")
        replace_file(path, b'{"id":"acme","tenant":"' + key_of("acme").encode() + b'"}')
        await process.wait_said("keys_file_broken")
        assert await process.stop() == 0
        assert "exposed_without_credentials" not in process.stderr
        assert "very-secret" not in process.stderr
        assert "sssssss" not in process.stderr


SESSIONS = (
    "http://169.254.169.254/latest/meta-data/",
    "169.254.169.254:80",
    "[::1]:6379",
    "http://127.0.0.1:1/",
    "file:///etc/passwd",
    "gopher://127.0.0.1:6379/_PING",
    "worker-1@10.0.0.1",
    "../../etc/passwd",
    "eyJ1cmwiOiJodHRwOi8vMTY5LjI1NC4xNjkuMjU0LyJ9",
    "http%3A%2F%2F169.254.169.254%2F",
    "tg.v1.admit.>",
    "*",
)


async def test_a_session_id_is_never_an_address(stage: Stage) -> None:
    """F1: whatever a session calls itself, in whichever header or member, a registered worker gets it, at its own path
    and host."""
    urls = {engine.url.removeprefix("http://").encode() for engine in stage.engines.values()}
    async with stage.door(admit_idle_s=0.01) as door:
        for number, session in enumerate(SESSIONS):
            headers = {"x-session-id": session, "x-session-affinity": session, "x-codex-turn-state": session}
            members: dict[str, Any] = {
                "user": session,
                "session_id": session,
                "nvext": {"backend_instance_id": session},
            }
            answer = await door.post(chat(**members), **headers, x_request_id=f"ssrf-{number}")
            assert answer.status == 200
            row = await stage.rows.by_x_request_id(f"ssrf-{number}")
            assert row.worker is not None
            assert row.worker.worker in stage.engines
        for target in ("http://169.254.169.254/v1/chat/completions", "//169.254.169.254/v1/chat/completions"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(door.url.rpartition(":")[2]))
            sent = json.dumps(chat()).encode()
            head = f"POST {target} HTTP/1.1\r\nhost: 169.254.169.254\r\ncontent-length: {len(sent)}\r\n"
            writer.write(f"{head}connection: close\r\n\r\n".encode() + sent)
            async with asyncio.timeout(30):
                await reader.read()
            writer.close()
    for engine in stage.engines.values():
        for request in engine.seen:
            assert request.path == "/v1/chat/completions"
            assert request.header("host") in urls


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def house(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    async with running_bridged(tmp_path_factory.mktemp("keys"), engines=1) as system:
        yield system


async def test_predicted_is_what_an_engine_reports_under_salts(house: System, tmp_path: Path) -> None:
    """Two tenants, one prompt, one engine: each finds its own blocks and none of the other's; what the decision expects
    is what the engine reports; a client's own salt still separates within its tenant. Official clients with keys."""
    path = tmp_path / "keys.jsonl"
    path.write_bytes(entry("acme") + entry("bees"))
    more = {"tokenizers": {MODEL: str(ASSETS)}, "tokenize": "local", "admit_idle_s": 30.0}
    async with house.door(**settings(path, **more)) as door:
        cached: dict[str, list[int | None]] = {}
        states: list[BusMessage] = []
        heard = await house.bus.subscribe(f"{subjects.ROOT}.worker.state.*", states.append)

        async def turn(name: str, tenant: str, **members: Any) -> None:
            client = openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=key_of(tenant), max_retries=0, timeout=30)
            named = f"{name}-{len(cached.setdefault(name, []))}"
            headers = {"x-tidegate-session-id": "same", "x-request-id": named}
            prompt: Any = [{"role": "user", "content": LONG}]
            asked: dict[str, Any] = {"model": MODEL, "extra_headers": headers, "extra_body": members}
            if name == "responses":
                await client.responses.create(input=prompt, max_output_tokens=4, **asked)
            else:
                await client.chat.completions.create(messages=prompt, max_tokens=4, **asked)
            await client.close()
            row = await house.rows.by_x_request_id(named, 30)
            assert (row.tenant, row.predicted_cached_tokens) == (tenant, row.cached_tokens)
            cached[name].append(row.cached_tokens)
            enough = len(states) + 3  # the worker's state twice: the blocks of this turn were said before them
            await until(lambda: len(states) >= enough, 30)

        for _ in range(2):
            await turn("acme", "acme")
        for _ in range(2):
            await turn("bees", "bees")
        for _ in range(2):
            await turn("salted", "acme", cache_salt="mine")
        await turn("responses", "bees")
        assert [counts[0] for name, counts in cached.items() if name != "responses"] == [0, 0, 0]
        await heard.unsubscribe()
        again = {counts[-1] for counts in cached.values()}
        assert len(again) == 1
        assert (again.pop() or 0) > 1000

        async with anthropic.AsyncAnthropic(base_url=door.url, api_key=key_of("acme"), max_retries=0) as client:
            message = await client.messages.create(
                model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Hello."}]
            )
            assert message.usage.output_tokens > 0
        async with anthropic.AsyncAnthropic(base_url=door.url, auth_token=key_of("none"), max_retries=0) as wrong:
            with pytest.raises(anthropic.AuthenticationError):
                await wrong.messages.create(model=MODEL, max_tokens=4, messages=[{"role": "user", "content": "Hello."}])
        async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key="sk-dummy", max_retries=0) as nobody:
            with pytest.raises(openai.AuthenticationError):
                await nobody.models.list()


async def test_engines_get_their_own_key(stage: Stage, keys_file: Path, tmp_path: Path) -> None:
    """In place of whatever a client brings and the settings forward, for requests and for ``/tokenize``; once."""
    path = tmp_path / "engine-key"
    path.write_text("of-the-engines\n")
    asked: list[bytes | None] = []
    more = {"engine_api_key_file": str(path), "forward_headers": ("x-api-key",)}
    async with stage.door(**settings(keys_file, **more)) as door:
        for engine in stage.engines.values():
            engine.tokenize = lambda request: asked.append(request.header("authorization"))
        answer = await door.post(chat(), authorization=f"Bearer {key_of('acme')}", x_api_key=key_of("acme"))
        assert answer.status == 200
        for engine in stage.engines.values():
            engine.tokenize = None
    (request,) = [request for engine in stage.engines.values() for request in engine.seen]
    given = [value for name, value in request.headers if name.lower() in (b"authorization", b"x-api-key")]
    assert given == [b"Bearer of-the-engines"] == asked


async def test_apis_that_are_passed_on(stage: Stage, keys_file: Path) -> None:
    """They need a key as well; those that nobody knows are closed, since no engine knows of tenants, unless opened."""
    headers = {"authorization": f"Bearer {key_of('acme')}"}
    statuses = {}
    for wanted in (None, True):
        async with stage.door(**settings(keys_file, passthrough=wanted)) as door:
            for path in ("/v1/embeddings", "/v1/files"):
                assert (await door.post(chat(), path)).status == (401 if wanted or path == "/v1/embeddings" else 404)
                statuses[wanted, path] = (await door.post(chat(), path, **headers)).status
    assert statuses == {
        (None, "/v1/embeddings"): 200,
        (None, "/v1/files"): 404,
        (True, "/v1/embeddings"): 200,
        (True, "/v1/files"): 200,
    }


async def test_messages_where_every_tenant_must_be_alone(stage: Stage, keys_file: Path) -> None:
    """Engines read no salt in Messages: with ``require_cache_salt`` it is 501; count_tokens computes nothing."""
    async with stage.door(**settings(keys_file, require_cache_salt=True)) as door:
        answers = {path: await ask(door, key_of("acme"), path) for path in PATHS}
        assert [answers[path].status for path in PATHS] == [200, 200, 200, 501, 200]
        assert answers["/v1/messages"].header(REASON) == b"api_not_isolated"


async def test_without_keys_not_a_byte_changes(stage: Stage) -> None:
    """As before: everybody is of the settings' tenant, the client's salt is its own, its credential is the engine's."""
    raw = json.dumps(chat(cache_salt="mine")).encode()
    async with stage.door(admit_idle_s=0.05) as door:
        headers = [*JSON, (b"authorization", b"Bearer engine"), (b"x-request-id", b"plain")]
        sent = await door.client.fetch("POST", f"{door.url}{PATHS[0]}", headers, raw, Timeouts(total_s=30))
        assert sent.status == 200
        assert (await stage.rows.by_x_request_id("plain")).tenant == "default"
    (request,) = [request for engine in stage.engines.values() for request in engine.seen]
    assert (request.body, request.header("authorization")) == (raw, b"Bearer engine")
