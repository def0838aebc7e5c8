"""Which processes make a system, how each is called, in what order they start and stop. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from tidegate.supervisor.engines import EngineAddress

_POOL_BRIDGE = "bridge-pool"
INNER_HOST = "127.0.0.1"
"""Where everything but the front door listens."""


class Stage(IntEnum):
    """The order of a clean stop: who feeds others stops before those it feeds. Starting is the other way round for
    the bus and the engines; everything else starts together and waits for what it needs."""

    INGRESS = 0
    PLANNING = 1
    BRIDGE = 2
    INDEXER = 3
    RECORDER = 4
    ENGINE = 5
    BUS = 6


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process. ``ready_url`` answers 200 when it is ready; ``stop_s``: seconds it may take after SIGTERM.
    ``section`` of its settings and what we set there, where it is one of our programs."""

    name: str
    command: tuple[str, ...]
    stage: Stage
    ready_url: str
    stop_s: float = 10.0
    section: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Simulated:
    """A simulated engine to start: its id on the bus, its HTTP port and its two ZeroMQ ports."""

    worker: str
    port: int
    events_port: int
    replay_port: int


POOL = "pool-a"
"""Name on the bus of the simulated shared pool."""


@dataclass(frozen=True, slots=True)
class SimulatedPool:
    """A simulated shared pool to start: its HTTP port and its ZeroMQ port."""

    port: int
    events_port: int


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of this system. ``health``: of each service process, by its child's name."""

    ingress: int
    nats: int
    nats_monitor: int
    health: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SystemPlan:
    """Everything that `children` needs to know. Paths are absolute.

    ``host``: where the front door listens; all else stays on loopback. ``nats_url`` of the bus in use; ``nats_command``
    is ``None`` when it is somebody else's. ``pool``: that the simulated engines share. ``tokenizers``: model to the
    folder of its tokenizer. ``captured``: where the front door writes prompts, if it was told where;
    ``door_files``: its settings that name files, ``engine_tls_ca``: the bridges' one; ``door_workers``: its processes,
    if it was told. ``config``: the user's TOML file, handed to every process. ``secrets``: where the password of each
    user of the bus lies, if it has users.
    ``overrides``: settings by section that win over ours.
    """

    python: str
    host: str
    model: str
    ports: Ports
    traces: Path
    nats_url: str
    nats_command: tuple[str, ...] | None
    simulated: tuple[Simulated, ...] = ()
    pool: SimulatedPool | None = None
    engines: tuple[EngineAddress, ...] = ()
    tokenizers: Mapping[str, str] = field(default_factory=dict)
    captured: Path | None = None
    door_files: Mapping[str, str] = field(default_factory=dict)
    engine_tls_ca: str = ""
    door_workers: int | None = None
    config: Path | None = None
    secrets: Path | None = None
    overrides: Mapping[str, Mapping[str, str]] | None = None


def service_names(simulated: int, real: int, *, pool: bool = False) -> list[str]:
    """Names of the service children (not engines, not the bus) of a system with so many engines. ``pool``: they share
    one."""
    bridges = [f"bridge-{number}" for number in range(1, simulated + real + 1)] + [_POOL_BRIDGE] * pool
    return ["ingress", "admission", "hints", *bridges, "indexer", "recorder"]


def children(plan: SystemPlan) -> list[ChildSpec]:
    """Every child, in the order of starting."""
    specs: list[ChildSpec] = []
    if plan.nats_command is not None:
        url = f"http://{INNER_HOST}:{plan.ports.nats_monitor}/healthz"
        specs.append(ChildSpec("nats", plan.nats_command, Stage.BUS, url))
    if plan.pool is not None:
        specs.append(_pool(plan, plan.pool))
    for number, engine in enumerate(plan.simulated, start=1):
        specs.append(_engine(plan, f"engine-{number}", engine))
    specs.append(_service(plan, "indexer", "indexer", Stage.INDEXER, {}))
    for number, settings in enumerate(_bridge_settings(plan), start=1):
        specs.append(_service(plan, f"bridge-{number}", "bridge", Stage.BRIDGE, settings))
    if plan.pool is not None:
        followed = {
            "pool": POOL,
            "pool_url": f"http://{INNER_HOST}:{plan.pool.port}",
            "pool_events": f"tcp://{INNER_HOST}:{plan.pool.events_port}",
        }
        specs.append(_service(plan, _POOL_BRIDGE, "bridge", Stage.BRIDGE, followed))
    specs.append(_service(plan, "admission", "admission", Stage.PLANNING, {}))
    specs.append(_service(plan, "hints", "hints", Stage.PLANNING, {}))
    specs.append(_service(plan, "recorder", "recorder", Stage.RECORDER, {"directory": str(plan.traces)}))
    door = {"host": plan.host, "port": str(plan.ports.ingress)}
    if plan.tokenizers:
        door["tokenizers"] = json.dumps(dict(plan.tokenizers))
    if plan.captured is not None:
        door["capture_directory"] = str(plan.captured)
    if plan.door_workers is not None:
        door["workers"] = str(plan.door_workers)
    door |= plan.door_files
    specs.append(_service(plan, "ingress", "ingress", Stage.INGRESS, door))
    return specs


