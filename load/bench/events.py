"""Decoding and applying engine batches, by layout and size, in both twins; and from a ZeroMQ socket to the index.

Decoding (layouts of performance §B, one BlockStored a batch): ``decode_<form>_<blocks>x<tokens>_us`` of CPU a batch,
with ``form`` either ``array`` (vLLM 0.23) or ``map`` (0.32), ``digest``: 32-byte hashes.

Applying: ``apply_<blocks>_us`` for one raw batch of so many blocks of 16 tokens that are new to the rank;
``peer_apply_<blocks>_us``: the peer's JSON with hashes given, made beforehand. Wall clock, and ``_cpu_us`` of the
process, which a busy machine disturbs less.

``zmq_``: batches of a full engine (64 blocks evicted, one event each, and 64 stored) in three frames from another
process over ipc, received, decoded and applied in one thread; the sender may be the limit. Medians of the runs,
collector off.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import tempfile
import time
from array import array
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import zmq
from msgspec import msgpack

from kvcore.hashing import local_hashes, pack_tokens
from load.bench import peer
from load.bench.measure import without_collector
from load.bench.options import Options
from load.bench.twins import PYTHON, Twin, all_twins

TOKENS_PER_BLOCK = 16
LAYOUTS = ((1, 16, False), (1, 64, False), (64, 16, False), (64, 64, False), (64, 16, True))
SIZES = (1, 16, 64, 512)
ZMQ_BLOCKS = 64
_SECONDS = 1_795_973_189.7


def stored_batch(
    random_: random.Random,
    blocks: int,
    tokens: int,
    *,
    form: str = "map",
    digest: bool = False,
    parent: int | None = None,
) -> tuple[bytes, list[int], list[int]]:
    """A raw batch of one BlockStored with random content; its hashes (as integers) and its tokens."""
    token_ids = [random_.randrange(131_072) for _ in range(blocks * tokens)]
    hashes = [random_.getrandbits(64) for _ in range(blocks)]
    wire: list[Any] = [value.to_bytes(32, "big") for value in hashes] if digest else list(hashes)
    fields: dict[str, Any] = {
        "block_hashes": wire,
        "parent_block_hash": parent,
        "token_ids": token_ids,
        "block_size": tokens,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * blocks,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    event = {"type": "BlockStored", **fields} if form == "map" else ["BlockStored", *fields.values(), None]
    return msgpack.encode((_SECONDS, [event], 0)), hashes, token_ids


def run(options: Options) -> dict[str, object]:
    """See the module."""
    twins = all_twins()
    result: dict[str, object] = {"bench": "events", "kvcore": twins[0].name, "quick": options.quick}
    with without_collector():
        options.progress("decoding")
        result |= _decode(twins, options)
        options.progress("applying")
        result |= _apply(twins, options)
        options.progress("from a socket")
        for twin in twins:
            prefix = "" if twin is twins[0] else "python_"
            result |= {f"{prefix}{key}": value for key, value in _zmq(twin, options).items()}
    if len(twins) == 1:  # pure Python is the chosen one
        result |= {
            f"python_{key}": value for key, value in result.items() if key.startswith(("decode_", "apply_", "zmq_"))
        }
    result["mismatches"] = _mismatches(twins)
    return result


def _prefixed(twins: list[Twin]) -> list[tuple[str, Twin]]:
    return [("" if twin is twins[0] else "python_", twin) for twin in twins]


def _decode(twins: list[Twin], options: Options) -> dict[str, object]:
    random_ = random.Random(2)
    samples: dict[str, list[float]] = {}
    rounds = 20 if options.quick else 2_000
    for form in ("map", "array"):
        for blocks, tokens, digest in LAYOUTS:
            payload, _, _ = stored_batch(random_, blocks, tokens, form=form, digest=digest)
            name = f"decode_{form}_{blocks}x{tokens}{'_digest' if digest else ''}_us"
            for _ in range(options.runs):
                for prefix, twin in _prefixed(twins):
                    call = twin.decode_batch
                    times = max(rounds // blocks, 20)
                    start = time.process_time()
                    for _ in range(times):
                        call(payload)
                    samples.setdefault(prefix + name, []).append((time.process_time() - start) / times * 1e6)
    return _medians(samples)


def _apply(twins: list[Twin], options: Options) -> dict[str, object]:
    """Batches of one rank, each at the root; new blocks every time."""
    samples: dict[str, list[float]] = {}
    dynamo = peer.package()
    for blocks in SIZES:
        random_ = random.Random(blocks)
        many = max((1_024 if options.quick else 65_536) // max(blocks, 16), 2)
        batches = [stored_batch(random_, blocks, TOKENS_PER_BLOCK) for _ in range(many)]
        payloads = [payload for payload, _, _ in batches]
        told = [_told(number, hashes, tokens) for number, (_, hashes, tokens) in enumerate(batches)]
        for _ in range(options.runs):
            for prefix, twin in _prefixed(twins):
                index = twin.new_index()
                apply = index.apply_payload
                spent, cpu = _each(lambda payload, apply=apply: apply("worker", 0, payload), payloads)  # type: ignore[misc]
                samples.setdefault(f"{prefix}apply_{blocks}_us", []).append(spent)
                samples.setdefault(f"{prefix}apply_{blocks}_cpu_us", []).append(cpu)
            if dynamo is not None:
                apply_event = dynamo.RadixTree().apply_event
                spent, cpu = _each(lambda event, apply=apply_event: apply(1, event), told)  # type: ignore[misc]
                samples.setdefault(f"peer_apply_{blocks}_us", []).append(spent)
                samples.setdefault(f"peer_apply_{blocks}_cpu_us", []).append(cpu)
    absent = {f"peer_apply_{blocks}_{unit}": None for blocks in SIZES for unit in ("us", "cpu_us")}
    return absent | _medians(samples)


def _told(number: int, hashes: list[int], tokens: list[int]) -> bytes:
    local = local_hashes(pack_tokens(tokens), TOKENS_PER_BLOCK)
    blocks = [{"block_hash": own, "tokens_hash": of} for own, of in zip(hashes, local, strict=True)]
    data = {"stored": {"parent_hash": None, "blocks": blocks}}
    return json.dumps({"event_id": number, "dp_rank": 0, "data": data}, separators=(",", ":")).encode()


def _each(call: Callable[[bytes], object], arguments: list[bytes]) -> tuple[float, float]:
    """Microseconds a call: wall clock and CPU."""
    start, cpu = time.perf_counter(), time.process_time()
    for argument in arguments:
        call(argument)
    spent, cpu = time.perf_counter() - start, time.process_time() - cpu
    return spent / len(arguments) * 1e6, cpu / len(arguments) * 1e6


def _medians(samples: dict[str, list[float]]) -> dict[str, object]:
    return {key: round(statistics.median(values), 3) for key, values in samples.items()}


def _full_engine_batch(random_: random.Random) -> bytes:
    """Evicts what the same batch stored when it came last, and stores it again."""
    payload, hashes, _ = stored_batch(random_, ZMQ_BLOCKS, TOKENS_PER_BLOCK)
    _, (stored,), _ = msgpack.decode(payload)
    removed = [
        {"type": "BlockRemoved", "block_hashes": [engine], "medium": "GPU", "group_idx": 0}
        for engine in reversed(hashes)
    ]
    return msgpack.encode((_SECONDS, [*removed, stored], 0))


def _send(endpoint: str, payloads: list[bytes], batches: int) -> None:
    """The engine's side, in a process of its own."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 30_000)
        socket.connect(endpoint)
        for number in range(batches):
            socket.send_multipart((b"kv", number.to_bytes(8, "big"), payloads[number % len(payloads)]), copy=True)


