"""``python -m tests.fuzz.front_door --minutes 5 --seed 1``

Stops at the first case that goes wrong or takes longer than `HANG_S`, and appends it to
``tests/fixtures/fuzz/front_door.txt``, which the unit tests replay. Exit code 1 then.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
import time
import traceback
from collections import Counter
from pathlib import Path
from types import FrameType

from tests.fuzz.front_door.kinds import KINDS, run_case

KEPT = Path(__file__).parents[2] / "fixtures" / "fuzz" / "front_door.txt"
HANG_S = 10
"""Of processor time: an expression or a loop that does not come back."""


class HangError(Exception):
    """A case has not come back."""


def on_hang(number: int, frame: FrameType | None) -> None:
    raise HangError(f"no end after {HANG_S} s of processor time")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.front_door", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="where the numbers of the cases begin (default 0)")
    parser.add_argument("--kind", choices=sorted(KINDS), help="only cases of this kind")
    parser.add_argument("--case", metavar="KIND/NUMBER", help="this one case")
    parser.add_argument("--dry", action="store_true", help="do not add what is found to the kept cases")
    options = parser.parse_args()
    if options.case is not None:
        kind, _, number = options.case.partition("/")
        run_case(kind, int(number))
        return 0
    signal.signal(signal.SIGVTALRM, on_hang)
    kinds = [options.kind] if options.kind else list(KINDS)
    counts: Counter[str] = Counter()
    end = time.monotonic() + options.minutes * 60.0
    for number in itertools.count(options.seed * 1_000_000_000):
        kind = kinds[number % len(kinds)]
        signal.setitimer(signal.ITIMER_VIRTUAL, HANG_S)
        try:
            run_case(kind, number)
        except Exception:  # noqa: BLE001 - whatever it is, it is what we look for
            traceback.print_exc()
            print(f"FAILED: {kind}/{number}; again: python -m tests.fuzz.front_door --case {kind}/{number}")
            if not options.dry:
                with KEPT.open("a") as kept:
                    kept.write(f"{kind}/{number}\n")
            return 1
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        counts[kind] += 1
        if time.monotonic() >= end:
            break
    print(f"{counts.total()} cases, {dict(sorted(counts.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
