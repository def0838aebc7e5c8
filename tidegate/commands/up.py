"""``tidegate up``"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape

from bus.interrupt import INTERRUPTED_EXIT, STOP_SIGNALS
from bus.settings import load_with_origins, redact
from tidegate.commands.options import nats_option, workdir_option
from tidegate.front_door import first_model
from tidegate.locate import ENVIRONMENT_KEY, USUAL_URL
from tidegate.supervisor.config import UpSettings
from tidegate.supervisor.layout import Stage
from tidegate.supervisor.state import DEFAULT_WORKDIR, EngineState, SystemState
from tidegate.supervisor.supervisor import ChildEvent
from tidegate.supervisor.system import System


@click.command("up")
@click.option(
    "--port", type=click.IntRange(0, 65_535), help="Of the front door (default 8080; 0: any, and for the rest too)."
)
@click.option("--host", metavar="ADDRESS", help="Where the front door listens (default 127.0.0.1).")
@click.option("--engines", type=click.IntRange(min=1), metavar="N", help="Simulated engines to start (default 2).")
@click.option(
    "--engine",
    "engine",
    multiple=True,
    metavar="URL[=EVENTS[,replay=ENDPOINT]]",
    help="A real engine instead of simulated ones; repeatable.",
)
@click.option("--model", metavar="NAME", help="What the simulated engines serve.")
@click.option("--pool", is_flag=True, help="The simulated engines share a simulated pool of KV pages.")
@click.option("--ingress-workers", type=click.IntRange(min=1), metavar="N", help="Processes of the front door (1).")
@click.option("--tls-cert", metavar="FILE", help="The front door speaks TLS with this certificate (PEM).")
@click.option("--tls-key", metavar="FILE", help="Its key, where that is not in the same file.")
@click.option("--secure", is_flag=True, help="The bus has users: every process its own, commands and policies too.")
@nats_option("Use this bus instead of starting one.")
@workdir_option(f"Where traces, logs and the bus's store go (default {DEFAULT_WORKDIR}).")
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False, exists=True), help="TOML file for all parts.")
@click.option("--json", "as_json", is_flag=True, help="When ready, print one JSON object with all addresses.")
def command(
    port: int | None,
    host: str | None,
    engines: int | None,
    engine: tuple[str, ...],
    model: str | None,
    pool: bool,
    ingress_workers: int | None,
    tls_cert: str | None,
    tls_key: str | None,
    secure: bool,
    nats: str | None,
    workdir: Path | None,
    config: Path | None,
    as_json: bool,
) -> int:
    """Run a whole system on this machine and keep it running until Ctrl-C.

    The front door, the bus and the services are child processes; one that dies is started again. Without --engine
    the engines are simulated: no GPU is needed.

    \b
    Examples:
      tidegate up
      tidegate up --port 8000 --engines 4
      tidegate up --pool
      tidegate up --secure
      tidegate up --ingress-workers 2 --tls-cert door.pem --tls-key door.key
      tidegate up --engine http://127.0.0.1:8000=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5558 \\
                  --engine http://127.0.0.1:8001=tcp://127.0.0.1:5567,replay=tcp://127.0.0.1:5568
      tidegate up --config tidegate.toml --json
    """
    given: dict[str, str] = {}
    options = {"port": port, "host": host, "engines": engines, "model": model, "workdir": workdir, "nats_url": nats}
    options |= {"ingress_workers": ingress_workers, "tls_cert": tls_cert, "tls_key": tls_key}
    given.update({key: str(value) for key, value in options.items() if value is not None})
    if pool:
        given["pool"] = "true"
    if secure:
        given["secure"] = "true"
    if engine:
        given["engine"] = json.dumps(engine)
    loaded = load_with_origins("up", UpSettings, file=config, overrides=given)
    nats_url = loaded.settings.nats_url if "nats_url" in loaded.origins else None
    screen = Screen(as_json)
    system = System(loaded.settings, nats_url=nats_url, config=config, on_event=screen.event)
    return asyncio.run(serve(system, screen))


class Screen:
    """What `up` says: results on standard output, everything else on standard error."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._out = Console(soft_wrap=True, highlight=False)
        self._note = Console(stderr=True, highlight=False)

    def event(self, event: ChildEvent) -> None:
        style = {"given_up": "bold red", "restarting": "yellow"}.get(event.state, "green")
        self._note.print(f"[bold]{event.child}[/] {escape(event.what)}", style=style)

    def starting(self) -> Any:
        return self._note.status("starting …")

    def stopping(self) -> None:
        self._note.print("stopping; Ctrl-C now ends it at once")

    def killed(self, names: list[str]) -> None:
        if names:
            self._note.print(f"did not stop in time and were killed: {', '.join(names)}", style="yellow")

    def ready(self, state: SystemState, model: str | None) -> None:
        if self._as_json:
            print(json.dumps(addresses(state, model)), flush=True)
            return
        lines = [
            ("front door", f"{state.url}/v1" + (f"   model {model}" if model else "")),
            ("bus", str(redact("nats_url", state.nats_url)) + (f"   {state.bus_note}" if state.bus_note else "")),
            *(("engine", _engine_text(engine)) for engine in state.engines),
            ("traces", state.traces),
            ("logs", state.logs),
            ("try", curl(state, model)),
            ("watch", command_for(state, "tail")),
            ("check", command_for(state, "doctor")),
        ]
        if state.nats_url != USUAL_URL or state.nats_user:
            lines.append(("policies", policy_command(state)))
        self._out.print("[bold green]Tidegate is up.[/] Ctrl-C stops it.")
        for label, text in lines:
            self._out.print(f"  [bold]{label:<12}[/]{escape(text)}")


