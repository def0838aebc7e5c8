"""The architecture as tests: cores without I/O, and one direction of imports (docs/architecture.md, STYLE.md §7.1)."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

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


@cache
def facts(path: Path) -> tuple[tuple[tuple[int, str], ...], tuple[tuple[int, str], ...]]:
    """(line, dotted name) of every import in a file, inside functions too, ``from a import b`` as ``a.b``; (line, name)
    of every call of a plain name. Read once: parsing is what costs here."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    imported: list[tuple[int, str]] = []
    called: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            imported += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            imported += [(node.lineno, f"{origin}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called.append((node.lineno, node.func.id))
    return tuple(imported), tuple(called)


def imports(path: Path) -> tuple[tuple[int, str], ...]:
    """What a file imports."""
    return facts(path)[0]


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
    guilty = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in CORES
        for line, name in imports(path)
        if name.split(".")[0] in FORBIDDEN_IN_CORES or any(is_in(name, module) for module in IMPURE_HOUSE)
    ]
    assert guilty == []


def test_a_core_calls_nothing_that_goes_around_its_imports() -> None:
    """No file is opened, no module fetched by name, no code made from text."""
    around = {"open", "__import__", "eval", "exec", "input", "print"}
    guilty = [
        f"{path.relative_to(ROOT)}:{line} calls {name}"
        for path in CORES
        for line, name in facts(path)[1]
        if name in around
    ]
    assert guilty == []


def test_imports_point_one_way() -> None:
    """schemas, segments, web, kvcore <- bus <- replica <- services <- load <- tidegate; services import no other."""
    guilty = []
    for path in (path for package in sorted(MAY_IMPORT) for path in modules(package)):
        own = path.relative_to(ROOT).parts
        package = own[0]
        for line, name in imports(path):
            top = name.split(".")[0]
            if top not in MAY_IMPORT and top != "tests":
                continue
            allowed = top == package or top in MAY_IMPORT[package]
            if package == top == "services":
                allowed = len(own) < 3 or is_in(name, f"services.{own[1]}")
            if not allowed:
                guilty.append(f"{path.relative_to(ROOT)}:{line} imports {name}")
    assert guilty == []


def test_cores_do_not_import_their_shell() -> None:
    """The shell knows the core, never the other way round."""
    guilty = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in CORES
        for line, name in imports(path)
        if (name.startswith("services.") and len(name.split(".")) > 2 and name.split(".")[2].startswith("shell"))
        or name.startswith("replica.shell")
    ]
    assert guilty == []
