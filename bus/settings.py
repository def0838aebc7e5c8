"""Settings of a service: one TOML file, the environment, ``--set``; converted, checked, and every mistake named.

Later wins: defaults, ``[common]``, ``[<section>]``, ``TIDEGATE_<KEY>`` (common keys), ``TIDEGATE_<SECTION>_<KEY>``,
``--set key=value``. Lists and tables are JSON in the environment and in ``--set``. A key or table nobody knows is an
error: a typo never becomes a default.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import inspect
from msgspec.structs import FieldInfo
from msgspec.structs import fields as struct_fields

from bus.errors import SettingsError
from bus.setting_problems import choices, in_words, table_keys

SECTIONS = ("ingress", "bridge", "indexer", "admission", "hints", "recorder", "engine", "pool", "up")
"""The tables that a settings file may hold beside ``[common]``."""

ENVIRONMENT_PREFIX = "TIDEGATE_"
NOT_SETTINGS = frozenset(
    {"TIDEGATE_CONFIG", "TIDEGATE_BASE_IMAGE", "TIDEGATE_NATS_IMAGE", "TIDEGATE_KVCORE", "TIDEGATE_NATIVE"}
)
"""Variables under our prefix that are read by other tools than a service."""

# Kubernetes puts the addresses of Services into the environment; one named tidegate-ingress would look like settings.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT)(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_SECRET = re.compile(r"(^|_)(secret|token|password|passphrase|credentials|api_key|api_keys|private_key|salt_key)$")
REDACTED = "***"

_CLOSE = 0.75
"""How alike, 0 to 1, a known name must be to be what was meant."""
_MOST_NAMES = 9
"""More are not listed in an error."""
_COMMANDS = {"engine": "python -m load.engine", "pool": "python -m load.pool", "up": "tidegate up"}
"""Section to the program whose --help lists its settings, where that is no service."""


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every service has. Subclass it in ``services/<name>/config.py``; rules between keys go to ``__post_init__``
    and raise `ValueError` with one sentence.

    ``instance``: this process's name on the bus; empty: the section's name + ``-1``. ``http_port``: health and metrics;
    0 picks one, -1 none. ``stop_timeout_s``: how long a clean stop may take.

    ``nats_url``: one address of the bus, or several separated by commas; ``tls://`` takes nothing but TLS.
    ``nats_user`` with ``nats_password`` or ``nats_password_file``, or ``nats_creds`` (a ``.creds`` file; needs the
    package nkeys): who this process is on the bus. ``nats_tls_ca``: who vouches for the server, ``nats_tls_cert`` and
    ``nats_tls_key``: for us (PEM files). ``nats_inbox_prefix``: where answers come to; empty: ``_INBOX.<nats_user>``.
    ``nats_replicas``: copies of every stream and bucket that we make, on as many servers.

    Not a setting: ``hears_itself``, whether the service's own messages come back to it where it subscribes to them.
    """

    hears_itself: ClassVar[bool] = True

    instance: str = ""
    nats_url: str = "nats://127.0.0.1:4222"
    nats_user: str = ""
    nats_password: str = ""
    nats_password_file: str = ""
    nats_creds: str = ""
    nats_tls_ca: str = ""
    nats_tls_cert: str = ""
    nats_tls_key: str = ""
    nats_inbox_prefix: str = ""
    nats_replicas: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1
    http_host: str = "127.0.0.1"
    http_port: int = 0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    stop_timeout_s: float = 10.0


S = TypeVar("S", bound=CommonSettings)


@dataclass(frozen=True, slots=True)
class LoadedSettings(Generic[S]):
    """Settings and, for each key that somebody set, where the winning value was written."""

    settings: S
    origins: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Value:
    """One value as written: ``text`` values come from the environment or ``--set`` and still need a type."""

    raw: Any
    written: str
    origin: str
    text: bool


def load_settings(
    section: str,
    kind: type[S],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] | None = None,
) -> S:
    """Settings of ``section`` as ``kind``. Raises `SettingsError` naming the key as its user wrote it.

    ``environ``: the process's environment unless given. ``overrides``: ``--set`` pairs, key to text.
    """
    return load_with_origins(section, kind, file=file, environ=environ, overrides=overrides).settings


