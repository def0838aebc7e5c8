"""Looks at everything and judges it with `tidegate.doctor.checks`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from bus.errors import BusError
from bus.interface import BusMessage
from bus.nats import NatsBus
from bus.subjects import INDEX_MATCH, ROOT, TRACE_STREAM
from kvcore import IMPLEMENTATION, WHY
from schemas.base import BadMessageError, from_json, from_msgpack, to_msgpack
from schemas.index import MatchReply, MatchRequest
from schemas.worker import WorkerState
from tidegate.doctor import checks
from tidegate.doctor.checks import Check
from tidegate.errors import NoBusError
from tidegate.front_door import trusting
from tidegate.locate import Located, open_bus
from tidegate.policy.listing import asked_by_admission, list_policies
from tidegate.services import find_services, metadata_of
from web.client import HttpClient, Timeouts
from web.errors import ConnectError, WebError

LISTEN_S = 2.5
_ASK_S = 2.0
_CONSUMER_NOT_FOUND = 10014
"""JetStream's error code."""
_LEAST_PAYLOAD = 8 * 1024 * 1024


async def examine(located: Located, url: str | None) -> list[Check]:
    """All checks. ``url``: the front door, where the bus does not tell."""
    here = checks.check_kvcore(IMPLEMENTATION, WHY)
    try:
        bus = await open_bus(located, "tidegate-doctor")
    except NoBusError as error:
        fix = "start a system with `tidegate up`, or name the bus with --nats"
        return [here, Check(name="bus", verdict="failed", found=str(error).split(";")[0], fix=fix)]
    certificate = located.state.door_cert if located.state is not None else ""
    http = HttpClient(tls=trusting(certificate) if certificate and url is None else None)
    try:
        return [here, *await Examination(bus, http, located).all(url)]
    finally:
        await http.close()
        await bus.close()


