"""What the front door answers by itself, and what it lets through in each direction."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import re
import time

import pytest

from bus.nats import connect
from services.ingress.endpoints import TextPrompt
from services.ingress.replies import REASON_HEADER
from services.ingress.shell.local_tokenizer import LocalTokenizer
from tests.integration.ingress.support import ASSETS, JSON, MODEL, Door, Stage, chat, open_door
from web.client import Answer, Timeouts
from web.errors import ConnectionLostError
from web.server import Request, Responder

pytestmark = pytest.mark.asyncio(loop_scope="session")


def error_of(answer: Answer) -> dict[str, object]:
    error: dict[str, object] = json.loads(answer.body)["error"]
    return error


async def test_bad_input_is_refused_in_openais_shape(stage: Stage) -> None:
    """Bad JSON 400, a bad member 400, unknown model 404, unknown path 404, wrong method 405, compressed body 415."""
    async with stage.door() as door:
        for answer, status, reason in (
            (await door.post(b"{not json"), 400, "bad_json"),
            (await door.post(b'{"model": 7, "messages": []}'), 400, "bad_request"),
            (await door.post({**chat(), "model": "gpt-none"}), 404, "model_not_found"),
            (await door.post(chat(), path="/v2/embeddings"), 404, "unknown_url"),
            (await door.get("/v1/chat/completions"), 405, "method_not_allowed"),
            (await door.post(chat(), path="/healthz"), 405, "method_not_allowed"),
            (await door.post(chat(), content_encoding="br"), 415, "content_encoding"),
        ):
            error = error_of(answer)
            assert (answer.status, error["code"]) == (status, reason)
            assert answer.header(REASON_HEADER.decode()) == reason.encode()
            assert set(error) == {"message", "type", "param", "code"}
        assert not any(engine.seen for engine in stage.engines.values())


async def test_a_body_over_the_limit_is_413_in_its_apis_shape(stage: Stage) -> None:
    """Refused below the routes, yet in the shape that the API's clients read."""
    async with stage.door(body_bytes=1000) as door:
        answer = await door.post(chat("x" * 2000))
        assert (answer.status, error_of(answer)["code"]) == (413, "body_too_large")
        answer = await door.post(chat("x" * 2000), path="/v1/messages")
        assert answer.status == 413
        assert json.loads(answer.body)["type"] == "error"
        assert b'http_refusals_total{reason="body_too_large"} 2.0' in (await door.get("/metrics")).body


async def test_models_health_and_metrics_are_on_the_same_port(stage: Stage) -> None:
    """Models are those of live workers; the pages of every process are here too."""
    async with stage.door() as door:
        models = json.loads((await door.get("/v1/models")).body)
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert (await door.get(f"/v1/models/{MODEL}")).status == 200
        assert (await door.get("/v1/models/none")).status == 404
        assert (await door.get("/healthz")).body == b"ok\n"
        assert (await door.get("/readyz")).body == b"ready\n"
        assert b"tidegate_ingress_in_flight 0.0" in (await door.get("/metrics")).body


async def test_without_workers_it_is_not_ready_and_answers_503(stage: Stage) -> None:
    """B7: requests that arrive before any worker get 503 with Retry-After, and /readyz says why."""
    stage.heartbeats.silent = set(stage.engines)
    async with open_door(stage.nats.url, ready=False) as door:
        readyz = await door.get("/readyz")
        assert (readyz.status, readyz.body) == (503, b"no_worker\n")
        answer = await door.post(chat())
        assert (answer.status, answer.header("retry-after")) == (503, b"1")
        assert error_of(answer)["code"] == "no_worker"


SPOOFED = (
    "x-tidegate-worker",
    "X-Tidegate-Tenant",
    "X_TIDEGATE_PRIORITY",
    "x-dynamo-worker-instance-id",
    "X-DYNAMO-Request-Priority",
    "x_dynamo_dp_rank",
    "x-data-parallel-rank",
    "X-Data-Parallel-Rank",
)


async def test_internal_headers_of_clients_never_reach_an_engine(stage: Stage) -> None:
    """F1: the router's internal headers are stripped in every spelling, doubled or not; our request id replaces the
    client's."""
    headers = [(name.encode(), value) for name in SPOOFED for value in (b"http://169.254.169.254/", b"7")]
    headers += [(b"X-Request-Id", b"theirs"), (b"x-request-id", b"twice"), *JSON]
    async with stage.door() as door:
        body = json.dumps(chat()).encode()
        answer = await door.client.fetch("POST", f"{door.url}/v1/chat/completions", headers, body)
        assert answer.status == 200
    (request,) = [request for engine in stage.engines.values() for request in engine.seen]
    names = [name.lower().replace(b"_", b"-") for name, _ in request.headers]
    assert not [name for name in names if name.startswith((b"x-tidegate", b"x-dynamo", b"x-data-parallel"))]
    ids = [value for name, value in request.headers if name.lower() == b"x-request-id"]
    assert len(ids) == 1
    assert re.fullmatch(rb"[0-9a-f]{32}", ids[0])
    assert answer.header("x-request-id") == ids[0]


