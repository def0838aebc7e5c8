"""The compose file against the services that exist and the settings they have."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from bus.settings import CommonSettings, load_settings

ROOT = Path(__file__).resolve().parents[3]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if name != "nats"}


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
    environment = {key: str(value) for key, value in OURS[name].get("environment", {}).items()}
    assert environment, "a container without settings would look for NATS on its own loopback"
    load_settings(section, settings_type(module), environ=environment)


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