def _zmq(twin: Twin, options: Options) -> dict[str, object]:
    """Received, decoded and applied, from the first batch's arrival to the last one applied."""
    random_ = random.Random(3)
    payloads = [_full_engine_batch(random_) for _ in range(64)]
    batches = 256 if options.quick else 20_000 if twin is not PYTHON else 4_000
    index = twin.new_index()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        endpoint = f"ipc://{Path(folder) / 'engine'}"
        with zmq.Context() as context, context.socket(zmq.PULL) as socket:
            socket.setsockopt(zmq.RCVTIMEO, 30_000)
            socket.bind(endpoint)
            sender = multiprocessing.get_context("spawn").Process(target=_send, args=(endpoint, payloads, batches))
            sender.start()
            try:
                frames = socket.recv_multipart()
                start, cpu = time.perf_counter(), time.thread_time()
                for number in count():
                    index.apply_payload("worker", 0, frames[2])
                    if number == batches - 1:
                        break
                    frames = socket.recv_multipart()
                spent, cpu = time.perf_counter() - start, time.thread_time() - cpu
            finally:
                sender.join(timeout=30)
                sender.close()
    return {
        "zmq_batches_per_s": round(batches / spent),
        "zmq_blocks_per_s": round(batches * ZMQ_BLOCKS * 2 / spent),
        "zmq_cpu_us_per_batch": round(cpu / batches * 1e6, 2),
    }


def _mismatches(twins: list[Twin]) -> int:
    """Layouts that a twin decodes to something else than what was encoded."""
    random_ = random.Random(4)
    wrong = 0
    for form in ("map", "array"):
        for blocks, tokens, digest in LAYOUTS:
            payload, hashes, token_ids = stored_batch(random_, blocks, tokens, form=form, digest=digest, parent=7)
            for twin in twins:
                event = twin.decode_batch(payload).events[0]
                told = (list(event.hashes), array("I", bytes(event.tokens)).tolist(), event.parent, event.block_size)
                wrong += told != (hashes, token_ids, 7, tokens)
    return wrong
