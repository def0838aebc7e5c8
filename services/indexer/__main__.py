"""``python -m services.indexer``"""

from __future__ import annotations

import sys

from bus.service import imports_of, run_service

with imports_of("indexer"):
    from services.indexer.config import IndexerSettings
    from services.indexer.shell.service import IndexerService

if __name__ == "__main__":
    sys.exit(run_service("indexer", IndexerSettings, IndexerService))
