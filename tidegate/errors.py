"""Everything that `tidegate` may have to say no to. Each message says what to do; ``exit_code`` is the shell's.

TidegateError          1
├── WrongUseError      2  an option or setting is wrong
├── PortTakenError     1  somebody else listens there
├── AlreadyRunningError 1 a system runs in this workdir
├── ChildFailedError   1  a child process did not become ready, or gave up
├── MissingPartError   1  a package or program is not installed
├── NoBusError         1  no bus answers, or it is gone
├── NoSystemError      1  no system runs in the folder that was named
├── CalibrationError   1  an engine could not be measured
├── EndpointError      1  an endpoint to replay against is not there, or not fit (tidegate/replay/endpoint.py)
├── TraceFileError     1  a trace file is not what it should be (tidegate/trace/errors.py)
├── CollectorError     1  a collector did not take a trace's spans (tidegate/trace/otlp.py)
└── SimulationError    1  a simulation was ended from outside, or its results could not be written
"""

from __future__ import annotations


class TidegateError(Exception):
    """Root of the command line's errors."""

    reason = "tidegate_error"
    exit_code = 1


class WrongUseError(TidegateError):
    """An option or setting is wrong (the user's mistake); the message names it."""

    reason = "wrong_use"
    exit_code = 2


class PortTakenError(TidegateError):
    """The port that was asked for is taken."""

    reason = "port_taken"

    def __init__(self, host: str, port: int, option: str) -> None:
        super().__init__(f"port {port} on {host} is taken; stop what listens there or choose another with {option}")
        self.port = port


class AlreadyRunningError(TidegateError):
    """Another `tidegate up` owns this workdir."""

    reason = "already_running"


class ChildFailedError(TidegateError):
    """A child process is not well; ``child`` names it."""

    reason = "child_failed"

    def __init__(self, child: str, problem: str) -> None:
        super().__init__(f"{child} {problem}")
        self.child = child


class MissingPartError(TidegateError):
    """Something that is installed separately is not there."""

    reason = "missing_part"


class NoBusError(TidegateError):
    """No bus answers at the address, or its system has stopped."""

    reason = "no_bus"


class NoSystemError(TidegateError):
    """The folder named by --workdir holds no running system."""

    reason = "no_system"


class CalibrationError(TidegateError):
    """An engine is not there, busy, answers with an error, or gives times that make no curve."""

    reason = "calibration"


class SimulationError(TidegateError):
    """A process of the simulation is gone, or the folder for its results is no good."""

    reason = "simulation"
