"""Processes that need a kvcore and cannot have the one that is asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import REPOSITORY as ROOT


@pytest.mark.parametrize(
    ("module", "arguments", "name"),
    [
        ("tidegate", ["doctor"], "tidegate"),
        ("services.indexer", [], "tidegate indexer"),
        ("load.engine", [], "tidegate engine"),
    ],
)
def test_a_kvcore_that_cannot_be_had_is_one_sentence(
    module: str, arguments: list[str], name: str, tmp_path: Path
) -> None:
    """``TIDEGATE_KVCORE=native`` without a build that fits, in every process that needs it: what is wrong and what to
    do, code 2, no traceback, and nothing is started."""
    (tmp_path / "tidegate_kvcore.py").write_text("API = None")
    environ = {**os.environ, "TIDEGATE_KVCORE": "native", "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 2
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith(f"{name}: TIDEGATE_KVCORE=native, but the installed tidegate_kvcore is too old")
    assert "make setup" in sentence
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "__pycache__") == ["tidegate_kvcore.py"]
