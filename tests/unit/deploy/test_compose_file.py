"""The compose file against the services that exist and the settings they have."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from bus.permissions import users
from bus.settings import CommonSettings, load_settings
from services.ingress.config import IngressSettings
from services.recorder.config import RecorderSettings

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "nats"}
SECURE: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.secure.yaml").read_text())
TLS: dict[str, Any] = yaml.safe_load((ROOT / "deploy" / "compose.tls.yaml").read_text())
POOL: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "compose.pool.yaml").read_text())["services"]


def module_of(service: dict[str, Any]) -> str:
    """The module that a service's command runs."""
    python, flag, module = service["command"]
    assert (python, flag) == ("python", "-m")
    return str(module)


def settings_type(module: str) -> type[CommonSettings]:
    """The settings struct that a module's ``config`` defines."""
    config = importlib.import_module(f"{module}.config")
    kinds = [
        value
        for value in vars(config).values()
        if isinstance(value, type) and issubclass(value, CommonSettings) and value is not CommonSettings
    ]
    assert len(kinds) == 1, f"{module}.config should define one settings struct"
    return kinds[0]


def test_every_process_of_the_house_is_in_the_file() -> None:
    """Each runnable service folder, and the simulated engine, has at least one container; nothing else does."""
    runnable = {f"services.{path.parent.name}" for path in (ROOT / "services").glob("*/__main__.py")} | {"load.engine"}
    assert runnable == {module_of(service) for service in OURS.values()}


@pytest.mark.parametrize("name", sorted(OURS))
def test_settings_in_the_file_are_settings_that_exist(name: str) -> None:
    """A container's environment loads as its process's settings: no unknown key, no value of the wrong type."""
    module = module_of(OURS[name])
    section = module.rpartition(".")[2]
    said = OURS[name].get("environment", {})
    environment = {key: str(value) for key, value in said.items() if value is not None}
    assert environment, "a container without settings would look for NATS on its own loopback"
    load_settings(section, settings_type(module), environ=environment)


