"""Secrets of a whole system: whoever reads its bus, its files, its pages, its processes or its errors learns none."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bus.interface import BusMessage
from bus.nats import NatsOptions, connect
from bus.nats.access import NatsAccess
from services.ingress.keys import Key, digest
from tests.support.processes import eventually, start_process
from tests.support.system import RunningSystem, running_system
from web.client import Answer, HttpClient, Timeouts

pytestmark = pytest.mark.timeout(400)

KEY = f"tg_acme_{'Kq7' * 14}"
WRONG = f"tg_acme_{'Wz3' * 14}"
FOREIGN = f"sk-proj-{'Fx9' * 14}"
COOKIE = f"session={'Ck5' * 14}"
SALT = "5a17" * 16
ENGINE_KEY = "En8" * 14
SECRETS = {"key": KEY[8:], "wrong key": WRONG[8:], "foreign key": FOREIGN[8:], "cookie": COOKIE[8:]}
SECRETS |= {"salt secret": SALT, "engine's key": ENGINE_KEY}
CONFIG = """
[ingress]
keys_file = "{folder}/keys.jsonl"
cache_salt_secret_file = "{folder}/salt"
engine_api_key_file = "{folder}/engine-key"
capture = "answers"
capture_directory = "{folder}/captured"
capture_headers = ["x-*", "user-agent"]

[common]
log_level = "debug"
"""


def write_files(folder: Path) -> Path:
    """Everything that the system is given; the path of its configuration."""
    key = Key(id="acme", sha256=digest(KEY), tenant="acme")
    for name, text in (("keys.jsonl", json.dumps({"id": key.id, "sha256": key.sha256, "tenant": key.tenant})),
                       ("salt", SALT), ("engine-key", ENGINE_KEY)):  # fmt: skip
        (folder / name).write_text(text + "\n")
        (folder / name).chmod(0o600)
    config = folder / "tidegate.toml"
    config.write_text(CONFIG.format(folder=folder))
    return config


async def everything_asked(http: HttpClient, url: str) -> list[Answer]:
    """Turns that are served and every kind of refusal, each with credentials in all places that clients have."""
    message = {"role": "user", "content": f"My key is {KEY}, keep it."}
    good = json.dumps({"model": "sim-8b", "max_tokens": 8, "messages": [message]}).encode()
    answers = []
    for key in (KEY, WRONG, FOREIGN):
        for path, body, more in (
            ("/v1/chat/completions", good, []),
            ("/v1/chat/completions", good.replace(b'"max_tokens"', b'"stream": true, "max_tokens"'), []),
            ("/v1/messages", good, [(b"x-api-key", key.encode())]),
            ("/v1/chat/completions", b"{" + KEY.encode(), []),
            ("/v1/chat/completions", good.replace(b"sim-8b", KEY.encode()), []),
            ("/v1/chat/completions", good, [(b"content-encoding", b"gzip")]),
            ("/v1/chat/completions", good, [(b"expect", KEY.encode())]),
            ("/nothing", good, []),
        ):
            headers = [(b"content-type", b"application/json"), (b"authorization", b"Bearer " + key.encode()), *more]
            headers += [(b"cookie", COOKIE.encode()), (b"x-tidegate-session-id", b"secrets")]
            answers.append(await http.fetch("POST", url + path, headers, body, Timeouts(total_s=60.0)))
    return answers


def texts(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below a folder but the secrets' own, unpacked."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "secrets" not in path.parts:
            data = path.read_bytes()
            yield str(path.relative_to(folder)), gzip.decompress(data) if path.suffix == ".gz" and data else data


def processes_of(system: RunningSystem) -> Iterator[tuple[str, bytes]]:
    """Arguments and environment of every process of the system."""
    children: dict[int, list[int]] = {}
    for entry in (entry for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        try:
            parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        children.setdefault(parent, []).append(int(entry.name))
    found, waiting = [], [system.process.pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], [])
    assert len(found) > 6
    for pid in found:
        for name in ("cmdline", "environ"):
            yield f"{name} of {pid}", Path(f"/proc/{pid}/{name}").read_bytes()


async def test_no_secret_is_anywhere_but_in_its_file(tmp_path: Path) -> None:
    """Keys that are right, wrong and somebody else's, cookies, the salts' secret, the engine's key and every password
    of the bus: not in answers, facts, rows, captured prompts, the bus' own files, pages of metrics, logs (at debug),
    `doctor`, command lines or environments."""
    config = write_files(tmp_path)
    async with running_system(tmp_path, "--secure", "--config", str(config)) as system:
        folder = system.workdir / "secrets"
        passwords = {path.name: path.read_text().strip() for path in folder.iterdir() if "." not in path.name}
        access = NatsAccess(user="watcher", password_file=str(folder / "watcher"))
        watcher = await connect(system.nats_url, name="watcher", timeout_s=30, options=NatsOptions(access=access))
        said: list[tuple[str, bytes]] = []
        http = HttpClient()

        def on_message(message: BusMessage) -> None:
            said.append((message.subject, message.payload))

        try:
            await watcher.subscribe("tg.v1.>", on_message)
            await watcher.flush()
            answers = await everything_asked(http, system.url)
            assert {answer.status for answer in answers} >= {200, 400, 401, 404, 417}
            await eventually(lambda: system.metric("recorder", "tidegate_recorder_rows_total") >= 3)
            for number, answer in enumerate(answers):
                head = b"".join(b"%b: %b\n" % header for header in answer.headers)
                # What a client writes into its own model's name comes back to it, and to nobody else.
                said.append((f"answer {number}", (head + answer.body).replace(KEY.encode(), b"")))
            for name, ready in system.addresses["health"].items():
                if name != "nats" and not name.startswith("engine"):
                    page = await http.fetch("GET", ready.replace("/readyz", "/metrics"), [], b"", Timeouts(total_s=30))
                    said.append((f"metrics of {name}", page.body))
            said += processes_of(system)
            doctor = [sys.executable, "-m", "tidegate", "doctor", "--workdir", str(system.workdir)]
            done = await start_process(doctor, tmp_path / "system", name="doctor")
            await done.wait(120)
            said.append(("doctor", done.output.encode()))
        finally:
            await watcher.close()
            await http.close()
        assert await system.process.stop(60) == 0, system.process.output
        said += [*texts(system.workdir), *texts(tmp_path / "captured"), ("up", system.process.output.encode())]
    secrets = SECRETS | {f"password of {name}": password for name, password in passwords.items()}
    found = [(name, where) for where, data in said for name, secret in secrets.items() if secret.encode() in data]
    assert found == []
    seen = {where.split("/")[0].split(".")[0] for where, data in said if b"acme" in data}
    assert seen >= {"tg", "nats", "traces"}, "what is no secret, whose request it was, is found there"
    assert any(b"My key is [redacted], keep it." in data for where, data in said if where.startswith("capture."))