async def test_the_forward_list(stage: Stage) -> None:
    """C8: credentials, beta and trace headers pass; what belongs to one hop, and what nobody listed, does not."""
    forwarded = {
        "authorization": "Bearer secret",
        "openai-beta": "assistants=v2",
        "anthropic-version": "2023-06-01",
        "traceparent": "00-1-2-01",
        "user-agent": "test/1",
        "x-claude-code-session-id": "s",
        "x-my-header": "listed",
    }
    dropped = {
        "connection": "x-stainless-lang",
        "x-stainless-lang": "named by connection",
        "keep-alive": "1",
        "te": "trailers",
        "cookie": "a=b",
        "x-forwarded-for": "1.2.3.4",
        "accept-encoding": "gzip",
        "proxy-authorization": "Basic x",
    }
    async with stage.door(forward_headers=("X-My-*",)) as door:
        headers = [(name.encode(), value.encode()) for name, value in (forwarded | dropped).items()]
        body = json.dumps(chat()).encode()
        answer = await door.client.fetch("POST", f"{door.url}/v1/chat/completions?a=b", [*JSON, *headers], body)
        assert answer.status == 200
    (request,) = [request for engine in stage.engines.values() for request in engine.seen]
    assert {name: (request.header(name) or b"").decode() for name in forwarded} == forwarded
    assert [name for name in dropped if request.header(name) is not None] == ["accept-encoding"]
    assert request.header("accept-encoding") == b"identity"
    assert (request.path, request.query, request.body) == ("/v1/chat/completions", "a=b", body)


async def test_an_engines_headers_come_back_but_for_its_hops(stage: Stage) -> None:
    """Rate-limit and processing headers pass to the client; a hop's own and internal ones do not."""

    async def script(request: Request, responder: Responder) -> None:
        extra = [(b"X-RateLimit-Remaining", b"7"), (b"x-tidegate-secret", b"1"), (b"keep-alive", b"timeout=5")]
        responder.send(200, [*JSON, *extra], b"{}")

    for engine in stage.engines.values():
        engine.script = script
    async with stage.door() as door:
        answer = await door.post(chat())
    assert (answer.header("x-ratelimit-remaining"), answer.header("x-tidegate-secret")) == (b"7", None)
    assert answer.header("keep-alive") is None
    assert answer.header("content-length") == b"2"


async def test_client_errors_pass_unchanged_and_harm_no_worker(stage: Stage) -> None:
    """C8: 20 answers of 400 reach their clients as the engine wrote them; the workers go on serving."""
    body = b'{"object":"error","message":"context too long","code":400}'

    async def refuse(request: Request, responder: Responder) -> None:
        responder.send(400, JSON, body)

    async with stage.door() as door:
        for engine in stage.engines.values():
            engine.script = refuse
        answers = await asyncio.gather(*(door.post(chat(), x_tidegate_session_id=f"bad-{n}") for n in range(20)))
        assert {(answer.status, answer.body) for answer in answers} == {(400, body)}
        row = await stage.rows.one((answers[0].header("x-request-id") or b"").decode())
        assert (row.outcome, row.status, row.attempts) == ("client_error", 400, 1)
        again = await door.post(chat(), x_tidegate_session_id="bad-0")
        assert again.status == 400
        assert len((await door.get("/v1/models")).body) > 20
        assert sum(len(engine.seen) for engine in stage.engines.values()) == 21


CORPUS = (
    b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
    b'data:{"choices":[{"index":0,"delta":{"content":"no space\\u2028 and raw \xe2\x80\xa8 and \xc2\x85 inside"}}]}\n\n'
    b": a comment\r\n\r\n"
    b'event: x\r\ndata: {"choices":[{"index":0,\r\ndata: "delta":{"content":"two lines"}}]}\r\n\r\n'
    b'data: {"choices":[{"index":0,"delta":{"content":"cr"}}]}\r\r'
    b'data: {"choices":[{"index":0,"delta":{"content":"' + b"long " * 5000 + b'"}}]}\n\n'
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}],"usage":null}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}}\n\n'
    b"data: [DONE]\n\n"
)


