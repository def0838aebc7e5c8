"""Which processes make a system, and how they are called."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest

from bus.errors import SettingsError
from bus.settings import load_settings, parse_overrides
from services.recorder.config import RecorderSettings
from tests.support.certificates import Authority
from tidegate.errors import WrongUseError
from tidegate.supervisor.check import SETTINGS, check_settings
from tidegate.supervisor.config import UpSettings
from tidegate.supervisor.engines import EngineAddress, parse_engine
from tidegate.supervisor.layout import POOL, Ports, Simulated, SimulatedPool, Stage, SystemPlan, children, service_names


def plan_of(
    simulated: int = 2, engines: tuple[EngineAddress, ...] = (), own_bus: bool = True, pool: bool = False
) -> SystemPlan:
    names = service_names(simulated, len(engines), pool=pool)
    return SystemPlan(
        python="python",
        host="127.0.0.1",
        model="sim-8b",
        ports=Ports(8080, 4222, 8222, {name: 9101 + place for place, name in enumerate(names)}),
        traces=Path("/srv/traces"),
        nats_url="nats://127.0.0.1:4222",
        nats_command=("nats-server",) if own_bus else None,
        simulated=tuple(Simulated(f"engine-{n}", 8100 + n, 5000 + n, 6000 + n) for n in range(1, simulated + 1)),
        pool=SimulatedPool(7001, 7002) if pool else None,
        engines=engines,
        tokenizers={"sim-8b": "/assets"},
    )


def test_every_child_can_be_started_with_its_settings() -> None:
    """Each command names a module that exists and settings that its own section accepts."""
    engine = EngineAddress("http://10.0.0.1:8000", ("tcp://10.0.0.1:5557",), ("tcp://10.0.0.1:5558",))
    for spec in children(plan_of(engines=(engine,), pool=True)):
        if spec.stage is Stage.BUS:
            continue
        module = spec.command[spec.command.index("-m") + 1]
        assert importlib.util.find_spec(f"{module}.__main__") is not None, module
        assert spec.section is not None
        marks = [place for place, word in enumerate(spec.command) if word == "--set"]
        given = parse_overrides(spec.command[place + 1] for place in marks)
        assert given == spec.settings
        settings = load_settings(spec.section, SETTINGS[spec.section], environ={}, overrides=given)
        assert f":{settings.http_port}/" in spec.ready_url


def test_prompts_are_written_where_the_user_meant() -> None:
    """Children run in the workdir; the front door alone is told the folder, and only where there is one."""
    told = {spec.name: spec.settings for spec in children(replace(plan_of(), captured=Path("/srv/captured")))}
    assert [name for name, settings in told.items() if "capture_directory" in settings] == ["ingress"]
    assert told["ingress"]["capture_directory"] == "/srv/captured"
    assert all("capture_directory" not in spec.settings for spec in children(plan_of()))


def test_a_child_may_take_as_long_to_stop_as_its_settings_say(tmp_path: Path) -> None:
    """``stop_timeout_s`` of the file, or the section's default, and a second more: nobody is killed while it drains."""
    file = tmp_path / "tidegate.toml"
    file.write_text("[ingress]\nstop_timeout_s = 90\n")
    stops = {spec.name: spec.stop_s for spec in check_settings(children(plan_of()), file)}
    assert (stops["ingress"], stops["recorder"]) == (91.0, RecorderSettings().stop_timeout_s + 1)
    assert {spec.stop_s for spec in check_settings(children(plan_of()), None) if spec.name == "ingress"} == {31.0}


def test_a_certificate_that_cannot_be_used_is_said_with_the_settings(tmp_path: Path) -> None:
    """Missing, not PEM, a key of another, a wrong authority of clients: named by its setting, as at the front door."""
    authority = Authority()
    certificate, key = authority.pair(tmp_path)
    _, another = authority.pair(tmp_path, "another")
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")

    def check(**files: Path) -> None:
        door_files = {name: str(path) for name, path in files.items()}
        check_settings(children(replace(plan_of(), door_files=door_files)), None)

    check(tls_cert=certificate, tls_key=key, tls_client_ca=authority.file(tmp_path / "ca.pem"))
    for wrong, files in (
        ("tls_cert", {"tls_cert": tmp_path / "none.pem", "tls_key": key}),
        ("tls_cert", {"tls_cert": junk, "tls_key": key}),
        ("tls_key", {"tls_cert": certificate}),
        ("tls_key", {"tls_cert": certificate, "tls_key": another}),
        ("tls_client_ca", {"tls_cert": certificate, "tls_key": key, "tls_client_ca": junk}),
    ):
        with pytest.raises(SettingsError, match=f"^{wrong}: ") as raised:
            check(**files)
        assert raised.value.key == wrong


