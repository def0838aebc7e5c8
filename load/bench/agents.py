"""Agents through the whole system, policy by policy: real processes, two simulated engines, more sessions than memory.

Every policy has a house of its own (``tidegate up``: nats-server, front door, admission, indexer, bridges, engines,
hints, recorder) and the same agents (`load.bench.agents_plan`), so many at a time; `load.bench.agents_figures` says
what is reported. What stands for what:

- ``token_scale``: prompts, answers, KV and chunks of the engine have this many times fewer tokens than the published
  workload and machine (412,000 tokens of KV an engine).
- ``time_scale``: tools and the seconds in policies' parameters are this many times shorter. Where both scales are the
  same, engines take the published constants' time for the tokens that they have (``speed`` is the one over the
  other), and so does what policies assume of a token's cost. What a policy has as a constant of time is as it is
  (``commit`` steers kappa every 5 s).

An engine schedules by priority, and gets it from admission, where the policy is made for that (``engine_scheduling``).
Pins that a policy asks for reach no engine: of ``continuum`` only its order acts (``pins_dropped`` counts the rest).

Whether engines or the machine were what all waited for: ``cpu_cores_used`` by all processes, ``loop_lag_p99_ms``, by
how much timers of this process were late, and ``engine_lost_share``, the share of the run that an engine was late by
and could not catch up with.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Self

from bus.interrupt import until_interrupted
from bus.nats import connect
from load.bench.agents_client import AgentClient, RunResult
from load.bench.agents_figures import Figures, Sizes, measure, over_kv
from load.bench.agents_house import ENGINES, House, HouseError, Rows
from load.bench.agents_plan import AgentPlan, Scales, plan
from load.bench.measure import percentile
from load.bench.options import InterruptedByUser, Options
from load.engine.timing import H100_8B
from services.admission.policies.registry import make_policy

POLICIES = ("kv", "thunderagent", "continuum", "commit")
CONCURRENCY = 64
SESSIONS = 96
SCALE = 8.0
BLOCK_SIZE = 16
CHUNK = 2_048
HOLD_S = 3_600.0
"""Longer than anything here: what a policy holds is ended by nobody else, in seconds."""

QUICK_CONCURRENCY = 5
QUICK_SESSIONS = 6
QUICK_POLICIES = ("kv", "commit")
QUICK_KV_TOKENS = 120_000
"""Before scaling: in proportion to the fewer sessions."""
QUICK_SCALES = 64.0, 16.0
"""Of time, of tokens."""

LIMIT_S = 3_000.0
"""Of one policy's run, in seconds."""


def policy_parameters(policy: str, scales: Scales) -> dict[str, object]:
    """The policy's own, with its seconds and its fixed tokens scaled."""
    seconds, tokens = scales.time, scales.tokens
    if policy == "commit":
        return {"bypass_s": 10 / seconds, "hold_limit_s": 300 / seconds, "idle_expiry_s": 600 / seconds}
    if policy == "continuum":
        return {"cold_start_mean_s": 1 / seconds, "cold_start_limit_s": 60 / seconds}
    if policy == "thunderagent":
        return {
            "dynamo": {
                "resume_timeout_seconds": 1_800 / seconds,
                "scheduler_interval_seconds": 5 / seconds,
                "acting_decay_tau_seconds": 1 / seconds,
                "buffer_per_program": round(100 / tokens),
            }
        }
    return {}


def engine_scheduling(policy: str) -> str:
    """``priority`` where the policy is made for engines that schedule so, else ``fcfs``."""
    return str(getattr(getattr(make_policy(policy), "engine", None), "scheduling", "fcfs"))