def _engine_text(engine: EngineState) -> str:
    return f"{engine.url}   {engine.worker}, simulated" if engine.simulated else engine.url


def policy_command(state: SystemState) -> str:
    """How a user's policy finds this bus, and who it is there."""
    found = f"{ENVIRONMENT_KEY}={shlex.quote(state.nats_url)}"
    if state.nats_user:
        secrets = shlex.quote(str(Path(state.nats_password_file).parent))
        found += f" TIDEGATE_NATS_USER=policy-NAME TIDEGATE_NATS_PASSWORD_FILE={secrets}/policy-NAME"
    return f"{found} python your_policy.py"


def addresses(state: SystemState, model: str | None) -> dict[str, Any]:
    """Everything a script needs, as ``up --json`` prints it."""
    return {
        "ready": True,
        **msgspec.to_builtins(state),
        "base_url": f"{state.url}/v1",
        "model": model,
        "tail": command_for(state, "tail"),
        "curl": curl(state, model),
    }


def curl(state: SystemState, model: str | None) -> str:
    """A command that can be pasted."""
    body = json.dumps({"model": model or "MODEL", "messages": [{"role": "user", "content": "Hello"}]})
    trust = f"--cacert {shlex.quote(state.door_cert)} " if state.door_cert else ""
    key = "-H 'authorization: Bearer YOUR_KEY' " if state.door_keys else ""
    return (
        f"curl {trust}{state.url}/v1/chat/completions -H 'content-type: application/json' {key}"
        f"-H 'x-dynamo-session-id: hello' -d '{body}'"
    )


def command_for(state: SystemState, command: str) -> str:
    """``tidegate tail`` and the like, as they find this system from here."""
    if Path(state.workdir) == Path.cwd() / DEFAULT_WORKDIR:
        return f"tidegate {command}"
    return f"tidegate {command} --workdir {shlex.quote(state.workdir)}"


async def serve(system: System, screen: Screen) -> int:
    """Up, until a signal or until a part that nothing works without is given up."""
    loop = asyncio.get_running_loop()
    asked = asyncio.Event()

    def on_signal() -> None:
        if asked.is_set():
            os._exit(INTERRUPTED_EXIT)  # the children die with us
        asked.set()

    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    waiting = asyncio.ensure_future(asked.wait())
    starting = asyncio.ensure_future(system.start())
    try:
        with screen.starting():
            await asyncio.wait({waiting, starting}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return INTERRUPTED_EXIT
        state = starting.result()
        screen.ready(state, state.model or await first_model(state.url, state.door_cert))
        failing = asyncio.ensure_future(_wait_hopeless(system))
        await asyncio.wait({waiting, failing}, return_when=asyncio.FIRST_COMPLETED)
        if failing.done():
            failing.result()
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        return 0
    finally:
        for task in (waiting, starting):
            task.cancel()
        await asyncio.gather(waiting, starting, return_exceptions=True)
        asked.set()
        if system.started_something:
            screen.stopping()
        screen.killed(await system.stop())


async def _wait_hopeless(system: System) -> None:
    """Raises `ChildFailedError` when the front door or the bus is given up; without other parts the system serves."""
    await system.supervisor.wait_given_up((Stage.INGRESS, Stage.BUS))
