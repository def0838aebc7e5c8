"""A folder with everything that a bus with users needs: accounts, passwords, one file for each user's own."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from pathlib import Path

from bus.permissions import User, accounts_text, passwords_text

ACCOUNTS = "nats-accounts.conf"
PASSWORDS = "passwords.conf"
HEADER = (
    "# Users of the bus and what each may do. Generated from schemas/catalog.py: python -m deploy.permissions\n"
    "# passwords.conf is made by `python -m deploy.permissions --secrets FOLDER` and lies beside this file.\n\n"
)
_BYTES = 24


def accounts_file(made: Sequence[User]) -> str:
    """Text of `ACCOUNTS`; it includes `PASSWORDS`."""
    return HEADER + accounts_text(made, PASSWORDS)


def write_secrets(folder: Path, made: Sequence[User]) -> list[str]:
    """`ACCOUNTS`, a password for each user that has none in ``folder`` yet, and `PASSWORDS`; returns who got a new one.

    The folder is its owner's alone; the files in it can be read by whoever they are mounted for. Raises `OSError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    fresh = []
    passwords = {}
    for user in made:
        path = folder / user.name
        if not path.exists():
            # Hexadecimal behind a letter: no character that a URL, a shell or nats-server reads as something else.
            _write(path, f"p{secrets.token_hex(_BYTES)}\n")
            fresh.append(user.name)
        passwords[user.name] = path.read_text().strip()
    _write(folder / PASSWORDS, passwords_text(passwords, made))
    _write(folder / ACCOUNTS, accounts_file(made))
    return fresh


def _write(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(0o444)
