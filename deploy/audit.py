"""``python -m deploy.audit``: whether a weakness is known of a locked package (by pip-audit).

Exit code 1 when there is one. Where the advisory service cannot be asked, or does not know the packages (a mirror of a
registry), it says ``skipped`` and why, and passes. What was found is kept for a day beside the virtual environment.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
LOCKS = (ROOT / "requirements.lock", ROOT / "requirements-dev.lock")
KEPT = Path(sys.prefix) / ".audited.json"
KEPT_S = 86_400
PROBE_S = 20
AUDIT_S = 180
ACCEPTED: dict[str, str] = {}
"""Weaknesses by id that do not touch us, and why."""


@dataclass(frozen=True, slots=True)
class Audit:
    """``skipped``: why nothing is known; ``weaknesses``: a line for each."""

    skipped: str | None = None
    weaknesses: tuple[str, ...] = ()
    packages: int = 0
    unknown: int = 0


def read(report: dict[str, Any]) -> Audit:
    """pip-audit's JSON report. That no package could be looked up is said by it in passing, as a success."""
    entries = report["dependencies"]
    unknown = [entry for entry in entries if "skip_reason" in entry]
    if len(unknown) == len(entries):
        why = unknown[0]["skip_reason"] if unknown else "there are no packages"
        return Audit(skipped=f"the advisory service does not know the packages ({why})")
    weaknesses = tuple(
        f"{entry['name']} {entry['version']}: {weakness['id']}, mended in {weakness['fix_versions'] or 'no version'}"
        for entry in entries
        for weakness in entry.get("vulns", ())
        if not ACCEPTED.keys() & {weakness["id"], *weakness.get("aliases", ())}
    )
    return Audit(weaknesses=weaknesses, packages=len(entries), unknown=len(unknown))


def ask(requirements: list[Path], timeout_s: float, program: tuple[str, str] = ("-m", "pip_audit")) -> Audit:
    """pip-audit about these files. ``program``: what Python is to run."""
    files = [argument for path in requirements for argument in ("--requirement", str(path))]
    options = ["--no-deps", "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "5"]
    command = [sys.executable, *program, *files, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return Audit(skipped=f"the advisory service did not answer within {timeout_s:g} s")
    try:
        return read(json.loads(done.stdout))
    except (ValueError, KeyError, TypeError):
        said = done.stderr.strip().splitlines() or ["pip-audit said nothing"]
        return Audit(skipped=f"the advisory service cannot be asked: {said[-1][:200]}")


def audit() -> Audit:
    """One package first: where the service cannot be asked, a hundred would take minutes to say so."""
    with tempfile.TemporaryDirectory(prefix="tidegate-audit-") as folder:
        one = Path(folder) / "one.txt"
        one.write_text(next(line for line in LOCKS[0].read_text().splitlines() if "==" in line) + "\n")
        first = ask([one], PROBE_S)
    return first if first.skipped is not None else ask([LOCKS[1]], AUDIT_S)


def kept(digest: str, now: float) -> Audit | None:
    """What was found of the same locks within a day."""
    try:
        said = json.loads(KEPT.read_text())
        if said["digest"] == digest and 0 <= now - said["at"] < KEPT_S:
            return Audit(skipped=said["skipped"], packages=said["packages"], unknown=said["unknown"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None


@click.command(help=__doc__)
@click.option("--again", is_flag=True, help="Ask, whatever is kept.")
def main(again: bool) -> None:
    """See the module."""
    now = time.time()
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (*LOCKS, Path(__file__)))).hexdigest()
    found = None if again else kept(digest, now)
    if found is None:
        found = audit()
        if not found.weaknesses:
            said = {"skipped": found.skipped, "packages": found.packages, "unknown": found.unknown}
            KEPT.write_text(json.dumps({"digest": digest, "at": now, **said}))
    if found.weaknesses:
        click.echo("weaknesses are known (a newer version, or deploy/audit.py ACCEPTED with the reason):", err=True)
        click.echo("\n".join(f"  {line}" for line in found.weaknesses), err=True)
        sys.exit(1)
    if found.skipped is not None:
        click.echo(f"audit: skipped: {found.skipped}")
        return
    click.echo(
        f"audit: no weakness is known of {found.packages - found.unknown} packages, {found.unknown} not looked up"
    )


if __name__ == "__main__":
    main()
