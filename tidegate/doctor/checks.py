"""Judgements on what was found. Pure: each takes what was seen and gives a `Check`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from schemas.index import MatchReply
from schemas.worker import WorkerState

Verdict = Literal["ok", "warning", "failed"]
LATE_ROWS = 1_000


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the doctor's table. ``fix``: what to do, where it is not ok."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def failed(checks: Sequence[Check]) -> bool:
    """Whether the doctor's exit code is 1."""
    return any(check.verdict == "failed" for check in checks)


def counted(number: int, thing: str) -> str:
    """``1 row``, ``2 rows``."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def check_kvcore(implementation: str, why: str | None) -> Check:
    """Which twin of `kvcore` works in this environment? Both are right; the native one is faster."""
    found = f"{implementation}: {why}" if why else implementation
    return Check(name="kvcore here", verdict="ok", found=found)


def check_workers(workers: Mapping[str, WorkerState], listened_s: float) -> list[Check]:
    """Are there engines, and is each well?"""
    if not workers:
        fix = "start a bridge for each engine (`tidegate up` does), and see its log"
        return [Check(name="workers", verdict="failed", found=f"no worker spoke within {listened_s:g} s", fix=fix)]
    return [_check_worker(state) for _, state in sorted(workers.items())]


def _check_worker(state: WorkerState) -> Check:
    profile = state.profile
    name = f"worker {state.worker}"
    found = f"{state.health}, {profile.engine} {profile.engine_version or ''} at {profile.url}".replace("  ", " ")
    if state.health == "ready":
        return Check(name=name, verdict="ok", found=found)
    found += f": {state.reason}" if state.reason else ""
    fixes = {
        "starting": "wait for the engine to load its model, then look again",
        "unhealthy": f"see whether the engine answers: curl {profile.url}/health",
        "mismatch": "its events contradict its profile; give the bridge the engine's real block_size",
        "left": "its bridge has stopped; start it again",
    }
    verdict: Verdict = "warning" if state.health in ("starting", "left") else "failed"
    return Check(name=name, verdict=verdict, found=found, fix=fixes[state.health])


def check_models(workers: Mapping[str, WorkerState]) -> list[Check]:
    """Workers of one model must agree on block size and salt rule, else their caches cannot be compared."""
    pools: dict[str, set[tuple[int | None, str]]] = {}
    for state in workers.values():
        if state.health != "left":
            rules = pools.setdefault(state.profile.model, set())
            rules.add((state.profile.block_size, state.profile.salt_rule))
    checks = []
    for model, rules in sorted(pools.items()):
        name = f"model {model}"
        sizes = ", ".join(sorted({str(size) for size, _ in rules}))
        if len(rules) > 1:
            salts = ", ".join(sorted({salt for _, salt in rules}))
            found = f"block sizes differ: {sizes}" if "," in sizes else f"salt rules differ: {salts}"
            fix = "start all engines of a model with the same --block-size and salt rule"
            checks.append(Check(name=name, verdict="warning", found=found, fix=fix))
        elif None in {size for size, _ in rules}:
            fix = "switch the engine's KV events on, or set block_size on its bridge"
            checks.append(Check(name=name, verdict="warning", found="block size not known yet", fix=fix))
        else:
            checks.append(Check(name=name, verdict="ok", found=f"blocks of {sizes} tokens"))
    return checks


def check_streams(workers: Mapping[str, WorkerState]) -> list[Check]:
    """Does each rank's event stream reach the bridge without a gap?"""
    checks = []
    for worker, state in sorted(workers.items()):
        name = f"events {worker}"
        if state.health == "left":
            continue
        if not state.streams:
            fix = "start the engine with KV events on (vLLM: --kv-events-config) and name them to its bridge"
            checks.append(Check(name=name, verdict="warning", found="no event stream", fix=fix))
        for stream in state.streams:
            place = f" at {stream.seq}" if stream.seq >= 0 else ", nothing published yet"
            gaps = counted(stream.gaps, "gap")
            found = f"rank {stream.rank} {stream.state}{place}, {gaps}, {stream.rejected} rejected"
            if stream.state == "synced":
                checks.append(Check(name=name, verdict="ok", found=found))
                continue
            found += f": {stream.reason}" if stream.reason else ""
            fix = "wait for the replay" if stream.state == "catching_up" else "see the bridge's log; is the port right?"
            verdict: Verdict = "warning" if stream.state == "catching_up" else "failed"
            checks.append(Check(name=name, verdict=verdict, found=found, fix=fix))
    return checks