def test_a_recorder_in_the_image_has_all_its_sinks() -> None:
    """What the extra ``otlp`` needs is locked for the image; who runs `docker compose` names the sinks, and they are
    passed on."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    locked = {line.partition("==")[0] for line in (ROOT / "requirements.lock").read_text().splitlines()}
    assert {re.split(r"[^\w-]", each)[0] for each in extras["otlp"]} <= locked
    passed = {key for key, value in OURS["recorder"]["environment"].items() if value is None}
    assert passed == {"TIDEGATE_RECORDER_SINKS", "TIDEGATE_RECORDER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"}
    environment = {
        "TIDEGATE_RECORDER_SINKS": '["file", "otlp"]',
        "TIDEGATE_RECORDER_OTLP_ENDPOINT": "http://collector:4318",
    }
    settings = load_settings("recorder", RecorderSettings, environ=environment)
    assert settings.sinks == ("file", "otlp")


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_container_is_watched_and_restarted(name: str) -> None:
    """Health check and restart policy on each container, the bus included."""
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", sorted(OURS))
def test_health_checks_ask_the_port_that_is_served(name: str) -> None:
    """The probed port is the one that the process is told to listen on."""
    environment = OURS[name]["environment"]
    url = OURS[name]["healthcheck"]["test"][-1]
    port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\w+", url)
    assert port is not None
    assert port[1] in {environment.get("TIDEGATE_HTTP_PORT"), environment.get("TIDEGATE_INGRESS_PORT")}


def test_only_loopback_is_published() -> None:
    """There are no credentials yet, so nothing is published beyond this machine."""
    for service in SERVICES.values():
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:")


def test_images_are_variables_with_the_official_ones_as_defaults() -> None:
    """TIDEGATE_BASE_IMAGE and TIDEGATE_NATS_IMAGE choose other images; no `# syntax` line asks for a frontend."""
    text = (ROOT / "compose.yaml").read_text()
    dockerfile = (ROOT / "deploy" / "Dockerfile").read_text()
    assert "${TIDEGATE_BASE_IMAGE:-python:" in text
    assert "${TIDEGATE_NATS_IMAGE:-nats:" in text
    assert "ARG TIDEGATE_BASE_IMAGE=python:" in dockerfile
    assert not dockerfile.startswith("# syntax")


def test_every_bridge_stands_for_an_engine_of_the_file() -> None:
    """Each engine container has exactly one bridge."""
    engines = {name for name, service in OURS.items() if module_of(service) == "load.engine"}
    asked = [
        service["environment"]["TIDEGATE_BRIDGE_ENGINE_URL"]
        for service in OURS.values()
        if module_of(service) == "services.bridge"
    ]
    assert sorted(f"http://{name}:8000" for name in engines) == sorted(asked)


def test_the_build_context_holds_every_package_of_the_wheel() -> None:
    """What is packed is copied into the image, and what is copied is not kept out by ``.dockerignore``."""
    packed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    )
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    copied = {
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert packed <= copied
    assert {word.split("/")[0] for word in copied} <= {word.split("/")[0] for word in allowed}


@pytest.mark.parametrize("name", sorted(POOL))
def test_the_file_with_a_pool_adds_settings_that_exist(name: str) -> None:
    """What it adds to a container, and the two that it brings, load as their processes' settings; probes ask the port
    that is served."""
    service = {**OURS.get(name, {}), **POOL[name]}
    module = module_of(service)
    environment = {**OURS.get(name, {}).get("environment", {}), **POOL[name]["environment"]}
    load_settings(module.rpartition(".")[2], settings_type(module), environ={k: str(v) for k, v in environment.items()})
    assert f":{environment['TIDEGATE_HTTP_PORT']}/" in service["healthcheck"]["test"][-1]
    assert service["restart"] == "unless-stopped"


def test_every_engine_of_the_file_shares_the_pool() -> None:
    """One that wrote elsewhere, or whose bridge did not say so, would be left out without a word."""
    engines = {name for name, service in OURS.items() if module_of(service) == "load.engine"}
    bridges = {name for name, service in OURS.items() if module_of(service) == "services.bridge"}
    assert {name for name in POOL if name in OURS} == engines | bridges
    url = POOL["bridge-pool"]["environment"]["TIDEGATE_BRIDGE_POOL_URL"]
    assert {POOL[name]["environment"]["TIDEGATE_ENGINE_POOL_URL"] for name in engines} == {url}
    pool = POOL["bridge-pool"]["environment"]["TIDEGATE_BRIDGE_POOL"]
    assert {POOL[name]["environment"]["TIDEGATE_BRIDGE_SHARED_POOL"] for name in bridges} == {pool}


def test_the_secure_file_gives_every_process_its_own_user() -> None:
    """Each process of ours but the engines has a user that exists and that user's password, nobody else's."""
    made = {user.name for user in users()}
    speaking = {name for name, service in OURS.items() if module_of(service) != "load.engine"}
    assert set(SECURE["services"]) == speaking | {"nats"}
    for name in speaking:
        added = SECURE["services"][name]
        user = added["environment"]["TIDEGATE_NATS_USER"]
        assert user in made
        assert user == module_of(OURS[name]).rpartition(".")[2]
        assert added["secrets"] == [f"nats-{user}"]
        assert added["environment"]["TIDEGATE_NATS_PASSWORD_FILE"] == f"/run/secrets/nats-{user}"
        assert SECURE["secrets"][f"nats-{user}"] == {"file": f"./secrets/{user}"}
        module = module_of(OURS[name])
        written = {key: value for key, value in OURS[name]["environment"].items() if value is not None}
        load_settings(module.rpartition(".")[2], settings_type(module), environ={**written, **added["environment"]})


def mounts(*files: dict[str, Any]) -> dict[str, str]:
    """Where folders of this machine lie in the ingress' container, by what they are there."""
    volumes = [volume for file in files for volume in file["services"]["ingress"].get("volumes", ())]
    assert all(volume.endswith(":ro") for volume in volumes)
    return {volume.split(":")[1]: volume.split(":")[0] for volume in volumes}


def test_the_secure_files_give_the_front_door_its_keys_and_its_certificate() -> None:
    """As files in folders that are mounted read-only (a file that is mounted by itself would never change), whose names
    the settings have; the probe asks a port without TLS."""
    environment = {key: value for key, value in OURS["ingress"]["environment"].items() if value is not None}
    for file in (SECURE, TLS):
        environment |= file["services"]["ingress"]["environment"]
    settings = load_settings("ingress", IngressSettings, environ=environment | {"TIDEGATE_INGRESS_WORKERS": "2"})
    folders = mounts(SECURE, TLS)
    assert {str(Path(name).parent) for name in (settings.keys_file, settings.cache_salt_secret_file)} | {
        str(Path(name).parent) for name in (settings.tls_cert, settings.tls_key)
    } == set(folders)
    assert set(folders.values()) == {"./secrets/front-door", "./secrets/front-door-tls"}
    assert f":{environment['TIDEGATE_HTTP_PORT']}/" in TLS["services"]["ingress"]["healthcheck"]["test"][-1]


def test_no_secret_is_in_an_environment_or_a_command() -> None:
    """Both can be read by whoever may look at a container: secrets are files."""
    for file in (COMPOSE, SECURE, TLS):
        for service in file["services"].values():
            named = [
                name for name in service.get("environment", ()) if re.search("(PASSWORD|SECRET|API_KEY|TOKEN)$", name)
            ]
            assert named == []
            assert not re.search("password|secret=|tg_", " ".join(service.get("command", ())))
