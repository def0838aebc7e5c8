"""The command line without a system: help, wrong use, where the bus is looked for."""

from __future__ import annotations

import importlib
from pathlib import Path

import msgspec
import pytest

from bus.service import imports_of
from tidegate.cli import COMMANDS, main
from tidegate.commands.up import Screen
from tidegate.errors import NoSystemError, PortTakenError
from tidegate.locate import USUAL_URL, locate
from tidegate.supervisor.ports import PortPicker, is_free
from tidegate.supervisor.state import EngineState, SystemState, read_state, remove_state, write_state

ROOT = Path(__file__).parents[3]


TRACE = str(Path(__file__).parents[2] / "fixtures" / "recorded_traces" / "mooncake_conversation_head.jsonl")


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_help_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--help ends with 0 and shows how the command is used."""
    assert main([command, "--help"]) == 0
    assert f"tidegate {command}" in capsys.readouterr().out.split("Examples:")[1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "No such command"),
        (["up", "--port", "70000"], "--port"),
        (["up", "--engine", "host:8000"], "write http://HOST:PORT"),
        (["tail", "--count", "0"], "--count"),
        (["demo", "--model", "m"], "go with --url"),
        (["simulate", "--speed", "2"], "give one with --trace"),
        (["simulate", "--speed", "nan", "--trace", TRACE], "nan is no finite number"),
        (["simulate", "--block-size", "16", "--trace", TRACE], "add --speed 1"),
        (["simulate", "--preset", "quick", "--speed", "1", "--trace", TRACE], "leave --preset and --quick out"),
        (["simulate", "--seeds", "1", "--speed", "1", "--trace", TRACE], "--seeds: a recorded trace has one load"),
        (["simulate", "--policy", "cap", "--speed", "1", "--trace", TRACE], "'cap' does not play a recorded trace"),
    ],
)
def test_wrong_use_is_one_sentence_and_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The option is named; no traceback."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--host", "192.0.2.1"], "--host: nothing can listen on 192.0.2.1"),
        (["--workdir", "file/below"], "--workdir: "),
        (["--engine", "http://h:1=udp://h:2"], "no ZeroMQ endpoint"),
    ],
)
def test_up_says_what_is_wrong_and_nothing_else(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence naming the option, code 2; no word of a stop where nothing was started, no guess at a taken port."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("a file, not a folder")
    assert main(["up", "--port", "0", *arguments]) == 2
    assert said in (complaint := capsys.readouterr().err)
    assert len(complaint.splitlines()) == 1


def test_a_wrong_setting_in_a_file_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unknown key of [up] ends with code 2 and the key's name."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tidegate.toml").write_text("[up]\nenginess = 3\n")
    assert main(["up", "--config", "tidegate.toml"]) == 2
    assert "enginess" in capsys.readouterr().err


def test_the_bus_is_looked_for_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--nats, --workdir, the environment, the system running here, the usual address, said to be a guess."""
    monkeypatch.chdir(tmp_path)
    workdir = tmp_path / ".tidegate"
    workdir.mkdir()
    guessed = locate(None, None, {})
    assert guessed.nats_url == USUAL_URL
    assert "no system runs in .tidegate" in guessed.guess
    state = SystemState(
        pid=1,
        url="http://127.0.0.1:8080",
        nats_url="nats://127.0.0.1:4333",
        model="m",
        workdir=str(workdir),
        traces="t",
        logs="l",
        engines=(EngineState(url="http://127.0.0.1:8101", worker="engine-1", simulated=True),),
        health={"ingress": "http://127.0.0.1:9101/readyz"},
    )
    write_state(workdir, state)
    assert read_state(workdir) == state
    far = {"TIDEGATE_NATS_URL": "nats://far:4222"}
    for found in (locate(None, None, {}), locate(None, workdir, far)):
        assert (found.nats_url, found.state, found.guess) == ("nats://127.0.0.1:4333", state, "")
        assert found.workdir is not None
    by_environment = locate(None, None, far)
    assert (by_environment.nats_url, by_environment.state, by_environment.workdir) == ("nats://far:4222", None, None)
    by_option = locate("nats://127.0.0.1:4333", workdir, far)
    assert (by_option.source, by_option.state) == ("--nats", state)
    remove_state(workdir)
    remove_state(workdir)
    assert read_state(workdir) is None


@pytest.mark.parametrize("command", ["tail", "doctor"])
def test_a_workdir_without_a_system_is_no_reason_to_look_elsewhere(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--workdir given and no system there: one sentence and code 1, whoever listens on the usual address."""
    with pytest.raises(NoSystemError):
        locate(None, tmp_path, {})
    assert main([command, "--workdir", str(tmp_path)]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"tidegate: no system runs in {tmp_path}")


def test_up_says_when_the_bus_is_not_where_others_look(capsys: pytest.CaptureFixture[str]) -> None:
    """4222 was taken: said beside the address, with the line that starts a policy on this bus; else neither."""
    state = SystemState(
        pid=1,
        url="http://127.0.0.1:8080",
        nats_url="nats://127.0.0.1:18222",
        model="m",
        workdir="w",
        traces="t",
        logs="l",
        engines=(),
        health={},
        bus_note="4222 was taken",
    )
    Screen(as_json=False).ready(state, "m")
    said = capsys.readouterr().out
    assert "nats://127.0.0.1:18222   4222 was taken" in said
    assert "TIDEGATE_NATS_URL=nats://127.0.0.1:18222 python your_policy.py" in said
    Screen(as_json=False).ready(msgspec.structs.replace(state, nats_url=USUAL_URL, bus_note=""), "m")
    assert "your_policy.py" not in capsys.readouterr().out


def test_ports_are_free_distinct_and_below_the_ephemeral_range() -> None:
    """A restarted child finds its port free; a taken one is refused naming the option."""
    picker = PortPicker()
    ports = [picker.pick() for _ in range(20)]
    assert len(set(ports)) == 20
    assert all(is_free("127.0.0.1", port) for port in ports)
    with pytest.raises(PortTakenError, match=f"port {ports[0]} .* --port"):
        picker.exactly(ports[0], "--port")
    assert picker.pick(preferred=ports[0]) != ports[0]


def test_an_import_that_fails_for_another_reason_is_no_sentence() -> None:
    """A package that is missing is shown with where it was missed."""
    with pytest.raises(ModuleNotFoundError), imports_of("x"):
        importlib.import_module("no_such_module_at_all")
