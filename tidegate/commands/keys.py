"""``tidegate keys``: ``add``, ``list``, ``revoke``, ``check``"""

from __future__ import annotations

import base64
import datetime
import json
import os
import secrets
import sys
import tempfile
import time
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from services.ingress.errors import InvalidKeyError, KeysFileError
from services.ingress.keys import PREFIX, Key, Keyring, digest, entries, read_keys
from tidegate.commands.options import FiniteRange
from tidegate.errors import TidegateError, WrongUseError
from tidegate.safe_text import safe

SECRET_BYTES = 32
ID_BYTES = 5

_file = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("keys.jsonl"),
    show_default=True,
    metavar="FILE",
    envvar="TIDEGATE_INGRESS_KEYS_FILE",
    show_envvar=True,
    help="The keys file, as [ingress] keys_file names it.",
)
_json = click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")


@click.group("keys")
def command() -> None:
    """API keys of the front door: make one, see them, take one away, check the file.

    The file holds no key, only what tells a right one; a running front door reads it again within a second or two.

    \b
    Examples:
      tidegate keys add --tenant research
      tidegate keys list
      tidegate keys revoke k3vq7a2m
      tidegate keys check
    """


@command.command("add")
@click.option("--tenant", required=True, help="Whose requests these are: sessions, caches and rows are kept apart.")
@click.option("--name", default="", help="For people: who has it.")
@click.option(
    "--model", "models", multiple=True, help="A model that it may use (again for more; 'sim-*'). Default: all."
)
@click.option("--requests-per-s", type=FiniteRange(0.001, 1e6), help="Requests a second, on average.")
@click.option("--burst", type=click.IntRange(1, 10**6), help="Requests at once (default: those of a second).")
@click.option("--tokens-per-min", type=click.IntRange(1, 10**12), help="Tokens of prompts and answers a minute.")
@click.option("--days", type=FiniteRange(0.001, 36_500), help="Valid for so long. Default: until it is revoked.")
@_json
@_file
def add(
    tenant: str,
    name: str,
    models: tuple[str, ...],
    requests_per_s: float | None,
    burst: int | None,
    tokens_per_min: int | None,
    days: float | None,
    as_json: bool,
    path: Path,
) -> int:
    """Make a key, and print it: once, nobody can show it again. The file is made where there is none.

    \b
    Examples:
      tidegate keys add --tenant research
      tidegate keys add --tenant ci --model 'qwen*' --requests-per-s 5 --burst 20 --days 90
      export OPENAI_API_KEY=$(tidegate keys add --tenant me)
    """
    data = _data(path, missing=b"")
    key_id = _random(ID_BYTES)
    text = f"{PREFIX}{key_id}_{_random(SECRET_BYTES)}"
    key = Key(
        id=key_id,
        sha256=digest(text),
        tenant=tenant,
        name=name,
        models=models,
        requests_per_s=requests_per_s,
        burst=burst,
        tokens_per_min=tokens_per_min,
        expires_at=None if days is None else int(time.time() + days * 86_400),
    )
    written = data + (b"" if not data or data.endswith(b"\n") else b"\n") + msgspec.json.encode(key) + b"\n"
    try:
        read_keys(written)
    except KeysFileError as error:
        raise WrongUseError(error.rule) from error
    _write(path, written)
    if as_json:
        print(json.dumps({"key": text, **_shown(key)}))
    else:
        print(text)
        click.echo(f"tidegate: kept as {key.id} of tenant {key.tenant} in {path}; it is not shown again", err=True)
    return 0


@command.command("list")
@_json
@_file
def list_keys(as_json: bool, path: Path) -> int:
    """Who has keys, and what they may do. No key is in the file, and none is shown.

    \b
    Examples:
      tidegate keys list
      tidegate keys list --json | jq '.keys[] | select(.expired)'
    """
    keys = read_file(path)
    if as_json:
        print(json.dumps({"keys": [_shown(key) for key in keys]}))
        return 0
    table = Table(box=None, padding=(0, 2, 0, 0))
    for title in ("id", "tenant", "name", "models", "limits", "expires"):
        table.add_column(title, overflow="fold")
    for key in keys:
        cells = (key.id, key.tenant, key.name, ", ".join(key.models) or "all", _limits(key), _expiry(key))
        table.add_row(*(escape(safe(cell)) for cell in cells))
    console = Console(highlight=False)
    console.print(table if len(keys) else "no keys")
    return 0


