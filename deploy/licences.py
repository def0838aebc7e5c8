"""``python -m deploy.licences``: under which licences the locked packages are, and whether each may be used here.

Reads what the installed packages say of themselves (and, where cargo is, the crates of the native twin), without
network. A package passes when its licence, an SPDX expression, can be met with those of `TAKEN`. One that says nothing,
something unknown, or asks for another licence ends the check with exit code 1: look at its files, then add it to
`LOOKED_AT`, or do without it.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from email.message import Message
from importlib import metadata
from pathlib import Path

import click
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-dev.lock"
"""It has what runs (requirements.lock) and what we build and test with."""

TAKEN = frozenset(
    {
        "0BSD", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0",
        "CNRI-Python", "ISC", "MIT", "MIT-0", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Unicode-3.0", "Zlib",
    }
)  # fmt: skip
"""Permissive ones, and MPL-2.0, which asks for the sources of its own files only: we change none of them."""

LOOKED_AT = {
    "contourpy": "BSD-3-Clause",
    "cycler": "BSD-3-Clause",
    "forbiddenfruit": "GPL-3.0-or-later OR MIT",  # its COPYING files have both, one may choose
    "jinja2": "BSD-3-Clause",
    "kiwisolver": "BSD-3-Clause",
    "matplotlib": "PSF-2.0",  # its own licence, made after Python's
    "tiktoken": "MIT",
}
"""What the files of packages say whose metadata does not say it in a way that can be read."""

_SPELLED = {
    "3-clause bsd license": "BSD-3-Clause",
    "apache": "Apache-2.0",
    "apache 2 license": "Apache-2.0",
    "apache 2.0": "Apache-2.0",
    "apache software license": "Apache-2.0",
    "mit license": "MIT",
    "mozilla public license 2.0 (mpl 2.0)": "MPL-2.0",
    "psfl": "PSF-2.0",
    "python software foundation license": "PSF-2.0",
}
_TOKEN = re.compile(r"\(|\)|\bAND\b|\bOR\b|[^()\s]+(?: WITH [^()\s]+)?")
_ID = re.compile(r"[A-Za-z0-9.+-]+(?: WITH [A-Za-z0-9.+-]+)?")


def locked(lock: str) -> Iterator[str]:
    """The packages of a lock that this machine installs, once each."""
    seen: set[str] = set()
    for line in lock.splitlines():
        if not line or line[0] in " #":
            continue
        requirement = Requirement(line)
        if requirement.name not in seen and (requirement.marker is None or requirement.marker.evaluate()):
            seen.add(requirement.name)
            yield requirement.name


def licence_of(name: str, said: Message) -> str | None:
    """The SPDX expression of a package by its metadata; ``None``: it says none that can be read."""
    if name in LOOKED_AT:
        return LOOKED_AT[name]
    for text in (said.get("License-Expression"), said.get("License")):
        if text and (found := _SPELLED.get(text.lower(), text if _is_expression(text) else None)):
            return found
    named = [line.rpartition("::")[2].strip().lower() for line in said.get_all("Classifier") or ()
             if line.startswith("License ::") and not line.endswith("Approved")]  # fmt: skip
    spelled = [_SPELLED.get(text) for text in named]
    return " OR ".join(filter(None, spelled)) if spelled and all(spelled) else None


def _is_expression(text: str) -> bool:
    """Identifiers joined by words, and no sentence."""
    parts = [part for part in _TOKEN.findall(text) if part not in ("(", ")", "AND", "OR")]
    joined = sum(part in ("AND", "OR") for part in _TOKEN.findall(text))
    return bool(parts) and joined == len(parts) - 1 and all(_ID.fullmatch(part) for part in parts)


def taken(expression: str) -> bool:
    """Whether the licences of `TAKEN` are enough: all of those joined by AND, one of those joined by OR. Raises
    `ValueError` for what is no expression."""
    tokens = _TOKEN.findall(expression.replace("/", " OR "))  # crates of old write MIT/Apache-2.0
    result = _either(tokens)
    if tokens:
        raise ValueError(f"{expression!r} is no licence expression")
    return result


def _either(tokens: list[str]) -> bool:
    result = _both(tokens)
    while tokens and tokens[0] == "OR":
        tokens.pop(0)
        result = _both(tokens) or result
    return result


def _both(tokens: list[str]) -> bool:
    result = _one(tokens)
    while tokens and tokens[0] == "AND":
        tokens.pop(0)
        result = _one(tokens) and result
    return result


def _one(tokens: list[str]) -> bool:
    if not tokens or tokens[0] in (")", "AND", "OR"):
        raise ValueError("a licence is missing in the expression")
    token = tokens.pop(0)
    if token != "(":  # noqa: S105 - no password
        return token in TAKEN
    result = _either(tokens)
    if not tokens or tokens.pop(0) != ")":
        raise ValueError("a bracket is not closed in the expression")
    return result


def packages() -> dict[str, str | None]:
    """Licence by package. Raises `click.ClickException` for a package of the lock that is not installed."""
    found: dict[str, str | None] = {}
    for name in locked(LOCK.read_text()):
        try:
            found[name] = licence_of(name, metadata.metadata(name))  # type: ignore[arg-type]
        except metadata.PackageNotFoundError as error:
            raise click.ClickException(f"{name} is in {LOCK.name} and not installed: make setup") from error
    return found


def crates() -> dict[str, str | None]:
    """Licence by crate of the native twin; none where cargo is not, or has not fetched them."""
    cargo = shutil.which("cargo")
    if cargo is None:
        return {}
    command = [cargo, "metadata", "--format-version", "1", "--offline", "--locked"]
    try:
        done = subprocess.run(command, cwd=ROOT / "native", capture_output=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    return {f"crate {crate['name']}": crate["license"] for crate in json.loads(done.stdout)["packages"]}


@click.command(help=__doc__)
@click.option("--all", "everything", is_flag=True, help="A line for each package, not for each licence.")
def main(everything: bool) -> None:
    """See the module."""
    rust = crates()
    found = packages() | rust
    refused = []
    for name, licence in sorted(found.items()):
        try:
            passes = licence is not None and taken(licence)
        except ValueError:
            passes = False
        if not passes:
            refused.append(f"{name}: {licence or 'says no licence that can be read'}")
        elif everything:
            click.echo(f"{name:40} {licence}")
    if refused:
        click.echo("licences that nobody has looked at (deploy/licences.py):\n  " + "\n  ".join(refused), err=True)
        sys.exit(1)
    of_crates = f" ({len(rust)} crates)" if rust else " (no crates: cargo is not here, or has not fetched them)"
    click.echo(f"licences: {len(found)} packages{of_crates}, all within {len(TAKEN)} licences")


if __name__ == "__main__":
    main()
