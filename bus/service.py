"""``main`` of every service: settings, bus, health pages, signals, clean stop.

    with imports_of("indexer"):
        from services.indexer.config import IndexerSettings
        from services.indexer.shell.service import IndexerService

    if __name__ == "__main__":
        sys.exit(run_service("indexer", IndexerSettings, IndexerService))

With a `Grouping` it may be several processes behind one port (`bus.process_group`).

Exit codes: 0 stopped as asked; 1 a task failed or the bus is gone for good (the supervisor restarts); 2 a setting or
the installation is wrong (one sentence on stderr; restarting does not help).
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import click
import uvloop
from prometheus_client import REGISTRY

from bus import garbage
from bus.errors import BusError, SettingsError, cannot_listen
from bus.health import HealthServer, LoopLag, ProcessCollector
from bus.held_address import HeldAddress
from bus.interface import Bus, ServedEndpoints
from bus.interrupt import INTERRUPTED_EXIT
from bus.log import EventLog, set_up_logging, tell_left_out
from bus.membership import Membership, ParentLine, parse_membership
from bus.nats import connect, options_of
from bus.process_group import ProcessGroup
from bus.settings import (
    CommonSettings,
    describe_settings,
    load_with_origins,
    parse_overrides,
    redact,
    show_settings,
)
from bus.tasks import Tasks, end

log = EventLog(__name__)


class Service(Protocol):
    """What a service's shell gives to the process that runs it."""

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Subscribe, and start loops with ``tasks.start(name, coroutine)``."""

    def not_ready(self) -> str | None:
        """``None``: ready; else the reason that ``/readyz`` shows."""

    async def stop(self, timeout_s: float) -> None:
        """Drain. Tasks are cancelled and awaited after it, the bus is closed after them."""


S = TypeVar("S", bound=CommonSettings)
Factory = Callable[[S, Membership | None], Service]
"""``None``: it is alone."""


@dataclass(frozen=True)
class Grouping(Generic[S]):
    """How a service may be several processes. ``module``: what is run. ``key`` of the setting that says how many;
    ``address``: the setting, host and port that they share; ``memory``: a descriptor of what they share, for so many.
    """

    module: str
    key: str
    address: Callable[[S], tuple[str, str, int]]
    memory: Callable[[int], int]

    def count(self, settings: S) -> int:
        return int(getattr(settings, self.key))


@contextmanager
def imports_of(section: str) -> Iterator[None]:
    """Around a main's imports: what of ours cannot be imported, and says why, ends the process with that sentence."""
    try:
        yield
    except ImportError as error:
        if not says_why(error):
            raise
        print(f"tidegate {section}: {error}", file=sys.stderr)  # noqa: T201 - the one sentence for whoever started us
        raise SystemExit(2) from None


def says_why(error: ImportError) -> bool:
    """Whether it is one of our own errors, which have a stable ``reason`` (`kvcore.errors.TwinError`); the bus imports
    nothing of `kvcore`."""
    return hasattr(error, "reason")


def run_service(
    section: str,
    kind: type[S],
    factory: Callable[[S], Service],
    argv: Sequence[str] | None = None,
) -> int:
    """Run one service until it is told to stop; returns the exit code. ``argv``: arguments without the program."""
    return _main(section, _command(section, kind, lambda settings, _: factory(settings), None), argv)


def run_grouped_service(
    section: str,
    kind: type[S],
    factory: Factory[S],
    grouping: Grouping[S],
    argv: Sequence[str] | None = None,
) -> int:
    """As `run_service`, for one that may be several processes."""
    return _main(section, _command(section, kind, factory, grouping), argv)


def _main(section: str, command: click.Command, argv: Sequence[str] | None) -> int:
    try:
        return int(command.main(args=None if argv is None else list(argv), standalone_mode=False) or 0)
    except SettingsError as error:
        print(f"tidegate {section}: {error}", file=sys.stderr)  # noqa: T201 - the one sentence for whoever started us
        return 2
    except click.ClickException as error:
        error.show()
        return 2
    except click.exceptions.Abort:
        return 1
    except KeyboardInterrupt:  # before there was a loop to take the signal
        return INTERRUPTED_EXIT


