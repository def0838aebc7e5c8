"""``python -m services.recorder``"""

from __future__ import annotations

import sys

from bus.service import run_service
from services.recorder.config import RecorderSettings
from services.recorder.shell.service import RecorderService

if __name__ == "__main__":
    sys.exit(run_service("recorder", RecorderSettings, RecorderService))
