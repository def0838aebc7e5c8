"""``python -m tests.fuzz.kvcore --minutes 5 --seed 1``

A process of its own runs the cases and writes down which one it is at, so that nothing is lost when a twin crashes,
hangs or takes all memory. It stops at the first case that goes wrong, and appends it to
``tests/fixtures/fuzz/kvcore.txt``, which the unit tests replay. Exit code 1 then.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import resource
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from random import Random

from tests.fuzz.kvcore.kinds import KINDS, WEIGHTS, run
from tests.unit.kvcore.twins import NATIVE, NATIVE_MISSING, PYTHON

KEPT = Path(__file__).parents[2] / "fixtures" / "fuzz" / "kvcore.txt"
MEMORY_BYTES = 1024 * 1024 * 1024
"""What the cases may take; their inputs are a few KiB each."""
KEPT_MIB = 64
"""What may still be taken when all is over."""
HANG_S = 60.0
_WIDTH = 64
_FAILED = 3


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kvcore", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="where the numbers of the cases begin (default 0)")
    parser.add_argument("--kind", choices=sorted(KINDS), help="only cases of this kind")
    parser.add_argument("--case", metavar="KIND/NUMBER", help="this one case, in this process")
    parser.add_argument("--dry", action="store_true", help="do not add what is found to the kept cases")
    parser.add_argument("--at", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case is not None:
        kind, _, number = options.case.partition("/")
        run(kind, int(number), NATIVE or PYTHON)
        return 0
    if options.at is not None:
        return work(options.minutes, options.seed, options.kind, options.at)
    if NATIVE is None:
        print(f"only the Python twin, against itself: {NATIVE_MISSING}")
    with tempfile.NamedTemporaryFile(prefix="fuzz-kvcore-") as at:
        code = watch([*sys.argv[1:], "--at", at.name], Path(at.name))
        case = Path(at.name).read_text().strip()
    if code == 0:
        return 0
    print(f"FAILED: {case} (exit code {code}); again: python -m tests.fuzz.kvcore --case {case}")
    if not options.dry and case:
        KEPT.parent.mkdir(parents=True, exist_ok=True)
        with KEPT.open("a") as kept:
            kept.write(f"{case}\n")
    return 1


def watch(arguments: list[str], at: Path) -> int:
    """Run the worker; ended when it stays at one case for `HANG_S`. Its exit code, negative for a signal."""
    with subprocess.Popen([sys.executable, "-m", "tests.fuzz.kvcore", *arguments]) as worker:
        seen, since = "", time.monotonic()
        while True:
            try:
                return worker.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                case = at.read_text()
                if case != seen:
                    seen, since = case, time.monotonic()
                elif time.monotonic() - since > HANG_S:
                    worker.kill()
                    print(f"no progress for {HANG_S:g} s")


def work(minutes: float, seed: int, kind: str | None, at: Path) -> int:
    """Cases until the time is over or one goes wrong."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_memory_bytes(0) + MEMORY_BYTES, hard))
    names, weights = ([kind], [1]) if kind else (list(WEIGHTS), list(WEIGHTS.values()))
    twin = NATIVE or PYTHON
    counts: Counter[str] = Counter()
    end = time.monotonic() + minutes * 60.0
    before = _memory_bytes(1)
    place = os.open(at, os.O_WRONLY)
    for number in itertools.count(seed * 1_000_000_000):
        name = Random(number).choices(names, weights)[0]
        os.pwrite(place, f"{name}/{number}".ljust(_WIDTH).encode(), 0)
        try:
            run(name, number, twin)
        except KeyboardInterrupt:
            raise
        except BaseException:  # noqa: BLE001 - a panic of the native twin is no Exception
            traceback.print_exc()
            return _FAILED
        counts[name] += 1
        if time.monotonic() >= end:
            break
    gc.collect()
    grown = (_memory_bytes(1) - before) // 1024**2
    print(f"{twin} twin: {counts.total()} cases, {dict(sorted(counts.items()))}, memory grew by {grown} MiB")
    if grown > KEPT_MIB:
        print("memory grew beyond what single cases need: something is not given back")
        return _FAILED
    return 0


def _memory_bytes(column: int) -> int:
    """Of this process: 0 its address space, 1 what of it is in memory."""
    return int(Path("/proc/self/statm").read_text().split()[column]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
