"""What the front door says about itself."""

from __future__ import annotations

import json

from web.client import HttpClient, Timeouts
from web.errors import WebError


async def first_model(url: str) -> str | None:
    """The first model that the front door names."""
    client = HttpClient()
    try:
        answer = await client.fetch("GET", f"{url}/v1/models", [], b"", Timeouts(total_s=3.0))
        return str(json.loads(answer.body)["data"][0]["id"])
    except (WebError, ValueError, LookupError, TypeError):
        return None
    finally:
        await client.close()
