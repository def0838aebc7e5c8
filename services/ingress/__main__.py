"""``python -m services.ingress``"""

import sys

from bus.service import imports_of, run_service

with imports_of("ingress"):
    from services.ingress.config import IngressSettings
    from services.ingress.shell.service import IngressService

if __name__ == "__main__":
    sys.exit(run_service("ingress", IngressSettings, IngressService))