_WITHOUT_INDEXER = "nobody can be asked who holds what; decisions need one only with admission's index = ask"


def check_index(model: str, reply: MatchReply | None) -> list[Check]:
    """What does an indexer say of each rank of a model? ``None``: it did not answer."""
    name = f"index {model}"
    if reply is None or reply.error:
        found = reply.error if reply is not None and reply.error else "no indexer answers"
        fix = f"start one: python -m services.indexer; until then {_WITHOUT_INDEXER}"
        return [Check(name=name, verdict="failed", found=found, fix=fix)]
    checks = []
    for match in reply.matches:
        found = f"{match.worker} rank {match.rank}: {match.health}, {counted(match.resident_blocks, 'block')}"
        found += f": {match.reason}" if match.reason else ""
        if match.health == "synced":
            checks.append(Check(name=name, verdict="ok", found=found))
        else:
            fix = "its requests are placed by session and load until it is synced; see the logs of indexer and bridge"
            if match.health == "approximate":
                fix = (
                    f"its requests are placed by what was sent there; docs/operations.md says what {match.reason} means"
                )
            checks.append(Check(name=name, verdict="warning", found=found, fix=fix))
    if not checks:
        fix = "see the bridges' logs: their events must reach the bus"
        checks.append(Check(name=name, verdict="failed", found="the index knows no source", fix=fix))
    return checks


def check_pools(model: str, reply: MatchReply | None) -> list[Check]:
    """What does an indexer say of the shared pools that workers of a model read?"""
    checks = []
    for pool in reply.pools if reply is not None else ():
        name, age = f"pool {pool.pool}", "" if pool.age_ms is None else f", reconciled {pool.age_ms / 1000:.0f} s ago"
        found = f"{model}: {pool.health}" + (f": {pool.reason}" if pool.reason else "") + age
        if pool.health == "synced":
            checks.append(Check(name=name, verdict="ok", found=found))
        else:
            worth = "its pages count for nothing" if pool.health == "blind" else "its pages count for less"
            fix = f"{worth} until it is synced; docs/operations.md (a shared pool) says what {pool.reason} means"
            checks.append(Check(name=name, verdict="warning", found=found, fix=fix))
    return checks


def check_stream(info: Mapping[str, Any], pending: int | None, problem: str | None = None) -> Check:
    """The trace stream as JetStream describes it; ``pending``: rows that the recorder has not written yet, ``None``
    where there is no such consumer; ``problem``: why that could not be asked."""
    error = info.get("error")
    if error:
        fix = "start nats-server with JetStream on (-js), or any of our services once, which makes the stream"
        found = str(error.get("description", error))
        return Check(name="trace stream", verdict="failed", found=found, fix=fix)
    state = info.get("state", {})
    found = f"{counted(state.get('messages', 0), 'row')}, {counted(state.get('bytes', 0), 'byte')}"
    if problem is not None:
        fix = "look again; when it stays so, see nats-server's log"
        found += f", its recorder could not be asked for: {problem}"
        return Check(name="trace stream", verdict="warning", found=found, fix=fix)
    if pending is None:
        return Check(name="trace stream", verdict="ok", found=f"{found}, no recorder has read it")
    found += f", {pending} not recorded yet"
    if pending > LATE_ROWS:
        fix = "the recorder is behind or gone; see its log and its disk"
        return Check(name="trace stream", verdict="warning", found=found, fix=fix)
    return Check(name="trace stream", verdict="ok", found=found)