def dribble(pieces: list[bytes]) -> object:
    async def script(request: Request, responder: Responder) -> None:
        responder.start(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
        for piece in pieces:
            responder.write(piece)
            await asyncio.sleep(0)
        responder.finish()

    return script


@pytest.mark.parametrize("seed", range(6))
async def test_a_stream_passes_byte_for_byte_wherever_it_is_cut(stage: Stage, seed: int) -> None:
    """C1: the client's bytes are the engine's bytes for every way of cutting them, line ends of all kinds included."""
    cuts = sorted(random.Random(seed).sample(range(1, len(CORPUS)), 120))
    pieces = [CORPUS[start:end] for start, end in zip([0, *cuts], [*cuts, len(CORPUS)], strict=True)]
    for engine in stage.engines.values():
        engine.script = dribble(pieces)  # type: ignore[assignment]
    async with stage.door() as door:
        answer = await door.post(chat(stream=True, stream_options={"include_usage": True}))
        assert answer.body == CORPUS
        row = await stage.rows.one((answer.header("x-request-id") or b"").decode())
        assert (row.outcome, row.input_tokens, row.output_tokens) == ("completed", 7, 5)


async def test_an_event_over_the_limit_ends_the_stream_not_the_process(stage: Stage) -> None:
    """C1: an event of megabytes is an error, not memory growth."""
    for engine in stage.engines.values():
        engine.script = dribble([b"data: {}\n\n", b"data: ", *[b"x" * 10_000] * 20])  # type: ignore[assignment]
    async with stage.door(event_bytes=50_000) as door:
        stream = await door.stream(chat(stream=True))
        pieces: list[bytes] = []
        with pytest.raises(ConnectionLostError):
            await stream.pipe(pieces.append)
        data = b"".join(pieces)
        assert data.startswith(b'data: {}\n\ndata: {"error"')
        assert b"event_too_large" in data
        row = await stage.rows.one((dict(stream.headers)[b"x-request-id"]).decode())
        assert (row.outcome, row.reason) == ("upstream_error", "event_too_large")


async def test_usage_is_asked_for_and_its_chunk_kept_from_those_who_did_not(stage: Stage) -> None:
    """C3: the engine is asked for usage by one splice; everything else of the body is the client's own bytes."""
    body = b'{ "model" : "%b", "stream":true,\n"messages": [ {"role":"user","content":"h\\u00e9\\ud83d\\ude00"} ] }'
    body %= MODEL.encode()
    for engine in stage.engines.values():
        engine.script = dribble([CORPUS])  # type: ignore[assignment]
    async with stage.door() as door:
        answer = await door.post(body)
    (request,) = [request for engine in stage.engines.values() for request in engine.seen]
    assert request.body == body.replace(b"{ ", b'{"stream_options":{"include_usage":true}, ', 1)
    usage_chunk = b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":5,"total_tokens":12}}\n\n'
    assert answer.body == CORPUS.replace(usage_chunk, b"")


async def test_splices_can_be_switched_off(stage: Stage) -> None:
    """With every splice off the engine gets the client's bytes and nothing else."""
    async with stage.door(splice_usage=False, splice_priority=False) as door:
        body = json.dumps(chat(stream=True)).encode()
        await door.post(body)
    (request,) = [request for engine in stage.engines.values() for request in engine.seen]
    assert request.body == body


async def test_the_session_id_is_spliced_where_asked(stage: Stage) -> None:
    """`splice_session_id` sends the session's id in the body, over whatever the client wrote there."""
    async with stage.door(splice_session_id=True) as door:
        await door.post(chat(session_id="forged"), x_tidegate_session_id="mine")
    (request,) = [request for engine in stage.engines.values() for request in engine.seen]
    assert json.loads(request.body)["session_id"] == "mine"


async def test_probes_answer_while_long_prompts_are_counted(stage: Stage, door_with_tokenizer: Door) -> None:
    """B6: 32 prompts of 400 KB are tokenised off the loop: what probes of /healthz wait for is far from the processor
    time of counting them, and what is over the bound is placed without its tokens, not stalled."""
    door = door_with_tokenizer
    text = "".join(f"def f{number}(x): return x + {number}\n" for number in range(14_000))[:400_000]
    tokenizer = LocalTokenizer(ASSETS, cache_bytes=1)
    began = time.thread_time()
    tokenizer.count(TextPrompt(text=text), None)
    one_s = time.thread_time() - began
    posts = [asyncio.create_task(door.post(chat(f"{number} {text}"))) for number in range(32)]
    used = []
    while not all(post.done() for post in posts):
        began = time.thread_time()
        answer = await door.client.fetch("GET", f"{door.url}/healthz", [], b"", Timeouts(total_s=30))
        assert answer.status == 200
        used.append(time.thread_time() - began)
    assert {(await post).status for post in posts} == {200}
    assert len(used) >= 20
    ordinary = sorted(used)[len(used) // 2]
    assert sum(used) - len(used) * ordinary < 32 * one_s / 4
    metrics = (await door.get("/metrics")).body.decode()
    counted = sum(float(value) for value in re.findall(r'prompts_total\{how="[a-z_]+"\} ([0-9.]+)', metrics))
    assert counted == 32


async def test_a_resent_conversation_costs_its_new_tail(stage: Stage, door_with_tokenizer: Door) -> None:
    """The second turn of a conversation encodes only what is new; its chain begins with the first one's."""
    door = door_with_tokenizer
    messages = [{"role": "user", "content": "tell me " + "word " * 3000}]
    async with stage.leader(lambda question: []) as asked:
        await door.post({"model": MODEL, "messages": messages})
        before = door.service.cached_tokens()
        messages += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "more"}]
        await door.post({"model": MODEL, "messages": messages})
        after = door.service.cached_tokens()
    hit, encoded = after[0] - before[0], after[1] - before[1]
    assert hit > 3000
    assert encoded < 50
    first, second = asked[0], asked[-1]
    assert (first.tokens_from, first.block_size) == ("tokenizer", 16)
    assert len(first.chain) == first.input_tokens // 16 * 8
    assert second.chain.startswith(first.chain[:-8])


