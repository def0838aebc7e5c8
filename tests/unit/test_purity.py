"""The architecture as tests: cores without I/O, and one direction of imports (docs/architecture.md, STYLE.md §7.1)."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FORBIDDEN_IN_CORES = frozenset(
    {
        "asyncio",
        "builtins",
        "concurrent",
        "datetime",
        "http",
        "httptools",
        "importlib",
        "logging",
        "multiprocessing",
        "nats",
        "os",
        "pathlib",
        "random",
        "secrets",
        "select",
        "signal",
        "socket",
        "subprocess",
        "threading",
        "time",
        "uuid",
        "uvloop",
        "zmq",
    }
)
"""Clock, chance, the network, threads, processes: a core gets what it needs of them handed in."""

IMPURE_HOUSE = (
    "bus.health",
    "bus.interrupt",
    "bus.leadership",
    "bus.log",
    "bus.memory",
    "bus.nats",
    "bus.rows",
    "bus.service",
    "bus.tasks",
    "segments.writer",
    "web.client",
    "web.server",
)
"""Modules of ours that do I/O; a core does not import them either."""

SHELLS = ("shell", "config", "__main__")

MAY_IMPORT = {
    "schemas": frozenset[str](),
    "web": frozenset[str](),
    "segments": frozenset[str](),
    "kvcore": frozenset[str](),
    "bus": frozenset({"schemas", "web"}),
    "replica": frozenset({"schemas", "bus", "kvcore"}),
    "services": frozenset({"schemas", "segments", "bus", "web", "kvcore", "replica"}),
    "load": frozenset({"schemas", "segments", "bus", "web", "kvcore", "replica", "services"}),
    "tidegate": frozenset({"schemas", "segments", "bus", "web", "kvcore", "replica", "services", "load"}),
}
"""Package to the packages below it; every package may import itself, a service only itself among the services."""


def modules(package: str) -> list[Path]:
    """Every Python file of a package."""
    return sorted((ROOT / package).rglob("*.py"))


Named = tuple[tuple[int, str], ...]
"""(line, name), in the order of a file."""

_NAMES = r"[\w.]+(?:\s+as\s+\w+)?"
STATEMENT = re.compile(
    rf"^[ \t]*(from\s+[.\w]+\s+import\s+(?:\([^)]*\)|[^(\n]+)|import\s+{_NAMES}(?:\s*,\s*{_NAMES})*)", re.MULTILINE
)
"""An import as the formatter of this house leaves it: at the beginning of a line. In a text there may be one too."""

AROUND = ("open", "__import__", "eval", "exec", "input", "print")
CALL = re.compile(rf"(?<![.\w])({'|'.join(AROUND)})\(")


def read(text: str, path: Path) -> tuple[Named, Named]:
    """The dotted name of every import, inside functions too, ``from a import b`` as ``a.b``; the name of every call of
    a plain name."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    imported: list[tuple[int, str]] = []
    called: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            imported += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.append((node.lineno, node.func.id))
    return tuple(imported), tuple(called)


def imports(path: Path) -> Named:
    """What a file imports."""
    return read(path.read_text("utf-8"), path)[0]


@cache
def imports_at_most(path: Path) -> frozenset[str]:
    """What a file imports, and perhaps what its texts show: its statements alone are parsed, as a whole file takes many
    times as long."""
    statements = "\n".join(match[1] for match in STATEMENT.finditer(path.read_text("utf-8")))
    return frozenset(name for _, name in read(statements, path)[0])


def wrong_imports(paths: Iterable[Path], is_wrong: Callable[[Path, str], bool]) -> list[str]:
    """Where what is imported that must not be."""
    suspects = [path for path in paths if any(is_wrong(path, name) for name in imports_at_most(path))]
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in suspects
        for line, name in imports(path)
        if is_wrong(path, name)
    ]


def is_shell(path: Path) -> bool:
    """Whether a file of a service or of the replica may do I/O: its ``shell*``, ``config.py``, ``__main__.py``."""
    parts = path.relative_to(ROOT).parts
    room = parts[2:] if parts[0] == "services" else parts[1:]
    if not room:
        return False
    name = room[0].removesuffix(".py")
    return name in SHELLS or name.startswith("shell")


PURE_HOUSE = [ROOT / "segments" / name for name in ("errors.py", "format.py", "rules.py")]
"""Modules beside the services that are as pure as their cores."""


def is_in(name: str, module: str) -> bool:
    """Whether a dotted name is a module or something in it."""
    return name == module or name.startswith(module + ".")


CORES = [path for package in ("services", "replica") for path in modules(package) if not is_shell(path)] + PURE_HOUSE


def test_there_are_cores_to_check() -> None:
    """The rules below look at real files: at least one core of every service, and the replica's."""
    assert ROOT / "replica" / "core.py" in CORES
    assert {path.relative_to(ROOT).parts[1] for path in CORES} >= {
        "admission",
        "bridge",
        "hints",
        "indexer",
        "ingress",
        "recorder",
    }


def test_a_core_imports_neither_clock_nor_chance_nor_io() -> None:
    """Every service module but shell, config and __main__ is pure."""

    def is_impure(_: Path, name: str) -> bool:
        return name.split(".")[0] in FORBIDDEN_IN_CORES or any(is_in(name, module) for module in IMPURE_HOUSE)

    assert wrong_imports(CORES, is_impure) == []


def test_a_core_calls_nothing_that_goes_around_its_imports() -> None:
    """No file is opened, no module fetched by name, no code made from text."""
    guilty = []
    for path in CORES:
        text = path.read_text("utf-8")
        if CALL.search(text):
            called = [(line, name) for line, name in read(text, path)[1] if name in AROUND]
            guilty += [f"{path.relative_to(ROOT)}:{line} calls {name}" for line, name in called]
    assert guilty == []


def test_imports_point_one_way() -> None:
    """schemas, segments, web, kvcore <- bus <- replica <- services <- load <- tidegate; services import no other."""

    def is_upwards(path: Path, name: str) -> bool:
        own = path.relative_to(ROOT).parts
        package, top = own[0], name.split(".")[0]
        if top not in MAY_IMPORT and top != "tests":
            return False
        if package == top == "services":
            return len(own) >= 3 and not is_in(name, f"services.{own[1]}")
        return top != package and top not in MAY_IMPORT[package]

    assert wrong_imports((path for package in sorted(MAY_IMPORT) for path in modules(package)), is_upwards) == []


def test_cores_do_not_import_their_shell() -> None:
    """The shell knows the core, never the other way round."""

    def is_shells(_: Path, name: str) -> bool:
        parts = name.split(".")
        services = parts[0] == "services" and len(parts) > 2 and parts[2].startswith("shell")
        return services or name.startswith("replica.shell")

    assert wrong_imports(CORES, is_shells) == []


@pytest.mark.long
def test_no_import_is_overlooked() -> None:
    """Whole files, parsed, import nothing that their statements alone do not show."""
    paths = [path for package in sorted(MAY_IMPORT) for path in modules(package)]
    overlooked = {path: {name for _, name in imports(path)} - imports_at_most(path) for path in paths}
    assert {path: names for path, names in overlooked.items() if names} == {}