def check_tokenizer(model: str, answers: bool, problem: str) -> Check:
    """Does an engine count tokens when it is asked? The front door needs that, or a local tokenizer."""
    name = f"tokenizer {model}"
    if answers:
        return Check(name=name, verdict="ok", found="the engine's /tokenize answers")
    fix = (
        "harmless where the front door has a local one ([ingress] tokenizers); else requests are placed by blocks of "
        "their text (`approximate`)"
    )
    return Check(name=name, verdict="warning", found=problem, fix=fix)


def check_services(names: Sequence[str]) -> list[Check]:
    """Which of our services answer ``$SRV.PING``?"""
    checks = []
    for service, without in _SERVICES.items():
        count = sum(name == f"tidegate-{service}" for name in names)
        if count:
            checks.append(Check(name=f"service {service}", verdict="ok", found=f"{count} running"))
        else:
            fix = f"start it: python -m services.{service} --set nats_url=..."
            found = f"none answers; {without}"
            verdict: Verdict = "failed" if service in ("ingress", "bridge") else "warning"
            checks.append(Check(name=f"service {service}", verdict=verdict, found=found, fix=fix))
    return checks


def check_policies(answering: Mapping[str, bool]) -> list[Check]:
    """Does anybody serve the users' policies that admission and hints ask? Name to whether somebody does."""
    checks = []
    for policy, answers in sorted(answering.items()):
        name = f"policy {policy}"
        if answers:
            checks.append(Check(name=name, verdict="ok", found="served"))
        else:
            settings = "[[admission.policies]] and [[hints.policies]]"
            fix = f"start the process that serves Policy({policy!r}), or take it out of {settings}"
            found = "does not answer; the built-in choice stands"
            checks.append(Check(name=name, verdict="warning", found=found, fix=fix))
    return checks


def check_holding(policies: Sequence[str], workers: Mapping[str, WorkerState]) -> list[Check]:
    """May turns be held, and can they be where they should? ``policies``: those of the admission services."""
    names = sorted(set(policies))
    if not names:
        return []
    name = "scheduling policy"
    if len(names) > 1:
        fix = "give every admission process, leader or standby, the same [admission] policy"
        return [Check(name=name, verdict="warning", found=f"admission services differ: {', '.join(names)}", fix=fix)]
    if names == ["kv"]:
        return [Check(name=name, verdict="ok", found="kv: no turn is held")]
    unsized = [each for each, state in sorted(workers.items()) if state.health == "ready" and not _is_sized(state)]
    if not unsized:
        return [Check(name=name, verdict="ok", found=f'{names[0]}: turns may be held (policy = "kv" holds none)')]
    found = f"{names[0]}, but {', '.join(unsized)} does not say how much KV it has: its turns are placed as under kv"
    fix = "see that the engine's /metrics name its KV cache (SGLang: --enable-metrics); or set block_size on its bridge"
    return [Check(name=name, verdict="warning", found=found, fix=fix)]


def _is_sized(state: WorkerState) -> bool:
    return bool(state.profile.kv_tokens and state.profile.block_size)


_SERVICES = {
    "ingress": "nothing is served",
    "bridge": "no engine is known",
    "indexer": _WITHOUT_INDEXER,
    "admission": "the front door places requests by itself",
    "hints": "caches are told nothing",
    "recorder": "rows stay in the stream",
}
"""Service to what is missing without it."""


def check_ready(name: str, url: str, why_not: str | None, *, out_of_reach: bool = False) -> Check:
    """A readiness page. ``out_of_reach``: its service answers on the bus, and nobody at this address does."""
    if why_not is None:
        return Check(name=name, verdict="ok", found=f"ready at {url}")
    if out_of_reach:
        fix = "ask on its own machine; or let its page listen where you can reach it: http_host"
        return Check(name=name, verdict="warning", found=f"{url} from here: {why_not}", fix=fix)
    return Check(name=name, verdict="failed", found=why_not, fix=f"see its log; ask again: curl {url}/readyz")