class Examination:
    """One look at one system."""

    def __init__(self, bus: NatsBus, http: HttpClient, located: Located) -> None:
        self._bus = bus
        self._http = http
        self._located = located

    async def all(self, url: str | None) -> list[Check]:
        """In the order in which things depend on each other."""
        workers, services = await asyncio.gather(self._workers(), find_services(self._bus))
        found = [self._check_bus(), await self._check_stream()]
        found += checks.check_services([str(service["name"]) for service in services])
        found += checks.check_policies(await self._policies(services))
        found += checks.check_holding(_scheduling_policies(services), workers)
        found += checks.check_workers(workers, LISTEN_S)
        found += checks.check_streams(workers)
        found += checks.check_models(workers)
        pools = {state.profile.model: state for state in workers.values() if state.health != "left"}
        for model, state in sorted(pools.items()):
            reply = await self._match(state)
            found += checks.check_index(model, reply)
            found += checks.check_pools(model, reply)
            found.append(await self._check_tokenizer(state))
        for state in workers.values():
            found.append(await self._check_engine(state))
        found += await self._check_pages(services, url)
        return found

    def _check_bus(self) -> Check:
        limit = self._bus.max_payload
        found = f"{self._located.shown_url} (from {self._located.source}), messages up to {limit} bytes"
        if limit >= _LEAST_PAYLOAD:
            return Check(name="bus", verdict="ok", found=found)
        fix = f"set max_payload: {_LEAST_PAYLOAD} in nats-server's configuration"
        return Check(name="bus", verdict="warning", found=found, fix=fix)

    async def _check_stream(self) -> Check:
        info = await self._ask_json(f"$JS.API.STREAM.INFO.{TRACE_STREAM}")
        consumer = await self._ask_json(f"$JS.API.CONSUMER.INFO.{TRACE_STREAM}.recorder")
        error = consumer.get("error")
        if error is None:
            pending = int(consumer.get("num_pending", 0)) + int(consumer.get("num_ack_pending", 0))
            return checks.check_stream(info, pending)
        unknown = error.get("err_code") == _CONSUMER_NOT_FOUND
        return checks.check_stream(info, None, None if unknown else str(error.get("description", error)))

    async def _ask_json(self, subject: str) -> dict[str, Any]:
        try:
            answer = await self._bus.request(subject, b"", timeout_s=_ASK_S)
            return dict(json.loads(answer.payload))
        except (BusError, ValueError) as error:
            return {"error": {"description": str(error)}}

    async def _workers(self) -> dict[str, WorkerState]:
        """What bridges say within `LISTEN_S` (they speak once a second)."""
        workers: dict[str, WorkerState] = {}

        def on_state(message: BusMessage) -> None:
            try:
                state = from_json(message.payload, WorkerState)
            except BadMessageError:
                return  # a newer version's; it is missed below
            workers[state.worker] = state

        subscription = await self._bus.subscribe(f"{ROOT}.worker.state.>", on_state)
        await asyncio.sleep(LISTEN_S)
        await subscription.unsubscribe()
        return workers

    async def _policies(self, services: list[dict[str, Any]]) -> dict[str, bool]:
        """Users' policies that admission asks, and whether somebody listens to all of their questions."""
        if not asked_by_admission(services):
            return {}
        return {listed.name: not listed.missing for listed in await list_policies(self._bus) if listed.asked}

    async def _match(self, state: WorkerState) -> MatchReply | None:
        profile = state.profile
        question = MatchRequest(
            model=profile.model, block_size=profile.block_size or 16, chain=b"", salt_rule=profile.salt_rule
        )
        try:
            answer = await self._bus.request(INDEX_MATCH, to_msgpack(question), timeout_s=_ASK_S)
            return from_msgpack(answer.payload, MatchReply)
        except (BusError, BadMessageError):
            return None

    async def _check_tokenizer(self, state: WorkerState) -> Check:
        body = json.dumps({"model": state.profile.model, "prompt": "one two three"}).encode()
        problem = await self._fetch("POST", f"{state.profile.url}/tokenize", body)
        return checks.check_tokenizer(state.profile.model, problem is None, f"/tokenize: {problem}")

    async def _check_engine(self, state: WorkerState) -> Check:
        url = state.profile.url
        name = f"engine {state.worker}"
        problem = await self._fetch("GET", f"{url}/v1/models")
        if problem is None:
            return Check(name=name, verdict="ok", found=f"{url}/v1/models answers")
        fix = "harmless if only the bridge and the front door can reach it; else see the engine"
        return Check(name=name, verdict="warning", found=f"{url} from here: {problem}", fix=fix)

    async def _check_pages(self, services: list[dict[str, Any]], url: str | None) -> list[Check]:
        """Readiness of the front door and of every service that says where its page is."""
        pages: dict[str, str] = {}
        for service in services:
            metadata = metadata_of(service)
            if metadata.get("http"):
                instance = metadata.get("instance") or service.get("id")
                pages[f"ready {instance}"] = str(metadata["http"])
        distant = set(pages)
        if self._located.state is not None:
            here = {page.removesuffix("/readyz") for page in self._located.state.health.values()}
            distant = {name for name, page in pages.items() if page.rstrip("/") not in here}
            known = {page.rstrip("/") for page in pages.values()}
            for child, page in self._located.state.health.items():
                base = page.removesuffix("/readyz")
                if page.endswith("/readyz") and base not in known:
                    pages[f"ready {child}"] = base
        door = url or (self._located.state.url if self._located.state is not None else None)
        if door is not None:
            pages["front door"] = door.rstrip("/").removesuffix("/v1")
        found = []
        for name, page in pages.items():
            reached, why_not = await self._ask("GET", f"{page}/readyz")
            found.append(checks.check_ready(name, page, why_not, out_of_reach=name in distant and not reached))
        return found

    async def _fetch(self, method: str, url: str, body: bytes = b"") -> str | None:
        """``None`` for 2xx, else what is wrong."""
        _, problem = await self._ask(method, url, body)
        return problem

    async def _ask(self, method: str, url: str, body: bytes = b"") -> tuple[bool, str | None]:
        """Whether anybody answers there, and what is wrong (``None`` for 2xx)."""
        headers = [(b"content-type", b"application/json")] if body else []
        try:
            answer = await self._http.fetch(method, url, headers, body, Timeouts(connect_s=1.0, total_s=_ASK_S))
        except WebError as error:
            return not isinstance(error, ConnectError), str(error)
        if 200 <= answer.status < 300:
            return True, None
        return True, answer.body.decode(errors="replace").strip()[:200] or f"status {answer.status}"


def _scheduling_policies(services: list[dict[str, Any]]) -> list[str]:
    """Those that admission services run."""
    named = (metadata_of(each).get("policy") for each in services if each.get("name") == "tidegate-admission")
    return [str(policy) for policy in named if policy]