def load_with_origins(
    section: str,
    kind: type[S],
    *,
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, str] | None = None,
) -> LoadedSettings[S]:
    """As `load_settings`, and where each value came from (for ``--print-config``)."""
    fields = {field.encode_name: field for field in struct_fields(kind)}
    written = _written(section, fields, file, os.environ if environ is None else environ, overrides or {})
    values = dict(written)
    converted = {key: _convert(value, fields[key].type) for key, value in values.items()}
    if not converted.get("instance"):
        converted["instance"] = f"{section}-1"
    for key, field in fields.items():
        if field.required and key not in converted:
            variable = f"{ENVIRONMENT_PREFIX}{section.upper()}_{key.upper()}"
            raise SettingsError(key, f"must be set, in [{section}] of the settings file, as {variable}, or with --set")
    try:
        settings = kind(**converted)
    except ValueError as error:
        raise SettingsError("settings", str(error)) from error
    return LoadedSettings(settings, {key: value.origin for key, value in values.items()})


def parse_overrides(pairs: Iterable[str]) -> dict[str, str]:
    """``["key=value", ...]`` as a mapping. Raises `SettingsError`."""
    overrides: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise SettingsError(pair, "--set wants key=value")
        overrides[key.strip()] = value
    return overrides


def show_settings(loaded: LoadedSettings[S], section: str) -> str:
    """The effective settings as TOML that can be read back, secrets as ``***``, origins as comments."""
    lines = [f"[{section}]"]
    for field in struct_fields(type(loaded.settings)):
        key = field.encode_name
        value = msgspec.to_builtins(getattr(loaded.settings, field.name))
        origin = loaded.origins.get(key)
        comment = f"  # {origin}" if origin else ""
        lines.append(f"# {key}: not set" if value is None else f"{key} = {_toml(redact(key, value))}{comment}")
    return "\n".join(lines) + "\n"


def redact(key: str, value: Any) -> Any:
    """``value`` without secrets: by the key's name (``..._secret``, ``..._token``, ...), or inside a URL."""
    if value and _SECRET.search(key.lower()):
        return REDACTED
    if isinstance(value, str):
        return _redact_url(value)
    if isinstance(value, list | tuple):
        return [redact(key, item) for item in value]
    if isinstance(value, Mapping):
        return {name: redact(str(name), item) for name, item in value.items()}
    return value


def describe_settings(section: str, kind: type[CommonSettings]) -> list[tuple[str, str, str]]:
    """(key, default, environment variable) of every setting, for ``--help``."""
    common = {field.encode_name for field in struct_fields(CommonSettings)}
    rows = []
    for field in struct_fields(kind):
        key = field.encode_name
        default = "required" if field.required else _toml_or_none(redact(key, _default(field)))
        prefix = ENVIRONMENT_PREFIX if key in common else f"{ENVIRONMENT_PREFIX}{section.upper()}_"
        rows.append((key, default, prefix + key.upper()))
    return rows


def setting_values(kind: type[CommonSettings]) -> dict[str, tuple[str, ...]]:
    """What may be written for the settings of which there is a choice, and the keys of those that are tables with
    fixed keys, for ``--help``."""
    values = {field.encode_name: choices(field.type) or table_keys(field.type) for field in struct_fields(kind)}
    return {key: allowed for key, allowed in values.items() if allowed}


# Where values are written


def _written(
    section: str,
    fields: Mapping[str, FieldInfo],
    file: Path | None,
    environ: Mapping[str, str],
    overrides: Mapping[str, str],
) -> Iterable[tuple[str, _Value]]:
    """Every written value, weakest first."""
    common = {field.encode_name for field in struct_fields(CommonSettings)}
    if file is not None:
        yield from _from_file(section, fields, common, file)
    yield from _from_environment(section, fields, common, environ)
    for key, text in overrides.items():
        if key not in fields:
            raise _unknown(section, key, "--set", fields)
        yield key, _Value(text, key, "--set", True)


