"""Which twin is chosen: a process of its own for each value of ``TIDEGATE_KVCORE`` and each installation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcore.errors import TwinError
from kvcore.events import Tier
from kvcore.twin import NATIVE_API, choose
from tests.unit.kvcore.making import batch, chain_of_names, removed, stored
from tests.unit.kvcore.twins import NATIVE, NATIVE_MISSING, PYTHON

ROOT = Path(__file__).parents[3]
SHOW = "import kvcore; print(kvcore.IMPLEMENTATION, kvcore.WHY); print(kvcore.PrefixIndex.__module__)"


def chosen(value: str | None, folder: Path | None = None) -> tuple[int, str]:
    """Exit code and output of a process that says what it chose. ``folder``: searched for modules before all else."""
    environ = {key: text for key, text in os.environ.items() if key != "TIDEGATE_KVCORE"}
    if value is not None:
        environ["TIDEGATE_KVCORE"] = value
    environ["PYTHONPATH"] = os.pathsep.join([*([str(folder)] if folder else []), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


def fake_native(folder: Path, text: str) -> Path:
    (folder / "tidegate_kvcore.py").write_text(text)
    return folder


def test_python_is_taken_when_asked_for() -> None:
    """Whatever is installed."""
    assert chosen("python") == (0, "python TIDEGATE_KVCORE=python asks for pure Python\nkvcore.index\n")


@pytest.mark.skipif(NATIVE_MISSING is not None, reason=f"no native twin is tested: {NATIVE_MISSING}")
def test_native_is_taken_where_it_is_installed() -> None:
    """By default and when asked for; there is nothing to explain."""
    assert choose("")[0] is choose("auto")[0] is choose(" Native ")[0]
    for value in (None, "native"):
        code, output = chosen(value)
        assert (code, output.splitlines()[0]) == (0, "native None")
        assert "tidegate_kvcore" in output.splitlines()[1]


def test_without_a_native_build(tmp_path: Path) -> None:
    """``auto`` goes on in pure Python and says why; ``native`` refuses, and says what to do."""
    folder = fake_native(tmp_path, "API = None")
    code, output = chosen("auto", folder)
    assert code == 0
    assert output.startswith("python the installed tidegate_kvcore is too old")
    code, output = chosen("native", folder)
    assert code == 1
    assert "kvcore.errors.TwinError: TIDEGATE_KVCORE=native, but the installed tidegate_kvcore is too old" in output
    assert "make setup" in output


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", f"too old (API unnamed, not {NATIVE_API})"),
        (f"API = {NATIVE_API - 1}", f"too old (API {NATIVE_API - 1 or 'unnamed'}, not {NATIVE_API})"),
        (f"API = {NATIVE_API + 1}", f"too new (API {NATIVE_API + 1}, not {NATIVE_API})"),
        ("raise ModuleNotFoundError('No module', name='tidegate_kvcore')", "is not installed"),
        ("import tidegate_kvcore_gone", "is damaged"),
        ("raise ImportError('wrong glibc')", "cannot be loaded (wrong glibc)"),
    ],
)
def test_why_a_native_build_does_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str) -> None:
    """Each reason in one sentence."""
    monkeypatch.syspath_prepend(fake_native(tmp_path, text))
    monkeypatch.delitem(sys.modules, "tidegate_kvcore", raising=False)
    native, said = choose("auto")
    assert native is None
    assert why in str(said)
    with pytest.raises(TwinError, match="make setup"):
        choose("native")
    sys.modules.pop("tidegate_kvcore", None)


def test_an_unknown_choice_is_refused() -> None:
    """A typo never becomes a default."""
    with pytest.raises(TwinError, match="TIDEGATE_KVCORE must be one of auto, native, python, not 'rust'"):
        choose("rust")
    assert chosen("rust")[0] == 1


@pytest.mark.skipif(NATIVE_MISSING is not None, reason=f"no native twin is tested: {NATIVE_MISSING}")
def test_results_of_both_twins_are_equal() -> None:
    """What a caller keeps or compares may come from either."""
    assert NATIVE is not None
    chain = chain_of_names([0, 1])
    results = []
    for twin in (PYTHON, NATIVE):
        index = twin.PrefixIndex()
        applied = index.apply("w", 3, batch(stored([0, 1]), stored([1], 0, Tier.HOST), removed([7])))
        matches = index.match(chain)
        assert isinstance(matches, Sequence)
        assert (len(matches), matches[0], matches[-1], list(matches)) == (1, matches[0], matches[0], [matches[0]])
        results.append((applied, matches[0], index.stats(), index.block_size("w", 3)))
    assert results[0] == results[1]
    assert results[1] == results[0]
    assert results[0][1].reach == results[1][1].reach == 2
