"""``tidegate keys``: what it writes the front door reads, and no key is anywhere but in the line that is printed."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from services.ingress.keys import read_keys
from tidegate.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["keys", *arguments])
    said = capsys.readouterr()
    return code, said.out.strip(), said.err


def test_a_keys_life(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Made, listed, checked, revoked; comments and other lines stay; the file is for its owner only."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "keys.jsonl"
    code, key, said = run(capsys, "add", "--tenant", "acme", "--name", "\x1b[2J", "--model", "sim-*", "--days", "1")
    assert (code, key.startswith("tg_"), len(key) > 60, path.stat().st_mode & 0o777) == (0, True, True, 0o600)
    assert key not in said
    path.write_bytes(b"# ours\n" + path.read_bytes().rstrip(b"\n"))
    other = json.loads(run(capsys, "add", "--tenant", "b", "--requests-per-s", "2", "--burst", "4", "--json")[1])
    (found,) = [each for each in read_keys(path.read_bytes()) if each.tenant == "acme"]
    assert read_keys(path.read_bytes()).find(key, time.time()) == found
    assert key.split("_")[2].encode() not in path.read_bytes()
    listed = run(capsys, "list")[1]
    assert "sim-*" in listed
    assert "2 requests/s, 4 at" in listed
    assert "\x1b[2J" not in listed
    assert [each["id"] for each in json.loads(run(capsys, "list", "--json")[1])["keys"]] == [found.id, other["id"]]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{key}\n".encode())))
    assert run(capsys, "check", "--key")[:2] == (0, f"keys.jsonl: the key is {found.id}, of tenant acme")
    assert run(capsys, "revoke", key)[0] == 0
    assert path.read_bytes().startswith(b"# ours\n{")
    assert [each.id for each in read_keys(path.read_bytes())] == [other["id"]]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"{key}\n".encode())))
    assert run(capsys, "check", "--key")[0] == 1
    assert run(capsys, "revoke", found.id)[0] == 1


@pytest.mark.parametrize(
    ("data", "arguments", "code", "said"),
    [
        (None, ["list"], 1, "`tidegate keys add` makes it"),
        (b"\nno", ["check"], 1, "line 2: is not a JSON object"),
        (b"no", ["add", "--tenant", "a"], 2, "is not a JSON object"),
        (b"", ["add", "--tenant", "a b"], 2, "tenant must be"),
        (b"", ["add", "--tenant", "a", "--burst", "3"], 2, "burst needs requests_per_s"),
        (b"", ["add", "--tenant", "a", "--requests-per-s", "nan"], 2, "no finite number"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_written(
    data: bytes | None, arguments: list[str], code: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit codes and sentences; the file stays as it was."""
    path = tmp_path / "keys.jsonl"
    if data is not None:
        path.write_bytes(data)
    found = run(capsys, *arguments, "--file", str(path))
    assert found[0] == code
    assert said in found[2]
    assert (path.read_bytes() if path.exists() else None) == data
