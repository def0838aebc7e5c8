"""``python -m services.bridge --set engine_url=http://127.0.0.1:8000``"""

from __future__ import annotations

import sys

from bus.service import imports_of, run_service

with imports_of("bridge"):
    from services.bridge.config import BridgeSettings
    from services.bridge.shell.service import BridgeService

if __name__ == "__main__":
    sys.exit(run_service("bridge", BridgeSettings, BridgeService))
