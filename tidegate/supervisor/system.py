"""A whole system on this machine: ports chosen, workdir taken, children run, addresses written down."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import kvcore.twin  # noqa: F401 - what the children would refuse to begin with is said before they are started
from bus.errors import NotConnectedError
from bus.nats import connect, options_of
from bus.permissions import users
from bus.settings import load_settings, redact
from load.engine import assets
from services.admission.config import AdmissionSettings
from services.bridge.config import BridgeSettings
from services.hints.config import HintsSettings
from services.ingress.config import IngressSettings
from services.recorder.config import RecorderSettings
from tidegate.errors import AlreadyRunningError, NoBusError, WrongUseError
from tidegate.supervisor import nats_server
from tidegate.supervisor.check import check_settings, user_settings
from tidegate.supervisor.config import UpSettings
from tidegate.supervisor.engines import parse_engine
from tidegate.supervisor.layout import (
    INNER_HOST,
    ChildSpec,
    Ports,
    Simulated,
    SimulatedPool,
    SystemPlan,
    children,
    service_names,
)
from tidegate.supervisor.nats_accounts import ACCOUNTS, write_secrets
from tidegate.supervisor.ports import PortPicker
from tidegate.supervisor.state import EngineState, SystemState, read_state, remove_state, write_state
from tidegate.supervisor.supervisor import ChildEvent, Supervisor

_NATS_PORT = 4222
_BUS_WAIT_S = 4.0
_ENGINE_PORT = 8101
_DOOR_FILES = (
    "keys_file", "cache_salt_secret_file", "engine_api_key_file", "engine_tls_ca",
    "tls_cert", "tls_key", "tls_client_ca",
)  # fmt: skip
_HEALTH_PORT = 9101


class System:
    """Children of one workdir.

    ``nats_url``: somebody else's bus to use, ``None``: start one. ``usual_ports``: prefer the well-known ports for what
    has no option (a system that stays up); otherwise any, as where the front door may have any: who says so does not
    mind, and two such systems that start together would race for them. ``overrides``: settings by
    section that win over ours.
    """

    def __init__(
        self,
        settings: UpSettings,
        *,
        nats_url: str | None = None,
        config: Path | None = None,
        usual_ports: bool = True,
        overrides: Mapping[str, Mapping[str, str]] | None = None,
        on_event: Callable[[ChildEvent], None] = lambda _: None,
    ) -> None:
        self._settings = settings
        self._workdir = Path(settings.workdir).resolve()
        self._lock = -1
        self._nats_url = nats_url
        self._config = config.resolve() if config else None
        self._secrets = self._workdir / "secrets" if settings.secure else None
        self._usual_ports = usual_ports and settings.port != 0
        self._overrides = overrides
        self._on_event = on_event
        self._supervisor: Supervisor | None = None
        self._state: SystemState | None = None

    @property
    def state(self) -> SystemState:
        """Addresses. Only between `start` and `stop`."""
        assert self._state is not None
        return self._state

    @property
    def started_something(self) -> bool:
        """Whether there is anything to stop."""
        return self._supervisor is not None

    @property
    def supervisor(self) -> Supervisor:
        """Only between `start` and `stop`."""
        assert self._supervisor is not None
        return self._supervisor

    async def start(self) -> SystemState:
        """Everything ready. Raises `TidegateError`, `SettingsError`; the caller calls `stop` in any case."""
        try:
            self._workdir.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            remove_state(self._workdir)  # of a system that was killed
            await self._check_bus()
            plan, state, specs = self._plan()
            specs = check_settings(specs, self._config)
            plan.traces.mkdir(parents=True, exist_ok=True)
            self._supervisor = Supervisor(
                specs,
                self._workdir,
                log_bytes=self._settings.log_bytes,
                hung_s=self._settings.hung_s,
                on_event=self._on_event,
            )
        except OSError as error:
            raise WrongUseError(f"--workdir: {self._workdir} cannot be used: {error}") from error
        await self._supervisor.start(self._settings.ready_timeout_s)
        write_state(self._workdir, state)
        self._state = state
        return state

    async def stop(self) -> list[str]:
        """In order; returns the names of children that had to be killed."""
        killed: list[str] = []
        if self._supervisor is not None:
            killed = await self._supervisor.stop()
        if self._lock >= 0:
            remove_state(self._workdir)
            os.close(self._lock)
            self._lock = -1
        return killed

    async def _check_bus(self) -> None:
        """Somebody else's bus must answer. Raises `NoBusError`."""
        if self._nats_url is None:
            return
        if self._settings.secure:
            raise WrongUseError("--secure is for the bus that `tidegate up` starts; another has users of its own")
        try:
            options = options_of(self._settings)
            bus = await connect(self._nats_url, name="tidegate-up", timeout_s=_BUS_WAIT_S, options=options)
        except NotConnectedError as error:
            raise NoBusError(
                f"no bus answers at {redact('nats_url', self._nats_url)}; start it first, or leave its address "
                "(--nats, TIDEGATE_NATS_URL, nats_url) away and `tidegate up` starts its own"
            ) from error
        await bus.close()

    def _take_lock(self) -> None:
        self._lock = os.open(self._workdir / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            self._lock = -1
            other = read_state(self._workdir)
            who = f" (pid {other.pid}, {other.url})" if other else ""
            raise AlreadyRunningError(
                f"a system already runs in {self._workdir}{who}; stop it, or choose another folder with --workdir"
            ) from None

    def _plan(self) -> tuple[SystemPlan, SystemState, list[ChildSpec]]:
        settings = self._settings
        addresses = tuple(parse_engine(text) for text in settings.engine)
        door = PortPicker(settings.host).exactly(settings.port, "--port")
        picker = PortPicker(INNER_HOST, taken={door})
        usual = self._usual_ports
        nats_port = picker.pick(_NATS_PORT if usual else 0)
        monitor_port = picker.pick(_NATS_PORT + 4000 if usual else 0)
        simulated = tuple(
            Simulated(
                worker=f"engine-{number}",
                port=picker.pick(_ENGINE_PORT + number - 1 if usual else 0),
                events_port=picker.pick(),
                replay_port=picker.pick(),
            )
            for number in range(1, (0 if addresses else settings.engines) + 1)
        )
        pool = SimulatedPool(picker.pick(), picker.pick()) if settings.pool else None
        own_traces = user_settings("recorder", RecorderSettings, "directory", self._config)
        own_tokenizers = user_settings("ingress", IngressSettings, "tokenizers", self._config)
        own_capture = user_settings("ingress", IngressSettings, "capture_directory", self._config)
        own_bridge = None
        if addresses:  # a bridge's settings are not whole without its engine
            ours = {"engine_url": addresses[0].url}
            own_bridge = user_settings("bridge", BridgeSettings, "engine_tls_ca", self._config, ours)
        engine_tls_ca = own_bridge.engine_tls_ca if own_bridge is not None else ""
        captured = own_capture.capture_directory if own_capture is not None else ""
        tokenizers = {settings.model: str(Path(assets.__file__).parent)} if simulated else {}
        if own_tokenizers is not None:
            # Children run in the workdir; what the user wrote is meant from here.
            tokenizers |= {model: str(Path(path).resolve()) for model, path in own_tokenizers.tokenizers.items()}
        door_files = {key: str(Path(path).resolve()) for key, path in self._door_files().items()}
        names = service_names(len(simulated), len(addresses), pool=settings.pool)
        health = {name: picker.pick(_HEALTH_PORT + place if usual else 0) for place, name in enumerate(names)}
        plan = SystemPlan(
            python=sys.executable,
            host=settings.host,
            model=settings.model,
            ports=Ports(ingress=door, nats=nats_port, nats_monitor=monitor_port, health=health),
            traces=Path(own_traces.directory).resolve() if own_traces is not None else self._workdir / "traces",
            nats_url=self._nats_url or f"nats://{INNER_HOST}:{nats_port}",
            nats_command=None if self._nats_url else self._nats_command(nats_port, monitor_port),
            simulated=simulated,
            pool=pool,
            engines=addresses,
            tokenizers=tokenizers,
            captured=Path(captured).resolve() if captured else None,
            door_files=door_files,
            engine_tls_ca=str(Path(engine_tls_ca).resolve()) if engine_tls_ca else "",
            door_workers=settings.ingress_workers,
            config=self._config,
            secrets=self._secrets,
            overrides=self._overrides,
        )
        specs = children(plan)
        moved = self._nats_url is None and usual and nats_port != _NATS_PORT
        engines = [
            EngineState(url=f"http://{INNER_HOST}:{engine.port}", worker=engine.worker, simulated=True)
            for engine in simulated
        ]
        engines += [EngineState(url=address.url) for address in addresses]
        state = SystemState(
            pid=os.getpid(),
            url=f"{'https' if 'tls_cert' in door_files else 'http'}://{reachable(settings.host)}:{door}",
            door_cert=door_files.get("tls_cert", ""),
            door_keys="keys_file" in door_files,
            nats_url=plan.nats_url,
            model=settings.model if simulated else None,
            workdir=str(self._workdir),
            traces=str(plan.traces),
            logs=str(self._workdir / "logs"),
            engines=tuple(engines),
            health={spec.name: spec.ready_url for spec in specs},
            bus_note=f"{_NATS_PORT} was taken" if moved else "",
            nats_user="operator" if self._secrets else "",
            nats_password_file=str(self._secrets / "operator") if self._secrets else "",
        )
        return plan, state, specs

    def _door_files(self) -> dict[str, str]:
        """The front door's settings that name files, as the user wrote them; options win."""
        found = {}
        for key in _DOOR_FILES:
            settings = user_settings("ingress", IngressSettings, key, self._config)
            if settings is not None and getattr(settings, key):
                found[key] = str(getattr(settings, key))
        own = {"tls_cert": self._settings.tls_cert, "tls_key": self._settings.tls_key}
        return found | {key: path for key, path in own.items() if path}

    def _nats_command(self, port: int, monitor_port: int) -> tuple[str, ...]:
        executable = nats_server.find_executable()
        file = self._workdir / "nats.conf"
        accounts = None
        if self._secrets is not None:
            write_secrets(self._secrets, users(self._policies()))
            accounts = f"{self._secrets.name}/{ACCOUNTS}"
        text = nats_server.configuration(INNER_HOST, port, monitor_port, self._workdir / "nats", accounts)
        file.write_text(text, encoding="utf-8")
        return (str(executable), "-c", str(file))

    def _policies(self) -> list[str]:
        """Names of the users' policies that admission and the hint planner are to ask. Raises `SettingsError`."""
        given = self._overrides or {}
        admission = load_settings("admission", AdmissionSettings, file=self._config, overrides=given.get("admission"))
        hints = load_settings("hints", HintsSettings, file=self._config, overrides=given.get("hints"))
        return sorted({rule.name for rule in admission.policies} | {rule.name for rule in hints.policies})


def reachable(host: str) -> str:
    """The address under which this machine reaches a server that listens on ``host``."""
    if host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not bound
        return INNER_HOST
    return f"[{host}]" if ":" in host else host