def test_a_system_of_two_simulated_engines() -> None:
    """The bus first, then engines; one bridge for each engine; names are unique."""
    specs = children(plan_of())
    names = [spec.name for spec in specs]
    assert names[:3] == ["nats", "engine-1", "engine-2"]
    assert sorted(names[3:]) == ["admission", "bridge-1", "bridge-2", "hints", "indexer", "ingress", "recorder"]
    bridge = specs[names.index("bridge-2")].settings
    engine = specs[names.index("engine-2")].settings
    assert bridge["engine_url"] == f"http://127.0.0.1:{engine['http_port']}"
    assert json.loads(bridge["kv_events"]) == [engine["kv_events_endpoint"]]
    assert json.loads(bridge["kv_replay"]) == [engine["replay_endpoint"]]


def test_simulated_engines_share_a_pool() -> None:
    """With --pool: a pool and a bridge of its own; every engine uses it, and every engine's bridge names it."""
    specs = {spec.name: spec for spec in children(plan_of(pool=True))}
    pool, bridge = specs["pool"].settings, specs["bridge-pool"].settings
    assert bridge["pool_url"] == f"http://127.0.0.1:{pool['http_port']}"
    assert (bridge["pool"], bridge["pool_events"]) == (POOL, pool["kv_events_endpoint"])
    assert {specs[f"engine-{number}"].settings["pool_url"] for number in (1, 2)} == {bridge["pool_url"]}
    assert {specs[f"bridge-{number}"].settings["shared_pool"] for number in (1, 2)} == {POOL}
    assert specs["pool"].stage is Stage.ENGINE
    with pytest.raises(ValueError, match="pool is simulated"):
        UpSettings(pool=True, engine=("http://h:8000",))


def test_stages_stop_who_feeds_before_who_is_fed() -> None:
    """ingress, then admission and hints, then bridges, indexer, recorder, engines, and the bus last."""
    specs = sorted(children(plan_of()), key=lambda spec: spec.stage)
    order = [spec.name.split("-")[0] for spec in specs]
    assert order == [
        "ingress", "admission", "hints", "bridge", "bridge", "indexer", "recorder", "engine", "engine", "nats",
    ]  # fmt: skip


def test_real_engines_and_somebody_elses_bus_are_not_started() -> None:
    """With --engine and --nats only our services run."""
    engine = EngineAddress("http://10.0.0.1:8000")
    specs = children(plan_of(simulated=0, engines=(engine,), own_bus=False))
    assert {spec.stage for spec in specs}.isdisjoint({Stage.BUS, Stage.ENGINE})
    assert "kv_events" not in next(spec for spec in specs if spec.name == "bridge-1").settings


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://h:8000", EngineAddress("http://h:8000")),
        ("http://h:8000=tcp://h:5557", EngineAddress("http://h:8000", ("tcp://h:5557",))),
        (
            "http://h:8000=tcp://h:5557,tcp://h:5558,replay=tcp://h:6557,replay=tcp://h:6558",
            EngineAddress("http://h:8000", ("tcp://h:5557", "tcp://h:5558"), ("tcp://h:6557", "tcp://h:6558")),
        ),
    ],
)
def test_a_real_engine_is_read(text: str, address: EngineAddress) -> None:
    """URL, event endpoints by rank, replay endpoints by rank."""
    assert parse_engine(text) == address


@pytest.mark.parametrize(
    "text", ["", "h:8000", "tcp://h:5557", "http://", "http://h=", "http://h=5557", "http://h=replay=tcp://h:1"]
)
def test_a_bad_engine_is_refused_with_the_form_that_is_wanted(text: str) -> None:
    """The message shows what to write."""
    with pytest.raises(WrongUseError, match="write http://HOST:PORT"):
        parse_engine(text)
