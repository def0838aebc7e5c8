"""What the front door says about itself."""

from __future__ import annotations

import json
import ssl

from web.client import HttpClient, Timeouts
from web.errors import WebError


async def first_model(url: str, certificate: str = "") -> str | None:
    """The first model that the front door names. ``certificate``: its own, a file, where ``url`` is ``https://``."""
    client = HttpClient(tls=trusting(certificate) if certificate else None)
    try:
        answer = await client.fetch("GET", f"{url}/v1/models", [], b"", Timeouts(total_s=3.0))
        return str(json.loads(answer.body)["data"][0]["id"])
    except (WebError, ValueError, LookupError, TypeError):
        return None
    finally:
        await client.close()


def trusting(certificate: str) -> ssl.SSLContext:
    """Of a client that takes this certificate and no other, whatever name it is for: it is our own machine's."""
    context = ssl.create_default_context(cafile=certificate)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context