def _bridge_settings(plan: SystemPlan) -> list[dict[str, str]]:
    shared = {"shared_pool": POOL, "shared_tp": "1"} if plan.pool is not None else {}
    settings = [
        {
            "engine_url": f"http://{INNER_HOST}:{engine.port}",
            "worker": engine.worker,
            "engine": "simulated",
            "kv_events": json.dumps([f"tcp://{INNER_HOST}:{engine.events_port}"]),
            "kv_replay": json.dumps([f"tcp://{INNER_HOST}:{engine.replay_port}"]),
            **shared,
        }
        for engine in plan.simulated
    ]
    for address in plan.engines:
        real = {"engine_url": address.url}
        if address.events:
            real["kv_events"] = json.dumps(address.events)
        if plan.engine_tls_ca:
            real["engine_tls_ca"] = plan.engine_tls_ca
        if address.replay:
            real["kv_replay"] = json.dumps(address.replay)
        settings.append(real)
    return settings


def _engine(plan: SystemPlan, name: str, engine: Simulated) -> ChildSpec:
    settings = {
        "instance": name,
        "http_host": INNER_HOST,
        "http_port": str(engine.port),
        "model": plan.model,
        "kv_events_endpoint": f"tcp://{INNER_HOST}:{engine.events_port}",
        "replay_endpoint": f"tcp://{INNER_HOST}:{engine.replay_port}",
    }
    if plan.pool is not None:
        settings["pool_url"] = f"http://{INNER_HOST}:{plan.pool.port}"
    url = f"http://{INNER_HOST}:{engine.port}/health"
    return _child(plan, name, Stage.ENGINE, "load.engine", "engine", settings, url)


def _pool(plan: SystemPlan, pool: SimulatedPool) -> ChildSpec:
    settings = {
        "instance": POOL,
        "http_host": INNER_HOST,
        "http_port": str(pool.port),
        "kv_events_endpoint": f"tcp://{INNER_HOST}:{pool.events_port}",
        "backend_id": POOL,
    }
    url = f"http://{INNER_HOST}:{pool.port}/health"
    return _child(plan, "pool", Stage.ENGINE, "load.pool", "pool", settings, url)


def _service(plan: SystemPlan, name: str, section: str, stage: Stage, settings: Mapping[str, str]) -> ChildSpec:
    port = plan.ports.health[name]
    common = {
        "instance": name if name.startswith("bridge") else f"{section}-1",
        "nats_url": plan.nats_url,
        "http_host": INNER_HOST,
        "http_port": str(port),
    }
    if plan.secrets is not None:
        common |= {"nats_user": section, "nats_password_file": str(plan.secrets / section)}
    url = f"http://{INNER_HOST}:{port}/readyz"
    return _child(plan, name, stage, f"services.{section}", section, {**common, **settings}, url)


def _child(
    plan: SystemPlan,
    name: str,
    stage: Stage,
    module: str,
    section: str,
    settings: Mapping[str, str],
    ready_url: str,
) -> ChildSpec:
    settings = {**settings, **(plan.overrides or {}).get(section, {})}
    # -P: a folder named `services` in the user's working directory must not stand before ours.
    command = [plan.python, "-P", "-m", module]
    if plan.config is not None:
        command += ["--config", str(plan.config)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    return ChildSpec(name, tuple(command), stage, ready_url, section=section, settings=settings)
