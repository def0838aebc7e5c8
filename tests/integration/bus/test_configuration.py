"""``deploy/nats.conf``: a real server takes it, and it gives what the bus needs."""

from __future__ import annotations

import json
from pathlib import Path

from bus.nats import connect
from tests.support.nats import NatsServer

CONFIGURATION = Path(__file__).parents[3] / "deploy" / "nats.conf"


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
        bus = await connect(server.url, name="test", timeout_s=5)
        assert bus.max_payload == 8 * 1024 * 1024
        bucket = await bus.key_value("TG_TEST")
        assert await bucket.put("a", b"1") == 1
        assert (tmp_path / "data" / "jetstream").is_dir()
        await bus.close()
    finally:
        server.kill()
