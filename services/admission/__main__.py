"""Run the admission service alone: ``python -m services.admission``."""

from __future__ import annotations

import sys

from bus.service import imports_of, run_service

with imports_of("admission"):
    from services.admission.config import AdmissionSettings
    from services.admission.shell import AdmissionService

if __name__ == "__main__":
    sys.exit(run_service("admission", AdmissionSettings, AdmissionService))
