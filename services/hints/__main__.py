"""Run the hints service alone: ``python -m services.hints``."""

from __future__ import annotations

import sys

from bus.service import run_service
from services.hints.config import HintsSettings
from services.hints.shell import HintsService

if __name__ == "__main__":
    sys.exit(run_service("hints", HintsSettings, HintsService))
