"""The engine's ``cache_salt`` of a tenant: prompts of two tenants share no cached block (spec: user-cases F2).

Derived by BLAKE2b keyed with the operator's secret, over length-framed parts, so that nobody can compute another
tenant's and no two pairs of names run together. A client's own salt is mixed in: it still separates within its tenant.
"""

from __future__ import annotations

import hashlib
from struct import Struct

LEAST_SECRET_BYTES = 16
SALT_BYTES = 16
SALTED_ENDPOINTS = frozenset({"chat_completions", "completions", "responses"})
"""APIs in which engines read ``cache_salt``. Messages has none at vLLM and SGLang: it is sent all the same, and the
prompt is expected in the cache that all tenants share, as the engine does."""

_LENGTH = Struct("<Q")
_PERSON = b"tidegate-salt-1"


def tenant_salt(secret: bytes, tenant: str, client: str | None = None) -> str:
    """32 hex digits for a tenant and, where it sent one, its client's own salt."""
    keyed = hashlib.blake2b(secret, digest_size=32, person=_PERSON).digest()  # a secret may have any length
    salt = hashlib.blake2b(_frame(tenant), digest_size=SALT_BYTES, key=keyed, person=_PERSON)
    if client is not None:
        salt.update(_frame(client))
    return salt.hexdigest()


def _frame(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return _LENGTH.pack(len(data)) + data
