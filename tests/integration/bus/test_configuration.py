"""The configurations in ``deploy``: a real server takes them, and gives what the bus needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bus.nats import connect
from bus.permissions import users
from tests.support.nats import NatsServer, executable
from tidegate.supervisor.nats_accounts import write_secrets

DEPLOY = Path(__file__).parents[3] / "deploy"
CONFIGURATION = DEPLOY / "nats.conf"


async def test_a_server_with_our_configuration(tmp_path: Path) -> None:
    """Messages of 8 MB, JetStream in its store directory. Addresses and the store are replaced, nothing else."""
    text = CONFIGURATION.read_text()
    for line, replacement in (
        ("listen: 0.0.0.0:4222", "listen: 127.0.0.1:-1"),
        ("http: 0.0.0.0:8222", "http: 127.0.0.1:-1"),
        ("store_dir: /data", f"store_dir: {json.dumps(str(tmp_path / 'data'))}"),
    ):
        assert line in text
        text = text.replace(line, replacement)
    server = NatsServer(tmp_path / "nats", config=text, whole_config=True).start()
    try:
        bus = await connect(server.url, name="test", timeout_s=30)
        assert bus.max_payload == 8 * 1024 * 1024
        bucket = await bus.key_value("TG_TEST")
        assert await bucket.put("a", b"1") == 1
        assert (tmp_path / "data" / "jetstream").is_dir()
        await bus.close()
    finally:
        server.kill()


@pytest.mark.parametrize("folder", [DEPLOY, DEPLOY / "nats-cluster"], ids=["one", "three"])
def test_a_server_reads_the_configuration_with_users(folder: Path, tmp_path: Path) -> None:
    """Beside its passwords; without them it does not start."""
    for name in ("nats.conf", "nats-secure.conf"):
        shutil.copy(folder / name, tmp_path)
    shutil.copy(DEPLOY / "nats-accounts.conf", tmp_path)
    command = [executable(), "-t", "-c", str(tmp_path / "nats-secure.conf")]
    environment = {**os.environ, "NATS_SERVER_NAME": "nats-0"}
    assert subprocess.run(command, capture_output=True, check=False, env=environment).returncode != 0
    write_secrets(tmp_path, users(["fair"], ["w"]))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