def _command(section: str, kind: type[S], factory: Factory[S], grouping: Grouping[S] | None) -> click.Command:
    @click.command(section, help=_help(section, kind), context_settings={"help_option_names": ["-h", "--help"]})
    @click.option(
        "--config",
        type=click.Path(path_type=Path),
        envvar="TIDEGATE_CONFIG",
        help=f"TOML file with the tables [common] and [{section}]; those of other services are ignored.",
    )
    @click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="Override one setting; repeatable.")
    @click.option("--print-config", is_flag=True, help="Print the settings that would be used, and where from.")
    @click.option("--member", hidden=True)
    def command(
        config: Path | None, pairs: tuple[str, ...], print_config: bool, member: str | None, **more: str | None
    ) -> int:
        overrides = parse_overrides(pairs) | {key: value for key, value in more.items() if value is not None}
        loaded = load_with_origins(section, kind, file=config, overrides=overrides)
        if print_config:
            click.echo(show_settings(loaded, section), nl=False)
            return 0
        settings = loaded.settings
        set_up_logging(settings.log_level, settings.log_format, instance=settings.instance)
        membership = None if member is None else parse_membership(member)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            if grouping is not None and membership is None and grouping.count(settings) > 1:
                return runner.run(_run_group(section, settings, grouping, config, overrides))
            return runner.run(ServiceProcess(section, settings, factory, membership).run())

    if grouping is not None:
        option = click.Option([f"--{grouping.key}"], metavar="N", help="Processes behind one port (default 1).")
        command.params.append(option)
    return command


async def _run_group(
    section: str, settings: S, grouping: Grouping[S], config: Path | None, overrides: dict[str, str]
) -> int:
    """Raises `SettingsError`."""
    count = grouping.count(settings)
    key, host, port = grouping.address(settings)
    held = HeldAddress(key, host, port)

    def command(member: Membership) -> list[str]:
        own = {
            **overrides,
            "instance": f"{settings.instance}-{member.number}",
            key: str(held.port),
            "http_host": "127.0.0.1",
            "http_port": "0",
        }
        pairs = [part for name, value in own.items() for part in ("--set", f"{name}={value}")]
        chosen = [] if config is None else ["--config", str(config)]
        python = [sys.executable, *(["-P"] if sys.flags.safe_path else [])]
        return [*python, "-m", grouping.module, *chosen, *pairs, "--member", member.option()]

    return await ProcessGroup(section, settings, count, command, held, grouping.memory(count)).run()


def _help(section: str, kind: type[CommonSettings]) -> str:
    rows = describe_settings(section, kind)
    width = max(len(f"{key} = {default}") for key, default, _ in rows)
    table = "\n".join(f"{f'{key} = {default}':{min(width, 60)}}  {variable}" for key, default, variable in rows)
    about = (kind.__doc__ or "").strip().split("\n\n")[0]
    return (
        f"Run the {section} service of Tidegate.\n\n{about}\n\n"
        "\b\nSettings, with their defaults, and the variables that set them:\n" + table + "\n\n"
        f"Later wins: defaults, [common] and [{section}] of --config, environment, --set. Lists and tables are JSON in "
        "the environment and in --set. The process answers /healthz, /readyz and /metrics on http_host:http_port."
    )


