"""``python -m services.bridge --set engine_url=http://127.0.0.1:8000``, or of a shared pool ``--set pool=pool-a
--set pool_url=http://127.0.0.1:9003 --set pool_events=tcp://127.0.0.1:5557``"""

from __future__ import annotations

import sys

from bus.service import imports_of, run_service

with imports_of("bridge"):
    from services.bridge.config import BridgeSettings
    from services.bridge.shell.pool_service import PoolBridgeService
    from services.bridge.shell.service import BridgeService


def bridge_of(settings: BridgeSettings) -> BridgeService | PoolBridgeService:
    """The bridge of the pool that the settings name, else of their engine."""
    return PoolBridgeService(settings) if settings.pool else BridgeService(settings)


if __name__ == "__main__":
    sys.exit(run_service("bridge", BridgeSettings, bridge_of))
