"""`compose up` for real: images built without network, the demo's client from outside, a process killed and healed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy import standins
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
CONTAINERS = 10

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1500)]


def compose_command() -> list[str] | None:
    """Compose 2 as a plug-in, or Compose 1.29 as a program; ``None`` where neither is installed."""
    plugin = subprocess.run(["docker", "compose", "version"], capture_output=True, check=False)
    if plugin.returncode == 0:
        return ["docker", "compose"]
    return ["docker-compose"] if shutil.which("docker-compose") else None


class Deployment:
    """One compose project of our file, on ports of its own."""

    def __init__(self, command: list[str], images: dict[str, str]) -> None:
        self.project = f"tidegate-test-{uuid.uuid4().hex[:8]}"
        self.port, self.nats_port = free_ports(2)
        self.image = f"{self.project}:test"
        self._command = [*command, "-f", str(ROOT / "compose.yaml"), "-p", self.project]
        self._environment = {
            **os.environ,
            **images,
            "TIDEGATE_IMAGE": self.image,
            "TIDEGATE_PORT": str(self.port),
            "TIDEGATE_NATS_PORT": str(self.nats_port),
            "DOCKER_BUILDKIT": "0",
            "COMPOSE_DOCKER_CLI_BUILD": "0",
        }

    def compose(self, *arguments: str, timeout_s: float = 600.0) -> str:
        """Run one compose command; its output when it failed is the test's failure."""
        done = subprocess.run(
            [*self._command, *arguments], env=self._environment, capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"compose {' '.join(arguments)}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        return done.stdout

    def inspect(self) -> dict[str, dict[str, object]]:
        """Service name to {id, pid, health, restarts}."""
        ids = self.compose("ps", "-q").split()
        if not ids:
            return {}
        raw = subprocess.run(["docker", "inspect", *ids], capture_output=True, text=True, check=True).stdout
        return {
            one["Config"]["Labels"]["com.docker.compose.service"]: {
                "id": one["Id"],
                "pid": one["State"]["Pid"],
                "health": one["State"].get("Health", {}).get("Status", "none"),
                "restarts": one["RestartCount"],
            }
            for one in json.loads(raw)
        }

    def wait_healthy(self, timeout_s: float = 180.0, restarted: str | None = None) -> dict[str, dict[str, object]]:
        """All containers healthy (and ``restarted`` restarted at least once), or the test fails with their states."""
        deadline = time.monotonic() + timeout_s
        state: dict[str, dict[str, object]] = {}
        while time.monotonic() < deadline:
            state = self.inspect()
            healthy = len(state) == CONTAINERS and all(one["health"] == "healthy" for one in state.values())
            if healthy and (restarted is None or state[restarted]["restarts"] != 0):
                return state
            time.sleep(1.0)
        pytest.fail(f"not healthy within {timeout_s:g} s: {state}\n{self.compose('logs', '--tail', '40')}")

    def demo(self) -> dict[str, object]:
        """The demo's client against the published port, its rows counted from the published bus."""
        done = subprocess.run(
            [
                sys.executable, "-m", "tidegate", "demo", "--json",
                "--url", f"http://127.0.0.1:{self.port}/v1", "--nats", f"nats://127.0.0.1:{self.nats_port}",
            ],
            cwd=ROOT, capture_output=True, text=True, timeout=240.0, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}{done.stderr[-3000:]}"
        figures: dict[str, object] = json.loads(done.stdout.strip().splitlines()[-1])
        return figures

    def leftovers(self) -> list[str]:
        """Containers, volumes and networks of this project that still exist."""
        label = f"label=com.docker.compose.project={self.project}"
        found: list[str] = []
        for kind in (["ps", "-aq"], ["volume", "ls", "-q"], ["network", "ls", "-q"]):
            found += subprocess.run(
                ["docker", *kind, "--filter", label], capture_output=True, text=True, check=True
            ).stdout.split()
        return found


@pytest.fixture(scope="module")
def deployment() -> Iterator[Deployment]:
    """The file brought up; taken down with its volumes and its image afterwards, whatever happened."""
    if (
        shutil.which("docker") is None
        or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no Docker engine answers")
    command = compose_command()
    if command is None:
        pytest.skip("neither `docker compose` nor docker-compose is installed")
    standins.fill_wheelhouse()
    one = Deployment(command, standins.ensure_images())
    try:
        one.compose("build", "engine-1", timeout_s=900.0)
        one.compose("up", "-d", "--no-build", timeout_s=300.0)
        yield one
    finally:
        one.compose("down", "--volumes", "--timeout", "20", timeout_s=240.0)
        subprocess.run(["docker", "rmi", "--force", one.image], capture_output=True, check=False)


def test_compose_up_serves_heals_and_leaves_nothing(deployment: Deployment) -> None:
    """All healthy; the demo holds from outside; a process killed from the host heals; `down` leaves nothing."""
    state = deployment.wait_healthy()
    assert set(state) >= {"nats", "engine-1", "engine-2", "bridge-1", "indexer", "admission", "recorder", "ingress"}

    figures = deployment.demo()
    print(json.dumps(figures))
    assert figures["failed"] == 0
    assert figures["traces"] == figures["requests"]

    # Killed from the host, as a crash would be: `docker kill` counts as a wish, and is not restarted.
    os.kill(int(str(state["admission"]["pid"])), signal.SIGKILL)
    healed = deployment.wait_healthy(restarted="admission")
    assert healed["admission"]["pid"] != state["admission"]["pid"]
    again = deployment.demo()
    print(json.dumps(again))
    assert again["failed"] == 0

    deployment.compose("down", "--volumes", "--timeout", "20", timeout_s=240.0)
    assert deployment.leftovers() == []