def _from_file(
    section: str, fields: Mapping[str, FieldInfo], common: set[str], file: Path
) -> Iterable[tuple[str, _Value]]:
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(str(file), f"cannot be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(str(file), f"is not TOML: {error}") from error
    known_tables = {"common", section, *SECTIONS}
    for name, table in tables.items():
        if name not in known_tables:
            raise _unknown(section, name, f"{file.name}: there is no such table", known_tables)
        if not isinstance(table, dict):
            raise SettingsError(name, f"in {file.name} must be a table, as in [{name}]")
    for table_name, known in (("common", common), (section, fields.keys())):
        for key, raw in tables.get(table_name, {}).items():
            origin = f"{file.name} [{table_name}]"
            if key not in known:
                raise _unknown(section, key, origin, known)
            yield key, _Value(raw, key, origin, False)


def _from_environment(
    section: str, fields: Mapping[str, FieldInfo], common: set[str], environ: Mapping[str, str]
) -> Iterable[tuple[str, _Value]]:
    own = f"{ENVIRONMENT_PREFIX}{section.upper()}_"
    foreign = tuple(f"{ENVIRONMENT_PREFIX}{name.upper()}_" for name in SECTIONS if name != section)
    shared: list[tuple[str, _Value]] = []
    special: list[tuple[str, _Value]] = []
    for name in sorted(environ):
        if not name.startswith(ENVIRONMENT_PREFIX) or name in NOT_SETTINGS or name.startswith(foreign):
            continue
        if _SERVICE_LINK.search(name) or (name.endswith("_PORT") and environ[name].startswith(("tcp://", "udp://"))):
            continue
        key = name.removeprefix(own).lower()
        if name.startswith(own):
            if key not in fields:
                raise _unknown(section, name, "the environment", [own + known.upper() for known in fields])
            special.append((key, _Value(environ[name], name, name, True)))
            continue
        key = name.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key not in common:
            raise _unknown(section, name, "the environment", [ENVIRONMENT_PREFIX + known.upper() for known in common])
        shared.append((key, _Value(environ[name], name, name, True)))
    yield from shared
    yield from special


def _unknown(section: str, written: str, where: str, known: Iterable[str]) -> SettingsError:
    names = sorted(known)
    # The prefix alone shall not make two variables look alike.
    own = f"{ENVIRONMENT_PREFIX}{section.upper()}_"
    shared = len(next((prefix for prefix in (own, ENVIRONMENT_PREFIX) if written.startswith(prefix)), ""))
    near = difflib.get_close_matches(
        written[shared:], [name[shared:] for name in names if name.startswith(written[:shared])], n=1, cutoff=_CLOSE
    )
    if near:
        advice = f"did you mean {written[:shared]}{near[0]}?"
    elif len(names) <= _MOST_NAMES:
        advice = f"known: {', '.join(names)}"
    else:
        advice = f"`{_COMMANDS.get(section, f'python -m services.{section}')} --help` lists them"
    return SettingsError(written, f"unknown setting ({where}); {advice}")


# Values


def _default(field: FieldInfo) -> Any:
    if field.default_factory is not msgspec.NODEFAULT:
        return msgspec.to_builtins(field.default_factory())
    return msgspec.to_builtins(field.default)


def _convert(value: _Value, kind: Any) -> Any:
    try:
        if value.text and _is_container(inspect.type_info(kind)):
            converted = msgspec.json.decode(value.raw, type=kind)
        else:
            converted = msgspec.convert(value.raw, kind, strict=not value.text)
        if _is_finite(msgspec.to_builtins(converted)):
            return converted
        problem = "must be a finite number"
    except SettingsError as error:  # a rule of a table's own
        key = f"{value.written}.{error.key}"
        raise SettingsError(key, str(error).removeprefix(f"{error.key}: ")) from error
    except msgspec.ValidationError as error:
        problem = in_words(str(error), kind)
    except msgspec.DecodeError as error:
        raise SettingsError(value.written, f"lists and tables are written as JSON here ({error})") from error
    origin = "" if value.origin == value.written else f" ({value.origin})"
    raise SettingsError(value.written, f"{problem}{_shown(value)}{origin}")


def _is_finite(value: Any) -> bool:
    """Whether no number in it is infinite, or none at all: those pass every comparison, or none."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_is_finite, value))


def _shown(value: _Value) -> str:
    if _SECRET.search(value.written.lower()):
        return ""
    if isinstance(value.raw, str):
        return f", not {'' if value.text else 'the text '}{_redact_url(value.raw)!r}"
    return f", not {_toml(redact(value.written, value.raw))}"


def _is_container(kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.Metadata):
        return _is_container(kind.type)
    if isinstance(kind, inspect.UnionType):
        return any(_is_container(member) for member in kind.types)
    scalar = (
        inspect.StrType,
        inspect.IntType,
        inspect.FloatType,
        inspect.BoolType,
        inspect.NoneType,
        inspect.LiteralType,
        inspect.EnumType,
    )
    return not isinstance(kind, scalar)


_NEXT_URL = re.compile(r",(?=\s*[a-z]+://)")


def _redact_url(text: str) -> str:
    if "@" not in text or "://" not in text:
        return text
    return ",".join(_redact_one(part) for part in _NEXT_URL.split(text))


def _redact_one(url: str) -> str:
    if "@" not in url or "://" not in url:
        return url
    scheme, rest = url.split("://", 1)
    return f"{scheme}://{REDACTED}@{rest.rsplit('@', 1)[1]}"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        # TOML has no null; a key of a table that is not written is not set.
        items = [f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items() if item is not None]
        return "{ " + ", ".join(items) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, float) and not value.is_integer():
        return repr(value)
    return json.dumps(value, ensure_ascii=False)


def _toml_or_none(value: Any) -> str:
    return "not set" if value is None else _toml(value)
