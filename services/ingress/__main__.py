"""``python -m services.ingress``"""

import sys

from bus.service import run_service
from services.ingress.config import IngressSettings
from services.ingress.shell.service import IngressService

if __name__ == "__main__":
    sys.exit(run_service("ingress", IngressSettings, IngressService))