class ServiceProcess(Generic[S]):
    """One service from connect to close."""

    def __init__(self, section: str, settings: S, factory: Factory[S], membership: Membership | None = None) -> None:
        self._section = section
        self._settings = settings
        self._factory = factory
        self._membership = membership
        self._parent = ParentLine() if membership is not None else None
        self._bus: Bus | None = None
        self._service: Service | None = None
        self._state: str | None = "starting"
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._lag = LoopLag()

    async def run(self) -> int:
        """Returns the exit code. Raises `SettingsError` when the service finds a setting wrong."""
        settings = self._settings
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        tasks = Tasks()
        tasks.start("loop-lag", self._lag.watch())
        tasks.start("log", _tell_left_out())
        twin = kvcore_in_use()
        if twin is not None:
            log.info("kvcore", implementation=twin[0], why=twin[1])
        collector = ProcessCollector(lambda: self._bus, self._lag, kvcore=None if twin is None else twin[0])
        REGISTRY.register(collector)
        health = HealthServer(self.not_ready)
        served: ServedEndpoints | None = None
        code = 0
        try:
            if self._parent is not None:
                await self._parent.open()
                tasks.start("parent", self._parent.watch(self._on_orphaned))
            url = await self._listen(health)
            if not await self._connect():
                return 0
            assert self._bus is not None
            self._service = self._factory(settings, self._membership)
            await self._service.start(self._bus, tasks)
            if not self._bus.serving:
                served = await self._bus.serve(
                    f"tidegate-{self._section}",
                    package_version(),
                    f"Tidegate's {self._section} service",
                    [],
                    {"instance": settings.instance, "http": url},
                )
            self._state = None
            log.info("service_started", section=self._section, http=url)
            if self._parent is not None:
                self._parent.tell(url, started=True)
            with garbage.settled():
                code = await self._until_stop(tasks)
        except SettingsError:
            raise
        except BusError as error:
            log.warning("service_failed", reason=error.reason, detail=str(error))
            code = 1
        finally:
            self._state = "stopping"
            clean = await self._shut_down(tasks, served, health)
            if self._parent is not None:
                await self._parent.close()
            REGISTRY.unregister(collector)
        return code if clean else 1

    def not_ready(self) -> str | None:
        """Why this process should get no work now; ``None`` when it should."""
        if self._state is not None:
            return self._state
        if self._bus is not None and not self._bus.connected:
            return "bus_down"
        return self._service.not_ready() if self._service is not None else "starting"

    def _on_signal(self, number: int) -> None:
        log.info("stop_asked", signal=signal.Signals(number).name)
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _on_orphaned(self) -> None:
        """Our parent is gone: as when a single process is killed, but that what is written is sent."""
        log.error("parent_gone")
        self._stop.set()
        self._hurry.set()

    async def _listen(self, health: HealthServer) -> str:
        settings = self._settings
        if settings.http_port < 0:
            return ""
        try:
            await health.start(settings.http_host, settings.http_port)
        except OSError as error:
            raise cannot_listen("http_port", settings.http_host, settings.http_port, error) from error
        url = f"http://{settings.http_host}:{health.port}"
        log.info("http_listening", url=url)
        if self._parent is not None:
            self._parent.tell(url)
        return url

    async def _connect(self) -> bool:
        """Wait for the bus as long as it takes; ``False`` when told to stop meanwhile."""
        settings = self._settings
        self._state = f"waiting for the bus at {redact('nats_url', settings.nats_url)}"
        connecting = asyncio.ensure_future(
            connect(settings.nats_url, name=settings.instance, options=options_of(settings))
        )
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({connecting, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                return False
            self._bus = connecting.result()
            self._state = "starting"
            return not self._stop.is_set()
        finally:
            await end(connecting)
            await end(stopping)

    async def _until_stop(self, tasks: Tasks) -> int:
        assert self._bus is not None
        stopping = tasks.start("stop", self._stop.wait())
        lost = tasks.start("bus-lost", self._bus.wait_lost())
        await asyncio.wait({stopping, tasks.failed, lost}, return_when=asyncio.FIRST_COMPLETED)
        if tasks.failed.done():
            if isinstance(error := tasks.failed.result(), SettingsError):
                raise error
            log.error("service_failed", reason=repr(tasks.failed.result()))
            return 1
        if lost.done():
            log.error("bus_lost", reason=lost.result())
            return 1
        return 0

    async def _shut_down(self, tasks: Tasks, served: ServedEndpoints | None, health: HealthServer) -> bool:
        """Drain, cancel, close; ``False`` when the drain failed or took longer than it may."""
        timeout_s = self._settings.stop_timeout_s
        draining = asyncio.ensure_future(self._drain(served, timeout_s))
        hurry = asyncio.ensure_future(self._hurry.wait())
        await asyncio.wait({draining, hurry}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        clean = True
        if not draining.done():
            clean = False
            if self._hurry.is_set():
                log.warning("stop_hurried")
            else:
                log.error("stop_timed_out", timeout_s=timeout_s)
        elif (failure := draining.exception()) is not None:
            clean = False
            log.error("stop_failed", error=failure)
        for future in (draining, hurry):
            future.cancel()
        await asyncio.gather(draining, hurry, return_exceptions=True)
        await tasks.stop()
        if self._bus is not None:
            await self._bus.close()
        await health.close()
        log.info("service_stopped", section=self._section)
        return clean

    async def _drain(self, served: ServedEndpoints | None, timeout_s: float) -> None:
        if served is not None:
            await served.stop()
        if self._service is not None:
            await self._service.stop(timeout_s)


async def _tell_left_out() -> None:
    """A log that has fallen silent says all the same what it left out."""
    while True:
        await asyncio.sleep(1.0)
        tell_left_out()


def kvcore_in_use() -> tuple[str, str | None] | None:
    """The twin of `kvcore` that this process works with, and why it is not the native one; ``None`` where it uses none.

    The bus imports nothing of `kvcore`: whoever needs it has loaded it by the time its service starts.
    """
    twin = sys.modules.get("kvcore.twin")
    return None if twin is None else (twin.IMPLEMENTATION, twin.WHY)


def package_version() -> str:
    """Of the installed distribution; 0.0.0 in a source tree that is not installed."""
    try:
        return version("tidegate")
    except PackageNotFoundError:
        return "0.0.0"
