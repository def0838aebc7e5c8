"""The processes of a soak and their settings. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from load.engine import assets
from load.soak.plan import ADMISSIONS, BRIDGES, ENGINES, INDEXERS, INGRESSES

MODEL = "sim-8b"
BLOCK_SIZE = 16
MAX_PAYLOAD_BYTES = 8 * 1024 * 1024

_ENGINE_BLOCKS = 1_024
"""Of each engine: little enough that sessions evict each other, enough that one engine alone serves all."""

DOOR_PATIENCE = {"first_byte_timeout_s": "8", "idle_timeout_s": "8", "total_timeout_s": "100", "stall_timeout_s": "30"}
"""A hung engine must be noticed within a soak's steps; a machine that is short of processors must not look like one."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process. ``module``: of a program of ours (``None``: nats-server) with its settings; ``port``: where it
    answers over HTTP, ``ready_path`` with 200 when it is ready."""

    name: str
    module: str | None
    settings: Mapping[str, str]
    port: int
    ready_path: str = "/readyz"


@dataclass(frozen=True, slots=True)
class Ports:
    """``http``: of every part, by name. ``bus``: where each nats-server takes clients; ``routes``: where the servers
    speak to each other. ``events``, ``replay``: of each engine's KV events."""

    http: Mapping[str, int]
    bus: Mapping[str, int]
    routes: Mapping[str, int]
    events: Mapping[str, int]
    replay: Mapping[str, int]


SERVICES = (*BRIDGES, *INDEXERS, *ADMISSIONS, *INGRESSES, "hints", "recorder")
"""The parts that are on the bus, each behind a relay of its own."""


def engine_parts(ports: Ports) -> list[Part]:
    """The simulated engines."""
    return [
        Part(
            name,
            "load.engine",
            {
                "instance": name,
                "http_port": str(ports.http[name]),
                "model": MODEL,
                "num_blocks": str(_ENGINE_BLOCKS),
                "kv_events_endpoint": f"tcp://127.0.0.1:{ports.events[name]}",
                "replay_endpoint": f"tcp://127.0.0.1:{ports.replay[name]}",
            },
            ports.http[name],
            "/health",
        )
        for name in ENGINES
    ]


def service_parts(ports: Ports, urls: Mapping[str, str], traces: str, replicas: int) -> list[Part]:
    """The services; ``urls``: of the bus, as each of them sees it. ``traces``: the recorder's folder."""
    own: dict[str, dict[str, str]] = {
        **{bridge: _bridge(engine, ports) for bridge, engine in zip(BRIDGES, ENGINES, strict=True)},
        **{name: {"host": "127.0.0.1", "port": str(ports.http[name]), **DOOR_PATIENCE} for name in INGRESSES},
        "recorder": {"directory": traces},
    }
    # Tokens are counted at one front door, and by the engines for the other: both ways are in use.
    own[INGRESSES[0]]["tokenizers"] = json.dumps({MODEL: str(Path(assets.__file__).parent)})
    parts = []
    for name in SERVICES:
        section = name.partition("-")[0]
        settings = {
            "instance": name,
            "nats_url": urls[name],
            "nats_replicas": str(replicas),
            **own.get(name, {}),
        }
        # A front door has its pages at its own port; a health port beside it would be one more to keep.
        settings["http_port"] = "-1" if section == "ingress" else str(ports.http[name])
        parts.append(Part(name, f"services.{section}", settings, ports.http[name]))
    return parts


def _bridge(engine: str, ports: Ports) -> dict[str, str]:
    return {
        "engine_url": f"http://127.0.0.1:{ports.http[engine]}",
        "worker": engine,
        "engine": "simulated",
        "kv_events": json.dumps([f"tcp://127.0.0.1:{ports.events[engine]}"]),
        "kv_replay": json.dumps([f"tcp://127.0.0.1:{ports.replay[engine]}"]),
        "checkpoint_interval_s": "2",
    }


def nats_configuration(name: str, ports: Ports, store: str) -> str:
    """Text of one nats-server's configuration file. Of several, clients are told of no other: what a part may reach is
    its relays' affair."""
    lines = [
        f"server_name: {name}",
        f'listen: "127.0.0.1:{ports.bus[name]}"',
        f'http: "127.0.0.1:{ports.http[name]}"',
        f"max_payload: {MAX_PAYLOAD_BYTES}",
        f"jetstream {{ store_dir: {json.dumps(store)} }}",
    ]
    if len(ports.bus) > 1:
        routes = [f"nats://127.0.0.1:{port}" for port in ports.routes.values()]
        listen = f"127.0.0.1:{ports.routes[name]}"
        lines.append(f'cluster {{ name: soak, listen: "{listen}", no_advertise: true, routes: {json.dumps(routes)} }}')
    return "\n".join(lines) + "\n"


def nats_parts(ports: Ports) -> list[Part]:
    return [Part(name, None, {}, ports.http[name], "/healthz") for name in ports.bus]


def arguments(settings: Mapping[str, str]) -> Sequence[str]:
    """As ``--set`` wants them."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
