"""``python -m services.ingress``"""

import sys

from bus.service import Grouping, imports_of, run_grouped_service

with imports_of("ingress"):
    from services.ingress.config import IngressSettings
    from services.ingress.shell.service import IngressService
    from services.ingress.shell.shared_limits import shared_memory

if __name__ == "__main__":
    grouping: Grouping[IngressSettings] = Grouping(
        module="services.ingress",
        key="workers",
        address=lambda settings: ("port", settings.host, settings.port),
        memory=shared_memory,
    )
    sys.exit(
        run_grouped_service(
            "ingress",
            IngressSettings,
            lambda settings, membership: IngressService(settings, membership=membership),
            grouping,
        )
    )