def settings(policy: str, *, kv_tokens: float, scales: Scales, seed: int) -> dict[str, str]:
    """Of the house, as the environment has them. ``kv_tokens`` before scaling."""
    parameters = policy_parameters(policy, scales)
    by_priority = engine_scheduling(policy) == "priority"
    return {
        "TIDEGATE_ENGINE_PROFILE": H100_8B.name,
        "TIDEGATE_ENGINE_SPEED": str(scales.time / scales.tokens),
        "TIDEGATE_ENGINE_NUM_BLOCKS": str(int(kv_tokens / scales.tokens) // BLOCK_SIZE + 1),
        "TIDEGATE_ENGINE_BLOCK_SIZE": str(BLOCK_SIZE),
        "TIDEGATE_ENGINE_MAX_NUM_BATCHED_TOKENS": str(round(CHUNK / scales.tokens)),
        "TIDEGATE_ENGINE_CHUNK_TOKENS": "8",
        "TIDEGATE_ENGINE_SEED": str(seed),
        "TIDEGATE_ENGINE_SCHEDULING_POLICY": engine_scheduling(policy),
        "TIDEGATE_ADMISSION_POLICY": policy,
        "TIDEGATE_ADMISSION_POLICY_PARAMETERS": json.dumps(parameters),
        "TIDEGATE_ADMISSION_ENGINE_PRIORITIES": str(by_priority).lower(),
        "TIDEGATE_ADMISSION_HOLD_DEADLINE_S": str(HOLD_S),
        "TIDEGATE_ADMISSION_SEED": str(seed),
        "TIDEGATE_INGRESS_ADMIT_DEADLINE_S": str(HOLD_S),
        "TIDEGATE_INGRESS_FIRST_BYTE_TIMEOUT_S": str(HOLD_S),
    }


def run(options: Options) -> dict[str, object]:
    """Every policy of the options in turn. Raises `HouseError`, `InterruptedByUser`."""
    quick = options.quick
    scales = Scales(*(QUICK_SCALES if quick else (SCALE, SCALE)))
    if options.scale is not None:
        scales = Scales(options.scale, options.scale)
    policies = options.policies or (QUICK_POLICIES if quick else POLICIES)
    concurrency = options.concurrency or (QUICK_CONCURRENCY if quick else CONCURRENCY)
    sessions = max(options.sessions or (QUICK_SESSIONS if quick else SESSIONS), concurrency)
    kv_tokens = QUICK_KV_TOKENS if quick else H100_8B.kv_tokens
    houses = {name: settings(name, kv_tokens=kv_tokens, scales=scales, seed=options.seed) for name in policies}
    agents = plan(sessions, options.seed, scales)
    sizes = Sizes(agents.shared, agents.tools, BLOCK_SIZE, concurrency, scales.time)
    figures = asyncio.run(until_interrupted(_run(agents, sizes, houses, options)))
    if figures is None:
        raise InterruptedByUser
    return {
        "bench": "agents",
        "quick": quick,
        "seed": options.seed,
        "time_scale": scales.time,
        "token_scale": scales.tokens,
        "engines": ENGINES,
        "engine_profile": H100_8B.name,
        "kv_tokens": kv_tokens,
        "concurrency": concurrency,
        "root_sessions": sessions,
        "sessions": len(agents.sessions),
        "turns": agents.turns,
        "policies": {name: one | over_kv(one, figures.get("kv")) for name, one in figures.items()},
    }


async def _run(
    agents: AgentPlan, sizes: Sizes, houses: Mapping[str, Mapping[str, str]], options: Options
) -> dict[str, Figures]:
    """Policy by policy. The houses' folders go with them; that of one that fails is kept, and named."""
    directory = Path(tempfile.mkdtemp(prefix="tidegate-agents-"))
    figures: dict[str, Figures] = {}
    try:
        for name, house in houses.items():
            figures[name] = await _policy(name, House(directory / name, house), agents, sizes, options)
    except HouseError as error:
        raise HouseError(f"{error}\n  logs are kept in {directory}") from error
    except BaseException:
        await asyncio.to_thread(shutil.rmtree, directory)
        raise
    await asyncio.to_thread(shutil.rmtree, directory)
    return figures


async def _policy(name: str, house: House, agents: AgentPlan, sizes: Sizes, options: Options) -> Figures:
    options.progress(f"{name}: starting")
    started = time.monotonic()

    def progress(turns: int, failed: int) -> None:
        note = f", {failed} failed" if failed else ""
        options.progress(f"{name}{note}", turns, agents.turns)

    try:
        await house.start()
        bus = await connect(house.nats_url, name="bench-agents")
        client = AgentClient(house.base_url, house.model, timeout_s=HOLD_S)
        rows = Rows(bus)
        try:
            rows.start()
            before, own_before = house.cpu_s(), time.process_time()
            began = time.monotonic()
            with Lag() as lag:
                result = await _driven(client.run(agents, sizes.concurrency, progress), house)
            seconds = time.monotonic() - began
            cpu_s = house.cpu_s() - before + time.process_time() - own_before
            await rows.wait({turn.request_id for turn in result.turns if turn.request_id is not None})
        finally:
            await client.close()
            await rows.stop()
            await bus.close()
        figures = measure(result, rows.rows, sizes)
        figures["preemptions"] = int(await house.counters("engine", "vllm:num_preemptions_total"))
        figures["pins_dropped"] = int(await house.counters("admission", "tidegate_policy_ignored_total", what="pin"))
        figures["cpu_cores_used"] = round(cpu_s / seconds, 2)
        figures["engine_lost_share"] = round(await house.lost_s() / ENGINES / seconds, 4)
        figures["loop_lag_p99_ms"] = round(lag.p99_ms, 1)
    finally:
        options.progress(f"{name}: stopping")
        await house.stop()
    figures["with_start_s"] = round(time.monotonic() - started, 1)
    figures["engine_scheduling"] = engine_scheduling(name)
    return figures


async def _driven(work: Coroutine[None, None, RunResult], house: House) -> RunResult:
    """The work's result. Raises `HouseError` where the system ended under it, or it takes too long."""
    try:
        async with asyncio.timeout(LIMIT_S):
            result = await work
    except TimeoutError:
        raise HouseError(f"the agents are not through after {LIMIT_S:g} s") from None
    house.check()
    return result


class Lag:
    """How late a timer of 20 ms was, again and again while this is open."""

    EVERY_S = 0.02

    def __init__(self) -> None:
        self._late_ms: list[float] = []
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def p99_ms(self) -> float:
        return percentile(self._late_ms or [0.0], 99)

    def __enter__(self) -> Self:
        self._again()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _again(self) -> None:
        loop = asyncio.get_running_loop()
        if self._due:
            self._late_ms.append(max(0.0, loop.time() - self._due) * 1000)
        self._due = loop.time() + self.EVERY_S
        self._timer = loop.call_at(self._due, self._again)