async def test_the_bus_goes_away_and_requests_are_still_served(stage: Stage) -> None:
    """C9: without NATS the ingress serves by its last worker list, marked `fallback`; rows follow when it is back."""
    async with stage.door(worker_lost_s=2.0) as door:
        stage.nats.stop()
        stopped = time.monotonic()
        try:
            while time.monotonic() < stopped + 3.5:  # longer than a worker may be silent
                answer = await door.post(chat())
                assert answer.status == 200
                await asyncio.sleep(0.2)
        finally:
            stage.nats.start()
        row = await stage.rows.one((answer.header("x-request-id") or b"").decode(), timeout_s=20)
        assert (row.outcome, row.decision_mode) == ("completed", "fallback")
    bus = await connect(stage.nats.url, name="check", timeout_s=30)
    await bus.close()


async def test_a_bus_that_hangs_is_an_outage_too(stage: Stage) -> None:
    """C9 without a broken connection: while NATS is stopped dead, no worker counts as silent, and no request fails."""
    async with stage.door(worker_lost_s=3.0) as door:
        stage.nats.pause()
        paused = time.monotonic()
        statuses = []
        try:
            while time.monotonic() < paused + 4.5:  # longer than a worker may be silent
                statuses.append((await door.post(chat())).status)
        finally:
            stage.nats.resume()
        assert set(statuses) == {200}


async def test_a_gzip_body_reaches_the_engine_plain(stage: Stage) -> None:
    """Small and large ones, with their bytes as the client had them; its encoding is no header of the engine's."""
    for engine in stage.engines.values():
        engine.seen.clear()
    async with stage.door(tokenize="none") as door:
        for text in ("hello", "a long prompt " * 50_000):
            body = json.dumps(chat(text), indent=1).encode()
            answer = await door.post(gzip.compress(body), content_encoding="gzip")
            assert answer.status == 200
            (request,) = [request for engine in stage.engines.values() for request in engine.seen]
            assert request.body == body
            assert request.header("content-encoding") is None
            for engine in stage.engines.values():
                engine.seen.clear()


async def test_what_a_gzip_body_hides_is_bounded(stage: Stage) -> None:
    """A bomb is 413, rubbish 400, and what is held counts unpacked; nothing of it stays held."""
    bomb = gzip.compress(b" " * 8_000_000)
    async with stage.door(body_bytes=1_000_000, held_body_bytes=1_500_000) as door:
        for body, status, reason in (
            (bomb, 413, "body_too_large"),
            (b"no gzip", 400, "bad_encoding"),
            (gzip.compress(b"{}") * 1000, 400, "bad_encoding"),
            (gzip.compress(b"{not json"), 400, "bad_json"),
        ):
            answer = await door.post(body, content_encoding="gzip")
            assert (answer.status, error_of(answer)["code"]) == (status, reason)
        assert b"tidegate_ingress_held_body_bytes 0.0" in (await door.get("/metrics")).body