@command.command("revoke")
@click.argument("key_id", metavar="ID")
@_file
def revoke(key_id: str, path: Path) -> int:
    """Take the key ID away (its id, or the key itself). Other lines of the file stay as they are; requests that run end
    as they would have.

    \b
    Examples:
      tidegate keys revoke k3vq7a2m
    """
    if key_id.startswith(PREFIX):
        key_id = key_id.split("_")[1]
    keys = read_file(path)
    if key_id not in {key.id for key in keys}:
        raise TidegateError(f"{path} has no key {key_id}; `tidegate keys list` shows those that it has")
    data = _data(path)
    gone = {number for number, line in entries(data) if msgspec.json.decode(line, type=Key).id == key_id}
    lines = data.split(b"\n")
    _write(path, b"\n".join(line for number, line in enumerate(lines, start=1) if number not in gone))
    click.echo(f"tidegate: {key_id} is revoked", err=True)
    return 0


@command.command("check")
@click.option("--key", "ask", is_flag=True, help="Ask for a key on standard input, and say whose it is.")
@_json
@_file
def check(ask: bool, as_json: bool, path: Path) -> int:
    """Whether the front door can read the file; with --key, whether it would take a key. Exit code 1: it would not.

    \b
    Examples:
      tidegate keys check && echo well
      tidegate keys check --key < key.txt
    """
    keys = read_file(path)
    found: Key | None = None
    if ask:
        text = sys.stdin.readline().strip()
        try:
            found = keys.find(text, time.time())
        except InvalidKeyError as error:
            raise TidegateError(f"{path}: {error}") from error
    if as_json:
        print(json.dumps({"ok": True, "keys": len(keys), "key": _shown(found) if found is not None else None}))
    elif found is not None:
        print(f"{path}: the key is {found.id}, of tenant {found.tenant}")
    else:
        print(f"{path}: {len(keys)} keys")
    return 0


def read_file(path: Path) -> Keyring:
    """The keys of a file. Raises `TidegateError` naming file, line and rule."""
    try:
        return read_keys(_data(path))
    except KeysFileError as error:
        raise TidegateError(f"{path}: {error}") from error


def _data(path: Path, missing: bytes | None = None) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        if missing is not None:
            return missing
        raise TidegateError(f"{path} is not there; `tidegate keys add` makes it") from error
    except OSError as error:
        raise TidegateError(f"{path} cannot be read: {error.strerror or error}") from error


def _write(path: Path, data: bytes) -> None:
    """In one step, so that nobody reads half a file; with the rights of the one before it, else for its owner only."""
    try:
        target = path.resolve()
        mode = target.stat().st_mode & 0o777 if target.exists() else 0o600
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fchmod(file.fileno(), mode)
                os.fsync(file.fileno())
            Path(name).replace(target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise TidegateError(f"{path} cannot be written: {error.strerror or error}") from error


def _random(size: int) -> str:
    """So many random bytes in lower-case letters and digits."""
    return base64.b32encode(secrets.token_bytes(size)).decode().rstrip("=").lower()


def _shown(key: Key) -> dict[str, object]:
    shown: dict[str, object] = msgspec.to_builtins(key)
    del shown["sha256"]
    return shown | {"expired": key.expires_at is not None and time.time() >= key.expires_at}


def _limits(key: Key) -> str:
    limits = []
    if key.requests_per_s is not None:
        limits.append(f"{key.requests_per_s:g} requests/s" + (f", {key.burst} at once" if key.burst else ""))
    if key.tokens_per_min is not None:
        limits.append(f"{key.tokens_per_min:,} tokens/min")
    return "; ".join(limits) or "none"


def _expiry(key: Key) -> str:
    if key.expires_at is None:
        return "never"
    if time.time() >= key.expires_at:
        return "expired"
    try:
        return datetime.datetime.fromtimestamp(key.expires_at, datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    except (OverflowError, ValueError, OSError):
        return f"{key.expires_at}"
