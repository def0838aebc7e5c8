"""``python -m services.indexer``"""

from __future__ import annotations

import sys

from bus.service import run_service
from services.indexer.config import IndexerSettings
from services.indexer.shell.service import IndexerService

if __name__ == "__main__":
    sys.exit(run_service("indexer", IndexerSettings, IndexerService))
