"""A client of a real Mooncake store, run by the Python that has its package: a JSON question a line, an answer a line.

    python -P tests/support/mooncake_store.py HOST:PORT MASTER_HOST:PORT SEGMENT_BYTES [TENANT]

``["put", [key, ...], bytes_each]`` result codes, ``["remove", [key, ...]]`` result codes, ``["remove_all"]`` how many,
``["get", key]`` bytes got, ``["close"]``. Answers are JSON behind ``answer: ``, the first says ``["ready", code]``;
other lines are the store's own. With ``SSD_PATH`` set, objects are copied there. Imports nothing of ours.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]  # only the other Python has it

BUFFER_BYTES = 16 << 20


def answer(store: Any, question: list[Any]) -> Any:
    """What the store says to one question."""
    match question:
        case ["put", keys, size]:
            return [store.put(key, b"x" * size) for key in keys]
        case ["remove", keys]:
            return [store.remove(key) for key in keys]
        case ["remove_all"]:
            return store.remove_all()
        case ["get", key]:
            return len(store.get(key))
        case ["close"]:
            return store.close()
    raise ValueError(f"unknown question {question!r}")


def main(here: str, master: str, segment_bytes: int, tenant: str) -> None:
    store = MooncakeDistributedStore()
    ssd = os.environ.get("SSD_PATH", "")
    code = store.setup(
        here,
        "P2PHANDSHAKE",
        segment_bytes,
        BUFFER_BYTES,
        "tcp",
        "",
        master,
        enable_ssd_offload=bool(ssd),
        ssd_offload_path=ssd,
        tenant_id=tenant or "default",
    )
    print(f"answer: {json.dumps(['ready', code])}", flush=True)
    for line in sys.stdin:
        print(f"answer: {json.dumps(answer(store, json.loads(line)))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), "".join(sys.argv[4:]))
